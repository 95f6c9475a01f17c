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

import dataclasses
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Any, ClassVar, Literal, get_type_hints

import msgspec

from quark_core.json_object import JsonObject, normalize_object
from quark_core.names import check_name, split_name

__all__ = [
    "RECORD_TYPES",
    "ConfigSnapshot",
    "EnvironmentSnapshot",
    "EventRecord",
    "EventSeverity",
    "LayerSummaryRecord",
    "LifecycleAction",
    "LifecycleRecord",
    "LogIdentifier",
    "MetricRecord",
    "ProjectRecord",
    "Record",
    "RunRecord",
    "RunStatus",
    "StreamRecord",
    "format_time",
    "parse_time",
]

RunStatus = Literal["running", "completed", "failed", "interrupted"]
EventSeverity = Literal["debug", "info", "warning", "error", "critical"]
LogIdentifier = Literal["Info", "Warning", "Error"]
LifecycleAction = Literal["start", "config", "environment", "tag", "status", "heartbeat", "gap"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def format_time(time_us: int) -> str:
    """ISO 8601 in UTC with microseconds, such as `2026-05-07T09:30:00.000000Z`."""
    moment = _EPOCH + timedelta(microseconds=time_us)
    return f"{moment.isoformat(timespec='microseconds').removesuffix('+00:00')}Z"


def parse_time(text: str) -> int:
    """Microseconds since the epoch of an ISO 8601 text; without an offset it is UTC.

    Raises:
        ValueError: Not an ISO 8601 date and time.
        OverflowError: Before the year 1 or after 9999 in UTC.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # Through UTC, so that a moment that UTC cannot show is refused here.
    return (moment.astimezone(UTC) - _EPOCH) // _MICROSECOND


class _DataclassFields:
    """Computes `__dataclass_fields__` at first sight, through the public dataclasses API."""

    def __init__(self) -> None:
        self._made: dict[type, dict[str, dataclasses.Field[Any]]] = {}

    def __get__(self, instance: object, owner: type) -> dict[str, dataclasses.Field[Any]]:
        found = self._made.get(owner)
        if found is None:
            hints = get_type_hints(owner)
            specs: list[tuple[str, Any, dataclasses.Field[Any]]] = []
            for field in msgspec.structs.fields(owner):
                default: Any = dataclasses.MISSING
                factory: Callable[[], Any] | Any = dataclasses.MISSING
                if field.default is not msgspec.NODEFAULT:
                    default = field.default
                if field.default_factory is not msgspec.NODEFAULT:
                    factory = field.default_factory
                made = (
                    dataclasses.field(default_factory=factory)
                    if factory is not dataclasses.MISSING
                    else dataclasses.field(default=default)
                )
                specs.append((field.name, hints[field.name], made))
            twin: Any = dataclasses.make_dataclass(owner.__name__, specs)
            found = self._made[owner] = twin.__dataclass_fields__
        return found


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of every record: immutable, comparable, picklable, `to_dict()`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = _DataclassFields()  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """A new dict of plain JSON-like values, in the order of the fields."""
        return {name: _plain(getattr(self, name)) for name in self.__struct_fields__}


class StreamRecord(Record, frozen=True, gc=False):
    """A record that a writer puts into a run's stream."""

    run_id: str | None
    writer_id: str
    attempt: int
    rank: int
    sequence: int
    time_us: int

    KIND: ClassVar[str] = ""

    @property
    def id(self) -> str:
        """Unique over all runs: writer, kind and sequence."""
        return f"{self.writer_id}-{self.KIND}-{self.sequence}"

    @property
    def timestamp(self) -> str:
        """`time_us` as ISO 8601 text in UTC."""
        return format_time(self.time_us)

    def to_dict(self) -> dict[str, Any]:
        """`id`, the fields, and `timestamp` in place of `time_us`, as JSON-like values."""
        out: dict[str, Any] = {"id": self.id}
        for name in self.__struct_fields__:
            if name == "time_us":
                out["timestamp"] = self.timestamp
            else:
                out[name] = _plain(getattr(self, name))
        return out


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
            *_start(timestamp),
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
        return cls(*_start(timestamp), event_type, severity, step, epoch, status, json)


class LayerSummaryRecord(StreamRecord, frozen=True, gc=False):
    """Statistics of what one call of one module gave, or of its gradient.

    Attributes:
        module_name: Qualified name of the module.
        module_type: Name of its class.
        summary_type: activation or gradient.
        hook_direction: forward or backward.
        call_index: 0 for the module's first call of the step, and so on.
        element_count: Elements that the statistics are over.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        tensor_shape: Shape of the tensor, or None.
        mean, std, norm, variance: Statistics of the elements, or None.
        dead_unit_ratio: Share of units that are zero everywhere, or None.
        saturation_ratio: Share of elements at the ends of their range, or None.
        metadata: JSON values, or None.
    """

    module_name: str
    module_type: str
    summary_type: str
    hook_direction: str
    call_index: int
    element_count: int
    step: int | None = None
    epoch: int | None = None
    tensor_shape: tuple[int, ...] | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    variance: float | None = None
    dead_unit_ratio: float | None = None
    saturation_ratio: float | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "layer"


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


RECORD_TYPES: dict[str, type[StreamRecord]] = {
    record_type.KIND: record_type
    for record_type in (MetricRecord, EventRecord, LayerSummaryRecord, LifecycleRecord)
}
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
        values: The configuration.
        notes: One line for each value that was replaced, with its path and why.
    """

    values: JsonObject
    notes: tuple[str, ...] = ()


class EnvironmentSnapshot(Record, frozen=True, gc=False):
    """Where a run ran: interpreter, packages, host, GPUs, command line, git state."""

    values: JsonObject


def _start(timestamp: object) -> tuple[None, str, int, int, int, int]:
    """The fields that every record begins with, of one that nobody has written yet."""
    from quark_core.times import check_timestamp, now_us

    return None, "", 0, 0, 0, now_us() if timestamp is None else check_timestamp(timestamp)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value
