"""Reads the machine in the background: one thread a process, for all who want to know."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from quark_core.system.hardware.gpus import GpuReader
from quark_core.system.hardware.processor import ProcessorReader
from quark_core.system.hardware.readings import (
    GpusReading,
    HardwareReading,
    ProcessorReading,
    find_local_rank,
)

__all__ = ["HardwareSampler", "Watch", "shared_sampler"]

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
    """

    __slots__ = ("__weakref__", "gpus", "interval_s", "node", "processor", "wanted")

    def __init__(
        self,
        interval_s: float,
        *,
        processor: bool,
        gpus: bool,
        wanted: Callable[[], bool] = lambda: True,
        node: bool = False,
    ) -> None:
        self.interval_s = interval_s
        self.processor = processor
        self.gpus = gpus
        self.wanted = wanted
        self.node = node


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
            self._thread = threading.Thread(
                target=self._run, args=(self._wake,), name="quark-hardware", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                # No thread is to be had, now; training goes on without figures.
                self._thread = None
                self._retry_at_s = time.monotonic() + _START_RETRY_S
                self._tell(f"its thread cannot be started: {error}")
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

    def _run(self, wake: threading.Event) -> None:
        first = True
        while True:
            try:
                wanted = self._find_wanted(wake)
                if wanted is None:
                    return
                interval_s, processor, gpus, node = wanted
                reading = self._read(processor, gpus, node)
                with self._lock:
                    if self._wake is not wake or not self.running:
                        return
                    self.reading = reading
            except Exception as error:  # noqa: BLE001 - training must not lose its figures for one
                self._tell(f"it failed: {type(error).__name__}: {error}")
                interval_s = _START_RETRY_S
            wake.wait(min(interval_s, _SECOND_READING_S) if first else interval_s)
            first = False

    def _find_wanted(self, wake: threading.Event) -> tuple[float, bool, bool, bool] | None:
        """Interval, and what is to be read here; None where nobody watches this thread any more."""
        with self._lock:
            if self._wake is not wake or not self.running:
                return None
            watches = [watch for watch in self._watches if watch.wanted()]
            if not watches:
                self.running = False
                self._thread = None
                return None
            wake.clear()
            return (
                min(watch.interval_s for watch in watches),
                any(watch.processor for watch in watches),
                any(watch.gpus for watch in watches),
                any(watch.node for watch in watches) or find_local_rank() == 0,
            )

    def _read(self, processor: bool, gpus: bool, node: bool) -> HardwareReading:
        processor_reading: ProcessorReading | None = None
        gpus_reading: GpusReading | None = None
        if processor:
            processor_reading = self._processor.read(node=node)
        if gpus:
            gpus_reading = self._gpus.read() if node else GpusReading(unavailable=_ELSEWHERE)
        return HardwareReading(time.monotonic(), processor_reading, gpus_reading)

    def _read_gpus_within(self, timeout_s: float) -> GpusReading:
        """Read in a thread of its own, which is left behind where the driver hangs."""
        found: list[GpusReading] = []
        thread = threading.Thread(
            target=lambda: found.append(self._gpus.read()), name="quark-gpus", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            return GpusReading(unavailable=f"NVML: no thread can be started: {error}")
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
