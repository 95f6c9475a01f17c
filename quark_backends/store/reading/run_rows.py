"""Turns rows of the run table into runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quark_core.backends.contract import StoredRun
from quark_core.errors import RunNotFoundError
from quark_core.records import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    ProjectRecord,
    RunRecord,
    format_time,
)
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import RunDigests, RunProgress, RunStatus, StopRequest
from quark_core.records.sweeps import TrialClaim
from quark_core.system.process import ProcessIdentity, find_lost_reason

__all__ = [
    "RUN_COLUMNS",
    "RUN_QUERY",
    "RUN_TABLES",
    "read_mapping",
    "read_settings",
    "read_stop",
    "read_texts",
    "run_not_found",
    "to_stored_run",
]

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
    known = _decode_json(of.process)
    identity = msgspec.convert(known, ProcessIdentity)
    lost_reason = find_lost_reason(of.status, identity, of.heartbeat_us)
    config, environment = of.config, of.environment
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
        state=of.status if lost_reason is None else "lost",
        config=None if config is None else ConfigSnapshot.from_data(_decode_json(config)),
        environment=(
            None
            if environment is None
            else EnvironmentSnapshot(JsonObject(_decode_json(environment)))
        ),
        heartbeat_at=format_time(of.heartbeat_us),
        lost_reason=lost_reason,
        exit_code=known.get("exit_code"),
        stop=read_stop(of.stop),
        fields=read_mapping(of.fields),
        digests=RunDigests(
            of.config_digest, of.structure_digest, of.code_digest, of.environment_digest
        ),
        progress=_read_progress(of.progress),
        trial=trial,
        superseded=trial is not None and _is_newer(of.newest_token, trial.token),
    )


def _decode_json(text: str) -> Any:
    """The value of a column; as `json.loads`, three times as fast for what Quark writes."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return json.loads(text)


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
        tags=tuple(_decode_json(of.tags)),
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
    """The values of a configuration as a run's row has it; empty without one."""
    values: dict[str, Any] = {} if config is None else _decode_json(config)["values"]
    return values


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
