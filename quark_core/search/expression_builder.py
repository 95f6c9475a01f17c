"""Makes the tree of a search out of what the grammar has found, and checks its types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, NoReturn, get_args

from lark import Token, Transformer_NonRecursive

from quark_core.records.query import (
    And,
    Comparison,
    Contains,
    Expression,
    Field,
    HasTag,
    InGroup,
    IsNull,
    Membership,
    Mismatch,
    Not,
    Operator,
    Or,
    Place,
    Scope,
    Statistic,
    Value,
)
from quark_core.search.evaluation import parse_period
from quark_core.search.resolution import (
    ALIASES,
    CHOICES,
    RUN_FIELDS,
    RunFieldType,
    point_at,
    suggest_names,
)

_INT64_MAX = 2**63 - 1
_MIRRORED: dict[str, Operator] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_WORDS: dict[str, Value | None] = {"TRUE": True, "FALSE": False, "NULL": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_PREFIXES: tuple[Scope, ...] = ("config", "field", "fingerprint", "metric", "run")
_SPOKEN: dict[Scope, str] = {
    "config": "configuration",
    "field": "fields",
    "fingerprint": "fingerprints",
}


class _Given(NamedTuple):
    """A value as it was written."""

    value: Value | None
    token: Token


class ExpressionBuilder(Transformer_NonRecursive[Token, Any]):
    """One method per rule of the grammar; each gets what its parts became.

    Args:
        place: The text that is read.

    Raises:
        SchemaValidationError: A value of a wrong type, or a field or a function
            that does not exist; as the cause of lark's VisitError.
    """

    FIELDS: ClassVar[Mapping[str, RunFieldType]] = RUN_FIELDS
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = CHOICES

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def where(self, children: list[Expression]) -> Expression:
        """The whole."""
        return children[0]

    def either(self, children: list[Any]) -> Expression:
        """`a or b`."""
        return Or(tuple(child for child in children if not isinstance(child, Token)))

    def both(self, children: list[Any]) -> Expression:
        """`a and b`."""
        return And(tuple(child for child in children if not isinstance(child, Token)))

    def negate(self, children: list[Any]) -> Expression:
        """`not a`."""
        return Not(children[-1])

    def compare(self, children: list[Any]) -> Expression:
        """`a == b`, with the value on either side."""
        left, token, right = children
        operator: Operator = str(token)  # type: ignore[assignment]
        if isinstance(left, _Given):
            if isinstance(right, _Given):
                self._fail(left.token, "one side must be a name; write names without quotes")
            left, right = right, left
            operator = _MIRRORED.get(operator, operator)
        if isinstance(right, Field):
            assert right.place is not None
            raise point_at(
                right.place, f"names are compared with values; put a text in quotes: '{right.name}'"
            )
        if right.value is None:
            if operator not in ("==", "!="):
                self._fail(token, "null has no order; use == null or != null")
            return IsNull(left) if operator == "==" else Not(IsNull(left))
        value = self._check_value(left, right)
        left = self._note_mismatch(left, right)
        if isinstance(value, bool) and operator not in ("==", "!="):
            self._fail(token, "booleans have no order; use == or !=")
        if left.scope == "run" and self.FIELDS[left.name] == "groups":
            if operator not in ("==", "!="):
                self._fail(token, "groups have no order; use == or !=, or 'path' in groups")
            inside = InGroup(str(value), below=False)
            return inside if operator == "==" else Not(inside)
        return Comparison(left, operator, value)

    def among(self, children: list[Any]) -> Expression:
        """`a in (1, 2)` and `a not in (1, 2)`."""
        field, *words, members = children
        if isinstance(field, _Given):
            self._fail(field.token, "put a name before 'in (…)'")
        values = []
        for given in members:
            if given.value is None:
                self._fail(given.token, "null cannot be in a list; use == null or != null")
            values.append(self._check_value(field, given))
            field = self._note_mismatch(field, given)
        found: Expression = Membership(field, tuple(values))
        if field.scope == "run" and self.FIELDS[field.name] == "groups":
            found = Or(tuple(InGroup(str(value), below=False) for value in values))
        return Not(found) if len(words) == 2 else found

    def within(self, children: list[Any]) -> Expression:
        """`'a' in tags` and `'a' in name`."""
        left, *words, right = children
        if isinstance(right, _Given):
            self._fail(right.token, "put several values in parentheses: in (…)")
        if isinstance(left, Field):
            assert left.place is not None
            raise point_at(left.place, f"put the text before 'in' in quotes: '{left.name}'")
        found = self._search_text(left, right)
        return Not(found) if len(words) == 2 else found

    def members(self, children: list[Any]) -> list[_Given]:
        """The values of a list."""
        return [child for child in children if isinstance(child, _Given)]

    def value(self, children: list[Token]) -> _Given:
        """A number, a text, true, false or null."""
        token = children[0]
        if token.type == "NUMBER":
            return _Given(self._read_number(token), token)
        if token.type == "TEXT":
            return _Given(self._read_text(token), token)
        return _Given(_WORDS[token.type], token)

    def bare(self, children: list[Token]) -> Field:
        """A name as it stands."""
        return self._find_field(children[0], self._locate(children[0]))

    def quoted(self, children: list[Token]) -> Field:
        """A name in backticks."""
        return self._find_field(children[0], self._locate(children[0]))

    def call(self, children: list[Token]) -> Field:
        """`min(name)`."""
        function, name = children
        statistics: tuple[Statistic, ...] = get_args(Statistic)
        for statistic in statistics:
            if statistic == function:
                break
        else:
            self._fail(function, f"unknown function {function}; use {', '.join(statistics)}")
        place = self._locate(name)
        field = self._find_field(name, place)
        if field.scope != "metric":
            hint = f"; for the metric of that name write {function}(metric.{field.name})"
            raise point_at(
                place,
                f"{function}(…) takes a metric, not a field of the "
                f"{'run' + hint if field.scope == 'run' else _SPOKEN[field.scope]}",
            )
        return replace(field, statistic=statistic)

    def check_sortable(self, field: Field) -> Field:
        """Return a field by which runs can be sorted."""
        if field.scope == "run" and self.FIELDS[field.name] in ("tags", "groups"):
            assert field.place is not None
            raise point_at(field.place, f"runs cannot be sorted by their {field.name}")
        return field

    def _find_field(self, token: Token, place: Place) -> Field:
        text = str(token)
        prefix, dot, rest = text.partition(".")
        if text.startswith("`"):
            return Field("metric", text[1:-1], place=place)
        scope = next((scope for scope in _PREFIXES if dot and scope == prefix), None)
        if scope is not None:
            # No name holds a backtick, so what is left are its levels, joined by dots.
            name = rest.replace("`", "")
            if not name:
                raise point_at(place, f"put a name after {prefix}.")
            if scope != "run":
                return Field(scope, name, place=place)
            name = ALIASES.get(name, name)
            if name not in RUN_FIELDS:
                near = suggest_names(name, RUN_FIELDS) or list(RUN_FIELDS)
                raise point_at(place, f"a run has no field {name!r}; similar: {', '.join(near)}")
            return Field("run", name, place=place)
        text = ALIASES.get(text, text)
        return Field("run" if text in RUN_FIELDS else "metric", text, place=place)

    def _search_text(self, given: _Given, field: Field) -> Expression:
        kind = self.FIELDS[field.name] if field.scope == "run" else "text"
        assert field.place is not None
        message = f"{field.name} is not a text, so 'in' cannot search it"
        if kind not in ("text", "tags", "groups"):
            raise point_at(field.place, message)
        if not isinstance(given.value, str) or not given.value:
            self._fail(given.token, "put a text in quotes before 'in'")
        if field.scope == "metric":
            field = replace(field, mismatch=Mismatch(field.place, message, str(given.token)))
        if kind == "tags":
            return HasTag(given.value)
        if kind == "groups":
            return InGroup(given.value.strip("/"), below=True)
        return Contains(field, given.value)

    def _check_value(self, field: Field, given: _Given) -> Value:
        value = given.value
        assert value is not None
        if field.scope != "run":
            return value
        kind = self.FIELDS[field.name]
        if kind == "tags":
            hint = "write 'tag' in tags"
            if isinstance(value, str):
                hint = f"did you mean {given.token} in tags?"
            self._fail(given.token, f"a run has several tags: {hint}")
        if kind == "number":
            if isinstance(value, (bool, str)):
                self._fail(given.token, f"{field.name} is a number, so compare it with a number")
            return value
        if not isinstance(value, str):
            what = "time such as '2026-11-01'" if kind == "time" else "text in quotes"
            self._fail(given.token, f"compare {field.name} with a {what}")
        if kind == "time":
            try:
                parse_period(value)
            except (ValueError, OverflowError):
                self._fail(
                    given.token,
                    "this is not a time; write 2026, 2026-11, 2026-11-01 or 2026-11-01T09:30",
                )
        choices = self.CHOICES.get(field.name)
        if choices is not None and value not in choices:
            hint = "; lost is a state" if value == "lost" else ""
            self._fail(
                given.token, f"{field.name} must be one of {', '.join(map(repr, choices))}{hint}"
            )
        return value

    def _note_mismatch(self, field: Field, given: _Given) -> Field:
        """The field of a metric with what is wrong, where the value is no number."""
        if (
            field.scope != "metric"
            or field.mismatch is not None
            or not isinstance(given.value, (bool, str))
        ):
            return field
        message = f"as a metric, {field.name} is a number, so compare it with a number"
        text = str(given.token) if isinstance(given.value, str) else None
        return replace(field, mismatch=Mismatch(self._locate(given.token), message, text))

    def _read_number(self, token: Token) -> int | float:
        text = str(token).replace("_", "")
        number: int | float
        try:
            number = int(text)
        except ValueError:
            number = float(text)
        if isinstance(number, int):
            return number if abs(number) <= _INT64_MAX else float(text)
        if math.isnan(number):
            self._fail(
                token,
                "nan equals nothing; use == null to find metrics whose newest value is not finite",
            )
        return number

    def _read_text(self, token: Token) -> str:
        def unescape(found: re.Match[str]) -> str:
            if found[1] not in _ESCAPED:
                self._fail(token, f"{found[0]} has no meaning; write \\\\ for a backslash")
            return _ESCAPED[found[1]]

        text = _ESCAPE.sub(unescape, token[1:-1])
        try:
            text.encode()
        except UnicodeEncodeError:
            self._fail(token, "this text contains half of a surrogate pair")
        return text

    def _locate(self, token: Token) -> Place:
        return replace(self._place, column=(token.start_pos or 0) + 1, length=len(token))

    def _fail(self, token: Token, message: str) -> NoReturn:
        raise point_at(self._locate(token), message)
