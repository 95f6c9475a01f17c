"""Finds runs by their summaries: which, then the rows, then the metrics of those.

All of it is asked inside of a transaction that reads, so that a search sees one moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.search_conditions import (
    SearchConditions,
    StoredNames,
    is_visible,
    sql,
)
from quark_backends.store.reading.table_rows import (
    ROW_SIZE,
    RUN_COLUMNS,
    RUN_TABLES,
    cut_numbers,
    run_not_found,
    to_stored_run,
)
from quark_core.backends.run_summary import MetricSummary, RunSummary
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.query import RunSearch
from quark_core.search.resolution import resolve_names

# Of texts of runs that are decoded at once: some become forty times as much.
_PART_BYTES = 2**20
_METRIC_BYTES = 40


def iterate_search(
    connection: StoreConnection,
    search: RunSearch,
    store_name: str | None = None,
    *,
    start: int = 0,
) -> Iterator[RunSummary]:
    """The runs that fit, in the order that is asked for, a few at a time in memory.

    They are newest first by default. Runs in the trash are left out.

    Args:
        connection: The store, inside of a transaction that reads.
        search: What is asked for.
        store_name: Only runs that were started for a storage root of this label.
        start: How many of the first are left out.

    Raises:
        SchemaValidationError: A name that no run of the searched project
            has; the message points at its column.
    """
    if search.where is None and not search.order_by:
        # Needs no look at the names that there are.
        found = sql("SELECT pk FROM run WHERE {}", is_visible(search.project, store_name))
        if not search.archived:
            found = sql("{} AND archived_us IS NULL", found)
        statement = sql("{} ORDER BY created_us DESC, pk DESC", found)
        limit = search.limit
    else:
        names = StoredNames(connection, search.project, store_name)
        resolved = resolve_names(search, names)
        if resolved is None:
            return
        conditions = SearchConditions(
            connection, resolved, names.metric_names, now_us(), store_name
        )
        statement = sql(
            "SELECT run.pk FROM {} WHERE {} ORDER BY {}",
            *(conditions.tables, conditions.make_condition(), conditions.make_order()),
        )
        limit = resolved.limit
    if limit is not None:
        statement = sql("{} LIMIT {}", statement, limit)
    pks = [pk for (pk,) in statement.ask(connection)]
    yield from _load_summaries(connection, pks[start:])


def summarize(connection: StoreConnection, run_id: str) -> RunSummary:
    """One run with its metrics summed up, in the trash or not.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    row = connection.execute("SELECT pk FROM run WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        raise run_not_found(run_id)
    return next(_load_summaries(connection, row))


def _load_summaries(connection: StoreConnection, run_pks: Sequence[int]) -> Iterator[RunSummary]:
    """The runs of these numbers, in their order."""
    for part in _cut_by_size(connection, run_pks):
        summaries: dict[int, RunSummary] = {}
        metrics = _load_metrics(connection, part)
        for pk, newest_step, *row in connection.execute(
            f"SELECT run.pk, newest_step, {RUN_COLUMNS} FROM {RUN_TABLES} "
            f"WHERE run.pk IN ({_mark(part)})",
            part,
        ):
            found = metrics.get(pk)
            summaries[pk] = RunSummary(
                stored=to_stored_run(row),
                newest_step=newest_step,
                last_metric_at=None if found is None else format_time(found.last_us),
                metrics={} if found is None else found,
            )
        yield from (summaries[pk] for pk in part)


def _cut_by_size(connection: StoreConnection, run_pks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of runs in parts, whose rows together are decoded without taking much memory."""
    for numbers in cut_numbers(run_pks):
        found = connection.execute(
            f"SELECT run.pk, {ROW_SIZE},"
            " (SELECT count(*) FROM run_metric WHERE run_metric.run_pk = run.pk)"
            f" FROM run WHERE run.pk IN ({_mark(numbers)})",
            numbers,
        )
        sizes = {pk: texts + metrics * _METRIC_BYTES for pk, texts, metrics in found}
        part: list[int] = []
        size_bytes = 0
        for pk in numbers:
            size_bytes += sizes[pk]
            if part and size_bytes > _PART_BYTES:
                yield tuple(part)
                part, size_bytes = [], sizes[pk]
            part.append(pk)
        yield tuple(part)


def _mark(values: Sequence[object]) -> str:
    """A place for each of the values of a statement."""
    return ", ".join("?" * len(values))


class _Metrics(Mapping[str, MetricSummary]):
    """Metrics of a run; a page of runs has thousands, so each is made when asked for."""

    __slots__ = ("_made", "_rows")

    def __init__(self, rows: Mapping[str, Sequence[Any]]) -> None:
        self._rows = rows
        self._made: dict[str, MetricSummary] = {}

    @property
    def last_us(self) -> int:
        """Time of the latest of the metrics' newest points, in microseconds."""
        return max(int(row[-1]) for row in self._rows.values())

    def __getitem__(self, key: str) -> MetricSummary:
        made = self._made.get(key)
        if made is not None:
            return made
        _, _, count, non_finite, first, last, low, high, last_step, _ = self._rows[key]
        made = self._made[key] = MetricSummary(
            key=key,
            count=count,
            non_finite=non_finite,
            first=first,
            last=last,
            low=low,
            high=high,
            last_step=last_step,
        )
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(dict(self))


_METRIC_COLUMNS = """
    run_pk, name_pk, count, non_finite, first, last, low, high, last_step, last_us
"""


def _load_metrics(connection: StoreConnection, run_pks: Sequence[int]) -> dict[int, _Metrics]:
    wanted = f"run_pk IN ({_mark(run_pks)})"
    if len(run_pks) == 1:
        # Each name stands in one row, and there may be a million.
        named = connection.execute(
            f"SELECT {_METRIC_COLUMNS}, name.text FROM run_metric "
            f"JOIN name ON name.pk = name_pk WHERE {wanted} ORDER BY name.text",
            run_pks,
        )
        found = {row[-1]: tuple(row)[:-1] for row in named}
        return {run_pks[0]: _Metrics(found)} if found else {}
    rows = connection.execute(
        f"SELECT {_METRIC_COLUMNS} FROM run_metric WHERE {wanted}", run_pks
    ).fetchall()
    # A few names stand in thousands of rows: each is read once.
    keys: dict[int, str] = {}
    for part in cut_numbers(list({row[1] for row in rows})):
        texts = connection.execute(f"SELECT pk, text FROM name WHERE pk IN ({_mark(part)})", part)
        keys.update((pk, text) for pk, text in texts)
    ranks = {pk: rank for rank, pk in enumerate(sorted(keys, key=keys.__getitem__))}
    rows.sort(key=lambda row: ranks[row[1]])
    by_run: dict[int, dict[str, Sequence[Any]]] = {}
    for row in rows:
        by_run.setdefault(row[0], {})[keys[row[1]]] = row
    return {pk: _Metrics(named_rows) for pk, named_rows in by_run.items()}
