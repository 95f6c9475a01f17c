"""The language of `where` over the trials of a sweep: `param.lr < 0.01 and failures == 0`.

A name is a parameter, unless it is one of `TRIAL_FIELDS`; `param.lr` says so, `origin.rung` is
what the search has noted of where a trial comes from, `trial.state` is a field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.expression import (
    And,
    Comparison,
    Contains,
    Expression,
    Field,
    IsNull,
    Membership,
    Not,
    Operator,
    Or,
    Place,
    Value,
    find_fields,
)
from quark_core.records.json_object import flatten_json
from quark_core.records.sweeps import TRIAL_STATES, StoredTrial
from quark_core.search.parser import parse_with
from quark_core.search.resolution import RunFieldType, point_at

if TYPE_CHECKING:
    from lark import Token, Transformer_NonRecursive

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
_MOST_COMPILED = 64


def fits_trial(where: str, trial: StoredTrial) -> bool:
    """Whether an expression is true of a trial.

    Raises:
        SchemaValidationError: It is malformed; the message shows the place.
    """
    return compile_trial_where(where)(trial)


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
                f"no trial has {field.name!r}; there are the parameters {', '.join(parameters)} "
                f"and the fields {', '.join(TRIAL_FIELDS)}",
            )


def _make_builder(place: Place) -> Transformer_NonRecursive[Token, Any]:
    # Late: the parser is heavy, and few claims ask for anything.

    from quark_core.search.building import ExpressionBuilder

    class TrialBuilder(ExpressionBuilder):
        """Knows the fields of trials in place of those of runs."""

        FIELDS = TRIAL_FIELDS
        CHOICES = _CHOICES

        def call(self, children: list[Token]) -> Field:
            """A function, which nothing of a trial has."""
            raise point_at(
                self._locate(children[0]), f"a trial has no {children[0]}(…); its figure is `value`"
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
                    raise point_at(place, f"a trial has no field {name!r}; there is {known}")
                return Field("run", name, place=place)
            if text in TRIAL_FIELDS:
                return Field("run", text, place=place)
            return Field("config", text.replace("`", ""), place=place)

    return TrialBuilder(place)


class _Trial:
    """The values of one trial."""

    def __init__(self, trial: StoredTrial) -> None:
        self._trial = trial

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
                return self._find(field) is None
            case Comparison(field, sign, value):
                return self._compare(field, sign, value)
            case Membership(field, values):
                return any(self._compare(field, "==", value) for value in values)
            case Contains(field, part):
                found = self._find(field)
                return isinstance(found, str) and part in found
            case _:
                raise SchemaValidationError("where: a trial has neither tags nor groups")

    def _find(self, field: Field) -> Any:
        trial = self._trial
        if field.scope == "config":
            return _look_up(trial.parameters, field.name)
        if field.scope == "field":
            return _look_up(trial.origin, field.name)
        match field.name:
            case "budget" | "rung":
                return trial.origin.get(field.name)
            case "claimed" | "lease" | "settled":
                return {
                    "claimed": trial.claimed_at,
                    "lease": trial.lease_until,
                    "settled": trial.settled_at,
                }[field.name]
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

    def _compare(self, field: Field, sign: Operator, value: Value) -> bool:
        from quark_core.search.evaluation import compare_time, compare_values

        found = self._find(field)
        if found is None:
            return False
        if field.scope == "run" and TRIAL_FIELDS[field.name] == "time":
            return compare_time(parse_time(found), sign, str(value))
        return compare_values(found, sign, value)


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    """A value by its name, or by a path through what is nested."""
    if name in values or "." not in name:
        return values.get(name)
    return next((value for key, value in flatten_json(values) if key == name), None)
