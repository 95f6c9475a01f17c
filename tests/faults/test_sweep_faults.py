"""Workers of a sweep under two faults at once: each trial is finished once, by one of them."""

import contextlib
import os
import signal
import subprocess

import pytest
from kit.programs import HEAD, kill, lock, start_code, sync, wait_until
from stopped_processes import stop_between_writes

import quark
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import find_folders

ENVIRONMENT = {"QUARK_CAPTURE": "none", "QUARK_SYSTEM_METRICS": "0"}

WORK = """
lease_s = float(sys.argv[2])
sweep = quark.sweep("s", project="p", storage_dir=storage_dir, lease_s=lease_s)
for trial in sweep:
    with trial.start_run() as session:
        metrics = quark.MetricsLogger(session)
        for step in range(3):
            metrics.log("loss", trial["x"] + trial.claim.token / 8 + step, step=step)
        session.flush("durable")
        print(trial.number, trial.claim.token, session.run_id, flush=True)
        sys.stdin.readline()
        for step in range(3, 6):
            metrics.log("loss", trial["x"] + trial.claim.token / 8 + step, step=step)
    print("ended", trial.number, flush=True)
"""
"""Tells each trial that it has, with its token and run; ends it when it is given a line."""


def make_sweep(storage_dir, trials, **settings):
    return quark.sweep(
        "s",
        project="p",
        space={"x": [float(number) for number in range(trials)]},
        search="grid",
        metric="loss",
        mode="min",
        storage_dir=storage_dir,
        **settings,
    )


@pytest.fixture
def launch():
    """Starts workers; those that are left are killed."""
    workers = []

    def launch_one(storage_dir, lease_s=60.0):
        worker = start_code(
            HEAD + WORK,
            storage_dir,
            lease_s,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
        )
        workers.append(worker)
        return worker

    yield launch_one
    for worker in workers:
        worker.kill()
        worker.wait(60)
        for stream in (worker.stdin, worker.stdout, worker.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def hear(worker):
    """Number, token and run of the trial that a worker has now."""
    line = worker.stdout.readline()
    assert line, worker.communicate()[1]
    number, token, run_id = line.split()
    return int(number), int(token), run_id


def go(worker):
    """Let it end its trial; returns at once."""
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write("\n")
        worker.stdin.flush()


def finish(worker):
    """Let it end whatever it gets, until there is no more."""
    out, errors = worker.communicate("\n" * 100, timeout=120)
    assert worker.returncode == 0, errors
    return out


def read_losses(run_id, storage_dir):
    with quark.open_run(run_id, storage_dir) as session:
        records = quark.MetricsLogger(session).read(metric_key="loss")
    return [record.value for record in records]


def expect_losses(trial, token):
    return [trial + token / 8 + step for step in range(6)]


@pytest.mark.long
@pytest.mark.parametrize("first", ["sync", pytest.param("claim", marks=pytest.mark.long)])
def test_a_worker_that_is_killed_while_the_store_is_locked_has_finished_its_trial_or_somebody_else(
    tmp_path, launch, first
):
    """Its result is in the journal: it counts where it comes before another claim."""
    sweep = make_sweep(tmp_path, 1)
    killed = launch(tmp_path)
    number, token, run_id = hear(killed)
    with lock(tmp_path, "IMMEDIATE"):
        go(killed)
        assert wait_until(lambda: has_journaled_its_end(tmp_path))
        kill(killed)
    if first == "sync":
        sync(tmp_path)
        (trial,) = sweep.trials()
        assert (trial.state, trial.token, trial.run_id) == ("completed", 1, run_id)
        assert finish(launch(tmp_path)) == ""
    else:
        other = launch(tmp_path)
        assert hear(other)[:2] == (number, token + 1)
        finish(other)
        sync(tmp_path)
    (trial,) = sweep.trials()
    assert trial.state == "completed"
    assert trial.values == (expect_losses(0, trial.token)[-1],)
    assert read_losses(run_id, tmp_path) == expect_losses(0, token)
    assert sweep.store.load_run(run_id).superseded == (trial.token > token)
    sweep.close()


def has_journaled_its_end(storage_dir):
    """Whether the end of a run is in some journal."""
    return any(
        record.action == "status"
        for folder in find_folders(storage_dir)
        for batch in JournalReader(folder.path).read()
        if batch.kind == "lifecycle"
        for record in batch.to_records()
    )


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
def test_a_worker_that_is_stopped_and_one_that_is_killed_leave_the_trial_to_a_third(
    tmp_path, launch
):
    """The late result of the first changes nothing; its run is kept, and says so."""
    sweep = make_sweep(tmp_path, 1)
    stopped = launch(tmp_path, lease_s=2.0)
    _, _, late_run = hear(stopped)
    stop_between_writes(stopped.pid, tmp_path)
    killed = launch(tmp_path)
    assert hear(killed)[1] == 2
    kill(killed)
    third = launch(tmp_path)
    _, token, run_id = hear(third)
    assert token == 3
    stopped.send_signal(signal.SIGCONT)
    go(stopped)
    assert wait_until(lambda: sweep.store.load_run(late_run).run.status == "completed")
    (trial,) = sweep.trials()
    assert (trial.state, trial.token) == ("running", 3)
    finish(third)
    finish(stopped)
    (trial,) = sweep.trials()
    assert (trial.state, trial.token, trial.losses, trial.run_id) == ("completed", 3, 2, run_id)
    assert trial.values == (expect_losses(0, 3)[-1],)
    assert sweep.store.load_run(late_run).superseded
    assert read_losses(late_run, tmp_path) == expect_losses(0, 1)
    sweep.close()


def test_a_full_disk_and_a_kill_cost_no_trial(mount, launch):
    """Nothing can be claimed while there is no room, and nobody is given what another has."""
    disk = mount("-t", "tmpfs", "-o", "size=24m", "tmpfs")
    sweep = make_sweep(disk, 3)
    worker = launch(disk)
    number, _, run_id = hear(worker)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        free = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    go(worker)
    kill(worker)
    filler.unlink()
    other = launch(disk)
    finish(other)
    sync(disk)
    trials = sweep.trials()
    assert [trial.state for trial in trials] == ["completed"] * 3
    for trial in trials:
        assert trial.values == (expect_losses(trial.number, trial.token)[-1],)
    assert read_losses(run_id, disk)[:3] == expect_losses(number, 1)[:3]
    sweep.close()
