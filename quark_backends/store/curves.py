"""Curves of one metric, out of roll-ups wherever these will do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from quark_backends.store.rollups import (
    BLOCK_POINTS,
    Blocks,
    summarize_blocks,
)
from quark_backends.store.stored_rows import ChunkEntry, StoredRows, WriterRow, hide_rows
from quark_core.attempts import HiddenRows
from quark_core.columns import Array, Columns
from quark_core.errors import SchemaValidationError
from quark_core.query import Query
from quark_core.reading import reduce_columns
from quark_core.records import MetricRecord
from quark_core.series import Series

__all__ = ["read_curve"]

_KIND = MetricRecord.KIND


def read_curve(
    rows: StoredRows,
    writers: Sequence[WriterRow],
    key: str,
    max_points: int | None,
    all_attempts: bool,
) -> Series:
    """One metric of a run, in at most `max_points` entries.

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
        hidden = None if all_attempts else rows.find_hidden(writer, _KIND)
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
        while whole < len(entries) and _is_whole(entries[whole], hidden):
            whole += 1
    blocks: list[Blocks] = []
    if whole:
        try:
            blocks = list(rows.load_blocks(entries[:whole]))
        except SchemaValidationError:
            whole = 0  # the points themselves are there
    rest = rows.join_chunks(writer, _KIND, entries[whole:])
    tail = rows.load_tail(writer, _KIND).select(query)
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


def _is_whole(entry: ChunkEntry, hidden: HiddenRows | None) -> bool:
    """Whether nothing in a chunk is hidden."""
    if hidden is None:
        return True
    return entry.step_high < hidden.step and (
        hidden.sequence is None or entry.last_sequence <= hidden.sequence
    )


def _group(key: str, blocks: Blocks, max_points: int) -> Series:
    """Entries of about equally many blocks."""
    count = len(blocks.count)
    entries = min(max_points, count)
    edges = np.arange(entries + 1, dtype=np.int64) * count // entries
    starts, sizes = edges[:-1], np.diff(edges)
    points = np.add.reduceat(blocks.count, starts)
    non_finite = np.add.reduceat(blocks.non_finite, starts)
    finite = blocks.count - blocks.non_finite
    low, low_step = _reduce(np.minimum, blocks.low, np.inf, blocks.low_step, starts, sizes)
    high, high_step = _reduce(np.maximum, blocks.high, -np.inf, blocks.high_step, starts, sizes)
    weights = np.maximum(points - non_finite, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        shares = np.where(finite > 0, blocks.mean * (finite / np.repeat(weights, sizes)), 0.0)
        mean = np.add.reduceat(shares, starts)
    return Series(
        key=key,
        step=blocks.step[starts],
        epoch=blocks.epoch[starts],
        time_us=blocks.time_us[starts],
        low=low,
        high=high,
        # Rounding can carry the mean of equal values past them.
        mean=np.where(points > non_finite, np.clip(mean, low, high), np.nan),
        last=blocks.last[edges[1:] - 1],
        low_step=low_step,
        high_step=high_step,
        count=points,
        non_finite=non_finite,
        exact=False,
    )


def _reduce(
    function: np.ufunc, values: Array, neutral: float, steps: Array, starts: Array, sizes: Array
) -> tuple[Array, Array]:
    """Extreme of each group, and the step of the first block that has it."""
    missing = np.isnan(values)
    filled = np.where(missing, neutral, values) if missing.any() else values
    extremes = function.reduceat(filled, starts)
    hits = np.flatnonzero((filled == np.repeat(extremes, sizes)) & ~missing)
    groups = np.repeat(np.arange(len(starts)), sizes)[hits]
    its_step = np.full(len(starts), -1, dtype=np.int64)
    # Written backwards, the first hit of each group stays.
    its_step[groups[::-1]] = steps[hits[::-1]]
    known = np.zeros(len(starts), dtype=np.bool_)
    known[groups] = True
    return np.where(known, extremes, np.nan), its_step


def _not_empty(parts: Sequence[Columns]) -> list[Columns]:
    return [part for part in parts if part.count]
