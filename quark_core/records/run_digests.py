"""Digests of what a run was made of: equal where that was equal, in any process and Python.

They are taken of values as records keep them, in an encoding of their own that depends on no
library: `1` and `1.0` are one number, `-0.0` is `0`, every NaN is the same, a truth value is no
number, and the order of keys says nothing. Lists are ordered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from quark_core.records.json_object import flatten_json
from quark_core.records.runs import RunDigests

__all__ = [
    "digest_config",
    "digest_environment",
    "digest_structure",
    "is_idle_package",
    "is_seed",
    "list_imported",
    "make_digests",
]

_DIGEST_BYTES = 16
_SEED = re.compile(r"(^|[._/-])seed$", re.IGNORECASE)
# What a run is judged by is no setting of it.
_OBJECTIVE = frozenset({"quark_objective", "quark_objective_mode"})
# Of the repr of an object that JSON cannot hold.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Where a process ran and which one it was; what it was made of is all else.
_PLACES = frozenset(
    """
    git process imported installed host.name host.release python.executable launch.rank
    launch.local_rank launch.source variables.CUDA_VISIBLE_DEVICES variables.MASTER_PORT
    variables.RANK variables.LOCAL_RANK variables.NODE_RANK variables.CONDA_DEFAULT_ENV
    variables.WORLD_SIZE variables.SLURM_JOB_ID variables.SLURM_JOB_NAME variables.SLURM_PROCID
    variables.SLURM_NTASKS variables.SLURM_JOB_NUM_NODES variables.SLURM_RESTART_COUNT
    """.split()
)


def is_seed(path: str) -> bool:
    """Whether a path of the configuration holds a seed."""
    return _SEED.search(path) is not None


def digest_config(values: Mapping[str, Any]) -> str:
    """Digest of a configuration without its seeds: runs of one digest are seeds of one.

    The objective is left out too, and where in memory an object lay that is kept as its repr.

    Args:
        values: The configuration; nested keys and keys joined by dots are the same.
    """
    kept = {path: _without_addresses(value) for path, value in _list_settings(values)}
    return _digest(b"config", _encode(kept))


def digest_structure(values: Mapping[str, Any]) -> str:
    """Digest of the keys and types of a configuration, whatever its values.

    Integers and floats are one type; truth values, texts and None are each another. A list is
    of the types of its items, however many of each; an empty one is of none.

    Args:
        values: The configuration, of which seeds and objective are left out: what has equal
            settings has an equal structure.
    """
    kept = {path: _type(value) for path, value in _list_settings(values)}
    return _digest(b"structure", _encode(kept))


def digest_environment(values: Mapping[str, Any]) -> str:
    """Digest of interpreter, libraries, hardware and switches.

    Args:
        values: As `EnvironmentSnapshot` has them. Which process of which host it was is left
            out, and the state of git, which is the code's; of packages those that were not
            imported, where that is known.
    """
    imported = list_imported(values)
    kept = {
        path: value
        for path, value in flatten_json(values)
        if not _is_place(path) and not is_idle_package(path, imported)
    }
    return _digest(b"environment", _encode(kept))


def list_imported(environment: Mapping[str, Any]) -> frozenset[str] | None:
    """Packages that an environment says were imported; None where it does not say."""
    imported = environment.get("imported")
    if not isinstance(imported, list | tuple):
        return None
    return frozenset(each for each in imported if isinstance(each, str))


def is_idle_package(path: str, imported: frozenset[str] | None) -> bool:
    """Whether a path of an environment is of a package that nobody is known to have imported.

    Args:
        path: The path, as `flatten_json` has it.
        imported: As `list_imported` has it of the same environment.
    """
    section, _, name = path.partition(".")
    return section == "packages" and imported is not None and name not in imported


def make_digests(
    config: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
    code: str | None = None,
) -> RunDigests:
    """The digests of a run; None for what nothing was recorded of.

    Args:
        config: Values of its configuration; an empty one was never given.
        environment: Values of its environment.
        code: Digest of its sources.
    """
    return RunDigests(
        config=digest_config(config) if config else None,
        structure=digest_structure(config) if config else None,
        code=code,
        environment=digest_environment(environment) if environment else None,
    )


def _list_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in flatten_json(values):
        if path not in _OBJECTIVE and not is_seed(path):
            yield path, value


def _without_addresses(value: Any) -> Any:
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    if isinstance(value, list | tuple):
        return [_without_addresses(item) for item in value]
    return value


def _is_place(path: str) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:end]) in _PLACES for end in range(1, len(parts) + 1))


def _type(value: Any) -> Any:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return {str(key): _type(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return sorted({_encode(_type(item)): _type(item) for item in value}.items())
    return type(value).__name__


def _encode(value: Any) -> bytes:
    """Bytes that are equal for equal values: each with its type and length before it."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int | float):
        return _frame(b"d", _spell(value).encode())
    if isinstance(value, str):
        return _frame(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _frame(b"b", value)
    if isinstance(value, Mapping):
        items = sorted((_encode(str(key)), _encode(item)) for key, item in value.items())
        return _frame(b"m", b"".join(key + item for key, item in items))
    if isinstance(value, Sequence):
        return _frame(b"l", b"".join(map(_encode, value)))
    return _frame(b"o", str(value).encode("utf-8", "surrogatepass"))


def _spell(number: float) -> str:
    """A number as text, the same for an integer and the float that equals it."""
    if number != number:
        return "nan"
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return f"{number:x}" if isinstance(number, int) else float(number).hex()


def _frame(kind: bytes, content: bytes) -> bytes:
    return b"%s%d:%s" % (kind, len(content), content)


def _digest(what: bytes, encoded: bytes) -> str:
    return blake2b(encoded, digest_size=_DIGEST_BYTES, person=what).hexdigest()
