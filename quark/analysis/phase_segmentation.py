"""Curves reduced to blocks and cut into segments where their slope changes.

The heights of a track are fitted by straight lines, one a piece. Among all
ways to cut it the one is taken with the least sum of squared residuals, each
over its block's noise, plus a fixed price for each piece: an exact dynamic
program (Bellman 1961; Jackson et al. 2005), which goes forward through the
blocks. A cut that the best division of all blocks so far has had for some
blocks is settled: whatever comes later, it stays; and where none was made for
many blocks, none is made any more. So a run that grows keeps the pieces that it
had.

Rapid learning is what falls significantly, at a good part of the mean rate
since the start, and adds up to a fall that is large against noise and against
the fall so far. What falls more slowly, or has just become flat, is
stabilization. Stagnation begins when the curve has been flat for a share of
the time before, with so many points that a visible change can be ruled out.
Until learning sets in, the run is initializing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark.analysis.config import PhaseAnalyzerThresholds
from quark.analysis.curves import Curve, median_filter

# Curves reduced to a few blocks on a scale on which training looks the same everywhere.
#
# The first 64 points are blocks of their own; later ones hold a sixty-fourth of
# the points before them, and their median counts. So a run that grows keeps all
# its blocks but the last, and a million points are some 700 blocks.
#
# A loss that is positive is put on the scale log(loss / start + 1/20): falls
# count by their ratio as long as they are visible, and not any more when nearly
# all is gone. A loss that goes below 0 is put on asinh((loss - start) / fall),
# which is plain where the run learns and logarithmic where it explodes.

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


Mask = NDArray[np.bool_]

_PRICE = 22.0
_SETTLED_BLOCKS = 12
_OPEN_BLOCKS = 40

_SIGNIFICANT = 4.0
_CERTAIN = 5.0  # as one of many pieces must be
_STEEP = 0.4  # of the mean rate since the start
_SLOWEST = 0.1  # of the steepest rate after it
_TINY = 0.03  # of the fall so far
_INVISIBLE = 0.75  # of the noise of one point
_FLAT_SHARE = 0.4  # of the time until it became flat
_FLAT_BLOCKS = 6
_FLAT_POINTS = 8
_SHORT_BLOCKS = 3
_HEAD_BLOCKS = 40
_FEWEST_BLOCKS = 5


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


Names = NDArray[np.object_]

INITIALIZATION = "initialization_adaptation"
RAPID = "rapid_learning"
STABILIZATION = "stabilization"
STAGNATION = "stagnation"


def name_blocks(
    track: Track, lines: Lines, pieces: list[Piece], thresholds: PhaseAnalyzerThresholds
) -> Names:
    """A phase for each block: initialization, rapid learning, stabilization or stagnation."""
    if len(track) < _FEWEST_BLOCKS:
        return np.full(len(track), INITIALIZATION, dtype=object)
    rapid = _find_rapid(track, lines, pieces, thresholds)
    names: Names = np.full(len(track), STABILIZATION, dtype=object)
    names[rapid] = RAPID
    learning = np.flatnonzero(rapid)
    begin = int(learning[0]) if len(learning) else len(track)
    _name_calm(track, lines, pieces, rapid, names, begin, thresholds)
    _absorb_short(names)
    first = min(_count_initial_blocks(track, thresholds), len(track))
    if begin < len(track):
        end = next(high for low, high in _runs(rapid) if low == begin)
        if lines.x[begin] <= lines.x[end - 1] - lines.x[begin]:
            # A wait that is shorter than the learning after it is none.
            first = max(first, begin)
    names[:first] = INITIALIZATION
    return names


def _find_rapid(
    track: Track, lines: Lines, pieces: list[Piece], thresholds: PhaseAnalyzerThresholds
) -> Mask:
    rapid = np.zeros(len(track), dtype=np.bool_)
    top, lowest = pieces[0].start, np.inf
    before: Piece | None = None
    for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
        noise = float(track.point_noise[piece.low])
        if before is not None:
            drop = before.end - piece.start
            total = top - min(lowest, piece.end)
            if drop >= max(0.2 * total, 5.0 * float(track.noise[piece.low]), 1e-6):
                rapid[before.high - 1 : piece.low + 2] = True
        # What goes on for long is judged by its beginnings, so that it keeps its name.
        for head in _list_heads(lines, piece):
            total = top - min(lowest, head.end)
            if total <= 0 or not _is_falling(head, after if head is piece else None):
                continue
            is_visible = head.fall >= min(0.05 * total, 3.0 * noise)
            usual = total / max(float(lines.x[head.high - 1]), 1e-12)
            if is_visible and -head.slope >= _STEEP * usual:
                rapid[piece.low : piece.high] = True
                break
        lowest = min(lowest, piece.end)
        before = piece
    for low, high in _runs(rapid):
        inside = [piece for piece in pieces if low <= piece.low < high]
        fastest = max((-piece.slope for piece in inside), default=0.0)
        for piece in inside:
            # Before the steep part comes what only leads to it.
            whole = inside[0].start - inside[-1].end
            if -piece.slope >= _SLOWEST * fastest or piece.fall >= 0.25 * whole:
                break
            rapid[piece.low : piece.high] = False
    for low, high in _runs(rapid):
        if not _is_large(track, pieces, low, high, thresholds):
            rapid[low:high] = False
    return rapid


def _list_heads(lines: Lines, piece: Piece) -> Iterable[Piece]:
    """Beginnings of a piece, of twice as many blocks each, and the whole of it."""
    size = _HEAD_BLOCKS
    while piece.low and size < piece.high - piece.low:
        yield lines.fit(piece.low, piece.low + size)
        size *= 2
    yield piece


def _is_falling(piece: Piece, after: Piece | None) -> bool:
    """Whether a piece falls significantly: by its slope, or to the level of the one after it."""
    if piece.certainty <= -_CERTAIN:
        return True
    if after is None or piece.certainty > -0.5 * _SIGNIFICANT:
        return False
    error = float(np.hypot(piece.mean_error, 2.0 * after.mean_error))  # of a line's end: twice
    return piece.mean - max(after.start, after.mean) >= _CERTAIN * error


def _is_large(
    track: Track, pieces: list[Piece], low: int, high: int, thresholds: PhaseAnalyzerThresholds
) -> bool:
    """Whether the fall from one block to another is large against noise and the fall so far."""
    inside = [piece for piece in pieces if piece.low < high and piece.high > low]
    limit = thresholds.limit("rapid_learning_min_relative_change")
    if limit is not None and _relative_fall(track, low, high) < limit:
        return False
    lowest = min(piece.end for piece in inside)
    fall = max(piece.start for piece in inside) - lowest
    total = pieces[0].start - min(piece.end for piece in pieces if piece.low < high)
    scale = thresholds.rapid_learning_min_relative_change
    noise = float(np.median(track.point_noise[low:high]))
    if track.is_signed:
        return bool(fall >= max(0.15 * total, 3.0 * noise))
    large = fall >= max(0.7 * scale, noise) or fall >= max(scale / 3.0, 5.0 * noise)
    return bool(large and fall >= 0.15 * total)


def _relative_fall(track: Track, low: int, high: int) -> float:
    before = float(np.median(track.level[max(0, low - 1) : low + 1]))
    after = float(np.median(track.level[max(low, high - 2) : high]))
    return (before - after) / abs(before) if before else 0.0


def _name_calm(
    track: Track,
    lines: Lines,
    pieces: list[Piece],
    rapid: Mask,
    names: Names,
    begin: int,
    thresholds: PhaseAnalyzerThresholds,
) -> None:
    """Name what is not rapid learning; `begin` is where that begins."""
    since: int | None = None
    is_flat = False
    for number, piece in enumerate(pieces):
        if rapid[piece.low : piece.high].mean() > 0.5:
            since, is_flat = None, False
            continue
        if since is not None and not _goes_on(track, lines.fit(since, piece.low), piece):
            since, is_flat = None, False
        since = piece.low if since is None else since
        fallen = max(0.0, pieces[0].start - piece.start)
        is_early = (
            piece.low < begin
            and STAGNATION not in names[: piece.low]
            and _is_beginning(pieces, number, begin < len(track))
        )
        for block in range(piece.low, piece.high):
            if rapid[block]:
                continue
            is_flat = _is_flat(track, lines, since, block + 1, fallen, thresholds, is_flat)
            if is_flat:
                names[block] = STAGNATION
                is_early = False
            elif is_early:
                names[block] = INITIALIZATION


def _is_beginning(pieces: list[Piece], number: int, learns: bool) -> bool:
    """Whether what is neither flat nor learning comes before learning sets in."""
    piece = pieces[number]
    if learns:
        return True
    if number:
        return False
    # A small fall that soon ends is the outputs' scale being found.
    is_falling = piece.certainty <= -_SIGNIFICANT
    return not is_falling or (len(pieces) > 1 and abs(pieces[1].slope) < 0.25 * abs(piece.slope))


def _goes_on(track: Track, flat: Piece, piece: Piece) -> bool:
    """Whether a piece lies where the flat stretch before it lay."""
    error = float(np.hypot(flat.mean_error, piece.mean_error))
    noise = float(track.point_noise[piece.low])
    return abs(piece.mean - flat.mean) <= max(_SIGNIFICANT * error, _INVISIBLE * noise)


def _is_flat(
    track: Track,
    lines: Lines,
    since: int,
    end: int,
    fallen: float,
    thresholds: PhaseAnalyzerThresholds,
    was_flat: bool,
) -> bool:
    """Whether a visible change from a block to another can be ruled out, or, if it was, still."""
    x = lines.x
    # What has been flat from the first point on needs no time before to be held against.
    begin = since and int(np.searchsorted(x, x[end - 1] / (1.0 + _FLAT_SHARE), side="right")) - 1
    blocks = end - max(begin, since)
    if blocks < 2 or (not was_flat and (begin < since or blocks < _FLAT_BLOCKS)):
        return was_flat
    since = max(begin, since)
    length = float(x[end - 1] - x[since])
    line = lines.fit(since, end)
    change, error = abs(line.slope) * length, line.slope_error * length
    limit = thresholds.limit("stagnation_max_relative_change")
    if limit is not None and change > limit:
        return False
    scale = thresholds.stagnation_max_relative_change
    noise = float(track.point_noise[end - 1])
    largest = max(_TINY * fallen, 0.5 * scale, _INVISIBLE * noise)
    if was_flat:
        return change - _SIGNIFICANT * error <= largest
    points = int(track.points[since:end].sum())
    if change < 2.0 * error:
        largest *= 2.0
    return points >= _FLAT_POINTS and change + error < largest


def _count_initial_blocks(track: Track, thresholds: PhaseAnalyzerThresholds) -> int:
    """Blocks that hold the first points, which are initialization at least."""
    wanted = int(thresholds.initialization_points)
    return int(np.searchsorted(np.cumsum(track.points), wanted)) + 1 if wanted else 0


def _absorb_short(names: Names) -> None:
    """Give stretches of a few blocks to what comes before, or after at the start."""
    if len(names) < 4 * _SHORT_BLOCKS:
        return
    while True:
        stretches = _stretches(names)
        short = [(high - low, low, high) for low, high in stretches if high - low < _SHORT_BLOCKS]
        if len(stretches) < 2 or not short:
            return
        _, low, high = min(short)
        names[low:high] = names[low - 1] if low else names[high]


def _stretches(names: Names) -> list[tuple[int, int]]:
    edges = np.flatnonzero(names[1:] != names[:-1]) + 1
    return list(pairwise([0, *edges.tolist(), len(names)]))


def _runs(mask: Mask) -> list[tuple[int, int]]:
    padded = np.concatenate([[False], mask, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
