"""Reads the rows of a reply: frame by frame, each bounded, the whole of it or nothing."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator

from quark_backends.service.client.service_errors import Refused, Unreachable
from quark_backends.service.client.transport import Call, Reply, Transport
from quark_backends.service.protocol import ROWS
from quark_backends.service.rows import MAX_FRAME_BYTES, Failure, Rows, decode_frame
from quark_core.columns import Columns

__all__ = ["iterate_parts", "read_columns"]

_LENGTH = struct.Struct("<I")
_SPOOL_BYTES = 32 * 2**20


def read_columns(transport: Transport, call: Call, kind: str) -> Columns:
    """All rows of a reply.

    Raises:
        ServiceError: They cannot be had.
        SchemaValidationError: They are damaged, or of a newer version.
    """

    def read(reply: Reply) -> list[Columns]:
        return [columns for _, columns in _receive(reply)]

    return Columns.concatenate(kind, transport.use(call, read))


def iterate_parts(transport: Transport, call: Call, rows: int) -> Iterator[Columns]:
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

        transport.use(call, fetch)
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
