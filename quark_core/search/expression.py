"""What a search says, as a tree that a store turns into a query of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "And",
    "Comparison",
    "Expression",
    "Field",
    "HasTag",
    "IsNull",
    "Literal_",
    "Membership",
    "Not",
    "Or",
    "OrderBy",
    "RunSearch",
    "Scope",
    "Statistic",
]

Scope = Literal["run", "config", "metric"]
Statistic = Literal["last", "first", "min", "max", "count"]
Operator = Literal["==", "!=", "<", "<=", ">", ">="]
Literal_ = float | int | str | bool
"""A value that is compared with; a bool is no number."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a run.

    Attributes:
        scope: run, config or metric.
        name: A field of the run, a flattened key of its configuration, or the
            stored key of a metric.
        column: Where it stands in the text, counted from 1.
        statistic: Of a metric: which of its figures.
    """

    scope: Scope
    name: str
    column: int
    statistic: Statistic = "last"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`field op value`; false for a run that lacks the field."""

    field: Field
    operator: Operator
    value: Literal_


@dataclass(frozen=True, slots=True)
class Membership:
    """`field in (a, b)`; false for a run that lacks the field."""

    field: Field
    values: tuple[Literal_, ...]


@dataclass(frozen=True, slots=True)
class HasTag:
    """`'tag' in tags`."""

    tag: str


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


Expression = Comparison | Membership | HasTag | IsNull | Not | And | Or


@dataclass(frozen=True, slots=True)
class OrderBy:
    """A field to sort by; runs that lack it come last either way."""

    field: Field
    descending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSearch:
    """Which runs, and in which order.

    Attributes:
        project: Only runs of this project.
        where: What must be true of a run.
        order_by: What to sort by; ties, and everything without it, newest first.
        limit: At most so many.
        text: What the user wrote as `where`, for messages.
    """

    project: str | None = None
    where: Expression | None = None
    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None
    text: str = ""
