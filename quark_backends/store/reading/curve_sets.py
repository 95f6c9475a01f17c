"""Curves of several metrics within a window, of one moment of the store.

Where each entry stands for a block of points or more, it is made of blocks; of
points otherwise. At the edges of a window points are read, so that low, high and
count of each entry are those of the points in the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quark_backends.store.encoding.rollups import BLOCK_POINTS
from quark_backends.store.reading.axis_blocks import (
    AxisBlocks,
    BlockCache,
    find_overlapping,
    load_axis_blocks,
    summarize_axis,
)
from quark_backends.store.reading.curves import is_whole
from quark_backends.store.reading.metric_tails import MetricTails
from quark_backends.store.reading.stored_rows import ChunkEntry, StoredRows, WriterRow, hide_rows
from quark_core.backends.curves import (
    Curve,
    CurveQuery,
    RankChoice,
    Window,
    extend_series,
    find_first_steps,
    make_curve,
    merge_curves,
)
from quark_core.backends.series import choose_rank_points, group_entries
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows
from quark_core.records.columns import Columns

_KIND = MetricRecord.KIND
_COLUMNS = ("step", "epoch", "time_us", "value")
# So many blocks are taken apart where that puts their points in order: a million points.
_SORTED_BLOCKS = 16_384


@dataclass(slots=True)
class _Share:
    """What one writer has of one metric within a window.

    Attributes:
        writer: The writer.
        key: The metric.
        chunks: Its chunks, by their first sequence.
        hidden: What a later attempt hides of it.
        tail: Points that are not compacted yet, in the window and not hidden.
        folded: Blocks that stand for earlier ones of these.
    """

    writer: WriterRow
    key: str
    chunks: list[ChunkEntry]
    hidden: HiddenRows | None
    tail: list[Columns] = field(default_factory=list)
    folded: list[AxisBlocks] = field(default_factory=list)
    tail_count: int = 0

    def fold(self, axis: str) -> None:
        """Sum up the points of the tail, where they are too many to be held."""
        if self.tail:
            self.folded.append(summarize_axis(_join(self.tail), axis))
            self.tail = []


def read_curves(
    rows: StoredRows,
    tails: MetricTails,
    cache: BlockCache,
    writers: Sequence[WriterRow],
    query: CurveQuery,
) -> tuple[Curve, ...]:
    """The curves, by the order of the keys, then attempt, then rank.

    Args:
        rows: Loads rows.
        tails: Reads what is not compacted yet.
        cache: Keeps what was made of chunks.
        writers: Whose points are wanted, in persistence order.
        query: What is wanted of them.
    """
    entries, window, ranks = query.entries, query.window, query.ranks
    wanted = [writer for writer in writers if not isinstance(ranks, tuple) or writer.rank in ranks]
    shares: dict[str, dict[int, dict[int, list[_Share]]]] = {key: {} for key in query.keys}
    names = rows.find_keys(query.keys)
    for writer in wanted:
        hidden = None if query.all_attempts else rows.find_hidden(writer, _KIND, query.keys)
        bound = _choose_bound(entries, ranks, wanted)
        found = _find_shares(rows, tails, writer, names, hidden, window, bound)
        for key, share in found.items():
            shares[key].setdefault(writer.attempt, {}).setdefault(writer.rank, []).append(share)
    out: list[Curve] = []
    for key in query.keys:
        for attempt, by_rank in sorted(shares[key].items()):
            across = ranks is None and len(by_rank) > 1
            bound = choose_rank_points(entries) if across else entries
            curves = [
                curve
                for rank, its in sorted(by_rank.items())
                if (curve := _read_rank(rows, cache, key, (attempt, rank), its, bound, window))
            ]
            if ranks is None and curves:
                curves = [merge_curves(curves, entries, window.axis)]
            out += curves
    return tuple(out)


def _choose_bound(
    entries: int | None, ranks: RankChoice, writers: Sequence[WriterRow]
) -> int | None:
    """The most entries that the curve of a writer's rank may have."""
    several = ranks is None and len({writer.rank for writer in writers}) > 1
    return choose_rank_points(entries) if several else entries


def _find_shares(
    rows: StoredRows,
    tails: MetricTails,
    writer: WriterRow,
    names: Mapping[str, int],
    hidden: HiddenRows | None,
    window: Window,
    entries: int | None,
) -> dict[str, _Share]:
    """What a writer has of each of these metrics, of those of which it has anything."""
    chunks = rows.find_series_chunks(writer, list(names.values()))
    found = {
        key: _Share(writer, key, its, hidden)
        for key, pk in names.items()
        if (its := chunks.get(pk))
    }
    most = None if entries is None else entries * BLOCK_POINTS
    for part in tails.read(rows, writer, list(names)):
        for key, points in part.items():
            within = _take_within(hide_rows(points, hidden, key), window)
            if not within.count:
                continue
            share = found.setdefault(key, _Share(writer, key, [], hidden))
            share.tail.append(within)
            share.tail_count += within.count
            if most is not None and sum(part.count for part in share.tail) >= most:
                share.fold(window.axis)
    return found


def _read_rank(
    rows: StoredRows,
    cache: BlockCache,
    key: str,
    whose: tuple[int, int],
    shares: Sequence[_Share],
    entries: int | None,
    window: Window,
) -> Curve | None:
    """The curve of one rank in one attempt; None where it has no point in the window."""
    folded = [blocks for share in shares for blocks in share.folded]
    try:
        if entries is not None:
            parts = _find_blocks(rows, cache, shares, entries, window)
            if parts is not None:
                blocks = AxisBlocks.join([*parts, *folded]).order()
                # Where points go back from one chunk to another, blocks lie over each other.
                if folded or len(blocks) > _SORTED_BLOCKS or not blocks.has_overlaps:
                    return _group(key, whose, blocks, entries)
    except SchemaValidationError:
        pass  # a roll-up is damaged; the points themselves are there
    points = [part for share in shares for part in _load_points(rows, cache, share, window)]
    if folded:
        assert entries is not None
        more = [summarize_axis(_join(points), window.axis)] if points else []
        return _group(key, whose, AxisBlocks.join([*more, *folded]).order(), entries)
    if not points:
        return None
    joined = _join(points)
    arrays = (joined[name] for name in _COLUMNS)
    return make_curve(key, *whose, *arrays, axis=window.axis, entries=entries)


def _find_blocks(
    rows: StoredRows,
    cache: BlockCache,
    shares: Sequence[_Share],
    entries: int,
    window: Window,
) -> list[AxisBlocks] | None:
    """Blocks of all that is in the window; None where it is too little to be made of blocks.

    Raises:
        SchemaValidationError: A roll-up is damaged.
    """
    least = entries * BLOCK_POINTS
    near = [_find_near(share.chunks, window) for share in shares]
    within = sum(share.tail_count for share in shares)
    if within + sum(entry.count for chunks in near for entry in chunks) < least:
        return None
    loaded: list[tuple[_Share, list[ChunkEntry], AxisBlocks | None, list[ChunkEntry]]] = []
    for share, chunks in zip(shares, near, strict=True):
        whole = _choose_whole(cache, share, chunks, window.axis)
        partly = [entry for entry in chunks if not is_whole(entry, share.hidden, share.key)]
        if not whole:
            loaded.append((share, partly, None, []))
            continue
        blocks, chunk_of = load_axis_blocks(rows, whole, window.axis, cache)
        if window.is_open:
            within += int(blocks.blocks.count.sum())
            loaded.append((share, partly, blocks, []))
            continue
        some, inside = find_overlapping(blocks, window)
        within += int(blocks.blocks.count[some].sum())
        # Of a chunk that a window cuts through all points are read.
        cut = np.unique(chunk_of[some & ~inside])
        kept = blocks.take(inside & ~np.isin(chunk_of, cut))
        loaded.append((share, partly, kept, [whole[place] for place in cut.tolist()]))
    if within + sum(e.count for _, partly, _, _ in loaded for e in partly) < least:
        return None
    out: list[AxisBlocks] = []
    for share, partly, found, cut_chunks in loaded:
        if found is not None and len(found.least):
            out.append(found)
        # Each by itself: a block of two of them would reach from one to the other.
        points = [
            part
            for entry in (*cut_chunks, *partly)
            for part in _load_chunks(rows, share, [entry], window)
        ]
        if share.tail:
            points.append(_join(share.tail))
        out += [summarize_axis(part, window.axis) for part in points]
    count = sum(int(part.blocks.count.sum()) for part in out)
    folded = sum(int(part.blocks.count.sum()) for share in shares for part in share.folded)
    # Most of it may be hidden, or outside after all: then it is few points.
    return out if count + folded >= least else None


def _choose_whole(
    cache: BlockCache, share: _Share, chunks: list[ChunkEntry], axis: str
) -> list[ChunkEntry]:
    """Those of which nothing is hidden: all that the share has, where their blocks are known."""
    every = [entry for entry in share.chunks if is_whole(entry, share.hidden, share.key)]
    if len(every) > len(chunks) and cache.find(axis, tuple(entry.pk for entry in every)) is None:
        return [entry for entry in chunks if is_whole(entry, share.hidden, share.key)]
    return every


def _load_points(
    rows: StoredRows, cache: BlockCache, share: _Share, window: Window
) -> list[Columns]:
    """All points of a share in the window, in the order in which they came."""
    chunks = _find_near(share.chunks, window)
    if chunks and not window.is_open and window.axis != "step":
        chunks = _find_nearer(rows, cache, share, chunks, window)
    return [*_load_chunks(rows, share, chunks, window), *share.tail]


def _find_near(chunks: list[ChunkEntry], window: Window) -> list[ChunkEntry]:
    """The chunks that may have points in a window, as far as the store's index tells."""
    if window.is_open or window.axis != "step":
        return chunks
    low, high = window.least, window.high
    return [
        entry
        for entry in chunks
        if (low is None or entry.step_high >= low) and (high is None or entry.step_low <= high)
    ]


def _find_nearer(
    rows: StoredRows,
    cache: BlockCache,
    share: _Share,
    chunks: list[ChunkEntry],
    window: Window,
) -> list[ChunkEntry]:
    """Those that do have points near a window, as their blocks tell."""
    whole = [entry for entry in chunks if is_whole(entry, share.hidden, share.key)]
    if not whole:
        return chunks
    try:
        blocks, chunk_of = load_axis_blocks(rows, whole, window.axis, cache)
    except SchemaValidationError:
        return chunks  # a roll-up is damaged
    some, _ = find_overlapping(blocks, window)
    near = {whole[place].pk for place in np.unique(chunk_of[some]).tolist()}
    return [
        entry
        for entry in chunks
        if entry.pk in near or not is_whole(entry, share.hidden, share.key)
    ]


def _load_chunks(
    rows: StoredRows, share: _Share, chunks: list[ChunkEntry], window: Window
) -> list[Columns]:
    """The points of chunks that are in a window and not hidden."""
    if not chunks:
        return []
    found = rows.join_chunks(share.writer, _KIND, chunks)
    within = _take_within(hide_rows(found, share.hidden, share.key), window)
    return [within] if within.count else []


def _take_within(points: Columns, window: Window) -> Columns:
    if window.is_open or not points.count:
        return points
    inside = window.find_rows(points[window.axis])
    return points if inside is None else points.take(inside)


def _join(parts: Iterable[Columns]) -> Columns:
    """Points of several parts, with the columns that a curve needs."""
    found = list(parts)
    count = sum(part.count for part in found)
    arrays = {
        name: found[0][name] if len(found) == 1 else np.concatenate([part[name] for part in found])
        for name in _COLUMNS
    }
    return Columns(_KIND, count, arrays)


def _group(key: str, whose: tuple[int, int], found: AxisBlocks, entries: int) -> Curve:
    """Entries of about equally many blocks."""
    count = len(found.least)
    size = min(entries, count)
    starts = np.arange(size, dtype=np.int64) * count // size
    series = group_entries(key, found.blocks, starts)
    steps = find_first_steps(found.bad_step, found.blocks.non_finite, starts)
    attempt, rank = whose
    return extend_series(series, attempt, rank, steps)
