"""Metric by metric: summaries over the common range, tests over the runs, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.comparison.alignment import (
    CommonRange,
    CurveSummary,
    find_range,
    summarize_curve,
)
from quark_core.analysis.comparison.config import (
    ComparisonEngineConfig,
    MetricDirection,
    MetricTargetSpec,
)
from quark_core.analysis.comparison.directions import infer_direction, is_rate_name
from quark_core.analysis.comparison.results import FigureDiff, MetricDiff
from quark_core.analysis.comparison.statistics import (
    adjust_by_holm,
    bootstrap_iqm,
    compare_means,
    estimate_effect,
    probability_of_improvement,
    take_iqm,
)
from quark_core.analysis.comparison.targets import compare_targets
from quark_core.analysis.comparison.verdicts import Evidence, Sample, Verdict, conclude, weigh
from quark_core.analysis.curves import Curve
from quark_core.analysis.metric_roles import (
    find_train_accuracy,
    find_train_loss,
    find_validation_accuracy,
    find_validation_loss,
)
from quark_core.analysis.run_data import RunData
from quark_core.config.objective import Objective, read_objective
from quark_core.records.names import encode_name
from quark_core.runs.reading import encode_key

__all__ = [
    "Pairing",
    "compare_metrics",
]

Floats = NDArray[np.float64]

_STATISTICS = ("last", "best", "tail_median", "area")

_SCALE_POINTS = 4096
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
    tested = [metric for metric in metrics if _is_tested(metric)]
    raw = [metric.evidence.p_value or 0.0 for metric in tested]
    weights = _weigh_family([metric.key for metric in tested], headline, config.headline_share)
    adjusted = {
        metric.key: p
        for metric, p in zip(tested, adjust_by_holm(raw, weights) if raw else (), strict=True)
    }
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
    if objective is not None and objective.metric == key and objective.mode is not None:
        return "higher" if objective.mode == "max" else "lower"
    return infer_direction(key)


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
    for find in (
        find_validation_loss,
        find_validation_accuracy,
        find_train_loss,
        find_train_accuracy,
    ):
        found = find(common)
        if found is not None:
            return found.key
    return None


def _weigh_family(keys: Sequence[str], headline: str | None, share: float) -> list[float]:
    """The headline gets its share of the error rate, the others the rest in equal parts."""
    others = len(keys) - (headline in keys)
    if others == 0 or headline not in keys:
        return [1.0] * len(keys)
    return [share if key == headline else (1.0 - share) / others for key in keys]


def _is_tested(metric: _Metric) -> bool:
    return metric.evidence.early is None and metric.evidence.p_value is not None


def _weigh_metric(
    key: str,
    sides: tuple[Sequence[RunData], Sequence[RunData]],
    direction: MetricDirection,
    target: MetricTargetSpec | None,
    pairing: Pairing,
    config: ComparisonEngineConfig,
) -> _Metric:
    curves = _lay_over(key, sides)
    present = [[curve for curve in side if len(curve)] for side in curves]
    both = all(present)
    common = find_range([*present[0], *present[1]], config.tail_fraction, config.tail_points)
    empty: tuple[list[CurveSummary], list[CurveSummary]] = ([], [])
    if common is None:
        early = Verdict("inconclusive" if both else None, _explain_no_range(curves, both))
        evidence = Evidence("none", early=early)
        return _Metric(key, direction, target, curves, None, empty, None, evidence, 0.0)
    measured = [[summarize_curve(curve, common, direction) for curve in side] for side in curves]
    order = pairing.order
    if order is not None and len(order) == len(measured[1]) == len(measured[0]):
        measured[1] = [measured[1][index] for index in order]
    summaries = (_drop_empty(measured[0]), _drop_empty(measured[1]))
    if not both or not all(summaries):
        why = _explain_no_range(curves, both) if not both else (
            "one side has no points within the common range"
        )  # fmt: skip
        evidence = Evidence("none", early=Verdict("inconclusive" if both else None, why))
        return _Metric(key, direction, target, curves, common, summaries, None, evidence, 0.0)
    is_paired = order is not None and len(summaries[0]) == len(summaries[1]) == len(order)
    sample = _make_sample(key, direction, curves, summaries, common, is_paired, pairing.same_runs)
    tolerance = _find_tolerance(sample, config)
    evidence = weigh(sample, config)
    return _Metric(key, direction, target, curves, common, summaries, sample, evidence, tolerance)


def _explain_no_range(curves: tuple[list[Curve], list[Curve]], both: bool) -> str:
    if not both:
        return f"only the {'primary' if curves[0] else 'reference'} has this metric"
    units = {curve.unit for side in curves for curve in side}
    if len(units) > 1:
        return "one side is logged over steps and the other over epochs only"
    (unit,) = units
    spans = []
    for side in curves:
        first = max(int(curve.step[0]) for curve in side)
        last = min(int(curve.step[-1]) for curve in side)
        spans.append(f"{first} to {last}")
    return f"no common {unit}s: the primary has {spans[0]}, the reference {spans[1]}"


def _find_tolerance(sample: Sample, config: ComparisonEngineConfig) -> float:
    if sample.key in config.tolerances:
        return config.tolerances[sample.key]
    if sample.is_rate:
        return config.rate_tolerance
    return config.relative_tolerance * abs(_take_mean(sample.statistics["tail_median"][1]) or 0.0)


def _make_diff(
    metric: _Metric, adjusted: float | None, headline: bool, config: ComparisonEngineConfig
) -> MetricDiff:
    sample, evidence, summaries = metric.sample, metric.evidence, metric.summaries
    level = 1.0 - config.error_rate
    verdict = conclude(evidence, adjusted, metric.tolerance, config)
    interval: tuple[float | None, float | None] = (None, None)
    if evidence.end is not None:
        low, high = evidence.end.interval(level)
        interval = (_take_known(low), _take_known(high))
    shown = {name: _compare_statistic(summaries, name, sample) for name in _STATISTICS}
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
        tail_start=common.tail_start if common else None,
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
        **_describe_groups(sample, level),
    )  # fmt: skip


def _lay_over(
    key: str, sides: tuple[Sequence[RunData], Sequence[RunData]]
) -> tuple[list[Curve], list[Curve]]:
    """The metric's curves of either side, over steps wherever some are over steps."""
    curves = [[run.metrics[key] for run in side if key in run.metrics] for side in sides]
    if len({curve.unit for side in curves for curve in side}) > 1:
        curves = [
            [run.place_on_steps(run.metrics[key]) for run in side if key in run.metrics]
            for side in sides
        ]
    return curves[0], curves[1]


def _drop_empty(summaries: Sequence[CurveSummary]) -> list[CurveSummary]:
    """Without the runs that have no points in the common range."""
    return [item for item in summaries if item.points or item.diverged]


def _make_sample(
    key: str,
    direction: MetricDirection,
    curves: tuple[list[Curve], list[Curve]],
    summaries: tuple[list[CurveSummary], list[CurveSummary]],
    common: CommonRange,
    paired: bool,
    same_runs: bool,
) -> Sample:
    """What the test of one metric looks at; both sides have summaries."""
    diverged = tuple(
        np.array([item.diverged or item.tail_median is None for item in side]) for side in summaries
    )
    values = {name: _collect_statistic(summaries, name) for name in ("best", "tail_median", "area")}
    alive = ~np.concatenate(diverged)
    known = {
        name: pair
        for name, pair in values.items()
        if name == "tail_median" or bool(np.isfinite(np.concatenate(pair)[alive]).all())
    }
    ends = np.concatenate(known["tail_median"])[alive]
    whole = np.concatenate(known.get("area", known["tail_median"]))[alive]
    inside = np.concatenate([ends, whole])
    single = len(summaries[0]) == len(summaries[1]) == 1
    positive = bool((inside > 0.0).all())
    return Sample(
        key,
        {"higher": 1, "lower": -1, "none": 0}[direction],
        known,
        (diverged[0], diverged[1]),
        noises=tuple(item.noise for side in summaries for item in side),
        scale=0.0 if not single or positive else _measure_scale(curves, common),
        is_rate=is_rate_name(key) and bool(((inside >= 0.0) & (inside <= 1.0)).all()),
        paired=paired,
        same_runs=same_runs,
        identical=single and _are_equal(curves[0][0], curves[1][0]),
    )


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


def _measure_scale(curves: tuple[list[Curve], list[Curve]], common: CommonRange) -> float:
    """Spread of the values of a typical curve: its interquartile range."""
    spreads = []
    for curve in (*curves[0], *curves[1]):
        values = curve.between(common.start, common.end).finite.value
        if len(values):
            low, high = np.quantile(values[:: len(values) // _SCALE_POINTS + 1], [0.25, 0.75])
            spreads.append(float(high) - float(low))
    return float(np.mean(spreads)) if spreads else 0.0


def _describe_groups(sample: Sample | None, level: float) -> dict[str, float | None]:
    """Effect size, probability of improvement and interquartile means, as far as the runs allow."""
    if sample is None or any(bool(side.any()) for side in sample.diverged):
        return {}
    one, two = sample.statistics["tail_median"]
    out: dict[str, float | None] = {"effect_size": _take_known(estimate_effect(one, two))}
    if min(len(one), len(two)) >= 2 and sample.sign:
        out["probability_of_improvement"] = probability_of_improvement(one, two, sample.sign)
    if min(len(one), len(two)) >= _IQM_RUNS:
        low, high = bootstrap_iqm(one, two, level)
        out |= {
            "primary_iqm": _take_known(take_iqm(one)),
            "reference_iqm": _take_known(take_iqm(two)),
            "iqm_interval_low": _take_known(low),
            "iqm_interval_high": _take_known(high),
        }
    return out


def _compare_statistic(
    summaries: tuple[list[CurveSummary], list[CurveSummary]], name: str, sample: Sample | None
) -> FigureDiff:
    """One figure on both sides; None for what neither side or only one has."""
    one, two = (side[np.isfinite(side)] for side in _collect_statistic(summaries, name))
    primary, reference = _take_mean(one), _take_mean(two)
    difference, relative, p_value = None, None, None
    if primary is not None and reference is not None:
        difference = _take_known(primary - reference)
        if difference is not None and reference:
            relative = _take_known(difference / abs(reference))
        paired = sample is not None and sample.paired and len(one) == len(two) == len(summaries[0])
        test = compare_means(one, two, paired=paired)
        p_value = None if test is None else test.p_value
    deviations = [
        _take_known(float(side.std(ddof=1))) if len(side) > 1 else None for side in (one, two)
    ]
    return FigureDiff(
        primary, reference, difference, relative, deviations[0], deviations[1], p_value
    )


def _take_mean(values: Floats) -> float | None:
    """The mean, or None of no values."""
    # Divided first, since the sum of huge values overflows where their mean does not.
    return _take_known(float((values / len(values)).sum())) if len(values) else None


def _take_known(value: float | None) -> float | None:
    """The value where it is finite, else None."""
    return None if value is None or not math.isfinite(value) else float(value)
