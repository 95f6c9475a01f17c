"""One event file, of which only the acknowledged part counts."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["EventFile"]

_BINARY = getattr(os, "O_BINARY", 0)
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


class EventFile:
    """Appends events after the acknowledged part, and cuts off what lies beyond it.

    A reader that has seen what is cut off loses nothing: the same batch makes
    the same bytes again.

    Args:
        path: The file; made at the first append, with the version that
            TensorBoard expects first.
        checksum: TensorBoard's masked CRC-32C.
        header: The event that an event file begins with, encoded.
    """

    def __init__(self, path: Path, checksum: Any, header: bytes) -> None:
        self.path = path
        self._checksum = checksum
        self._header = header

    def append(self, events: Iterable[bytes], size_bytes: int) -> int:
        """Write events and sync them; returns the new size, which the caller acknowledges.

        Args:
            events: Encoded events.
            size_bytes: What is acknowledged.

        Raises:
            OSError: The file cannot be written; it may be called again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            # Shorter than that where somebody has emptied it: what was there is gone anyway.
            size_bytes = min(size_bytes, os.fstat(descriptor).st_size)
            head = [] if size_bytes else [self._header]
            data = b"".join(self._frame(event) for event in (*head, *events))
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size_bytes + len(data)

    def _frame(self, event: bytes) -> bytes:
        length = _LENGTH.pack(len(event))
        return b"".join(
            (
                length,
                _CHECKSUM.pack(self._checksum(length)),
                event,
                _CHECKSUM.pack(self._checksum(event)),
            )
        )
