"""Processors, memory and processes of this node, through psutil."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from quark_core.system.hardware.readings import ProcessorReading
from quark_core.system.process import importing

# The kernel counts in hundredths of a second, so that a shorter window is noise.
_WINDOW_S = 0.1
_LISTING_INTERVAL_S = 10.0
_LISTING_TIMES = 4000
_KEPT = 16


class _Counters(NamedTuple):
    """What has been used since the boot: by the node where it is asked, and by our processes."""

    at_s: float
    of_node: bool
    busy_s: float
    total_s: float
    processes_s: dict[int, float]


class ProcessorReader:
    """Reads figures of the node and of this process with its workers. Threads may share one.

    Shares of time are over the time since an earlier reading, at least 0.1 s
    ago, and None until there is one. psutil's own percentages are left alone:
    they are over the time since anyone in the process last asked for them.
    In a container, CPU and RAM are those of the host, whatever its limits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._earlier: deque[_Counters] = deque(maxlen=_KEPT)
        self._process: Any = None
        self._workers: list[Any] = []
        self._list_at_s = 0.0

    def read(self, *, node: bool = True, fresh: bool = False) -> ProcessorReading:
        """Read now; takes a millisecond or so, and never raises.

        Args:
            node: Also the figures of the whole node, not only of this process.
            fresh: List the workers now, which takes long on a node with many
                processes, and wait 0.1 s where shares have no earlier reading
                to begin at. Otherwise they are listed every 10 s.
        """
        with self._lock:
            try:
                with importing():
                    import psutil
            except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
                return ProcessorReading(unavailable=f"psutil: {_describe(error)}")
            gaps: list[str] = []
            if fresh and self._find_earlier(time.monotonic(), node) is None:
                self._earlier.append(self._count(psutil, node, fresh, []))
                time.sleep(_WINDOW_S)
            now = self._count(psutil, node, fresh, gaps)
            begin = self._find_earlier(now.at_s, node)
            self._keep(now)
            usage, process_share = _share(begin, now)
            if begin is None:
                gaps.append("shares of time need a second reading")
            total, available = self._read_memory(psutil, gaps) if node else (None, None)
            rss, workers, workers_rss = self._read_sizes(psutil, gaps)
        used = None if total is None or available is None else max(0, total - available)
        if not node:
            usage = None
            gaps.append("the process with local rank 0 samples CPU and RAM of this node")
        return ProcessorReading(
            cpu_usage_percent=usage,
            ram_usage_percent=None if used is None or not total else 100.0 * used / total,
            ram_used_bytes=used,
            ram_total_bytes=total,
            process_cpu_percent=process_share,
            process_rss_bytes=rss,
            worker_count=workers,
            workers_rss_bytes=workers_rss,
            unavailable="; ".join(gaps) or None,
        )

    def _count(self, psutil: Any, node: bool, fresh: bool, gaps: list[str]) -> _Counters:
        busy_s = total_s = 0.0
        if node:
            try:
                busy_s, total_s = _add_up(psutil.cpu_times())
            except Exception as error:  # noqa: BLE001 - platforms differ in what they raise
                gaps.append(f"psutil.cpu_times: {_describe(error)}")
        processes_s: dict[int, float] = {}
        try:
            if self._process is None:
                self._process = psutil.Process()
            times = self._process.cpu_times()
            processes_s[self._process.pid] = times.user + times.system
            self._list_workers(fresh)
        except Exception as error:  # noqa: BLE001 - as above
            gaps.append(f"psutil.Process: {_describe(error)}")
        for worker in self._workers:
            try:
                times = worker.cpu_times()
            except Exception:  # noqa: BLE001, S112 - a worker may have ended meanwhile
                continue
            processes_s[worker.pid] = times.user + times.system
        return _Counters(time.monotonic(), node, busy_s, total_s, processes_s)

    def _list_workers(self, fresh: bool) -> None:
        now = time.monotonic()
        if not fresh and now < self._list_at_s:
            return
        known = {worker.pid: worker for worker in self._workers}
        found = self._process.children(recursive=True)
        # It looks at every process of the node, of which there may be thousands.
        took_s = time.monotonic() - now
        self._list_at_s = now + max(_LISTING_INTERVAL_S, _LISTING_TIMES * took_s)
        # Equal is what has the same id and time of creation: ids are used again.
        self._workers = [
            known[worker.pid] if known.get(worker.pid) == worker else worker for worker in found
        ]

    def _find_earlier(self, now_s: float, node: bool) -> _Counters | None:
        """The newest counters that are a window old, and have the node's where they must."""
        for counters in reversed(self._earlier):
            if now_s - counters.at_s >= _WINDOW_S and (counters.of_node or not node):
                return counters
        return None

    def _keep(self, now: _Counters) -> None:
        # Readings in quick succession must not push out the one that is old enough.
        if not self._earlier or now.at_s - self._earlier[-1].at_s >= _WINDOW_S / 2:
            self._earlier.append(now)

    def _read_memory(self, psutil: Any, gaps: list[str]) -> tuple[int | None, int | None]:
        try:
            memory = psutil.virtual_memory()
            return int(memory.total), int(memory.available)
        except Exception as error:  # noqa: BLE001 - as above
            gaps.append(f"psutil.virtual_memory: {_describe(error)}")
            return None, None

    def _read_sizes(
        self, psutil: Any, gaps: list[str]
    ) -> tuple[int | None, int | None, int | None]:
        if self._process is None:
            return None, None, None
        try:
            rss = int(self._process.memory_info().rss)
        except Exception as error:  # noqa: BLE001 - as above
            gaps.append(f"psutil.Process.memory_info: {_describe(error)}")
            rss = None
        count = size = 0
        for worker in self._workers:
            try:
                # One that has ended and was not waited for has no memory left.
                if worker.status() == psutil.STATUS_ZOMBIE:
                    continue
                worker_rss = int(worker.memory_info().rss)
            except Exception:  # noqa: BLE001, S112 - a worker may have ended meanwhile
                continue
            count += 1
            size += worker_rss
        return rss, count, size


def _add_up(times: Any) -> tuple[float, float]:
    """Busy and all seconds of all cores since the boot."""
    # Linux counts the time of virtual machines a second time under user and nice.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    total = float(sum(times)) - guests
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _share(begin: _Counters | None, now: _Counters) -> tuple[float | None, float | None]:
    """Percent of all cores that the node used, and percent of one that our processes used."""
    if begin is None:
        return None, None
    usage = None
    if begin.total_s and now.total_s > begin.total_s:
        # A counter may step back a little where a core goes to sleep.
        share = (now.busy_s - begin.busy_s) / (now.total_s - begin.total_s)
        usage = 100.0 * min(1.0, max(0.0, share))
    if not now.processes_s:
        return usage, None
    # What a worker did before it was first seen belongs to no window.
    used_s = sum(
        max(0.0, seconds - begin.processes_s[pid])
        for pid, seconds in now.processes_s.items()
        if pid in begin.processes_s
    )
    return usage, 100.0 * used_s / (now.at_s - begin.at_s)


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    # A file name in it may hold what no JSON can.
    return text.encode("utf-8", "replace").decode()
