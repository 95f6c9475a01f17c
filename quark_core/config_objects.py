"""Tells apart the objects that people keep configs in, and reads their fields.

Objects of attrs, pydantic and OmegaConf are told by the marks of their types:
none of these libraries is imported here, and whoever hands over such an object
has imported it already.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["HIDDEN", "Unreadable", "find_root", "is_hidden", "read_fields", "read_named_tuple"]

HIDDEN = "**********"
"""What pydantic shows of a secret."""

_SECRET_TYPES = ("Secret", "SecretBytes", "SecretField", "SecretStr", "_SecretBase")


class Unreadable:
    """Stands for a field that raised while it was read.

    Attributes:
        reason: The name of what it raised.
    """

    def __init__(self, error: Exception) -> None:
        self.reason = type(error).__name__

    def __repr__(self) -> str:
        return "<unreadable>"


def read_fields(value: object) -> Mapping[Any, Any] | None:
    """The fields of an object by their names, or None for what is no object with fields.

    Mappings, `argparse.Namespace`, `types.SimpleNamespace`, and instances of
    dataclasses, attrs classes and pydantic models (of version 1 and 2) have
    fields. A field that raises becomes `Unreadable`; the others are kept.
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if _derives_from(value, "pydantic", ("BaseModel",)):
        return _read_model(value)
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if isinstance(attributes, tuple):
        return _read_attributes(value, [attribute.name for attribute in attributes])
    if dataclasses.is_dataclass(value):
        return _read_attributes(value, [field.name for field in dataclasses.fields(value)])
    return None


def read_named_tuple(value: object) -> Mapping[str, Any] | None:
    """The fields of a NamedTuple by their names, or None for anything else."""
    names = getattr(type(value), "_fields", None)
    if not isinstance(value, tuple) or not isinstance(names, tuple):
        return None
    return dict(zip(names, value, strict=False))


def find_root(value: object) -> object:
    """What a pydantic model with a root stands for; any other value itself."""
    kind = type(value)
    if not _derives_from(value, "pydantic", ("BaseModel",)):
        return value
    if getattr(kind, "__pydantic_root_model__", False):
        return vars(value).get("root")
    return vars(value).get("__root__", value)


def is_hidden(value: object) -> bool:
    """Whether pydantic hides this value (`SecretStr` and its like)."""
    return _derives_from(value, "pydantic", _SECRET_TYPES)


def _read_attributes(value: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes by name; one that was never set is None."""
    out: dict[str, Any] = {}
    for name in names:
        try:
            out[name] = getattr(value, name, None)
        except Exception as error:  # noqa: BLE001 - a foreign attribute may raise anything
            out[name] = Unreadable(error)
    return out


def _read_model(value: object) -> dict[str, Any]:
    """Fields of a pydantic model, then its extra ones; nothing that is computed."""
    kind = type(value)
    set_values = vars(value)
    for mark in ("__pydantic_fields__", "model_fields"):
        fields = getattr(kind, mark, None)
        if isinstance(fields, dict):
            extra = getattr(value, "__pydantic_extra__", None) or {}
            return {name: set_values[name] for name in fields if name in set_values} | extra
    # Version 1 keeps extra fields among the others, and so does a cached property.
    fields = getattr(kind, "__fields__", {})
    given = getattr(value, "__fields_set__", ())
    return {name: item for name, item in set_values.items() if name in fields or name in given}


def _derives_from(value: object, library: str, names: tuple[str, ...]) -> bool:
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] == library
        for base in type(value).__mro__
    )
