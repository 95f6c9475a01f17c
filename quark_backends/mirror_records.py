"""Converts records for other trackers: values of curves, sample tables, tags and groups."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quark_core.api import (
    ALERT_RAISED,
    SOURCES_KEY,
    AggregateRecord,
    AlertRecord,
    BatchDiagnosticRecord,
    EventRecord,
    FingerprintRecord,
    GpuReading,
    HealthScoreRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    SampleRecord,
    StreamRecord,
    SystemTelemetryRecord,
    change_fields,
    change_groups,
    decode_name,
    make_digests,
)

# What of each record is a value of a curve, and what such curves are called elsewhere.
#
# Tools that know only named curves get one per value:
#
# record                  curves
# metric                  its key, as the user wrote it
# telemetry               system/runtime/*, and <machine>/<node>/* for the machine's values
# layer                   layers/<module>/<activation or gradient>/*; of further calls in one
# step layers/<module>.call<n>/…
# parameter               params_stats/<parameter>/*
# parameter_distribution  dist/<parameter>/<value, gradient or update>, a histogram
# batch                   data/batch_loss, data/batch_size, data/seq_len_mean
# event                   quark/events/<severity>, how many so far
# alert                   quark/alerts/<rule>, its severity from 1 to 4
# health_score            quark/health/<key>; none where it is not known
# aggregate               timers/<key>, mean seconds of a window; aggregates/<key>, its mean,
# or of a value the newest
# phase                   quark/phase_index, from 0, where the phase begins
# artifact, lifecycle     none
# any other kind          as its type says: see `StreamRecord.list_figures`
#
# Those of ranks other than 0 stand under `rank<n>/`. MLflow's points know their rank, and
# its System tab finds the machine's values by MLflow's own names; see `MlflowCurves`.

ALERT_LEVELS = {"info": 1, "warning": 2, "error": 3, "critical": 4}
"""An alert's severity as a number."""

_MEGABYTE = 1e6
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


class Curves:
    """The curves of one tool: their names, and the values that records have for them.

    Args:
        machine: First part of the names of the machine's values. Tools have
            names of their own there that must not be met.
    """

    def __init__(self, machine: str) -> None:
        self._machine = machine

    def list_values(self, record: StreamRecord) -> list[tuple[str, float]]:
        """A record's values with their names, in a fixed order; what is not known is left out.

        Phases and events have none by themselves: see `count`.
        """
        prefix = rank_prefix(record)
        return [(prefix + name, value) for name, value in self.list_plain(record)]

    def list_plain(self, record: StreamRecord) -> list[tuple[str, float]]:
        """As `list_values`, where what a rank's names begin with comes from elsewhere."""
        return [(name, float(value)) for name, value in self._list(record) if value is not None]

    def count(
        self, record: EventRecord | PhaseRecord, counts: dict[str, int], phases: int
    ) -> tuple[str, int]:
        """The value of an event, which counts those of its severity, or of a phase, its number.

        Args:
            record: The record.
            counts: Name -> how many events there were so far; brought up to date.
            phases: How many phases there were before, in the same batch.
        """
        if isinstance(record, PhaseRecord):
            return self.phase_index(record), phases
        name = self.event_count(record.severity, record)
        counts[name] = counts.get(name, 0) + 1
        return name, counts[name]

    def phase_index(self, record: StreamRecord | None = None) -> str:
        """Name of the curve that counts phases; without a record that of rank 0."""
        return f"{rank_prefix(record)}quark/phase_index"

    def event_count(self, severity: str, record: StreamRecord | None = None) -> str:
        """Name of the curve that counts events of a severity; without a record that of rank 0."""
        return f"{rank_prefix(record)}quark/events/{severity}"

    def alert(self, rule_id: str) -> str:
        """Name of the curve of an alert's severity."""
        return f"quark/alerts/{rule_id}"

    def distribution(self, record: ParameterDistributionRecord) -> str:
        """Name of the histogram that a distribution is."""
        name = record.parameter_name or "model"
        return f"{rank_prefix(record)}dist/{name}/{record.distribution_type}"

    def _list(self, record: StreamRecord) -> Iterator[tuple[str, float | None]]:
        if isinstance(record, MetricRecord):
            yield decode_name(record.metric_key), record.value
        elif isinstance(record, SystemTelemetryRecord):
            yield from self._list_telemetry(record)
        elif isinstance(record, LayerSummaryRecord):
            yield from _list_layer(record)
        elif isinstance(record, ParameterSummaryRecord):
            stem = f"params_stats/{record.parameter_name or 'model'}"
            for field, name in _PARAMETER.items():
                yield f"{stem}/{name}", getattr(record, field)
        elif isinstance(record, BatchDiagnosticRecord):
            yield "data/batch_loss", record.loss
            yield "data/batch_size", record.batch_size
            if record.sequence_lengths:
                lengths = record.sequence_lengths
                yield "data/seq_len_mean", sum(lengths) / len(lengths)
        elif isinstance(record, AlertRecord):
            yield self.alert(record.rule_id), ALERT_LEVELS.get(record.severity, 0)
        elif isinstance(record, AggregateRecord):
            yield _find_aggregate(record)
        elif isinstance(record, HealthScoreRecord):
            if record.is_known:
                yield f"quark/health/{record.score_key}", record.score
        else:
            yield from record.list_figures()

    def _list_telemetry(self, record: SystemTelemetryRecord) -> Iterator[tuple[str, float | None]]:
        for field in (*_TIMINGS, *(_COUNTERS if record.step is not None else ())):
            yield f"system/runtime/{field}", getattr(record, field)
        stem = f"{self._machine}/{record.node or 'node'}"
        for field, name in _MACHINE.items():
            yield f"{stem}/{name}", getattr(record, field)
        gpus = _find_only_gpu(record) if record.gpus is None else record.gpus
        for gpu in gpus:
            for field in _GPU:
                yield f"{stem}/gpu.{gpu.index}/{field}", getattr(gpu, field)


class MlflowCurves(Curves):
    """MLflow's: the machine's values by MLflow's own names, those of a rank under system/<node>/.

    The step times of telemetry are left out: the writer mirrors them into metrics
    of their own.
    """

    def __init__(self) -> None:
        super().__init__("system")

    def _list_telemetry(self, record: SystemTelemetryRecord) -> Iterator[tuple[str, float | None]]:
        # MLflow itself puts the node's name there, where a run has several.
        node = f"/{record.node or f'rank{record.rank}'}" if record.rank else ""
        place = f"{self._machine}{node}"
        yield f"{place}/cpu_utilization_percentage", record.cpu_usage_percent
        yield f"{place}/system_memory_usage_megabytes", _to_megabytes(record.ram_used_bytes)
        yield f"{place}/system_memory_usage_percentage", record.ram_usage_percent
        yield f"{place}/process_memory_usage_megabytes", _to_megabytes(record.process_rss_bytes)
        for gpu in record.gpus or _find_only_gpu(record):
            name = f"{place}/gpu_{gpu.index}"
            yield f"{name}_utilization_percentage", gpu.utilization_percent
            yield f"{name}_memory_usage_megabytes", _to_megabytes(gpu.memory_used_bytes)
            yield f"{name}_memory_usage_percentage", gpu.memory_usage_percent
            yield f"{name}_power_usage_watts", gpu.power_watts


def _find_aggregate(record: AggregateRecord) -> tuple[str, float | None]:
    """The curve of a key, and what its window adds to it."""
    table = "timers" if record.keep == "timer" else "aggregates"
    name = f"{table}/{decode_name(record.key)}"
    return name, record.last if record.keep == "value" else record.mean


def find_raised_rule(record: EventRecord) -> str | None:
    """The rule of the alert that an event tells of; else None."""
    payload: Mapping[str, Any] = record.payload or {}
    rule_id = payload.get("rule_id")
    is_alert = record.event_type == ALERT_RAISED and isinstance(rule_id, str)
    return rule_id if is_alert else None


def rank_prefix(record: StreamRecord | None) -> str:
    """What names of a rank's curves begin with."""
    return f"rank{record.rank}/" if record is not None and record.rank else ""


def _find_only_gpu(record: SystemTelemetryRecord) -> tuple[GpuReading, ...]:
    """The GPU of a record that tells of one at most."""
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


def _list_layer(record: LayerSummaryRecord) -> Iterator[tuple[str, float | None]]:
    module = record.module_name or "model"
    if record.call_index:
        module = f"{module}.call{record.call_index}"
    stem = f"layers/{module}/{record.summary_type}"
    for field in _LAYER:
        yield f"{stem}/{field}", getattr(record, field)
    for field in _NON_FINITE:
        # Zero at nearly every step of nearly every layer.
        yield f"{stem}/{field}", getattr(record, field) or None


def _to_megabytes(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / _MEGABYTE


_FIXED = ("prompt", "completion", "reward")


def tabulate_samples(
    records: Sequence[SampleRecord],
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Columns and rows of samples of one set; a column that no row fills is left out.

    Objects and lists in cells are JSON, as text.
    """
    fixed = [name for name in _FIXED if any(getattr(one, name) is not None for one in records)]
    others: dict[str, None] = {}
    for record in records:
        columns: Mapping[str, Any] = record.columns or {}
        others.update(dict.fromkeys(columns))
    # A column may be called like one of ours.
    own = [name for name in others if name not in fixed]
    rows = []
    for record in records:
        columns = record.columns or {}
        cells = [getattr(record, name) for name in fixed]
        rows.append((*cells, *(_settle(columns.get(name)) for name in own)))
    return (*fixed, *own), tuple(rows)


def _settle(value: Any) -> Any:
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=dict)
    return value


def change_belonging(run: Mapping[str, Any], record: LifecycleRecord) -> dict[str, Any]:
    """What changes of a run, as its start has told of it, by a `group`, `fields` or `edit`.

    Args:
        run: The part `run` of its start, with what changed since.
        record: The record.
    """
    data: Mapping[str, Any] = record.data or {}
    if record.action == "group":
        return {"groups": change_groups(run.get("groups") or (), data)}
    if record.action == "fields":
        return {"fields": change_fields(run.get("fields") or {}, data)}
    return change_by_edit(run, data.get("changes") or {}) if record.action == "edit" else {}


def change_by_edit(run: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The same by what somebody has edited of a run.

    Args:
        run: As in `change_belonging`.
        changes: What the edit says.
    """
    changed: dict[str, Any] = {}
    groups, fields = changes.get("groups"), changes.get("fields")
    if groups:
        said = {"add": groups.get("added"), "remove": groups.get("removed")}
        changed["groups"] = change_groups(run.get("groups") or (), said)
    if fields:
        said = {"set": fields.get("set"), "remove": fields.get("removed")}
        changed["fields"] = change_fields(run.get("fields") or {}, said)
    return changed


def list_notes(run: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of what is noted of a run: `groups`, and `field.NAME` of each field."""
    fields: Mapping[str, Any] = run.get("fields") or {}
    groups: Sequence[str] = run.get("groups") or ()
    notes = {f"field.{name}": _spell(value) for name, value in fields.items()}
    return {**({"groups": ", ".join(groups)} if groups else {}), **notes}


def list_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Name and digest of a configuration and of its structure; none of an empty one."""
    made = make_digests(config, None)
    named = {"config_digest": made.config, "structure_digest": made.structure}
    return {name: digest for name, digest in named.items() if digest is not None}


def list_data_digests(records: Iterable[StreamRecord]) -> dict[str, str]:
    """Key -> level and digest of the newest fingerprint of data, such as `full 3fa1…`."""
    return {
        record.key: f"{record.level} {record.digest}"
        for record in records
        if isinstance(record, FingerprintRecord) and record.subject == "data"
    }


def find_code_digest(records: Iterable[StreamRecord]) -> str | None:
    """The newest digest of a run's sources among some records, or None."""
    found = None
    for record in records:
        if isinstance(record, FingerprintRecord) and record.subject == "code":
            found = record.digest if record.key == SOURCES_KEY else found
    return found


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# A time, a Windows path and an address have no key before their colon.
_PAIR = re.compile(
    r"(?P<key>[^=:/\\]*[^\W\d][^=:/\\]*?)\s*(?:=|:(?!//|\\|\d\d\b))\s*(?P<text>\S.*)", re.DOTALL
)


def split_tag(tag: str) -> tuple[str, str]:
    """Key and value of a tag such as `group:baseline` or `lr=0.1`; the tag itself and ""."""
    match = _PAIR.fullmatch(tag)
    return (match["key"], match["text"]) if match else (tag, "")
