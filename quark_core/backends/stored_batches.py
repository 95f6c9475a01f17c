"""For backends that keep batches as they come: batches as JSON, and runs read out of batches.

A backend that can list a run's batches reads by two calls:

    def read(self, run_id, kind, query): return select_rows(self._load(run_id), kind, query)
    def load_run(self, run_id): return describe_run(self._load(run_id))

Both take the batches in any order and leave out what came twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quark_core.backends.contract import Batch
from quark_core.backends.edits import apply_edit, apply_stop, edit_fields
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import (
    RECORD_TYPES,
    ConfigSnapshot,
    EnvironmentSnapshot,
    LifecycleRecord,
    ProjectRecord,
    RunRecord,
    format_time,
)
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord
from quark_core.records.runs import (
    RunEnding,
    RunProgress,
    StopRequest,
    change_fields,
    change_groups,
    make_digests,
    read_progress,
)
from quark_core.records.sweeps import TrialClaim
from quark_core.system.process import ProcessIdentity, find_loss, renew_process

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query

_ORIGIN = ("run_id", "writer_id", "attempt", "rank")
_IDENTITY = (*_ORIGIN, "number", "kind")


def dump_batch(batch: Batch) -> dict[str, Any]:
    """A batch as JSON-like values, with a dict for each record.

    Values that are not finite stay floats: Python's json writes them as
    `NaN` and `Infinity`, and reads them back.

    Raises:
        SchemaValidationError: The batch's body cannot be read.
    """
    dumped: dict[str, Any] = {name: getattr(batch, name) for name in _IDENTITY}
    records = [msgspec.to_builtins(record) for record in batch.to_records()]
    for record in records:
        for name in _ORIGIN:
            del record[name]
    return {**dumped, "records": records}


def restore_batch(data: Mapping[str, Any]) -> Batch:
    """The batch that a dict of `dump_batch` says.

    Raises:
        SchemaValidationError: It says none.
    """
    try:
        record_type = RECORD_TYPES[data["kind"]]
        origin = {name: data[name] for name in _ORIGIN}
        records = [
            msgspec.convert({**origin, **record}, record_type, dec_hook=_restore)
            for record in data["records"]
        ]
        identity = {name: data[name] for name in _IDENTITY}
        body = encode_records(records)
        return msgspec.convert({**identity, "count": len(records), "body": body}, Batch)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise SchemaValidationError(f"not a valid batch: {error!r}") from error


def select_rows(batches: Iterable[Batch], kind: str, query: Query) -> Columns:
    """What `SupportsRead.read` returns, out of all batches of one run.

    Args:
        batches: Every batch of the run, of all kinds.
        kind: Kind of the records that are wanted.
        query: The filters.
    """
    from quark_core.records.attempts import hide_superseded
    from quark_core.records.columns import Columns

    ordered = _order(batches)
    parts = []
    for writer in _split_writers([batch for batch in ordered if batch.kind == kind]):
        rows = [
            Columns.from_body(batch.decoded, {name: getattr(batch, name) for name in _ORIGIN})
            for batch in writer
        ]
        parts.append(Columns.concatenate(kind, rows).order_by_sequence())
    columns = Columns.concatenate(kind, parts)
    if not query.all_attempts:
        columns = hide_superseded(columns, _find_from_steps(ordered))
    return columns.select(query)


def describe_run(batches: Iterable[Batch]) -> StoredRun:
    """What `SupportsRead.load_run` returns, out of all batches of one run.

    Raises:
        RunNotFoundError: None of them starts a run.
    """
    ordered = _order(batches)
    records = _list_lifecycle(ordered)
    starts = [record for record in records if record.action == "start"]
    if not starts:
        raise RunNotFoundError("this store does not have the run")
    attempt = max(record.attempt for record in starts)
    newest = [record for record in records if record.attempt == attempt]
    stop: StopRequest | None = None
    for record in newest:
        stop = apply_stop(stop, record)
    start = _data(next(record for record in newest if record.action == "start"))
    run, project = start["run"], start["project"]
    tags = {tag for record in starts for tag in _data(record)["run"]["tags"]}
    tags |= {_data(record)["tag"] for record in records if record.action == "tag"}
    ended = next((record for record in reversed(newest) if record.action == "status"), None)
    status = "running" if ended is None else str(_data(ended)["status"])
    config = next((_data(r) for r in reversed(records) if r.action == "config"), None)
    environment = next((_data(r) for r in reversed(records) if r.action == "environment"), None)
    created_at = format_time(starts[0].time_us)
    updated = [record.time_us for record in records if record.action != "heartbeat"]
    updated_at = format_time(max(updated))
    heartbeat_us = max(record.time_us for record in newest)
    told = start["process"]
    for record in newest:
        if record.action == "heartbeat":
            told = renew_process(told, record.data or {})
    process = msgspec.convert(told, ProcessIdentity)
    loss = find_loss(status, process, heartbeat_us)
    described = StoredRun(
        project=ProjectRecord(
            project["id"], project["name"], project["root_path"], created_at, updated_at
        ),
        run=RunRecord(
            id=starts[0].run_id,
            project_id=project["id"],
            project_name=project["name"],
            status=status,
            parent_run_id=run["parent_run_id"],
            lineage_root_run_id=run["lineage_root_run_id"],
            resume_count=attempt,
            run_path=run["run_path"],
            git_commit=run["git_commit"],
            strict_mode=run["strict_mode"],
            tags=tuple(sorted(tags)),
            attempt=attempt,
            name=run["name"],
            notes=run["notes"],
            created_at=created_at,
            updated_at=updated_at,
            ended_at=None if ended is None else format_time(ended.time_us),
            fork_step=_find_fork_step(starts),
        ),
        state=status if loss is None else "lost",
        config=None if config is None else ConfigSnapshot.from_data(config),
        environment=None if environment is None else EnvironmentSnapshot.from_data(environment),
        heartbeat_at=format_time(heartbeat_us),
        lost_reason=None if loss is None else loss.message,
        exit_code=None if ended is None else _data(ended).get("exit_code"),
        ending=loss if ended is None else RunEnding.from_data(_data(ended).get("ending")),
        stop=stop if stop is not None and stop.is_complete else None,
        trial=_find_trial(starts),
    )
    progress = _find_progress(newest) if ended is None else None
    changed = _apply_changes(dataclasses.replace(described, progress=progress), records)
    return dataclasses.replace(
        changed,
        digests=make_digests(
            None if config is None else config["values"], environment, _find_code_digest(ordered)
        ),
    )


def _apply_changes(stored: StoredRun, records: Sequence[LifecycleRecord]) -> StoredRun:
    """A run after what was said of it while it ran and later, in the order of their times."""
    run, fields = stored.run, stored.fields
    for record in sorted(records, key=lambda record: record.time_us):
        if record.action == "edit":
            run = apply_edit(run, record)
            fields = edit_fields(fields, record)
        elif record.action == "group":
            run = msgspec.structs.replace(
                run, groups=tuple(change_groups(run.groups, _data(record)))
            )
        elif record.action == "fields":
            fields = change_fields(fields, _data(record))
    return dataclasses.replace(stored, run=run, fields=fields)


def _find_trial(starts: Sequence[LifecycleRecord]) -> TrialClaim | None:
    """The claim of the newest attempt that has one."""
    for record in sorted(starts, key=lambda record: record.attempt, reverse=True):
        told = _data(record).get("trial")
        if told is not None:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(told, TrialClaim)
    return None


def _find_progress(newest: Sequence[LifecycleRecord]) -> RunProgress | None:
    """What the newest attempt has told last of how far it has come."""
    beats = [record for record in newest if record.action == "heartbeat"]
    told = (read_progress(_data(record)) for record in reversed(beats))
    return next((each for each in told if each is not None), None)


def _find_code_digest(ordered: Sequence[Batch]) -> str | None:
    """The digest of the sources: of the newest attempt, in it of the lowest rank, the newest."""
    found: list[tuple[tuple[int, int, int, int], str]] = []
    for batch in ordered:
        if batch.kind != FingerprintRecord.KIND:
            continue
        for record in batch.to_records():
            if (
                isinstance(record, FingerprintRecord)
                and record.subject == "code"
                and record.key == SOURCES_KEY
            ):
                place = (record.attempt, -record.rank, record.time_us, record.sequence)
                found.append((place, record.digest))
    return max(found)[1] if found else None


def _order(batches: Iterable[Batch]) -> list[Batch]:
    """Batches by attempt, rank, start of the writer and number; each once."""
    known: dict[tuple[str, int, str], Batch] = {}
    for batch in batches:
        known.setdefault((batch.writer_id, batch.number, batch.kind), batch)
    started: dict[str, int] = {}
    for batch in known.values():
        first = min(batch.decoded.to_list("time_us"), default=0)
        started[batch.writer_id] = min(first, started.get(batch.writer_id, first))
    return sorted(
        known.values(),
        key=lambda b: (b.attempt, b.rank, started[b.writer_id], b.writer_id, b.number),
    )


def _split_writers(ordered: Sequence[Batch]) -> list[list[Batch]]:
    writers: dict[str, list[Batch]] = {}
    for batch in ordered:
        writers.setdefault(batch.writer_id, []).append(batch)
    return list(writers.values())


def _list_lifecycle(ordered: Sequence[Batch]) -> list[LifecycleRecord]:
    found: list[LifecycleRecord] = []
    for batch in ordered:
        if batch.kind == LifecycleRecord.KIND:
            found += [r for r in batch.to_records() if isinstance(r, LifecycleRecord)]
    return found


def _find_from_steps(ordered: Sequence[Batch]) -> dict[int, int]:
    starts = [record for record in _list_lifecycle(ordered) if record.action == "start"]
    steps = {record.attempt: _data(record).get("from_step") for record in starts}
    return {attempt: step for attempt, step in steps.items() if step is not None}


def _find_fork_step(starts: Sequence[LifecycleRecord]) -> int | None:
    """The last step that a run has of its parent: what it did again, it has of itself."""
    forks = [_data(record).get("fork") for record in starts]
    fork = next((found for found in forks if isinstance(found, Mapping)), {})
    if not isinstance(fork.get("step"), int):
        return None
    steps = [_data(record).get("from_step") for record in starts]
    step = int(min([fork["step"], *(step - 1 for step in steps if step is not None)]))
    return step if step >= 0 else None


def _data(record: LifecycleRecord) -> dict[str, Any]:
    return dict(record.data or {})


def _restore(wanted: type, value: Any) -> Any:
    if wanted is JsonObject and isinstance(value, dict):
        return JsonObject(value)
    raise TypeError(f"{value!r:.60} is no {wanted.__name__}")
