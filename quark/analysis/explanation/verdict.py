"""Is there a change at all? Held against what chance does between runs of one configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from quark.analysis.comparison.results import MetricDiff, RunReference
from quark.analysis.comparison.statistics import MeanTest
from quark.analysis.comparison.unfinished import may_say, tell_ends
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.results import ChangeVerdict, NoiseFloor

_SURE = 0.01
"""Chance of a change where there is none, up to which one is told: it leads to accusations."""

_LIKELY = 0.05
_LEAST_DEGREES = 2
_MOST_ALIKE = 40
_SAID: dict[str | None, ChangeVerdict] = {
    "better": "better",
    "worse": "worse",
    "equivalent": "no_difference",
    "inconclusive": "cannot_tell",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said, and why.

    Attributes:
        verdict: The verdict.
        reason: Why.
        accuses: Whether what differs may be to blame; not where chance alone does as much.
    """

    verdict: ChangeVerdict
    reason: str
    accuses: bool = True


def find_noise_floor(
    history: Sequence[PastRun],
    sides: Sequence[Sequence[PastRun]],
    *,
    apart: bool,
) -> NoiseFloor | None:
    """How far seeds of one configuration lie apart; None where too few runs tell.

    Runs that are like those that are compared, in all but seeds, tell first; where they are
    too few, those of all other configurations of the project tell together.

    Args:
        history: Runs of the project, newest first.
        sides: The runs that are compared.
        apart: Whether the sides differ in more than seeds: then their runs are not of one kind,
            also where history does not show in what.
    """
    # A run that is in question says nothing of what chance does: it would excuse itself.
    own = {sides[0][0].sign_rest()} if sides[0] else set()
    asked = {run.run_id for run in sides[-1] if run.sign_rest() in own}
    floor = _find_floor([run for run in history if run.run_id not in asked], sides)
    if floor is None and asked and not apart:
        return _find_floor(history, sides)
    return floor


def _find_floor(
    history: Sequence[PastRun], sides: Sequence[Sequence[PastRun]]
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
        values = _keep_seeds(members)
        if first is None:
            first = values
        own.append(values)
    mean = float(np.mean(first)) if first and len(first) > 1 else None
    floor = _pool(own, mean, "side")
    if floor is not None:
        return floor
    others = [_keep_seeds(members[:_MOST_ALIKE]) for members in groups.values()]
    return _pool(others, mean, "project")


def judge_change(metric: MetricDiff | None, floor: NoiseFloor | None) -> Judgement:
    """The verdict; `metric` has the second side as its primary.

    It is that of the comparison. One run a side, of which a comparison knows nothing, is held
    against what the project's other runs say of chance.
    """
    if metric is None:
        return Judgement("cannot_tell", "the two sides have no metric in common")
    if metric.method == "single_seed" and floor is not None:
        return _judge_single(metric, metric.last.difference or 0.0, floor)
    if metric.method == "divergence" and floor is not None:
        return _judge_divergence(metric)
    if metric.direction == "none":
        return _judge_undirected(metric)
    said = _SAID.get(metric.verdict, "cannot_tell")
    is_chance = said == "no_difference" or (metric.p_value is not None and metric.p_value > _LIKELY)
    return Judgement(said, _turn(metric.reason), not is_chance)


def _judge_divergence(metric: MetricDiff) -> Judgement:
    """One run, or all of a side, ends in no number, which other seeds of the project do not."""
    sides = metric.last.primary is None, metric.last.reference is None
    if all(sides):
        return Judgement("cannot_tell", _turn(metric.reason))
    told = f"the {'second' if sides[0] else 'first'} ends in values that are not finite"
    return Judgement("worse" if sides[0] else "better", f"{told}, which no other seed here does")


def limit_judgement(judgement: Judgement, before: RunReference, after: RunReference) -> Judgement:
    """The judgement, or `cannot_tell` in its place where a side broke off and would look good."""
    words: dict[str, str] = {"no_difference": "equivalent", "changed": "equivalent"}
    if may_say(words.get(judgement.verdict, judgement.verdict), after, before):
        return judgement
    ends = tell_ends(("the first", before), ("the second", after))
    told = " ".join(ends).rstrip(".")
    return Judgement("cannot_tell", f"{told}; up to there: {judgement.reason}", judgement.accuses)


def _judge_undirected(metric: MetricDiff) -> Judgement:
    """Without a direction there is a change or none, by the same interval."""
    low, high = metric.interval_low, metric.interval_high
    if low is None or high is None:
        return Judgement("cannot_tell", "one run a side: how far seeds lie apart is not known")
    told = f"the difference lies between {low:.3g} and {high:.3g}"
    if low <= 0.0 <= high:
        return Judgement("cannot_tell", f"{told}: chance alone may do that", accuses=False)
    return Judgement("changed", told)


def _judge_single(metric: MetricDiff, difference: float, floor: NoiseFloor) -> Judgement:
    if difference == 0.0:
        return Judgement("no_difference", "both end at the same value", accuses=False)
    deviation = floor.deviation
    if deviation <= 0.0:
        # Seeds that all end at one value, such as an accuracy of 1, leave the resolution alone.
        deviation = (metric.tolerance or 0.0) / 2.0
    variance = 2.0 * deviation * deviation
    test = MeanTest("known_deviation", difference, math.sqrt(variance), floor.degrees, variance)
    times = abs(difference) / deviation if deviation > 0.0 else math.inf
    p = test.p_value
    told = f"{times:.3g} times the deviation between seeds ({deviation:.3g}), p = {p:.2g}"
    if p > _LIKELY:
        return Judgement("no_difference", f"{told}: no more than chance does", accuses=False)
    if p > _SURE:
        return Judgement("cannot_tell", f"{told}: chance alone does that once in {1.0 / p:.0f}")
    if metric.direction == "none":
        return Judgement("changed", told)
    is_better = (difference > 0.0) == (metric.direction == "higher")
    return Judgement("better" if is_better else "worse", told)


def _turn(reason: str) -> str:
    """A reason of the comparison, whose primary is the second side here."""
    return reason.replace("the primary", "the second").replace("the reference", "the first")


def _keep_seeds(runs: Sequence[PastRun]) -> list[float]:
    """One value for each seed: a seed that was run again says nothing of other seeds."""
    by_seed: dict[bytes | None, list[float]] = defaultdict(list)
    for run in runs:
        if run.value is not None and math.isfinite(run.value):
            by_seed[run.seed].append(run.value)
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
