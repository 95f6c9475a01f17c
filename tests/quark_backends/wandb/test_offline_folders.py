"""One offline folder for a run, however many processes of W&B there were."""

import shutil
import time

import psutil
import pytest

import quark

pytest.importorskip("wandb")

from quark_backends.wandb.backend import _SharedWorker
from quark_backends.wandb.local_files import join_folders


def kill_worker(run_path):
    """Kill the mirror's process, and W&B's own with it."""
    deadline = time.monotonic() + 100
    while True:
        found = [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if "quark_backends.wandb.worker" in (process.info["cmdline"] or [])
            and str(run_path) in str(process.info["environ"])
        ]
        if found and found[0].children():
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for process in (found[0], *found[0].children()):
        process.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_twice_and_resumed(start, tmp_path, read_mirror, deliver):
    session = start()
    metrics = quark.MetricsLogger(session)
    image = quark.ArtifactStore(session)
    for part in range(3):
        for step in range(part * 100, part * 100 + 100):
            metrics.log("m", float(step), step=step)
        image.store("report", "report", {"part": part}, step=part)
        deliver(session)
        if part < 2:
            kill_worker(session.run_path)
    session.end_run("failed")
    (log,) = read_mirror(session.run_path).paths
    again = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, backends="wandb")
    quark.MetricsLogger(again).log("m", 300.0, step=300)
    again.end_run()
    mirrored = read_mirror(session.run_path)
    assert mirrored.paths == [log]
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(301))
    assert mirrored.exit_codes == [0]
    numbers = [record.num for record in mirrored.records]
    assert numbers == list(range(1, len(numbers) + 1))
    assert log.parent.parent.joinpath("latest-run").exists()
    join_again(log, mirrored, read_mirror, session)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_process_that_dies_at_the_end_is_replaced_for_the_join(
    start, read_mirror, deliver, monkeypatch
):
    session = start()
    metrics = quark.MetricsLogger(session)
    for step in range(2):
        metrics.log("m", float(step), step=step)
        deliver(session)
        if step == 0:
            kill_worker(session.run_path)
    finish = _SharedWorker._finish
    ended = []

    def kill_first(shared, process):
        if not ended:
            kill_worker(session.run_path)
        ended.append(finish(shared, process))
        return ended[-1]

    monkeypatch.setattr(_SharedWorker, "_finish", kill_first)
    session.end_run()
    assert ended == [False, True]
    mirrored = read_mirror(session.run_path)
    assert len(mirrored.paths) == 1
    assert mirrored.points("m") == [(0, 0), (1, 1)]
    assert mirrored.exit_codes == [0]


def join_again(log, mirrored, read_mirror, session):
    """A join that was broken off before the later folder was removed doubles no row."""
    from wandb.proto import wandb_internal_pb2 as pb

    wandb_id = log.stem.removeprefix("run-")
    later = log.parent.with_name(log.parent.name.replace("offline-run-2", "offline-run-9"))
    shutil.copytree(log.parent, later)
    joined = join_folders(log.parent.parent, wandb_id, pb.Record)
    assert joined == log
    again = read_mirror(session.run_path)
    assert again.paths == [log]
    assert [row["quark/seq"] for row in again.rows if "quark/seq" in row] == [
        row["quark/seq"] for row in mirrored.rows if "quark/seq" in row
    ]
    assert again.exit_codes == [0]
