"""The schema of records: its version, how each field is encoded, and the rules to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records import (
    RECORD_TYPES,
    EventSeverity,
    Record,
    RunStatus,
    StreamRecord,
    format_time,
)
from quark_core.records.checks import check_finite
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.diagnostics import (
    ArtifactPayloadFormat,
    TelemetryBoundary,
)
from quark_core.records.names import check_name

ORIGIN_FIELDS = ("run_id", "writer_id", "attempt", "rank")
"""Fields that a batch carries once for all of its records."""


class RecordField(NamedTuple):
    """How a field of a record type is stored.

    Attributes:
        encoding: `i` for integers and booleans, `f` for floats, `t` for text, `j` for JSON.
        is_boolean: Whether it holds booleans, which are stored as 0 and 1.
        is_optional: Whether it may be None.
        default: The value of records that were written before the field existed.
        restore: Makes the value out of what JSON gives back; None if that is the value.
    """

    encoding: str
    is_boolean: bool
    is_optional: bool
    default: Any
    restore: Callable[[Any], Any] | None


@cache
def describe_fields(kind: str) -> Mapping[str, RecordField]:
    """Describe the fields of a record type by name, without those of the origin.

    Args:
        kind: The kind of record, such as "metric".
    """
    return {
        name: RecordField(
            encoding,
            name in boolean_fields(kind),
            name in optional_fields(kind),
            default_value(kind, name),
            restorers(kind).get(name),
        )
        for name, encoding in column_types(kind).items()
    }


@cache
def column_types(kind: str) -> dict[str, str]:
    """Field name -> encoding (`i`, `f`, `t` or `j`) of a kind, without the origin fields."""
    hints = get_type_hints(RECORD_TYPES[kind])
    return {
        name: _encoding_of(hints[name])
        for name in RECORD_TYPES[kind].__struct_fields__
        if name not in ORIGIN_FIELDS
    }


@cache
def restorers(kind: str) -> dict[str, Callable[[Any], Any]]:
    """Field name -> what makes its value out of the list that JSON gives back.

    Only of fields that hold tuples: of plain values, or of records.
    """
    found: dict[str, Callable[[Any], Any]] = {}
    for name, hint in get_type_hints(RECORD_TYPES[kind]).items():
        for option in (hint, *get_args(hint)):
            if get_origin(option) is tuple:
                item = get_args(option)[0]
                is_record = isinstance(item, type) and issubclass(item, Record)
                found[name] = (
                    partial(_make_records, item)
                    if is_record
                    else partial(_make_tuple, name, _types_within(item))
                )
    return found


def restore_object(name: str, value: Any) -> Any:
    """The value of a field that holds a JSON object, out of what JSON gives back.

    Raises:
        SchemaValidationError: It is none.
    """
    if not isinstance(value, dict):
        raise SchemaValidationError(f"{name} contains {value!r:.40}, which is not a JSON object")
    return value


@cache
def boolean_fields(kind: str) -> frozenset[str]:
    """Fields of a kind that hold truth values, which travel as 0 and 1."""
    hints = get_type_hints(RECORD_TYPES[kind])
    return frozenset(name for name, hint in hints.items() if bool in (hint, *get_args(hint)))


def _types_within(item: Any) -> frozenset[type]:
    """The types that a value within a list may have; of floats JSON has integers, and null."""
    options = frozenset(get_args(item) or (item,))
    return options | {int, type(None)} if float in options else options


def _make_tuple(name: str, types: frozenset[type], items: Any) -> tuple[Any, ...]:
    if not isinstance(items, (list, tuple)) or not types.issuperset(map(type, items)):
        raise SchemaValidationError(f"{name} is not a list of its values, but {items!r:.40}")
    return tuple(items)


def _make_records(record_type: type[Record], items: list[Any]) -> tuple[Record, ...]:
    try:
        # Fields that a newer writer has added are left out.
        return tuple(msgspec.convert(item, record_type) for item in items)
    except (msgspec.ValidationError, TypeError) as error:
        raise SchemaValidationError(f"{record_type.__name__} cannot be read: {error}") from None


@cache
def optional_fields(kind: str) -> frozenset[str]:
    """Fields of a kind that may be None."""
    hints = get_type_hints(RECORD_TYPES[kind])
    return frozenset(name for name, hint in hints.items() if type(None) in get_args(hint))


def default_value(kind: str, name: str) -> Any:
    """The value of a field in a record that an older writer made, which did not know it."""
    if name not in (known := _list_defaults(kind)):
        raise KeyError(f"{kind} records have no field {name!r}")
    return known[name]


@cache
def _list_defaults(kind: str) -> dict[str, Any]:
    return {
        field.name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(RECORD_TYPES[kind])
    }


def _encoding_of(annotation: Any) -> str:
    options = set(getattr(annotation, "__args__", (annotation,))) - {type(None)}
    if options <= {int, bool}:
        return "i"
    if options == {float}:
        return "f"
    if options == {str}:
        return "t"
    return "j"


CURRENT_SCHEMA_VERSION = 6
"""Schema version of the records and stores that this version of Quark writes."""

RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)
TERMINAL_STATUSES = ("completed", "failed", "interrupted")
"""Statuses with which a run ends."""
EVENT_SEVERITIES: tuple[str, ...] = get_args(EventSeverity)
TELEMETRY_BOUNDARIES: tuple[str, ...] = get_args(TelemetryBoundary)
ARTIFACT_PAYLOAD_FORMATS: tuple[str, ...] = get_args(ArtifactPayloadFormat)
LOG_IDENTIFIERS = {"Info": "info", "Warning": "warning", "Error": "error"}
"""Identifier of a log -> severity of its event."""
RESERVED_LOG_KEYS = ("message", "identifier")
"""Payload keys of a log that Quark fills in."""

_INT64_MAX = 2**63 - 1
_SIGNED = frozenset({"time_us"})
_COUNTING_NOTHING = frozenset({str, type(None), JsonObject})


def validate_record(record: Record) -> Record:
    """Check a record against the current schema and return it.

    The check covers types, literals, non-negative counters, finite values, and the consistency of a
    metric's key, namespace and name.

    Args:
        record: The record.

    Raises:
        SchemaValidationError: The record is invalid. The message starts with its type and field.
    """
    if not isinstance(record, Record):
        raise SchemaValidationError(
            f"record must be one of Quark's records, not {type(record).__name__}"
        )
    name = type(record).__name__
    for field, annotation, usual in _field_types(type(record)):
        value = getattr(record, field)
        # Most values are of just the type that their field has; the rest is looked at more closely.
        if type(value) not in usual:
            _check_field(f"{name}.{field}", value, annotation)
        if isinstance(value, tuple):
            for item in value:
                if isinstance(item, Record):
                    validate_record(item)
    _check_counters(name, record)
    if isinstance(record, StreamRecord):
        try:
            format_time(record.time_us)
        except OverflowError:
            raise SchemaValidationError(
                f"{name}.time_us must be in the years 1 to 9999, got {record.time_us}"
            ) from None
    for field in record.RULES.names:
        check_name(getattr(record, field), f"{name}.{field}")
    for field, allowed in record.RULES.words.items():
        _check_word(f"{name}.{field}", getattr(record, field), allowed)
    for field in record.RULES.finite:
        check_finite(f"{name}.{field}", getattr(record, field))
    record.check()
    return record


@cache
def _field_types(record_type: type[Record]) -> tuple[tuple[str, Any, frozenset[Any]], ...]:
    """Name and annotation of each field, and the types of which any value will do."""
    hints = get_type_hints(record_type)
    return tuple(
        (field, hints[field], frozenset(_options(hints[field])) - {int})
        for field in record_type.__struct_fields__
    )


@cache
def _counting_fields(record_type: type[Record]) -> tuple[tuple[str, Any], ...]:
    """Name and annotation of the fields that may hold an integer, or several."""
    return tuple(
        (field, annotation)
        for field, annotation, _ in _field_types(record_type)
        if field not in _SIGNED and not set(_options(annotation)) <= _COUNTING_NOTHING
    )


def dump_record(record: Record) -> dict[str, Any]:
    """Validate a record and return it as a new dict of JSON values.

    Args:
        record: The record.

    Raises:
        SchemaValidationError: The record is invalid. The message starts with its type and field.
    """
    return validate_record(record).to_dict()


def _check_counters(name: str, record: Record) -> None:
    for field, annotation in _counting_fields(type(record)):
        value = getattr(record, field)
        # Every integer of a record counts something.
        if isinstance(value, int) and value < 0 and float not in _options(annotation):
            raise SchemaValidationError(f"{name}.{field} must not be negative, got {value}")
        if isinstance(value, tuple) and value and get_args(_tuple_option(annotation))[0] is int:
            negative = min(value)
            if negative < 0:
                raise SchemaValidationError(f"{name}.{field} must not contain {negative}")


@cache
def _options(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _tuple_option(annotation: Any) -> Any:
    return next(option for option in _options(annotation) if get_origin(option) is tuple)


def _check_word(where: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SchemaValidationError(
            f"{where} must be one of {', '.join(map(repr, allowed))}, got {value!r:.60}"
        )


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
