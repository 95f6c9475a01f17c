"""The attributes of a run as one flat table, and the runs that are explained by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quark.analysis.comparison.changes import (
    fold_arguments,
    list_command,
    list_configuration,
    list_environment,
    take_environment,
)
from quark.analysis.comparison.comparison_groups import (
    Target,
    describe_side,
    open_target,
    refer_to_run,
)
from quark.analysis.comparison.results import RunReference
from quark.analysis.explanation.results import CauseKind
from quark.analysis.run_data import RunData
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import StoredRun
from quark_core.config.objective import MODE_KEY, OBJECTIVE_KEY
from quark_core.config.redaction import REDACTED
from quark_core.errors import SessionStoreError
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query
from quark_core.records.runs import RunContext, is_seed
from quark_core.runs.environment import WELL_KNOWN_PACKAGES
from quark_core.runs.reading import read_rows
from quark_core.sessions.run_config import CONFIG_READS

T = TypeVar("T")

Place = tuple[CauseKind, str]
"""Kind and place of one trait."""

INSTALLED: Place = ("package", "installed.digest")
"""The digest over all that was installed, imported or not."""

_INCIDENTAL = re.compile(
    r"(^|[._/ -])(log(ging|_?every|_?interval|_?level|_?dir|_?freq)?|verbose|print|debug"
    r"|tracking|report|progress|notes?|tags?|output|out|store|save|checkpoint|ckpt"
    r"|(output|run|save|work|exp|log|cache)_?dir|experiment|user|host)"
    r"([._/-]|$)"
    # The name of the run; that of its model, as in `model.name`, is a setting.
    r"|^(argv )?names?$",
    re.IGNORECASE,
)
# What a run is called, by people and by tools: keys that importers and trackers leave behind.
_IDENTITY = re.compile(
    r"((^|[./])(exp|experiment|job|trial|sweep|project|group)|(^|[._/-])run)[._-]?"
    r"(name|id|uuid|url|uri|link|key|notes?|description|tags?|number|entity|project|version)$"
    r"|^(argv )?(notes?|description|comments?|tags|uuid|guid|entity|timestamp|datetime"
    r"|(created|started|launched)_at|start_time)$",
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
_HASH_SEED = "PYTHONHASHSEED"
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
        script: What was started, or "": what an argument without a name means is its affair.
        assumed: What was taken for granted of it, as sentences: somebody may know better.
    """

    values: Mapping[Place, Any]
    known: frozenset[CauseKind]
    repeats: Mapping[str, Place] = field(default_factory=dict)
    sections: frozenset[str] = frozenset()
    origins: Mapping[Place, str] = field(default_factory=dict)
    imported: frozenset[str] | None = None
    script: str = ""
    assumed: tuple[str, ...] = ()

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
    environment = take_environment(stored)
    for path, value in list_environment(stored).items():
        section, place = _place_environment(path)
        sections.add(section)
        if place is not None and place not in values:
            values[place], origins[place] = value, section
    sections |= {
        name for name in ("packages", "variables", "gpus", "launch") if name in environment
    }
    script, repeats = _take_arguments(stored, values, sections)
    _take_code(stored, environment, values, sections)
    if stored.run.resume_count:
        values["launch", "resumed"] = stored.run.resume_count
    sections.add("run")
    for place in list(values)[len(origins) :]:
        origins[place] = _name_section(place)
    imported = environment.get("imported")
    if isinstance(imported, Sequence) and not isinstance(imported, str):
        sections.add("imported")
        imported = frozenset(str(name).lower().replace("_", "-") for name in imported)
    else:
        imported = None
    known = _find_known(values, sections)
    return RunTraits(values, known, repeats, frozenset(sections), origins, imported, script)


def _name_section(place: Place) -> str:
    kind, name = place
    if kind == "seed":
        return "argv"
    if kind == "launch":
        return "argv" if name.startswith("argv ") else "run"
    return "sources" if kind == "code" else "config"


def _find_known(values: Mapping[Place, Any], sections: set[str]) -> frozenset[CauseKind]:
    """Of which kinds all was written down that is ever written down."""
    known: set[CauseKind] = {kind for kind, needed in _NEEDS.items() if needed <= sections}
    if list_seeds(values):
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
    if path in (OBJECTIVE_KEY, MODE_KEY) or _IDENTITY.search(path):
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
    if head == "variables" and is_seed(rest):
        return section, ("seed", rest)
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
        dirty = " and uncommitted changes" if (git or {}).get("dirty") else ""
        values["code", _COMMIT_PLACE] = f"{commit}{dirty}"


def _take_arguments(
    stored: StoredRun, values: dict[Place, Any], sections: set[str]
) -> tuple[str, dict[str, Place]]:
    """The script, and options that only say what a key of the configuration says already.

    The others are added to the values.
    """
    arguments = list_command(stored)
    if arguments is None:
        return "", {}
    sections.add("argv")
    # A seed that the environment gives is no key that an argument may set.
    keys = {
        place[1]: place
        for place in values
        if place[0] == "config" or (place[0] == "seed" and place[1] != _HASH_SEED)
    }
    settings = {path: values[place] for path, place in keys.items()}
    repeats, others = fold_arguments(arguments[1:], settings)
    for each in others:
        if is_seed(each.name):
            values["seed", each.name] = read_seed(each.text)
        elif not _IDENTITY.search(each.name):
            values["launch", f"argv {each.name}"] = each.text
    script = arguments[0].replace("\\", "/").rpartition("/")[2] if arguments else ""
    return script, {f"argv {name}": keys[path] for name, path in repeats.items()}


def list_seeds(values: Mapping[Place, Any]) -> dict[str, Any]:
    """The seeds of a run's traits. That of Python's hashes alone is none: images often fix it."""
    found = {name: value for (kind, name), value in values.items() if kind == "seed"}
    return {} if found.keys() == {_HASH_SEED} else found


def encode_seeds(traits: RunTraits) -> bytes | None:
    """A text that is equal for runs of equal seeds, or None where none is known."""
    return encode_value(sorted(found.items())) if (found := list_seeds(traits.values)) else None


def read_seed(text: str | None) -> Any:
    """The number that an argument gives, as a configuration would have it."""
    return int(text) if text is not None and text.isdecimal() else text


_MOST_FINGERPRINTS = 5_000


@dataclass(frozen=True)
class ExplainedRun:
    """One run of a side.

    Attributes:
        stored: The run as its store knows it.
        data: Its curves.
        reader: Where its records are read.
        context: Its context.
    """

    stored: StoredRun
    data: RunData
    reader: SupportsRead
    context: RunContext

    @property
    def run_id(self) -> str:
        """The run."""
        return self.data.run_id

    @cached_property
    def traits(self) -> RunTraits:
        """What it was made of."""
        return describe_traits(self.stored)

    @cached_property
    def fingerprints(self) -> tuple[FingerprintRecord, ...]:
        """What it noted of code, data, outputs and environment, the newest of it."""
        query = Query(limit=_MOST_FINGERPRINTS)
        found = read_rows(self.reader, self.run_id, FingerprintRecord.KIND, query).to_records()
        return tuple(record for record in found if isinstance(record, FingerprintRecord))

    @cached_property
    def read_keys(self) -> Mapping[str, bool] | None:
        """Key of the configuration -> whether it was read; None where nobody knows.

        Of a launch of several processes, and of a run that was resumed, one process's reads
        are not all of them.
        """
        said = [
            record
            for record in self.fingerprints
            if (record.subject, record.key) == ("environment", CONFIG_READS)
        ]
        world_size = self.traits.values.get(("launch", "launch.world_size"), 1)
        if len(said) != 1 or self.stored.run.attempt or world_size != 1:
            return None
        metadata: Mapping[str, Any] = said[0].metadata or {}
        read, known = metadata.get("read"), metadata.get("known")
        if not isinstance(read, Sequence) or not isinstance(known, Sequence):
            return None
        return {str(key): key in read for key in known}


def load_runs(
    targets: Sequence[Target], root: Path | None, opened: ExitStack
) -> list[ExplainedRun]:
    """The runs of a side, each once however often it is named; `opened` closes their stores.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    found: dict[str, ExplainedRun] = {}
    for target in targets:
        run = _load(target, root, opened)
        found.setdefault(run.run_id, run)
    return list(found.values())


def _load(item: Target, root: Path | None, opened: ExitStack) -> ExplainedRun:
    target = open_target(item, root, opened)
    data, reader = target.load(), target.run.reader
    if reader is None or data.stored is None:
        raise SessionStoreError(f"run {data.run_id}: its records cannot be read back")
    return ExplainedRun(data.stored, data, reader, target.context)


def describe_runs(runs: Sequence[ExplainedRun]) -> RunReference:
    """One side as the result shows it."""
    return describe_side(tuple(refer_to_run(run.stored, run.data, "none") for run in runs))
