"""Applies lifecycle records to the tables of projects and runs."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from quark_core.errors import BackendRejected
from quark_core.records import LifecycleRecord

__all__ = ["apply_lifecycle"]


def apply_lifecycle(connection: sqlite3.Connection, record: LifecycleRecord) -> None:
    """Apply one record inside the caller's transaction.

    A record of an attempt never changes a run whose newest attempt is later.

    Raises:
        BackendRejected: The attempt was started already, by another process.
    """
    data: Mapping[str, Any] = record.data or {}
    if record.action == "start":
        _start(connection, record, data)
        return
    row = connection.execute(
        "SELECT pk, attempt, tags, status FROM run WHERE id = ?", (record.run_id,)
    ).fetchone()
    if row is None:
        raise BackendRejected(f"run {record.run_id} was never started in this store")
    run_pk, attempt, tags, _ = row
    now_us = time.time_ns() // 1000
    if record.action == "tag":
        merged = sorted({*json.loads(tags), data["tag"]})
        _update(connection, run_pk, tags=json.dumps(merged), updated_us=record.time_us)
    elif record.attempt != attempt:
        return
    elif record.action == "heartbeat":
        # The store's own clock: hosts disagree about the time.
        _update(connection, run_pk, heartbeat_us=now_us)
    elif record.action in ("config", "environment"):
        _update(connection, run_pk, **{record.action: json.dumps(data), "heartbeat_us": now_us})
    elif record.action == "status":
        _update(
            connection,
            run_pk,
            status=data["status"],
            ended_us=record.time_us,
            updated_us=record.time_us,
            heartbeat_us=now_us,
        )


def _start(
    connection: sqlite3.Connection, record: LifecycleRecord, data: Mapping[str, Any]
) -> None:
    project, run = data["project"], data["run"]
    connection.execute(
        "INSERT INTO project (id, name, root_path, created_us, updated_us)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET updated_us = excluded.updated_us",
        (project["id"], project["name"], project["root_path"], record.time_us, record.time_us),
    )
    row = connection.execute(
        "SELECT pk, attempt FROM run WHERE id = ?", (record.run_id,)
    ).fetchone()
    now_us = time.time_ns() // 1000
    process = json.dumps(data["process"])
    if row is None:
        connection.execute(
            "INSERT INTO run (id, project_id, name, notes, status, attempt, parent_run_id,"
            " lineage_root_run_id, run_path, git_commit, strict_mode, tags, process, created_us,"
            " updated_us, heartbeat_us) VALUES (?, ?, ?, ?, 'running', ?, ?, ?, ?, ?, ?, ?, ?, ?,"
            " ?, ?)",
            (
                record.run_id,
                project["id"],
                run["name"],
                run["notes"],
                record.attempt,
                run["parent_run_id"],
                run["lineage_root_run_id"],
                run["run_path"],
                run["git_commit"],
                run["strict_mode"],
                json.dumps(sorted(set(run["tags"]))),
                process,
                record.time_us,
                record.time_us,
                now_us,
            ),
        )
        return
    run_pk, attempt = row
    if record.attempt <= attempt:
        raise BackendRejected(
            f"attempt {record.attempt} of run {record.run_id} was started by another process"
        )
    _update(
        connection,
        run_pk,
        status="running",
        attempt=record.attempt,
        process=process,
        git_commit=run["git_commit"],
        ended_us=None,
        updated_us=record.time_us,
        heartbeat_us=now_us,
    )


def _update(connection: sqlite3.Connection, run_pk: int, **values: Any) -> None:
    # Column names come from this module only; values are bound.
    assignments = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE run SET {assignments} WHERE pk = ?", (*values.values(), run_pk))
