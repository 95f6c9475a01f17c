"""Searches a store that can only be read, by reading its runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from quark_core.backends.contract import SupportsRead, SupportsSearch
from quark_core.backends.forks import read_with_beginnings
from quark_core.backends.run_pages import (
    ConfigName,
    PageCursor,
    PageSearch,
    RunNames,
    RunPage,
    RunRow,
    TagName,
    checksum_search,
)
from quark_core.backends.run_summary import MetricSummary, RunSummary, StoredRun
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord, format_time, parse_time
from quark_core.records.base import now_us
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import VALUE_SCOPES, Field, Query, RunSearch, Scope
from quark_core.search.evaluation import evaluate, find_cell, find_keys, flatten_values, sort_runs
from quark_core.search.resolution import RUN_FIELDS, resolve_names, spell_name, write_name

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


_MOST_VALUES = 8
# Where every point must be read to know a run's metrics, those of older runs are not named.
_READ_RUNS = 20
_SEARCHED_RUNS = 1_000
_DIGITS = re.compile(r"(\d+)")
_SEGMENTS = re.compile(r"[/._\-]")


def search_page_by_reading(reader: SupportsRead, page: PageSearch) -> RunPage:
    """What `SupportsPages.search_page` returns, from any store that is read.

    A backend that searches is asked for every run that fits. With any other,
    every point of every run is read where a metric is searched for or sorted
    by, and of the page's runs where a column is of a metric.

    Raises:
        SchemaValidationError: A name that no run of the searched project has,
            or a cursor of another search.
    """
    search = replace(page.search, limit=None)
    if isinstance(reader, SupportsSearch) and not _needs_fingerprints(page):
        return select_page(reader.search(search), page)
    if any(_needs_points(field) for field in search.fields):
        return select_page(search_by_reading(reader, search), page)
    cursor = open_cursor(page)
    at_us = now_us() if cursor is None else cursor.at_us
    runs = list_runs(reader, search, page.columns)
    found = select_page(select_runs(runs, search, at_us=at_us), page)
    if not any(_needs_points(field) for field in page.columns):
        return found
    rows = [summarize_by_reading(reader, row.run_id) for row in found.rows]
    return replace(found, rows=tuple(_make_row(run, page, at_us) for run in rows))


def select_page(runs: Sequence[RunSummary], page: PageSearch) -> RunPage:
    """A page of the runs that fit, which are given in order.

    Raises:
        SchemaValidationError: A cursor of another search.
    """
    cursor = open_cursor(page)
    at_us = now_us() if cursor is None else cursor.at_us
    start = 0 if cursor is None else _find_start(runs, page, cursor)
    shown = runs[start : start + page.limit]
    following = None
    if shown and start + page.limit < len(runs):
        last = shown[-1]
        following = PageCursor(
            checksum_search(page.search),
            at_us,
            parse_time(last.stored.run.created_at),
            last.run_id,
            find_keys(_resolve_order(page.search, last), last, at_us=at_us),
        ).encode()
    return RunPage(
        columns=page.column_texts,
        rows=tuple(_make_row(run, page, at_us) for run in shown),
        next=following,
        count=len(runs) if page.count else None,
    )


def open_cursor(page: PageSearch) -> PageCursor | None:
    """The cursor of a page, None of the first one.

    Raises:
        SchemaValidationError: It is none, or one of another search.
    """
    if page.after is None:
        return None
    cursor = PageCursor.decode(page.after, page.search)
    wanted: list[type | tuple[type, ...]] = []
    for order in page.search.order_by:
        field = order.field
        if field.scope in VALUE_SCOPES:
            wanted += [int, (int, float), str]
        else:
            is_text = field.scope == "fingerprint" or (
                field.scope == "run" and RUN_FIELDS[field.name] == "text"
            )
            wanted.append(str if is_text else (int, float))
    if all(key is None or isinstance(key, t) for key, t in zip(cursor.keys, wanted, strict=True)):
        return cursor
    raise SchemaValidationError("after must be the value of `next` of the previous page")


def list_names_by_reading(
    reader: SupportsRead, project: str | None, text: str, limit: int
) -> RunNames:
    """What `SupportsPages.list_names` returns, from any store that is read.

    Metrics are those of the newest runs where the store does not search.
    """
    if isinstance(reader, SupportsSearch):
        runs = reader.search(RunSearch(project=project, limit=_SEARCHED_RUNS + 1))
        whole = len(runs) <= _SEARCHED_RUNS
    else:
        listed = reader.list_runs(project=project)
        runs = [RunSummary(stored=stored) for stored in listed]
        for place, stored in enumerate(listed[:_READ_RUNS]):
            runs[place] = summarize_by_reading(reader, str(stored.run.id))
        whole = len(listed) <= _READ_RUNS
    metrics = {write_name("metric", key) for run in runs for key in run.metrics}
    keys: dict[str, list[Any]] = {}
    tags: dict[str, int] = {}
    for run in runs:
        for key, value in flatten_values(run.config):
            keys.setdefault(key, []).append(value)
        for tag in run.stored.run.tags:
            tags[tag] = tags.get(tag, 0) + 1
    found = {
        sort: order_names(names, text)
        for sort, names in (("metrics", metrics), ("config", keys), ("tags", tags))
    }
    return RunNames(
        metrics=tuple(found["metrics"][:limit]),
        config=tuple(describe_key(key, keys[key]) for key in found["config"][:limit]),
        tags=tuple(TagName(tag, tags[tag]) for tag in found["tags"][:limit]),
        complete=whole and all(len(names) <= limit for names in found.values()),
    )


def order_names(names: Iterable[str], text: str) -> list[str]:
    """Names that have a text in them: those that begin with it, then a part that does, the rest.

    Among equals `m2` stands before `m10`.
    """
    wanted = text.lower()

    def key(name: str) -> tuple[Any, ...]:
        lower = name.lower()
        nearness = 0
        if not lower.startswith(wanted):
            nearness = 1 if any(p.startswith(wanted) for p in _SEGMENTS.split(lower)) else 2
        parts = [(int(p), "") if p.isdecimal() else (-1, p) for p in _DIGITS.split(lower)]
        return nearness, parts, name

    return sorted((name for name in names if wanted in name.lower()), key=key)


def describe_key(key: str, values: Iterable[Any]) -> ConfigName:
    """A configuration key by the values that runs have there, the newest run's first."""
    types: dict[str, None] = {}
    some: dict[tuple[type, Any], Any] = {}
    for value in values:
        sort = _name_type(value)
        types.setdefault(sort)
        if sort in ("number", "bool", "text") and value == value:
            some.setdefault((type(value), value), value)
    return ConfigName(
        key,
        write_name("config", key),
        tuple(sorted(types)),
        tuple(islice(some.values(), _MOST_VALUES)),
    )


def _needs_fingerprints(page: PageSearch) -> bool:
    """Whether a column shows fingerprints, which no search returns."""
    return any(field.scope == "fingerprint" for field in (*page.columns, *page.search.fields))


def _needs_points(field: Field) -> bool:
    return field.scope == "metric" or (field.scope == "run" and field.name == "step")


def _find_start(runs: Sequence[RunSummary], page: PageSearch, cursor: PageCursor) -> int:
    """Place of the first run behind a cursor."""
    descending: list[bool] = []
    for order in page.search.order_by:
        descending += [order.descending] * (3 if order.field.scope in VALUE_SCOPES else 1)
    beside: int | None = None
    for place, run in enumerate(runs):
        keys = find_keys(_resolve_order(page.search, run), run, at_us=cursor.at_us)
        created_us = parse_time(run.stored.run.created_at)
        side = _compare([*keys, created_us], [*cursor.keys, cursor.created_us], [*descending, True])
        if side > 0:
            return place if beside is None else beside
        if side == 0:
            if run.run_id == cursor.run_id:
                return place + 1
            beside = place if beside is None else beside
    # The run itself is gone: what was made at the same moment may be shown again, not left out.
    return len(runs) if beside is None else beside


def _compare(own: Sequence[Any], other: Sequence[Any], descending: Sequence[bool]) -> int:
    """1 where the first stands behind the second, -1 before it, 0 beside it."""
    for mine, theirs, is_descending in zip(own, other, descending, strict=True):
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            return 1 if mine is None else -1
        return 1 if (mine > theirs) != is_descending else -1
    return 0


def _resolve_order(search: RunSearch, run: RunSummary) -> list[Any]:
    return [replace(order, field=_resolve(order.field, run)) for order in search.order_by]


def _resolve(field: Field, run: RunSummary) -> Field:
    """A field under the name that a run has it by."""
    if field.scope != "metric":
        return field
    return next(
        (replace(field, name=name) for name in spell_name(field) if name in run.metrics), field
    )


def _make_row(run: RunSummary, page: PageSearch, at_us: int) -> RunRow:
    cells = (find_cell(_resolve(field, run), run, at_us=at_us) for field in page.columns)
    return RunRow(run.run_id, tuple(cells))


def _name_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    return "text" if isinstance(value, str) else "json"
