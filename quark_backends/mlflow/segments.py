"""Batches in files, as they came: what MLflow has no place for is kept exactly in here.

    quark/records/<writer>-0001.qrec    one writer's batches, in order

A file begins with `QREC1` and a newline. A batch is four bytes of length and
eight of checksum (xxh3, both little-endian), then msgpack of
`[writer_id, attempt, rank, number, kind, count, body]` with the body as
`quark_core.codec` encodes it. What follows a torn batch is not read.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from quark_core.backend import Batch

__all__ = ["SUFFIX", "SegmentFiles", "name_segment", "read_segment"]

SUFFIX = ".qrec"
_MAGIC = b"QREC1\n"
_HEAD = struct.Struct("<IQ")
_LIMIT_BYTES = 8 * 1024 * 1024


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    writer_id: str
    attempt: int
    rank: int
    number: int
    kind: str
    count: int
    body: bytes


class SegmentFiles:
    """The segments of every writer of a run that this process delivers.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Path, int, int]] = {}

    def append(self, batch: Batch, first_index: int = 1) -> Path | None:
        """Keep a batch; one that is in the newest segment already is left out.

        Args:
            batch: It.
            first_index: Number of the writer's first segment, where none is here.

        Returns:
            The segment that was closed because it is full, or None.

        Raises:
            OSError: It cannot be written.
        """
        path, size, newest = self._find(batch.writer_id, first_index)
        if batch.number <= newest:
            return None
        full = None
        if size >= _LIMIT_BYTES:
            full = path
            path = path.with_name(name_segment(batch.writer_id, _index_of(path) + 1))
            size = 0
        data = _encode(batch) if size else _MAGIC + _encode(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            # What an attempt that failed half way has left is written over.
            file.truncate(size)
            file.seek(size)
            file.write(data)
        self._open[batch.writer_id] = path, size + len(data), batch.number
        return full

    def has(self, writer_id: str) -> bool:
        """Whether anything of a writer is here."""
        return writer_id in self._open or bool(self._list(writer_id))

    def list_open(self) -> list[Path]:
        """The segments that are appended to by this process."""
        return [path for path, *_ in self._open.values()]

    def _find(self, writer_id: str, first_index: int) -> tuple[Path, int, int]:
        found = self._open.get(writer_id)
        if found is None:
            paths = self._list(writer_id)
            path = paths[-1] if paths else self._folder / name_segment(writer_id, first_index)
            size, newest = 0, -1
            for batch, end in _scan(path.read_bytes() if paths else b""):
                size, newest = end, batch.number
            found = self._open[writer_id] = path, size, newest
        return found

    def _list(self, writer_id: str) -> list[Path]:
        name = re.compile(re.escape(_stem(writer_id)) + r"-\d{4,}" + re.escape(SUFFIX))
        paths = self._folder.glob(f"*{SUFFIX}")
        return sorted((path for path in paths if name.fullmatch(path.name)), key=_index_of)


def name_segment(writer_id: str, index: int) -> str:
    """File name of a writer's segment; the first is 1."""
    return f"{_stem(writer_id)}-{index:04d}{SUFFIX}"


def read_segment(data: bytes, run_id: str) -> Iterator[Batch]:
    """The batches of a segment, up to where it is torn.

    Args:
        data: All of it.
        run_id: The run that they are of.
    """
    for frame, _ in _scan(data):
        yield Batch(
            run_id,
            frame.writer_id,
            frame.attempt,
            frame.rank,
            frame.number,
            frame.kind,
            frame.count,
            frame.body,
        )


def _scan(data: bytes) -> Iterator[tuple[_Frame, int]]:
    """Each whole frame with the position of its end."""
    if not data.startswith(_MAGIC):
        return
    position = len(_MAGIC)
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        payload = data[position : position + length]
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        position += length
        try:
            yield msgspec.msgpack.decode(payload, type=_Frame), position
        except msgspec.DecodeError:
            return


def _encode(batch: Batch) -> bytes:
    payload = msgspec.msgpack.encode(
        _Frame(
            batch.writer_id,
            batch.attempt,
            batch.rank,
            batch.number,
            batch.kind,
            batch.count,
            batch.body,
        )
    )
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _stem(writer_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", writer_id)


def _index_of(path: Path | os.PathLike[str]) -> int:
    return int(Path(path).stem.rpartition("-")[2])
