"""What a comparison says about one metric."""

from __future__ import annotations

from typing import Any, Literal

from quark_core.record_base import Record

__all__ = [
    "FigureDiff",
    "MetricDiff",
    "MetricVerdict",
    "Presence",
    "TargetDiff",
    "TargetOutcome",
]

MetricVerdict = Literal["better", "worse", "equivalent", "inconclusive"]
Presence = Literal["both", "primary_only", "reference_only"]


class FigureDiff(Record, frozen=True, gc=False):
    """One figure of a metric's curve on both sides.

    Attributes:
        primary, reference: Means over the runs of each side.
        difference: The primary's less the reference's.
        relative_difference: Of the reference's magnitude.
        primary_deviation, reference_deviation: Standard deviations between the
            runs of a side; None for one run.
        p_value: That of this figure by itself, not corrected; None for single runs.
    """

    primary: float | None
    reference: float | None
    difference: float | None
    relative_difference: float | None
    primary_deviation: float | None = None
    reference_deviation: float | None = None
    p_value: float | None = None


class TargetOutcome(Record, frozen=True, gc=False):
    """When the runs of one side reached a target.

    Attributes:
        step: The first step of the points in a row that met it; of several
            runs the median. None where it was not reached, or not by half of the runs.
        censored_at: The last step of a run that did not reach it; of several the lowest.
        reached_count, run_count: Runs that reached it, and all that have the metric.
        confirmed: Whether it held for `persistence` points; otherwise it held
            from there to the end of the curve, which has fewer.
        summary: The same in words.
    """

    step: float | None
    censored_at: int | None
    reached_count: int
    run_count: int
    confirmed: bool
    summary: str


class TargetDiff(Record, frozen=True, gc=False):
    """The time to a target on both sides.

    Attributes:
        target_value, direction: The target.
        primary, reference: When each side reached it.
        difference: Steps, where both reached it.
        earlier: primary, reference or same; None where that cannot be said.
        p_value: That the sides are alike, from a permutation test that knows
            of runs that did not reach it; None below three runs a side.
        summary: One sentence.
    """

    target_value: float
    direction: str
    primary: TargetOutcome
    reference: TargetOutcome
    difference: float | None
    earlier: str | None
    p_value: float | None
    summary: str


class MetricDiff(Record, frozen=True, gc=False):
    """One metric on both sides, and what may be said about it.

    Attributes:
        metric_key: The stored key.
        presence: both, primary_only or reference_only.
        direction: higher or lower is better; none where that is not known.
        headline: Whether it is the metric that the runs are about.
        unit: step or epoch, over which the curves are laid.
        common_start, common_end: What both cover; every figure is from there.
        tail_start: Where the end begins, of which `tail_median` is the median.
        last: The last values.
        best: The best values; None without a direction.
        tail_median: The medians of the end.
        area: The areas under the curves, over their width: mean levels.
        time_to_target: The time to the target, where there is one.
        primary_noise, reference_noise: Standard error of `tail_median` within
            a run, from its residuals and their autocorrelation.
        primary_run_count, reference_run_count: Runs with figures in the common range.
        primary_non_finite_count, reference_non_finite_count: Points that are NaN or infinite.
        verdict: better or worse (of the primary), equivalent, inconclusive;
            None without a direction or on one side only.
        reason: Why, in a sentence.
        method: welch, paired, prediction (one run held against a group),
            known_deviation, single_seed, divergence, identical or none.
        p_value: Of the verdict's test, over the end, the best value and the whole curve.
        adjusted_p_value: The same, corrected by Holm for all metrics of the comparison.
        permutation_p_value: A second test without assumptions about the
            distribution, not corrected.
        effect_size: Difference of `tail_median` over the deviation between
            seeds (Hedges' g).
        interval_low, interval_high: Confidence interval of the difference of `tail_median`.
        interval_level: Its level, such as 0.95.
        tolerance: Difference within which the sides count as equivalent.
        probability_of_improvement: Share of pairs of runs in which the primary's ends better.
        primary_iqm, reference_iqm: Interquartile means of `tail_median`, of five runs or more.
        iqm_interval_low, iqm_interval_high: Bootstrap interval of their difference.
    """

    metric_key: str
    presence: str
    direction: str
    headline: bool
    unit: str
    common_start: int | None
    common_end: int | None
    tail_start: int | None
    last: FigureDiff
    best: FigureDiff | None
    tail_median: FigureDiff
    area: FigureDiff | None
    time_to_target: TargetDiff | None
    primary_noise: float | None
    reference_noise: float | None
    primary_run_count: int
    reference_run_count: int
    primary_non_finite_count: int
    reference_non_finite_count: int
    verdict: str | None
    reason: str
    method: str
    p_value: float | None = None
    adjusted_p_value: float | None = None
    permutation_p_value: float | None = None
    effect_size: float | None = None
    interval_low: float | None = None
    interval_high: float | None = None
    interval_level: float | None = None
    tolerance: float | None = None
    probability_of_improvement: float | None = None
    primary_iqm: float | None = None
    reference_iqm: float | None = None
    iqm_interval_low: float | None = None
    iqm_interval_high: float | None = None

    @property
    def time_to_target_step(self) -> float | None:
        """How many steps later the primary reached the target, where both did."""
        return None if self.time_to_target is None else self.time_to_target.difference

    def to_dict(self) -> dict[str, Any]:
        """The fields and `time_to_target_step`, as JSON-like values."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return {**Record.to_dict(self), "time_to_target_step": self.time_to_target_step}
