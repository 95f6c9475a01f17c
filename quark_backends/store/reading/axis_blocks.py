"""Blocks of points along an axis: where each begins and ends there, exactly.

A roll-up says where a block begins, and where it ends only if its steps are a
straight line. Of all else the one column of the chunk is read that tells, once:
what was made of a chunk is kept, and a chunk never changes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quark_backends.store.encoding.chunks import Chunk
from quark_backends.store.encoding.rollups import (
    BLOCK_POINTS,
    Blocks,
    RollupHead,
    decode_rollups,
    read_head,
    summarize_blocks,
)
from quark_backends.store.reading.stored_rows import ChunkEntry, StoredRows
from quark_core.backends.curves import Window
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.columns import Array, Columns

_KIND = MetricRecord.KIND
_CACHED_BYTES = 48 * 2**20
_BYTES = 8


@dataclass(frozen=True, slots=True)
class AxisBlocks:
    """Blocks in the order of their beginnings within each part, as arrays of one length.

    Attributes:
        blocks: The blocks; the rows of each stand in the order of the axis.
        least, most: Where on the axis they begin and end, both inclusive.
        bad_step: Step of the first value of each that is not finite, or -1.
    """

    blocks: Blocks
    least: Array
    most: Array
    bad_step: Array

    @classmethod
    def join(cls, parts: Sequence[AxisBlocks]) -> AxisBlocks:
        """Blocks of several parts, one after the other; at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            Blocks.join([part.blocks for part in parts]),
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("least", "most", "bad_step")
            ),
        )

    def take(self, rows: Array | slice) -> AxisBlocks:
        """Only these blocks."""
        names = Blocks.__dataclass_fields__
        return AxisBlocks(
            Blocks(*(getattr(self.blocks, name)[rows] for name in names)),
            self.least[rows],
            self.most[rows],
            self.bad_step[rows],
        )

    def order(self) -> AxisBlocks:
        """The blocks by where they begin."""
        if len(self.least) < 2 or bool((self.least[1:] >= self.least[:-1]).all()):
            return self
        return self.take(np.argsort(self.least, kind="stable"))

    def __len__(self) -> int:
        return len(self.least)

    @property
    def has_overlaps(self) -> bool:
        """Whether one, of blocks in order, begins before another one ends."""
        return bool((self.least[1:] < np.maximum.accumulate(self.most)[:-1]).any())

    @property
    def size_bytes(self) -> int:
        """What they take up."""
        return len(self.least) * _BYTES * (len(Blocks.__dataclass_fields__) + 3)


class BlockCache:
    """Blocks that were made of chunks, for several readers of one store at once."""

    def __init__(self, max_bytes: int = _CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._found: OrderedDict[tuple[str, tuple[int, ...]], AxisBlocks] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, axis: str, pks: tuple[int, ...]) -> AxisBlocks | None:
        """What was kept of these chunks, or None."""
        with self._lock:
            found = self._found.get((axis, pks))
            if found is not None:
                self._found.move_to_end((axis, pks))
            return found

    def keep(self, axis: str, pks: tuple[int, ...], blocks: AxisBlocks) -> None:
        """Keep what was made of these chunks, and let go of what was asked for longest ago."""
        if blocks.size_bytes > self._max_bytes:
            return
        with self._lock:
            before = self._found.pop((axis, pks), None)
            self._size_bytes += blocks.size_bytes - (before.size_bytes if before else 0)
            self._found[axis, pks] = blocks
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= self._found.popitem(last=False)[1].size_bytes


def summarize_axis(columns: Columns, axis: str) -> AxisBlocks:
    """Blocks of rows of one metric, at least one, which are put in the order of the axis."""
    places = columns[axis]
    if len(places) > 1 and bool((places[1:] < places[:-1]).any()):
        columns = columns.take(np.argsort(places, kind="stable"))
        places = columns[axis]
    blocks = summarize_blocks(columns)
    starts = np.arange(0, len(places), BLOCK_POINTS)
    return AxisBlocks(
        blocks=blocks,
        least=places[starts],
        most=places[starts + blocks.count - 1],
        bad_step=_find_bad_steps(columns["value"], columns["step"], len(starts)),
    )


def load_axis_blocks(
    rows: StoredRows, entries: Sequence[ChunkEntry], axis: str, cache: BlockCache
) -> tuple[AxisBlocks, Array]:
    """The blocks of chunks of one metric, and for each block which chunk it is of.

    Raises:
        SchemaValidationError: A roll-up is damaged.
    """
    counts = [-(-entry.count // BLOCK_POINTS) for entry in entries]
    chunk_of = np.repeat(np.arange(len(entries)), counts)
    pks = tuple(entry.pk for entry in entries)
    found = cache.find(axis, pks)
    if found is None:
        found = _make(rows, entries, axis)
        cache.keep(axis, pks, found)
    if len(found.least) != len(chunk_of):
        raise SchemaValidationError("a roll-up has another number of points than its chunk")
    return found, chunk_of


def _make(rows: StoredRows, entries: Sequence[ChunkEntry], axis: str) -> AxisBlocks:
    rollups = rows.load_rollups(entries)
    joined = Blocks.join(decode_rollups(rollups))
    heads = [read_head(rollup) for rollup in rollups]
    edges = np.cumsum([0, *(head.blocks for head in heads)]).tolist()
    least = {"step": joined.step, "epoch": joined.epoch, "time_us": joined.time_us}[axis]
    most, bad_step = least.copy(), np.full(len(least), -1, dtype=np.int64)
    is_bad = joined.non_finite > 0
    bad_step[is_bad] = joined.step[is_bad]
    is_mixed = is_bad & (joined.non_finite < joined.count)
    lines = np.array([_find_difference(head, axis) for head in heads], dtype=np.int64)
    is_line = lines >= 0
    most += np.repeat(np.where(is_line, lines, 0), np.diff(edges)) * (joined.count - 1)
    to_read = ~is_line | np.logical_or.reduceat(is_mixed, edges[:-1])
    by_place = [
        (slice(edges[place], edges[place + 1]), entries[place])
        for place in np.flatnonzero(to_read).tolist()
    ]
    found = AxisBlocks(joined, least, most, bad_step)
    if not by_place:
        return found
    found = _make_writable(found)
    for part, chunk in zip(
        (part for part, _ in by_place),
        rows.open_chunks(_KIND, [entry for _, entry in by_place]),
        strict=True,
    ):
        if chunk is not None:
            _read_chunk(found, part, chunk, axis)
    return found


def _find_difference(head: RollupHead, axis: str) -> int:
    """By how much each place of a chunk is above the one before; -1 where only its rows tell."""
    if axis == "step" and head.step_difference is not None:
        return max(-1, head.step_difference)
    return 0 if axis == "epoch" and head.has_one_epoch else -1


def _make_writable(found: AxisBlocks) -> AxisBlocks:
    names = Blocks.__dataclass_fields__
    copies = Blocks(*(np.array(getattr(found.blocks, name)) for name in names))
    return replace(found, blocks=copies, least=np.array(found.least))


def _read_chunk(found: AxisBlocks, part: slice, chunk: Chunk, axis: str) -> None:
    """Put what a chunk's own columns say in the place of what its roll-up does not."""
    places = chunk.array(axis)
    if len(places) > 1 and bool((places[1:] < places[:-1]).any()):
        arrays = {name: chunk.array(name) for name in ("step", "epoch", "time_us", "value")}
        made = summarize_axis(Columns(_KIND, chunk.count, arrays), axis)
        for name in Blocks.__dataclass_fields__:
            getattr(found.blocks, name)[part] = getattr(made.blocks, name)
        for name in ("least", "most", "bad_step"):
            getattr(found, name)[part] = getattr(made, name)
        return
    starts = np.arange(0, chunk.count, BLOCK_POINTS)
    found.most[part] = places[np.append(starts[1:], chunk.count) - 1]
    if found.blocks.non_finite[part].any():
        found.bad_step[part] = _find_bad_steps(
            chunk.array("value"), chunk.array("step"), len(starts)
        )


def _find_bad_steps(values: Array, steps: Array, blocks: int) -> Array:
    """Step of the first value of each block that is not finite, or -1."""
    bad = np.flatnonzero(~np.isfinite(values))
    out = np.full(blocks, -1, dtype=np.int64)
    # Written backwards, the first one of each block stays.
    out[(bad // BLOCK_POINTS)[::-1]] = steps[bad[::-1]]
    return out


def find_overlapping(found: AxisBlocks, window: Window) -> tuple[Array, Array]:
    """Which blocks have something within a window, and which of them all of it, as masks.

    A block that begins before and ends behind a window may have nothing in it; it counts
    among the first.
    """
    some = np.ones(len(found.least), dtype=np.bool_)
    whole = some.copy()
    if window.least is not None:
        some &= found.most >= window.least
        whole &= found.least >= window.least
    if window.high is not None:
        some &= found.least <= window.high
        whole &= found.most <= window.high
    return some, whole & some
