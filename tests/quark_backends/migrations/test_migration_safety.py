"""Migration under fire: killed anywhere, out of room, raced, and beside a run of an older Quark."""

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

import quark
from quark_backends.store.databases import sqlite as database
from quark_core.errors import SchemaMigrationError, SessionStoreError
from quark_core.runs.backend_choice import open_reader

# Forks a child per statement of the migration, which is killed as it begins that one.
KILL_AT_EACH_STATEMENT = """
import os, shutil, signal, sys
from pathlib import Path
import quark
from quark_backends.store.databases import sqlite as database

golden, place = Path(sys.argv[1]), Path(sys.argv[2])
open_database, seen = database.open_database, 0

def run(root, deadly):
    global seen
    shutil.copytree(golden, root / ".quark")

    def count(statement):
        global seen
        seen += 1
        if seen == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_counted(*arguments):
        connection = open_database(*arguments)
        connection.set_trace_callback(count)
        return connection

    seen = 0
    database.open_database = open_counted
    quark.migrate_store(root)
    return seen

total = run(place / "whole", None)
for deadly in range(1, total + 1):
    pid = os.fork()
    if not pid:
        run(place / str(deadly), deadly)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), (deadly, status)
print(total)
"""

KILL_AT_A_MOMENT = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import quark

golden, place, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
shutil.copytree(golden, place / "whole" / ".quark")
began = time.monotonic()
quark.migrate_store(place / "whole")
shutil.copytree(golden, place / "again" / ".quark")
began = time.monotonic()
quark.migrate_store(place / "again")
took_s = time.monotonic() - began
for number in range(count):
    root = place / str(number)
    shutil.copytree(golden, root / ".quark")
    pid = os.fork()
    if not pid:
        # The system kills, whatever is being done.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.05, 1.1) * took_s + 1e-6)
        quark.migrate_store(root)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def dump(db_path):
    """All rows of all tables."""
    store = sqlite3.connect(db_path)
    names = store.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    rows = {
        name: sorted(store.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
        for (name,) in names
    }
    rows["version"] = store.execute("PRAGMA user_version").fetchone()
    assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store.close()
    return rows


@pytest.fixture
def states(copy_store):
    """Everything that is in the store before a migration, and after one."""
    store = copy_store("reference")
    before = dump(store.db_path)
    quark.migrate_store(store.root)
    return before, dump(store.db_path)


def check_killed(root, states):
    """A store is of the one state or the other, and can be used; returns which one it is."""
    db_path = root / ".quark" / "quark.db"
    found = dump(db_path)
    assert found in states
    assert quark.migrate_store(root) == quark.CURRENT_SCHEMA_VERSION
    assert dump(db_path) == states[1]
    marker = json.loads((root / ".quark" / "store.json").read_text())
    assert marker["schema_version"] == quark.CURRENT_SCHEMA_VERSION
    return states.index(found)


@pytest.mark.long
def test_killed_at_any_statement_it_is_the_old_store_or_the_new_one(old_store, states, tmp_path):
    place = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILL_AT_EACH_STATEMENT, old_store.folder, place],
        capture_output=True,
        text=True,
        check=True,
    )
    total = int(done.stdout)
    found = [check_killed(place / str(number), states) for number in range(1, total + 1)]
    # The last one is the commit.
    assert found == [0] * total
    assert total > 15
    assert check_killed(place / "whole", states) == 1


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.long)])
def test_killed_at_any_moment_it_is_the_old_store_or_the_new_one(
    old_store, states, tmp_path, kills
):
    place = tmp_path / "killed"
    subprocess.run(
        [sys.executable, "-c", KILL_AT_A_MOMENT, old_store.folder, place, str(kills)], check=True
    )
    for number in range(kills):
        check_killed(place / str(number), states)


def test_a_fault_between_its_steps_leaves_the_old_store(old_store, monkeypatch):
    """The last statement fails: the tables are there by then, and must go again."""
    before = old_store.read_files()
    list_statements = database.list_statements
    monkeypatch.setattr(
        database, "list_statements", lambda *a, **k: [*list_statements(*a, **k), "SELECT broken()"]
    )
    with pytest.raises(SchemaMigrationError, match=r"broken.*not changed"):
        quark.migrate_store(old_store.root)
    assert old_store.read_files() == before
    monkeypatch.undo()
    assert old_store.describe() == old_store.expected


@pytest.mark.parametrize("pages", [0, 4])
def test_a_full_disk_leaves_the_old_store(old_store, monkeypatch, pages):
    """SQLite itself refuses to let the file grow by more than some pages."""
    open_database = database.open_database

    def open_limited(path, parameters):
        connection = open_database(path, parameters)
        (count,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={count + pages}")
        return connection

    before = old_store.read_files()
    monkeypatch.setattr(database, "open_database", open_limited)
    with pytest.raises(SchemaMigrationError, match="full"):
        quark.migrate_store(old_store.root)
    with pytest.raises(SessionStoreError, match="full"):
        quark.start_run(project="p", storage_dir=old_store.root)
    assert old_store.read_files() == before
    monkeypatch.undo()
    assert old_store.describe() == old_store.expected


@pytest.mark.long
def test_processes_that_begin_at_once_migrate_once(old_store, states):
    program = (
        "import sys, logging, quark\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "with quark.start_run(project='vision', storage_dir=sys.argv[1]) as s:\n"
        "    quark.MetricsLogger(s).log('m', 1.0, step=0)\n"
        "print(s.run_id)\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, old_store.root],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    assert sum(error.count("migrating the store") for _, error in outputs) == 1
    for run_id, _ in outputs:
        session = quark.open_run(run_id.strip(), old_store.root)
        assert session.status == "completed"
        assert [record.value for record in quark.MetricsLogger(session).read()] == [1.0]
    assert old_store.describe() == old_store.expected


def test_a_living_run_of_an_older_quark_is_left_alone(old_store):
    old_store.revive()
    before = old_store.read_files()
    match = r"version 5, and run killed of an older Quark is writing.*Reading works meanwhile"
    with pytest.raises(SchemaMigrationError, match=match):
        quark.migrate_store(old_store.root)
    with pytest.raises(SessionStoreError, match=match):
        quark.start_run(project="p", storage_dir=old_store.root)
    with pytest.raises(SessionStoreError, match="killed"):
        quark.resume_run(run_id="stopped", storage_dir=old_store.root)
    assert old_store.read_files() == before


def test_beside_a_living_run_all_can_be_read(old_store, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    old_store.revive()
    before = old_store.read_files()
    old_store.expected["killed"]["state"] = "running"
    assert old_store.describe() == old_store.expected
    assert len(list(temporary.iterdir())) == 1  # one copy, however often it is opened
    # What the living run stores comes with the next opening.
    old_store.edit(("UPDATE run SET notes = 'still here' WHERE id = 'killed'",))
    assert open_reader(old_store.root).load_run("killed").run.notes == "still here"
    assert len(list(temporary.iterdir())) == 1
    assert old_store.read_version() == 5
    assert old_store.read_files()["store.json"] == before["store.json"]


@pytest.mark.long
def test_copies_go_with_the_process(old_store, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    old_store.revive()
    program = (
        "import os, sys, tempfile, quark\n"
        "session = quark.open_run('resumed', sys.argv[1])\n"
        "assert len(os.listdir(tempfile.gettempdir())) == 1\n"
        "if not os.fork():\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "assert len(os.listdir(tempfile.gettempdir())) == 1, 'a fork removed the copy'\n"
        "again = quark.open_run('resumed', sys.argv[1])\n"
        "print(len(quark.MetricsLogger(again).read(metric_key='lr')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, old_store.root],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    # Its second attempt logs steps 20 to 29 again, and readers leave out the earlier points.
    assert done.stdout.split() == ["50"]
    assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_when_the_run_has_ended_the_store_is_migrated(old_store):
    program = (
        "import msgspec\n"
        "from quark_core.system.process import current_process\n"
        "print(msgspec.json.encode(current_process()).decode(), flush=True)\n"
        "input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        old_store.revive(json.loads(child.stdout.readline()))
        with pytest.raises(SchemaMigrationError, match="run killed"):
            quark.migrate_store(old_store.root)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert quark.migrate_store(old_store.root) == quark.CURRENT_SCHEMA_VERSION
    assert old_store.describe() == old_store.expected


def test_another_writer_is_waited_for_and_then_named(old_store, monkeypatch):
    monkeypatch.setattr(database, "_FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(database, "_LONG_WAIT_S", 0.2)
    other = sqlite3.connect(old_store.db_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(SchemaMigrationError, match=r"another process has been writing.*Try again"):
        quark.migrate_store(old_store.root)
    # Readers do not wait for long: they read a copy.
    assert old_store.describe() == old_store.expected
    assert old_store.read_version() == 5
    other.close()
    assert quark.migrate_store(old_store.root) == quark.CURRENT_SCHEMA_VERSION


def test_another_writer_that_ends_is_waited_for(old_store, monkeypatch, caplog):
    monkeypatch.setattr(database, "_FIRST_WAIT_S", 0.05)
    other = sqlite3.connect(old_store.db_path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    waiting = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record):
            if "waiting for another process" in record.getMessage():
                waiting.set()

    def end_it():
        waiting.wait(60)
        other.execute("ROLLBACK")

    watch, thread = Watch(), threading.Thread(target=end_it)
    logging.getLogger("quark").addHandler(watch)
    thread.start()
    try:
        assert quark.migrate_store(old_store.root) == quark.CURRENT_SCHEMA_VERSION
    finally:
        logging.getLogger("quark").removeHandler(watch)
        waiting.set()
        thread.join()
        other.close()
    assert old_store.describe() == old_store.expected


def test_what_an_older_writer_sends_after_all_is_kept(old_store):
    """A process that had connected before and begins its run right after the migration."""
    older = sqlite3.connect(old_store.db_path, isolation_level=None)
    older.execute("SELECT count(*) FROM run").fetchone()
    quark.migrate_store(old_store.root)
    (body, digest, count) = older.execute(
        "SELECT body, digest, count FROM batch WHERE kind = 'metric' LIMIT 1"
    ).fetchone()
    older.execute("BEGIN IMMEDIATE")
    older.execute(
        "INSERT INTO run (id, project_id, name, notes, status, attempt, parent_run_id,"
        " lineage_root_run_id, run_path, git_commit, strict_mode, tags, process, created_us,"
        " updated_us, heartbeat_us) SELECT 'late', project_id, name, notes, 'running', 0, NULL,"
        " 'late', run_path, git_commit, 0, tags, process, created_us, updated_us, heartbeat_us"
        " FROM run WHERE id = 'killed'"
    )
    older.execute(
        "INSERT INTO writer (run_pk, id, attempt, rank, started_us, head)"
        " SELECT pk, 'late-writer', 0, 0, created_us, -1 FROM run WHERE id = 'late'"
    )
    older.execute(
        "INSERT INTO batch (writer_pk, kind, number, count, digest, body)"
        " SELECT pk, 'metric', 0, ?, ?, ? FROM writer WHERE id = 'late-writer'",
        (count, digest, body),
    )
    older.execute("UPDATE writer SET head = 0 WHERE id = 'late-writer'")
    older.execute("UPDATE run SET status = 'completed', ended_us = updated_us WHERE id = 'late'")
    older.execute("COMMIT")
    older.close()
    late = quark.open_run("late", old_store.root)
    assert late.status == "completed"
    assert len(quark.MetricsLogger(late).read(include_non_finite=True)) == count


@pytest.mark.long
def test_opening_a_current_store_loads_no_sqlalchemy(tmp_path):
    program = (
        "import sys, quark\n"
        "quark.start_run(project='p', storage_dir=sys.argv[1]).end_run()\n"
        "print('sqlalchemy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
