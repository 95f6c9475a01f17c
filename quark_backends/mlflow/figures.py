"""What a run has beside metrics, as curves that MLflow can show.

    telemetry     system/cpu_utilization_percentage and the other names of MLflow's own
                  System tab; of a rank other than 0 under system/<node>/
    layer         layers/<module>/<activation or gradient>/<statistic>, of the worst layers
    parameter     params_stats/<parameter>/<statistic>, of the worst parameters
    batch         data/batch_loss, data/batch_size, data/seq_len_mean
    alert         quark/alerts/<rule>: its severity, 1 to 4; also of the events that a
                  monitor raises
    health_score  quark/health/<score>
    phase         quark/phase_index, where each phase begins

The step times of telemetry are left out: the writer mirrors them into metrics
of their own. Events are counted by `count_events`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quark_backends.mlflow.metrics import FIGURE_MARK
from quark_core.records import (
    AlertRecord,
    BatchDiagnosticRecord,
    EventRecord,
    HealthScoreRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    StreamRecord,
    SystemTelemetryRecord,
)

__all__ = [
    "FIGURE_KINDS",
    "SEVERITIES",
    "Figure",
    "count_events",
    "find_raised_rule",
    "list_figures",
    "list_raised_alerts",
    "make_metric",
]

Figure = tuple[str, float, StreamRecord]
"""Name as text, value, and the record that it is of."""

SEVERITIES: Mapping[str, int] = {"info": 1, "warning": 2, "error": 3, "critical": 4}
# As `quark_core.analysis.monitor`, which is too much to load for one name, has it.
_ALERT_EVENT_TYPE = "alert_raised"
_MEGABYTE = 1e6
_LAYER = ("mean", "std", "norm", "dead_unit_ratio", "saturation_ratio")
_PARAMETER = (
    ("norm", "value_norm"),
    ("grad_norm", "gradient_norm"),
    ("update_ratio", "update_to_parameter_ratio"),
    ("near_zero_ratio", "value_near_zero_ratio"),
)
# Updates of about a thousandth of a parameter are the usual advice.
_USUAL_UPDATE_RATIO = 1e-3


def list_figures(kind: str, records: Sequence[Any], most: int) -> Iterator[Figure]:
    """The values of a batch that are shown as curves, in order; the same at each call.

    Args:
        kind: One of `FIGURE_KINDS`.
        records: The batch's records.
        most: How many layers or parameters of each step are shown.
    """
    if kind == LayerSummaryRecord.KIND:
        records = _keep_worst(records, most, _layer_name, _rate_layer)
    elif kind == ParameterSummaryRecord.KIND:
        records = _keep_worst(records, most, _parameter_name, _rate_parameter)
    for record in records:
        for name, value in _MAKERS[kind](record):
            if value is not None:
                yield name, float(value), record


def count_events(
    records: Sequence[EventRecord], counts: dict[str, int]
) -> Iterator[tuple[str, float, EventRecord]]:
    """How many events of each severity there were, once for each severity in a batch.

    Args:
        records: The batch's events.
        counts: Severity -> how many the writer had before; brought up to date.
    """
    last: dict[str, EventRecord] = {}
    for record in records:
        counts[record.severity] = counts.get(record.severity, 0) + 1
        last[record.severity] = record
    for severity, record in last.items():
        yield f"quark/events/{severity}", float(counts[severity]), record


def list_raised_alerts(records: Sequence[EventRecord]) -> Iterator[Figure]:
    """The alerts that a monitor has raised, which come as events while the run goes on."""
    for record in records:
        rule_id = find_raised_rule(record)
        if rule_id is not None:
            yield f"quark/alerts/{rule_id}", float(SEVERITIES.get(record.severity, 0)), record


def find_raised_rule(record: EventRecord) -> str | None:
    """The rule of the alert that an event tells of; None for any other event."""
    payload: Mapping[str, Any] = record.payload or {}
    rule_id = payload.get("rule_id")
    is_alert = record.event_type == _ALERT_EVENT_TYPE and isinstance(rule_id, str)
    return rule_id if is_alert else None


def _of_telemetry(record: SystemTelemetryRecord) -> Iterator[tuple[str, float | None]]:
    # MLflow itself puts the node's name there, where a run has several.
    place = f"system/{record.node or f'rank{record.rank}'}" if record.rank else "system"
    yield f"{place}/cpu_utilization_percentage", record.cpu_usage_percent
    yield f"{place}/system_memory_usage_megabytes", _scale(record.ram_used_bytes)
    yield f"{place}/system_memory_usage_percentage", record.ram_usage_percent
    yield f"{place}/process_memory_usage_megabytes", _scale(record.process_rss_bytes)
    for gpu in record.gpus or ():
        name = f"{place}/gpu_{gpu.index}"
        yield f"{name}_utilization_percentage", gpu.utilization_percent
        yield f"{name}_memory_usage_megabytes", _scale(gpu.memory_used_bytes)
        yield f"{name}_memory_usage_percentage", gpu.memory_usage_percent
        yield f"{name}_power_usage_watts", gpu.power_watts
    if not record.gpus and record.gpu_index is not None:
        name = f"{place}/gpu_{record.gpu_index}"
        yield f"{name}_utilization_percentage", record.gpu_utilization_percent
        yield f"{name}_memory_usage_megabytes", _scale(record.gpu_memory_used_bytes)
        yield f"{name}_memory_usage_percentage", record.gpu_memory_usage_percent


def _of_layer(record: LayerSummaryRecord) -> Iterator[tuple[str, float | None]]:
    name = f"layers/{_layer_name(record)}/{record.summary_type}"
    if record.call_index:
        name += f"/call{record.call_index}"
    for field in _LAYER:
        yield f"{name}/{field}", getattr(record, field)


def _of_parameter(record: ParameterSummaryRecord) -> Iterator[tuple[str, float | None]]:
    for name, field in _PARAMETER:
        yield f"params_stats/{_parameter_name(record)}/{name}", getattr(record, field)


def _of_batch(record: BatchDiagnosticRecord) -> Iterator[tuple[str, float | None]]:
    yield "data/batch_loss", record.loss
    yield "data/batch_size", record.batch_size
    if record.sequence_lengths:
        yield "data/seq_len_mean", math.fsum(record.sequence_lengths) / len(record.sequence_lengths)


def _of_alert(record: AlertRecord) -> Iterator[tuple[str, float | None]]:
    yield f"quark/alerts/{record.rule_id}", SEVERITIES.get(record.severity, 0)


def _of_score(record: HealthScoreRecord) -> Iterator[tuple[str, float | None]]:
    yield f"quark/health/{record.score_key}", record.score


def _of_phase(record: PhaseRecord) -> Iterator[tuple[str, float | None]]:
    yield "quark/phase_index", record.sequence


_MAKERS: Mapping[str, Callable[[Any], Iterable[tuple[str, float | None]]]] = {
    SystemTelemetryRecord.KIND: _of_telemetry,
    LayerSummaryRecord.KIND: _of_layer,
    ParameterSummaryRecord.KIND: _of_parameter,
    BatchDiagnosticRecord.KIND: _of_batch,
    AlertRecord.KIND: _of_alert,
    HealthScoreRecord.KIND: _of_score,
    PhaseRecord.KIND: _of_phase,
}
FIGURE_KINDS = frozenset(_MAKERS)
"""Kinds that `list_figures` takes."""


def make_metric(name: str, value: float, record: Any) -> MetricRecord:
    """A metric record of a figure, with the identity, time and step of its source."""
    step = getattr(record, "step", getattr(record, "step_start", None))
    epoch = getattr(record, "epoch", getattr(record, "epoch_start", None))
    if isinstance(record, HealthScoreRecord):
        # A score is of the whole run so far: what tells two of them apart is the analysis.
        generation = record.writer_id.rpartition(".")[2]
        step = int(generation) if generation.isdecimal() else record.sequence
    key = f"{FIGURE_MARK}{name}"
    return MetricRecord(
        record.run_id,
        record.writer_id,
        record.attempt,
        record.rank,
        record.sequence,
        record.time_us,
        key,
        None,
        key,
        value,
        step,
        epoch,
    )


def _keep_worst(
    records: Sequence[Any], most: int, name_of: Callable[[Any], str], rate: Callable[[Any], float]
) -> list[Any]:
    """Of each step those of the worst names; of equally bad ones those that came first."""
    worst: dict[tuple[object, object], dict[str, float]] = {}
    for record in records:
        rated = worst.setdefault((record.step, record.epoch), {})
        name = name_of(record)
        rated[name] = max(rated.get(name, 0.0), rate(record))
    kept = {
        at: frozenset(sorted(rated, key=lambda name, rated=rated: -rated[name])[:most])  # type: ignore[misc]
        for at, rated in worst.items()
    }
    return [one for one in records if name_of(one) in kept[one.step, one.epoch]]


def _rate_layer(record: LayerSummaryRecord) -> float:
    bad = (record.nan_count or 0) + (record.inf_count or 0)
    shares = (record.dead_unit_ratio or 0.0, record.saturation_ratio or 0.0)
    # Tenths: smaller differences must not make curves come and go.
    return 100.0 if bad else float(int(10 * max(shares)))


def _rate_parameter(record: ParameterSummaryRecord) -> float:
    if record.non_finite_value_count or record.non_finite_gradient_count:
        return 100.0
    ratio = record.update_to_parameter_ratio
    if ratio is None:
        return 0.0
    # Orders of magnitude, whole ones, likewise.
    return float(int(abs(math.log10(max(ratio, 1e-12) / _USUAL_UPDATE_RATIO))))


def _layer_name(record: LayerSummaryRecord) -> str:
    return record.module_name or "model"


def _parameter_name(record: ParameterSummaryRecord) -> str:
    return record.parameter_name


def _scale(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / _MEGABYTE
