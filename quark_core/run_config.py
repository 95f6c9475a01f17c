"""Turns what people call a config into a snapshot of plain JSON values."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject, normalize_json
from quark_core.records import ConfigSnapshot
from quark_core.redaction import redact_values

__all__ = ["snapshot_config"]

_MAX_DEPTH = 32
_MAX_REPR = 500


def snapshot_config(config: object) -> ConfigSnapshot:
    """Take a config as it is now, redacted.

    A dict, an argparse Namespace or a dataclass instance is a config; inside
    it, enum members become their values, paths strings, numpy and torch
    scalars numbers, dtypes and devices their names, sets sorted lists. What
    JSON cannot hold becomes its repr, with a note; it never raises for that.

    Raises:
        SchemaValidationError: `config` itself is none of the three, nor None.
    """
    if config is None:
        return ConfigSnapshot(JsonObject())
    notes: list[str] = []
    mapping = _as_mapping(config)
    if mapping is None:
        raise SchemaValidationError(
            "config must be a dict, an argparse.Namespace or a dataclass instance, "
            f"not {type(config).__name__}"
        )
    values = _convert(mapping, "config", notes, 0)
    return ConfigSnapshot(JsonObject(redact_values(values)), tuple(notes))


def _as_mapping(value: object) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return None


def _convert(value: Any, path: str, notes: list[str], depth: int) -> Any:
    if value is None or (
        isinstance(value, (bool, str, int, float)) and not isinstance(value, Enum)
    ):
        return normalize_json(_plain_scalar(value), path)
    if depth >= _MAX_DEPTH:
        return _fall_back(value, path, notes, "nested too deep")
    mapping = _as_mapping(value)
    if mapping is not None:
        return {
            _convert_key(key): _convert(item, f"{path}.{key}", notes, depth + 1)
            for key, item in list(mapping.items())
        }
    if isinstance(value, Enum):
        return _convert(value.value, path, notes, depth + 1)
    if isinstance(value, (list, tuple)):
        return _convert_items(value, path, notes, depth)
    if isinstance(value, (set, frozenset)):
        return _convert_items(sorted(value, key=repr), path, notes, depth)
    if isinstance(value, PurePath):
        return str(value)
    return _convert_foreign(value, path, notes)


def _convert_items(items: Iterable[Any], path: str, notes: list[str], depth: int) -> list[Any]:
    return [_convert(item, f"{path}[{i}]", notes, depth + 1) for i, item in enumerate(items)]


def _convert_foreign(value: Any, path: str, notes: list[str]) -> Any:
    """Objects of libraries that are not imported here: told by module and shape."""
    module = type(value).__module__.partition(".")[0]
    try:
        if module == "torch" and type(value).__name__ in ("dtype", "device", "Size"):
            return list(value) if type(value).__name__ == "Size" else str(value)
        if module == "numpy" and hasattr(value, "newbyteorder") and hasattr(value, "itemsize"):
            return str(value)  # an instance of numpy.dtype
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return normalize_json(value.item(), path)
    except Exception as error:  # noqa: BLE001 - foreign code
        return _fall_back(value, path, notes, f"{type(error).__name__}: {error}")
    return _fall_back(value, path, notes, f"{type(value).__name__} is not JSON")


def _convert_key(key: object) -> str:
    if isinstance(key, Enum):
        key = key.value
    return normalize_json(key if isinstance(key, str) else str(key), "config")  # type: ignore[no-any-return]


def _plain_scalar(value: Any) -> Any:
    """numpy.float64 is a float and numpy.str_ a str; take the plain value."""
    if isinstance(value, bool) or value is None:
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    return value


def _fall_back(value: Any, path: str, notes: list[str], reason: str) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - foreign code
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    if len(text) > _MAX_REPR:
        text = text[:_MAX_REPR] + "…"
    notes.append(f"{path} was kept as its repr: {reason}")
    return str(normalize_json(text, path))
