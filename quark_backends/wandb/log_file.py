"""Reads what has been sent out of W&B's own file of a run, while it is written.

The file begins with seven bytes and goes on as a log in LevelDB's format:
blocks of 32 KiB, each record in one or more pieces of checksum, length and
type. What is in the file stays there whoever is killed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HISTORY_KEY = "quark/seq"
"""Key of the marks of a row's parts, `<writer>.<batch>.<part>`, with spaces between."""

_BLOCK_BYTES = 32768
_PIECE = struct.Struct("<IHB")
_HEADER_BYTES = 7
_FULL, _FIRST, _LAST = 1, 2, 4


def mark_artifact(artifact: Any) -> str:
    """What tells an artifact in the file from those before it."""
    return f"{artifact.name}:{artifact.digest}"


class LogFile:
    """One file, read on from where the last call ended.

    Args:
        path: The file; it need not be there yet.
        record_type: W&B's class of a record.
        offset: Where a record begins: a former `offset`, or 0.

    Attributes:
        offset: After the last whole record that was read.
        damage: Why the last call could not read on, where that is no record half written.
    """

    def __init__(self, path: Path, record_type: Any, offset: int = 0) -> None:
        self.path = path
        self._record_type = record_type
        self.offset = max(offset, _HEADER_BYTES)
        self.damage: str | None = None

    def read_marks(self) -> Iterator[str]:
        """The marks of what has come to the file since the last call: rows' parts and artifacts."""
        for data in self.read_records():
            record = self._record_type()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "artifact":
                yield mark_artifact(record.artifact)
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                if HISTORY_KEY in (item.key, "/".join(item.nested_key)):
                    yield from json.loads(item.value_json).split(" ")

    def read_records(self) -> Iterator[bytes]:
        """What has come to the file since the last call, as W&B's records, not decoded yet."""
        self.damage = None
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        start, position = self.offset, 0
        parts: list[bytes] = []
        while position + _PIECE.size <= len(data):
            left = _BLOCK_BYTES - (start + position) % _BLOCK_BYTES
            if left < _PIECE.size:
                # The rest of a block that holds no piece is padding.
                position += left
                continue
            checksum, size_bytes, kind = _PIECE.unpack_from(data, position)
            end = position + _PIECE.size + size_bytes
            if size_bytes > left - _PIECE.size or (kind == 0 and (checksum or size_bytes)):
                self.damage = f"the record at byte {start + position} is damaged"
                return
            if end > len(data) or kind == 0:
                return
            piece = data[position + _PIECE.size : end]
            if zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
                self.damage = f"the record at byte {start + position} is damaged"
                return
            if kind in (_FULL, _FIRST):
                parts = []
            parts.append(piece)
            position = end
            if kind in (_FULL, _LAST):
                self.offset = start + position
                yield b"".join(parts)
                parts = []
