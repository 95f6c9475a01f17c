"""A sweep's space as Optuna's distributions, and the values of both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from quark.sweeps.space import Choices, Integers, ParameterRange, Space, Uniform


class OptunaSpace:
    """What Optuna is asked for, of a sweep's space.

    Values that never change are not asked for. Choices that Optuna does not know, such as lists,
    or cannot tell from one another, such as 1 and True, are asked for by their JSON text.

    Args:
        space: The space.
    """

    def __init__(self, space: Space) -> None:
        self.distributions: dict[str, BaseDistribution] = {}
        self._names = list(space.ranges)
        self._fixed: dict[str, Any] = {}
        self._labels: dict[str, dict[str, Any]] = {}
        for name, values in space.ranges.items():
            if isinstance(values, Choices):
                self._take_choices(name, values.values)
            else:
                self.distributions[name] = _make_distribution(values)

    def to_parameters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A trial's parameters out of those that Optuna has chosen, in the order of the space."""
        found = dict(self._fixed)
        for name, value in params.items():
            if name in self.distributions:
                labels = self._labels.get(name)
                found[name] = value if labels is None else labels[value]
        return {name: found[name] for name in self._names if name in found}

    def to_params(self, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """What Optuna knows a trial's parameters as, or None where they are not of the space."""
        params: dict[str, Any] = {}
        for name, found in self.distributions.items():
            if name not in parameters:
                return None
            value = parameters[name]
            if name in self._labels:
                value = _label(value)
            try:
                inner = found.to_internal_repr(value)
                if not found._contains(inner):
                    return None
            except (TypeError, ValueError):
                return None
            params[name] = found.to_external_repr(inner)
        return params

    def _take_choices(self, name: str, values: tuple[Any, ...]) -> None:
        if len(values) == 1:
            self._fixed[name] = values[0]
            return
        are_plain = all(
            value is None or isinstance(value, bool | int | float | str) for value in values
        )
        if are_plain and len(set(values)) == len(values):
            self.distributions[name] = CategoricalDistribution(values)
            return
        labels = {_label(value): value for value in values}
        self._labels[name] = labels
        self.distributions[name] = CategoricalDistribution(tuple(labels))


def _label(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _make_distribution(values: ParameterRange) -> BaseDistribution:
    if isinstance(values, Integers):
        high = values.low + (values.high - values.low) // values.step * values.step
        return IntDistribution(values.low, high, log=values.log, step=values.step)
    assert isinstance(values, Uniform)
    if values.step is None:
        return FloatDistribution(values.low, values.high, log=values.log)
    steps = math.floor((values.high - values.low) / values.step + 1e-9)
    return FloatDistribution(values.low, values.low + steps * values.step, step=values.step)
