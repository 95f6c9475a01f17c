"""Reads the black box of a process that is gone: see `quark_core.delivery.black_box`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from quark_core.backends.contract import Batch
from quark_core.delivery.accounts import StreamAccounts
from quark_core.delivery.black_box import (
    ACCOUNTS_AT,
    ACCOUNTS_BYTES,
    ACCOUNTS_HEAD,
    ENTRY,
    FRAMES_NAME,
    HEAD_BYTES,
    HEAD_NAME,
    MAGIC,
    NOTES,
    NOTES_AT,
    RECORDS_SUFFIX,
)
from quark_core.delivery.metric_rows import MetricKey, expand_row
from quark_core.delivery.segments import SEGMENT_SUFFIX, DamagedSegment, Origin, parse_segment
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
)
from quark_core.records.fields import column_types, restorers
from quark_core.records.json_object import JsonObject, decode_json
from quark_core.records.names import split_name

_KINDS = {1: MetricRecord.KIND, 3: EventRecord.KIND, 4: LifecycleRecord.KIND}

# The ring that version 0.1 kept: one file, entries with numbers, padded to 8 bytes.
_RING_MAGIC = b"QKB1"
_RING_HEAD = struct.Struct("<4sIQQ")
_RING_UNCOVERED = struct.Struct("<QQ")
_RING_UNCOVERED_AT = 24
_RING_AT = 64
_RING_ENTRY = struct.Struct("<IIQ")
_RING_WRAP = 0xFFFFFFFF


@dataclass(slots=True)
class BoxContents:
    """What is in a black box, but for its records: `iterate_entries` gives those.

    Attributes:
        batches: Batches that the journal did not take when they were made.
        accounts: What its process knew to be in batches; None where that cannot be
            told, as of a box of version 0.1.
        uncovered: At most so many records more were accepted and are in no journal.
        was_filling: Whether the process may have had to let go of records.
    """

    batches: list[Batch] = field(default_factory=list)
    accounts: StreamAccounts | None = None
    uncovered: int = 0
    was_filling: bool = False


def read_black_box(path: Path) -> BoxContents:
    """What is in a black box whose process is gone; none is as good as an empty one.

    Raises:
        OSError: It is there and cannot be read.
    """
    contents = BoxContents()
    if path.is_dir():
        _read_head(path / HEAD_NAME, contents)
        contents.batches = _read_frames(path / FRAMES_NAME)
    elif path.exists():
        contents.uncovered = _count_ring_uncovered(path.read_bytes())
    return contents


def iterate_entries(path: Path) -> Iterator[Any]:
    """The entries of a black box in the order they came, journaled ones among them.

    Raises:
        OSError: It is there and cannot be read.
    """
    if path.is_dir():
        yield from _read_segments(path)
    elif path.exists():
        yield from _read_ring(path.read_bytes())


def find_entry_span(entry: Any) -> tuple[str, int, int]:
    """Kind of an entry's records, their first sequence number and the one after the last."""
    kind = entry[0]
    if kind == 2:
        return MetricRecord.KIND, entry[1], entry[1] + len(entry[-1])
    if kind == 5:
        return entry[1], entry[2][0], entry[2][0] + 1
    return _KINDS[kind], entry[1], entry[1] + 1


def _read_head(path: Path, contents: BoxContents) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # its process was killed while it made the box
    if len(data) < HEAD_BYTES or data[: len(MAGIC)] != MAGIC:
        return
    uncovered, journaled, filling = NOTES.unpack_from(data, NOTES_AT)
    contents.uncovered = max(0, uncovered - journaled)
    contents.was_filling = bool(filling)
    newest = -1
    for place in ACCOUNTS_AT:
        generation, length, checksum = ACCOUNTS_HEAD.unpack_from(data, place)
        start = place + ACCOUNTS_HEAD.size
        body = data[start : start + min(length, ACCOUNTS_BYTES)]
        expected = xxhash.xxh32_intdigest(body, generation & 0xFFFFFFFF)
        if generation <= newest or len(body) != length or checksum != expected or not body:
            continue
        contents.accounts = StreamAccounts.decode(body)
        newest = generation
    if contents.accounts is None:
        contents.accounts = StreamAccounts()  # nothing was in a batch yet


def _read_frames(path: Path) -> list[Batch]:
    """Batches by number; what was kept later may have lower ones."""
    found: dict[int, Batch] = {}
    for segment in sorted(path.glob(f"*{SEGMENT_SUFFIX}")):
        try:
            batches = parse_segment(segment.read_bytes()).batches
        except DamagedSegment:
            continue  # its process was killed while it began it
        found.update((batch.number, batch) for batch in batches)
    return [found[number] for number in sorted(found)]


def _read_segments(path: Path) -> Iterator[Any]:
    for segment in sorted(path.glob(f"*{RECORDS_SUFFIX}")):
        data = segment.read_bytes()
        position = 0
        while position + ENTRY.size <= len(data):
            length, checksum = ENTRY.unpack_from(data, position)
            start = position + ENTRY.size
            body = data[start : start + length]
            if not body or len(body) != length or xxhash.xxh32_intdigest(body) != checksum:
                break
            try:
                yield msgspec.msgpack.decode(body)
            except msgspec.DecodeError:
                break
            position = start + length


def _count_ring_uncovered(data: bytes) -> int:
    if len(data) < _RING_AT or data[:4] != _RING_MAGIC:
        return 0
    uncovered, journaled = _RING_UNCOVERED.unpack_from(data, _RING_UNCOVERED_AT)
    return max(0, int(uncovered) - int(journaled))


def _read_ring(data: bytes) -> Iterator[Any]:
    if len(data) < _RING_AT:
        return
    magic, capacity, position, number = _RING_HEAD.unpack_from(data)
    if magic != _RING_MAGIC or capacity + _RING_AT > len(data) or capacity <= 0:
        return
    while True:
        place = position % capacity
        room = capacity - place
        if room < _RING_ENTRY.size:
            position += room
            continue
        length, checksum, found = _RING_ENTRY.unpack_from(data, _RING_AT + place)
        if length == _RING_WRAP:
            position += room
            place = 0
            length, checksum, found = _RING_ENTRY.unpack_from(data, _RING_AT)
        start = _RING_AT + place + _RING_ENTRY.size
        body = data[start : start + length]
        if found != number or len(body) != length or xxhash.xxh32_intdigest(body) != checksum:
            return
        try:
            yield msgspec.msgpack.decode(body)
        except msgspec.DecodeError:
            return
        number += 1
        position += (_RING_ENTRY.size + length + 7) & ~7


def restore_records(entry: Any, origin: Origin) -> list[Any]:
    """The records of an entry; none where it is of a kind that is not known here."""
    head: Any = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)
    plain: Any
    kind, *fields = entry
    if kind == 1:
        sequence, time_us, key, value, step, epoch, description, metadata = fields
        names = (key, *split_name(key))
        rest: Any = (value, step, epoch, description, _to_object(metadata))
        return [MetricRecord(*(*head, sequence, time_us, *names, *rest))]
    if kind == 2:
        sequence, time_us, step, epoch, names, values = fields
        keys = tuple(MetricKey(name, *split_name(name)) for name in names)
        return list(
            expand_row(
                (sequence, time_us, step, epoch, keys, values),
                run_id=origin.run_id,
                writer_id=origin.writer_id,
                attempt=origin.attempt,
                rank=origin.rank,
            )
        )
    if kind == 3:
        *plain, payload = fields
        return [EventRecord(*(*head, *plain, _to_object(payload)))]
    if kind == 4:
        *plain, body = fields
        return [LifecycleRecord(*(*head, *plain, _to_object(body)))]
    if kind == 5 and fields[0] in RECORD_TYPES:
        name, plain = fields
        restore = restorers(name)
        types = column_types(name)
        values = [
            None
            if value is None
            else restore[field](value)
            if field in restore
            # Only JSON objects travel as bytes.
            else _to_object(value)
            if types[field] == "j"
            else value
            for field, value in zip(types, plain, strict=True)
        ]
        record_type: Any = RECORD_TYPES[name]
        return [record_type(*head, *values)]
    return []


def _to_object(encoded: bytes | None) -> JsonObject | None:
    return None if encoded is None else decode_json(encoded)
