"""Reads the language of `where` and `order_by` into the tree of `expression`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records.expression import Expression, Field, OrderBy, Place
from quark_core.search.resolution import point_at

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
    from quark_core.search.building import ExpressionBuilder

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
    from quark_core.search.building import ExpressionBuilder

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
            raise point_at(word, f"write {text[sign]} before the name or {found[1]} behind it")
        descending = found[1].lower() == "desc"
        rest = rest[: found.start()]
    builder = ExpressionBuilder(place)
    return OrderBy(builder.check_sortable(_parse(place, "field", builder, rest)), descending)


def parse_column(text: str, argument: str = "columns") -> Field:
    """One column of a list of runs: a metric or a figure of it, `config.key` or a run's field.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    from quark_core.search.building import ExpressionBuilder

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
        message = "for the opposite write 'not', or != to compare"
    elif found := re.compile(r"[+-]?\.?\d[\w./@:#%$~^+-]*").match(text, position):
        length = len(found[0])
        message = (
            f"{found[0]} is no number; texts and times stand in quotes, "
            "a name that begins with a digit in backticks"
        )
    else:
        message = f"{character!r} means nothing here; a name with it stands in backticks"
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
        message = "a comparison has two sides; write both of them: 0.1 < x and x < 0.3"
    elif str(token) == "is":
        message = "to ask whether a run has something, write == null or != null"
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
    from quark_core.records.expression import And, Not, Or

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
        raise point_at(place, f"this has {terms} comparisons and values; at most {MAX_TERMS}")
    if len(names) > MAX_NAMES:
        raise point_at(place, f"this asks for {len(names)} names; at most {MAX_NAMES}")
