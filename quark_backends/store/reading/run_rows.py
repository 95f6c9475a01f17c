"""Turns rows of the run table into runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
from quark_core.records.runs import RunDigests, RunProgress, StopRequest
from quark_core.system.process import ProcessIdentity, find_lost_reason

__all__ = ["RUN_QUERY", "read_stop", "run_not_found", "to_stored_run"]

RUN_QUERY = """
SELECT run.id, project_id, project.name, project.root_path, project.created_us,
    project.updated_us, status, parent_run_id, lineage_root_run_id, attempt, run_path,
    git_commit, strict_mode, run.tags, run.name, notes, run.created_us, run.updated_us, ended_us,
    config, environment, process, heartbeat_us, archived_us, stop, group_paths, run.fields,
    config_digest, structure_digest, code_digest, environment_digest, fork_step, progress
FROM run JOIN project ON project.id = project_id
"""
"""Selects what `to_stored_run` needs of each run, in its order."""


def to_stored_run(row: Sequence[Any]) -> StoredRun:
    """The run that a row of `RUN_QUERY` is."""
    (
        run_id,
        project_id,
        project_name,
        root_path,
        project_created_us,
        project_updated_us,
        status,
        parent_run_id,
        lineage_root_run_id,
        attempt,
        run_path,
        git_commit,
        strict_mode,
        tags,
        name,
        notes,
        created_us,
        updated_us,
        ended_us,
        config,
        environment,
        process,
        heartbeat_us,
        archived_us,
        stop,
        group_paths,
        fields,
        config_digest,
        structure_digest,
        code_digest,
        environment_digest,
        fork_step,
        progress,
    ) = row
    known = json.loads(process)
    identity = msgspec.convert(known, ProcessIdentity)
    lost_reason = find_lost_reason(status, identity, heartbeat_us)
    return StoredRun(
        project=ProjectRecord(
            project_id,
            project_name,
            root_path,
            format_time(project_created_us),
            format_time(project_updated_us),
        ),
        run=RunRecord(
            id=run_id,
            project_id=project_id,
            project_name=project_name,
            status=status,
            parent_run_id=parent_run_id,
            lineage_root_run_id=lineage_root_run_id,
            resume_count=attempt,
            run_path=run_path,
            git_commit=git_commit,
            strict_mode=bool(strict_mode),
            tags=tuple(json.loads(tags)),
            attempt=attempt,
            name=name,
            notes=notes,
            created_at=format_time(created_us),
            updated_at=format_time(updated_us),
            ended_at=None if ended_us is None else format_time(ended_us),
            archived_at=None if archived_us is None else format_time(archived_us),
            groups=() if group_paths is None else tuple(json.loads(group_paths)),
            fork_step=fork_step,
        ),
        state=status if lost_reason is None else "lost",
        config=None if config is None else ConfigSnapshot.from_data(json.loads(config)),
        environment=(
            None
            if environment is None
            else EnvironmentSnapshot(JsonObject(json.loads(environment)))
        ),
        heartbeat_at=format_time(heartbeat_us),
        lost_reason=lost_reason,
        exit_code=known.get("exit_code"),
        stop=read_stop(stop),
        fields={} if fields is None else json.loads(fields),
        digests=RunDigests(config_digest, structure_digest, code_digest, environment_digest),
        progress=(None if progress is None else msgspec.json.decode(progress, type=RunProgress)),
    )


def read_stop(stored: str | None) -> StopRequest | None:
    """The request that stands, of the column `stop`."""
    found = None if stored is None else msgspec.json.decode(stored, type=StopRequest)
    return found if found is not None and found.is_complete else None


def run_not_found(run_id: str) -> RunNotFoundError:
    """The error for a run that the store does not have."""
    return RunNotFoundError(f"run_id {run_id}: this store has no such run")
