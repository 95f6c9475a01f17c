"""Aggregates of one run in this process: values come in by the batch, records leave each 10 s.

A thread that measures appends to a queue, which is one atomic call. Whoever finds the queue long
folds it into a sum, the delivery thread does so once a second, and nobody waits for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import AggregateRecord, KeptAs
from quark_core.records.tallies import Tally
from quark_core.runs.step_counters import find_newest_step

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun
    from quark_core.writers.device_timing import PendingSteps

_log = logging.getLogger("quark")

RING_VALUES = 50
_WINDOW_S = 10.0
# Names that a script makes up as it goes must not fill the memory.
_MOST_KEYS = 1_000
LONG_QUEUE = 512
"""A queue of so many is folded by the thread that finds it."""
# Where nobody folds for long, which takes a thread that was stopped in the middle of it.
_LONGEST_QUEUE = 65_536
_SETTLE_S = 0.5
# A signal handler may have stopped the thread that folds.
_LOCK_S = 0.25


class Gathering:
    """What one key has measured since its last record.

    Attributes:
        items: What came and is not in a sum yet. Of a timer the seconds of a block, or None of
            one that was left by an exception; of a ring (value, step); else the value.
        keep: How it is kept.
        step: The newest step that was given with a value, or None.
        first_step: The step at which the last record was made, or None.
        is_kept: Whether what comes goes anywhere.
        clocks: What the device's blocks of this window were measured by.
    """

    __slots__ = (
        "_emptied", "_failed", "_first", "_last", "_lock", "_ring", "_since_s", "_started_us",
        "_tally", "_was_first", "clocks", "first_step", "is_kept", "items", "keep", "key", "step",
    )  # fmt: skip

    def __init__(self, key: str, keep: KeptAs, *, is_kept: bool = True) -> None:
        self.key = key
        self.keep = keep
        self.is_kept = is_kept
        self.items: deque[Any] = deque(maxlen=_LONGEST_QUEUE if is_kept else 0)
        self.clocks: set[str] = set()
        self.step: int | None = None
        self.first_step: int | None = None
        self._lock = threading.Lock()
        self._ring: deque[tuple[float, int | None]] = deque(
            maxlen=RING_VALUES if keep == "ring" else 1
        )
        self._was_first = False
        self._emptied = (time.monotonic(), time.time_ns() // 1000)
        self._clear()

    def _clear(self) -> None:
        self._tally = Tally()
        self.clocks = set()
        self._failed = 0
        self._first: float | None = None
        self._last: float | None = None
        self._since_s: float | None = None
        self._started_us = 0

    def fold(self, *, waits: bool = False) -> None:
        """Put what is in the queue into the sum; where another thread is at it, leave it to it."""
        if not self._lock.acquire(blocking=waits):
            return
        try:
            self._fold()
        finally:
            self._lock.release()

    def _fold(self) -> None:
        take = self.items.popleft
        # Only who has the lock takes anything out, and what comes meanwhile stays.
        values: list[Any] = [take() for _ in range(len(self.items))]
        # All of them came since the queue was last empty.
        emptied, self._emptied = self._emptied, (time.monotonic(), time.time_ns() // 1000)
        if not values:
            return
        if self._since_s is None:
            self._since_s, self._started_us = emptied
        if self.keep == "timer":
            finished = [value for value in values if value is not None]
            self._failed += len(values) - len(finished)
            values = finished
        elif self.keep != "stat":
            self._ring.extend(item for item in values if isfinite(item[0]))
            values = [value for value, _ in values]
        if values and not self._was_first:
            values = self._take_first(values)
        self._tally.add_values(values)
        for value in reversed(values):
            if isfinite(value):
                self._last = value
                break

    def _take_first(self, values: list[float]) -> list[float]:
        """Note the first finite value ever, which of a timer is in no other figure."""
        for place, value in enumerate(values):
            if isfinite(value):
                self._first, self._was_first = value, True
                if self.keep == "timer":
                    self._last = value
                    return values[:place] + values[place + 1 :]
                break
        return values

    def take_record(
        self, run: OpenRun, place: tuple[int | None, int | None], *, whole: bool
    ) -> AggregateRecord | None:
        """The record of what came since the last one, or None where it is too early for it.

        Args:
            run: The run.
            place: The steps at which the last records were made, and now.
            whole: Whether the window ends now, however short it was.
        """
        if not self._lock.acquire(timeout=_LOCK_S):
            return None
        try:
            self._fold()
            if self._since_s is None:
                return None
            if not whole and time.monotonic() - self._since_s < _WINDOW_S:
                return None
            record = self._make_record(run, place)
            self._clear()
        finally:
            self._lock.release()
        return record

    def _make_record(self, run: OpenRun, place: tuple[int | None, int | None]) -> AggregateRecord:
        tally, now_us = self._tally, time.time_ns() // 1000
        first_step, step = place
        if self.step is not None:
            step, self.step = self.step, None
        if first_step is not None and (step is None or first_step > step):
            first_step = None
        self.first_step = step
        has = tally.count > 0
        ring = list(self._ring) if self.keep in ("ring", "value") else []
        places = [place for _, place in ring if place is not None]
        bucketed = has and self.keep in ("stat", "timer")
        clock = None
        if self.keep == "timer":
            clock = "cuda_events" if self.clocks == {"cuda_events"} else "wall_clock"
        origin, channel = run.origin, run.stream.channel(AggregateRecord.KIND)
        return AggregateRecord(
            origin.run_id, origin.writer_id, origin.attempt, origin.rank, channel.take_sequence(),
            now_us, self.key, self.keep, "s" if self.keep == "timer" else None,
            min(self._started_us, now_us), first_step, step, tally.count,
            tally.mean if has else None, tally.m2 if has and isfinite(tally.m2) else None,
            tally.low if has else None, tally.high if has else None, self._first, self._last,
            tally.non_finite, self._failed, clock,
            JsonObject(tally.encode_buckets()) if bucketed else None,
            tuple(value for value, _ in ring),
            tuple(places) if len(places) == len(ring) and self.keep == "ring" else (),
        )  # fmt: skip


class Aggregates:
    """All keys that this process aggregates of one run.

    Args:
        run: The run.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._lock = threading.RLock()  # a signal handler may time something, too
        self._gatherings: dict[str, Gathering] = {}
        self._pending: dict[str, PendingSteps] = {}
        self._sinks: dict[KeptAs, Gathering] = {}
        self._has_told = False
        self._step: int | None = None
        self._failures = 0

    def open(self, key: str, keep: KeptAs) -> Gathering:
        """Where the values of a key go.

        Raises:
            SchemaValidationError: The key is kept otherwise so far.
        """
        if not self._run.stream.active:
            return self.sink(keep)
        with self._lock:
            found = self._gatherings.get(key)
            if found is None:
                if len(self._gatherings) >= _MOST_KEYS:
                    self._tell_surplus(key)
                    return self.sink(keep)
                found = self._gatherings[key] = Gathering(key, keep)
                found.first_step = self._step
        if found.keep != keep:
            raise SchemaValidationError(
                f"keep: {key!r} is kept as {found.keep!r} in this run so far, and cannot be "
                f"{keep!r} too: name it otherwise"
            )
        # A forked child has a stream once something was put into it.
        self._run.stream.open()
        return found

    def sink(self, keep: KeptAs) -> Gathering:
        """Where values go that are not kept."""
        found = self._sinks.get(keep)
        if found is None:
            found = self._sinks[keep] = Gathering("", keep, is_kept=False)
        return found

    def _tell_surplus(self, key: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "run %s: more than %d keys are aggregated or timed, the newest of them %r: what "
                "belongs to further ones is not kept. What changes from call to call belongs into "
                "no name.",
                self._run.context.run_id, _MOST_KEYS, key,
            )  # fmt: skip

    def share_pending(self, device: str, make: Callable[[], PendingSteps]) -> PendingSteps:
        """The blocks of a device that it has not passed yet."""
        with self._lock:
            pending = self._pending.get(device)
            if pending is None:
                pending = self._pending[device] = make()
        return pending

    def collect(self, *, whole: bool = False) -> None:
        """Put records of the windows that have ended into the stream; called once a second.

        Any thread may call it; it raises nothing.

        Args:
            whole: Whether all windows end now.
        """
        try:
            self._collect(whole)
        except Exception:  # noqa: BLE001 - delivery must go on
            self._failures += 1
            if self._failures == 1:
                _log.exception("run %s: aggregates are not kept", self._run.context.run_id)

    def _collect(self, whole: bool) -> None:
        run = self._run
        if run.is_over:
            return
        with self._lock:
            gatherings = list(self._gatherings.values())
        channel = run.stream.channel(AggregateRecord.KIND)
        now = find_newest_step(run)
        for gathering in gatherings:
            record = gathering.take_record(run, (gathering.first_step, now), whole=whole)
            if record is not None:
                channel.put(record)
        self._step = now

    def settle(self) -> None:
        """Put everything that was measured into the stream, before the run ends."""
        with self._lock:
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.settle(_SETTLE_S)
        self.collect(whole=True)


def find_aggregates(run: OpenRun) -> Aggregates:
    """The aggregates of a run in this process, made where there are none yet."""
    with run.lock:
        found = run.aggregates
        if not isinstance(found, Aggregates):
            found = run.aggregates = Aggregates(run)
            run.stream.collect = found.collect
        return found
