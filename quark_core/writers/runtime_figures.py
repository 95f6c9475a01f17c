"""What a telemetry record says of the machine, laid out once for each reading of it."""

from __future__ import annotations

from functools import cache

from quark_core.hardware.placement import choose_gpu
from quark_core.hardware.readings import HardwareReading
from quark_core.metric_rows import MetricKey
from quark_core.names import split_name
from quark_core.records import GpuReading

__all__ = ["MIRRORED_KEYS", "RuntimeFigures", "lay_out_figures"]

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

_NO_READING = "the first reading is not there yet"
_OLD_READING = "no reading for a long time: the sampler waits for the driver or the system"

_keys = tuple(MetricKey(key, *split_name(key)) for key in MIRRORED_KEYS)
# Of the machine's fields below, those that are mirrored, in the order of the keys.
_MIRRORED = (0, 1, 2, 5, 9, 10, 12)


class RuntimeFigures:
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
) -> RuntimeFigures:
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
    return RuntimeFigures(reading, (*cpu, *gpu), every, unavailable or None)
