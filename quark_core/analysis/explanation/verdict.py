"""Is there a change at all? Held against what chance does between runs of one configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from quark_core.analysis.comparison.results import MetricDiff
from quark_core.analysis.comparison.statistics import MeanTest
from quark_core.analysis.explanation.history import PastRun
from quark_core.analysis.explanation.results import ChangeVerdict, NoiseFloor

__all__ = ["Judgement", "find_noise_floor", "judge_change"]

_SURE = 0.01
"""Chance of a change where there is none, up to which one is told: it leads to accusations."""

_LIKELY = 0.05
_LEAST_DEGREES = 2
_MOST_ALIKE = 40
_SIDES: dict[str, ChangeVerdict] = {"better": "better", "worse": "worse"}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said, and why."""

    verdict: ChangeVerdict
    reason: str


def find_noise_floor(
    history: Sequence[PastRun],
    sides: Sequence[Sequence[PastRun]],
    measure: Callable[[str], float | None],
    *,
    apart: bool,
) -> NoiseFloor | None:
    """How far seeds of one configuration lie apart; None where too few runs tell.

    Runs that are like those that are compared, in all but seeds, tell first; where they are
    too few, those of all other configurations of the project tell together.

    Args:
        history: Runs of the project, newest first.
        sides: The runs that are compared.
        measure: The end of a run's curve by its id, as the comparison takes it; None where
            the run did not come so far.
        apart: Whether the sides differ in more than seeds: then their runs are not of one kind,
            also where history does not show in what.
    """
    # A run that is in question says nothing of what chance does: it would excuse itself.
    own = {sides[0][0].sign_rest()} if sides[0] else set()
    asked = {run.run_id for run in sides[-1] if run.sign_rest() in own}
    floor = _find_floor([run for run in history if run.run_id not in asked], sides, measure)
    if floor is None and asked and not apart:
        return _find_floor(history, sides, measure)
    return floor


def _find_floor(
    history: Sequence[PastRun],
    sides: Sequence[Sequence[PastRun]],
    measure: Callable[[str], float | None],
) -> NoiseFloor | None:
    groups: dict[Hashable, list[PastRun]] = defaultdict(list)
    for run in history:
        if run.is_whole and run.config_digest is not None:
            groups[run.sign_rest()].append(run)
    keys = dict.fromkeys(
        run.sign_rest() for side in sides for run in side if run.config_digest is not None
    )
    own = []
    first: list[float] | None = None
    for key in keys:
        members = groups.get(key, [])[:_MOST_ALIKE]
        values = _keep_seeds([(run, measure(run.run_id)) for run in members])
        if first is None:
            first = values
        own.append(values)
    mean = float(np.mean(first)) if first and len(first) > 1 else None
    floor = _pool(own, mean, "side")
    if floor is not None:
        return floor
    others = [
        _keep_seeds([(run, run.value) for run in members[:_MOST_ALIKE]])
        for members in groups.values()
    ]
    return _pool(others, mean, "project")


def judge_change(metric: MetricDiff | None, floor: NoiseFloor | None) -> Judgement:
    """The verdict; `metric` has the second side as its primary."""
    if metric is None:
        return Judgement("cannot_tell", "the two sides have no metric in common")
    ends = metric.tail_median
    if metric.method == "identical":
        return Judgement("no_difference", metric.reason)
    if metric.method == "divergence":
        if metric.verdict in _SIDES:
            return Judgement(_SIDES[metric.verdict], _turn(metric.reason))
        return Judgement("no_difference", metric.reason)
    if ends.difference is None:
        return Judgement("cannot_tell", _turn(metric.reason) or "one side has no points to compare")
    if metric.primary_run_count == metric.reference_run_count == 1:
        return _judge_single(metric, floor)
    p = metric.p_value
    if p is None and metric.interval_low is not None and metric.interval_high is not None:
        inside = metric.interval_low <= 0.0 <= metric.interval_high
        return Judgement(
            "no_difference" if inside else "changed",
            f"the difference lies between {metric.interval_low:.3g} and {metric.interval_high:.3g}",
        )
    if p is None:
        return Judgement("cannot_tell", _turn(metric.reason))
    return _judge_p(metric, p, ends.difference, f"between the groups of runs p = {p:.2g}")


def _judge_single(metric: MetricDiff, floor: NoiseFloor | None) -> Judgement:
    difference = metric.tail_median.difference or 0.0
    if floor is None:
        if metric.verdict in _SIDES:
            return Judgement(_SIDES[metric.verdict], _turn(metric.reason))
        return Judgement(
            "cannot_tell",
            "one run a side, and no configuration of the project has been run with three seeds: "
            "nobody knows what chance does",
        )
    if difference == 0.0:
        return Judgement("no_difference", "both end at the same value")
    deviation = floor.deviation
    if deviation <= 0.0:
        # Seeds that all end at one value, such as an accuracy of 1, leave the resolution alone.
        deviation = (metric.tolerance or 0.0) / 2.0
    test = MeanTest("known_deviation", difference, deviation * math.sqrt(2.0), floor.degrees)
    times = abs(difference) / deviation if deviation > 0.0 else math.inf
    told = (
        f"{times:.3g} times the deviation between seeds ({deviation:.3g}), p = {test.p_value:.2g}"
    )
    return _judge_p(metric, test.p_value, difference, told)


def _judge_p(metric: MetricDiff, p: float, difference: float, told: str) -> Judgement:
    if p > _LIKELY:
        return Judgement("no_difference", f"{told}: no more than chance does")
    if p > _SURE:
        return Judgement("cannot_tell", f"{told}: chance alone does that once in {1.0 / p:.0f}")
    if metric.direction == "none":
        return Judgement("changed", told)
    is_better = (difference > 0.0) == (metric.direction == "higher")
    return Judgement("better" if is_better else "worse", told)


def _turn(reason: str) -> str:
    """A reason of the comparison, whose primary is the second side here."""
    return reason.replace("the primary", "the second").replace("the reference", "the first")


def _keep_seeds(found: Sequence[tuple[PastRun, float | None]]) -> list[float]:
    """One value for each seed: a seed that was run again says nothing of other seeds."""
    by_seed: dict[bytes | None, list[float]] = defaultdict(list)
    for run, value in found:
        if value is not None and math.isfinite(value):
            by_seed[run.seed].append(value)
    out = []
    for seed, values in by_seed.items():
        # Without a seed each run has one of its own, but copies to the last bit are one run.
        out += sorted(set(values)) if seed is None else [float(np.mean(values))]
    return out


def _pool(groups: Sequence[Sequence[float]], mean: float | None, source: str) -> NoiseFloor | None:
    known = [np.array(values) for values in groups if len(values) > 1]
    degrees = sum(len(values) - 1 for values in known)
    if degrees < _LEAST_DEGREES:
        return None
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in known)
    return NoiseFloor(math.sqrt(squares / degrees), degrees, sum(map(len, known)), mean, source)
