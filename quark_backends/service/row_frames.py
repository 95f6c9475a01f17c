"""Rows of a read on the wire: a stream of frames, one for each stretch of one writer's rows.

A frame is its length as a little-endian u32 and so many bytes: a msgpack array
`[tag, …]`. `[0, run_id, writer_id, attempt, rank, body]` are rows, with a body
as `quark_core.records.codec` has it; `[1, rows]` is the end and says how many rows
there were, so that a reply that was cut off is noticed; `[2, code, message]`
is an error that came up after the reply had begun.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records.codec import decode_body
from quark_core.records.columns import Columns, encode_rows, split_by_origin

MAX_FRAME_BYTES = 128 * 2**20
"""A client refuses a frame that claims to be longer."""

_LENGTH = struct.Struct("<I")

# What a frame has at most, unless a single row is larger.
_FRAME_BYTES = 32 * 2**20


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Rows of one writer."""

    run_id: str
    writer_id: str
    attempt: int
    rank: int
    body: bytes

    def to_columns(self) -> Columns:
        """The rows, each column decoded when it is asked for.

        Raises:
            SchemaValidationError: The body is damaged, or of a newer version.
        """
        origin = {
            "run_id": self.run_id,
            "writer_id": self.writer_id,
            "attempt": self.attempt,
            "rank": self.rank,
        }
        return Columns.from_body(decode_body(self.body), origin)


class End(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """There is no more."""

    rows: int


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The reading broke off."""

    code: str
    message: str


Frame = Rows | End | Failure

_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """A frame with its length before it."""
    encoded = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(encoded)) + encoded


def encode_columns(columns: Columns, *, frame_bytes: int = _FRAME_BYTES) -> Iterator[bytes]:
    """The frames of some rows; there is no end among them.

    Args:
        columns: The rows.
        frame_bytes: What a frame of more than one row has at most.
    """
    for part in split_by_origin(columns):
        body = encode_rows(part, compress=False)
        if len(body) > frame_bytes and part.count > 1:
            half = part.count // 2
            for rows in (slice(None, half), slice(half, None)):
                yield from encode_columns(part.take(rows), frame_bytes=frame_bytes)
            continue
        yield encode_frame(
            Rows(
                run_id=_first(part, "run_id"),
                writer_id=_first(part, "writer_id"),
                attempt=int(_first(part, "attempt")),
                rank=int(_first(part, "rank")),
                body=body,
            )
        )


def decode_frame(data: bytes) -> Frame:
    """The frame that some bytes are, without their length.

    Raises:
        SchemaValidationError: They are none.
    """
    try:
        frame: Frame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaValidationError(f"a frame of rows is damaged: {error}") from error
    return frame


def decode_frames(data: bytes) -> list[Columns]:
    """The rows that frames hold which stand one after the other, without an end.

    Raises:
        SchemaValidationError: They are damaged, or of a newer version.
    """
    parts: list[Columns] = []
    place = 0
    while place < len(data):
        (size,) = _LENGTH.unpack_from(data.ljust(place + _LENGTH.size, b"\0"), place)
        place += _LENGTH.size + size
        frame = decode_frame(data[place - size : place])
        if not isinstance(frame, Rows) or place > len(data):
            raise SchemaValidationError("rows of a reply are cut off")
        parts.append(frame.to_columns())
    return parts


def _first(columns: Columns, name: str) -> Any:
    constant = columns.find_constant(name)
    return constant[0] if constant is not None else columns[name][0]
