"""Pages of runs, and the names that runs have, for stores that cannot make them by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from quark_core.backends.contract import SupportsRead, SupportsSearch
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
from quark_core.backends.run_summary import RunSummary
from quark_core.errors import SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.expression import VALUE_SCOPES, Field, RunSearch
from quark_core.records.times import now_us
from quark_core.search.evaluation import find_cell, find_keys, flatten_values
from quark_core.search.fallback import (
    list_runs,
    search_by_reading,
    select_runs,
    summarize_by_reading,
)
from quark_core.search.resolution import RUN_FIELDS, spell_name, write_name

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
    raise SchemaValidationError("after must be what `next` of the page before was")


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
