"""Turns rows of the tables into runs, projects, groups, sweeps and trials."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from quark_backends.store.databases.connection import StoreConnection
from quark_core.backends.coordination import MOST_ENTRIES, MOST_READ_CHARACTERS, unknown_sweep
from quark_core.backends.edits import StoredGroup, StoredProject, gather_groups, unknown_project
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    ProjectRecord,
    RunRecord,
    format_time,
)
from quark_core.records.codec import MALFORMED
from quark_core.records.json_object import JsonObject, check_plain, normalize_object
from quark_core.records.runs import (
    RunDigests,
    RunEnding,
    RunProgress,
    RunStatus,
    StopRequest,
)
from quark_core.records.sweeps import TRIAL_STATES, StoredSweep, StoredTrial, TrialClaim
from quark_core.system.process import ProcessIdentity, find_loss

T = TypeVar("T")

_log = logging.getLogger("quark")

# Bound parameters of one statement; SQLite refuses more than 999 in its older versions.
_MOST_PARAMETERS = 500

RUN_COLUMNS = """
    run.id, project_id, project.name, project.root_path, project.created_us,
    project.updated_us, status, parent_run_id, lineage_root_run_id, attempt, run_path,
    git_commit, strict_mode, run.tags, run.name, notes, run.created_us, run.updated_us, ended_us,
    config, environment, process, heartbeat_us, archived_us, stop, group_paths, run.fields,
    config_digest, structure_digest, code_digest, environment_digest, fork_step, progress,
    run.sweep_id, trial_number, trial_token,
    (SELECT trial.token FROM trial
        WHERE trial.sweep_id = run.sweep_id AND trial.number = trial_number)
"""
"""What `to_stored_run` needs of each run, in its order, of `RUN_TABLES`."""

ROW_SIZE = " + ".join(
    f"coalesce(length(run.{name}), 0)" for name in ("config", "environment", "fields", "notes")
)
"""About how many bytes the row of a run has."""

RUN_TABLES = "run JOIN project ON project.id = project_id"

RUN_QUERY = f"SELECT {RUN_COLUMNS} FROM {RUN_TABLES}"
"""Selects `RUN_COLUMNS` of each run."""


class _Row(NamedTuple):
    """A row of `RUN_QUERY`."""

    run_id: str
    project_id: str
    project_name: str
    root_path: str
    project_created_us: int
    project_updated_us: int
    status: RunStatus
    parent_run_id: str | None
    lineage_root_run_id: str | None
    attempt: int
    run_path: str
    git_commit: str | None
    strict_mode: int
    tags: str
    name: str | None
    notes: str | None
    created_us: int
    updated_us: int
    ended_us: int | None
    config: str | None
    environment: str | None
    process: str
    heartbeat_us: int
    archived_us: int | None
    stop: str | None
    group_paths: str | None
    fields: str | None
    config_digest: str | None
    structure_digest: str | None
    code_digest: str | None
    environment_digest: str | None
    fork_step: int | None
    progress: str | None
    sweep_id: str | None
    trial_number: int | None
    trial_token: int | None
    newest_token: int | None


def cut_numbers(run_pks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers in parts, of which each is few enough for one statement."""
    numbers = iter(run_pks)
    while part := tuple(islice(numbers, _MOST_PARAMETERS)):
        yield part


def to_stored_run(row: Sequence[Any]) -> StoredRun:
    """The run that a row of `RUN_QUERY` is."""
    of = _Row(*row)
    nothing: dict[str, Any] = {}
    known = _read(of, "process", _read_process, nothing) or nothing
    identity = msgspec.convert(known, ProcessIdentity) if known else _NOBODY
    loss = find_loss(of.status, identity, of.heartbeat_us)
    trial = _read_claim(of)
    return StoredRun(
        project=ProjectRecord(
            of.project_id,
            of.project_name,
            of.root_path,
            format_time(of.project_created_us),
            format_time(of.project_updated_us),
        ),
        run=_to_run(of),
        state=of.status if loss is None else "lost",
        config=_read(of, "config", _read_config, _UNREADABLE),
        environment=_read(of, "environment", _read_environment, EnvironmentSnapshot(JsonObject())),
        heartbeat_at=format_time(of.heartbeat_us),
        lost_reason=None if loss is None else loss.message,
        exit_code=known.get("exit_code"),
        ending=loss or RunEnding.from_data(known.get("ending")),
        stop=_read(of, "stop", read_stop, None),
        fields=read_mapping(of.fields),
        digests=RunDigests(
            of.config_digest, of.structure_digest, of.code_digest, of.environment_digest
        ),
        progress=_read_progress(of.progress),
        trial=trial,
        superseded=trial is not None and _is_newer(of.newest_token, trial.token),
    )


_NOBODY = ProcessIdentity("", 0, "")
_UNREADABLE = ConfigSnapshot(JsonObject(), ("the stored config of this run cannot be read",))
# Of what nobody can read it is said once that it is there.
_MOST_TOLD = 1000
_told: set[tuple[str, str]] = set()


def _read(of: _Row, name: str, read: Callable[[str], T], otherwise: T) -> T | None:
    """What a column of a run's row holds; None where nothing is there.

    One run whose row is not what Quark writes must not hide all others: what cannot be read is
    told, and something else stands in its place.
    """
    stored: str | None = getattr(of, name)
    try:
        return None if stored is None else read(stored)
    except (SchemaValidationError, msgspec.MsgspecError, *MALFORMED) as error:
        if (of.run_id, name) not in _told and len(_told) < _MOST_TOLD:
            _told.add((of.run_id, name))
            _log.warning("run %s: its %s cannot be read: %s", of.run_id, name, error)
        return otherwise


def _read_process(stored: str) -> dict[str, Any]:
    """The process of a run's newest attempt, of the column `process`.

    Raises:
        SchemaValidationError: There is none in it, as in those of `MALFORMED`.
    """
    known: dict[str, Any] = _decode_json(stored)
    msgspec.convert(known, ProcessIdentity)
    return known


def _read_config(stored: str) -> ConfigSnapshot:
    return ConfigSnapshot.from_data(_decode_json(stored))


def _read_environment(stored: str) -> EnvironmentSnapshot:
    return EnvironmentSnapshot.from_data(_decode_json(stored))


def _decode_json(text: str) -> Any:
    """The value of a column; as `json.loads`, three times as fast for what Quark writes.

    Raises:
        SchemaValidationError: It is none that a record holds.
        ValueError: It is no JSON.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        value = json.loads(text)
    check_plain(value, text.encode())
    return value


def _is_newer(newest: object, token: int) -> bool:
    return isinstance(newest, int) and newest > token


def _read_claim(of: _Row) -> TrialClaim | None:
    if of.sweep_id is None or of.trial_number is None or of.trial_token is None:
        return None
    return TrialClaim(of.sweep_id, of.trial_number, of.trial_token)


def _to_run(of: _Row) -> RunRecord:
    return RunRecord(
        id=of.run_id,
        project_id=of.project_id,
        project_name=of.project_name,
        status=of.status,
        parent_run_id=of.parent_run_id,
        lineage_root_run_id=of.lineage_root_run_id,
        resume_count=of.attempt,
        run_path=of.run_path,
        git_commit=of.git_commit,
        strict_mode=bool(of.strict_mode),
        tags=read_texts(of.tags),
        attempt=of.attempt,
        name=of.name,
        notes=of.notes,
        created_at=format_time(of.created_us),
        updated_at=format_time(of.updated_us),
        ended_at=None if of.ended_us is None else format_time(of.ended_us),
        archived_at=None if of.archived_us is None else format_time(of.archived_us),
        groups=read_texts(of.group_paths),
        fork_step=of.fork_step if isinstance(of.fork_step, int) else None,
    )


def read_texts(stored: str | None) -> tuple[str, ...]:
    """Texts of a column; of what no Quark has written there, those that are some.

    One row that somebody has damaged must not hide all other runs.
    """
    found = _decode(stored)
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def read_settings(config: str | None) -> dict[str, Any]:
    """The values of a configuration as a run's row has it; empty without one that can be read."""
    try:
        return {} if config is None else dict(_decode_json(config)["values"])
    except (SchemaValidationError, *MALFORMED):
        return {}


def read_mapping(stored: str | None) -> dict[str, Any]:
    """A mapping of a column; empty where no Quark has written what is there."""
    found = _decode(stored)
    return found if isinstance(found, dict) else {}


def _decode(stored: str | None) -> object:
    try:
        return None if stored is None else json.loads(stored)
    except (ValueError, TypeError, RecursionError):
        return None


def _read_progress(stored: str | None) -> RunProgress | None:
    try:
        return None if stored is None else msgspec.json.decode(stored, type=RunProgress)
    except (msgspec.MsgspecError, TypeError, RecursionError):
        return None


def read_stop(stored: str | None) -> StopRequest | None:
    """The request that stands, of the column `stop`."""
    found = None if stored is None else msgspec.json.decode(stored, type=StopRequest)
    return found if found is not None and found.is_complete else None


def run_not_found(run_id: str) -> RunNotFoundError:
    """The error for a run that the store does not have."""
    return RunNotFoundError(f"run_id {run_id}: this store has no run with this ID")


def list_groups(
    connection: StoreConnection, project: str | None = None, store_name: str | None = None
) -> list[StoredGroup]:
    """See `SupportsBelonging.list_groups`; inside a transaction.

    Args:
        connection: The store.
        project: Only those of this project.
        store_name: Only of runs that were started for a storage root of this label.
    """
    return gather_groups(
        _list_members(connection, project, store_name), _list_described(connection, project)
    )


def load_group(connection: StoreConnection, project: str, path: str) -> StoredGroup:
    """One group, described or not."""
    found = next((g for g in list_groups(connection, project) if g.path == path), None)
    return StoredGroup(project=project, path=path) if found is None else found


def load_project(
    connection: StoreConnection, project: str, store_name: str | None = None
) -> StoredProject:
    """See `SupportsBelonging.load_project`; inside a transaction."""
    row = connection.execute(
        "SELECT id, description, fields, tags FROM project WHERE name = ?", (project,)
    ).fetchone()
    if row is None:
        raise unknown_project(project)
    project_id, *said = row
    sql = "SELECT count(*), max(created_us) FROM run WHERE project_id = ? AND trashed_us IS NULL"
    arguments = [project_id]
    if store_name is not None:
        sql, arguments = f"{sql} AND store_name = ?", [project_id, store_name]
    runs, newest_us = connection.execute(sql, arguments).fetchone()
    return StoredProject(
        project=project,
        **_read_belonging(*said),
        runs=int(runs),
        newest_at=None if newest_us is None else format_time(newest_us),
    )


def _list_members(
    connection: StoreConnection, project: str | None, store_name: str | None
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    sql = (
        "SELECT project.name, group_paths, run.created_us FROM run JOIN project ON project.id = "
        "project_id WHERE trashed_us IS NULL AND group_paths IS NOT NULL"
    )
    arguments = []
    for column, wanted in (("project.name", project), ("store_name", store_name)):
        if wanted is not None:
            sql += f" AND {column} = ?"
            arguments.append(wanted)
    for name, paths, created_us in connection.execute(sql, arguments).fetchall():
        yield name, read_texts(paths), format_time(created_us)


def _list_described(connection: StoreConnection, project: str | None) -> list[StoredGroup]:
    sql = (
        "SELECT project.name, path, run_group.description, run_group.fields, run_group.tags"
        " FROM run_group JOIN project ON project.id = project_id"
    )
    rows = (
        connection.execute(sql)
        if project is None
        else connection.execute(f"{sql} WHERE project.name = ?", (project,))
    )
    return [
        StoredGroup(project=name, path=path, **_read_belonging(*said))
        for name, path, *said in rows.fetchall()
    ]


def _read_belonging(
    description: str | None, fields: str | None, tags: str | None
) -> dict[str, Any]:
    return {
        "description": description,
        "fields": read_mapping(fields),
        "tags": read_texts(tags),
    }


TRIAL_COLUMNS = (
    "sweep_id, number, parameters, origin, state, token, failures, losses, worker, claimed_us,"
    " lease_us, run_id, objective_values, constraint_values, step, reason, settled_us"
)
"""What `to_stored_trial` needs of the table of trials, in its order."""

_MOST_KEPT = 4096  # characters of an object that is kept, once it has been read
_MOST_LISTED = 4_000_000  # characters of the sweeps of a list, of which it has the newest
_SWEEP_COLUMNS = "id, project, name, definition, state, created_us, updated_us"


class _TrialRow(NamedTuple):
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


_AnyRow = TypeVar("_AnyRow", _TrialRow, _SweepRow)


def to_stored_trial(row: Sequence[Any]) -> StoredTrial:
    """The trial that a row of `TRIAL_COLUMNS` is."""
    of = _check_row(row, _TrialRow, "a trial")
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


def list_sweeps(connection: StoreConnection, project: str | None = None) -> list[StoredSweep]:
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
    connection: StoreConnection, sweep_id: str, *, start: int = 0, limit: int | None = None
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


def read_entries(
    connection: StoreConnection, log: str, start: int, *, limit: int = MOST_ENTRIES
) -> list[str]:
    """See `SupportsCoordination.read_entries`; inside a transaction."""
    # Bounded where they are: a driver may fetch all rows of a statement at once.
    rows = connection.execute(
        "SELECT text FROM (SELECT number, text, sum(length(text)) OVER (ORDER BY number) AS total"
        " FROM entry JOIN log ON pk = log_pk WHERE name = ? AND number >= ?"
        " ORDER BY number LIMIT ?) AS part WHERE total <= ? OR number = ? ORDER BY number",
        (log, start, min(limit, MOST_ENTRIES), MOST_READ_CHARACTERS, start),
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
            f"the store has {what} that Quark did not write ({error}). Restore it from a "
            "backup, or use another store"
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
