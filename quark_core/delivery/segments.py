"""The form of a journal segment: a header, then frames, each one batch.

    header  magic "QKJ1" · version u16 · length u16 · msgpack [run_id, writer_id, attempt, rank,
            first batch number] · xxh3_64 of all that
    frame   body length u32 · xxh3_64 u64 · kind u8 · flags u8 · batch number u64 · count u32 · body

All integers are little-endian. The checksum of a frame covers everything of
it but the body's length and the checksum itself. A segment is read up to its
first damaged frame: what follows cannot be told apart from what it seems.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import xxhash

from quark_core.backend import Batch

__all__ = [
    "FORMAT_VERSION",
    "SEGMENT_SUFFIX",
    "DamagedSegment",
    "ParsedSegment",
    "encode_frame",
    "encode_header",
    "parse_segment",
    "segment_name",
]

FORMAT_VERSION = 1
SEGMENT_SUFFIX = ".qj"

_MAGIC = b"QKJ1"
_PREFIX = struct.Struct("<4sHH")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IQBBQI")
_COVERED = struct.Struct("<BBQI")
# Numbers are for ever: a kind keeps its own, new ones are added.
_KIND_NUMBERS = {"metric": 1, "event": 2, "lifecycle": 3}
_KINDS = {number: kind for kind, number in _KIND_NUMBERS.items()}
_OTHER_KIND = 255
_MAX_BODY_BYTES = 256 * 1024 * 1024


class DamagedSegment(ValueError):
    """A segment whose header cannot be read: nothing of it can be."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    writer_id: str
    attempt: int
    rank: int
    first_number: int


@dataclass(frozen=True, slots=True)
class ParsedSegment:
    """What a segment holds.

    Attributes:
        batches: Its batches up to the first damage.
        good_bytes: Length of the part that could be read.
        damage: What is wrong after that, or None where nothing is.
    """

    batches: list[Batch]
    good_bytes: int
    damage: str | None


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


def parse_segment(data: bytes) -> ParsedSegment:
    """Read a segment.

    Raises:
        DamagedSegment: Its header is torn, damaged, or of a newer version.
    """
    header, position = _parse_header(data)
    batches: list[Batch] = []
    while position < len(data):
        damage, batch, end = _parse_frame(data, position, header)
        if batch is None:
            return ParsedSegment(batches, position, damage)
        batches.append(batch)
        position = end
    return ParsedSegment(batches, position, None)


def _parse_header(data: bytes) -> tuple[_Header, int]:
    if len(data) < _PREFIX.size:
        raise DamagedSegment("the header is torn")
    magic, version, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedSegment("this is no journal segment")
    if version > FORMAT_VERSION:
        raise DamagedSegment(
            f"it has format version {version}; this Quark reads up to {FORMAT_VERSION}"
        )
    end = _PREFIX.size + length
    if len(data) < end + _CHECKSUM.size:
        raise DamagedSegment("the header is torn")
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise DamagedSegment("the header is damaged")
    try:
        header = msgspec.msgpack.decode(data[_PREFIX.size : end], type=_Header)
    except msgspec.DecodeError as error:
        raise DamagedSegment(f"the header cannot be read: {error}") from error
    return header, end + _CHECKSUM.size


def _parse_frame(
    data: bytes, position: int, header: _Header
) -> tuple[str | None, Batch | None, int]:
    """What is wrong, or the batch and where it ends."""
    if len(data) - position < _FRAME.size:
        return f"a frame is torn at byte {position}", None, position
    length, checksum, kind_number, _flags, number, count = _FRAME.unpack_from(data, position)
    start = position + _FRAME.size
    end = start + length
    if length > _MAX_BODY_BYTES:
        return f"a frame at byte {position} claims {length} bytes", None, position
    if end > len(data):
        return f"a frame is torn at byte {position}", None, position
    body = data[start:end]
    covered = data[start - _COVERED.size : start]
    if xxhash.xxh3_64_intdigest(covered + body) != checksum:
        return f"a frame is damaged at byte {position}", None, position
    kind = _KINDS.get(kind_number)
    if kind is None:
        size = body[0] if body else 0
        kind, body = body[1 : 1 + size].decode("utf-8", "replace"), body[1 + size :]
    batch = Batch(
        header.run_id, header.writer_id, header.attempt, header.rank, number, kind, count, body
    )
    return None, batch, end
