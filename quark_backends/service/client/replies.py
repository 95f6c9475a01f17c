"""Reads replies of the service: rows in columns, and pages of runs."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from quark_backends.service.client.http_client import (
    Call,
    Refused,
    Reply,
    ServiceClient,
    Unreachable,
)
from quark_backends.service.protocol import ROWS
from quark_backends.service.row_frames import MAX_FRAME_BYTES, Failure, Rows, decode_frame
from quark_core.backends.run_pages import PageSearch, RunPage, RunRow
from quark_core.errors import SchemaValidationError
from quark_core.records.columns import Columns

T = TypeVar("T")


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
            raise Unreachable(f"{count} rows arrived instead of {frame.rows}", answered=True)
        else:
            return
    raise Unreachable("its reply ends too early")


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
                        f"its reply has a frame of {wanted} bytes, more than allowed", answered=True
                    )
            if wanted is None or len(buffer) < wanted:
                break
            yield bytes(memoryview(buffer)[:wanted])
            del buffer[:wanted]
            wanted = None


def restore_tuples(page: RunPage, search: PageSearch) -> RunPage:
    """A page as a store gives it: tags and groups are tuples, which no reply has.

    Raises:
        SchemaValidationError: A row has not the columns that were asked for.
    """
    if any(len(row.values) != len(search.columns) for row in page.rows):
        raise SchemaValidationError("page: a row does not have the requested columns")
    places = [
        place
        for place, field in enumerate(search.columns)
        if field.scope == "run" and field.name in ("tags", "groups")
    ]
    rows = []
    for row in page.rows:
        values = list(row.values)
        for place in places:
            values[place] = None if values[place] is None else tuple(values[place])
        rows.append(RunRow(row.run_id, tuple(values)))
    return replace(page, rows=tuple(rows))
