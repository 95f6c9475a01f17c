"""The best run of a store by one metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from quark_core.backends.run_summary import RunSummary
from quark_core.config.objective import (
    MODE_KEY,
    OBJECTIVE_KEY,
    ObjectiveMode,
    check_objective,
    infer_mode,
    read_objective,
)
from quark_core.errors import SchemaValidationError
from quark_core.records.names import encode_name
from quark_core.runs.run_search import search_runs
from quark_core.search.resolution import write_name


def best_run(
    metric: str,
    *,
    mode: ObjectiveMode | None = None,
    project: str | None = None,
    where: str | None = None,
    storage_dir: str | Path | None = None,
) -> RunSummary | None:
    """The run whose best value of a metric is the best of all; None where no run has one.

    Values that are not finite count for nothing; archived runs are left out. Of runs that are
    equally good it is the newest. A run that broke off counts too, since it has reached the value:
    `where="state == 'completed'"` leaves it out.

    Args:
        metric: Its name, such as `val/acc`.
        mode: Whether it is better when lower ("min") or higher ("max"); by default as the
            newest of these runs was started with that has it as its objective, else by its name.
        project: Only runs of this project.
        where: What else must be true of a run, such as `'paper/fig3' in groups`.
        storage_dir: Storage root; the working directory by default.

    Raises:
        SchemaValidationError: A bad argument, a metric that no run has, or one whose name does
            not say which way it is better.
        SessionStoreError: There is no store, or it cannot be read.
    """
    declared = _find_declared(metric, project, where, storage_dir)
    try:
        wished = choose_mode(metric, mode, declared)
    except SchemaValidationError:
        if isinstance(metric, str) and metric:
            # A metric that no run has is named before its direction is asked for.
            name = write_name("metric", encode_name(metric))
            search_runs(storage_dir=storage_dir, project=project, order_by=name, limit=1)
        raise
    name = write_name("metric", encode_name(metric))
    order = f"min({name})" if wished == "min" else f"-max({name})"
    found = search_runs(
        storage_dir=storage_dir, project=project, where=where, order_by=order, limit=1
    )
    if not found:
        return None
    figures = found[0].metrics.get(metric)
    best = None if figures is None else figures.low if wished == "min" else figures.high
    return None if best is None else found[0]


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
        raise SchemaValidationError("metric must be given")
    declared = (read_objective(run.config) for run in runs)
    found = (
        mode
        or next((one.mode for one in declared if one and one.metric == metric and one.mode), None)
        or infer_mode(objective.metric)
    )
    if found is None:
        raise SchemaValidationError(
            f"mode must be 'min' or 'max': the name {objective.metric[:60]!r} does not say which "
            "way it is better"
        )
    return found
