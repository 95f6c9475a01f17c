"""Reads what does not fit in memory, part by part, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from quark_backends.store.stored_rows import StoredRows, WriterRow, hide_rows
from quark_core.columns import Columns
from quark_core.query import Query

__all__ = ["iterate_writer"]

_Load = Callable[[], Columns | None]


def iterate_writer(
    stored: StoredRows, writer: WriterRow, kind: str, query: Query, rows: int
) -> Iterator[Columns]:
    """A writer's rows that fit a query (without a limit), in parts of at most `rows` rows.

    Chunks and batches are opened by their first sequence; a row is handed out
    once nothing that is still closed can come before it.
    """
    hidden = None if query.all_attempts else stored.find_hidden(writer, kind)
    pieces = _find_pieces(stored, writer, kind, query)
    opened = Columns.empty(kind)
    place = 0
    while place < len(pieces) or opened.count:
        parts = [opened] if opened.count else []
        count = opened.count
        while place < len(pieces) and (count < rows or len(parts) < 2):
            part = pieces[place][1]()
            place += 1
            if part is not None and part.count:
                parts.append(part)
                count += part.count
        joined = Columns.concatenate(kind, parts).order_by_sequence()
        end = joined.count
        if place < len(pieces):
            end = int(np.searchsorted(joined["sequence"], pieces[place][0]))
        chosen = hide_rows(joined.take(slice(0, end)), hidden).select(query)
        for start in range(0, chosen.count, rows):
            yield chosen.take(slice(start, start + rows))
        # By index, so that what was handed out is not kept alive.
        opened = joined.take(np.arange(end, joined.count)).make_all()


def _find_pieces(
    stored: StoredRows, writer: WriterRow, kind: str, query: Query
) -> list[tuple[int, _Load]]:
    """First sequence of each chunk and batch, in order, and what loads it."""
    pieces: list[tuple[int, _Load]] = [
        (entry.first_sequence, partial(stored.load_chunk, writer, kind, entry))
        for entry in stored.find_chunks(writer, kind, query)
    ]
    for number, part in stored.iterate_batches(writer, kind):
        if part is not None:
            first = int(part["sequence"].min())
            pieces.append((first, partial(stored.load_batch, writer, kind, number)))
    return sorted(pieces, key=lambda piece: piece[0])
