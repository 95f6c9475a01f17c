"""Digests of what a run was made of: equal where that was equal, in any process and Python.

They are taken of values as records keep them, in an encoding of their own that depends on no
library: `1` and `1.0` are one number, `-0.0` is `0`, every NaN is the same, a truth value is no
number, and the order of keys says nothing. Lists are ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from quark_core.records.json_object import flatten_json
from quark_core.records.runs import RunDigests

_DIGEST_BYTES = 16
# No setting that anybody reads is a list of lists of lists of lists of lists.
_MOST_LISTS = 5
# Most paths have none of these in them, and need no further look.
_SEED_WORDS = ("seed", "rng", "random")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEED = re.compile(
    r"(^|[._/-])("
    r"((py(thon)?)?hash|rand(om)?|manual|global|rng)?seed([_-]?(everything|value|num(ber)?))?"
    r"|random[_-]?state|p?rng([_-](key|state))?"
    # Each library's own, where a run has one of each: `seed.torch`, `seeds.numpy`.
    r"|seeds?\.[^.]+"
    r")$"
)
_SEED_BEFORE = re.compile(r"(^|[._/-])seed$", re.IGNORECASE)
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
    """Whether a setting is a seed, by its name: that of a key, an argument or a variable.

    This alone decides of it: digests, groups, comparisons and `quark why` all ask here. It is
    `seed` or what ends in it (`data.seed`, `random-seed`, `randomSeed`, `PYTHONHASHSEED`), its
    value under another usual name (`seed_everything`, `random_state`, `rng`, `prng_key`), or one
    of several seeds (`seed.torch`).
    """
    lowered = path.lower()
    if not any(word in lowered for word in _SEED_WORDS):
        return False
    return _SEED.search(_HUMP.sub("_", path).lower()) is not None


def was_seed(path: str) -> bool:
    """Whether stores and runs of versions up to 0.2 know a seed by its name."""
    return _SEED_BEFORE.search(path) is not None


def digest_config(values: Mapping[str, Any], knows: Callable[[str], bool] = is_seed) -> str:
    """Digest of a configuration without its seeds: runs of one digest are seeds of one.

    The objective is left out too, and where in memory an object lay that is kept as its repr.

    Args:
        values: The configuration; nested keys and keys joined by dots are the same.
        knows: What is a seed; `was_seed` gives the digest of an older version.
    """
    kept = {path: _without_addresses(value) for path, value in _list_settings(values, knows)}
    return _digest(b"config", _encode(kept))


def digest_structure(values: Mapping[str, Any]) -> str:
    """Digest of the keys and types of a configuration, whatever its values.

    Integers and floats are one type; truth values, texts and None are each another. A list is
    of the types of its items, however many of each; an empty one is of none.

    Args:
        values: The configuration, of which seeds and objective are left out: what has equal
            settings has an equal structure.
    """
    types = sorted((_encode(path), _encode_type(value)) for path, value in _list_settings(values))
    return _digest(b"structure", _frame(b"m", b"".join(map(b"".join, types))))


def digest_environment(values: Mapping[str, Any]) -> str:
    """Digest of interpreter, libraries, hardware and switches.

    Args:
        values: As `EnvironmentSnapshot` has them. Which process of which host it was is left
            out, and the state of git, which is the code's; of packages those that were not
            imported, where that is known; and seeds, such as PYTHONHASHSEED.
    """
    imported = list_imported(values)
    kept = {
        path: value
        for path, value in flatten_json(values)
        if not (_is_place(path) or is_seed(path) or is_idle_package(path, imported))
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


def renew_digests(stored: RunDigests, config: Mapping[str, Any]) -> RunDigests:
    """The digests that a store keeps of a run, as this version makes them.

    An older version has not left out the seeds that it did not know.

    Args:
        stored: As they are kept.
        config: Values of the run's configuration.
    """
    if not any(is_seed(path) and not was_seed(path) for path, _ in flatten_json(config)):
        return stored
    made = make_digests(config, None)
    return msgspec.structs.replace(stored, config=made.config, structure=made.structure)


def _list_settings(
    values: Mapping[str, Any], knows: Callable[[str], bool] = is_seed
) -> Iterator[tuple[str, Any]]:
    for path, value in flatten_json(values):
        if path not in _OBJECTIVE and not knows(path):
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


def _encode_type(value: Any, lists: int = 0) -> bytes:
    """The encoded type of a value; of lists within so many others that they are lists.

    A list's names each type twice, so that each list around it doubles its length.
    """
    if value is None:
        return _encode("null")
    if isinstance(value, bool):
        return _encode("bool")
    if isinstance(value, int | float):
        return _encode("number")
    if isinstance(value, str):
        return _encode("text")
    if isinstance(value, Mapping):
        items = sorted((_encode(str(key)), _encode_type(of, lists)) for key, of in value.items())
        return _frame(b"m", b"".join(map(b"".join, items)))
    if not isinstance(value, Sequence):
        return _encode(type(value).__name__)
    if lists == _MOST_LISTS:
        return _encode("list")
    types = sorted({_encode_type(item, lists + 1) for item in value})
    return _frame(b"l", b"".join(_frame(b"l", _frame(b"b", each) + each) for each in types))


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
