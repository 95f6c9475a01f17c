"""Takes batches in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from quark_backends.service.server.ingest.batch_checks import check_batches, find_metric_keys
from quark_backends.service.server.ingest.json_batches import JsonIngest, encode_json_batches
from quark_backends.service.server.workspaces.stores import OpenStore, WorkspaceStore
from quark_core.backends.contract import Batch, Generation
from quark_core.errors import BackendRejected, RunNotFoundError
from quark_core.records import RECORD_TYPES, LifecycleRecord, StreamRecord

__all__ = ["ingest", "store_batches", "write_generation"]

# What is smaller is decoded where it came in: handing it to a thread would take longer.
_SMALL_BYTES = 128 * 1024
_EDITS = frozenset({"edit", "stop"})
_OUTPUT_KINDS = RECORD_TYPES.keys() - {LifecycleRecord.KIND}


async def ingest(call: Call) -> ASGIApp:
    """Store batches, all of them or none."""
    run_id = call.run_id
    limits = call.service.config.limits
    async with call.body() as body:
        if body.media == MSGPACK:
            request = body.decode(IngestRequest)
            if len(body.data) <= _SMALL_BYTES:
                batches = check_batches(run_id, request.batches, limits)
            else:
                batches = await call.service.threads.write(
                    check_batches, run_id, request.batches, limits
                )
            timed = True
        else:
            asked = body.decode(JsonIngest)
            batches = await call.service.threads.write(encode_json_batches, run_id, asked, limits)
            timed = all(batch.is_timed for batch in asked.batches)
        _refuse_edits(call, batches)
        removed = await store_batches(call, run_id, batches, timed=timed)
    return call.reply(Acknowledged(len(batches), removed))


def _refuse_edits(call: Call, batches: Sequence[Batch]) -> None:
    """See that what only the scope write allows does not come in among the batches of a training.

    Raises:
        ServiceFailure: It does.
    """
    if call.principal.scopes & {"write", "admin"}:
        return
    for index, batch in enumerate(batches):
        if batch.kind != LifecycleRecord.KIND:
            continue
        edits = sorted(_EDITS.intersection(batch.decoded.to_list("action")))
        if edits:
            raise ServiceFailure(
                ErrorCode.FORBIDDEN,
                f"a lifecycle record {edits[0]!r} needs the scope write: a training has no such "
                "records, and who edits or stops a run does so by routes of their own",
                field=f"batches[{index}]",
            )


async def store_batches(call: Call, run_id: str, batches: list[Batch], *, timed: bool) -> bool:
    """Store checked batches of one run; returns once they are committed.

    Args:
        call: The request that they come with.
        run_id: The run.
        batches: The batches.
        timed: Whether their sender said when their records were made. Where it did
            not, records that come again with another time are the same records.

    Returns:
        Whether they were let go: the run was removed for good.

    Raises:
        ServiceFailure: The key or the run would go beyond a limit.
        BackendRejected: One of them can never be stored.
        BackendUnavailable: The store is busy or out of reach.
    """
    service = call.service
    rows = sum(batch.count for batch in batches)
    service.guard.spend_rows(call.principal, rows)
    async with call.store() as opened:
        if keys := find_metric_keys(batches):

            async def load() -> Iterable[str]:
                return await _load_keys(call, opened, run_id)

            await service.run_keys.check(call.principal.workspace, run_id, keys, load)
        try:
            await opened.write(batches)
        except BackendRejected:
            if timed or not await service.threads.read(_is_repeat, opened.store, batches):
                raise
        removed = run_id in opened.store.let_go
    service.metrics.add("quark_ingested_batches_total", len(batches))
    service.metrics.add("quark_ingested_rows_total", rows)
    return removed


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
        if output.kind not in _OUTPUT_KINDS:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"outputs[{index}].kind must be one of {', '.join(sorted(_OUTPUT_KINDS))}, "
                f"got {output.kind!r:.60}",
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
