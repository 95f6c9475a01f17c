"""A CSV mirror whose folder somebody deletes is filled again out of the primary store."""

import csv
import os
import shutil
import subprocess
import sys
import time

import quark
from quark_core.runs import recovery


def read_values(folder):
    with (folder / "metrics_long.csv").open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file)]


def wait_for_mirror(session):
    deadline = time.monotonic() + 60
    while any(lane.waiting for lane in session.report_delivery().lanes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_mirror_whose_folder_is_deleted_is_filled_again(tmp_path, caplog):
    with quark.start_run(project="p", storage_dir=tmp_path, backends=["csv"]) as session:
        metrics = quark.MetricsLogger(session)
        folder = tmp_path / ".quark" / "runs" / session.id / "csv"
        for part in range(4):
            for step in range(part * 50, part * 50 + 50):
                metrics.log("m", float(step), step=step)
            session.flush()
            wait_for_mirror(session)
            if part == 2:
                shutil.rmtree(folder)
    assert session.report_delivery().complete
    assert read_values(folder) == [float(step) for step in range(200)]
    (told,) = [r.getMessage() for r in caplog.records if "were deleted" in r.getMessage()]
    assert str(folder) in told


TRAINING = """
import os, shutil, sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], backends=["csv"])
print(session.id, flush=True)
metrics = quark.MetricsLogger(session)
for step in range(100):
    metrics.log("m", float(step), step=step)
session.flush()
while any(lane.waiting for lane in session.report_delivery().lanes):
    time.sleep(0.01)
from quark_core.delivery.delivery_worker import Lane
Lane._deliver = lambda *_: time.sleep(100)
for step in range(100, 200):
    metrics.log("m", float(step), step=step)
session.flush("journaled")
os.kill(os.getpid(), 9)
"""


def test_sync_fills_a_mirror_whose_folder_was_deleted_after_a_kill(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "QUARK_QUIET": "1"},
    )
    assert done.returncode == -9, done.stderr
    folder = tmp_path / ".quark" / "runs" / done.stdout.strip() / "csv"
    shutil.rmtree(folder)
    assert {lane.state for lane in recovery.sync(tmp_path)} == {"delivered"}
    assert read_values(folder) == [float(step) for step in range(200)]
