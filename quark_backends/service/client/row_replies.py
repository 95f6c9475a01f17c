"""Reads what replies hold in columns: rows frame by frame, the whole or nothing, and curves."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quark_backends.service.client.calls import Call, Reply, ServiceClient
from quark_backends.service.client.service_errors import Refused, Unreachable
from quark_backends.service.protocol import (
    CURVE_COLUMNS,
    ROWS,
    SERIES_COLUMNS,
    CurveReply,
    SeriesReply,
)
from quark_backends.service.rows import MAX_FRAME_BYTES, Failure, Rows, decode_frame
from quark_core.backends.curves import Curve
from quark_core.backends.series import Series
from quark_core.errors import SchemaValidationError
from quark_core.records.columns import Columns

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
