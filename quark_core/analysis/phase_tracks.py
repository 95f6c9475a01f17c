"""Curves reduced to a few blocks on a scale on which training looks the same everywhere.

A block is a number of points, a power of two, so that a run which grows keeps
its blocks until there are too many and pairs of them become one. Of each block
the median counts. A loss that is positive is put on the scale log(loss + c),
where c is a twentieth of its level at the start: falls count by their ratio as
long as they are visible, and not any more when nearly all is gone. A loss that
goes below 0 is put on asinh((loss - start) / fall), which is plain where the
run learns and logarithmic where it explodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.curves import Curve, median_filter

__all__ = ["Track", "reduce_curve", "trim_outliers"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_BLOCKS = 200
_NORMAL = 1.4826 / np.sqrt(6.0)  # of second differences
_FLOOR = 0.05
_START_BLOCKS = 8
_NEGATIVE_SHARE = 0.005
_OUTLIER = 4.0
_LARGEST = 1e150  # squares of larger values are no numbers any more


@dataclass(frozen=True)
class Track:
    """A curve reduced to at most 200 blocks; lower is better.

    Attributes:
        key: The metric.
        step: First step of each block, ascending.
        middle: Median step of each block.
        level: Median value of each block, in the metric's own unit, or 1 less
            an accuracy.
        height: The same on the scale of this module.
        noise: Deviation of each block's height from the trend.
        points: Points of each block.
        last_step: The last finite point's step.
        is_accuracy: Whether `level` is 1 less an accuracy.
        is_signed: Whether the loss goes below 0.
    """

    key: str
    step: Integers
    middle: Floats
    level: Floats
    height: Floats
    noise: Floats
    points: Integers
    last_step: int
    is_accuracy: bool
    is_signed: bool

    def __len__(self) -> int:
        return len(self.step)

    @property
    def point_noise(self) -> float:
        """Deviation of a single point's height; a median over blocks is quieter."""
        size = float(np.median(self.points)) if len(self) else 1.0
        # The median of n points deviates by sqrt(pi / 2n) of what they do.
        inflation = np.sqrt(2.0 * size / np.pi) if size >= 3 else 1.0
        return float(np.median(self.noise) * inflation) if len(self) else 0.0

    def read(self, low: int, high: int) -> float:
        """Median level of blocks low, ..., high - 1 in the metric's own unit."""
        value = float(np.median(self.level[low:high]))
        return 1.0 - value if self.is_accuracy else value


def reduce_curve(curve: Curve | None, *, is_accuracy: bool = False) -> Track | None:
    """Reduce a curve; None where it has no finite point."""
    if curve is None:
        return None
    points = curve.merged.finite
    count = len(points)
    if not count:
        return None
    values = np.clip(points.value, -_LARGEST, _LARGEST)
    if is_accuracy:
        scale = 100.0 if float(np.median(values)) > 1.5 else 1.0
        values = 1.0 - values / scale
    size = 1
    while count > MOST_BLOCKS * size:
        size *= 2
    whole = count // size
    if size == 1:
        middle, level = points.step.astype(np.float64), values
    else:
        shape = (whole, size)
        middle = np.median(points.step[: whole * size].reshape(shape), axis=1)
        level = np.median(values[: whole * size].reshape(shape), axis=1)
        if count - whole * size >= size / 2:
            rest = slice(whole * size, count)
            middle = np.append(middle, np.median(points.step[rest]))
            level = np.append(level, np.median(values[rest]))
    sizes = np.full(len(level), size)
    sizes[-1] = count - size * (len(level) - 1)
    is_signed = float((values < 0).mean()) > _NEGATIVE_SHARE and not is_accuracy
    height = _lift_signed(level) if is_signed else _lift_positive(level)
    return Track(
        curve.key, points.step[: len(level) * size : size], middle, level, height,
        _measure_noise(height), sizes, int(points.step[-1]), is_accuracy, is_signed,
    )  # fmt: skip


def trim_outliers(track: Track) -> Floats:
    """Heights with single blocks that stand far out put back among their neighbours."""
    height = track.height
    if len(height) < 5:
        return height
    near = median_filter(height, 5)
    return np.where(np.abs(height - near) > _OUTLIER * track.noise, near, height)


def _lift_positive(level: Floats) -> Floats:
    start = float(np.median(level[:_START_BLOCKS]))
    if start <= 0:
        start = float(np.max(level))
    if start <= 0:
        return np.zeros(len(level))
    return np.log(np.maximum(level, 0.0) / start + _FLOOR)


def _lift_signed(level: Floats) -> Floats:
    start = float(np.median(level[:_START_BLOCKS]))
    calm = median_filter(level, 5)
    scale = start - float(np.min(calm))
    differences = np.abs(np.diff(level))
    noise = float(np.median(differences)) if len(differences) else 0.0
    scale = max(scale, 3.0 * noise, 1e-9 * float(np.max(np.abs(level))))
    return np.arcsinh((level - start) / scale) if scale > 0 else np.zeros(len(level))


def _measure_noise(height: Floats) -> Floats:
    """Deviation of each block from the trend: of its surroundings, and never next to nothing."""
    count = len(height)
    span = float(np.ptp(height)) if count else 0.0
    fall = float(height[0] - height.min()) if count else 0.0
    floor = max(0.003 * fall, 1e-4 * span, 1e-9)
    if count < 5:
        return np.full(count, floor)
    second = np.abs(np.diff(height, n=2)) * _NORMAL
    usual = float(np.median(second))
    local = median_filter(np.concatenate([second[:1], second, second[-1:]]), 25)
    inflation = 1.0
    if count >= 20 and usual > floor:
        # Noise that wanders has larger differences over a distance.
        wide = np.abs(height[:-6] - 2.0 * height[3:-3] + height[6:]) * _NORMAL
        inflation = float(np.clip(np.median(wide) / usual, 1.0, 3.0))
    return np.maximum(inflation * np.maximum(local, 0.3 * usual), floor)
