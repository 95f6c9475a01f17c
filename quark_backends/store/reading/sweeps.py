"""Sweeps, their trials, and logs that workers share, as rows have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.run_rows import read_mapping
from quark_core.backends.coordination import MOST_READ_CHARACTERS, unknown_sweep
from quark_core.errors import SchemaValidationError
from quark_core.records import format_time
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.sweeps import TRIAL_STATES, StoredSweep, StoredTrial

TRIAL_COLUMNS = (
    "sweep_id, number, parameters, origin, state, token, failures, losses, worker, claimed_us,"
    " lease_us, run_id, objective_values, constraint_values, step, reason, settled_us"
)
"""What `to_stored_trial` needs of the table of trials, in its order."""

_MOST_KEPT = 4096  # characters of an object that is kept, once it has been read
_MOST_LISTED = 4_000_000  # characters of the sweeps of a list, of which it has the newest
_SWEEP_COLUMNS = "id, project, name, definition, state, created_us, updated_us"


class _Row(NamedTuple):
    """A row of `TRIAL_COLUMNS`."""

    sweep_id: str
    number: int
    parameters: str
    origin: str
    state: str
    token: int
    failures: int
    losses: int
    worker: str | None
    claimed_us: int | None
    lease_us: int | None
    run_id: str | None
    objective_values: str | None
    constraint_values: str | None
    step: int | None
    reason: str | None
    settled_us: int | None


class _SweepRow(NamedTuple):
    """A row of `_SWEEP_COLUMNS`."""

    id: str
    project: str
    name: str
    definition: str
    state: str
    created_us: int
    updated_us: int


_AnyRow = TypeVar("_AnyRow", _Row, _SweepRow)


def to_stored_trial(row: Sequence[Any]) -> StoredTrial:
    """The trial that a row of `TRIAL_COLUMNS` is."""
    of = _check_row(row, _Row, "a trial")
    worker = _read_object(of.worker)
    return StoredTrial(
        sweep_id=of.sweep_id,
        number=of.number,
        parameters=_read_object(of.parameters),
        origin=_read_object(of.origin),
        state=of.state,
        token=of.token,
        failures=of.failures,
        losses=of.losses,
        worker=worker or None,
        claimed_at=_format(of.claimed_us),
        lease_until=_format(of.lease_us),
        run_id=of.run_id,
        values=_read_numbers(of.objective_values),
        constraints=_read_numbers(of.constraint_values),
        step=of.step,
        reason=of.reason,
        settled_at=_format(of.settled_us),
    )


def list_sweeps(connection: StoreConnection, project: str | None) -> list[StoredSweep]:
    """See `SupportsCoordination.list_sweeps`; inside a transaction."""
    sql = f"SELECT {_SWEEP_COLUMNS} FROM sweep"
    arguments = () if project is None else (project,)
    if project is not None:
        sql += " WHERE project = ?"
    found = connection.execute(f"{sql} ORDER BY created_us DESC, id", arguments)
    rows: list[Any] = []
    characters = 0
    for row in found:
        characters += sum(len(value) for value in row if isinstance(value, str))
        if rows and characters > _MOST_LISTED:
            break
        rows.append(row)
    found.close()
    # Those of one sweep are next to each other in an index; a whole store's need no such thing.
    counted = _count(connection, None if project is None else [row[0] for row in rows])
    return [_to_stored_sweep(row, counted.get(row[0], {})) for row in rows]


def load_sweep(connection: StoreConnection, sweep_id: str) -> StoredSweep:
    """See `SupportsCoordination.load_sweep`; inside a transaction.

    Raises:
        SchemaValidationError: There is no such sweep.
    """
    row = connection.execute(
        f"SELECT {_SWEEP_COLUMNS} FROM sweep WHERE id = ? OR name_key = ?", (sweep_id, sweep_id)
    ).fetchone()
    if row is None:
        raise unknown_sweep(sweep_id)
    return _to_stored_sweep(row, _count(connection, [row[0]]).get(row[0], {}))


def load_trial(connection: StoreConnection, sweep_id: str, number: int) -> StoredTrial | None:
    """One trial, or None; inside a transaction."""
    row = connection.execute(
        f"SELECT {TRIAL_COLUMNS} FROM trial WHERE sweep_id = ? AND number = ?", (sweep_id, number)
    ).fetchone()
    return None if row is None else to_stored_trial(row)


def list_trials(
    connection: StoreConnection, sweep_id: str, start: int, limit: int | None
) -> list[StoredTrial]:
    """See `SupportsCoordination.list_trials`; inside a transaction."""
    if connection.execute("SELECT 1 FROM sweep WHERE id = ?", (sweep_id,)).fetchone() is None:
        raise unknown_sweep(sweep_id)
    sql = f"SELECT {TRIAL_COLUMNS} FROM trial WHERE sweep_id = ? AND number >= ? ORDER BY number"
    arguments: list[Any] = [sweep_id, start]
    if limit is not None:
        sql += " LIMIT ?"
        arguments.append(limit)
    return [to_stored_trial(row) for row in connection.execute(sql, arguments).fetchall()]


def read_entries(connection: StoreConnection, log: str, start: int, limit: int) -> list[str]:
    """See `SupportsCoordination.read_entries`; inside a transaction."""
    # Bounded where they are: a driver may fetch all rows of a statement at once.
    rows = connection.execute(
        "SELECT text FROM (SELECT number, text, sum(length(text)) OVER (ORDER BY number) AS total"
        " FROM entry JOIN log ON pk = log_pk WHERE name = ? AND number >= ?"
        " ORDER BY number LIMIT ?) AS part WHERE total <= ? OR number = ? ORDER BY number",
        (log, start, limit, MOST_READ_CHARACTERS, start),
    ).fetchall()
    return [text for (text,) in rows]


def _count(
    connection: StoreConnection, sweep_ids: Iterable[str] | None
) -> dict[str, dict[str, int]]:
    """How many trials sweeps have in each state."""
    sql = "SELECT sweep_id, state, count(*) FROM trial"
    group = " GROUP BY sweep_id, state"
    rows: list[Any] = []
    if sweep_ids is None:
        rows = connection.execute(sql + group).fetchall()
    else:
        for sweep_id in sweep_ids:
            rows += connection.execute(f"{sql} WHERE sweep_id = ?{group}", (sweep_id,)).fetchall()
    found: dict[str, dict[str, int]] = {}
    for sweep_id, state, count in rows:
        found.setdefault(sweep_id, {})[state] = int(count)
    return found


def _to_stored_sweep(row: Sequence[Any], counts: dict[str, int]) -> StoredSweep:
    of = _check_row(row, _SweepRow, "a sweep")
    return StoredSweep(
        id=of.id,
        project=of.project,
        name=of.name,
        definition=_read_object(of.definition),
        state=of.state,
        counts=JsonObject((str(s), counts[s]) for s in TRIAL_STATES if s in counts),
        created_at=_format(of.created_us) or format_time(0),
        updated_at=_format(of.updated_us) or format_time(0),
    )


def _check_row(row: Sequence[Any], kind: type[_AnyRow], what: str) -> _AnyRow:
    """A row with its types; a column of SQLite may hold anything.

    Raises:
        SchemaValidationError: No Quark has written it; it will be no other one by waiting.
    """
    try:
        return msgspec.convert(tuple(row), kind)
    except msgspec.ValidationError as error:
        raise SchemaValidationError(
            f"the store has {what} that no Quark has written ({error}): restore it from a backup, "
            "or take another store"
        ) from None


def _format(time_us: int | None) -> str | None:
    try:
        return None if time_us is None else format_time(time_us)
    except OverflowError:
        return None  # no Quark has written it


def _read_object(stored: str | None) -> JsonObject:
    """An object of a column; empty where no Quark has written what is there."""
    # A trial is read again and again, and of one worker there are many. What has no list and no
    # object in it cannot be changed by whoever has it.
    if stored is None or len(stored) > _MOST_KEPT or "[" in stored or stored.count("{") > 1:
        return _read_any_object(stored)
    return _read_flat_object(stored)


def _read_any_object(stored: str | None) -> JsonObject:
    try:
        return normalize_object(read_mapping(stored), "a column") or JsonObject()
    except (SchemaValidationError, RecursionError):
        return JsonObject()


_read_flat_object = lru_cache(maxsize=256)(_read_any_object)


def _read_numbers(stored: str | None) -> tuple[float, ...] | None:
    """Numbers of a column; None where no Quark has written what is there."""
    if stored is None:
        return None
    try:
        return msgspec.convert(json.loads(stored), tuple[float, ...])
    except (ValueError, TypeError, RecursionError):
        return None
