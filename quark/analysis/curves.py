"""Curves over steps, and the robust statistics that analyzers put to them.

Every estimate here is scale-free or keeps the unit of its curve, takes
medians in place of means, and has no random part.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_TREND_POINTS = 400
_MANY = 20_000
_EARLY_POINTS, _EARLY_PART = 5, 4
_ROUNDING = 1e-6  # of the largest value: what differs by less is the same

SMALLEST = 1e-300
"""In place of 0 under a fraction: what is divided by it is beyond every threshold."""


@dataclass(frozen=True)
class Curve:
    """Values over steps, ascending.

    Attributes:
        key: What it is of, such as a metric's key.
        step: Steps; epochs where `unit` says so. Several points may share one.
        value: Values, which may be NaN or infinite.
        epoch: Epochs, -1 where there is none.
        unit: `step` or `epoch`.
    """

    key: str
    step: Integers
    value: Floats
    epoch: Integers
    unit: str = "step"

    def __len__(self) -> int:
        return len(self.value)

    @cached_property
    def finite(self) -> Curve:
        """Only the points whose value is finite."""
        kept = np.isfinite(self.value)
        return self if bool(kept.all()) else self.take(kept)

    @cached_property
    def merged(self) -> Curve:
        """Finite points with one value a step: the mean of its points."""
        curve = self.finite
        if len(curve) < 2 or bool((np.diff(curve.step) > 0).all()):
            return curve
        steps, first, group = np.unique(curve.step, return_index=True, return_inverse=True)
        counts = np.bincount(group)
        means = np.bincount(group, weights=curve.value, minlength=len(steps)) / counts
        if not np.isfinite(means).all():
            # The sum of the largest numbers is none any more, though their mean is.
            shares = curve.value / counts[group]
            means = np.asarray(np.bincount(group, weights=shares), dtype=np.float64)
        return Curve(curve.key, steps, means, curve.epoch[first], self.unit)

    def find_best(self, *, rises: bool = False) -> tuple[float, int]:
        """The best finite value that was logged, and its first step: what texts call the best.

        Levels of smoothed curves are what rules judge by. Every one has a lowest level of its
        own, so none of them is told.

        Args:
            rises: Whether the highest is the best.
        """
        curve = self.finite
        at = int(np.argmax(curve.value) if rises else np.argmin(curve.value))
        return float(curve.value[at]), int(curve.step[at])

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Curve:
        """Only these points."""
        return Curve(self.key, self.step[rows], self.value[rows], self.epoch[rows], self.unit)

    def thin(self, most: int) -> Curve:
        """At most so many points: medians of equally many neighbours, at their first step."""
        size = -(-len(self) // most)
        if size <= 1:
            return self
        whole = len(self) // size * size
        value = np.median(self.value[:whole].reshape(-1, size), axis=1)
        step, epoch = self.step[:whole:size], self.epoch[:whole:size]
        if whole < len(self):
            value = np.append(value, np.median(self.value[whole:]))
            step, epoch = np.append(step, self.step[whole]), np.append(epoch, self.epoch[whole])
        return Curve(self.key, step, value, epoch, self.unit)

    def between(self, first: int | None, last: int | None) -> Curve:
        """Points from one step to another, both included; None is no bound."""
        low = 0 if first is None else int(np.searchsorted(self.step, first, "left"))
        high = len(self) if last is None else int(np.searchsorted(self.step, last, "right"))
        return self.take(slice(low, high))


def spread(values: Floats) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    if len(values) == 0:
        return 0.0
    return float(_NORMAL * np.median(np.abs(values - np.median(values))))


def estimate_noise(values: Floats) -> float:
    """Standard deviation of what is not trend, from second differences.

    The second differences of a straight line are 0, and those of white noise
    have the deviation sqrt(6) times its own (Gasser, Sroka, Jennen-Steinmetz
    1986); their median absolute value does not see single outliers.
    """
    if len(values) < 4:
        return 0.0
    second = np.diff(values, n=2)
    return float(_NORMAL * np.median(np.abs(second)) / np.sqrt(6.0))


def find_resolution(values: Floats) -> float:
    """The smallest step between two of these values, as of a share of n samples; 0 of one value."""
    steps = np.diff(np.unique(values))
    scale = float(np.abs(values).max(initial=0.0))
    steps = steps[steps > _ROUNDING * scale]
    return float(steps.min()) if len(steps) else 0.0


def take_early(values: Floats) -> Floats:
    """The first values, a history's early level: a quarter of them, five at most, at least one."""
    return values[: max(1, min(_EARLY_POINTS, len(values) // _EARLY_PART))]


def smooth(values: Floats, window: int) -> Floats:
    """Centred running median, then a running mean of the same width; the ends are shorter."""
    if window < 3 or len(values) < 3:
        return values.astype(np.float64, copy=True)
    return _running_mean(median_filter(values, window), window)


def median_filter(values: Floats, window: int) -> Floats:
    """Centred running median; at the ends over what there is."""
    half = min(window // 2, (len(values) - 1) // 2)
    if half < 1:
        return values.astype(np.float64, copy=True)
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(len(values))
    inner = slice(half, len(values) - half)
    out[inner] = np.median(windows[inner], axis=1)
    for index in (*range(half), *range(len(values) - half, len(values))):
        out[index] = np.median(values[max(0, index - half) : index + half + 1])
    return out


def trailing_median(values: Floats, window: int) -> Floats:
    """Median of the `window` values before each one; NaN for the first, fewer at the start.

    Of more than 20,000 values it is that of the whole block before each value's own.
    """
    count = len(values)
    if count > _MANY:
        whole = count // window * window
        medians = np.median(values[:whole].reshape(-1, window), axis=1)
        out = np.repeat(np.concatenate([medians[:1], medians]), window)[:count]
        out[0] = np.nan
        return out
    out = np.full(count, np.nan)
    out[1:window] = _growing_medians(values[: window - 1])[: max(0, count - 1)]
    if count > window:
        windows = np.lib.stride_tricks.sliding_window_view(values, window)
        out[window:] = np.median(windows[:-1], axis=1)
    return out


def local_spread(values: Floats, window: int) -> Floats:
    """Robust deviation of the whole block of `window` values before each value's own block.

    Values of the first block have its own.
    """
    count = len(values)
    if count < 2 * window:
        return np.full(count, spread(values))
    whole = count // window * window
    blocks = values[:whole].reshape(-1, window)
    middle = np.median(blocks, axis=1, keepdims=True)
    scales = _NORMAL * np.median(np.abs(blocks - middle), axis=1)
    before = np.concatenate([scales[:1], scales])
    return np.repeat(before, window)[:count]


def fit_slope(steps: NDArray[np.generic], values: Floats) -> float:
    """Slope by Theil and Sen: the median slope over pairs of points, at most 400 of them."""
    x = np.asarray(steps, dtype=np.float64)
    if len(x) < 2:
        return 0.0
    if len(x) > _TREND_POINTS:
        chosen = np.linspace(0, len(x) - 1, _TREND_POINTS).astype(np.int64)
        x, values = x[chosen], values[chosen]
    rows, columns = np.triu_indices(len(x), 1)
    run = x[columns] - x[rows]
    kept = run > 0
    if not kept.any():
        return 0.0
    return float(np.median((values[columns] - values[rows])[kept] / run[kept]))


def _growing_medians(values: Floats) -> list[float]:
    """Median of the first value, of the first two, and so on."""
    out: list[float] = []
    known: list[float] = []
    for value in values.tolist():
        if value != value or (out and out[-1] != out[-1]):
            out.append(np.nan)
            continue
        insort(known, value)
        half = len(known) // 2
        middle = known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
        out.append(middle)
    return out


def _running_mean(values: Floats, window: int) -> Floats:
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - half, 0)
    high = np.minimum(index + half + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))
