"""Reads what does not fit in memory, part by part, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quark_backends.store.stored_rows import ChunkEntry, StoredRows, WriterRow, hide_rows
from quark_core.columns import Columns
from quark_core.query import Query

__all__ = ["iterate_writer"]


def iterate_writer(
    stored: StoredRows, writer: WriterRow, kind: str, query: Query, rows: int
) -> Iterator[Columns]:
    """A writer's rows that fit a query (without a limit), in parts of about `rows` rows.

    A part is a stretch of sequences, wide enough for so many rows; what begins
    within it is opened, and what reaches beyond it stays open.
    """
    hidden = None if query.all_attempts else stored.find_hidden(writer, kind)
    pieces = _find_pieces(stored, writer, kind, query)
    if not pieces:
        return
    width = _choose_width(pieces, rows)
    opened: list[_Opened] = []
    place = 0
    while place < len(pieces) or opened:
        firsts = [piece.next_sequence for piece in opened]
        firsts += [piece.first_sequence for piece in pieces[place : place + 1]]
        end = min(firsts) + width
        begun = place
        while place < len(pieces) and pieces[place].first_sequence < end:
            place += 1
        found = _load_pieces(stored, writer, kind, pieces[begun:place])
        opened += [_Opened(part) for part in found if part.count]
        parts = [cut for piece in opened if (cut := piece.take_before(end)).count]
        opened = [piece for piece in opened if not piece.is_empty]
        joined = Columns.concatenate(kind, parts).order_by_sequence()
        chosen = hide_rows(joined, hidden).select(query)
        for start in range(0, chosen.count, rows):
            yield chosen.take(slice(start, start + rows))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk or batch that is not opened yet: the one or the number of the other."""

    first_sequence: int
    last_sequence: int
    count: int
    chunk: ChunkEntry | None = None
    number: int = -1


class _Opened:
    """Rows of a piece, in order, and how far they are handed out."""

    __slots__ = ("_place", "_rows", "_sequences")

    def __init__(self, rows: Columns) -> None:
        self._rows = rows.order_by_sequence()
        self._sequences = self._rows["sequence"]
        self._place = 0

    @property
    def is_empty(self) -> bool:
        return self._place >= len(self._sequences)

    @property
    def next_sequence(self) -> int:
        return int(self._sequences[self._place])

    def take_before(self, end: int) -> Columns:
        """The rows before a sequence that were not handed out yet."""
        start = self._place
        self._place = int(np.searchsorted(self._sequences, end))
        return self._rows.take(slice(start, self._place))


def _choose_width(pieces: Sequence[_Piece], rows: int) -> int:
    """How many sequences hold about so many rows."""
    first = min(piece.first_sequence for piece in pieces)
    last = max(piece.last_sequence for piece in pieces)
    count = sum(piece.count for piece in pieces)
    return max(1, rows * (last - first + 1) // max(1, count))


def _find_pieces(stored: StoredRows, writer: WriterRow, kind: str, query: Query) -> list[_Piece]:
    """Every chunk and batch, by its first sequence."""
    pieces = [
        _Piece(entry.first_sequence, entry.last_sequence, entry.count, chunk=entry)
        for entry in stored.find_chunks(writer, kind, query)
    ]
    for number, part in stored.iterate_batches(writer, kind):
        if part is not None:
            sequences = part["sequence"]
            first, last = int(sequences.min()), int(sequences.max())
            pieces.append(_Piece(first, last, part.count, number=number))
    return sorted(pieces, key=lambda piece: piece.first_sequence)


def _load_pieces(
    stored: StoredRows, writer: WriterRow, kind: str, pieces: Sequence[_Piece]
) -> list[Columns]:
    """Rows of pieces, asked for together: over a network each question takes its time."""
    chunks = [piece.chunk for piece in pieces if piece.chunk is not None]
    numbers = [piece.number for piece in pieces if piece.chunk is None]
    return [
        stored.read_chunks(writer, kind, chunks),
        *stored.load_batches(writer, kind, numbers),
    ]
