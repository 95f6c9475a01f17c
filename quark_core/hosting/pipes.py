"""Messages between a process and its helper: a length of four bytes, then msgpack."""

from __future__ import annotations

import struct
from io import RawIOBase
from typing import Any, TypeVar

import msgspec

__all__ = ["read_frame", "write_frame"]

_LENGTH = struct.Struct("<I")
_Frame = TypeVar("_Frame")


def write_frame(stream: RawIOBase, message: Any) -> None:
    """Send a message.

    Args:
        stream: Unbuffered: a forked child must not inherit half of a message.
        message: It.

    Raises:
        OSError: The other side is gone.
    """
    data = msgspec.msgpack.encode(message)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[stream.write(view) or 0 :]


def read_frame(stream: RawIOBase, kind: type[_Frame]) -> _Frame | None:
    """The next message, or None where the other side is gone.

    Args:
        stream: Unbuffered.
        kind: What is expected: a type, or a union of types.
    """
    head = _read(stream, _LENGTH.size)
    if head is None:
        return None
    data = _read(stream, _LENGTH.unpack(head)[0])
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


def _read(stream: RawIOBase, size_bytes: int) -> bytes | None:
    parts = []
    while size_bytes:
        part = stream.read(size_bytes)
        if not part:
            return None
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)
