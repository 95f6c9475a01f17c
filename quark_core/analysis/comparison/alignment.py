"""Curves of several runs laid over each other, and a summary of each within what all cover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.comparison.config import MetricDirection
from quark_core.analysis.comparison.statistics import estimate_median_error
from quark_core.analysis.curves import Curve

__all__ = ["CommonRange", "CurveSummary", "find_range", "summarize_curve"]

Floats = NDArray[np.float64]

_LARGE = 1e140


@dataclass(frozen=True, slots=True)
class CommonRange:
    """The steps that all curves cover, both ends included.

    Attributes:
        unit: step or epoch.
        start, end: The range.
        tail_start: Where its last part begins, the same for all curves.
    """

    unit: str
    start: int
    end: int
    tail_start: int


@dataclass(frozen=True, slots=True)
class CurveSummary:
    """One curve within a range; None for what it has no finite points for.

    Attributes:
        last: Last value.
        best: Best value; None where no direction is known.
        tail_median: Median of the last part.
        area: Area under the curve over the width of the range.
        noise: Standard error of `tail_median` within the run.
        points: Finite points in the range.
        non_finite: Points in the range that are not.
        diverged: Whether most points of the last part are not finite.
    """

    last: float | None
    best: float | None
    tail_median: float | None
    area: float | None
    noise: float | None
    points: int
    non_finite: int
    diverged: bool


def find_range(
    curves: Sequence[Curve], tail_fraction: float, tail_points: int
) -> CommonRange | None:
    """What all curves cover; None where that is nothing, or where their units differ.

    The last part is the same stretch of steps for all of them: `tail_fraction`
    of the range, or as much more as the sparsest curve needs for
    `tail_points` points, at most half of its points.
    """
    if not curves or any(len(curve) == 0 for curve in curves):
        return None
    units = {curve.unit for curve in curves}
    start = max(int(curve.step[0]) for curve in curves)
    end = min(int(curve.step[-1]) for curve in curves)
    if len(units) > 1 or start > end:
        return None
    tail_start = end - math.floor(tail_fraction * (end - start))
    for curve in curves:
        inside = curve.between(start, end).merged
        if len(inside):
            wanted = min(tail_points, (len(inside) + 1) // 2)
            tail_start = min(tail_start, int(inside.step[-wanted]))
    return CommonRange(units.pop(), start, end, tail_start)


def summarize_curve(curve: Curve, common: CommonRange, direction: MetricDirection) -> CurveSummary:
    """The summary of one curve; several points of one step count as their mean."""
    inside = curve.between(common.start, common.end)
    tail = inside.between(common.tail_start, None)
    good = inside.merged
    values = good.value
    finite = int(np.isfinite(inside.value).sum())
    diverged = bool(len(tail)) and int(np.isfinite(tail.value).sum()) * 2 < len(tail)
    if not len(values):
        return CurveSummary(None, None, None, None, None, 0, len(inside) - finite, diverged)
    end = good.between(common.tail_start, None).value
    best = None
    if direction != "none":
        best = _known(values.max() if direction == "higher" else values.min())
    return CurveSummary(
        last=_known(values[-1]),
        best=best,
        tail_median=_known(_take_median(end)) if len(end) else None,
        area=_average_area(good, common),
        noise=estimate_median_error(end),
        points=finite,
        non_finite=len(inside) - finite,
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
    return _known((float(inner.sum()) / 2.0 + float(outside)) / width * scale)


def _take_median(values: Iterable[float]) -> float:
    array = np.asarray(values, dtype=np.float64)
    middle = len(array) // 2
    if len(array) % 2:
        return float(np.partition(array, middle)[middle])
    low, high = np.partition(array, (middle - 1, middle))[middle - 1 : middle + 1]
    return float(low / 2.0 + high / 2.0)


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
