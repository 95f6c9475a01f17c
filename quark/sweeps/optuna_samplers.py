"""Optuna samplers and pruners of a sweep, and its space as Optuna distributions."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import BasePruner, HyperbandPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from quark.sweeps.definition import SweepDefinition, read_options
from quark.sweeps.space import Choices, Integers, ParameterRange, Space, Uniform, mix_seed
from quark_core.backends.registry import default_registry
from quark_core.config.arguments import describe_argument
from quark_core.errors import SchemaValidationError


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


_log = logging.getLogger("quark")

_OWN_NAMES = ("grid", "random", "halving", "asha")  # that need no Optuna
_NAMES = ("tpe", "hyperband", "cmaes")
_OBJECTS = "optuna:"
_STARTUP = 10  # trials at random, before TPE has anything to go by
_LOWEST_RATE, _HIGHEST_RATE = 1e-6, 0.5
_MOST_POPULATION = 100_000
_MOST_BRACKETS = 5


@dataclass(frozen=True, slots=True)
class Methods:
    """How a sweep searches.

    Attributes:
        sampler: Chooses the parameters of each trial.
        pruner: Says which trials stop early.
        rungs: The only steps at which the pruner decides anything, or None where any may be one.
    """

    sampler: BaseSampler
    pruner: BasePruner
    rungs: tuple[int, ...] | None


def choose_methods(definition: SweepDefinition, given: object = None) -> Methods:
    """The sampler and the pruner of a sweep; arguments as of `open_search`."""
    budget, seed = definition.budget, definition.seed
    if given is not None and not isinstance(given, str):
        sampler, pruner = _take_apart(given)
        return Methods(
            sampler or SeededSampler(_make_tpe, seed), pruner, _list_rungs(pruner, budget)
        )
    name = definition.search.name
    if name.startswith(_OBJECTS):
        raise SchemaValidationError(
            f"search: this sweep uses Optuna objects ({name[len(_OBJECTS) :][:100]}), which a "
            "store cannot keep. Run it with the script that created them, with the same search="
        )
    if name == "hyperband":
        options = read_options(definition.search, {"rate": 1 / 3, "least": 0, "startup": _STARTUP})
        pruner = _make_hyperband(definition, options)
        sampler = SeededSampler(partial(_make_tpe, startup=int(options["startup"])), seed)
        return Methods(sampler, pruner, _list_rungs(pruner, budget))
    if name == "tpe":
        options = read_options(definition.search, {"startup": _STARTUP})
        sampler = SeededSampler(partial(_make_tpe, startup=int(options["startup"])), seed)
        return Methods(sampler, NopPruner(), ())
    if name == "cmaes":
        options = read_options(definition.search, {"population": 0})
        population = int(options["population"])
        if not 0 <= population <= _MOST_POPULATION:
            raise SchemaValidationError(
                f"search: population must be 0 to {_MOST_POPULATION:,}, got {population}"
            )
        return Methods(_make_cmaes(definition, population), NopPruner(), ())
    return _ask_plugins(name, definition)


def describe_objects(given: object) -> str:
    """Describe Optuna's objects for a definition by their types, such as `optuna:GPSampler`.

    Raises:
        SchemaValidationError: They are no sampler, pruner or pair of both, or such that keep
            pickles in the store.
    """
    sampler, pruner = _take_apart(given)
    parts = [type(part).__name__ for part in (sampler, pruner) if part is not None]
    return _OBJECTS + "+".join(part for part in parts if part != "NopPruner")


class SeededSampler(BaseSampler):
    """Makes a sampler for each trial, with a seed that comes from the trial's number.

    So workers that begin together never draw the same, and one worker alone draws the same each
    time. What a sampler knows of earlier trials it takes from the journal.

    Args:
        make: Makes one with a seed.
        seed: The seed of the sweep.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._newest: tuple[int, BaseSampler] | None = None

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """As of the trial's sampler."""
        return self._get(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As of the trial's sampler."""
        return self._get(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """As of the trial's sampler."""
        return self._get(trial).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """As of the trial's sampler."""
        self._get(trial).before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As of the trial's sampler."""
        self._get(trial).after_trial(study, trial, state, values)

    def _get(self, trial: FrozenTrial) -> BaseSampler:
        if self._newest is None or self._newest[0] != trial.number:
            self._newest = (trial.number, self._make(mix_seed(self._seed, trial.number)))
        return self._newest[1]


def _make_tpe(seed: int, *, startup: int = _STARTUP) -> BaseSampler:
    return TPESampler(seed=seed, n_startup_trials=startup)


def _make_cmaes(definition: SweepDefinition, population: int) -> BaseSampler:
    try:
        from quark.sweeps.optuna_cmaes import ReplayedCmaSampler
    except ImportError:
        raise SchemaValidationError(
            'search="cmaes" requires the package cmaes: pip install "quark-tracker[sweep]"'
        ) from None
    _refuse_several_metrics(definition)
    distributions = OptunaSpace(definition.space).distributions
    if not any(isinstance(d, FloatDistribution | IntDistribution) for d in distributions.values()):
        raise SchemaValidationError('search="cmaes" requires a number in space. Use "tpe" instead')
    return ReplayedCmaSampler(definition.seed, distributions, population)


def _make_hyperband(definition: SweepDefinition, options: Mapping[str, float]) -> HyperbandPruner:
    _refuse_several_metrics(definition)
    budget, rate = definition.budget, options["rate"]
    if budget is None:
        raise SchemaValidationError(
            "budget is required (steps of a full trial), such as budget=100"
        )
    if not _LOWEST_RATE <= rate <= _HIGHEST_RATE:
        raise SchemaValidationError(
            f"search: rate must be more than 0 and at most {_HIGHEST_RATE:g}, got {rate:g}"
        )
    factor = round(1 / rate)
    least = int(options["least"]) or max(1, budget // factor ** (_MOST_BRACKETS - 1))
    if not 1 <= least <= budget:
        raise SchemaValidationError(f"search: least must be 1 to {budget}, got {least}")
    return HyperbandPruner(min_resource=least, max_resource=budget, reduction_factor=factor)


def _refuse_several_metrics(definition: SweepDefinition) -> None:
    if len(definition.goals) > 1:
        raise SchemaValidationError(
            f'metric must be one metric for search="{definition.search.name}"; "tpe" takes several'
        )


def _ask_plugins(name: str, definition: SweepDefinition) -> Methods:
    """What a plugin makes under a name."""
    known: dict[str, Callable[[Mapping[str, Any], int], object]] = {}
    for plugin, declared in default_registry().collect("quark_register_samplers"):
        if not isinstance(declared, Mapping):
            _log.warning("plugin %s: samplers must be a mapping of names", plugin)
            continue
        for label, make in declared.items():
            if isinstance(label, str) and callable(make):
                known.setdefault(label, make)
            else:
                _log.warning("plugin %s: %.80r is not a sampler", plugin, label)
    make = known.get(name)
    if make is None:
        names = ", ".join([*_OWN_NAMES, *_NAMES, *sorted(set(known) - {*_OWN_NAMES, *_NAMES})])
        raise SchemaValidationError(
            f"search must be one of {names}, or a sampler of Optuna, got {name[:60]!r}"
        )

    said = definition.to_dict()

    def make_parts(seed: int) -> tuple[BaseSampler, BasePruner]:
        try:
            sampler, pruner = _take_apart(make(said, seed))
        except SchemaValidationError as error:
            raise SchemaValidationError(f"search={name!r} of a plugin: {error}") from None
        return sampler or _make_tpe(seed), pruner

    pruner = make_parts(definition.seed)[1]
    sampler = SeededSampler(lambda seed: make_parts(seed)[0], definition.seed)
    return Methods(sampler, pruner, _list_rungs(pruner, definition.budget))


def _take_apart(given: object) -> tuple[BaseSampler | None, BasePruner]:
    """A sampler, a pruner, or a pair of both."""
    parts = given if isinstance(given, tuple) else (given,)
    samplers = [part for part in parts if isinstance(part, BaseSampler)]
    pruners = [part for part in parts if isinstance(part, BasePruner)]
    if (
        not parts
        or len(samplers) + len(pruners) != len(parts)
        or max(len(samplers), len(pruners)) > 1
    ):
        raise SchemaValidationError(
            "search must be a name, a sampler or pruner of Optuna, or a pair of both, "
            f"got {describe_argument(given)}"
        )
    for sampler in samplers:
        if isinstance(sampler, CmaEsSampler):
            raise SchemaValidationError(
                "search: Optuna's CmaEsSampler reads pickles from the store, which others may "
                'have written. Use search="cmaes", which runs CMA-ES without pickles'
            )
    return (samplers[0] if samplers else None), (pruners[0] if pruners else NopPruner())


def _list_rungs(pruner: BasePruner, budget: object) -> tuple[int, ...] | None:
    """The steps at which a pruner decides, where that can be told."""
    if isinstance(pruner, NopPruner):
        return ()
    if not isinstance(pruner, HyperbandPruner | SuccessiveHalvingPruner):
        return None
    least = getattr(pruner, "_min_resource", None)
    factor = getattr(pruner, "_reduction_factor", None)
    rate = getattr(pruner, "_min_early_stopping_rate", 0)
    most = getattr(pruner, "_max_resource", budget)
    if not (isinstance(least, int) and isinstance(factor, int) and isinstance(most, int)):
        return None
    rungs = []
    step = least * factor ** int(rate)
    while step < most:  # at the last step there is nothing left to save
        rungs.append(step)
        step *= factor
    return tuple(rungs)
