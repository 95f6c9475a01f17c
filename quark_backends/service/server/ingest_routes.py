"""Routes that write runs: batches, records as JSON, and runs started and ended with curl."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import xxhash
from msgspec import Meta
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    ACKNOWLEDGED_LIMIT_BATCHES,
    MSGPACK,
    RUN_ID,
    Acknowledged,
    ErrorCode,
    GenerationReply,
    GenerationRequest,
    IngestRequest,
    WireBatch,
)
from quark_backends.service.server.config import Limits
from quark_backends.service.server.ingest_validation import (
    check_batches,
    check_declared,
    check_reserved,
    find_metric_keys,
)
from quark_backends.service.server.requests import check_nesting
from quark_backends.service.server.responses import ServiceFailure
from quark_backends.service.server.service import Call
from quark_backends.service.server.stores import OpenStore
from quark_backends.store.run_store import RunStore
from quark_core.backends.contract import Batch, Generation
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import check_notes, check_tags
from quark_core.config.redaction import redact_record
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import BackendRejected, RunNotFoundError, SchemaValidationError
from quark_core.records import RECORD_TYPES, EventRecord, LifecycleRecord, StreamRecord
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.checks import check_event_type
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import check_name, decode_name, encode_name, split_name
from quark_core.records.schema import (
    LOG_IDENTIFIERS,
    ORIGIN_FIELDS,
    RESERVED_LOG_KEYS,
    restorers,
    validate_record,
)
from quark_core.records.sweeps import TrialClaim, TrialResult

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_SEQUENCES_OF_A_BATCH = 2**20


class JsonBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch whose records are objects.

    Attributes:
        writer_id, number: Identity of the batch within its run.
        kind: Kind of the records.
        attempt, rank: Of the writer.
        records: Each has the fields of its kind; `timestamp` (ISO 8601) or `time_us`
            says when it was, now where neither is there. `sequence` is counted
            where it is left out.
    """

    writer_id: Annotated[str, Meta(min_length=1, max_length=128)]
    number: Annotated[int, Meta(ge=0, le=2**42)]
    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    attempt: _Number = 0
    rank: _Number = 0
    records: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=65_536)]

    @property
    def is_timed(self) -> bool:
        """Whether every record says when it was."""
        return all("timestamp" in each or "time_us" in each for each in self.records)


class JsonIngest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/batches` as JSON: all of them are stored, or none."""

    batches: Annotated[list[JsonBatch], Meta(min_length=1, max_length=ACKNOWLEDGED_LIMIT_BATCHES)]


def _encode(run_id: str, batch: JsonBatch, field: str, limits: Limits) -> WireBatch:
    if batch.kind not in RECORD_TYPES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"{field}.kind must be one of {', '.join(map(repr, sorted(RECORD_TYPES)))}, "
            f"got {batch.kind!r:.60}",
            field=f"{field}.kind",
        )
    moment = now_us()
    records = []
    for index, given in enumerate(batch.records):
        where = f"{field}.records[{index}]"
        check_nesting(given, limits.nesting, where)
        try:
            records.append(_make_record(run_id, batch, index, given, moment))
        except SchemaValidationError as error:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{where}: {error}", field=where
            ) from None
    return WireBatch(
        batch.writer_id,
        batch.attempt,
        batch.rank,
        batch.number,
        batch.kind,
        len(records),
        encode_records(records),
    )


def _make_record(
    run_id: str, batch: JsonBatch, index: int, given: Mapping[str, Any], moment_us: int
) -> StreamRecord:
    record_type: Any = RECORD_TYPES[batch.kind]
    values = dict(given)
    for name in (*ORIGIN_FIELDS, "id"):
        values.pop(name, None)
    if "timestamp" in values:
        values["time_us"] = check_timestamp(values.pop("timestamp"))
    values.setdefault("time_us", moment_us)
    values.setdefault("sequence", batch.number * _SEQUENCES_OF_A_BATCH + index)
    _complete_names(batch.kind, values)
    fields = {each.name: each for each in msgspec.structs.fields(record_type)}
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise SchemaValidationError(
            f"{batch.kind} records have no field {unknown[0]!r:.100}. Their fields are "
            f"{', '.join(name for name in fields if name not in ORIGIN_FIELDS)}"
        )
    hints = get_type_hints(record_type)
    for name, each in fields.items():
        if name in ORIGIN_FIELDS:
            continue
        if name in values:
            values[name] = _convert(batch.kind, name, values[name], hints[name])
        elif each.default is msgspec.NODEFAULT and each.default_factory is msgspec.NODEFAULT:
            if type(None) not in get_args(hints[name]):
                raise SchemaValidationError(f"{name} is missing")
            values[name] = None
    record: StreamRecord = record_type(
        run_id=run_id,
        writer_id=batch.writer_id,
        attempt=batch.attempt,
        rank=batch.rank,
        **values,
    )
    validate_record(record)
    return record


def _complete_names(kind: str, values: dict[str, Any]) -> None:
    """A metric's or artifact's key is enough: its parts, and its stored form, follow from it."""
    if kind not in ("metric", "artifact"):
        return
    key = values.get(f"{kind}_key")
    if isinstance(key, str):
        check_name(key, f"{kind}_key")
        if decode_name(key) == key:
            key = values[f"{kind}_key"] = encode_name(key)
        values["namespace"], values[f"{kind}_name"] = split_name(key)


def _convert(kind: str, name: str, value: Any, hint: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        return None
    if JsonObject in options:
        return normalize_object(value, name)
    if name in restorers(kind):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise SchemaValidationError(f"{name} must be a list, not {type(value).__name__}")
        try:
            return restorers(kind)[name](list(value))
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise SchemaValidationError(f"{name} has a wrong form: {error}") from None
    if float in options and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise SchemaValidationError(f"{name} does not fit into a float64") from None
    return value


# What is smaller is looked at where it came in: handing it to a thread would take longer. What a
# batch declares counts, not what it weighs.
_SMALL_BYTES = 128 * 1024
_SMALL_ROWS = 1024
# What a record may take of memory beside its bytes, while its batch is open.
_ROW_BYTES = 16


class CheckedBatches(msgspec.Struct, frozen=True):
    """Batches that a store can take.

    Attributes:
        batches: They.
        keys: Keys of the metrics in them.
        timed: Whether their sender said when their records were made. Where it did
            not, records that come again with another time are the same records.
    """

    batches: list[Batch]
    keys: set[str]
    timed: bool = True


async def ingest(call: Call) -> ASGIApp:
    """Store batches, all of them or none; answered once they are committed."""
    run_id = call.run_id
    service, limits = call.service, call.service.config.limits
    async with call.body() as body:
        if body.media == MSGPACK:
            wire = body.decode(IngestRequest).batches
            rows, size = check_declared(wire, limits)
            # Before anybody works for it, so that what is refused costs its sender as well.
            service.guard.spend_rows(call.principal, rows)
            is_small = size <= _SMALL_BYTES and rows <= _SMALL_ROWS
            check = partial(_check, call, run_id, wire)
        else:
            asked = (await service.threads.write(body.decode_values, JsonIngest)).batches
            rows, size = sum(len(batch.records) for batch in asked), len(body.data)
            service.guard.spend_rows(call.principal, rows)
            is_small = False
            check = partial(_encode_json, call, run_id, asked)
        if is_small:
            count, removed = await _store(call, run_id, check())
        else:
            owner = call.principal.workspace
            async with service.bodies.opened.hold(owner, size + rows * _ROW_BYTES):
                checked = await service.threads.write(check)
                count, removed = await _store(call, run_id, checked)
    return call.reply(Acknowledged(count, removed))


def _check(call: Call, run_id: str, wire: Sequence[WireBatch]) -> CheckedBatches:
    batches = check_batches(run_id, wire, call.service.config.limits)
    check_reserved(batches, call.principal)
    return CheckedBatches(batches, find_metric_keys(batches))


def _encode_json(call: Call, run_id: str, asked: Sequence[JsonBatch]) -> CheckedBatches:
    """The batches, checked by the record types and encoded.

    Raises:
        ServiceFailure: A record that does not fit; `field` says which.
    """
    limits = call.service.config.limits
    wire = [
        _encode(run_id, batch, f"batches[{index}]", limits) for index, batch in enumerate(asked)
    ]
    checked = _check(call, run_id, wire)
    return CheckedBatches(checked.batches, checked.keys, all(batch.is_timed for batch in asked))


async def _store(call: Call, run_id: str, checked: CheckedBatches) -> tuple[int, bool]:
    """Store batches; returns their number, and whether they were let go with their run."""
    service, batches = call.service, checked.batches
    async with call.store() as opened:
        if checked.keys:

            async def load() -> Iterable[str]:
                return await _load_keys(call, opened, run_id)

            await service.run_keys.check(call.principal.workspace, run_id, checked.keys, load)
        try:
            await opened.write(batches)
        except BackendRejected:
            if checked.timed or not await service.threads.read(_is_repeat, opened.store, batches):
                raise
        removed = run_id in opened.store.let_go
    service.metrics.add("quark_ingested_batches_total", len(batches))
    service.metrics.add("quark_ingested_rows_total", sum(batch.count for batch in batches))
    return len(batches), removed


async def write_generation(call: Call) -> ASGIApp:
    """Keep the outputs of one analysis, visible all at once."""
    run_id = call.run_id
    async with call.body() as body:
        request = body.decode(GenerationRequest)
        generation = await call.service.threads.write(_decode_generation, call, run_id, request)
        async with call.store() as opened:
            number = await call.service.threads.write(opened.store.write_generation, generation)
    return call.reply(GenerationReply(number))


def _decode_generation(call: Call, run_id: str, request: GenerationRequest) -> Generation:
    wire = []
    for index, output in enumerate(request.outputs):
        if output.kind not in RECORD_TYPES or output.kind == LifecycleRecord.KIND:
            kinds = sorted(set(RECORD_TYPES) - {LifecycleRecord.KIND})
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"outputs[{index}].kind must be one of {', '.join(map(repr, kinds))}",
                field=f"outputs[{index}].kind",
            )
        if output.count:
            wire.append(
                WireBatch(request.analyzer, 0, 0, index, output.kind, output.count, output.body)
            )
    outputs: dict[str, list[StreamRecord]] = {output.kind: [] for output in request.outputs}
    for batch in check_batches(run_id, wire, call.service.config.limits):
        outputs[batch.kind].extend(batch.to_records())
    return Generation(
        run_id=run_id, analyzer=request.analyzer, replaces=request.replaces, outputs=outputs
    )


async def _load_keys(call: Call, opened: OpenStore, run_id: str) -> Sequence[str]:
    try:
        summary = await call.service.threads.read(opened.store.summarize, run_id)
    except RunNotFoundError:
        return ()
    return list(summary.metrics)


def _is_repeat(store: RunStore, batches: Sequence[Batch]) -> bool:
    """Whether each batch is stored already, with the same records but for their time.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    return all(_is_stored(store, batch) for batch in batches)


def _is_stored(store: RunStore, batch: Batch) -> bool:
    try:
        found = store.read_batches(batch.run_id, batch.writer_id, batch.number, 1)
    except RunNotFoundError:
        return False
    if not found or (found[0].number, found[0].kind) != (batch.number, batch.kind):
        return False
    ours, theirs = batch.to_records(), found[0].to_records()
    return len(ours) == len(theirs) and all(
        msgspec.structs.replace(one, time_us=other.time_us) == other
        for one, other in zip(ours, theirs, strict=True)
    )


# Starts, tags, logs and ends runs for people with curl.
#
# Each request becomes a batch of lifecycle or event records with a writer of its
# own, and goes through the same ingest as the batches of a training.

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
                f"{name} must be letters, digits, '.', '_' and '-', and not start with '.'",
                field=name,
            )
    root = run_id
    fork: dict[str, Any] = {}
    if request.fork_step is not None:
        if request.parent_run_id is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                "fork_step requires parent_run_id, the ID of the forked run",
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

    await _store_made(call, run_id, make)
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
                f"payload must not contain the reserved key {reserved!r}",
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
        return _encode_made(writer_id, attempt, [record])

    await _store_made(call, run_id, make)
    return call.reply(Acknowledged(1))


async def _apply(call: Call, actions: list[tuple[str, Mapping[str, Any] | None]]) -> ASGIApp:
    """Store lifecycle records of the run's newest attempt."""
    run_id = call.run_id
    stored: StoredRun = await call.ask("load_run", run_id)
    writer_id, _ = _name_writer(call)
    attempt = stored.run.attempt
    await _store_made(call, run_id, lambda: _make_batch(run_id, writer_id, attempt, actions))
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
    return _encode_made(
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


def _encode_made(writer_id: str, attempt: int, records: list[StreamRecord]) -> WireBatch:
    records = [redact_record(record) for record in records]
    for record in records:
        validate_record(record)
    return WireBatch(
        writer_id, attempt, 0, 0, records[0].KIND, len(records), encode_records(records)
    )


async def _store_made(call: Call, run_id: str, make: Callable[[], WireBatch]) -> None:
    """Store a batch, made on a thread: what is in it is redacted, however much that is.

    Raises:
        ServiceFailure: The key or the run would go beyond a limit.
        BackendRejected: It can never be stored.
        BackendUnavailable: The store is busy or out of reach.
    """

    def prepare() -> CheckedBatches:
        return msgspec.structs.replace(_check(call, run_id, [make()]), timed=False)

    checked = await call.service.threads.write(prepare)
    call.service.guard.spend_rows(call.principal, sum(each.count for each in checked.batches))
    await _store(call, run_id, checked)


def _derive_project_id(project: str) -> str:
    """As a training derives it."""
    return f"p{xxhash.xxh3_64_hexdigest(project.encode('utf-8', 'replace'))}"
