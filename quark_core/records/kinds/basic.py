"""Metrics, events, and what a run's life consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord, start_fields
from quark_core.records.checks import check_event_type, check_key
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import check_name, split_name

EventSeverity = Literal["debug", "info", "warning", "error", "critical"]
"""Severities of events, the mildest first."""
LogIdentifier = Literal["Info", "Warning", "Error"]
"""Values of the argument `identifier` of `add_log`."""
LifecycleAction = Literal[
    "start",
    "config",
    "environment",
    "tag",
    "status",
    "heartbeat",
    "gap",
    "edit",
    "stop",
    "stop_seen",
    "import",
    "group",
    "fields",
]


class MetricRecord(StreamRecord, frozen=True, gc=False):
    """One value of one scalar metric.

    Attributes:
        metric_key: Stored key: `namespace/metric_name` or a bare name.
        namespace: Key without its last segment, or None.
        metric_name: Last segment of the key.
        value: Value; it may be NaN or infinite.
        step: Step, or None.
        epoch: Epoch, or None. At least one of step and epoch is set.
        description: Description, or None.
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
    TABLE: ClassVar[str] = "metrics_long"
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("metric_key",),
        finite=("value",),
        plain=(
            "namespace",
            "metric_name",
        ),
    )

    def check(self) -> None:
        """Reject a point without step and epoch, and a key that contradicts its parts."""
        name = type(self).__name__
        if self.step is None and self.epoch is None:
            raise SchemaValidationError(f"{name} requires a step or an epoch")
        check_key(name, "metric", self.metric_key, self.namespace, self.metric_name)

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
        """Create a record for `session.write`, which adds the run and the writer.

        Args:
            key: Name of the metric, including its namespace.
            value: Value of the metric.
            step, epoch: Counters; `session.write` needs at least one.
            timestamp: Time as ISO 8601 text, in UTC if it has no offset. Defaults to now.
            description: Description, or None.
            metadata: JSON values; copied.

        Raises:
            SchemaValidationError: The key, timestamp or metadata is invalid.
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
        event_type: Type in lowercase, such as `checkpoint_saved` or `user_log`.
        severity: `debug`, `info`, `warning`, `error` or `critical`.
        step: Step, or None.
        epoch: Epoch, or None.
        status: Free status text, or None.
        payload: JSON values. A log line has `message` and `identifier`.
    """

    event_type: str
    severity: str
    step: int | None = None
    epoch: int | None = None
    status: str | None = None
    payload: JsonObject | None = None

    KIND: ClassVar[str] = "event"
    TABLE: ClassVar[str] = "events"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        words={"severity": get_args(EventSeverity)}, plain=("event_type",)
    )

    def check(self) -> None:
        """Reject an invalid event type."""
        check_event_type(self.event_type, f"{type(self).__name__}.event_type")

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
        """Create a record for `session.write`, which adds the run and the writer.

        Args:
            event_type: Type in lowercase, such as `checkpoint_saved`.
            severity: `debug`, `info`, `warning`, `error` or `critical`. Defaults to `info`.
            step, epoch: Counters, or None.
            status: Free status text, or None.
            payload: JSON values; copied.
            timestamp: Time as ISO 8601 text, in UTC if it has no offset. Defaults to now.

        Raises:
            SchemaValidationError: The timestamp or payload is invalid.
        """
        json = normalize_object(payload, "payload")
        return cls(*start_fields(timestamp), event_type, severity, step, epoch, status, json)


class LifecycleRecord(StreamRecord, frozen=True, gc=False):
    """One step in a run's life, which travels in the stream and is applied by the store.

    Attributes:
        action: `start` opens an attempt (data: project, run, process),
            `config` and `environment` carry snapshots, `tag` adds one tag,
            `status` sets the attempt's status, `heartbeat` says it is alive,
            `gap` counts records that are missing, `edit` changes what people
            have said of the run, `stop` asks the attempt to stop,
            `stop_seen` says that it knows, `import` notes how far the
            run was read at another tool, `group` puts the run into groups or
            takes it out, and `fields` sets fields of it.
        data: What the action needs, as JSON values.
    """

    action: str
    data: JsonObject | None = None

    KIND: ClassVar[str] = "lifecycle"
    TABLE: ClassVar[str] = "lifecycle"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        words={"action": get_args(LifecycleAction)}, plain=("data",)
    )
