"""What may be said about one metric of two sides: better, worse, equivalent or inconclusive.

The test looks at three statistics of each run together, its end, its best value
and its whole curve, because one of them alone cannot tell five runs from five
that are two deviations between seeds away: at an error rate of 5 % no test of
one figure finds more than 79 % of such shifts (89 % were the deviation known).
The end must point the same way by itself, with twice the error rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.comparison.config import ComparisonEngineConfig
from quark_core.analysis.comparison.statistics import (
    MeanTest,
    compare_means,
    measure_gap,
    permute_pairs,
    permute_sides,
    score_runs,
    two_sided_p,
)

__all__ = ["Evidence", "Sample", "Verdict", "conclude", "weigh"]

Floats = NDArray[np.float64]

_NOISE_MULTIPLE = 3.0
_DIVERGED_PENALTY = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The statistics of one metric over the runs of both sides.

    Attributes:
        key: The metric.
        sign: 1 where higher is better, -1 where lower is, 0 where neither is known.
        statistics: tail_median, best, area -> values of the primary's and of the
            reference's runs; NaN for runs that diverged.
        diverged: Which runs end in values that are not finite.
        noises: Standard errors of the ends within single runs.
        scale: Spread of the curves, for values that are not all positive.
        is_rate: Whether the metric is a share between 0 and 1.
        paired: Whether the runs stand in the order of matching seeds.
        same_runs: Whether both sides are the same runs.
        identical: Whether all points of both sides are the same.
    """

    key: str
    sign: int
    statistics: Mapping[str, tuple[Floats, Floats]]
    diverged: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    noises: tuple[float | None, ...] = ()
    scale: float = 0.0
    is_rate: bool = False
    paired: bool = False
    same_runs: bool = False
    identical: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said, and why."""

    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the test of one metric found, before it is corrected for the others.

    Attributes:
        method: As in `MetricDiff.method`.
        sign: 1 where the primary is better, -1 where it is worse, 0 where the sides are level.
        p_value: Two-sided, of all statistics together; None where there is no test.
        permutation_p_value: That of a permutation test.
        end: Test of the ends alone, in the metric's own unit.
        end_agrees: Whether the end alone points the same way.
        early: What is said without a test.
        remarks: What to know besides.
    """

    method: str
    sign: int = 0
    p_value: float | None = None
    permutation_p_value: float | None = None
    end: MeanTest | None = None
    end_agrees: bool = True
    early: Verdict | None = None
    remarks: tuple[str, ...] = field(default=())


def weigh(sample: Sample, config: ComparisonEngineConfig) -> Evidence:
    """Test one metric."""
    one, two = (len(side) for side in sample.diverged)
    if sample.sign == 0:
        end = None
        if not _any_diverged(sample):
            end = compare_means(*sample.statistics["tail_median"], paired=sample.paired)
        said = Verdict(None, "whether higher or lower is better is not known from its name")
        return Evidence("none" if end is None else end.method, end=end, early=said)
    if sample.same_runs:
        return _say("identical", "equivalent", "both sides are the same runs")
    if all(side.all() for side in sample.diverged):
        return _say("divergence", "inconclusive", "both sides end in values that are not finite")
    if one == 1 and two == 1:
        return _weigh_single(sample, config)
    if not _any_diverged(sample) and all(
        bool((np.concatenate(pair) == pair[0][0]).all()) for pair in sample.statistics.values()
    ):
        return _say("identical", "equivalent", "all figures of all runs are the same")
    return _weigh_groups(sample, config)


def conclude(
    evidence: Evidence,
    adjusted_p: float | None,
    tolerance: float,
    config: ComparisonEngineConfig,
) -> Verdict:
    """The verdict of one metric, its p-value corrected for all metrics."""
    if evidence.early is not None:
        return evidence.early
    rate = config.error_rate
    p, corrected = evidence.p_value or 0.0, adjusted_p or 0.0
    told = "; ".join(("", *evidence.remarks))
    if corrected <= rate and evidence.sign and evidence.end_agrees:
        name = "better" if evidence.sign > 0 else "worse"
        return Verdict(name, f"p = {p:.2g}, corrected for all metrics {corrected:.2g}{told}")
    end = evidence.end
    if end is not None and end.method in ("welch", "paired", "known_deviation"):
        low, high = end.interval(1.0 - 2.0 * rate)
        if -tolerance <= low and high <= tolerance:
            inside = f"the difference lies between {low:.3g} and {high:.3g}"
            return Verdict("equivalent", f"{inside}, within the tolerance of {tolerance:.3g}{told}")
    if corrected <= rate and evidence.sign:
        why = "the curves differ on the way, but their ends do not clearly point the same way"
    elif p <= rate:
        why = f"p = {p:.2g} alone, but {corrected:.2g} when corrected for all metrics"
    else:
        why = f"p = {p:.2g}: such a difference is common between seeds"
    return Verdict("inconclusive", why + told)


def _weigh_single(sample: Sample, config: ComparisonEngineConfig) -> Evidence:
    one, two = (bool(side[0]) for side in sample.diverged)
    if one or two:
        side = "primary" if one else "reference"
        reason = f"the {side} ends in values that are not finite, the other does not"
        return _say("divergence", "worse" if one else "better", reason, -1 if one else 1)
    if sample.identical:
        return _say("identical", "equivalent", "all points are the same")
    ends = sample.statistics["tail_median"]
    primary, reference = float(ends[0][0]), float(ends[1][0])
    difference = primary - reference
    sign = sample.sign * (difference > 0) - sample.sign * (difference < 0)
    name = "better" if sign > 0 else "worse"
    deviation = config.seed_deviations.get(sample.key)
    if deviation is not None:
        error = deviation * math.sqrt(2.0)
        test = MeanTest("known_deviation", difference, error, math.inf)
        return Evidence("known_deviation", sign, test.p_value, end=test)
    if "area" not in sample.statistics:
        reason = "single seed: one point a side says nothing about chance"
        return _say("single_seed", "inconclusive", reason)
    gap = _gap(sample, "tail_median")
    told = _describe_gap(gap, sample)
    band = math.log(config.single_seed_factor)
    unit = "in odds" if sample.is_rate else "apart"
    least = f"a factor of {config.single_seed_factor:g} {unit}"
    if abs(gap) < band:
        reason = f"single seed: the ends are {told}, and below {least} two "
        return _say("single_seed", "inconclusive", reason + "seeds of one configuration may be")
    if _gap(sample, "area") * math.copysign(1.0, gap) < band / 3.0:
        reason = f"single seed: the ends are {told}, but the curves as a whole "
        return _say("single_seed", "inconclusive", reason + "are no further apart than seeds are")
    noise = math.hypot(*(error or 0.0 for error in sample.noises))
    if abs(difference) <= _NOISE_MULTIPLE * noise:
        reason = f"single seed: the ends are {told}, within the noise of a run"
        return _say("single_seed", "inconclusive", reason)
    reason = f"single seed, but the ends are {told}, beyond {least}, which seeds seldom reach"
    return _say("single_seed", name, reason, sign)


def _weigh_groups(sample: Sample, config: ComparisonEngineConfig) -> Evidence:
    rows = [
        (*sample.statistics[name], sample.sign)
        for name in ("tail_median", "best", "area")
        if name in sample.statistics
    ]
    alive = tuple(~side for side in sample.diverged)
    remarks: list[str] = []
    scores = [np.zeros(len(side)) for side in alive]
    living = score_runs([(one[alive[0]], two[alive[1]], sign) for one, two, sign in rows])
    for index, found in enumerate(living):
        scores[index][alive[index]] = found
    if _any_diverged(sample):
        worst = float(np.concatenate(living).min()) - _DIVERGED_PENALTY
        for index in (0, 1):
            scores[index][~alive[index]] = worst
        counts = [int(side.sum()) for side in sample.diverged]
        remarks.append(f"{counts[0]} of the primary's and {counts[1]} of the reference's runs "
                       "end in values that are not finite")  # fmt: skip
    first, second = scores
    first, second = _drop_copies(first, second, sample.diverged, remarks)
    whole = len(first) == len(sample.diverged[0]) and len(second) == len(sample.diverged[1])
    paired = sample.paired and whole
    test = compare_means(first, second, paired=paired)
    if test is None:
        remarks.append("use runs of several seeds")
        return _say("single_seed", "inconclusive", "; ".join(remarks))
    sign = int(np.sign(test.difference))
    end, agrees = None, True
    if not _any_diverged(sample):
        one_end, two_end = sample.statistics["tail_median"]
        end = compare_means(one_end[: len(first)], two_end[: len(second)], paired=paired)
        agrees = end is not None and _agrees(end, sample.sign * sign, 2.0 * config.error_rate)
    permuted = permute_pairs(first - second) if paired else permute_sides(first, second)
    if test.method == "prediction":
        remarks.append("one run held against the spread of the other side's")
    return Evidence(test.method, sign, test.p_value, permuted, end, agrees, None, tuple(remarks))


def _drop_copies(
    first: Floats, second: Floats, diverged: Sequence[NDArray[np.bool_]], remarks: list[str]
) -> tuple[Floats, Floats]:
    """Runs of a side that are all the same to the last digit are one run.

    Those that diverged are alike only because they all count as the worst.
    """
    out = []
    for name, side, ended in zip(("primary", "reference"), (first, second), diverged, strict=True):
        kept = side
        if len(side) > 1 and not ended.any() and bool((side == side[0]).all()):
            remarks.append(f"the {name}'s runs are all the same, so they count as one")
            kept = side[:1]
        out.append(kept)
    return out[0], out[1]


def _agrees(end: MeanTest, sign: int, one_sided_rate: float) -> bool:
    if end.difference * sign <= 0:
        return False
    return two_sided_p(end.t, end.df) / 2.0 <= one_sided_rate


def _gap(sample: Sample, name: str) -> float:
    one, two = sample.statistics[name]
    return measure_gap(float(one[0]), float(two[0]), sample.scale, is_rate=sample.is_rate)


def _describe_gap(gap: float, sample: Sample) -> str:
    ends = sample.statistics["tail_median"]
    if sample.is_rate:
        return f"a factor of {_exp(abs(gap)):.3g} apart in odds"
    if all(float(side[0]) > 0.0 for side in ends):
        return f"a factor of {_exp(abs(gap)):.3g} apart"
    return f"{abs(gap):.3g} times the curves' own spread apart"


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _say(method: str, name: str, reason: str, sign: int = 0) -> Evidence:
    return Evidence(method, sign, early=Verdict(name, reason))


def _any_diverged(sample: Sample) -> bool:
    return any(bool(side.any()) for side in sample.diverged)
