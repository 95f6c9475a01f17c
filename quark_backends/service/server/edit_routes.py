"""Routes that edit runs, ask them to stop, and move them to the trash and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    RUN_ID,
    BelongingRequest,
    CollectReply,
    CollectRequest,
    DamagedList,
    EditRequest,
    ErrorCode,
    GroupList,
    RunIds,
    StopReply,
    StopRunRequest,
    UsageList,
    UsageReply,
)
from quark_backends.service.server.requests import Call
from quark_backends.service.server.responses import ServiceFailure
from quark_core.backends.edits import (
    BelongingEdit,
    Collection,
    RunEdit,
    RunUsage,
    check_belonging_edit,
    check_edit,
    check_reason,
)
from quark_core.config.arguments import check_group_path

# Edits what is said of runs, and asks them to stop.
#
# Both need the scope `write`: a key that only trains may not rename, archive or stop what others
# have begun. A training asks with any key whether it shall stop.


async def edit_run(call: Call) -> ASGIApp:
    """Change what is said of a run."""
    request = await call.decode(EditRequest)
    edit = check_edit(
        RunEdit(**{name: getattr(request, name) for name in RunEdit.__struct_fields__})
    )
    async with call.store() as opened:
        stored = await call.service.threads.write(
            opened.store.edit_run, call.run_id, edit, by=call.name_caller(request.by)
        )
    return call.reply(stored.to_dict())


async def list_groups(call: Call) -> ASGIApp:
    """The groups that there are."""
    groups = await call.ask("list_groups", call.query_text("project"), call.query_text("store"))
    return call.reply(GroupList([group.to_dict() for group in groups]))


async def load_project(call: Call) -> ASGIApp:
    """What is known of a project."""
    name = call.query_text("project") or ""
    found = await call.ask("load_project", name, call.query_text("store"))
    return call.reply(found.to_dict())


async def update_project(call: Call) -> ASGIApp:
    """Change what is said of a project."""
    request = await call.decode(BelongingRequest)
    edit, by = _read_update(call, request)
    async with call.store() as opened:
        found = await call.service.threads.write(
            opened.store.update_project, request.project, edit, by=by
        )
    return call.reply(found.to_dict())


async def update_group(call: Call) -> ASGIApp:
    """Change what is said of a group."""
    request = await call.decode(BelongingRequest)
    path = check_group_path(request.path, "path")
    edit, by = _read_update(call, request)
    async with call.store() as opened:
        found = await call.service.threads.write(
            opened.store.update_group, request.project, path, edit, by=by
        )
    return call.reply(found.to_dict())


def _read_update(call: Call, request: BelongingRequest) -> tuple[BelongingEdit, str]:
    names = BelongingEdit.__struct_fields__
    edit = check_belonging_edit(BelongingEdit(**{n: getattr(request, n) for n in names}))
    return edit, call.name_caller(request.by)


async def request_stop(call: Call) -> ASGIApp:
    """Ask a run to stop."""
    request = await call.decode(StopRunRequest)
    reason = check_reason(request.reason)
    async with call.store() as opened:
        stop = await call.service.threads.write(
            opened.store.request_stop,
            call.run_id,
            by=call.name_caller(request.by),
            reason=reason,
        )
    return call.reply(StopReply(stop))


async def find_stop(call: Call) -> ASGIApp:
    """The request that stands for a run."""
    return call.reply(StopReply(await call.ask("find_stop", call.run_id)))


# Measures runs, puts them into the trash and back, and removes them for good.
#
# The store has the last word: it says which runs are in the trash, and which are
# removed. Payloads lie apart, one folder for each run, and go once the store has
# no row of their run any more; nothing is shared between runs, so a payload has
# one use, which is its place. Whoever is killed in between leaves nothing but
# work for the next collection.

# A request ends well before any proxy gives it up.
_COLLECT_S = 3.0
_PAYLOADS = "artifacts"


async def trash_runs(call: Call) -> ASGIApp:
    """Put runs into the trash, all or none."""
    return await _trash(call, await _decode_ids(call))


async def trash_run(call: Call) -> ASGIApp:
    """Put one run into the trash."""
    return await _trash(call, [call.run_id])


async def restore_runs(call: Call) -> ASGIApp:
    """Take runs out of the trash, all or none."""
    run_ids = await _decode_ids(call)
    async with call.store() as opened:
        await call.service.threads.write(opened.store.trash.restore_runs, run_ids)
    return call.reply(RunIds(run_ids))


async def list_trash(call: Call) -> ASGIApp:
    """The runs in the trash, with what they take up."""
    async with _upkeep(call), call.store() as opened:
        found = await call.service.threads.upkeep(opened.store.trash.list_trash)
    return call.reply(_describe(found, await _measure_payloads(call)))


async def measure_runs(call: Call) -> ASGIApp:
    """What some runs take up."""
    run_ids = await _decode_ids(call)
    async with _upkeep(call), call.store() as opened:
        found = await call.service.threads.upkeep(opened.store.trash.measure_runs, run_ids)
    return call.reply(_describe(found, await _measure_payloads(call)))


async def measure_workspace(call: Call) -> ASGIApp:
    """What the workspace takes up."""
    async with _upkeep(call), call.store() as opened:
        usage = await call.service.threads.upkeep(opened.store.trash.measure_store)
    payloads = await _measure_payloads(call)
    known = {run.run_id for run in usage.runs}
    runs = _add_payloads(usage.runs, payloads)
    return call.reply(
        UsageReply(
            runs=[run.to_dict() for run in sorted(runs, key=lambda run: -run.total_bytes)],
            database_file_bytes=usage.database_file_bytes,
            free_bytes=usage.free_bytes,
            shared_bytes=usage.shared_bytes
            + sum(size for run_id, size in payloads.items() if run_id not in known),
            total_bytes=usage.total_bytes + sum(payloads.values()),
        )
    )


async def list_damaged(call: Call) -> ASGIApp:
    """What could not be read and was set aside."""
    async with call.store() as opened:
        found = await call.service.threads.read(opened.store.trash.list_damaged)
    return call.reply(DamagedList([each.to_dict() for each in found]))


async def collect_trash(call: Call) -> ASGIApp:
    """Remove what is in the trash for good, for a few seconds."""
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


async def _trash(call: Call, run_ids: list[str]) -> ASGIApp:
    async with call.store() as opened:
        await call.service.threads.write(opened.store.trash.trash_runs, run_ids)
    return call.reply(RunIds(run_ids))


def _upkeep(call: Call) -> AbstractAsyncContextManager[None]:
    """A turn at what takes its time: one for each workspace, a few for all."""
    return call.service.upkeep.hold(call.principal.workspace, 1)


async def _decode_ids(call: Call) -> list[str]:
    run_ids = (await call.decode(RunIds)).run_ids
    for index, run_id in enumerate(run_ids):
        if RUN_ID.fullmatch(run_id) is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"run_ids[{index}] must be letters, digits, '.', '_' and '-' that do not begin "
                "with '.'",
                field=f"run_ids[{index}]",
            )
    return list(dict.fromkeys(run_ids))


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


def _describe(runs: Iterable[RunUsage], payloads: Mapping[str, int]) -> UsageList:
    return UsageList([run.to_dict() for run in _add_payloads(runs, payloads)])


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
        removed=[run.to_dict() for run in _add_payloads(collected.runs, before)],
        skipped=dict(collected.skipped),
        leftovers={run_id: before[run_id] for run_id in gone if run_id not in removed},
        before_bytes=collected.before_bytes + sum(before.values()),
        after_bytes=collected.after_bytes + sum(after.values()),
        notes=list(collected.notes),
        done=done,
    )
