"""Cuts a curve where its slope changes, and names the pieces.

The heights of a track are fitted by straight lines, one a piece. Among all
ways to cut it the one is taken with the least sum of squared residuals, each
over its block's noise, plus a fixed price for each piece: an exact dynamic
program (Bellman 1961, Jackson et al. 2005) over at most 200 blocks. The price
does not depend on the length of the run, so that what was cut long ago stays
cut there when the run goes on.

A piece falls or rises where its slope is significant and its change not tiny;
else it is flat. Rapid learning is what falls at no less than a tenth of the
steepest rate and adds up to a large fall. What falls more slowly, or has just
become flat, is stabilization; what has been flat for a longer time than its
share of the time before is stagnation. All of this looks back only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.phase_config import PhaseAnalyzerThresholds
from quark_core.analysis.phase_tracks import Track, trim_outliers

__all__ = ["RAPID", "Piece", "cut_track", "name_blocks"]

Floats = NDArray[np.float64]

INITIALIZATION = "initialization_adaptation"
RAPID = "rapid_learning"
STABILIZATION = "stabilization"
STAGNATION = "stagnation"

_PRICE = 22.0
_SIGNIFICANT = 4.0
_SLOWEST = 0.1  # of the steepest rate
_TINY = 0.02  # of the fall so far
_FLAT_SHARE = 0.4  # of the time until it became flat
_FLAT_BLOCKS = 6
_SHORT_SHARE = 0.03


@dataclass(frozen=True)
class Piece:
    """Blocks that lie about one straight line.

    Attributes:
        low, high: First block, and the one after the last.
        start, end: Height of the line at both ends.
        slope: Change of height over the whole time of the run.
        certainty: Slope over its standard error.
        mean: Mean height.
        error: Its standard error.
    """

    low: int
    high: int
    start: float
    end: float
    slope: float
    certainty: float
    mean: float
    error: float

    @property
    def fall(self) -> float:
        """From its start to its end."""
        return self.start - self.end


def cut_track(track: Track) -> list[Piece]:
    """Cut a track into straight pieces; see the module for the method."""
    count = len(track)
    x = _time(track)
    y = trim_outliers(track)
    least = 3 if count >= 12 else 2
    sums = _Sums(x, y, track.noise)
    if count < 2 * least:
        return [sums.fit(0, count)]
    best = np.full(count + 1, np.inf)
    best[0] = -_PRICE
    cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(least, count + 1):
        starts = np.arange(0, end - least + 1)
        costs = best[starts] + sums.residual(starts, end) + _PRICE
        chosen = int(np.argmin(costs))
        best[end], cut[end] = costs[chosen], chosen
    ends = [count]
    while ends[-1] > 0:
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    return [sums.fit(low, high) for low, high in pairwise(ends)]


def name_blocks(
    track: Track, pieces: list[Piece], thresholds: PhaseAnalyzerThresholds
) -> NDArray[np.object_]:
    """A phase for each block: initialization, rapid learning, stabilization or stagnation."""
    names: NDArray[np.object_] = np.full(len(track), STABILIZATION, dtype=object)
    first = _count_initial_blocks(track, thresholds)
    rapid = _find_rapid(track, pieces, thresholds)
    _name_flat(track, pieces, rapid, names, thresholds)
    names[rapid] = RAPID
    _absorb_short(names)
    _name_start(track, pieces, names, first)
    return names


def _find_rapid(
    track: Track, pieces: list[Piece], thresholds: PhaseAnalyzerThresholds
) -> NDArray[np.bool_]:
    rapid = np.zeros(len(track), dtype=np.bool_)
    total = pieces[0].start - min(min(piece.start, piece.end) for piece in pieces)
    if total <= 0:
        return rapid
    falling = [
        piece
        for piece, after in zip(pieces, [*pieces[1:], None], strict=True)
        if _is_falling(piece, after)
    ]
    steepest = max((-p.slope for p in falling if p.fall >= 0.1 * total), default=0.0)
    for piece in falling:
        visible = piece.fall >= 0.05 * total or piece.fall >= 3.0 * track.point_noise
        if visible and -piece.slope >= _SLOWEST * steepest:
            rapid[piece.low : piece.high] = True
    for before, after in pairwise(pieces):
        drop = before.end - after.start
        if drop >= max(0.2 * total, 5.0 * float(track.noise[after.low])):
            rapid[max(before.high - 1, 0) : min(after.low + 2, len(track))] = True
    for low, high in _runs(rapid):
        if not _is_large(track, pieces, low, high, total, thresholds):
            rapid[low:high] = False
    return rapid


def _is_falling(piece: Piece, after: Piece | None) -> bool:
    """Whether a piece falls significantly: by its slope, or to the level of the one after it."""
    if piece.certainty <= -_SIGNIFICANT:
        return True
    if after is None or piece.certainty > -0.5 * _SIGNIFICANT:
        return False
    error = float(np.hypot(piece.error, after.error))
    return piece.mean - after.mean >= _SIGNIFICANT * error


def _is_large(
    track: Track,
    pieces: list[Piece],
    low: int,
    high: int,
    total: float,
    thresholds: PhaseAnalyzerThresholds,
) -> bool:
    """Whether the fall from one block to another is large against noise and the whole fall."""
    inside = [piece for piece in pieces if piece.low < high and piece.high > low]
    fall = max(piece.start for piece in inside) - min(piece.end for piece in inside)
    limit = thresholds.limit("rapid_learning_min_relative_change")
    if limit is not None:
        return _relative_fall(track, low, high) >= limit
    scale = thresholds.rapid_learning_min_relative_change
    noise = track.point_noise
    if track.is_signed:
        return fall >= max(0.15 * total, 3.0 * noise)
    large = fall >= max(0.7 * scale, noise) or fall >= max(scale / 3.0, 5.0 * noise)
    return large and fall >= 0.15 * total


def _relative_fall(track: Track, low: int, high: int) -> float:
    before = float(np.median(track.level[max(0, low - 1) : low + 1]))
    after = float(np.median(track.level[max(low, high - 2) : high]))
    return (before - after) / abs(before) if before else 0.0


def _name_flat(
    track: Track,
    pieces: list[Piece],
    rapid: NDArray[np.bool_],
    names: NDArray[np.object_],
    thresholds: PhaseAnalyzerThresholds,
) -> None:
    """Name what has been flat for long stagnation."""
    x = _time(track)
    since: int | None = None
    level = 0.0
    for piece in pieces:
        fallen = pieces[0].start - piece.start
        still = _is_flat(piece, x, fallen, thresholds)
        if rapid[piece.low : piece.high].mean() > 0.5 or not still:
            since = None
            continue
        tolerance = max(_TINY * fallen, 0.01, 3.0 * float(track.noise[piece.low]))
        if since is None or abs(piece.start - level) > tolerance:
            since = piece.low
            level = piece.start
        wait = _FLAT_SHARE * (x[since] - x[0])
        begin = int(np.searchsorted(x, x[since] + wait))
        begin = max(begin, piece.low, since + (_FLAT_BLOCKS if since else 0))
        if piece.high - since >= min(_FLAT_BLOCKS, len(track)) and begin < piece.high:
            names[begin : piece.high] = STAGNATION


def _is_flat(piece: Piece, x: Floats, fallen: float, thresholds: PhaseAnalyzerThresholds) -> bool:
    limit = thresholds.limit("stagnation_max_relative_change")
    if limit is not None and abs(piece.fall) > limit:
        return False
    if abs(piece.certainty) < _SIGNIFICANT:
        return True
    # How much it would change in as much time as the run had had until then.
    length = max(x[piece.high - 1] - x[piece.low], x[piece.low] - x[0])
    scale = thresholds.stagnation_max_relative_change
    return bool(abs(piece.slope) * length < max(_TINY * fallen, 0.5 * scale))


def _name_start(track: Track, pieces: list[Piece], names: NDArray[np.object_], first: int) -> None:
    """Name what comes before learning sets in."""
    rapid = np.flatnonzero(names == RAPID)
    begin = int(rapid[0]) if len(rapid) else 0
    if len(rapid):
        length = next(high - low for low, high in _runs(names == RAPID))
        if begin > first and begin <= max(length, 2 * first):
            first = begin
    elif len(pieces) > 1 and pieces[0].fall > 0:
        # A small fall that soon ends is the outputs' scale being found, not learning.
        second = pieces[1]
        soon = pieces[0].high <= max(first, len(track) // 8)
        if soon and abs(second.slope) < 0.25 * abs(pieces[0].slope):
            first = max(first, pieces[0].high)
    first = min(first, len(track))
    if begin > first and len(rapid):
        # Before anything was learned, nothing can have become stable.
        names[first:begin] = STAGNATION
    names[:first] = INITIALIZATION


def _count_initial_blocks(track: Track, thresholds: PhaseAnalyzerThresholds) -> int:
    """Blocks that hold the first points, which are initialization at least."""
    wanted = int(thresholds.initialization_points)
    ends = np.cumsum(track.points)
    return int(np.searchsorted(ends, wanted)) + 1 if wanted else 0


def _absorb_short(names: NDArray[np.object_]) -> None:
    """Give stretches of a few blocks to what comes before, or after at the start."""
    least = max(2, int(_SHORT_SHARE * len(names)))
    if len(names) < 3 * least:
        return
    while True:
        stretches = _stretches(names)
        short = [(high - low, low, high) for low, high in stretches if high - low < least]
        if len(stretches) < 2 or not short:
            return
        _, low, high = min(short)
        names[low:high] = names[low - 1] if low else names[high]


def _stretches(names: NDArray[np.object_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(names[1:] != names[:-1]) + 1
    bounds = [0, *edges.tolist(), len(names)]
    return list(pairwise(bounds))


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    padded = np.concatenate([[False], mask, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _time(track: Track) -> Floats:
    """Time of each block, 0 at the first one and 1 at the last."""
    span = float(track.middle[-1] - track.middle[0])
    return np.asarray((track.middle - track.middle[0]) / (span if span > 0 else 1.0))


class _Sums:
    """Weighted sums of every beginning, from which any piece's line follows at once."""

    def __init__(self, x: Floats, y: Floats, noise: Floats) -> None:
        weight = 1.0 / noise**2
        self.shift = float(np.median(y))
        y = y - self.shift
        columns = (weight, weight * x, weight * x * x, weight * y, weight * x * y, weight * y * y)
        self.sums = np.array([np.concatenate([[0.0], np.cumsum(column)]) for column in columns])
        self.x = x

    def residual(self, low: NDArray[np.int64], high: int) -> Floats:
        """Sum of squared residuals over noise of the pieces low, ..., high - 1."""
        w, _, _, _, _, syy, sxx, sxy = self._centre(low, high)
        explained = np.divide(sxy * sxy, sxx, out=np.zeros_like(sxx), where=sxx > 1e-12 * w)
        return np.maximum(syy - explained, 0.0)

    def fit(self, low: int, high: int) -> Piece:
        """The line of one piece."""
        w, mx, my, _, _, _, sxx, sxy = (
            float(value[0]) for value in self._centre(np.array([low]), high)
        )
        slope = sxy / sxx if sxx > 1e-12 * w else 0.0
        start = my + slope * (float(self.x[low]) - mx) + self.shift
        end = my + slope * (float(self.x[high - 1]) - mx) + self.shift
        certainty = slope * float(np.sqrt(max(sxx, 0.0)))
        return Piece(low, high, start, end, slope, certainty, my + self.shift, w**-0.5)

    def _centre(self, low: NDArray[np.int64], high: int) -> tuple[Floats, ...]:
        w, wx, wxx, wy, wxy, wyy = self.sums[:, high][:, None] - self.sums[:, low]
        mx, my = wx / w, wy / w
        return w, mx, my, wx, wy, wyy - wy * my, wxx - wx * mx, wxy - wx * my
