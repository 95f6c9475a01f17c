"""The mirror in a process of its own, as sessions open it."""

import os
import signal
import subprocess
import sys
import time

import pytest

import quark


@pytest.fixture(autouse=True)
def helpers(monkeypatch, registered):
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "1")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "90")


def find_helper(session, known, timeout_s=150):
    """The process id of the mirror's helper, which is none of those known."""
    folder = session.run_path / "mirrors" / "processes" / "mlflow"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in folder.glob("*.json"):
            pid = int(path.stem.partition("-")[0])
            if pid not in known:
                return pid
        for lane in session.open_run.stream._lanes:
            lane.nudge()
        time.sleep(0.05)
    raise AssertionError("the mirror has no process")


def start(tmp_path, server, project):
    return quark.start_run(
        project=project,
        storage_dir=tmp_path,
        backends=f"mlflow:{server.uri}?quark=full",
        config={"lr": 0.1},
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_helper_that_is_killed_again_and_again_leaves_each_point_once(
    tmp_path, server, project, find_runs, history
):
    session = start(tmp_path, server, project)
    metrics = quark.MetricsLogger(session)
    pids = set()
    for part in range(2):
        for step in range(part * 200, part * 200 + 200):
            metrics.log_many({"m": float(step), "n": 0.5}, step=step)
            time.sleep(0.001)
        pid = find_helper(session, pids)
        pids.add(pid)
        time.sleep(0.7 * part)
        os.kill(pid, signal.SIGKILL)
    session.end_run()
    (lane,) = [each for each in session.report_delivery().lanes if not each.primary]
    assert lane.complete, lane
    assert sum(lane.errors.values()) >= 2
    (run,) = find_runs()
    for key in ("m", "n"):
        assert [step for step, *_ in history(run.info.run_id, key)] == list(range(400))
    assert run.data.params == {"lr": "0.1"}
    assert run.info.status == "FINISHED"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_mlflow_is_never_imported_into_training(tmp_path, server, project, find_runs):
    code = """
import os, sys, quark
from quark_core.backends.registry import default_registry
from quark_backends.mlflow.plugin import quark_register_backends
default_registry()._definitions.setdefault("mlflow", quark_register_backends()[0])
with quark.start_run(project=sys.argv[1], storage_dir=sys.argv[2], backends=sys.argv[3]) as session:
    quark.MetricsLogger(session).log("m", 0.5, step=0)
assert session.report_delivery().complete, session.report_delivery()
assert not {"mlflow", "google.protobuf", "requests"} & sys.modules.keys()
"""
    arguments = [project, str(tmp_path), f"mlflow:{server.uri}?quark=full"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    (run,) = find_runs()
    assert run.data.metrics["m"] == 0.5
