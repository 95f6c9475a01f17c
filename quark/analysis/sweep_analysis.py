"""The analysis of a sweep: which parameters matter, and whether the best trial is really better."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.significance import make_generator, rank_values, two_sided_p
from quark.analysis.explanation.history import PastRun, load_history
from quark.analysis.explanation.results import NoiseFloor
from quark.analysis.metric_roles import find_best_trial, list_objectives, pick_comparable
from quark_core.backends.contract import SupportsRead
from quark_core.config.objective import ObjectiveMode
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.base import Record
from quark_core.records.checks import check_choice
from quark_core.records.runs import digest_config, is_seed
from quark_core.records.sweeps import StoredSweep, StoredTrial
from quark_core.runs.reading import encode_key

# Which parameters of a sweep matter: how much of what its trials reach each explains.
#
# By default `ranks`, which needs no library: the ranks of the metric as a sum of a curve of each
# parameter's ranks. Optuna's PED-ANOVA, where Optuna is there, asks what parts the best tenth from
# the rest. What parameters do together is seen by neither.

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
    """Importance of each parameter of a sweep for one metric.

    Attributes:
        metric: Name of the metric.
        method: `ped_anova` (Optuna; shares add up to 1) or `ranks` (share of the variance of the
            metric's ranks that a parameter explains).
        shares: Parameter -> share from 0 to 1, largest first. Seeds and constant parameters are
            omitted.
        chance: With `ranks`, the share that an irrelevant parameter reaches in 95 % of cases, else
            None.
        explained: With `ranks`, the share that all parameters explain together, else None.
        count: Number of trials used.
        note: Reason for a missing result, or None.
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
            "method 'ped_anova' requires Optuna: pip install 'quark-tracker[sweep]'. Or use 'ranks'"
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
        note = f"{len(told):,} completed trials have values, but {_LEAST_TRIALS} are required"
        if len(told) >= _LEAST_TRIALS:
            note = "all values are the same" if columns else "no parameter differs between trials"
        return Importances(metric, method, {}, None, None, len(told), note)
    if method == "ped_anova":
        try:
            shares = _ask_optuna(sweep.definition, columns, values, mode)
            return Importances(metric, method, _sort(shares), None, None, len(told))
        except Exception as error:  # noqa: BLE001 - another Optuna than we know: ours tells as well
            _log.debug("Optuna cannot compute importances: %r", error)
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
    spread = max(1.0, float(len(values) - 1))
    ranks = 2.0 * (rank_values(values) - 1.0) / spread
    return np.asarray(ranks - float(ranks.mean()))


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


# Is the best of a sweep really better than the second and the rest, or was it lucky?
#
# Of many trials that are all equally good one is the best by chance, and the more there are, the
# better it looks. So three things are asked, each with what chance does between seeds of one
# configuration:
#
# - Is the best better than each other? Its lead over the runner-up is tested two-sided, which
# holds its level however many there were to choose from (Gutmann and Maymin 1987; Hung and
# Fithian 2019).
# - Which others may be the best as well? Those within Gupta's bound of it.
# - What would the best reach, were it run again? What it has, less what choosing the best of so
# many adds, which is simulated from values that are drawn together as far as they are noise.

SweepVerdictWord = Literal["better", "no_difference", "cannot_tell"]

_SURE = 0.01
"""Chance of a lead where there is none, up to which one is told, as of a change."""

_LIKELY = 0.05
_LEVEL = 0.95
_MOST_ALIKE = 200
_RESAMPLES = 200
_DRAWN_VALUES = 400_000
_REPEATS_POWER = (2.5758 + 0.8416) ** 2
"""Of the two-sided test at 1 %, for four chances in five to see what is there."""

_MOST_REPEATS = 100
_LEAST_REPEATS = 3


class SweepVerdict(Record, frozen=True, gc=False):
    """Verdict on the best configuration of a sweep, for one metric.

    Attributes:
        metric, mode: Metric, and `min` or `max`.
        verdict: `better` if the best beats all others beyond seed noise, `no_difference`, or
            `cannot_tell`.
        headline, reason, advice: The verdict, its reason and the next step in words. `advice` may
            be empty.
        best: Trial with the best value of the best configuration, or None.
        best_trials: All trials of that configuration.
        best_value: Mean of their values.
        second, second_value: Trial and mean of the runner-up.
        p_value: P-value of the lead over the closest competitor, or None.
        noise: Seed noise, or None if unknown. Its source is `sweep` or `project`.
        expected_again: Expected value of a repetition of the best, or None.
        alike: Up to 200 trials that may be the best too, best first. With 95 % confidence, all such
            trials together include the true best. Empty if the noise is unknown.
        alike_count: Number of such trials.
        compared: Number of configurations that were compared.
        is_spread: Whether configurations differ beyond seed noise, or None if unknown.
    """

    metric: str
    mode: str
    verdict: SweepVerdictWord
    headline: str
    reason: str
    advice: str
    best: int | None = None
    best_trials: tuple[int, ...] = ()
    best_value: float | None = None
    second: int | None = None
    second_value: float | None = None
    p_value: float | None = None
    noise: NoiseFloor | None = None
    expected_again: float | None = None
    alike: tuple[int, ...] = ()
    alike_count: int = 0
    compared: int = 0
    is_spread: bool | None = None


@dataclass(frozen=True, slots=True)
class _Configuration:
    """Trials of one configuration, seeds apart; `values` has one for each run that is not a copy.

    Values are signed so that higher is better.
    """

    numbers: tuple[int, ...]
    values: tuple[float, ...]
    digest: str

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class _Field:
    """The configurations from the best to the worst, as arrays, of so many completed trials."""

    configurations: Sequence[_Configuration]
    means: Floats
    counts: Floats
    completed: int


def judge_sweep(
    sweep: StoredSweep, trials: Sequence[StoredTrial], reader: SupportsRead | None = None
) -> tuple[SweepVerdict, ...]:
    """Say of each metric of a sweep whether its best trial is really the best.

    Args:
        sweep: The sweep.
        trials: Its trials.
        reader: The store, which is asked what chance does in other runs of the project where
            the sweep's own trials do not tell; None to ask nobody.
    """
    # Of a halving one alone is at the end: it was chosen among those of the rung before.
    compared = pick_comparable(sweep, trials, least=2)
    top = find_best_trial(sweep, trials)
    aside = ""
    if compared and top is not None and top not in compared:
        aside = f" Only trial {top.number} went further; it was selected from these."
    completed = sum(trial.state == "completed" for trial in trials)
    verdicts = []
    for place, (metric, mode) in enumerate(list_objectives(sweep.definition)):
        field = _gather(compared, place, 1.0 if mode == "max" else -1.0, completed)
        ask = None if reader is None else _ProjectNoise(reader, sweep.project, metric, mode)
        verdict = _judge(field, metric, mode, ask)
        verdicts.append(msgspec.structs.replace(verdict, reason=verdict.reason + aside))
    return tuple(verdicts)


def _gather(trials: Sequence[StoredTrial], place: int, sign: float, completed: int) -> _Field:
    groups: dict[str, list[StoredTrial]] = defaultdict(list)
    for trial in trials:
        values = trial.values or ()
        if place < len(values) and values[place] is not None and math.isfinite(values[place]):
            groups[digest_config(trial.parameters)].append(trial)
    found = []
    for digest, members in groups.items():
        members.sort(key=lambda trial: -sign * trial.values[place])  # type: ignore[index]
        values = _drop_copies(
            [(trial.parameters, sign * trial.values[place]) for trial in members]  # type: ignore[index]
        )
        found.append(_Configuration(tuple(trial.number for trial in members), values, digest))
    found.sort(key=lambda each: (-each.mean, each.numbers))
    return _Field(
        found,
        np.array([each.mean for each in found]),
        np.array([float(len(each.values)) for each in found]),
        completed,
    )


def _drop_copies(runs: Sequence[tuple[Mapping[str, Any], float]]) -> tuple[float, ...]:
    """One value for each run that says something of chance.

    Runs that end at the same value to the last bit are one run, unless they had seeds that
    differ: a training that is repeated bit by bit has not been repeated.
    """
    by_seed: dict[str, list[float]] = defaultdict(list)
    for parameters, value in runs:
        by_seed[repr(sorted((k, v) for k, v in parameters.items() if is_seed(k)))].append(value)
    out: list[float] = []
    for values in by_seed.values():
        out += sorted(set(values))
    return tuple(out)


class _ProjectNoise:
    """What chance does between seeds of other runs of the project, where anybody asks."""

    def __init__(
        self, reader: SupportsRead, project: str, metric: str, mode: ObjectiveMode
    ) -> None:
        self._reader = reader
        self._project = project
        self._metric = metric
        self._sign = 1.0 if mode == "max" else -1.0

    def find(self, least: float) -> NoiseFloor | None:
        """The noise among configurations that are on average at least so good, or None."""
        try:
            key = encode_key(self._metric, "metric")
            history = load_history(self._reader, self._project, key)
        except QuarkError:
            return None
        return _pool(self._group(history), least, "project")

    def _group(self, history: Sequence[PastRun]) -> list[list[float]]:
        groups: dict[Hashable, dict[bytes | None, set[float]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for run in history:
            value = run.value
            if run.is_whole and run.config_digest and value is not None and math.isfinite(value):
                groups[run.sign_rest()][run.seed].add(self._sign * value)
        return [
            [value for values in by_seed.values() for value in sorted(values)]
            for by_seed in groups.values()
        ]


def _pool(groups: Iterable[Sequence[float]], least: float, source: str) -> NoiseFloor | None:
    """The deviation within groups that are on average at least so good.

    What is worse does not count: where nothing is learned runs hardly differ, and where they
    diverge they differ by all means.
    """
    known = [each for each in groups if len(each) > 1 and float(np.mean(each)) >= least]
    return NoiseFloor.pool(known, source)


def _judge(
    field: _Field, metric: str, mode: ObjectiveMode, ask: _ProjectNoise | None
) -> SweepVerdict:
    count = len(field.configurations)
    if count < 2:
        return _judge_few(field, metric, mode)
    # The better half, and of a few the first three: they stand from the best to the worst.
    least = float(field.means[min(count - 1, max(2, (count - 1) // 2))])
    floor = _pool((each.values for each in field.configurations), least, "sweep")
    if floor is None and ask is not None:
        floor = ask.find(least)
    sign = 1.0 if mode == "max" else -1.0
    best, second = field.configurations[:2]
    known: dict[str, Any] = {
        "metric": metric,
        "mode": mode,
        "best": best.numbers[0],
        "best_trials": best.numbers,
        "best_value": sign * best.mean,
        "second": second.numbers[0],
        "second_value": sign * second.mean,
        "noise": floor,
        "compared": count,
    }
    lead = (
        f"{_name(best, capital=True)} has {_write(sign * best.mean)}, {_name(second)} "
        f"{_write(sign * second.mean)}"
    )
    if floor is None:
        return SweepVerdict(
            **known,
            verdict="cannot_tell",
            headline=f"It is unknown if {_name(best)} is really the best",
            reason=f"{lead}, and no good config was run with several seeds, so the seed noise is "
            f"unknown. The best of {count:,} looks better than it is.",
            advice=f"Run the best few again with {_LEAST_REPEATS} seeds each: trials "
            f"{_list_numbers(field)}.",
        )
    if floor.deviation <= 0.0:
        return _judge_exact(field, floor, known, lead)
    return _judge_noisy(field, floor, known, lead, sign)


def _judge_few(field: _Field, metric: str, mode: ObjectiveMode) -> SweepVerdict:
    if not field.configurations:
        headline = "No trial is completed yet"
        if field.completed:
            headline = "No completed trial has the metric"
        return SweepVerdict(
            metric, mode, "cannot_tell", headline,
            f"No completed trial has a finite value of {metric}.", "",
        )  # fmt: skip
    (only,) = field.configurations
    sign = 1.0 if mode == "max" else -1.0
    return SweepVerdict(
        metric, mode, "cannot_tell", "A single config cannot be the best",
        f"{_name(only, capital=True)} is the only completed one.", "",
        only.numbers[0], only.numbers, sign * only.mean, compared=1
    )  # fmt: skip


def _judge_exact(
    field: _Field, floor: NoiseFloor, known: Mapping[str, Any], lead: str
) -> SweepVerdict:
    """Runs of other seeds all end at one value: nothing is random, or the metric is at its end."""
    best, second = field.configurations[:2]
    alike = [each for each in field.configurations if each.mean == best.mean]
    tested = max(len(best.values), len(second.values)) > 1 and floor.source == "sweep"
    if len(alike) > 1:
        word: SweepVerdictWord = "no_difference"
        headline = f"{len(alike):,} configs are equally good"
        reason = f"{lead}; they end at one value"
    elif tested:
        word, headline = "better", f"{_name(best, capital=True)} is really the best"
        reason = f"{lead}, and other seeds change nothing"
    else:
        word, headline = "cannot_tell", f"It is unknown if {_name(best)} is really the best"
        reason = f"{lead}. Seeds changed nothing in others, but were not tried here"
    return SweepVerdict(
        **known,
        verdict=word,
        headline=headline,
        reason=f"{reason}.",
        advice="",
        alike=tuple(each.numbers[0] for each in alike[:_MOST_ALIKE]),
        alike_count=len(alike),
    )


def _judge_noisy(
    field: _Field, floor: NoiseFloor, known: Mapping[str, Any], lead: str, sign: float
) -> SweepVerdict:
    best = field.configurations[0]
    count = len(field.configurations)
    errors = floor.deviation * np.sqrt(1.0 / field.counts[0] + 1.0 / field.counts[1:])
    t = float(((field.means[0] - field.means[1:]) / errors).min())
    p = two_sided_p(t, floor.degrees)
    alike = _find_alike(field, floor)
    again = float(field.means[0]) - _measure_luck(field, floor)
    spread = _is_spread(field, floor)
    apart = float(field.means[0] - field.means[1]) / floor.deviation
    where = "runs of this sweep" if floor.source == "sweep" else "other runs of the project"
    told = (
        f"{lead}: {apart:.2g} times the standard deviation between seeds "
        f"({floor.deviation:.3g}, from {floor.run_count:,} {where}), p = {p:.2g}"
    )
    others = f"{len(alike):,} of {count:,} configs may be the best"
    if p <= _SURE:
        word: SweepVerdictWord = "better"
        headline = f"{_name(best, capital=True)} is really the best"
        reason = f"{told}. Seed noise seldom causes that"
        advice = ""
    elif p <= _LIKELY:
        word = "cannot_tell"
        headline = f"{_name(best, capital=True)} is likely the best, but not certainly"
        reason = f"{told}. Seed noise alone causes that once in {1.0 / p:.0f}; {others}"
        advice = _advise(field, floor, alike)
    else:
        word = "no_difference"
        headline = (
            f"{_name(best, capital=True)} is not better than others: {others}"
            if spread
            else f"All {count:,} configs are equally good, within seed noise"
        )
        reason = f"{told}. That is within seed noise"
        advice = _advise(field, floor, alike)
    reason += f". A second run would reach about {_write(sign * again)}."
    single = max(field.configurations, key=lambda each: max(each.values))
    if single is not best:
        top = _write(sign * max(single.values))
        reason += f" Trial {single.numbers[0]} has the best single value, {top}, but its "
        reason += f"{len(single.values)} runs have {_write(sign * single.mean)} on average."
    return SweepVerdict(
        **known,
        verdict=word,
        headline=headline,
        reason=reason,
        advice=advice,
        p_value=p,
        expected_again=sign * again,
        alike=tuple(field.configurations[at].numbers[0] for at in alike[:_MOST_ALIKE]),
        alike_count=len(alike),
        is_spread=spread,
    )


def _find_alike(field: _Field, floor: NoiseFloor) -> list[int]:
    """Configurations that may be the best: none is better by more than Gupta's bound."""
    bound = _find_bound(len(field.means), floor.degrees) * floor.deviation
    best_of = {
        float(runs): float(field.means[field.counts == runs].max())
        for runs in np.unique(field.counts)
    }
    reach = np.full(len(field.means), -math.inf)
    for runs, top in best_of.items():
        reach = np.maximum(reach, top - bound * np.sqrt(1.0 / field.counts + 1.0 / runs))
    return [int(at) for at in np.flatnonzero(field.means >= reach)]


@lru_cache(maxsize=256)
def _find_bound(count: int, degrees: int) -> float:
    """How many errors of a difference the true best of so many stays behind, 95 times in 100.

    The one-sided quantile of the largest of `count - 1` differences to one mean, by quadrature
    over that mean and over the estimate of the deviation.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()
    # The deviation by its quantiles: Wilson and Hilferty's normal form of chi-square.
    ranks = np.linspace(0.0025, 0.9975, 200)
    normal = _invert_normal(ranks)
    part = 2.0 / (9.0 * degrees)
    scales = np.sqrt(np.maximum(1.0 - part + normal * math.sqrt(part), 0.0) ** 3)
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        places = nodes[:, None] + middle * math.sqrt(2.0) * scales[None, :]
        share = float((weights @ _normal_cdf(places) ** (count - 1)).mean())
        low, high = (middle, high) if share < _LEVEL else (low, middle)
    return high


def _normal_cdf(places: Floats) -> Floats:
    return np.interp(places, *_tabulate_normal())


def _invert_normal(ranks: Floats) -> Floats:
    places, shares = _tabulate_normal()
    return np.interp(ranks, shares, places)


@lru_cache(maxsize=1)
def _tabulate_normal() -> tuple[Floats, Floats]:
    places = np.linspace(-8.0, 8.0, 8001)
    return places, np.array([0.5 * math.erfc(-place / math.sqrt(2.0)) for place in places])


def _measure_luck(field: _Field, floor: NoiseFloor) -> float:
    """By how much the best of these is better than it is, on average.

    The means are drawn together as far as they are noise, taken for true, and made noisy again.
    """
    count = len(field.means)
    noise = floor.deviation / np.sqrt(field.counts)
    centre = field.means.mean()
    # Halves of the distance, which alone may be too large for its square.
    variance = float(((field.means - centre) ** 2).sum() / (count - 1))
    if not math.isfinite(variance) or variance <= 0.0:
        return 0.0
    share = max(0.0, 1.0 - float((noise**2).mean()) / variance)
    true = centre + share * (field.means - centre)
    generator = make_generator(field.means)
    draws = max(20, min(_RESAMPLES, _DRAWN_VALUES // count))
    seen = true + noise * generator.standard_normal((draws, count))
    chosen = seen.argmax(axis=1)
    return float((seen[np.arange(draws), chosen] - true[chosen]).mean())


def _is_spread(field: _Field, floor: NoiseFloor) -> bool:
    """Whether configurations differ by more than chance does, at 5 %: an F test by simulation."""
    count = len(field.means)
    weights = field.counts
    centre = float((weights * field.means).sum() / weights.sum())
    between = float((weights * (field.means - centre) ** 2).sum()) / (count - 1)
    generator = make_generator(field.means)
    drawn = generator.chisquare(count - 1, 4000) / (count - 1)
    drawn /= generator.chisquare(floor.degrees, 4000) / floor.degrees
    return bool(between / floor.deviation**2 > np.quantile(drawn, 1.0 - _LIKELY))


def _advise(field: _Field, floor: NoiseFloor, alike: Sequence[int]) -> str:
    gap = float(field.means[0] - field.means[1])
    needed = _MOST_REPEATS + 1
    if gap > 0.0:
        needed = math.ceil(min(needed, 2.0 * _REPEATS_POWER * (floor.deviation / gap) ** 2))
    if needed > _MOST_REPEATS:
        return (
            "Use the cheapest of these: to separate the first two would take more than "
            f"{_MOST_REPEATS} seeds each."
        )
    few = max(2, min(len(alike), 5))
    return (
        f"Run the best {few} again with {max(_LEAST_REPEATS, needed)} seeds each: trials "
        f"{_list_numbers(field, few)}."
    )


def _list_numbers(field: _Field, most: int = 5) -> str:
    return ", ".join(str(each.numbers[0]) for each in field.configurations[:most])


def _name(each: _Configuration, *, capital: bool = False) -> str:
    numbers = each.numbers
    if len(numbers) == 1:
        text = f"trial {numbers[0]}"
    else:
        text = f"the config of trial {numbers[0]} ({len(numbers)} runs)"
    return text[0].upper() + text[1:] if capital else text


def _write(value: float) -> str:
    return f"{value:.4g}"
