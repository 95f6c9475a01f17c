"""Syncing twice, at once, and beside the living process delivers every point once."""

import csv
import subprocess
import sys

import msgspec
import pytest
from kit.programs import read_values, run_script, start_code

import quark
from quark_core.delivery.sync import sync_folder
from quark_core.runs import recovery
from quark_core.system.process import current_process

LEFT = """
def stop(lane):
    def write(*_):
        raise OSError("planted outage")
    lane._backend.write = lane._backend.write_group = write
session = quark.start_run(project="p", storage_dir=storage_dir, backends="csv")
metrics = quark.MetricsLogger(session)
while any(lane._backend is None for lane in session.open_run.stream._lanes):
    time.sleep(0.01)
session.flush()
for lane in session.open_run.stream._lanes:
    stop(lane)
for step in range(3000):
    metrics.log("m", float(step), step=step)
    if step % 200 == 0:
        session.flush("journaled")
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

SYNC = """
import sys, pathlib
from quark_core.runs import recovery
sys.stdin.readline()
for result in recovery.sync(pathlib.Path(sys.argv[1])):
    print(result.backend, result.state, result.delivered)
"""


def mirrored(tmp_path, run_id):
    found = []
    for path in sorted((tmp_path / ".quark" / "runs" / run_id).rglob("metrics_long*.csv")):
        with path.open(newline="") as file:
            found += [float(row["value"]) for row in csv.DictReader(file)]
    return sorted(found)


def assert_all_once(tmp_path, run_id, count):
    assert read_values(tmp_path, run_id) == list(map(float, range(count)))
    assert mirrored(tmp_path, run_id) == list(map(float, range(count)))
    assert recovery.survey(tmp_path) == []


@pytest.fixture
def left_behind(tmp_path):
    output, _ = run_script(tmp_path, LEFT, ends=-9)
    return output.strip()


@pytest.mark.long
def test_sync_twice_delivers_once(tmp_path, left_behind):
    first = recovery.sync(tmp_path)
    assert {result.backend: result.state for result in first} == {
        "embedded": "delivered",
        "csv": "delivered",
    }
    assert sum(result.delivered for result in first) >= 6_000
    assert recovery.sync(tmp_path) == []
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
def test_what_somebody_else_has_delivered_meanwhile_leaves_no_folder(tmp_path, left_behind):
    (folder,) = recovery.find_folders(tmp_path)
    # As rank 0 reads it of a rank that is about to end.
    manifest = msgspec.structs.replace(folder.read_manifest(), process=current_process())
    recovery.sync(tmp_path)
    assert not folder.path.exists()
    sync_folder(folder, manifest, recovery.open_lane)
    assert not folder.path.exists()
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_syncs_at_once_deliver_once(tmp_path, left_behind, count):
    children = [
        start_code(SYNC, tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0] * count, ended
    recovery.sync(tmp_path)
    assert_all_once(tmp_path, left_behind, 3_000)


KILLED_SYNC = """
import pathlib
from quark_core.runs import recovery
from quark_core.delivery import delivery_state, sync
sync.GROUP_BATCHES = 3
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{plant}
recovery.sync(pathlib.Path(storage_dir), on_progress={progress})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "progress"),
    [("", "die"), ("delivery_state.LaneMark.finish = die", "None")],
    ids=["after the mark", "before the mark"],
)
def test_a_sync_that_is_killed_is_finished_by_the_next(tmp_path, left_behind, plant, progress):
    for _ in range(4):
        run_script(tmp_path, KILLED_SYNC.format(plant=plant, progress=progress), ends=-9)
    recovery.sync(tmp_path)
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
def test_sync_beside_the_living_process_leaves_it_alone(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(3_000):
            metrics.log("m", float(step), step=step)
            if step % 300 == 0:
                assert {r.state for r in recovery.sync(tmp_path)} == {"held"}
        for _ in range(2):
            child = subprocess.run(
                [sys.executable, "-c", SYNC, str(tmp_path)],
                input="go\n",
                capture_output=True,
                text=True,
                timeout=200,
            )
            states = {line.split()[1] for line in child.stdout.splitlines()}
            assert (child.returncode, states) == (0, {"held"}), child.stderr
        metrics.flush()
    assert session.report_delivery().complete
    assert_all_once(tmp_path, session.run_id, 3_000)
