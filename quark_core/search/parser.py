"""Reads the language of `where` and `order_by` into the tree of `expression`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.json_object import flatten_json
from quark_core.records.query import (
    And,
    Expression,
    Field,
    Not,
    Or,
    OrderBy,
    Place,
    find_fields,
)
from quark_core.records.sweeps import TRIAL_STATES, StoredTrial
from quark_core.search.evaluation import FieldValues
from quark_core.search.resolution import RunFieldType, point_at

if TYPE_CHECKING:
    from lark import Lark, Token, UnexpectedCharacters, UnexpectedToken
    from lark.visitors import Transformer_NonRecursive

MAX_CHARACTERS = 20_000
MAX_DEPTH = 50
MAX_TERMS = 400
MAX_NAMES = 40

_DIRECTION = re.compile(r"\s+(asc|desc)\s*\Z", re.IGNORECASE)
_NAMES = {"NAME", "QUOTED"}
_VALUES = {"NUMBER", "TEXT", "TRUE", "FALSE", "NULL"}
_WORDS = {
    "AND": "'and'",
    "OR": "'or'",
    "RPAR": "')'",
    "RSQB": "']'",
    "LPAR": "'('",
    "LSQB": "'['",
    "COMMA": "','",
    "$END": "the end",
}


def parse_where(text: str, argument: str = "where") -> Expression:
    """The tree of an expression; names are not looked up yet.

    Args:
        text: The expression.
        argument: What it is called in messages.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    from quark_core.search.expression_builder import ExpressionBuilder

    return parse_with(text, argument, ExpressionBuilder)


def parse_with(
    text: str, argument: str, build: Callable[[Place], Transformer_NonRecursive[Token, Any]]
) -> Expression:
    """The tree of an expression over anything that has fields.

    Args:
        text: The expression.
        argument: What it is called in messages.
        build: What knows the fields, of the place where they are named.

    Raises:
        SchemaValidationError: As of `parse_where`.
    """
    place = Place(argument, _check_text(text, argument), 1)
    expression: Expression = _parse(place, "where", build(place))
    _check_size(expression, place)
    return expression


def parse_order(text: str, argument: str = "order_by") -> OrderBy:
    """One thing to sort by: a field, with `-` before it or `desc` behind it for descending.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    from quark_core.search.expression_builder import ExpressionBuilder

    place = Place(argument, _check_text(text, argument), 1)
    descending = False
    rest = text
    sign = len(text) - len(text.lstrip())
    signed = text[sign : sign + 1] in ("-", "+")
    if signed:
        descending = text[sign] == "-"
        # A blank in its place keeps the columns of what follows.
        rest = f"{text[:sign]} {text[sign + 1 :]}"
    found = _DIRECTION.search(rest)
    if found is not None and rest[: found.start()].strip():
        if signed:
            word = replace(place, column=found.start(1) + 1, length=len(found[1]))
            raise point_at(word, f"write {text[sign]} before the name or {found[1]} after it")
        descending = found[1].lower() == "desc"
        rest = rest[: found.start()]
    builder = ExpressionBuilder(place)
    return OrderBy(builder.check_sortable(_parse(place, "field", builder, rest)), descending)


def parse_column(text: str, argument: str = "columns") -> Field:
    """One column of a list of runs: a metric or a figure of it, `config.key` or a run's field.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    from quark_core.search.expression_builder import ExpressionBuilder

    place = Place(argument, _check_text(text, argument), 1)
    found: Field = _parse(place, "field", ExpressionBuilder(place))
    return found


def _check_text(text: object, argument: str) -> str:
    if not isinstance(text, str):
        raise SchemaValidationError(f"{argument} must be a str, not {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise SchemaValidationError(
            f"{argument} has {len(text)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    return text


@cache
def _load_parser() -> Lark:
    from lark import Lark

    grammar = Path(__file__).with_name("grammar.lark").read_text("utf-8")
    return Lark(grammar, parser="lalr", lexer="basic", start=["where", "field"])


def _parse(
    place: Place, start: str, builder: Transformer_NonRecursive[Token, Any], text: str | None = None
) -> Any:
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken, VisitError

    text = place.text if text is None else text
    try:
        tree = _load_parser().parse(text, start=start)
    except UnexpectedCharacters as error:
        raise _explain_characters(error, place, text) from None
    except UnexpectedToken as error:
        raise _explain_token(error, place, text) from None
    try:
        return builder.transform(tree)
    except VisitError as error:
        raise error.orig_exc from None


def _explain_characters(
    error: UnexpectedCharacters, place: Place, text: str
) -> SchemaValidationError:
    position = error.pos_in_stream or 0
    character = text[position]
    length = 1
    if character in "'\"":
        message = "this text has no closing quote"
        length = len(text)
    elif character == "`":
        message = "this name has no closing backtick"
        length = len(text)
    elif character == "=":
        message = "to compare, write =="
    elif character in "&|":
        message = "write 'and' and 'or' as words"
    elif character == "!":
        message = "to negate, write 'not', or != to compare"
    elif found := re.compile(r"[+-]?\.?\d[\w./@:#%$~^+-]*").match(text, position):
        length = len(found[0])
        message = (
            f"{found[0]} is not a number; put texts and times in quotes, and a name that starts "
            "with a digit in backticks"
        )
    else:
        message = f"{character!r} has no meaning here; put a name that contains it in backticks"
    return point_at(replace(place, column=position + 1, length=length), message)


def _explain_token(error: UnexpectedToken, place: Place, text: str) -> SchemaValidationError:
    accepted = error.accepts or set()
    token = error.token
    wanted = f"expected {_describe(accepted)}"
    if token.type == "$END":
        end = len(text.rstrip())
        return point_at(replace(place, column=end + 1), f"{wanted}, but it ends here")
    message = f"{wanted}, not {str(token)!r}"
    if token.type == "OPERATOR" and "AND" in accepted:
        message = "a comparison has two sides; write two comparisons: 0.1 < x and x < 0.3"
    elif str(token) == "is":
        message = "to check if a run has a value, write == null or != null"
    column = (token.start_pos or 0) + 1
    return point_at(replace(place, column=column, length=len(token)), message)


def _describe(terminals: set[str]) -> str:
    """What may stand here, in words."""
    words = []
    if "OPERATOR" in terminals:
        words.append("a comparison (== != < <= > >= in)")
        terminals = terminals - {"NOT", "IN", "LPAR", "OPERATOR"}
    if terminals >= _NAMES:
        words.append("a name")
    if terminals >= _VALUES:
        words.append("a value")
    elif "IN" in terminals:
        words.append("'in'")
    if terminals & (_NAMES | {"$END"}):
        terminals = terminals - {"LPAR", "LSQB"}
    words += [word for terminal, word in _WORDS.items() if terminal in terminals]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _check_size(expression: Expression, place: Place) -> None:
    """Refuse what would be too much for a store: its depth, terms and names are bounded."""
    terms = 0
    names = set()
    waiting = [(expression, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise point_at(place, f"this is nested deeper than {MAX_DEPTH} levels")
        match node:
            case Not(operand):
                waiting.append((operand, depth + 1))
            case And(operands) | Or(operands):
                waiting += [(operand, depth + 1) for operand in operands]
            case _:
                values = getattr(node, "values", ())
                terms += max(1, len(values))
                field = getattr(node, "field", None)
                if field is not None:
                    names.add((field.scope, field.name))
    if terms > MAX_TERMS:
        raise point_at(place, f"{terms} comparisons and values; at most {MAX_TERMS} are allowed")
    if len(names) > MAX_NAMES:
        raise point_at(place, f"this contains {len(names)} names; at most {MAX_NAMES} are allowed")


# The language of `where` over the trials of a sweep: `param.lr < 0.01 and failures == 0`.
#
# A name is a parameter, unless it is one of `TRIAL_FIELDS`; `param.lr` says so, `origin.rung` is
# what the search has noted of where a trial comes from, `trial.state` is a field.

TRIAL_FIELDS: Mapping[str, RunFieldType] = {
    "budget": "number",
    "claimed": "time",
    "failures": "number",
    "lease": "time",
    "losses": "number",
    "number": "number",
    "reason": "text",
    "run": "text",
    "rung": "number",
    "settled": "time",
    "state": "text",
    "step": "number",
    "token": "number",
    "value": "number",
    "worker": "text",
}
"""Name of a field of a trial -> what it holds."""

_CHOICES = {"state": TRIAL_STATES}
_MOMENTS = {"claimed": "claimed_at", "lease": "lease_until", "settled": "settled_at"}
_MOST_COMPILED = 64


@lru_cache(maxsize=_MOST_COMPILED)
def compile_trial_where(where: str) -> Callable[[StoredTrial], bool]:
    """What says whether an expression is true of a trial; false where the trial lacks a name.

    Args:
        where: Such as `param.lr < 0.1 and state == 'suspended'`.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    expression = parse_with(where, "where", _make_builder)
    return lambda trial: _Trial(trial).fits(expression)


def check_trial_where(where: str, parameters: Sequence[str]) -> None:
    """Refuse an expression with a name that no trial of a sweep has, which none would fit.

    Args:
        where: The expression.
        parameters: Names of the sweep's parameters.

    Raises:
        SchemaValidationError: It is malformed, or has such a name; the message shows the place.
    """
    for field in find_fields(parse_with(where, "where", _make_builder)):
        if field.scope != "config" or field.place is None:
            continue
        if not any(field.name == name or field.name.startswith(f"{name}.") for name in parameters):
            raise point_at(
                field.place,
                f"no trial has {field.name!r}; the parameters are {', '.join(parameters)} and "
                f"the fields {', '.join(TRIAL_FIELDS)}",
            )


def _make_builder(place: Place) -> Transformer_NonRecursive[Token, Any]:
    # Late: the parser is heavy, and few claims ask for anything.
    from quark_core.search.expression_builder import ExpressionBuilder

    class TrialBuilder(ExpressionBuilder):
        """Knows the fields of trials in place of those of runs."""

        FIELDS = TRIAL_FIELDS
        CHOICES = _CHOICES

        def call(self, children: list[Token]) -> Field:
            """A function, which nothing of a trial has."""
            raise point_at(
                self._locate(children[0]), f"a trial has no {children[0]}(…); use `value`"
            )

        def _find_field(self, token: Token, place: Place) -> Field:
            text = str(token)
            prefix, dot, rest = text.partition(".")
            name = rest.replace("`", "")
            if dot and prefix in ("param", "config"):
                return Field("config", name, place=place)
            if dot and prefix == "origin":
                return Field("field", name, place=place)
            if dot and prefix == "trial":
                if name not in TRIAL_FIELDS:
                    known = ", ".join(TRIAL_FIELDS)
                    raise point_at(place, f"a trial has no field {name!r}; its fields are {known}")
                return Field("run", name, place=place)
            if text in TRIAL_FIELDS:
                return Field("run", text, place=place)
            return Field("config", text.replace("`", ""), place=place)

    return TrialBuilder(place)


class _Trial(FieldValues):
    """The values of one trial."""

    TYPES = TRIAL_FIELDS

    def __init__(self, trial: StoredTrial) -> None:
        self._trial = trial

    def find(self, field: Field) -> Any:
        trial = self._trial
        if field.scope == "config":
            return _look_up(trial.parameters, field.name)
        if field.scope == "field":
            return _look_up(trial.origin, field.name)
        match field.name:
            case "budget" | "rung":
                return trial.origin.get(field.name)
            case name if name in _MOMENTS:
                moment = getattr(trial, _MOMENTS[name])
                return None if moment is None else parse_time(moment)
            case "run":
                return trial.run_id
            case "value":
                value = trial.values[0] if trial.values else None
                return value if value is not None and math.isfinite(value) else None
            case "worker":
                host = None if trial.worker is None else trial.worker.get("host")
                return host.partition("|")[0] if isinstance(host, str) else None
            case name:
                return getattr(trial, name)


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    """A value by its name, or by a path through what is nested."""
    if name in values or "." not in name:
        return values.get(name)
    return next((value for key, value in flatten_json(values) if key == name), None)
