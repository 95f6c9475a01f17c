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
_MAX_NODES = 100_000
_MAX_NOTES = 100
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
    mapping = _as_mapping(config)
    if mapping is None:
        raise SchemaValidationError(
            "config must be a dict, an argparse.Namespace or a dataclass instance, "
            f"not {type(config).__name__}"
        )
    conversion = _Conversion()
    values = conversion.convert(mapping, "config")
    if not isinstance(values, dict):
        values = {"config": values}
    return ConfigSnapshot(JsonObject(redact_values(values)), tuple(conversion.notes))


class _Conversion:
    """One walk over a config: foreign objects may raise anywhere, and may hold themselves."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._above: list[int] = []
        self._nodes = 0

    def convert(self, value: Any, path: str) -> Any:
        """The value in JSON types; whatever goes wrong becomes a repr and a note."""
        self._nodes += 1
        try:
            if self._nodes > _MAX_NODES:
                return self._fall_back(value, path, f"the config has over {_MAX_NODES} values")
            if id(value) in self._above:
                return self._fall_back(None, path, "it holds itself")
            if len(self._above) >= _MAX_DEPTH:
                return self._fall_back(value, path, "it is nested too deep")
            self._above.append(id(value))
            try:
                return self._convert(value, path)
            finally:
                self._above.pop()
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return self._fall_back(value, path, f"{type(error).__name__} while it was read")

    def _convert(self, value: Any, path: str) -> Any:
        if isinstance(value, Enum):
            return self.convert(value.value, path)
        if value is None or isinstance(value, (str, int, float)):
            return normalize_json(_plain_scalar(value), path)
        mapping = _as_mapping(value)
        if mapping is not None:
            return {
                self._convert_key(key, path): self.convert(item, f"{path}.{_name(key)}")
                for key, item in list(mapping.items())
            }
        if isinstance(value, (list, tuple)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(_sort(value))]
        if isinstance(value, PurePath):
            return str(value)
        return self._convert_foreign(value, path)

    def _convert_foreign(self, value: Any, path: str) -> Any:
        """Objects of libraries that are not imported here: told by module and shape."""
        module = type(value).__module__.partition(".")[0]
        if module == "torch" and type(value).__name__ in ("dtype", "device"):
            return str(value)
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return normalize_json(value.item(), path)
        if module == "numpy" and "DType" in type(value).__name__:
            return str(value)
        return self._fall_back(value, path, f"{type(value).__name__} is not JSON")

    def _convert_key(self, key: object, path: str) -> str:
        if isinstance(key, Enum):
            key = key.value
        try:
            text = normalize_json(str(key), path)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return self._fall_back(key, path, f"{type(error).__name__} while a key was read")
        return str(text)

    def _fall_back(self, value: object, path: str, reason: str) -> str:
        try:
            text = str(normalize_json(repr(value), path))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
        if len(text) > _MAX_REPR:
            text = text[:_MAX_REPR] + "…"
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(f"{path} was kept as its repr: {reason}")
        return text


def _as_mapping(value: object) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return None


def _plain_scalar(value: Any) -> Any:
    """numpy.float64 is a float and numpy.str_ a str; take the plain value."""
    if isinstance(value, bool) or value is None:
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    return value


def _sort(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return list(values)


def _name(key: object) -> str:
    """A key for a path in a note; never fails."""
    return key if isinstance(key, str) else f"<{type(key).__name__}>"
