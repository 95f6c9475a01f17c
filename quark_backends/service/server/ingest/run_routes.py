"""Starts, tags, logs and ends runs for people with curl.

Each request becomes a batch of lifecycle or event records with a writer of its
own, and goes through the same ingest as the batches of a training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta
from starlette.types import ASGIApp

from quark_backends.service.protocol import RUN_ID, Acknowledged, ErrorCode, WireBatch
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.http.request_bodies import check_nesting
from quark_backends.service.server.ingest.batch_checks import check_batches
from quark_backends.service.server.ingest.reserved_records import check_reserved
from quark_backends.service.server.ingest.routes import store_batches
from quark_core.backends.contract import Batch, StoredRun
from quark_core.config.arguments import check_notes, check_tags
from quark_core.config.redaction import redact_record
from quark_core.config.snapshot import snapshot_config
from quark_core.records import EventRecord, LifecycleRecord, StreamRecord
from quark_core.records.base import now_us
from quark_core.records.checks import check_event_type
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.schema import LOG_IDENTIFIERS, RESERVED_LOG_KEYS, validate_record
from quark_core.records.sweeps import TrialClaim, TrialResult

_Label = Annotated[str, Meta(min_length=1, max_length=250)]
_Index = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs`: start a run, with its configuration.

    Attributes:
        project: Its project.
        run_id: Its id; a random one where it is left out.
        name, notes: For people.
        tags: As in `quark.start_run`.
        config: JSON values; what looks like a secret is redacted.
        parent_run_id: The run of the workspace that it descends from.
        fork_step: The last step that it has of that run, whose curves its own begin with.
        store: Label of the project store that it belongs to.
        trial: The claim by which it has a trial of a sweep, as `claim` has answered.
    """

    project: _Label
    run_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    name: _Label | None = None
    notes: Annotated[str, Meta(max_length=100_000)] | None = None
    tags: Annotated[list[_Label], Meta(max_length=1000)] = []
    config: dict[str, Any] = {}
    parent_run_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    fork_step: _Index | None = None
    store: _Label = "default"
    trial: TrialClaim | None = None


class TagRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/tags`."""

    tags: Annotated[list[_Label], Meta(min_length=1, max_length=1000)]


class LogRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs/{run_id}/logs`: one log line.

    Attributes:
        message: The line.
        identifier: How grave it is.
        event_type: What it is filed under.
        step, epoch: Where the training was.
        payload: More, as JSON values.
    """

    message: Annotated[str, Meta(max_length=1_000_000)]
    identifier: Literal["Info", "Warning", "Error"] = "Info"
    event_type: Annotated[str, Meta(min_length=1, max_length=250)] = "user_log"
    step: _Index | None = None
    epoch: _Index | None = None
    payload: dict[str, Any] | None = None


class StatusRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/status`: the run has ended.

    Attributes:
        status: How.
        trial: What became of the trial that it has; by its status where this is left out.
    """

    status: Literal["completed", "failed", "interrupted"]
    trial: TrialResult | None = None


class HeartbeatRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/heartbeat`: the run lives; it counts as lost a minute after one.

    Where it has a trial of a sweep, the trial stays its own.
    """


_KEY_BYTES = 200


async def start_run(call: Call) -> ASGIApp:
    """Start a run."""
    request = await call.decode(StartRequest)
    writer_id, is_repeatable = _name_writer(call)
    run_id = request.run_id
    if run_id is None:
        seed = writer_id.encode() if is_repeatable else os.urandom(16)
        run_id = hashlib.sha256(call.principal.workspace.encode() + b"\x00" + seed).hexdigest()[:16]
    for name, given in (("run_id", run_id), ("parent_run_id", request.parent_run_id)):
        if given is not None and RUN_ID.fullmatch(given) is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} must be letters, digits, '.', '_' and '-' that do not begin with '.'",
                field=name,
            )
    root = run_id
    fork: dict[str, Any] = {}
    if request.fork_step is not None:
        if request.parent_run_id is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                "fork_step needs the parent_run_id of the run that is forked",
                field="fork_step",
            )
        fork = {"fork": {"run_id": request.parent_run_id, "step": request.fork_step}}
    if request.parent_run_id is not None:
        parent: StoredRun = await call.ask("load_run", request.parent_run_id)
        root = parent.run.lineage_root_run_id or request.parent_run_id
    start = {
        "project": {
            "id": _derive_project_id(request.project),
            "name": request.project,
            "root_path": "",
        },
        "run": {
            "name": request.name,
            "notes": check_notes(request.notes),
            "parent_run_id": request.parent_run_id,
            "lineage_root_run_id": root,
            "run_path": f"quark:/runs/{run_id}",
            "git_commit": None,
            "strict_mode": False,
            "tags": list(check_tags(request.tags)),
        },
        "store": {"name": request.store, "path": ""},
        # No process that could be asked: its heartbeats say whether the run lives.
        "process": {"host": f"http/{call.principal.key_id}", "pid": 0, "started": ""},
        **fork,
        **({} if request.trial is None else {"trial": request.trial.to_dict()}),
    }

    def make() -> WireBatch:
        check_nesting(request.config, call.service.config.limits.nesting, "config")
        config = snapshot_config(request.config).to_data()
        return _make_batch(run_id, writer_id, 0, [("start", start), ("config", config)])

    await _store(call, run_id, make)
    stored: StoredRun = await call.ask("load_run", run_id)
    return call.reply(stored.to_dict())


async def add_tags(call: Call) -> ASGIApp:
    """Add tags to a run."""
    request = await call.decode(TagRequest)
    tags = check_tags(request.tags)
    return await _apply(call, [("tag", {"tag": tag}) for tag in tags])


async def set_status(call: Call) -> ASGIApp:
    """End a run."""
    request = await call.decode(StatusRequest)
    told = {} if request.trial is None else {"trial": msgspec.to_builtins(request.trial)}
    return await _apply(call, [("status", {"status": request.status, **told})])


async def beat(call: Call) -> ASGIApp:
    """Say that a run lives."""
    await call.decode(HeartbeatRequest)
    return await _apply(call, [("heartbeat", None)])


async def add_log(call: Call) -> ASGIApp:
    """Add a log line to a run."""
    run_id = call.run_id
    request = await call.decode(LogRequest)
    payload = request.payload or {}
    for reserved in RESERVED_LOG_KEYS:
        if reserved in payload:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"payload must not hold the reserved key {reserved!r}",
                field="payload",
            )
    stored: StoredRun = await call.ask("load_run", run_id)
    writer_id, _ = _name_writer(call)
    attempt = stored.run.attempt

    def make() -> WireBatch:
        check_nesting(payload, call.service.config.limits.nesting, "payload")
        said = {"message": request.message, "identifier": request.identifier, **payload}
        record = EventRecord(
            run_id,
            writer_id,
            attempt,
            0,
            0,
            now_us(),
            check_event_type(request.event_type),
            LOG_IDENTIFIERS[request.identifier],
            request.step,
            request.epoch,
            None,
            normalize_object(said, "payload"),
        )
        return _encode(writer_id, attempt, [record])

    await _store(call, run_id, make)
    return call.reply(Acknowledged(1))


async def _apply(call: Call, actions: list[tuple[str, Mapping[str, Any] | None]]) -> ASGIApp:
    """Store lifecycle records of the run's newest attempt."""
    run_id = call.run_id
    stored: StoredRun = await call.ask("load_run", run_id)
    writer_id, _ = _name_writer(call)
    attempt = stored.run.attempt
    await _store(call, run_id, lambda: _make_batch(run_id, writer_id, attempt, actions))
    return call.reply(Acknowledged(1))


def _name_writer(call: Call) -> tuple[str, bool]:
    """The writer of a request, and whether a repeat of the request has the same."""
    key = call.request.headers.get("idempotency-key")
    if key is None:
        return f"http-{os.urandom(12).hex()}", False
    if not 0 < len(key) <= _KEY_BYTES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"Idempotency-Key must have 1 to {_KEY_BYTES} characters",
            field="Idempotency-Key",
        )
    # Of this route only: the same key elsewhere is another request.
    named = f"{call.route.path}\x00{key}".encode("utf-8", "replace")
    return f"http-{hashlib.sha256(named).hexdigest()[:24]}", True


def _make_batch(
    run_id: str,
    writer_id: str,
    attempt: int,
    actions: list[tuple[str, Mapping[str, Any] | None]],
) -> WireBatch:
    moment_us = now_us()
    return _encode(
        writer_id,
        attempt,
        [
            LifecycleRecord(
                run_id,
                writer_id,
                attempt,
                0,
                sequence,
                moment_us,
                action,
                None if data is None else JsonObject(data),
            )
            for sequence, (action, data) in enumerate(actions)
        ],
    )


def _encode(writer_id: str, attempt: int, records: list[StreamRecord]) -> WireBatch:
    records = [redact_record(record) for record in records]
    for record in records:
        validate_record(record)
    return WireBatch(
        writer_id, attempt, 0, 0, records[0].KIND, len(records), encode_records(records)
    )


async def _store(call: Call, run_id: str, make: Callable[[], WireBatch]) -> None:
    """Store a batch, made on a thread: what is in it is redacted, however much that is."""

    def prepare() -> list[Batch]:
        batches = check_batches(run_id, [make()], call.service.config.limits)
        check_reserved(batches, call.principal)
        return batches

    await store_batches(call, run_id, await call.service.threads.write(prepare))


def _derive_project_id(project: str) -> str:
    """As a training derives it."""
    return f"p{xxhash.xxh3_64_hexdigest(project.encode('utf-8', 'replace'))}"
