"""Routes that read runs, records, curves and outputs, and what came into a run since a cursor."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from quark_backends.service.protocol import (
    CURVE_COLUMNS,
    JSON,
    MSGPACK,
    ROWS,
    SERIES_COLUMNS,
    ChangesReply,
    ChangesRequest,
    CurveReply,
    CurvesReply,
    CurvesRequest,
    ErrorCode,
    GridReply,
    HeadsReply,
    NamesReply,
    PageReply,
    PageRequest,
    ReadRequest,
    RecordList,
    RunList,
    SearchRequest,
    SeriesReply,
    SummaryList,
    WireBatch,
    WireBatches,
)
from quark_backends.service.row_frames import End, Failure, encode_columns, encode_frame
from quark_backends.service.server.requests import Call
from quark_backends.service.server.responses import (
    REPLY_BYTES,
    ServiceFailure,
    choose_media,
    encode_body,
    encode_within,
    keep_newest,
    to_failure,
)
from quark_backends.store.batch_bodies import weigh_rows
from quark_core.backends.curves import Curve, CurveQuery, check_keys
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
    from quark_backends.service.server.stores import WorkspaceStore

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


def iterate_newest(
    store: WorkspaceStore, run_id: str, kind: str, query: Query
) -> Iterator[Columns]:
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

    def __init__(self, call: Call, read: Callable[[WorkspaceStore], Iterator[Columns]]) -> None:
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

_NAMES = 100
_MOST_CELLS = 800_000
_LISTED_BYTES = 4 * 2**20
_REPLAYED_BATCHES = 1000
_REPLAYED_BYTES = 16 * 2**20


async def list_runs(call: Call) -> ASGIApp:
    """One page of the workspace's runs, newest first."""
    limits = call.service.config.limits
    asked = call.query_number("limit", limits.page_runs)
    assert asked is not None
    page = min(asked, limits.page_runs)
    project, store_name = call.query_text("project"), call.query_text("store")
    after = call.query_text("after")
    if not page:
        return call.reply(RunList([]))
    start = _Cursor.decode(after) if after else None
    which: dict[str, Any] = {
        "project": project,
        "store_name": store_name,
        "after": None if start is None else (start.created_us, start.run_id),
    }

    async with call.store() as opened:
        store = opened.store

        def make() -> RunList:
            sizes = store.measure_runs(limit=page + 1, **which)
            # Of runs with large configurations a page has as many as may be open at once.
            fit = sum(total <= _LISTED_BYTES for total in accumulate(sizes[:page]))
            runs = store.list_runs(limit=max(1, fit), **which)
            shown = list(encode_within((run.to_dict() for run in runs), call.media))
            is_last = not runs or len(sizes) <= len(shown)
            return RunList(shown, None if is_last else _Cursor.of(runs[len(shown) - 1]).encode())

        return await call.answer(make)


async def load_run(call: Call) -> ASGIApp:
    """One run."""
    stored = await call.ask("load_run", call.run_id)
    return await call.answer(stored.to_dict)


async def summarize_run(call: Call) -> ASGIApp:
    """One run with its metrics summed up."""
    summary = await call.ask("summarize", call.run_id)
    return await call.answer(summary.to_dict)


async def search_runs(call: Call) -> ASGIApp:
    """The runs that an expression is true of."""
    request = await call.decode(SearchRequest)
    search = await call.service.threads.read(_build_search, request)
    start = request.start or 0

    async with call.store() as opened:
        store = opened.store

        def make() -> SummaryList:
            taken = count()
            with closing(store.iterate_search(search, request.store, start=start)) as found:
                each = (summary.to_dict() for summary, _ in zip(found, taken, strict=False))
                shown = list(encode_within(each, call.media))
            if next(taken) == len(shown):
                return SummaryList(shown)
            if request.start is None:
                raise ServiceFailure(
                    ErrorCode.INVALID_ARGUMENT,
                    "the runs that fit are more than one reply takes: give a limit, or start: 0, "
                    "and `next` of each reply as the start of the one that follows",
                    field="limit",
                )
            return SummaryList(shown, start + len(shown))

        return await call.answer(make)


async def search_page(call: Call) -> ASGIApp:
    """One page of a search with chosen columns."""
    request = await call.decode(PageRequest)
    limit = call.service.config.limits.page_runs
    search = await call.service.threads.read(_build_page_search, request, limit)
    found = await call.ask("search_page", search, request.store)
    return await call.answer(
        lambda: PageReply(
            rows=[(row.run_id, list(row.values)) for row in found.rows],
            next=found.next,
            count=found.count,
        )
    )


async def list_names(call: Call) -> ASGIApp:
    """The names that runs have, for completion."""
    limit = min(call.query_number("limit", _NAMES) or 0, MOST_NAMES)
    found = await call.ask(
        "list_names",
        call.query_text("project"),
        call.query_text("text") or "",
        limit,
        call.query_text("store"),
    )
    reply = NamesReply(
        metrics=found.metrics,
        config=tuple((key.key, key.written, key.types, key.values) for key in found.config),
        tags=tuple((tag.tag, tag.runs) for tag in found.tags),
        complete=found.complete,
    )
    return call.reply(reply)


async def read_grid(call: Call) -> ASGIApp:
    """A figure of layers, parameters or telemetry over steps."""
    run_id = call.run_id
    query = GridQuery.build(
        call.query_text("kind") or "",
        call.query_text("field") or "",
        summary_type=call.query_text("summary_type"),
        by=call.query_text("by"),
        under=call.query_text("under"),
        low=call.query_number("low"),
        high=call.query_number("high"),
        rank=call.query_number("rank"),
        bins=call.query_number("bins", 1_000) or 0,
        rows=call.query_number("rows", 1_000) or 0,
        all_attempts=call.query_flag("all_attempts"),
    )
    # Each is the most that is wanted: of many rows there are fewer places.
    query = replace(query, bins=max(1, min(query.bins, _MOST_CELLS // query.rows)))
    grid = await call.ask("read_grid", run_id, query)
    packed = call.media == MSGPACK
    reply = GridReply(
        names=grid.names,
        starts=encode_array(grid.starts, packed=packed),
        ends=encode_array(grid.ends, packed=packed),
        values=encode_array(grid.values.ravel(), packed=packed),
        marks=grid.marks.tobytes() if packed else grid.marks.ravel().tolist(),
        exact=grid.exact,
        depth=grid.depth,
        left_out=grid.left_out,
        points=grid.points,
    )
    return call.reply(reply)


async def read_records(call: Call) -> ASGIApp:
    """Records of one kind, as rows or as JSON."""
    run_id, kind = call.run_id, _check_kind(call)
    query = _to_query(kind, await call.decode(ReadRequest))
    if choose_media(call.request.headers.get("accept"), rows=True) == ROWS:
        stream = RowStream(call, lambda store: iterate_newest(store, run_id, kind, query))
        await stream.begin()
        return stream
    limit = call.service.config.limits.json_rows
    query = _limit(query, limit)

    async with call.store() as opened:
        store, media = opened.store, call.media

        def make() -> RecordList:
            records = keep_newest(
                (
                    record.to_dict()
                    for part in iterate_newest(store, run_id, kind, query)
                    for record in part.to_records()
                ),
                media,
            )
            return RecordList(kind=kind, count=len(records), records=records)

        return await call.answer(make)


async def read_series(call: Call) -> ASGIApp:
    """One metric as a curve."""
    run_id, key = call.run_id, call.query_text("key")
    if not key:
        raise ServiceFailure(ErrorCode.INVALID_ARGUMENT, "key is missing", field="key")
    asked = check_max_points(call.query_number("max_points"))
    read = partial(
        call.ask,
        "read_series",
        run_id,
        key,
        all_attempts=call.query_flag("all_attempts"),
        rank=call.query_number("rank"),
    )
    series = await read(max_points=MOST_ENTRIES if asked is None else min(asked, MOST_ENTRIES))
    if asked is None and not series.exact and series.points <= MOST_ENTRIES:
        # Of several ranks a bounded reading gives means, however few points there are.
        series = await read(max_points=None)
    if asked is None and series.points > MOST_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curve has more than {MOST_ENTRIES} points: give max_points, or read its records "
            "as rows",
            field="max_points",
        )
    packed = call.media == MSGPACK
    columns = {name: encode_array(getattr(series, name), packed=packed) for name in SERIES_COLUMNS}
    reply = SeriesReply(
        key=series.key, exact=bool(series.exact), columns=columns, ranks=series.ranks
    )
    return call.reply(reply)


async def read_batches(call: Call) -> ASGIApp:
    """A writer's batches as they came."""
    run_id, writer_id = call.run_id, call.path_text("writer_id")
    limit = min(call.query_number("limit", 100) or 0, _REPLAYED_BATCHES)
    bounds = (call.query_number("start", 0), limit, _REPLAYED_BYTES)
    found = await call.ask("read_batches", run_id, writer_id, *bounds)
    return await call.answer(lambda: WireBatches(list(map(WireBatch.of, found))))


async def read_outputs(call: Call) -> ASGIApp:
    """Outputs of analyzers, as rows or as JSON."""
    run_id, kind = call.run_id, _check_kind(call)
    analyzer = call.query_text("analyzer")
    if choose_media(call.request.headers.get("accept"), rows=True) == ROWS:
        stream = RowStream(call, lambda store: store.iterate_outputs(run_id, kind, analyzer))
        await stream.begin()
        return stream
    limit = call.service.config.limits.json_rows

    async with call.store() as opened:
        parts = opened.store.iterate_outputs(run_id, kind, analyzer, limit=limit)

        def make() -> RecordList:
            each = (record.to_dict() for part in parts for record in part.to_records())
            records = keep_newest(each, call.media)[-limit:]
            return RecordList(kind=kind, count=len(records), records=records)

        return await call.answer(make)


class _Cursor(msgspec.Struct, array_like=True, frozen=True):
    """Where a page ended: at its last run."""

    created_us: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    run_id: Annotated[str, msgspec.Meta(max_length=128)]

    @classmethod
    def of(cls, stored: StoredRun) -> _Cursor:
        return cls(parse_time(stored.run.created_at), stored.run.id or "")

    @classmethod
    def decode(cls, text: str) -> _Cursor:
        try:
            padded = text.encode("ascii") + b"=" * (-len(text) % 4)
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(padded), type=cls)
        except (msgspec.MsgspecError, UnicodeError, binascii.Error, ValueError):
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                "after must be what `next` of the page before was",
                field="after",
            ) from None

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def _build_page_search(request: PageRequest, limit: int) -> PageSearch:
    asked = limit if request.limit is None else min(request.limit, limit)
    try:
        return build_page_search(
            project=request.project,
            where=request.where,
            order_by=request.order_by or None,
            columns=request.columns,
            limit=min(asked, MOST_PAGE_RUNS),
            archived=request.archived,
            after=request.after,
            count=request.count,
            where_argument=request.where_argument,
            order_argument=request.order_argument,
            columns_argument=request.columns_argument,
        )
    except RecursionError:
        raise SchemaValidationError(f"{request.where_argument} is nested too deeply") from None


def _build_search(request: SearchRequest) -> RunSearch:
    try:
        return build_search(
            project=request.project,
            where=request.where,
            order_by=request.order_by or None,
            limit=request.limit,
            archived=request.archived,
            where_argument=request.where_argument,
            order_argument=request.order_argument,
        )
    except RecursionError:
        raise SchemaValidationError(f"{request.where_argument} is nested too deeply") from None


def _check_kind(call: Call) -> str:
    kind = call.path_text("kind")
    if kind not in RECORD_TYPES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"kind must be one of {', '.join(sorted(RECORD_TYPES))}, got {kind!r:.60}; the "
            "records of a plugin are read where the server has the plugin",
            field="kind",
        )
    return kind


def _to_query(kind: str, request: ReadRequest) -> Query:
    texts = {name for name, encoding in column_types(kind).items() if encoding == "t"}
    for field in ("equals", "any_of"):
        for name in getattr(request, field):
            if name not in texts and name != "writer_id":
                raise ServiceFailure(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{field}: {kind} records have no column of texts {name!r:.100}; "
                    f"there are {', '.join(sorted(texts))}",
                    field=field,
                )
    given = {name: getattr(request, name) for name in request.__struct_fields__}
    for bound in ("step", "epoch"):
        asked = any(given[bound + end] is not None for end in ("", "_min", "_max"))
        if asked and bound not in column_types(kind):
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{kind} records have no {bound}", field=bound
            )
    return Query(**given)


def _limit(query: Query, limit: int) -> Query:
    return replace(query, limit=limit if query.limit is None else min(query.limit, limit))


def encode_array(values: Any, *, packed: bool) -> Any:
    """A column of a curve as it is sent: bytes, or a list with null for what is not finite."""
    is_float = values.dtype.kind == "f"
    if packed:
        return values.astype("<f8" if is_float else "<i8", copy=False).tobytes()
    if not is_float:
        return values.tolist()
    return [value if np.isfinite(value) else None for value in values.tolist()]


async def read_curves(call: Call) -> ASGIApp:
    """Several metrics within a window."""
    request = await call.decode(CurvesRequest)
    query = CurveQuery.build(**msgspec.structs.asdict(request))
    # What is asked for is the most that is wanted, so that no reading is larger than a reply.
    most = max(1, MOST_ENTRIES // max(1, len(query.keys)))
    bounded = replace(query, entries=most if query.entries is None else min(query.entries, most))
    found = await call.ask("read_series_many", call.run_id, bounded)
    entries = sum(map(len, found.curves))
    if query.entries is not None and entries > MOST_ENTRIES:
        # Each attempt and rank has a curve: of many of them each has fewer entries.
        fewer = max(1, min(query.entries, most) * MOST_ENTRIES // entries)
        found = await call.ask("read_series_many", call.run_id, replace(query, entries=fewer))
    is_cut = query.entries is None and not all(curve.exact for curve in found.curves)
    if is_cut or sum(map(len, found.curves)) > MOST_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curves have more than {MOST_ENTRIES} entries: ask for fewer keys, a narrower "
            "window or fewer entries",
            field="entries",
        )
    packed = call.media == MSGPACK
    return await call.answer(
        lambda: CurvesReply(curves=_encode_curves(found.curves, packed), cursor=dict(found.cursor))
    )


async def read_heads(call: Call) -> ASGIApp:
    """How far a run has come."""
    heads = await call.ask("read_heads", call.run_id)
    return call.reply(HeadsReply(cursor=dict(heads.cursor), outputs=heads.outputs))


async def read_changes(call: Call) -> ASGIApp:
    """What came since a cursor."""
    request = await call.decode(ChangesRequest)
    for kind in request.kinds:
        if kind not in RECORD_TYPES:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"kinds must be of {', '.join(sorted(RECORD_TYPES))}, got {kind!r:.60}",
                field="kinds",
            )
    packed = call.media == MSGPACK
    rows = request.max_rows
    asked: dict[str, Any] = {
        "kinds": tuple(dict.fromkeys(request.kinds)),
        "keys": None if request.keys is None else check_keys(request.keys),
        "all_attempts": request.all_attempts,
    }
    most = rows if packed else min(rows, call.service.config.limits.json_rows)

    def make(store: WorkspaceStore) -> ChangesReply:
        left = most
        while True:
            changes = store.read_changes(call.run_id, request.cursor, max_rows=left, **asked)
            records = _encode_records(changes.records, packed, bounded=left > 1)
            if records is not None:
                break
            # Few long rows make a reply: what does not fit is read again, and less of it.
            left = max(1, left // 8)
        return ChangesReply(
            cursor=dict(changes.cursor),
            records=records,
            more=changes.more,
            stale=changes.stale,
            outputs=changes.outputs,
        )

    async with call.store() as opened:
        return await call.answer(lambda: make(opened.store))


def _encode_curves(curves: tuple[Curve, ...], packed: bool) -> list[CurveReply]:
    return [
        CurveReply(
            key=curve.key,
            attempt=curve.attempt,
            rank=curve.rank,
            ranks=curve.ranks,
            exact=bool(curve.exact),
            columns={
                name: encode_array(getattr(curve, name), packed=packed) for name in CURVE_COLUMNS
            },
        )
        for curve in curves
    ]


def _encode_records(
    records: Mapping[str, Columns], packed: bool, *, bounded: bool = True
) -> dict[str, Any] | None:
    """Rows as the reply has them; None where they are more than one reply takes."""
    if packed:
        return {kind: b"".join(encode_columns(found)) for kind, found in records.items()}
    made: dict[str, Any] = {}
    size_bytes = 0
    for kind, found in records.items():
        rows = made[kind] = []
        for record in found.to_records():
            encoded = encode_body(record.to_dict(), JSON)
            size_bytes += len(encoded)
            if bounded and size_bytes > REPLY_BYTES:
                return None
            rows.append(msgspec.Raw(encoded))
    return made
