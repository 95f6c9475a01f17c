"""Turns batches into chunks: fewer, larger and quicker to read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from quark_backends.store.batch_bodies import (
    DamagedError,
    make_rows,
    number_texts,
    open_body,
    weigh_body,
    weigh_rows,
)
from quark_backends.store.chunks import (
    BatchSpan,
    MissingCodecError,
    best_codec,
    decode_chunk,
    encode_chunk,
    encode_spans,
    join_chunks,
)
from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.rollups import encode_rollup
from quark_backends.store.writing.metrics import NameTable
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, MetricRecord
from quark_core.records.codec import MALFORMED, DecodedBody
from quark_core.records.columns import Array, Columns
from quark_core.records.names import split_name
from quark_core.records.schema import column_types

_log = logging.getLogger("quark")

CHUNK_ROWS = 8192
"""A chunk of a metric has no more rows; one of another kind has whole steps."""

NO_NAME = 0
"""Stands for the name of chunks of other kinds than metrics."""

METRIC_CONSTANTS = frozenset({"metric_key", "namespace", "metric_name"})
"""Fields of a metric that its name says."""

_TURN_BATCHES = 4096
_TURN_ROWS = 65_536
# A point has a tenth of the columns of other records; more in a turn make fuller chunks at once.
_TURN_POINTS = 262_144
# What the JSON values of a turn may take of memory, and those of a chunk that it is merged with.
_TURN_BYTES = 32 * 2**20
# Who looks for much in few batches looks at no more than these.
_RECENT_BATCHES = 4096
# A chunk has a head of some hundred bytes, and is made in as many microseconds.
_MANY_KEYS = 10_000
_LEAST_POINTS = 8
# A full chunk is never merged again, and each row is written about as often as this grows.
_GROWTH = 2
_ORIGIN = {"run_id": None, "writer_id": "", "attempt": 0, "rank": 0}

Gate = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Work:
    """Batches that wait for compaction.

    Attributes:
        writer_pk: Their writer.
        kind: Their kind.
        batches: How many there are.
    """

    writer_pk: int
    kind: str
    batches: int


@dataclass(slots=True)
class _Turn:
    """What one turn is about to change."""

    writer_pk: int
    kind: str
    records: int = 0
    weight: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    batches: list[tuple[int, int]] = field(default_factory=list)
    spans: list[BatchSpan] = field(default_factory=list)
    merged_pks: list[int] = field(default_factory=list)
    chunks: list[tuple[Any, ...]] = field(default_factory=list)
    damaged: list[tuple[Any, ...]] = field(default_factory=list)


class Compactor:
    """Compacts over one connection; belongs to one thread.

    Rows are read and encoded outside of any transaction, since a batch never
    changes; then one short transaction puts the chunks in their place. If
    another process was first, or this one is killed, nothing has happened.

    Args:
        connection: The store.
        gate: Entered around each transaction, so that it may wait for a moment
            in which nobody else writes.
        codec: How chunks are compressed; the best that is installed by default.
    """

    def __init__(
        self, connection: StoreConnection, gate: Gate = nullcontext, *, codec: int | None = None
    ) -> None:
        self._connection = connection
        self._gate = gate
        self._codec = best_codec() if codec is None else codec
        self._compacted_records = 0

    @property
    def compacted_records(self) -> int:
        """How many records it has moved out of batches."""
        return self._compacted_records

    def count_recent_records(self) -> int:
        """How many records the batches hold that came last and are not compacted."""
        (found,) = self._connection.execute(
            "SELECT coalesce(sum(count), 0) FROM batch"
            " WHERE pk > (SELECT coalesce(max(pk), 0) FROM batch) - ?",
            (_RECENT_BATCHES,),
        ).fetchone()
        return int(found)

    def find_heavy_work(self, records: int) -> list[Work]:
        """What has at least so many records among the batches that came last.

        A long queue comes in few batches, which hold as much as thousands of others.
        """
        rows = self._connection.execute(
            "SELECT writer_pk, kind, count(*), sum(count) FROM batch"
            " WHERE pk > (SELECT coalesce(max(pk), 0) FROM batch) - ?"
            " GROUP BY writer_pk, kind HAVING sum(count) >= ? ORDER BY sum(count) DESC",
            (_RECENT_BATCHES, records),
        ).fetchall()
        return [Work(*row[:3]) for row in rows if row[1] in RECORD_TYPES]

    def find_work(
        self, *, minimum: int, writer_pk: int | None = None, ended_only: bool = False
    ) -> list[Work]:
        """What has at least so many batches, the most first.

        Args:
            minimum: How many batches are worth it.
            writer_pk: Only of this writer.
            ended_only: Only of runs that have ended.
        """
        conditions, arguments = [], []
        if writer_pk is not None:
            conditions.append("writer_pk = ?")
            arguments.append(writer_pk)
        if ended_only:
            conditions.append(
                "writer_pk IN (SELECT writer.pk FROM writer JOIN run ON run.pk = run_pk"
                " WHERE status <> 'running')"
            )
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = self._connection.execute(
            f"SELECT writer_pk, kind, count(*) AS batches FROM batch {where}"
            " GROUP BY writer_pk, kind HAVING count(*) >= ? ORDER BY batches DESC",
            (*arguments, minimum),
        ).fetchall()
        return [Work(*row) for row in rows if row[1] in RECORD_TYPES]

    def compact(self, work: Work) -> int:
        """Do one turn of some work: a bounded number of batches, the oldest first.

        Returns:
            How many batches it did away with; 0 where another process was first, or where
            they hold so many metrics of so few points that chunks would be no better.

        Raises:
            The database's error: The store is busy, full or out of reach; nothing has changed.
        """
        turn = _Turn(work.writer_pk, work.kind)
        rows, codes = self._read_batches(turn)
        if not turn.batches or _has_too_many_keys(turn, rows):
            return 0
        if rows.count:
            if turn.kind == MetricRecord.KIND:
                self._plan_series(turn, rows, codes)
            else:
                self._plan_rows(turn, NO_NAME, rows, frozenset())
        with self._gate():
            if not self._commit(turn):
                return 0
        self._compacted_records += turn.records
        return len(turn.batches)

    def _read_batches(self, turn: _Turn) -> tuple[Columns, Array]:
        """All rows of the turn's batches, in order; what cannot be read is set aside.

        Returns:
            The rows, and of metrics for each row the place of its key in the turn's.
        """
        found = self._connection.execute(
            "SELECT pk, number, count, digest, body FROM batch"
            " WHERE writer_pk = ? AND kind = ? ORDER BY number LIMIT ?",
            (turn.writer_pk, turn.kind, _TURN_BATCHES),
        )
        most = _TURN_POINTS if turn.kind == MetricRecord.KIND else _TURN_ROWS
        parts, codes, count = [], [np.empty(0, dtype=np.int64)], 0
        part: Columns | None
        why: Exception | None
        for pk, number, records, digest, body in found:
            if count >= most or turn.weight >= _TURN_BYTES:
                break
            try:
                decoded = open_body(body, digest)
                part, lost, why = make_rows(decoded, _ORIGIN, {})
                if turn.kind == MetricRecord.KIND:
                    codes.append(_number_keys(turn, decoded if not lost else None, part))
            except DamagedError as error:
                part, lost, why = None, records, error
            except SchemaValidationError as error:
                # Sound, and written by a Quark that knows more: it stays as it is.
                _log.debug("batch %d of writer %d is skipped: %s", number, turn.writer_pk, error)
                break
            except MALFORMED as error:
                part, lost, why = None, records, error
            turn.batches.append((pk, number))
            if lost:
                place = f"batch {number} of writer {turn.writer_pk}"
                _log.warning("%s: %d records are damaged and moved away: %s", place, lost, why)
                turn.damaged.append(("batch", number, lost, str(why), body))
            if part is None:
                continue
            count += part.count
            turn.weight += weigh_body(decoded)
            turn.records = count
            turn.spans.append(BatchSpan.of(number, part["sequence"]))
            parts.append(part)
        found.close()
        return Columns.concatenate(turn.kind, parts), np.concatenate(codes)

    def _plan_series(self, turn: _Turn, rows: Columns, codes: Array) -> None:
        # By key, then by sequence.
        sequence = rows["sequence"]
        if bool((sequence[1:] >= sequence[:-1]).all()):
            order = np.argsort(codes, kind="stable")
        else:
            order = np.lexsort((sequence, codes))
        bounds = np.searchsorted(codes[order], np.arange(len(turn.keys) + 1))
        # Ingest has made them all; only a store that was tampered with lacks one.
        names = NameTable(self._connection)
        for key, index in turn.keys.items():
            chosen = order[bounds[index] : bounds[index + 1]]
            if len(chosen):
                self._plan_rows(turn, names.find(key), rows.take(chosen), METRIC_CONSTANTS)

    def _plan_rows(
        self, turn: _Turn, name_pk: int, rows: Columns, leave_out: frozenset[str]
    ) -> None:
        """Merge rows with the last chunks of their series, and cut them into new ones."""
        parts = [rows]
        total, weight = rows.count, turn.weight
        for pk, count in self._find_tail(turn, name_pk):
            if count >= CHUNK_ROWS or count > _GROWTH * total or weight >= _TURN_BYTES:
                break
            row = self._connection.execute("SELECT body FROM chunk WHERE pk = ?", (pk,)).fetchone()
            if row is None:
                # Another process merged it meanwhile, or removed it: it is not ours to judge.
                break
            (body,) = row
            try:
                chunk = decode_chunk(turn.kind, body)
                constants = _name_metric(self._connection, name_pk) if leave_out else {}
                part = join_chunks([chunk], _ORIGIN, constants).make_all()
            except DamagedError as error:
                _log.warning("chunk %d is damaged and moved away: %s", pk, error)
                turn.damaged.append(("chunk", pk, count, str(error), body))
                turn.merged_pks.append(pk)
                continue
            except (SchemaValidationError, MissingCodecError):
                break
            if turn.kind != MetricRecord.KIND:
                weight += weigh_rows(part)
                if weight > _TURN_BYTES:
                    break
            turn.merged_pks.append(pk)
            parts.append(part)
            total += count
        joined = Columns.concatenate(turn.kind, parts[::-1]).order_by_sequence()
        for start, end in _cut(joined):
            piece = joined.take(slice(start, end))
            sequences = piece["sequence"]
            steps = piece["step"] if "step" in column_types(turn.kind) else np.array([-1])
            known = steps[steps >= 0]
            turn.chunks.append(
                (
                    turn.writer_pk,
                    turn.kind,
                    name_pk,
                    int(sequences[0]),
                    int(sequences[-1]),
                    int(known.min()) if len(known) else -1,
                    int(known.max()) if len(known) else -1,
                    piece.count,
                    self._codec,
                    encode_rollup(piece) if leave_out else None,
                    encode_chunk(piece, leave_out=leave_out, codec=self._codec),
                )
            )

    def _find_tail(self, turn: _Turn, name_pk: int) -> list[tuple[int, int]]:
        """The last chunks of a series, the newest first."""
        return self._connection.execute(
            "SELECT pk, count FROM chunk WHERE writer_pk = ? AND kind = ? AND name_pk = ?"
            " ORDER BY first_sequence DESC LIMIT 16",
            (turn.writer_pk, turn.kind, name_pk),
        ).fetchall()

    def _commit(self, turn: _Turn) -> bool:
        """Put chunks in the place of batches; whether these were still there."""
        execute, executemany = self._connection.execute, self._connection.executemany
        new_key = self._connection.new_key
        self._connection.begin_write()
        try:
            if self._connection.is_shared:
                # Who makes a run's figures again must not see its rows come and go.
                execute(
                    "SELECT pk FROM run WHERE pk = (SELECT run_pk FROM writer WHERE pk = ?)"
                    f"{self._connection.for_update}",
                    (turn.writer_pk,),
                ).fetchone()
            # A number may mean another run's batch by now, if this one was taken away meanwhile.
            gone = executemany(
                "DELETE FROM batch WHERE pk = ? AND writer_pk = ? AND kind = ? AND number = ?",
                [(pk, turn.writer_pk, turn.kind, number) for pk, number in turn.batches],
            )
            whole = gone.rowcount == len(turn.batches)
            if turn.merged_pks:
                gone = executemany(
                    "DELETE FROM chunk WHERE pk = ?", [(p,) for p in turn.merged_pks]
                )
                whole = whole and gone.rowcount == len(turn.merged_pks)
            if not whole:
                self._connection.rollback()
                return False
            executemany(
                "INSERT INTO chunk (pk, writer_pk, kind, name_pk, first_sequence, last_sequence,"
                " step_low, step_high, count, codec, rollup, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(new_key(), *chunk) for chunk in turn.chunks],
            )
            if turn.spans:
                execute(
                    "INSERT INTO frame (writer_pk, first_number, last_number, body)"
                    " VALUES (?, ?, ?, ?)",
                    (
                        turn.writer_pk,
                        turn.spans[0].number,
                        turn.spans[-1].number,
                        encode_spans(turn.kind, turn.spans),
                    ),
                )
            now_us = time.time_ns() // 1000
            executemany(
                "INSERT INTO damaged (pk, writer_pk, source, kind, number, count, reason, found_us,"
                " body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        new_key(),
                        turn.writer_pk,
                        source,
                        turn.kind,
                        number,
                        count,
                        reason,
                        now_us,
                        body,
                    )
                    for source, number, count, reason, body in turn.damaged
                ],
            )
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        return True


def _number_keys(turn: _Turn, body: DecodedBody | None, rows: Columns) -> Array:
    """For each row of metrics the place of its key in the turn's; a whole body has them at hand."""
    if body is not None:
        return number_texts(body, "metric_key", turn.keys)
    found = [turn.keys.setdefault(key, len(turn.keys)) for key in rows["metric_key"].tolist()]
    return np.array(found, dtype=np.int64)


def _has_too_many_keys(turn: _Turn, rows: Columns) -> bool:
    """Whether a chunk for each metric would take longer to make and to read than the batches."""
    return len(turn.keys) > _MANY_KEYS and rows.count < _LEAST_POINTS * len(turn.keys)


def _name_metric(connection: StoreConnection, name_pk: int) -> dict[str, Any]:
    row = connection.execute("SELECT text FROM name WHERE pk = ?", (name_pk,)).fetchone()
    namespace, metric_name = split_name(row[0])
    return {"metric_key": row[0], "namespace": namespace, "metric_name": metric_name}


def _cut(rows: Columns) -> list[tuple[int, int]]:
    """Where chunks begin and end: full ones, the rest in the last; of other kinds whole steps."""
    count = rows.count
    if rows.kind == MetricRecord.KIND or "step" not in column_types(rows.kind):
        return [(start, min(start + CHUNK_ROWS, count)) for start in range(0, count, CHUNK_ROWS)]
    steps: Array = rows["step"]
    edges = [0, *(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), count]
    pieces, start = [], 0
    for before, after in pairwise(edges):
        if after - start > CHUNK_ROWS and before > start:
            pieces.append((start, before))
            start = before
    pieces.append((start, count))
    return pieces
