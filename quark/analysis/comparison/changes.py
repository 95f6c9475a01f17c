"""What was set differently: configuration, code, environment."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import msgspec

from quark.analysis.comparison.code import CodeComparison, list_code_changes
from quark.analysis.comparison.results import ChangeDiff
from quark.analysis.run_arguments import (
    find_setting,
    index_names,
    parse_arguments,
    says_value,
)
from quark.provenance.numeric_facts import NUMERIC_PACKAGES
from quark_core.backends.contract import StoredRun
from quark_core.records.json_object import flatten_json
from quark_core.records.runs import is_idle_package, is_seed, list_imported
from quark_core.runs.environment import SECTIONS

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
_SHOWN_DIGITS = 12
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
    return dict(_flatten(_config(run)))


def list_environment(run: StoredRun) -> dict[str, Any]:
    """The section of the environment of `list_settings`."""
    known = _environment(run)
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


def _config(run: StoredRun) -> Mapping[str, Any]:
    return {} if run.config is None else run.config.values


def _git(run: StoredRun) -> Mapping[str, Any]:
    git = _environment(run).get("git") or {}
    return {"git": {"commit": run.run.git_commit, **git}} if git or run.run.git_commit else {}


def _list_arguments(run: StoredRun) -> dict[str, Any]:
    """Arguments that no key of the configuration says already, by name."""
    arguments = (_environment(run).get("process") or {}).get("argv")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        return {}
    given = list(parse_arguments([str(each) for each in arguments[1:]]))
    settings = list_configuration(run) if given else {}
    by_name = index_names(settings)
    return {
        f"{_ARGUMENT}{each.name}": each.text
        for each in given
        if find_setting(each, by_name, settings) is None
    }


def _environment(run: StoredRun) -> Mapping[str, Any]:
    return {} if run.environment is None else run.environment.values


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return filterfalse(_is_passing, flatten_json(values))


def _is_passing(leaf: tuple[str, Any]) -> bool:
    return leaf[0] in _PASSING


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
