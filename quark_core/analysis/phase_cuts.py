"""Cuts a curve where its slope changes.

The heights of a track are fitted by straight lines, one a piece. Among all
ways to cut it the one is taken with the least sum of squared residuals, each
over its block's noise, plus a fixed price for each piece: an exact dynamic
program (Bellman 1961; Jackson et al. 2005), which goes forward through the
blocks. A cut that the best division of all blocks so far has had for some
blocks is settled: whatever comes later, it stays; and where none was made for
many blocks, none is made any more. So a run that grows keeps the pieces that it
had.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.phase_tracks import Track, trim_outliers

__all__ = ["Lines", "Piece", "cut_track"]

Floats = NDArray[np.float64]

_PRICE = 22.0
_SETTLED_BLOCKS = 12
_OPEN_BLOCKS = 40


@dataclass(frozen=True)
class Piece:
    """Blocks that lie about one straight line.

    Attributes:
        low, high: First block, and the one after the last.
        start, end: Height of the line at both ends.
        slope: Change of height over the whole time of the run.
        slope_error: Its standard error.
        mean: Mean height.
        mean_error: Its standard error.
    """

    low: int
    high: int
    start: float
    end: float
    slope: float
    slope_error: float
    mean: float
    mean_error: float

    @property
    def fall(self) -> float:
        """From its start to its end."""
        return self.start - self.end

    @property
    def certainty(self) -> float:
        """Slope over its standard error."""
        return self.slope / self.slope_error if self.slope_error > 0 else 0.0


class Lines:
    """Straight lines through any stretch of a track, from sums of every beginning.

    Attributes:
        x: Time of each block, 0 at the first one and 1 at the last.
    """

    def __init__(self, track: Track) -> None:
        span = float(track.middle[-1] - track.middle[0])
        self.x: Floats = (track.middle - track.middle[0]) / (span if span > 0 else 1.0)
        height = trim_outliers(track)
        self._shift = float(np.median(height))
        # No block counts so much more than another that their sums would lose it.
        noise = np.maximum(track.noise, 1e-4 * float(track.noise.max()))
        x, y, weight = self.x, height - self._shift, noise**-2.0
        columns = (weight, weight * x, weight * x * x, weight * y, weight * x * y, weight * y * y)
        self._sums = np.array([np.concatenate([[0.0], np.cumsum(column)]) for column in columns])

    def residuals(self, low: NDArray[np.int64], high: int) -> Floats:
        """Sum of squared residuals over noise of the stretches low, ..., high - 1."""
        w, _, _, syy, sxx, sxy = self._centre(low, high)
        explained = np.divide(sxy * sxy, sxx, out=np.zeros_like(sxx), where=sxx > 1e-12 * w)
        return np.maximum(syy - explained, 0.0)

    def fit(self, low: int, high: int) -> Piece:
        """The line through blocks low, ..., high - 1."""
        w, mx, my, _, sxx, sxy = (float(value[0]) for value in self._centre(np.array([low]), high))
        is_wide = sxx > 1e-12 * w
        slope = sxy / sxx if is_wide else 0.0
        middle = my + self._shift
        start = middle + slope * (float(self.x[low]) - mx)
        end = middle + slope * (float(self.x[high - 1]) - mx)
        error = sxx**-0.5 if is_wide else np.inf
        return Piece(low, high, start, end, slope, error, middle, w**-0.5)

    def _centre(self, low: NDArray[np.int64], high: int) -> tuple[Floats, ...]:
        w, wx, wxx, wy, wxy, wyy = self._sums[:, high][:, None] - self._sums[:, low]
        mx, my = wx / w, wy / w
        return w, mx, my, wyy - wy * my, wxx - wx * mx, wxy - wx * my


def cut_track(track: Track, lines: Lines) -> list[Piece]:
    """Cut a track into straight pieces; see the module for the method."""
    count = len(track)
    least = 3 if count >= 12 else 2
    best = np.full(count + 1, np.inf)
    cut = np.zeros(count + 1, dtype=np.int64)
    settled = [0]

    def solve(first: int, last: int) -> None:
        base = settled[-1]
        best[base] = -_PRICE
        best[base + 1 : min(base + least, last + 1)] = np.inf
        for end in range(max(first, base + least), last + 1):
            starts = np.arange(base, end - least + 1)
            costs = best[starts] + lines.residuals(starts, end) + _PRICE
            chosen = int(np.argmin(costs))
            best[end], cut[end] = costs[chosen], base + chosen

    for end in range(least, count + 1):
        solve(end, end)
        if not np.isfinite(best[end]):
            continue
        best[settled[-1] + 1 : max(settled[-1] + 1, end - _OPEN_BLOCKS)] = np.inf
        earliest = _trace(cut, settled[-1], end)[0]
        if earliest < end and end - earliest >= _SETTLED_BLOCKS:
            settled.append(earliest)
            solve(earliest, end)
    edges = [*settled, *_trace(cut, settled[-1], count)]
    if not np.isfinite(best[count]):
        edges = [*settled[:-1], count] if len(settled) > 1 else [0, count]
    return [lines.fit(low, high) for low, high in pairwise(edges)]


def _trace(cut: NDArray[np.int64], base: int, end: int) -> list[int]:
    """The ends of the pieces of the best division of the blocks from `base` to `end`."""
    ends = [end]
    while cut[ends[-1]] > base:
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    return ends
