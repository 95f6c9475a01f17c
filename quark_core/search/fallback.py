"""Searches a store that can only be read, by reading its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.backends.forks import read_with_beginnings
from quark_core.backends.run_summary import MetricSummary, RunSummary
from quark_core.records import MetricRecord, format_time
from quark_core.records.expression import Field, RunSearch, Scope
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query
from quark_core.records.times import now_us
from quark_core.search.evaluation import evaluate, flatten_values, sort_runs
from quark_core.search.resolution import resolve_names

if TYPE_CHECKING:
    from quark_core.records.columns import Columns


def search_by_reading(reader: SupportsRead, search: RunSearch) -> list[RunSummary]:
    """What `SupportsSearch.search` returns, from any store that is read.

    Every point of every run is read where a metric is asked for, and of the
    returned runs otherwise.

    Raises:
        SchemaValidationError: A name that no run of the searched project has.
    """
    at_us = now_us()
    runs = list_runs(reader, search)
    needs_points = any(
        field.scope == "metric" or (field.scope == "run" and field.name == "step")
        for field in search.fields
    )
    if needs_points:
        runs = [
            replace(_summarize(reader, run.stored), fingerprints=run.fingerprints) for run in runs
        ]
    found = select_runs(runs, search, at_us=at_us)
    return found if needs_points else [_summarize(reader, run.stored) for run in found]


def list_runs(
    reader: SupportsRead, search: RunSearch, columns: Iterable[Field] = ()
) -> list[RunSummary]:
    """Every run of a search's project, without metrics; with fingerprints where it names some.

    Args:
        reader: The store.
        search: What is searched for.
        columns: What is shown besides.
    """
    runs = [RunSummary(stored=stored) for stored in reader.list_runs(project=search.project)]
    if not any(field.scope == "fingerprint" for field in (*search.fields, *columns)):
        return runs
    return [replace(run, fingerprints=_read_fingerprints(reader, run.run_id)) for run in runs]


def _read_fingerprints(reader: SupportsRead, run_id: str) -> dict[str, str]:
    """Key -> digest of its newest fingerprint: of the newest attempt, in it of the lowest rank.

    Of two subjects that have the same key, the lower digest: stores say the same.
    """
    rows = reader.read(run_id, FingerprintRecord.KIND, Query())
    if not rows.count:
        return {}
    names = ("subject", "key", "attempt", "rank", "time_us", "sequence", "digest")
    newest: dict[tuple[str, str], tuple[Any, ...]] = {}
    for subject, key, attempt, rank, time_us, sequence, digest in zip(
        *(rows[name].tolist() for name in names), strict=True
    ):
        place = (attempt, -rank, time_us, sequence, digest)
        newest[subject, key] = max(place, newest.get((subject, key), place))
    found: dict[str, str] = {}
    for (_, key), place in newest.items():
        found[key] = min(place[-1], found.get(key, place[-1]))
    return found


def select_runs(
    runs: Sequence[RunSummary], search: RunSearch, *, at_us: int | None = None
) -> list[RunSummary]:
    """Those of some runs that fit, in order; its project aside.

    Args:
        runs: Every run of the project, newest first.
        search: What is searched for.
        at_us: The present; by default the clock's.

    Raises:
        SchemaValidationError: A name that none of the runs has.
    """
    if not search.archived:
        runs = [run for run in runs if run.stored.run.archived_at is None]
    resolved = resolve_names(search, _RunNames(runs))
    if resolved is None:
        return []
    at_us = now_us() if at_us is None else at_us
    where = resolved.where
    if where is not None:
        runs = [run for run in runs if evaluate(where, run, at_us=at_us)]
    return sort_runs(runs, resolved.order_by, at_us=at_us)[: resolved.limit]


def summarize_by_reading(reader: SupportsRead, run_id: str) -> RunSummary:
    """What `SupportsSearch.summarize` returns, from any store that is read.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    return _summarize(reader, reader.load_run(run_id))


def summarize_columns(columns: Columns) -> tuple[int | None, Mapping[str, MetricSummary]]:
    """Highest step, and a summary of each metric, of metric rows in persistence order."""
    if columns.count == 0:
        return None, {}
    import numpy as np

    values, steps = columns["value"], columns["step"]
    keys, indexes = np.unique(columns["metric_key"].astype(str), return_inverse=True)
    # Sorting once by key and slicing is linear in the points, however many metrics there are.
    order = np.argsort(indexes, kind="stable")
    bounds = np.searchsorted(indexes[order], np.arange(len(keys) + 1)).tolist()
    metrics = {}
    for index, key in enumerate(keys.tolist()):
        rows = order[bounds[index] : bounds[index + 1]]
        metrics[key] = _sum_up(key, values[rows], int(steps[rows[-1]]))
    newest = int(steps.max())
    return (None if newest < 0 else newest), metrics


def _sum_up(key: str, values: Any, last_step: int) -> MetricSummary:
    import numpy as np

    finite = np.isfinite(values)
    kept = values[finite]
    return MetricSummary(
        key=key,
        count=len(values),
        non_finite=len(values) - len(kept),
        first=float(values[0]) if finite[0] else None,
        last=float(values[-1]) if finite[-1] else None,
        low=float(kept.min()) if len(kept) else None,
        high=float(kept.max()) if len(kept) else None,
        last_step=None if last_step < 0 else last_step,
    )


def _summarize(reader: SupportsRead, stored: StoredRun) -> RunSummary:
    columns = read_with_beginnings(reader, str(stored.run.id), MetricRecord.KIND)
    newest_step, metrics = summarize_columns(columns)
    return RunSummary(
        stored=stored,
        newest_step=newest_step,
        last_metric_at=_find_last_time(columns),
        metrics=metrics,
    )


def _find_last_time(columns: Columns) -> str | None:
    """Time of the latest of the metrics' newest points, of rows in persistence order."""
    if columns.count == 0:
        return None
    import numpy as np

    # The first of each key, from the end, is its newest point.
    _, newest = np.unique(columns["metric_key"].astype(str)[::-1], return_index=True)
    return format_time(int(columns["time_us"][::-1][newest].max()))


def _list_run_names(run: RunSummary, scope: Scope) -> Iterable[str]:
    if scope == "metric":
        return run.metrics
    if scope == "fingerprint":
        return run.fingerprints
    return (
        key for key, _ in flatten_values(run.config if scope == "config" else run.stored.fields)
    )


class _RunNames:
    """The names that runs have (see `Vocabulary`)."""

    def __init__(self, runs: Iterable[RunSummary]) -> None:
        self._runs = list(runs)
        self._names: dict[Scope, frozenset[str]] = {}

    def has_runs(self) -> bool:
        """Whether there is any run."""
        return bool(self._runs)

    def has(self, scope: Scope, name: str) -> bool:
        """Whether a run has the name."""
        return name in self.list_names(scope)

    def list_names(self, scope: Scope) -> Iterable[str]:
        """All names."""
        if scope not in self._names:
            self._names[scope] = frozenset(
                name for run in self._runs for name in _list_run_names(run, scope)
            )
        return self._names[scope]
