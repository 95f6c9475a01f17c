"""A crash buffer in shared memory: what is accepted and not yet in the journal."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import stat
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from quark_core.backends.contract import Batch
from quark_core.config import settings
from quark_core.delivery.channel import MetricRow, count_items
from quark_core.delivery.journal import Journal
from quark_core.delivery.segments import Origin
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import ORIGIN_FIELDS

# Beyond this many, the oldest gap is only counted: nothing of it can turn up any more.
_MOST_SPANS = 64


class Spans:
    """Sequence numbers that are accounted for, as ranges.

    Attributes:
        ranges: Sorted and apart from each other, each `[first, after the last]`.
        forgotten: Numbers of gaps that were closed because there were too many.
    """

    __slots__ = ("forgotten", "ranges")

    def __init__(self, ranges: Iterable[Iterable[int]] = (), forgotten: int = 0) -> None:
        self.ranges = [list(numbers) for numbers in ranges]
        self.forgotten = forgotten

    def add(self, start: int, stop: int) -> None:
        """Account for the numbers from `start` up to before `stop`."""
        ranges = self.ranges
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = stop
            return
        place = bisect_right(ranges, start, key=_find_start)
        if place and ranges[place - 1][1] >= start:
            place -= 1
            start = ranges[place][0]
            stop = max(stop, ranges[place][1])
        after = place
        while after < len(ranges) and ranges[after][0] <= stop:
            stop = max(stop, ranges[after][1])
            after += 1
        ranges[place:after] = [[start, stop]]
        if len(ranges) > _MOST_SPANS:
            self.forgotten += ranges[1][0] - ranges[0][1]
            ranges[:2] = [[ranges[0][0], ranges[1][1]]]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.ranges, number, key=_find_start)
        return place > 0 and number < self.ranges[place - 1][1]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all numbers from `start` up to before `stop` are accounted for."""
        place = bisect_right(self.ranges, start, key=_find_start)
        return place > 0 and stop <= self.ranges[place - 1][1]

    @property
    def stop(self) -> int:
        """The number after the highest."""
        return self.ranges[-1][1] if self.ranges else 0

    def count_missing(self) -> int:
        """How many numbers below the highest are not accounted for, the forgotten ones too."""
        missing = self.forgotten
        end = 0
        for start, stop in self.ranges:
            missing += start - end
            end = stop
        return missing


class StreamAccounts:
    """The next batch's number, and which records of a stream are in a batch already.

    Belongs to the delivery thread, which saves it to shared memory before a
    lane sees a batch.

    Attributes:
        next_number: Number of the batch that is made next.
        spans: By kind, the sequence numbers of records that are in a batch.
        told: By kind, how many records went and were told as gone.
        exposed: Records of batches that lanes may have and that neither the
            journal nor shared memory had room for; 0 but where both fail.
    """

    __slots__ = ("exposed", "next_number", "spans", "told")

    def __init__(self) -> None:
        self.next_number = 0
        self.spans: dict[str, Spans] = {}
        self.told: dict[str, int] = {}
        self.exposed = 0

    def add(self, kind: str, spans: Iterable[tuple[int, int]]) -> None:
        """Account for records that are in a batch now."""
        known = self.spans.get(kind)
        if known is None:
            known = self.spans[kind] = Spans()
        for start, stop in spans:
            known.add(start, stop)

    def add_batch(self, batch: Batch) -> None:
        """Account for a batch as it was journaled."""
        self.next_number = max(self.next_number, batch.number + 1)
        sequences = batch.decoded.to_list("sequence")
        self.add(batch.kind, list_spans((number, number + 1) for number in sequences))

    def tell(self, gaps: Mapping[str, int]) -> None:
        """Note that records are gone and that the run itself tells of it."""
        for kind, count in gaps.items():
            self.told[kind] = self.told.get(kind, 0) + count

    def knows(self, kind: str, sequence: int) -> bool:
        """Whether a record is in a batch already."""
        spans = self.spans.get(kind)
        return spans is not None and sequence in spans

    def covers(self, kind: str, start: int, stop: int) -> bool:
        """Whether all records of a range are in batches already."""
        spans = self.spans.get(kind)
        return spans is not None and spans.covers(start, stop)

    def copy(self) -> StreamAccounts:
        """Accounts of their own that say the same."""
        return StreamAccounts.decode(self.encode())

    def count_untold(self) -> int:
        """How many records went below the highest numbers that nobody has told of."""
        return sum(
            max(0, spans.count_missing() - self.told.get(kind, 0))
            for kind, spans in self.spans.items()
        )

    def encode(self) -> bytes:
        """As bytes; `decode` reads them."""
        spans = {kind: (known.ranges, known.forgotten) for kind, known in self.spans.items()}
        return msgspec.msgpack.encode((self.next_number, spans, self.told, self.exposed))

    @classmethod
    def decode(cls, data: bytes) -> StreamAccounts:
        """What `encode` has written.

        Raises:
            msgspec.DecodeError: It is something else.
        """
        form: Any = tuple[int, dict[str, tuple[list[list[int]], int]], dict[str, int], int]
        accounts = cls()
        accounts.next_number, spans, accounts.told, accounts.exposed = msgspec.msgpack.decode(
            data, type=form
        )
        accounts.spans = {kind: Spans(ranges, count) for kind, (ranges, count) in spans.items()}
        return accounts


def list_spans(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of numbers, with those joined that follow each other."""
    spans: list[tuple[int, int]] = []
    first = after = -1
    for start, stop in pairs:
        if start == after:
            after = stop
            continue
        if after >= 0:
            spans.append((first, after))
        first, after = start, stop
    if after >= 0:
        spans.append((first, after))
    return spans


def list_item_spans(items: list[Any]) -> list[tuple[int, int]]:
    """The sequence numbers of a channel's items, which may be rows."""
    return list_spans(map(_find_span, items))


def _find_span(item: Any) -> tuple[int, int]:
    if type(item) is tuple:
        row: MetricRow = item
        return row[0], row[0] + count_items(row)
    return item.sequence, item.sequence + 1


def _find_start(numbers: list[int]) -> int:
    return numbers[0]


# A black box against SIGKILL: what is accepted and not yet journaled, in shared memory.
#
# The delivery thread journals every 50 ms or so, and cannot while the journal's
# disk fails; a process that is killed would lose what `log()` returned for
# since. So each record also goes, encoded, into shared memory, which outlives
# the process, and so does each batch that the journal does not take. The next
# start or `quark sync` finds them there and journals what the journal lacks.
#
# A box is a folder in shared memory:
#
# head            magic "QKB2", then what the writers note of themselves, and two places
# for the accounts (`StreamAccounts`), written in turn
# NNNN.records    a segment: one entry for each record or row, in the order they came
# frames/*.qj     batches that the journal could not take, as the journal would hold them
# journal.json    the journal's manifest, for a journal that never had one
#
# entry           length u32 · xxh32 u32 · msgpack
#
# An entry is added by one call into C, which nothing interrupts: no lock is
# taken, whoever logs from which thread, signal handler or finalizer. When a
# segment is full, the next spare one is taken. The delivery thread makes spare
# ones ahead of need and takes those back whose records are journaled. Where it
# does not keep up, the thread that logs makes one, which is the one system call
# it may ever make. The box grows up to the bound at which records are dropped
# anyway, and leaves half of the machine's shared memory to others.
#
# An entry beyond the newest one of a segment that is used again is an old one:
# its record is in the accounts, so that nobody takes it for a new one.

_log = logging.getLogger("quark")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is shared memory that is wanted
SEGMENT_BYTES = 1024 * 1024
_LARGEST_SEGMENT_BYTES = 64 * 1024 * 1024
# A larger segment takes milliseconds to make, which is too long for a thread that logs.
_LARGEST_HURRIED_BYTES = 8 * 1024 * 1024
_FRAMES_SEGMENT_BYTES = 4 * 1024 * 1024

MAGIC = b"QKB2"
# Uncovered records, of them journaled since; whether a queue was ever near its bound.
NOTES = struct.Struct("<QQB")
NOTES_AT = 8
_WORD_BYTES = 8
ACCOUNTS_AT = (64, 64 + 32 * 1024)
ACCOUNTS_BYTES = 32 * 1024
ACCOUNTS_HEAD = struct.Struct("<QII")
HEAD_BYTES = 64 + 2 * ACCOUNTS_BYTES
ENTRY = struct.Struct("<II")
HEAD_NAME = "head"
RECORDS_SUFFIX = ".records"
FRAMES_NAME = "frames"
_PLAIN_IDS = re.compile(r"[A-Za-z0-9._-]{1,128}/[A-Za-z0-9_]{1,64}")

_encode = msgspec.msgpack.Encoder().encode
_pack_entry = ENTRY.pack
_checksum = xxhash.xxh32_intdigest

BoxMark = tuple[list[tuple["_Segment", int]], int]


class _Segment:
    """A file in shared memory that entries are added to."""

    __slots__ = ("memory", "path", "size_bytes", "spare")

    def __init__(self, path: Path, size_bytes: int) -> None:
        import mmap  # not every Python has it

        if not hasattr(os, "posix_fallocate"):
            # Without it, writing to memory that is not there would kill the process.
            raise OSError(errno.ENOSYS, "this system has no shared memory")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            self.memory = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.path = path
        self.size_bytes = size_bytes
        self.spare = True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.memory.close()


class BlackBox:
    """The black box of one writer. Any thread puts entries in; the rest is the delivery thread's.

    Args:
        path: The folder to make in shared memory; it must not exist.
        origin: Whose it is.
        capacity_bytes: What its segments may take together.
        segment_bytes: What the smallest of them takes.

    Raises:
        OSError: There is not so much shared memory.
        ImportError: This Python has no mmap.
    """

    def __init__(
        self,
        path: Path,
        origin: Origin,
        *,
        capacity_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        path.mkdir(mode=0o700)
        self.path = path
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._numbers = itertools.count()
        self._segments: list[_Segment] = []
        self._spares: deque[_Segment] = deque()
        self._recycled_bytes = 0
        self._seen_bytes = 0
        self._uncovered = itertools.count()
        self._journaled_uncovered = 0
        self._filling = 0
        self._generation = 0
        self._closed = False
        self._fullness: list[Callable[[], bool]] = []
        try:
            self._head = _Segment(path / HEAD_NAME, HEAD_BYTES).memory
            self._head[: len(MAGIC)] = MAGIC
            first = self._make_segment(segment_bytes)
            self._spares.append(self._make_segment(segment_bytes))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        first.spare = False
        # Its `__self__` says which segment is the current one: one attribute, set at once.
        self._write: Any = first.memory.write
        # Never synced: it lies in memory.
        self._frames = Journal(
            path / FRAMES_NAME, origin, segment_bytes=_FRAMES_SEGMENT_BYTES, prepare=None
        )

    # --- threads that log ---

    def wrap_append(
        self, append: Callable[[Any], None], is_filling: Callable[[], bool] | None = None
    ) -> Callable[[Any], None]:
        """An `append` that also puts the item in here, after it was appended.

        In this order, whatever is in the box before a tick begins is in the
        channel too, and is drained by that tick.

        Args:
            append: Appends to a channel.
            is_filling: Whether the channel may be about to let go of records.
        """
        box = self
        if is_filling is not None:
            self._fullness.append(is_filling)

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
            else:
                data = _encode_record(item)
            entry = _pack_entry(len(data), _checksum(data)) + data
            try:
                # Between looking this up and calling it no other thread comes in.
                box._write(entry)
            except ValueError:
                box._put_elsewhere(entry, len(item[5]) if kind is tuple else 1)

        return append_and_put

    def _put_elsewhere(self, entry: bytes, records: int) -> None:
        """Put an entry into another segment, since the current one is full."""
        self._look_whether_filling()
        while (segment := self._take_spare(len(entry))) is not None:
            try:
                segment.memory.write(entry)
            except ValueError:
                continue  # larger than this one, or another thread was quicker
            self._write = segment.memory.write
            return
        for _ in range(records):
            next(self._uncovered)
        self._note()

    def _take_spare(self, needed_bytes: int) -> _Segment | None:
        try:
            segment = self._spares.popleft()
        except IndexError:
            if self._closed:
                return None
            size_bytes = min(_LARGEST_HURRIED_BYTES, self._measure() // 8)
            try:
                segment = self._make_segment(max(self._segment_bytes, size_bytes, needed_bytes))
            except (OSError, ValueError):
                return None
        segment.spare = False
        return segment

    def _look_whether_filling(self) -> None:
        if not self._filling and any(is_filling() for is_filling in self._fullness):
            self.note_filling()

    def note_filling(self) -> None:
        """Note that records may have to go: what is missing later was not just on its way."""
        if not self._filling:
            self._filling = 1
            self._note()

    def _make_segment(self, size_bytes: int) -> _Segment:
        """Make a segment that is not in use yet; callable from any thread.

        Raises:
            OSError: There is no room for it.
        """
        if self._measure() + size_bytes > max(self._capacity_bytes, 2 * self._segment_bytes):
            raise OSError(errno.ENOSPC, "the crash buffer has reached its maximum size")
        if self._segments:
            _leave_room(self.path, size_bytes)
        segment = _Segment(
            self.path / f"{next(self._numbers):06d}{RECORDS_SUFFIX}",
            size_bytes,
        )
        self._segments.append(segment)
        return segment

    def _measure(self) -> int:
        """What the segments take together."""
        return sum(segment.size_bytes for segment in self._segments)

    # --- the delivery thread ---

    @property
    def uncovered(self) -> int:
        """Records that were not put in, because there was no room."""
        # repr() is the one way to look at a counter without moving it.
        return int(repr(self._uncovered)[len("count(") : -1])

    def mark(self) -> BoxMark:
        """Where the box ends now; everything before it is in the channels."""
        self._look_whether_filling()
        places = [(s, s.memory.tell()) for s in self._segments if not s.spare]
        return places, self.uncovered

    def release(self, mark: BoxMark) -> None:
        """Let entries before a mark be overwritten: they are journaled, and the accounts saved."""
        places, uncovered = mark
        for segment, place in places:
            memory = segment.memory
            # What came meanwhile from a thread that was late stays until the next mark.
            if memory is not self._write.__self__ and memory.tell() == place:
                self._recycled_bytes += place
                memory.seek(0)
                segment.spare = True
                self._spares.append(segment)
        if self._journaled_uncovered != uncovered:
            self._journaled_uncovered = uncovered
            self._note()
        self.provide()

    def provide(self) -> None:
        """See that there are spare segments ahead of need, and not many more than that."""
        spare_bytes = sum(segment.size_bytes for segment in list(self._spares))
        used_bytes = self._measure() - spare_bytes
        wanted_bytes = max(self._segment_bytes, min(_LARGEST_SEGMENT_BYTES, used_bytes))
        if spare_bytes < wanted_bytes:
            with contextlib.suppress(OSError, ValueError):
                self._spares.append(self._make_segment(wanted_bytes - spare_bytes))
        while spare_bytes > 2 * wanted_bytes:
            try:
                segment = self._spares.pop()
            except IndexError:
                return
            self._segments.remove(segment)
            spare_bytes -= segment.size_bytes
            segment.remove()

    def choose_wait(self, tick_s: float, elapsed_s: float) -> float:
        """How long to wait for the next tick, so that about half of a small segment is used.

        Args:
            tick_s: The longest wait.
            elapsed_s: Time since the last call.
        """
        total = self._recycled_bytes + sum(
            s.memory.tell() for s in list(self._segments) if not s.spare
        )
        used, self._seen_bytes = total - self._seen_bytes, total
        share = self._segment_bytes // 2
        return tick_s if used <= share else min(tick_s, elapsed_s * share / used)

    def save_accounts(self, accounts: StreamAccounts) -> None:
        """Note which records are in batches; before a lane sees them."""
        data = accounts.encode()
        if len(data) > ACCOUNTS_BYTES - ACCOUNTS_HEAD.size:
            return  # too many kinds with too many gaps; the last ones were good, and the journal is
        self._generation += 1
        place = ACCOUNTS_AT[self._generation % 2]
        start = place + ACCOUNTS_HEAD.size
        self._head[start : start + len(data)] = data
        checksum = xxhash.xxh32_intdigest(data, self._generation & 0xFFFFFFFF)
        ACCOUNTS_HEAD.pack_into(self._head, place, self._generation, len(data), checksum)

    def keep_frames(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Keep batches that the journal does not take.

        Args:
            frames: Number of each batch, and its frame.

        Raises:
            OSError: There is no room for them.
        """
        size_bytes = sum(len(frame) for _, frame in frames)
        if self._frames.size_bytes + size_bytes > self._capacity_bytes:
            raise OSError(errno.ENOSPC, "the crash buffer has reached its maximum size")
        _leave_room(self.path, size_bytes)
        self._frames.append_frames(frames)

    def release_frames(self, number: int) -> None:
        """Let batches before a number go: every lane has passed them."""
        self._frames.release(number)

    def drop_frames(self) -> None:
        """Let all batches go: the journal has them."""
        if self._frames.size_bytes:
            self._frames.discard()

    def remove(self) -> None:
        """Delete the box; the memory itself goes with the last who uses it."""
        self._closed = True
        remove_black_box(self.path)

    def _note(self) -> None:
        while True:
            uncovered = self.uncovered
            data = NOTES.pack(uncovered, self._journaled_uncovered, self._filling)
            # One store each, so that a kill in between leaves the old number or the new one:
            # `pack_into` makes all of it zero first.
            for start in range(0, NOTES.size, _WORD_BYTES):
                part = data[start : start + _WORD_BYTES]
                self._head[NOTES_AT + start : NOTES_AT + start + len(part)] = part
            if self.uncovered == uncovered:
                return


def _encode_record(item: Any) -> bytes:
    """A record that is no metric."""
    kind = type(item)
    if kind is EventRecord:
        payload = item.payload
        return _encode(
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
    if kind is LifecycleRecord:
        body = None if item.data is None else item.data.encoded
        return _encode((4, item.sequence, item.time_us, item.action, body))
    plain = [
        value.encoded if type(value) is JsonObject else value
        for value in msgspec.structs.astuple(item)[len(ORIGIN_FIELDS) :]
    ]
    return _encode((5, item.KIND, plain))


def _leave_room(path: Path, size_bytes: int) -> None:
    """Leave half of the shared memory to others, such as the workers of a data loader.

    Raises:
        OSError: So much is not to be had.
    """
    if not hasattr(os, "statvfs"):
        raise OSError(errno.ENOSYS, "this system does not report how much shared memory is free")
    room = os.statvfs(path)
    if room.f_blocks and (room.f_bavail * room.f_frsize - size_bytes) * 2 < (
        room.f_blocks * room.f_frsize
    ):
        raise OSError(errno.ENOSPC, "half of the shared memory is in use")


def find_box_path(run_id: str | None, writer_id: str) -> Path | None:
    """Where the black box of a writer lies; None for ids that no box is named by.

    The one way from a journal to a box: what a journal says of a file is not believed.
    """
    if _PLAIN_IDS.fullmatch(f"{run_id}/{writer_id}") is None:
        return None
    return SHARED_MEMORY / f"quark-{run_id}-{writer_id}"


def is_own_box(path: Path) -> bool:
    """Whether a path is a folder of this user, which may be read as a box and deleted."""
    if not hasattr(os, "geteuid"):  # Windows has neither owners of that kind nor boxes
        return False
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def open_black_box(origin: Origin, capacity_bytes: int) -> BlackBox | None:
    """The black box of a writer, or None where there is no shared memory for it.

    QUARK_BLACK_BOX=0 does without: a call then costs about half as much.
    """
    if os.environ.get(settings.BLACK_BOX, "").strip() == "0":
        return None
    if not hasattr(os, "posix_fallocate") or not SHARED_MEMORY.is_dir():
        return None
    path = find_box_path(origin.run_id, origin.writer_id)
    if path is None:
        return None
    try:
        return BlackBox(path, origin, capacity_bytes=capacity_bytes)
    except (OSError, ImportError) as error:
        _log.debug("no crash buffer: %s", error)
        return None


def remove_black_box(path: Path) -> None:
    """Delete a black box; none is as good."""
    shutil.rmtree(path, ignore_errors=True)
