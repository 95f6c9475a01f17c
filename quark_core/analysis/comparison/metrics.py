"""Metric by metric: figures over the common range, tests over the runs, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quark_core.analysis.comparison.alignment import CommonRange, Figures, find_range, measure
from quark_core.analysis.comparison.config import (
    ComparisonEngineConfig,
    MetricDirection,
    MetricTargetSpec,
)
from quark_core.analysis.comparison.directions import infer_direction
from quark_core.analysis.comparison.figures import (
    describe_groups,
    make_figure,
    take_known,
    take_mean,
)
from quark_core.analysis.comparison.results import MetricDiff
from quark_core.analysis.comparison.samples import drop_empty, lay_over, make_sample
from quark_core.analysis.comparison.statistics import adjust_by_holm
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
from quark_core.run_reading import encode_key

__all__ = ["Pairing", "compare_metrics"]

_FIGURES = ("last", "best", "tail_median", "area")


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
    figures: tuple[list[Figures], list[Figures]]
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
    headline = _find_headline(primary, shared, targets, config)
    metrics = []
    for key in keys:
        target = targets.get(key)
        direction = config.directions.get(key) or _direct(key, target)
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


def _direct(key: str, target: MetricTargetSpec | None) -> MetricDirection:
    if target is not None:
        return "higher" if target.direction == "at_least" else "lower"
    return infer_direction(key)


def _find_headline(
    primary: Sequence[RunData],
    shared: Sequence[str],
    targets: Mapping[str, MetricTargetSpec],
    config: ComparisonEngineConfig,
) -> str | None:
    if config.headline_metric is not None:
        return encode_key(config.headline_metric, "headline_metric")
    for key in targets:
        if key in shared:
            return key
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
    curves = lay_over(key, sides)
    present = [[curve for curve in side if len(curve)] for side in curves]
    both = all(present)
    common = find_range([*present[0], *present[1]], config.tail_fraction, config.tail_points)
    empty: tuple[list[Figures], list[Figures]] = ([], [])
    if common is None:
        early = Verdict("inconclusive" if both else None, _explain_no_range(curves, both))
        evidence = Evidence("none", early=early)
        return _Metric(key, direction, target, curves, None, empty, None, evidence, 0.0)
    measured = [[measure(curve, common, direction) for curve in side] for side in curves]
    order = pairing.order
    if order is not None and len(order) == len(measured[1]) == len(measured[0]):
        measured[1] = [measured[1][index] for index in order]
    figures = (drop_empty(measured[0]), drop_empty(measured[1]))
    if not both or not all(figures):
        why = _explain_no_range(curves, both) if not both else (
            "one side has no points within the common range"
        )  # fmt: skip
        evidence = Evidence("none", early=Verdict("inconclusive" if both else None, why))
        return _Metric(key, direction, target, curves, common, figures, None, evidence, 0.0)
    is_paired = order is not None and len(figures[0]) == len(figures[1]) == len(order)
    sample = make_sample(key, direction, curves, figures, common, is_paired, pairing.same_runs)
    tolerance = _find_tolerance(sample, config)
    evidence = weigh(sample, config)
    return _Metric(key, direction, target, curves, common, figures, sample, evidence, tolerance)


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
    return config.relative_tolerance * abs(take_mean(sample.figures["tail_median"][1]) or 0.0)


def _make_diff(
    metric: _Metric, adjusted: float | None, headline: bool, config: ComparisonEngineConfig
) -> MetricDiff:
    sample, evidence, figures = metric.sample, metric.evidence, metric.figures
    level = 1.0 - config.error_rate
    verdict = conclude(evidence, adjusted, metric.tolerance, config)
    interval: tuple[float | None, float | None] = (None, None)
    if evidence.end is not None:
        low, high = evidence.end.interval(level)
        interval = (take_known(low), take_known(high))
    shown = {name: make_figure(figures, name, sample) for name in _FIGURES}
    target = None
    if metric.target is not None:
        target = compare_targets(
            *metric.curves, metric.target, config.persistence, config.error_rate
        )
    noises = [
        take_mean(np.array([f.noise for f in side if f.noise is not None])) for side in figures
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
        primary_run_count=len(figures[0]),
        reference_run_count=len(figures[1]),
        primary_non_finite_count=sum(item.non_finite for item in figures[0]),
        reference_non_finite_count=sum(item.non_finite for item in figures[1]),
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
        **describe_groups(sample, level),
    )  # fmt: skip
