"""Several workers at one sweep, and what becomes of a trial whose worker dies or is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stopped_processes import stop_between_writes

import quark

WORKER = Path(__file__).with_name("sweep_worker.py")


@pytest.fixture
def start_worker(root):
    """Starts workers, and ends those that are left."""
    processes = []

    def start(name, step_s=0, **changes):
        environment = {**os.environ, "SWEEP_CHANGES": json.dumps(changes)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(root), name, str(step_s)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def wait_for(process, what):
    """Read a worker's lines up to one that has something in it."""
    for line in process.stdout:
        said = json.loads(line)
        if what in said:
            return said
    raise AssertionError(process.stderr.read())


def read_sweep(root, name):
    with quark.sweep(name, storage_dir=root) as sweep:
        return sweep.trials(), sweep.best


@pytest.mark.long
def test_each_trial_is_worked_at_once(start_worker, root):
    workers = [start_worker("shared", trials=8) for _ in range(2)]
    said = []
    for worker in workers:
        output, errors = worker.communicate(timeout=200)
        assert worker.returncode == 0, errors
        said += read_lines(output)
    assert sorted(line["begins"] for line in said if "begins" in line) == list(range(8))
    assert sum("over" in line for line in said) == 2
    trials, best = read_sweep(root, "shared")
    assert [(t.state, t.token) for t in trials] == [("completed", 1)] * 8
    assert best.parameters["lr"] == max(t.parameters["lr"] for t in trials)


@pytest.mark.long
def test_workers_agree_on_the_rungs_of_a_bracket(start_worker, root):
    workers = [start_worker("bracket", search="halving", trials=9, budget=9) for _ in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=250)
        assert worker.returncode == 0, errors
    trials, best = read_sweep(root, "bracket")
    assert [trial.origin["rung"] for trial in trials] == [0] * 9 + [1] * 3 + [2]
    ranked = sorted(trials[:9], key=lambda trial: -trial.parameters["lr"])
    assert [trial.origin["parent"] for trial in trials[9:12]] == [t.number for t in ranked[:3]]
    assert best.parameters == ranked[0].parameters
    assert best.number == 12


@pytest.mark.long
def test_a_trial_of_a_killed_worker_is_taken_up(start_worker, root):
    killed = start_worker("killed", step_s=30, trials=2)
    begun = wait_for(killed, "begins")
    killed.kill()
    killed.wait()
    other = start_worker("killed", trials=2)
    output, errors = other.communicate(timeout=200)
    assert other.returncode == 0, errors
    again = [line for line in read_lines(output) if line.get("begins") == begun["begins"]]
    assert [line["token"] for line in again] == [2]
    trials, _ = read_sweep(root, "killed")
    assert [(t.state, t.token, t.failures) for t in trials] == [
        ("completed", 2, 0), ("completed", 1, 0),
    ]  # fmt: skip
    assert trials[0].losses == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_worker_gives_its_trial_back(start_worker, root, number):
    # It is in its first step when the signal comes, however late that is.
    worker = start_worker("interrupted", step_s=30, trials=2)
    begun = wait_for(worker, "begins")
    wait_for(worker, "trains")
    worker.send_signal(number)
    worker.communicate(timeout=60)
    assert worker.returncode == -number
    trials, _ = read_sweep(root, "interrupted")
    assert (trials[0].failures, trials[0].token) == (0, 1)
    # After SIGTERM what the run has said may be in its journal yet: whoever comes takes it up.
    assert trials[0].state == "suspended" or (number, trials[0].state) == (15, "running")
    assert trials[1].state == "waiting"
    other = start_worker("interrupted", trials=2)
    output, errors = other.communicate(timeout=200)
    assert other.returncode == 0, errors
    firsts = [line for line in read_lines(output) if "begins" in line]
    # Those that wait come before those whose worker is gone without a word.
    assert sorted((line["begins"], line["token"]) for line in firsts) == [(0, 2), (1, 1)]
    assert next(line for line in firsts if line["begins"] == 0)["lr"] == begun["lr"]


@pytest.mark.long
def test_a_stopped_worker_comes_back_too_late(start_worker, root):
    stopped = start_worker("stopped", step_s=1, trials=1, lease_s=2.0)
    wait_for(stopped, "begins")
    stop_between_writes(stopped.pid, root)
    other = start_worker("stopped", trials=1, lease_s=2.0)
    output, errors = other.communicate(timeout=200)
    assert other.returncode == 0, errors
    assert [(line["begins"], line["token"]) for line in read_lines(output) if "begins" in line] == [
        (0, 2)
    ]
    (settled,), _ = read_sweep(root, "stopped")
    stopped.send_signal(signal.SIGCONT)
    _, errors = stopped.communicate(timeout=100)
    assert stopped.returncode == 0, errors
    assert read_sweep(root, "stopped")[0] == [settled]
    assert (settled.token, settled.state) == (2, "completed")


def test_a_worker_keeps_its_trial_until_its_run_begins(root):
    with quark.sweep(
        "slow", project="digits", space={"lr": [1.0]}, metric="a", mode="max", trials=1,
        lease_s=0.5, storage_dir=root, search="grid",
    ) as sweep:  # fmt: skip
        looks = []
        for trial in sweep:
            before = sweep.trials()[0].lease_until
            deadline = time.monotonic() + 60
            while sweep.trials()[0].lease_until <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            looks.append(sweep.trials()[0])
            trial.complete(1.0)
    assert [(look.state, look.token) for look in looks] == [("running", 1)]
    assert looks[0].lease_until > before


def test_a_loop_waits_for_what_others_hold(open_sweep):
    sweep = open_sweep(trials=1, lease_s=1.0)
    held = sweep.claim()
    # Nobody says anything of it again, so the loop gets it when its lease is over.
    numbers = []
    for trial in sweep:
        numbers.append((trial.number, trial.claim.token))
        trial.complete(0.5)
    assert numbers == [(0, 2)]
    held.complete(0.9)
    assert sweep.best.values == (0.5,)


def test_a_fork_leaves_its_parents_sweep_alone(open_sweep):
    sweep = open_sweep(trials=2)
    for trial in sweep:
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            metrics.log("val/acc", 0.5, step=0)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    metrics.log("val/acc", 0.9, step=1)
                    code = 3 if trial.should_stop() else 0
                    sweep.trials()
                    code = 4
                except quark.SessionStoreError:
                    pass
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [trial.values for trial in sweep.trials()] == [(0.5,)] * 2
