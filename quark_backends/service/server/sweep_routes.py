"""Routes of sweeps, trials, shared logs and compare-and-set fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    PAGE_BYTES,
    PAGE_TRIALS,
    AddTrialsRequest,
    AppendRequest,
    ClaimRequest,
    CompareBelongingRequest,
    CompareReply,
    CompareRequest,
    EntryList,
    ErrorCode,
    OpenSweepRequest,
    SettleRequest,
    SweepList,
    SweepStateRequest,
    TrialList,
    TrialReply,
)
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.requests import (
    Call,
    Parameter,
    ServiceRoute,
    check_nesting,
    check_text,
)
from quark_backends.service.server.responses import ServiceFailure, encode_within
from quark_backends.service.server.stores import WorkspaceStore
from quark_core.backends.coordination import (
    MOST_ENTRIES,
    AppendedEntries,
    check_entries,
    check_new_trials,
)
from quark_core.config.arguments import check_group_path
from quark_core.records.names import check_name
from quark_core.records.sweeps import StoredTrial
from quark_core.system.process import ProcessIdentity

# Gives trials of sweeps to workers, keeps their logs, and sets fields that many compare.
#
# Whoever may send records may work on a sweep: open it, add trials, claim them, say what became of
# them, and append to logs. To see one sweep, its trials and its logs any key will do, since a
# worker cannot search without them; only the list of all sweeps needs the scope `read`. Pausing and
# cancelling a sweep, as stopping a run, needs `write`, and so do fields of groups and projects.
#
# A sweep belongs to a project of the workspace. Which storage root a worker begins its runs from
# makes no difference: workers of several machines have several.

T = TypeVar("T")

_PART_TRIALS = 100
_WORKER_CHARACTERS = 1000
_DEFINITION_BYTES = 2**20


async def open_sweep(call: Call) -> ASGIApp:
    """The sweep of a name, which is made where there is none."""
    request = await call.decode(OpenSweepRequest)
    check_nesting(request.definition, call.service.config.limits.nesting, "definition")
    if (size := len(msgspec.json.encode(request.definition))) > _DEFINITION_BYTES:
        raise ServiceFailure(
            ErrorCode.TOO_LARGE,
            f"the definition has {size} bytes as JSON; this server takes {_DEFINITION_BYTES}",
            field="definition",
        )
    found = await _change(
        call,
        "open_sweep",
        _check_name(request.project, "project"),
        _check_name(request.name, "name"),
        request.definition,
        max_failures=request.max_failures,
    )
    return call.reply(found.to_dict())


async def list_sweeps(call: Call) -> ASGIApp:
    """The sweeps that there are."""
    project = call.query_text("project")

    async with call.store() as opened:
        store, media = opened.store, call.media

        def make() -> SweepList:
            # The newest of them: those that a reply has no room for are found by their name.
            found = (sweep.to_dict() for sweep in store.list_sweeps(project))
            return SweepList(list(encode_within(found, media)))

        return await call.answer(make)


async def load_sweep(call: Call) -> ASGIApp:
    """One sweep."""
    found = await call.ask("load_sweep", call.path_text("sweep_id"))
    return call.reply(found.to_dict())


async def update_sweep(call: Call) -> ASGIApp:
    """Pause, go on with or cancel a sweep."""
    request = await call.decode(SweepStateRequest)
    by = call.name_caller(request.by)
    found = await _change(call, "update_sweep", call.path_text("sweep_id"), request.state, by=by)
    return call.reply(found.to_dict())


async def add_trials(call: Call) -> ASGIApp:
    """Add trials to a sweep."""
    request = await call.decode(AddTrialsRequest)
    nesting = call.service.config.limits.nesting
    for place, trial in enumerate(request.trials):
        check_nesting(trial.parameters, nesting, f"trials[{place}].parameters")
        check_nesting(trial.origin, nesting, f"trials[{place}].origin")
    trials = check_new_trials(request.trials)
    call.service.guard.spend_rows(call.principal, len(trials))
    added = await _change(
        call,
        "add_trials",
        call.path_text("sweep_id"),
        trials,
        key=_check_name(request.key, "key"),
    )
    return call.reply(TrialList([trial.to_dict() for trial in added]))


async def list_trials(call: Call) -> ASGIApp:
    """Some trials of a sweep."""
    sweep_id = call.path_text("sweep_id")
    start = call.query_number("start", 0) or 0
    limit = min(call.query_number("limit", PAGE_TRIALS) or 0, PAGE_TRIALS)
    async with call.store() as opened:
        page = await call.service.threads.read(_read_trials, opened.store, sweep_id, start, limit)
    return call.reply(TrialList(page, start + len(page) if page else None))


def _read_trials(
    store: WorkspaceStore, sweep_id: str, start: int, limit: int
) -> list[dict[str, Any]]:
    """A page of trials, read in parts: of large ones it holds few."""

    def read() -> Iterator[dict[str, Any]]:
        first = start
        while first < start + limit:
            wanted = min(_PART_TRIALS, start + limit - first)
            part = store.list_trials(sweep_id, start=first, limit=wanted)
            for trial in part:
                yield trial.to_dict()
            if len(part) < wanted:
                return
            first += wanted

    return _cut(read())


async def claim_trial(call: Call) -> ASGIApp:
    """Give a trial to a worker."""
    request = await call.decode(ClaimRequest)
    # No process that could be asked: its lease says how long it is believed in.
    worker = request.worker or ProcessIdentity(f"http/{call.principal.key_id}", 0, "")
    found = await _change(
        call,
        "claim_trial",
        call.path_text("sweep_id"),
        request_id=_check_name(request.request_id, "request_id"),
        worker=_check_worker(worker),
        lease_s=request.lease_s,
        wish=request.wish,
    )
    return _reply_with(call, found)


async def settle_trial(call: Call) -> ASGIApp:
    """Take what became of a trial, or renew its lease."""
    request = await call.decode(SettleRequest)
    found = await _change(
        call,
        "settle_trial",
        call.path_text("sweep_id"),
        request.number,
        request.token,
        request.result,
        lease_s=request.lease_s,
    )
    return _reply_with(call, found)


def _reply_with(call: Call, trial: StoredTrial | None) -> ASGIApp:
    """What a `TrialReply` is once it is encoded; a record need not be made a dict for that."""
    return call.reply({"trial": trial})


async def append_entries(call: Call) -> ASGIApp:
    """Append texts to a log."""
    request = await call.decode(AppendRequest)
    entries = check_entries(request.entries)
    call.service.guard.spend_rows(call.principal, len(entries))
    found = await _change(
        call,
        "append_entries",
        _check_name(request.log, "log"),
        entries,
        request_id=_check_name(request.request_id, "request_id"),
    )
    return call.reply(found)


async def read_entries(call: Call) -> ASGIApp:
    """Some entries of a log."""
    log = _check_name(call.query_text("log") or "", "log")
    start = call.query_number("start", 0) or 0
    limit = min(call.query_number("limit", MOST_ENTRIES) or 0, MOST_ENTRIES)
    async with call.store() as opened:
        page = await call.service.threads.read(_read_entries, opened.store, log, start, limit)
    return call.reply(EntryList(page, start + len(page) if page else None))


def _read_entries(store: WorkspaceStore, log: str, start: int, limit: int) -> list[str]:
    return _cut(store.read_entries(log, start, limit=limit)) if limit else []


async def compare_and_set(call: Call) -> ASGIApp:
    """Set a field of a run if it has the value that is expected."""
    request = await call.decode(CompareRequest)
    was_set = await _change(
        call,
        "compare_and_set",
        call.run_id,
        *_read_comparison(call, request),
        by=call.name_caller(request.by),
    )
    return call.reply(CompareReply(was_set))


async def compare_and_set_group(call: Call) -> ASGIApp:
    """Set a field of a group if it has the value that is expected."""
    request = await call.decode(CompareBelongingRequest)
    return await _compare_belonging(call, request, check_group_path(request.path, "path"))


async def compare_and_set_project(call: Call) -> ASGIApp:
    """Set a field of a project if it has the value that is expected."""
    request = await call.decode(CompareBelongingRequest)
    if request.path:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            "path must be empty here; a group has a route of its own",
            field="path",
        )
    return await _compare_belonging(call, request, "")


async def _compare_belonging(call: Call, request: CompareBelongingRequest, path: str) -> ASGIApp:
    was_set = await _change(
        call,
        "compare_and_set_group",
        request.project,
        path,
        *_read_comparison(call, request),
        by=call.name_caller(request.by),
    )
    return call.reply(CompareReply(was_set))


def _read_comparison(call: Call, request: CompareRequest) -> tuple[str, Any, Any]:
    nesting = call.service.config.limits.nesting
    check_nesting(request.expect, nesting, "expect")
    check_nesting(request.value, nesting, "value")
    return _check_name(request.field, "field"), request.expect, request.value


async def _change(call: Call, method: str, *args: Any, **kwargs: Any) -> Any:
    """What a method of the workspace's store returns that changes something."""
    async with call.store() as opened:
        return await opened.coordinate(partial(getattr(opened.store, method), *args, **kwargs))


def _check_name(text: str, field: str) -> str:
    """A text that names something, as it is: ids that workers draw look like secrets.

    Raises:
        SchemaValidationError: It is empty, or too long.
        ServiceFailure: It is what no text of a database may be.
    """
    return check_text(check_name(text, field), field)


def _check_worker(worker: ProcessIdentity) -> ProcessIdentity:
    """Who claims.

    Raises:
        ServiceFailure: It is nothing that a process could be.
    """
    for name in ("host", "started", "image"):
        text = check_text(getattr(worker, name), f"worker.{name}")
        if len(text) > _WORKER_CHARACTERS:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"worker.{name} has {len(text)} characters; at most {_WORKER_CHARACTERS}",
                field=f"worker.{name}",
            )
    if not 0 <= worker.pid < 2**63:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"worker.pid must be from 0 on, got {worker.pid}",
            field="worker.pid",
        )
    return worker


def _cut(items: Iterable[T]) -> list[T]:
    """As many of these as a page has room for, and one at least where there is one."""
    page: list[T] = []
    size_bytes = 0
    for item in items:
        size_bytes += len(msgspec.msgpack.encode(item))
        if page and size_bytes > PAGE_BYTES:
            break
        page.append(item)
    return page


_BOTH = (JSON, MSGPACK)
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 512}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}

_START = Parameter(name="start", schema=_NUMBER, summary="Number of the first of them.")
_LIMIT = Parameter(name="limit", schema=_NUMBER, summary="How many at most.")
_CUT = "There may be fewer than the limit although more follow: `next` says so."

COORDINATION_ROUTES: tuple[ServiceRoute, ...] = (
    ServiceRoute(
        method="GET",
        path="/v1/sweeps",
        handler=list_sweeps,
        summary="The sweeps that there are, newest first.",
        scope="read",
        reply=SweepList,
        parameters=(Parameter(name="project", schema=_TEXT, summary="Only of this project."),),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps",
        handler=open_sweep,
        summary="The sweep of a name, which is made where there is none.",
        scope="ingest",
        request=OpenSweepRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/sweeps/{sweep_id}",
        handler=load_sweep,
        summary="One sweep, with how many of its trials are in which state.",
        scope=ANY_SCOPE,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/state",
        handler=update_sweep,
        summary="Pause, go on with or cancel a sweep.",
        scope="write",
        request=SweepStateRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/sweeps/{sweep_id}/trials",
        handler=list_trials,
        summary="Trials of a sweep, by their number.",
        scope=ANY_SCOPE,
        reply=TrialList,
        parameters=(_START, _LIMIT),
        media=_BOTH,
        notes=_CUT,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/trials",
        handler=add_trials,
        summary="Add trials, all of them or none; of several who add under one key, the first.",
        scope="ingest",
        request=AddTrialsRequest,
        reply=TrialList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/claim",
        handler=claim_trial,
        summary="A trial that nobody else holds, or null where there is none to have now.",
        scope="ingest",
        request=ClaimRequest,
        reply=TrialReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/settle",
        handler=settle_trial,
        summary="Say what became of a trial, or that it is held still.",
        scope="ingest",
        request=SettleRequest,
        reply=TrialReply,
        media=_BOTH,
        notes="Answers with the trial as it is then: see whether it has your token.",
    ),
    ServiceRoute(
        method="GET",
        path="/v1/entries",
        handler=read_entries,
        summary="Entries of a log, in their order.",
        scope=ANY_SCOPE,
        reply=EntryList,
        parameters=(
            Parameter(name="log", schema=_TEXT, summary="The log.", required=True),
            _START,
            _LIMIT,
        ),
        media=_BOTH,
        notes=_CUT,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/entries",
        handler=append_entries,
        summary="Append entries to a log, all of them or none, one after the other.",
        scope="ingest",
        request=AppendRequest,
        reply=AppendedEntries,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/compare_and_set",
        handler=compare_and_set,
        summary="Set a field of a run if it has the value that is expected.",
        scope="ingest",
        request=CompareRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/groups/compare_and_set",
        handler=compare_and_set_group,
        summary="Set a field of a group if it has the value that is expected.",
        scope="write",
        request=CompareBelongingRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/project/compare_and_set",
        handler=compare_and_set_project,
        summary="Set a field of a project if it has the value that is expected.",
        scope="write",
        request=CompareBelongingRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
)
