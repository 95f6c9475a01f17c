"""The schema of records: its version, and the rules a record must keep."""

from __future__ import annotations

import math
import re
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject
from quark_core.names import check_name, split_name
from quark_core.records import (
    EventRecord,
    EventSeverity,
    LayerSummaryRecord,
    LifecycleAction,
    LifecycleRecord,
    MetricRecord,
    Record,
    RunRecord,
    RunStatus,
    StreamRecord,
    format_time,
)

__all__ = [
    "CURRENT_SCHEMA_VERSION",
    "EVENT_SEVERITIES",
    "HOOK_DIRECTIONS",
    "LAYER_SUMMARY_TYPES",
    "LOG_IDENTIFIERS",
    "RESERVED_LOG_KEYS",
    "RUN_STATUSES",
    "TERMINAL_STATUSES",
    "check_event_type",
    "dump_record",
    "validate_record",
]

CURRENT_SCHEMA_VERSION = 2
"""Version of the records and of the stores that hold them."""

RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)
TERMINAL_STATUSES = ("completed", "failed", "interrupted")
EVENT_SEVERITIES: tuple[str, ...] = get_args(EventSeverity)
LAYER_SUMMARY_TYPES = ("activation", "gradient")
HOOK_DIRECTIONS = ("forward", "backward")
LOG_IDENTIFIERS = {"Info": "info", "Warning": "warning", "Error": "error"}
"""Identifier of a log -> severity of its event."""
RESERVED_LOG_KEYS = ("message", "identifier")
"""Payload keys of a log that Quark fills in."""

_INT64_MAX = 2**63 - 1
_COUNTERS = (
    "attempt",
    "rank",
    "sequence",
    "step",
    "epoch",
    "resume_count",
    "call_index",
    "element_count",
)
_EVENT_TYPE = re.compile(r"[a-z][a-z0-9_./-]*")


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
    _check_counters(name, record)
    if isinstance(record, StreamRecord):
        try:
            format_time(record.time_us)
        except OverflowError:
            raise SchemaValidationError(
                f"{name}.time_us must lie in the years 1 to 9999, got {record.time_us}"
            ) from None
    if isinstance(record, MetricRecord):
        check_name(record.metric_key, f"{name}.metric_key")
        if (record.namespace, record.metric_name) != split_name(record.metric_key):
            raise SchemaValidationError(
                f"{name}.metric_key {record.metric_key!r} is not namespace and metric_name joined, "
                "with the last segment as metric_name"
            )
        _check_finite(f"{name}.value", record.value)
    elif isinstance(record, EventRecord):
        check_event_type(record.event_type, f"{name}.event_type")
        _check_literal(f"{name}.severity", record.severity, EVENT_SEVERITIES)
    elif isinstance(record, LifecycleRecord):
        _check_literal(f"{name}.action", record.action, get_args(LifecycleAction))
    elif isinstance(record, LayerSummaryRecord):
        check_name(record.module_name, f"{name}.module_name")
        _check_literal(f"{name}.summary_type", record.summary_type, LAYER_SUMMARY_TYPES)
        _check_literal(f"{name}.hook_direction", record.hook_direction, HOOK_DIRECTIONS)
    elif isinstance(record, RunRecord):
        _check_literal(f"{name}.status", record.status, RUN_STATUSES)
    return record


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
    for field in _COUNTERS:
        value = getattr(record, field, None)
        if value is not None and value < 0:
            raise SchemaValidationError(f"{name}.{field} must not be negative, got {value}")
    if isinstance(record, MetricRecord) and record.step is None and record.epoch is None:
        raise SchemaValidationError(f"{name} needs a step or an epoch")


def _check_finite(where: str, value: float) -> None:
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
    options = (
        get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    )
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
    return isinstance(value, option)
