"""Asks the service for pages of runs, names and grids, and reads what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from quark_backends.service.client.calls import Call
from quark_backends.service.client.service_errors import Refused
from quark_backends.service.protocol import (
    MSGPACK,
    ErrorCode,
    GridReply,
    NamesReply,
    PageReply,
    PageRequest,
)
from quark_core.backends.grids import Grid, GridQuery
from quark_core.backends.run_pages import (
    ConfigName,
    PageSearch,
    RunNames,
    RunPage,
    RunRow,
    TagName,
)
from quark_core.errors import SchemaValidationError

T = TypeVar("T")


class _Fetch(Protocol):
    """Asks, and returns the struct that the reply is."""

    def __call__(self, call: Call, kind: type[T], /) -> T:
        """See the class."""


def ask_page(fetch: _Fetch, search: PageSearch, store: str | None) -> RunPage | None:
    """One page of runs; None where the service has no pages, or cannot be told what is searched."""
    source = search.search.source
    if source is None or len(search.column_texts) != len(search.columns):
        return None
    request = PageRequest(
        where=source.where,
        order_by=source.order_by,
        project=search.search.project,
        store=store,
        limit=search.limit,
        archived=search.search.archived,
        where_argument=source.where_argument,
        order_argument=source.order_argument,
        columns=search.column_texts,
        after=search.after,
        count=search.count,
    )
    body = msgspec.msgpack.encode(request)
    call = Call(method="POST", path="/v1/runs/page", body=body, accept=MSGPACK)
    reply = _ask(fetch, call, PageReply)
    if reply is None:
        return None
    if any(len(values) != len(search.columns) for _, values in reply.rows):
        raise SchemaValidationError("page: a row has not the columns that were asked for")
    is_tags = [
        field.scope == "run" and field.name in ("tags", "groups") for field in search.columns
    ]
    rows = tuple(
        RunRow(
            run_id,
            tuple(
                tuple(value) if is_tag and value is not None else value
                for value, is_tag in zip(values, is_tags, strict=True)
            ),
        )
        for run_id, values in reply.rows
    )
    return RunPage(columns=search.column_texts, rows=rows, next=reply.next, count=reply.count)


def ask_names(
    fetch: _Fetch, project: str | None, text: str, limit: int, store: str | None
) -> RunNames | None:
    """The names that runs have; None where the service has no such route."""
    parameters = {
        "project": project,
        "store": store,
        "text": text or None,
        "limit": str(limit),
    }
    reply = _ask(fetch, _get("/v1/names", parameters), NamesReply)
    if reply is None:
        return None
    return RunNames(
        metrics=reply.metrics,
        config=tuple(ConfigName(*key) for key in reply.config),
        tags=tuple(TagName(*tag) for tag in reply.tags),
        complete=reply.complete,
    )


def ask_grid(fetch: _Fetch, run_route: str, query: GridQuery) -> Grid | None:
    """A grid; None where the service has none.

    Raises:
        SchemaValidationError: The reply holds no grid.
    """
    given = {field.name: getattr(query, field.name) for field in fields(query)}
    parameters = {name: _write(value) for name, value in given.items()}
    reply = _ask(fetch, _get(f"{run_route}/grid", parameters), GridReply)
    if reply is None:
        return None
    shape = (len(reply.names), _count(reply.starts, 8))
    arrays = {}
    for name, dtype, places in (
        ("starts", "<i8", shape[1]),
        ("ends", "<i8", shape[1]),
        ("values", "<f8", shape[0] * shape[1]),
        ("marks", "u1", shape[0] * shape[1]),
    ):
        data = getattr(reply, name)
        if _count(data, np.dtype(dtype).itemsize) != places:
            raise SchemaValidationError(f"grid: {name} is missing or damaged")
        arrays[name] = np.frombuffer(data, dtype=dtype)
    return Grid(
        kind=query.kind,
        field=query.field,
        summary_type=query.summary_type,
        names=reply.names,
        starts=arrays["starts"],
        ends=arrays["ends"],
        values=arrays["values"].reshape(shape),
        marks=arrays["marks"].reshape(shape),
        exact=reply.exact,
        depth=reply.depth,
        left_out=reply.left_out,
        points=reply.points,
    )


def _ask(fetch: _Fetch, call: Call, kind: type[T]) -> T | None:
    """What the service answers; None where it does not know the route."""
    try:
        return fetch(call, kind)
    except Refused as error:
        if error.code in (ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED):
            return None
        raise


def _get(path: str, parameters: Mapping[str, str | None]) -> Call:
    return Call(method="GET", path=path, parameters=parameters, accept=MSGPACK)


def _write(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else None
    return None if value is None else str(value)


def _count(data: object, size_bytes: int) -> int:
    """How many values of this size are in some bytes; -1 where it is none."""
    if not isinstance(data, bytes) or len(data) % size_bytes:
        return -1
    return len(data) // size_bytes
