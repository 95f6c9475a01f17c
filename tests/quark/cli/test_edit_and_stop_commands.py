"""`quark edit` and `quark stop`, and what other commands show of both."""

import json
import subprocess
import sys

import pytest

import quark
from quark_core.errors import InvalidRunStateError
from quark_core.runs.open_run import StopLookout

# It trains until its input ends, and never looks whether it shall stop.
DEAF = """
import sys
import quark
from quark_core.delivery import stream
stream.HEARTBEAT_S = 1e9
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    print(session.run_id, flush=True)
    sys.stdin.read()
"""


def test_a_run_is_edited(tmp_path, log_run, invoke):
    log_run(tmp_path, "run-a", name="a", tags=["x"])
    result = invoke(
        *("edit", "run-a", "-d", tmp_path, "--name", "b", "--notes", "n"),
        *("--tag", "y", "--tag", "z", "--untag", "x"),
    )
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [
        ["name", "b"],
        ["notes", "n"],
        ["tags", "y,", "z"],
        ["groups", "-"],
        ["archived", "-"],
    ]
    found = json.loads(invoke("edit", "b", "-d", tmp_path, "--name", "", "--json").output)
    assert (found["name"], found["tags"]) == (None, ["y", "z"])


def test_archived_runs_are_left_out_until_they_are_restored(tmp_path, log_run, invoke):
    for run_id in ("run-a", "run-b"):
        log_run(tmp_path, run_id)
    invoke("edit", "run-a", "-d", tmp_path, "--archive")

    def list_runs(*arguments):
        found = json.loads(invoke("runs", "-d", tmp_path, "--json", *arguments).output)
        return [run["id"] for run in found]

    assert list_runs() == ["run-b"]
    assert list_runs("--archived") == ["run-b", "run-a"]
    assert list_runs("--archived", "--status", "completed") == ["run-b", "run-a"]
    table = invoke("runs", "-d", tmp_path, "--archived").output
    assert table.count("(archived)") == 1
    assert "archived" in invoke("show", "run-a", "-d", tmp_path).output
    # It is not in the trash.
    assert invoke("rm", "--list", "-d", tmp_path).output == (
        f"The trash of the store {tmp_path} is empty.\n"
    )
    invoke("edit", "run-a", "-d", tmp_path, "--unarchive")
    assert list_runs() == ["run-b", "run-a"]


def test_a_run_that_is_over_cannot_be_stopped(tmp_path, log_run, invoke):
    log_run(tmp_path, "run-a")
    with pytest.raises(InvalidRunStateError, match=r"has ended \(completed\)"):
        invoke("stop", "run-a", "-d", tmp_path)


def test_a_training_that_never_looks_is_told_of(tmp_path, invoke):
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as training:
        run_id = training.stdout.readline().strip()
        result = invoke("stop", run_id, "-d", tmp_path, "--wait", "0.1", "--reason", "why")
        assert result.exit_code == 1
        assert "No answer from the training process within 0.1 s" in result.output
        shown = " ".join(invoke("show", run_id, "-d", tmp_path).output.split())
        assert "asked the run to stop" in shown
        assert "not yet received" in shown
        again = invoke("stop", run_id, "-d", tmp_path, "--wait", "0", "--reason", "other")
        assert again.exit_code == 0
        assert ": why." in again.output
        training.kill()


def test_a_request_that_is_known_is_told_so(tmp_path, start, invoke):
    with start(tmp_path, "run-a") as session:
        quark.stop_run(session, reason="why")
        lookout = StopLookout(session.open_run)
        lookout.look()
        if lookout._thread is not None:  # the session's own has not heard of it before
            lookout._thread.join()
        session.flush()
        result = invoke("stop", "run-a", "-d", tmp_path, "--json")
        found = json.loads(result.output)
        assert (result.exit_code, found["state"]) == (0, "running")
        assert found["stop"]["reason"] == "why"
        assert found["stop"]["seen_at"] is not None
        assert "The process received the request." in invoke("stop", "run-a", "-d", tmp_path).output
