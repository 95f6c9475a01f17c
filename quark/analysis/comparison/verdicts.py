"""What may be said about one metric of two sides: better, worse, equivalent or inconclusive.

Each run counts with one figure, the last value of its own curve: a schedule ends with its
run, so no figure from before the end tells what a run reached. One test looks at these ends,
Welch's, and the interval that is shown is that test's own, so that *better* never stands
beside an interval that holds 0. Where runs end in values that are not finite there is no
difference to be measured: the ends are compared by their ranks, those runs last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.config import ComparisonEngineConfig
from quark.analysis.comparison.results import MetricDiff
from quark.analysis.comparison.statistics import (
    MeanTest,
    compare_means,
    count_deciding_runs,
    go_together,
    permute_pairs,
    permute_sides,
    rank_values,
)

Floats = NDArray[np.float64]

_MANY_RUNS = 1_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric over the runs of both sides.

    Attributes:
        key: The metric.
        sign: 1 where higher is better, -1 where lower is, 0 where neither is known.
        ends: Last values of the primary's and of the reference's runs; NaN for those that
            diverged.
        copies: Of either side, whether all its runs have the same points.
        earlier: Values at the last common step, where the side that ends first may only have
            logged its end no more; else None.
        resolution: The step between two values of the metric where some ends are tied, else 0.
        paired: Whether the runs stand in the order of matching seeds.
        same_runs: Whether both sides are the same runs.
        identical: Whether all points of both sides are the same.
    """

    key: str
    sign: int
    ends: tuple[Floats, Floats]
    copies: tuple[bool, bool] = (False, False)
    earlier: tuple[Floats, Floats] | None = None
    resolution: float = 0.0
    paired: bool = False
    same_runs: bool = False
    identical: bool = False

    @property
    def has_diverged(self) -> bool:
        """Whether any run has."""
        return any(bool(np.isnan(side).any()) for side in self.ends)


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
        counts: Runs of either side that count.
        sign: 1 where the primary is better, -1 where it is worse, 0 where the sides are level.
        p_value: Two-sided; None where there is no test.
        permutation_p_value: That of a permutation test.
        end: The test of the ends, in the metric's own unit.
        early: What is said without a test.
        doubt: Why neither better nor worse may be said whatever the test says, or None.
        remarks: What to know besides.
    """

    method: str
    counts: tuple[int, int] = (0, 0)
    sign: int = 0
    p_value: float | None = None
    permutation_p_value: float | None = None
    end: MeanTest | None = None
    early: Verdict | None = None
    remarks: tuple[str, ...] = ()
    doubt: str | None = None


def weigh(sample: Sample, config: ComparisonEngineConfig) -> Evidence:
    """Test one metric."""
    if sample.sign == 0:
        end = None if sample.has_diverged else _compare_ends(sample, sample.ends)
        said = Verdict(None, "whether higher or lower is better is not known from its name")
        return Evidence("none" if end is None else end.method, end=end, early=said)
    if sample.same_runs:
        return _say("identical", "equivalent", "both sides are the same runs")
    if all(bool(np.isnan(side).all()) for side in sample.ends):
        return _say("divergence", "inconclusive", "both sides end in values that are not finite")
    if sample.identical:
        return _say("identical", "equivalent", "all points are the same")
    remarks: list[str] = []
    ends = _drop_copies(sample, remarks)
    if len(ends[0]) == len(ends[1]) == 1:
        return _weigh_single(sample, ends, remarks, config)
    if sample.has_diverged:
        return _weigh_ranks(sample, ends, remarks)
    return _weigh_groups(sample, ends, remarks, config)


def conclude(
    evidence: Evidence,
    adjusted_p: float | None,
    tolerance: float,
    config: ComparisonEngineConfig,
) -> Verdict:
    """The verdict of one metric, its p-value corrected for the other metrics."""
    if evidence.early is not None:
        return evidence.early
    p, corrected = evidence.p_value or 0.0, adjusted_p or 0.0
    told = "".join(f"; {remark}" for remark in evidence.remarks)
    by = "p = " if evidence.method != "permutation" else "by ranks p = "
    if corrected <= config.error_rate and evidence.sign:
        if evidence.doubt is not None:
            return Verdict("inconclusive", f"{by}{p:.2g}, but {evidence.doubt}{told}")
        name = "better" if evidence.sign > 0 else "worse"
        more = f", corrected for the other metrics {corrected:.2g}" if corrected > p else ""
        return Verdict(name, f"{by}{p:.2g}{more}{told}")
    end = evidence.end
    if end is not None:
        low, high = end.interval(1.0 - config.error_rate)
        if -tolerance <= low and high <= tolerance:
            inside = f"the difference lies between {low:.3g} and {high:.3g}"
            return Verdict("equivalent", f"{inside}, within the tolerance of {tolerance:.3g}{told}")
    if p <= config.error_rate:
        why = f"p = {p:.2g} alone, but {corrected:.2g} when corrected for the other metrics"
        return Verdict("inconclusive", why + told)
    return Verdict("inconclusive", _say_who_decides(evidence, tolerance, config) + told)


def may_be_worse(diff: MetricDiff) -> bool:
    """Whether the primary ends worse by more than the tolerance, and nobody can tell if by chance.

    Of runs that diverged there is no difference: then the values that are not finite count.
    """
    if diff.verdict != "inconclusive":
        return False
    if diff.last.difference is None:
        return diff.primary_non_finite_count > diff.reference_non_finite_count
    loss = diff.last.difference * (-1.0 if diff.direction == "higher" else 1.0)
    return loss > (diff.tolerance or 0.0)


def _say_who_decides(evidence: Evidence, tolerance: float, config: ComparisonEngineConfig) -> str:
    """How many runs would show a change that matters, or the one that is seen."""
    one, two = evidence.counts
    runs = f"{one} run{'s' if one > 1 else ''}" if one == two else f"{one} and {two} runs"
    p = f"p = {evidence.p_value:.2g}"
    end = evidence.end
    if end is None:
        return f"inconclusive with {runs}: by ranks {p}; more would decide"
    level, has = 1.0 - config.error_rate, min(one, two)
    change = tolerance
    count = count_deciding_runs(end, change, level)
    if count <= has or change <= 0.0:
        # The runs can show such a change, but the one that is seen may be larger than that.
        change = abs(end.difference)
        count = max(has + 1, count_deciding_runs(end, change, level))
    many = f"{count}" if count < _MANY_RUNS else f"more than {_MANY_RUNS}"
    side = "" if one == two else " a side"
    return (
        f"inconclusive with {runs}; {many}{side} would decide ({p}; so many show a change of "
        f"{change:.2g} in four cases of five)"
    )


def _weigh_single(
    sample: Sample,
    ends: tuple[Floats, Floats],
    remarks: Sequence[str],
    config: ComparisonEngineConfig,
) -> Evidence:
    """One run a side says nothing of how far seeds lie apart, however far these two do."""
    primary, reference = float(ends[0][0]), float(ends[1][0])
    deviation = config.seed_deviations.get(sample.key)
    if math.isnan(primary) or math.isnan(reference):
        side, sign = ("primary", -1) if math.isnan(primary) else ("reference", 1)
        told = f"the {side} ends in values that are not finite, the other does not; "
        return _say("divergence", "inconclusive", told + _ask_for_seeds(remarks), sign)
    difference = primary - reference
    sign = sample.sign * ((difference > 0) - (difference < 0))
    if deviation is None:
        return _say("single_seed", "inconclusive", _ask_for_seeds(remarks), sign)
    variance = 2.0 * deviation * deviation
    test = MeanTest("known_deviation", difference, math.sqrt(variance), math.inf, variance)
    return Evidence("known_deviation", (1, 1), sign, test.p_value, end=test)


def _ask_for_seeds(remarks: Sequence[str]) -> str:
    told = "".join(f"{remark}; " for remark in remarks)
    return (
        f"{told}inconclusive with 1 run: how far seeds lie apart is not known, and three or more "
        "a side would decide"
    )


def _weigh_groups(
    sample: Sample,
    ends: tuple[Floats, Floats],
    remarks: list[str],
    config: ComparisonEngineConfig,
) -> Evidence:
    test = _compare_ends(sample, ends)
    assert test is not None, "one side has two runs"
    sign = sample.sign * int(np.sign(test.difference))
    counts = len(ends[0]), len(ends[1])
    if test.error == 0.0 and test.difference and test.method != "paired":
        told = "the runs of each side end at one value, so how far seeds lie apart is not known"
        return _say("none", "inconclusive", told, sign)
    permuted = permute_pairs(ends[0] - ends[1]) if test.method == "paired" else permute_sides(*ends)
    if test.method == "prediction":
        remarks.append("one run held against the spread of the other side's")
    doubt = None
    if sample.earlier is not None:
        before = compare_means(*sample.earlier, resolution=sample.resolution)
        if (
            before is None
            or before.p_value > config.error_rate
            or (before.difference * test.difference < 0.0)
        ):
            doubt = (
                "one side's last point comes before the other's by less than lies between two of "
                "its points, and at the last common step the two do not differ this way; log the "
                "last step"
            )
    return Evidence(
        test.method, counts, sign, test.p_value, permuted, test, None, tuple(remarks), doubt
    )


def _weigh_ranks(sample: Sample, ends: tuple[Floats, Floats], remarks: list[str]) -> Evidence:
    """By ranks: nobody can say how far a run that diverged is behind.

    It stands as far behind the worst of the others as that one stands behind the best.
    """
    signed = sample.sign * np.concatenate(ends)
    ended = ~np.isnan(signed)
    scores = np.full(len(signed), -1.0)
    scores[ended] = (rank_values(signed[ended]) - 1.0) / max(1, int(ended.sum()) - 1)
    one, two = scores[: len(ends[0])], scores[len(ends[0]) :]
    bad = [int(np.isnan(side).sum()) for side in sample.ends]
    remarks.append(
        f"{bad[0]} of the primary's and {bad[1]} of the reference's runs end in values that are "
        "not finite"
    )
    p = permute_sides(one, two)
    sign = int(np.sign(float(one.mean() - two.mean())))
    counts = len(one), len(two)
    return Evidence("permutation", counts, sign, p, p, None, None, tuple(remarks))


def _compare_ends(sample: Sample, ends: tuple[Floats, Floats]) -> MeanTest | None:
    """Welch's test; the paired one only where pairs of seeds surely go together.

    Pairs halve the degrees of freedom, and most seeds of two configurations have nothing in
    common: then they would only hide what there is to see.
    """
    paired = sample.paired and len(ends[0]) == len(ends[1]) and go_together(*ends)
    return compare_means(*ends, paired=paired, resolution=sample.resolution)


def _drop_copies(sample: Sample, remarks: list[str]) -> tuple[Floats, Floats]:
    """Runs of a side that are the same in every point are one run."""
    out = []
    for name, side, is_copied in zip(
        ("primary", "reference"), sample.ends, sample.copies, strict=True
    ):
        if is_copied and len(side) > 1:
            remarks.append(f"the {name}'s runs are all the same, so they count as one")
        out.append(side[:1] if is_copied else side)
    return out[0], out[1]


def _say(method: str, name: str, reason: str, sign: int = 0) -> Evidence:
    return Evidence(method, sign=sign, early=Verdict(name, reason))
