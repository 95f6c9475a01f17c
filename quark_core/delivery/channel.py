"""The records of one kind on their way out of the training thread, and a bound on all of them."""

from __future__ import annotations

import itertools
import logging
import math
import os
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from quark_core.config.redaction import redact_record
from quark_core.records import MetricRecord
from quark_core.records.codec import (
    Column,
    encode_columns,
    encode_floats,
    encode_repeated,
    encode_spread,
)
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch
    from quark_core.records import StreamRecord

# What waits between `MetricsLogger` and the delivery thread.
#
# A channel of metrics holds records and rows. A row is what `log_many` leaves:
# a plain tuple, because making one takes a twentieth of the time of the records
# it stands for, which nobody may ever ask for:
#
# (sequence of the first value, time_us, step, epoch, keys, values)
#
# where `keys` is a tuple of `MetricKey`, shared between rows, and `values` a
# list of floats of the same length. The values' sequences follow each other.


class MetricKey(NamedTuple):
    """A stored metric key and its two parts."""

    metric_key: str
    namespace: str | None
    metric_name: str


MetricRow: TypeAlias = tuple[int, int, int | None, int | None, tuple[MetricKey, ...], list[float]]
MetricItem: TypeAlias = MetricRecord | MetricRow


def count_items(item: MetricItem) -> int:
    """How many records an item stands for."""
    return len(item[5]) if type(item) is tuple else 1


def expand_row(row: MetricRow, head: tuple[str | None, str, int, int]) -> list[MetricRecord]:
    """The records that a row stands for, which begin with what their origin says."""
    sequence, time_us, step, epoch, keys, values = row
    return [
        MetricRecord(*head, sequence + index, time_us, *key, value, step, epoch)
        for index, (key, value) in enumerate(zip(keys, values, strict=True))
    ]


def encode_items(items: Sequence[MetricItem]) -> tuple[int, bytes]:
    """Number of records and body of a batch of metrics."""
    names = list(column_types(MetricRecord.KIND))
    if not any(type(item) is tuple for item in items):
        columns: dict[str, list[Any]] = {
            name: [getattr(item, name) for item in items] for name in names
        }
        return len(items), encode_columns(MetricRecord.KIND, len(items), columns)
    rows: list[MetricRow] = [item for item in items if type(item) is tuple]
    if len(rows) == len(items) and all(row[4] is rows[0][4] for row in rows):
        return _encode_rows(rows)
    columns = {name: [] for name in names}
    for item in items:
        if type(item) is tuple:
            sequence, time_us, step, epoch, keys, values = item
            count = len(values)
            columns["sequence"].extend(range(sequence, sequence + count))
            columns["time_us"].extend([time_us] * count)
            columns["step"].extend([step] * count)
            columns["epoch"].extend([epoch] * count)
            columns["metric_key"].extend([key[0] for key in keys])
            columns["namespace"].extend([key[1] for key in keys])
            columns["metric_name"].extend([key[2] for key in keys])
            columns["value"].extend(values)
            columns["description"].extend([None] * count)
            columns["metadata"].extend([None] * count)
        else:
            for name in names:
                columns[name].append(getattr(item, name))
    count = len(columns["value"])
    return count, encode_columns(MetricRecord.KIND, count, columns)


def _encode_rows(rows: Sequence[MetricRow]) -> tuple[int, bytes]:
    """Rows of the very same keys, as a training loop leaves them: their names are encoded once."""
    keys: tuple[MetricKey, ...] = rows[0][4]
    width, count = len(keys), len(keys) * len(rows)
    firsts = [row[0] for row in rows]
    columns: dict[str, Any] = {}
    if count > 1 and firsts == list(range(firsts[0], firsts[0] + count, width)):
        columns["sequence"] = Column("sequence", "i", [firsts[0], 1], b"", _count_up(count))
    else:
        columns["sequence"] = [n for first in firsts for n in range(first, first + width)]
    for place, name in ((1, "time_us"), (2, "step"), (3, "epoch")):
        values: list[Any] = [row[place] for row in rows]
        if None in values:
            columns[name] = [value for value in values for _ in range(width)]
        else:
            columns[name] = encode_spread(name, values, width)
    for place, name in enumerate(MetricKey._fields):
        columns[name] = encode_repeated(name, tuple(key[place] for key in keys), len(rows))
    floats = array("d", chain.from_iterable(row[5] for row in rows))
    columns["value"] = encode_floats("value", floats)
    return count, encode_columns(MetricRecord.KIND, count, columns)


def _count_up(count: int) -> bytes:
    """Differences of so many numbers that follow each other; the first is 0."""
    return b"\x00" + b"\x01" * (count - 1)


_Record = TypeVar("_Record", bound="StreamRecord")

FRAME_BYTES = 256 * 1024
"""A frame is closed when its items weigh about as much, encoded and not compressed."""

LONG_FRAME_RECORDS = 16_384
"""A frame of a long queue is closed when it holds this many records, or more by one item's."""

# Each batch has a price of its own, to whoever stores and reads it: a queue that grew by more
# than this many frames goes into frames that are as large as everybody takes.
_LONG_QUEUE_FRAMES = 10
_LONG_FRAME_BYTES = 4 * FRAME_BYTES
_DEFAULT_FRAME_RECORDS = 100
# What a record weighs in memory, measured over metrics with step and epoch.
ITEM_BYTES = 256
_SAMPLES = 8
_LIST_ITEM_BYTES = 6
# Where a kind of record carries the one thing of it that may be large.
_OBJECT_FIELDS = {
    "metric": "metadata",
    "event": "payload",
    "lifecycle": "data",
    "sample": "columns",
}


class Channel:
    """A queue of records (for metrics: also of rows) that never makes its writer wait.

    Attributes:
        append: Hands over one record or row in which nobody has written a text.
            Takes no lock, makes no system call; safe in any thread, signal
            handler or finalizer. Where the queue is full, its oldest item
            goes, and is counted later.
        take_sequence: The next sequence number. Atomic.
        sequence: The counter itself, for who needs several at once.
        frame_records: A batch is closed when it holds this many records, or
            `LONG_FRAME_RECORDS` while many wait.
        listeners: Called by the delivery thread with each batch that it closes; they must
            neither wait nor raise.
        lost: Records that went because memory ran out.
        newest: The last item that went into a batch, or None.
    """

    __slots__ = (
        "_drained",
        "_fitted",
        "_missing",
        "_settled",
        "_was_filling",
        "append",
        "frame_records",
        "items",
        "kind",
        "listeners",
        "lost",
        "newest",
        "sequence",
        "take_sequence",
    )

    def __init__(self, kind: str, *, capacity_items: int) -> None:
        self.kind = kind
        self.items: deque[Any] = deque(maxlen=capacity_items)
        self.append: Callable[[Any], None] = self.items.append
        self.sequence = itertools.count()
        self.take_sequence = self.sequence.__next__
        self.frame_records = _DEFAULT_FRAME_RECORDS
        self.listeners: tuple[Callable[[Batch], None], ...] = ()
        self.lost = 0
        self.newest: Any = None
        self._fitted = False
        self._drained = 0
        self._missing = 0
        # How much was drained when nothing was missing; -1 where something was.
        self._settled = -1
        self._was_filling = False

    def put(self, record: _Record) -> _Record:
        """Hand over one record without the secrets that are in it; returns it as it is kept.

        What comes after this, the black box and the journal first, keeps what it gets.
        """
        redacted = redact_record(record)
        self.append(redacted)
        return redacted

    def listen(self, listener: Callable[[Batch], None]) -> None:
        """Have the delivery thread call it with each batch from now on."""
        self.listeners = (*self.listeners, listener)

    def leave(self, listener: Callable[[Batch], None]) -> None:
        """Have it called no more."""
        self.listeners = tuple(each for each in self.listeners if each != listener)

    def fit_frames(self, records: int) -> None:
        """Let batches hold as many records as the largest of the channel's writers wants."""
        self.frame_records = records if not self._fitted else max(self.frame_records, records)
        self._fitted = True

    def continue_sequence(self, other: Channel) -> None:
        """Go on counting where another channel is, before anything was put in here."""
        self.sequence = other.sequence
        self.take_sequence = other.take_sequence
        # What was drawn there comes in here, so that it must not count as missing.
        self._drained = 0

    def count_drawn(self) -> int:
        """How many sequence numbers were drawn so far."""
        # repr() is the one way to look at a counter without moving it.
        return int(repr(self.sequence)[len("count(") : -1])

    def count_records(self) -> int:
        """Records that wait in here."""
        if self.kind != "metric":
            return len(self.items)
        return sum(map(count_items, self.items.copy()))

    def weigh(self) -> int:
        """About how many bytes wait in here, by a sample."""
        waiting = len(self.items)
        if waiting == 0:
            return 0
        try:
            places = range(0, waiting, max(1, waiting // _SAMPLES))
            sample = [_weigh_item(self.kind, self.items[place]) for place in places]
        except IndexError:  # the full queue has let go of some in the meantime
            return waiting * ITEM_BYTES
        return waiting * sum(sample) // len(sample)

    def take_frame(self) -> tuple[list[Any], int]:
        """The next items that go into one batch, and how many records they are."""
        self._look_how_full()
        most_records, most_bytes = self._choose_bounds()
        items: list[Any] = []
        records = size_bytes = 0
        while records < most_records and size_bytes < most_bytes:
            try:
                item = self.items.popleft()
            except IndexError:
                break
            items.append(item)
            records += count_items(item)
            size_bytes += _measure_encoded(self.kind, item)
        self._drained += records
        if items:
            self.newest = items[-1]
        return items, records

    def _choose_bounds(self) -> tuple[int, int]:
        """How many records, and about how many bytes, go into the next frame."""
        try:
            waiting = len(self.items) * count_items(self.items[0])
        except IndexError:
            waiting = 0
        if waiting <= _LONG_QUEUE_FRAMES * self.frame_records:
            return self.frame_records, FRAME_BYTES
        return max(self.frame_records, LONG_FRAME_RECORDS), _LONG_FRAME_BYTES

    def drop_oldest(self, count: int) -> None:
        """Let the oldest items go, counted."""
        self._look_how_full()
        for _ in range(count):
            try:
                item = self.items.popleft()
            except IndexError:
                return
            records = count_items(item)
            self._drained += records
            self.lost += records

    def count_overflow(self) -> int:
        """Find records that the full queue let go; returns how many were found now.

        Every record drew a number, so what drew one and is neither drained
        nor waiting is gone. A thread that has drawn a number and not appended
        yet looks the same for a while, so a difference counts when it is
        there twice in a row, and only of a queue that was at least half full.
        """
        self._look_how_full()
        if not self._was_filling or (not self.items and self._drained == self._settled):
            return 0
        missing = max(0, self.count_drawn() - self._drained - self.count_records())
        found = missing if missing == self._missing else 0
        self._missing = missing - found
        self._drained += found
        self._settled = -1 if self._missing else self._drained
        self._was_filling = missing > 0
        self.lost += found
        return found

    def _look_how_full(self) -> None:
        """Note whether the queue may have let go of something since it was last looked at.

        Only full ones do, and only the thread that looks takes anything out:
        a frame at a time, which is far less than half.
        """
        if 2 * len(self.items) >= (self.items.maxlen or 0):
            self._was_filling = True


def _weigh_item(kind: str, item: Any) -> int:
    """About how many bytes an item takes in memory."""
    if type(item) is tuple:
        return 200 + 60 * len(item[5])
    return ITEM_BYTES + 12 * _measure_objects(kind, item)


def _measure_encoded(kind: str, item: Any) -> int:
    """About how many bytes an item takes in a frame that is not compressed."""
    if type(item) is tuple:
        return 16 + 20 * len(item[5])
    return 64 + _measure_objects(kind, item)


def _measure_objects(kind: str, item: Any) -> int:
    """Length of the JSON object that an item carries, and about that of its lists and texts."""
    value = getattr(item, _OBJECT_FIELDS.get(kind, "metadata"), None)
    size = 0 if value is None else len(value.encoded)
    if kind == "sample":
        size += len(item.prompt or "") + len(item.completion or "")
    if kind == "batch":
        size += _LIST_ITEM_BYTES * len(item.sample_ids or ())
        size += _LIST_ITEM_BYTES * len(item.sequence_lengths or ())
        size += 0 if item.class_counts is None else len(item.class_counts.encoded)
    return size


def encode_frame_body(kind: str, items: list[Any]) -> tuple[int, bytes]:
    """Number of records and body of a batch of a channel's items."""
    if kind == "metric":
        return encode_items(items)
    columns = {name: [getattr(item, name) for item in items] for name in column_types(kind)}
    return len(items), encode_columns(kind, len(items), columns)


_log = logging.getLogger("quark")

_LEAST_CAPACITY_BYTES = 64 * 1024 * 1024
_MOST_CAPACITY_BYTES = 1024 * 1024 * 1024

_DROP_ORDER = (
    "console",
    "aggregate",
    "parameter_distribution",
    "layer",
    "parameter",
    "telemetry",
    "batch",
    "sample",
    "artifact",
    "metric",
    "event",
    "lifecycle",
)
"""Which kinds go first where memory runs out: what sums up the network before what users say."""


class MemoryBound:
    """Lets the oldest records of the lowest kinds go where the channels weigh too much.

    Args:
        channels: The channels, by kind.
        capacity_bytes: What they may weigh together, about.
        on_gap: Told of the records, by kind, that went.
        on_excess: Called before any are let go.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        capacity_bytes: int,
        on_gap: Callable[[Mapping[str, int]], None] | None,
        on_excess: Callable[[], None] | None = None,
    ) -> None:
        self._channels = channels
        self._capacity_bytes = capacity_bytes
        self._on_gap = on_gap
        self._on_excess = on_excess
        self._told: dict[str, int] = dict.fromkeys(channels, 0)

    def bound(self, *, may_tell: bool) -> None:
        """Drop what is too much, and tell of it once there is room to tell."""
        self._drop_excess()
        if not may_tell or self._on_gap is None:
            return
        gaps = {
            kind: channel.lost - self._told[kind]
            for kind, channel in self._channels.items()
            if channel.lost > self._told[kind]
        }
        if gaps:
            for kind, count in gaps.items():
                self._told[kind] += count
            _log.warning(
                "records are logged faster than they can be written, and the %d MB for them are "
                "full. These records were dropped: %s. In a loop that logs without pauses, call "
                "session.flush('journaled') regularly",
                self._capacity_bytes // 1_000_000,
                gaps,
            )
            self._on_gap(gaps)

    def _drop_excess(self) -> None:
        weights = {kind: channel.weigh() for kind, channel in self._channels.items()}
        excess = sum(weights.values()) - self._capacity_bytes
        if excess > 0 and self._on_excess is not None:
            self._on_excess()
        for kind in _DROP_ORDER:
            channel = self._channels.get(kind)
            if channel is None:
                continue
            waiting = len(channel.items)
            # What has come since it was weighed weighs nothing.
            if excess > 0 and waiting and weights[kind]:
                each = weights[kind] / waiting
                dropped = min(waiting, math.ceil(excess / each))
                channel.drop_oldest(dropped)
                excess -= int(dropped * each)
            channel.count_overflow()


def choose_capacity() -> int:
    """Bytes that may wait for delivery: a sixteenth of the memory, from 64 MiB to 1 GiB."""
    if not hasattr(os, "sysconf"):  # Windows has none
        return _LEAST_CAPACITY_BYTES
    try:
        memory_bytes: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _LEAST_CAPACITY_BYTES
    return max(_LEAST_CAPACITY_BYTES, min(_MOST_CAPACITY_BYTES, memory_bytes // 16))
