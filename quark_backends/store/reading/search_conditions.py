"""Turns the tree of a search into SQL: every value that a user wrote is bound."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    FromClause,
    Table,
    and_,
    case,
    cast,
    exists,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
)

from quark_backends.store.databases.tables import METADATA
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

_run = METADATA.tables["run"]
_project = METADATA.tables["project"]
_run_tag = METADATA.tables["run_tag"]
_run_metric = METADATA.tables["run_metric"]
_run_group_member = METADATA.tables["run_group_member"]
_run_fingerprint = METADATA.tables["run_fingerprint"]
_name = METADATA.tables["name"]
_GIVEN: dict[Scope, Table] = {
    "config": METADATA.tables["run_config"],
    "field": METADATA.tables["run_field"],
}
# Tables whose column `key` has the names of a scope.
_KEYED: dict[Scope, Table] = {**_GIVEN, "fingerprint": _run_fingerprint}

_COMPARE: dict[Operator, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_STATISTICS = {"last": "last", "first": "first", "min": "low", "max": "high", "count": "count"}


class SearchConditions:
    """The tables, the condition and the order of one search.

    Every condition is true or false and never NULL, so that the opposite of
    one that a run cannot meet is true.

    Args:
        search: Its names are resolved.
        metric_names: Stored key of each of its metrics -> the key's number.
        alive: Numbers of the runs that say they are running, and are.
        at_us: The present, in microseconds since the epoch.
        store_name: Only runs that were started for a storage root of this label.
    """

    def __init__(
        self,
        search: RunSearch,
        metric_names: Mapping[str, int],
        alive: tuple[int, ...],
        at_us: int,
        store_name: str | None = None,
    ) -> None:
        self._search = search
        self._store_name = store_name
        self._alive = alive
        self._at_us = at_us
        self._joined: dict[tuple[str, str], FromClause] = {}
        self.tables: FromClause = _run
        if Field("run", "project") in search.fields:
            self.tables = _run.join(_project, _project.c.id == _run.c.project_id)
        for field in search.fields:
            place = (field.scope, field.name)
            if field.scope == "run" or place in self._joined:
                continue
            alias: FromClause
            if field.scope == "metric":
                alias = _run_metric.alias(f"metric_{len(self._joined)}")
                named = alias.c.name_pk == metric_names[field.name]
            elif field.scope == "fingerprint":
                # Two subjects may have the same key; a run is found once.
                columns = _run_fingerprint.c
                alias = (
                    select(columns.run_pk, func.min(columns.digest).label("digest"))
                    .where(columns.key == field.name)
                    .group_by(columns.run_pk)
                    .subquery(f"fingerprint_{len(self._joined)}")
                )
                named = true()
            else:
                alias = _GIVEN[field.scope].alias(f"{field.scope}_{len(self._joined)}")
                named = alias.c.key == field.name
            self._joined[place] = alias
            self.tables = self.tables.outerjoin(alias, and_(alias.c.run_pk == _run.c.pk, named))

    def make_condition(self) -> ColumnElement[bool]:
        """What must be true of a run."""
        conditions: list[ColumnElement[bool]] = [_run.c.trashed_us.is_(None)]
        if not self._search.archived:
            conditions.append(_run.c.archived_us.is_(None))
        if self._search.project is not None:
            conditions.append(is_of_project(self._search.project))
        if self._store_name is not None:
            conditions.append(_run.c.store_name == self._store_name)
        if self._search.where is not None:
            conditions.append(self._convert(self._search.where))
        return and_(*conditions)

    def make_order(self) -> list[ColumnElement[Any]]:
        """What to sort by; what is missing last, and ties newest first."""
        terms = [term for order in self._search.order_by for term in self._make_terms(order)]
        return [*terms, _run.c.created_us.desc(), _run.c.pk.desc()]

    def list_keys(self) -> list[tuple[ColumnElement[Any], bool]]:
        """Each term that is sorted by, and whether it is descending."""
        return [
            (term, order.descending)
            for order in self._search.order_by
            for term in self._list_terms(order)
        ]

    def make_bound(self, keys: Sequence[Any], created_us: int, run_id: str) -> ColumnElement[bool]:
        """Only what stands behind the run that has these keys.

        Args:
            keys: A value for each of `list_keys`.
            created_us: When the run was made.
            run_id: The run; where it is gone, what was made at its moment is left out.
        """
        created = _run.c.created_us
        last = select(func.coalesce(func.min(_run.c.pk), -1)).where(_run.c.id == run_id)
        bound = or_(
            created < created_us, and_(created == created_us, _run.c.pk < last.scalar_subquery())
        )
        if not keys:
            # Said twice, so that an index has where to begin.
            bound = and_(created <= created_us, bound)
        for (term, is_descending), key in zip(self.list_keys()[::-1], keys[::-1], strict=True):
            if key is None:
                bound = and_(term.is_(None), bound)
            else:
                beyond = term < key if is_descending else term > key
                bound = or_(beyond, term.is_(None), and_(term == key, bound))
        return bound

    def _convert(self, expression: Expression) -> ColumnElement[bool]:
        match expression:
            case And(operands):
                return and_(*(self._convert(operand) for operand in operands))
            case Or(operands):
                return or_(*(self._convert(operand) for operand in operands))
            case Not(operand):
                return not_(self._convert(operand))
            case HasTag(tag):
                return self._has_tag(_run_tag.c.tag == tag)
            case InGroup(path, below):
                return self._is_in_group(path, below)
            case IsNull(field):
                return self._is_null(field)
            case Comparison(field, sign, value):
                return self._compare(field, sign, value)
            case Membership(field, values):
                return or_(*(self._compare(field, "==", value) for value in values))
            case Contains(field, part):
                return self._contains(field, part)

    def _has_tag(self, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return exists(
            select(literal(1)).where(_run_tag.c.run_pk == _run.c.pk, *conditions).correlate(_run)
        )

    def _is_in_group(self, path: str, below: bool) -> ColumnElement[bool]:
        member = _run_group_member.c
        wanted = member.path == path
        if below:
            # What begins with the path and a slash, said so that an index finds it.
            beyond = f"{path}{chr(ord('/') + 1)}"
            wanted = or_(wanted, and_(member.path > f"{path}/", member.path < beyond))
        found = select(literal(1)).where(member.run_pk == _run.c.pk, wanted).correlate(_run)
        return exists(found)

    def _is_null(self, field: Field) -> ColumnElement[bool]:
        if field.scope in VALUE_SCOPES:
            return not_(self._is_set(field))
        if field.scope == "run" and RUN_FIELDS[field.name] == "groups":
            return _run.c.group_paths.is_(None)
        if field.scope == "run" and RUN_FIELDS[field.name] == "tags":
            return not_(self._has_tag())
        return self._find_column(field).is_(None)

    def _is_set(self, field: Field) -> ColumnElement[bool]:
        """Whether a configuration has something there."""
        kind = self._joined[field.scope, field.name].c.type
        return and_(kind.is_not(None), kind != "null")

    def _compare(self, field: Field, sign: Operator, value: Value) -> ColumnElement[bool]:
        if field.scope in VALUE_SCOPES:
            return self._compare_given(field, sign, value)
        column = self._find_column(field)
        if field.scope == "run" and RUN_FIELDS[field.name] == "time":
            return and_(column.is_not(None), _compare_time(column, sign, str(value)))
        if isinstance(value, int) and field.scope == "metric":
            value = float(value)
        return and_(column.is_not(None), _COMPARE[sign](column, value))

    def _compare_given(self, field: Field, sign: Operator, value: Value) -> ColumnElement[bool]:
        columns = self._joined[field.scope, field.name].c
        kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
        column = columns.text if kind == "text" else columns.number
        plain = value if isinstance(value, str) else float(value)
        if sign == "!=":
            different = or_(columns.type != kind, column.is_(None), column != plain)
            return and_(self._is_set(field), different)
        return and_(
            columns.type.is_not(None),
            columns.type == kind,
            column.is_not(None),
            _COMPARE[sign](column, plain),
        )

    def _contains(self, field: Field, part: str) -> ColumnElement[bool]:
        if field.scope == "metric":
            return false()
        if field.scope in VALUE_SCOPES:
            columns = self._joined[field.scope, field.name].c
            column: ColumnElement[Any] = columns.text
            is_text = and_(columns.type.is_not(None), columns.type == "text", column.is_not(None))
        else:
            column = self._find_column(field)
            is_text = column.is_not(None)
        # LIKE takes case differently in each database, and has wildcards to escape.
        return and_(is_text, func.replace(column, part, "") != column)

    def _make_terms(self, order: OrderBy) -> list[ColumnElement[Any]]:
        return [
            (term.desc() if order.descending else term.asc()).nulls_last()
            for term in self._list_terms(order)
        ]

    def _list_terms(self, order: OrderBy) -> list[ColumnElement[Any]]:
        field = order.field
        if field.scope in VALUE_SCOPES:
            columns = self._joined[field.scope, field.name].c
            kind = case(
                (columns.type == "bool", 0),
                (and_(columns.type == "number", columns.number.is_not(None)), 1),
                (columns.type == "text", 2),
            )
            return [kind, columns.number, case((columns.type == "text", columns.text))]
        return [self._find_column(field)]

    def _find_column(self, field: Field) -> ColumnElement[Any]:
        if field.scope == "metric":
            return self._joined["metric", field.name].c[_STATISTICS[field.statistic]]
        if field.scope == "fingerprint":
            return self._joined["fingerprint", field.name].c.digest
        match field.name:
            case "created" | "updated" | "ended" | "archived":
                return _run.c[f"{field.name}_us"]
            case "duration":
                return self._measure_duration()
            case "parent":
                return _run.c.parent_run_id
            case "project":
                return _project.c.name
            case "state":
                return case(
                    (_run.c.status != "running", _run.c.status),
                    (_run.c.pk.in_(self._alive), "running"),
                    else_="lost",
                )
            case "step":
                return _run.c.newest_step
            case _:
                return _run.c[field.name]

    def _measure_duration(self) -> ColumnElement[float]:
        end_us = case(
            (_run.c.ended_us.is_not(None), _run.c.ended_us),
            (
                and_(_run.c.status == "running", _run.c.pk.in_(self._alive)),
                literal(self._at_us, _run.c.created_us.type),
            ),
            else_=_run.c.heartbeat_us,
        )
        length_us = end_us - _run.c.created_us
        return case((length_us < 0, 0.0), else_=cast(length_us, Double) / 1e6)


def is_of_project(name: str) -> ColumnElement[bool]:
    """Whether a run is of a project; an index has the answer without the run's row."""
    found = select(_project.c.id).where(_project.c.name == name).scalar_subquery()
    return _run.c.project_id == found


def _compare_time(column: ColumnElement[Any], sign: Operator, text: str) -> ColumnElement[bool]:
    start_us, end_us = parse_period(text)
    match sign:
        case "==":
            return and_(column >= start_us, column < end_us)
        case "!=":
            return or_(column < start_us, column >= end_us)
        case "<":
            return column < start_us
        case "<=":
            return column < end_us
        case ">":
            return column >= end_us
        case ">=":
            return column >= start_us


def find_alive(connection: Connection) -> tuple[int, ...]:
    """Runs that say they are running, and are: what SQL cannot tell.

    There are never many: each is a process of this host, or of another one
    that was heard of in the last minute.
    """
    rows = connection.execute(
        select(_run.c.pk, _run.c.process, _run.c.heartbeat_us).where(
            _run.c.status == "running", _run.c.trashed_us.is_(None)
        )
    )
    return tuple(
        pk
        for pk, process, heartbeat_us in rows
        if find_lost_reason(
            "running", msgspec.json.decode(process, type=ProcessIdentity), heartbeat_us
        )
        is None
    )


def is_visible(project: str | None, store_name: str | None) -> list[ColumnElement[bool]]:
    """What is true of a run that is searched: its project and store, and that it is not trashed."""
    conditions: list[ColumnElement[bool]] = [_run.c.trashed_us.is_(None)]
    if project is not None:
        conditions.append(is_of_project(project))
    if store_name is not None:
        conditions.append(_run.c.store_name == store_name)
    return conditions


class StoredNames:
    """The names that the runs of a project have (see `Vocabulary`).

    Attributes:
        metric_names: Stored key -> number, of the metrics that were found.
    """

    def __init__(self, connection: Connection, project: str | None, store_name: str | None) -> None:
        self._connection = connection
        self._is_searched = is_visible(project, store_name)
        self.metric_names: dict[str, int] = {}

    def has_runs(self) -> bool:
        """Whether there is any run."""
        found = select(_run.c.pk).where(*self._is_searched).limit(1)
        return self._connection.scalar(found) is not None

    def has(self, scope: Scope, name: str) -> bool:
        """Whether a run has the name."""
        table = _KEYED.get(scope)
        if table is not None:
            return self._is_used(table, table.c.key == name)
        pk = self._connection.scalar(select(_name.c.pk).where(_name.c.text == name))
        if pk is None or not self._is_used(_run_metric, _run_metric.c.name_pk == pk):
            return False
        self.metric_names[name] = pk
        return True

    def list_names(self, scope: Scope) -> Iterable[str]:
        """All names."""
        table = _KEYED.get(scope)
        if table is not None:
            texts = self._connection.scalars(select(table.c.key).distinct()).all()
        else:
            texts = self._connection.scalars(select(_name.c.text)).all()
        return [text for text in texts if self.has(scope, text)]

    def _is_used(self, table: Any, condition: Any) -> bool:
        statement = (
            select(table.c.run_pk)
            .join_from(table, _run, table.c.run_pk == _run.c.pk)
            .where(condition, *self._is_searched)
            .limit(1)
        )
        return self._connection.scalar(statement) is not None
