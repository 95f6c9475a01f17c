"""Edits of runs, projects and groups, and requests to stop, each in one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quark_backends.store.databases.connection import StoreConnection, writing
from quark_backends.store.reading.reader import find_run
from quark_backends.store.reading.table_rows import (
    RUN_QUERY,
    load_group,
    load_project,
    to_stored_run,
)
from quark_backends.store.writing.ingest import BatchIngest
from quark_backends.store.writing.lifecycle import MOST_CHARACTERS
from quark_core.backends.contract import Batch
from quark_core.backends.coordination import FieldExchange
from quark_core.backends.edits import (
    BelongingEdit,
    PlannedStop,
    RunEdit,
    StoredGroup,
    StoredProject,
    apply_belonging_edit,
    make_edit,
    make_stop,
    unknown_project,
)
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.base import now_us
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


def store_project_edit(connection: StoreConnection, project: str, edit: BelongingEdit) -> None:
    """Update a project; see `SupportsBelonging`.

    Raises:
        SchemaValidationError: There is no such project.
        The database's error: It is busy, full or out of reach.
    """
    with writing(connection):
        project_id = _lock_project(connection, project)
        _put_project(connection, project_id, load_project(connection, project), edit)


def store_group_edit(
    connection: StoreConnection, project: str, path: str, edit: BelongingEdit
) -> None:
    """Update a group; see `SupportsBelonging`.

    Raises:
        SchemaValidationError: There is no such project.
        The database's error: It is busy, full or out of reach.
    """
    with writing(connection):
        # Who changes two groups of a project waits: the second sees what the first has made.
        project_id = _lock_project(connection, project)
        _put_group(connection, project_id, load_group(connection, project, path), edit)


def store_belonging_field(
    connection: StoreConnection, project: str, path: str, exchange: FieldExchange
) -> bool:
    """Set a field of a group, or of a project, if it has a value.

    See `SupportsCoordination.compare_and_set_group`.

    Raises:
        SchemaValidationError: There is no such project.
        The database's error: It is busy, full or out of reach.
    """
    field, value = exchange.field, exchange.value
    edit = (
        BelongingEdit(remove_fields=(field,))
        if value is None
        else BelongingEdit(set_fields={field: value})
    )
    with writing(connection):
        project_id = _lock_project(connection, project)
        known = load_group(connection, project, path) if path else load_project(connection, project)
        if not exchange.fits(known.fields):
            return False
        if isinstance(known, StoredGroup):
            _put_group(connection, project_id, known, edit)
        else:
            _put_project(connection, project_id, known, edit)
    return True


def _put_project(
    connection: StoreConnection, project_id: str, known: StoredProject, edit: BelongingEdit
) -> None:
    said = _encode(apply_belonging_edit(known, edit))
    connection.execute(
        "UPDATE project SET description = ?, fields = ?, tags = ? WHERE id = ?",
        (*said, project_id),
    )


def _put_group(
    connection: StoreConnection, project_id: str, known: StoredGroup, edit: BelongingEdit
) -> None:
    said = _encode(apply_belonging_edit(known, edit))
    moment_us = now_us()
    connection.execute(
        "INSERT INTO run_group (project_id, path, description, fields, tags, created_us,"
        " updated_us) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (project_id, path) DO UPDATE"
        " SET description = excluded.description, fields = excluded.fields,"
        " tags = excluded.tags, updated_us = excluded.updated_us",
        (project_id, known.path, *said, moment_us, moment_us),
    )
    if not any(said):
        connection.execute(
            "DELETE FROM run_group WHERE project_id = ? AND path = ?", (project_id, known.path)
        )


def _lock_project(connection: StoreConnection, project: str) -> str:
    row = connection.execute(
        f"SELECT id FROM project WHERE name = ?{connection.for_update}", (project,)
    ).fetchone()
    if row is None:
        raise unknown_project(project)
    return str(row[0])


def _encode(said: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    kept = {name: json.dumps(said[name]) if said[name] else None for name in ("fields", "tags")}
    for name, text in kept.items():
        if len(text or "") > MOST_CHARACTERS:
            raise SchemaValidationError(
                f"{name} would have {len(text or '')} characters as JSON; at most {MOST_CHARACTERS}"
            )
    return said["description"], kept["fields"], kept["tags"]
