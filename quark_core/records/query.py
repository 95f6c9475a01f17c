"""Queries of a read: filters of records, and searches for runs as a tree."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from quark_core.errors import SchemaValidationError
from quark_core.records.names import check_text

_P = ParamSpec("_P")
_R = TypeVar("_R")

_INT64_MAX = 2**63 - 1


def check_index(value: object, argument: str) -> int | None:
    """Return a step, an epoch, a rank or a limit as a plain int; None stays None.

    Raises:
        SchemaValidationError: Not an integer (bool is none), negative, or beyond 64 bits.
    """
    if value is None:
        return None
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        raise SchemaValidationError(f"{argument} must be an integer, not bool")
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        raise SchemaValidationError(
            f"{argument} must be a non-negative integer, not {type(value).__name__}"
        ) from None
    if number < 0:
        raise SchemaValidationError(f"{argument} must not be negative")
    if number > _INT64_MAX:
        raise SchemaValidationError(
            f"{argument} must fit in 64 bits, but has {number.bit_length()} bits"
        )
    return number


def check_step(value: object, argument: str) -> int | None:
    """As `check_index`, for a counter of a training: a float that is whole is one, too.

    Raises:
        SchemaValidationError: As of `check_index`.
    """
    whole = find_whole(value)
    return check_index(value if whole is None else whole, argument)


def find_whole(value: Any) -> int | None:
    """The integer that a number of any library is, negative ones too; None of anything else."""
    try:
        if isinstance(value, (bool, str, bytes)) or "bool" in str(getattr(value, "dtype", "")):
            return None
        if getattr(value, "ndim", 0):
            value = value.item()
        if hasattr(value, "__index__") and "float" not in str(getattr(value, "dtype", "")):
            return int(operator.index(value))
        number = float(value)
        return int(number) if number.is_integer() and number == value else None
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return None


class ReadBounds(TypedDict, total=False):
    """The bounds that every reader takes; all are inclusive.

    A record without a step fits no bound on the step, and so for epochs.
    """

    step: int | None
    step_min: int | None
    step_max: int | None
    epoch: int | None
    epoch_min: int | None
    epoch_max: int | None


class _MetricNames(TypedDict, total=False):
    metric_key: str | None
    namespace: str | None
    metric_name: str | None


class MetricFilters(_MetricNames, ReadBounds, total=False):
    """What every reader of metrics takes."""

    limit: int | None
    all_attempts: bool
    rank: int | None


def spell_out(
    given: type, *, before: str | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Give a method whose last argument is `**name: Unpack[given]` the signature that it means.

    `help` and `inspect.signature` then show each argument of the TypedDict, and
    one that neither has is refused by name (TypeError).

    Args:
        given: The TypedDict.
        before: Its arguments stand before the method's own one of this name, by default last.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        own = inspect.signature(method)
        *plain, _ = own.parameters.values()
        spelled = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "all_attempts" else None,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in given.__annotations__.items()
        ]
        place = len(plain) if before is None else list(own.parameters).index(before)
        signature = own.replace(parameters=[*plain[:place], *spelled, *plain[place:]])

        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{method.__qualname__}() {error}") from None
            return method(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters of one read; all of them must hold.

    Attributes:
        equals: Column name -> the value it must have.
        any_of: Column name -> the values one of which it must have.
        step, step_min, step_max: Bounds are inclusive; a record without a
            step fits none of them.
        epoch, epoch_min, epoch_max: The same for epochs.
        rank: Only what this rank of the launch has logged.
        limit: Keep the newest N, returned in persistence order.
        include_non_finite: Whether metrics and batches are returned whose value or loss
            is NaN or infinite.
        all_attempts: Whether points are returned that a later attempt, resumed
            from an earlier step, has hidden.
    """

    equals: Mapping[str, str] = field(default_factory=dict)
    any_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    step: int | None = None
    step_min: int | None = None
    step_max: int | None = None
    epoch: int | None = None
    epoch_min: int | None = None
    epoch_max: int | None = None
    rank: int | None = None
    limit: int | None = None
    include_non_finite: bool = True
    all_attempts: bool = False

    @classmethod
    def build(
        cls,
        *,
        equals: Mapping[str, str | None] | None = None,
        any_of: Mapping[str, tuple[str, ...] | None] | None = None,
        include_non_finite: bool = True,
        all_attempts: bool = False,
        **bounds: Any,
    ) -> Query:
        """Make a query out of a reader's arguments, leaving out what is None.

        Raises:
            SchemaValidationError: A bound is no non-negative integer, or a value no text; the
                message names it.
        """
        wanted = {name: value for name, value in (equals or {}).items() if value is not None}
        return cls(
            equals={name: check_text(value, name) for name, value in wanted.items()},
            any_of={name: value for name, value in (any_of or {}).items() if value is not None},
            include_non_finite=include_non_finite,
            all_attempts=bool(all_attempts),
            **{name: check_index(value, name) for name, value in bounds.items()},
        )


Scope = Literal["run", "config", "field", "fingerprint", "metric"]
"""The part of a run that a name in a search belongs to."""
Statistic = Literal["last", "first", "min", "max", "count"]
Operator = Literal["==", "!=", "<", "<=", ">", ">="]
"""Comparisons of the search language."""
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
"""A condition on runs."""


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
