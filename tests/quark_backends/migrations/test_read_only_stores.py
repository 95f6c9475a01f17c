"""A store on a read-only disk, or in a folder that may not be written, can be read."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import golden_store
import pytest

import quark
from quark_core.runs.backend_choice import open_reader

# Describes a store, and what else became of it.
DESCRIBE = """
import json, os, sys, tempfile
import golden_store, quark
from quark_core.errors import QuarkError

warm, root, user = sys.argv[1:]
golden_store.describe_store(warm)  # imports all there is to import
quark.migrate_store(warm)
if user:
    os.setgid(int(user))
    os.setuid(int(user))
found = {"described": golden_store.describe_store(root), "refused": {}}
found["copies"] = len(os.listdir(tempfile.gettempdir()))
for name, call in {
    "migrate": lambda: quark.migrate_store(root),
    "start": lambda: quark.start_run(project="p", storage_dir=root),
}.items():
    try:
        call()
    except QuarkError as error:
        found["refused"][name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""
# Looks on at each run of a store; prints what its curves, its changes and its rows have.
FOLLOW = """
import json, sys
from pathlib import Path
from quark_backends.store.databases.sqlite import find_store
from quark_backends.store.run_store import SqliteRunStore
from quark_core.backends.curves import EACH_RANK, CurveQuery
from quark_core.records.query import Query

store = SqliteRunStore(find_store(Path(sys.argv[1])), read_only=True)
found = {}
for stored in store.list_runs():
    run_id = stored.run.id
    rows = store.read(run_id, "metric", Query())
    keys = sorted(set(rows["metric_key"].tolist()))
    curves = store.read_series_many(run_id, CurveQuery.build(keys, entries=2, ranks=EACH_RANK))
    changes = store.read_changes(run_id, {}, kinds=("metric",), max_rows=10**6)
    came = changes.records.get("metric")
    same = store.read_mark(run_id) == store.read_mark(run_id)
    rest = store.read_changes(run_id, curves.cursor, kinds=("metric",), max_rows=10**6)
    points = sum(curve.points for curve in curves.curves)
    found[run_id] = [rows.count, points, 0 if came is None else came.count, same, bool(rest)]
store.close()
print(json.dumps(found))
"""
# Mounts of its own, which end with the process.
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
NOBODY = 65534


def find_mounter():
    """A command that shows a folder read-only to another command; None where one may not."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        command = ["unshare", *options, "sh", "-c", MOUNTED]
        try:
            if subprocess.run([*command, "/usr", "true"], capture_output=True).returncode == 0:
                return command
        except OSError:
            return None
    return None


MOUNTER = find_mounter()
PLACES = [
    pytest.param(
        "disk", marks=pytest.mark.skipif(MOUNTER is None, reason="no mounts may be made here")
    ),
    "folder",
]


@pytest.fixture
def place():
    """A folder that other users can come to, as they cannot to those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o777)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(folder)


@pytest.fixture
def look(place, copy_store):
    """Looks at a store from a process that may not write where it lies."""
    warm = copy_store("warm")
    temporary = place / "temporary"

    def look(root, how):
        user = str(NOBODY) if how == "folder" and os.geteuid() == 0 else ""
        command = [sys.executable, "-c", DESCRIBE, str(warm.root), str(root), user]
        if how == "disk":
            command = [*MOUNTER, str(root), *command]
        else:
            for path in (*root.rglob("*"), root):
                path.chmod(0o555 if path.is_dir() else 0o444)
        before = {path: path.read_bytes() for path in (root / ".quark").iterdir()}
        path = Path(golden_store.__file__).parent
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {path: path.read_bytes() for path in (root / ".quark").iterdir()} == before
        assert list(temporary.iterdir()) == []  # copies go with the process
        return json.loads(done.stdout)

    return look


def put(store, place):
    """Move a store to where others can come to it."""
    shutil.copytree(store.root, place / "store")
    return place / "store"


def leave_open(root, *statements):
    """Write to a store and end as a killed process does, without taking anything together."""
    program = (
        "import os, sqlite3, sys\n"
        "store = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "store.execute('PRAGMA wal_autocheckpoint=0')\n"
        "for statement in sys.argv[2:]:\n"
        "    store.execute(statement)\n"
        "os._exit(0)\n"
    )
    database = root / ".quark" / "quark.db"
    subprocess.run([sys.executable, "-c", program, database, *statements], check=True)
    assert database.with_name("quark.db-wal").stat().st_size > 0


@pytest.mark.sampled
@pytest.mark.parametrize("how", PLACES)
def test_an_old_store_is_read_from_a_migrated_copy(old_store, place, look, how):
    found = look(put(old_store, place), how)
    assert found["described"] == old_store.expected
    assert found["copies"] == 1
    assert found["refused"]["migrate"][0] == "SchemaMigrationError"
    assert found["refused"]["start"][0] == "SessionStoreError"
    for _, message in found["refused"].values():
        assert "cannot be written" in message


@pytest.mark.long
@pytest.mark.parametrize("how", PLACES)
def test_a_current_store_is_read_where_it_lies(old_store, place, look, how):
    quark.migrate_store(old_store.root)
    found = look(put(old_store, place), how)
    assert found["described"] == old_store.expected
    assert found["copies"] == 0
    assert list(found["refused"]) == ["start"]
    assert found["refused"]["start"][0] == "SessionStoreError"


@pytest.mark.sampled
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("version", ["old", "current"])
@pytest.mark.parametrize("how", PLACES)
def test_what_only_the_log_holds_is_read_too(old_store, place, look, how, version, shared_memory):
    """The last writer was killed, so its last words are not in the database itself."""
    if version == "current":
        quark.migrate_store(old_store.root)
    root = put(old_store, place)
    leave_open(root, "UPDATE run SET notes = 'last words' WHERE id = 'killed'")
    if not shared_memory:
        (root / ".quark" / "quark.db-shm").unlink()
    found = look(root, how)
    old_store.expected["killed"]["notes"] = "last words"
    assert found["described"] == old_store.expected
    assert found["refused"]["start"][0] == "SessionStoreError"
    assert "cannot be written" in found["refused"]["start"][1]


@pytest.mark.sampled
@pytest.mark.parametrize("how", PLACES)
def test_there_is_no_store_to_be_read_twice(old_store, place, look, how):
    """A store that is read-only at first is migrated once it can be."""
    root = put(old_store, place)
    assert look(root, how)["described"] == old_store.expected
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert len(open_reader(root).list_runs()) == len(old_store.expected)
    database = sqlite3.connect(root / ".quark" / "quark.db")
    assert database.execute("PRAGMA user_version").fetchone() == (quark.CURRENT_SCHEMA_VERSION,)
    database.close()


@pytest.mark.sampled
@pytest.mark.parametrize("version", ["old", "current"])
@pytest.mark.skipif(MOUNTER is None, reason="no mounts may be made here")
def test_who_looks_on_writes_nothing(old_store, place, version):
    if version == "current":
        quark.migrate_store(old_store.root)
    root = put(old_store, place)
    done = subprocess.run(
        [*MOUNTER, str(root), sys.executable, "-c", FOLLOW, str(root)],
        env={**os.environ, "TMPDIR": str(place / "temporary")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(old_store.expected)
    assert sum(rows for rows, *_ in found.values()) > 0
    for rows, *read in found.values():
        assert read == [rows, rows, True, False]


@pytest.mark.long
def test_no_room_for_a_copy_is_said(old_store, place):
    """What a store that must be copied needs, and how to give it that."""
    old_store.revive()
    program = (
        "import resource, signal, sys, quark\n"
        "quark.migrate_store(sys.argv[2])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "quark.open_run('resumed', sys.argv[1])\n"
    )
    other = put(old_store, place)
    database = sqlite3.connect(other / ".quark" / "quark.db")
    database.execute("UPDATE run SET status = 'completed'")
    database.commit()
    database.close()
    done = subprocess.run(
        [sys.executable, "-c", program, old_store.root, other],
        env={**os.environ, "TMPDIR": str(place / "temporary")},
        capture_output=True,
        text=True,
    )
    assert "SessionStoreError: the store" in done.stderr
    assert "Set TMPDIR to a folder with enough space" in done.stderr
    assert list((place / "temporary").iterdir()) == []
