"""Time to a target: persistence, censoring, groups."""

import pytest
from comparison_runs import compare, make_run

from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec


def diff(primary, reference, value=0.8, direction="at_least", persistence=3):
    config = ComparisonEngineConfig(
        metric_targets=(MetricTargetSpec("val/accuracy", value, direction),),
        persistence=persistence,
    )
    sides = [
        [make_run({"val/accuracy": values}) for values in side] for side in (primary, reference)
    ]
    return compare(*sides, config)["val/accuracy"]


def test_the_first_of_three_in_a_row():
    lucky = [0.1, 0.9, 0.1, 0.5, 0.8, 0.85, 0.9, 0.2, 0.9]
    late = [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 0.9, 0.9]
    found = diff([lucky], [late])
    assert (found.time_to_target.primary.step, found.time_to_target.reference.step) == (4, 6)
    assert found.time_to_target_step == found.to_dict()["time_to_target_step"] == -2
    assert found.time_to_target.earlier == "primary"
    assert found.time_to_target.primary.confirmed
    assert diff([lucky], [late], persistence=1).time_to_target.primary.step == 1


def test_never_is_not_zero():
    target = diff([[0.1] * 9], [[0.1, 0.2, 0.8, 0.8, 0.8, 0.9, 0.9, 0.9, 0.9]]).time_to_target
    assert target.primary.step is None
    assert target.primary.censored_at == 8
    assert target.primary.summary == "not reached by step 8"
    assert target.difference is None
    assert target.earlier == "reference"
    both = diff([[0.1] * 9], [[0.1] * 5]).time_to_target
    assert (both.difference, both.earlier) == (None, None)


def test_a_run_that_stopped_early_may_still_have_been_first():
    target = diff([[0.1, 0.1, 0.1]], [[0.1] * 6 + [0.9] * 5]).time_to_target
    assert (target.earlier, target.reference.step) == (None, 6)


def test_what_held_to_the_end_counts_and_is_told():
    target = diff([[0.1, 0.82, 0.85]], [[0.1, 0.2, 0.9]]).time_to_target
    assert (target.primary.step, target.reference.step) == (1, 2)
    assert not target.primary.confirmed
    assert "held to the end" in target.summary


def test_at_most():
    target = diff([[3, 2, 1, 1, 1, 1]], [[3, 2, 2, 1, 1, 1]], 1.5, "at_most").time_to_target
    assert (target.primary.step, target.reference.step) == (2, 3)
    assert target.direction == "at_most"


def test_points_that_are_not_finite_meet_nothing():
    nan = float("nan")
    target = diff([[nan, 0.9, 0.9, nan, 0.9, 0.9, 0.9]], [[nan] * 7]).time_to_target
    assert target.primary.step == 4
    assert target.reference.reached_count == 0


def test_groups():
    fast = [[0.1] * k + [0.9] * (20 - k) for k in (2, 3, 4, 5, 6)]
    slow = [[0.1] * k + [0.9] * (20 - k) for k in (12, 13, 20, 20, 20)]
    target = diff(fast, slow).time_to_target
    assert (target.primary.step, target.primary.reached_count) == (4, 5)
    assert (target.reference.step, target.reference.reached_count) == (None, 2)
    assert target.reference.censored_at == 19
    assert target.p_value == pytest.approx(2 / 252)
    assert target.earlier == "primary"
    assert "reached by 2 of 5 runs" in target.summary


def test_the_median_knows_of_runs_that_ended_before():
    # Half of the runs that were still there at step 8 had reached it by then.
    curves = [[0.1] * 4, [0.1] * 4, [0.1] * 8 + [0.9] * 3, [0.1] * 9 + [0.9] * 3]
    assert diff(curves, curves).time_to_target.primary.step == 8


def test_a_target_that_only_one_side_has():
    config = ComparisonEngineConfig(
        metric_targets=(MetricTargetSpec("val/accuracy", 0.5, "at_least"),)
    )
    found = compare([make_run({"val/accuracy": [0.9] * 4})], [make_run({"x": [1]})], config)
    target = found["val/accuracy"].time_to_target
    assert target.primary.step == 0
    assert target.reference.summary == "no points"
