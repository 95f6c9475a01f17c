"""The list of runs: pages of rows, names for completion, curves and standings of visible rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark.page.api.parameters import MAX_ROWS, MAX_RUNS, Parameters
from quark.page.api.rows import (
    ROW_FIELDS,
    describe_column,
    describe_ending,
    describe_found,
    describe_main,
    list_values,
    show_cell,
)
from quark.page.api.standings import describe_standing
from quark_core.backends.run_pages import MOST_NAMES
from quark_core.errors import RunNotFoundError
from quark_core.runs import run_search
from quark_core.runs.run_search import build_page_search, find_page
from quark_core.search.resolution import RUN_FIELDS

if TYPE_CHECKING:
    from quark.page.api.analyses import AnalysisDesk
    from quark.page.api.source import PageSource
    from quark_core.backends.run_pages import RunPage, RunRow
    from quark_core.records.query import Field

_MAX_COLUMNS = 40
_MAX_ORDERS = 10
_ROWS = 100
_NAMES = 200
_PROJECT_ROWS = 1_000
_VALUES = 5
_VALUE_CHARACTERS = 60
_MOST_CURSOR = 100_000
_MOST_WHERE = 20_000
_IS_LIVE = "state == 'running'"
_FUNCTIONS = ("last", "min", "max", "first", "count")


def tell_about(source: PageSource, version: str, now: str) -> dict[str, Any]:
    """What is looked at, and what it can do."""
    projects = Counter(_list_projects(source))
    notes = []
    # Of what is not there yet nobody knows what it can do.
    lacks = {name for name, can in source.capabilities.items() if not can and not source.is_awaited}
    if "series" in lacks:
        notes.append("this backend reads every point of a curve")
    if "search" in lacks:
        notes.append("this backend reads every run to search for metrics")
    if "outputs" in lacks:
        notes.append("this backend keeps no findings; they are computed here, and not stored")
    return {
        "version": version,
        "place": source.place,
        "backend": source.backend,
        "capabilities": dict(source.capabilities),
        "notes": notes,
        "preparing": source.describe_preparing(),
        "projects": [{"name": name, "runs": count} for name, count in projects.items()],
        "now": now,
    }


def _list_projects(source: PageSource) -> Iterator[str]:
    """The project of each run, newest run first."""
    after = None
    while True:
        search = build_page_search(
            project=None, where=None, order_by=None, columns=("project",), limit=_PROJECT_ROWS,
            after=after, count=False,
        )  # fmt: skip
        page = find_page(source.reader, search)
        yield from (str(row.values[0]) for row in page.rows)
        after = page.next
        if after is None:
            return


def list_rows(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """One page of the list.

    Raises:
        SchemaValidationError: A bad parameter, or a mistake in an expression.
    """
    ask = _Ask.read(parameters)
    after = parameters.get_text("after", _MOST_CURSOR)
    page = ask.find(source, ask.where, after, count=True)
    rows = [_make_row(row, ask) for row in page.rows]
    if not ask.orders and (live := _list_live(source, ask)):
        # They stand on the first page, before all others.
        shown = {row["id"] for row in live}
        rows = [row for row in rows if row["id"] not in shown]
        rows = rows if after is not None else [*live, *rows]
    return {
        "count": page.count,
        "next": page.next,
        "columns": [describe_column(*pair) for pair in zip(ask.columns, ask.fields, strict=True)],
        "rows": rows,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What is asked for of the list."""

    project: str | None
    where: str | None
    orders: tuple[str, ...]
    columns: tuple[str, ...]
    fields: tuple[Field, ...]
    limit: int

    @classmethod
    def read(cls, parameters: Parameters) -> _Ask:
        columns = tuple(parameters.get_texts("column", _MAX_COLUMNS))
        from quark_core.search.parser import parse_column

        return cls(
            project=parameters.get_text("project"),
            where=parameters.get_text("where", _MOST_WHERE),
            orders=tuple(parameters.get_texts("order", _MAX_ORDERS)),
            columns=columns,
            fields=tuple(parse_column(text, "column") for text in columns),
            limit=parameters.get_bounded("limit", _ROWS, MAX_ROWS),
        )

    def find(
        self, source: PageSource, where: str | None, after: str | None, *, count: bool = False
    ) -> RunPage:
        """A page of the runs that fit."""
        search = build_page_search(
            project=self.project,
            where=where,
            order_by=self.orders or None,
            columns=(*ROW_FIELDS, *self.columns),
            limit=self.limit,
            after=after,
            count=count,
            where_argument="where",
            order_argument="order",
            columns_argument="column",
        )
        return find_page(source.reader, search)


def _list_live(source: PageSource, ask: _Ask) -> list[dict[str, Any]]:
    """The runs that go on; none where there are more than a page of them."""
    where = _IS_LIVE if ask.where is None else f"({ask.where}\n) and {_IS_LIVE}"
    page = ask.find(source, where, None)
    if page.next is not None:
        return []
    rows = []
    for found in page.rows:
        row = _make_row(found, ask)
        if source.capabilities["search"]:
            try:
                summary = source.summarize(found.run_id)
            except RunNotFoundError:
                continue  # removed meanwhile
            row["main"] = describe_main(summary)
            row["last_metric_at"] = summary.last_metric_at
            row["pending"] = False
        rows.append(row)
    return rows


def _make_row(row: RunRow, ask: _Ask) -> dict[str, Any]:
    own, others = row.values[: len(ROW_FIELDS)], row.values[len(ROW_FIELDS) :]
    cells = [show_cell(*pair) for pair in zip(ask.fields, others, strict=True)]
    return {**describe_found(row.run_id, own), "values": cells}


def list_standings(
    source: PageSource, desk: AnalysisDesk, parameters: Parameters
) -> dict[str, Any]:
    """What the visible rows say besides: health, the worst finding, progress.

    Raises:
        SchemaValidationError: A bad parameter.
    """
    from quark_core.search.parser import parse_column

    columns = [
        parse_column(text, "column") for text in parameters.get_texts("column", _MAX_COLUMNS)
    ]
    standings = {}
    for run_id in parameters.get_texts("run", MAX_RUNS):
        try:
            summary = source.summarize(run_id)
            standing = describe_standing(source, desk, summary)
        except RunNotFoundError:
            continue
        standing["newest_step"] = summary.newest_step
        standing["last_metric_at"] = summary.last_metric_at
        standing["state"] = summary.state
        standing["lost_reason"] = summary.stored.lost_reason
        standing["exit_code"] = summary.stored.exit_code
        standing["ending"] = describe_ending(summary.stored)
        standing["main"] = describe_main(summary)
        standing["values"] = list_values(summary, columns)
        standings[run_id] = standing
    return {"standings": standings}


def list_names(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """Names for completion.

    Raises:
        SchemaValidationError: A bad parameter.
    """
    prefix = parameters.get_text("prefix") or ""
    # What stands before the dot says where the name is looked for, and is no part of it.
    text = prefix.removeprefix("config.").removeprefix("metric.").removeprefix("run.")
    names = run_search.list_names(
        source.reader,
        project=parameters.get_text("project"),
        text=text,
        limit=parameters.get_bounded("limit", _NAMES, MOST_NAMES),
    )
    is_setting = prefix.startswith("config.")
    return {
        "metrics": []
        if is_setting
        else [{"key": written, "name": written} for written in names.metrics],
        "config": [
            {
                "key": entry.key,
                "written": entry.written,
                "types": entry.types,
                "values": [_shorten(value) for value in entry.values[:_VALUES]],
            }
            for entry in names.config
        ],
        "tags": [{"tag": entry.tag, "runs": entry.runs} for entry in names.tags],
        "fields": [name for name in RUN_FIELDS if text.lower() in name],
        "functions": list(_FUNCTIONS),
        "complete": names.complete,
    }


def _shorten(value: Any) -> Any:
    return value[:_VALUE_CHARACTERS] if isinstance(value, str) else value
