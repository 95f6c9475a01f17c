"""CMA-ES whose state is worked out of the trials, instead of being kept as a pickle in the store.

Optuna's own sampler keeps its optimizer as a pickle among the attributes of trials. A store may be
shared with strangers, so here only numbers are kept: of each trial its generation, and of the first
one of a generation the trials that it was made of. Each worker plays that back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cmaes
import numpy as np
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from quark.sweeps.space import mix_seed

_GENERATION = "quark:cma_generation"
_PARENTS = "quark:cma_parents"
_SIGMA = 1 / 6  # of the range of each parameter, which is 0 to 1

_NumericDistribution = FloatDistribution | IntDistribution


class ReplayedCmaSampler(BaseSampler):
    """Samples numbers by CMA-ES, and all else at random.

    Args:
        seed: Trials of the same seed, number and history have the same parameters.
        distributions: The space.
        population: How many trials a generation has; 0 for as many as suit the space.
    """

    def __init__(
        self, seed: int, distributions: Mapping[str, BaseDistribution], population: int = 0
    ) -> None:
        self._seed = seed
        self._population = population or None
        self._numbers: dict[str, BaseDistribution] = {
            name: found
            for name, found in distributions.items()
            if isinstance(found, FloatDistribution | IntDistribution) and not found.single()
        }

    def infer_relative_search_space(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """All that are numbers."""
        return self._numbers

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point of the newest generation, and notes of which one that is."""
        space = {
            name: found
            for name, found in search_space.items()
            if isinstance(found, FloatDistribution | IntDistribution)
        }
        if not space:
            return {}
        trials = study.get_trials(deepcopy=False)
        optimizer = self._replay(study, trials, space)
        notes: dict[str, Any] = {}
        ended = [t for t in trials if _has_ended(t) and _read_generation(t) == optimizer.generation]
        if len(ended) >= optimizer.population_size:
            parents = ended[: optimizer.population_size]
            _tell(optimizer, parents, study.direction, space)
            notes[_PARENTS] = [parent.number for parent in parents]
        notes[_GENERATION] = optimizer.generation
        for name, value in notes.items():
            study._storage.set_trial_system_attr(trial._trial_id, name, value)
        optimizer.reseed_rng(mix_seed(self._seed, trial.number))
        return _from_unit(optimizer.ask(), space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A value at random, of choices."""
        sampler = RandomSampler(seed=mix_seed(self._seed, trial.number, param_name))
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def _replay(
        self, study: Study, trials: list[FrozenTrial], space: Mapping[str, _NumericDistribution]
    ) -> cmaes.CMA:
        """The optimizer as all trials together have left it."""
        bounds = np.array([[0.0, 1.0]] * len(space))
        optimizer = cmaes.CMA(
            mean=np.full(len(space), 0.5),
            sigma=_SIGMA,
            bounds=bounds,
            seed=mix_seed(self._seed),
            n_max_resampling=10 * len(space),
            population_size=self._population,
        )
        by_number = {trial.number: trial for trial in trials if _has_ended(trial)}
        for trial in trials:  # in the order of the journal, so that the first to go on decides
            parents = trial.system_attrs.get(_PARENTS)
            if not isinstance(parents, list) or _read_generation(trial) != optimizer.generation + 1:
                continue
            found = [by_number.get(number) for number in parents if isinstance(number, int)]
            known = [t for t in found if t is not None and space.keys() <= t.params.keys()]
            if len(known) == optimizer.population_size:
                _tell(optimizer, known, study.direction, space)
        return optimizer


def _tell(
    optimizer: cmaes.CMA,
    parents: list[FrozenTrial],
    direction: StudyDirection,
    space: Mapping[str, _NumericDistribution],
) -> None:
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    optimizer.tell([(_to_unit(t.params, space), sign * float(t.value or 0.0)) for t in parents])


def _has_ended(trial: FrozenTrial) -> bool:
    return (
        trial.state == TrialState.COMPLETE
        and trial.value is not None
        and math.isfinite(trial.value)
    )


def _read_generation(trial: FrozenTrial) -> int | None:
    generation = trial.system_attrs.get(_GENERATION)
    return generation if isinstance(generation, int) else None


def _ends(found: _NumericDistribution) -> tuple[float, float]:
    """What 0 and 1 stand for: whole numbers have half of one more at each end."""
    step = found.step or 0.0
    low, high = found.low - step / 2, found.high + step / 2
    return (math.log(low), math.log(high)) if found.log else (low, high)


def _to_unit(params: Mapping[str, Any], space: Mapping[str, _NumericDistribution]) -> np.ndarray:
    point = []
    for name, found in space.items():
        low, high = _ends(found)
        value = math.log(params[name]) if found.log else params[name]
        point.append((value - low) / (high - low))
    return np.array(point)


def _from_unit(point: np.ndarray, space: Mapping[str, _NumericDistribution]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for (name, found), place in zip(space.items(), point, strict=True):
        low, high = _ends(found)
        value = low + float(place) * (high - low)
        if found.log:
            value = math.exp(value)
        if found.step is not None:
            value = found.low + round((value - found.low) / found.step) * found.step
        value = min(max(value, found.low), found.high)
        params[name] = int(value) if isinstance(found, IntDistribution) else float(value)
    return params
