"""How each field of each record type is encoded, read off its annotations once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, Record

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
        raise SchemaValidationError(f"{name} holds no JSON object, but {value!r:.40}")
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
        raise SchemaValidationError(f"{name} holds no list of its values, but {items!r:.40}")
    return tuple(items)


def _make_records(record_type: type[Record], items: list[Any]) -> tuple[Record, ...]:
    try:
        # Fields that a newer writer has added are left out.
        return tuple(msgspec.convert(item, record_type) for item in items)
    except (msgspec.ValidationError, TypeError) as error:
        raise SchemaValidationError(f"what should be a {record_type.__name__}: {error}") from None


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
