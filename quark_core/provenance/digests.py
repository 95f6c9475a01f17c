"""Digests of a configuration: of what it says, and of the shape in which it says it.

Both leave out seeds and the objective: runs of one digest are seeds of one configuration,
whatever they are judged by. Equal text means equal values, on every machine and version of
Python: keys are sorted, 1 and 1.0 are one number, and addresses in memory are no values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from quark_core.config.objective import MODE_KEY, OBJECTIVE_KEY

__all__ = ["digest_config", "digest_structure", "find_seeds", "flatten_config", "is_seed"]

_SEED = re.compile(r"(^|[._/-])seed$", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_EXACT_FLOATS = 2.0**53


def is_seed(path: str) -> bool:
    """Whether a path of the configuration holds a seed."""
    return _SEED.search(path) is not None


def digest_config(values: Mapping[str, Any]) -> str:
    """A text that is equal for configurations that say the same, seeds and objective aside.

    Args:
        values: Plain JSON values, as `ConfigSnapshot` has them.
    """
    return _digest(_strip(values, "", _plain))


def digest_structure(values: Mapping[str, Any]) -> str:
    """A text that is equal for configurations of the same keys and types.

    int and float are one type; of a list the types that stand in it count, and not how many.
    Seeds and objective aside, as in `digest_config`: what has equal configurations has equal
    structures.

    Args:
        values: As in `digest_config`.
    """
    return _digest(_strip(values, "", _type))


def find_seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> value of each seed in a configuration."""
    return {path: _plain(value) for path, value in flatten_config(values) if is_seed(path)}


def flatten_config(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths with dots between, and the values there; a list and an empty mapping are values."""
    for key, item in values.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(item, Mapping) and item:
            yield from flatten_config(item, below)
        else:
            yield below, item


def _strip(values: Mapping[str, Any], path: str, say: Any) -> dict[str, Any]:
    """A mapping without what no digest knows, each value as `say` has it."""
    kept: dict[str, Any] = {}
    for key, item in values.items():
        below = f"{path}.{key}" if path else str(key)
        if below in (OBJECTIVE_KEY, MODE_KEY):
            continue
        if isinstance(item, Mapping) and item:
            inside = _strip(item, below, say)
            if inside:
                kept[str(key)] = inside
        elif not is_seed(below):
            kept[str(key)] = say(item)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS:
        return int(value)
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _type(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return {str(key): _type(item) for key, item in value.items()}
    inside = {_encode(_type(item)): _type(item) for item in value}
    return [inside[key] for key in sorted(inside)]


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_encode(value))
