"""What a run was made of, piece by piece, as one flat table that any two runs can be held by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quark_core.analysis.comparison.changes import list_settings
from quark_core.analysis.explanation.results import CauseKind
from quark_core.backends.contract import StoredRun
from quark_core.config.objective import MODE_KEY, OBJECTIVE_KEY
from quark_core.config.redaction import REDACTED
from quark_core.records.run_digests import is_seed

__all__ = [
    "NUMERIC_PACKAGES",
    "Place",
    "RunTraits",
    "describe_traits",
    "encode_value",
    "is_redacted",
]

Place = tuple[CauseKind, str]
"""Kind and place of one trait."""

NUMERIC_PACKAGES = frozenset(
    """
    torch torchvision torchaudio numpy scipy pandas polars scikit-learn jax jaxlib flax tensorflow
    keras transformers datasets tokenizers accelerate diffusers peft trl lightning
    pytorch-lightning deepspeed timm torchmetrics xgboost lightgbm triton python blas cuda cudnn
    """.split()
)
"""Packages whose version may alter what a training computes."""

_LAUNCH_VARIABLES = re.compile(r"^(SLURM_|WORLD_SIZE$|NODE_RANK$|CONDA_DEFAULT_ENV$|NCCL_)")
_IGNORED = re.compile(
    r"^(process\.(pid|cwd)|python\.executable|launch\.(rank|local_rank|source)|host\.release"
    r"|packages\.quark-tracker$|git$|git\.)"
)
_CODE_PLACE = "sources"
_COMMIT_PLACE = "git commit"


@dataclass(frozen=True, slots=True)
class RunTraits:
    """One run's traits.

    Attributes:
        values: Kind and place -> value.
        known: Kinds of which it was recorded all that is ever recorded.
        repeats: What only says again what another trait says -> that trait.
    """

    values: Mapping[Place, Any]
    known: frozenset[CauseKind]
    repeats: Mapping[str, Place] = field(default_factory=dict)


def describe_traits(stored: StoredRun) -> RunTraits:
    """The traits of a run, from what its store says of it without reading records."""
    settings = list_settings(stored)
    values: dict[Place, Any] = {}
    known: set[CauseKind] = set()
    for path, value in settings["config"].items():
        if path in (OBJECTIVE_KEY, MODE_KEY):
            continue
        # A run that was given no configuration has an empty one.
        known.add("config")
        values["seed" if is_seed(path) else "config", path] = value
    environment = {} if stored.environment is None else stored.environment.values
    for path, value in settings["environment"].items():
        place = _place_environment(path)
        if place is not None:
            values.setdefault(place, value)
    known |= _find_known(environment)
    repeats = _take_arguments(environment, values)
    _take_code(stored, environment, values, known)
    if any(kind == "seed" for kind, _ in values):
        known.add("seed")
    return RunTraits(values, frozenset(known), repeats)


def encode_value(value: Any) -> bytes:
    """A text that is equal for equal values; 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return msgspec.json.encode(value, order="sorted")


def is_redacted(value: Any) -> bool:
    """Whether a value, or a part of it, is not known because it was a secret."""
    if isinstance(value, str):
        return REDACTED in value
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    return isinstance(value, Sequence) and any(map(is_redacted, value))


def _place_environment(path: str) -> Place | None:
    if _IGNORED.match(path):
        return None
    section, _, rest = path.partition(".")
    if section == "packages":
        return "package", rest
    if section == "python":
        return ("package", "python") if rest == "version" else ("package", f"python {rest}")
    if section == "variables":
        return ("launch" if _LAUNCH_VARIABLES.match(rest) else "switch"), rest
    if section == "switches":
        return "switch", rest
    if section in ("numeric", "blas", "imported"):
        return "package", rest or section
    if section in ("host", "gpus", "hardware"):
        return "hardware", path
    return "launch", path


def _find_known(environment: Mapping[str, Any]) -> set[CauseKind]:
    sections: dict[str, CauseKind] = {
        "packages": "package",
        "switches": "switch",
        "gpus": "hardware",
        "launch": "launch",
    }
    return {kind for section, kind in sections.items() if section in environment}


def _take_code(
    stored: StoredRun,
    environment: Mapping[str, Any],
    values: dict[Place, Any],
    known: set[CauseKind],
) -> None:
    """The digest of the sources where they are known, else what git says."""
    if stored.digests.code is not None:
        values["code", _CODE_PLACE] = stored.digests.code
        known.add("code")
        return
    git = environment.get("git")
    commit = (git or {}).get("commit") or stored.run.git_commit
    if commit is not None:
        dirty = " and what was not committed" if (git or {}).get("dirty") else ""
        values["code", _COMMIT_PLACE] = f"{commit}{dirty}"


def _take_arguments(environment: Mapping[str, Any], values: dict[Place, Any]) -> dict[str, Place]:
    """Options of the command line that no key of the configuration says already."""
    arguments = (environment.get("process") or {}).get("argv")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        return {}
    by_name = _index_names(values)
    repeats: dict[str, Place] = {}
    for name, text in _parse_arguments([str(each) for each in arguments[1:]]):
        place = _find_key(name, text, by_name, values)
        if place is not None:
            repeats[f"argv {name}"] = place
        elif is_seed(name):
            values["seed", name] = text
        else:
            values["launch", f"argv {name}"] = text
    return repeats


def _index_names(values: Mapping[Place, Any]) -> dict[str, list[Place]]:
    """Names as an option may spell them -> the keys of the configuration that they may be."""
    found: dict[str, list[Place]] = {}
    for place in values:
        if place[0] not in ("config", "seed"):
            continue
        spelled = _spell(place[1])
        for name in {spelled, spelled.rpartition(".")[2], spelled.replace(".", "_")}:
            found.setdefault(name, []).append(place)
    return found


def _find_key(
    name: str, text: str | None, by_name: Mapping[str, list[Place]], values: Mapping[Place, Any]
) -> Place | None:
    spelled = _spell(name)
    for candidate in (spelled, spelled.removeprefix("no_")):
        for place in by_name.get(candidate, ()):
            if text is None and isinstance(values[place], bool):
                return place
            if text is not None and _says(text, values[place]):
                return place
    return None


def _says(text: str, value: Any) -> bool:
    """Whether the text of an argument is this value."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool) or value is None:
        return text.lower() in _WORDS[str(value)]
    if isinstance(value, (int, float)):
        try:
            return float(text) == float(value)
        except ValueError:
            return False
    try:
        return bool(msgspec.json.decode(text) == value)
    except msgspec.DecodeError:
        return False


_WORDS = {
    "True": ("true", "1", "yes"),
    "False": ("false", "0", "no"),
    "None": ("none", "null"),
}


def _spell(name: str) -> str:
    return name.lstrip("+-~").replace("-", "_").lower()


_OPTION = re.compile(r"^--?[A-Za-z][\w.-]*$")
_OVERRIDE = re.compile(r"^(\+{0,2}[A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)


def _parse_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Name and text of each option: `--lr 0.1`, `--lr=0.1`, `lr=0.1`, `--fast`; others by place."""
    index, plain = 0, 0
    while index < len(arguments):
        text = arguments[index]
        index += 1
        bare = text.lstrip("-") if text.startswith("-") else text
        override = _OVERRIDE.match(bare)
        if override is not None:
            yield override[1], override[2]
        elif _OPTION.match(text):
            follows = arguments[index] if index < len(arguments) else None
            if follows is None or _OPTION.match(follows):
                yield text.lstrip("-"), None
            else:
                index += 1
                yield text.lstrip("-"), follows
        else:
            plain += 1
            yield f"#{plain}", text
