"""Configurations as snapshots of plain JSON values, and configurations that note their reads.

Objects of attrs, pydantic and OmegaConf are told by the marks of their types:
none of these libraries is imported here, and whoever hands over such an object
has imported it already. An interpolation of OmegaConf is told by what it is
written as: `${oc.env:API_KEY}` and `${db.password}` name a secret, whatever the
key is called that they stand at.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, NoReturn

from quark_core.config.redaction import REDACTED, cut_text, is_secret_key, redact_values
from quark_core.errors import SchemaValidationError
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import JsonObject, mark_key, normalize_json

_MAX_DEPTH = 32
_READ = 1


class _Reads:
    """Which keys were read: one byte each, which forked children share.

    A worker of a data loader that reads a key in its own process has read it too.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.places: dict[str, int] = {}
        try:
            self._add(values, "", 0)
        except SchemaValidationError:
            raise
        except Exception as error:
            raise SchemaValidationError(
                f"tracked: config cannot be iterated: {type(error).__name__}: {error!s:.60}"
            ) from error
        # Late: only who tracks a configuration needs it.
        from mmap import mmap

        self._marks = mmap(-1, max(1, len(self.places)))

    def _add(self, values: Mapping[str, Any], above: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise SchemaValidationError(f"config is nested more than {_MAX_DEPTH} levels deep")
        for key, value in values.items():
            path = f"{above}.{key}" if above else str(key)
            inner = _find_mapping(value)
            if inner:
                self._add(inner, path, depth + 1)
            else:
                self.places[path] = len(self.places)

    def mark(self, path: str) -> None:
        """Note that a key, or a whole mapping, was read."""
        place = self.places.get(path)
        if place is not None:
            self._marks[place] = _READ

    def mark_below(self, path: str) -> None:
        """Note that all keys of a mapping were read."""
        prefix = f"{path}." if path else ""
        for name, place in self.places.items():
            if name.startswith(prefix):
                self._marks[place] = _READ

    def list_read(self) -> list[str]:
        """The keys that were read, sorted."""
        return sorted(name for name, place in self.places.items() if self._marks[place] == _READ)


class TrackedConfig(Mapping[str, Any]):
    """A configuration that notes which keys are read; made by `quark.tracked`.

    Keys are read as `config["lr"]` or `config.lr`; a nested mapping comes as one of these.
    It cannot be changed. Whoever walks over it has read all of it. Reads of forked children,
    such as a data loader's workers, count too; a copy or a pickle counts as having read it all.

    Threads: any.
    """

    __slots__ = ("_path", "_reads", "_values")

    def __init__(self, values: Mapping[str, Any], path: str, reads: _Reads) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_reads", reads)

    _values: Mapping[str, Any]
    _path: str
    _reads: _Reads

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        path = f"{self._path}.{key}" if self._path else str(key)
        inner = _find_mapping(value)
        if inner:
            return TrackedConfig(inner, path, self._reads)
        self._reads.mark(path)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no key {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        self._reads.mark_below(self._path)
        return iter(self._values)

    def __len__(self) -> int:
        self._reads.mark_below(self._path)
        return len(self._values)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            path = f"{self._path}.{key}" if self._path else key
            self._reads.mark(path)
            self._reads.mark_below(path)
        return key in self._values

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError(f"a tracked config is read-only: {name} keeps its value")

    def __setitem__(self, key: str, value: object) -> NoReturn:
        raise TypeError(f"a tracked config is read-only: {key!r} keeps its value")

    def __copy__(self) -> TrackedConfig:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process reads of it nobody here learns.
        self._reads.mark_below(self._path)
        return tracked, (_make_plain(self._values),)

    def __repr__(self) -> str:
        return f"tracked({_make_plain(self._values)!r})"


def tracked(config: Mapping[str, Any] | Namespace | SimpleNamespace) -> TrackedConfig:
    """Wrap a config to record which keys the training script reads.

    Pass the result to `start_run(config=…)` and read all values from it. `quark why` then rules out
    keys that neither run has read. Values read from the original config are not seen.

    Args:
        config: A mapping, `argparse.Namespace` or `SimpleNamespace`. It is not copied.

    Returns:
        A read-only mapping with the keys as attributes.

    Raises:
        SchemaValidationError: `config` has another type. Convert an OmegaConf config with
            `OmegaConf.to_container(config, resolve=True)`.

    Example:
        config = quark.tracked({"lr": 0.1, "optimizer": {"name": "sgd"}})
        session = quark.start_run(project="vision", config=config)
        optimizer = make(config.optimizer.name, lr=config.lr)
    """
    values = _find_mapping(config)
    if isinstance(config, TrackedConfig):
        return config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        raise SchemaValidationError(
            "tracked: OmegaConf resolves keys internally, so their reads cannot be recorded. "
            "Pass OmegaConf.to_container(config, resolve=True)"
        )
    if values is None:
        raise SchemaValidationError(
            "tracked: config must be a mapping, an argparse.Namespace or a SimpleNamespace, not "
            f"{type(config).__name__}"
        )
    return TrackedConfig(values, "", _Reads(values))


def find_plain(config: TrackedConfig) -> Mapping[str, Any]:
    """What a tracked configuration holds, without reading it."""
    return config._values


def list_reads(config: TrackedConfig) -> tuple[list[str], list[str]]:
    """The keys that were read so far, and all keys."""
    reads = config._reads
    return reads.list_read(), sorted(reads.places)


def _find_mapping(value: object) -> Mapping[str, Any] | None:
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    return value if isinstance(value, Mapping) else None


def _make_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if (inner := _find_mapping(value)) is None else _make_plain(inner)
        for key, value in values.items()
    }


_MAX_NODES = 100_000
_MAX_NOTES = 100
_MAX_REPR = 500
_REPR_LEVELS, _REPR_ITEMS = 2, 50
_ACCEPTED = (
    "a dict or another mapping, an argparse.Namespace or ArgumentParser, a types.SimpleNamespace, "
    "a NamedTuple, an instance of a dataclass, an attrs class or a pydantic model, an "
    "OmegaConf DictConfig, or a Config of OpenMMLab"
)
# Modules of values that are spelled in one way.
_SPELLED = frozenset({"datetime", "decimal", "ipaddress", "uuid"})


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """What a plugin knows of an object that somebody gave as `config`.

    Attributes:
        values: What the core reads in its place, of a type that `snapshot_config` accepts.
        add_origins: Adds origins and notes to the snapshot of `values`, which is redacted: what
            it adds must be redacted too. None where nothing is known.
    """

    values: object
    add_origins: Callable[[ConfigSnapshot], ConfigSnapshot] | None = None


def snapshot_config(config: object) -> ConfigSnapshot:
    """Take a config as it is now, redacted.

    A config is a mapping, an argparse.Namespace, a types.SimpleNamespace, a
    NamedTuple, an instance of a dataclass, an attrs class or a pydantic model,
    or an OmegaConf DictConfig; or an argparse.ArgumentParser, which is asked to
    parse `sys.argv`, what it does not know left out: of a bad value, and of
    `--help`, it ends the program as ever. Inside it all of these may stand as well (a
    NamedTuple as a list); enum members become their names (their values where
    those are texts), paths, dates and ids strings, numpy and torch scalars
    numbers, dtypes and devices their names, sets sorted lists. What JSON cannot
    hold becomes its repr, with a note; it never raises for that. Of two keys
    that become one, such as 1 and "1", the later has its type behind it, with a
    note.

    Interpolations of OmegaConf are resolved one by one. What cannot be, and
    what is missing (`???`), stays as it is written, with a note. Where that
    makes a difference, `raw` is the config with all of them as written.

    Raises:
        SchemaValidationError: `config` itself is none of these, nor None.
    """
    if config is None:
        return ConfigSnapshot(JsonObject())
    if isinstance(config, ArgumentParser):
        config, _ = config.parse_known_args()
    tree = _find_root(config)
    named = read_named_tuple(tree)
    tree = tree if named is None else named
    if tree is config and read_fields(tree) is None:
        raise SchemaValidationError(f"config must be {_ACCEPTED}, not {type(config).__name__}")
    conversion = _Conversion(resolve=True)
    values = _wrap(conversion.convert(tree, "config"))
    raw = None
    if conversion.has_interpolations:
        values = _place_interpolated(values, conversion.secrets)
        raw = JsonObject(redact_values(_wrap(_Conversion(resolve=False).convert(tree, "config"))))
    resolved = JsonObject(redact_values(values), is_redacted=True)
    raw = None if raw == resolved else raw
    return ConfigSnapshot(resolved, tuple(conversion.notes), raw)


def make_converter() -> Callable[[object], object]:
    """A function that makes plain JSON of single values as `snapshot_config` does, unredacted."""
    conversion = _Conversion(resolve=False)
    return lambda value: conversion.convert(value, "config")


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
                return self._fall_back(value, path, f"the config has more than {_MAX_NODES} values")
            if id(value) in self._above:
                return self._fall_back(None, path, "it contains itself")
            if len(self._above) >= _MAX_DEPTH:
                return self._fall_back(value, path, "it is nested too deeply")
            self._above.append(id(value))
            try:
                return self._convert(value, path)
            finally:
                self._above.pop()
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return self._fall_back(value, path, f"reading it raised {type(error).__name__}")

    def _convert(self, value: Any, path: str) -> Any:
        if isinstance(value, Enum):
            return self.convert(_name_member(value), path)
        if value is None or isinstance(value, (str, int, float)):
            return normalize_json(_plain_scalar(value), path)
        omegaconf = _find_omegaconf(value)
        if omegaconf is not None:
            return self._convert_container(omegaconf, value, path)
        root = _find_root(value)
        if root is not value:
            return self.convert(root, path)
        fields = read_fields(value)
        if fields is not None:
            out: dict[str, Any] = {}
            for key, item in list(fields.items()):
                name = self._place_key(key, out, path)
                out[name] = self.convert(item, f"{path}.{_name(key)}")
            return out
        if isinstance(value, (list, tuple)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return [self.convert(item, f"{path}[{i}]") for i, item in enumerate(_sort(value))]
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, _Unreadable):
            return self._fall_back(value, path, f"reading it raised {value.reason}")
        return self._convert_foreign(value, path)

    def _convert_container(self, omegaconf: Any, container: Any, path: str) -> Any:
        """A DictConfig or ListConfig, entry by entry: one that is broken must not cost the rest."""
        written = omegaconf.to_container(container, resolve=False)
        if isinstance(written, dict):
            out: dict[str, Any] = {}
            for key, item in written.items():
                out[self._place_key(key, out, path)] = self._convert_entry(
                    omegaconf, container, key, item, f"{path}.{_name(key)}"
                )
            return out
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
            return _redact_written(self.convert(written, path))
        try:
            item = container[key]
        except Exception as error:  # noqa: BLE001 - a resolver may raise anything
            return self._keep_written(written, path, type(error).__name__)
        if not interpolated:
            return self.convert(item, path)
        self.has_interpolations = True
        if _names_secret(written, item):
            self.secrets.append(self.convert(item, path))
            return REDACTED
        if id(item) in self._above:
            return self._keep_written(written, path, "it refers to itself")
        found = self.convert(item, path)
        return found if isinstance(found, (dict, list)) else _Interpolated(found)

    def _keep_written(self, written: Any, path: str, reason: str) -> Any:
        self._note(f"{path} was stored as it is written: {reason}")
        return _redact_written(self.convert(written, path))

    def _convert_foreign(self, value: Any, path: str) -> Any:
        """Objects of libraries that are not imported here: told by module and shape."""
        if _is_hidden(value):
            return _HIDDEN
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

    def _place_key(self, key: object, taken: Mapping[str, Any], path: str) -> str:
        """A key as JSON has it; of two that become one, such as 1 and "1", the later is marked."""
        name = self._convert_key(key, path)
        if name in taken:
            marked = mark_key(name, key, taken)
            self._note(f"{path} has two keys {name!r}; the one of type {type(key).__name__} was "
                       f"stored as {marked!r}")  # fmt: skip
            return marked
        return name

    def _convert_key(self, key: object, path: str) -> str:
        if isinstance(key, Enum):
            key = _name_member(key)
        try:
            text = normalize_json(str(key), path)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return self._fall_back(key, path, f"reading a key raised {type(error).__name__}")
        return str(text)

    def _fall_back(self, value: object, path: str, reason: str) -> str:
        try:
            text = str(normalize_json(_describe(value), path))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
        if len(text) > _MAX_REPR:
            text = cut_text(text, _MAX_REPR) + "…"
        self._note(f"{path} was stored as its repr: {reason}")
        return text

    def _note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)


def _describe(value: object) -> str:
    """A repr that does not unfold: of lists that hold lists, each many times, none has an end."""
    if type(value) not in (dict, list, tuple, set, frozenset):
        return repr(value)
    short = reprlib.Repr()
    short.maxlevel = _REPR_LEVELS
    short.maxdict = short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = _REPR_ITEMS
    short.maxstring = short.maxother = short.maxlong = _MAX_REPR
    return short.repr(value)


def _name_member(member: Enum) -> Any:
    """An enum member by a text: its value where that is one, else its name."""
    return member.value if isinstance(member.value, str) else member.name or str(member)


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


_HIDDEN = "**********"
"""What pydantic shows of a secret."""

_SECRET_TYPES = ("Secret", "SecretBytes", "SecretField", "SecretStr", "_SecretBase")


class _Unreadable:
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
    if isinstance(value, TrackedConfig):
        return find_plain(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if _derives_from(value, "mmengine", ("Config",)) or _derives_from(value, "mmcv", ("Config",)):
        return _read_openmmlab(value)
    if _derives_from(value, "pydantic", ("BaseModel",)):
        return _read_model(value)
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if isinstance(attributes, tuple):
        return _read_attributes(value, [attribute.name for attribute in attributes])
    if dataclasses.is_dataclass(value):
        return _read_attributes(value, [field.name for field in dataclasses.fields(value)])
    return None


def _read_openmmlab(value: Any) -> Mapping[str, Any] | None:
    """The values of a configuration of OpenMMLab, which is no mapping itself."""
    found = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "_cfg_dict", None)
    return found if isinstance(found, Mapping) else None


def read_named_tuple(value: object) -> Mapping[str, Any] | None:
    """The fields of a NamedTuple by their names, or None for anything else."""
    names = getattr(type(value), "_fields", None)
    if not isinstance(value, tuple) or not isinstance(names, tuple):
        return None
    return dict(zip(names, value, strict=False))


def _find_root(value: object) -> object:
    """What a pydantic model with a root stands for; any other value itself."""
    kind = type(value)
    if not _derives_from(value, "pydantic", ("BaseModel",)):
        return value
    if getattr(kind, "__pydantic_root_model__", False):
        return vars(value).get("root")
    return vars(value).get("__root__", value)


def _is_hidden(value: object) -> bool:
    """Whether pydantic hides this value (`SecretStr` and its like)."""
    return _derives_from(value, "pydantic", _SECRET_TYPES)


def _read_attributes(value: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes by name; one that was never set is None."""
    out: dict[str, Any] = {}
    for name in names:
        try:
            out[name] = getattr(value, name, None)
        except Exception as error:  # noqa: BLE001 - a foreign attribute may raise anything
            out[name] = _Unreadable(error)
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


# A short text is found by accident in others.
_MIN_SECRET_LENGTH = 6
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_BETWEEN_NAMES = re.compile(r"[^\w-]+")


@dataclass(frozen=True, slots=True)
class _Interpolated:
    """A value that an interpolation resolved to, until `_place_interpolated` has looked at it.

    Attributes:
        value: A JSON value that is neither a dict nor a list.
    """

    value: Any


def _find_omegaconf(value: object) -> Any | None:
    """The class `OmegaConf` where `value` is one of its containers, else None; imports nothing."""
    library = sys.modules.get("omegaconf")
    if library is None:
        return None
    for name in ("DictConfig", "ListConfig", "TupleConfig"):
        kind = getattr(library, name, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return getattr(library, "OmegaConf", None)
    return None


def _names_secret(written: str, value: object) -> bool:
    """Whether an interpolation as it is written names a secret that has this value."""
    return any(
        is_secret_key(name, value)
        for expression in _find_expressions(written)
        for name in _find_names(expression)
    )


def _redact_written(written: Any) -> Any:
    """An interpolation as it is written, but for the default value of a secret."""
    if isinstance(written, str) and "," in written and _names_secret(written, "any"):
        return REDACTED
    return written


def _place_interpolated(values: dict[str, Any], secrets: list[object]) -> dict[str, Any]:
    """Put the values of interpolations in place, but for those that hold a secret of elsewhere.

    Args:
        values: JSON values with `_Interpolated` ones among them.
        secrets: What is known to be secret besides what stands under a secret's key.
    """
    texts: set[str] = set()
    for secret in secrets:
        _collect(secret, texts)
    # The name of a variable may have been put together by interpolations itself.
    _collect_by_key("", dict(os.environ), texts)
    _collect_by_key("", values, texts)
    settled = _settle(values, texts)
    assert isinstance(settled, dict)
    return settled


def _find_expressions(written: str) -> list[str]:
    """What stands between `${` and `}`, of nested ones too: each without those inside it."""
    found: list[str] = []
    rest, count = written, 1
    while count:
        found += _INNERMOST.findall(rest)
        rest, count = _INNERMOST.subn("", rest)
    return found


def _find_names(expression: str) -> list[str]:
    """Names in the path of a node; or those of a resolver and its first argument."""
    resolver, colon, arguments = expression.partition(":")
    names = _BETWEEN_NAMES.split(resolver)
    if colon:
        names += _BETWEEN_NAMES.split(arguments.partition(",")[0])
    return names


def _collect_by_key(key: str, value: Any, texts: set[str]) -> None:
    if is_secret_key(key, value.value if isinstance(value, _Interpolated) else value):
        _collect(value, texts)
    elif isinstance(value, dict):
        for name, item in value.items():
            _collect_by_key(name, item, texts)
    elif isinstance(value, list):
        for item in value:
            _collect_by_key(key, item, texts)


def _collect(value: Any, texts: set[str]) -> None:
    if isinstance(value, _Interpolated):
        value = value.value
    if isinstance(value, dict):
        for item in value.values():
            _collect(item, texts)
    elif isinstance(value, list):
        for item in value:
            _collect(item, texts)
    elif value is not None and len(text := str(value)) >= _MIN_SECRET_LENGTH:
        texts.add(text)


def _settle(value: Any, texts: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _settle(item, texts) for name, item in value.items()}
    if isinstance(value, list):
        return [_settle(item, texts) for item in value]
    if not isinstance(value, _Interpolated):
        return value
    shown = str(value.value)
    return REDACTED if any(text in shown for text in texts) else value.value
