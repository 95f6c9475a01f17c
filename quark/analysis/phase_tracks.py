"""Curves reduced to a few blocks on a scale on which training looks the same everywhere.

The first 64 points are blocks of their own; later ones hold a sixty-fourth of
the points before them, and their median counts. So a run that grows keeps all
its blocks but the last, and a million points are some 700 blocks.

A loss that is positive is put on the scale log(loss / start + 1/20): falls
count by their ratio as long as they are visible, and not any more when nearly
all is gone. A loss that goes below 0 is put on asinh((loss - start) / fall),
which is plain where the run learns and logarithmic where it explodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import Curve, median_filter

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_SINGLE = 64
_NORMAL = 1.4826 / np.sqrt(6.0)  # of second differences
_FLOOR = 0.05
_WIDEST_RATIO = 1e300
_START_BLOCKS = 8
_NEGATIVE_SHARE = 0.005
_OUTLIER = 4.0
_LARGEST = 1e150  # squares of larger values are no numbers any more


@dataclass(frozen=True)
class Track:
    """A curve reduced to blocks; lower is better.

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
        curve: What it was reduced from.
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
    curve: Curve

    def find_best(self) -> tuple[float, int]:
        """See `Curve.find_best`; of what was logged before the track ends."""
        return self.curve.between(None, self.last_step).find_best(rises=self.is_accuracy)

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def point_noise(self) -> Floats:
        """Deviation of a single point's height about each block; a median is quieter."""
        return np.asarray(self.noise * _inflate(self.points))

    def before(self, step: int | None) -> Track | None:
        """The blocks that begin before a step, all of them for None; None where there is none."""
        count = len(self) if step is None else int(np.searchsorted(self.step, step))
        if count == len(self):
            return self
        if not count:
            return None
        kept = {
            name: getattr(self, name)[:count]
            for name in ("step", "middle", "level", "height", "noise", "points")
        }
        return replace(self, last_step=int(self.step[count]) - 1, **kept)

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
    edges = _cut_blocks(count)
    middle, level = points.step.astype(np.float64), values
    if len(edges) <= count:
        middle, level = (_take_medians(array, edges) for array in (middle, level))
    sizes = np.diff(edges)
    is_signed = float((values < 0).mean()) > _NEGATIVE_SHARE and not is_accuracy
    height = _lift_signed(level) if is_signed else _lift_positive(level)
    return Track(
        curve.key, points.step[np.array(edges[:-1])], middle, level, height,
        _measure_noise(height, sizes), sizes, int(points.step[-1]), is_accuracy, is_signed,
        curve,
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
    # A start of next to nothing must leave the ratio a number.
    start = max(start, float(np.max(level)) / _WIDEST_RATIO)
    return np.log(np.maximum(level, 0.0) / start + _FLOOR)


def _lift_signed(level: Floats) -> Floats:
    start = float(np.median(level[:_START_BLOCKS]))
    calm = median_filter(level, 5)
    scale = start - float(np.min(calm))
    differences = np.abs(np.diff(level))
    noise = float(np.median(differences)) if len(differences) else 0.0
    scale = max(scale, 3.0 * noise, 1e-9 * float(np.max(np.abs(level))))
    return np.arcsinh((level - start) / scale) if scale > 0 else np.zeros(len(level))


def _inflate(sizes: Integers) -> Floats:
    """By how much one point deviates more than the median of so many."""
    return np.where(sizes >= 3, np.sqrt(2.0 * sizes / np.pi), 1.0)


def _measure_noise(height: Floats, sizes: Integers) -> Floats:
    """Deviation of each block from the trend: of its surroundings, and never next to nothing.

    What comes much later does not change it.
    """
    count = len(height)
    lowest = np.minimum.accumulate(height)
    span = np.maximum.accumulate(height) - lowest
    floor = np.maximum(np.maximum(0.003 * (height[0] - lowest), 1e-4 * span), 1e-6)
    if count < 5:
        return np.full(count, floor.max())
    # In terms of one point, so that blocks of many sizes can be put together.
    inflation = _inflate(sizes)
    second = np.abs(np.diff(height, n=2)) * _NORMAL * inflation[1:-1]
    local = median_filter(np.concatenate([second[:1], second, second[-1:]]), 25)
    usual = _median_so_far(second, count, 12)
    noise = np.maximum(local, 0.3 * usual)
    if count > _SINGLE:
        # Noise that wanders has larger differences over a distance; so has the bend of a
        # curve, but not where its points are many.
        wide = np.abs(height[:-6] - 2.0 * height[3:-3] + height[6:]) * _NORMAL * inflation[3:-3]
        ratio = _median_so_far(wide, count, 12) / np.maximum(usual, floor)
        ratio[: _SINGLE // 2] = 1.0
        noise = noise * np.clip(ratio, 1.0, 3.0)
    return np.asarray(np.maximum(noise / inflation, floor))


def _median_so_far(values: Floats, count: int, ahead: int) -> Floats:
    """Median of all values up to some blocks after each of the curve's blocks."""
    ends = np.minimum((np.arange(count) + ahead) // 8 * 8 + 8, len(values))
    medians = {end: float(np.median(values[:end])) for end in np.unique(ends).tolist()}
    return np.array([medians[end] for end in ends.tolist()])


def _take_medians(values: Floats, edges: list[int]) -> Floats:
    """Median of each block; those of one size that follow each other are taken at once."""
    sizes = np.diff(edges)
    changes = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    parts = []
    for low, high in pairwise(changes):
        block = values[edges[low] : edges[high]].reshape(high - low, int(sizes[low]))
        parts.append(block[:, 0] if block.shape[1] == 1 else np.median(block, axis=1))
    return np.concatenate(parts)


def _cut_blocks(count: int) -> list[int]:
    """First points of the blocks, and the number of points."""
    edges = list(range(min(count, _SINGLE) + 1))
    while edges[-1] < count:
        edges.append(min(edges[-1] + edges[-1] // _SINGLE, count))
    if len(edges) > 2 and edges[-1] - edges[-2] < edges[-2] // (2 * _SINGLE):
        del edges[-2]  # the rest is less than half a block
    return edges
