"""What a run was made of, piece by piece, as one flat table that any two runs can be held by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from quark_core.analysis.comparison.changes import list_configuration, list_environment
from quark_core.analysis.explanation.results import CauseKind
from quark_core.backends.contract import StoredRun
from quark_core.config.objective import MODE_KEY, OBJECTIVE_KEY
from quark_core.config.redaction import REDACTED
from quark_core.records.run_digests import is_seed
from quark_core.runs.environment import WELL_KNOWN_PACKAGES

__all__ = [
    "CODE_PLACE",
    "INSTALLED",
    "Place",
    "RunTraits",
    "describe_traits",
    "encode_value",
    "is_incidental",
    "is_redacted",
    "tells_runs_apart",
]

T = TypeVar("T")

Place = tuple[CauseKind, str]
"""Kind and place of one trait."""

INSTALLED: Place = ("package", "installed.digest")
"""The digest over all that was installed, imported or not."""

_INCIDENTAL = re.compile(
    r"(^|[._/ -])(log(ging|_?every|_?interval|_?level|_?dir|_?freq)?|verbose|print|debug"
    r"|tracking|report|progress|names?|notes?|tags?|output|out|store|save|checkpoint|ckpt"
    r"|(output|run|save|work|exp|log|cache)_?dir|(run|exp|job)_?(name|id)|experiment|user|host)"
    r"([._/-]|$)",
    re.IGNORECASE,
)
_LAUNCH_VARIABLES = re.compile(r"^(SLURM_|WORLD_SIZE$|NODE_RANK$|CONDA_DEFAULT_ENV$|NCCL_)")
_IGNORED = re.compile(
    r"^(process\.(pid|cwd)|python\.executable|launch\.(rank|local_rank|source)|host\.release"
    r"|packages\.quark-tracker$|git$|git\.|imported$|installed$|installed\.(count|list)$)"
)
_SECTIONS: dict[str, CauseKind] = {
    "packages": "package",
    "python": "package",
    "libc": "package",
    "cuda": "package",
    "installed": "package",
    "variables": "switch",
    "switches": "switch",
    "host": "hardware",
    "gpus": "hardware",
    "cpu": "hardware",
    "launch": "launch",
    "process": "launch",
}
CODE_PLACE = "sources"
"""Place of the digest over all sources."""

_COMMIT_PLACE = "git commit"
_NEEDS: dict[CauseKind, frozenset[str]] = {
    "config": frozenset({"config"}),
    "code": frozenset({"sources"}),
    "launch": frozenset({"launch", "argv"}),
    "package": frozenset({"packages", "imported"}),
    "hardware": frozenset({"gpus", "host"}),
}

# Runs of a project have the same places and few values: each is worked out once. Bounded, as
# are the texts, for a store may hold anything.
_MOST_PLACES = 4_096
_MOST_VALUES = 16_384
_MOST_CHARACTERS = 200


def _remember(work_out: Callable[[str], T]) -> Callable[[str], T]:
    """Work out once what paths say, long ones aside."""
    known = lru_cache(maxsize=_MOST_PLACES)(work_out)

    def find(path: str) -> T:
        return known(path) if len(path) <= _MOST_CHARACTERS else work_out(path)

    return find


@dataclass(frozen=True, slots=True)
class RunTraits:
    """One run's traits.

    Attributes:
        values: Kind and place -> value.
        known: Kinds of which it was recorded all that is ever recorded.
        repeats: What only says again what another trait says -> that trait.
        sections: What was written down at all: of what is not in one of these nobody knows.
        origins: Kind and place -> its section.
        imported: Packages that it had imported, or None where that was not written down.
    """

    values: Mapping[Place, Any]
    known: frozenset[CauseKind]
    repeats: Mapping[str, Place] = field(default_factory=dict)
    sections: frozenset[str] = frozenset()
    origins: Mapping[Place, str] = field(default_factory=dict)
    imported: frozenset[str] | None = None

    def lacks(self, place: Place, section: str) -> bool:
        """Whether it is known not to have something, rather than not known to have it."""
        return place not in self.values and section in self.sections


def describe_traits(stored: StoredRun) -> RunTraits:
    """The traits of a run, from what its store says of it without reading records."""
    values: dict[Place, Any] = {}
    sections: set[str] = set()
    for path, value in list_configuration(stored).items():
        place = _place_setting(path)
        if place is not None:
            values[place] = value
    if values:
        # A run that was given no configuration has an empty one.
        sections.add("config")
    origins = dict.fromkeys(values, "config")
    environment = {} if stored.environment is None else stored.environment.values
    for path, value in list_environment(stored).items():
        section, place = _place_environment(path)
        sections.add(section)
        if place is not None and place not in values:
            values[place], origins[place] = value, section
    sections |= {
        name for name in ("packages", "variables", "gpus", "launch") if name in environment
    }
    repeats = _take_arguments(environment, values, sections)
    _take_code(stored, environment, values, sections)
    if stored.run.resume_count:
        values["launch", "resumed"] = stored.run.resume_count
    sections.add("run")
    for place in list(values)[len(origins) :]:
        origins[place] = _name_section(place)
    imported = environment.get("imported")
    if isinstance(imported, Sequence) and not isinstance(imported, str):
        sections.add("imported")
        imported = frozenset(_spell_package(str(name)) for name in imported)
    else:
        imported = None
    known = _find_known(values, sections)
    return RunTraits(values, known, repeats, frozenset(sections), origins, imported)


def _name_section(place: Place) -> str:
    kind, name = place
    if kind == "launch":
        return "argv" if name.startswith("argv ") else "run"
    return "sources" if kind == "code" else "config"


def _find_known(values: Mapping[Place, Any], sections: set[str]) -> frozenset[CauseKind]:
    """Of which kinds all was written down that is ever written down."""
    known: set[CauseKind] = {kind for kind, needed in _NEEDS.items() if needed <= sections}
    if any(place[0] == "seed" for place in values):
        known.add("seed")
    # Switches are of a library: where none was loaded there were none to write down.
    if any(section.startswith("switches.") for section in sections):
        known.add("switch")
    return frozenset(known)


def encode_value(value: Any) -> bytes:
    """A text that is equal for equal values; 1 and 1.0 are equal."""
    kind = type(value)
    if kind in _PLAIN or (kind is str and len(value) <= _MOST_CHARACTERS):
        return _encode_plain(value)
    return _encode(value)


def _encode(value: Any) -> bytes:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return msgspec.json.encode(value, order="sorted")


# By type, for True and 1 are equal and their texts are not.
_encode_plain = lru_cache(maxsize=_MOST_VALUES, typed=True)(_encode)
_PLAIN = frozenset({int, float, bool, type(None)})


def _spell_package(name: str) -> str:
    return name.lower().replace("_", "-")


def is_incidental(place: Place) -> bool:
    """Whether something says, by its name, where a run ran, or what it is called.

    As far as names tell it decides of no result: runs that differ in it are still alike.
    """
    kind, name = place
    if kind == "hardware":
        return name == "host.name"
    if kind == "launch" and not name.startswith("argv "):
        return name not in ("launch.world_size", "resumed")
    return kind in ("config", "launch") and _INCIDENTAL.search(name) is not None


@lru_cache(maxsize=_MOST_PLACES)
def tells_runs_apart(place: Place) -> bool:
    """Whether runs that differ in this are not runs of one kind, as seeds of one are.

    Which packages were imported depends on the moment at which somebody looked, so that only
    those count that are always recorded.
    """
    kind, name = place
    if kind == "package":
        is_always_known = name.startswith("python") or name in WELL_KNOWN_PACKAGES
        return is_always_known or ("." in name and place != INSTALLED)
    return kind != "seed" and not is_incidental(place)


def is_redacted(value: Any) -> bool:
    """Whether a value, or a part of it, is not known because it was a secret."""
    if isinstance(value, str):
        return REDACTED in value
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    return isinstance(value, Sequence) and any(map(is_redacted, value))


@_remember
def _place_setting(path: str) -> Place | None:
    """Which trait a path of the configuration is, if any."""
    if path in (OBJECTIVE_KEY, MODE_KEY):
        return None
    return "seed" if is_seed(path) else "config", path


@_remember
def _place_environment(path: str) -> tuple[str, Place | None]:
    """Section of a path of the environment, and which trait it is, if any."""
    section, _, rest = path.partition(".")
    if section == "switches" and "." in rest:
        section = f"switches.{rest.partition('.')[0]}"
    if _IGNORED.match(path):
        return section, None
    head = path.partition(".")[0]
    if head == "packages":
        return section, ("package", rest)
    if head == "python":
        return section, ("package", "python" if rest == "version" else f"python {rest}")
    if head == "variables":
        return section, ("launch" if _LAUNCH_VARIABLES.match(rest) else "switch", rest)
    if head == "switches":
        return section, ("switch", rest)
    if head == "blas":
        # How many threads a pool has is a setting; which library it is, is not.
        return section, ("switch" if "pools" in rest else "package", path)
    return section, (_SECTIONS.get(head, "launch"), path)


def _take_code(
    stored: StoredRun,
    environment: Mapping[str, Any],
    values: dict[Place, Any],
    sections: set[str],
) -> None:
    """The digest of the sources where they are known, else what git says."""
    if stored.digests.code is not None:
        values["code", CODE_PLACE] = stored.digests.code
        sections.add("sources")
        return
    git = environment.get("git")
    commit = (git or {}).get("commit") or stored.run.git_commit
    if commit is not None:
        dirty = " and what was not committed" if (git or {}).get("dirty") else ""
        values["code", _COMMIT_PLACE] = f"{commit}{dirty}"


def _take_arguments(
    environment: Mapping[str, Any], values: dict[Place, Any], sections: set[str]
) -> dict[str, Place]:
    """Options of the command line that no key of the configuration says already."""
    arguments = (environment.get("process") or {}).get("argv")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        return {}
    sections.add("argv")
    options = list(_parse_arguments([str(each) for each in arguments[1:]]))
    by_name = _index_names(values) if options else {}
    repeats: dict[str, Place] = {}
    for name, text in options:
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
        for name in _list_spellings(place[1]):
            found.setdefault(name, []).append(place)
    return found


@_remember
def _list_spellings(path: str) -> frozenset[str]:
    spelled = _spell(path)
    return frozenset((spelled, spelled.rpartition(".")[2], spelled.replace(".", "_")))


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
