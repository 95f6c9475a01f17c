"""Routes of the methods of the contract: which key may call which, and the bounds of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp

from quark_backends.service.calls import (
    CALL_ROUTE,
    OF_STORE,
    encode_value,
    find_result,
    make_arguments,
    unpack,
)
from quark_backends.service.protocol import MSGPACK, NEXT_PAGE, REMOVAL_LIMIT_RUNS, ErrorCode
from quark_backends.service.server import read_routes, removal_routes
from quark_backends.service.server.config import ANY_SCOPE, Scope
from quark_backends.service.server.requests import (
    SMALL_BYTES,
    RequestBody,
    check_nesting,
    check_numbers,
    check_run_id,
    check_text,
    refuse_invalid,
)
from quark_backends.service.server.responses import ServiceFailure, encode_within
from quark_backends.service.server.service import Call, Parameter, ServiceRoute
from quark_backends.store.run_store import RunStore
from quark_core.backends.coordination import MOST_ENTRIES, check_entries, check_new_trials
from quark_core.backends.edits import (
    BelongingEdit,
    RunEdit,
    check_belonging_edit,
    check_edit,
    check_reason,
)
from quark_core.backends.methods import find_method
from quark_core.config.arguments import check_group_path
from quark_core.system.process import ProcessIdentity

# Whoever may send records may work on a sweep: open it, add trials, claim them, say what became of
# them, and append to logs. To see one sweep, its trials and its logs any key will do, since a
# worker cannot search without them; only the list of all sweeps needs the scope `read`. To pause
# and to cancel a sweep, and to edit or stop a run, needs `write`: a key that only trains may not
# rename, archive or stop what others have begun. A training asks with any key whether it shall
# stop.
#
# A sweep belongs to a project of the workspace. Which storage root a worker begins its runs from
# makes no difference: workers of several machines have several.

T = TypeVar("T")

Arguments = dict[str, Any]
Serve = Callable[[Call, str, Arguments], Awaitable[ASGIApp]]

PAGE_TRIALS = 1000
"""A page of trials has at most so many."""

PAGE_BYTES = 8 * 2**20
"""A page of trials or entries ends where it has about so many bytes."""

_PART_TRIALS = 100
_WORKER_CHARACTERS = 1000
_DEFINITION_BYTES = 2**20
# What holds a JSON value lies in the arguments, and may lie in a list of structs.
_OUTER_LEVELS = 3


async def ask(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """What a method of the workspace's store returns that reads little."""
    return await call.read(method, **arguments)


async def change(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """What a method returns that changes a run, a project or a group."""
    async with call.store() as opened:
        found = await call.service.threads.write(getattr(opened.store, method), **arguments)
    return call.reply(found)


async def _update_group(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    check_group_path(arguments["path"], "path")
    return await change(call, method, arguments)


async def coordinate(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """What a method returns that many workers call at once; such calls share transactions."""
    for name in ("trials", "entries"):
        if name in arguments:
            call.service.guard.spend_rows(call.principal, len(arguments[name]))
    async with call.store() as opened:
        found = await opened.coordinate(partial(getattr(opened.store, method), **arguments))
    return await call.answer(lambda: found) if isinstance(found, list) else call.reply(found)


async def _list_sweeps(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """The newest sweeps: those that a reply has no room for are found by their name."""
    async with call.store() as opened:
        read = partial(getattr(opened.store, method), **arguments)
        return await call.answer(lambda: list(encode_within(read(), call.media)))


async def _list_trials(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    sweep_id, first, limit = arguments["sweep_id"], arguments["start"], arguments["limit"]
    start = max(first, call.query_number("after", 0) or 0)
    left = PAGE_TRIALS if limit is None else min(PAGE_TRIALS, max(0, first + limit - start))
    async with call.store() as opened:
        page = await call.service.threads.read(
            lambda: _cut(_read_trials(opened.store, sweep_id, start, left))
        )
    following = start + len(page)
    is_last = not page or (limit is not None and following >= first + limit)
    return await call.answer(lambda: page, following=None if is_last else str(following))


def _read_trials(store: RunStore, sweep_id: str, start: int, limit: int) -> Iterator[Any]:
    """A page of trials, read in parts: of large ones it holds few."""
    for first in range(start, start + limit, _PART_TRIALS):
        wanted = min(_PART_TRIALS, start + limit - first)
        part = store.list_trials(sweep_id, start=first, limit=wanted)
        yield from part
        if len(part) < wanted:
            return


async def _read_entries(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    limit = min(arguments["limit"], MOST_ENTRIES)
    async with call.store() as opened:
        read = partial(opened.store.read_entries, arguments["log"], arguments["start"], limit=limit)
        return await call.answer(lambda: _cut(read()) if limit else [])


def _cut(items: Iterable[T]) -> list[T]:
    """As many of these as a page has room for, and one at least where there is one."""
    page: list[T] = []
    size_bytes = 0
    for item in items:
        size_bytes += len(encode_value(item, MSGPACK))
        if page and size_bytes > PAGE_BYTES:
            break
        page.append(item)
    return page


@dataclass(frozen=True, slots=True)
class Rule:
    """How a method of the contract is served.

    Attributes:
        scope: What the key must allow.
        serve: Answers, of the arguments as they were checked.
        notes: More for people.
    """

    scope: Scope
    serve: Serve = ask
    notes: str = ""


_ROWS = "Returns only the newest json_rows rows, unless frames of rows are requested."
_CUT = "A page may have fewer entries than requested although more follow. Request the next page."

RULES: Mapping[str, Rule] = {
    "load_run": Rule("read"),
    "list_runs": Rule("read", read_routes.list_runs),
    "search": Rule("read", read_routes.search_runs),
    "search_page": Rule("read", read_routes.search_page),
    "list_names": Rule("read", read_routes.list_names),
    "summarize": Rule("read"),
    "read": Rule("read", read_routes.read_records, notes=_ROWS),
    "read_series": Rule("read", read_routes.read_series),
    "read_series_many": Rule("read", read_routes.read_curves),
    "read_heads": Rule("read"),
    "read_changes": Rule("read", read_routes.read_changes),
    "read_grid": Rule("read", read_routes.read_grid),
    "read_batches": Rule("read", read_routes.read_batches),
    "read_outputs": Rule("read", read_routes.read_outputs, notes=_ROWS),
    "edit_run": Rule("write", change),
    "request_stop": Rule("write", change),
    "find_stop": Rule(ANY_SCOPE),
    "list_groups": Rule("read"),
    "load_project": Rule("read"),
    "update_project": Rule("write", change),
    "update_group": Rule("write", _update_group),
    "trash_runs": Rule("write", removal_routes.move_runs),
    "restore_runs": Rule("write", removal_routes.move_runs),
    "measure_runs": Rule("read", removal_routes.list_usages),
    "list_trash": Rule("read", removal_routes.list_usages),
    "measure_store": Rule("read", removal_routes.measure_store),
    "list_damaged": Rule("read", removal_routes.list_damaged),
    "open_sweep": Rule("ingest", coordinate),
    "update_sweep": Rule("write", coordinate),
    "add_trials": Rule("ingest", coordinate),
    "claim_trial": Rule("ingest", coordinate),
    "settle_trial": Rule("ingest", coordinate),
    "append_entries": Rule("ingest", coordinate),
    "read_entries": Rule(ANY_SCOPE, _read_entries, notes=_CUT),
    "compare_and_set": Rule("ingest", coordinate),
    "compare_and_set_group": Rule("write", coordinate),
    "list_sweeps": Rule("read", _list_sweeps),
    "load_sweep": Rule(ANY_SCOPE),
    "list_trials": Rule(ANY_SCOPE, _list_trials),
}
"""Every method that may be called, and by whom; no other one can be."""


def _check_worker(call: Call, worker: ProcessIdentity | None) -> ProcessIdentity:
    """Who claims.

    Raises:
        ServiceFailure: It is nothing that a process could be.
    """
    if worker is None:
        # No process that could be asked: its lease says how long it is believed in.
        return ProcessIdentity(f"http/{call.principal.key_id}", 0, "")
    for name in ("host", "started", "image"):
        text = check_text(getattr(worker, name), f"worker.{name}")
        if len(text) > _WORKER_CHARACTERS:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"worker.{name} has {len(text)} characters; at most {_WORKER_CHARACTERS}",
                field=f"worker.{name}",
            )
    if worker.pid < 0:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"worker.pid must not be negative, got {worker.pid}",
            field="worker.pid",
        )
    return worker


def _check_edit(_call: Call, edit: RunEdit | BelongingEdit) -> RunEdit | BelongingEdit:
    return check_edit(edit) if isinstance(edit, RunEdit) else check_belonging_edit(edit)


def _check_run_ids(_call: Call, run_ids: Sequence[str]) -> list[str]:
    if not 0 < len(run_ids) <= REMOVAL_LIMIT_RUNS:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"run_ids has {len(run_ids)} runs, but must have 1 to {REMOVAL_LIMIT_RUNS}",
            field="run_ids",
        )
    return [
        check_run_id(run_id, f"run_ids[{place}]")
        for place, run_id in enumerate(dict.fromkeys(run_ids))
    ]


def _check_token(_call: Call, token: int) -> int:
    if token < 1:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT, f"token must be at least 1, got {token}", field="token"
        )
    return token


def _check_definition(_call: Call, definition: Any) -> Any:
    if (size := len(msgspec.json.encode(definition))) > _DEFINITION_BYTES:
        raise ServiceFailure(
            ErrorCode.TOO_LARGE,
            f"the definition has {size} bytes as JSON, but this server accepts {_DEFINITION_BYTES}",
            field="definition",
        )
    return definition


# What is checked of an argument of this name, whichever method it is of.
_CHECKS: Mapping[str, Callable[[Call, Any], Any]] = {
    "run_id": lambda _call, text: check_run_id(text),
    "run_ids": _check_run_ids,
    "edit": _check_edit,
    "by": lambda call, text: call.name_caller(text),
    "path": lambda _call, path: check_group_path(path, "path") if path else path,
    "reason": lambda _call, text: check_reason(text),
    "trials": lambda _call, trials: check_new_trials(trials),
    "entries": lambda _call, entries: check_entries(entries),
    "worker": _check_worker,
    "definition": _check_definition,
    "token": _check_token,
}


def _read_arguments(call: Call, method: str, body: RequestBody) -> Arguments:
    """The arguments of a call, each as it may be handed on to a store.

    Raises:
        ServiceFailure, SchemaValidationError: One of them is none; the error names it.
    """
    is_small = len(body.data) <= SMALL_BYTES
    given = (body.decode if is_small else body.decode_values)(dict[str, Any])
    limits = call.service.config.limits
    for name, value in given.items():
        check_nesting(value, limits.nesting + _OUTER_LEVELS, name)
        check_numbers(value, name)
    kind = make_arguments(method)
    try:
        decoded = msgspec.convert(given, kind, dec_hook=unpack)
    except msgspec.ValidationError as error:
        raise refuse_invalid(error) from None
    found: Arguments = {}
    for name in kind.__struct_fields__:
        value = getattr(decoded, name)
        if isinstance(value, str) and name != "reason":
            call.check_text(value, name)
        check = _CHECKS.get(name)
        found[name] = value if check is None else check(call, value)
    return found


async def _serve(method: str, rule: Rule, call: Call) -> ASGIApp:
    async with call.body() as body:
        read = partial(_read_arguments, call, method, body)
        if len(body.data) <= SMALL_BYTES:
            arguments = read()
        else:
            arguments = await call.service.threads.write(read)
    if method in OF_STORE:
        arguments["store_name"] = call.query_text("store")
    return await rule.serve(call, method, arguments)


_TEXT: dict[str, Any] = {"type": "string", "maxLength": 512}
_AFTER = Parameter(
    name="after", schema=_TEXT, summary=f"`{NEXT_PAGE}` of the reply before this page."
)
_OF_STORE = Parameter(name="store", schema=_TEXT, summary="Only runs of this project store.")


def _make_route(method: str, rule: Rule) -> ServiceRoute:
    async def serve(call: Call) -> ASGIApp:
        return await _serve(method, rule, call)

    serve.__doc__ = find_method(method).__doc__
    return ServiceRoute(
        method="POST",
        path=f"{CALL_ROUTE}{method}",
        handler=serve,
        scope=rule.scope,
        request=make_arguments(method),
        reply=find_result(method),
        parameters=(_AFTER, _OF_STORE) if method in OF_STORE else (_AFTER,),
        notes=rule.notes,
    )


CALL_ROUTES: tuple[ServiceRoute, ...] = tuple(_make_route(*each) for each in RULES.items())
