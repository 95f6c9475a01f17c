"""One process's stream into one run: channels, the delivery thread and the lanes."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quark_core import metric_rows
from quark_core.backend import Batch
from quark_core.codec import column_types, encode_columns
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.lane import Lane
from quark_core.delivery.report import DeliveryReport, LaneReport
from quark_core.errors import SessionStoreError
from quark_core.records import RECORD_TYPES

__all__ = ["Channel", "Origin", "RunStream", "make_writer_id"]

_log = logging.getLogger("quark")

TICK_S = 0.02
HEARTBEAT_S = 10.0
_DEFAULT_FRAME_RECORDS = 100

# Lifecycle comes last in a tick: a status must not overtake what was logged before it.
_KIND_ORDER = sorted(RECORD_TYPES, key=lambda kind: kind == "lifecycle")


def make_writer_id() -> str:
    """A new id for one process's stream; it sorts by nothing and is never used twice."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one stream have in common."""

    run_id: str | None
    writer_id: str = field(default_factory=make_writer_id)
    attempt: int = 0
    rank: int = 0


class Channel:
    """The records of one kind on their way out of the training thread.

    Attributes:
        append: Hands over one record (for metrics: or one row). Takes no
            lock, makes no system call; safe in any thread, signal handler or
            finalizer.
        take_sequence: The next sequence number. Atomic.
        sequence: The counter itself, for who needs several at once.
        frame_records: A batch is closed when it holds this many records.
    """

    __slots__ = ("_fitted", "append", "frame_records", "items", "kind", "sequence", "take_sequence")

    def __init__(self, kind: str, *, keep: bool) -> None:
        self.kind = kind
        self.items: deque[Any] = deque(maxlen=None if keep else 0)
        self.append = self.items.append
        self.sequence = itertools.count()
        self.take_sequence = self.sequence.__next__
        self.frame_records = _DEFAULT_FRAME_RECORDS
        self._fitted = False

    def fit_frames(self, records: int) -> None:
        """Let batches hold as many records as the largest of the channel's writers wants."""
        self.frame_records = records if not self._fitted else max(self.frame_records, records)
        self._fitted = True

    def count_records(self) -> int:
        """Records that wait in here."""
        if self.kind != "metric":
            return len(self.items)
        return sum(map(metric_rows.count_items, list(self.items)))


class RunStream:
    """Moves records from the channels into batches and hands them to the lanes.

    The delivery thread alone numbers batches; every tick it closes one frame
    per kind, or several where a frame is full. Without lanes nothing is kept
    and no thread is started: that is the stream of a rank that only listens.

    Args:
        origin: What all records have in common.
        log: The log that the lanes read.
        lanes: One lane per backend, the primary's first where there is one.
        heartbeat: Called by the delivery thread every 10 s.
    """

    def __init__(
        self,
        origin: Origin,
        log: BatchLog | None = None,
        lanes: Sequence[Lane] = (),
        *,
        heartbeat: Callable[[], None] | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self.origin = origin
        self._log = log or BatchLog()
        self._lanes = tuple(lanes)
        self._primary = next((lane for lane in lanes if lane.primary), None)
        self._channels = {kind: Channel(kind, keep=bool(lanes)) for kind in _KIND_ORDER}
        self._heartbeat = heartbeat
        self._tick_s = tick_s
        self._numbers = itertools.count()
        self._wake = threading.Event()
        self._ticked = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._draining = 0
        self._lost = 0
        self._closing = False
        self._ended = False
        self._closed_report: DeliveryReport | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the lanes and the delivery thread; nothing where there are no lanes."""
        if not self._lanes:
            return
        for lane in self._lanes:
            lane.start()
        self._thread = threading.Thread(target=self._run, name="quark-delivery", daemon=True)
        self._thread.start()

    def channel(self, kind: str) -> Channel:
        """The channel of a kind of record."""
        return self._channels[kind]

    @property
    def active(self) -> bool:
        """Whether anything is kept at all."""
        return bool(self._lanes)

    def hand_over(self, timeout_s: float) -> int | None:
        """Wait until everything accepted so far is on its way to the lanes.

        Returns the position in the log after it, or None where that took longer.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return self._log.end
        with self._ticked:
            self._asked += 1
            ticket = self._asked
            self._wake.set()
            answered = self._ticked.wait_for(
                lambda: self._answered >= ticket or self._ended, timeout_s
            )
            if not answered:
                return None
        return self._log.end

    def flush(self, timeout_s: float) -> None:
        """Wait until the primary has acknowledged everything accepted before this call.

        Raises:
            SessionStoreError: It did not within `timeout_s`; the records stay
                queued and are delivered later.
        """
        if self._primary is None or self._closed_report is not None:
            return
        deadline = time.monotonic() + timeout_s
        position = self.hand_over(timeout_s)
        self._primary.nudge()
        remaining_s = max(0.0, deadline - time.monotonic())
        if position is None or not self._primary.wait_passed(position, remaining_s):
            reason = self._primary.last_error
            raise SessionStoreError(
                f"the primary store ({self._primary.name}) did not acknowledge within "
                f"{timeout_s:g} s{f'; last error: {reason}' if reason else ''}. "
                "Nothing is lost: the records wait and are delivered when it answers."
            )

    def close(self, timeout_s: float) -> DeliveryReport:
        """Deliver what is left within a time, close the lanes, and say what became of it all.

        A second call returns the first one's report.
        """
        if self._closed_report is not None:
            return self._closed_report
        deadline = time.monotonic() + timeout_s
        self.hand_over(timeout_s)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            lane.close(deadline)
        for lane in self._lanes:
            lane.join(deadline - time.monotonic())
        self._closed_report = self.report()
        return self._closed_report

    def report(self) -> DeliveryReport:
        """What each lane has delivered so far, and what not."""
        if self._closed_report is not None:
            return self._closed_report
        pending = self._draining + sum(c.count_records() for c in self._channels.values())
        return DeliveryReport(tuple(lane.report(pending, self._lost) for lane in self._lanes))

    def report_primary(self) -> LaneReport | None:
        """The primary's lane, or None where there is none."""
        return None if self._primary is None else self._primary.report()

    def _run(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_S
        while not self._closing:
            self._wake.wait(self._tick_s)
            self._wake.clear()
            asked = self._asked
            if self._heartbeat is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._heartbeat()
            for channel in self._channels.values():
                if channel.items:
                    self._drain(channel)
            if self._answered < asked:
                with self._ticked:
                    self._answered = asked
                    self._ticked.notify_all()
        with self._ticked:
            # Whoever still waits for a tick would wait in vain.
            self._ended = True
            self._ticked.notify_all()

    def _drain(self, channel: Channel) -> None:
        take = channel.items.popleft
        remaining = len(channel.items)
        while remaining:
            items: list[Any] = []
            records = 0
            while remaining and records < channel.frame_records:
                item = take()
                items.append(item)
                records += metric_rows.count_items(item)
                remaining -= 1
            self._draining = records
            try:
                count, body = _encode(channel.kind, items)
            except Exception:  # noqa: BLE001
                # Records are validated before they come here, so this is a bug of ours;
                # it must cost this frame only, and be seen.
                _log.exception("%d %s records could not be encoded", records, channel.kind)
                self._draining = 0
                self._lost += records
                continue
            self._log.append(
                Batch(
                    self.origin.run_id or "",
                    self.origin.writer_id,
                    self.origin.attempt,
                    self.origin.rank,
                    next(self._numbers),
                    channel.kind,
                    count,
                    body,
                )
            )
            self._draining = 0


def _encode(kind: str, items: list[Any]) -> tuple[int, bytes]:
    if kind == "metric":
        return metric_rows.encode_items(items)
    columns = {name: [getattr(item, name) for item in items] for name in column_types(kind)}
    return len(items), encode_columns(kind, len(items), columns)
