"""A configuration that notes which of its keys are read: what nobody reads changes nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from quark_core.errors import SchemaValidationError

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
                f"tracked: config cannot be gone through: {type(error).__name__}: {error!s:.60}"
            ) from error
        # Late: only who tracks a configuration needs it.
        from mmap import mmap

        self._marks = mmap(-1, max(1, len(self.places)))

    def _add(self, values: Mapping[str, Any], above: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise SchemaValidationError(f"config is nested deeper than {_MAX_DEPTH} levels")
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
            raise AttributeError(f"the configuration has no key {name!r}") from None

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
        raise TypeError(f"a tracked configuration cannot be changed: {name} keeps its value")

    def __setitem__(self, key: str, value: object) -> NoReturn:
        raise TypeError(f"a tracked configuration cannot be changed: {key!r} keeps its value")

    def __copy__(self) -> TrackedConfig:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process reads of it nobody here learns.
        self._reads.mark_below(self._path)
        return tracked, (_make_plain(self._values),)

    def __repr__(self) -> str:
        return f"tracked({_make_plain(self._values)!r})"


def tracked(config: Mapping[str, Any] | Namespace | SimpleNamespace) -> TrackedConfig:
    """Wrap a configuration so that Quark learns which of its keys the training reads.

    Give it to `start_run(config=…)` and read every key from it. `quark why` then rules out a
    key that neither run has read: whatever it says, nobody looked. That holds as far as the
    training reads its configuration from here and from nowhere else.

    config = quark.tracked({"lr": 0.1, "optimizer": {"name": "sgd"}})
    session = quark.start_run(project="vision", config=config)
    optimizer = make(config.optimizer.name, lr=config.lr)

    Args:
        config: A mapping, `argparse.Namespace` or `SimpleNamespace`; taken as it is, not
            copied.

    Returns:
        A mapping whose keys are also attributes; it cannot be changed.

    Raises:
        SchemaValidationError: `config` is something else, or of OmegaConf, whose keys read
            one another unseen: give `OmegaConf.to_container(config, resolve=True)`.
    """
    values = _find_mapping(config)
    if isinstance(config, TrackedConfig):
        return config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        raise SchemaValidationError(
            "tracked: keys of an OmegaConf config read one another unseen; give "
            "OmegaConf.to_container(config, resolve=True)"
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
