"""What a search says, as a tree that a store turns into a query of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

Scope = Literal["run", "config", "field", "fingerprint", "metric"]
Statistic = Literal["last", "first", "min", "max", "count"]
Operator = Literal["==", "!=", "<", "<=", ">", ">="]
Value = float | int | str | bool
"""What a field is compared with; a bool is no number."""

VALUE_SCOPES: tuple[Scope, ...] = ("config", "field")
"""Scopes of which a name may hold a value of any type."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands in what the user wrote, for messages.

    Attributes:
        argument: Name of the argument, such as `where`.
        text: The whole of it.
        column: First character, counted from 1.
        length: How many characters.
    """

    argument: str
    text: str
    column: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A metric that was treated as if it were no number.

    Told once the name is looked up: where there is no such metric, that is
    what the user needs to know.

    Attributes:
        place: What does not fit.
        message: Why.
        text: The text that was given, in its quotes, or None.
    """

    place: Place
    message: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a run.

    Attributes:
        scope: run, config, field, fingerprint or metric.
        name: A field of the run, a flattened key of its configuration, a field that
            was noted of it, the key of a fingerprint, or the key of a metric: as
            the user wrote it until the names are resolved, then as the store has it.
        statistic: Of a metric: which of its figures.
        place: Where it was written; two fields are equal wherever they stand.
        mismatch: What is wrong with its use, if the name exists.
    """

    scope: Scope
    name: str
    statistic: Statistic = "last"
    place: Place | None = field(default=None, compare=False)
    mismatch: Mismatch | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`field op value`; false for a run that lacks the field.

    A value of another type than the field's is different from it, and neither
    less nor greater. A value for a field that is a time is the ISO 8601 text
    of a moment or of a whole day, hour and so on (see `parse_period`).
    """

    field: Field
    operator: Operator
    value: Value


@dataclass(frozen=True, slots=True)
class Membership:
    """`field in (a, b)`: equal to one of them."""

    field: Field
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Contains:
    """`'part' in field`: the field is a text with this in it, in the same case."""

    field: Field
    part: str


@dataclass(frozen=True, slots=True)
class HasTag:
    """`'tag' in tags`."""

    tag: str


@dataclass(frozen=True, slots=True)
class InGroup:
    """`groups == 'path'`: the run is in the group; `'path' in groups`: or in one below it."""

    path: str
    below: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    """`field == null`: the run lacks the field, or has null there."""

    field: Field


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite: true for every run of which the operand is not true."""

    operand: Expression


@dataclass(frozen=True, slots=True)
class And:
    """All of them."""

    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of them."""

    operands: tuple[Expression, ...]


Expression = Comparison | Membership | Contains | HasTag | InGroup | IsNull | Not | And | Or


@dataclass(frozen=True, slots=True)
class OrderBy:
    """A field to sort by; runs that lack it come last either way.

    Values of a configuration may be of several types: false, true, then
    numbers, then texts.
    """

    field: Field
    descending: bool = False


@dataclass(frozen=True, slots=True)
class SearchSource:
    """A search as it was written.

    Attributes:
        where: The expression, or None.
        order_by: What to sort by, each as one text.
        where_argument, order_argument: What messages call these two.
    """

    where: str | None
    order_by: tuple[str, ...]
    where_argument: str
    order_argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSearch:
    """Which runs, and in which order.

    Attributes:
        project: Only runs of this project.
        where: What must be true of a run.
        order_by: What to sort by; ties, and everything without it, newest first.
        limit: At most so many.
        archived: Whether archived runs are searched too.
        source: What the user wrote, where a text was parsed; a store elsewhere
            parses it again.
    """

    project: str | None = None
    where: Expression | None = None
    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None
    archived: bool = False
    source: SearchSource | None = field(default=None, compare=False)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every field that is asked for, each once: those of `where` first."""
        found = [] if self.where is None else list(find_fields(self.where))
        return tuple(dict.fromkeys([*found, *(order.field for order in self.order_by)]))


def find_fields(expression: Expression) -> Iterator[Field]:
    """The fields of an expression, in the order in which they were written."""
    match expression:
        case Not(operand):
            yield from find_fields(operand)
        case And(operands) | Or(operands):
            for operand in operands:
                yield from find_fields(operand)
        case HasTag() | InGroup():
            pass
        case _:
            yield expression.field


def map_fields(expression: Expression, change: Callable[[Field], Field]) -> Expression:
    """The same expression with other fields."""
    match expression:
        case Not(operand):
            return Not(map_fields(operand, change))
        case And(operands):
            return And(tuple(map_fields(operand, change) for operand in operands))
        case Or(operands):
            return Or(tuple(map_fields(operand, change) for operand in operands))
        case HasTag() | InGroup():
            return expression
        case _:
            return replace(expression, field=change(expression.field))
