"""Curves and grids of metrics, out of roll-ups and chunks, and points not compacted yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from quark_backends.store.batch_bodies import number_texts
from quark_backends.store.chunks import Chunk
from quark_backends.store.reading.stored_rows import (
    AxisBlocks,
    BlockCache,
    ChunkEntry,
    StoredRows,
    WriterRow,
    find_overlapping,
    hide_rows,
    load_axis_blocks,
    summarize_axis,
)
from quark_backends.store.rollups import BLOCK_POINTS, Blocks, summarize_blocks
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
from quark_core.backends.grids import Grid, GridBuilder, GridQuery, find_counters
from quark_core.backends.series import Series, choose_rank_points, group_entries, merge_ranks
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows
from quark_core.records.codec import DecodedBody
from quark_core.records.columns import Array, Columns
from quark_core.records.query import Query
from quark_core.runs.reading import reduce_columns

_KIND = MetricRecord.KIND
_COLUMNS = ("sequence", "step", "epoch", "time_us", "value")
# A tail of no more points is kept decoded, 44 bytes a point, as long as there is room.
_KEPT_ROWS = 200_000
# Of a longer one so many points of the wanted metrics are given at once.
_PART_ROWS = 65_536
# Nor is one of more batches.
_KEPT_BATCHES = 1024


@dataclass(slots=True)
class _Points:
    """Points of several metrics in the order of the batches.

    Attributes:
        known: Code of each metric.
        codes, arrays: The metric of each point, and its columns, in parts.
    """

    known: dict[str, int] = field(default_factory=dict)
    codes: list[Array] = field(default_factory=list)
    arrays: dict[str, list[Array]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    count: int = 0
    order: Array | None = None

    def add(self, body: DecodedBody, wanted: int | None = None) -> None:
        """Add a batch's points, or those whose code is below `wanted`.

        Raises:
            SchemaValidationError, ValueError, TypeError, KeyError, IndexError: It is malformed;
                nothing was added.
        """
        codes = number_texts(body, "metric_key", self.known)
        rows = None if wanted is None else np.flatnonzero(codes < wanted)
        if rows is not None and not len(rows):
            return
        columns = [body.to_array(name, rows) for name in _COLUMNS]
        if rows is not None:
            codes = codes[rows]
        if any(len(column) != len(codes) for column in columns):
            raise SchemaValidationError("its columns are of different lengths")
        self.codes.append(codes)
        for name, column in zip(_COLUMNS, columns, strict=True):
            self.arrays[name].append(column)
        self.count += len(codes)
        self.order = None

    def split(self, keys: Sequence[str]) -> dict[str, Columns]:
        """The points of each of these metrics that has any."""
        if self.order is None:
            self.codes = [np.concatenate(self.codes or [np.empty(0, dtype=np.int64)])]
            for name, parts in self.arrays.items():
                self.arrays[name] = [np.concatenate(parts)] if len(parts) > 1 else parts
            self.order = np.argsort(self.codes[0], kind="stable")
        codes = self.codes[0][self.order]
        found: dict[str, Columns] = {}
        for key in keys:
            code = self.known.get(key)
            if code is None:
                continue
            low, high = np.searchsorted(codes, [code, code + 1]).tolist()
            if low < high:
                rows = self.order[low:high]
                arrays = {name: parts[0][rows] for name, parts in self.arrays.items()}
                found[key] = Columns(_KIND, high - low, arrays)
        return found


@dataclass(slots=True)
class _Kept:
    """The tail of one writer as it was read: its first batch and the newest of them."""

    first: int
    newest: int = -1
    points: _Points = field(default_factory=_Points)


class MetricTails:
    """Reads the tails of writers; what is short is kept, so that only what came since is decoded.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def read(
        self, rows: StoredRows, writer: WriterRow, keys: Sequence[str]
    ) -> Iterator[dict[str, Columns]]:
        """The points of metrics in a writer's tail, in order, in parts of bounded size.

        Points of other metrics than these are decoded of a short tail only.
        """
        (first,) = rows.connection.execute(
            "SELECT min(number) FROM batch WHERE writer_pk = ? AND kind = ?", (writer.pk, _KIND)
        ).fetchone()
        kept = self._kept.pop(writer.pk, None)
        if first is None:
            return
        if kept is None or kept.first != first:
            kept = _Kept(first)
        if not self._is_short(rows, writer, kept):
            yield from _stream(rows, writer, keys)
            return
        for number, count, body in rows.open_batches(writer, _KIND, kept.newest):
            kept.newest = number
            _add(rows, writer, number, count, body, kept.points)
        self._kept[writer.pk] = kept
        while len(self._kept) > 1 and self._count_rows() > _KEPT_ROWS:
            self._kept.popitem(last=False)
        yield kept.points.split(keys)

    def _count_rows(self) -> int:
        return sum(kept.points.count for kept in self._kept.values())

    def _is_short(self, rows: StoredRows, writer: WriterRow, kept: _Kept) -> bool:
        """Whether the tail, with what came since it was kept, may be kept."""
        counts = rows.connection.execute(
            "SELECT count FROM batch WHERE writer_pk = ? AND kind = ? AND number > ? LIMIT ?",
            (writer.pk, _KIND, kept.newest, _KEPT_BATCHES + 1),
        ).fetchall()
        new = sum(count for (count,) in counts)
        return len(counts) <= _KEPT_BATCHES and kept.points.count + new <= _KEPT_ROWS


def _stream(
    rows: StoredRows, writer: WriterRow, keys: Sequence[str]
) -> Iterator[dict[str, Columns]]:
    known = {key: code for code, key in enumerate(keys)}
    points = _Points(dict(known))
    batches = records = 0
    for number, count, body in rows.open_batches(writer, _KIND, -1):
        batches += 1
        records += count
        _add(rows, writer, number, count, body, points, len(keys))
        if points.count >= _PART_ROWS:
            yield points.split(keys)
            points = _Points(dict(known))
    rows.note_backlog(records, batches)
    if points.count:
        yield points.split(keys)


def _add(
    rows: StoredRows,
    writer: WriterRow,
    number: int,
    count: int,
    body: DecodedBody | None,
    points: _Points,
    wanted: int | None = None,
) -> None:
    if body is None:
        return
    try:
        points.add(body, wanted)
    except (SchemaValidationError, ValueError, TypeError, KeyError, IndexError) as error:
        rows.warn_of_batch(writer, number, count, error)


def read_curve(
    rows: StoredRows,
    writers: Sequence[WriterRow],
    key: str,
    max_points: int | None,
    all_attempts: bool,
) -> Series:
    """One metric of a run over the ranks of these writers, in at most `max_points` entries."""
    ranks = {writer.rank for writer in writers}
    if len(ranks) > 1:
        points = choose_rank_points(max_points)
        attempts: dict[int, list[Series]] = {}
        for attempt, rank in dict.fromkeys((writer.attempt, writer.rank) for writer in writers):
            its = [writer for writer in writers if (writer.attempt, writer.rank) == (attempt, rank)]
            curve = _read_rank(rows, its, key, points, all_attempts)
            if len(curve):
                attempts.setdefault(attempt, []).append(replace(curve, ranks=(rank,)))
        ranks = {rank for curves in attempts.values() for curve in curves for rank in curve.ranks}
        if len(ranks) > 1:
            return merge_ranks(key, list(attempts.values()), max_points)
    its = [writer for writer in writers if writer.rank in ranks]
    curve = _read_rank(rows, its, key, max_points, all_attempts)
    return replace(curve, ranks=tuple(ranks)) if len(curve) else curve


def _read_rank(
    rows: StoredRows,
    writers: Sequence[WriterRow],
    key: str,
    max_points: int | None,
    all_attempts: bool,
) -> Series:
    """One metric as the writers of one rank have it, one after the other.

    Where each entry stands for a block of points or more, it is made of
    blocks; of points otherwise.
    """
    query = Query(equals={"metric_key": key}, all_attempts=all_attempts)
    found = [(writer, rows.find_chunks(writer, _KIND, query)) for writer in writers]
    stored = sum(entry.count for _, entries in found for entry in entries)
    if max_points is None or stored < max_points * BLOCK_POINTS:
        parts = [rows.load(writer, _KIND, query) for writer in writers]
        return reduce_columns(key, Columns.concatenate(_KIND, _not_empty(parts)), max_points)
    blocks: list[Blocks] = []
    for writer, entries in found:
        hidden = rows.find_hidden_by(writer, _KIND, query)
        blocks += _read_blocks(rows, writer, entries, query, hidden)
    joined = Blocks.join(blocks) if blocks else None
    if joined is None or int(joined.count.sum()) < max_points * BLOCK_POINTS:
        # Most of it is hidden, and what is left is few points.
        parts = [rows.load(writer, _KIND, query) for writer in writers]
        return reduce_columns(key, Columns.concatenate(_KIND, _not_empty(parts)), max_points)
    return _group(key, joined, max_points)


def _read_blocks(
    rows: StoredRows,
    writer: WriterRow,
    entries: list[ChunkEntry],
    query: Query,
    hidden: HiddenRows | None,
) -> list[Blocks]:
    """A writer's blocks, in order: of roll-ups first, of points where these will not do."""
    whole = 0
    if all(after.first_sequence > before.last_sequence for before, after in pairwise(entries)):
        while whole < len(entries) and is_whole(entries[whole], hidden, query.equals["metric_key"]):
            whole += 1
    blocks: list[Blocks] = []
    if whole:
        try:
            blocks = list(rows.load_blocks(entries[:whole]))
        except SchemaValidationError:
            whole = 0  # the points themselves are there
    rest = rows.join_chunks(writer, _KIND, entries[whole:])
    tail = rows.load_tail(writer, _KIND, query).select(query)
    joined = Columns.concatenate(_KIND, _not_empty([rest, tail])).order_by_sequence()
    if whole and joined.count and joined["sequence"][0] < entries[whole - 1].last_sequence:
        return _read_blocks_of_points(rows, writer, query, hidden)
    visible = hide_rows(joined, hidden)
    return [*blocks, summarize_blocks(visible)] if visible.count else blocks


def _read_blocks_of_points(
    rows: StoredRows, writer: WriterRow, query: Query, hidden: HiddenRows | None
) -> list[Blocks]:
    visible = hide_rows(rows.load(writer, _KIND, query), hidden)
    return [summarize_blocks(visible)] if visible.count else []


def is_whole(entry: ChunkEntry, hidden: HiddenRows | None, key: str) -> bool:
    """Whether nothing in a chunk of a metric is hidden."""
    return hidden is None or hidden.is_whole(
        entry.step_low, entry.step_high, entry.last_sequence, key
    )


def _group(key: str, blocks: Blocks, max_points: int) -> Series:
    """Entries of about equally many blocks."""
    count = len(blocks.count)
    entries = min(max_points, count)
    return group_entries(key, blocks, np.arange(entries, dtype=np.int64) * count // entries)


def _not_empty(parts: Sequence[Columns]) -> list[Columns]:
    return [part for part in parts if part.count]


# Curves of several metrics within a window, of one moment of the store.
#
# Where each entry stands for a block of points or more, it is made of blocks; of
# points otherwise. At the edges of a window points are read, so that low, high and
# count of each entry are those of the points in the window.

_POINT_COLUMNS = ("step", "epoch", "time_us", "value")
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
                if (
                    curve := _read_rank_curve(rows, cache, key, (attempt, rank), its, bound, window)
                )
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


def _read_rank_curve(
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
                    return _group_points(key, whose, blocks, entries)
    except SchemaValidationError:
        pass  # a roll-up is damaged; the points themselves are there
    points = [part for share in shares for part in _load_points(rows, cache, share, window)]
    if folded:
        assert entries is not None
        more = [summarize_axis(_join(points), window.axis)] if points else []
        return _group_points(key, whose, AxisBlocks.join([*more, *folded]).order(), entries)
    if not points:
        return None
    joined = _join(points)
    arrays = (joined[name] for name in _POINT_COLUMNS)
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
        for name in _POINT_COLUMNS
    }
    return Columns(_KIND, count, arrays)


def _group_points(key: str, whose: tuple[int, int], found: AxisBlocks, entries: int) -> Curve:
    """Entries of about equally many blocks."""
    count = len(found.least)
    size = min(entries, count)
    starts = np.arange(size, dtype=np.int64) * count // size
    series = group_entries(key, found.blocks, starts)
    steps = find_first_steps(found.bad_step, found.blocks.non_finite, starts)
    attempt, rank = whose
    return extend_series(series, attempt, rank, steps)


# So many rows of batches are put together before they are looked at.
_HELD_ROWS = 262_144
_MALFORMED = (SchemaValidationError, ValueError, TypeError, KeyError, IndexError)


def load_grid(stored: StoredRows, writers: Sequence[WriterRow], query: GridQuery) -> Grid:
    """The grid of what these writers have logged; see `SupportsGrid`."""
    builder = GridBuilder(query)
    read: dict[bytes, list[Any]] = {}
    for writer in writers:
        hidden = stored.find_hidden_by(writer, query.kind, query.query)
        for chunk in stored.iterate_chunks(
            query.kind, stored.find_chunks(writer, query.kind, query.query)
        ):
            try:
                _add_chunk(builder, chunk, writer, query, hidden, read)
            except SchemaValidationError as error:
                stored.warn_of_chunk(chunk.count, error)
        _add_tail(builder, stored, writer, query, hidden)
    return builder.make_grid()


def _add_tail(
    builder: GridBuilder,
    stored: StoredRows,
    writer: WriterRow,
    query: GridQuery,
    hidden: HiddenRows | None,
) -> None:
    """Add what is not compacted yet: of each batch a few columns, and many batches at once."""
    names: dict[str, int] = {str(writer.rank): 0} if query.by == "rank" else {}
    parts: list[tuple[Any, ...]] = []
    held = rows = batches = 0

    def flush() -> None:
        if parts:
            codes, *rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            builder.add(list(names), codes, *rest)
            parts.clear()

    for number, count, body in stored.open_batches(writer, query.kind, -1):
        rows, batches = rows + count, batches + 1
        if body is None:
            continue
        try:
            part = _read_body(body, names, query, hidden)
        except _MALFORMED as error:
            stored.warn_of_batch(writer, number, count, error)
            continue
        parts.append(part)
        held += count
        if held > _HELD_ROWS:
            flush()
            held = 0
    flush()
    stored.note_backlog(rows, batches)


def _read_body(
    body: DecodedBody, names: dict[str, int], query: GridQuery, hidden: HiddenRows | None
) -> tuple[Any, ...]:
    """What `GridBuilder.add` takes of a batch, behind the names."""
    count = body.count
    none = np.zeros(count, dtype=np.bool_)
    steps, values = body.to_array("step"), body.to_array(query.field)
    by_name = query.by == "name"
    codes = number_texts(body, query.row_column, names) if by_name else np.zeros(count, np.int64)
    nulls = body.nulls(query.field)
    broken = none
    for counter in find_counters(query.kind, query.field):
        broken = broken | (body.to_array(counter) > 0)
    kinds = none
    if query.kind == "layer":
        types: dict[str, int] = {"gradient": 0}
        kinds = number_texts(body, "summary_type", types) == 0
    found = (codes, steps, values, none if nulls is None else nulls, broken, kinds)
    if any(len(array) != count for array in found):
        raise SchemaValidationError("columns are of different lengths")
    if hidden is None:
        return found
    shown = ~hidden.find_hidden(steps, body.to_array("sequence"), body.to_array("epoch"))
    return tuple(array[shown] for array in found)


def _add_chunk(
    builder: GridBuilder,
    chunk: Chunk,
    writer: WriterRow,
    query: GridQuery,
    hidden: HiddenRows | None,
    read: dict[bytes, list[Any]],
) -> None:
    steps = chunk.array("step")
    values = chunk.array(query.field)
    nulls = chunk.nulls(query.field)
    if query.by == "rank":
        texts, codes = [str(writer.rank)], np.zeros(chunk.count, dtype=np.uint8)
    else:
        texts, codes = chunk.codes(query.row_column, read)
    kinds: Any = None
    if query.kind == "layer":
        types, type_codes = chunk.codes("summary_type", read)
        if len(types) == 1:
            kinds = types[0] == "gradient"
        else:
            kinds = np.array([kind == "gradient" for kind in types], dtype=np.bool_)[type_codes]
    broken: Any = None
    for counter in find_counters(query.kind, query.field):
        # Mostly it is one number for all rows, and 0.
        if chunk.constant(counter) in ((0,), (None,)):
            continue
        found = chunk.array(counter) > 0
        broken = found if broken is None else broken | found
    if hidden is not None:
        shown = ~hidden.find_hidden(steps, chunk.array("sequence"), chunk.array("epoch"))
        if not shown.all():
            steps, values, codes = steps[shown], values[shown], codes[shown]
            nulls = None if nulls is None else nulls[shown]
            kinds = kinds[shown] if isinstance(kinds, np.ndarray) else kinds
            broken = None if broken is None else broken[shown]
    builder.add(texts, codes, steps, values, nulls, broken, kinds)
