"""Roll-ups: each 64 points of a chunk of one metric summed up, for curves of a few points.

A roll-up begins with a header of 40 bytes: version, flags, number of blocks,
points of the last block, first step, step's difference, epoch and first time.
Then come the blocks' columns, one after the other: low, high, mean and last
(float32 where the metric is, float64 otherwise), where in the block low and
high are, how many values are not finite, and when the block began (in
microseconds since the one before). Where the steps are no straight line or
the epochs differ, the blocks' own follow as int64. The last 8 bytes are the
xxh3_64 of all before them.

Many roll-ups are decoded at once: that is what makes a curve of a million
points quick.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash

from quark_core.errors import SchemaValidationError
from quark_core.records.columns import Array, Columns

BLOCK_POINTS = 64
"""Points that a block stands for; the last one of a chunk may have fewer."""

_HEADER = struct.Struct("<BBHHxxqqqq")
_VERSION = 1
_DOUBLE = 1
_STEPS = 2
_EPOCHS = 4
_NO_PLACE = 255
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of points that follow each other, as arrays of one length.

    Attributes:
        count: Points of each block.
        step, epoch, time_us: Of its first point; -1 for a missing step or epoch.
        low, high, mean: Over its finite values; NaN where there is none.
        last: Its last value.
        low_step, high_step: Steps of the points that low and high are.
        non_finite: Values that are NaN or infinite.
    """

    count: Array
    step: Array
    epoch: Array
    time_us: Array
    low: Array
    high: Array
    mean: Array
    last: Array
    low_step: Array
    high_step: Array
    non_finite: Array

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Blocks of several parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            )
        )


class RollupHead(NamedTuple):
    """What a roll-up says of its chunk's rows as a whole.

    Attributes:
        blocks: How many blocks it has.
        step_difference: By how much each step is above the one before; None where that differs.
        has_one_epoch: Whether all rows are of one epoch, or of none.
    """

    blocks: int
    step_difference: int | None
    has_one_epoch: bool


def read_head(rollup: bytes) -> RollupHead:
    """The head of a roll-up that `decode_rollups` has found sound."""
    _, flags, blocks, _, _, difference, _, _ = _HEADER.unpack_from(rollup)
    return RollupHead(blocks, None if flags & _STEPS else difference, not flags & _EPOCHS)


def summarize_blocks(columns: Columns) -> Blocks:
    """Blocks of rows of one metric, which stand in order."""
    values, steps = columns["value"], columns["step"]
    starts = np.arange(0, len(values), BLOCK_POINTS)
    counts = np.diff([*starts.tolist(), len(values)])
    finite = np.isfinite(values)
    if finite.all():
        lows = highs = kept = values
        numbers = counts
    else:
        lows, highs = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        kept = np.where(finite, values, 0.0)
        numbers = np.add.reduceat(finite.astype(np.int64), starts)
    none = numbers == 0
    low, high = np.minimum.reduceat(lows, starts), np.maximum.reduceat(highs, starts)
    low_at = _find_first(lows, low, starts, counts)
    high_at = _find_first(highs, high, starts, counts)
    divisors = np.maximum(numbers, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduceat(kept, starts) / divisors
        if not np.isfinite(mean).all():
            # The sum of large values overflows where their mean does not.
            parts = np.add.reduceat(kept / np.repeat(divisors, counts), starts)
            mean = np.where(np.isfinite(mean), mean, parts)
    return Blocks(
        count=counts,
        step=steps[starts],
        epoch=columns["epoch"][starts],
        time_us=columns["time_us"][starts],
        low=np.where(none, np.nan, low),
        high=np.where(none, np.nan, high),
        mean=np.where(none, np.nan, mean),
        last=values[starts + counts - 1],
        low_step=np.where(none, -1, steps[low_at]),
        high_step=np.where(none, -1, steps[high_at]),
        non_finite=counts - numbers,
    )


def encode_rollup(columns: Columns) -> bytes:
    """The roll-up of a chunk's rows, which are of one metric and stand in order."""
    blocks = summarize_blocks(columns)
    values, steps = columns["value"], columns["step"]
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32).astype(np.float64)
    double = not bool((single.view(np.int64) == values.view(np.int64)).all())
    differences = np.diff(steps)
    line = not len(differences) or bool((differences == differences[0]).all())
    same_epoch = bool((columns["epoch"] == columns["epoch"][0]).all())
    flags = _DOUBLE * double | _STEPS * (not line) | _EPOCHS * (not same_epoch)
    difference = int(differences[0]) if line and len(differences) else 0
    head = _HEADER.pack(
        _VERSION,
        flags,
        len(blocks.count),
        int(blocks.count[-1]),
        int(steps[0]),
        difference,
        int(blocks.epoch[0]),
        int(blocks.time_us[0]),
    )
    kept = "<f8" if double else "<f4"
    with np.errstate(over="ignore"):
        floats = [
            getattr(blocks, name).astype(kept).tobytes() for name in ("low", "high", "mean", "last")
        ]
    times = np.diff(blocks.time_us, prepend=blocks.time_us[:1])
    parts = [*floats, *_place_extremes(blocks, columns), times.astype("<i8").tobytes()]
    if not line:
        parts += [
            getattr(blocks, name).astype("<i8").tobytes()
            for name in ("step", "low_step", "high_step")
        ]
    if not same_epoch:
        parts.append(blocks.epoch.astype("<i8").tobytes())
    rollup = head + b"".join(parts)
    return rollup + xxhash.xxh3_64_digest(rollup)


def decode_rollups(rollups: Sequence[bytes]) -> list[Blocks]:
    """Blocks of roll-ups that follow each other, in as few parts as they allow.

    Raises:
        SchemaValidationError: One is damaged, or of a newer version.
    """
    for rollup in rollups:
        end = len(rollup) - _CHECKSUM_BYTES
        if end < _HEADER.size or xxhash.xxh3_64_digest(rollup[:end]) != rollup[end:]:
            raise SchemaValidationError("the checksum of a roll-up is wrong")
    heads = [_HEADER.unpack_from(rollup) for rollup in rollups]
    newest = max((head[0] for head in heads), default=_VERSION)
    if newest > _VERSION:
        raise SchemaValidationError(
            f"a roll-up has format version {newest}, but this Quark reads up to {_VERSION}"
        )
    parts = []
    numbered = list(zip(rollups, heads, strict=True))
    # Roll-ups of as many blocks and the same columns are one matrix.
    for (flags, blocks), group in groupby(numbered, key=lambda item: item[1][1:3]):
        found = list(group)
        parts.append(_decode_equal(flags, blocks, [r for r, _ in found], [h for _, h in found]))
    return parts


def _decode_equal(
    flags: int, blocks: int, rollups: list[bytes], heads: list[tuple[int, ...]]
) -> Blocks:
    width = 8 if flags & _DOUBLE else 4
    size = 4 * width + 3 + 8 + 24 * bool(flags & _STEPS) + 8 * bool(flags & _EPOCHS)
    length = _HEADER.size + blocks * size + _CHECKSUM_BYTES
    if any(len(rollup) != length for rollup in rollups):
        raise SchemaValidationError("a roll-up has a wrong length")
    rows = len(rollups)
    matrix = np.frombuffer(b"".join(rollups), dtype=np.uint8).reshape(rows, -1)
    place = _HEADER.size

    def take(dtype: str) -> Array:
        nonlocal place
        end = place + blocks * np.dtype(dtype).itemsize
        out = np.ascontiguousarray(matrix[:, place:end]).view(dtype)
        place = end
        return out

    head = np.array([h[3:] for h in heads], dtype=np.int64)
    last_count, first_step, difference, epoch, first_time = head.T
    low, high, mean, last = (take(f"<f{width}").astype(np.float64).ravel() for _ in range(4))
    low_at, high_at, non_finite = (take("u1") for _ in range(3))
    times = take("<i8").cumsum(axis=1) + first_time[:, None]
    counts = np.full((rows, blocks), BLOCK_POINTS, dtype=np.int64)
    counts[:, -1] = last_count
    if flags & _STEPS:
        step, low_step, high_step = (take("<i8").ravel() for _ in range(3))
    else:
        starts = np.arange(blocks, dtype=np.int64) * BLOCK_POINTS
        base, slope = first_step[:, None], difference[:, None]
        step = (base + slope * starts).ravel()
        low_step = np.where(low_at == _NO_PLACE, -1, base + slope * (starts + low_at)).ravel()
        high_step = np.where(high_at == _NO_PLACE, -1, base + slope * (starts + high_at)).ravel()
    epochs = take("<i8").ravel() if flags & _EPOCHS else np.repeat(epoch, blocks)
    return Blocks(
        count=counts.ravel(),
        step=step,
        epoch=epochs,
        time_us=times.ravel(),
        low=low,
        high=high,
        mean=mean,
        last=last,
        low_step=low_step,
        high_step=high_step,
        non_finite=non_finite.ravel().astype(np.int64),
    )


def _find_first(values: Array, wanted: Array, starts: Array, counts: Array) -> Array:
    """Row of the first value of each block that equals the block's own."""
    hits = np.flatnonzero(values == np.repeat(wanted, counts))
    blocks = np.searchsorted(starts, hits, side="right") - 1
    rows = starts.copy()
    # Written backwards, the first hit of each block stays.
    rows[blocks[::-1]] = hits[::-1]
    return rows


def _place_extremes(blocks: Blocks, columns: Columns) -> list[bytes]:
    """Where in their block low and high are, and how many values are not finite."""
    values = columns["value"]
    starts = np.arange(0, len(values), BLOCK_POINTS)
    out = []
    for extreme in (blocks.low, blocks.high):
        at = _find_first(values, extreme, starts, blocks.count) - starts
        out.append(np.where(np.isnan(extreme), _NO_PLACE, at).astype("u1").tobytes())
    return [*out, blocks.non_finite.astype("u1").tobytes()]
