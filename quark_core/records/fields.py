"""How each field of each record type is encoded, read off its annotations once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from quark_core.records import RECORD_TYPES, Record

__all__ = [
    "ORIGIN_FIELDS",
    "boolean_fields",
    "column_types",
    "default_value",
    "optional_fields",
    "restorers",
]

ORIGIN_FIELDS = ("run_id", "writer_id", "attempt", "rank")
"""Fields that a batch carries once for all of its records."""


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
                found[name] = partial(_make_records, item) if is_record else tuple
    return found


@cache
def boolean_fields(kind: str) -> frozenset[str]:
    """Fields of a kind that hold truth values, which travel as 0 and 1."""
    hints = get_type_hints(RECORD_TYPES[kind])
    return frozenset(name for name, hint in hints.items() if bool in (hint, *get_args(hint)))


def _make_records(record_type: type[Record], items: list[Any]) -> tuple[Record, ...]:
    # Fields that a newer writer has added are left out.
    return tuple(msgspec.convert(item, record_type) for item in items)


@cache
def optional_fields(kind: str) -> frozenset[str]:
    """Fields of a kind that may be None."""
    hints = get_type_hints(RECORD_TYPES[kind])
    return frozenset(name for name, hint in hints.items() if type(None) in get_args(hint))


@cache
def default_value(kind: str, name: str) -> Any:
    """What stands in a field that an older writer did not know."""
    for field in msgspec.structs.fields(RECORD_TYPES[kind]):
        if field.name == name:
            return None if field.default is msgspec.NODEFAULT else field.default
    raise KeyError(f"{kind} records have no field {name!r}")


def _encoding_of(annotation: Any) -> str:
    options = set(getattr(annotation, "__args__", (annotation,))) - {type(None)}
    if options <= {int, bool}:
        return "i"
    if options == {float}:
        return "f"
    if options == {str}:
        return "t"
    return "j"
