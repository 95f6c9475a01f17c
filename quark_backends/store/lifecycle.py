"""Applies lifecycle records to the tables of projects and runs."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from quark_backends.store.names import NameTable
from quark_backends.store.run_labels import write_config, write_tags
from quark_core.errors import BackendRejected
from quark_core.records import LifecycleRecord

__all__ = ["apply_lifecycle"]


def apply_lifecycle(
    connection: sqlite3.Connection, record: LifecycleRecord, names: NameTable
) -> None:
    """Apply one record inside the caller's transaction.

    A record of an attempt never changes a run whose newest attempt is later.

    Raises:
        BackendRejected: The attempt was started already, by another process.
    """
    data: Mapping[str, Any] = record.data or {}
    if record.action == "start":
        _start(connection, record, data, names)
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
        write_tags(connection, run_pk, merged)
    elif record.attempt != attempt:
        return
    elif record.action == "heartbeat":
        # The store's own clock: hosts disagree about the time.
        _update(connection, run_pk, heartbeat_us=now_us)
    elif record.action in ("config", "environment"):
        _update(connection, run_pk, **{record.action: json.dumps(data), "heartbeat_us": now_us})
        if record.action == "config":
            write_config(connection, run_pk, data["values"])
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
    connection: sqlite3.Connection,
    record: LifecycleRecord,
    data: Mapping[str, Any],
    names: NameTable,
) -> None:
    project, run = data["project"], data["run"]
    connection.execute(
        "INSERT INTO project (id, name, root_path, created_us, updated_us)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET updated_us = excluded.updated_us",
        (project["id"], project["name"], project["root_path"], record.time_us, record.time_us),
    )
    row = connection.execute(
        "SELECT pk, attempt, trashed_us FROM run WHERE id = ?", (record.run_id,)
    ).fetchone()
    now_us = time.time_ns() // 1000
    process = json.dumps(data["process"])
    if row is None:
        tags = sorted(set(run["tags"]))
        cursor = connection.execute(
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
                json.dumps(tags),
                process,
                record.time_us,
                record.time_us,
                now_us,
            ),
        )
        write_tags(connection, int(cursor.lastrowid or 0), tags)
        _add_attempt(connection, int(cursor.lastrowid or 0), record, None)
        return
    run_pk, attempt, trashed_us = row
    if trashed_us is not None:
        raise BackendRejected(
            f"run {record.run_id} is in the trash; `quark restore {record.run_id}` brings it back"
        )
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
    from_step = data.get("from_step")
    _add_attempt(connection, run_pk, record, from_step)
    if from_step is not None:
        _hide_rows(connection, run_pk, record.attempt, from_step, names)


def _add_attempt(
    connection: sqlite3.Connection, run_pk: int, record: LifecycleRecord, from_step: int | None
) -> None:
    connection.execute(
        "INSERT INTO attempt (run_pk, number, from_step, started_us) VALUES (?, ?, ?, ?)",
        (run_pk, record.attempt, from_step, record.time_us),
    )


def _hide_rows(
    connection: sqlite3.Connection, run_pk: int, attempt: int, from_step: int, names: NameTable
) -> None:
    """Hide what earlier attempts have at a step or beyond it."""
    from quark_backends.store.summaries import find_first_hidden, rebuild_metrics

    writers = connection.execute(
        "SELECT pk FROM writer WHERE run_pk = ? AND attempt < ? AND coalesce(hidden_step, ?) >= ?",
        (run_pk, attempt, from_step, from_step),
    ).fetchall()
    for (writer_pk,) in writers:
        connection.execute("UPDATE writer SET hidden_step = ? WHERE pk = ?", (from_step, writer_pk))
        connection.executemany(
            "INSERT OR REPLACE INTO hidden (writer_pk, kind, sequence) VALUES (?, ?, ?)",
            [
                (writer_pk, kind, sequence)
                for kind, sequence in find_first_hidden(connection, writer_pk, from_step).items()
            ],
        )
    rebuild_metrics(connection, run_pk, names.find)


def _update(connection: sqlite3.Connection, run_pk: int, **values: Any) -> None:
    # Column names come from this module only; values are bound.
    assignments = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE run SET {assignments} WHERE pk = ?", (*values.values(), run_pk))
