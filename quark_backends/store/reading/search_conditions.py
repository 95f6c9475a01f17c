"""Turns the tree of a search into SQL: every value that a user wrote is bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quark_backends.store.databases.connection import StoreConnection, StoreCursor
from quark_core.records.query import (
    VALUE_SCOPES,
    And,
    Comparison,
    Contains,
    Expression,
    Field,
    HasTag,
    InGroup,
    IsNull,
    Membership,
    Not,
    Operator,
    Or,
    OrderBy,
    RunSearch,
    Scope,
    Value,
)
from quark_core.search.evaluation import parse_period
from quark_core.search.resolution import RUN_FIELDS
from quark_core.system.process import ProcessIdentity, find_lost_reason

_GIVEN: dict[Scope, str] = {"config": "run_config", "field": "run_field"}
# Tables whose column `key` has the names of a scope.
_KEYED: dict[Scope, str] = {**_GIVEN, "fingerprint": "run_fingerprint"}

STATISTICS = {"last": "last", "first": "first", "min": "low", "max": "high", "count": "count"}
"""Figure of a metric -> its column."""


class Sql(NamedTuple):
    """A piece of a statement, and the values that it binds."""

    text: str
    values: tuple[Any, ...] = ()

    def ask(self, connection: StoreConnection) -> StoreCursor:
        """Run it as a statement."""
        return connection.execute(self.text, self.values)


def sql(text: str, *parts: Any) -> Sql:
    """A piece out of a text with `{}` for each part: a piece, or a value that is bound."""
    pieces = [part if isinstance(part, Sql) else Sql("?", (part,)) for part in parts]
    values = tuple(value for piece in pieces for value in piece.values)
    return Sql(text.format(*(piece.text for piece in pieces)), values)


def join_sql(word: str, parts: Iterable[Sql]) -> Sql:
    """Pieces with a word, such as a comma, between them."""
    pieces = list(parts)
    return sql(word.join(["{}"] * len(pieces)), *pieces)


def every(*conditions: Sql) -> Sql:
    """Whether all of some conditions are true."""
    return sql("({})", join_sql(" AND ", conditions))


def some(*conditions: Sql) -> Sql:
    """Whether one of some conditions is true."""
    return sql("({})", join_sql(" OR ", conditions)) if conditions else Sql("1 = 0")


def list_values(values: Iterable[Any]) -> Sql:
    """Values for `IN`, in parentheses; there is at least one."""
    return sql("({})", join_sql(", ", (Sql("?", (value,)) for value in values)))


class SearchConditions:
    """The tables, the condition and the order of one search.

    Every condition is true or false and never NULL, so that the opposite of
    one that a run cannot meet is true.

    Args:
        connection: Inside of a transaction that reads.
        search: Its names are resolved.
        metric_names: Stored key of each of its metrics -> the key's number.
        at_us: The present, in microseconds since the epoch.
        store_name: Only runs that were started for a storage root of this label.
    """

    def __init__(
        self,
        connection: StoreConnection,
        search: RunSearch,
        metric_names: Mapping[str, int],
        at_us: int,
        store_name: str | None = None,
    ) -> None:
        self._search = search
        self._store_name = store_name
        asks_liveness = any(
            field.scope == "run" and field.name in ("state", "duration") for field in search.fields
        )
        alive = _find_alive(connection) if asks_liveness else ()
        self._is_alive = sql("run.pk IN {}", list_values(alive)) if alive else Sql("1 = 0")
        self._at_us = at_us
        self._joined: dict[tuple[str, str], str] = {}
        self.tables = Sql("run")
        if Field("run", "project") in search.fields:
            self.tables = Sql("run JOIN project ON project.id = run.project_id")
        for field in search.fields:
            place = (field.scope, field.name)
            if field.scope == "run" or place in self._joined:
                continue
            alias = self._joined[place] = f"{field.scope}_{len(self._joined)}"
            if field.scope == "metric":
                joined = sql(
                    f"run_metric AS {alias} ON {alias}.name_pk = {{}} AND", metric_names[field.name]
                )
            elif field.scope == "fingerprint":
                # Two subjects may have the same key; a run is found once.
                joined = sql(
                    "(SELECT run_pk, min(digest) AS digest FROM run_fingerprint WHERE key = {}"
                    f" GROUP BY run_pk) AS {alias} ON",
                    field.name,
                )
            else:
                joined = sql(
                    f"{_GIVEN[field.scope]} AS {alias} ON {alias}.key = {{}} AND", field.name
                )
            self.tables = sql(f"{{}} LEFT JOIN {{}} {alias}.run_pk = run.pk", self.tables, joined)

    def make_condition(self) -> Sql:
        """What must be true of a run."""
        conditions = [is_visible(self._search.project, self._store_name)]
        if not self._search.archived:
            conditions.append(Sql("run.archived_us IS NULL"))
        if self._search.where is not None:
            conditions.append(self._convert(self._search.where))
        return every(*conditions)

    def make_order(self) -> Sql:
        """What to sort by; what is missing last, and ties newest first."""
        terms = [
            sql(f"{{}} {'DESC' if is_descending else 'ASC'} NULLS LAST", term)
            for term, is_descending in self.list_keys()
        ]
        return join_sql(", ", [*terms, Sql("run.created_us DESC, run.pk DESC")])

    def list_keys(self) -> list[tuple[Sql, bool]]:
        """Each term that is sorted by, and whether it is descending."""
        return [
            (term, order.descending)
            for order in self._search.order_by
            for term in self._list_terms(order)
        ]

    def make_bound(self, keys: Sequence[Any], created_us: int, run_id: str) -> Sql:
        """Only what stands behind the run that has these keys.

        Args:
            keys: A value for each of `list_keys`.
            created_us: When the run was made.
            run_id: The run; where it is gone, what was made at its moment is left out.
        """
        bound = sql(
            "(run.created_us < {} OR run.created_us = {} AND run.pk <"
            " (SELECT coalesce(min(pk), -1) FROM run AS last WHERE last.id = {}))",
            created_us,
            created_us,
            run_id,
        )
        if not keys:
            # Said twice, so that an index has where to begin.
            bound = sql("(run.created_us <= {} AND {})", created_us, bound)
        for (term, is_descending), key in zip(self.list_keys()[::-1], keys[::-1], strict=True):
            if key is None:
                bound = sql("({} IS NULL AND {})", term, bound)
            else:
                sign = "<" if is_descending else ">"
                bound = sql(
                    f"({{}} {sign} {{}} OR {{}} IS NULL OR ({{}} = {{}} AND {{}}))",
                    *(term, key, term, term, key, bound),
                )
        return bound

    def _convert(self, expression: Expression) -> Sql:
        match expression:
            case And(operands):
                return every(*map(self._convert, operands))
            case Or(operands):
                return some(*map(self._convert, operands))
            case Not(operand):
                return sql("NOT ({})", self._convert(operand))
            case HasTag(tag):
                return sql(f"EXISTS ({_OWN_TAGS} AND run_tag.tag = {{}})", tag)
            case InGroup(path, below):
                return _is_in_group(path, below)
            case IsNull(field):
                return self._is_null(field)
            case Comparison(field, sign, value):
                return self._compare(field, sign, value)
            case Membership(field, values):
                return some(*(self._compare(field, "==", value) for value in values))
            case Contains(field, part):
                return self._contains(field, part)

    def _is_null(self, field: Field) -> Sql:
        if field.scope in VALUE_SCOPES:
            return sql("NOT ({})", self._is_set(field))
        if field.scope == "run" and RUN_FIELDS[field.name] == "groups":
            return Sql("run.group_paths IS NULL")
        if field.scope == "run" and RUN_FIELDS[field.name] == "tags":
            return Sql(f"NOT EXISTS ({_OWN_TAGS})")
        return sql("{} IS NULL", self._find_column(field))

    def _is_set(self, field: Field) -> Sql:
        """Whether a configuration has something there."""
        alias = self._joined[field.scope, field.name]
        return Sql(f"({alias}.type IS NOT NULL AND {alias}.type <> 'null')")

    def _compare(self, field: Field, sign: Operator, value: Value) -> Sql:
        if field.scope in VALUE_SCOPES:
            return self._compare_given(field, sign, value)
        column = self._find_column(field)
        if field.scope == "run" and RUN_FIELDS[field.name] == "time":
            found = _compare_time(column, sign, str(value))
        else:
            if isinstance(value, int) and field.scope == "metric":
                value = float(value)
            found = _compare(column, sign, value)
        return sql("({} IS NOT NULL AND {})", column, found)

    def _compare_given(self, field: Field, sign: Operator, value: Value) -> Sql:
        alias = self._joined[field.scope, field.name]
        kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
        column = Sql(f"{alias}.{'text' if kind == 'text' else 'number'}")
        found = _compare(column, sign, value if isinstance(value, str) else float(value))
        if sign == "!=":
            different = sql(f"({alias}.type <> '{kind}' OR {{}} IS NULL OR {{}})", column, found)
            return every(self._is_set(field), different)
        return sql(
            f"({alias}.type IS NOT NULL AND {alias}.type = '{kind}' AND {{}} IS NOT NULL AND {{}})",
            column,
            found,
        )

    def _contains(self, field: Field, part: str) -> Sql:
        if field.scope == "metric":
            return Sql("1 = 0")
        is_text = Sql("1 = 1")
        if field.scope in VALUE_SCOPES:
            alias = self._joined[field.scope, field.name]
            column = Sql(f"{alias}.text")
            is_text = Sql(f"{alias}.type IS NOT NULL AND {alias}.type = 'text'")
        else:
            column = self._find_column(field)
        return every(is_text, sql("{} IS NOT NULL", column), contains(column, part))

    def _list_terms(self, order: OrderBy) -> list[Sql]:
        field = order.field
        if field.scope not in VALUE_SCOPES:
            return [self._find_column(field)]
        alias = self._joined[field.scope, field.name]
        return [
            Sql(
                f"CASE WHEN {alias}.type = 'bool' THEN 0"
                f" WHEN {alias}.type = 'number' AND {alias}.number IS NOT NULL THEN 1"
                f" WHEN {alias}.type = 'text' THEN 2 END"
            ),
            Sql(f"{alias}.number"),
            Sql(f"CASE WHEN {alias}.type = 'text' THEN {alias}.text END"),
        ]

    def _find_column(self, field: Field) -> Sql:
        if field.scope == "metric":
            return Sql(f"{self._joined['metric', field.name]}.{STATISTICS[field.statistic]}")
        if field.scope == "fingerprint":
            return Sql(f"{self._joined['fingerprint', field.name]}.digest")
        match field.name:
            case "created" | "updated" | "ended" | "archived":
                return Sql(f"run.{field.name}_us")
            case "duration":
                return self._measure_duration()
            case "parent":
                return Sql("run.parent_run_id")
            case "project":
                return Sql("project.name")
            case "state":
                return sql(
                    "CASE WHEN run.status <> 'running' THEN run.status"
                    " WHEN {} THEN 'running' ELSE 'lost' END",
                    self._is_alive,
                )
            case "step":
                return Sql("run.newest_step")
            case _:
                return Sql(f"run.{field.name}")

    def _measure_duration(self) -> Sql:
        length_us = sql(
            "(CASE WHEN run.ended_us IS NOT NULL THEN run.ended_us"
            " WHEN run.status = 'running' AND {} THEN {} ELSE run.heartbeat_us END"
            " - run.created_us)",
            *(self._is_alive, self._at_us),
        )
        return sql(
            "CASE WHEN {} < 0 THEN 0.0 ELSE CAST({} AS DOUBLE PRECISION) / 1000000.0 END",
            *(length_us, length_us),
        )


_OWN_TAGS = "SELECT 1 FROM run_tag WHERE run_tag.run_pk = run.pk"


def _compare(column: Sql, sign: Operator, value: Value) -> Sql:
    return sql(f"{{}} {'=' if sign == '==' else sign} {{}}", column, value)


def contains(column: Sql, part: str) -> Sql:
    """Whether a text has another one in it."""
    # LIKE takes case differently in each database, and has wildcards to escape.
    return sql("replace({}, {}, '') <> {}", column, part, column)


def _is_in_group(path: str, below: bool) -> Sql:
    wanted = sql("run_group_member.path = {}", path)
    if below:
        # What begins with the path and a slash, said so that an index finds it.
        beyond = f"{path}{chr(ord('/') + 1)}"
        inside = "run_group_member.path > {} AND run_group_member.path < {}"
        wanted = some(wanted, sql(inside, f"{path}/", beyond))
    own = "SELECT 1 FROM run_group_member WHERE run_group_member.run_pk = run.pk"
    return sql(f"EXISTS ({own} AND {{}})", wanted)


def _compare_time(column: Sql, sign: Operator, text: str) -> Sql:
    start_us, end_us = parse_period(text)
    match sign:
        case "==":
            return sql("({} >= {} AND {} < {})", column, start_us, column, end_us)
        case "!=":
            return sql("({} < {} OR {} >= {})", column, start_us, column, end_us)
        case "<" | ">=":
            return sql(f"{{}} {sign} {{}}", column, start_us)
        case "<=":
            return sql("{} < {}", column, end_us)
        case ">":
            return sql("{} >= {}", column, end_us)


def _find_alive(connection: StoreConnection) -> tuple[int, ...]:
    """Runs that say they are running, and are: what SQL cannot tell.

    There are never many: each is a process of this host, or of another one
    that was heard of in the last minute.
    """
    rows = connection.execute(
        "SELECT pk, process, heartbeat_us FROM run WHERE status = 'running' AND trashed_us IS NULL"
    )
    return tuple(
        pk
        for pk, process, heartbeat_us in rows
        if find_lost_reason(
            "running", msgspec.json.decode(process, type=ProcessIdentity), heartbeat_us
        )
        is None
    )


def is_visible(project: str | None, store_name: str | None) -> Sql:
    """What is true of a run that is searched: its project and store, and that it is not trashed."""
    conditions = [Sql("run.trashed_us IS NULL")]
    if project is not None:
        # An index has the answer without the run's row.
        own = "run.project_id = (SELECT own.id FROM project AS own WHERE own.name = {})"
        conditions.append(sql(own, project))
    if store_name is not None:
        conditions.append(sql("run.store_name = {}", store_name))
    return every(*conditions)


class StoredNames:
    """The names that the runs of a project have (see `Vocabulary`).

    Attributes:
        metric_names: Stored key -> number, of the metrics that were found.
    """

    def __init__(
        self, connection: StoreConnection, project: str | None, store_name: str | None
    ) -> None:
        self._connection = connection
        self._is_searched = is_visible(project, store_name)
        self.metric_names: dict[str, int] = {}

    def has_runs(self) -> bool:
        """Whether there is any run."""
        found = sql("SELECT run.pk FROM run WHERE {} LIMIT 1", self._is_searched)
        return found.ask(self._connection).fetchone() is not None

    def has(self, scope: Scope, name: str) -> bool:
        """Whether a run has the name."""
        table = _KEYED.get(scope)
        if table is not None:
            return self._is_used(table, "key", name)
        row = sql("SELECT pk FROM name WHERE text = {}", name).ask(self._connection).fetchone()
        if row is None or not self._is_used("run_metric", "name_pk", row[0]):
            return False
        self.metric_names[name] = row[0]
        return True

    def list_names(self, scope: Scope) -> Iterable[str]:
        """All names."""
        table = _KEYED.get(scope)
        texts = f"DISTINCT key FROM {table}" if table is not None else "text FROM name"
        found = self._connection.execute(f"SELECT {texts}").fetchall()
        return [text for (text,) in found if self.has(scope, text)]

    def _is_used(self, table: str, column: str, value: str | int) -> bool:
        found = sql(
            f"SELECT 1 FROM {table} JOIN run ON run.pk = {table}.run_pk"
            f" WHERE {table}.{column} = {{}} AND {{}} LIMIT 1",
            *(value, self._is_searched),
        )
        return found.ask(self._connection).fetchone() is not None
