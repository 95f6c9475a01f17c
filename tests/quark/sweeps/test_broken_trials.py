"""`stop_broken=True`: what is broken is stopped and told, and nothing else is."""

import random
import threading
import time

import numpy as np
import pytest

import quark
from quark.analysis.analysis_context import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.curves import Curve
from quark.analysis.early_stopping import Peer, decide_stop, make_peer
from quark.analysis.run_data import RunData
from quark.sweeps import broken_trials
from quark_core.records.columns import Columns
from quark_core.records.query import Query

STEPS = 200


class Known:
    newest_us = 0

    def __init__(self, curves):
        self.load = lambda: curves


def make_case(mode="max", **curves):
    """A run of these curves: name -> values in steps from 0."""
    made = {}
    for name, values in curves.items():
        key = name.replace("_", "/")
        steps = np.arange(len(values), dtype=np.int64)
        made[key] = Curve(key, steps, np.asarray(values, float), np.full(len(steps), -1))
    data = RunData(
        lambda kind, _: Columns.empty(kind), "run", ended=False, find_curves=lambda: Known(made)
    )
    return Case(data, AnalyzerEngineConfig(objective="val/acc", objective_mode=mode))


def draw_noise(count, size, seed=0):
    return np.random.default_rng(seed).normal(0.0, size, count)


def learn(count=STEPS, start=2.3, end=0.3, seed=0):
    return end + (start - end) * np.exp(-np.arange(count) / 40) + draw_noise(count, 0.03, seed)


def judge(case, peers=()):
    return decide_stop(case, lambda: peers)


PEERS = [Peer("val/acc", 20, STEPS, -0.9 + place / 100) for place in range(6)]


def test_a_loss_that_is_no_number_any_more_is_broken():
    found = judge(make_case(train_loss=[2.0, 1.5, 1.2] + [np.nan] * 3))
    assert (found.breakage, found.metric, found.step) == ("non_finite", "train/loss", 3)
    assert found.reason == "train/loss is NaN since step 3"
    assert judge(make_case(train_loss=[2.0, 1.5, 1.2] + [np.nan] * 2)) is None
    assert judge(make_case(train_loss=[2.0, np.nan, np.nan, np.nan, 1.2])) is None


def test_a_loss_that_explodes_and_stays_up_is_broken():
    up = [2.3, 2.2, 5.0, *(200.0 + draw_noise(150, 5.0))]
    found = judge(make_case(train_loss=up))
    assert found.breakage == "exploded"
    assert "rose from 2.3 to 20" in found.reason
    # As long as it is on its way back it may come round.
    down = [2.3, *np.geomspace(500.0, 10.0, 150)]
    assert judge(make_case(train_loss=down)) is None
    assert judge(make_case(train_loss=up[:60])) is None


def test_nothing_learned_is_held_against_those_that_learned():
    flat = make_case(train_loss=2.3 + draw_noise(80, 0.02), val_acc=0.1 + draw_noise(80, 0.01))
    found = judge(flat, PEERS)
    assert found.breakage == "nothing_learned"
    assert "the 5 best of 6 other trials that learned had shown it by step 20" in found.reason
    # Without others that learned nobody knows how long it takes.
    assert judge(flat, PEERS[:4]) is None
    # Nor where a good one took half as long.
    late = [Peer("val/acc", 60, STEPS, -0.99), *PEERS]
    assert judge(flat, late) is None
    # Of what was poor in the end it does not count how long it took.
    assert judge(flat, [*PEERS, Peer("val/acc", 190, STEPS, -0.2)]) is not None


def test_whatever_gets_better_is_not_broken():
    for seed in range(5):
        case = make_case(train_loss=learn(80, seed=seed), val_acc=0.1 + draw_noise(80, 0.01))
        assert judge(case, PEERS) is None
    # The accuracy alone, too.
    case = make_case(train_loss=2.3 + draw_noise(80, 0.02), val_acc=np.linspace(0.1, 0.3, 80))
    assert judge(case, PEERS) is None
    # Nor what noise may hide.
    slow = 2.3 - 0.0015 * np.arange(80) + draw_noise(80, 0.3)
    case = make_case(train_loss=slow, val_acc=0.1 + draw_noise(80, 0.01))
    assert judge(case, PEERS) is None


def test_others_are_read_only_where_nothing_gets_better():
    def fail():
        raise AssertionError("nobody need be asked")

    assert decide_stop(make_case(train_loss=learn(), val_acc=np.linspace(0, 1, 200)), fail) is None


def test_what_a_training_is_to_others():
    peer = make_peer(make_case(train_loss=learn(), val_acc=np.linspace(0.1, 0.9, STEPS)))
    assert peer.metric == "val/acc"
    assert peer.ended_at == STEPS - 1
    assert 5 <= peer.shown_at <= 40
    assert peer.rank < -0.8
    assert make_peer(make_case(train_loss=2.3 + draw_noise(200, 0.01))) is None


@pytest.fixture
def quick(monkeypatch):
    """Looks come as often as a short training needs."""
    monkeypatch.setattr(broken_trials, "_POLL_S", 0.02)
    monkeypatch.setattr(broken_trials, "_LEAST_S", 0.02)
    monkeypatch.setattr(broken_trials, "_SHARE", 1.0)
    monkeypatch.setattr(broken_trials, "_PEERS_S", 0.1)


def open_sweep(tmp_path, values, **arguments):
    return quark.sweep(
        "s", project="p", space={"kind": values}, metric="val/acc", mode="max", search="grid",
        storage_dir=tmp_path, **arguments,
    )  # fmt: skip


def train(kind, session, steps=STEPS):
    metrics = quark.MetricsLogger(session)
    noise = random.Random(kind)
    for step in range(steps):
        if str(kind).startswith("good"):
            loss, accuracy = 2.3 / (1 + step / 10), min(0.95, step / 80)
        else:
            loss, accuracy = {"nan": float("nan"), "flat": 2.3}[kind], 0.1
        metrics.log("train/loss", loss + noise.gauss(0, 0.01), step=step)
        metrics.log("val/acc", accuracy, step=step)
        if not str(kind).startswith("good"):
            time.sleep(0.02)


def test_a_broken_trial_is_stopped_and_told_with_the_reason(tmp_path, quick):
    sweep = open_sweep(tmp_path, ["nan", "good 1"], stop_broken=True)
    for trial in sweep:
        with trial.start_run() as session:
            train(trial["kind"], session, steps=5_000 if trial["kind"] == "nan" else STEPS)
    broken, good = sweep.trials()
    assert (broken.state, good.state) == ("failed", "completed")
    assert broken.reason == "train/loss is NaN since step 0"
    run = quark.open_run(broken.run_id, storage_dir=tmp_path)
    events = run.open_run.read("event", Query()).to_records()
    (told,) = [event for event in events if event.event_type == broken_trials.BROKEN_EVENT_TYPE]
    assert told.payload["breakage"] == "non_finite"
    sweep.close()


@pytest.mark.long
def test_what_learns_nothing_is_held_against_the_trials_of_the_store(tmp_path, quick):
    sweep = open_sweep(tmp_path, [*(f"good {n}" for n in range(5)), "flat"], stop_broken=True)

    def work(trial, session):
        train(trial["kind"], session, steps=5_000 if trial["kind"] == "flat" else STEPS)

    sweep.run(work)
    *good, flat = sweep.trials()
    assert {trial.state for trial in good} == {"completed"}
    assert flat.state == "failed"
    assert "nothing is learned, and the 5 best of 5 other trials" in flat.reason
    sweep.close()


def test_it_is_not_stopped_where_nobody_asks_for_it(tmp_path, quick):
    sweep = open_sweep(tmp_path, ["nan"])
    for trial in sweep:
        with trial.start_run() as session:
            train("nan", session, steps=30)
    (trial,) = sweep.trials()
    assert trial.state == "completed"
    sweep.close()


def test_a_monitor_of_the_users_own_looks_on_as_well(tmp_path, quick):
    sweep = open_sweep(tmp_path, ["nan"], stop_broken=True)
    for trial in sweep:
        with trial.start_run() as session:
            monitor = quark.monitor(session, every_n_steps=1, min_interval_s=0.02)
            train("nan", session, steps=5_000)
    assert [alert.rule_id for alert in monitor.alerts] == ["non_finite_values"]
    (trial,) = sweep.trials()
    assert trial.state == "failed"
    sweep.close()


def test_a_look_that_fails_ends_no_training(tmp_path, quick, monkeypatch, caplog):
    def fail(case, find_peers):
        raise RuntimeError("a bug")

    monkeypatch.setattr(broken_trials, "decide_stop", fail)
    sweep = open_sweep(tmp_path, ["nan"], stop_broken=True)
    for trial in sweep:
        with trial.start_run() as session:
            train("nan", session, steps=30)
    (trial,) = sweep.trials()
    assert trial.state == "completed"
    assert caplog.text.count("it is unknown if its trial is broken") == 1
    assert "quark-broken-trial" not in {thread.name for thread in threading.enumerate()}
    sweep.close()
