"""Differences in settings: config, command-line arguments, code and environment."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import msgspec

from quark.analysis.comparison.results import ChangeDiff
from quark.provenance.code_changes import CodeChange, compare_sources
from quark.provenance.code_fingerprints import FingerprintCache
from quark.provenance.environment import NUMERIC_PACKAGES
from quark.provenance.sources import SourceSnapshot, read_sources
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import ArtifactDamagedError, ArtifactNotFoundError
from quark_core.records.json_object import flatten_json
from quark_core.records.runs import is_idle_package, is_seed, list_imported
from quark_core.runs.environment import SECTIONS

_OPTION = re.compile(r"^--?[A-Za-z][\w.-]*$")
_ASSIGNMENT = re.compile(r"^(\+{0,2}[A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)
_SHORT_CARRIER = re.compile(r"^[A-Za-z]([A-Za-z_].*)$")
# Options that set nothing themselves, but say that settings follow.
_CARRIERS = frozenset(
    "set o opt opts option options override overrides cfg_options config_override "
    "config_overrides param params hparam hparams d define".split()
)
_WHOLE = re.compile(r"\d+")
_WORDS = {
    "True": ("true", "1", "yes"),
    "False": ("false", "0", "no"),
    "None": ("none", "null"),
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One setting that a command line gives.

    Attributes:
        name: Its name without dashes, or `#1` for the first argument without a name.
        text: Its value, or None of an option that stands alone.
        index: Which argument has the value, or the option that stands alone.
        prefix: What stands before the value in that argument, such as `--lr=`.
    """

    name: str
    text: str | None
    index: int
    prefix: str = ""


def parse_arguments(arguments: Sequence[str]) -> Iterator[Argument]:
    """The settings of a command line, the script left out.

    `--lr 0.1`, `--lr=0.1`, `lr=0.1`, `+lr=0.1`, `--set lr=0.1`, `-o lr=0.1` and `SEED 3` have
    names, as `--fast` has; others are told by their place among those without a name.
    """
    index, plain = 0, 0
    while index < len(arguments):
        here, text = index, arguments[index]
        index += 1
        assigned = _split(text)
        follows = arguments[index] if index < len(arguments) else None
        if assigned is not None:
            yield Argument(*assigned[:2], here, assigned[2])
        elif _OPTION.match(text):
            name = text.lstrip("-")
            if follows is None or _is_option(follows):
                yield Argument(name, None, here)
            elif _ASSIGNMENT.match(follows) or _is_pair(arguments, index):
                if not _is_carrier(name):
                    yield Argument(name, None, here)
            else:
                yield Argument(name, follows, index)
                index += 1
        elif _is_pair(arguments, here):
            yield Argument(text, follows, index)
            index += 1
        else:
            plain += 1
            yield Argument(f"#{plain}", text, here)


def _split(text: str) -> tuple[str, str, str] | None:
    """Name and value of `name=value`, and what stands before the value."""
    bare = text.lstrip("-")
    found = _ASSIGNMENT.match(bare)
    if found is None or (bare is not text and text[: len(text) - len(bare)] not in ("-", "--")):
        return None
    name, value = found[1].lstrip("+"), found[2]
    inner = _ASSIGNMENT.match(value) if _is_carrier(name) else None
    if inner is not None:
        name, value = inner[1].lstrip("+"), inner[2]
    elif text[0] == "-" and text[1] != "-" and (short := _SHORT_CARRIER.match(name)):
        # `-Dseed=3`: the letter is the option, and the rest what it sets.
        name = short[1] if is_seed(short[1]) and not is_seed(name) else name
    return name, value, text[: len(text) - len(value)]


def _is_option(text: str) -> bool:
    """Whether an argument is an option, with a value or without, and no value itself."""
    is_given = text.startswith("-") and _split(text) is not None
    return is_given or _OPTION.match(text) is not None


def _is_carrier(name: str) -> bool:
    return spell_argument(name) in _CARRIERS or len(name) == 1


def _is_pair(arguments: Sequence[str], index: int) -> bool:
    """Whether a seed's name and its number stand there as two words, without dashes."""
    return (
        index + 1 < len(arguments)
        and is_seed(arguments[index])
        and not arguments[index].startswith("-")
        and _WHOLE.fullmatch(arguments[index + 1]) is not None
    )


def spell_argument(name: str) -> str:
    """A name in one spelling, however dashes and capitals are written."""
    return name.lstrip("+-~").replace("-", "_").lower()


def take_environment(run: StoredRun) -> Mapping[str, Any]:
    """The environment of a run; empty where none was recorded."""
    return {} if run.environment is None else run.environment.values


def list_command(run: StoredRun) -> list[str] | None:
    """The command line that started a run, the script first; None where it was not recorded."""
    arguments = (take_environment(run).get("process") or {}).get("argv")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        return None
    return [str(each) for each in arguments]


def fold_arguments(
    arguments: Sequence[str], settings: Mapping[str, Any]
) -> tuple[dict[str, str], list[Argument]]:
    """Names of arguments that only say a setting again, with its key, and the other arguments.

    Args:
        arguments: Of a command line, the script left out.
        settings: Key -> value, of a configuration.
    """
    repeats, others = {}, []
    by_name = _index_names(settings) if arguments else {}
    for each in parse_arguments(arguments):
        path = _find_setting(each, by_name, settings)
        if path is None:
            others.append(each)
        else:
            repeats[each.name] = path
    return repeats, others


def _index_names(paths: Iterable[str]) -> dict[str, list[str]]:
    """Names as an argument may spell them -> the keys of a configuration that they may be."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for name in _list_spellings(path):
            found.setdefault(name, []).append(path)
    return found


# Runs of a project have the same keys: each is worked out once.
@lru_cache(maxsize=4_096)
def _list_spellings(path: str) -> frozenset[str]:
    spelled = spell_argument(path)
    return frozenset((spelled, spelled.rpartition(".")[2], spelled.replace(".", "_")))


def _find_setting(
    argument: Argument, by_name: Mapping[str, Sequence[str]], settings: Mapping[str, Any]
) -> str | None:
    """The key of a configuration that an argument of its name only says again, or None.

    Args:
        argument: The argument.
        by_name: Of the settings, as `_index_names` has it.
        settings: Key -> value.
    """
    spelled, text = spell_argument(argument.name), argument.text
    for candidate in (spelled, spelled.removeprefix("no_")):
        for path in by_name.get(candidate, ()):
            if text is None and isinstance(settings[path], bool):
                return path
            if text is not None and says_value(text, settings[path]):
                return path
    return None


def says_value(text: str, value: Any) -> bool:
    """Whether the text of an argument is this value."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool) or value is None:
        return text.lower() in _WORDS[str(value)]
    if isinstance(value, (int, float)):
        try:
            return float(text) == float(value)
        except (ValueError, OverflowError):
            return False
    try:
        return bool(msgspec.json.decode(text) == value)
    except msgspec.DecodeError:
        return False


SOURCES = "sources"
"""Path of all sources together, where no more than their digest is known."""

_SHOWN_DIGITS = 12
_MOST_NAMED = 4


class CodeHolder(Protocol):
    """A run whose code is compared."""

    @property
    def stored(self) -> StoredRun:
        """The run as its store knows it."""

    @property
    def reader(self) -> SupportsRead | None:
        """Where its sources are read, or None."""


@dataclass(frozen=True, slots=True)
class CodeComparison:
    """What holding the code of two sides against each other has found.

    Attributes:
        manner: `same`: all that was kept is the same to the byte. `changed`: it differs, and
            `changes` says in what. `digests`: it differs, and no more is known. `varies`: the
            runs of a side are not of one code. `unknown`: it was not compared.
        reason: Why no more is known, or "".
        digests: Those of the runs of either side, sorted.
        changes: By function, of comments and layout too.
        sources: The sources of a run of either side, or None; texts are read where they differ.
        unseen: What code there was that nobody has kept.
    """

    manner: Literal["same", "changed", "digests", "varies", "unknown"]
    reason: str = ""
    digests: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    changes: tuple[CodeChange, ...] = ()
    sources: tuple[SourceSnapshot, SourceSnapshot] | None = None
    unseen: tuple[tuple[str, str], ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the code is known to do the same on both sides."""
        is_same = self.manner == "same" or (
            self.manner == "changed" and all(each.kind == "cosmetic" for each in self.changes)
        )
        return is_same and not self.unseen

    def list_notes(self) -> list[str]:
        """What is to be said of it beside what differs."""
        out = []
        if self.manner == "unknown":
            out.append(f"The code was not compared: {self.reason}.")
        elif self.manner == "digests":
            out.append(f"The code differs, details unknown: {self.reason}.")
        quiet = [each.describe() for each in self.changes if not each.is_logic]
        if quiet:
            more = f" and {len(quiet) - _MOST_NAMED} more" if len(quiet) > _MOST_NAMED else ""
            out.append(f"Other code changes: {', '.join(quiet[:_MOST_NAMED])}{more}.")
        out += [f"Code that was not compared: {place}, {words}." for place, words in self.unseen]
        return out


def compare_code(
    before: Sequence[CodeHolder],
    after: Sequence[CodeHolder],
    cache: FingerprintCache | None = None,
) -> CodeComparison:
    """Hold the code of two sides against each other; parses what differs, nothing else.

    Args:
        before, after: The runs of either side.
        cache: Where fingerprints of modules are kept.
    """
    found = [{run.stored.digests.code for run in side} for side in (before, after)]
    if None in found[0] | found[1]:
        return _compare_commits(before, after)
    digests = [tuple(sorted(filter(None, side))) for side in found]
    both = digests[0], digests[1]
    if any(len(side) > 1 for side in both):
        return CodeComparison("varies", "the runs of a side do not all have the same code", both)
    is_same = both[0] == both[1]
    try:
        one, two = (_read(side[0], texts=not is_same) for side in (before, after))
    except (ArtifactNotFoundError, ArtifactDamagedError) as error:
        return CodeComparison("same" if is_same else "digests", str(error), both)
    changes = () if is_same else compare_sources(one.files, two.files, cache)
    return CodeComparison(
        "same" if is_same else "changed", "", both, changes, (one, two), _list_unseen(one, two)
    )


def _read(run: CodeHolder, *, texts: bool) -> SourceSnapshot:
    run_id = str(run.stored.run.id)
    if run.reader is None:
        raise ArtifactNotFoundError(f"run {run_id}: its records cannot be read back")
    return read_sources(run.reader, run_id, texts=texts)


def _compare_commits(before: Sequence[CodeHolder], after: Sequence[CodeHolder]) -> CodeComparison:
    """Without sources one commit of git with nothing beside it is one code."""
    everyone = [run.stored for run in (*before, *after)]
    commits = {_find_commit(run) for run in everyone}
    if len(commits) == 1 and None not in commits:
        return CodeComparison("same", "by the git commit")
    lacking = dict.fromkeys(str(run.run.id) for run in everyone if run.digests.code is None)
    named = ", ".join(list(lacking)[:_MOST_NAMED]) + (" …" if len(lacking) > _MOST_NAMED else "")
    which = f"run {named} has" if len(lacking) == 1 else f"runs {named} have"
    return CodeComparison("unknown", f"{which} no source snapshot")


def _find_commit(run: StoredRun) -> str | None:
    """The commit of a run that had nothing beside it, or None."""
    git = take_environment(run).get("git") or {}
    return git.get("commit") if git.get("dirty") is False else None


def _list_unseen(one: SourceSnapshot, two: SourceSnapshot) -> tuple[tuple[str, str], ...]:
    """Place and words of what code there was that nobody has kept."""
    found = []
    outside = sorted({*one.outside, *two.outside})
    if outside:
        named = ", ".join(outside[:_MOST_NAMED]) + (" …" if len(outside) > _MOST_NAMED else "")
        found.append(
            ("outside", f"imported from outside of the project, so it is not stored: {named}")
        )
    # A name in angle brackets is a part of the program, such as what came from standard input.
    lacking = {**one.left_out, **two.left_out}
    found += [
        (place, f"is not in the source snapshot: {reason}")
        for place, reason in sorted(lacking.items())
        if place.startswith("<")
    ]
    altered = sorted({*one.changed, *two.changed})
    found += [(path, "was changed during a run") for path in altered]
    return tuple(found)


def list_code_changes(code: CodeComparison) -> tuple[ChangeDiff, ...]:
    """What differs in the code as changes of a comparison, whose primary came after."""
    if code.manner == "digests":
        shown = [side[0][:_SHOWN_DIGITS] for side in code.digests]
        return (ChangeDiff("code", SOURCES, "changed", shown[1], shown[0]),)
    if code.manner == "varies":
        lists = [[digest[:_SHOWN_DIGITS] for digest in side] for side in code.digests]
        return (
            ()
            if lists[0] == lists[1]
            else (ChangeDiff("code", SOURCES, "varies", lists[1], lists[0]),)
        )
    return tuple(
        _tell(change, code.sources) for change in code.changes if change.is_logic and code.sources
    )


def _tell(change: CodeChange, sources: tuple[SourceSnapshot, SourceSnapshot]) -> ChangeDiff:
    before = sources[0].find(change.before_path or change.path)
    after = sources[1].find(change.path)
    shown = [None if each is None else each.sha256[:_SHOWN_DIGITS] for each in (before, after)]
    words = change.describe().removeprefix(f"{change.place} ")
    if change.kind == "added":
        return ChangeDiff("code", change.place, "added", f"{words}, file {shown[1]}", None)
    if change.kind == "removed":
        return ChangeDiff("code", change.place, "removed", None, f"file {shown[0]}")
    return ChangeDiff(
        "code", change.place, "changed", f"{words}, file {shown[1]}", f"file {shown[0]}"
    )


# Different in every run, whatever is run.
_PASSING = frozenset(
    """
    process.pid process.argv launch.rank launch.local_rank launch.source
    variables.MASTER_PORT variables.SLURM_JOB_ID variables.SLURM_PROCID variables.RANK
    variables.LOCAL_RANK variables.SLURM_RESTART_COUNT
    """.split()
)
_MISSING = object()
_ARGUMENT = "argv "
_INSTALLED = "installed"
# The others are told elsewhere, or in one line.
_TOLD = SECTIONS - {"git", "imported", _INSTALLED}
_SECTIONS = ("config", "code", "environment")


def compare_settings(
    primary: Sequence[StoredRun],
    reference: Sequence[StoredRun],
    code: CodeComparison | None = None,
) -> tuple[ChangeDiff, ...]:
    """Configuration first, then code, then environment, each by path.

    Of the code the functions that differ come first, as far as `code` says. In the environment
    switches come first, then numeric libraries that were imported, and last what was installed
    and not imported, which is one change at most.

    Seeds are left out where each side has several runs: they are what the
    runs of a side differ in. The environment, and what it says of the code, are left
    out if a run has recorded none, as an imported one: nothing is known to differ.
    """
    seeds = len(primary) > 1 or len(reference) > 1
    out: list[ChangeDiff] = []
    sides = [[list_settings(run) for run in side] for side in (primary, reference)]
    is_known = all(run["environment"] for side in sides for run in side)
    for section in _SECTIONS:
        values = [
            [run[section] if is_known or section == "config" else {} for run in side]
            for side in sides
        ]
        found_paths = {path for side in values for run in side for path in run}
        paths = sorted(found_paths, key=partial(_rank, section))
        if section == "code" and code is not None:
            out += list_code_changes(code)
        for path in paths:
            if seeds and _is_seed(path):
                continue
            found = _compare(section, path, values)
            if found is not None:
                out.append(found)
    return tuple(change for change in out if not repeats_setting(change, out))


def list_agreeing(
    sides: Iterable[Sequence[StoredRun]], differing: Container[str], agrees: bool
) -> tuple[str, ...]:
    """The sections in which nothing differs, as far as every run of all sides has recorded them.

    Args:
        sides: The runs.
        differing: Sections in which something differs.
        agrees: Whether their code was compared and is the same.
    """
    runs = [run for side in sides for run in side]
    recorded = {
        "config": all(map(list_configuration, runs)),
        "code": agrees,
        "environment": all(map(list_environment, runs)),
    }
    return tuple(each for each in _SECTIONS if recorded[each] and each not in differing)


def repeats_setting(change: ChangeDiff, changes: Iterable[ChangeDiff]) -> bool:
    """Whether an argument that differs only says on both sides what a setting says."""
    if not change.path.startswith(_ARGUMENT) or change.kind != "changed":
        return False
    texts = change.primary, change.reference
    return all(isinstance(text, str) for text in texts) and any(
        each.section == "config"
        and each.kind == "changed"
        and says_value(texts[0], each.primary)
        and says_value(texts[1], each.reference)
        for each in changes
    )


def list_settings(run: StoredRun) -> dict[str, dict[str, Any]]:
    """What a run was set to, by section (config, code, environment) and path.

    Without what differs between any two runs, such as process ids, and in the environment
    without what the section of the code says.
    """
    return {
        "config": list_configuration(run),
        "code": {**dict(_flatten(_git(run))), **_list_arguments(run)},
        "environment": list_environment(run),
    }


def list_configuration(run: StoredRun) -> dict[str, Any]:
    """The section of the configuration of `list_settings`."""
    return {} if run.config is None else dict(_flatten(run.config.values))


def list_environment(run: StoredRun) -> dict[str, Any]:
    """The section of the environment of `list_settings`."""
    known = take_environment(run)
    imported = list_imported(known)
    environment = {
        path: value
        for path, value in _flatten(known)
        if path.partition(".")[0] in _TOLD and not is_idle_package(path, imported)
    }
    installed = known.get(_INSTALLED)
    if isinstance(installed, Mapping):
        digest = str(installed.get("digest"))[:_SHOWN_DIGITS]
        environment[_INSTALLED] = f"{installed.get('count')} packages, digest {digest}"
    return environment


def _rank(section: str, path: str) -> tuple[int, str]:
    """Where a change stands among those of its section: what decides of numbers comes first."""
    top, _, name = path.partition(".")
    if section != "environment":
        return 0, path
    if top == "switches":
        return 0, path
    if top == "packages" and name in NUMERIC_PACKAGES:
        return 1, path
    return (3 if top == _INSTALLED else 2), path


def find_seed(run: StoredRun) -> str | None:
    """The seeds of a run as one text, of its configuration and its arguments; None without any."""
    given = {**list_configuration(run), **_list_arguments(run)}
    seeds = {path.removeprefix(_ARGUMENT): given[path] for path in given if _is_seed(path)}
    if not seeds or any(value is None for value in seeds.values()):
        return None
    if len(seeds) == 1:
        return str(next(iter(seeds.values())))
    return ", ".join(f"{path}={seeds[path]}" for path in sorted(seeds))


def _is_seed(path: str) -> bool:
    return is_seed(path.removeprefix(_ARGUMENT))


def _git(run: StoredRun) -> Mapping[str, Any]:
    git = take_environment(run).get("git") or {}
    return {"git": {"commit": run.run.git_commit, **git}} if git or run.run.git_commit else {}


def _list_arguments(run: StoredRun) -> dict[str, Any]:
    """Arguments that no key of the configuration says already, by name."""
    arguments = (list_command(run) or [])[1:]
    _, others = fold_arguments(arguments, list_configuration(run) if arguments else {})
    return {f"{_ARGUMENT}{each.name}": each.text for each in others}


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return (leaf for leaf in flatten_json(values) if leaf[0] not in _PASSING)


def _compare(
    section: str, path: str, sides: Sequence[Sequence[Mapping[str, Any]]]
) -> ChangeDiff | None:
    values = [[run.get(path, _MISSING) for run in side] for side in sides]
    distinct = [{_encode(value): value for value in side} for side in values]
    if distinct[0].keys() == distinct[1].keys():
        return None
    if any(len(side) > 1 for side in distinct):
        lists = [[_shown(side[key]) for key in sorted(side)] for side in distinct]
        return ChangeDiff(section, path, "varies", *lists)
    primary, reference = values[0][0], values[1][0]
    kind = "added" if reference is _MISSING else "removed" if primary is _MISSING else "changed"
    return ChangeDiff(section, path, kind, _shown(primary), _shown(reference))


def _encode(value: Any) -> bytes:
    return b"" if value is _MISSING else msgspec.json.encode(value, order="sorted")


def _shown(value: Any) -> Any:
    return None if value is _MISSING else value
