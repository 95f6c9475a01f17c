"""Reads a run in parts: since a cursor, in bounded memory, and for a mirror that is behind."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from quark_backends.store.batch_bodies import has_json, weigh_body
from quark_backends.store.chunks import BatchSpan, decode_spans
from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.stored_rows import (
    ChunkEntry,
    StoredRows,
    WriterRow,
    find_texts,
    hide_rows,
)
from quark_core.backends.contract import Batch
from quark_core.backends.curves import Cursor, RunChanges, RunHeads
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import can_be_hidden
from quark_core.records.codec import BODY_HEAD_BYTES, MALFORMED, encode_records, measure_body
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


_log = logging.getLogger("quark")

_ALL = Query(all_attempts=True)


def replay_batches(
    connection: StoreConnection,
    stored: StoredRows,
    writer: WriterRow,
    start: int,
    limit: int,
    limit_bytes: int | None = None,
) -> list[Batch]:
    """A writer's batches from a number on, in order, at most `limit`, and of so many bytes.

    Of what is larger it is the first.

    A batch that was compacted is made again: the same records under the same
    number, though not the same bytes.
    """
    sizes = dict(
        connection.execute(
            "SELECT number, length(body) FROM batch WHERE writer_pk = ? AND number >= ?"
            " ORDER BY number LIMIT ?",
            (writer.pk, start, limit),
        ).fetchall()
    )
    compacted = _find_spans(connection, writer, start)
    wanted = sorted({*sizes, *compacted})[:limit]
    if limit_bytes is not None:
        totals = accumulate(sizes.get(number, 0) for number in wanted)
        wanted = wanted[: max(1, sum(total <= limit_bytes for total in totals))]
    batches = {
        row[0]: Batch(writer.run_id, writer.writer_id, writer.attempt, writer.rank, *row)
        for row in connection.execute(
            "SELECT number, kind, count, body FROM batch"
            " WHERE writer_pk = ? AND number BETWEEN ? AND ? ORDER BY number",
            (writer.pk, start, wanted[-1] if wanted else start),
        )
    }
    rows: dict[str, Columns] = {}
    out = []
    for number in wanted:
        if number in batches:
            out.append(batches[number])
            continue
        kind, span = compacted[number]
        if kind not in rows:
            spans = [s for k, s in (compacted[n] for n in wanted if n in compacted) if k == kind]
            rows[kind] = _load_rows(stored, writer, kind, spans)
        batch = _make_batch(writer, kind, span, rows[kind])
        if batch is not None:
            out.append(batch)
    return out


def _load_rows(stored: StoredRows, writer: WriterRow, kind: str, spans: list[BatchSpan]) -> Columns:
    """The compacted rows of one kind that spans speak of, and some more."""
    sequences = [sequence for span in spans for sequence in span.sequences]
    low, high = min(sequences), max(sequences)
    entries = [
        entry
        for entry in stored.find_chunks(writer, kind, _ALL)
        if entry.last_sequence >= low and entry.first_sequence <= high
    ]
    return stored.join_chunks(writer, kind, entries)


def _find_spans(
    connection: StoreConnection, writer: WriterRow, start: int
) -> dict[int, tuple[str, BatchSpan]]:
    bodies = connection.execute(
        "SELECT body FROM frame WHERE writer_pk = ? AND last_number >= ?", (writer.pk, start)
    )
    found: dict[int, tuple[str, BatchSpan]] = {}
    for (body,) in bodies:
        try:
            kind, spans = decode_spans(body)
        except SchemaValidationError as error:
            _log.warning("writer %s: batches cannot be returned: %s", writer.writer_id, error)
            continue
        found.update({s.number: (kind, s) for s in spans if s.number >= start})
    return found


def _make_batch(writer: WriterRow, kind: str, span: BatchSpan, rows: Columns) -> Batch | None:
    """The batch with those of its records that can still be read; None where none can."""
    wanted = np.array(span.sequences)
    places = np.searchsorted(rows["sequence"], wanted)
    places, wanted = places[places < rows.count], wanted[places < rows.count]
    records = rows.take(places[rows["sequence"][places] == wanted]).to_records()
    if not records:
        return None
    return Batch(
        writer.run_id,
        writer.writer_id,
        writer.attempt,
        writer.rank,
        span.number,
        kind,
        len(records),
        encode_records(records),
    )


# Records that hold JSON values are read up to so many bytes of bodies at once, of which memory
# may take fifty times as many. Records of chunks are counted as of so many bytes each.
_MOST_BYTES = 2 * 2**20
_ROW_BYTES = 256
_SHAPE = ""
"""Under this name a cursor has what tells whether earlier reads still hold; no writer has it."""
_WITHIN = "\x01"
"""Before a writer's name: how many rows of its next batch were read already."""


def read_heads(rows: StoredRows, run_pk: int) -> RunHeads:
    """How far a run has come."""
    return RunHeads(
        cursor=_Writers.find(rows, run_pk).make_cursor(),
        outputs=_count_outputs(rows.connection, run_pk),
    )


def read_changes(
    rows: StoredRows,
    run_pk: int,
    writers: Sequence[WriterRow],
    cursor: Cursor,
    *,
    kinds: Sequence[str],
    keys: Sequence[str] | None,
    all_attempts: bool,
    max_rows: int,
) -> RunChanges:
    """What came since a cursor; see `SupportsChanges`.

    Args:
        rows: Loads rows.
        run_pk: The run.
        writers: Its writers, in persistence order.
        cursor: Up to where the run was read.
        kinds: Kinds of records that are wanted.
        keys: Stored keys of the metrics that are wanted; None for all.
        all_attempts: Also what a later attempt hides.
        max_rows: How many records are given at most.
    """
    found = _Writers.find(rows, run_pk)
    outputs = _count_outputs(rows.connection, run_pk)
    if found.is_stale(cursor, kinds):
        return RunChanges(cursor=cursor, stale=True, outputs=outputs)
    following = found.make_cursor()
    parts: dict[str, list[Columns]] = {}
    left, bytes_left, more = max_rows, _MOST_BYTES, False
    for writer in writers:
        start, end = cursor.get(writer.writer_id, 0), following[writer.writer_id]
        if start >= end:
            continue
        within = cursor.get(f"{_WITHIN}{writer.writer_id}", 0)
        if left <= 0 or bytes_left <= 0:
            following[writer.writer_id], more = start, True
            if within:
                following[f"{_WITHIN}{writer.writer_id}"] = within
            continue
        new = _find_new(rows.connection, writer, start, kinds, left, within, bytes_left)
        left -= new.count
        bytes_left -= new.size_bytes
        if new.end is not None:
            following[writer.writer_id], more = new.end, True
            if new.within:
                following[f"{_WITHIN}{writer.writer_id}"] = new.within
        for kind in kinds:
            its = _load(rows, writer, kind, new, keys)
            if not all_attempts:
                its = hide_rows(its, rows.find_hidden(writer, kind, keys))
            if its.count:
                parts.setdefault(kind, []).append(its)
    records = {kind: Columns.concatenate(kind, its) for kind, its in parts.items()}
    return RunChanges(cursor=following, records=records, more=more, outputs=outputs)


@dataclass(frozen=True, slots=True)
class _Writers:
    """The writers of a run: of each its next number, and what its points look like to readers."""

    ends: Mapping[str, int]
    looks: Mapping[str, str]

    @classmethod
    def find(cls, rows: StoredRows, run_pk: int) -> _Writers:
        """Those of a run."""
        connection = rows.connection
        found = connection.execute(
            "SELECT pk, id, head, attempt, hidden_step FROM writer WHERE run_pk = ? ORDER BY pk",
            (run_pk,),
        ).fetchall()
        hidden: dict[int, list[str]] = {}
        if any(row[4] is not None for row in found):
            noted = connection.execute(
                "SELECT writer_pk, kind, sequence FROM hidden WHERE writer_pk IN"
                " (SELECT pk FROM writer WHERE run_pk = ?) ORDER BY writer_pk, kind",
                (run_pk,),
            )
            for writer_pk, kind, sequence in noted:
                hidden.setdefault(writer_pk, []).append(f"{kind}:{sequence}")
        if len({row[3] for row in found}) > 1:
            for writer_pk, looks in rows.list_replaced(run_pk).items():
                hidden.setdefault(writer_pk, []).extend(looks)
        return cls(
            {writer_id: head + 1 for _, writer_id, head, _, _ in found},
            {
                writer_id: f"{writer_id}/{attempt}/{step}/{','.join(hidden.get(pk, ()))}"
                for pk, writer_id, _, attempt, step in found
            },
        )

    def make_cursor(self) -> dict[str, int]:
        """The cursor of this moment."""
        return {**self.ends, _SHAPE: self._take_shape(self.ends)}

    def is_stale(self, cursor: Cursor, kinds: Sequence[str]) -> bool:
        """Whether a cursor's reader has seen what is not there any more, or not like that.

        What a later attempt hides is nothing to who reads only what cannot be hidden.
        """
        known = [name for name in cursor if name != _SHAPE and not name.startswith(_WITHIN)]
        if any(name not in self.ends or cursor[name] > self.ends[name] for name in known):
            return True
        if not known or not any(map(can_be_hidden, kinds)):
            return False
        return cursor.get(_SHAPE) != self._take_shape(known)

    def _take_shape(self, names: Sequence[str] | Mapping[str, int]) -> int:
        """A number that tells apart how these writers look."""
        return zlib.crc32("\n".join(sorted(self.looks[name] for name in names)).encode())


@dataclass(slots=True)
class _New:
    """Batches of one writer that a reader has not seen.

    Attributes:
        numbers: Those that are batches still, by kind.
        cuts: Of those of them that are not wanted whole: which of their rows, by number.
        sequences: Sequences of those that were compacted, by kind.
        count: How many records they hold, at least.
        size_bytes: How many bytes those have that hold JSON values.
        end: The number to go on with, where there are more; None where these are all.
        within: How many rows of that one were found already.
    """

    numbers: dict[str, list[int]] = field(default_factory=dict)
    cuts: dict[int, slice] = field(default_factory=dict)
    sequences: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0
    size_bytes: int = 0
    end: int | None = None
    within: int = 0


class _Waiting(NamedTuple):
    """A batch that was not compacted: its records, and its body."""

    rows: int
    head: bytes
    stored_bytes: int

    @property
    def size_bytes(self) -> int:
        """How large the body is once it is decompressed."""
        return measure_body(bytes(self.head), self.stored_bytes)


def _find_new(
    connection: StoreConnection,
    writer: WriterRow,
    start: int,
    kinds: Sequence[str],
    limit: int,
    within: int,
    limit_bytes: int,
) -> _New:
    """A writer's batches of these kinds from a number on, the oldest rows of them up to limits.

    A batch may hold more than the limit, and its rows be long: then it is given in parts. Its
    rows count in the order of their sequences, which compacting does not change.
    """
    marks = ", ".join("?" * len(kinds))
    waiting = connection.execute(
        f"SELECT number, kind, count, substr(body, 1, {BODY_HEAD_BYTES}), length(body) FROM batch "
        f"WHERE writer_pk = ? AND kind IN ({marks}) AND number >= ? ORDER BY number",
        (writer.pk, *kinds, start),
    )
    new = _New()
    for number, kind, found in _merge(
        ((number, kind, _Waiting(*its)) for number, kind, *its in waiting),
        _iterate_spans(connection, writer, start, kinds),
    ):
        if new.count >= limit or new.size_bytes >= limit_bytes:
            new.end = number
            break
        count = len(found.sequences) if isinstance(found, BatchSpan) else found.rows
        if has_json(kind):
            size = count * _ROW_BYTES if isinstance(found, BatchSpan) else found.size_bytes
            if new.count and new.size_bytes + size > limit_bytes:
                new.end = number
                break
            new.size_bytes += size
        first = min(within, count) if number == start else 0
        last = min(count, first + limit - new.count)
        if isinstance(found, BatchSpan):
            sequences = sorted(found.sequences)[first:last]
            new.sequences.setdefault(kind, []).extend(sequences)
        else:
            new.numbers.setdefault(kind, []).append(number)
            if (first, last) != (0, count):
                new.cuts[number] = slice(first, last)
        new.count += last - first
        if last < count:
            new.end, new.within = number, last
            break
    waiting.close()
    return new


def _merge(
    waiting: Iterator[tuple[int, str, _Waiting]], spans: Iterator[tuple[int, str, BatchSpan]]
) -> Iterator[tuple[int, str, _Waiting | BatchSpan]]:
    """Both by their numbers, no two of which are the same."""
    from heapq import merge

    yield from merge(waiting, spans, key=lambda item: item[0])  # type: ignore[misc]


def _iterate_spans(
    connection: StoreConnection, writer: WriterRow, start: int, kinds: Sequence[str]
) -> Iterator[tuple[int, str, BatchSpan]]:
    """What was compacted of a writer from a number on, by number."""
    frames = connection.execute(
        "SELECT first_number, body FROM frame WHERE writer_pk = ? AND last_number >= ?"
        " ORDER BY first_number",
        (writer.pk, start),
    )
    held: list[tuple[int, str, BatchSpan]] = []
    for first, body in frames:
        # Frames of several kinds overlap, so that only what is before the next one is in order.
        held.sort(key=lambda item: item[0])
        while held and held[0][0] < first:
            yield held.pop(0)
        try:
            kind, spans = decode_spans(body)
        except SchemaValidationError:
            continue  # told of where batches are given back
        if kind in kinds:
            held += [(span.number, kind, span) for span in spans if span.number >= start]
    frames.close()
    yield from sorted(held, key=lambda item: item[0])


def _load(
    rows: StoredRows, writer: WriterRow, kind: str, new: _New, keys: Sequence[str] | None
) -> Columns:
    """Rows of one kind that are new, in order; of metrics only these."""
    by_key = kind == MetricRecord.KIND and keys is not None
    parts: list[Columns] = []
    sequences = new.sequences.get(kind)
    if sequences:
        parts.append(_load_compacted(rows, writer, kind, sequences, keys if by_key else None))
    for number, part in rows.load_numbered(writer, kind, new.numbers.get(kind, ()), {}):
        cut = new.cuts.get(number)
        parts.append(part if cut is None else part.order_by_sequence().take(cut))
    wanted = []
    for part in parts:
        chosen = part
        if by_key and part.count:
            names = frozenset(keys or ())
            chosen = part.take(np.array([name in names for name in part["metric_key"].tolist()]))
        if chosen.count:
            wanted.append(chosen)
    found = Columns.concatenate(kind, wanted)
    return found.order_by_sequence() if can_be_hidden(kind) or len(wanted) > 1 else found


def _load_compacted(
    rows: StoredRows,
    writer: WriterRow,
    kind: str,
    sequences: Sequence[int],
    keys: Sequence[str] | None,
) -> Columns:
    wanted = np.unique(np.array(sequences, dtype=np.int64))
    names = None if keys is None else rows.find_keys(keys)
    if names is None:
        chunks = rows.find_chunks(writer, kind, _ALL)
    else:
        by_name = rows.find_series_chunks(writer, list(names.values()))
        chunks = [entry for its in by_name.values() for entry in its]
    low, high = int(wanted[0]), int(wanted[-1])
    near = [
        entry for entry in chunks if entry.last_sequence >= low and entry.first_sequence <= high
    ]
    found = rows.read_chunks(writer, kind, near)
    return found.take(np.isin(found["sequence"], wanted))


def _count_outputs(connection: StoreConnection, run_pk: int) -> int:
    """How many generations of outputs a run has."""
    (found,) = connection.execute(
        "SELECT count(*) FROM generation WHERE run_pk = ?", (run_pk,)
    ).fetchone()
    return int(found)
