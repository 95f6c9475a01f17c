"""Loads what a writer has logged: chunks and the batches that are not compacted yet."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from quark_backends.store.bodies import open_body
from quark_backends.store.chunks import Chunk, decode_chunk, join_chunks
from quark_backends.store.connection import StoreConnection
from quark_backends.store.rollups import Blocks, decode_rollups
from quark_core.attempts import HiddenRows, can_be_hidden
from quark_core.columns import Columns
from quark_core.errors import SchemaValidationError
from quark_core.names import split_name
from quark_core.query import Query
from quark_core.records import MetricRecord

__all__ = ["ChunkEntry", "StoredRows", "WriterRow", "hide_rows"]

_log = logging.getLogger("quark")

_CACHED_ROWS = 200_000
# Whose roll-ups are kept decoded: about 12 kB each.
_CACHED_CHUNKS = 1_500
# Bound parameters of one statement; SQLite refuses more than 999 in its older versions.
_MANY = 500
_NAME_FILTERS = ("metric_key", "namespace", "metric_name")


@dataclass(frozen=True, slots=True)
class WriterRow:
    """A writer of a run.

    Attributes:
        pk: Its number in the store.
        run_id, writer_id, attempt, rank: What its records have in common.
        hidden_step: From which step on its points are hidden, or None.
    """

    pk: int
    run_id: str
    writer_id: str
    attempt: int
    rank: int
    hidden_step: int | None

    @property
    def origin(self) -> dict[str, Any]:
        """The origin fields of its records."""
        return {
            "run_id": self.run_id,
            "writer_id": self.writer_id,
            "attempt": self.attempt,
            "rank": self.rank,
        }


class ChunkEntry(msgspec.Struct, frozen=True):
    """A chunk, without its body; a struct, since a curve of a million points makes a hundred."""

    pk: int
    name_pk: int
    first_sequence: int
    last_sequence: int
    step_low: int
    step_high: int
    count: int


class StoredRows:
    """Loads rows over one connection, inside a transaction that its caller has opened.

    What was read last is kept: the tail of batches, and chunks that were
    joined, so that reading again costs only what came since. Not for several
    threads at once.

    Args:
        connection: The store.

    Attributes:
        connection: The store; another connection may take its place between transactions.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self.connection = connection
        self._tails: OrderedDict[tuple[int, str], tuple[int, int, Columns]] = OrderedDict()
        self._joined: OrderedDict[tuple[int, str, tuple[int, ...]], Columns] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, ...], list[Blocks]] = OrderedDict()
        self._names: dict[int, Mapping[str, Any]] = {}
        self._told: set[tuple[str, int]] = set()

    def load(self, writer: WriterRow, kind: str, query: Query) -> Columns:
        """A writer's rows of one kind that fit a query (its limit aside), in order."""
        hidden = None if query.all_attempts else self.find_hidden(writer, kind)
        chunks = self.find_chunks(writer, kind, query)
        # Chunks were chosen by name already; comparing a million names would take longest of all.
        unnamed = _without_names(kind, query)
        found = hide_rows(self.join_chunks(writer, kind, chunks), hidden).select(unnamed)
        tail = hide_rows(self.load_tail(writer, kind), hidden).select(query).order_by_sequence()
        if not tail.count:
            return found
        if not found.count:
            return tail
        rows = Columns.concatenate(kind, [found, tail])
        is_ordered = found["sequence"][-1] < tail["sequence"][0]
        return rows if is_ordered else rows.order_by_sequence()

    def find_hidden(self, writer: WriterRow, kind: str) -> HiddenRows | None:
        """Which of a writer's rows a later attempt has hidden; None where none."""
        if writer.hidden_step is None or not can_be_hidden(kind):
            return None
        row = self.connection.execute(
            "SELECT sequence FROM hidden WHERE writer_pk = ? AND kind = ?", (writer.pk, kind)
        ).fetchone()
        return HiddenRows(writer.hidden_step, None if row is None else row[0])

    def find_chunks(self, writer: WriterRow, kind: str, query: Query) -> list[ChunkEntry]:
        """The chunks that may hold rows which fit a query, by their first sequence."""
        names = self._find_names(writer, kind, query)
        condition = ""
        if names is not None:
            if not names:
                return []
            condition = f"AND name_pk IN ({', '.join('?' * len(names))})"
        rows = self.connection.execute(
            "SELECT pk, name_pk, first_sequence, last_sequence, step_low, step_high, count"
            f" FROM chunk WHERE writer_pk = ? AND kind = ? {condition} ORDER BY first_sequence, pk",
            (writer.pk, kind, *(names or ())),
        )
        entries = [ChunkEntry(*row) for row in rows]
        low, high = _step_bounds(query)
        if low is None and high is None:
            return entries
        return [
            entry
            for entry in entries
            if (low is None or entry.step_high >= low) and (high is None or entry.step_low <= high)
        ]

    def join_chunks(self, writer: WriterRow, kind: str, entries: list[ChunkEntry]) -> Columns:
        """Rows of chunks, in order of their sequence."""
        pks = tuple(entry.pk for entry in entries)
        found = self._joined.get((writer.pk, kind, pks))
        if found is not None:
            self._joined.move_to_end((writer.pk, kind, pks))
            return found
        joined = self.read_chunks(writer, kind, entries)
        if 0 < joined.count <= _CACHED_ROWS:
            self._joined[writer.pk, kind, pks] = joined
            while sum(part.count for part in self._joined.values()) > _CACHED_ROWS:
                self._joined.popitem(last=False)
        return joined

    def read_chunks(self, writer: WriterRow, kind: str, entries: Sequence[ChunkEntry]) -> Columns:
        """What `join_chunks` returns, not kept; a damaged chunk is left out and told once."""
        chunks: dict[int, list[Chunk]] = {}
        read: list[ChunkEntry] = []
        bodies = self._load_bodies(entries)
        for entry in entries:
            chunk = self._open_chunk(kind, entry, bodies[entry.pk])
            if chunk is not None:
                chunks.setdefault(entry.name_pk, []).append(chunk)
                read.append(entry)
        parts = [
            join_chunks(found, writer.origin, self._name_constants(kind, name_pk))
            for name_pk, found in chunks.items()
        ]
        joined = Columns.concatenate(kind, parts)
        # Rows stand in order within a chunk, and chunks of one metric mostly do not overlap.
        if len(parts) < 2 and all(a.last_sequence < b.first_sequence for a, b in pairwise(read)):
            return joined
        return joined.order_by_sequence()

    def load_blocks(self, entries: Sequence[ChunkEntry]) -> list[Blocks]:
        """The roll-ups of chunks of one metric, in their order, in few parts.

        Raises:
            SchemaValidationError: One of them is damaged.
        """
        pks = tuple(entry.pk for entry in entries)
        found = self._blocks.get(pks)
        if found is None:
            rollups: dict[int, bytes | None] = {}
            for start in range(0, len(pks), _MANY):
                part = pks[start : start + _MANY]
                marks = ", ".join("?" * len(part))
                rollups.update(
                    self.connection.execute(
                        f"SELECT pk, rollup FROM chunk WHERE pk IN ({marks})", part
                    )
                )
            found = self._blocks[pks] = decode_rollups([rollups[pk] or b"" for pk in pks])
            while sum(map(len, self._blocks)) > _CACHED_CHUNKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(pks)
        return found

    def _load_bodies(self, entries: Sequence[ChunkEntry]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        pks = [entry.pk for entry in entries]
        for start in range(0, len(pks), _MANY):
            part = pks[start : start + _MANY]
            marks = ", ".join("?" * len(part))
            found.update(
                self.connection.execute(f"SELECT pk, body FROM chunk WHERE pk IN ({marks})", part)
            )
        return found

    def _open_chunk(self, kind: str, entry: ChunkEntry, body: bytes) -> Chunk | None:
        try:
            return decode_chunk(kind, body)
        except SchemaValidationError as error:
            self._tell("chunk", entry.pk, entry.count, error)
            return None

    def _name_constants(self, kind: str, name_pk: int) -> Mapping[str, Any]:
        if name_pk not in self._names:
            row = self.connection.execute(
                "SELECT text FROM name WHERE pk = ?", (name_pk,)
            ).fetchone()
            self._names[name_pk] = name_constants(kind, None if row is None else row[0])
        return self._names[name_pk]

    def load_tail(self, writer: WriterRow, kind: str) -> Columns:
        """All rows of the batches that are not compacted yet, in order of the batches."""
        key = (writer.pk, kind)
        (first,) = self.connection.execute(
            "SELECT min(number) FROM batch WHERE writer_pk = ? AND kind = ?", key
        ).fetchone()
        if first is None:
            self._tails.pop(key, None)
            return Columns.empty(kind)
        known_first, known, columns = self._tails.get(key, (-1, -1, Columns.empty(kind)))
        if known_first != first:
            known, columns = -1, Columns.empty(kind)
        parts = [columns] if columns.count else []
        for number, part in self.iterate_batches(writer, kind, known):
            known = number
            if part is not None:
                parts.append(part)
        if len(parts) > 1 or not columns.count:
            columns = Columns.concatenate(kind, parts).make_all()
        self._tails[key] = (first, known, columns)
        self._tails.move_to_end(key)
        while sum(tail[2].count for tail in self._tails.values()) > _CACHED_ROWS:
            self._tails.popitem(last=False)
        return columns

    def iterate_batches(
        self, writer: WriterRow, kind: str, after: int = -1
    ) -> Iterator[tuple[int, Columns | None]]:
        """Number and rows of each batch after one; None for one that is damaged."""
        rows = self.connection.execute(
            "SELECT number, count, digest, body FROM batch"
            " WHERE writer_pk = ? AND kind = ? AND number > ? ORDER BY number",
            (writer.pk, kind, after),
        )
        for number, count, digest, body in rows:
            yield number, self._decode_batch(writer, number, count, digest, body)

    def load_batches(
        self, writer: WriterRow, kind: str, numbers: Sequence[int]
    ) -> Iterator[Columns]:
        """Rows of each of these batches; one that is damaged or not there is left out."""
        for start in range(0, len(numbers), _MANY):
            part = numbers[start : start + _MANY]
            rows = self.connection.execute(
                "SELECT number, count, digest, body FROM batch WHERE writer_pk = ? AND kind = ?"
                f" AND number IN ({', '.join('?' * len(part))}) ORDER BY number",
                (writer.pk, kind, *part),
            )
            for row in rows:
                columns = self._decode_batch(writer, *row)
                if columns is not None:
                    yield columns

    def _decode_batch(
        self, writer: WriterRow, number: int, count: int, digest: bytes, body: bytes
    ) -> Columns | None:
        try:
            # Made now: what is malformed must not come out of a column that somebody asks for.
            return Columns.from_body(open_body(body, digest), writer.origin).make_all()
        except (SchemaValidationError, ValueError, TypeError, KeyError, IndexError) as error:
            self._tell(f"batch of writer {writer.writer_id}", number, count, error)
            return None

    def _find_names(self, writer: WriterRow, kind: str, query: Query) -> list[int] | None:
        """Names of the metrics that fit a query; None where it does not ask for any."""
        wanted = {name: query.equals[name] for name in _NAME_FILTERS if name in query.equals}
        if kind != MetricRecord.KIND or not wanted:
            return None
        if set(wanted) == {"metric_key"}:
            rows = self.connection.execute(
                "SELECT pk, text FROM name WHERE text = ?", (wanted["metric_key"],)
            )
            return [pk for pk, _ in rows]
        rows = self.connection.execute(
            "SELECT pk, text FROM name WHERE pk IN"
            " (SELECT name_pk FROM chunk WHERE writer_pk = ? AND kind = ?)",
            (writer.pk, kind),
        )
        return [pk for pk, text in rows if wanted.items() <= name_constants(kind, text).items()]

    def _tell(self, what: str, number: int, count: int, error: Exception) -> None:
        if (what, number) in self._told:
            return
        self._told.add((what, number))
        _log.warning(
            "%s %d is damaged, its %d records are left out: %s", what, number, count, error
        )


def name_constants(kind: str, text: str | None) -> Mapping[str, Any]:
    """The fields that a metric's name says; none for another kind."""
    if kind != MetricRecord.KIND or text is None:
        return {}
    namespace, metric_name = split_name(text)
    return {"metric_key": text, "namespace": namespace, "metric_name": metric_name}


def _without_names(kind: str, query: Query) -> Query:
    if kind != MetricRecord.KIND or query.equals.keys().isdisjoint(_NAME_FILTERS):
        return query
    rest = {name: value for name, value in query.equals.items() if name not in _NAME_FILTERS}
    return replace(query, equals=rest)


def hide_rows(rows: Columns, hidden: HiddenRows | None) -> Columns:
    """The rows that are not hidden."""
    if hidden is None or not rows.count:
        return rows
    found = hidden.find_hidden(rows["step"], rows["sequence"])
    return rows.take(~found) if found.any() else rows


def _step_bounds(query: Query) -> tuple[int | None, int | None]:
    if query.step is not None:
        return query.step, query.step
    low, high = query.step_min, query.step_max
    # A row without a step fits no bound, so that even an upper one asks for a step.
    return (0 if low is None and high is not None else low), high
