"""Answers a search in Python, for stores that cannot: the meaning of the language, in one place.

A store that searches by itself must give the same answers; a test holds the
embedded store to that.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from quark_core.backends.run_summary import RunSummary
from quark_core.errors import SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.base import now_us
from quark_core.records.json_object import flatten_json
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
    Scope,
    Value,
)
from quark_core.search.resolution import RUN_FIELDS, RunFieldType

_ISO = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d\d)(?:-(?P<day>\d\d)(?:[T ](?P<hour>\d\d)"
    r"(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,6}))?)?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.IGNORECASE | re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LENGTHS = (
    ("second", timedelta(seconds=1)),
    ("minute", timedelta(minutes=1)),
    ("hour", timedelta(hours=1)),
    ("day", timedelta(days=1)),
)


class Period(NamedTuple):
    """From `start_us` to before `end_us`, in microseconds since the epoch, UTC."""

    start_us: int
    end_us: int


@lru_cache(maxsize=1024)
def parse_period(text: str) -> Period:
    """What an ISO 8601 text stands for: `2026-11-01` is a day, `2026-11` a month.

    Without an offset it is UTC. A moment is before a period, in it, or after it.

    Raises:
        ValueError: Not a year, month, day or time in ISO 8601.
    """
    found = _ISO.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"not ISO 8601: {text!r}")
    parts: dict[str, str | None] = found.groupdict()

    def read(name: str, default: int) -> int:
        return int(parts[name] or default)

    moment = datetime(
        read("year", 1),
        read("month", 1),
        read("day", 1),
        read("hour", 0),
        read("minute", 0),
        read("second", 0),
        int((parts["fraction"] or "").ljust(6, "0")),
        UTC,
    )
    start_us = (moment - _EPOCH) // _MICROSECOND - _find_offset(parts["zone"]) // _MICROSECOND
    return Period(start_us, start_us + _find_length(parts, moment) // _MICROSECOND)


def _find_offset(zone: str | None) -> timedelta:
    if zone is None or zone in "Zz":
        return timedelta(0)
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"unknown time offset: {zone}")
    offset = timedelta(hours=hours, minutes=minutes)
    return -offset if zone[0] == "-" else offset


def _find_length(parts: dict[str, str | None], moment: datetime) -> timedelta:
    fraction = parts["fraction"]
    if fraction is not None:
        return timedelta(microseconds=10 ** (6 - len(fraction)))
    for name, length in _LENGTHS:
        if parts[name] is not None:
            return length
    months = 1 if parts["month"] is not None else 12
    following = moment.month - 1 + months
    year = moment.year + following // 12
    if year > 9999:
        return timedelta(days=31 if months == 1 else 365)
    return moment.replace(year=year, month=following % 12 + 1) - moment


_COMPARE: dict[Operator, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_STATISTICS = {"last": "last", "first": "first", "min": "low", "max": "high", "count": "count"}
_TYPES: dict[type, int] = {bool: 0, float: 1, int: 1, str: 2}


def evaluate(expression: Expression, run: RunSummary, *, at_us: int | None = None) -> bool:
    """Whether an expression is true of a run.

    Args:
        expression: Its names are the stored ones (see `resolve_names`).
        run: The run.
        at_us: The present, for how long a run has taken; by default the clock's.
    """
    return _Run(run, now_us() if at_us is None else at_us).fits(expression)


def find_value(field: Field, run: RunSummary, *, at_us: int | None = None) -> Any:
    """What a run has in a field, or None; a time is in microseconds since the epoch."""
    return _Run(run, now_us() if at_us is None else at_us).find(field)


def find_cell(field: Field, run: RunSummary, *, at_us: int | None = None) -> Any:
    """What a column of a page shows of a run; see `RunRow`."""
    found = find_value(field, run, at_us=at_us)
    if found is None and field.scope == "metric" and field.name in run.metrics:
        return math.nan
    return list(found) if isinstance(found, tuple) and field.scope in VALUE_SCOPES else found


def find_keys(
    order_by: Sequence[OrderBy], run: RunSummary, *, at_us: int | None = None
) -> list[Any]:
    """What a run is sorted by, as a cursor of a page keeps it; see `PageCursor`."""
    keys: list[Any] = []
    for order in order_by:
        found = _sort_key(find_value(order.field, run, at_us=at_us))
        if order.field.scope not in VALUE_SCOPES:
            keys.append(None if found is None else found[1])
        elif found is None:
            keys += [None, None, None]
        else:
            kind, value = found
            is_text = isinstance(value, str)
            keys += [kind, None if is_text else float(value), value if is_text else None]
    return keys


def sort_runs(
    runs: Iterable[RunSummary], order_by: Sequence[OrderBy], *, at_us: int | None = None
) -> list[RunSummary]:
    """Runs in order; those that tie stay as they were, and those that lack a field come last."""
    present_us = now_us() if at_us is None else at_us
    found = [(_Run(run, present_us), run) for run in runs]
    for order in reversed(order_by):
        keys = [_sort_key(values.find(order.field)) for values, _ in found]
        with_key = [(key, pair) for key, pair in zip(keys, found, strict=True) if key is not None]
        with_key.sort(key=lambda item: item[0], reverse=order.descending)
        without = [pair for key, pair in zip(keys, found, strict=True) if key is None]
        found = [pair for _, pair in with_key] + without
    return [run for _, run in found]


class FieldValues:
    """The fields of one thing that is searched for, which an expression is true of or not.

    Attributes:
        TYPES: Name of a field of the scope `run` -> what it holds.
    """

    TYPES: ClassVar[Mapping[str, RunFieldType]]

    def find(self, field: Field) -> Any:
        """The value of a field, or None."""
        raise NotImplementedError

    def fits(self, expression: Expression) -> bool:
        """Whether an expression is true."""
        match expression:
            case And(operands):
                return all(self.fits(operand) for operand in operands)
            case Or(operands):
                return any(self.fits(operand) for operand in operands)
            case Not(operand):
                return not self.fits(operand)
            case IsNull(field):
                return self.find(field) is None
            case Comparison(field, sign, value):
                return self._compare(field, sign, value)
            case Membership(field, values):
                return any(self._compare(field, "==", value) for value in values)
            case Contains(field, part):
                found = self.find(field)
                return isinstance(found, str) and part in found
            case _:
                raise SchemaValidationError("where: tags and groups cannot be used here")

    def _compare(self, field: Field, sign: Operator, value: Value) -> bool:
        found = self.find(field)
        if found is None:
            return False
        if field.scope == "run" and self.TYPES[field.name] == "time":
            return compare_time(found, sign, str(value))
        return compare_values(found, sign, value)


class _Run(FieldValues):
    """The values of one run."""

    TYPES = RUN_FIELDS

    def __init__(self, run: RunSummary, at_us: int) -> None:
        self._run = run
        self._at_us = at_us
        self._given: dict[Scope, dict[str, Any]] = {}

    def fits(self, expression: Expression) -> bool:
        match expression:
            case HasTag(tag):
                return tag in self._run.stored.run.tags
            case InGroup(path, below):
                groups = self._run.stored.run.groups
                return path in groups or (below and any(g.startswith(f"{path}/") for g in groups))
            case _:
                return super().fits(expression)

    def find(self, field: Field) -> Any:
        """The value of a field, or None."""
        if field.scope == "run":
            return self._find_run_value(field.name)
        if field.scope in VALUE_SCOPES:
            return self._find_given(field.scope).get(field.name)
        if field.scope == "fingerprint":
            return self._run.fingerprints.get(field.name)
        metric = self._run.metrics.get(field.name)
        return None if metric is None else getattr(metric, _STATISTICS[field.statistic])

    def _find_given(self, scope: Scope) -> dict[str, Any]:
        """Configuration or fields, flattened."""
        if scope not in self._given:
            values = self._run.config if scope == "config" else self._run.stored.fields
            self._given[scope] = dict(flatten_values(values))
        return self._given[scope]

    def _compare(self, field: Field, sign: Operator, value: Value) -> bool:
        if isinstance(value, int) and not isinstance(value, bool) and field.scope != "run":
            value = float(value)
        return super()._compare(field, sign, value)

    def _find_run_value(self, name: str) -> Any:
        stored = self._run.stored
        run = stored.run
        match name:
            case "created" | "updated" | "archived" | "ended":
                moment = getattr(run, f"{name}_at")
                return None if moment is None else parse_time(moment)
            case "duration":
                return self._measure_duration()
            case "parent":
                return run.parent_run_id
            case "project":
                return stored.project.name
            case "state":
                return stored.state
            case "step":
                return self._run.newest_step
            case "tags" | "groups":
                return getattr(run, name) or None
            case _ if name.endswith("_digest"):
                return getattr(stored.digests, name.removesuffix("_digest"))
            case _:
                return getattr(run, name)

    def _measure_duration(self) -> float:
        stored = self._run.stored
        end = stored.run.ended_at
        if end is None and stored.state != "running":
            end = stored.heartbeat_at
        end_us = self._at_us if end is None else parse_time(end)
        return max(0, end_us - parse_time(stored.run.created_at)) / 1e6


def compare_values(found: Any, sign: Operator, value: Value) -> bool:
    """Whether a comparison is true of a value; one of another type is different, and no more."""
    if _TYPES.get(type(found)) != _TYPES[type(value)]:
        return sign == "!="
    return _COMPARE[sign](found, value)


def compare_time(found_us: int, sign: Operator, text: str) -> bool:
    """Whether a comparison is true of a moment, in microseconds since the epoch."""
    start_us, end_us = parse_period(text)
    match sign:
        case "==":
            return start_us <= found_us < end_us
        case "!=":
            return not start_us <= found_us < end_us
        case "<":
            return found_us < start_us
        case "<=":
            return found_us < end_us
        case ">":
            return found_us >= end_us
        case ">=":
            return found_us >= start_us


def _sort_key(value: Any) -> tuple[int, Any] | None:
    """What a value is sorted by, or None for what stands last."""
    kind = _TYPES.get(type(value))
    if kind is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return kind, value


def flatten_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and value of each leaf; lists and empty mappings are leaves.

    Keys of nested mappings are joined by a dot. An integer beyond what a
    float can hold becomes a text.
    """
    for key, value in flatten_json(values):
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                yield key, float(value)
            except OverflowError:
                yield key, str(value)
        else:
            yield key, value
