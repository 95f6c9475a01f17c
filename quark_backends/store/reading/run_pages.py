"""Pages of runs and the names that they have, as SQL: no more is read of a run than is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from sqlalchemy import (
    ColumnElement,
    Table,
    and_,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
)

from quark_backends.store.databases.tables import METADATA
from quark_backends.store.reading.search_conditions import (
    SearchConditions,
    StoredNames,
    find_alive,
    is_visible,
)
from quark_backends.store.reading.table_rows import cut_numbers, read_texts
from quark_core.backends.run_pages import (
    PageCursor,
    PageSearch,
    RunNames,
    RunPage,
    RunRow,
    TagName,
    checksum_search,
)
from quark_core.records.base import now_us
from quark_core.records.names import encode_name
from quark_core.records.query import Field, RunSearch, Scope
from quark_core.search.fallback import describe_key, open_cursor, order_names
from quark_core.search.resolution import resolve_names, spell_name, write_name
from quark_core.system.process import ProcessIdentity, find_lost_reason

if TYPE_CHECKING:
    from sqlalchemy import Connection

_run = METADATA.tables["run"]
_project = METADATA.tables["project"]
_run_tag = METADATA.tables["run_tag"]
_run_metric = METADATA.tables["run_metric"]
_run_config = METADATA.tables["run_config"]
_run_field = METADATA.tables["run_field"]
_run_fingerprint = METADATA.tables["run_fingerprint"]
_name = METADATA.tables["name"]

_STATISTICS = {"last": "last", "first": "first", "min": "low", "max": "high", "count": "count"}
_RUN_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "created": ("created_us",),
    "updated": ("updated_us",),
    "ended": ("ended_us",),
    "archived": ("archived_us",),
    "groups": ("group_paths",),
    "parent": ("parent_run_id",),
    "step": ("newest_step",),
    "project": ("project_id",),
    "state": ("status", "process", "heartbeat_us"),
    "duration": ("status", "process", "heartbeat_us", "created_us", "ended_us"),
}
# So many names are looked through, and the configurations of so many of the newest runs.
_LOOKED_THROUGH = 5_000
_NEWEST_RUNS = 64
_KEYS_AT_ONCE = 100
_VALUES_OF_OLD = 20
# Longer texts are read for one run at a time, and shown by their beginning. A page ends where its
# cells have so many characters, and so do tags and groups that are shown at all.
_SHORT_CHARACTERS = 256
_CELL_CHARACTERS = 16_384
_LIST_CHARACTERS = 65_536
_PAGE_CHARACTERS = 4_000_000
_KEY_CHARACTERS = 512


def load_page(connection: Connection, page: PageSearch, store_name: str | None) -> RunPage:
    """One page, inside a transaction that reads; see `RunFinder.search_page`."""
    search = page.search
    cursor = open_cursor(page)
    names = StoredNames(connection, search.project, store_name)
    resolved = resolve_names(search, names)
    if resolved is None:
        return RunPage(columns=page.column_texts, rows=(), count=0 if page.count else None)
    at_us = now_us() if cursor is None else cursor.at_us
    conditions = _make_conditions(connection, resolved, names, at_us, store_name)
    statement = (
        select(_run.c.pk, _run.c.id, _run.c.created_us, *(key for key, _ in conditions.list_keys()))
        .select_from(conditions.tables)
        .where(conditions.make_condition())
        .order_by(*conditions.make_order())
        .limit(page.limit + 1)
    )
    if cursor is not None:
        bound = conditions.make_bound(cursor.keys, cursor.created_us, cursor.run_id)
        statement = statement.where(bound)
    found = [tuple(row) for row in connection.execute(statement)]
    shown = found[: page.limit]
    cells = _Cells(connection, [row[0] for row in shown], page.columns, at_us)
    rows: list[RunRow] = []
    characters = 0
    for run_pk, run_id, *_ in shown:
        values = cells.find_row(run_pk)
        characters += sum(map(_count_characters, values))
        if rows and characters > _PAGE_CHARACTERS:
            break
        rows.append(RunRow(run_id, values))
    following = None
    if rows and len(found) > len(rows):
        _, run_id, created_us, *keys = shown[len(rows) - 1]
        last = PageCursor(checksum_search(search), at_us, created_us, run_id, keys)
        following = last.encode()
    return RunPage(
        columns=page.column_texts,
        rows=tuple(rows),
        next=following,
        count=_count(connection, resolved, names, at_us, store_name) if page.count else None,
    )


def _make_conditions(
    connection: Connection,
    resolved: RunSearch,
    names: StoredNames,
    at_us: int,
    store_name: str | None,
) -> SearchConditions:
    asks_liveness = any(
        field.scope == "run" and field.name in ("state", "duration") for field in resolved.fields
    )
    alive = find_alive(connection) if asks_liveness else ()
    return SearchConditions(resolved, names.metric_names, alive, at_us, store_name)


def _count(
    connection: Connection,
    resolved: RunSearch,
    names: StoredNames,
    at_us: int,
    store_name: str | None,
) -> int:
    unordered = replace(resolved, order_by=())
    conditions = _make_conditions(connection, unordered, names, at_us, store_name)
    statement = (
        select(func.count()).select_from(conditions.tables).where(conditions.make_condition())
    )
    return int(connection.scalar(statement) or 0)


class _Cells:
    """What the columns of a page show, in a statement for each sort of column.

    Args:
        connection: Inside a transaction.
        run_pks: The runs of the page.
        columns: The columns.
        at_us: The present.
    """

    def __init__(
        self, connection: Connection, run_pks: Sequence[int], columns: Sequence[Field], at_us: int
    ) -> None:
        self._connection = connection
        self._columns = columns
        self._at_us = at_us
        self._runs: dict[int, Mapping[str, Any]] = {}
        self._metrics: dict[tuple[int, str], Any] = {}
        # By run, scope and name.
        self._given: dict[tuple[int, str, str], Any] = {}
        self._long: dict[int, list[tuple[str, Table, str, bool]]] = {}
        fields = {
            scope: [field.name for field in columns if field.scope == scope]
            for scope in get_args(Scope)
        }
        for part in cut_numbers(run_pks):
            if fields["run"]:
                self._load_runs(connection, part, fields["run"])
            for scope, table in (("config", _run_config), ("field", _run_field)):
                if fields[scope]:
                    self._load_given(connection, part, scope, table, fields[scope])
            if fields["fingerprint"]:
                self._load_fingerprints(connection, part, fields["fingerprint"])
            if fields["metric"]:
                self._load_metrics(connection, part)

    def find_row(self, run_pk: int) -> tuple[Any, ...]:
        """The cells of one run."""
        long = self._long.pop(run_pk, [])
        for scope, table, key, is_json in long:
            text = func.substr(table.c.text, 1, _CELL_CHARACTERS + 1)
            its = (table.c.run_pk == run_pk, table.c.key == key)
            found = str(self._connection.scalar(select(text).where(*its)) or "")
            is_cut = len(found) > _CELL_CHARACTERS
            value = f"{found[:_CELL_CHARACTERS]}…" if is_cut else found
            self._given[run_pk, scope, key] = json.loads(found) if is_json and not is_cut else value
        row = tuple(self._find(run_pk, field) for field in self._columns)
        for scope, _, key, _ in long:
            del self._given[run_pk, scope, key]
        return row

    def _find(self, run_pk: int, field: Field) -> Any:
        if field.scope == "run":
            return self._find_run_value(self._runs[run_pk], field.name)
        if field.scope != "metric":
            return self._given.get((run_pk, field.scope, field.name))
        for name in spell_name(field):
            row = self._metrics.get((run_pk, name))
            if row is not None:
                value = getattr(row, _STATISTICS[field.statistic])
                return math.nan if value is None else value
        return None

    def _find_run_value(self, row: Mapping[str, Any], name: str) -> Any:
        match name:
            case "tags":
                return tuple(json.loads(row["tags"])) or None
            case "groups":
                return read_texts(row["group_paths"]) or None
            case "state":
                return self._find_state(row)
            case "duration":
                return self._measure_duration(row)
            case "project":
                return row["project_name"]
            case _:
                return row[_RUN_COLUMNS.get(name, (name,))[0]]

    @staticmethod
    def _find_state(row: Mapping[str, Any]) -> str:
        status = str(row["status"])
        if status != "running":
            return status
        process = msgspec.json.decode(row["process"], type=ProcessIdentity)
        lost = find_lost_reason(status, process, row["heartbeat_us"])
        return status if lost is None else "lost"

    def _measure_duration(self, row: Mapping[str, Any]) -> float:
        end_us = row["ended_us"]
        if end_us is None:
            is_alive = self._find_state(row) == "running"
            end_us = self._at_us if is_alive else row["heartbeat_us"]
        return float(max(0, end_us - row["created_us"])) / 1e6

    def _load_runs(self, connection: Connection, part: Sequence[int], names: list[str]) -> None:
        wanted = {column for name in names for column in _RUN_COLUMNS.get(name, (name,))}
        statement = select(_run.c.pk, *map(_cut_column, sorted(wanted)))
        if "project" in names:
            statement = statement.add_columns(_project.c.name.label("project_name")).join_from(
                _run, _project
            )
        for row in connection.execute(statement.where(_run.c.pk.in_(part))).mappings():
            self._runs[row["pk"]] = dict(row)

    def _load_given(
        self,
        connection: Connection,
        part: Sequence[int],
        scope: str,
        table: Table,
        keys: list[str],
    ) -> None:
        columns = table.c
        length = func.coalesce(func.length(columns.text), 0)
        statement = select(
            columns.run_pk, columns.key, length, columns.type, columns.number, _cut_text(table)
        ).where(columns.run_pk.in_(part), columns.key.in_(sorted(set(keys))))
        for run_pk, key, characters, kind, *value in connection.execute(statement):
            if characters > _SHORT_CHARACTERS:
                self._long.setdefault(run_pk, []).append((scope, table, key, kind == "json"))
            else:
                self._given[run_pk, scope, key] = _read_value(kind, *value)

    def _load_fingerprints(
        self, connection: Connection, part: Sequence[int], keys: list[str]
    ) -> None:
        columns = _run_fingerprint.c
        statement = (
            select(
                columns.run_pk,
                columns.key,
                func.substr(func.min(columns.digest), 1, _SHORT_CHARACTERS),
            )
            .where(columns.run_pk.in_(part), columns.key.in_(sorted(set(keys))))
            .group_by(columns.run_pk, columns.key)
        )
        for run_pk, key, digest in connection.execute(statement):
            self._given[run_pk, "fingerprint", key] = digest

    def _load_metrics(self, connection: Connection, part: Sequence[int]) -> None:
        fields = [field for field in self._columns if field.scope == "metric"]
        texts = {name for field in fields for name in spell_name(field)}
        found = connection.execute(
            select(_name.c.pk, _name.c.text).where(_name.c.text.in_(sorted(texts)))
        )
        names: dict[int, str] = {row.pk: row.text for row in found}
        statistics = sorted({_STATISTICS[field.statistic] for field in fields})
        columns = _run_metric.c
        statement = select(
            columns.run_pk, columns.name_pk, *(columns[column] for column in statistics)
        ).where(columns.run_pk.in_(part), columns.name_pk.in_(sorted(names)))
        for row in connection.execute(statement) if names else ():
            self._metrics[row.run_pk, names[row.name_pk]] = row


def _cut_column(name: str) -> ColumnElement[Any]:
    """A column of a run that no run makes large; a list of texts that is, is not shown."""
    column = _run.c[name]
    if name == "notes":
        return func.substr(column, 1, _CELL_CHARACTERS).label(name)
    if name == "tags":
        return case((func.length(column) <= _LIST_CHARACTERS, column), else_="[]").label(name)
    if name == "group_paths":
        return case((func.length(column) <= _LIST_CHARACTERS, column)).label(name)
    return column


def _cut_text(table: Table) -> ColumnElement[Any]:
    """The text of a value where it is short, else NULL."""
    return case((func.length(table.c.text) <= _SHORT_CHARACTERS, table.c.text))


def _count_characters(cell: Any) -> int:
    if isinstance(cell, str):
        return len(cell)
    return len(json.dumps(cell)) if isinstance(cell, (tuple, list, dict)) else 1


def _read_value(kind: str, number: float | None, text: str | None) -> Any:
    if kind == "bool":
        return bool(number)
    if kind == "json":
        return json.loads(text or "null")
    return text if kind == "text" else number


def load_names(
    connection: Connection, project: str | None, text: str, limit: int, store_name: str | None
) -> RunNames:
    """Names that have a text in them, inside a transaction; see `RunFinder.list_names`."""
    visible = is_visible(project, store_name)
    metrics = _find_metrics(connection, visible, text)
    keys = _find_keys(connection, visible, text)
    tags = _find_tags(connection, visible, text)
    found_keys = order_names(keys, text)
    found_tags = order_names(tags, text)
    found_metrics = order_names(metrics, text)
    return RunNames(
        metrics=tuple(found_metrics[:limit]),
        config=tuple(
            describe_key(key, values)
            for key, values in _load_values(connection, visible, found_keys[:limit]).items()
        ),
        tags=tuple(TagName(tag, tags[tag]) for tag in found_tags[:limit]),
        complete=max(map(len, (metrics, keys, tags))) < _LOOKED_THROUGH
        and max(map(len, (found_metrics, found_keys, found_tags))) <= limit,
    )


def _contains(column: ColumnElement[Any], *texts: str) -> ColumnElement[bool]:
    lower = func.lower(column)
    return or_(*(func.replace(lower, text.lower(), "") != lower for text in texts if text))


def _find_metrics(
    connection: Connection, visible: Sequence[ColumnElement[bool]], text: str
) -> list[str]:
    used = exists(
        select(literal(1))
        .select_from(_run_metric.join(_run, _run.c.pk == _run_metric.c.run_pk))
        .where(_run_metric.c.name_pk == _name.c.pk, *visible)
        .correlate(_name)
    )
    statement = select(_name.c.text).where(used).order_by(_name.c.text).limit(_LOOKED_THROUGH)
    if text:
        statement = statement.where(_contains(_name.c.text, text, encode_name(text)))
    return [write_name("metric", key) for key in connection.scalars(statement)]


def _find_keys(
    connection: Connection, visible: Sequence[ColumnElement[bool]], text: str
) -> list[str]:
    # From one key to the next one: the index is not walked through for each run that has it.
    first = select(func.min(_run_config.c.key).label("key")).cte("keys", recursive=True)
    following = select(func.min(_run_config.c.key)).where(_run_config.c.key > first.c.key)
    keys = first.union_all(
        select(following.correlate(first).scalar_subquery()).where(first.c.key.is_not(None))
    )
    used = exists(
        select(literal(1))
        .select_from(_run_config.join(_run, _run.c.pk == _run_config.c.run_pk))
        .where(_run_config.c.key == keys.c.key, *visible)
        .correlate(keys)
    )
    is_short = func.length(keys.c.key) <= _KEY_CHARACTERS
    statement = select(keys.c.key).where(is_short, used).limit(_LOOKED_THROUGH)
    if text:
        statement = statement.where(_contains(keys.c.key, text))
    return list(connection.scalars(statement))


def _find_tags(
    connection: Connection, visible: Sequence[ColumnElement[bool]], text: str
) -> dict[str, int]:
    statement = (
        select(_run_tag.c.tag, func.count())
        .select_from(_run_tag.join(_run, _run.c.pk == _run_tag.c.run_pk))
        .where(*visible)
        .group_by(_run_tag.c.tag)
        .order_by(_run_tag.c.tag)
        .limit(_LOOKED_THROUGH)
    )
    if text:
        statement = statement.where(_contains(_run_tag.c.tag, text))
    return {tag: int(count) for tag, count in connection.execute(statement)}


def _load_values(
    connection: Connection, visible: Sequence[ColumnElement[bool]], keys: Sequence[str]
) -> dict[str, list[Any]]:
    """Values of each key: those of the newest runs, or of some older ones that have it."""
    newest = connection.scalars(
        select(_run.c.pk)
        .where(*visible)
        .order_by(_run.c.created_us.desc(), _run.c.pk.desc())
        .limit(_NEWEST_RUNS)
    ).all()
    places = {pk: place for place, pk in enumerate(newest)}
    columns = _run_config.c
    given = (columns.key, columns.type, columns.number, columns.text)
    is_short = func.coalesce(func.length(columns.text), 0) <= _SHORT_CHARACTERS
    found: dict[str, list[tuple[int, Any]]] = {key: [] for key in keys}
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        part = keys[start : start + _KEYS_AT_ONCE]
        statement = select(columns.run_pk, *given).where(
            columns.run_pk.in_(newest), columns.key.in_(part), is_short
        )
        for run_pk, key, *value in connection.execute(statement):
            found[key].append((places[run_pk], _read_value(*value)))
        missing = [key for key in part if not found[key]]
        if not missing:
            continue
        older = (
            select(
                select(*given)
                .select_from(_run_config.join(_run, _run.c.pk == columns.run_pk))
                .where(and_(columns.key == key, is_short, *visible))
                .limit(_VALUES_OF_OLD)
                .subquery()
            )
            for key in missing
        )
        for key, *value in connection.execute(union_all(*older)):
            found[key].append((0, _read_value(*value)))
    return {
        key: [value for _, value in sorted(values, key=lambda item: item[0])]
        for key, values in found.items()
    }
