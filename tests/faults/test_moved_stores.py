"""A store that is moved while a run writes to it, which then goes on at the old path."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner
from kit.programs import read_steps, run_script

import quark
from quark.cli.main import cli
from quark_core.runs import recovery

STEPS = 400

MOVING = """
way, rest = os.environ["WAY"], int(os.environ["REST"])
session, metrics = begin(system_metrics=False)
log_steps(metrics, 200)
session.flush("stored")
time.sleep(0.7)
if way == "root":
    os.rename(storage_dir, storage_dir + "-moved")
else:
    os.mkdir(storage_dir + "-moved")
    os.rename(storage_dir + "/.quark", storage_dir + "-moved/.quark")
log_steps(metrics, 200, 200 + rest)
if rest:
    # What is not synced where it was is written again, a second later.
    deadline = time.monotonic() + 10
    while not os.path.exists(f"{storage_dir}/.quark/runs") and time.monotonic() < deadline:
        time.sleep(0.1)
    session.flush("journaled")
if os.environ["END"] == "kill":
    os.kill(os.getpid(), 9)
session.end_run()
"""


def ask(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def list_payloads(storage_dir):
    return {path.name for path in storage_dir.rglob(".objects/*/*")}


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["old", "moved", "reader"])
@pytest.mark.parametrize("end", ["kill", "end"])
@pytest.mark.parametrize("way", ["root", pytest.param("store", marks=pytest.mark.long)])
def test_a_store_that_is_moved_under_a_run_has_all_of_it_in_one_place(tmp_path, way, end, first):
    old, moved = tmp_path / "root", tmp_path / "root-moved"
    said, _ = run_script(old, MOVING, ends=-9 if end == "kill" else 0, WAY=way, END=end, REST="200")
    run_id = said.strip()
    payloads = list_payloads(old) | list_payloads(moved)
    for place in (old, moved):
        text = " ".join(ask("doctor", "-d", place, "--json").output.split())
        assert str(old) in text
        assert str(moved) in text
    if first == "reader":
        assert read_steps(run_id, moved) == list(range(STEPS))
    else:
        done = ask("sync", old if first == "old" else moved, "--json")
        assert done.exit_code == 0, done.output
        assert not any(lane["missing"] for lane in json.loads(done.stdout))
    assert read_steps(run_id, moved) == list(range(STEPS))
    assert quark.open_run(run_id, moved).status == ("running" if end == "kill" else "completed")
    assert not (old / ".quark" / "quark.db").exists()
    assert not list(old.rglob("*.qj"))
    assert list_payloads(moved) == payloads
    # Nothing is left to be done, wherever that is asked.
    recovery.sync(moved)
    assert not recovery.survey(old)
    assert not recovery.survey(moved)
    with quark.start_run(project="p", storage_dir=old) as session:
        session.flush()
    assert quark.open_run(session.id, old).status == "completed"


def test_a_run_that_ends_at_the_moment_of_the_move_makes_no_second_store(tmp_path):
    old, moved = tmp_path / "root", tmp_path / "root-moved"
    code = MOVING.replace("200 + rest", "201")
    said, _ = run_script(old, code, ends=-9, WAY="root", END="kill", REST="0")
    recovery.sync(old)
    assert not list(old.rglob("quark.db"))
    assert read_steps(said.strip(), moved) == list(range(201))


@pytest.mark.long
def test_records_wait_where_the_moved_store_cannot_be_found(tmp_path):
    old, moved = tmp_path / "root", tmp_path / "root-moved"
    said, _ = run_script(old, MOVING, ends=-9, WAY="root", END="kill", REST="200")
    elsewhere = tmp_path / "disk" / "root"
    elsewhere.parent.mkdir()
    os.rename(moved, elsewhere)
    for _ in range(2):
        (lane,) = recovery.sync(old)
        assert lane.state == "waiting"
        assert "was moved away" in lane.reason
        assert not list(old.rglob("quark.db"))
    # Moved once more it is as good: it says itself where it was.
    recovery.sync(elsewhere)
    assert read_steps(said.strip(), elsewhere) == list(range(STEPS))


@pytest.mark.long
def test_a_copy_of_a_store_takes_nothing_from_the_one_it_is_of(tmp_path):
    old, moved = tmp_path / "root", tmp_path / "root-moved"
    run_script(old, MOVING, ends=-9, WAY="root", END="kill", REST="200")
    shutil.copytree(moved, tmp_path / "copy")
    before = sorted(old.rglob("*"))
    recovery.sync(tmp_path / "copy")
    assert sorted(old.rglob("*")) == before


KILLED = """
session, metrics = begin(system_metrics=False)
log_steps(metrics, 3_000)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs shared memory")
def test_a_copy_that_lacks_what_is_in_shared_memory_is_not_called_delivered(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    said, _ = run_script(first, KILLED, ends=-9)
    shutil.copytree(first, copy)
    for _ in range(2):
        told = ask("sync", copy)
        assert told.exit_code == 1
        # The table wraps what does not fit beside a long path.
        assert "this is a copy of the journal" in " ".join(told.output.split())
    assert ask("sync", first).exit_code == 0
    assert read_steps(said.strip(), first) == list(range(3_000))
    # The shared memory is gone now, as with a machine that is: that is said, and ends the waiting.
    assert ask("sync", copy).exit_code == 0
    assert ask("sync", copy).exit_code == 0


JOURNALED = """
import glob

session, metrics = begin(system_metrics=False)
session.flush("stored")
os.mkdir(storage_dir + "-aside")
for path in glob.glob(storage_dir + "/.quark/quark.db*"):
    os.rename(path, f"{storage_dir}-aside/{os.path.basename(path)}")
log_steps(metrics, 200)
session.flush("journaled")
os.kill(os.getpid(), 9)
"""


def test_a_journal_that_names_itself_as_its_other_part_loses_nothing(tmp_path):
    # A file system that is mounted over `.quark` during a run hides its journal. The new one is
    # made at the same path, and says that the earlier part lies there.
    root, alias = tmp_path / "root", tmp_path / "alias"
    root.mkdir()
    alias.symlink_to(root)
    said, _ = run_script(root, JOURNALED, ends=-9)
    for path in tmp_path.glob("root-aside/*"):
        path.rename(root / ".quark" / path.name)
    (path,) = root.glob(".quark/runs/*/journal/*")
    manifest = json.loads((path / "journal.json").read_text())
    manifest["moved_to"] = str(alias / path.relative_to(root))
    (path / "journal.json").write_text(json.dumps(manifest))
    recovery.sync(root)
    assert read_steps(said.strip(), root) == list(range(200))
