"""What was read of the machine at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quark_core.records import GpuReading

__all__ = ["GpusReading", "HardwareReading", "ProcessorReading"]


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
    """

    taken_at_s: float
    processor: ProcessorReading | None = None
    gpus: GpusReading | None = None
