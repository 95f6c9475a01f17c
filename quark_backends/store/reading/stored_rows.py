"""Loads what a writer has logged, at once or in parts: chunks, and batches not compacted yet."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from quark_backends.store.batch_bodies import make_rows, open_body
from quark_backends.store.chunks import Chunk, decode_chunk, join_chunks
from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.reading.attempt_progress import AttemptReaches, AttemptWriter
from quark_backends.store.rollups import (
    BLOCK_POINTS,
    Blocks,
    RollupHead,
    decode_rollups,
    read_head,
    summarize_blocks,
)
from quark_core.backends.curves import Window
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows, can_be_hidden, find_series
from quark_core.records.codec import MALFORMED, DecodedBody
from quark_core.records.columns import Array, Columns
from quark_core.records.names import split_name
from quark_core.records.query import Query
from quark_core.records.schema import column_types

_log = logging.getLogger("quark")

_CACHED_ROWS = 200_000
_CACHED_TAILS = 1_000
# A tail of no more rows is read as a whole, and kept for whatever is asked for next.
_SHORT_TAIL_ROWS = 20_000
_SHORT_TAIL_BATCHES = 256
# A process that compacts while it writes leaves no more, unless it is killed.
_BACKLOG_ROWS = 262_144
_BACKLOG_BATCHES = 1024
# Whose roll-ups are kept decoded: about 12 kB each.
_CACHED_CHUNKS = 1_500
# Of a long run's layers a chunk is up to a megabyte.
_OPEN_CHUNKS = 32
# Which chunks there are is remembered of so many: about 120 bytes each.
_CACHED_LISTED = 100_000
# Bound parameters of one statement; SQLite refuses more than 999 in its older versions.
_MANY = 500
_CHUNKS = (
    "SELECT pk, name_pk, first_sequence, last_sequence, step_low, step_high, count"
    " FROM chunk WHERE writer_pk = ? AND kind = ?"
)
_NAME_FILTERS = ("metric_key", "namespace", "metric_name")

# Writer, kind, and which texts were asked for.
_TailKey = tuple[int, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class WriterRow:
    """A writer of a run.

    Attributes:
        pk: Its number in the store.
        run_id, writer_id, attempt, rank: What its records have in common.
        hidden_step: From which step on its points are hidden, or None.
        others: All writers of the run, where it has several attempts.
    """

    pk: int
    run_id: str
    writer_id: str
    attempt: int
    rank: int
    hidden_step: int | None
    others: tuple[AttemptWriter, ...] = ()

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
        met_backlog: Whether so much was found that is not compacted that somebody should see to
            it; set, and never cleared, here.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self.connection = connection
        self.met_backlog = False
        self._tails: OrderedDict[_TailKey, tuple[int, int, Columns]] = OrderedDict()
        self._joined: OrderedDict[tuple[int, str, tuple[int, ...]], Columns] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, ...], list[Blocks]] = OrderedDict()
        self._series: dict[int, dict[int, list[ChunkEntry]]] = {}
        self._series_version: tuple[int, int] | None = None
        self._names: dict[int, Mapping[str, Any]] = {}
        self._warned: set[tuple[str, int]] = set()
        self._reaches = AttemptReaches()

    def load(self, writer: WriterRow, kind: str, query: Query) -> Columns:
        """A writer's rows of one kind that fit a query (its limit aside), in order."""
        hidden = self.find_hidden_by(writer, kind, query)
        chunks = self.find_chunks(writer, kind, query)
        # Chunks were chosen by name already; comparing a million names would take longest of all.
        unnamed = _without_names(kind, query)
        found = hide_rows(self.join_chunks(writer, kind, chunks), hidden).select(unnamed)
        tail = self.load_tail(writer, kind, query)
        tail = hide_rows(tail, hidden).select(query).order_by_sequence()
        if not tail.count:
            return found
        if not found.count:
            return tail
        rows = Columns.concatenate(kind, [found, tail])
        is_ordered = found["sequence"][-1] < tail["sequence"][0]
        return rows if is_ordered else rows.order_by_sequence()

    def find_hidden(
        self, writer: WriterRow, kind: str, keys: Sequence[str] | None = None
    ) -> HiddenRows | None:
        """Which of a writer's rows later attempts have hidden; None where none.

        Args:
            writer: Whose rows.
            kind: Of which kind.
            keys: Of which metrics; of all by default.
        """
        if not can_be_hidden(kind):
            return None
        replaced = self._reaches.find_hidden(self.connection, writer.others, writer.pk, kind, keys)
        if writer.hidden_step is None:
            return HiddenRows(reaches=replaced) if replaced else None
        row = self.connection.execute(
            "SELECT sequence FROM hidden WHERE writer_pk = ? AND kind = ?", (writer.pk, kind)
        ).fetchone()
        return HiddenRows(writer.hidden_step, None if row is None else row[0], replaced)

    def list_replaced(self, run_pk: int) -> dict[int, list[str]]:
        """What later attempts have replaced of each writer of a run, as texts to compare."""
        return self._reaches.list_replaced(self.connection, run_pk)

    def find_hidden_by(self, writer: WriterRow, kind: str, query: Query) -> HiddenRows | None:
        """Which of the rows that fit a query are hidden; None where it asks for all attempts."""
        if query.all_attempts:
            return None
        key, several = query.equals.get("metric_key"), query.any_of.get("metric_key")
        keys = several if key is None else (key,)
        return self.find_hidden(writer, kind, None if keys is None else [str(k) for k in keys])

    def find_chunks(self, writer: WriterRow, kind: str, query: Query) -> list[ChunkEntry]:
        """The chunks that may hold rows which fit a query, by their first sequence."""
        names = self._find_names(writer, kind, query)
        condition = ""
        if names is not None:
            if not names:
                return []
            condition = f"AND name_pk IN ({', '.join('?' * len(names))})"
        rows = self.connection.execute(
            f"{_CHUNKS} {condition} ORDER BY first_sequence, pk", (writer.pk, kind, *(names or ()))
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
        for entry, chunk in zip(entries, self._decode_chunks(kind, entries), strict=True):
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
            found = self._blocks[pks] = decode_rollups(self.load_rollups(entries))
            while sum(map(len, self._blocks)) > _CACHED_CHUNKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(pks)
        return found

    def load_rollups(self, entries: Sequence[ChunkEntry]) -> list[bytes]:
        """The roll-ups of chunks as they are stored, in their order; empty where one has none."""
        return [found or b"" for found in self._load_column("rollup", entries)]

    def open_chunks(self, kind: str, entries: Sequence[ChunkEntry]) -> Iterator[Chunk | None]:
        """Each of these chunks; None in place of one that is damaged, which is told once."""
        for start in range(0, len(entries), _OPEN_CHUNKS):
            yield from self._decode_chunks(kind, entries[start : start + _OPEN_CHUNKS])

    def find_series_chunks(
        self, writer: WriterRow, names: Sequence[int]
    ) -> dict[int, list[ChunkEntry]]:
        """The chunks of several metrics, by name, each by its first sequence."""
        version = _find_version(self.connection)
        if version is None or version != self._series_version:
            self._series.clear()
            self._series_version = version
        known = self._series.setdefault(writer.pk, {})
        wanted = [name for name in names if name not in known]
        found: dict[int, list[ChunkEntry]] = {name: [] for name in wanted}
        for start in range(0, len(wanted), _MANY):
            part = wanted[start : start + _MANY]
            rows = self.connection.execute(
                f"{_CHUNKS} AND name_pk IN ({', '.join('?' * len(part))})"
                " ORDER BY name_pk, first_sequence, pk",
                (writer.pk, MetricRecord.KIND, *part),
            )
            for row in rows:
                found[row[1]].append(ChunkEntry(*row))
        known |= found
        chosen = {name: known[name] for name in names if known[name]}
        if (
            sum(len(its) for kept in self._series.values() for its in kept.values())
            > _CACHED_LISTED
        ):
            self._series.clear()
        return chosen

    def find_keys(self, keys: Sequence[str]) -> dict[str, int]:
        """The numbers that metrics have in the store; one that nobody has logged has none."""
        found: dict[str, int] = {}
        for start in range(0, len(keys), _MANY):
            part = keys[start : start + _MANY]
            found.update(
                self.connection.execute(
                    f"SELECT text, pk FROM name WHERE text IN ({', '.join('?' * len(part))})", part
                )
            )
        return found

    def open_batches(
        self, writer: WriterRow, kind: str, after: int
    ) -> Iterator[tuple[int, int, DecodedBody | None]]:
        """Each batch after one: its number, how many records it holds, and its body.

        None in place of the body of one that is damaged, which is told once.
        """
        return self._open_batches(writer, kind, "number > ?", (after,))

    def _open_batches(
        self, writer: WriterRow, kind: str, condition: str, arguments: Sequence[int]
    ) -> Iterator[tuple[int, int, DecodedBody | None]]:
        rows = self.connection.execute(
            "SELECT number, count, digest, body FROM batch"
            f" WHERE writer_pk = ? AND kind = ? AND {condition} ORDER BY number",
            (writer.pk, kind, *arguments),
        )
        for number, count, digest, body in rows:
            try:
                yield number, count, open_body(body, digest)
            except SchemaValidationError as error:
                self.warn_of_batch(writer, number, count, error)
                yield number, count, None

    def note_backlog(self, rows: int, batches: int) -> None:
        """Say how much was read that is not compacted."""
        self.met_backlog |= rows > _BACKLOG_ROWS or batches > _BACKLOG_BATCHES

    def warn_of_batch(self, writer: WriterRow, number: int, count: int, error: Exception) -> None:
        """Tell, once, that a batch is damaged."""
        self._warn(f"batch of writer {writer.writer_id}", number, count, error)

    def iterate_chunks(self, kind: str, entries: Sequence[ChunkEntry]) -> Iterator[Chunk]:
        """Chunks, a few at a time in memory; one that is damaged is left out and told once."""
        return (chunk for chunk in self.open_chunks(kind, entries) if chunk is not None)

    def warn_of_chunk(self, count: int, error: Exception) -> None:
        """Say that a column of a chunk of so many records is damaged."""
        self._warn("chunk of records", count, count, error)

    def _load_column(self, column: str, entries: Sequence[ChunkEntry]) -> list[bytes | None]:
        """A column of each of some chunks."""
        found: dict[int, bytes | None] = {}
        pks = [entry.pk for entry in entries]
        for start in range(0, len(pks), _MANY):
            part = pks[start : start + _MANY]
            marks = ", ".join("?" * len(part))
            sql = f"SELECT pk, {column} FROM chunk WHERE pk IN ({marks})"
            found.update(self.connection.execute(sql, part))
        return [found.get(pk) for pk in pks]

    def _decode_chunks(self, kind: str, entries: Sequence[ChunkEntry]) -> Iterator[Chunk | None]:
        bodies = self._load_column("body", entries)
        for entry, body in zip(entries, bodies, strict=True):
            assert body is not None
            try:
                chunk = decode_chunk(kind, body)
            except SchemaValidationError as error:
                self._warn("chunk", entry.pk, entry.count, error)
                chunk = None
            yield chunk

    def _name_constants(self, kind: str, name_pk: int) -> Mapping[str, Any]:
        if name_pk not in self._names:
            row = self.connection.execute(
                "SELECT text FROM name WHERE pk = ?", (name_pk,)
            ).fetchone()
            self._names[name_pk] = name_constants(kind, None if row is None else row[0])
        return self._names[name_pk]

    def load_tail(self, writer: WriterRow, kind: str, query: Query) -> Columns:
        """Rows of the batches that are not compacted yet, in order of the batches.

        At least those that fit a query. Of a long tail nothing is decoded, nor
        held in memory, that has other texts than the query asks for.
        """
        (first,) = self.connection.execute(
            "SELECT min(number) FROM batch WHERE writer_pk = ? AND kind = ?", (writer.pk, kind)
        ).fetchone()
        if first is None:
            for known_key in [key for key in self._tails if key[:2] == (writer.pk, kind)]:
                del self._tails[known_key]
            return Columns.empty(kind)
        equals = find_texts(kind, query)
        if equals and self._is_short(writer, kind):
            equals = {}
        key = (writer.pk, kind, tuple(sorted(equals.items())))
        known_first, known, columns = self._tails.get(key, (-1, -1, Columns.empty(kind)))
        if known_first != first:
            known, columns = -1, Columns.empty(kind)
        parts = [columns] if columns.count else []
        batches = rows = 0
        for number, count, body in self.open_batches(writer, kind, known):
            known = number
            batches += 1
            rows += count
            part = self._make_rows(writer, number, count, body, equals)
            if part is not None and part.count:
                parts.append(part)
        if len(parts) > 1 or not columns.count:
            columns = Columns.concatenate(kind, parts).make_all()
        self.note_backlog(rows, batches)
        self._tails[key] = (first, known, columns)
        self._tails.move_to_end(key)
        kept_rows = sum(tail[2].count for tail in self._tails.values())
        while kept_rows > _CACHED_ROWS or len(self._tails) > _CACHED_TAILS:
            kept_rows -= self._tails.popitem(last=False)[1][2].count
        return columns

    def _is_short(self, writer: WriterRow, kind: str) -> bool:
        """Whether the batches that are not compacted yet hold few rows."""
        counts = self.connection.execute(
            "SELECT count FROM batch WHERE writer_pk = ? AND kind = ? LIMIT ?",
            (writer.pk, kind, _SHORT_TAIL_BATCHES + 1),
        ).fetchall()
        rows = sum(count for (count,) in counts)
        return len(counts) <= _SHORT_TAIL_BATCHES and rows <= _SHORT_TAIL_ROWS

    def load_numbered(
        self, writer: WriterRow, kind: str, numbers: Sequence[int], equals: Mapping[str, str]
    ) -> Iterator[tuple[int, Columns]]:
        """Number and rows of each of these batches; one that is damaged or not there is left out.

        Args:
            writer: Whose batches.
            kind: Of which kind.
            numbers: Which.
            equals: Only rows whose texts are these.
        """
        for start in range(0, len(numbers), _MANY):
            part = numbers[start : start + _MANY]
            among = f"number IN ({', '.join('?' * len(part))})"
            for number, count, body in self._open_batches(writer, kind, among, part):
                rows = self._make_rows(writer, number, count, body, equals)
                if rows is not None:
                    yield number, rows

    def _make_rows(
        self,
        writer: WriterRow,
        number: int,
        count: int,
        body: DecodedBody | None,
        equals: Mapping[str, str],
    ) -> Columns | None:
        """Rows of a batch; None of one that is damaged."""
        if body is None:
            return None
        try:
            rows, left_out, reason = make_rows(body, writer.origin, equals)
        except (SchemaValidationError, *MALFORMED) as error:
            self.warn_of_batch(writer, number, count, error)
            return None
        if reason is not None:
            what = f"part of the batch of writer {writer.writer_id}"
            self._warn(what, number, left_out, reason)
        return rows

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

    def _warn(self, what: str, number: int, count: int, error: Exception) -> None:
        if (what, number) in self._warned:
            return
        self._warned.add((what, number))
        _log.warning("%s %d is damaged, its %d records are omitted: %s", what, number, count, error)


def _find_version(connection: StoreConnection) -> tuple[int, int] | None:
    """What changes with whatever is committed to a database; None where it does not tell."""
    if not isinstance(connection, SqliteConnection):
        return None
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    # Of its own writes a connection's version says nothing.
    return version, connection.total_changes


def name_constants(kind: str, text: str | None) -> Mapping[str, Any]:
    """The fields that a metric's name says; none for another kind."""
    if kind != MetricRecord.KIND or text is None:
        return {}
    namespace, metric_name = split_name(text)
    return {"metric_key": text, "namespace": namespace, "metric_name": metric_name}


def find_texts(kind: str, query: Query) -> dict[str, str]:
    """Which texts of a kind's records a query asks for."""
    types = column_types(kind)
    return {name: text for name, text in query.equals.items() if types.get(name) == "t"}


def _without_names(kind: str, query: Query) -> Query:
    if kind != MetricRecord.KIND or query.equals.keys().isdisjoint(_NAME_FILTERS):
        return query
    rest = {name: value for name, value in query.equals.items() if name not in _NAME_FILTERS}
    return replace(query, equals=rest)


def hide_rows(rows: Columns, hidden: HiddenRows | None, series: str | None = None) -> Columns:
    """The rows that are not hidden.

    Args:
        rows: The rows.
        hidden: What is hidden.
        series: The series of all of them; by default as their columns say.
    """
    if hidden is None or not rows.count:
        return rows
    found = hidden.find_hidden(
        rows["step"],
        rows["sequence"],
        rows.get("epoch"),
        find_series(rows) if series is None else series,
    )
    return rows.take(~found) if found.any() else rows


def _step_bounds(query: Query) -> tuple[int | None, int | None]:
    if query.step is not None:
        return query.step, query.step
    low, high = query.step_min, query.step_max
    # A row without a step fits no bound, so that even an upper one asks for a step.
    return (0 if low is None and high is not None else low), high


# Blocks of points along an axis: where each begins and ends there, exactly.
#
# A roll-up says where a block begins, and where it ends only if its steps are a
# straight line. Of all else the one column of the chunk is read that tells, once:
# what was made of a chunk is kept, and a chunk never changes.

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
        raise SchemaValidationError("a roll-up has a different number of points than its chunk")
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
