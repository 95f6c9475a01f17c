"""Metrics compared one by one: curves aligned, time to target, a test over the runs, a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.results import FigureDiff, MetricDiff, TargetDiff, TargetOutcome
from quark.analysis.comparison.significance import (
    Evidence,
    Sample,
    Verdict,
    adjust_by_holm,
    bootstrap_iqm,
    compare_means,
    conclude,
    estimate_effect,
    estimate_median_error,
    permute_sides,
    probability_of_improvement,
    take_iqm,
    weigh,
)
from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
from quark.analysis.curves import Curve, find_resolution
from quark.analysis.metric_roles import CurvePart, find_part
from quark.analysis.observations import keep_finite
from quark.analysis.run_data import RunData
from quark_core.config.objective import (
    MetricDirection,
    Objective,
    find_mode,
    is_rate_name,
    name_direction,
    read_objective,
)
from quark_core.records.names import encode_name
from quark_core.runs.reading import encode_key

Floats = NDArray[np.float64]

_LARGE = 1e140


@dataclass(frozen=True, slots=True)
class CommonRange:
    """The steps that all curves cover, both ends included.

    Attributes:
        unit: step or epoch.
        start, end: The range.
    """

    unit: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CurveSummary:
    """One run's curve; None for what it has no finite points for.

    Attributes:
        end: Its last step.
        last: Its last value, wherever the other curves end; None of a run that diverged.
        best: Its best value; None where no direction is known.
        tail_median: Median of its own last part.
        tail_start: Where that begins.
        noise: Standard error of `tail_median` within the run.
        at_common_end: Its value at the last step that all curves cover.
        area: Its mean level over what all curves cover.
        non_finite: Points that are not finite.
        diverged: Whether most of the last few points are not finite.
    """

    end: int
    last: float | None
    best: float | None
    tail_median: float | None
    tail_start: int | None
    noise: float | None
    at_common_end: float | None
    area: float | None
    non_finite: int
    diverged: bool


def find_range(curves: Sequence[Curve]) -> CommonRange | None:
    """What all curves cover; None where that is nothing, or where their units differ."""
    if not curves or any(len(curve) == 0 for curve in curves):
        return None
    units = {curve.unit for curve in curves}
    start = max(int(curve.step[0]) for curve in curves)
    end = min(int(curve.step[-1]) for curve in curves)
    return None if len(units) > 1 or start > end else CommonRange(units.pop(), start, end)


def summarize_curve(
    curve: Curve,
    common: CommonRange | None,
    direction: MetricDirection,
    tail_fraction: float,
    tail_points: int,
) -> CurveSummary:
    """The summary of a curve that has points; several points of one step count as their mean.

    A schedule ends with its run, so the end, the best value and the last part are those of
    the run's own curve. The last part is `tail_fraction` of its steps, or as much more as
    `tail_points` points need, at most half of them.
    """
    good = curve.merged
    count = min(tail_points, (len(curve) + 1) // 2)
    closing = int(np.isfinite(curve.value[-count:]).sum())
    end = int(curve.step[-1])
    non_finite = len(curve) - int(np.isfinite(curve.value).sum())
    if not len(good):
        return CurveSummary(end, None, None, None, None, None, None, None, non_finite, True)
    diverged = closing * 2 < count
    tail_start = end - math.floor(tail_fraction * (end - int(curve.step[0])))
    tail_start = min(tail_start, int(good.step[-min(tail_points, (len(good) + 1) // 2)]))
    tail = good.between(tail_start, None).value
    best = None
    if direction != "none":
        best = keep_finite(good.value.max() if direction == "higher" else good.value.min())
    inside = None if common is None else good.between(common.start, common.end)
    return CurveSummary(
        end=end,
        last=None if diverged else keep_finite(good.value[-1]),
        best=best,
        tail_median=keep_finite(_take_median(tail)),
        tail_start=tail_start,
        noise=estimate_median_error(tail),
        at_common_end=keep_finite(inside.value[-1]) if inside is not None and len(inside) else None,
        area=None if inside is None or common is None else _average_area(inside, common),
        non_finite=non_finite,
        diverged=diverged,
    )


def _average_area(curve: Curve, common: CommonRange) -> float | None:
    """The curve's mean level by the trapezoidal rule, its ends interpolated or held."""
    width = common.end - common.start
    if len(curve) < 2 or width == 0:
        return None
    steps = curve.step.astype(np.float64)
    values = curve.value
    scale = float(np.abs(values).max())
    # Sums of huge values overflow where their mean does not.
    scale = scale if scale > _LARGE else 1.0
    if scale != 1.0:
        values = values / scale
    inner = (values[1:] + values[:-1]) * (steps[1:] - steps[:-1])
    outside = values[0] * (steps[0] - common.start) + values[-1] * (common.end - steps[-1])
    return keep_finite((float(inner.sum()) / 2.0 + float(outside)) / width * scale)


def _take_median(values: Iterable[float]) -> float:
    array = np.asarray(values, dtype=np.float64)
    middle = len(array) // 2
    if len(array) % 2:
        return float(np.partition(array, middle)[middle])
    low, high = np.partition(array, (middle - 1, middle))[middle - 1 : middle + 1]
    return float(low / 2.0 + high / 2.0)


_TESTED_RUNS = 3


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """When one run reached a target.

    Attributes:
        at: The step, or the last step that the run has where it did not.
        reached: Whether it did.
        confirmed: Whether it held for the points that were asked for.
    """

    at: int
    reached: bool
    confirmed: bool

    def is_before(self, other: TimeToTarget) -> bool:
        """Whether this run certainly reached the target before the other one."""
        if not self.reached:
            return False
        return self.at < other.at if other.reached else self.at <= other.at


def find_time_to_target(curve: Curve, target: MetricTargetSpec, persistence: int) -> TimeToTarget:
    """The first of `persistence` points in a row that meet the target.

    Where the curve ends sooner, all points from there on must meet it.
    """
    above = target.direction == "at_least"
    with np.errstate(invalid="ignore"):
        met = curve.value >= target.target_value if above else curve.value <= target.target_value
    sums = np.concatenate([[0], np.cumsum(met)])
    if len(met) >= persistence:
        held = np.flatnonzero(sums[persistence:] - sums[:-persistence] == persistence)
        if len(held):
            return TimeToTarget(int(curve.step[held[0]]), True, True)
    failed = np.flatnonzero(~met)
    start = int(failed[-1]) + 1 if len(failed) else 0
    if start < len(met):
        return TimeToTarget(int(curve.step[start]), True, False)
    return TimeToTarget(int(curve.step[-1]), False, False)


def compare_targets(
    primary: Sequence[Curve],
    reference: Sequence[Curve],
    target: MetricTargetSpec,
    persistence: int,
    error_rate: float,
) -> TargetDiff:
    """The time to a target on both sides, over all points that each run has."""
    sides = [
        [find_time_to_target(curve, target, persistence) for curve in curves if len(curve)]
        for curves in (primary, reference)
    ]
    unit = next((curve.unit for curve in (*primary, *reference) if len(curve)), "step")
    outcomes = [_sum_up(reaches, unit) for reaches in sides]
    one, two = (outcome.step for outcome in outcomes)
    difference = None if one is None or two is None else one - two
    p_value, earlier = None, None
    if min(map(len, sides)) >= _TESTED_RUNS:
        scores = _score(sides[0], sides[1])
        p_value = permute_sides(*scores)
        lead = float(scores[0].mean() - scores[1].mean())
        if p_value <= error_rate and lead:
            earlier = "primary" if lead > 0 else "reference"
    elif len(sides[0]) == len(sides[1]) == 1:
        earlier = _order(sides[0][0], sides[1][0])
    summary = f"primary: {outcomes[0].summary}; reference: {outcomes[1].summary}"
    return TargetDiff(
        float(target.target_value),
        target.direction,
        outcomes[0],
        outcomes[1],
        difference,
        earlier,
        p_value,
        summary,
    )


def _order(primary: TimeToTarget, reference: TimeToTarget) -> str | None:
    if primary.is_before(reference):
        return "primary"
    if reference.is_before(primary):
        return "reference"
    return "same" if primary.reached and reference.reached else None


def _sum_up(reaches: Sequence[TimeToTarget], unit: str) -> TargetOutcome:
    count, reached = len(reaches), sum(reach.reached for reach in reaches)
    censored = [reach.at for reach in reaches if not reach.reached]
    step = _find_median(reaches)
    lowest = min(censored, default=None)
    if not count:
        words = "no points"
    elif count == 1:
        at = f"by {unit} {reaches[0].at}"
        words = f"reached at {unit} {reaches[0].at}" if reached else f"not reached {at}"
        if reached and not reaches[0].confirmed:
            words += " (held to the end, which came soon after)"
    else:
        words = f"reached by {reached} of {count} runs"
        if step is not None:
            words += f", by half of them by {unit} {step:g}"
        if lowest is not None:
            words += f"; not reached by {unit} {lowest} at the soonest"
    confirmed = any(r.reached for r in reaches) and all(r.confirmed for r in reaches if r.reached)
    return TargetOutcome(step, lowest, reached, count, confirmed, words)


def _find_median(reaches: Sequence[TimeToTarget]) -> float | None:
    """The step by which half of the runs reached it (Kaplan and Meier 1958), or None."""
    share = 1.0
    for at in sorted({reach.at for reach in reaches if reach.reached}):
        at_risk = sum(reach.at >= at for reach in reaches)
        share *= 1.0 - sum(reach.reached and reach.at == at for reach in reaches) / at_risk
        if share <= 0.5 + 1e-12:
            return float(at)
    return None


def _score(primary: Sequence[TimeToTarget], reference: Sequence[TimeToTarget]) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]
]:  # fmt: skip
    """Of each run, how many it certainly beat less how many beat it (Gehan 1965)."""
    everyone = [*primary, *reference]
    scores = np.array(
        [
            float(sum(own.is_before(other) - other.is_before(own) for other in everyone))
            for own in everyone
        ]
    )
    return scores[: len(primary)], scores[len(primary) :]


_STATISTICS = ("last", "best", "tail_median", "area", "at_common_end")

_PARTS: tuple[CurvePart, ...] = (
    "validation loss", "validation accuracy", "train loss", "train accuracy",
)  # fmt: skip
_RESOLVED_POINTS = 4096
_IQM_RUNS = 5


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which run of the reference belongs to which of the primary.

    Attributes:
        order: Reference runs in the order of the primary's; None where they do not match.
        same_runs: Whether both sides are the same runs.
    """

    order: tuple[int, ...] | None = None
    same_runs: bool = False


@dataclass(frozen=True, slots=True)
class _Metric:
    """One metric on its way to a verdict."""

    key: str
    direction: MetricDirection
    target: MetricTargetSpec | None
    curves: tuple[list[Curve], list[Curve]]
    common: CommonRange | None
    summaries: tuple[list[CurveSummary], list[CurveSummary]]
    sample: Sample | None
    evidence: Evidence
    tolerance: float


def compare_metrics(
    primary: Sequence[RunData],
    reference: Sequence[RunData],
    pairing: Pairing,
    config: ComparisonEngineConfig,
) -> tuple[MetricDiff, ...]:
    """Every metric that a run of either side has, the headline first, then by name."""
    # What no float can hold ends as None in the result, not as a warning.
    with np.errstate(all="ignore"):
        return _compare(primary, reference, pairing, _encode_keys(config))


def _encode_keys(config: ComparisonEngineConfig) -> ComparisonEngineConfig:
    """The options with metrics under their stored keys."""
    stored = {
        name: {encode_key(key, name): value for key, value in getattr(config, name).items()}
        for name in ("directions", "tolerances", "seed_deviations")
    }
    return replace(config, **stored)  # type: ignore[arg-type]


def _compare(
    primary: Sequence[RunData],
    reference: Sequence[RunData],
    pairing: Pairing,
    config: ComparisonEngineConfig,
) -> tuple[MetricDiff, ...]:
    targets = {encode_key(spec.metric_key, "metric_key"): spec for spec in config.metric_targets}
    sides = (primary, reference)
    keys = sorted({key for run in (*primary, *reference) for key in run.metrics})
    shared = [key for key in keys if all(any(key in run.metrics for run in s) for s in sides)]
    objective = _find_objective((*primary, *reference), shared)
    headline = _find_headline(primary, shared, targets, objective, config)
    metrics = []
    for key in keys:
        target = targets.get(key)
        direction = config.directions.get(key) or _direct(key, target, objective)
        metrics.append(_weigh_metric(key, sides, direction, target, pairing, config))
    adjusted = _adjust(metrics, headline, config)
    diffs = [
        _make_diff(metric, adjusted.get(metric.key), metric.key == headline, config)
        for metric in metrics
    ]
    return tuple(sorted(diffs, key=lambda diff: (not diff.headline, diff.metric_key)))


def _find_objective(runs: Sequence[RunData], shared: Sequence[str]) -> Objective | None:
    """What the first run that names one, of those that both sides have, is to be judged by."""
    for run in runs:
        named = read_objective(run.config)
        for key in () if named is None else (named.metric, encode_name(named.metric)):
            if named is not None and key in shared:
                return Objective(key, named.mode)
    return None


def _direct(
    key: str, target: MetricTargetSpec | None, objective: Objective | None
) -> MetricDirection:
    if target is not None:
        return "higher" if target.direction == "at_least" else "lower"
    return name_direction(find_mode(key, objective))


def _find_headline(
    primary: Sequence[RunData],
    shared: Sequence[str],
    targets: Mapping[str, MetricTargetSpec],
    objective: Objective | None,
    config: ComparisonEngineConfig,
) -> str | None:
    if config.headline_metric is not None:
        return encode_key(config.headline_metric, "headline_metric")
    for key in targets:
        if key in shared:
            return key
    if objective is not None:
        return objective.metric
    common = {
        key: next(run.metrics[key] for run in primary if key in run.metrics) for key in shared
    }
    parts = (find_part(common, part) for part in _PARTS)
    return next((found.key for found in parts if found is not None), None)


def _adjust(
    metrics: Sequence[_Metric], headline: str | None, config: ComparisonEngineConfig
) -> dict[str, float]:
    """P-values of what was tested, corrected for the number of metrics.

    The headline, which was chosen before anybody looked, has the whole error rate, so that its
    verdict is the one that its interval gives. All others have a share of it together, or all
    of it once the headline differs.
    """
    raw = {
        metric.key: metric.evidence.p_value
        for metric in metrics
        if metric.evidence.early is None and metric.evidence.p_value is not None
    }
    own = raw.pop(headline, None) if headline is not None else None
    share = 1.0
    if own is not None and own > config.error_rate:
        share = 1.0 - config.headline_share
    corrected = adjust_by_holm(list(raw.values()), [1.0] * len(raw))
    out = {key: min(1.0, p / share) for key, p in zip(raw, corrected, strict=True)}
    if headline is not None and own is not None:
        out[headline] = own
    return out


def _weigh_metric(
    key: str,
    sides: tuple[Sequence[RunData], Sequence[RunData]],
    direction: MetricDirection,
    target: MetricTargetSpec | None,
    pairing: Pairing,
    config: ComparisonEngineConfig,
) -> _Metric:
    curves = _align_curves(key, sides)
    common = find_range([*curves[0], *curves[1]])
    summaries = tuple(
        [
            summarize_curve(curve, common, direction, config.tail_fraction, config.tail_points)
            for curve in side
        ]
        for side in curves
    )
    one, two = summaries
    order = pairing.order
    is_paired = order is not None and len(order) == len(one) == len(two)
    if order is not None and is_paired:
        two = [two[index] for index in order]
    if not one or not two:
        early = Verdict(None, f"only the {'primary' if one else 'reference'} has this metric")
        evidence = Evidence("none", early=early)
        return _Metric(key, direction, target, curves, common, (one, two), None, evidence, 0.0)
    sample = _make_sample(key, direction, curves, (one, two), is_paired, pairing.same_runs)
    evidence = weigh(sample, config)
    tolerance = _find_tolerance(sample, config)
    return _Metric(key, direction, target, curves, common, (one, two), sample, evidence, tolerance)


def _find_tolerance(sample: Sample, config: ComparisonEngineConfig) -> float:
    if sample.key in config.tolerances:
        return config.tolerances[sample.key]
    ends = np.concatenate(sample.ends)
    ends = ends[~np.isnan(ends)]
    if is_rate_name(sample.key) and bool(((ends >= 0.0) & (ends <= 1.0)).all()):
        return config.rate_tolerance
    reference = sample.ends[1][~np.isnan(sample.ends[1])]
    return config.relative_tolerance * abs(_take_mean(reference) or 0.0)


def _make_diff(
    metric: _Metric, adjusted: float | None, headline: bool, config: ComparisonEngineConfig
) -> MetricDiff:
    sample, evidence, summaries = metric.sample, metric.evidence, metric.summaries
    level = 1.0 - config.error_rate
    verdict = conclude(evidence, adjusted, metric.tolerance, config)
    interval: tuple[float | None, float | None] = (None, None)
    if evidence.end is not None:
        low, high = evidence.end.interval(level)
        interval = (keep_finite(low), keep_finite(high))
    shown = {name: _compare_statistic(summaries, name) for name in _STATISTICS}
    shown["last"] = msgspec.structs.replace(shown["last"], p_value=evidence.p_value)
    if sample is not None and sample.has_diverged:
        # What is left of a side without the runs that failed is no figure of that side.
        shown["last"] = msgspec.structs.replace(
            shown["last"], difference=None, relative_difference=None
        )
    target = None
    if metric.target is not None:
        target = compare_targets(
            *metric.curves, metric.target, config.persistence, config.error_rate
        )
    noises = [
        _take_mean(np.array([f.noise for f in side if f.noise is not None])) for side in summaries
    ]
    common = metric.common
    units = {curve.unit for side in metric.curves for curve in side}
    presence = "both" if all(metric.curves) else (
        "primary_only" if metric.curves[0] else "reference_only"
    )  # fmt: skip
    return MetricDiff(
        metric_key=metric.key,
        presence=presence,
        direction=metric.direction,
        headline=headline,
        unit=common.unit if common else min(units, default="step"),
        common_start=common.start if common else None,
        common_end=common.end if common else None,
        tail_start=min((f.tail_start for f in _chain(summaries) if f.tail_start is not None),
                       default=None),
        last=shown["last"],
        best=None if metric.direction == "none" else shown["best"],
        tail_median=shown["tail_median"],
        area=shown["area"] if (shown["area"].primary, shown["area"].reference) != (None, None)
        else None,
        time_to_target=target,
        primary_noise=noises[0],
        reference_noise=noises[1],
        primary_run_count=len(summaries[0]),
        reference_run_count=len(summaries[1]),
        primary_non_finite_count=sum(item.non_finite for item in summaries[0]),
        reference_non_finite_count=sum(item.non_finite for item in summaries[1]),
        verdict=verdict.name,
        reason=verdict.reason,
        method=evidence.method,
        p_value=evidence.p_value,
        adjusted_p_value=adjusted,
        permutation_p_value=evidence.permutation_p_value,
        interval_low=interval[0],
        interval_high=interval[1],
        interval_level=level if evidence.end is not None else None,
        tolerance=metric.tolerance if sample is not None and metric.direction != "none" else None,
        at_last_common_step=shown["at_common_end"]
        if common and any(item.end > common.end for item in _chain(summaries)) else None,
        **_describe_groups(sample, level),
    )  # fmt: skip


def _align_curves(
    key: str, sides: tuple[Sequence[RunData], Sequence[RunData]]
) -> tuple[list[Curve], list[Curve]]:
    """The metric's curves of either side, over steps wherever some are over steps."""
    curves = [[run.metrics[key] for run in side if key in run.metrics] for side in sides]
    if len({curve.unit for side in curves for curve in side}) > 1:
        curves = [
            [run.place_on_steps(run.metrics[key]) for run in side if key in run.metrics]
            for side in sides
        ]
    one, two = ([curve for curve in side if len(curve)] for side in curves)
    return one, two


def _make_sample(
    key: str,
    direction: MetricDirection,
    curves: tuple[list[Curve], list[Curve]],
    summaries: tuple[list[CurveSummary], list[CurveSummary]],
    paired: bool,
    same_runs: bool,
) -> Sample:
    """What the test of one metric looks at; both sides have summaries."""
    ends = _collect_statistic(summaries, "last")
    one, two = (all(_are_equal(side[0], curve) for curve in side[1:]) for side in curves)
    return Sample(
        key,
        {"higher": 1, "lower": -1, "none": 0}[direction],
        ends,
        (one, two),
        earlier=_collect_statistic(summaries, "at_common_end") if _may_be_cut(curves) else None,
        resolution=_find_step(curves) if any(len(set(side)) < len(side) for side in ends) else 0.0,
        paired=paired,
        same_runs=same_runs,
        identical=one and two and _are_equal(curves[0][0], curves[1][0]),
    )


def _may_be_cut(curves: tuple[list[Curve], list[Curve]]) -> bool:
    """Whether the side that ends first may have gone on, and only logged its end no more.

    So it is where it logs at regular steps and the other side's last point comes before its
    next one would have. A last point beside these steps was logged because it was the last.
    """
    first, second = (max(side, key=lambda curve: int(curve.step[-1])).merged for side in curves)
    if len(first) == 0 or len(second) == 0:
        return False
    apart = int(second.step[-1]) - int(first.step[-1])
    gaps = np.diff((first if apart > 0 else second).step[-3:])
    return bool(len(gaps) == 2 and gaps[0] == gaps[1] and 0 < abs(apart) < gaps[0])


def _chain(summaries: tuple[list[CurveSummary], list[CurveSummary]]) -> list[CurveSummary]:
    return [*summaries[0], *summaries[1]]


def _collect_statistic(
    summaries: tuple[list[CurveSummary], list[CurveSummary]], name: str
) -> tuple[Floats, Floats]:
    """One statistic of all runs of either side, NaN where a run has none."""
    one, two = (
        np.array([math.nan if (v := getattr(item, name)) is None else v for item in side])
        for side in summaries
    )
    return one, two


def _are_equal(one: Curve, two: Curve) -> bool:
    return bool(
        len(one) == len(two)
        and np.array_equal(one.step, two.step)
        and np.array_equal(one.value, two.value, equal_nan=True)
    )


def _find_step(curves: tuple[list[Curve], list[Curve]]) -> float:
    """The least step between two values of the metric, as of a share of so many samples."""
    ends = [curve.finite.value[-_RESOLVED_POINTS:] for side in curves for curve in side]
    return find_resolution(np.concatenate(ends))


def _describe_groups(sample: Sample | None, level: float) -> dict[str, float | None]:
    """Effect size, probability of improvement and interquartile means, as far as the runs allow."""
    if sample is None or sample.has_diverged:
        return {}
    one, two = sample.ends
    out: dict[str, float | None] = {"effect_size": keep_finite(estimate_effect(one, two))}
    if min(len(one), len(two)) >= 2 and sample.sign:
        out["probability_of_improvement"] = probability_of_improvement(one, two, sample.sign)
    if min(len(one), len(two)) >= _IQM_RUNS:
        low, high = bootstrap_iqm(one, two, level)
        out |= {
            "primary_iqm": keep_finite(take_iqm(one)),
            "reference_iqm": keep_finite(take_iqm(two)),
            "iqm_interval_low": keep_finite(low),
            "iqm_interval_high": keep_finite(high),
        }
    return out


def _compare_statistic(
    summaries: tuple[list[CurveSummary], list[CurveSummary]], name: str
) -> FigureDiff:
    """One figure on both sides; None for what neither side or only one has."""
    one, two = (side[np.isfinite(side)] for side in _collect_statistic(summaries, name))
    primary, reference = _take_mean(one), _take_mean(two)
    difference, relative, p_value = None, None, None
    if primary is not None and reference is not None:
        difference = keep_finite(primary - reference)
        if difference is not None and reference:
            relative = keep_finite(difference / abs(reference))
        test = compare_means(one, two)
        p_value = None if test is None else test.p_value
    deviations = [
        keep_finite(float(side.std(ddof=1))) if len(side) > 1 else None for side in (one, two)
    ]
    return FigureDiff(
        primary, reference, difference, relative, deviations[0], deviations[1], p_value
    )


def _take_mean(values: Floats) -> float | None:
    """The mean, or None of no values."""
    # Divided first, since the sum of huge values overflows where their mean does not.
    return keep_finite(float((values / len(values)).sum())) if len(values) else None
