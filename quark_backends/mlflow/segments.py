"""Batches in files, as they came: what MLflow has no place for is kept exactly in here.

    quark/records/<writer>-0001.qrec    one writer's batches, in order

A file begins with `QREC1` and a newline. A batch is four bytes of length and
eight of checksum (xxh3, both little-endian), then msgpack of
`[writer_id, attempt, rank, number, kind, count, body]` with the body as
`quark_core.records.codec` encodes it. Behind a damaged place the next whole batch is
looked for. A file is added to by the opening of the mirror alone that began it.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from quark_backends.mirroring.saved_state import make_file_name
from quark_backends.mlflow.outbox import write_at
from quark_core.api import Batch, FrameSearch

_log = logging.getLogger("quark")

SUFFIX = ".qrec"
_MAGIC = b"QREC1\n"
_HEAD = struct.Struct("<IQ")
# An array of seven, a text first.
_PAYLOAD_PATTERN = re.compile(rb"\x97[\xa0-\xbf\xd9-\xdb]")
_LIMIT_BYTES = 8 * 1024 * 1024
# Size of a segment that another opening of the mirror has begun: nothing is added to it. Who
# began it may be sending it yet, and what is sent late would take the place of what is newer.
_LEFT_ALONE = -1


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

    def append(self, batch: Batch, first_index: int = 1, *, is_late: bool = False) -> Path | None:
        """Keep a batch; one that is in the newest segment already is left out.

        Args:
            batch: It.
            first_index: Number of the writer's first segment, where none is here.
            is_late: Whether it comes after later ones, and is in none.

        Returns:
            The segment that was closed because it is full, or None.

        Raises:
            OSError: It cannot be written.
        """
        path, size, newest = self._find(batch.writer_id, first_index)
        if batch.number <= newest and not is_late:
            return None
        full = None
        if size >= _LIMIT_BYTES or size < 0:
            full = path
            path, size = _find_free(path, batch.writer_id), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        data = _encode(batch) if size else _MAGIC + _encode(batch)
        while not write_at(path, size, data):
            path = _find_free(path, batch.writer_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            size, data = 0, _MAGIC + _encode(batch)
        self._open[batch.writer_id] = path, size + len(data), max(newest, batch.number)
        return full

    def has(self, writer_id: str) -> bool:
        """Whether anything of a writer is here."""
        return writer_id in self._open or bool(self._list(writer_id))

    def list_older(self, attempt: int) -> list[tuple[Path, str]]:
        """The segments of attempts before one, each with its writer's id."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            frame = next(iter(_scan(path.read_bytes()).frames), None)
            if frame is not None and frame.attempt < attempt:
                found.append((path, frame.writer_id))
        return found

    def list_open(self) -> list[Path]:
        """The segments that are appended to by this process."""
        return [path for path, *_ in self._open.values()]

    def _find(self, writer_id: str, first_index: int) -> tuple[Path, int, int]:
        found = self._open.get(writer_id)
        if found is None:
            paths = self._list(writer_id)
            path = paths[-1] if paths else self._folder / name_segment(writer_id, first_index)
            scan = _scan(path.read_bytes() if paths else b"")
            newest = max(scan.numbers(writer_id), default=-1)
            if scan.damaged:
                scan.tell(path)
            found = self._open[writer_id] = path, _LEFT_ALONE if paths else 0, newest
        return found

    def _list(self, writer_id: str) -> list[Path]:
        name = re.compile(re.escape(_stem(writer_id)) + r"-\d{4,}" + re.escape(SUFFIX))
        paths = self._folder.glob(f"*{SUFFIX}")
        return sorted((path for path in paths if name.fullmatch(path.name)), key=_index_of)


def name_segment(writer_id: str, index: int) -> str:
    """File name of a writer's segment; the first is 1."""
    return f"{_stem(writer_id)}-{index:04d}{SUFFIX}"


def _find_free(path: Path, writer_id: str) -> Path:
    """The next segment after one that nobody has begun."""
    index = _index_of(path)
    while True:
        index += 1
        free = path.with_name(name_segment(writer_id, index))
        if not free.exists():
            return free


def read_segment(path: Path, run_id: str) -> Iterator[Batch]:
    """The whole batches of a segment; the log is told what damage has cost.

    Args:
        path: The segment.
        run_id: The run that they are of.

    Raises:
        OSError: It cannot be read.
    """
    scan = _scan(path.read_bytes())
    if scan.damaged:
        scan.tell(path)
    for frame in scan.frames:
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


@dataclass(slots=True)
class _Scan:
    """What a segment holds.

    Attributes:
        frames: Its whole batches.
        damaged: Where there is anything else, and between which of the frames.
    """

    frames: list[_Frame] = field(default_factory=list)
    damaged: list[tuple[int, int, int]] = field(default_factory=list)

    def numbers(self, writer_id: str) -> list[int]:
        """Numbers of a writer's batches."""
        return [frame.number for frame in self.frames if frame.writer_id == writer_id]

    def tell(self, path: Path) -> None:
        """Tell the log what damage has cost."""
        for start, end, place in self.damaged:
            before = self.frames[place - 1].number if place else -1
            if place == len(self.frames):
                gone = f"batches from {before + 1} on are missing"
            else:
                after = self.frames[place].number
                gone = f"batches {before + 1} to {after - 1} are missing"
                if after == before + 1:
                    gone = "nothing is missing"
            _log.warning("%s is damaged at bytes %d to %d; %s", path, start, end - 1, gone)


def _scan(data: bytes) -> _Scan:
    scan = _Scan()
    size = len(data)
    view = memoryview(data)

    def claim_end(position: int) -> int | None:
        if position + _HEAD.size > size:
            return None
        end: int = position + _HEAD.size + _HEAD.unpack_from(data, position)[0]
        return end if end <= size else None

    search = FrameSearch(
        data,
        head=_PAYLOAD_PATTERN,
        head_offset=_HEAD.size,
        claim_end=claim_end,
        is_whole=partial(_is_whole, view),
    )
    first = len(_MAGIC) if data.startswith(_MAGIC) else 0
    for start, end, is_frame, is_last in search.split(first):
        frame = _decode(data[start + _HEAD.size : end]) if is_frame else None
        if frame is not None:
            scan.frames.append(frame)
        elif not is_frame and not (is_last and claim_end(start) is None):
            scan.damaged.append((start, end, len(scan.frames)))
    return scan


def _is_whole(view: memoryview, position: int, end: int) -> bool:
    start = position + _HEAD.size
    if end <= start:
        return False
    checksum: int = _HEAD.unpack_from(view, position)[1]
    return checksum == xxhash.xxh3_64_intdigest(view[start:end])


def _decode(payload: bytes) -> _Frame | None:
    try:
        return msgspec.msgpack.decode(payload, type=_Frame)
    except msgspec.DecodeError:
        return None


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
    return make_file_name(writer_id)


def _index_of(path: Path | os.PathLike[str]) -> int:
    return int(Path(path).stem.rpartition("-")[2])
