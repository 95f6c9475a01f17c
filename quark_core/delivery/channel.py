"""The records of one kind on their way out of the training thread."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quark_core import metric_rows
from quark_core.codec import encode_columns
from quark_core.fields import column_types

if TYPE_CHECKING:
    from quark_core.backend import Batch

__all__ = ["FRAME_BYTES", "ITEM_BYTES", "Channel", "encode_frame_body"]

FRAME_BYTES = 256 * 1024
"""A frame is closed when its items weigh about as much, encoded and not compressed."""

_DEFAULT_FRAME_RECORDS = 100
# What a record weighs in memory, measured over metrics with step and epoch.
ITEM_BYTES = 256
_SAMPLES = 8
_LIST_ITEM_BYTES = 6
# Where a kind of record carries the one thing of it that may be large.
_OBJECT_FIELDS = {"metric": "metadata", "event": "payload", "lifecycle": "data"}


class Channel:
    """A queue of records (for metrics: also of rows) that never makes its writer wait.

    Attributes:
        append: Hands over one record or row. Takes no lock, makes no system
            call; safe in any thread, signal handler or finalizer. Where the
            queue is full, its oldest item goes, and is counted later.
        take_sequence: The next sequence number. Atomic.
        sequence: The counter itself, for who needs several at once.
        frame_records: A batch is closed when it holds this many records.
        on_batch: Called by the delivery thread with each batch that it closes, where it
            is set; it must neither wait nor raise.
        lost: Records that went because memory ran out.
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
        "lost",
        "on_batch",
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
        self.on_batch: Callable[[Batch], None] | None = None
        self.lost = 0
        self._fitted = False
        self._drained = 0
        self._missing = 0
        # How much was drained when nothing was missing; -1 where something was.
        self._settled = -1
        self._was_filling = False

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

    def count_records(self) -> int:
        """Records that wait in here."""
        if self.kind != "metric":
            return len(self.items)
        return sum(map(metric_rows.count_items, self.items.copy()))

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
        items: list[Any] = []
        records = size_bytes = 0
        while records < self.frame_records and size_bytes < FRAME_BYTES:
            try:
                item = self.items.popleft()
            except IndexError:
                break
            items.append(item)
            records += metric_rows.count_items(item)
            size_bytes += _measure_encoded(self.kind, item)
        self._drained += records
        return items, records

    def drop_oldest(self, count: int) -> None:
        """Let the oldest items go, counted."""
        self._look_how_full()
        for _ in range(count):
            try:
                item = self.items.popleft()
            except IndexError:
                return
            records = metric_rows.count_items(item)
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
        # repr() is the one way to look at a counter without moving it.
        drawn = int(repr(self.sequence)[len("count(") : -1])
        missing = max(0, drawn - self._drained - self.count_records())
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
    """Length of the JSON object that an item carries, and about that of its lists."""
    value = getattr(item, _OBJECT_FIELDS.get(kind, "metadata"), None)
    size = 0 if value is None else len(value.encoded)
    if kind == "batch":
        size += _LIST_ITEM_BYTES * len(item.sample_ids or ())
        size += _LIST_ITEM_BYTES * len(item.sequence_lengths or ())
        size += 0 if item.class_counts is None else len(item.class_counts.encoded)
    return size


def encode_frame_body(kind: str, items: list[Any]) -> tuple[int, bytes]:
    """Number of records and body of a batch of a channel's items."""
    if kind == "metric":
        return metric_rows.encode_items(items)
    columns = {name: [getattr(item, name) for item in items] for name in column_types(kind)}
    return len(items), encode_columns(kind, len(items), columns)
