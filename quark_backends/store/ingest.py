"""Stores batches, each exactly once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quark_backends.store.bodies import digest_body
from quark_backends.store.figures import MetricFold, place_writer
from quark_backends.store.lifecycle import apply_lifecycle
from quark_backends.store.names import NameTable
from quark_backends.store.summaries import rebuild_metrics
from quark_core.attempts import HiddenRows, can_be_hidden
from quark_core.backend import Batch
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import RECORD_TYPES, LifecycleRecord, MetricRecord

__all__ = ["BatchIngest"]

_NO_HEAD = -1
# What decoding makes of malformed bodies, and SQLite of values that no column of ours holds.
_MALFORMED = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)


@dataclass(slots=True)
class _Writer:
    pk: int
    run_pk: int
    head: int
    started_us: int
    hidden_step: int | None


class BatchIngest:
    """Writes batches over one connection; belongs to one thread.

    The writer's head advances in the same transaction as the data, so a batch
    that is delivered again, after a lost reply or a crash, is recognised by
    its number and acknowledged without being stored again. What is known of a
    run without reading it (its metrics' figures, tags, configuration, newest
    step) changes in that transaction too.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._names = NameTable(connection)
        # Of the transaction that is open: figures of runs, and runs whose figures must be remade.
        self._folds: dict[int, MetricFold] = {}
        self._stale: set[int] = set()

    def write(self, batches: Sequence[Batch]) -> None:
        """Store batches in one transaction.

        Raises:
            BackendRejected: One of them can never be stored; none was.
            BackendUnavailable: The database is busy, full or out of reach; none was.
        """
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            try:
                for batch in batches:
                    self._store_checked(batch)
                self._write_figures()
                execute("COMMIT")
            except BaseException:
                self._names.forget()
                if self._connection.in_transaction:
                    execute("ROLLBACK")
                raise
            finally:
                self._folds.clear()
                self._stale.clear()
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error
        except SessionStoreError as error:
            # What is stored already cannot be read here now, and may be later.
            raise BackendUnavailable(str(error)) from error

    def _store_checked(self, batch: Batch) -> None:
        """Store a batch, or find that it never can be.

        Raises:
            BackendRejected: Its content is malformed.
        """
        try:
            self._store(batch)
        except sqlite3.ProgrammingError as error:
            if "bind" not in str(error):
                raise
            raise _reject(batch, error) from error
        except _MALFORMED as error:
            raise _reject(batch, error) from error

    def _write_figures(self) -> None:
        """Add what the batches say of metrics to what is known of their runs."""
        for run_pk in self._stale:
            rebuild_metrics(self._connection, run_pk, self._names.find)
        for run_pk, fold in self._folds.items():
            if run_pk not in self._stale:
                fold.write(self._connection, run_pk, self._names.find)
        self._folds.clear()
        self._stale.clear()

    def _store(self, batch: Batch) -> None:
        execute = self._connection.execute
        digest = digest_body(batch.body)
        writer = self._find_writer(batch)
        if writer is not None and batch.number <= writer.head:
            self._recognise(writer.pk, batch, digest)
            return
        if writer is None and self._is_removed(batch):
            return
        if batch.kind == LifecycleRecord.KIND:
            # A resumed run's figures are made again of what is stored, the last batch included.
            self._write_figures()
            self._apply(batch)  # a start makes the run that its writer belongs to
        if writer is None:
            writer = self._add_writer(batch)
        execute(
            "INSERT INTO batch (writer_pk, kind, number, count, digest, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (writer.pk, batch.kind, batch.number, batch.count, digest, batch.body),
        )
        execute("UPDATE writer SET head = ? WHERE pk = ?", (batch.number, writer.pk))
        hidden = None
        if writer.hidden_step is not None and can_be_hidden(batch.kind):
            hidden = self._note_hidden(writer, batch)
        if batch.kind == MetricRecord.KIND:
            fold = self._folds.get(writer.run_pk)
            if fold is None:
                fold = self._folds[writer.run_pk] = MetricFold()
            place = place_writer(batch.attempt, batch.rank)
            fold.add_body(batch.decoded, place, writer.started_us, hidden)
        elif batch.kind in RECORD_TYPES and batch.decoded.count != batch.count:
            raise SchemaValidationError(f"it holds {batch.decoded.count} records")

    def _find_writer(self, batch: Batch) -> _Writer | None:
        row = self._connection.execute(
            "SELECT writer.pk, run_pk, head, started_us, hidden_step FROM writer"
            " JOIN run ON run.pk = run_pk WHERE run.id = ? AND writer.id = ?",
            (batch.run_id, batch.writer_id),
        ).fetchone()
        return None if row is None else _Writer(*row)

    def _is_removed(self, batch: Batch) -> bool:
        """Whether the batch is a late one of a run that was removed for good.

        Raises:
            BackendRejected: It begins a new run under the old id.
        """
        row = self._connection.execute(
            "SELECT removed_us FROM removed WHERE run_id = ?", (batch.run_id,)
        ).fetchone()
        if row is None:
            return False
        if batch.kind == LifecycleRecord.KIND and any(
            isinstance(record, LifecycleRecord)
            and record.action == "start"
            and record.time_us > row[0]
            for record in batch.to_records()
        ):
            raise BackendRejected(
                f"run {batch.run_id} was removed from this store; choose another id"
            )
        return True

    def _add_writer(self, batch: Batch) -> _Writer:
        execute = self._connection.execute
        run = execute("SELECT pk FROM run WHERE id = ?", (batch.run_id,)).fetchone()
        if run is None:
            raise BackendRejected(f"run {batch.run_id} was never started in this store")
        # An attempt that began before this writer's first batch came hides what it says too.
        (hidden_step,) = execute(
            "SELECT min(from_step) FROM attempt WHERE run_pk = ? AND number > ?",
            (run[0], batch.attempt),
        ).fetchone()
        started_us = self._find_start(batch)
        cursor = execute(
            "INSERT INTO writer (run_pk, id, attempt, rank, started_us, head, hidden_step)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                run[0],
                batch.writer_id,
                batch.attempt,
                batch.rank,
                started_us,
                _NO_HEAD,
                hidden_step,
            ),
        )
        return _Writer(int(cursor.lastrowid or 0), run[0], _NO_HEAD, started_us, hidden_step)

    def _find_start(self, batch: Batch) -> int:
        try:
            return int(min(batch.decoded.to_list("time_us")))
        except SchemaValidationError:
            return time.time_ns() // 1000  # a kind that only a newer Quark knows

    def _note_hidden(self, writer: _Writer, batch: Batch) -> HiddenRows:
        """Which of a late batch's rows a later attempt has hidden."""
        assert writer.hidden_step is not None
        execute = self._connection.execute
        steps, sequences = batch.decoded.to_list("step"), batch.decoded.to_list("sequence")
        beyond = [
            sequence
            for step, sequence in zip(steps, sequences, strict=True)
            if step is not None and step >= writer.hidden_step
        ]
        row = execute(
            "SELECT sequence FROM hidden WHERE writer_pk = ? AND kind = ?", (writer.pk, batch.kind)
        ).fetchone()
        first = None if row is None else row[0]
        if beyond and (first is None or min(beyond) < first):
            if batch.kind == MetricRecord.KIND:
                # Points without a step that were counted may be hidden from now on.
                self._stale.add(writer.run_pk)
            first = min(beyond)
            execute(
                "INSERT INTO hidden (writer_pk, kind, sequence) VALUES (?, ?, ?)"
                " ON CONFLICT (writer_pk, kind) DO UPDATE SET"
                " sequence = min(sequence, excluded.sequence)",
                (writer.pk, batch.kind, first),
            )
        return HiddenRows(writer.hidden_step, first)

    def _recognise(self, writer_pk: int, batch: Batch, digest: bytes) -> None:
        row = self._connection.execute(
            "SELECT digest FROM batch WHERE writer_pk = ? AND kind = ? AND number = ?",
            (writer_pk, batch.kind, batch.number),
        ).fetchone()
        if row is not None and row[0] != digest:
            raise BackendRejected(
                f"batch {batch.number} of writer {batch.writer_id} came again with other content"
            )

    def _apply(self, batch: Batch) -> None:
        for record in batch.to_records():
            assert isinstance(record, LifecycleRecord)
            apply_lifecycle(self._connection, record, self._names)


def _reject(batch: Batch, error: Exception) -> BackendRejected:
    return BackendRejected(
        f"batch {batch.number} of writer {batch.writer_id} is malformed: {error!r}"
    )
