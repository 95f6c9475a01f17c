"""Stores batches, each exactly once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import xxhash

from quark_backends.store.lifecycle import apply_lifecycle
from quark_core.backend import Batch
from quark_core.errors import BackendRejected, BackendUnavailable, SchemaValidationError
from quark_core.records import LifecycleRecord

__all__ = ["BatchIngest"]

_NO_HEAD = -1


class BatchIngest:
    """Writes batches over one connection; belongs to one thread.

    The writer's head advances in the same transaction as the data, so a batch
    that is delivered again, after a lost reply or a crash, is recognised by
    its number and acknowledged without being stored again.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

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
                    self._store(batch)
                execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error

    def _store(self, batch: Batch) -> None:
        execute = self._connection.execute
        digest = xxhash.xxh3_128_digest(batch.body)
        found = self._find_writer(batch)
        if found is not None and batch.number <= found[1]:
            self._recognise(found[0], batch, digest)
            return
        if batch.kind == LifecycleRecord.KIND:
            self._apply(batch)  # a start makes the run that its writer belongs to
        writer_pk = found[0] if found is not None else self._add_writer(batch)
        execute(
            "INSERT INTO batch (writer_pk, kind, number, count, digest, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (writer_pk, batch.kind, batch.number, batch.count, digest, batch.body),
        )
        execute("UPDATE writer SET head = ? WHERE pk = ?", (batch.number, writer_pk))

    def _find_writer(self, batch: Batch) -> tuple[int, int] | None:
        row = self._connection.execute(
            "SELECT writer.pk, head FROM writer JOIN run ON run.pk = run_pk"
            " WHERE run.id = ? AND writer.id = ?",
            (batch.run_id, batch.writer_id),
        ).fetchone()
        return None if row is None else (row[0], row[1])

    def _add_writer(self, batch: Batch) -> int:
        run = self._connection.execute(
            "SELECT pk FROM run WHERE id = ?", (batch.run_id,)
        ).fetchone()
        if run is None:
            raise BackendRejected(f"run {batch.run_id} was never started in this store")
        cursor = self._connection.execute(
            "INSERT INTO writer (run_pk, id, attempt, rank, started_us, head)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                run[0],
                batch.writer_id,
                batch.attempt,
                batch.rank,
                min(batch.decoded.to_list("time_us")),
                _NO_HEAD,
            ),
        )
        return int(cursor.lastrowid or 0)

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
        try:
            for record in batch.to_records():
                assert isinstance(record, LifecycleRecord)
                apply_lifecycle(self._connection, record)
        except (SchemaValidationError, KeyError, TypeError) as error:
            raise BackendRejected(f"lifecycle records are malformed: {error!r}") from error
