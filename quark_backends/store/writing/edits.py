"""Edits of runs and requests to stop, each in one transaction of its store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.reader import find_run
from quark_backends.store.reading.run_rows import RUN_QUERY, to_stored_run
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.backends.contract import Batch, StoredRun
from quark_core.backends.coordination import FieldExchange
from quark_core.backends.edits import PlannedStop, RunEdit, make_edit, make_stop
from quark_core.errors import SessionStoreError
from quark_core.records.runs import StopRequest


def store_edit(connection: StoreConnection, run_id: str, edit: RunEdit, by: str) -> None:
    """Edit a run; see `SupportsEdits`.

    Raises:
        RunNotFoundError: There is no such run, or it is in the trash.
        The database's error: It is busy, full or out of reach.
    """
    BatchIngest(connection).write_made(
        lambda: make_edit(_lock_run(connection, run_id), edit, by=by)
    )


def store_field(connection: StoreConnection, run_id: str, exchange: FieldExchange, by: str) -> bool:
    """Set a field of a run if it has a value; see `SupportsCoordination.compare_and_set`.

    Raises:
        RunNotFoundError: There is no such run, or it is in the trash.
        The database's error: It is busy, full or out of reach.
    """
    fits: list[bool] = []

    def make() -> list[Batch]:
        stored = _lock_run(connection, run_id)
        fits[:] = [exchange.fits(stored.fields)]
        if not fits[0] or exchange.fits({exchange.field: exchange.value}):
            return []
        field = exchange.field
        if exchange.value is None:
            edit = RunEdit(remove_fields=(field,))
        else:
            edit = RunEdit(set_fields={field: exchange.value})
        return make_edit(stored, edit, by=by)

    BatchIngest(connection).write_made(make)
    return fits[0]


def store_stop(
    connection: StoreConnection, run_id: str, by: str, reason: str | None
) -> StopRequest:
    """Ask a run to stop; see `SupportsEdits`.

    Raises:
        RunNotFoundError, InvalidRunStateError: As `SupportsEdits.request_stop`.
        The database's error: It is busy, full or out of reach.
    """
    planned: list[PlannedStop] = []

    def make() -> list[Batch]:
        planned[:] = [make_stop(_lock_run(connection, run_id), by=by, reason=reason)]
        return planned[0].batches

    BatchIngest(connection).write_made(make)
    return planned[0].request


def _lock_run(connection: StoreConnection, run_id: str) -> StoredRun:
    run_pk = find_run(connection, run_id, for_update=True)
    row: Sequence[object] = connection.execute(
        f"{RUN_QUERY} WHERE run.pk = ?", (run_pk,)
    ).fetchone()
    return to_stored_run(row)


@contextmanager
def editing(connection: StoreConnection) -> Iterator[None]:
    """Make errors of a database those of who edits.

    Raises:
        SessionStoreError: It is busy, full or out of reach.
    """
    try:
        yield
    except connection.Error as error:
        raise SessionStoreError(f"the store cannot be written: {error}") from error
