"""Links, paths and ids in a run folder of somebody else lead to nothing outside of it."""

import hashlib
import json
import os
import sqlite3
from contextlib import closing

import msgspec
import pytest
from hostile_folders import EMBEDDED, list_tree, make_artifact, make_journal
from kit.programs import call, run_code, wait_for_adoption

import quark
from quark_core.delivery.delivery_state import lane_folder_name
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry
from quark_core.errors import SessionStoreError
from quark_core.ranks.launches import Launch, RunClaims
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker

CSV = LaneEntry("csv", "csv")
TENSORBOARD = LaneEntry("tensorboard", "tensorboard")


@pytest.fixture
def home(tmp_path):
    """Files of the reader's, outside of any store."""
    folder = tmp_path / "home"
    (folder / "folder").mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    (folder / "folder" / "key").write_text("a private key")
    return folder


@pytest.fixture
def untouched(home):
    """The reader's files are what they were."""
    before = list_tree(home)
    yield home
    assert list_tree(home) == before


@pytest.mark.long
def test_where_a_journal_lies_is_what_it_is(tmp_path, untouched, monkeypatch):
    """Also where journals lie elsewhere, and say themselves whose they are."""
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    root = tmp_path / "root"
    folder = make_journal(
        root, run_id="theirs", lanes=(EMBEDDED, CSV), run_path=str(untouched / "folder")
    )
    place = tmp_path / "journals" / "theirs" / folder.path.name
    place.parent.mkdir(parents=True)
    os.rename(folder.path, place)
    assert {result.state for result in recovery.sync(root)} == {"delivered"}
    assert (root / ".quark" / "runs" / "theirs" / "csv" / "metrics_long.csv").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"run_id": "../../../home/folder"},
        {"run_id": "another"},
        {"run_id": "/etc"},
        {"writer_id": "../../../../home/folder"},
        {"writer_id": "another"},
        {"writer_id": ""},
    ],
)
def test_a_journal_of_another_run_or_writer_is_left_alone(tmp_path, untouched, caplog, said):
    folder = make_journal(tmp_path / "root", lanes=(EMBEDDED, CSV))
    path = folder.path / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    (result,) = recovery.sync(tmp_path / "root")
    assert (result.state, result.delivered) == ("waiting", 0)
    assert "does not name this journal, or names another one" in result.reason
    assert f"the journal {folder.path} is ignored" in caplog.text
    assert path.exists()


@pytest.mark.parametrize("name", ["..", ".", "", "../../x", "/etc", "x" * 5000, "\0", "\ud800"])
def test_a_lane_is_a_name_of_one_file_whatever_it_is_called(name):
    kept = lane_folder_name(name)
    assert "/" not in kept
    assert kept.strip(".")
    assert len(os.fsencode(kept)) < 255


@pytest.mark.long
def test_refused_batches_stay_where_the_run_is(tmp_path, untouched):
    maker = BatchMaker("theirs")
    batches = [maker.start(), make_artifact(maker, sha256="../" * 8 + "etc/passwd")]
    batches.append(msgspec.structs.replace(batches[0], number=2, kind="unheard of", body=b"x"))
    root = tmp_path / "root"
    make_journal(root, run_id="theirs", lanes=(LaneEntry("..", "csv"), EMBEDDED), batches=batches)
    before = set(os.listdir(root / ".quark" / "runs" / "theirs"))
    recovery.sync(root)
    after = set(os.listdir(root / ".quark" / "runs" / "theirs"))
    assert after - before <= {"csv", "quarantine", "artifacts", "delivered.jsonl"}
    assert not list((root / ".quark" / "runs" / "theirs").glob("*.batch"))


LINKS = [
    ("journal/{writer}/lanes", "folder"),
    ("journal/{writer}/lanes/csv.mark", "thesis.txt"),
    ("journal/{writer}/lanes/csv.lease", "thesis.txt"),
    ("journal/{writer}/00000009.qj", "thesis.txt"),
    ("journal/{writer}/artifacts", "folder"),
    ("journal/{writer}/journal.json.part", "thesis.txt"),
    ("quarantine", "folder"),
    ("quarantine/csv", "folder"),
    ("csv", "folder"),
    ("csv/metrics_long.csv", "thesis.txt"),
    ("csv/state.json", "thesis.txt"),
    ("csv/artifacts", "folder"),
    ("tensorboard", "folder"),
    ("tensorboard/state", "folder"),
    ("mirrors", "folder"),
    ("artifacts", "folder"),
    ("artifacts/.objects", "folder"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("link", "target"), LINKS)
def test_no_link_in_a_folder_is_followed_out_of_it(tmp_path, untouched, link, target):
    root = tmp_path / "root"
    folder = make_journal(root, run_id="theirs", lanes=(CSV, TENSORBOARD, EMBEDDED))
    path = root / ".quark" / "runs" / "theirs" / link.format(writer=folder.path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(untouched / target, path)
    results = recovery.sync(root)
    assert {result.state for result in results} == {"waiting"}
    assert {str(path) in result.reason for result in results} == {True}
    with pytest.raises(SessionStoreError, match="leads out of its folder"):
        _resume(root, "theirs")
    # Nothing is lost: without the link, all of it is delivered.
    path.unlink()
    assert {result.state for result in recovery.sync(root)} == {"delivered"}


def _resume(root, run_id):
    with closing(sqlite3.connect(root / ".quark" / "quark.db")) as database:
        known = database.execute("SELECT count(*) FROM run WHERE id = ?", (run_id,)).fetchone()[0]
    if not known:
        # A start in this root adopts what lies there, and must not follow the link either.
        with quark.start_run(project="own", storage_dir=root):
            pass
        wait_for_adoption()
        raise SessionStoreError("the run is not there: a link leads out of its folder")
    quark.resume_run(run_id, storage_dir=root)


@pytest.mark.parametrize("depth", range(4))
def test_no_folder_on_the_way_to_a_journal_may_be_a_link(tmp_path, home, caplog, depth):
    root = tmp_path / "root"
    folder = make_journal(root, run_id="theirs", lanes=(EMBEDDED, CSV))
    path = (folder.path / "journal.json", *folder.path.parents)[depth]
    if depth == 1:
        path = folder.path
    elsewhere = home / "moved"
    os.rename(path, elsewhere)
    os.symlink(elsewhere, path)
    before = list_tree(home)
    recovery.sync(root)
    assert list_tree(home) == before
    assert f"{path} is a link" in caplog.text


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["quark.db", "quark.db-wal", "store.json", "runs", "launches"])
@pytest.mark.parametrize("act", ["start", "read", "sync"])
def test_the_files_of_a_store_are_no_links(tmp_path, home, name, act):
    root = tmp_path / "root"
    make_journal(root)
    path = root / ".quark" / name
    if path.exists():
        os.rename(path, home / "moved")
    os.symlink(home / "moved", path)
    before = list_tree(home)
    if act == "start":
        with pytest.raises(SessionStoreError, match="is a link"):
            quark.start_run(project="own", storage_dir=root)
    elif act == "read":
        with pytest.raises(SessionStoreError, match="is a link"):
            quark.open_run("theirs", storage_dir=root)
    else:
        assert all(result.state == "waiting" for result in recovery.sync(root))
    assert list_tree(home) == before


@pytest.mark.long
def test_the_store_itself_may_lie_elsewhere(tmp_path):
    make_journal(tmp_path / "root")
    os.rename(tmp_path / "root" / ".quark", tmp_path / "large disk")
    os.symlink(tmp_path / "large disk", tmp_path / "root" / ".quark")
    with quark.start_run(project="own", storage_dir=tmp_path / "root") as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    make_journal(tmp_path / "root", lanes=(EMBEDDED, CSV))
    assert {r.state for r in recovery.sync(tmp_path / "root")} == {"delivered"}


PIPES = ["journal.json", "lanes/embedded.lease", "lanes/embedded.mark", "00000009.qj"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", PIPES)
def test_nobody_waits_for_a_pipe(tmp_path, name):
    root = tmp_path / "root"
    folder = make_journal(root)
    path = folder.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    run_code(
        "import sys, quark\n"
        "with quark.start_run(project='own', storage_dir=sys.argv[1]): pass\n"
        "from pathlib import Path\n"
        "from quark_core.runs import recovery\n"
        "recovery.sync(Path(sys.argv[1]))",
        root,
    )


@pytest.mark.long
def test_a_payload_that_is_a_link_is_given_to_nobody(tmp_path, untouched):
    """Also where its hash is known, as that of many a file is."""
    data = (untouched / "folder" / "key").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    maker = BatchMaker("theirs")
    root = tmp_path / "root"
    run_path = root / ".quark" / "runs" / "theirs"
    batches = [
        maker.start(),
        make_artifact(maker, data),
        maker.lifecycle(("status", {"status": "completed"})),
    ]
    make_journal(root, run_id="theirs", lanes=(EMBEDDED,), batches=batches)
    recovery.sync(root)
    path = run_path / "artifacts" / ".objects" / sha256[:2] / sha256
    path.parent.mkdir(parents=True)
    os.symlink(untouched / "folder" / "key", path)
    call("mirror", "replay", "theirs", "--to", f"csv:{tmp_path / 'out'}", "-d", root)
    out = tmp_path / "copied"
    assert call("artifacts", "theirs", "-o", out, "-d", root).exit_code == 1
    assert (tmp_path / "out" / "theirs" / "artifacts.csv").exists()
    assert data not in (list_tree(tmp_path / "out") | list_tree(out)).values()


@pytest.mark.sampled
@pytest.mark.parametrize("sha256", ["../../../../../home/thesis.txt", "/etc/passwd", "", "a" * 63])
def test_a_hash_names_no_file(tmp_path, untouched, sha256):
    maker = BatchMaker("theirs")
    batches = [maker.start(), make_artifact(maker, sha256=sha256)]
    root = tmp_path / "root"
    make_journal(root, run_id="theirs", lanes=(EMBEDDED, CSV, TENSORBOARD), batches=batches)
    recovery.sync(root)
    (record,) = quark.ArtifactStore(quark.open_run("theirs", root)).read()
    assert record.sha256 == sha256
    assert call("artifacts", "theirs", "-o", tmp_path / "out", "-d", root).exit_code == 1
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.long
def test_a_mirror_writes_where_it_lies_whatever_its_notes_say(tmp_path, untouched):
    root = tmp_path / "root"
    folder = make_journal(root, run_id="theirs", lanes=(EMBEDDED, TENSORBOARD))
    state = root / ".quark" / "runs" / "theirs" / "tensorboard" / "state"
    state.mkdir(parents=True)
    said = {"place": "../../../../../home", "name": "thesis.txt"}
    (state / f"writer-{folder.path.name}.json").write_text(json.dumps(said))
    assert {result.state for result in recovery.sync(root)} == {"delivered"}
    assert list((state.parent).glob("events.out.tfevents.*"))


@pytest.mark.long
def test_an_id_in_a_store_names_no_folder_elsewhere(tmp_path, untouched):
    root = tmp_path / "root"
    with quark.start_run(project="theirs", storage_dir=root) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    hostile = "../../../home/folder"
    with closing(sqlite3.connect(root / ".quark" / "quark.db")) as database:
        database.execute("UPDATE run SET id = ?", (hostile,))
        database.commit()
    assert hostile in call("runs", "-d", root, "--json").stdout
    call("rm", hostile, "-y", "--force", "-d", root)
    call("gc", "-y", "-d", root)


def test_a_claim_of_a_launch_names_no_folder(tmp_path):
    launch = Launch("torchrun", "key", 0, True)
    claims = RunClaims(tmp_path, launch, "project")
    assert claims.claim("harmless", 0)
    assert claims.is_used
    claims.claim("../../home/folder", 0)
    assert not claims.is_used


@pytest.mark.long
def test_the_ledger_is_read_from_and_written_to_no_link(tmp_path, untouched):
    root = tmp_path / "root"
    folder = make_journal(root, run_id="theirs", lanes=(EMBEDDED, CSV))
    os.symlink(untouched / "thesis.txt", root / ".quark" / "runs" / "theirs" / "delivered.jsonl")
    assert {result.state for result in recovery.sync(root)} == {"waiting"}
    JournalFolder(folder.path).remove()
