"""The configuration of SystemTelemetry, and the part of it that makes records."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import islice
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any, ClassVar

from quark_core.delivery.channel import MetricKey
from quark_core.errors import SchemaValidationError
from quark_core.records import GpuReading, MetricRecord, SystemTelemetryRecord
from quark_core.records.json_object import JsonObject, normalize_json
from quark_core.records.names import check_text, split_name
from quark_core.records.query import check_index
from quark_core.system.hardware_readings import HardwareReading, choose_gpu, find_local_rank
from quark_core.system.hardware_sampler import Watch, shared_sampler
from quark_core.writers.buffered_writer import BufferedWriter
from quark_core.writers.scalars import to_amount
from quark_core.writers.step_timing import (
    PendingSteps,
    StepTelemetryScope,
    StepTimes,
    find_device_index,
    is_cuda,
    open_device_clock,
)

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun
    from quark_core.writers.step_timing import Throughput

_MIN_INTERVAL_S = 0.01
_MAX_INTERVAL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SystemTelemetryConfig:
    """Options of SystemTelemetry.

    Attributes:
        sample_every_n_steps: Record steps that are multiples of this number. Overflows and skipped
            steps are counted at each step.
        emit_scalar_metrics: Whether to log the fields also as metrics, such as
            `system/runtime/step_time_ms`.
        capture_cpu: Whether to read CPU, memory, and this process with its workers.
        capture_gpu: Whether to read GPUs.
        gpu_index: Driver index of the main GPU. Defaults to the first visible GPU, or that of the
            local rank. CUDA_VISIBLE_DEVICES is respected if it contains integers.
        sample_interval_s: Seconds between readings, 0.01 to 86400. The process has one sampler,
            with the smallest interval of all SystemTelemetry objects.
        device: Training device, as a torch device or its name. For a CUDA device, `start_step`
            measures with events in its current stream. torch is not imported.
        every_rank: Whether to read system metrics on each recording rank, instead of only on local
            rank 0 of each node.

    Raises:
        SchemaValidationError: A value is invalid. The message names the field.
    """

    sample_every_n_steps: int = 1
    emit_scalar_metrics: bool = True
    capture_cpu: bool = True
    capture_gpu: bool = True
    gpu_index: int | None = None
    sample_interval_s: float = 1.0
    device: Any = None
    every_rank: bool = False

    def __post_init__(self) -> None:
        every = check_index(self.sample_every_n_steps, "sample_every_n_steps")
        if not every:
            raise SchemaValidationError("sample_every_n_steps must be a positive integer")
        for name in ("emit_scalar_metrics", "capture_cpu", "capture_gpu", "every_rank"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SchemaValidationError(
                    f"{name} must be True or False, not {type(value).__name__}"
                )
        interval_s = to_amount(self.sample_interval_s, "sample_interval_s", "SystemTelemetryConfig")
        if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
            raise SchemaValidationError(
                f"sample_interval_s must be from {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S:g} seconds, "
                f"got {interval_s!r:.60}"
            )
        find_device_index(self.device)
        # Plain numbers, whatever they came as.
        object.__setattr__(self, "sample_every_n_steps", every)
        object.__setattr__(self, "gpu_index", check_index(self.gpu_index, "gpu_index"))
        object.__setattr__(self, "sample_interval_s", interval_s)


_AGE = "reading_age_ms"
_SETTLE_TIMEOUT_S = 1.0
_OLD_AFTER_S = 30.0
_OLD_AFTER_INTERVALS = 10
# Place of `gpu_index` among the machine's fields.
_GPU_INDEX = 8


class TelemetryRecording(BufferedWriter[SystemTelemetryRecord]):
    """Counts, finds the machine's figures, and puts records and their mirrors into the stream."""

    KIND: ClassVar[str] = SystemTelemetryRecord.KIND

    def __init__(
        self,
        session: object,
        *,
        config: SystemTelemetryConfig | None,
        batch_size: int,
        throughput: Callable[[OpenRun], Throughput] | None = None,
    ) -> None:
        self._throughput: Throughput | None = None
        if config is None:
            config = SystemTelemetryConfig()
        elif not isinstance(config, SystemTelemetryConfig):
            raise SchemaValidationError(
                f"config must be a SystemTelemetryConfig, not {type(config).__name__}"
            )
        self._config = config
        self._every = config.sample_every_n_steps
        self._captures = config.capture_cpu or config.capture_gpu
        self._device_index = find_device_index(config.device)
        self._is_cuda = is_cuda(config.device)
        self._old_after_s = max(_OLD_AFTER_S, _OLD_AFTER_INTERVALS * config.sample_interval_s)
        self._node = find_node()
        self._figures = self._lay_out(None)
        super().__init__(session, batch_size=batch_size)
        run = self._run
        if throughput is not None:
            self._throughput = throughput(run)
        self._watch = Watch(
            config.sample_interval_s,
            processor=config.capture_cpu,
            gpus=config.capture_gpu,
            # A run may end without its writers being closed.
            wanted=lambda: not run.is_over,
            node=config.every_rank,
        )
        if not run.leads and not config.every_rank and find_local_rank() != 0:
            self._captures = False
        if self._captures and not run.is_over and run.stream.active and not run.forked:
            # So that the first steps have figures already.
            self._start_watching()

    @property
    def records_machine(self) -> bool:
        """Whether the records include system metrics."""
        return self._captures and not self._closed

    def bind(self) -> None:
        """Connect to the run's stream."""
        super().bind()
        metrics = self._run.stream.channel(MetricRecord.KIND)
        if self._config.emit_scalar_metrics:
            # As many steps in a batch of metrics as in one of telemetry.
            metrics.fit_frames(self._batch_size * len(MIRRORED_KEYS))
        self._metric_sequence = metrics.sequence
        self._append_row = metrics.append
        self._watching = False

    def _begin(self) -> None:
        super()._begin()
        self._count_lock = threading.Lock()
        self._overflow_count = self._skipped_step_count = 0
        self._mirrored_figures: _RuntimeFigures | None = None
        self._mirrored_counts: tuple[int, int] | None = None
        self._told: dict[str, str] | None = None
        self._pending: PendingSteps | None = None
        self._clock_is_open = not self._is_cuda
        if self._throughput is not None:
            self._throughput.begin()

    def _finish_step(
        self, scope: StepTelemetryScope, overflow: bool, skipped: bool, raised: str | None
    ) -> SystemTelemetryRecord | None:
        """Record what a scope has timed."""
        if self._closed or self._run.refusal is not None:
            self._check_open("finish")
        if self._throughput is not None or scope.counts is not None:
            self._count_throughput(scope.counts, scope.start_s, None)
        if not scope.sampled:
            if overflow or skipped:
                self._count(overflow, skipped)
            return None
        time_us = time_ns() // 1000
        wall = scope.measure_wall_times()
        counts = self._count(overflow, skipped)
        figures, items = self._find_figures()
        if self._throughput is not None:
            self._put_rates(scope.step, scope.epoch, time_us)
        if raised is not None:
            items["raised"] = raised
        if not self._is_cuda:
            metadata = merge_metadata(items, scope.metadata)
            return self._put(
                "step", scope.step, scope.epoch, time_us, figures, counts, metadata, wall
            )
        emit = partial(
            self._put_timed,
            scope.step,
            scope.epoch,
            time_us,
            figures,
            counts,
            items,
            scope.metadata,
        )
        marks = scope.mark_end()
        if self._pending is None or (marks is None and not len(self._pending)):
            return emit(wall, "wall_clock")
        self._pending.add(marks, wall, emit)
        self._pending.poll()
        return None

    def _put_timed(
        self,
        step: int,
        epoch: int | None,
        time_us: int,
        figures: _RuntimeFigures,
        counts: tuple[int, int],
        items: dict[str, Any],
        own: dict[str, Any] | None,
        times: StepTimes,
        timing: str,
    ) -> SystemTelemetryRecord | None:
        """Record a step of a CUDA device, once its times are known."""
        if self._run.is_over:
            return None  # the run has ended while the device was at work
        items["timing"] = timing
        return self._put(
            "step", step, epoch, time_us, figures, counts, merge_metadata(items, own), times
        )

    def _put(
        self,
        boundary: str,
        step: int | None,
        epoch: int | None,
        time_us: int,
        figures: _RuntimeFigures,
        counts: tuple[int, int],
        metadata: JsonObject | None,
        times: StepTimes,
    ) -> SystemTelemetryRecord:
        """Make the record, hand it over, and mirror it."""
        record = SystemTelemetryRecord(  # type: ignore[call-arg]
            *self._origin,
            self._take_sequence(),
            time_us,
            boundary,
            step,
            epoch,
            *times,
            *figures.machine,  # type: ignore[arg-type]
            *counts,
            figures.gpus,
            self._node,
            metadata,
        )
        record = self._put_record(record)
        self._remember(record, 1)
        if self._config.emit_scalar_metrics and (step is not None or epoch is not None):
            self._mirror(step, epoch, time_us, figures, counts, times)
        return record

    def _mirror(
        self,
        step: int | None,
        epoch: int | None,
        time_us: int,
        figures: _RuntimeFigures,
        counts: tuple[int, int],
        times: StepTimes,
    ) -> None:
        step_ms, data_ms, compute_ms = times
        # A reading stands for many steps and a count for more, and each is one point.
        is_new = figures is not self._mirrored_figures
        is_counted = counts != self._mirrored_counts
        values = [time_ms for time_ms in times if time_ms is not None]
        if is_new:
            self._mirrored_figures = figures
            values += figures.values
        if is_counted:
            self._mirrored_counts = counts
            values += map(float, counts)
        count = len(values)
        if not count:
            return
        keys = figures.choose_keys(
            (step_ms is not None, data_ms is not None, compute_ms is not None, is_new, is_counted)
        )
        self._append_points(step, epoch, time_us, keys, values)

    def _append_points(
        self,
        step: int | None,
        epoch: int | None,
        time_us: int,
        keys: tuple[MetricKey, ...],
        values: list[float],
    ) -> None:
        """Hand over a row of metrics."""
        count = len(values)
        sequences = list(islice(self._metric_sequence, count))
        if sequences[-1] - sequences[0] == count - 1:
            self._append_row((sequences[0], time_us, step, epoch, keys, values))
            return
        # Another thread drew numbers in between, which needs an interpreter without a GIL.
        for sequence, key, value in zip(sequences, keys, values, strict=True):
            self._append_row((sequence, time_us, step, epoch, (key,), [value]))

    def _count_throughput(
        self, counted: dict[str, float] | None, start_s: float | None, step_time_ms: float | None
    ) -> None:
        if self._throughput is None:
            # A step has said what it does, without anybody having asked before.
            from quark_core.writers.step_timing import make_throughput

            self._throughput = make_throughput(self._run)
        self._throughput.count_step(counted, start_s, step_time_ms)

    def _put_rates(self, step: int | None, epoch: int | None, time_us: int) -> None:
        """The rates up to this step, as metrics: they stand in no record."""
        assert self._throughput is not None
        keys, values = self._throughput.take_rates(self._find_gpu_name)
        if values:
            self._append_points(step, epoch, time_us, tuple(keys), values)

    def _find_gpu_name(self) -> str | None:
        from quark_core.writers.step_timing import find_cuda_name

        name = find_cuda_name(self._device_index)
        if name is not None:
            return name
        gpus = self._figures.gpus
        chosen = self._figures.machine[_GPU_INDEX]
        if gpus:
            return next((gpu.name for gpu in gpus if gpu.index == chosen), None)
        # Without a GPU there is nothing that the table knows.
        return "no GPU" if self._figures.reading is not None or not self._captures else None

    def _find_figures(self) -> tuple[_RuntimeFigures, dict[str, Any]]:
        """The machine's figures as they are known now, and what metadata says of them."""
        items: dict[str, Any] = {}
        if not self._captures:
            return self._figures, items
        if not (self._watching and shared_sampler.running):
            self._start_watching()
        reading = shared_sampler.reading
        figures = self._figures
        if figures.reading is not reading:
            figures = self._figures = self._lay_out(reading)
        if reading is not None:
            age_s = monotonic() - reading.taken_at_s
            if age_s > self._old_after_s:
                figures = self._lay_out(reading, is_old=True)
            else:
                # In steps of 10 ms, so that what quick steps say of it is the same.
                items[_AGE] = round(age_s * 100.0) * 10.0
        unavailable = figures.unavailable
        if unavailable != self._told:
            self._told = unavailable
            if unavailable is not None:
                items["unavailable"] = unavailable
        return figures, items

    def _lay_out(self, reading: HardwareReading | None, *, is_old: bool = False) -> _RuntimeFigures:
        config = self._config
        return lay_out_figures(
            reading,
            capture_cpu=config.capture_cpu,
            capture_gpu=config.capture_gpu,
            gpu_index=config.gpu_index,
            device_index=self._device_index if self._is_cuda else None,
            is_old=is_old,
        )

    def _start_watching(self) -> None:
        self._watching = True
        shared_sampler.watch(self._watch)

    def _open_clock(self) -> None:
        """Once torch is there, see whether its device can be asked for times."""
        if "torch" not in sys.modules:
            return
        clock = open_device_clock(self._config.device)
        if clock is not None:
            self._pending = PendingSteps(clock)
        self._clock_is_open = True

    def _count(self, overflow: bool, skipped: bool) -> tuple[int, int]:
        """Count the flags of a step; returns the counts so far."""
        if overflow or skipped:
            with self._count_lock:
                self._overflow_count += overflow
                self._skipped_step_count += skipped
        return self._overflow_count, self._skipped_step_count

    def settle(self) -> None:
        """Record steps that a GPU has not finished, after waiting up to one second."""
        if self._pending is not None:
            self._pending.settle(_SETTLE_TIMEOUT_S)


def find_node() -> str | None:
    """Name of this host, or None where it has none."""
    return check_text(platform.node(), "node") or None


def take_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The caller's metadata as it is now."""
    if metadata is None:
        return None
    if type(metadata) is not dict and not isinstance(metadata, Mapping):
        raise SchemaValidationError(
            f"metadata must be a mapping of JSON values, not {type(metadata).__name__}"
        )
    taken: dict[str, Any] = normalize_json(metadata, "metadata")
    return taken


def merge_metadata(items: dict[str, Any], own: dict[str, Any] | None) -> JsonObject | None:
    """Our metadata and the caller's, which wins."""
    if own is not None:
        return JsonObject({**items, **own})
    if len(items) == 1 and _AGE in items:
        return _make_age(items[_AGE])
    return JsonObject(items) if items else None


@lru_cache(maxsize=64)
def _make_age(age_ms: float) -> JsonObject:
    return JsonObject({_AGE: age_ms})


MIRRORED_KEYS = (
    "system/runtime/step_time_ms",
    "system/runtime/data_time_ms",
    "system/runtime/compute_time_ms",
    "system/cpu/usage_percent",
    "system/ram/usage_percent",
    "system/ram/used_bytes",
    "system/process/rss_bytes",
    "system/gpu/utilization_percent",
    "system/gpu/memory_used_bytes",
    "system/gpu/memory_usage_percent",
    "system/runtime/overflow_count",
    "system/runtime/skipped_step_count",
)
"""Metric keys of the mirrored fields: three times, the machine's figures, two counts."""

_NO_READING = "the first reading is not available yet"
_OLD_READING = "no reading for a long time: the driver or the system does not answer"

_keys = tuple(MetricKey(key, *split_name(key)) for key in MIRRORED_KEYS)
# Of the machine's fields below, those that are mirrored, in the order of the keys.
_MIRRORED = (0, 1, 2, 5, 9, 10, 12)


class _RuntimeFigures:
    """A reading as the fields of a record and as the values of a row of metrics.

    Attributes:
        reading: What it was made of.
        machine: `cpu_usage_percent` to `gpu_memory_usage_percent`, in the record's order.
        gpus: Every GPU, or None.
        values: The mirrored ones of `machine` that are not None.
        unavailable: "cpu" or "gpu" -> why figures are missing; None where none are.
    """

    __slots__ = ("_present", "gpus", "machine", "reading", "unavailable", "values")

    def __init__(
        self,
        reading: HardwareReading | None,
        machine: tuple[float | None, ...],
        gpus: tuple[GpuReading, ...] | None,
        unavailable: dict[str, str] | None,
    ) -> None:
        self.reading = reading
        self.machine = machine
        self.gpus = gpus
        self.unavailable = unavailable
        mirrored = [machine[place] for place in _MIRRORED]
        self.values = [float(value) for value in mirrored if value is not None]
        self._present = tuple(value is not None for value in mirrored)

    def choose_keys(self, present: tuple[bool, bool, bool, bool, bool]) -> tuple[MetricKey, ...]:
        """Keys of a row, the same object for the same ones.

        Args:
            present: Whether step, data and compute time, `values`, and the
                counts are in it.
        """
        return _choose_keys(present, self._present)


@cache
def _choose_keys(present: tuple[bool, ...], machine: tuple[bool, ...]) -> tuple[MetricKey, ...]:
    *times, has_machine, has_counts = present
    there = (*times, *(has_machine and one for one in machine), has_counts, has_counts)
    return tuple(key for key, is_there in zip(_keys, there, strict=True) if is_there)


def lay_out_figures(
    reading: HardwareReading | None,
    *,
    capture_cpu: bool,
    capture_gpu: bool,
    gpu_index: int | None,
    device_index: int | None,
    is_old: bool = False,
) -> _RuntimeFigures:
    """Lay out a reading for a writer's configuration.

    Args:
        reading: None where there is none yet.
        capture_cpu, capture_gpu: What the writer's records are to have.
        gpu_index, device_index: As in `choose_gpu`.
        is_old: The reading is so old that its figures say nothing any more.
    """
    unavailable: dict[str, str] = {}
    cpu: tuple[float | None, ...] = (None,) * 8
    gpu: tuple[float | None, ...] = (None,) * 5
    processor = gpus = None
    if reading is not None and not is_old:
        processor, gpus = reading.processor, reading.gpus
    missing = _OLD_READING if is_old else _NO_READING
    if capture_cpu and processor is None:
        unavailable["cpu"] = missing
    elif capture_cpu and processor is not None:
        cpu = (
            processor.cpu_usage_percent,
            processor.ram_usage_percent,
            processor.ram_used_bytes,
            processor.ram_total_bytes,
            processor.process_cpu_percent,
            processor.process_rss_bytes,
            processor.worker_count,
            processor.workers_rss_bytes,
        )
        if processor.unavailable is not None:
            unavailable["cpu"] = processor.unavailable
    every: tuple[GpuReading, ...] | None = None
    if capture_gpu and gpus is None:
        unavailable["gpu"] = missing
    elif capture_gpu and gpus is not None:
        every = gpus.gpus
        index, reason = choose_gpu(gpus, gpu_index=gpu_index, device_index=device_index)
        chosen = next((one for one in every or () if one.index == index), None)
        if chosen is not None:
            reason = gpus.gaps.get(chosen.index)
            gpu = (
                chosen.index,
                chosen.utilization_percent,
                chosen.memory_used_bytes,
                chosen.memory_total_bytes,
                chosen.memory_usage_percent,
            )
        if reason is not None:
            unavailable["gpu"] = reason
    return _RuntimeFigures(reading, (*cpu, *gpu), every, unavailable or None)
