"""Very long runs are judged by what the store has summed up, as they would be point by point."""

import math

import numpy as np
import pytest

import quark
from quark.analysis import run_data
from quark.analysis.engine import analyze_run
from quark.analysis.outputs import open_analysis
from quark.analysis.run_data import RunData, find_long_curves

POINTS = 40_000


def make_loss():
    x = np.arange(POINTS)
    noise = np.random.default_rng(3).normal(size=POINTS)
    return 0.1 + np.exp(-5.0 * x / POINTS) * (1 + 0.05 * noise)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the embedded store: one that learns, one with a spike, and NaN at the end."""
    root = tmp_path_factory.mktemp("long")
    broken = make_loss()
    broken[17_003] = 900.0
    broken[39_507:] = math.nan
    made = {}
    for name, loss in (("good", make_loss()), ("broken", broken)):
        with quark.start_run(project="p", storage_dir=root) as session:
            metrics = quark.MetricsLogger(session)
            for step, value in enumerate(loss.tolist()):
                row = {"train/loss": value, "other": value, "short": 1.0}
                metrics.log_many(row if step < 50 else dict(list(row.items())[:2]), step=step)
        made[name] = (quark.open_run(session.run_id, root), loss)
    return made


@pytest.fixture
def long(monkeypatch):
    """Bounds that these runs are beyond."""
    monkeypatch.setattr(run_data, "ALL_POINTS", 10_000)
    monkeypatch.setattr(run_data, "METRIC_POINTS", 4_096)


def load(session):
    return open_analysis(session).load()


@pytest.mark.long
def test_a_run_within_the_bounds_is_read_point_by_point(runs):
    session, loss = runs["good"]
    assert find_long_curves(session.open_run.reader, session.run_id) is None
    np.testing.assert_array_equal(load(session).metrics["train/loss"].value, loss)


def test_no_point_of_a_long_run_is_read_in_parts(runs, long, monkeypatch):
    session, _ = runs["good"]
    data = load(session)

    def refuse(*_):
        raise AssertionError("points were read")

    monkeypatch.setattr(RunData, "_collect", refuse)
    assert len(data.metrics["short"]) == 50
    assert len(data.metrics["train/loss"]) < 6_000


def test_a_sample_has_steps_and_levels_of_the_run(runs, long):
    session, loss = runs["good"]
    curve = load(session).metrics["train/loss"]
    assert (np.diff(curve.step) > 0).all()
    assert (curve.step[0], curve.step[-1]) == (0, POINTS - 1)
    np.testing.assert_array_equal(curve.value, loss[curve.step])


def test_what_stands_out_and_where_values_end_are_kept(runs, long):
    session, loss = runs["broken"]
    data = load(session)
    kept = dict(zip(data.metrics["other"].step.tolist(), data.metrics["other"].value, strict=True))
    assert kept[17_003] == 900.0
    assert kept[39_506] == loss[39_506]
    assert math.isnan(kept[39_507])
    assert data.last_step == POINTS - 1


@pytest.mark.parametrize("name", ["good", "broken"])
def test_the_judgement_is_that_of_every_point(runs, monkeypatch, name):
    session, _ = runs[name]
    whole = analyze_run(load(session))
    monkeypatch.setattr(run_data, "ALL_POINTS", 10_000)
    monkeypatch.setattr(run_data, "METRIC_POINTS", 4_096)
    sampled = analyze_run(load(session))
    assert [
        (alert.rule_id, alert.severity, alert.culprit, alert.step) for alert in sampled.alerts
    ] == [(alert.rule_id, alert.severity, alert.culprit, alert.step) for alert in whole.alerts]
    (one, *_), (other, *_) = whole.health_scores, sampled.health_scores
    assert (one.status, one.known) == (other.status, other.known)
    ours, theirs = one.metadata["learning"], other.metadata["learning"]
    assert theirs["state"] == ours["state"]
    if name == "good":
        assert theirs["end"] == pytest.approx(ours["end"], rel=0.05)
