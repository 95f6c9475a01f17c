"""The schema of records: its version, and the rules a record must keep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from quark_core.analysis_records import (
    AlertCategory,
    AlertSeverity,
    HealthScoreKey,
    HealthStatus,
)
from quark_core.diagnostic_records import (
    ArtifactPayloadFormat,
    HookDirection,
    LayerSummaryType,
    ParameterDistributionType,
    ParameterRole,
    TelemetryBoundary,
)
from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject
from quark_core.names import check_name, split_name
from quark_core.records import (
    AlertRecord,
    ArtifactRecord,
    BatchDiagnosticRecord,
    EventRecord,
    EventSeverity,
    HealthScoreRecord,
    LayerSummaryRecord,
    LifecycleAction,
    LifecycleRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    Record,
    RunRecord,
    RunStatus,
    StreamRecord,
    SystemTelemetryRecord,
    format_time,
)

__all__ = [
    "CURRENT_SCHEMA_VERSION",
    "EVENT_SEVERITIES",
    "ARTIFACT_PAYLOAD_FORMATS",
    "HOOK_DIRECTIONS",
    "LAYER_SUMMARY_TYPES",
    "LOG_IDENTIFIERS",
    "PARAMETER_DISTRIBUTION_TYPES",
    "PARAMETER_ROLES",
    "RESERVED_LOG_KEYS",
    "RUN_STATUSES",
    "TELEMETRY_BOUNDARIES",
    "TERMINAL_STATUSES",
    "check_event_type",
    "check_histogram",
    "dump_record",
    "validate_record",
]

CURRENT_SCHEMA_VERSION = 3
"""Version of the records and of the stores that hold them."""

RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)
TERMINAL_STATUSES = ("completed", "failed", "interrupted")
EVENT_SEVERITIES: tuple[str, ...] = get_args(EventSeverity)
LAYER_SUMMARY_TYPES: tuple[str, ...] = get_args(LayerSummaryType)
HOOK_DIRECTIONS: tuple[str, ...] = get_args(HookDirection)
TELEMETRY_BOUNDARIES: tuple[str, ...] = get_args(TelemetryBoundary)
PARAMETER_ROLES: tuple[str, ...] = get_args(ParameterRole)
PARAMETER_DISTRIBUTION_TYPES: tuple[str, ...] = get_args(ParameterDistributionType)
ARTIFACT_PAYLOAD_FORMATS: tuple[str, ...] = get_args(ArtifactPayloadFormat)
LOG_IDENTIFIERS = {"Info": "info", "Warning": "warning", "Error": "error"}
"""Identifier of a log -> severity of its event."""
RESERVED_LOG_KEYS = ("message", "identifier")
"""Payload keys of a log that Quark fills in."""

_INT64_MAX = 2**63 - 1
_LITERALS: dict[type[Record], dict[str, tuple[str, ...]]] = {
    EventRecord: {"severity": EVENT_SEVERITIES},
    LifecycleRecord: {"action": get_args(LifecycleAction)},
    RunRecord: {"status": RUN_STATUSES},
    SystemTelemetryRecord: {"boundary": TELEMETRY_BOUNDARIES},
    LayerSummaryRecord: {
        "summary_type": LAYER_SUMMARY_TYPES,
        "hook_direction": HOOK_DIRECTIONS,
    },
    ParameterSummaryRecord: {"parameter_role": PARAMETER_ROLES},
    ParameterDistributionRecord: {
        "parameter_role": PARAMETER_ROLES,
        "distribution_type": PARAMETER_DISTRIBUTION_TYPES,
    },
    ArtifactRecord: {"payload_format": ARTIFACT_PAYLOAD_FORMATS},
    AlertRecord: {"category": get_args(AlertCategory), "severity": get_args(AlertSeverity)},
    HealthScoreRecord: {
        "score_key": get_args(HealthScoreKey),
        "category": get_args(HealthScoreKey),
        "status": get_args(HealthStatus),
    },
}
"""Record type -> fields that hold one of a few words."""

_NAMES: dict[type[Record], tuple[str, ...]] = {
    MetricRecord: ("metric_key",),
    LayerSummaryRecord: ("module_name",),
    ParameterSummaryRecord: ("parameter_name",),
    ParameterDistributionRecord: ("parameter_name",),
    ArtifactRecord: ("artifact_type", "artifact_key"),
}
"""Record type -> fields that name something, and so are neither empty nor too long."""

_FINITE: dict[type[Record], tuple[str, ...]] = {
    MetricRecord: ("value",),
    BatchDiagnosticRecord: ("loss",),
    SystemTelemetryRecord: ("step_time_ms", "data_time_ms", "compute_time_ms"),
    HealthScoreRecord: ("score",),
}
"""Record type -> numbers that are finite. Statistics of a network need not be."""

_SIGNED = frozenset({"time_us"})
_EVENT_TYPE = re.compile(r"[a-z][a-z0-9_./-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_event_type(event_type: object, argument: str = "event_type") -> str:
    """Return the event type, or refuse it.

    Raises:
        SchemaValidationError: Not a lowercase letter followed by lowercase
            letters, digits, `_`, `.`, `/` or `-`, or too long.
    """
    name = check_name(event_type, argument)
    if _EVENT_TYPE.fullmatch(name) is None:
        raise SchemaValidationError(
            f"{argument} must begin with a lowercase letter and go on with lowercase letters, "
            f"digits, '_', '.', '/' or '-', got {name!r}"
        )
    return name


def validate_record(record: Record) -> Record:
    """Check a record or snapshot against the current schema and return it.

    Checks the type of every field, that counters are not negative, that
    values are finite, that literal fields hold one of their literals, and
    that a metric's key, namespace and name agree.

    Raises:
        SchemaValidationError: The message begins with the record's type and field.
    """
    if not isinstance(record, Record):
        raise SchemaValidationError(
            f"record must be one of Quark's records, not {type(record).__name__}"
        )
    name = type(record).__name__
    for field, annotation in _field_types(type(record)):
        _check_field(f"{name}.{field}", getattr(record, field), annotation)
        if isinstance(getattr(record, field), tuple):
            for item in getattr(record, field):
                if isinstance(item, Record):
                    validate_record(item)
    _check_counters(name, record)
    if isinstance(record, StreamRecord):
        try:
            format_time(record.time_us)
        except OverflowError:
            raise SchemaValidationError(
                f"{name}.time_us must lie in the years 1 to 9999, got {record.time_us}"
            ) from None
    for field in _NAMES.get(type(record), ()):
        check_name(getattr(record, field), f"{name}.{field}")
    for field, allowed in _LITERALS.get(type(record), {}).items():
        _check_literal(f"{name}.{field}", getattr(record, field), allowed)
    for field in _FINITE.get(type(record), ()):
        _check_finite(f"{name}.{field}", getattr(record, field))
    if isinstance(record, MetricRecord):
        _check_key(name, "metric", record.metric_key, record.namespace, record.metric_name)
    elif isinstance(record, EventRecord):
        check_event_type(record.event_type, f"{name}.event_type")
    elif isinstance(record, ArtifactRecord):
        _check_key(name, "artifact", record.artifact_key, record.namespace, record.artifact_name)
        if _SHA256.fullmatch(record.sha256) is None:
            raise SchemaValidationError(f"{name}.sha256 must be 64 lowercase hexadecimal digits")
    elif isinstance(record, ParameterDistributionRecord):
        check_histogram(record.bin_edges, record.counts, f"{name}.bin_edges", f"{name}.counts")
    elif isinstance(record, BatchDiagnosticRecord):
        _check_batch(name, record)
    elif isinstance(record, HealthScoreRecord) and not 0 <= record.score <= 100:
        raise SchemaValidationError(f"{name}.score must be from 0 to 100, got {record.score!r:.40}")
    return record


def check_histogram(
    edges: Sequence[float], counts: Sequence[float], edges_argument: str, counts_argument: str
) -> None:
    """Hold bin edges and counts to each other; two empty ones fit.

    Raises:
        SchemaValidationError: Not one more edge than counts, edges that do not
            ascend or are not finite, or counts that are negative or not finite.
    """
    if len(edges) != len(counts) + 1 and (edges or counts):
        raise SchemaValidationError(
            f"{edges_argument} must hold one more edge than {counts_argument} holds counts, "
            f"got {len(edges)} edges and {len(counts)} counts"
        )
    for index, edge in enumerate(edges):
        _check_finite(f"{edges_argument}[{index}]", edge)
        if index and not edges[index - 1] < edge:
            raise SchemaValidationError(
                f"{edges_argument} must ascend, but [{index}] is {edge!r:.40} after "
                f"{edges[index - 1]!r:.40}"
            )
    for index, count in enumerate(counts):
        _check_finite(f"{counts_argument}[{index}]", count)
        if count < 0:
            raise SchemaValidationError(
                f"{counts_argument}[{index}] must not be negative, got {count!r:.40}"
            )


def _check_key(record: str, noun: str, key: str, namespace: str | None, last: str) -> None:
    if (namespace, last) != split_name(key):
        raise SchemaValidationError(
            f"{record}.{noun}_key {key!r} is not namespace and {noun}_name joined, "
            f"with the last segment as {noun}_name"
        )


def _check_batch(name: str, record: BatchDiagnosticRecord) -> None:
    for label, count in (record.class_counts or {}).items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise SchemaValidationError(
                f"{name}.class_counts[{label!r:.60}] must be a non-negative integer, "
                f"got {count!r:.40}"
            )
    size = record.batch_size
    for field in ("sample_ids", "sequence_lengths"):
        values = getattr(record, field)
        if values is not None and size is not None and len(values) != size:
            raise SchemaValidationError(
                f"{name}.{field} has {len(values)} entries, but batch_size is {size}"
            )


@cache
def _field_types(record_type: type[Record]) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(record_type)
    return tuple((field, hints[field]) for field in record_type.__struct_fields__)


def dump_record(record: Record) -> dict[str, Any]:
    """Validate a record or snapshot and return it as a new dict of JSON-like values.

    Raises:
        SchemaValidationError: As `validate_record`.
    """
    return validate_record(record).to_dict()


def _check_counters(name: str, record: Record) -> None:
    for field, annotation in _field_types(type(record)):
        if field in _SIGNED:
            continue
        value = getattr(record, field)
        # Every integer of a record counts something.
        if isinstance(value, int) and value < 0 and float not in _options(annotation):
            raise SchemaValidationError(f"{name}.{field} must not be negative, got {value}")
        if isinstance(value, tuple) and value and get_args(_tuple_option(annotation))[0] is int:
            negative = min(value)
            if negative < 0:
                raise SchemaValidationError(f"{name}.{field} must hold no {negative}")
    if isinstance(record, MetricRecord) and record.step is None and record.epoch is None:
        raise SchemaValidationError(f"{name} needs a step or an epoch")


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _tuple_option(annotation: Any) -> Any:
    return next(option for option in _options(annotation) if get_origin(option) is tuple)


def _check_finite(where: str, value: float | None) -> None:
    if value is None:
        return
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise SchemaValidationError(f"{where} must be a finite float64, got {value!r:.40}")


def _check_literal(where: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SchemaValidationError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")


def _check_field(where: str, value: object, annotation: Any) -> None:
    options = _options(annotation)
    if type(value) is int and float not in options and not -_INT64_MAX <= value <= _INT64_MAX:
        raise SchemaValidationError(f"{where} must fit in 64 bits")
    if not any(_fits(value, option) for option in options):
        wanted = " or ".join(
            "None" if o is type(None) else getattr(o, "__name__", str(o)) for o in options
        )
        raise SchemaValidationError(f"{where} must be {wanted}, not {type(value).__name__}")


def _fits(value: object, option: Any) -> bool:
    if option is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if option is JsonObject:
        return isinstance(value, dict)
    if get_origin(option) is tuple:
        inner = get_args(option)[0]
        return isinstance(value, tuple) and all(_fits(item, inner) for item in value)
    if isinstance(option, UnionType):
        return any(_fits(value, one) for one in get_args(option))
    return isinstance(value, option)
