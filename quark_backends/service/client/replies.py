"""Reads replies of the service: pages of runs, names and grids, and rows and curves in columns."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from quark_backends.service.client.http_client import (
    Call,
    Refused,
    Reply,
    ServiceClient,
    Unreachable,
)
from quark_backends.service.protocol import (
    CURVE_COLUMNS,
    MSGPACK,
    ROWS,
    SERIES_COLUMNS,
    CurveReply,
    ErrorCode,
    GridReply,
    NamesReply,
    PageReply,
    PageRequest,
    SeriesReply,
)
from quark_backends.service.row_frames import MAX_FRAME_BYTES, Failure, Rows, decode_frame
from quark_core.backends.curves import Curve
from quark_core.backends.grids import Grid, GridQuery
from quark_core.backends.run_pages import ConfigName, PageSearch, RunNames, RunPage, RunRow, TagName
from quark_core.backends.series import Series
from quark_core.errors import SchemaValidationError
from quark_core.records.columns import Columns

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


_LENGTH = struct.Struct("<I")
_SPOOL_BYTES = 32 * 2**20


def read_columns(client: ServiceClient, call: Call, kind: str) -> Columns:
    """All rows of a reply.

    Raises:
        ServiceError: They cannot be had.
        SchemaValidationError: They are damaged, or of a newer version.
    """

    def read(reply: Reply) -> list[Columns]:
        return [columns for _, columns in _receive(reply)]

    return Columns.concatenate(kind, client.use(call, read))


def iterate_parts(client: ServiceClient, call: Call, rows: int) -> Iterator[Columns]:
    """The rows of a reply in parts of at most so many rows, in order.

    The reply is taken as fast as it comes, into memory and, where it is
    large, into a file without a name: whoever works on the parts may take
    hours, and a server does not wait for that.

    Raises:
        ServiceError, SchemaValidationError: As `read_columns`, before the first part.
    """
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:

        def fetch(reply: Reply) -> None:
            spool.seek(0)
            spool.truncate()
            for frame, _ in _receive(reply):
                spool.write(_LENGTH.pack(len(frame)))
                spool.write(frame)

        client.use(call, fetch)
        spool.seek(0)
        while head := spool.read(_LENGTH.size):
            found = decode_frame(spool.read(_LENGTH.unpack(head)[0]))
            assert isinstance(found, Rows)
            columns = found.to_columns()
            for start in range(0, columns.count, rows):
                yield columns.take(slice(start, start + rows)) if columns.count > rows else columns


def _receive(reply: Reply) -> Iterator[tuple[bytes, Columns]]:
    """The frames that are rows, with what they are, up to the one that ends them.

    Raises:
        Unreachable: The reply is cut off, or is none of rows.
        Refused: The service says that the reading broke off.
    """
    count = 0
    for data in _split(reply):
        frame = decode_frame(data)
        if isinstance(frame, Rows):
            columns = frame.to_columns()
            count += columns.count
            yield data, columns
        elif isinstance(frame, Failure):
            raise Refused(503, frame.message, code=frame.code)
        elif frame.rows != count:
            raise Unreachable(f"{count} rows came, where it has sent {frame.rows}", answered=True)
        else:
            return
    raise Unreachable("its reply was cut off")


def _split(reply: Reply) -> Iterator[bytes]:
    """The frames of a reply, without their lengths."""
    if reply.media != ROWS:
        raise Unreachable(f"its reply is {reply.media or 'of no type'}, not rows", answered=True)
    buffer = bytearray()
    wanted: int | None = None
    for piece in reply.iterate():
        buffer += piece
        while True:
            if wanted is None and len(buffer) >= _LENGTH.size:
                (wanted,) = _LENGTH.unpack_from(buffer)
                del buffer[: _LENGTH.size]
                if wanted > MAX_FRAME_BYTES:
                    raise Unreachable(
                        f"its reply has a frame of {wanted} bytes, which no reply has",
                        answered=True,
                    )
            if wanted is None or len(buffer) < wanted:
                break
            yield bytes(memoryview(buffer)[:wanted])
            del buffer[:wanted]
            wanted = None


_FLOATS = frozenset({"low", "high", "mean", "last"})


def to_series(reply: SeriesReply) -> Series:
    """The curve that a reply in msgpack is.

    Raises:
        SchemaValidationError: A column is missing, or they are of different lengths.
    """
    columns = _to_arrays(reply.columns, SERIES_COLUMNS)
    return Series(key=reply.key, exact=reply.exact, ranks=reply.ranks or (), **columns)


def to_curve(reply: CurveReply) -> Curve:
    """One of the curves that a reply in msgpack has.

    Raises:
        SchemaValidationError: As `to_series`.
    """
    return Curve(
        key=reply.key,
        attempt=reply.attempt,
        rank=reply.rank,
        ranks=reply.ranks,
        exact=reply.exact,
        **_to_arrays(reply.columns, CURVE_COLUMNS),
    )


def to_rows(kind: str, frames: object) -> Columns:
    """The rows that frames hold which stand one after the other.

    Raises:
        SchemaValidationError: They are damaged, or of a newer version.
    """
    if not isinstance(frames, bytes):
        raise SchemaValidationError(f"the {kind} records of a reply are no frames")
    parts: list[Columns] = []
    place = 0
    while place < len(frames):
        (size,) = _LENGTH.unpack_from(frames.ljust(place + _LENGTH.size, b"\0"), place)
        place += _LENGTH.size + size
        frame = decode_frame(frames[place - size : place])
        if not isinstance(frame, Rows) or place > len(frames):
            raise SchemaValidationError(f"the {kind} records of a reply are cut off")
        parts.append(frame.to_columns())
    return Columns.concatenate(kind, parts)


def _to_arrays(found: Mapping[str, object], names: Sequence[str]) -> dict[str, Any]:
    columns = {}
    for name in names:
        data = found.get(name)
        if not isinstance(data, bytes) or len(data) % 8:
            raise SchemaValidationError(f"series: the column {name!r} is missing or damaged")
        columns[name] = np.frombuffer(data, dtype="<f8" if name in _FLOATS else "<i8")
    if len({len(column) for column in columns.values()}) != 1:
        raise SchemaValidationError("series: the columns are of different lengths")
    return columns
