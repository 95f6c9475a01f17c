"""Gives a writer's rows in parts, so that a run is read in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quark_backends.store.encoding.bodies import has_json, weigh_body
from quark_backends.store.reading.stored_rows import (
    ChunkEntry,
    StoredRows,
    WriterRow,
    find_texts,
    hide_rows,
)
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.codec import MALFORMED
from quark_core.records.columns import Columns
from quark_core.records.query import Query

# What the JSON values may take of memory that are open at once, unless one piece has more.
_OPEN_BYTES = 32 * 2**20
# What a byte of a chunk may become. Compaction gives none more JSON than may be open.
_UNPACKED = 64


def iterate_writer(
    stored: StoredRows, writer: WriterRow, kind: str, query: Query, rows: int
) -> Iterator[Columns]:
    """A writer's rows that fit a query (without a limit), in parts of about `rows` rows.

    A part is a range of sequences, wide enough for so many rows, and no wider than what memory
    takes; what begins within it is opened, and what reaches beyond it stays open.
    """
    hidden = stored.find_hidden_by(writer, kind, query)
    pieces = _find_pieces(stored, writer, kind, query)
    if not pieces:
        return
    width = _choose_width(pieces, rows)
    opened: list[_Opened] = []
    place = 0
    while place < len(pieces) or opened:
        firsts = [piece.next_sequence for piece in opened]
        firsts += [piece.first_sequence for piece in pieces[place : place + 1]]
        end: int | None = min(firsts) + width
        begun = place
        weight = sum(piece.weight for piece in opened)
        bound = min(firsts) + width
        while place < len(pieces) and pieces[place].first_sequence < bound:
            weight += pieces[place].weight
            if weight > _OPEN_BYTES and pieces[place].first_sequence > min(firsts):
                end = pieces[place].first_sequence
                break
            if weight > _OPEN_BYTES and (opened or place > begun):
                # No writer numbers records so: what is open is given before the next is opened.
                end = None
                break
            place += 1
        opened += _open_pieces(stored, writer, kind, query, pieces[begun:place])
        parts = [cut for piece in opened if (cut := piece.take_before(end)).count]
        opened = [piece for piece in opened if not piece.is_empty]
        joined = Columns.concatenate(kind, parts).order_by_sequence()
        chosen = hide_rows(joined, hidden).select(query)
        for start in range(0, chosen.count, rows):
            yield chosen.take(slice(start, start + rows))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk or batch that is not opened yet: the one or the number of the other.

    Attributes:
        first_sequence, last_sequence, count: Of its rows.
        weight: About what its JSON values will take of memory.
        chunk: It, where it is one.
        number: The batch's.
    """

    first_sequence: int
    last_sequence: int
    count: int
    weight: int = 0
    chunk: ChunkEntry | None = None
    number: int = -1


class _Opened:
    """Rows of a piece, in order, and how far they are handed out."""

    __slots__ = ("_place", "_rows", "_sequences", "weight")

    def __init__(self, rows: Columns, weight: int) -> None:
        self.weight = weight
        self._rows = rows.order_by_sequence()
        self._sequences = self._rows["sequence"]
        self._place = 0

    @property
    def is_empty(self) -> bool:
        return self._place >= len(self._sequences)

    @property
    def next_sequence(self) -> int:
        return int(self._sequences[self._place])

    def take_before(self, end: int | None) -> Columns:
        """The rows before a sequence that were not handed out yet; all of them by default."""
        start = self._place
        last = len(self._sequences) if end is None else np.searchsorted(self._sequences, end)
        self._place = int(last)
        return self._rows.take(slice(start, self._place))


def _choose_width(pieces: Sequence[_Piece], rows: int) -> int:
    """How many sequences hold about so many rows."""
    first = min(piece.first_sequence for piece in pieces)
    last = max(piece.last_sequence for piece in pieces)
    count = sum(piece.count for piece in pieces)
    return max(1, rows * (last - first + 1) // max(1, count))


def _find_pieces(stored: StoredRows, writer: WriterRow, kind: str, query: Query) -> list[_Piece]:
    """Every chunk and batch, by its first sequence."""
    sizes: dict[int, int] = {}
    if kind != MetricRecord.KIND and has_json(kind):
        sql = "SELECT pk, length(body) FROM chunk WHERE writer_pk = ? AND kind = ?"
        sizes = dict(stored.connection.execute(sql, (writer.pk, kind)).fetchall())
    pieces = [
        _Piece(
            entry.first_sequence,
            entry.last_sequence,
            entry.count,
            weight=min(_OPEN_BYTES, _UNPACKED * sizes.get(entry.pk, 0)),
            chunk=entry,
        )
        for entry in stored.find_chunks(writer, kind, query)
    ]
    equals = find_texts(kind, query)
    for number, count, body in stored.open_batches(writer, kind, -1):
        if body is None:
            continue
        try:
            part = Columns.from_body_where(body, writer.origin, equals)
            if part.count:
                sequences = part["sequence"]
                first, last = int(sequences.min()), int(sequences.max())
                weight = weigh_body(body)
                pieces.append(_Piece(first, last, part.count, weight, number=number))
        except (SchemaValidationError, *MALFORMED) as error:
            stored.warn_of_batch(writer, number, count, error)
    return sorted(pieces, key=lambda piece: piece.first_sequence)


def _open_pieces(
    stored: StoredRows, writer: WriterRow, kind: str, query: Query, pieces: Sequence[_Piece]
) -> Iterator[_Opened]:
    """Pieces with their rows, asked for together: over a network each question takes its time."""
    chunks = [piece.chunk for piece in pieces if piece.chunk is not None]
    weights = {piece.number: piece.weight for piece in pieces if piece.chunk is None}
    if chunks:
        rows = stored.read_chunks(writer, kind, chunks)
        if rows.count:
            yield _Opened(rows, sum(piece.weight for piece in pieces if piece.chunk is not None))
    found = stored.load_numbered(writer, kind, list(weights), find_texts(kind, query))
    for number, rows in found:
        if rows.count:
            yield _Opened(rows, weights[number])
