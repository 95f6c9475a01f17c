"""Edits what is said of runs, and asks them to stop.

Both need the scope `write`: a key that only trains may not rename, archive or stop what others
have begun. A training asks with any key whether it shall stop.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from quark_backends.service.belonging import BelongingRequest, GroupList
from quark_backends.service.protocol import (
    EditRequest,
    StopReply,
    StopRunRequest,
)
from quark_backends.service.server.http.call import Call
from quark_core.backends.edits import (
    BelongingEdit,
    RunEdit,
    check_belonging_edit,
    check_edit,
    check_reason,
)
from quark_core.config.arguments import check_group_path


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
