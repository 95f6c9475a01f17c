"""Measures runs, and moves them to the trash, back, and away for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from quark_backends.service.protocol import CollectReply, CollectRequest
from quark_backends.service.server.service import Call
from quark_core.backends.edits import Collection, RunUsage

# The store has the last word: it says which runs are in the trash, and which are
# removed. Payloads lie apart, one folder for each run, and go once the store has
# no row of their run any more; nothing is shared between runs, so a payload has
# one use, which is its place. Whoever is killed in between leaves nothing but
# work for the next collection.

# A request ends well before any proxy gives it up.
_COLLECT_S = 3.0
_PAYLOADS = "artifacts"


async def move_runs(call: Call, method: str, arguments: dict[str, Any]) -> ASGIApp:
    """Put runs into the trash or take them out, all or none."""
    async with call.store() as opened:
        await call.service.threads.write(getattr(opened.store.trash, method), **arguments)
    return call.reply(None)


async def list_usages(call: Call, method: str, arguments: dict[str, Any]) -> ASGIApp:
    """What some runs take up, with their payloads."""
    async with _upkeep(call), call.store() as opened:
        measure = getattr(opened.store.trash, method)
        found = await call.service.threads.upkeep(measure, **arguments)
    payloads = await _measure_payloads(call)
    return await call.answer(lambda: _add_payloads(found, payloads))


async def measure_store(call: Call, _method: str, _arguments: dict[str, Any]) -> ASGIApp:
    """What the workspace takes up."""
    async with _upkeep(call), call.store() as opened:
        usage = await call.service.threads.upkeep(opened.store.trash.measure_store)
    payloads = await _measure_payloads(call)
    known = {run.run_id for run in usage.runs}
    runs = _add_payloads(usage.runs, payloads)
    found = replace(
        usage,
        # Where it lies is the server's own affair.
        store_root="",
        runs=tuple(sorted(runs, key=lambda run: -run.total_bytes)),
        shared_bytes=usage.shared_bytes
        + sum(size for run_id, size in payloads.items() if run_id not in known),
        elsewhere_bytes=0,
        total_bytes=usage.total_bytes + sum(payloads.values()),
    )
    return await call.answer(lambda: found)


async def list_damaged(call: Call, _method: str, _arguments: dict[str, Any]) -> ASGIApp:
    """What could not be read and was set aside."""
    async with call.store() as opened:
        return await call.answer(opened.store.trash.list_damaged)


async def collect_trash(call: Call) -> ASGIApp:
    """Remove what is in the trash for good."""
    request = await call.decode(CollectRequest)
    service, workspace = call.service, call.principal.workspace
    async with _upkeep(call), call.store() as opened:
        trash = opened.store.trash
        before = await _measure_payloads(call)
        if request.dry_run:
            plan = await service.threads.upkeep(
                trash.plan_collection, request.older_than_s, request.run_ids
            )
            gone = await service.threads.read(trash.list_gone, list(before))
            return call.reply(_to_reply(plan, before, before, gone, done=True))
        collected, done = await service.threads.upkeep(
            trash.collect_for, _COLLECT_S, request.older_than_s, request.run_ids
        )
        # Also those of runs whose rows an earlier collection has deleted.
        gone = await service.threads.read(trash.list_gone, list(before))
        for run_id in gone:
            await service.vault.forget_run(workspace, run_id)
        await service.vault.sweep()
        after = await _measure_payloads(call)
    return call.reply(_to_reply(collected, before, after, gone, done=done))


def _upkeep(call: Call) -> AbstractAsyncContextManager[None]:
    """A turn at what takes its time: one for each workspace, a few for all."""
    return call.service.upkeep.hold(call.principal.workspace, 1)


async def _measure_payloads(call: Call) -> dict[str, int]:
    return await call.service.vault.measure_runs(call.principal.workspace)


def _add_payloads(runs: Iterable[RunUsage], payloads: Mapping[str, int]) -> list[RunUsage]:
    """What runs take up, with their payloads, which the store does not know."""
    return [
        replace(run, files={**run.files, _PAYLOADS: size})
        if (size := payloads.get(run.run_id))
        else run
        for run in runs
    ]


def _to_reply(
    collected: Collection,
    before: Mapping[str, int],
    after: Mapping[str, int],
    gone: Iterable[str],
    *,
    done: bool,
) -> CollectReply:
    removed = {run.run_id for run in collected.runs}
    return CollectReply(
        removed=_add_payloads(collected.runs, before),
        skipped=dict(collected.skipped),
        leftovers={run_id: before[run_id] for run_id in gone if run_id not in removed},
        before_bytes=collected.before_bytes + sum(before.values()),
        after_bytes=collected.after_bytes + sum(after.values()),
        notes=list(collected.notes),
        done=done,
    )
