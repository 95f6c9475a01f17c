"""What was set differently: configuration, code, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import msgspec

from quark_core.analysis.comparison.results import ChangeDiff
from quark_core.backends.contract import StoredRun
from quark_core.provenance.numeric_facts import NUMERIC_PACKAGES
from quark_core.records.json_object import flatten_json
from quark_core.records.run_digests import is_idle_package, is_seed, list_imported

__all__ = [
    "compare_settings",
    "find_seed",
    "list_configuration",
    "list_environment",
    "list_settings",
]

# Different in every run, whatever is run.
_PASSING = frozenset(
    """
    process.pid process.argv launch.rank launch.local_rank launch.source
    variables.MASTER_PORT variables.SLURM_JOB_ID variables.SLURM_PROCID variables.RANK
    variables.LOCAL_RANK variables.SLURM_RESTART_COUNT
    """.split()
)
_MISSING = object()
_INSTALLED = "installed"
# What is told elsewhere, or in one line.
_FOLDED = frozenset({"git", "imported", _INSTALLED})
_SHOWN_DIGITS = 12
_SECTIONS = ("config", "code", "environment")


def compare_settings(
    primary: Sequence[StoredRun], reference: Sequence[StoredRun]
) -> tuple[ChangeDiff, ...]:
    """Configuration first, then code, then environment, each by path.

    In the environment switches come first, then numeric libraries that were imported, and last
    what was installed and not imported, which is one change at most.

    Seeds are left out where each side has several runs: they are what the
    runs of a side differ in.
    """
    seeds = len(primary) > 1 or len(reference) > 1
    out: list[ChangeDiff] = []
    sides = [[list_settings(run) for run in side] for side in (primary, reference)]
    for section in _SECTIONS:
        values = [[run[section] for run in side] for side in sides]
        found_paths = {path for side in values for run in side for path in run}
        paths = sorted(found_paths, key=partial(_rank, section))
        for path in paths:
            if section == "config" and seeds and is_seed(path):
                continue
            found = _compare(section, path, values)
            if found is not None:
                out.append(found)
    return tuple(out)


def list_settings(run: StoredRun) -> dict[str, dict[str, Any]]:
    """What a run was set to, by section (config, code, environment) and path.

    Without what differs between any two runs, such as process ids, and in the environment
    without what the section of the code says.
    """
    return {
        "config": list_configuration(run),
        "code": dict(_flatten(_code(run))),
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
        if path.partition(".")[0] not in _FOLDED and not is_idle_package(path, imported)
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
    """The seeds of a run's configuration as one text, or None where it has none."""
    seeds = {path: value for path, value in _flatten(_config(run)) if is_seed(path)}
    if not seeds or any(value is None for value in seeds.values()):
        return None
    if len(seeds) == 1:
        return str(next(iter(seeds.values())))
    return ", ".join(f"{path}={seeds[path]}" for path in sorted(seeds))


def _config(run: StoredRun) -> Mapping[str, Any]:
    return {} if run.config is None else run.config.values


def _code(run: StoredRun) -> Mapping[str, Any]:
    environment = {} if run.environment is None else run.environment.values
    git = environment.get("git") or {}
    out = {"git": {"commit": run.run.git_commit, **git}} if git or run.run.git_commit else {}
    arguments = (environment.get("process") or {}).get("argv")
    return out if arguments is None else {**out, "argv": arguments}


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
