"""The form of a journal segment: a header that says who writes, then frames, each one batch.

    header  magic "QKJ1" · version u16 · length u16 · msgpack [run_id, writer_id, attempt, rank,
            first batch number] · xxh3_64 of all that
    frame   body length u32 · xxh3_64 u64 · kind u8 · flags u8 · batch number u64 · count u32 · body

All integers are little-endian. The checksum of a frame covers everything of
it but the body's length and the checksum itself. Behind a damaged place the
next whole frame is looked for, so that damage costs the frames that it hit
and no other. Every version begins a segment with this header, by which an
older Quark knows what it must leave alone.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from quark_core.backends.contract import Batch

# What merely looks like frames is checked up to so many times the length of it all.
_CHECKED_SHARE = 16
_CHECKED_BYTES = 1024 * 1024


class Span(NamedTuple):
    """A whole frame, or what is none up to the next whole one.

    Attributes:
        start, end: Where it lies.
        is_frame: Whether it is a whole frame.
        is_last: Whether no whole frame was found behind a damaged place.
    """

    start: int
    end: int
    is_frame: bool
    is_last: bool = False


class FrameSearch:
    """Finds whole frames in bytes of which some are damaged.

    A place is looked at only where the head of a frame may be, by a pattern,
    and its checksum is made only where the length that it claims fits. Data
    that was made to look like frames at every byte is given up on after a
    bounded amount of work.

    Args:
        data: All of it.
        head: What is the same in every head of a frame.
        head_offset: Where in a frame that lies.
        claim_end: Where the frame at a place ends by its own word; None where
            that is not in the data.
        is_whole: Whether a frame's checksum is right that begins and ends there,
            whatever it says of its length.
    """

    def __init__(
        self,
        data: bytes,
        *,
        head: re.Pattern[bytes],
        head_offset: int,
        claim_end: Callable[[int], int | None],
        is_whole: Callable[[int, int], bool],
    ) -> None:
        self._data = data
        self._head = head
        self._head_offset = head_offset
        self._claim_end = claim_end
        self._is_whole = is_whole
        self._left_bytes = _CHECKED_SHARE * len(data) + _CHECKED_BYTES

    @property
    def is_exhausted(self) -> bool:
        """Whether so much looks like frames and is none that no more is searched."""
        return self._left_bytes < 0

    def split(
        self,
        position: int,
        is_next: Callable[[int], bool] = lambda _: False,
        *,
        in_doubt: bool = False,
    ) -> Iterator[Span]:
        """Take the data apart from a place on.

        Args:
            position: Where the first frame begins.
            is_next: As in `find_next`; asked when all before it was taken.
            in_doubt: Whether what begins at the place is known to be no frame.
        """
        while position < len(self._data):
            end = None if in_doubt else self.read_end(position)
            if end is not None:
                yield Span(position, end, True)
            else:
                found = self.find_next(position, is_next)
                end = len(self._data) if found is None else found
                is_frame = not in_doubt and self._is_whole(position, end)
                yield Span(position, end, is_frame, is_last=found is None)
            position, in_doubt = end, False

    def read_end(self, position: int) -> int | None:
        """Where the frame at a place ends; None where there is no whole one."""
        claimed = self._claim_end(position)
        if claimed is None or self.is_exhausted:
            return None
        if self._is_whole(position, claimed):
            return claimed
        self._left_bytes -= claimed - position
        return None

    def find_next(self, position: int, is_next: Callable[[int], bool]) -> int | None:
        """Where the first whole frame behind a damaged one begins; None where there is none.

        Args:
            position: Where the damaged one begins.
            is_next: Whether a whole frame is the very next after the damaged
                one, so that nothing between the two is looked for.
        """
        after = self._claim_end(position)
        if after is not None and self.read_end(after) is not None:
            if is_next(after):
                return after
            # It will be checked again when the search comes there.
            self._left_bytes -= (self._claim_end(after) or after) - after
        for match in self._head.finditer(self._data, position + 1 + self._head_offset):
            if self.is_exhausted:
                return None
            start = match.start() - self._head_offset
            if self.read_end(start) is not None:
                return start
        return None


def make_writer_id() -> str:
    """A new id for one process's stream; it is never used twice."""
    return os.urandom(6).hex()


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one stream have in common."""

    run_id: str | None
    writer_id: str = field(default_factory=make_writer_id)
    attempt: int = 0
    rank: int = 0

    @property
    def head(self) -> tuple[str | None, str, int, int]:
        """Run, writer, attempt and rank: what every record of the stream begins with."""
        return self.run_id, self.writer_id, self.attempt, self.rank


FORMAT_VERSION = 1
SEGMENT_SUFFIX = ".qj"
"""The suffix of the files of a journal."""
END_MARK = "end"
"""Name of the file beside the segments of a journal that was closed: number after its last
batch u64 · xxh3_64 of that."""

_MAGIC = b"QKJ1"
_PREFIX = struct.Struct("<4sHH")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IQBBQI")
_COVERED = struct.Struct("<BBQI")
_LENGTH = struct.Struct("<I")
_END = struct.Struct("<Q")
# Numbers are for ever: a kind keeps its own, new ones are added.
_KIND_NUMBERS = {"metric": 1, "event": 2, "lifecycle": 3}
_KINDS = {number: kind for kind, number in _KIND_NUMBERS.items()}
_OTHER_KIND = 255
_MAX_BODY_BYTES = 256 * 1024 * 1024
# A known kind, no flags, and a number below 2**40: what every frame has that was ever written.
_HEAD_PATTERN = re.compile(rb"[\x01\x02\x03\xff]\x00(?=.{5}\x00{3})", re.DOTALL)
_KIND_OFFSET = _LENGTH.size + _CHECKSUM.size


class DamagedSegment(ValueError):
    """A segment whose header cannot be read, and nobody said whose it is."""


class NewerSegment(DamagedSegment):
    """A segment of a newer format version, which is sound and left alone."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    writer_id: str
    attempt: int
    rank: int
    first_number: int


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """Bytes of a segment that are no whole frame.

    Attributes:
        start, end: Where they are.
        what: What is wrong there.
        is_torn: Whether they are what a killed process or a machine without
            power leaves at the end of a file.
    """

    start: int
    end: int
    what: str
    is_torn: bool = False

    def describe(self) -> str:
        """Where it is and what is wrong."""
        if self.start == self.end:
            return self.what
        return f"bytes {self.start} to {self.end - 1}: {self.what}"


@dataclass(slots=True)
class ParsedSegment:
    """What a segment holds.

    Attributes:
        first_number: Number of its first batch as its header has it, else of
            the first that was found; None where nothing was.
        header_is_whole: Whether it is the header that says so.
        size_bytes: Its length.
        batches: Its whole batches, in the order of the file.
        damaged: What else is in it, in order.
    """

    first_number: int | None
    header_is_whole: bool
    size_bytes: int
    batches: list[Batch] = field(default_factory=list)
    damaged: list[DamagedPart] = field(default_factory=list)

    @property
    def damaged_end(self) -> DamagedPart | None:
        """What is damaged at its very end, or None."""
        return next((part for part in self.damaged[-1:] if part.end == self.size_bytes), None)

    @property
    def is_contiguous(self) -> bool:
        """Whether it holds batches that follow each other without a gap, and nothing else."""
        if self.damaged or not self.header_is_whole or not self.batches:
            return False
        first = self.batches[0].number
        return all(batch.number == first + place for place, batch in enumerate(self.batches))


def segment_name(index: int) -> str:
    """Name of the segment of this index; names sort as indexes do."""
    return f"{index:08d}{SEGMENT_SUFFIX}"


def encode_header(run_id: str, writer_id: str, attempt: int, rank: int, first: int) -> bytes:
    """The bytes that a segment begins with."""
    block = msgspec.msgpack.encode(_Header(run_id, writer_id, attempt, rank, first))
    head = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(block)) + block
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def encode_frame(batch: Batch) -> bytes:
    """A batch as one frame."""
    number, body = _KIND_NUMBERS.get(batch.kind, _OTHER_KIND), batch.body
    if number == _OTHER_KIND:
        name = batch.kind.encode()
        body = bytes([len(name)]) + name + body
    covered = _COVERED.pack(number, 0, batch.number, batch.count)
    checksum = xxhash.xxh3_64_intdigest(covered + body)
    return struct.pack("<IQ", len(body), checksum) + covered + body


def parse_segment(data: bytes, origin: Origin | None = None) -> ParsedSegment:
    """Read a segment: every frame that is whole, wherever damage lies.

    Args:
        data: All of it.
        origin: Whose it is, where its header may be damaged.

    Raises:
        NewerSegment: It is of a newer version.
        DamagedSegment: Its header is torn or damaged, and no origin is given.
    """
    position, header_damage = 0, ""
    parsed = ParsedSegment(None, False, len(data))
    try:
        header, position = _parse_header(data)
        parsed = ParsedSegment(header.first_number, True, len(data))
    except NewerSegment:
        raise
    except DamagedSegment as error:
        if origin is None:
            raise
        header_damage = str(error)
        header = _Header(origin.run_id or "", origin.writer_id, origin.attempt, origin.rank, 0)
    frames = _Frames(data, header)
    search = FrameSearch(
        data,
        head=_HEAD_PATTERN,
        head_offset=_KIND_OFFSET,
        claim_end=frames.claim_end,
        is_whole=frames.is_whole,
    )

    def is_next(position: int) -> bool:
        expected = parsed.batches[-1].number + 1 if parsed.batches else header.first_number
        return frames.has_number(expected + 1, position)

    if header_damage and search.read_end(position) is not None:
        # All of it is gone, and the data begins with a frame.
        parsed.damaged.append(DamagedPart(0, 0, header_damage, is_torn=False))
        header_damage = ""
    for start, end, is_frame, is_last in search.split(
        position, is_next, in_doubt=bool(header_damage)
    ):
        if is_frame:
            parsed.batches.append(frames.read(start, end))
            continue
        what = header_damage or frames.describe(start, end)
        if search.is_exhausted and is_last:
            what += ", and too much of the rest looks like frames to be searched"
        torn = is_last and frames.is_torn(start, in_header=bool(header_damage))
        parsed.damaged.append(DamagedPart(start, end, what, torn))
        header_damage = ""
    if header_damage:
        parsed.damaged.append(DamagedPart(0, 0, header_damage, is_torn=True))
    if parsed.first_number is None and parsed.batches:
        parsed.first_number = parsed.batches[0].number
    return parsed


def read_origin(data: bytes) -> Origin:
    """Whose segment it is, by its header.

    Raises:
        DamagedSegment: That cannot be read.
    """
    header, _ = _parse_header(data)
    return Origin(header.run_id, header.writer_id, header.attempt, header.rank)


def encode_end_mark(number: int) -> bytes:
    """What the mark of a journal says whose last batch comes before a number."""
    data = _END.pack(number)
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def read_end_mark(data: bytes) -> int | None:
    """The number after the last batch; None where the mark is torn or damaged."""
    if len(data) != _END.size + _CHECKSUM.size:
        return None
    (number,) = _END.unpack_from(data)
    return int(number) if encode_end_mark(number) == data else None


def _parse_header(data: bytes) -> tuple[_Header, int]:
    if len(data) < _PREFIX.size:
        raise DamagedSegment("the header is incomplete")
    magic, version, length = _PREFIX.unpack_from(data)
    end = _PREFIX.size + length
    if len(data) < end + _CHECKSUM.size:
        raise DamagedSegment("the header is incomplete")
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise DamagedSegment("the header is damaged")
    if magic != _MAGIC:
        raise DamagedSegment("this is not a journal segment")
    if version > FORMAT_VERSION:
        raise NewerSegment(
            f"it has format version {version}, but this Quark reads up to {FORMAT_VERSION}"
        )
    try:
        header = msgspec.msgpack.decode(data[_PREFIX.size : end], type=_Header)
    except msgspec.DecodeError as error:
        raise DamagedSegment(f"the header cannot be read: {error}") from error
    return header, end + _CHECKSUM.size


class _Frames:
    """The frames of one segment, by where they begin."""

    def __init__(self, data: bytes, header: _Header) -> None:
        self._data = data
        self._view = memoryview(data)
        self._header = header

    def claim_end(self, position: int) -> int | None:
        """Where the frame at a place ends by its own word; None where that is not in the data."""
        start = position + _FRAME.size
        if start > len(self._data):
            return None
        (length,) = _LENGTH.unpack_from(self._data, position)
        end: int = start + length
        return end if length <= _MAX_BODY_BYTES and end <= len(self._data) else None

    def is_whole(self, position: int, end: int) -> bool:
        """Whether a frame is whole that ends there, whatever it says of its length."""
        start = position + _FRAME.size
        if end < start or end - start > _MAX_BODY_BYTES:
            return False
        checksum: int = _CHECKSUM.unpack_from(self._data, position + _LENGTH.size)[0]
        return checksum == xxhash.xxh3_64_intdigest(self._view[start - _COVERED.size : end])

    def has_number(self, number: int, position: int) -> bool:
        """Whether the whole frame at a place has the batch of this number."""
        found: int = _FRAME.unpack_from(self._data, position)[4]
        return found == number

    def is_torn(self, position: int, *, in_header: bool) -> bool:
        """Whether what begins there, with nothing whole behind it, was never written to its end."""
        data = self._data
        if data.count(0, position) == len(data) - position:
            return True
        if not in_header:
            return self.claim_end(position) is None
        if len(data) < _PREFIX.size:
            return True
        length: int = _PREFIX.unpack_from(data)[2]
        return len(data) < _PREFIX.size + length + _CHECKSUM.size

    def describe(self, position: int, end: int) -> str:
        """What is wrong with the frame at a place."""
        if end - position < _FRAME.size:
            return "a frame is incomplete"
        (length,) = _LENGTH.unpack_from(self._data, position)
        if length > _MAX_BODY_BYTES:
            return f"a frame states a length of {length} bytes"
        return "a frame is incomplete" if self.claim_end(position) is None else "a frame is damaged"

    def read(self, position: int, end: int) -> Batch:
        """The batch of a whole frame."""
        _, _, kind_number, _flags, number, count = _FRAME.unpack_from(self._data, position)
        body = self._data[position + _FRAME.size : end]
        kind = _KINDS.get(kind_number)
        if kind is None:
            size = body[0] if body else 0
            kind, body = body[1 : 1 + size].decode("utf-8", "replace"), body[1 + size :]
        header = self._header
        return Batch(
            header.run_id, header.writer_id, header.attempt, header.rank, number, kind, count, body
        )
