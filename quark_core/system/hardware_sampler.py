"""Reads the machine in the background: one thread a process, for all who want to know."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from quark_core.system.hardware_readings import (
    GpuReader,
    GpusReading,
    HardwareReading,
    ProcessorReader,
    ProcessorReading,
    TrafficReader,
    find_local_rank,
)
from quark_core.system.process import start_thread

_log = logging.getLogger("quark")

# The second reading follows soon, because shares of time need two.
_SECOND_READING_S = 0.25
_JOIN_TIMEOUT_S = 0.5
_FRESH_TIMEOUT_S = 2.0
_START_RETRY_S = 30.0
_ELSEWHERE = "the process with local rank 0 samples the GPUs of this node"


class Watch:
    """One who wants readings. The sampler forgets it once nobody holds it.

    Args:
        interval_s: Seconds between readings; the smallest of all watches counts.
        processor: Whether processors, memory and processes are wanted.
        gpus: Whether GPUs are wanted.
        wanted: Says whether readings are wanted still, such as until a run has ended.
        node: Whether the whole node is to be read here, though its process of
            local rank 0 reads it.
        traffic: Whether disks and network are wanted.
        begin_at_s: Moment of `time.monotonic` before which nothing is read for this one.
        on_reading: Gets each reading, on the thread that reads; it must not wait.
    """

    __slots__ = (
        "__weakref__",
        "begin_at_s",
        "gpus",
        "interval_s",
        "node",
        "on_reading",
        "processor",
        "traffic",
        "wanted",
    )

    def __init__(
        self,
        interval_s: float,
        *,
        processor: bool,
        gpus: bool,
        wanted: Callable[[], bool] = lambda: True,
        node: bool = False,
        traffic: bool = False,
        begin_at_s: float = 0.0,
        on_reading: Callable[[HardwareReading], None] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.processor = processor
        self.gpus = gpus
        self.wanted = wanted
        self.node = node
        self.traffic = traffic
        self.begin_at_s = begin_at_s
        self.on_reading = on_reading


class _Wanted(NamedTuple):
    """What is to be read now, and for whom."""

    watches: list[Watch]
    interval_s: float
    wait_s: float
    node: bool


class HardwareSampler:
    """A daemon thread that reads the machine while anyone watches.

    It starts with the first watch and ends by itself with the last. A forked
    child has none of its own until its first `watch`. Any method may be
    called from any thread; none raises.

    Attributes:
        reading: The newest reading, or None before the first.
        running: Whether the thread runs; False in a forked child.
    """

    def __init__(self) -> None:
        self.reading: HardwareReading | None = None
        self.running = False
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._retry_at_s = 0.0
        self._told: set[str] = set()
        self._processor = ProcessorReader()
        self._gpus = GpuReader()
        self._traffic = TrafficReader()

    def watch(self, watch: Watch) -> None:
        """Read for this one too, from now on; a second call starts what has ended."""
        if not self.running and time.monotonic() < self._retry_at_s:
            return
        with self._lock:
            self._watches.add(watch)
            if self.running:
                self._wake.set()
                return
            self._wake = threading.Event()
            self.reading = None
            self._thread = start_thread(self._run, args=(self._wake,), name="quark-hardware")
            if self._thread is None:  # training goes on without figures
                self._retry_at_s = time.monotonic() + _START_RETRY_S
                self._tell("its thread cannot be started")
                return
            self.running = True

    def unwatch(self, watch: Watch) -> None:
        """Read for this one no more; the last one ends the thread, within half a second.

        A thread that the driver does not let go of is left behind.
        """
        with self._lock:
            self._watches.discard(watch)
            if not self.running or any(one.wanted() for one in self._watches):
                return
            thread, self._thread = self._thread, None
            self.running = False
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)

    def read_now(self, *, processor: bool, gpus: bool) -> HardwareReading:
        """A new reading, whatever the background does; takes milliseconds, seconds at most."""
        gpus_reading = None
        if gpus:
            gpus_reading = self._read_gpus_within(_FRESH_TIMEOUT_S)
        processor_reading = self._processor.read(fresh=True) if processor else None
        return HardwareReading(time.monotonic(), processor_reading, gpus_reading)

    def become_child(self) -> None:
        """Leave the parent's thread and locks alone: this process was forked."""
        _parents.append((self._lock, self._wake, self._thread, self._processor, self._gpus))
        self._lock = threading.Lock()
        self._watches = weakref.WeakSet()
        self._thread = None
        self._retry_at_s = 0.0
        self.reading = None
        self.running = False
        self._processor = ProcessorReader()
        self._gpus = GpuReader()
        self._traffic = TrafficReader()

    def _run(self, wake: threading.Event) -> None:
        first = True
        while True:
            try:
                wanted = self._find_wanted(wake)
                if wanted is None:
                    return
                if wanted.wait_s > 0:
                    wake.wait(wanted.wait_s)
                    continue
                interval_s = wanted.interval_s
                reading = self._read(wanted)
                with self._lock:
                    if self._wake is not wake or not self.running:
                        return
                    self.reading = reading
                for watch in wanted.watches:
                    if watch.on_reading is not None:
                        watch.on_reading(reading)
            except Exception as error:  # noqa: BLE001 - training must not lose its figures for one
                self._tell(f"it failed: {type(error).__name__}: {error}")
                interval_s = _START_RETRY_S
            wake.wait(min(interval_s, _SECOND_READING_S) if first else interval_s)
            first = False

    def _find_wanted(self, wake: threading.Event) -> _Wanted | None:
        """What is to be read here; None where nobody watches this thread any more."""
        with self._lock:
            if self._wake is not wake or not self.running:
                return None
            watches = [watch for watch in self._watches if watch.wanted()]
            if not watches:
                self.running = False
                self._thread = None
                return None
            wake.clear()
        now_s = time.monotonic()
        begun = [watch for watch in watches if watch.begin_at_s <= now_s]
        return _Wanted(
            begun,
            min((watch.interval_s for watch in begun), default=0.0),
            0.0 if begun else min(watch.begin_at_s for watch in watches) - now_s,
            any(watch.node for watch in begun) or find_local_rank() == 0,
        )

    def _read(self, wanted: _Wanted) -> HardwareReading:
        processor_reading: ProcessorReading | None = None
        gpus_reading: GpusReading | None = None
        watches = wanted.watches
        if any(watch.processor for watch in watches):
            processor_reading = self._processor.read(node=wanted.node)
        if any(watch.gpus for watch in watches):
            gpus_reading = GpusReading(unavailable=_ELSEWHERE)
            if wanted.node:
                gpus_reading = self._gpus.read()
        traffic = self._traffic.read() if any(watch.traffic for watch in watches) else None
        return HardwareReading(time.monotonic(), processor_reading, gpus_reading, traffic)

    def _read_gpus_within(self, timeout_s: float) -> GpusReading:
        """Read in a thread of its own, which is left behind where the driver hangs."""
        found: list[GpusReading] = []
        thread = start_thread(lambda: found.append(self._gpus.read()), name="quark-gpus")
        if thread is None:
            return GpusReading(unavailable="NVML: no thread can be started")
        thread.join(timeout_s)
        return found[0] if found else GpusReading(unavailable="NVML: the driver does not answer")

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("hardware sampler: %s", reason)


# What a forked child has of its parent: kept, so that nothing of it is ever closed.
_parents: list[object] = []

shared_sampler = HardwareSampler()
"""Of this process."""

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=shared_sampler.become_child)
