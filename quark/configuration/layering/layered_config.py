"""The mapping that layers write to: dots for keys, and each setting knows where it is from."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from quark_core.config.redaction import redact_text, redact_values
from quark_core.errors import SchemaValidationError

COMMAND_LINE = "command line"
ARGPARSE_DEFAULT = "argparse default"
NOWHERE = ""
"""The place of what has none."""

_ROOT = Path(__file__).parents[3]
_OURS = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("quark", "quark_backends", "quark_core", "quark_torch")
)
# A loop that counts up a setting is no history worth keeping whole.
_MOST_OF_A_KEY = 50


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value that a setting was given.

    Attributes:
        source: By what.
        place: Where that stands, or None.
        value: The value.
    """

    source: str
    place: str | None
    value: Any


@dataclass(slots=True)
class Assignments:
    """All values that the settings of one configuration were given.

    Attributes:
        source: What is at work now.
        place: Where that stands, or `NOWHERE`; None to ask the stack for the line that assigns.
        by_key: Setting -> its values, the oldest first.
    """

    source: str = "code"
    place: str | None = None
    by_key: dict[str, list[Assignment]] = field(default_factory=dict)

    def note(self, key: str, value: object) -> None:
        """Remember that a setting has a value from now on."""
        place = find_place() if self.place is None else self.place or None
        known = self.by_key.setdefault(key, [])
        known.append(Assignment(self.source, place, copy_containers(value)))
        if len(known) > _MOST_OF_A_KEY:
            # The first one is worth more than those between.
            del known[1]

    def copy(self) -> dict[str, list[Assignment]]:
        """What is remembered now, as it may be put back."""
        return {key: list(each) for key, each in self.by_key.items()}


def find_place() -> str | None:
    """File and line of the nearest frame that is none of Quark's: `train.py:7`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return name_place(name, frame.f_lineno)
        frame = frame.f_back
    return None


def name_place(name: str, line: int | None = None) -> str:
    """A file as people call it: from the working directory, or the folder of the script."""
    shown = name if name.startswith("<") else _shorten(name)
    return shown if line is None else f"{shown}:{line}"


def _shorten(name: str) -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for folder in (None, os.path.dirname(script) if isinstance(script, str) else None):
        try:
            shown = os.path.relpath(name, folder or None)
        except (OSError, ValueError):
            continue
        if not shown.startswith(".."):
            return shown
    return name


def copy_containers(value: Any) -> Any:
    """A copy in which lists, sets and mappings are its own; all else is the same object."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_containers(item) for item in value]
    if type(value) is set:
        return set(value)
    return value


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple, set})


def has_fields(value: object) -> bool:
    """Whether a value is an object whose settings are its fields, and no mapping."""
    if type(value) in _PLAIN:
        return False
    return not isinstance(value, Mapping) and _read(value) is not None


def replace_field(held: Any, names: Sequence[str], value: Any, key: str) -> Any:
    """A copy of an object with one field set, and the others as they are.

    Args:
        held: The object.
        names: The field, and those within it.
        value: Its new value.
        key: How the configuration calls the field, for messages.

    Raises:
        SchemaValidationError: There is no such field, or the object refuses the value.
    """
    known, (name, *inner) = _read(held), names
    if known is None or name not in known:
        # Late: every run imports this module, and few ask for what is not there.
        import difflib

        near = difflib.get_close_matches(name, list(known or ()), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SchemaValidationError(
            f"config: {key!r}: {type(held).__name__} has no field {name!r}{hint}"
        )
    if inner:
        value = replace_field(known[name], inner, value, key)
    try:
        if isinstance(held, tuple):
            return held._replace(**{name: value})  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(held) and not isinstance(held, type):
            return dataclasses.replace(held, **{name: value})
        made = copy.copy(held)
        try:
            setattr(made, name, value)
        except AttributeError:  # a frozen class of attrs
            object.__setattr__(made, name, value)
        return made
    except Exception as error:  # a class may check its fields, and raise anything
        raise SchemaValidationError(
            f"config: {key!r} cannot be {str(value)[:60]!r}: {type(error).__name__}: {error}"
        ) from error


def _read(value: object) -> Mapping[str, Any] | None:
    # Late: what takes configurations apart reads layered ones, too.
    from quark_core.config.snapshot import read_fields, read_named_tuple

    named = read_named_tuple(value)
    return read_fields(value) if named is None else named


_MAX_DEPTH = 32
_ABSENT: Any = object()


class LayeredConfig(dict[str, Any]):
    """Config with keys as attributes, which records the origin of each value.

    A `dict` subclass. `config.optimizer.lr`, `config["optimizer"]["lr"]` and
    `config["optimizer.lr"]` are the same value. Mappings that you assign become LayeredConfig
    objects, and `config["a.b.c"] = 1` creates the parents. Use items for keys that are method names
    or not identifiers.

    Passed to `start_run`, it also records the origins. Changes after `resolve` have the origin
    `code`. Not thread-safe before `freeze()`.
    """

    __slots__ = ("_assignments", "_frozen", "_path")

    _assignments: Assignments | None
    _frozen: bool
    _path: str

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_assignments", Assignments())
        object.__setattr__(self, "_path", "")
        object.__setattr__(self, "_frozen", False)
        self.update(values, **more)

    # Reading

    def __getitem__(self, key: str) -> Any:
        found = _find(self, key)
        if found is _ABSENT:
            raise KeyError(self._describe_absence(key))
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = dict.get(self, name, _ABSENT)
        if found is _ABSENT:
            raise AttributeError(self._describe_absence(name), name=name, obj=self)
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _find(self, key) is not _ABSENT

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return the value of a key, which may contain dots, or the default."""
        found = _find(self, key)
        return default if found is _ABSENT else found

    def to_dict(self) -> dict[str, Any]:
        """Return a new dict of plain dicts and lists."""
        plain: dict[str, Any] = copy_containers(self)
        return plain

    def why(self, key: str | None = None) -> str:
        """Return the origin of one value, or of all values, as lines of text.

        A line such as `lr = 0.02  <- scaled (train.py:9) <- 0.01 high_lr (train.py:7)` names the
        origin, then each replaced value with its origin. Secrets are redacted.

        Args:
            key: Key, which may contain dots. Defaults to all keys.

        Raises:
            KeyError: The key does not exist.
        """
        return tell_origins(self, key)

    def save(self, path: str | Path) -> None:
        """Write the config to a file in the format of its extension.

        Args:
            path: Path that ends with `.json`, `.toml`, `.yaml` or `.yml` (extra `yaml`). Secrets
                are not redacted.

        Raises:
            SchemaValidationError: The extension is unknown, or the format cannot hold a value. The
                message names it.
            OSError: The file cannot be written.
        """
        from quark.configuration.layering.config_files import save_values

        save_values(self.to_dict(), Path(path))

    # Changing

    def __setitem__(self, key: str, value: Any) -> None:
        self._refuse_if_frozen(key)
        held = _find_held(self, key)
        if held is not None:
            above, name, fields = held
            _put(above, name, replace_field(dict.__getitem__(above, name), fields, value, key))
            return
        above, name = _open(self, key)
        _put(above, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _METHODS:
            raise AttributeError(f"{name} is a method of the config. Write config[{name!r}] = …")
        self[name] = value

    def __delitem__(self, key: str) -> None:
        self._refuse_if_frozen(key)
        self.pop(key)

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(self._describe_absence(name), name=name, obj=self)
        del self[name]

    def update(  # type: ignore[override]
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None, /, **more: Any
    ) -> None:
        """Set values; a mapping is merged into an existing one, key by key."""
        given = {} if values is None else values
        for key, value in given.items() if isinstance(given, Mapping) else given:
            self._merge(key, value)
        for key, value in more.items():
            self._merge(key, value)

    def update_if_absent(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Set only values whose keys do not exist yet, at each depth."""
        for key, value in {**(values or {}), **more}.items():
            known = _find(self, key)
            if known is _ABSENT:
                self[key] = value
            elif isinstance(known, LayeredConfig) and isinstance(value, Mapping):
                known.update_if_absent(value)

    def setdefault(self, key: str, default: Any = None, /) -> Any:
        """Return the value of a key, after setting it to the default if absent."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, default: Any = _ABSENT, /) -> Any:
        """Remove a key and return its value."""
        self._refuse_if_frozen(key)
        above, name = _find_above(self, key)
        if above is None or not dict.__contains__(above, name):
            if default is _ABSENT:
                raise KeyError(self._describe_absence(key))
            return default
        value = dict.pop(above, name)
        _let_go(value)
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the newest key and return it with its value."""
        if not self:
            raise KeyError("the config is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Remove all keys."""
        for key in list(self):
            self.pop(key)

    def __ior__(self, values: Any, /) -> Self:  # type: ignore[override, misc]
        self.update(values)
        return self

    def freeze(self) -> Self:
        """Make the config read-only at each depth, and return it."""
        object.__setattr__(self, "_frozen", True)
        for value in self.values():
            if isinstance(value, LayeredConfig):
                value.freeze()
        return self

    # Copies

    def copy(self) -> LayeredConfig:
        """Return a copy with the same origins that is not frozen."""
        return _restore(self.to_dict(), *_describe_memory(self))

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> LayeredConfig:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.to_dict(), *_describe_memory(self), self._frozen)

    def _merge(self, key: str, value: Any) -> None:
        known = _find(self, key)
        if isinstance(known, LayeredConfig) and isinstance(value, Mapping):
            known.update(value)
        elif isinstance(value, Mapping) and value and has_fields(known):
            for name, item in value.items():
                self[f"{key}.{_spell(name)}"] = item
        else:
            self[key] = value

    def _refuse_if_frozen(self, key: object) -> None:
        if self._frozen:
            raise TypeError(f"the config is frozen: {key!r} keeps its value")

    def _describe_absence(self, key: object) -> str:
        where = f" in {self._path}" if self._path else ""
        said = f"the config has no key {str(key)[:100]!r}{where}"
        # Late: every run imports this module, and few ask for what is not there.
        import difflib

        near = difflib.get_close_matches(str(key)[:100], list(self), 1)
        return f"{said}; did you mean {near[0]!r}?" if near else said


_METHODS = frozenset(name for name in dir(LayeredConfig) if not name.startswith("__"))


def get_memory(config: LayeredConfig) -> Assignments:
    """What a configuration remembers; of one that was taken out of another nothing."""
    memory = config._assignments
    return Assignments() if memory is None else memory


def read_assignments(config: LayeredConfig) -> dict[str, list[Assignment]]:
    """Setting -> the values that it was given, the oldest first; of what is there now alone."""
    known = get_memory(config).by_key
    prefix = f"{config._path}." if config._path else ""
    return {
        key: list(known[f"{prefix}{key}"])
        for key, _ in list_leaves(config)
        if f"{prefix}{key}" in known
    }


def list_leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each setting; an empty mapping is one."""
    for key, value in config.items():
        path = f"{above}{key}"
        if isinstance(value, LayeredConfig) and value:
            yield from list_leaves(value, f"{path}.")
        else:
            yield path, value


def note_changed_lists(config: LayeredConfig, place: str | None) -> None:
    """Remember lists that were changed where they are, as by `config.sizes.append(3)`."""
    memory = config._assignments
    if memory is None:
        return
    prefix = f"{config._path}." if config._path else ""
    for key, value in list_leaves(config):
        known = memory.by_key.get(f"{prefix}{key}")
        if type(value) not in (list, set) or not known:
            continue
        try:
            is_same = bool(known[-1].value == value)
        except Exception:  # noqa: BLE001 - foreign objects may refuse to be compared
            is_same = True
        if not is_same:
            before, memory.place = memory.place, place
            memory.note(f"{prefix}{key}", value)
            memory.place = before


def revert(
    config: LayeredConfig, values: Mapping[str, Any], known: Mapping[str, list[Assignment]]
) -> None:
    """Put back what a configuration was; nested mappings stay the same objects where they can."""
    memory = config._assignments
    _refill(config, values)
    if memory is not None:
        memory.by_key = {key: list(each) for key, each in known.items()}


def _refill(config: LayeredConfig, values: Mapping[str, Any]) -> None:
    kept = {key: dict.get(config, key) for key in values}
    for key in list(config):
        gone = dict.pop(config, key)
        if not isinstance(values.get(key), Mapping):
            _let_go(gone)
    for key, value in values.items():
        there = kept[key]
        if isinstance(value, Mapping):
            if not isinstance(there, LayeredConfig):
                there = _make(config, key)
            _refill(there, value)
            dict.__setitem__(config, key, there)
        else:
            dict.__setitem__(config, key, copy_containers(value))


def _describe_memory(config: LayeredConfig) -> tuple[str, dict[str, list[tuple[Any, ...]]]]:
    return config._path, {
        key: [(each.source, each.place, each.value) for each in known]
        for key, known in get_memory(config).by_key.items()
    }


def _restore(
    values: Mapping[str, Any],
    path: str,
    memory: Mapping[str, list[tuple[Any, ...]]],
    frozen: bool = False,
) -> LayeredConfig:
    config = LayeredConfig()
    object.__setattr__(config, "_path", path)
    _refill(config, values)
    assert config._assignments is not None
    config._assignments.by_key = {
        key: [Assignment(*each) for each in known] for key, known in memory.items()
    }
    return config.freeze() if frozen else config


def _find(config: LayeredConfig, key: object) -> Any:
    """The value of a key with dots, or `_ABSENT`."""
    if not isinstance(key, str):
        return _ABSENT
    found = dict.get(config, key, _ABSENT)
    if found is not _ABSENT or "." not in key:
        return found
    held = _find_held(config, key)
    if held is not None:
        above, name, fields = held
        return functools.reduce(
            lambda found, field: getattr(found, field, _ABSENT), fields, dict.get(above, name)
        )
    inner, name = _find_above(config, key)
    return _ABSENT if inner is None else dict.get(inner, name, _ABSENT)


def _find_above(config: LayeredConfig, key: str) -> tuple[LayeredConfig | None, str]:
    """The mapping that a key with dots stands in, and its name there."""
    *names, last = _split(key)
    for name in names:
        inner = dict.get(config, name)
        if not isinstance(inner, LayeredConfig):
            return None, last
        config = inner
    return config, last


def _find_held(config: LayeredConfig, key: str) -> tuple[LayeredConfig, str, list[str]] | None:
    """The object with fields that a key with dots leads into: its mapping, its name, the rest."""
    if not isinstance(key, str) or "." not in key or key in dict.keys(config):
        return None
    names = _split(key)
    for place, name in enumerate(names[:-1]):
        inner = dict.get(config, name)
        if not isinstance(inner, LayeredConfig):
            return (config, name, names[place + 1 :]) if has_fields(inner) else None
        config = inner
    return None


def _split(key: str) -> list[str]:
    if not isinstance(key, str):
        raise SchemaValidationError(
            f"config: a key must be a str, not {type(key).__name__}: {str(key)[:60]!r}"
        )
    names = key.split(".")
    if not all(names):
        raise SchemaValidationError(f"config: {key[:60]!r} has an empty part between its dots")
    if len(names) > _MAX_DEPTH:
        raise SchemaValidationError(f"config: {key[:60]!r} has more than {_MAX_DEPTH} levels")
    return names


def _open(config: LayeredConfig, key: str) -> tuple[LayeredConfig, str]:
    """The mapping that a key with dots is to stand in, made where it is not there."""
    *names, last = _split(key)
    for name in names:
        inner = dict.get(config, name)
        if not isinstance(inner, LayeredConfig):
            config._refuse_if_frozen(key)
            inner = _make(config, name)
            dict.__setitem__(config, name, inner)
        config = inner
    return config, last


def _make(above: LayeredConfig, name: str) -> LayeredConfig:
    path = f"{above._path}.{name}" if above._path else name
    if path.count(".") >= _MAX_DEPTH:
        raise SchemaValidationError(f"config: {path[:60]!r} has more than {_MAX_DEPTH} levels")
    made = LayeredConfig.__new__(LayeredConfig)
    object.__setattr__(made, "_assignments", above._assignments)
    object.__setattr__(made, "_path", path)
    object.__setattr__(made, "_frozen", False)
    return made


def _put(above: LayeredConfig, name: str, value: Any) -> None:
    """Set one key; a mapping is taken in, and remembered setting by setting."""
    above._refuse_if_frozen(name)
    if not isinstance(value, Mapping):
        _let_go(dict.get(above, name))
        dict.__setitem__(above, name, value)
        _note(above, name, value)
        return
    taken = list(value.items())
    inner = _make(above, name)
    _let_go(dict.get(above, name))
    dict.__setitem__(above, name, inner)
    if not taken:
        _note(above, name, {})
    for key, item in taken:
        inner_above, inner_name = _open(inner, _spell(key))
        _put(inner_above, inner_name, item)


def _spell(key: object) -> str:
    """A key of somebody's mapping; numbers are keys in many a file."""
    if isinstance(key, (bool, int, float)):
        return str(key)
    return key  # type: ignore[return-value]  # `_split` refuses what is no str


def _note(above: LayeredConfig, name: str, value: object) -> None:
    if above._assignments is not None:
        above._assignments.note(f"{above._path}.{name}" if above._path else name, value)


def _let_go(value: object) -> None:
    """What is no part of the configuration any more is not remembered either."""
    if isinstance(value, LayeredConfig):
        object.__setattr__(value, "_assignments", None)
        for inner in value.values():
            _let_go(inner)


_VALUE_CHARACTERS = 60


@dataclass(slots=True)
class Resolution:
    """How a configuration has come about.

    Attributes:
        config: The configuration.
        applied: What took part, in its order: names, and places where they are known.
        left_out: Names of the layers that did not.
        texts: Setting -> what `manual` says of it.
    """

    config: LayeredConfig
    applied: list[tuple[str, str | None]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


def print_manual(resolution: Resolution) -> None:
    """Print how a configuration has come about; a stream that is gone costs nothing."""
    try:
        sys.stdout.write(_tell_resolution(resolution))
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        return


def _tell_resolution(resolution: Resolution) -> str:
    applied = [
        _fit(name if place is None else f"{name} ({place})") for name, place in resolution.applied
    ]
    lines = ["Applied layers, in order (the last one wins):", f"  {' -> '.join(applied) or 'none'}"]
    if resolution.left_out:
        lines.append(f"Left out: {', '.join(map(_fit, resolution.left_out))}")
    lines += ["", "Settings:"]
    known = read_assignments(resolution.config)
    for key, chain in known.items():
        lines.append(f"  {tell_chain(key, _newest_first(chain))}")
        if key in resolution.texts:
            lines.append(f"      {_fit(resolution.texts[key])}")
    unset = [key for key in resolution.texts if key not in known]
    if unset:
        lines += ["", "Not set:"]
        lines += [f"  {_fit(key)}: {_fit(resolution.texts[key])}" for key in unset]
    return "\n".join([*lines, ""])


def tell_origins(config: LayeredConfig, key: str | None) -> str:
    """Where a setting of a configuration has its value from, those below it, or all of them.

    Raises:
        KeyError: There is no such key.
    """
    known = read_assignments(config)
    if key is not None:
        config[key]
        known = {
            name: each for name, each in known.items() if name == key or name.startswith(f"{key}.")
        }
    return "\n".join(tell_chain(name, _newest_first(chain)) for name, chain in known.items())


def _newest_first(chain: Sequence[Assignment]) -> list[tuple[str, str | None, Any]]:
    return [(each.source, each.place, each.value) for each in reversed(chain)]


def tell_chain(key: str, chain: Sequence[tuple[str, str | None, Any]]) -> str:
    """One setting in a line: its value, what gave it, and what that replaced.

    Args:
        key: The setting.
        chain: Source, place and value, the newest first; of a secret the value is redacted here.
    """
    parts: list[str] = []
    for number, (source, place, value) in enumerate(chain):
        shown = _show(key, value)
        said = source if place is None else f"{source} ({place})"
        parts.append(f"{key} = {shown}  <- {said}" if number == 0 else f"<- {shown} {said}")
    return _fit(redact_text(" ".join(parts)))


def _fit(text: str) -> str:
    """A text in one line in which nothing is hidden, or commands a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _show(key: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        told = redact_values({"key": key, "value": json.loads(text)})["value"]
        text = json.dumps(told, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
        text = str(redact_values({"key": key, "value": text})["value"])
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 3]}..."
