"""A summary of each run's curve: its own end, and its level within what all curves cover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.statistics import estimate_median_error
from quark.analysis.curves import Curve
from quark_core.config.objective import MetricDirection

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
        best = _known(good.value.max() if direction == "higher" else good.value.min())
    inside = None if common is None else good.between(common.start, common.end)
    return CurveSummary(
        end=end,
        last=None if diverged else _known(good.value[-1]),
        best=best,
        tail_median=_known(_take_median(tail)),
        tail_start=tail_start,
        noise=estimate_median_error(tail),
        at_common_end=_known(inside.value[-1]) if inside is not None and len(inside) else None,
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
