"""Curves of one metric, out of roll-ups wherever these will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from quark_backends.store.encoding.rollups import (
    BLOCK_POINTS,
    Blocks,
    summarize_blocks,
)
from quark_backends.store.reading.stored_rows import ChunkEntry, StoredRows, WriterRow, hide_rows
from quark_core.backends.series import Series, choose_rank_points, group_entries, merge_ranks
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.runs.reading import reduce_columns

_KIND = MetricRecord.KIND


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
