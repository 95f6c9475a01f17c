"""The filters that every read takes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypedDict, TypeVar

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
            f"{argument} must fit in 64 bits, got one of {number.bit_length()} bits"
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


def spell_out(given: type, *, before: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Give a method whose last argument is `**name: Unpack[given]` the signature that it means.

    `help` and `inspect.signature` then show each argument of the TypedDict, and
    one that neither has is refused by name (TypeError).

    Args:
        given: The TypedDict.
        before: Its arguments stand before the method's own one of this name.
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
        place = list(own.parameters).index(before)
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
