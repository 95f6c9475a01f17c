"""A black box against SIGKILL: what is accepted and not yet journaled, in shared memory.

The delivery thread journals every 20 ms or so; a process that is killed in
between would lose what `log()` returned for since. So each record also goes,
encoded, into a small ring in shared memory, which outlives the process. The
next start or `quark sync` finds it there and journals what the journal lacks.

    file    header, then a ring of entries
    header  magic "QKB1" · capacity u32 · tail position u64 · tail number u64
            · records not covered u64 · of them journaled since u64
    entry   length u32 · xxh32 u32 · number u64 · msgpack, padded to 8 bytes

Positions count bytes since the beginning and are taken modulo the capacity.
The writer never overwrites what the tail has not passed: where the ring is
full, records are not covered until the journal has caught up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from quark_core import settings
from quark_core.delivery.origin import Origin
from quark_core.fields import ORIGIN_FIELDS, column_types, restorers
from quark_core.json_object import JsonObject, decode_json
from quark_core.metric_rows import MetricKey, expand_row
from quark_core.names import split_name
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    StreamRecord,
)

__all__ = ["BlackBox", "open_black_box", "read_black_box"]

_log = logging.getLogger("quark")
_STUCK_S = 1.0

SIZE_BYTES = 2 * 1024 * 1024
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is shared memory that is wanted
_MAGIC = b"QKB1"
_HEADER = struct.Struct("<4sIQQ")
_TAIL = struct.Struct("<QQ")
_TAIL_AT = 8
_UNCOVERED = struct.Struct("<QQ")
_UNCOVERED_AT = 24
_RING_AT = 64
_ENTRY = struct.Struct("<IIQ")
_WRAP = 0xFFFFFFFF

_encode = msgspec.msgpack.Encoder().encode


class BlackBox:
    """The ring of one writer. Any thread puts entries in; the delivery thread releases them.

    Args:
        path: The file in shared memory; it must not exist.
        size_bytes: Its size.

    Raises:
        OSError: There is not so much shared memory.
        ImportError: This Python has no mmap.
    """

    def __init__(self, path: Path, *, size_bytes: int = SIZE_BYTES) -> None:
        import mmap  # not every Python has it

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Without this, writing to memory that is not there would kill the process.
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._memory = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.path = path
        self._capacity = size_bytes - _RING_AT
        self._capacity -= self._capacity % 8
        self._head = 0
        self._number = 0
        self._seen_head = 0
        self._entered = self._seen_entered = 0
        self._stuck_since: float | None = None
        self._tail = 0
        # Held for a copy in memory, never waited for: a signal handler may come in between.
        self._lock = threading.Lock()
        self._journaled = 0
        self.uncovered = 0
        """Items that were not put in, because the ring was full or in use."""
        _HEADER.pack_into(self._memory, 0, _MAGIC, self._capacity, 0, 0)

    def wrap_append(self, append: Callable[[Any], None]) -> Callable[[Any], None]:
        """An `append` that also puts the item in here, after it was appended.

        In this order, whatever is in the ring before a tick begins is in the
        channel too, and is drained by that tick.
        """
        put = self.put

        def append_and_put(item: Any) -> None:
            append(item)
            kind = type(item)
            if kind is MetricRecord:
                metadata = item.metadata
                data = _encode(
                    (
                        1,
                        item.sequence,
                        item.time_us,
                        item.metric_key,
                        item.value,
                        item.step,
                        item.epoch,
                        item.description,
                        None if metadata is None else metadata.encoded,
                    )
                )
            elif kind is tuple:
                sequence, time_us, step, epoch, keys, values = item
                names = [key[0] for key in keys]
                data = _encode((2, sequence, time_us, step, epoch, names, values))
            elif kind is EventRecord:
                payload = item.payload
                data = _encode(
                    (
                        3,
                        item.sequence,
                        item.time_us,
                        item.event_type,
                        item.severity,
                        item.step,
                        item.epoch,
                        item.status,
                        None if payload is None else payload.encoded,
                    )
                )
            elif kind is LifecycleRecord:
                body = None if item.data is None else item.data.encoded
                data = _encode((4, item.sequence, item.time_us, item.action, body))
            else:
                plain = [
                    value.encoded if type(value) is JsonObject else value
                    for value in msgspec.structs.astuple(item)[len(ORIGIN_FIELDS) :]
                ]
                data = _encode((5, item.KIND, plain))
            put(data)

        return append_and_put

    def put(self, data: bytes) -> None:
        """Put one entry in, if there is room."""
        if not self._lock.acquire(False):
            self._leave_out()
            return
        try:
            self._entered += 1
            length = len(data)
            size = (_ENTRY.size + length + 7) & ~7
            capacity, head = self._capacity, self._head
            place = head % capacity
            room = capacity - place
            needed = size if size <= room else room + size
            if head + needed - self._tail > capacity:
                self._leave_out()
                return
            memory = self._memory
            if size > room:
                if room >= _ENTRY.size:
                    _ENTRY.pack_into(memory, _RING_AT + place, _WRAP, 0, 0)
                head += room
                place = 0
            start = _RING_AT + place
            memory[start + 16 : start + 16 + length] = data
            # The entry counts from here on; a kill before this leaves it out.
            _ENTRY.pack_into(memory, start, length, xxhash.xxh32_intdigest(data), self._number)
            self._number += 1
            self._head = head + size
        finally:
            self._release_lock()

    def _release_lock(self) -> None:
        # Where the delivery thread took the lock for lost, it is free already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def _free_lost_lock(self) -> None:
        """Free the lock where an interrupt came between taking it and giving it back.

        Ctrl-C in a notebook may hit there, and nothing would be covered any
        more. A copy takes microseconds, so that a lock that is held through a
        second of ticks, with nobody coming in, is held by nobody.
        """
        if not self._lock.locked() or self._entered != self._seen_entered:
            self._seen_entered = self._entered
            self._stuck_since = None
            return
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= _STUCK_S:
            self._stuck_since = None
            self._release_lock()

    def mark(self) -> tuple[int, int, int]:
        """Where the ring ends now; everything before it is in the channels."""
        self._free_lost_lock()
        return self._head, self._number, self.uncovered

    def choose_wait(self, tick_s: float, elapsed_s: float) -> float:
        """How long to wait for the next tick, so that about a quarter of the ring is used.

        Args:
            tick_s: The longest wait.
            elapsed_s: Time since the last call.
        """
        used = self._head - self._seen_head
        self._seen_head = self._head
        share = self._capacity // 4
        return tick_s if used <= share else min(tick_s, elapsed_s * share / used)

    def release(self, mark: tuple[int, int, int]) -> None:
        """Let entries before a mark be overwritten: they are journaled."""
        head, number, journaled = mark
        _TAIL.pack_into(self._memory, _TAIL_AT, head, number)
        self._tail = head
        if self._journaled != journaled:
            self._journaled = journaled
            self._note_uncovered()

    def _leave_out(self) -> None:
        self.uncovered += 1
        self._note_uncovered()

    def _note_uncovered(self) -> None:
        _UNCOVERED.pack_into(self._memory, _UNCOVERED_AT, self.uncovered, self._journaled)

    def remove(self) -> None:
        """Delete the file; the ring itself goes with the last who uses it."""
        self.path.unlink(missing_ok=True)


def open_black_box(origin: Origin) -> BlackBox | None:
    """The ring of a writer, or None where there is no shared memory for it.

    QUARK_BLACK_BOX=0 does without: a call then costs about half as much.
    """
    if os.environ.get(settings.BLACK_BOX, "").strip() == "0":
        return None
    if not hasattr(os, "posix_fallocate") or not _SHARED_MEMORY.is_dir():
        return None
    try:
        return BlackBox(_SHARED_MEMORY / f"quark-{origin.run_id}-{origin.writer_id}")
    except (OSError, ImportError) as error:
        _log.debug("no black box: %s", error)
        return None


def read_black_box(path: Path, origin: Origin) -> tuple[list[StreamRecord], int]:
    """What is in a ring whose process is gone.

    Args:
        path: The ring's file; none is as good as an empty one.
        origin: Whose records they are.

    Returns:
        The records, in the order they were put in, and how many calls of the
        process since it last journaled may be in neither place: at most so
        many, since part of them may have come into the journal.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return [], 0
    records: list[StreamRecord] = []
    for entry in _read_entries(data):
        records += _to_records(entry, origin)
    return records, _count_uncovered(data)


def _count_uncovered(data: bytes) -> int:
    if len(data) < _RING_AT or data[:4] != _MAGIC:
        return 0
    uncovered, journaled = _UNCOVERED.unpack_from(data, _UNCOVERED_AT)
    return max(0, int(uncovered) - int(journaled))


def _read_entries(data: bytes) -> Iterator[Any]:
    if len(data) < _RING_AT:
        return
    magic, capacity, position, number = _HEADER.unpack_from(data)
    if magic != _MAGIC or capacity + _RING_AT > len(data) or capacity <= 0:
        return
    while True:
        place = position % capacity
        room = capacity - place
        if room < _ENTRY.size:
            position += room
            continue
        length, checksum, found = _ENTRY.unpack_from(data, _RING_AT + place)
        if length == _WRAP:
            position += room
            place = 0
            length, checksum, found = _ENTRY.unpack_from(data, _RING_AT)
        start = _RING_AT + place + _ENTRY.size
        body = data[start : start + length]
        if found != number or len(body) != length or xxhash.xxh32_intdigest(body) != checksum:
            return
        try:
            yield msgspec.msgpack.decode(body)
        except msgspec.DecodeError:
            return
        number += 1
        position += (_ENTRY.size + length + 7) & ~7


def _to_records(entry: Any, origin: Origin) -> list[Any]:
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
