"""The best run of a store by one metric."""

from __future__ import annotations

from pathlib import Path

from quark_core.analysis.comparison.directions import infer_direction
from quark_core.backends.run_summary import RunSummary
from quark_core.config.objective import ObjectiveMode, check_objective
from quark_core.errors import SchemaValidationError
from quark_core.records.names import encode_name
from quark_core.runs.searching import search_runs
from quark_core.search.resolution import write_name

__all__ = ["best_run", "choose_mode"]

_MODES: dict[str, ObjectiveMode] = {"lower": "min", "higher": "max"}


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
    equally good it is the newest.

    Args:
        metric: Its name, such as `val/acc`.
        mode: Whether it is better when lower ("min") or higher ("max"); by its name by default.
        project: Only runs of this project.
        where: What else must be true of a run, such as `'paper/fig3' in groups`; see
            docs/reference/search.md.
        storage_dir: Storage root; the working directory by default.

    Raises:
        SchemaValidationError: A bad argument, a metric that no run has, or one whose name does
            not say which way it is better.
        SessionStoreError: There is no store, or it cannot be read.
    """
    wished = choose_mode(metric, mode)
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


def choose_mode(metric: str, mode: ObjectiveMode | None) -> ObjectiveMode:
    """Which way a metric is better: as given, else by its name.

    Raises:
        SchemaValidationError: Neither says.
    """
    objective = check_objective(metric, mode)
    if objective is None:
        raise SchemaValidationError("metric must be given")
    found = mode or _MODES.get(infer_direction(objective.metric))
    if found is None:
        raise SchemaValidationError(
            f"mode must be 'min' or 'max': the name {objective.metric[:60]!r} does not say which "
            "way it is better"
        )
    return found
