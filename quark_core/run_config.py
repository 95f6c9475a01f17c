"""Turns what people call a config into a snapshot of plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import PurePath
from typing import Any

from quark_core.config_objects import (
    HIDDEN,
    Unreadable,
    find_root,
    is_hidden,
    read_fields,
    read_named_tuple,
)
from quark_core.errors import SchemaValidationError
from quark_core.interpolations import (
    Interpolated,
    find_omegaconf,
    names_secret,
    redact_written,
    settle,
)
from quark_core.json_object import JsonObject, normalize_json
from quark_core.records import ConfigSnapshot
from quark_core.redaction import REDACTED, redact_values

__all__ = ["snapshot_config"]

_MAX_DEPTH = 32
_MAX_NODES = 100_000
_MAX_NOTES = 100
_MAX_REPR = 500
_ACCEPTED = (
    "a dict or another mapping, an argparse.Namespace, a types.SimpleNamespace, a NamedTuple, an "
    "instance of a dataclass, an attrs class or a pydantic model, or an OmegaConf DictConfig"
)
# Modules of values that are spelled in one way.
_SPELLED = frozenset({"datetime", "decimal", "ipaddress", "uuid"})


def snapshot_config(config: object) -> ConfigSnapshot:
    """Take a config as it is now, redacted.

    A config is a mapping, an argparse.Namespace, a types.SimpleNamespace, a
    NamedTuple, an instance of a dataclass, an attrs class or a pydantic model,
    or an OmegaConf DictConfig. Inside it all of these may stand as well (a
    NamedTuple as a list); enum members become their values, paths, dates and
    ids strings, numpy and torch scalars numbers, dtypes and devices their
    names, sets sorted lists. What JSON cannot hold becomes its repr, with a
    note; it never raises for that.

    Interpolations of OmegaConf are resolved one by one. What cannot be, and
    what is missing (`???`), stays as it is written, with a note. Where that
    makes a difference, `raw` is the config with all of them as written.

    Raises:
        SchemaValidationError: `config` itself is none of these, nor None.
    """
    if config is None:
        return ConfigSnapshot(JsonObject())
    tree = find_root(config)
    named = read_named_tuple(tree)
    tree = tree if named is None else named
    if tree is config and read_fields(tree) is None:
        raise SchemaValidationError(f"config must be {_ACCEPTED}, not {type(config).__name__}")
    conversion = _Conversion(resolve=True)
    values = _wrap(conversion.convert(tree, "config"))
    raw = None
    if conversion.has_interpolations:
        values = settle(values, conversion.secrets)
        raw = JsonObject(redact_values(_wrap(_Conversion(resolve=False).convert(tree, "config"))))
    resolved = JsonObject(redact_values(values))
    return ConfigSnapshot(
        resolved, tuple(conversion.notes), None if raw is None or raw == resolved else raw
    )


def _wrap(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {"config": values}


class _Conversion:
    """One walk over a config: foreign objects may raise anywhere, and may hold themselves.

    Attributes:
        notes: One line for each value that was replaced.
        has_interpolations: Whether one was met and resolved.
        secrets: What interpolations resolved to that name a secret.
    """

    def __init__(self, *, resolve: bool) -> None:
        self.notes: list[str] = []
        self.has_interpolations = False
        self.secrets: list[object] = []
        self._resolve = resolve
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
        omegaconf = find_omegaconf(value)
        if omegaconf is not None:
            return self._convert_container(omegaconf, value, path)
        root = find_root(value)
        if root is not value:
            return self.convert(root, path)
        fields = read_fields(value)
        if fields is not None:
            return {
                self._convert_key(key, path): self.convert(item, f"{path}.{_name(key)}")
                for key, item in list(fields.items())
            }
        if isinstance(value, (list, tuple)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(_sort(value))]
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, Unreadable):
            return self._fall_back(value, path, f"{value.reason} while it was read")
        return self._convert_foreign(value, path)

    def _convert_container(self, omegaconf: Any, container: Any, path: str) -> Any:
        """A DictConfig or ListConfig, entry by entry: one that is broken must not cost the rest."""
        written = omegaconf.to_container(container, resolve=False)
        if isinstance(written, dict):
            return {
                self._convert_key(key, path): self._convert_entry(
                    omegaconf, container, key, item, f"{path}.{_name(key)}"
                )
                for key, item in written.items()
            }
        if isinstance(written, (list, tuple)):
            return [
                self._convert_entry(omegaconf, container, i, item, f"{path}[{i}]")
                for i, item in enumerate(written)
            ]
        # In the place of the container there is None, ??? or an interpolation without a parent.
        return None if written is None else self._keep_written(written, path, "it has no value")

    def _convert_entry(
        self, omegaconf: Any, container: Any, key: Any, written: Any, path: str
    ) -> Any:
        interpolated = omegaconf.is_interpolation(container, key)
        if interpolated and not self._resolve:
            return redact_written(self.convert(written, path))
        try:
            item = container[key]
        except Exception as error:  # noqa: BLE001 - a resolver may raise anything
            return self._keep_written(written, path, type(error).__name__)
        if not interpolated:
            return self.convert(item, path)
        self.has_interpolations = True
        if names_secret(written, item):
            self.secrets.append(self.convert(item, path))
            return REDACTED
        if id(item) in self._above:
            return self._keep_written(written, path, "it leads back to itself")
        found = self.convert(item, path)
        return found if isinstance(found, (dict, list)) else Interpolated(found)

    def _keep_written(self, written: Any, path: str, reason: str) -> Any:
        self._note(f"{path} was kept as it is written: {reason}")
        return redact_written(self.convert(written, path))

    def _convert_foreign(self, value: Any, path: str) -> Any:
        """Objects of libraries that are not imported here: told by module and shape."""
        if is_hidden(value):
            return HIDDEN
        modules = [base.__module__.partition(".")[0] for base in type(value).__mro__]
        module = modules[0]
        if module == "torch" and type(value).__name__ in ("dtype", "device"):
            return str(value)
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if not _SPELLED.isdisjoint(modules):
            isoformat = getattr(value, "isoformat", None)
            return normalize_json(str(value) if isoformat is None else isoformat(), path)
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
        self._note(f"{path} was kept as its repr: {reason}")
        return text

    def _note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)


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
