"""Metrics of a loop that runs many times a second: aggregates over windows, and timers."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import isfinite
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, cast, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import AggregateKeep, AggregateRecord, KeptAs
from quark_core.records.names import check_name
from quark_core.records.running_statistics import Tally
from quark_core.runs.step_counters import find_newest_step, read_step
from quark_core.system.process import importing
from quark_core.writers.scalars import to_float
from quark_core.writers.step_timing import (
    CudaClock,
    DeviceClock,
    DeviceEvent,
    DeviceMarks,
    PendingSteps,
    StepTimes,
    open_device_clock,
)

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun
    from quark_core.runs.run_report import AggregateTable
    from quark_core.writers.progress import Progress

# Aggregates of one run in this process: values come in by the batch, records leave each 10 s.
#
# A thread that measures appends to a queue, which is one atomic call. Whoever finds the queue long
# folds it into a sum, the delivery thread does so once a second, and nobody waits for that.

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

    def fold(self) -> None:
        """Put what is in the queue into the sum; where another thread is at it, leave it to it."""
        if not self._lock.acquire(blocking=False):
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
        channel = run.stream.channel(AggregateRecord.KIND)
        return AggregateRecord(
            *run.origin.head, channel.take_sequence(),
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
                f"keep: {key!r} is already aggregated with {found.keep!r} in this run, so "
                f"{keep!r} is not possible. Use another key"
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
                "run %s: more than %d keys are aggregated or timed, the newest of them %r. "
"Values of further keys are dropped. Do not put values that change with each "
"call into a key.",
                self._run.context.run_id, _MOST_KEYS, key
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
                _log.exception("run %s: aggregates cannot be stored", self._run.context.run_id)

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


_P = ParamSpec("_P")
_R = TypeVar("_R")


class MakesChronos(Protocol):
    """A logger, as far as a decorated function needs it."""

    def timer(self, key: str, *, device: Any = False) -> Timer:
        """A block."""


class Timer:
    """A block that is timed, by a clock that nobody can set; also a decorator of functions.

    Each `metrics.timer(key)` is one of its own, so that blocks may be nested, and be left and
    entered in any order. One that is kept may be used again by the same thread.
    An exception that leaves the block passes through; the block then counts as failed.
    """

    __slots__ = ("_device", "_gathering", "_items", "_key", "_metrics", "_outer", "_start_s")

    def __init__(self, metrics: MakesChronos, key: str, gathering: Gathering) -> None:
        self._metrics = metrics
        self._key = key
        self._gathering = gathering
        self._items: deque[Any] = gathering.items
        self._start_s = 0.0
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        if self._start_s:  # this very object is in a block already
            self._outer = (self._start_s, self._outer)
        self._start_s = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took_s = perf_counter() - self._start_s
        items = self._items
        items.append(took_s if kind is None else None)
        if len(items) > LONG_QUEUE:
            self._gathering.fold()
        if self._outer:
            self._start_s, self._outer = self._outer
        else:
            self._start_s = 0.0

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Time each call of a function; of an async one until it is done, waiting included.

        Of a generator function each pass, from its first item to its end, is one block. After
        the end of the run the function works on and is not timed.
        """
        return _decorate(function, self._make_again)

    def _make_again(self) -> Timer:
        return self._metrics.timer(self._key, device=getattr(self, "_device", False))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._key!r})"


class DeviceChrono(Timer):
    """A block whose work on a GPU is timed by marks in its stream; nobody waits for the GPU.

    Its time comes in when the device has passed its end and a later block of the device is left,
    or the run ends. Where the device cannot be marked, it is the host's time.
    """

    __slots__ = ("_entered", "_pending")

    def __init__(
        self,
        metrics: MakesChronos,
        key: str,
        gathering: Gathering,
        device: object,
        pending: PendingSteps,
    ) -> None:
        super().__init__(metrics, key, gathering)
        self._device = device
        self._pending = pending
        self._entered: list[tuple[float, DeviceEvent | None]] = []

    def __enter__(self) -> Self:
        self._entered.append((perf_counter(), self._pending.mark()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start_s, start = self._entered.pop()
        if kind is not None:
            self._items.append(None)
            return
        pending = self._pending
        end = None if start is None else pending.mark()
        wall = StepTimes((perf_counter() - start_s) * 1000.0, None, None)
        marks = None if start is None or end is None else DeviceMarks(start, None, end)
        pending.add(marks, wall, self._keep)
        pending.poll()

    def _keep(self, times: StepTimes, timing: str) -> None:
        """Take the time of a block; called once for each, by whichever thread finds it done."""
        took_ms = times.step_ms
        if took_ms is None:
            return
        gathering = self._gathering
        gathering.items.append(took_ms / 1000.0)
        # A block without marks has only waited for those before it.
        gathering.clocks.add(timing)
        if len(gathering.items) > LONG_QUEUE:
            gathering.fold()


def find_pending(
    aggregates: Aggregates, device: object, find: Callable[[object], DeviceClock | None]
) -> PendingSteps | None:
    """Where the blocks of a device wait; None where there is no such device here.

    Args:
        aggregates: Whose they are.
        device: As `metrics.timer` takes it, but for False.
        find: Finds a device's clock.

    Raises:
        SchemaValidationError: `device` is no device.
    """
    clock = find(device)
    if clock is None:
        return None
    return aggregates.share_pending(str(device), lambda: PendingSteps(clock))


def find_clock(device: object) -> DeviceClock | None:
    """The clock of a device; of True that of torch's current one."""
    if device is not True:
        return open_device_clock(device)
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_available():
            return None
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return None
    return CudaClock(torch, None)


def _decorate(function: Callable[_P, _R], make: Callable[[], Timer]) -> Callable[_P, _R]:
    if not callable(function):
        raise SchemaValidationError(
            f"metrics.timer(key) decorates a function, not {type(function).__name__}"
        )
    import inspect

    plain: Any = function
    made: Any
    if inspect.iscoroutinefunction(plain):

        async def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await plain(*args, **kwargs)

    elif inspect.isasyncgenfunction(plain):

        async def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                async for item in plain(*args, **kwargs):
                    yield item

    elif inspect.isgeneratorfunction(plain):

        def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return (yield from plain(*args, **kwargs))

    else:

        def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return plain(*args, **kwargs)

    return cast("Callable[_P, _R]", functools.wraps(function)(made))


_T = TypeVar("_T")


class LoopMetrics:
    """Times blocks, sums up values, tells how far a loop has come."""

    _run: OpenRun
    _closed: bool

    def _bind_gatherings(self) -> None:
        """Forget where values went: the run has another stream, or this is a forked child."""
        self._timers: dict[Any, Gathering] = {}
        self._gatherings: dict[Any, Gathering] = {}

    def timer(self, key: str, *, device: Any = False) -> Timer:
        """Time a block, `with metrics.timer("forward"):`, or each call of a function.

        Takes about a microsecond and does not wait. Times are summed: one record per key is written
        every 10 s, and at the end. The first block of a process is kept separately as `first`. A
        block that raises counts as `failed`.

        Blocks may be nested and recursive, in any thread. Create a new timer in a forked child.
        After the end of the run nothing is timed.

        Args:
            key: Name of the timer. Up to 1,000 keys per run are recorded.
            device: True to time the GPU with events in the current stream, or a device such as
                "cuda:1". On other devices, host time is used. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid, or `aggregate` uses the key. The message
                names it.
        """
        if device is False and self._run.refusal is None and not self._closed:
            try:
                return Timer(self, key, self._timers[key])
            except Exception:  # noqa: BLE001, S110 - new, or an object that raises when hashed
                pass
        return self._open_timer(key, device)

    def _open_timer(self, key: object, device: object) -> Timer:
        run = self._run
        if callable(key):
            raise SchemaValidationError(
                'key must be a str, not a function: write @metrics.timer("name")'
            )
        name = check_name(key, "key")
        if self._closed or run.is_over:
            _tell_late(run)
            return Timer(self, name, find_aggregates(run).sink("timer"))
        gathering = self._timers.get(name)
        if gathering is None:
            gathering = self._open_gathering(name, "timer")
            if gathering.is_kept:
                self._timers[name] = gathering
        if device is False or device is None:
            return Timer(self, name, gathering)
        pending = find_pending(find_aggregates(run), device, find_clock)
        if pending is None:
            return Timer(self, name, gathering)
        return DeviceChrono(self, name, gathering, device, pending)

    def aggregate(
        self, key: str, value: Any, *, keep: AggregateKeep = "stat", step: int | None = None
    ) -> None:
        """Add a value to a running summary, for values too frequent to log one by one.

        Takes about a microsecond. A summary is written every 10 s, at `flush()` and at the end of
        the run. If the process is killed, at most the last 10 s are lost.

        Args:
            key: Full key, as in `log`. Up to 1,000 keys per run are recorded.
            value: Value, as in `log`. NaN and infinities are counted separately.
            keep: Statistics to keep. Defaults to `stat`: count, mean, standard deviation, min, max
                and quantiles. `ring` is the newest 50 values, with mean, min and max. `value` is
                the newest value. `series` is each value as a metric point, which needs a step.
            step: Step of the value. Defaults to the step set by `session.step`, then to that of the
                newest metric.

        Raises:
            SchemaValidationError: An argument is invalid, or the key has another `keep`. In strict
                mode, also for a non-finite value.
            InvalidRunStateError: The writer is closed or the run has ended.
        """
        run = self._run
        if self._closed or run.refusal is not None:
            self._check_open("aggregate")  # type: ignore[attr-defined]
        try:
            gathering = self._gatherings[key]
        except Exception:  # noqa: BLE001 - new, or an object that raises when it is hashed
            gathering = None
        if gathering is None or gathering.keep is not keep:
            gathering = self._find_gathering(key, keep)
            if gathering is None:
                self.log(key, value, step=step)  # type: ignore[attr-defined]
                return
        if type(value) is not float:
            value = to_float(value, "value", "metrics.aggregate")
        if run.strict and not isfinite(value):
            raise SchemaValidationError(f"value of {key!r} must be finite, got {value}")
        if step is not None:
            gathering.step = read_step(run, step)
        items = gathering.items
        if keep == "stat":
            items.append(value)
        else:
            items.append((value, run.step if step is None else step))
        if len(items) > LONG_QUEUE:
            gathering.fold()

    def _find_gathering(self, key: object, keep: object) -> Gathering | None:
        """Where values of a key go; None of a series.

        Raises:
            SchemaValidationError: A bad key or `keep`.
        """
        check_choice(keep, "keep", get_args(AggregateKeep))
        name = check_name(key, "key")
        if keep == "series":
            return None
        gathering = self._open_gathering(name, keep)  # type: ignore[arg-type]
        if gathering.is_kept:
            self._gatherings[name] = gathering
        return gathering

    def _open_gathering(self, name: str, keep: KeptAs) -> Gathering:
        stored = self._resolve(name, None)[0]  # type: ignore[attr-defined]
        return find_aggregates(self._run).open(stored, keep)

    def progress(
        self,
        iterable: Iterable[_T] | None = None,
        *,
        total: int | tuple[int, ...] | None = None,
        start: int | tuple[int, ...] | None = None,
    ) -> Progress[_T]:
        """Show the progress and remaining time of a loop.

        The progress is printed, in place on a terminal and otherwise every 10 s at most. It is also
        sent with the heartbeat, so `quark runs`, `quark follow` and the web UI show it. Loops may
        be nested. Nothing is printed next to a tqdm bar, with QUARK_QUIET, or with
        QUARK_PROGRESS=0. An iteration takes half a microsecond.

        Args:
            iterable: Object to iterate over. Without one, call `advance()` of the result.
            total: Number of steps, or the sizes of nested loops from outside in, such as `(epochs,
                len(loader))`. In the latter case, each call continues the count. Defaults to the
                length of `iterable`.
            start: Steps that are already done, in the form of `total`. Defaults to 0. In a run
                resumed with `from_step=`, and with `total`, it defaults to that step.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.

        Example:
            for batch in metrics.progress(loader, total=(epochs, len(loader))):
                ...
        """
        with importing():
            from quark_core.writers.progress import open_progress

        return open_progress(self._run, iterable, total, start)

    def read_aggregates(
        self,
        key: str | None = None,
        *,
        rank: int | None = None,
        all_attempts: bool = False,
    ) -> AggregateTable:
        """Flush, then read timers and aggregates, combined over time and ranks.

        Quantiles have an error of up to 6 %.

        Args:
            key: Key, as logged or as stored. Defaults to all.
            rank: Rank that logged the values. Defaults to all ranks.
            all_attempts: If True, include values that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.records.kinds.provenance import AggregateRecord
        from quark_core.runs.run_report import build_query, summarize_records

        query = build_query(key, rank, all_attempts=all_attempts)
        found: Any = self._run.read(AggregateRecord.KIND, query).to_records()
        return summarize_records(found)


def _tell_late(run: OpenRun) -> None:
    if run.warns_first("timed_late"):
        _log.warning("run %s has ended or its logger is closed, so blocks are no longer timed",
                     run.context.run_id)  # fmt: skip
