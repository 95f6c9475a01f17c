"""Which parameters of a sweep matter: how much of what its trials reach each explains.

By default `ranks`, which needs no library: the ranks of the metric as a sum of a curve of each
parameter's ranks. Optuna's PED-ANOVA, where Optuna is there, asks what parts the best tenth from
the rest. What parameters do together is seen by neither.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.statistics import make_generator
from quark.analysis.trial_values import list_objectives, pick_comparable
from quark_core.errors import SchemaValidationError
from quark_core.records.base import Record
from quark_core.records.checks import check_choice
from quark_core.records.runs import is_seed
from quark_core.records.sweeps import StoredSweep, StoredTrial

_log = logging.getLogger("quark")

Floats = NDArray[np.float64]
ImportanceMethod = Literal["ped_anova", "ranks"]

_LEAST_TRIALS = 10
_MOST_TRIALS = 5_000
_MOST_CATEGORIES = 20
_RIDGE = 1e-2
_SHUFFLES = 100
_CHANCE = 0.95


class Importances(Record, frozen=True, gc=False):
    """How much each parameter of a sweep matters for one of its metrics.

    Attributes:
        metric: The metric.
        method: `ped_anova`, Optuna's, whose shares add up to 1; or `ranks`, ours, where a share
            is that of the variance of the metric's ranks which the parameter explains.
        shares: Parameter -> share from 0 to 1, the largest first; seeds and what is the same in
            all trials are left out.
        chance: With `ranks`, the share up to which parameters come that do nothing, 95 times in
            a hundred; None with another method.
        explained: With `ranks`, what all explain together; None with another method.
        count: How many trials tell.
        note: Why nothing is told, or None.
    """

    metric: str
    method: ImportanceMethod
    shares: dict[str, float]
    chance: float | None
    explained: float | None
    count: int
    note: str | None = None


def measure_importances(
    sweep: StoredSweep, trials: Sequence[StoredTrial], method: str = "ranks"
) -> tuple[Importances, ...]:
    """The importances of a sweep's parameters, for each of its metrics.

    Args:
        sweep: The sweep.
        trials: Its trials, of which those that are completed with the whole budget tell.
        method: `ranks`, which says what chance alone would give; or `ped_anova`, where Optuna is
            installed.

    Raises:
        SchemaValidationError: `method` is another one, or Optuna is asked for and not there.
    """
    check_choice(method, "method", ("ped_anova", "ranks"))
    if method == "ped_anova" and find_spec("optuna") is None:
        raise SchemaValidationError(
            "method 'ped_anova' is Optuna's: pip install 'quark-tracker[sweep]', or take 'ranks'"
        )
    wished: ImportanceMethod = "ped_anova" if method == "ped_anova" else "ranks"
    compared = pick_comparable(sweep, trials, least=_LEAST_TRIALS)
    return tuple(
        _measure(sweep, compared, place, metric, mode, wished)
        for place, (metric, mode) in enumerate(list_objectives(sweep.definition))
    )


def _measure(
    sweep: StoredSweep,
    trials: Sequence[StoredTrial],
    place: int,
    metric: str,
    mode: str,
    method: ImportanceMethod,
) -> Importances:
    told = [
        (trial.parameters, trial.values[place])
        for trial in trials[-_MOST_TRIALS:]
        if trial.values is not None and _is_finite(trial.values, place)
    ]
    columns = _list_columns([parameters for parameters, _ in told])
    values = np.array([value for _, value in told], dtype=np.float64)
    if len(told) < _LEAST_TRIALS or not columns or float(np.ptp(values)) <= 0.0:
        note = f"{len(told):,} completed trials tell, and it takes {_LEAST_TRIALS}"
        if len(told) >= _LEAST_TRIALS:
            note = "all values are the same" if columns else "no parameter differs between trials"
        return Importances(metric, method, {}, None, None, len(told), note)
    if method == "ped_anova":
        try:
            shares = _ask_optuna(sweep.definition, columns, values, mode)
            return Importances(metric, method, _sort(shares), None, None, len(told))
        except Exception as error:  # noqa: BLE001 - another Optuna than we know: ours tells as well
            _log.debug("Optuna cannot tell importances: %r", error)
    shares, chance, explained = _explain_ranks(columns, values)
    return Importances(metric, "ranks", _sort(shares), chance, explained, len(told))


def _is_finite(values: Sequence[Any], place: int) -> bool:
    return place < len(values) and values[place] is not None and math.isfinite(values[place])


def _list_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The parameters that all trials have and that differ between them."""
    names = dict.fromkeys(name for row in rows for name in row if not is_seed(name))
    columns = {
        name: [row[name] for row in rows] for name in names if all(name in row for row in rows)
    }
    return {name: each for name, each in columns.items() if len({_spell(v) for v in each}) > 1}


def _spell(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sort(shares: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _explain_ranks(
    columns: Mapping[str, Sequence[Any]], values: Floats
) -> tuple[dict[str, float], float, float]:
    """Shares of the parameters, what chance gives one, and what all explain together."""
    blocks = [_encode(each) for each in columns.values()]
    features = np.hstack(blocks)
    ends = np.cumsum([block.shape[1] for block in blocks])
    target = _rank(values)
    gram = features.T @ features
    gram[np.diag_indices_from(gram)] += _RIDGE * len(values)
    solve = np.linalg.solve(gram, features.T)
    generator = make_generator(values)
    shuffled = np.stack([generator.permutation(target) for _ in range(_SHUFFLES)], axis=1)
    targets = np.column_stack([target, shuffled])
    weights = solve @ targets
    # Of each target, what each parameter's curve has in common with it.
    parts = np.stack(
        [
            ((features[:, end - block.shape[1] : end] @ weights[end - block.shape[1] : end])
             * targets).sum(axis=0)
            for block, end in zip(blocks, ends, strict=True)
        ]
    ) / float(target @ target)  # fmt: skip
    # What a curve finds in chance is no importance: it is taken off on average.
    usual = parts[:, 1:].mean(axis=1)
    chance = float(np.quantile(parts[:, 1:] - usual[:, None], _CHANCE))
    found = np.clip(parts[:, 0] - usual, 0.0, 1.0)
    explained = float(np.clip(parts[:, 0].sum() - usual.sum(), 0.0, 1.0))
    return dict(zip(columns, map(float, found), strict=True)), max(chance, 0.0), explained


def _encode(values: Sequence[Any]) -> Floats:
    """A numeric parameter as a curve of its ranks, any other as one column a category."""
    if all(_is_number(value) for value in values):
        ranks = _rank(np.array(values, dtype=np.float64))
        curves = [ranks]
        for power in (2, 3):
            if len(set(values)) > power:
                curve = ranks**power
                curves.append(curve - curve.mean())
        return np.column_stack([curve / (float(curve.std()) or 1.0) for curve in curves])
    names, counts = np.unique([_spell(value) for value in values], return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")][:_MOST_CATEGORIES]
    texts = np.array([_spell(value) for value in values])
    table = (texts[:, None] == kept[None, :]).astype(np.float64)
    table -= table.mean(axis=0)
    return np.asarray(table / np.maximum(table.std(axis=0), 1e-12))


def _rank(values: Floats) -> Floats:
    """Ranks from -1 to 1, equal ones in the middle of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles = ends - 0.5 * (counts + 1)
    ranks = middles[places.ravel()]
    spread = max(1.0, float(len(values) - 1))
    return np.asarray(2.0 * ranks / spread - float((2.0 * ranks / spread).mean()))


def _ask_optuna(
    definition: Mapping[str, Any],
    columns: Mapping[str, Sequence[Any]],
    values: Floats,
    mode: str,
) -> dict[str, float]:
    """PED-ANOVA of a study in memory that has these trials."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    space = definition.get("space")
    ranges = space if isinstance(space, Mapping) else {}
    scales = {name: _make_scale(each, ranges.get(name)) for name, each in columns.items()}
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if mode == "max" else directions.MINIMIZE
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction=direction)
    finally:
        optuna.logging.set_verbosity(level)
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={name: scales[name][1](each[at]) for name, each in columns.items()},
                distributions={name: scale for name, (scale, _) in scales.items()},
                value=float(value),
            )
            for at, value in enumerate(values)
        ]
    )
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: float(found.get(name, 0.0)) for name in columns}


def _make_scale(values: Sequence[Any], range_: object) -> tuple[Any, Any]:
    """Optuna's distribution of a parameter, and how a value is written there."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    kind = range_.get("type") if isinstance(range_, Mapping) else None
    if kind == "choices" or not all(_is_number(value) for value in values):
        texts = list(dict.fromkeys(_spell(value) for value in values))
        return CategoricalDistribution(texts), _spell
    low, high = float(min(values)), float(max(values))
    is_log = isinstance(range_, Mapping) and range_.get("log") is True and low > 0.0
    return FloatDistribution(low, high, log=is_log), float
