"""What a killed process left in shared memory only is counted wherever waiting records are."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calls import invoke as call

import quark
from quark_core.delivery.crash_buffer import NOTES, NOTES_AT, remove_black_box
from quark_core.runs import recovery

KILLED = """
import os, sys, quark
session = quark.start_run(project="vision", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
metrics.log("loss", 1.0, step=0)
session.flush("stored")
# As a busy machine may do it: the thread that journals does not come in before the end.
session.open_run.stream._tick = lambda *, sync: True
for step in range(1, 2000):
    metrics.log("loss", 1.0 / step, step=step)
print(session.run_id, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def clear_black_boxes(tmp_path):
    """Shared memory is not given back by itself."""
    yield
    for path in tmp_path.rglob("journal.json"):
        remove_black_box(find_box(path.parent))


@contextlib.contextmanager
def refuse_writing(monkeypatch):
    """Whoever reads would take over what waits, where it could write."""
    access = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
        yield


def find_box(journal):
    return Path(json.loads((journal / "journal.json").read_text())["black_box"])


def run_killed(root, **environment):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, root],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == -9, done.stderr
    return done.stdout.strip()


@pytest.fixture
def killed(tmp_path):
    return run_killed(tmp_path)


@pytest.mark.long
def test_every_command_counts_the_same_records(tmp_path, killed, monkeypatch):
    (lane,) = json.loads(call("doctor", "-d", tmp_path, "--json").stdout)["journals"]
    (dry,) = json.loads(call("sync", tmp_path, "--dry-run", "--json").stdout)
    (found,) = recovery.survey(tmp_path)
    assert (lane["run_id"], lane["state"]) == (killed, "pending")
    assert lane == dry == found.to_dict()
    assert 0 < lane["waiting"] <= 2000
    assert "crash buffer only" in lane["reason"]
    waiting = f"{lane['waiting']:,} records waiting for"
    with (
        refuse_writing(monkeypatch),
        pytest.raises(quark.InvalidRunStateError, match=waiting),
    ):
        call("rm", killed, "-y", "-d", tmp_path)
    # Looking has changed nothing, and what was counted is what is delivered.
    (synced,) = json.loads(call("sync", tmp_path, "--json").stdout)
    assert synced["state"] == "delivered"
    assert synced["delivered"] == lane["waiting"]
    steps = quark.MetricsLogger(quark.open_run(killed, tmp_path)).columns()["step"].tolist()
    assert steps == list(range(2000))
    assert recovery.survey(tmp_path) == []
    call("rm", killed, "-y", "-d", tmp_path)


@pytest.mark.long
def test_doctor_says_what_to_do(tmp_path, killed):
    text = call("doctor", "-d", tmp_path).stdout
    assert "No records are waiting" not in text
    assert f"To deliver them: quark sync {tmp_path}" in text
    assert "No records are waiting." not in call("sync", tmp_path, "--dry-run").stdout


@pytest.mark.sampled
@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_show_and_export_say_that_more_is_to_come(tmp_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    root, target = tmp_path / "a store", tmp_path / "out"
    run_id = run_killed(root)
    line = f"Some records of this run are not in the store yet: quark sync '{root}'"
    with refuse_writing(monkeypatch):
        assert call("show", run_id, "-d", root).stdout.count(line) == 1
        exported = call("export", run_id, "--format", "csv", "-o", target, "-d", root)
        assert exported.stderr.endswith(f"{line}\n")
    call("sync", root)
    assert "not in the store yet" not in call("show", run_id, "-d", root).stdout
    exported = call("export", run_id, "--format", "csv", "-o", target, "--force", "-d", root)
    assert exported.stderr == ""


@pytest.mark.long
def test_a_black_box_that_cannot_be_read_is_not_taken_for_empty(tmp_path, killed):
    journal = next((tmp_path / ".quark" / "runs" / killed / "journal").iterdir())
    box = find_box(journal)
    head = box / "head"
    head.unlink()
    head.mkdir()
    try:
        (lane,) = recovery.survey(tmp_path)
        with pytest.raises(quark.InvalidRunStateError, match="cannot be read"):
            call("rm", killed, "-y", "-d", tmp_path)
    finally:
        head.rmdir()
    assert lane.state == "pending"
    assert lane.reason.startswith("its process has ended, and its crash buffer cannot be read")


@pytest.mark.long
def test_records_that_found_a_full_black_box_are_told(tmp_path, killed):
    head = find_box(next((tmp_path / ".quark" / "runs" / killed / "journal").iterdir())) / "head"
    memory = bytearray(head.read_bytes())
    # As the head says it: so many were left out, and none of them was journaled since.
    NOTES.pack_into(memory, NOTES_AT, 7, 0, 1)
    head.write_bytes(memory)
    (lane,) = recovery.survey(tmp_path)
    assert lane.reason.endswith("at most 7 records are lost, because the crash buffer was full")
    # The run itself tells of the gap, in a record of two kinds.
    (synced,) = recovery.sync(tmp_path)
    assert synced.delivered == lane.waiting + 2


def test_a_living_process_is_about_to_deliver_by_itself(tmp_path):
    with quark.start_run(project="vision", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(2000):
            metrics.log("loss", 1.0, step=step)
        assert recovery.count_unstored(tmp_path, session.run_id) == 0
        assert [lane.state for lane in recovery.survey(tmp_path)] == ["held"]
    assert recovery.count_unstored(tmp_path, session.run_id) == 0


@pytest.mark.long
def test_journals_elsewhere_are_counted_too(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    run_id = run_killed(tmp_path / "store")
    (lane,) = recovery.survey(tmp_path / "store")
    assert recovery.count_unstored(tmp_path / "store", run_id) == lane.waiting > 0
    assert recovery.has_journals(tmp_path / "store")
    assert not recovery.has_journals(tmp_path)
