"""Applies lifecycle records to the tables of projects and runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.table_rows import (
    RUN_QUERY,
    read_mapping,
    read_texts,
    to_stored_run,
)
from quark_backends.store.writing.metrics import NameTable
from quark_backends.store.writing.summaries import (
    begin_fork,
    shorten_fork,
    write_config,
    write_fields,
    write_groups,
    write_tags,
)
from quark_core.backends.contract import Batch
from quark_core.backends.edits import apply_edit, apply_stop, edit_fields
from quark_core.delivery.sending import SETTLED
from quark_core.errors import BackendRejected
from quark_core.records import EventRecord, LifecycleRecord, parse_time
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import (
    RunDigests,
    StopRequest,
    change_fields,
    change_groups,
    make_digests,
    read_progress,
)
from quark_core.records.sweeps import TrialClaim
from quark_core.system.process import renew_process

# Starts and ranks of a run may come late and out of order, but no more of them than this.
_MOST_AHEAD = 10_000
_GROWING = frozenset({"tags", "group_paths", "fields"})
MOST_CHARACTERS = 8 * 2**20
"""What each of the tags, groups and fields has at most as JSON: they grow bit by bit, and every
list reads them whole."""


@dataclass(frozen=True, slots=True)
class GivenAttempt:
    """The attempt that a start was given which was begun while the store was out of reach.

    Attributes:
        number: It.
        asked: The one that its process took, which another process had.
        status: Status of the run until then.
    """

    number: int
    asked: int
    status: str


@dataclass(frozen=True, slots=True)
class PreparedRecord:
    """A record, and what can be worked out of it before anybody has to wait for it.

    Attributes:
        record: It.
        digests: Of the configuration or environment that it brings.
        is_superseded: Whether its writer brings a newer configuration in the same transaction.
    """

    record: LifecycleRecord
    digests: RunDigests
    is_superseded: bool = False


_NO_DIGESTS = RunDigests()


def prepare(batches: Sequence[Batch]) -> dict[int, list[PreparedRecord]]:
    """The records of the lifecycle batches among some, by the `id` of their batch.

    Nobody else can write to the store while a transaction is open, so this is for before it.
    """
    found: dict[int, list[PreparedRecord]] = {}
    newer: set[tuple[str, str]] = set()
    for batch in reversed(batches):
        if batch.kind != LifecycleRecord.KIND:
            continue
        writer = batch.run_id, batch.writer_id
        prepared = found[id(batch)] = []
        for record in reversed(batch.to_records()):
            assert isinstance(record, LifecycleRecord)
            is_superseded = record.action == "config" and writer in newer
            if record.action == "start":
                newer.discard(writer)
            elif record.action == "config":
                newer.add(writer)
            digests = _NO_DIGESTS if is_superseded else _digest_record(record)
            prepared.insert(0, PreparedRecord(record, digests, is_superseded))
    return found


def _digest_record(record: LifecycleRecord) -> RunDigests:
    data: Mapping[str, Any] = record.data or {}
    if record.action == "config":
        return make_digests(data["values"], None)
    return make_digests(None, data) if record.action == "environment" else _NO_DIGESTS


def apply_lifecycle(
    connection: StoreConnection, prepared: PreparedRecord, names: NameTable
) -> GivenAttempt | None:
    """Apply one record inside the caller's transaction.

    A record of an attempt never changes a run whose newest attempt is later.

    Returns:
        The attempt that a start was given in place of its own, which another process has.

    Raises:
        BackendRejected: The attempt was started already, by another process, and this one
            was not begun while the store was out of reach.
    """
    record = prepared.record
    data: Mapping[str, Any] = record.data or {}
    if record.action == "start":
        return _start(connection, record, data, names)
    row = connection.execute(
        "SELECT pk, attempt, tags, process, stop, group_paths, fields, sweep_id, trial_number,"
        f" trial_token FROM run WHERE id = ?{connection.for_update}",
        (record.run_id,),
    ).fetchone()
    if row is None:
        raise BackendRejected(f"run {record.run_id} was never started in this store")
    run_pk, attempt, tags, process, stop, group_paths, fields, *claim = row
    if record.action == "tag":
        merged = sorted({*json.loads(tags), data["tag"]})
        _update(connection, run_pk, tags=json.dumps(merged), updated_us=record.time_us)
        write_tags(connection, run_pk, merged)
    elif record.action == "edit":
        _apply_edit(connection, run_pk, record)
    elif record.action == "group":
        groups = change_groups(read_texts(group_paths), data)
        _update(connection, run_pk, group_paths=_dump(groups), updated_us=record.time_us)
        write_groups(connection, run_pk, groups)
    elif record.action == "fields":
        values = change_fields(read_mapping(fields), data)
        _update(connection, run_pk, fields=_dump(values), updated_us=record.time_us)
        write_fields(connection, run_pk, values)
    elif record.attempt == attempt:
        _apply_to_attempt(connection, run_pk, prepared, process, stop)
        if claim[0] is not None and record.action in ("heartbeat", "status"):
            _tell_trial(connection, TrialClaim(*claim), record)
    return None


def _tell_trial(connection: StoreConnection, claim: TrialClaim, record: LifecycleRecord) -> None:
    """Let the trial of a run know that the run is alive, or how it has ended."""
    from quark_backends.store.writing.trials import end_trial, renew_trial

    if record.action == "heartbeat":
        renew_trial(connection, claim)
    else:
        end_trial(connection, claim, record.data or {})


def _apply_to_attempt(
    connection: StoreConnection,
    run_pk: int,
    prepared: PreparedRecord,
    process: str,
    stop: str | None,
) -> None:
    """Apply what the newest attempt of a run says of itself."""
    record, digests = prepared.record, prepared.digests
    data: Mapping[str, Any] = record.data or {}
    now_us = time.time_ns() // 1000
    if record.action == "heartbeat":
        # The store's own clock: hosts disagree about the time.
        _update(connection, run_pk, heartbeat_us=now_us)
        if "memory_kills" in data:
            renewed = json.dumps(renew_process(json.loads(process), data))
            _update(connection, run_pk, process=renewed)
        told = read_progress(data)
        if told is not None:
            # A rank may say it once more after the run has ended.
            connection.execute(
                "UPDATE run SET progress = ? WHERE pk = ? AND status = 'running'",
                (msgspec.json.encode(told).decode(), run_pk),
            )
    elif record.action == "environment":
        _update(
            connection,
            run_pk,
            environment=json.dumps(data),
            environment_digest=digests.environment,
            heartbeat_us=now_us,
        )
    elif record.action == "config" and not prepared.is_superseded:
        _update(
            connection,
            run_pk,
            config=json.dumps(data),
            config_digest=digests.config,
            structure_digest=digests.structure,
            heartbeat_us=now_us,
        )
        write_config(connection, run_pk, data["values"])
    elif record.action == "status":
        _update(
            connection,
            run_pk,
            status=data["status"],
            # With the process that ended so; a start puts another one in its place.
            process=json.dumps(
                {
                    **json.loads(process),
                    "exit_code": data.get("exit_code"),
                    "ending": data.get("ending"),
                }
            ),
            ended_us=record.time_us,
            progress=None,
            updated_us=record.time_us,
            heartbeat_us=now_us,
        )
    elif record.action in ("stop", "stop_seen"):
        known = None if stop is None else msgspec.json.decode(stop, type=StopRequest)
        changed = apply_stop(known, record)
        if changed != known:
            _update(connection, run_pk, stop=msgspec.json.encode(changed).decode())


def _apply_edit(connection: StoreConnection, run_pk: int, record: LifecycleRecord) -> None:
    """Change what is said of a run."""
    row = connection.execute(f"{RUN_QUERY} WHERE run.pk = ?", (run_pk,)).fetchone()
    known = to_stored_run(row)
    before, after = known.run, apply_edit(known.run, record)
    fields = edit_fields(known.fields, record)
    archived_at = after.archived_at
    _update(
        connection,
        run_pk,
        name=after.name,
        notes=after.notes,
        tags=json.dumps(list(after.tags)),
        group_paths=_dump(after.groups),
        fields=_dump(fields),
        archived_us=None if archived_at is None else parse_time(archived_at),
        updated_us=record.time_us,
    )
    if after.tags != before.tags:
        write_tags(connection, run_pk, list(after.tags))
    if after.groups != before.groups:
        write_groups(connection, run_pk, after.groups)
    if fields != known.fields:
        write_fields(connection, run_pk, fields)


def _start(
    connection: StoreConnection,
    record: LifecycleRecord,
    data: Mapping[str, Any],
    names: NameTable,
) -> GivenAttempt | None:
    project, run = data["project"], data["run"]
    connection.execute(
        "INSERT INTO project (id, name, root_path, created_us, updated_us)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET updated_us = excluded.updated_us",
        (project["id"], project["name"], project["root_path"], record.time_us, record.time_us),
    )
    row = connection.execute(
        "SELECT pk, attempt, status, created_us, trashed_us FROM run WHERE id = ?"
        f"{connection.for_update}",
        (record.run_id,),
    ).fetchone()
    now_us = time.time_ns() // 1000
    process = json.dumps(data["process"])
    check_attempt(record.run_id, record.attempt, -1 if row is None else row[1])
    if row is None:
        _add_run(connection, record, data, now_us)
        if data.get("fork"):
            begin_fork(connection, record.run_id, names.find)
        _begin_trial(connection, record, data)
        return None
    run_pk, newest, status, created_us, trashed_us = row
    if trashed_us is not None:
        raise BackendRejected(
            f"run {record.run_id} is in the trash; `quark restore {record.run_id}` restores it"
        )
    number = _choose_attempt(connection, run_pk, newest, record, data.get("offline"))
    from_step = data.get("from_step")
    if number >= newest:
        _update(
            connection,
            run_pk,
            status="running",
            attempt=number,
            process=process,
            git_commit=run["git_commit"],
            ended_us=None,
            # Whoever asked the attempt before to stop did not mean this one.
            stop=None,
            progress=None,
            updated_us=record.time_us,
            heartbeat_us=now_us,
        )
        _begin_trial(connection, record, data)
    elif record.time_us < created_us:
        _update(connection, run_pk, created_us=record.time_us)
    if number == record.attempt:
        _add_attempt(connection, run_pk, record, from_step)
    else:
        # It did nothing again of what the other process did beside it: both are shown.
        _add_attempt(connection, run_pk, msgspec.structs.replace(record, attempt=number), None)
    if from_step is not None and number != record.attempt:
        connection.execute(
            "UPDATE attempt SET from_step = ? WHERE run_pk = ? AND number = ?"
            " AND coalesce(from_step, ?) >= ?",
            (from_step, run_pk, record.attempt, from_step, from_step),
        )
    if from_step is not None:
        shorten_fork(connection, run_pk, from_step)
        _hide_rows(connection, run_pk, record.attempt, from_step, names)
    if number == record.attempt:
        return None
    return GivenAttempt(number, record.attempt, status)


def _add_run(
    connection: StoreConnection, record: LifecycleRecord, data: Mapping[str, Any], now_us: int
) -> None:
    """Make the run that a start begins."""
    project, run, process = data["project"], data["run"], json.dumps(data["process"])
    tags = sorted(set(run["tags"]))
    store = data.get("store") or {}
    fork = data.get("fork") or {}
    run_pk = connection.insert(
        "INSERT INTO run (pk, id, project_id, name, notes, status, attempt, parent_run_id,"
        " lineage_root_run_id, run_path, git_commit, strict_mode, tags, process, created_us,"
        " updated_us, heartbeat_us, store_name, store_path, fork_run_id, fork_step)"
        " VALUES (?, ?, ?, ?, ?, 'running', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            int(run["strict_mode"]),
            json.dumps(tags),
            process,
            record.time_us,
            record.time_us,
            now_us,
            store.get("name"),
            store.get("path"),
            fork.get("run_id"),
            fork.get("step"),
        ),
    )
    write_tags(connection, run_pk, tags)
    _add_attempt(connection, run_pk, record, None)


def _begin_trial(
    connection: StoreConnection, record: LifecycleRecord, data: Mapping[str, Any]
) -> None:
    """Note by what claim the run has a trial, where its start says so."""
    if data.get("trial") is None:
        return
    from quark_backends.store.writing.trials import begin_trial, read_claim

    claim = read_claim(data)
    if claim is not None and record.run_id is not None:
        connection.execute(
            "UPDATE run SET sweep_id = ?, trial_number = ?, trial_token = ? WHERE id = ?",
            (claim.sweep_id, claim.number, claim.token, record.run_id),
        )
        begin_trial(connection, record.run_id, claim)


def _choose_attempt(
    connection: StoreConnection,
    run_pk: int,
    newest: int,
    record: LifecycleRecord,
    offline: Mapping[str, Any] | None,
) -> int:
    """The attempt that a start begins.

    Raises:
        BackendRejected: Another process has started it, while the store was there to say so.
    """
    asked = record.attempt
    if offline is None:
        if asked <= newest:
            raise BackendRejected(
                f"attempt {asked} of run {record.run_id} was started by another process"
            )
        return asked
    if not _has_attempt(connection, run_pk, asked):
        return asked  # it may come late, after an attempt that followed it
    own = connection.execute(
        "SELECT 1 FROM writer WHERE run_pk = ? AND id = ? AND attempt = ?",
        (run_pk, offline.get("replaces") or "", asked),
    ).fetchone()
    # The process may have begun it itself, and not have heard of that.
    return asked if own is not None else newest + 1


def check_attempt(run_id: str | None, asked: int, newest: int) -> None:
    """Refuse an attempt that is so far beyond the newest that no attempt could follow it.

    Raises:
        BackendRejected: It is.
    """
    if asked > newest + _MOST_AHEAD:
        known = "which has none yet" if newest < 0 else f"whose newest attempt is {newest}"
        raise BackendRejected(
            f"attempt {asked} of run {run_id}, {known}, is too far ahead: at most {_MOST_AHEAD}"
        )


def _has_attempt(connection: StoreConnection, run_pk: int, number: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM attempt WHERE run_pk = ? AND number = ?", (run_pk, number)
    ).fetchone()
    return found is not None


def _add_attempt(
    connection: StoreConnection, run_pk: int, record: LifecycleRecord, from_step: int | None
) -> None:
    connection.execute(
        "INSERT INTO attempt (run_pk, number, from_step, started_us) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (run_pk, number) DO NOTHING",
        (run_pk, record.attempt, from_step, record.time_us),
    )


def _hide_rows(
    connection: StoreConnection, run_pk: int, attempt: int, from_step: int, names: NameTable
) -> None:
    """Hide what earlier attempts have at a step or beyond it."""
    from quark_backends.store.writing.summaries import (
        find_first_hidden,
        rebuild_fingerprints,
        rebuild_metrics,
    )

    writers = connection.execute(
        "SELECT pk FROM writer WHERE run_pk = ? AND attempt < ? AND coalesce(hidden_step, ?) >= ?",
        (run_pk, attempt, from_step, from_step),
    ).fetchall()
    for (writer_pk,) in writers:
        connection.execute("UPDATE writer SET hidden_step = ? WHERE pk = ?", (from_step, writer_pk))
        connection.executemany(
            "INSERT INTO hidden (writer_pk, kind, sequence) VALUES (?, ?, ?)"
            " ON CONFLICT (writer_pk, kind) DO UPDATE SET sequence = excluded.sequence",
            [
                (writer_pk, kind, sequence)
                for kind, sequence in find_first_hidden(connection, writer_pk, from_step).items()
            ],
        )
    rebuild_metrics(connection, run_pk, names.find)
    rebuild_fingerprints(connection, run_pk)


def _dump(value: Sequence[str] | Mapping[str, Any]) -> str | None:
    """JSON, or NULL where there is nothing."""
    return json.dumps(value) if value else None


def _update(connection: StoreConnection, run_pk: int, **values: Any) -> None:
    for name in _GROWING & values.keys():
        if len(value := values[name] or "") > MOST_CHARACTERS:
            raise BackendRejected(
                f"the {name} of the run would have {len(value)} characters as JSON, but a store "
                f"accepts {MOST_CHARACTERS}"
            )
    # Column names come from this module only; values are bound.
    assignments = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE run SET {assignments} WHERE pk = ?", (*values.values(), run_pk))


def make_attempt_event(batch: Batch, given: GivenAttempt) -> Batch:
    """The event of an attempt that got another number, as a batch; the same whenever it is made.

    Args:
        batch: The batch that holds the start.
        given: What became of it.
    """
    writer_id = f"{batch.writer_id}.settled"
    payload = {
        "message": (
            f"two processes started attempt {given.asked}, one of them when the store was "
            f"unreachable. That one is now attempt {given.number}, and both are kept"
        ),
        "writer_id": batch.writer_id,
        "asked_attempt": given.asked,
        "attempt": given.number,
        "status_before": given.status,
    }
    record = EventRecord(
        batch.run_id,
        writer_id,
        given.number,
        batch.rank,
        0,
        time.time_ns() // 1000,
        SETTLED,
        "warning",
        None,
        None,
        "running",
        JsonObject(payload),
    )
    return Batch(
        batch.run_id,
        writer_id,
        given.number,
        batch.rank,
        0,
        EventRecord.KIND,
        1,
        encode_records([record]),
    )
