"""W&B's own `_step` is the run's step as long as steps ascend; beyond that nothing is lost."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import quark
from quark_core.runs import recovery

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)

TOLD = "its steps do not ascend"


def own_steps(mirrored, key):
    return [(row["_step"], row[key]) for row in mirrored.rows if key in row]


def load_state(run_path):
    return json.loads(next(run_path.glob("mirrors/wandb/*/state.json")).read_bytes())


def find_worker(run_path):
    """The number of the mirror's own process, or None in the moment between two of them."""
    for path in run_path.rglob("worker.json"):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_bytes())["pid"]
    return None


def sync(folder, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while any(lane.state != "delivered" for lane in recovery.sync(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.long
def test_the_step_of_a_row_is_the_step_of_the_run(start, read_mirror, deliver, caplog):
    with caplog.at_level(logging.WARNING, "quark"), start() as session:
        metrics = quark.MetricsLogger(session)
        for step in range(0, 300, 3):
            metrics.log("loss", 1.0 / (step + 1), step=step)
            if step % 99 == 0:
                deliver(session)  # what follows comes in another batch
            metrics.log("accuracy", step / 300, step=step)
    mirrored = read_mirror(session.run_path)
    steps = list(range(0, 300, 3))
    for key in ("loss", "accuracy"):
        assert [step for step, _ in own_steps(mirrored, key)] == steps
        assert [step for step, _ in mirrored.points(key)] == steps
    assert len([row for row in mirrored.rows if "loss" in row]) == len(steps)
    assert {"loss", "accuracy", "*"}.isdisjoint(mirrored.axes)
    assert not [text for text in caplog.messages if TOLD in text]
    assert load_state(session.run_path)["held"] == ""


@pytest.mark.long
def test_what_has_an_epoch_only_has_an_axis_of_its_own(start, read_mirror):
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for step in range(100):
            metrics.log("loss", float(step), step=step)
            if step % 10 == 9:
                metrics.log("val", step / 100, epoch=step // 10)
    mirrored = read_mirror(session.run_path)
    assert own_steps(mirrored, "loss") == [(step, step) for step in range(100)]
    assert mirrored.axes["val"] == "quark/epoch"
    rows = [(row["quark/epoch"], row["val"]) for row in mirrored.rows if "val" in row]
    assert rows == [(epoch, (10 * epoch + 9) / 100) for epoch in range(10)]


@pytest.mark.long
def test_epochs_are_the_steps_of_a_run_that_has_no_others(start, read_mirror):
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for epoch in range(5):
            metrics.log_many({"loss": 1.0 / (epoch + 1), "acc": epoch / 5}, epoch=epoch)
    mirrored = read_mirror(session.run_path)
    assert [step for step, _ in own_steps(mirrored, "acc")] == list(range(5))
    assert mirrored.axes["acc"] == "quark/epoch"


@pytest.mark.long
def test_steps_that_go_back_are_told_and_nothing_is_lost(start, read_mirror, deliver, caplog):
    logged = [*range(20), *range(10, 30)]
    with caplog.at_level(logging.WARNING, "quark"), start() as session:
        metrics = quark.MetricsLogger(session)
        for number, step in enumerate(logged):
            metrics.log("loss", float(number), step=step)
            if number in (5, 12, 19):
                deliver(session)
    mirrored = read_mirror(session.run_path)
    expected = [(step, float(number)) for number, step in enumerate(logged)]
    assert sorted(mirrored.points("loss")) == sorted(expected)
    assert mirrored.axes["loss"] == "quark/step"
    assert mirrored.axes["*"] == "quark/step"
    assert len([text for text in caplog.messages if TOLD in text]) == 1
    steps = [row["_step"] for row in mirrored.rows]
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_the_same_metric_twice_at_a_step_is_there_twice(start, read_mirror):
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for step in (0, 1, 1, 2):
            metrics.log("loss", float(step), step=step)
    assert sorted(read_mirror(session.run_path).points("loss")) == [(0, 0), (1, 1), (1, 1), (2, 2)]


@pytest.mark.long
def test_layers_and_the_machine_do_not_bend_the_steps(start, read_mirror, deliver, caplog):
    with caplog.at_level(logging.WARNING, "quark"), start() as session:
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        telemetry = quark.SystemTelemetry(session)
        for step in range(60):
            metrics.log("loss", float(step), step=step)
            events.log("checkpoint_saved", step=step)
            telemetry.record_step(step=step, step_time_ms=float(step))
            if step % 20 == 7:
                deliver(session)
    mirrored = read_mirror(session.run_path)
    assert own_steps(mirrored, "loss") == [(step, step) for step in range(60)]
    assert not [text for text in caplog.messages if TOLD in text]
    times = "system/runtime/step_time_ms"
    assert own_steps(mirrored, times) == [(step, step) for step in range(60)]
    assert max(value for _, value in own_steps(mirrored, "quark/events/info")) >= 60


@pytest.mark.long
def test_a_run_that_is_taken_up_goes_on_by_its_steps(start, read_mirror, tmp_path):
    session = start()
    metrics = quark.MetricsLogger(session)
    for step in range(10):
        metrics.log("loss", float(step), step=step)
    session.end_run("failed")
    again = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, backends="wandb")
    metrics = quark.MetricsLogger(again)
    for step in range(10, 20):
        metrics.log("loss", float(step), step=step)
    again.end_run()
    mirrored = read_mirror(session.run_path)
    assert own_steps(mirrored, "loss") == [(step, step) for step in range(20)]


TRAIN = """
    import time
    import quark
    from quark_core.backends.registry import default_registry
    from quark_backends.wandb.plugin import quark_register_backends
    default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
    session = quark.start_run(project="vision", backends="wandb")
    metrics = quark.MetricsLogger(session)
    for step in range(200):
        metrics.log("a", float(step), step=step)
        metrics.log("b", float(step), step=step)
        time.sleep(0.002)
    (lane,) = [each for each in session.open_run.stream._lanes if not each.primary]
    session.open_run.flush()
    while lane.report().waiting:
        lane.nudge()
        time.sleep(0.02)
    print(session.run_path, flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_what_is_held_when_all_are_killed_comes_with_the_next_sync(tmp_path, read_mirror):
    (tmp_path / "job.py").write_text(textwrap.dedent(TRAIN))
    job = subprocess.Popen(
        [sys.executable, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with job.stdout:
        run_path = tmp_path / ".quark" / "runs" / Path(job.stdout.readline().strip()).name
    # Everything is acknowledged, and the rows of the newest steps are held.
    assert load_state(run_path)["held"]
    training = psutil.Process(job.pid)
    everyone = [training, *training.children(recursive=True)]
    worker = psutil.Process(json.loads(next(run_path.rglob("worker.json")).read_bytes())["pid"])
    everyone += [worker, *worker.children(recursive=True)]
    for process in everyone:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait()
    sync(tmp_path)
    mirrored = read_mirror(run_path)
    for key in ("a", "b"):
        assert sorted(step for step, _ in mirrored.points(key)) == list(range(200))
    assert load_state(run_path)["held"] == ""
    assert not list(run_path.rglob("held"))


@pytest.mark.long
def test_a_mirror_that_dies_at_the_end_is_started_again_for_what_it_held(
    start, read_mirror, deliver
):
    session = start()
    metrics = quark.MetricsLogger(session)
    for step in range(50):
        metrics.log("loss", float(step), step=step)
    deliver(session)
    assert load_state(session.run_path)["held"]
    own = json.loads(next(session.run_path.rglob("worker.json")).read_bytes())
    os.kill(own["pid"], signal.SIGKILL)
    session.end_run()
    points = read_mirror(session.run_path).points("loss")
    assert sorted(step for step, _ in points) == list(range(50))


TRAIN_ON = """
    import time
    import quark
    from quark_core.backends.registry import default_registry
    from quark_backends.wandb.plugin import quark_register_backends
    default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
    session = quark.start_run(project="vision", backends="wandb")
    metrics = quark.MetricsLogger(session)
    def train(start, stop):
        for step in range(start, stop):
            metrics.log("a", float(step), step=step)
            metrics.log("b", float(step), step=step)
            time.sleep(0.002)
    train(0, 200)
    (lane,) = [each for each in session.open_run.stream._lanes if not each.primary]
    session.open_run.flush()
    while lane.report().waiting:
        lane.nudge()
        time.sleep(0.02)
    metrics.log("a", 200.0, step=200)
    print(session.run_path, flush=True)
    input()
    # The other half of the newest row comes when nobody is there to take it.
    metrics.log("b", 200.0, step=200)
    train(201, 300)
    print("logged", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("moment", ["nobody is there", "a new one has begun"])
def test_the_mirror_dies_with_rows_held_and_then_its_training_and_each_point_is_there_once(
    tmp_path, read_mirror, moment
):
    (tmp_path / "job.py").write_text(textwrap.dedent(TRAIN_ON))
    job = subprocess.Popen(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job.stdout, job.stdin:
        run_path = tmp_path / ".quark" / "runs" / Path(job.stdout.readline().strip()).name
        assert load_state(run_path)["held"]
        worker = find_worker(run_path)
        os.kill(worker, signal.SIGKILL)
        job.stdin.write("go\n")
        job.stdin.flush()
        assert job.stdout.readline() == "logged\n"
        deadline = time.monotonic() + 60
        while moment == "a new one has begun" and find_worker(run_path) in (None, worker):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        job.kill()
        job.wait()
    sync(tmp_path)
    mirrored = read_mirror(run_path)
    for key in ("a", "b"):
        assert sorted(step for step, _ in mirrored.points(key)) == list(range(300))
    marks = [mark for row in mirrored.rows for mark in row["quark/seq"].split()]
    assert len(marks) == len(set(marks))
    assert load_state(run_path)["held"] == ""
