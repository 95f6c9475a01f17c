"""The immutable records that writers make and readers return.

Each is a frozen msgspec Struct, which takes a third of the time of a frozen
dataclass to make, and is a dataclass to whoever asks: `is_dataclass`,
`fields`, `asdict`, `replace` and `to_dict()` all work, and records pickle.

Fields that every record of a stream begins with:
    run_id: The run; None only on a rank that cannot know it.
    writer_id: One process's stream into one run.
    attempt: 0 for the first start, one more at each resume.
    rank: Global rank of the writing process.
    sequence: Counts per run, kind and writer; orders records, with gaps allowed.
    time_us: Microseconds since the epoch, UTC.

`id` and `timestamp` derive from these when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from quark_core.analysis_records import (
    AlertRecord,
    EvidenceRecord,
    HealthScoreRecord,
    PhaseRecord,
)
from quark_core.diagnostic_records import (
    ArtifactRecord,
    BatchDiagnosticRecord,
    GpuReading,
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)
from quark_core.json_object import JsonObject, normalize_object
from quark_core.names import check_name, split_name
from quark_core.record_base import Record, StreamRecord, format_time, parse_time, start_fields

__all__ = [
    "ANALYSIS_TYPES",
    "RECORD_TYPES",
    "AlertRecord",
    "ArtifactRecord",
    "BatchDiagnosticRecord",
    "ConfigSnapshot",
    "EnvironmentSnapshot",
    "EventRecord",
    "EventSeverity",
    "EvidenceRecord",
    "GpuReading",
    "HealthScoreRecord",
    "LayerSummaryRecord",
    "LifecycleAction",
    "LifecycleRecord",
    "LogIdentifier",
    "MetricRecord",
    "ParameterDistributionRecord",
    "ParameterSummaryRecord",
    "PhaseRecord",
    "ProjectRecord",
    "Record",
    "RunRecord",
    "RunStatus",
    "StreamRecord",
    "SystemTelemetryRecord",
    "format_time",
    "parse_time",
]

RunStatus = Literal["running", "completed", "failed", "interrupted"]
EventSeverity = Literal["debug", "info", "warning", "error", "critical"]
LogIdentifier = Literal["Info", "Warning", "Error"]
LifecycleAction = Literal["start", "config", "environment", "tag", "status", "heartbeat", "gap"]


class MetricRecord(StreamRecord, frozen=True, gc=False):
    """One value of one scalar metric.

    Attributes:
        metric_key: Stored key, `namespace/metric_name` or a bare name.
        namespace: All of the key before its last segment, or None.
        metric_name: Last segment of the key.
        value: The scalar; not finite only where the data was not.
        step: Step counter, or None.
        epoch: Epoch counter, or None; at least one of the two is given.
        description: Human-readable context, or None.
        metadata: JSON values, or None.
    """

    metric_key: str
    namespace: str | None
    metric_name: str
    value: float
    step: int | None = None
    epoch: int | None = None
    description: str | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "metric"

    @classmethod
    def make(
        cls,
        key: str,
        value: float,
        *,
        step: int | None = None,
        epoch: int | None = None,
        timestamp: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> MetricRecord:
        """A record for `session.write`, which says who wrote it and checks the rest.

        Args:
            key: The metric's name, namespace included.
            value, step, epoch, description, metadata: As the fields; metadata is copied.
            timestamp: ISO 8601, in UTC where it has no offset; None is now.

        Raises:
            SchemaValidationError: A key, timestamp or metadata that no record can have.
        """
        namespace, name = split_name(check_name(key, "key"))
        return cls(
            *start_fields(timestamp),
            key,
            namespace,
            name,
            value,
            step,
            epoch,
            description,
            normalize_object(metadata, "metadata"),
        )


class EventRecord(StreamRecord, frozen=True, gc=False):
    """One structured event or log line.

    Attributes:
        event_type: Lowercase type such as `checkpoint_saved` or `user_log`.
        severity: One of debug, info, warning, error, critical.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        status: Free status text of the event, or None.
        payload: JSON values; a log has `message` and `identifier` here.
    """

    event_type: str
    severity: str
    step: int | None = None
    epoch: int | None = None
    status: str | None = None
    payload: JsonObject | None = None

    KIND: ClassVar[str] = "event"

    @classmethod
    def make(
        cls,
        event_type: str,
        *,
        severity: EventSeverity = "info",
        step: int | None = None,
        epoch: int | None = None,
        status: str | None = None,
        payload: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> EventRecord:
        """A record for `session.write`, which says who wrote it and checks the rest.

        Takes the fields of the record; `payload` is copied, and `timestamp` is
        ISO 8601, in UTC where it has no offset, or None for now.

        Raises:
            SchemaValidationError: A timestamp or payload that no record can have.
        """
        json = normalize_object(payload, "payload")
        return cls(*start_fields(timestamp), event_type, severity, step, epoch, status, json)


class LifecycleRecord(StreamRecord, frozen=True, gc=False):
    """One step in a run's life, which travels in the stream and is applied by the store.

    Attributes:
        action: `start` opens an attempt (data: project, run, process),
            `config` and `environment` carry snapshots, `tag` adds one tag,
            `status` sets the attempt's status, `heartbeat` says it is alive,
            `gap` counts records that are missing.
        data: What the action needs, as JSON values.
    """

    action: str
    data: JsonObject | None = None

    KIND: ClassVar[str] = "lifecycle"


ANALYSIS_TYPES: tuple[type[StreamRecord], ...] = (AlertRecord, HealthScoreRecord, PhaseRecord)
"""What analyzers find out, which is kept in generations."""

_STREAM_TYPES: tuple[type[StreamRecord], ...] = (
    MetricRecord,
    EventRecord,
    SystemTelemetryRecord,
    LayerSummaryRecord,
    ParameterSummaryRecord,
    ParameterDistributionRecord,
    BatchDiagnosticRecord,
    ArtifactRecord,
    *ANALYSIS_TYPES,
    LifecycleRecord,
)

RECORD_TYPES: dict[str, type[StreamRecord]] = {each.KIND: each for each in _STREAM_TYPES}
"""Every kind of record that travels in a stream."""


class ProjectRecord(Record, frozen=True, gc=False):
    """A project: a name and the storage root under which its runs lie."""

    id: str
    name: str
    root_path: str
    created_at: str
    updated_at: str


class RunRecord(Record, frozen=True, gc=False):
    """A run's identity, state and lineage. Times are ISO 8601 text in UTC.

    Attributes:
        id: None only on a rank that cannot know rank 0's id.
        status: running, completed, failed or interrupted. That a running run
            is lost (its process died) is derived on reading, never stored.
        parent_run_id: The run this one descends from, or None.
        lineage_root_run_id: The first run of the lineage; a run without a
            parent is its own root.
        resume_count: How often the run was resumed.
        attempt: Newest attempt; equals `resume_count`.
        run_path: The run's directory, or its URI on a remote store.
        tags: Sorted, without duplicates.
    """

    id: str | None
    project_id: str
    project_name: str
    status: str
    parent_run_id: str | None
    lineage_root_run_id: str | None
    resume_count: int
    run_path: str
    git_commit: str | None
    strict_mode: bool
    tags: tuple[str, ...]
    attempt: int
    name: str | None
    notes: str | None
    created_at: str
    updated_at: str
    ended_at: str | None


class ConfigSnapshot(Record, frozen=True, gc=False):
    """A run's configuration as plain JSON values, redacted.

    Attributes:
        values: The configuration, interpolations of OmegaConf resolved.
        notes: One line for each value that was replaced, with its path and why.
        raw: The configuration with its interpolations as they were written;
            None where that is the same as `values`.
    """

    values: JsonObject
    notes: tuple[str, ...] = ()
    raw: JsonObject | None = None

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ConfigSnapshot:
        """The snapshot that the data of a lifecycle record of the action `config` holds."""
        raw = data.get("raw")
        return cls(
            JsonObject(data["values"]),
            tuple(data["notes"]),
            None if raw is None else JsonObject(raw),
        )


class EnvironmentSnapshot(Record, frozen=True, gc=False):
    """Where a run ran: interpreter, packages, host, GPUs, command line, git state."""

    values: JsonObject
