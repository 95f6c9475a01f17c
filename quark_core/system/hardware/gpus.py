"""The GPUs of this node, through the NVIDIA driver (NVML)."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quark_core.records import GpuReading
from quark_core.system.hardware.readings import GpusReading
from quark_core.system.process import importing

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
            self._unavailable = f"NVML: there is no {_LIBRARY} of an NVIDIA driver here"
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
