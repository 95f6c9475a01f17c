"""What runs end with, where they are not of one length: each by the end of its own curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from quark_core.analysis.comparison.results import MetricDiff
from quark_core.analysis.comparison.statistics import compare_means
from quark_core.analysis.curves import Curve
from quark_core.analysis.explanation.sides import ExplainedRun

__all__ = ["compare_own_ends", "find_end", "find_lengths"]

Floats = NDArray[np.float64]

_ALIKE = 0.95
"""Share of the longer one that a shorter one must have to be of the same length."""

_TAIL = 0.25
_LEAST_POINTS = 5


def find_lengths(
    before: Sequence[ExplainedRun], after: Sequence[ExplainedRun], metric: MetricDiff
) -> tuple[int, int] | None:
    """The last steps of the two sides where they are not of one length, else None.

    Only of runs that completed: one that goes on, or broke off, has no end of its own.
    """
    if metric.method == "divergence":
        return None
    curves = [_take_curves(side, metric.metric_key) for side in (before, after)]
    if not all(curves) or any(run.stored.state != "completed" for run in (*before, *after)):
        return None
    last = [min(int(curve.step[-1]) for curve in side) for side in curves]
    if min(last) >= _ALIKE * max(last):
        return None
    return last[0], last[1]


def compare_own_ends(
    metric: MetricDiff, before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]
) -> MetricDiff:
    """The metric with the ends of the runs' own curves in place of those of the common range."""
    first, second = (
        np.array(
            [
                end
                for curve in _take_curves(side, metric.metric_key)
                if (end := find_end(curve.step, curve.value)) is not None
            ]
        )
        for side in (before, after)
    )
    if not len(first) or not len(second):
        return metric
    test = compare_means(second, first)
    one, two = float(first.mean()), float(second.mean())
    tail = replace(
        metric.tail_median,
        primary=two,
        reference=one,
        difference=two - one,
        relative_difference=(two - one) / abs(one) if one else None,
        primary_deviation=_deviate(second),
        reference_deviation=_deviate(first),
    )
    return replace(
        metric,
        tail_median=tail,
        verdict="inconclusive",
        method="single_seed" if test is None else test.method,
        reason="the runs are of different lengths, and each is taken by its own end",
        p_value=None if test is None else test.p_value,
        adjusted_p_value=None,
        interval_low=None,
        interval_high=None,
    )


def find_end(places: NDArray[np.int64], values: Floats) -> float | None:
    """The median of the last quarter of a curve, five points at least; None without any."""
    finite = np.isfinite(values)
    places, values = places[finite], values[finite]
    if not len(values):
        return None
    start = int(places[-1]) - math.floor(_TAIL * (int(places[-1]) - int(places[0])))
    count = max(int((places >= start).sum()), min(_LEAST_POINTS, (len(values) + 1) // 2))
    return float(np.median(values[-count:]))


def _take_curves(side: Sequence[ExplainedRun], key: str) -> list[Curve]:
    found = [run.data.metrics.get(key) for run in side]
    return [curve for curve in found if curve is not None and len(curve)]


def _deviate(values: Floats) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None
