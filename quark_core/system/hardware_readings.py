"""Readings of this node's hardware: processors, memory, disks, network and GPUs."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quark_core.records import GpuReading
from quark_core.system.process import importing

# What was read of the machine at one moment, and which part of it is this process's.
#
# CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the driver (NVML) numbers
# all of them. CUDA_DEVICE_ORDER is not looked at: integers in CUDA_VISIBLE_DEVICES
# are taken as the driver's, which is what CUDA_DEVICE_ORDER=PCI_BUS_ID makes them,
# and what they are anyway where all GPUs of a node are of one model.


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """Processors, memory and processes; the figures are those of `SystemTelemetryRecord`.

    Attributes:
        unavailable: Why some of them are None, or None.
    """

    cpu_usage_percent: float | None = None
    ram_usage_percent: float | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    process_cpu_percent: float | None = None
    process_rss_bytes: int | None = None
    worker_count: int | None = None
    workers_rss_bytes: int | None = None
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class GpusReading:
    """Every GPU that the driver shows to this process.

    Attributes:
        gpus: In the order of the driver's indexes; None where none could be read.
        unavailable: Why `gpus` is None, or None.
        gaps: Driver's index of a GPU -> why its utilization or memory is None.
        mig_parents: Identity of a MIG device -> driver's index of the GPU it is a part of.
    """

    gpus: tuple[GpuReading, ...] | None = None
    unavailable: str | None = None
    gaps: Mapping[int, str] = field(default_factory=dict)
    mig_parents: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HardwareReading:
    """A reading of the whole machine.

    Attributes:
        taken_at_s: When, by `time.monotonic`.
        processor: None where it was not asked for.
        gpus: None where they were not asked for.
        traffic: Figures of disks and network by name; None where they were not asked for.
    """

    taken_at_s: float
    processor: ProcessorReading | None = None
    gpus: GpusReading | None = None
    traffic: Mapping[str, float] | None = None


# In the order of quark_core.ranks.launches: a launcher inside a batch job knows better.
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Rank of this process on its node, by the launcher's variables; 0 where none says.

    The global rank never stands in for it: on a second node no process would be 0.
    """
    environ = os.environ if environ is None else environ
    for name in _LOCAL_RANKS:
        value = environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return 0


def choose_gpu(
    reading: GpusReading,
    *,
    gpu_index: int | None,
    device_index: int | None,
    environ: Mapping[str, str] | None = None,
) -> tuple[int | None, str | None]:
    """The driver's index of the GPU that is meant, or None and why there is none.

    Args:
        reading: The GPUs there are.
        gpu_index: The driver's index, where the user gave one.
        device_index: CUDA's index, where the user gave a device; else it is the
            local rank where so many GPUs are visible, else 0.
        environ: The process's variables.
    """
    environ = os.environ if environ is None else environ
    gpus = reading.gpus or ()
    indexes = [gpu.index for gpu in gpus]
    if not indexes:
        return None, reading.unavailable or "the driver reports no GPU"
    if gpu_index is not None:
        if gpu_index in indexes:
            return gpu_index, None
        return None, f"gpu_index {gpu_index} does not exist. The driver reports {_list(indexes)}"
    visible = environ.get(_VISIBLE)
    if visible is not None:
        indexes = _find_visible(visible, reading)
        if not indexes:
            return None, f"{_VISIBLE}={visible!r} hides all GPUs of the driver from this process"
    if device_index is not None:
        if device_index < len(indexes):
            return indexes[device_index], None
        return None, (f"device index {device_index} does not exist. Visible: {_list(indexes)}")
    rank = find_local_rank(environ)
    return indexes[rank if rank < len(indexes) else 0], None


def _find_visible(visible: str, reading: GpusReading) -> list[int]:
    """Driver's indexes in CUDA's order; as in CUDA, the first bad entry ends the list."""
    found: list[int] = []
    for entry in visible.split(","):
        index = _find_entry(entry.strip(), reading)
        if index is None:
            break
        found.append(index)
    return found


def _find_entry(entry: str, reading: GpusReading) -> int | None:
    gpus = reading.gpus or ()
    if entry.isascii() and entry.isdigit():
        return next((gpu.index for gpu in gpus if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        parents = [at for mig, at in reading.mig_parents.items() if mig.startswith(entry)]
        if parents:
            return parents[0]
        # The older form names the GPU itself: MIG-GPU-<uuid>/<instance>/<instance>.
        entry = entry.removeprefix("MIG-").partition("/")[0]
    if not entry.startswith("GPU-"):
        return None
    meant = [gpu.index for gpu in gpus if gpu.uuid is not None and gpu.uuid.startswith(entry)]
    return meant[0] if len(meant) == 1 else None


def _list(indexes: list[int]) -> str:
    return f"{len(indexes)} GPU{'s' if len(indexes) > 1 else ''}: {', '.join(map(str, indexes))}"


T = TypeVar("T")

_RETRY_INTERVAL_S = 30.0
_LIBRARY = "libnvidia-ml.so.1"
# What says that the driver must be opened anew before this GPU answers again.
_LOST = ("NVMLError_GpuIsLost", "NVMLError_Uninitialized", "NVMLError_DriverNotLoaded")


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU as the driver knows it; what it does is asked for each time."""

    index: int
    handle: Any
    name: str | None
    uuid: str | None
    error: Exception | None = None


class GpuReader:
    """Reads all GPUs. Threads may share one.

    The driver is opened by the first reading. Where it cannot be opened, or
    has lost a GPU, it is opened anew at most every 30 s.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus: list[_Gpu] = []
        self._mig_parents: dict[str, int] = {}
        self._unavailable: str | None = None
        self._is_open = False
        self._open_at_s = 0.0

    def read(self, timeout_s: float = 1.0) -> GpusReading:
        """Read now; takes about a millisecond a GPU, and never raises.

        Where the driver does not return, neither does this; other threads then
        wait for `timeout_s` and get nothing.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return GpusReading(unavailable="NVML: the driver does not answer")
        try:
            return self._read()
        except Exception as error:  # noqa: BLE001 - a broken binding may raise anything
            return GpusReading(unavailable=f"NVML: {_describe(error)}")
        finally:
            self._lock.release()

    def _read(self) -> GpusReading:
        if not self._is_open and time.monotonic() >= self._open_at_s and _lacks_driver():
            self._unavailable = f"NVML: {_LIBRARY} of an NVIDIA driver is not installed"
            self._open_at_s = time.monotonic() + _RETRY_INTERVAL_S
        if not self._is_open and time.monotonic() < self._open_at_s:
            return GpusReading(unavailable=self._unavailable)
        try:
            with importing():
                import pynvml
        except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
            return GpusReading(unavailable=f"pynvml: {_describe(error)}")
        if time.monotonic() >= self._open_at_s and (not self._is_open or self._open_at_s):
            self._open(pynvml)
        if not self._is_open:  # what has just been tried
            return GpusReading(unavailable=self._unavailable)
        readings, gaps = [], {}
        for gpu in self._gpus:
            errors = {} if gpu.error is None else {"memory": gpu.error}
            readings.append(_read_gpu(pynvml, gpu, errors))
            if errors.keys() & {"utilization", "memory"}:
                gaps[gpu.index] = f"NVML: GPU {gpu.index}: " + "; ".join(
                    f"{what}: {_describe(error)}" for what, error in errors.items()
                )
            lost = gpu.error or any(type(e).__name__ in _LOST for e in errors.values())
            if lost and not self._open_at_s:
                self._open_at_s = time.monotonic() + _RETRY_INTERVAL_S
        return GpusReading(tuple(readings), None, gaps, self._mig_parents)

    def _open(self, pynvml: Any) -> None:
        if self._is_open:
            self._is_open = False
            _ask(pynvml.nvmlShutdown, {}, "shutdown")
        try:
            pynvml.nvmlInit()
            self._gpus = [
                _describe_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())
            ]
        except Exception as error:  # noqa: BLE001 - as above
            self._unavailable = f"NVML: {_describe(error)}"
            self._open_at_s = time.monotonic() + _RETRY_INTERVAL_S
            return
        self._mig_parents = {
            uuid: gpu.index for gpu in self._gpus for uuid in _find_migs(pynvml, gpu)
        }
        self._is_open = True
        self._open_at_s = 0.0


def _lacks_driver() -> bool:
    """Whether this is a Linux without NVIDIA's library, whose binding takes long to import."""
    if sys.platform != "linux" or "pynvml" in sys.modules:
        return False
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return True
    return False


def _describe_gpu(pynvml: Any, index: int) -> _Gpu:
    errors: dict[str, Exception] = {}
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index), errors, "handle")
    if errors:
        return _Gpu(index, None, None, None, errors["handle"])
    return _Gpu(
        index,
        handle,
        _ask(lambda: _to_text(pynvml.nvmlDeviceGetName(handle)), {}, "name"),
        _ask(lambda: _to_text(pynvml.nvmlDeviceGetUUID(handle)), {}, "uuid"),
    )


def _find_migs(pynvml: Any, gpu: _Gpu) -> list[str]:
    """Identities of the parts that a GPU is cut into, where it is."""

    def find() -> list[str]:
        if pynvml.nvmlDeviceGetMigMode(gpu.handle)[0] != 1:
            return []
        uuids = []
        for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
            get = partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, place)
            part: Any = _ask(get, {}, "part")
            if part is not None:
                uuids.append(_to_text(pynvml.nvmlDeviceGetUUID(part)))
        return uuids

    return _ask(find, {}, "parts") or []


def _read_gpu(pynvml: Any, gpu: _Gpu, errors: dict[str, Exception]) -> GpuReading:
    if gpu.error is not None:
        return GpuReading(gpu.index)
    handle = gpu.handle
    utilization = _ask(
        lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), errors, "utilization"
    )
    memory = _ask(lambda: _read_memory(pynvml, handle), errors, "memory")
    temperature = _ask(
        lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        errors,
        "temperature",
    )
    power_mw = _ask(lambda: float(pynvml.nvmlDeviceGetPowerUsage(handle)), errors, "power")
    used, total = memory or (None, None)
    return GpuReading(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        utilization_percent=utilization,
        memory_used_bytes=used,
        memory_total_bytes=total,
        memory_usage_percent=100.0 * used / total if used is not None and total else None,
        temperature_celsius=temperature,
        power_watts=None if power_mw is None else power_mw / 1000.0,
    )


def _read_memory(pynvml: Any, handle: Any) -> tuple[int, int]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total)


def _ask(question: Callable[[], T], errors: dict[str, Exception], what: str) -> T | None:
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - what one GPU cannot say must not cost the rest
        errors[what] = error
        return None


def _to_text(value: Any) -> str:
    # Older bindings return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    # A file name in it may hold what no JSON can.
    return text.encode("utf-8", "replace").decode()


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
                gaps.append("shares of time require a second reading")
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


_ROOT = "/"
_LEAST_WINDOW_S = 0.1


class TrafficReader:
    """Reads rates of the whole node since the reading before. One thread uses it."""

    def __init__(self) -> None:
        self._earlier: dict[str, int] = {}
        self._at_s = 0.0

    def read(self) -> dict[str, float]:
        """Figures by name; of what cannot be had there is none. Takes a millisecond or so."""
        try:
            with importing():
                import psutil
        except Exception:  # noqa: BLE001 - a broken installation may raise anything
            return {}
        now_s = time.monotonic()
        counted = _count(psutil)
        passed_s = now_s - self._at_s
        figures = {
            f"{name}_bytes_per_s": round(max(0, count - self._earlier[name]) / passed_s, 1)
            for name, count in counted.items()
            if name in self._earlier and passed_s >= _LEAST_WINDOW_S
        }
        self._earlier, self._at_s = counted, now_s
        # Platforms differ in what they raise, and a container may hide what there is.
        with suppress(Exception):
            figures["disk_usage_percent"] = float(psutil.disk_usage(_ROOT).percent)
        return figures


def _count(psutil: Any) -> dict[str, int]:
    """Bytes since the boot, by what they are."""
    counted: dict[str, int] = {}
    with suppress(Exception):
        disk = psutil.disk_io_counters()
        if disk is not None:
            counted |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
    with suppress(Exception):
        network = psutil.net_io_counters()
        if network is not None:
            counted |= {
                "network_received": network.bytes_recv,
                "network_sent": network.bytes_sent,
            }
    return counted
