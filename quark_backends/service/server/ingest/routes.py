"""Takes batches in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    MSGPACK,
    Acknowledged,
    ErrorCode,
    GenerationReply,
    GenerationRequest,
    IngestRequest,
    WireBatch,
)
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.ingest.batch_checks import (
    check_batches,
    check_declared,
    find_metric_keys,
)
from quark_backends.service.server.ingest.json_batches import (
    JsonBatch,
    JsonIngest,
    encode_json_batches,
)
from quark_backends.service.server.ingest.reserved_records import check_reserved
from quark_backends.service.server.workspaces.stores import OpenStore, WorkspaceStore
from quark_core.backends.contract import Batch, Generation
from quark_core.errors import BackendRejected, RunNotFoundError
from quark_core.records import RECORD_TYPES, LifecycleRecord, StreamRecord

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
    """Store batches, all of them or none."""
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
            check = partial(_encode, call, run_id, asked)
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


def _encode(call: Call, run_id: str, asked: Sequence[JsonBatch]) -> CheckedBatches:
    batches = encode_json_batches(run_id, asked, call.service.config.limits)
    check_reserved(batches, call.principal)
    timed = all(batch.is_timed for batch in asked)
    return CheckedBatches(batches, find_metric_keys(batches), timed)


async def store_batches(call: Call, run_id: str, batches: list[Batch]) -> None:
    """Store checked batches of one run that a route has made; returns once they are committed.

    Raises:
        ServiceFailure: The key or the run would go beyond a limit.
        BackendRejected: One of them can never be stored.
        BackendUnavailable: The store is busy or out of reach.
    """
    call.service.guard.spend_rows(call.principal, sum(batch.count for batch in batches))
    await _store(call, run_id, CheckedBatches(batches, set(), timed=False))


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
    """Keep the outputs of one analysis."""
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
                f"outputs[{index}].kind must be one of {', '.join(kinds)}, got {output.kind!r:.60}",
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


def _is_repeat(store: WorkspaceStore, batches: Sequence[Batch]) -> bool:
    """Whether each batch is stored already, with the same records but for their time.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    return all(_is_stored(store, batch) for batch in batches)


def _is_stored(store: WorkspaceStore, batch: Batch) -> bool:
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
