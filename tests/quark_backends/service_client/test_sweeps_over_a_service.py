"""Trainings of a sweep whose store is a service: renewals, results, kills and keys."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chaos_proxy import losing
from service_fixtures import ask

import quark
from quark_core.delivery import stream
from quark_core.records import parse_time

WORKER = Path(__file__).with_name("trial_worker.py")


def make_sweep(folder, trials, **changes):
    settings = {
        "space": {"lr": quark.uniform(0.0, 1.0)},
        "metric": "loss",
        "mode": "min",
        "search": "random",
        "trials": trials,
        "storage_dir": folder,
    }
    return quark.sweep("search", project="vision", **{**settings, **changes})


def train(trial, folder):
    with trial.start_run(storage_dir=folder) as session:
        quark.MetricsLogger(session).log("loss", trial["lr"], step=0)
    return session.run_id


def test_a_training_renews_and_settles_its_trial_through_the_service(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.1)
    sweep = make_sweep(tmp_path, 1, lease_s=20.0)
    trial = next(iter(sweep))
    with trial.start_run(storage_dir=tmp_path) as session:
        session.flush()
        (before,) = list_trials(service, sweep)
        assert (before["state"], before["run_id"]) == ("running", session.run_id)
        deadline = time.monotonic() + 60
        while True:
            (after,) = list_trials(service, sweep)
            if parse_time(after["lease_until"]) > parse_time(before["lease_until"]) + 500_000:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        quark.MetricsLogger(session).log("loss", 0.25, step=7)
    (settled,) = list_trials(service, sweep)
    assert (settled["state"], settled["values"], settled["token"]) == ("completed", [0.25], 1)
    stored = quark.open_run(session.run_id, tmp_path).open_run.reader.load_run(session.run_id)
    assert stored.trial.to_dict() == {"sweep_id": sweep.id, "number": 0, "token": 1}
    assert sweep.best.number == 0


def list_trials(service, sweep):
    with service.client(key=service.key) as client:
        return ask(client, "list_trials", sweep_id=sweep.id)


def test_a_key_that_may_only_send_records_works_a_sweep_through(service, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default", "ingest"))
    sweep = make_sweep(tmp_path, 3)
    done = [train(trial, tmp_path) for trial in sweep]
    assert len(done) == 3
    monkeypatch.setenv("QUARK_USER_KEY", service.key)
    trials = list_trials(service, sweep)
    assert [trial["state"] for trial in trials] == ["completed"] * 3
    assert [trial["run_id"] for trial in trials] == done


@pytest.mark.long
def test_a_trial_stops_at_a_rung_by_what_others_have_said_through_the_service(service, tmp_path):
    sweep = make_sweep(tmp_path, 9, search="asha", budget=9)
    steps = []
    for trial in sweep:
        with trial.start_run(storage_dir=tmp_path) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(1, 10):
                # Each is worse than those before.
                metrics.log("loss", float(trial.number), step=step)
                if trial.should_stop():
                    break
        steps.append(step)
    trials = list_trials(service, sweep)
    assert {trial["state"] for trial in trials} == {"completed", "pruned"}
    assert (steps[0], max(steps[3:])) == (9, 1)
    with service.client(key=service.key) as client:
        said = ask(client, "read_entries", log=f"{sweep.id}/reports", start=0)
    assert len(said) >= len(trials)


@pytest.mark.sampled
@pytest.mark.parametrize("search", ["grid", "halving"])
def test_searches_of_our_own_work_over_a_service(service, tmp_path, search):
    more = {"grid": {"space": {"lr": [0.1, 0.2, 0.3]}}, "halving": {"budget": 4}}
    sweep = make_sweep(tmp_path, 4, search=search, **more[search])
    for trial in sweep:
        train(trial, tmp_path)
    trials = list_trials(service, sweep)
    assert {trial["state"] for trial in trials} == {"completed"}
    assert len(trials) >= (3 if search == "grid" else 5)
    best = min(trials, key=lambda trial: trial["values"][0])
    assert sweep.best.values == tuple(best["values"])


def test_a_sweep_goes_on_through_lost_replies(service, proxied, tmp_path):
    sweep = make_sweep(tmp_path, 4)
    done = []
    for trial in sweep:
        with losing(proxied, 1):
            done.append((trial.number, train(trial, tmp_path)))
    assert [number for number, _ in done] == [0, 1, 2, 3]
    trials = list_trials(service, sweep)
    assert [(t["token"], t["state"], t["run_id"]) for t in trials] == [
        (1, "completed", run_id) for _, run_id in done
    ]


@pytest.mark.long
def test_workers_that_are_killed_leave_their_trials_to_others(service, tmp_path):
    """Two processes with folders of their own: one is killed within a trial, again and again."""
    sweep = make_sweep(tmp_path / "here", 8)

    def start(name, seconds):
        return subprocess.Popen(
            [sys.executable, WORKER, str(tmp_path / name), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )

    killed = 0
    for turn in range(3):
        victim = start(f"victim{turn}", 60.0)
        assert victim.stdout.readline().split()[0].isdigit()
        victim.send_signal(signal.SIGKILL)
        victim.wait(60)
        victim.stdout.close()
        killed += 1
    workers = [start(f"worker{n}", 0.3) for n in range(2)]
    outputs = [[], []]
    readers = [
        threading.Thread(target=lambda w, into: into.extend(w.stdout), args=(worker, into))
        for worker, into in zip(workers, outputs, strict=True)
    ]
    for reader in readers:
        reader.start()
    for worker, reader in zip(workers, readers, strict=True):
        reader.join(240)
        assert worker.wait(60) == 0
        worker.stdout.close()
    trials = list_trials(service, sweep)
    assert [trial["state"] for trial in trials] == ["completed"] * 8
    assert sum(trial["losses"] for trial in trials) == killed == 3
    assert [trial["token"] for trial in trials] == [1 + trial["losses"] for trial in trials]
    assert len(outputs[0]) + len(outputs[1]) == 8
