"""Step times measured on a GPU, without ever waiting for it."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quark_core.errors import SchemaValidationError

_log = logging.getLogger("quark")

# What torch knows, and "cpu"; "gpu" is none of them, and would silently time nothing.
_DEVICE_TYPES = frozenset(
    "cpu cuda mps xpu xla hpu npu meta vulkan ipu privateuseone mtia maia lazy".split()
)
_DEVICE = re.compile(r"([a-z]+)(?::(\d{1,4}))?")
_MAX_PENDING_STEPS = 1024
_POLL_S = 0.001


class DeviceEvent(Protocol):
    """A moment in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come there. Never waits."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to another event; the device has passed both."""


class DeviceClock(Protocol):
    """Marks moments in the work of a device."""

    def mark(self) -> DeviceEvent | None:
        """Mark the end of what was given to the device so far; None where that is impossible."""

    def can_query(self) -> bool:
        """Whether events may be asked now."""


class CudaClock:
    """Events on the current stream of a CUDA device, through the torch that is loaded already."""

    def __init__(self, torch: Any, index: int | None) -> None:
        self._cuda = torch.cuda
        self._index = index

    def mark(self) -> DeviceEvent | None:
        """Record an event on the device's current stream; None while a graph is captured."""
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            return None
        event: DeviceEvent = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._index))  # type: ignore[attr-defined]
        return event

    def can_query(self) -> bool:
        """Whether no graph is being captured, which asking an event would break off."""
        return not self._cuda.is_current_stream_capturing()


class StepTimes(NamedTuple):
    """Milliseconds of a step, None where they are not known; `step_ms` is the sum of the others."""

    step_ms: float | None
    data_ms: float | None
    compute_ms: float | None


class DeviceMarks(NamedTuple):
    """The moments of a step on the device; `ready` is None where the batch was never marked."""

    start: DeviceEvent
    ready: DeviceEvent | None
    end: DeviceEvent

    def measure(self) -> StepTimes:
        """The times between the moments, all of which the device has passed."""
        if self.ready is None:
            return StepTimes(self.start.elapsed_time(self.end), None, None)
        data_ms = self.start.elapsed_time(self.ready)
        compute_ms = self.ready.elapsed_time(self.end)
        return StepTimes(data_ms + compute_ms, data_ms, compute_ms)


class _Pending(NamedTuple):
    marks: DeviceMarks | None
    wall: StepTimes
    emit: Callable[[StepTimes, str], object]


class PendingSteps:
    """Steps that are finished for the host and not yet for the device, in order.

    Any method may be called from any thread; none raises. Each step is
    emitted once, with its device times ("cuda_events") or, where these are
    not to be had, with the host's ("wall_clock").
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._steps: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._told = False

    def __len__(self) -> int:
        return len(self._steps)

    def mark(self) -> DeviceEvent | None:
        """Mark a moment; None where the device refuses."""
        try:
            return self._clock.mark()
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            self._tell(error)
            return None

    def add(
        self, marks: DeviceMarks | None, wall: StepTimes, emit: Callable[[StepTimes, str], object]
    ) -> None:
        """Keep a step until the device has passed its end; the oldest goes where too many wait.

        One without marks only waits for those before it.
        """
        self._steps.append(_Pending(marks, wall, emit))
        if len(self._steps) > _MAX_PENDING_STEPS:
            with self._lock:
                self._emit_oldest(by_device=False)

    def poll(self) -> None:
        """Emit the steps whose end the device has passed. Never waits."""
        if self._steps and self._lock.acquire(blocking=False):
            try:
                while self._steps and self._clock.can_query():
                    marks = self._steps[0].marks
                    if marks is not None and not marks.end.query():
                        break
                    self._emit_oldest(by_device=True)
            except Exception as error:  # noqa: BLE001 - a driver may raise anything
                self._tell(error)
                self._emit_oldest(by_device=False)
            finally:
                self._lock.release()

    def settle(self, timeout_s: float) -> None:
        """Emit all steps: those that the device does not pass in time by the host's times."""
        deadline_s = time.monotonic() + timeout_s
        self.poll()
        while self._steps and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self.poll()
        while self._steps:
            with self._lock:
                self._emit_oldest(by_device=False)

    def become_child(self) -> None:
        """Forget the steps, which are the parent's: this process was forked."""
        self._lock = threading.Lock()
        self._steps = deque()

    def _emit_oldest(self, *, by_device: bool) -> None:
        try:
            step = self._steps.popleft()
        except IndexError:
            return
        times, timing = step.wall, "wall_clock"
        if by_device and step.marks is not None:
            try:
                times, timing = step.marks.measure(), "cuda_events"
            except Exception as error:  # noqa: BLE001 - as above
                self._tell(error)
        step.emit(times, timing)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "telemetry: step times cannot be measured on the device: %s: %s",
                type(error).__name__,
                error,
            )


def open_device_clock(device: object) -> DeviceClock | None:
    """A clock for a CUDA device; None for another one, or where torch has no CUDA here."""
    torch: Any = sys.modules.get("torch")
    if not is_cuda(device) or torch is None:
        return None
    try:
        if not torch.cuda.is_available():
            return None
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return None
    return CudaClock(torch, find_device_index(device))


def is_cuda(device: object) -> bool:
    """Whether a checked device is a CUDA one."""
    return device is not None and _take_apart(device, "device")[0] == "cuda"


def find_device_index(device: object) -> int | None:
    """The number of a checked device, such as 1 of `cuda:1`; None where it has none.

    Raises:
        SchemaValidationError: Neither a device nor the name of one.
    """
    return None if device is None else _take_apart(device, "device")[1]


def _take_apart(device: object, argument: str) -> tuple[str, int | None]:
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if isinstance(device, str):
        match = _DEVICE.fullmatch(device)
        if match is None or match[1] not in _DEVICE_TYPES:
            raise SchemaValidationError(
                f"{argument} must be a torch device or its name such as 'cuda:0', "
                f"got {device[:60]!r}"
            )
        return match[1], None if match[2] is None else int(match[2])
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise SchemaValidationError(
            f"{argument} must be a torch device or its name such as 'cuda:0', "
            f"not {type(device).__name__}"
        )
    return kind, index
