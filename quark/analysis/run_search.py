"""Runs found in a store: the best one by a metric, and those that are similar to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quark_core.backends.contract import SupportsPrimary
from quark_core.backends.run_pages import RunConfiguration, SupportsConfigurations
from quark_core.backends.run_summary import RunSummary, StoredRun
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.config.objective import (
    MODE_KEY,
    OBJECTIVE_KEY,
    ObjectiveMode,
    check_objective,
    infer_mode,
    read_objective,
)
from quark_core.errors import QuarkError, RunNotFoundError, SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.json_object import flatten_json
from quark_core.records.names import encode_name
from quark_core.records.query import check_index
from quark_core.records.runs import RunContext, is_seed
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_ids import find_run
from quark_core.runs.run_search import build_search, find_runs, search_runs, summarize_run
from quark_core.search.resolution import write_name


def best_run(
    metric: str,
    *,
    mode: ObjectiveMode | None = None,
    project: str | None = None,
    where: str | None = None,
    storage_dir: str | Path | None = None,
) -> RunSummary | None:
    """Return the run with the best value of a metric, or None.

    Non-finite values and archived runs are ignored. If runs are equally good, the newest is
    returned. Interrupted runs are included; `where="state == 'completed'"` excludes them.

    Args:
        metric: Name of the metric, such as "val/acc".
        mode: "min" or "max". Defaults to the mode of the newest run that has this metric as its
            objective, then to the direction implied by the name.
        project: Name of the project. Defaults to all projects.
        where: Filter expression, such as "'paper/fig3' in groups".
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Raises:
        SchemaValidationError: An argument is invalid, no run has the metric, or its name does not
            imply a direction.
        SessionStoreError: The store does not exist, or cannot be read.
    """
    declared = _find_declared(metric, project, where, storage_dir)
    try:
        wished = choose_mode(metric, mode, declared)
    except SchemaValidationError:
        if isinstance(metric, str) and metric:
            # A metric that no run has is named before its direction is asked for.
            name = write_name("metric", encode_name(metric))
            _order_runs(name, storage_dir=storage_dir, project=project)
        raise
    name = write_name("metric", encode_name(metric))
    order = f"min({name})" if wished == "min" else f"-max({name})"
    found = _order_runs(order, storage_dir=storage_dir, project=project, where=where)
    if not found:
        return None
    figures = found[0].metrics.get(metric)
    best = None if figures is None else figures.low if wished == "min" else figures.high
    return None if best is None else found[0]


def _order_runs(order: str, **arguments: Any) -> Sequence[RunSummary]:
    """The first run in this order; an error names the metric, not the order that is made of it."""
    try:
        return search_runs(order_by=order, limit=1, **arguments)
    except SchemaValidationError as error:
        kind, _, said = str(error).partition("\n")[0].partition(": ")
        if not kind.startswith("order_by"):
            raise
        raise SchemaValidationError(f"metric: {said}") from None


def _find_declared(
    metric: object, project: str | None, where: str | None, storage_dir: str | Path | None
) -> Sequence[RunSummary]:
    """The newest run of those meant that was started with this objective and a mode."""
    if not isinstance(metric, str):
        return ()
    modes = " or ".join(f"config.{MODE_KEY} == {mode!r}" for mode in get_args(ObjectiveMode))
    condition = f"config.{OBJECTIVE_KEY} == {json.dumps(metric)} and ({modes})"
    try:
        return search_runs(
            storage_dir=storage_dir,
            project=project,
            where=condition if where is None else f"({where}) and {condition}",
            limit=1,
        )
    except SchemaValidationError:
        return ()  # no run names an objective, or the search for the best says what is wrong


def choose_mode(
    metric: str, mode: ObjectiveMode | None, runs: Iterable[RunSummary] = ()
) -> ObjectiveMode:
    """Which way a metric is better: as given, else as runs were started with, else by its name.

    Args:
        metric: The metric.
        mode: As given.
        runs: Runs that have it, the newest first.

    Raises:
        SchemaValidationError: Neither says.
    """
    objective = check_objective(metric, mode)
    if objective is None:
        raise SchemaValidationError("metric is required")
    declared = (read_objective(run.config) for run in runs)
    found = (
        mode
        or next((one.mode for one in declared if one and one.metric == metric and one.mode), None)
        or infer_mode(objective.metric)
    )
    if found is None:
        raise SchemaValidationError(
            "mode is required: pass 'min' or 'max'. It cannot be inferred from the metric name "
            f"{objective.metric[:60]!r}"
        )
    return found


# Runs that are like another one: by their configuration, its structure, code or traces.
#
# Who has the same digest is found by the store's index; how far the others are is worked out
# of what is kept of them, for the newest ones, and only where equal ones are too few.

SimilarBy = Literal["structure", "config", "code", "trace"]
_Parts = frozenset[Hashable]
_PLAIN = frozenset({bool, float, str})

_LIMIT = 10
_MOST = 1_000
# How many of the newest runs are looked at one by one, and codes of which sources are read.
_MOST_COMPARED = 2_000
_MOST_CODES = 100
_DIGESTS: Mapping[str, str] = {"structure": "structure", "config": "config", "code": "code"}


@dataclass(frozen=True, slots=True)
class SimilarRun:
    """Run found by `find_similar_runs`, with its distance.

    Attributes:
        run: The run.
        distance: From 0 (equal) to 1 (nothing in common).
        by: Compared property.
    """

    run: RunSummary
    distance: float
    by: SimilarBy

    def __repr__(self) -> str:
        name = f" {self.run.stored.run.name!r}" if self.run.stored.run.name else ""
        alike = "the same" if self.distance == 0 else f"{1 - self.distance:.0%} the same"
        return f"SimilarRun({self.run.run_id}{name}, {alike} by {self.by})"

    def to_dict(self) -> dict[str, Any]:
        """Return the run and its distance as a new dict of JSON values."""
        return {"by": self.by, "distance": self.distance, "run": self.run.to_dict()}


def find_similar_runs(
    run: object,
    *,
    by: SimilarBy = "structure",
    limit: int | None = _LIMIT,
    everywhere: bool = False,
    storage_dir: str | Path | None = None,
) -> tuple[SimilarRun, ...]:
    """Find the runs that are most similar to a run, nearest first.

    Runs at the same distance are sorted by start, newest first. Runs without anything in common are
    omitted.

    Args:
        run: A run ID or unique prefix, a session, a context or a RunSummary.
        by: Property to compare. "structure": keys and types of the config. "config": config values
            except seeds. "code": source files of the project. "trace": functions under
            `quark.trace`.
        limit: Maximum number of runs, up to 1,000.
        everywhere: Whether to include runs of other projects. Defaults to False.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        RunNotFoundError: The run does not exist.
        SessionStoreError: The store does not exist, or cannot be read.
    """
    check_choice(by, "by", get_args(SimilarBy))
    most = check_index(limit, "limit")
    most = _MOST if most is None else min(most, _MOST)
    run_id, root = _find_target(run, storage_dir)
    reader = open_reader(root)
    try:
        own = find_run(reader, run_id)
        project = None if everywhere else own.project.name
        found = _find_equal(reader, own, by, project, most)
        if len(found) < most:
            found += _find_near(reader, own, by, project, most - len(found), found)
        return tuple(found)
    finally:
        reader.close()


def _find_target(run: object, storage_dir: str | Path | None) -> tuple[str, Path]:
    """The run that is meant, and where it lies."""
    root = None if storage_dir is None else resolve_storage_dir(storage_dir)
    if isinstance(run, RunSummary):
        return run.run_id, root or resolve_storage_dir(None)
    context = run if isinstance(run, RunContext) else getattr(run, "context", None)
    if isinstance(context, RunContext) and context.run_id is not None:
        return context.run_id, root or context.storage_dir
    if not isinstance(run, str):
        raise SchemaValidationError(
            "run must be a run ID, or a session, context or summary of a run, not "
            f"{type(run).__name__}"
        )
    return check_run_id(run, "run"), root or resolve_storage_dir(None)


def _find_equal(
    reader: SupportsPrimary, own: StoredRun, by: SimilarBy, project: str | None, most: int
) -> list[SimilarRun]:
    """Runs of the same digest, by the store's own search."""
    if by == "trace":
        return []
    digest = getattr(own.digests, _DIGESTS[by])
    if digest is None or most == 0:
        return []
    search = build_search(
        project=project, where=f"{_DIGESTS[by]}_digest == '{digest}'", limit=most + 1
    )
    try:
        found = [each for each in find_runs(reader, search) if each.run_id != own.run.id]
    except SchemaValidationError:
        return []  # a service of an older version, which cannot search for digests
    return [SimilarRun(each, 0.0, by) for each in found[:most]]


def _find_near(
    reader: SupportsPrimary,
    own: StoredRun,
    by: SimilarBy,
    project: str | None,
    most: int,
    found: Sequence[SimilarRun],
) -> list[SimilarRun]:
    """Runs of other digests, by what they share with the run."""
    known = {own.run.id, *(each.run.run_id for each in found)}
    # Without their metrics, which are half of the work: only what is near is summed up.
    parts, others = _describe_all(reader, own, by, project)
    if not parts:
        return []
    measured = [
        (_measure(parts, described), place)
        for place, (run_id, described) in enumerate(others)
        if run_id not in known
    ]
    near = sorted(each for each in measured if each[0] < 1.0)
    ids = [others[place][0] for _, place in near[:most]]
    nearest = []
    for (distance, _), run_id in zip(near, ids, strict=False):
        with suppress(RunNotFoundError):  # removed meanwhile
            nearest.append(SimilarRun(summarize_run(reader, run_id), distance, by))
    return nearest


def _measure(one: _Parts, other: _Parts) -> float:
    """Distance of two sets of parts: 0 where they are equal, 1 where they share nothing."""
    shared = len(one & other)
    return 1.0 - shared / max(1, len(one) + len(other) - shared)


def _describe_all(
    reader: SupportsPrimary, own: StoredRun, by: SimilarBy, project: str | None
) -> tuple[_Parts, Sequence[tuple[str, _Parts]]]:
    """Parts of the run, and id and parts of each of the newest that are not archived."""
    if by in ("structure", "config"):
        settings = _Settings(_name_type if by == "structure" else _spell)
        parts = settings.describe({} if own.config is None else own.config.values)
        return parts, [
            (each.run_id, settings.describe(each.values))
            for each in (_list_configurations(reader, project) if parts else ())
            if not each.is_archived
        ]
    describe = _Sources(reader).describe if by == "code" else _Traces(reader).describe
    parts = describe(own)
    return parts, [
        (str(each.run.id), describe(each))
        for each in (reader.list_runs(project=project, limit=_MOST_COMPARED) if parts else ())
        if each.run.archived_at is None
    ]


def _list_configurations(
    reader: SupportsPrimary, project: str | None
) -> Iterable[RunConfiguration]:
    """Of the newest runs, by the store's own list where it has one."""
    store: object = reader
    if isinstance(store, SupportsConfigurations):
        return store.list_configurations(project=project, limit=_MOST_COMPARED)
    return (
        RunConfiguration(
            str(each.run.id),
            each.run.archived_at is not None,
            {} if each.config is None else each.config.values,
        )
        for each in reader.list_runs(project=project, limit=_MOST_COMPARED)
    )


class _Settings:
    """The settings of configurations, seeds aside; a key of many is looked at once."""

    def __init__(self, spell: Callable[[Any], Hashable]) -> None:
        self._spell = spell
        self._seeds: dict[str, bool] = {}

    def describe(self, values: Mapping[str, Any]) -> _Parts:
        spell, seeds = self._spell, self._seeds
        parts = []
        for path, value in flatten_json(values):
            is_one = seeds.get(path)
            if is_one is None:
                is_one = seeds[path] = is_seed(path)
            if not is_one:
                parts.append((path, spell(value)))
        return frozenset(parts)


def _name_type(value: Any) -> str:
    kind = type(_to_number(value))
    return "number" if kind is float else kind.__name__


def _spell(value: Any) -> Hashable:
    kind = type(value)
    if kind is int:
        value = _to_number(value)
        kind = type(value)
    return (kind, value) if kind in _PLAIN else repr(value)


def _to_number(value: Any) -> Any:
    """One kind of number, as searches have it: of integers no float can hold, a text."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return str(value)


class _Traces:
    """Name and digest of each traced function of runs."""

    def __init__(self, reader: SupportsPrimary) -> None:
        self._reader = reader

    def describe(self, run: StoredRun) -> _Parts:
        from quark.provenance.traces import read_traces

        try:
            traces = read_traces(self._reader, str(run.run.id))
        except QuarkError:
            return frozenset()
        return frozenset((name, f"{trace.level} {trace.digest}") for name, trace in traces.items())


class _Sources:
    """The source files of runs, of each code once."""

    def __init__(self, reader: SupportsPrimary) -> None:
        self._reader = reader
        self._known: dict[str, _Parts] = {}

    def describe(self, run: StoredRun) -> _Parts:
        digest = run.digests.code
        if digest is None or (digest not in self._known and len(self._known) >= _MOST_CODES):
            return frozenset()
        if digest not in self._known:
            self._known[digest] = self._read(str(run.run.id))
        return self._known[digest]

    def _read(self, run_id: str) -> _Parts:
        from quark.provenance.sources import read_sources

        try:
            files = read_sources(self._reader, run_id).files
        except QuarkError:
            return frozenset()
        return frozenset((each.path, each.sha256) for each in files)
