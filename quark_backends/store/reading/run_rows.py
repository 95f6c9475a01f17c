"""Turns rows of the run table into runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from quark_core.backends.contract import StoredRun
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    ProjectRecord,
    RunRecord,
    format_time,
)
from quark_core.records.codec import MALFORMED
from quark_core.records.json_object import JsonObject, check_plain
from quark_core.records.runs import (
    RunDigests,
    RunEnding,
    RunProgress,
    RunStatus,
    StopRequest,
    renew_digests,
)
from quark_core.records.sweeps import TrialClaim
from quark_core.system.process import ProcessIdentity, find_loss

T = TypeVar("T")

_log = logging.getLogger("quark")

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


def to_stored_run(row: Sequence[Any]) -> StoredRun:
    """The run that a row of `RUN_QUERY` is."""
    of = _Row(*row)
    nothing: dict[str, Any] = {}
    known = _read(of, "process", _read_process, nothing) or nothing
    identity = msgspec.convert(known, ProcessIdentity) if known else _NOBODY
    loss = find_loss(of.status, identity, of.heartbeat_us)
    trial = _read_claim(of)
    settings = _read(of, "config", _read_config, _UNREADABLE)
    digests = RunDigests(
        of.config_digest, of.structure_digest, of.code_digest, of.environment_digest
    )
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
        config=settings,
        environment=_read(of, "environment", _read_environment, EnvironmentSnapshot(JsonObject())),
        heartbeat_at=format_time(of.heartbeat_us),
        lost_reason=None if loss is None else loss.message,
        exit_code=known.get("exit_code"),
        ending=loss or RunEnding.from_data(known.get("ending")),
        stop=_read(of, "stop", read_stop, None),
        fields=read_mapping(of.fields),
        digests=digests if settings is None else renew_digests(digests, settings.values),
        progress=_read_progress(of.progress),
        trial=trial,
        superseded=trial is not None and _is_newer(of.newest_token, trial.token),
    )


_NOBODY = ProcessIdentity("", 0, "")
_UNREADABLE = ConfigSnapshot(
    JsonObject(), ("the configuration that is stored of this run cannot be read",)
)
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
    return RunNotFoundError(f"run_id {run_id}: this store has no such run")
