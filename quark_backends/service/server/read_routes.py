"""Routes that read runs, records, curves and outputs, and what came into a run since a cursor."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AsyncExitStack, closing
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quark_backends.service.calls import SearchedPage, SearchedRuns, encode_value
from quark_backends.service.protocol import JSON, MSGPACK, NEXT_PAGE, ROWS, ErrorCode
from quark_backends.service.row_frames import End, Failure, encode_columns, encode_frame
from quark_backends.service.server.responses import (
    REPLY_BYTES,
    ServiceFailure,
    choose_media,
    encode_within,
    keep_newest,
    to_failure,
)
from quark_backends.service.server.service import Call
from quark_backends.store.batch_bodies import weigh_rows
from quark_core.backends.curves import CurveQuery, check_keys
from quark_core.backends.grids import GridQuery
from quark_core.backends.run_pages import MOST_NAMES, MOST_PAGE_RUNS, PageSearch
from quark_core.backends.run_summary import StoredRun
from quark_core.backends.series import check_max_points
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, parse_time
from quark_core.records.columns import Columns
from quark_core.records.query import Query, RunSearch
from quark_core.records.schema import column_types
from quark_core.runs.run_search import build_page_search, build_search

if TYPE_CHECKING:
    from quark_backends.store.run_store import RunStore

T = TypeVar("T")

Arguments = dict[str, Any]
"""Of a call, by name, each as it may be handed on to a store."""

_log = logging.getLogger("quark.service")

# Number of rows, and the frames that they are.
_Part = tuple[int, list[bytes]]

# Rows of metrics are narrow; those of other kinds may hold texts and JSON values.
_PART_ROWS = {"metric": 262_144}
_OTHER_PART_ROWS = 16_384
# The newest rows are kept in memory up to here, and their JSON values; for more of them the rows
# are read twice.
_KEPT_ROWS = 131_072
_KEPT_BYTES = 32 * 2**20


def iterate_newest(store: RunStore, run_id: str, kind: str, query: Query) -> Iterator[Columns]:
    """What `read` returns, in parts, in memory that does not grow with the run.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
    """
    every = replace(query, limit=None)
    rows = _PART_ROWS.get(kind, _OTHER_PART_ROWS)
    parts = store.iterate(run_id, kind, every, rows=rows)
    limit = query.limit
    if limit is None:
        yield from parts
    elif limit <= _KEPT_ROWS and (newest := _keep_newest(parts, limit)) is not None:
        yield from newest
    else:
        parts = store.iterate(run_id, kind, every, rows=rows)
        before = sum(part.count for part in parts) - limit
        left = limit
        for part in store.iterate(run_id, kind, every, rows=rows):
            first = min(max(before, 0), part.count)
            before -= part.count
            # What came in between the two readings is left out.
            taken = part.take(slice(first, first + left))
            left -= taken.count
            if taken.count:
                yield taken
            if not left:
                return


class RowStream:
    """A reply of frames; its errors come before it begins, or as its last frame.

    While a part is sent the next one is read, so that at most two are in memory.

    Args:
        call: The request.
        read: Gives what is read of a store, in parts.
    """

    def __init__(self, call: Call, read: Callable[[RunStore], Iterator[Columns]]) -> None:
        self._call = call
        self._read = read
        self._stack = AsyncExitStack()
        self._parts: Iterator[Columns] = iter(())
        self._first: _Part | None = None
        # A reading that its request no longer waits for must end before what it reads from.
        self._lock = threading.Lock()

    async def begin(self) -> None:
        """Read the first part, so that what goes wrong at once is a plain error.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        owner = self._call.principal.workspace
        await self._stack.enter_async_context(self._call.service.streams.hold(owner, 1))
        opened = await self._stack.enter_async_context(self._call.store())
        self._parts = self._read(opened.store)
        try:
            self._first = await self._call.service.threads.read(self._make_part)
        except BaseException:
            await self._end()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        limits = self._call.service.config.limits
        try:
            async with asyncio.timeout(limits.reader_total_s):
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [(b"content-type", ROWS.encode())],
                    }
                )
                await self._send_parts(send, limits.reader_stall_s)
        except TimeoutError:
            # Nobody takes it; without an end the client notices that it was cut off.
            _log.warning("request %s: the reader is too slow", self._call.request_id)
        finally:
            await self._end()

    async def _send_parts(self, send: Send, stall_s: float) -> None:
        read = self._call.service.threads.read
        rows = 0
        part = self._first
        self._first = None
        try:
            while part is not None:
                count, frames = part
                rows += count
                following = asyncio.ensure_future(read(self._make_part))
                try:
                    for frame in frames:
                        async with asyncio.timeout(stall_s):
                            await send(_to_body(frame, more=True))
                except BaseException:
                    following.add_done_callback(_forget)
                    raise
                part = await following
            last = encode_frame(End(rows))
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - the reply has begun: this is how it is told
            failure = to_failure(error, self._call.request_id)
            last = encode_frame(Failure(str(failure.code), failure.message))
        async with asyncio.timeout(stall_s):
            await send(_to_body(last, more=False))

    async def _end(self) -> None:
        await self._call.service.threads.read(self._close_parts)
        await self._stack.aclose()

    def _make_part(self) -> _Part | None:
        with self._lock:
            part = next(self._parts, None)
            return None if part is None else (part.count, list(encode_columns(part)))

    def _close_parts(self) -> None:
        with self._lock:
            close = getattr(self._parts, "close", None)
            if close is not None:
                close()
            self._parts = iter(())


def _forget(following: asyncio.Future[_Part | None]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not following.cancelled():
        following.exception()


def _to_body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _keep_newest(parts: Iterator[Columns], limit: int) -> list[Columns] | None:
    """The last rows of parts; None where they take too much memory to be kept."""
    kept: deque[tuple[Columns, int]] = deque()
    rows = weight = 0
    with closing(parts):  # type: ignore[type-var]
        for part in parts:
            kept.append((part.keep_newest(limit), weigh_rows(part)))
            rows += kept[-1][0].count
            weight += kept[-1][1]
            while rows - kept[0][0].count >= limit > 0:
                dropped, its_weight = kept.popleft()
                rows -= dropped.count
                weight -= its_weight
            if weight > _KEPT_BYTES:
                return None
    newest = [part for part, _ in kept]
    if newest and rows > limit:
        newest[0] = newest[0].keep_newest(newest[0].count - (rows - limit))
    return [part for part in newest if part.count]


MOST_ENTRIES = 100_000
"""Entries that the curves of one reply have together."""

_MOST_CELLS = 800_000
_LISTED_BYTES = 4 * 2**20
_REPLAYED_BATCHES = 1000
_REPLAYED_BYTES = 16 * 2**20
# How many values an argument may have.
_MOST_VALUES = {"keys": 10_000, "kinds": 64, "cursor": 100_000, "ranks": 10_000, "any_of": 1_000}
_MOST_CURVES = 1_000
_MOST_CHANGES = 100_000


async def list_runs(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    """One page of the workspace's runs, newest first."""
    limit = arguments.pop("limit")
    after = call.query_text("after")
    start = _Cursor.decode(after) if after else None
    taken = start.taken if start else 0
    most = call.service.config.limits.page_runs
    page = most if limit is None else min(most, max(0, limit - taken))
    if not page:
        return call.reply([])
    which = {**arguments, "after": (start.created_us, start.run_id) if start else None}

    async with call.store() as opened:
        store = opened.store

        def make() -> Response:
            sizes = store.measure_runs(limit=page + 1, **which)
            # Of runs with large configurations a page has as many as may be open at once.
            fit = sum(total <= _LISTED_BYTES for total in accumulate(sizes[:page]))
            runs = store.list_runs(limit=max(1, fit), **which)
            shown = list(encode_within(runs, call.media))
            count = taken + len(shown)
            is_last = not runs or len(sizes) <= len(shown) or count == limit
            last = None if is_last else _Cursor.of(runs[len(shown) - 1], count).encode()
            return call.reply(shown, last)

        return await call.service.threads.read(make)


async def search_runs(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    """Some of the runs that an expression is true of."""
    search = await call.service.threads.read(_build_search, arguments["search"])
    start = call.query_number("after", 0) or 0

    async with call.store() as opened:
        store = opened.store

        def make() -> Response:
            taken = count()
            with closing(
                store.iterate_search(search, arguments["store_name"], start=start)
            ) as found:
                each = (summary for summary, _ in zip(found, taken, strict=False))
                shown = list(encode_within(each, call.media))
            is_all = next(taken) == len(shown)
            return call.reply(shown, None if is_all else str(start + len(shown)))

        return await call.service.threads.read(make)


async def search_page(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """One page of a search with chosen columns."""
    limit = call.service.config.limits.page_runs
    search = await call.service.threads.read(_build_page_search, arguments["search"], limit)
    return await call.read(method, search, arguments["store_name"])


async def list_names(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """The names that runs have, for completion."""
    return await call.read(method, **{**arguments, "limit": min(arguments["limit"], MOST_NAMES)})


async def read_grid(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """A figure of layers, parameters or telemetry over steps."""
    query = GridQuery.build(**_list_fields(arguments["query"]))
    # Each is the most that is wanted: of many rows there are fewer places.
    query = replace(query, bins=max(1, min(query.bins, _MOST_CELLS // query.rows)))
    return await call.read(method, arguments["run_id"], query)


async def read_records(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    """Records of one kind, as rows or as JSON."""
    run_id, kind = arguments["run_id"], _check_kind(arguments["kind"])
    query = _check_query(kind, arguments["query"])
    limit = call.service.config.limits.json_rows
    return await _send_rows(
        call,
        lambda store: iterate_newest(store, run_id, kind, query),
        lambda store: iterate_newest(store, run_id, kind, _limit(query, limit)),
    )


async def read_outputs(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    """Outputs of analyzers, as rows or as JSON."""
    asked = (arguments["run_id"], _check_kind(arguments["kind"]), arguments["analyzer"])
    limit = call.service.config.limits.json_rows
    return await _send_rows(
        call,
        lambda store: store.iterate_outputs(*asked),
        lambda store: store.iterate_outputs(*asked, limit=limit),
    )


async def _send_rows(
    call: Call,
    read: Callable[[RunStore], Iterator[Columns]],
    read_newest: Callable[[RunStore], Iterator[Columns]],
) -> ASGIApp:
    """All rows as a stream of frames, or the newest as a list of records."""
    if choose_media(call.request.headers.get("accept"), rows=True) == ROWS:
        stream = RowStream(call, read)
        await stream.begin()
        return stream
    limit = call.service.config.limits.json_rows

    async with call.store() as opened:
        store = opened.store
        return await call.answer(
            lambda: keep_newest(
                (record.to_dict() for part in read_newest(store) for record in part.to_records()),
                call.media,
            )[-limit:]
        )


async def read_series(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """One metric as a curve."""
    if not arguments["key"]:
        raise ServiceFailure(ErrorCode.INVALID_ARGUMENT, "key is required", field="key")
    asked = check_max_points(arguments.pop("max_points"))
    read = partial(call.ask, method, **arguments)
    series = await read(max_points=MOST_ENTRIES if asked is None else min(asked, MOST_ENTRIES))
    if asked is None and not series.exact and series.points <= MOST_ENTRIES:
        # Of several ranks a bounded reading gives means, however few points there are.
        series = await read(max_points=None)
    if asked is None and series.points > MOST_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curve has more than {MOST_ENTRIES} points. Set max_points, or read its "
            "records as rows",
            field="max_points",
        )
    return await call.answer(lambda: series)


async def read_batches(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """A writer's batches as they came."""
    run_id, writer_id, start = (arguments[name] for name in ("run_id", "writer_id", "start"))
    after = [int(part) for part in (call.query_text("after") or "").split(".") if part.isdigit()]
    taken, start = after if len(after) == 2 else (0, start)
    limit = min(max(0, arguments["limit"] - taken), _REPLAYED_BATCHES)
    found = await call.ask(method, run_id, writer_id, start, limit, _REPLAYED_BYTES)
    count = taken + len(found)
    is_last = not found or count >= arguments["limit"]
    following = None if is_last else f"{count}.{found[-1].number + 1}"
    return await call.answer(lambda: found, following)


class _Cursor(msgspec.Struct, array_like=True, frozen=True):
    """Where a page ended: at its last run, and after how many in all."""

    created_us: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    run_id: Annotated[str, msgspec.Meta(max_length=128)]
    taken: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

    @classmethod
    def of(cls, stored: StoredRun, taken: int) -> _Cursor:
        return cls(parse_time(stored.run.created_at), stored.run.id or "", taken)

    @classmethod
    def decode(cls, text: str) -> _Cursor:
        try:
            padded = text.encode("ascii") + b"=" * (-len(text) % 4)
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(padded), type=cls)
        except (msgspec.MsgspecError, UnicodeError, binascii.Error, ValueError):
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"after must be the value of `{NEXT_PAGE}` of the previous page",
                field="after",
            ) from None

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def _build_page_search(asked: SearchedPage, most: int) -> PageSearch:
    limit = most if asked.limit is None else min(asked.limit, most)
    return _build(build_page_search, asked, limit=min(limit, MOST_PAGE_RUNS))


def _build_search(asked: SearchedRuns) -> RunSearch:
    return _build(build_search, asked)


def _build(build: Callable[..., T], asked: SearchedRuns, **changes: Any) -> T:
    given = {**msgspec.structs.asdict(asked), "order_by": asked.order_by or None, **changes}
    try:
        return build(**given)
    except RecursionError:
        raise SchemaValidationError(f"{asked.where_argument} is nested too deeply") from None


def _check_kind(kind: str, field: str = "kind") -> str:
    if kind not in RECORD_TYPES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"{field} must be one of {', '.join(map(repr, sorted(RECORD_TYPES)))}, got "
            f"{kind!r:.60}. Records of a plugin can be read only if the server has the plugin",
            field=field,
        )
    return kind


def _check_query(kind: str, query: Query) -> Query:
    texts = {name for name, encoding in column_types(kind).items() if encoding == "t"}
    for field in ("equals", "any_of"):
        for name in getattr(query, field):
            if name not in texts and name != "writer_id":
                raise ServiceFailure(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{field}: {kind} records have no text column {name!r:.100}. The text "
                    f"columns are {', '.join(sorted(texts))}",
                    field=field,
                )
    for values in query.any_of.values():
        _check_count("any_of", values)
    for bound in ("step", "epoch"):
        asked = any(getattr(query, bound + end) is not None for end in ("", "_min", "_max"))
        if asked and bound not in column_types(kind):
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{kind!r} records have no {bound}", field=bound
            )
    return Query.build(**_list_fields(query))


def _list_fields(query: Any) -> dict[str, Any]:
    return {each.name: getattr(query, each.name) for each in fields(query)}


def _check_count(name: str, values: Sized | None, most: int | None = None) -> None:
    allowed = _MOST_VALUES[name] if most is None else most
    if values is not None and len(values) > allowed:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"{name} has {len(values)} values; at most {allowed} are allowed",
            field=name,
        )


def _limit(query: Query, limit: int) -> Query:
    return replace(query, limit=limit if query.limit is None else min(query.limit, limit))


async def read_curves(call: Call, method: str, arguments: Arguments) -> ASGIApp:
    """Several metrics within a window."""
    asked = _list_fields(arguments["query"])
    asked |= _list_fields(asked.pop("window"))
    _check_count("keys", asked["keys"], _MOST_CURVES)
    _check_count("ranks", asked["ranks"])
    if asked.pop("since_start"):
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT, "since_start is allowed for readers only", field="query"
        )
    query = CurveQuery.build(**asked)
    ask = partial(call.ask, method, arguments["run_id"])
    # What is asked for is the most that is wanted, so that no reading is larger than a reply.
    most = max(1, MOST_ENTRIES // max(1, len(query.keys)))
    bounded = replace(query, entries=most if query.entries is None else min(query.entries, most))
    found = await ask(bounded)
    entries = sum(map(len, found.curves))
    if query.entries is not None and entries > MOST_ENTRIES:
        # Each attempt and rank has a curve: of many of them each has fewer entries.
        fewer = max(1, min(query.entries, most) * MOST_ENTRIES // entries)
        found = await ask(replace(query, entries=fewer))
    is_cut = query.entries is None and not all(curve.exact for curve in found.curves)
    if is_cut or sum(map(len, found.curves)) > MOST_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curves have more than {MOST_ENTRIES} entries. Request fewer keys, a narrower "
            "window or fewer entries",
            field="entries",
        )
    return await call.answer(lambda: found)


async def read_changes(call: Call, _method: str, arguments: Arguments) -> ASGIApp:
    """What came since a cursor."""
    for name in ("cursor", "kinds", "keys"):
        _check_count(name, arguments[name])
    kinds = tuple(_check_kind(kind, "kinds") for kind in dict.fromkeys(arguments["kinds"]))
    rows = min(arguments.pop("max_rows"), _MOST_CHANGES)
    packed = call.media == MSGPACK
    asked: Arguments = {**arguments, "kinds": kinds}
    if asked["keys"] is not None:
        asked["keys"] = check_keys(asked["keys"])
    most = rows if packed else min(rows, call.service.config.limits.json_rows)
    if most < 1:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT, "max_rows must be at least 1", field="max_rows"
        )

    def make(store: RunStore) -> Any:
        left = most
        while True:
            changes = store.read_changes(max_rows=left, **asked)
            records = changes.records if packed else _list_records(changes.records, left > 1)
            if records is not None:
                return {**_list_fields(changes), "records": records}
            # Few long rows make a reply: what does not fit is read again, and less of it.
            left = max(1, left // 8)

    async with call.store() as opened:
        return await call.answer(lambda: make(opened.store))


def _list_records(records: Mapping[str, Columns], bounded: bool) -> dict[str, Any] | None:
    """Records as a reply in JSON has them; None where they are more than one reply takes."""
    made: dict[str, Any] = {}
    size_bytes = 0
    for kind, found in records.items():
        rows = made[kind] = []
        for record in found.to_records():
            encoded = encode_value(record.to_dict(), JSON)
            size_bytes += len(encoded)
            if bounded and size_bytes > REPLY_BYTES:
                return None
            rows.append(msgspec.Raw(encoded))
    return made
