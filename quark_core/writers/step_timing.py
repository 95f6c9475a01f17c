"""The times of training steps, on the host and on a GPU, and the throughput that they give."""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, TypedDict

from quark_core.delivery.channel import MetricKey
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.ranks.launches import detect_rank
from quark_core.records import SystemTelemetryRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.names import split_name
from quark_core.runs.open_run import OpenRun
from quark_core.writers.scalars import to_float

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


class StepTelemetryScope:
    """Timer of one step, returned by `SystemTelemetry.start_step`.

    It runs until `finish` or the end of the `with` block. Use it in the training thread. Its
    methods take microseconds and do not wait for a store or GPU.

    Attributes:
        step: Step.
        epoch: Epoch, or None.
    """

    __slots__ = (
        "_counts",
        "_end_s",
        "_finish_step",
        "_finished",
        "_metadata",
        "_pending",
        "_ready",
        "_ready_s",
        "_result",
        "_sampled",
        "_start",
        "_start_s",
        "epoch",
        "step",
    )

    def __init__(
        self,
        finish_step: Callable[
            [StepTelemetryScope, bool, bool, str | None], SystemTelemetryRecord | None
        ],
        step: int,
        epoch: int | None,
        *,
        sampled: bool,
        metadata: dict[str, Any] | None = None,
        pending: PendingSteps | None = None,
    ) -> None:
        self._finish_step = finish_step
        self.step = step
        self.epoch = epoch
        self._sampled = sampled
        self._metadata = metadata
        self._pending = pending
        self._finished = False
        self._counts: dict[str, float] | None = None
        self._result: SystemTelemetryRecord | None = None
        self._start: DeviceEvent | None = None
        self._ready: DeviceEvent | None = None
        self._ready_s: float | None = None
        if pending is not None:
            self._start = pending.mark()
        self._start_s = perf_counter() if sampled else 0.0

    def mark_data_ready(self) -> None:
        """Mark that the batch is on its device: data time ends, compute time begins.

        A later call moves the mark. After `finish` it does nothing.
        """
        if self._sampled and not self._finished:
            self._ready_s = perf_counter()
            if self._pending is not None:
                self._ready = self._pending.mark()

    def count(
        self,
        *,
        tokens: float | None = None,
        samples: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Add the amount of work of the step in this process.

        Overrides `tokens_per_step` and the like. A GPU tensor makes the call wait for the GPU.
        After `finish` it does nothing.

        Args:
            tokens, samples, flops: Amounts, or None.

        Raises:
            SchemaValidationError: An amount is not a finite non-negative number. The message names
                it.
        """
        if self._finished:
            return

        said = self._counts or {}
        for name, amount in check_counts(
            {"tokens": tokens, "samples": samples, "flops": flops}
        ).items():
            said[name] = said.get(name, 0.0) + amount
        self._counts = said

    def finish(
        self, *, overflow_occurred: bool = False, skipped_step: bool = False
    ) -> SystemTelemetryRecord | None:
        """End the step and record it; a second call returns the same record.

        Args:
            overflow_occurred: Whether gradients overflowed. Counted at each step. Defaults to
                False.
            skipped_step: Whether the optimizer skipped its step. Counted at each step. Defaults to
                False.

        Returns:
            The record. None if the step is not sampled, or if its times are measured on a GPU and
            follow later. Without `mark_data_ready`, only the total time is known.

        Raises:
            SchemaValidationError: An argument is not a bool. The step continues.
            InvalidRunStateError: The telemetry is closed or the run has ended.
        """
        return self._finish(overflow_occurred, skipped_step, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._finish(False, False, None if exc_type is None else exc_type.__name__)
        except QuarkError:
            # The user's exception must not be replaced by ours.
            if error is None:
                raise

    def _finish(
        self, overflow_occurred: object, skipped_step: object, raised: str | None
    ) -> SystemTelemetryRecord | None:
        if self._finished:
            return self._result
        if self._sampled:
            self._end_s = perf_counter()
        overflow = overflow_occurred is not False and check_flag(
            overflow_occurred, "overflow_occurred"
        )
        skipped = skipped_step is not False and check_flag(skipped_step, "skipped_step")
        self._finished = True
        self._result = self._finish_step(self, overflow, skipped, raised)
        return self._result

    @property
    def counts(self) -> dict[str, float] | None:
        """Amount of work of the step, or None."""
        return self._counts

    @property
    def start_s(self) -> float | None:
        """Start by `perf_counter`, or None if the step is not sampled."""
        return self._start_s if self._sampled else None

    @property
    def sampled(self) -> bool:
        """Whether the step is sampled."""
        return self._sampled

    @property
    def metadata(self) -> dict[str, Any] | None:
        """JSON values passed with the step, or None."""
        return self._metadata

    def measure_wall_times(self) -> StepTimes:
        """Return the times by the host's clock, once the step is finished."""
        if self._ready_s is None:
            return StepTimes((self._end_s - self._start_s) * 1000.0, None, None)
        data_ms = (self._ready_s - self._start_s) * 1000.0
        compute_ms = (self._end_s - self._ready_s) * 1000.0
        return StepTimes(data_ms + compute_ms, data_ms, compute_ms)

    def mark_end(self) -> DeviceMarks | None:
        """Mark the end on the device and return its events, or None if that fails."""
        if self._pending is None or self._start is None:
            return None
        if self._ready_s is not None and self._ready is None:
            return None
        end = self._pending.mark()
        return None if end is None else DeviceMarks(self._start, self._ready, end)


def check_flag(value: Any, argument: str) -> bool:
    """A truth value, also of numpy or torch; one on a GPU makes the caller wait for it.

    Raises:
        SchemaValidationError: Neither a truth value nor 0 or 1.
    """
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
    except Exception as error:
        # A foreign object may raise anything while it is read.
        raise SchemaValidationError(
            f"{argument} must be True or False, but cannot be read: {type(error).__name__}"
        ) from error
    raise SchemaValidationError(f"{argument} must be True or False, not {type(value).__name__}")


# What a GPU can compute at most, by its name and the precision of its matrix products.
#
# Dense products, without sparsity, with float32 accumulation where that differs, of one device as
# the driver shows it. What is not in the table is not known: a wrong peak is worse than none.

PRECISIONS: tuple[str, ...] = ("fp8", "bf16", "fp16", "tf32", "fp32")
"""Names of precisions, as they are asked for."""

_SPELLINGS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    **{name: name for name in PRECISIONS},
}
_TERA = 1e12


def _list_peaks(
    half: float, tf32: float | None, fp32: float | None, fp8: float | None = None
) -> dict[str, float]:
    """TFLOP/s as FLOP/s; bfloat16 and float16 are equally fast."""
    given = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {name: peak * _TERA for name, peak in given.items() if peak is not None}


# From the vendors' data sheets; where these give figures with sparsity, half of them.
_H100_SXM = _list_peaks(989.4, 494.7, 66.9, 1978.9)  # NVIDIA H100 / H200 Tensor Core GPU Datasheet
_TABLE: tuple[tuple[str, dict[str, float]], ...] = (
    (r"gb200", _list_peaks(2500, 1250, None, 5000)),  # NVIDIA GB200 NVL72 datasheet, by 72
    (r"b200", _list_peaks(2250, 1125, None, 4500)),  # NVIDIA DGX B200 datasheet, by 8
    (r"h100 nvl", _list_peaks(835.5, 417.5, 60, 1670.5)),  # NVIDIA H100 NVL product brief
    (r"h100 pcie", _list_peaks(756, 378, 51, 1513)),  # NVIDIA H100 Tensor Core GPU Datasheet
    (r"gh200|h200|h100|h800", _H100_SXM),
    (r"h20", _list_peaks(148, 74, 44, 296)),  # NVIDIA H20 datasheet
    (r"a100|a800", _list_peaks(312, 156, 19.5)),  # NVIDIA A100 Tensor Core GPU Datasheet
    (r"rtx a6000", _list_peaks(154.8, 77.4, 38.7)),  # NVIDIA RTX A6000 datasheet
    (r"a40", _list_peaks(149.7, 74.8, 37.4)),  # NVIDIA A40 datasheet
    (r"a30", _list_peaks(165, 82, 10.3)),  # NVIDIA A30 datasheet
    (r"a10", _list_peaks(125, 62.5, 31.2)),  # NVIDIA A10 datasheet
    (r"l40s", _list_peaks(362, 183, 91.6, 733)),  # NVIDIA L40S datasheet
    (r"l40", _list_peaks(181, 90.5, 90.5, 362)),  # NVIDIA L40 datasheet
    (r"l4", _list_peaks(121, 60, 30.3, 242.5)),  # NVIDIA L4 datasheet
    (r"rtx 6000 ada", _list_peaks(364.2, 182.1, 91.1, 728.5)),  # NVIDIA RTX 6000 Ada datasheet
    (r"rtx 5090", _list_peaks(209.5, 104.8, 104.8, 419)),  # NVIDIA RTX Blackwell whitepaper
    (r"rtx 4090", _list_peaks(165.2, 82.6, 82.6, 330.3)),  # NVIDIA Ada GPU Architecture whitepaper
    (r"rtx 3090", _list_peaks(71, 35.6, 35.6)),  # NVIDIA Ampere GA102 whitepaper
    # Of Volta and Turing tensor cores take float16 only.
    (r"v100[- ]pcie", {"fp16": 112 * _TERA, "fp32": 14 * _TERA}),  # NVIDIA V100 datasheet
    (r"v100", {"fp16": 125 * _TERA, "fp32": 15.7 * _TERA}),  # NVIDIA V100 datasheet
    (r"t4", {"fp16": 65 * _TERA, "fp32": 8.1 * _TERA}),  # NVIDIA T4 datasheet
    (r"mi300x|mi325x", _list_peaks(1307.4, 653.7, 163.4, 2614.9)),  # AMD Instinct data sheets
    (r"mi250x", _list_peaks(191.5, None, 47.85)),  # AMD Instinct MI250X, one of its two dies
    (r"mi210", _list_peaks(181, None, 45.3)),  # AMD Instinct MI210 data sheet
)
_PATTERNS = tuple(
    (re.compile(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])"), peaks) for pattern, peaks in _TABLE
)


def find_peak_flops(name: str | None, precision: str) -> float | None:
    """FLOP/s of one device at most; None where the name or the precision is not known.

    Args:
        name: As the driver calls it, such as `NVIDIA H100 80GB HBM3`.
        precision: One of `PRECISIONS`.
    """
    lowered = (name or "").lower()
    # Of a slice of a GPU nobody says what share it has.
    if " mig " in f" {lowered} ":
        return None
    for pattern, peaks in _PATTERNS:
        if pattern.search(lowered):
            return peaks.get(precision)
    return None


def read_precision(precision: object) -> str | None:
    """One of `PRECISIONS` for a name or a torch dtype; None where it is none."""
    return _SPELLINGS.get(str(precision).removeprefix("torch.").lower())


Amount = float | Callable[[], float | None] | None
"""What a step does of something: a number, or a function that says it at the end of the step."""


class StepRates(TypedDict, total=False):
    """What `SystemTelemetry` takes of what steps do."""

    tokens_per_step: Amount
    samples_per_step: Amount
    flops_per_step: Amount | Literal["model"]
    flops_per_token: float | None
    precision: object
    peak_flops_per_s: float | None


THROUGHPUT_KEYS = {
    "tokens": "system/runtime/tokens_per_s",
    "samples": "system/runtime/samples_per_s",
    "flops": "system/runtime/flops_per_s",
    "mfu": "system/runtime/mfu_percent",
}
"""What is counted -> the metric of its rate; `mfu` is the share of the peak, in percent."""

_KEYS = {name: MetricKey(key, *split_name(key)) for name, key in THROUGHPUT_KEYS.items()}
_COUNTED = ("tokens", "samples", "flops")
_PERCENT = 100.0


def make_throughput(
    run: OpenRun,
    *,
    tokens_per_step: Amount = None,
    samples_per_step: Amount = None,
    flops_per_step: Amount = None,
    flops_per_token: float | None = None,
    precision: object = "bf16",
    peak_flops_per_s: float | None = None,
) -> Throughput:
    """What counts for one writer.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    amounts = {"tokens": tokens_per_step, "samples": samples_per_step, "flops": flops_per_step}
    for name, amount in amounts.items():
        if amount is not None and not callable(amount):
            amounts[name] = _check_amount(amount, f"{name}_per_step")
    if flops_per_token is not None:
        if flops_per_step is not None:
            raise SchemaValidationError("flops_per_step and flops_per_token cannot be combined")
        flops_per_token = _check_amount(flops_per_token, "flops_per_token")
    known = read_precision("bf16" if precision is None else precision)
    if known is None:
        raise SchemaValidationError(
            f"precision must be one of {', '.join(map(repr, PRECISIONS))}, or a torch dtype, "
            f"got {str(precision)[:40]!r}"
        )
    if peak_flops_per_s is not None:
        peak_flops_per_s = _check_amount(peak_flops_per_s, "peak_flops_per_s")
        if not peak_flops_per_s:
            raise SchemaValidationError("peak_flops_per_s must be above 0")
    return Throughput(run, amounts, flops_per_token, known, peak_flops_per_s)


class Throughput:
    """Counts what steps do, and says at recorded steps how much that is for each second.

    A rate is over the time since the recorded step before, in which waiting for
    data and whatever stands between two steps counts as well. Counts are of this process.
    """

    def __init__(
        self,
        run: OpenRun,
        amounts: dict[str, Any],
        flops_per_token: float | None,
        precision: str,
        peak_flops_per_s: float | None,
    ) -> None:
        self._run = run
        self._amounts = amounts
        self._flops_per_token = flops_per_token
        self._precision = precision
        self._peak = peak_flops_per_s
        self._is_peak_known = peak_flops_per_s is not None
        self._device = "given by the user" if peak_flops_per_s is not None else ""
        self._has_told = False
        self.begin()

    def begin(self) -> None:
        """Count anew: of a new writer, the first one or a forked child's."""
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._times_ms: float | None = 0.0
        self._done: dict[str, float] = {}
        # Of what a step since then did not know, a rate would say too little.
        self._unknown: set[str] = set()

    def count_step(
        self, counted: dict[str, float] | None, start_s: float | None, step_time_ms: float | None
    ) -> None:
        """A step has ended.

        Args:
            counted: What the step itself has said that it did.
            start_s: When it began, by `perf_counter`, where that is known.
            step_time_ms: How long it took, where the caller knows.
        """
        amounts = self._weigh_step(counted or {})
        with self._lock:
            if self._since_s is None:
                self._since_s = perf_counter() if start_s is None else start_s
                if start_s is None and step_time_ms is None:
                    # What was done in a time that nobody knows says nothing.
                    return
            if step_time_ms is None:
                self._times_ms = None
            elif self._times_ms is not None:
                self._times_ms += step_time_ms
            for name, amount in amounts.items():
                self._done[name] = self._done.get(name, 0.0) + amount

    def take_rates(self, gpu_name: Callable[[], str | None]) -> tuple[list[MetricKey], list[float]]:
        """The metrics of a recorded step and their values; the next ones count from here.

        Args:
            gpu_name: What the device is called, where that is known by now.
        """
        with self._lock:
            now_s = perf_counter()
            done, self._done = self._done, {}
            unknown, self._unknown = self._unknown, set()
            since_s, self._since_s = self._since_s, now_s
            times_ms, self._times_ms = self._times_ms, 0.0
        seconds = 0.0
        if times_ms:
            seconds = times_ms / 1000.0
        elif since_s is not None:
            seconds = now_s - since_s
        if seconds <= 0.0:
            return [], []
        rates = {name: done[name] / seconds for name in done if name not in unknown}
        if "flops" in rates:
            peak = self._find_peak(gpu_name)
            if peak is not None:
                rates["mfu"] = _PERCENT * rates["flops"] / peak
        if rates:
            self._tell(rates)
        return [_KEYS[name] for name in rates], list(rates.values())

    def _weigh_step(self, counted: dict[str, float]) -> dict[str, float]:
        done = dict(counted)
        for name in _COUNTED:
            amount = self._amounts[name]
            if name in done or amount is None:
                continue
            if callable(amount):
                amount = self._ask(name, amount)
            if amount is None:
                self._unknown.add(name)
            else:
                done[name] = amount
        if self._flops_per_token is not None and "flops" not in done and "tokens" in done:
            done["flops"] = self._flops_per_token * done["tokens"]
        return done

    def _ask(self, name: str, function: Callable[[], float | None]) -> float | None:
        try:
            amount = function()
            return None if amount is None else _check_amount(amount, f"{name}_per_step")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            self._amounts[name] = None
            _log.warning(
                "telemetry: %s per second are not measured: %s_per_step raised %s: %.200s",
                name, name, type(error).__name__, error,
            )  # fmt: skip
            return None

    def _find_peak(self, gpu_name: Callable[[], str | None]) -> float | None:
        if self._is_peak_known:
            return self._peak
        name = gpu_name()
        if name is None:
            # The first reading of the machine may still be on its way.
            return None
        self._is_peak_known = True
        self._device = name
        self._peak = find_peak_flops(name, self._precision)
        if self._peak is None:
            message = (
                f"the peak performance of {name!r} with {self._precision} is unknown, so MFU is "
                "not computed. Pass SystemTelemetry(peak_flops_per_s=…)"
            )
            _log.warning("telemetry: %s", message)
            payload = JsonObject({"message": message, "device": name})
            self._run.emit_event("mfu_unknown", "info", payload=payload)
        return self._peak

    def _tell(self, rates: dict[str, float]) -> None:
        """Say once what the figures are held against."""
        if self._has_told or ("flops" in rates and not self._is_peak_known):
            return
        self._has_told = True
        payload: dict[str, Any] = {
            "counted": [name for name in _COUNTED if name in rates],
            "world_size": detect_rank().world_size,
        }
        if "mfu" in rates:
            payload |= {
                "device": self._device,
                "precision": self._precision,
                "peak_flops_per_s": self._peak,
            }
        self._run.emit_event("throughput_measured", "debug", payload=JsonObject(payload))


def check_counts(counts: dict[str, Any]) -> dict[str, float]:
    """What a step says that it did.

    Raises:
        SchemaValidationError: No number that is finite and not negative; the message names it.
    """
    return {
        name: _check_amount(amount, name) for name, amount in counts.items() if amount is not None
    }


def find_cuda_name(index: int | None) -> str | None:
    """The name of a CUDA device by the torch that is loaded already; None where there is none."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        return str(cuda.get_device_name(index))
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return None


def _check_amount(value: Any, argument: str) -> float:
    amount = to_float(value, argument, "telemetry")
    if not math.isfinite(amount) or amount < 0:
        raise SchemaValidationError(
            f"{argument} must be a finite, non-negative number, got {amount}"
        )
    return amount
