"""Something of the wrong kind in the place of a file or folder of a journal or store."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner
from kit.programs import read_steps, run_script
from test_takeover import kill

import quark
from quark.cli.main import cli
from quark_core.delivery.journal_folder import find_folders
from quark_core.errors import SessionStoreError
from quark_core.runs import recovery
from quark_core.runs.backend_choice import open_reader

STEPS = 100


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A store of which a killed process has half in its journal only, and the run's id."""
    root = tmp_path_factory.mktemp("left")
    said, _ = run_script(
        root,
        """
from quark_backends.embedded.backend import EmbeddedBackend
from quark_core.errors import BackendUnavailable

session, metrics = begin(system_metrics=False)
log_steps(metrics, 50)
session.flush("stored")

def refuse(*_):
    raise BackendUnavailable("not now")

EmbeddedBackend.write = EmbeddedBackend.write_group = refuse
log_steps(metrics, 50, 100)
session.flush("journaled")
os.kill(os.getpid(), 9)
""",
        ends=-9,
    )
    recovery.journal_black_boxes(root)
    return root, said.strip()


def put(path, kind):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "file":
        path.write_text("x")
    elif kind == "folder":
        path.mkdir()
        (path / "in it").write_text("x")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)


def find_journal(storage_dir):
    (journal,) = (storage_dir / ".quark" / "runs").glob("*/journal/*")
    return journal


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lanes", "file"),
        ("lanes", "dangling link"),
        ("lanes", "pipe"),
        ("lanes/embedded.lease", "folder"),
        ("lanes/embedded.mark", "folder"),
        ("lanes/embedded.mark", "pipe"),
        ("damaged.json", "folder"),
        ("00000002.qj", "folder"),
        ("00000002.qj", "pipe"),
    ],
)
@pytest.mark.parametrize("first", ["sync", "reader"])
def test_what_is_no_part_of_a_journal_is_set_aside_and_the_rest_delivered(
    tmp_path, left, caplog, name, kind, first
):
    root = tmp_path / "root"
    shutil.copytree(left[0], root)
    path = find_journal(root) / name
    put(path, kind)
    if first == "sync":
        done = CliRunner().invoke(cli, ["sync", str(root)])
        assert done.exit_code == 0, done.output
    assert read_steps(left[1], root) == list(range(STEPS))
    # A reader waits for a process that delivers it, and there is none.
    assert "process ?" not in caplog.text
    told = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert len(told) == 1
    (aside,) = (root / ".quark" / "aside").iterdir()
    assert str(aside) in told[0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "file"])
def test_a_journal_that_does_not_say_whose_it_is_is_named_and_fails_a_sync(tmp_path, left, kind):
    root = tmp_path / "root"
    shutil.copytree(left[0], root)
    journal = find_journal(root)
    shutil.copyfile(journal / "journal.json", tmp_path / "kept")
    put(journal / "journal.json", kind)
    done = CliRunner().invoke(cli, ["sync", str(root), "--json"])
    assert done.exit_code == 1
    assert str(journal) in done.output
    assert str(journal) in CliRunner().invoke(cli, ["doctor", "-d", str(root), "--json"]).output
    assert read_steps(left[1], root) == list(range(50))
    put(journal / "journal.json", "file")
    shutil.copyfile(tmp_path / "kept", journal / "journal.json")
    assert CliRunner().invoke(cli, ["sync", str(root)]).exit_code == 0
    assert read_steps(left[1], root) == list(range(STEPS))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-owner"])
def test_what_is_no_file_beside_the_database_is_set_aside(tmp_path, left, suffix, kind):
    root = tmp_path / "root"
    shutil.copytree(left[0], root)
    put(root / ".quark" / f"quark.db{suffix}", kind)
    recovery.sync(root)
    assert read_steps(left[1], root) == list(range(STEPS))
    assert list((root / ".quark").glob(f"quark.db{suffix}.damaged-*"))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("name", ["quark.db", "store.json"])
def test_what_is_no_database_is_named_and_nothing_waits_for_it(tmp_path, left, name, kind):
    root = tmp_path / "root"
    shutil.copytree(left[0], root)
    path = root / ".quark" / name
    os.rename(path, tmp_path / "kept")
    put(path, kind)
    with pytest.raises(SessionStoreError, match=name):
        read_steps(left[1], root)
    assert all(lane.state == "waiting" for lane in recovery.sync(root))
    assert CliRunner().invoke(cli, ["sync", str(root)]).exit_code == 1
    put(path, "file")
    os.replace(tmp_path / "kept", path)
    recovery.sync(root)
    assert read_steps(left[1], root) == list(range(STEPS))


def test_a_journal_that_cannot_be_written_fails_a_sync(tmp_path, left, monkeypatch):
    root = tmp_path / "root"
    shutil.copytree(left[0], root)
    journal = find_journal(root)
    shutil.rmtree(journal / "lanes")
    monkeypatch.setattr(
        "quark_core.delivery.delivery_state.Lease._make", lambda *_: False
    )  # as on a disk that is read-only, which root's rights do not stand for
    done = CliRunner().invoke(cli, ["sync", str(root)])
    assert done.exit_code == 1
    assert "cannot be" in done.output
    assert "written" in done.output


# A small file of a store that says nothing costs only what it was of; everybody reads the rest.

CONTENTS = {
    "nested": b'{"other": ' + b"[" * 100_000,
    "no_text": b'{"run_id": "\xff", "writer_id": "\xff"}',
    "a_list": b"[1]",
    "empty": b"",
}
PLACES = {
    "manifest": "journal.json",
    "damage": "damaged.json",
    "lease": "lanes/embedded.lease",
    "mark": "lanes/embedded.mark",
    "ledger": "../../delivered.jsonl",
    "quarantine": "../../quarantine/embedded/WRITER-0.batch",
}
# Nobody knows whose a journal without its manifest is.
UNKNOWN = {"manifest"}


def ask(root, *arguments):
    done = CliRunner().invoke(cli, [*arguments, "-d", str(root)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.sampled
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_says_nothing_harms_no_reader_and_no_other_run(tmp_path, place, content):
    # None but the first is left when all of it is read for the first time.
    hit, other = kill(tmp_path), kill(tmp_path)
    (folder,) = find_folders(tmp_path, hit)
    name = PLACES[place].replace("WRITER", folder.path.name)
    path = (folder.path / name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(CONTENTS[content])
    shown = json.loads(ask(tmp_path, "show", other, "--json"))
    assert [each["count"] for each in shown["metrics"] if each["key"] == "loss"] == [50]
    for arguments in (["runs"], ["show", hit], ["doctor"], ["du"]):
        ask(tmp_path, *arguments)
    done = CliRunner().invoke(cli, ["sync", str(tmp_path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if place in UNKNOWN:
        assert open_reader(tmp_path).load_run(hit).state == "lost"
    else:
        with_all = quark.MetricsLogger(quark.open_run(hit, tmp_path)).read(metric_key="loss")
        assert len(with_all) == 50
