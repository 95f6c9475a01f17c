"""Gives runs, records, curves and outputs back."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    MSGPACK,
    ROWS,
    SERIES_COLUMNS,
    ErrorCode,
    GridReply,
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
from quark_backends.service.rows import End, encode_columns, encode_frame
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure, choose_media
from quark_backends.service.server.http.row_stream import RowStream, iterate_newest
from quark_core.backends.contract import StoredRun
from quark_core.backends.grids import GridQuery
from quark_core.backends.run_pages import MOST_NAMES, MOST_PAGE_RUNS, PageSearch
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, parse_time
from quark_core.records.expression import RunSearch
from quark_core.records.fields import column_types
from quark_core.records.query import Query
from quark_core.runs.searching import build_page_search, build_search

__all__ = [
    "encode_array",
    "list_names",
    "list_runs",
    "load_run",
    "read_batches",
    "read_grid",
    "read_outputs",
    "read_records",
    "read_series",
    "search_page",
    "search_runs",
    "summarize_run",
]

_NAMES = 100
_REPLAYED_BATCHES = 1000
_REPLAYED_BYTES = 32 * 2**20


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
    runs: list[StoredRun] = await call.ask(
        "list_runs",
        project=project,
        limit=page + 1,
        store_name=store_name,
        after=None if start is None else (start.created_us, start.run_id),
    )
    shown = runs[:page]
    following = _Cursor.of(shown[-1]).encode() if len(runs) > page else None
    return call.reply(RunList([run.to_dict() for run in shown], following))


async def load_run(call: Call) -> ASGIApp:
    """One run."""
    stored = await call.ask("load_run", call.run_id)
    return call.reply(stored.to_dict())


async def summarize_run(call: Call) -> ASGIApp:
    """One run with its metrics summed up."""
    summary = await call.ask("summarize", call.run_id)
    return call.reply(summary.to_dict())


async def search_runs(call: Call) -> ASGIApp:
    """The runs that an expression is true of."""
    request = await call.decode(SearchRequest)
    search = await call.service.threads.read(_build_search, request)
    found = await call.ask("search", search, request.store)
    return call.reply(SummaryList([summary.to_dict() for summary in found]))


async def search_page(call: Call) -> ASGIApp:
    """One page of a search with chosen columns."""
    request = await call.decode(PageRequest)
    limit = call.service.config.limits.page_runs
    search = await call.service.threads.read(_build_page_search, request, limit)
    found = await call.ask("search_page", search, request.store)
    rows = [(row.run_id, list(row.values)) for row in found.rows]
    return call.reply(PageReply(rows=rows, next=found.next, count=found.count))


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
        stream = RowStream(call, run_id, kind, query)
        await stream.begin()
        return stream
    limit = call.service.config.limits.json_rows
    query = _limit(query, limit)

    def read(store: Any) -> list[dict[str, Any]]:
        return [
            record.to_dict()
            for part in iterate_newest(store, run_id, kind, query)
            for record in part.to_records()
        ]

    async with call.store() as opened:
        records = await call.service.threads.read(read, opened.store)
    return call.reply(RecordList(kind=kind, count=len(records), records=records))


async def read_series(call: Call) -> ASGIApp:
    """One metric as a curve."""
    run_id, key = call.run_id, call.query_text("key")
    if not key:
        raise ServiceFailure(ErrorCode.INVALID_ARGUMENT, "key is missing", field="key")
    series = await call.ask(
        "read_series",
        run_id,
        key,
        max_points=call.query_number("max_points"),
        all_attempts=call.query_flag("all_attempts"),
        rank=call.query_number("rank"),
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
    found = await call.ask("read_batches", run_id, writer_id, call.query_number("start", 0), limit)
    batches: list[WireBatch] = []
    size_bytes = 0
    for batch in found:
        size_bytes += len(batch.body)
        if batches and size_bytes > _REPLAYED_BYTES:
            break
        batches.append(WireBatch.of(batch))
    return call.reply(WireBatches(batches))


async def read_outputs(call: Call) -> ASGIApp:
    """Outputs of analyzers, as rows or as JSON."""
    run_id, kind = call.run_id, _check_kind(call)
    found = await call.ask("read_outputs", run_id, kind, call.query_text("analyzer"))
    if choose_media(call.request.headers.get("accept"), rows=True) == ROWS:
        frames = b"".join([*encode_columns(found), encode_frame(End(found.count))])
        return Response(frames, media_type=ROWS)
    newest = found.keep_newest(call.service.config.limits.json_rows)
    records = [record.to_dict() for record in newest.to_records()]
    return call.reply(RecordList(kind=kind, count=len(records), records=records))


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
            f"kind must be one of {', '.join(sorted(RECORD_TYPES))}, got {kind!r:.60}",
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
