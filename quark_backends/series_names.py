"""What of each record is a figure of a series, and what such series are called elsewhere.

Tools that know only named curves get one per figure:

    record                  series
    metric                  its key, as the user wrote it
    telemetry               system/runtime/*, and <machine>/<node>/* for the machine's figures
    layer                   layers/<module>/<activation or gradient>/*
    parameter               params_stats/<parameter>/*
    parameter_distribution  dist/<parameter>/<value, gradient or update>, a histogram
    batch                   data/batch_loss, data/batch_size, data/seq_len_mean
    event                   quark/events/<severity>, how many so far
    alert                   quark/alerts/<rule>, its severity from 1 to 4
    health_score            quark/health/<key>
    phase                   quark/phase_index, from 0, where the phase begins

Those of ranks other than 0 stand under `rank<n>/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quark_core.names import decode_name
from quark_core.records import (
    AlertRecord,
    BatchDiagnosticRecord,
    GpuReading,
    HealthScoreRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    StreamRecord,
    SystemTelemetryRecord,
)

__all__ = ["ALERT_LEVELS", "Place", "SeriesNames", "find_place", "rank_prefix"]

ALERT_LEVELS = {"info": 1, "warning": 2, "error": 3, "critical": 4}
"""An alert's severity as a number."""

_TIMINGS = ("step_time_ms", "data_time_ms", "compute_time_ms")
_COUNTERS = ("overflow_count", "skipped_step_count")
_MACHINE = {
    "cpu_usage_percent": "cpu/utilization_percent",
    "ram_usage_percent": "ram/usage_percent",
    "ram_used_bytes": "ram/used_bytes",
    "process_cpu_percent": "process/cpu_percent",
    "process_rss_bytes": "process/rss_bytes",
    "worker_count": "workers/count",
    "workers_rss_bytes": "workers/rss_bytes",
}
_GPU = (
    "utilization_percent",
    "memory_used_bytes",
    "memory_usage_percent",
    "temperature_celsius",
    "power_watts",
)
_LAYER = (
    "mean",
    "std",
    "norm",
    "dead_unit_ratio",
    "saturation_ratio",
    "zero_ratio",
    "sample_variation_ratio",
)
_NON_FINITE = ("nan_count", "inf_count")
_PARAMETER = {
    "value_norm": "norm",
    "gradient_norm": "grad_norm",
    "update_to_parameter_ratio": "update_ratio",
    "value_near_zero_ratio": "near_zero_ratio",
}


class Place(NamedTuple):
    """Where on its axes a record stands; None where it does not say."""

    step: int | None
    epoch: int | None


def find_place(record: StreamRecord) -> Place:
    """Step and epoch of a record; those of a phase are where it begins."""
    if isinstance(record, PhaseRecord):
        return Place(record.step_start, record.epoch_start)
    return Place(getattr(record, "step", None), getattr(record, "epoch", None))


class SeriesNames:
    """The names of one tool's series.

    Args:
        machine: First part of the names of the machine's figures. Tools have
            names of their own there that must not be met.
    """

    def __init__(self, machine: str) -> None:
        self._machine = machine

    def list_figures(self, record: StreamRecord) -> list[tuple[str, float]]:
        """A record's figures with their names, in a fixed order; what is not known is left out.

        Phases and events have none by themselves: see `phase_index` and `event_count`.
        """
        prefix = rank_prefix(record)
        return [(prefix + name, float(value)) for name, value in self._list(record)]

    def phase_index(self, record: StreamRecord) -> str:
        """Name of the series that counts phases."""
        return f"{rank_prefix(record)}quark/phase_index"

    def event_count(self, record: StreamRecord, severity: str) -> str:
        """Name of the series that counts events of a severity."""
        return f"{rank_prefix(record)}quark/events/{severity}"

    def distribution(self, record: ParameterDistributionRecord) -> str:
        """Name of the histogram that a distribution is."""
        name = record.parameter_name or "model"
        return f"{rank_prefix(record)}dist/{name}/{record.distribution_type}"

    def _list(self, record: StreamRecord) -> Iterator[tuple[str, float]]:
        if isinstance(record, MetricRecord):
            yield decode_name(record.metric_key), record.value
        elif isinstance(record, SystemTelemetryRecord):
            yield from self._list_telemetry(record)
        elif isinstance(record, LayerSummaryRecord):
            yield from _list_layer(record)
        elif isinstance(record, ParameterSummaryRecord):
            stem = f"params_stats/{record.parameter_name or 'model'}"
            for field, name in _PARAMETER.items():
                yield from _known(record, field, f"{stem}/{name}")
        elif isinstance(record, BatchDiagnosticRecord):
            yield "data/batch_loss", record.loss
            yield from _known(record, "batch_size", "data/batch_size")
            if record.sequence_lengths:
                lengths = record.sequence_lengths
                yield "data/seq_len_mean", sum(lengths) / len(lengths)
        elif isinstance(record, AlertRecord):
            yield f"quark/alerts/{record.rule_id}", ALERT_LEVELS.get(record.severity, 0)
        elif isinstance(record, HealthScoreRecord):
            yield f"quark/health/{record.score_key}", record.score

    def _list_telemetry(self, record: SystemTelemetryRecord) -> Iterator[tuple[str, float]]:
        for field in _TIMINGS:
            yield from _known(record, field, f"system/runtime/{field}")
        if record.step is not None:
            for field in _COUNTERS:
                yield from _known(record, field, f"system/runtime/{field}")
        stem = f"{self._machine}/{record.node or 'node'}"
        for field, name in _MACHINE.items():
            yield from _known(record, field, f"{stem}/{name}")
        for gpu in _list_gpus(record):
            for field in _GPU:
                yield from _known(gpu, field, f"{stem}/gpu.{gpu.index}/{field}")


def rank_prefix(record: StreamRecord) -> str:
    """What names of a rank's series begin with."""
    return f"rank{record.rank}/" if record.rank else ""


def _list_gpus(record: SystemTelemetryRecord) -> tuple[GpuReading, ...]:
    if record.gpus is not None:
        return record.gpus
    if record.gpu_index is None:
        return ()
    return (
        GpuReading(
            record.gpu_index,
            utilization_percent=record.gpu_utilization_percent,
            memory_used_bytes=record.gpu_memory_used_bytes,
            memory_usage_percent=record.gpu_memory_usage_percent,
        ),
    )


def _list_layer(record: LayerSummaryRecord) -> Iterator[tuple[str, float]]:
    module = record.module_name or "model"
    if record.call_index:
        module = f"{module}.call{record.call_index}"
    stem = f"layers/{module}/{record.summary_type}"
    for field in _LAYER:
        yield from _known(record, field, f"{stem}/{field}")
    for field in _NON_FINITE:
        # Zero at nearly every step of nearly every layer.
        if getattr(record, field):
            yield f"{stem}/{field}", getattr(record, field)


def _known(record: object, field: str, name: str) -> Iterator[tuple[str, float]]:
    value = getattr(record, field)
    if value is not None:
        yield name, value
