"""Pages of runs and the names that they have, as SQL: no more is read of a run than is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.search_conditions import (
    STATISTICS,
    SearchConditions,
    Sql,
    StoredNames,
    contains,
    is_visible,
    join_sql,
    list_values,
    some,
    sql,
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
from quark_core.records.query import Field, Scope
from quark_core.search.fallback import describe_key, open_cursor, order_names
from quark_core.search.resolution import resolve_names, spell_name, write_name
from quark_core.system.process import ProcessIdentity, find_lost_reason

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
# Columns of a run that a run may make large; a list of texts that is large is not shown.
_CUT = {
    "notes": f"substr(run.notes, 1, {_CELL_CHARACTERS})",
    "tags": f"CASE WHEN length(run.tags) <= {_LIST_CHARACTERS} THEN run.tags ELSE '[]' END",
    "group_paths": (
        f"CASE WHEN length(run.group_paths) <= {_LIST_CHARACTERS} THEN run.group_paths END"
    ),
}


def load_page(
    connection: StoreConnection, page: PageSearch, store_name: str | None = None
) -> RunPage:
    """One page of the runs that fit, of each the chosen columns; see `SupportsPages`.

    Args:
        connection: The store, inside of a transaction that reads.
        page: What is asked for.
        store_name: Only runs that were started for a storage root of this label.

    Raises:
        SchemaValidationError: A name that no run of the searched project has, or a cursor of
            another search.
    """
    search = page.search
    cursor = open_cursor(page)
    names = StoredNames(connection, search.project, store_name)
    resolved = resolve_names(search, names)
    if resolved is None:
        return RunPage(columns=page.column_texts, rows=(), count=0 if page.count else None)
    at_us = now_us() if cursor is None else cursor.at_us
    own = (names.metric_names, at_us, store_name)
    conditions = SearchConditions(connection, resolved, *own)
    keys = [Sql("run.pk, run.id, run.created_us"), *(key for key, _ in conditions.list_keys())]
    condition = conditions.make_condition()
    if cursor is not None:
        bound = conditions.make_bound(cursor.keys, cursor.created_us, cursor.run_id)
        condition = sql("{} AND {}", condition, bound)
    statement = sql(
        f"SELECT {{}} FROM {{}} WHERE {{}} ORDER BY {{}} LIMIT {page.limit + 1}",
        *(join_sql(", ", keys), conditions.tables, condition, conditions.make_order()),
    )
    found = statement.ask(connection).fetchall()
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
    count = None
    if page.count:
        unordered = SearchConditions(connection, replace(resolved, order_by=()), *own)
        counted = sql(
            "SELECT count(*) FROM {} WHERE {}", unordered.tables, unordered.make_condition()
        )
        (count,) = counted.ask(connection).fetchone()
    return RunPage(
        columns=page.column_texts,
        rows=tuple(rows),
        next=following,
        count=count,
    )


class _Cells:
    """What the columns of a page show, in a statement for each sort of column.

    Args:
        connection: Inside a transaction.
        run_pks: The runs of the page.
        columns: The columns.
        at_us: The present.
    """

    def __init__(
        self,
        connection: StoreConnection,
        run_pks: Sequence[int],
        columns: Sequence[Field],
        at_us: int,
    ) -> None:
        self._connection = connection
        self._columns = columns
        self._at_us = at_us
        self._runs: dict[int, Mapping[str, Any]] = {}
        self._metrics: dict[tuple[int, str], Mapping[str, Any]] = {}
        # By run, scope and name.
        self._given: dict[tuple[int, str, str], Any] = {}
        self._long: dict[int, list[tuple[str, str, str, bool]]] = {}
        fields = {
            scope: [field.name for field in columns if field.scope == scope]
            for scope in get_args(Scope)
        }
        for part in cut_numbers(run_pks):
            if fields["run"]:
                self._load_runs(connection, part, fields["run"])
            for scope, table in (("config", "run_config"), ("field", "run_field")):
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
            beginning = sql(
                f"SELECT substr(text, 1, {_CELL_CHARACTERS + 1}) FROM {table}"
                " WHERE run_pk = {} AND key = {}",
                *(run_pk, key),
            )
            found = str(beginning.ask(self._connection).fetchone()[0] or "")
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
                value = row[STATISTICS[field.statistic]]
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

    def _load_runs(
        self, connection: StoreConnection, part: Sequence[int], names: list[str]
    ) -> None:
        wanted = {column for name in names for column in _RUN_COLUMNS.get(name, (name,))}
        columns = ["pk", *sorted(wanted)]
        texts = [_CUT.get(column, f"run.{column}") for column in columns]
        tables = "run"
        if "project" in names:
            columns.append("project_name")
            texts.append("project.name")
            tables = "run JOIN project ON project.id = run.project_id"
        statement = f"SELECT {', '.join(texts)} FROM {tables} WHERE run.pk IN {{}}"
        for row in sql(statement, list_values(part)).ask(connection):
            self._runs[row[0]] = dict(zip(columns, row, strict=True))

    def _load_given(
        self,
        connection: StoreConnection,
        part: Sequence[int],
        scope: str,
        table: str,
        keys: list[str],
    ) -> None:
        short = f"CASE WHEN length(text) <= {_SHORT_CHARACTERS} THEN text END"
        statement = sql(
            f"SELECT run_pk, key, coalesce(length(text), 0), type, number, {short} FROM {table}"
            " WHERE run_pk IN {} AND key IN {}",
            *(list_values(part), list_values(sorted(set(keys)))),
        )
        for run_pk, key, characters, kind, *value in statement.ask(connection):
            if characters > _SHORT_CHARACTERS:
                self._long.setdefault(run_pk, []).append((scope, table, key, kind == "json"))
            else:
                self._given[run_pk, scope, key] = _read_value(kind, *value)

    def _load_fingerprints(
        self, connection: StoreConnection, part: Sequence[int], keys: list[str]
    ) -> None:
        statement = sql(
            f"SELECT run_pk, key, substr(min(digest), 1, {_SHORT_CHARACTERS}) FROM run_fingerprint"
            " WHERE run_pk IN {} AND key IN {} GROUP BY run_pk, key",
            *(list_values(part), list_values(sorted(set(keys)))),
        )
        for run_pk, key, digest in statement.ask(connection):
            self._given[run_pk, "fingerprint", key] = digest

    def _load_metrics(self, connection: StoreConnection, part: Sequence[int]) -> None:
        fields = [field for field in self._columns if field.scope == "metric"]
        texts = sorted({name for field in fields for name in spell_name(field)})
        found = sql("SELECT pk, text FROM name WHERE text IN {}", list_values(texts))
        names: dict[int, str] = dict(found.ask(connection).fetchall())
        if not names:
            return
        columns = sorted({STATISTICS[field.statistic] for field in fields})
        statement = sql(
            f"SELECT run_pk, name_pk, {', '.join(columns)} FROM run_metric"
            " WHERE run_pk IN {} AND name_pk IN {}",
            *(list_values(part), list_values(sorted(names))),
        )
        for run_pk, name_pk, *values in statement.ask(connection):
            self._metrics[run_pk, names[name_pk]] = dict(zip(columns, values, strict=True))


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
    connection: StoreConnection,
    project: str | None,
    text: str,
    limit: int,
    store_name: str | None = None,
) -> RunNames:
    """The names that runs have and that have a text in them; see `SupportsPages`."""
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


def _contains(column: str, *texts: str) -> Sql:
    """Whether a column has one of some texts in it; true where none of them says anything."""
    lower = Sql(f"lower({column})")
    wanted = [contains(lower, text.lower()) for text in texts if text]
    return some(*wanted) if wanted else Sql("1 = 1")


def _find_metrics(connection: StoreConnection, visible: Sql, text: str) -> list[str]:
    found = sql(
        "SELECT name.text FROM name WHERE EXISTS (SELECT 1 FROM run_metric"
        " JOIN run ON run.pk = run_metric.run_pk WHERE run_metric.name_pk = name.pk AND {})"
        f" AND {{}} ORDER BY name.text LIMIT {_LOOKED_THROUGH}",
        *(visible, _contains("name.text", text, encode_name(text) if text else "")),
    )
    return [write_name("metric", key) for (key,) in found.ask(connection)]


def _find_keys(connection: StoreConnection, visible: Sql, text: str) -> list[str]:
    # From one key to the next one: the index is not walked through for each run that has it.
    found = sql(
        "WITH RECURSIVE keys (key) AS (SELECT min(run_config.key) FROM run_config UNION ALL"
        " SELECT (SELECT min(run_config.key) FROM run_config WHERE run_config.key > keys.key)"
        " FROM keys WHERE keys.key IS NOT NULL)"
        f" SELECT keys.key FROM keys WHERE length(keys.key) <= {_KEY_CHARACTERS}"
        " AND EXISTS (SELECT 1 FROM run_config JOIN run ON run.pk = run_config.run_pk"
        " WHERE run_config.key = keys.key AND {}) AND {}"
        f" LIMIT {_LOOKED_THROUGH}",
        *(visible, _contains("keys.key", text)),
    )
    return [key for (key,) in found.ask(connection)]


def _find_tags(connection: StoreConnection, visible: Sql, text: str) -> dict[str, int]:
    found = sql(
        "SELECT run_tag.tag, count(*) FROM run_tag JOIN run ON run.pk = run_tag.run_pk"
        " WHERE {} AND {} GROUP BY run_tag.tag ORDER BY run_tag.tag"
        f" LIMIT {_LOOKED_THROUGH}",
        *(visible, _contains("run_tag.tag", text)),
    )
    return dict(found.ask(connection).fetchall())


def _load_values(
    connection: StoreConnection, visible: Sql, keys: Sequence[str]
) -> dict[str, list[Any]]:
    """Values of each key: those of the newest runs, or of some older ones that have it."""
    runs = sql(
        "SELECT run.pk FROM run WHERE {} ORDER BY run.created_us DESC, run.pk DESC"
        f" LIMIT {_NEWEST_RUNS}",
        visible,
    )
    places = {pk: place for place, (pk,) in enumerate(runs.ask(connection))}
    given = "run_config.key, run_config.type, run_config.number, run_config.text"
    is_short = f"coalesce(length(run_config.text), 0) <= {_SHORT_CHARACTERS}"
    found: dict[str, list[tuple[int, Any]]] = {key: [] for key in keys}
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        part = keys[start : start + _KEYS_AT_ONCE]
        newest = sql(
            f"SELECT run_pk, {given} FROM run_config"
            f" WHERE run_pk IN {{}} AND key IN {{}} AND {is_short}",
            *(list_values(places), list_values(part)),
        )
        for run_pk, key, *value in newest.ask(connection) if places else ():
            found[key].append((places[run_pk], _read_value(*value)))
        missing = [key for key in part if not found[key]]
        if not missing:
            continue
        older = (
            sql(
                f"SELECT * FROM (SELECT {given} FROM run_config"
                " JOIN run ON run.pk = run_config.run_pk"
                f" WHERE run_config.key = {{}} AND {is_short} AND {{}}"
                f" LIMIT {_VALUES_OF_OLD}) AS older_{place}",
                *(key, visible),
            )
            for place, key in enumerate(missing)
        )
        for key, *value in join_sql(" UNION ALL ", older).ask(connection):
            found[key].append((0, _read_value(*value)))
    return {
        key: [value for _, value in sorted(values, key=lambda item: item[0])]
        for key, values in found.items()
    }
