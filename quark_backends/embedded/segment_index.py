"""The index of a journal's segment: what is in it, so that a reader need not open it.

    head    magic "QKX1" · version u16 · 0 u16 · length u64 · zstd of msgpack (see `IndexHead`) ·
            xxh3_64 of all that
    parts   one after the other: chunks and their roll-ups, as the store has them

It lies beside its segment, `00000001.qx` beside `00000001.qj`, and is derived
from it: it may be missing, and is made again by whoever reads. It is believed
only where its own checksums are right and the segment is the one that it was
made of: of the same size, and either not written since, or with the same
digest. All integers are little-endian.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.delivery.segments import END_MARK, SEGMENT_SUFFIX
from quark_core.errors import SchemaValidationError
from quark_core.records.codec import compress_frame, decompress_frame
from quark_core.system.folders import read_plain_file

_log = logging.getLogger("quark")

INDEX_SUFFIX = ".qx"
"""Ends the name of an index."""

LEAST_BYTES = 256 * 1024
"""A smaller segment is read as quickly without an index."""

_MAGIC = b"QKX1"
_VERSION = 1
_PREFIX = struct.Struct("<4sHHQ")
_CHECKSUM = struct.Struct("<Q")
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class DamagedIndex(ValueError):
    """An index that is not what was written, or not there any more."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an index behind its head: where it lies in the parts, and its xxh3_64."""

    offset: int
    size_bytes: int
    checksum: int


class ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of the segment's rows; the fields are those of the store's table.

    Attributes:
        key: The metric's stored key; None for another kind.
    """

    kind: str
    key: str | None
    first_sequence: int
    last_sequence: int
    step_low: int
    step_high: int
    count: int
    codec: int
    rollup: Part | None
    body: Part


class KeptBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of the segment that is in no chunk.

    Attributes:
        applies: Whether it says something of the run itself.
    """

    number: int
    kind: str
    count: int
    applies: bool
    body: bytes


class SegmentState(msgspec.Struct, frozen=True, array_like=True):
    """Which bytes a segment has, and when they were last written, as far as its disk says."""

    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class JournalLook:
    """What a journal looks like from outside.

    Attributes:
        states: Its segments by name, oldest first.
        is_closed: Whether it was closed.
        is_written: Whether its process may be writing it now.
    """

    states: Mapping[str, SegmentState]
    is_closed: bool
    is_written: bool

    @classmethod
    def take(cls, folder: JournalFolder, manifest: Manifest) -> JournalLook:
        """Look at a journal."""
        states = {}
        for name in JournalReader(folder.path).segment_names():
            with contextlib.suppress(FileNotFoundError):
                states[name] = find_state(folder.path / name)
        is_closed = (folder.path / END_MARK).exists()
        return cls(states, is_closed, folder.is_written(manifest))

    @property
    def sealed(self) -> list[str]:
        """Names of the segments that nobody writes to any more and that are worth an index."""
        names = list(self.states)
        if self.is_written and not self.is_closed:
            names = names[:-1]  # nobody writes to what another one follows
        return [name for name in names if self.states[name].size_bytes >= LEAST_BYTES]


class IndexHead(msgspec.Struct, frozen=True, array_like=True):
    """What an index says of its segment.

    Attributes:
        state: Size and time of the segment that it was made of.
        digest: xxh3_128 of all of that.
        run_id, writer_id, attempt, rank: Whose it is.
        first, end: Number of its first batch, and the one after its last; none is missing.
        started_us: When the first record of its first batch was logged.
        newest_step: Highest step of a metric, or -1.
        figures: Of each metric, as `MetricFold.list_figures` gives them.
        batches: What is in no chunk, in order.
        frames: Of the batches that are in chunks: number of the first and of the last, and a
            body as `store.frames` has it.
        chunks: The rest.
    """

    state: SegmentState
    digest: bytes
    run_id: str
    writer_id: str
    attempt: int
    rank: int
    first: int
    end: int
    started_us: int
    newest_step: int
    figures: list[tuple[str, int, int, float, float, float, int, float, int, int | None, int]]
    batches: list[KeptBatch]
    frames: list[tuple[int, int, bytes]]
    chunks: list[ChunkHead]


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """An index whose head was read.

    Attributes:
        path: Where it lies.
        head: What it says.
        parts_start: Where in it the parts begin.
        data: All of it, where it could not be kept beside its segment.
    """

    path: Path
    head: IndexHead
    parts_start: int
    data: bytes | None = None

    def read_part(self, part: Part) -> bytes:
        """The bytes of a part.

        Raises:
            DamagedIndex: They are not those that were written.
        """
        start = self.parts_start + part.offset
        if self.data is not None:
            found = self.data[start : start + part.size_bytes]
        else:
            try:
                with _open(self.path) as file:
                    file.seek(start)
                    found = file.read(part.size_bytes)
            except OSError as error:
                raise DamagedIndex(f"{self.path}: {error}") from error
        if xxhash.xxh3_64_intdigest(found) != part.checksum:
            raise DamagedIndex(f"{self.path}: a part of it is damaged")
        return found


def name_index(segment: Path) -> Path:
    """Where the index of a segment lies."""
    return segment.with_name(segment.name.removesuffix(SEGMENT_SUFFIX) + INDEX_SUFFIX)


def find_state(segment: Path) -> SegmentState:
    """Size and time of a segment.

    Raises:
        OSError: It is not there.
    """
    status = os.stat(segment, follow_symlinks=False)
    return SegmentState(status.st_size, status.st_mtime_ns)


def digest_segment(data: bytes) -> bytes:
    """What tells a segment from every other of its size."""
    return xxhash.xxh3_128_digest(data)


def encode_index(head: IndexHead, parts: list[bytes]) -> bytes:
    """All bytes of an index."""
    packed = compress_frame(msgspec.msgpack.encode(head))
    begin = _PREFIX.pack(_MAGIC, _VERSION, 0, len(packed)) + packed
    return b"".join((begin, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(begin)), *parts))


def load_index(path: Path, data: bytes | None = None) -> SegmentIndex:
    """Read the head of an index.

    Args:
        path: Where it lies.
        data: All of it, where it lies nowhere.

    Raises:
        DamagedIndex: It is damaged, or of a newer version.
        FileNotFoundError: There is none.
    """
    if data is not None:
        end = _find_head_end(data[: _PREFIX.size])
        return SegmentIndex(path, _decode_head(data[:end]), end, data)
    try:
        with _open(path) as file:
            prefix = file.read(_PREFIX.size)
            end = _find_head_end(prefix)
            begin = prefix + file.read(end - len(prefix))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedIndex(f"{path}: {error}") from error
    return SegmentIndex(path, _decode_head(begin), end)


def find_index(segment: Path) -> SegmentIndex | None:
    """The index of a segment, if there is one that may be believed."""
    try:
        index = load_index(name_index(segment))
        state = find_state(segment)
        if index.head.state.size_bytes != state.size_bytes:
            return None
        # What was copied has another time, and what was written since another digest.
        if index.head.state != state and digest_segment(read_plain_file(segment)) != (
            index.head.digest
        ):
            return None
    except FileNotFoundError:
        return None
    except (OSError, DamagedIndex) as error:
        _log.debug("the index of %s is not used: %s", segment, error)
        return None
    return index


def write_index(segment: Path, data: bytes) -> bool:
    """Keep an index beside its segment; whether that was possible. It is there whole or not."""
    path = name_index(segment)
    scratch = path.with_name(f"{path.name}.part{os.getpid()}-{os.urandom(4).hex()}")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        _log.debug("the index %s cannot be stored: %s", path, error)
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        return False
    return True


def _open(path: Path) -> BinaryIO:
    descriptor = os.open(path, _FLAGS | getattr(os, "O_NONBLOCK", 0))
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def _find_head_end(prefix: bytes) -> int:
    if len(prefix) < _PREFIX.size:
        raise DamagedIndex("its head is incomplete")
    magic, version, _, size_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise DamagedIndex("it is not an index")
    if version > _VERSION:
        raise DamagedIndex(f"it has format version {version}; this Quark reads up to {_VERSION}")
    return int(_PREFIX.size + size_bytes + _CHECKSUM.size)


def _decode_head(begin: bytes) -> IndexHead:
    covered, checksum = begin[: -_CHECKSUM.size], begin[-_CHECKSUM.size :]
    if len(begin) < _PREFIX.size + _CHECKSUM.size or checksum != _CHECKSUM.pack(
        xxhash.xxh3_64_intdigest(covered)
    ):
        raise DamagedIndex("its head is damaged")
    try:
        packed = decompress_frame(covered[_PREFIX.size :], "index")
        return msgspec.msgpack.decode(packed, type=IndexHead)
    except (SchemaValidationError, msgspec.DecodeError) as error:
        raise DamagedIndex(f"its head cannot be read: {error}") from error
