"""Reads runs and records back, as columns."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quark_backends.store.run_rows import RUN_QUERY, run_not_found, to_stored_run
from quark_core.backend import Batch, StoredRun
from quark_core.codec import decode_body
from quark_core.errors import SchemaValidationError, SessionStoreError

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.query import Query

__all__ = ["StoreReader"]

_CACHED_ROWS = 200_000


class StoreReader:
    """Reads over connections of its own; may be used from any thread.

    The newest kinds that were read are kept decoded, with a mark of how far
    they go, so that reading again decodes only what came since.

    Args:
        connect: Opens a connection for reading.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[int, str], tuple[int, Columns]] = OrderedDict()

    def close(self) -> None:
        """Give up the connection; a later read opens another."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.columns import Columns

        with self._lock:
            run_row = self._execute("SELECT pk FROM run WHERE id = ?", run_id).fetchone()
            if run_row is None:
                raise run_not_found(run_id)
            writers = self._execute(
                "SELECT pk, id, attempt, rank FROM writer WHERE run_pk = ?"
                " ORDER BY attempt, rank, started_us, id",
                run_row[0],
            ).fetchall()
            parts = []
            for writer_pk, writer_id, attempt, rank in writers:
                origin = {
                    "run_id": run_id,
                    "writer_id": writer_id,
                    "attempt": attempt,
                    "rank": rank,
                }
                stored = self._read_writer(writer_pk, kind, origin)
                parts.append(stored.select(_without_limit(query)).order_by_sequence())
        joined = Columns.concatenate(kind, [part for part in parts if part.count])
        return joined.keep_newest(query.limit)

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """A writer's batches from a number on, in order, as they were written."""
        with self._lock:
            rows = self._execute(
                "SELECT writer.attempt, writer.rank, number, kind, count, body FROM batch"
                " JOIN writer ON writer.pk = writer_pk JOIN run ON run.pk = run_pk"
                " WHERE run.id = ? AND writer.id = ? AND number >= ? ORDER BY number LIMIT ?",
                run_id,
                writer_id,
                start,
                limit,
            ).fetchall()
        return [Batch(run_id, writer_id, *row) for row in rows]

    def load_run(self, run_id: str) -> StoredRun:
        """One run.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        with self._lock:
            row = self._execute(f"{RUN_QUERY} WHERE run.id = ?", run_id).fetchone()
        if row is None:
            raise run_not_found(run_id)
        return to_stored_run(row)

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """Runs, newest first."""
        where, arguments = "", []
        if project is not None:
            where = "WHERE project.name = ?"
            arguments.append(project)
        with self._lock:
            rows = self._execute(
                f"{RUN_QUERY} {where} ORDER BY run.created_us DESC, run.pk DESC LIMIT ?",
                *arguments,
                -1 if limit is None else limit,
            ).fetchall()
        return [to_stored_run(row) for row in rows]

    def _read_writer(self, writer_pk: int, kind: str, origin: dict[str, Any]) -> Columns:
        """All rows of one writer and kind, in order of their batches."""
        from quark_core.columns import Columns

        known, columns = self._cache.get((writer_pk, kind), (-1, Columns.empty(kind)))
        rows = self._execute(
            "SELECT number, body FROM batch WHERE writer_pk = ? AND kind = ? AND number > ?"
            " ORDER BY number",
            writer_pk,
            kind,
            known,
        ).fetchall()
        if rows:
            parts = [columns] if columns.count else []
            for number, body in rows:
                try:
                    parts.append(Columns.from_body(decode_body(body), origin))
                except SchemaValidationError as error:
                    raise SessionStoreError(
                        f"batch {number} of writer {origin['writer_id']} cannot be read: {error}"
                    ) from error
                known = number
            columns = Columns.concatenate(kind, parts).make_all()
            self._remember((writer_pk, kind), known, columns)
        return columns

    def _remember(self, key: tuple[int, str], known: int, columns: Columns) -> None:
        self._cache[key] = (known, columns)
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and self._count_cached() > _CACHED_ROWS:
            self._cache.popitem(last=False)
        if self._count_cached() > _CACHED_ROWS:
            self._cache.clear()

    def _count_cached(self) -> int:
        return sum(columns.count for _, columns in self._cache.values())

    def _execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if self._connection is None:
            self._connection = self._connect()
        try:
            return self._connection.execute(sql, arguments)
        except sqlite3.Error as error:
            raise SessionStoreError(f"the store cannot be read: {error}") from error


def _without_limit(query: Query) -> Query:
    import dataclasses

    return query if query.limit is None else dataclasses.replace(query, limit=None)
