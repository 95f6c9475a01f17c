"""The likely causes of a change, ranked: evidence from pairs of runs, history and timing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from quark.analysis.comparison.significance import student_quantile
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.divergence import fits_divergence, score_divergence
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.results import (
    ABSENT,
    Cause,
    ChangeVerdict,
    Effect,
    FirstDivergence,
    Likelihood,
    NoiseFloor,
    Note,
)
from quark.analysis.explanation.run_attributes import (
    Place,
    encode_value,
    is_incidental,
    tells_runs_apart,
)
from quark.analysis.observations import format_number
from quark.provenance.environment import NUMERIC_PACKAGES
from quark_core.config.arguments import EXCHANGED_FIELD
from quark_core.records import EvidenceRecord

Floats = NDArray[np.float64]

LEAST_HISTORY = 20
"""Runs below which a regression stays silent."""

_SHOWN_DIGITS = 8
_ABSENT_TEXT = encode_value(ABSENT)
_LEVEL = 0.95
_RESAMPLES = 100
_MOST_COLUMNS = 300
_MOST_LEVELS = 40
_FEW_NUMBERS = 4
_TWO = 2
_NOTHING = 1e-12  # of the largest square: what is below is rounding
_PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_OUTLIER = 6.0  # in spreads of the middle half: what is beyond counts as that far away


@dataclass(frozen=True, slots=True)
class Attribution:
    """What the regression says.

    Attributes:
        effects: Difference -> its effect, with the share of resamples in which it is the largest
            in the direction of the change.
        together: Difference -> others that always changed with it.
        count: Runs that it rests on.
    """

    effects: Mapping[Place, Effect]
    together: Mapping[Place, tuple[Place, ...]]
    count: int


def measure_pairs(
    history: Sequence[PastRun], difference: Difference, floor: NoiseFloor | None
) -> Effect | None:
    """What a change did between runs that differ in it alone, seeds aside; None without any."""
    values = encode_value(difference.before), encode_value(difference.after)
    if values[0] == values[1] or not difference.is_clean:
        return None
    key = difference.key
    sides: tuple[set[int], set[int]] = set(), set()
    found: list[tuple[PastRun, float, int, int]] = []
    for run in history:
        own = run.texts.get(key, _ABSENT_TEXT)
        if own in values and run.is_whole and run.value is not None:
            side, rest = values.index(own), run.hash_rest(key)
            sides[side].add(rest)
            found.append((run, run.value, side, rest))
    both = sides[0] & sides[1]
    groups: dict[Hashable, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for run, value, side, rest in found:
        # Most runs have no like on the other side, and need no longer look.
        if rest in both:
            groups[run.sign_rest(key)][side].append(value)
    return _measure(groups.values(), floor)


def name_check_group(first_id: str, second_id: str) -> str:
    """The group of the runs that `quark why FIRST SECOND --check` makes."""
    return f"why/{first_id[:_SHOWN_DIGITS]}-{second_id[:_SHOWN_DIGITS]}"


def measure_checks(
    history: Sequence[PastRun], first: PastRun, second_id: str, floor: NoiseFloor | None
) -> dict[str, Effect]:
    """What runs say that were made to check one thing alone, or some together, by its place.

    Args:
        history: Runs of the project, with those that are compared.
        first: The first side's run, which they are again but for what was exchanged.
        second_id: The second side's run, which that was taken from.
        floor: What chance does.
    """
    group = name_check_group(first.run_id, second_id)
    after: dict[str, list[float]] = defaultdict(list)
    for run in history:
        if group in run.groups and run.is_whole and run.value is not None:
            after[str(run.fields.get(EXCHANGED_FIELD))].append(run.value)
    if not after:
        return {}
    kind = first.sign_rest()
    before = [
        run.value
        for run in history
        if run.value is not None and run.is_whole and run.sign_rest() == kind
    ]
    found = {place: _measure([(before, values)], floor) for place, values in after.items()}
    return {place: effect for place, effect in found.items() if effect is not None}


def _measure(
    groups: Iterable[tuple[list[float], list[float]]], floor: NoiseFloor | None
) -> Effect | None:
    both = [(np.array(one), np.array(two)) for one, two in groups if one and two]
    if not both:
        return None
    gaps = np.array([float(two.mean() - one.mean()) for one, two in both])
    weights = np.array([1.0 / (1.0 / len(one) + 1.0 / len(two)) for one, two in both])
    mean = float((gaps * weights).sum() / weights.sum())
    count = sum(min(len(one), len(two)) for one, two in both)
    low, high = _bound(mean, both, weights, floor)
    return Effect("pairs", mean, low, high, _LEVEL, count)


def _bound(
    mean: float,
    both: Sequence[tuple[Floats, Floats]],
    weights: Floats,
    floor: NoiseFloor | None,
) -> tuple[float | None, float | None]:
    """The interval: by the spread within the groups, with the noise floor's where it is known."""
    squares = sum(float(((side - side.mean()) ** 2).sum()) for pair in both for side in pair)
    degrees = sum(len(side) - 1 for pair in both for side in pair)
    if len(both) > 1:
        gaps = np.array([float(two.mean() - one.mean()) for one, two in both])
        squares += float((weights * (gaps - mean) ** 2).sum())
        degrees += len(both) - 1
    if floor is not None:
        squares += floor.deviation**2 * floor.degrees
        degrees += floor.degrees
    if degrees < 1:
        return None, None
    error = math.sqrt(squares / degrees / float(weights.sum()))
    half = student_quantile(0.5 + _LEVEL / 2.0, degrees) * error
    return mean - half, mean + half


def attribute(
    history: Sequence[PastRun], differences: Sequence[Difference], change: float
) -> Attribution | None:
    """What a regression says of each difference; functions stand for their sources together."""
    stands: dict[Place, list[Difference]] = {}
    for each in differences:
        stands.setdefault(each.in_history.key, []).append(each)
    found = regress(history, [each[0].in_history for each in stands.values()], change)
    if found is None:
        return None
    effects, together = {}, {}
    for key, members in stands.items():
        if key not in found.effects and not found.together[key]:
            continue
        alike = [
            each.key for other in (key, *found.together[key]) for each in stands.get(other, ())
        ]
        for member in members:
            if key in found.effects:
                effects[member.key] = found.effects[key]
            together[member.key] = tuple(place for place in alike if place != member.key)
    return Attribution(effects, together, found.count)


def regress(
    history: Sequence[PastRun], differences: Sequence[Difference], change: float
) -> Attribution | None:
    """A ridge regression of the metric on all that varied; None where history is too short.

    Args:
        history: Runs of the project, those that are compared left out.
        differences: What differs.
        change: By how much the metric changed.
    """
    runs = [run for run in history if run.is_whole]
    if len(runs) < LEAST_HISTORY or not differences or not change:
        return None
    table = _Table(runs, [each.key for each in differences])
    together = {
        one.key: tuple(
            two.key for two in differences if two is not one and table.are_alike(one.key, two.key)
        )
        for one in differences
    }
    strange = {each.key for each in differences if not table.knows(each)}
    # What cannot be told from something that history has not seen has not been seen either.
    candidates = [
        each for each in differences if strange.isdisjoint((each.key, *together[each.key]))
    ]
    if not candidates:
        return Attribution({}, together, len(runs)) if any(together.values()) else None
    design = table.make_design([each.key for each in candidates])
    y = _tame(np.array([run.value for run in runs], dtype=np.float64))
    shifts = np.array([design.shift(each) for each in candidates])
    y = y - y.mean()
    penalty = _choose_penalty(design.columns, y)
    drawn = _resample(design.columns, y, shifts, penalty)
    own = shifts @ _solve(design.columns, y, np.ones(len(y)), penalty)
    effects = _sum_up(candidates, together, own, drawn, change, len(runs))
    return Attribution(effects, together, len(runs))


def _sum_up(
    candidates: Sequence[Difference],
    together: Mapping[Place, tuple[Place, ...]],
    own: Floats,
    drawn: Floats,
    change: float,
    count: int,
) -> dict[Place, Effect]:
    """What always changed together counts as one: as the largest of it in each resample."""
    towards = drawn * math.copysign(1.0, change)
    largest = towards.argmax(axis=1)
    wins = towards.max(axis=1) > 0.0
    effects = {}
    for index, each in enumerate(candidates):
        members = [
            other
            for other, candidate in enumerate(candidates)
            if other == index or candidate.key in together[each.key]
        ]
        agreement = float((np.isin(largest, members) & wins).mean())
        total = drawn[:, members].sum(axis=1)
        low, high = np.quantile(total, [0.5 - _LEVEL / 2.0, 0.5 + _LEVEL / 2.0])
        effects[each.key] = Effect(
            "history",
            float(own[members].sum()),
            float(low),
            float(high),
            _LEVEL,
            count,
            agreement,
        )
    return effects


def _resample(columns: Floats, y: Floats, shifts: Floats, penalty: float) -> Floats:
    """The effects of each difference in each resample of the runs."""
    seed = xxhash.xxh3_64_intdigest(y.tobytes())
    generator = np.random.default_rng(seed)
    count = len(y)
    out = np.empty((_RESAMPLES, len(shifts)))
    whole = _stack(columns, y)
    for row in range(_RESAMPLES):
        weights = np.bincount(generator.integers(0, count, count), minlength=count)
        out[row] = shifts @ _solve(columns, y, weights.astype(np.float64), penalty, whole)
    return out


def _stack(columns: Floats, y: Floats) -> Floats:
    """What `_solve` sums up, of which each resample takes its rows."""
    return np.column_stack([columns, y, np.ones(len(y))])


def _solve(
    columns: Floats, y: Floats, weights: Floats, penalty: float, stacked: Floats | None = None
) -> Floats:
    """Coefficients of a weighted ridge regression with an intercept."""
    total = float(weights.sum())
    width = columns.shape[1]
    if width <= len(y):
        # Sums, squares and products in one go, centred afterwards.
        drawn = weights > 0.0
        whole = (_stack(columns, y) if stacked is None else stacked)[drawn]
        sums = (whole * weights[drawn, None]).T @ whole
        sums -= np.outer(sums[-1], sums[-1]) / total
        gram = sums[:width, :width]
        gram[np.diag_indices(width)] += penalty
        return np.asarray(np.linalg.solve(gram, sums[:width, width]), np.float64)
    roots = np.sqrt(weights)[:, None]
    centred = (columns - (columns * weights[:, None]).sum(axis=0) / total) * roots
    target = (y - float((weights * y).sum()) / total) * roots[:, 0]
    kernel = centred @ centred.T
    kernel[np.diag_indices(len(y))] += penalty
    return np.asarray(centred.T @ np.linalg.solve(kernel, target), np.float64)


def _choose_penalty(columns: Floats, y: Floats) -> float:
    """The penalty that foretells runs best that it has not seen, each left out once."""
    centred = columns - columns.mean(axis=0)
    if centred.shape[1] <= len(y):
        squares, turned = np.linalg.eigh(centred.T @ centred)
        is_some = squares > squares[-1] * _NOTHING
        squares = squares[is_some]
        u = centred @ turned[:, is_some] / np.sqrt(squares)
    else:
        squares, u = np.linalg.eigh(centred @ centred.T)
        is_some = squares > squares[-1] * _NOTHING
        squares, u = squares[is_some], u[:, is_some]
    projected = (u * y[:, None]).sum(axis=0)
    best, least = _PENALTIES[0], math.inf
    for penalty in _PENALTIES:
        shrink = squares / (squares + penalty)
        leverage = (u**2 * shrink).sum(axis=1) + 1.0 / len(y)
        residuals = (y - (u * (shrink * projected)).sum(axis=1)) / np.maximum(1.0 - leverage, 1e-6)
        error = float((residuals**2).mean())
        if error < least:
            best, least = penalty, error
    return best


def _tame(y: Floats) -> Floats:
    """Values with what lies far out brought in: one run that blew up is not all of history."""
    low, middle, high = np.quantile(y, [0.25, 0.5, 0.75])
    spread = high - low
    if spread <= 0.0:
        return y
    tamed: Floats = np.clip(y, middle - _OUTLIER * spread, middle + _OUTLIER * spread)
    return tamed


class _Design:
    """Columns, and which of them belong to which trait."""

    def __init__(self, columns: Floats, coders: Mapping[Place, tuple[slice, _Coder]]) -> None:
        self.columns = columns
        self._coders = coders

    def shift(self, difference: Difference) -> Floats:
        """By how much each column changes from before to after."""
        out = np.zeros(self.columns.shape[1])
        where, coder = self._coders[difference.key]
        out[where] = coder.code(difference.after) - coder.code(difference.before)
        return out


class _Coder:
    """One trait as columns: numbers linearly and by rank, all else and few numbers by value.

    Args:
        values: Text -> value, of all values that it has.
    """

    def __init__(self, values: Mapping[bytes, Any]) -> None:
        self._levels = sorted(values)
        numbers = [value for value in values.values() if value != ABSENT]
        self._numbers: Floats | None = None
        if len(numbers) == len(values) and all(map(_is_number, numbers)):
            self._numbers = np.unique(np.array(numbers, dtype=np.float64))
            self._low = float(self._numbers[0])
            self._width = float(self._numbers[-1] - self._numbers[0]) or 1.0
            # Two numbers are one step, however they are coded.
            if len(self._levels) > _FEW_NUMBERS or len(self._numbers) <= _TWO:
                self._levels = []

    @property
    def width(self) -> int:
        """How many columns."""
        return len(self._levels) + (0 if self._numbers is None else 2)

    def code(self, value: Any) -> Floats:
        """The columns of one value."""
        text = encode_value(value)
        own = [float(text == level) for level in self._levels]
        if self._numbers is None:
            return np.array(own)
        linear = (float(value) - self._low) / self._width
        rank = np.searchsorted(self._numbers, float(value)) / max(1, len(self._numbers) - 1)
        return np.array([linear, float(rank), *own])


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


class _Trait:
    """One trait of all runs.

    Attributes:
        values: Text -> value, in the order in which runs have them.
        pattern: Which runs have the same, whatever it is: the number of each one's value.
    """

    def __init__(self, runs: Sequence[PastRun], place: Place) -> None:
        texts = [run.texts.get(place, _ABSENT_TEXT) for run in runs]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        self.pattern = tuple(map(numbers.__getitem__, texts))
        having = dict(zip(texts, runs, strict=True))
        self.values = {text: having[text].traits.values.get(place, ABSENT) for text in numbers}


class _Table:
    """The traits of runs, by trait."""

    def __init__(self, runs: Sequence[PastRun], wanted: Sequence[Place]) -> None:
        self._count = len(runs)
        places: set[Place] = set().union(*(run.texts for run in runs))
        self._traits = {
            place: _Trait(runs, place)
            for place in sorted(places)
            if place in wanted or tells_runs_apart(place)
        }

    def knows(self, difference: Difference) -> bool:
        """Whether history has seen both of its values."""
        trait = self._traits.get(difference.key)
        sides = {encode_value(difference.before), encode_value(difference.after)}
        return difference.is_clean and trait is not None and sides <= trait.values.keys()

    def are_alike(self, one: Place, two: Place) -> bool:
        """Whether the two always changed together."""
        first, second = self._traits.get(one), self._traits.get(two)
        if first is None or second is None or len(first.values) == 1:
            return False
        return first.pattern == second.pattern

    def make_design(self, wanted: Sequence[Place]) -> _Design:
        """Columns of what varied, the wanted ones first, as many as there is room for."""
        varied = {
            place: len(trait.values)
            for place, trait in self._traits.items()
            if len(trait.values) > 1
        }
        order = [
            *wanted,
            *sorted(varied.keys() - set(wanted), key=lambda place: (varied[place], place)),
        ]
        blocks: list[Floats] = []
        coders: dict[Place, tuple[slice, _Coder]] = {}
        seen: set[tuple[int, ...]] = set()
        used = 0
        for place in order:
            trait = self._traits[place]
            coder = _Coder(trait.values)
            is_wanted = place in wanted
            if not is_wanted and (
                coder.width > min(_MOST_LEVELS, self._count // 2)
                or used + coder.width > _MOST_COLUMNS
            ):
                continue
            if not is_wanted and trait.pattern in seen:
                continue
            seen.add(trait.pattern)
            coded = np.array([coder.code(value) for value in trait.values.values()])
            blocks.append(coded[list(trait.pattern)])
            coders[place] = slice(used, used + coder.width), coder
            used += coder.width
        return _Design(np.concatenate(blocks, axis=1), coders)


_AGREEMENT = 0.8
"""Share of resamples that must hold one cause for the largest before it is probable."""

_MOST_SHARE = 0.25
"""Share of the change below which an effect cannot be what brought it about."""

_LEAST_SHARE = 0.4
"""Share of the change from which on an effect may explain it."""

_LEAST_TO_ACQUIT = 60
"""Runs from which on a regression may say that something has no effect: with fewer it is drawn
to none of its own."""

_KINDS = ("seed", "data", "config", "code", "launch", "switch", "package", "hardware")
_CHANGES = ("better", "worse", "changed")
_STANDINGS: tuple[Likelihood, ...] = ("probable", "possible", "unlikely")

_NEVER_RECORDED = (
    Note("switch", "environment variables", "few are recorded, by a fixed list"),
    Note("data", "files without a fingerprint", "what else the code has read"),
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is judged.

    Attributes:
        verdict: Whether there is a change.
        change: By how much the metric changed, or None.
        floor: What chance does, or None.
        differences: What differs.
        unknown: What was not recorded.
        pairs: Difference -> what runs say that differ in it alone.
        attribution: What a regression says, or None.
        divergence: Where the curves part.
        has_hidden: Whether something that was not recorded differs for sure.
    """

    verdict: ChangeVerdict
    change: float | None
    floor: NoiseFloor | None
    differences: Sequence[Difference]
    unknown: Sequence[Note]
    pairs: Mapping[Place, Effect]
    attribution: Attribution | None
    divergence: FirstDivergence
    has_hidden: bool = False


def rank_causes(case: Candidates) -> tuple[Cause, ...]:
    """The causes, the most likely first."""
    judged = [(_judge(case, each), each) for each in case.differences]
    judged.sort(key=lambda pair: _order(pair[0], pair[1], case))
    return tuple(cause for cause, _ in judged)


def list_never_recorded(case: Candidates, causes: Sequence[Cause]) -> tuple[Note, ...]:
    """What no run records and may be to blame, where nothing that is recorded explains a change."""
    explained = any(cause.standing != "unlikely" for cause in causes)
    return () if explained or case.verdict not in _CHANGES else _NEVER_RECORDED


def _judge(case: Candidates, difference: Difference) -> Cause:
    pieces: list[tuple[Likelihood, EvidenceRecord]] = []
    pairs = case.pairs.get(difference.key)
    history = None
    together: tuple[Place, ...] = ()
    if case.attribution is not None:
        history = case.attribution.effects.get(difference.key)
        together = case.attribution.together.get(difference.key, ())
    pieces += _weigh_pairs(case, difference, pairs)
    pieces += _weigh_history(case, difference, history, settled=bool(pieces))
    pieces += _weigh_alone(case, difference)
    pieces += _weigh_timing(case, difference)
    pieces += _weigh_kind(case, difference)
    standing = _decide(case, [standing for standing, _ in pieces])
    words = [piece.summary for _, piece in pieces]
    if difference.words and difference.words not in words:
        words.insert(0, difference.words)
    if not pieces:
        words.append("no other run has evidence")
    return Cause(
        difference.kind,
        difference.place,
        difference.before,
        difference.after,
        standing,
        pairs or history,
        "; ".join(words),
        tuple(piece for _, piece in pieces),
        tuple(place for _, place in together),
        difference.repeats,
    )


def _decide(case: Candidates, standings: Sequence[Likelihood]) -> Likelihood:
    """The first piece of evidence that says more than possible decides: they come in order."""
    told: Likelihood = next(
        (standing for standing in standings if standing != "possible"), "possible"
    )
    if told == "probable" and case.verdict in ("cannot_tell", "no_difference"):
        return "possible"
    return told


def _weigh_pairs(
    case: Candidates, difference: Difference, effect: Effect | None
) -> list[tuple[Likelihood, EvidenceRecord]]:
    if effect is None or case.change is None:
        return []
    pairs = f"{effect.count} pair{'s' if effect.count != 1 else ''} of runs differ in this alone"
    standing = judge_effect(effect, case.change)
    words = f"{pairs}: {_show(effect)}"
    if standing == "unlikely" and effect.low is not None and effect.high is not None:
        reach = max(abs(effect.low), abs(effect.high))
        if effect.low <= 0.0 <= effect.high:
            words = f"{pairs}: no effect found (|d| < {_short(reach)})"
    return [(standing, _note("pairs", difference, words, effect))]


def judge_effect(effect: Effect, change: float) -> Likelihood:
    """Whether what runs say that differ in one thing alone explains a change."""
    if effect.low is None or effect.high is None:
        return "possible"
    size, reach = abs(change), max(abs(effect.low), abs(effect.high))
    towards = effect.difference * (1.0 if change > 0 else -1.0)
    if effect.low <= 0.0 <= effect.high:
        return "unlikely" if reach < _MOST_SHARE * size else "possible"
    if towards > _LEAST_SHARE * size:
        return "probable"
    return "unlikely" if towards < 0.0 or reach < _MOST_SHARE * size else "possible"


def _weigh_history(
    case: Candidates, difference: Difference, effect: Effect | None, *, settled: bool
) -> list[tuple[Likelihood, EvidenceRecord]]:
    if effect is None or case.change is None or effect.low is None or effect.high is None:
        return []
    size = abs(case.change)
    agreement = effect.agreement or 0.0
    towards = effect.difference * (1.0 if case.change > 0 else -1.0)
    standing: Likelihood = "possible"
    told = f"{effect.count} runs of the project: {_show(effect)}"
    reach = max(abs(effect.low), abs(effect.high))
    if agreement >= _AGREEMENT and towards > _LEAST_SHARE * size:
        standing = "probable"
        told += f", the largest one in {100 * agreement:.0f} % of resamples"
    elif reach < _MOST_SHARE * size and effect.count >= _LEAST_TO_ACQUIT:
        standing = "unlikely"
        told = f"{effect.count} runs of the project: no effect found (|d| < {_short(reach)})"
    elif settled:
        return []
    return [(standing, _note("history", difference, told, effect))]


def _weigh_alone(
    case: Candidates, difference: Difference
) -> list[tuple[Likelihood, EvidenceRecord]]:
    """The only thing that differs did it, where enough was recorded to say so."""
    others = [
        each
        for each in case.differences
        if each is not difference
        and each.kind != "seed"
        and not each.is_aside
        and not each.may_follow
        and not is_incidental(each.key)
    ]
    if difference.kind == "seed" or difference.is_aside or others:
        return []
    words = "no other recorded difference"
    for is_so, doubt in (
        (is_incidental(difference.key), "its name suggests that it is not a setting"),
        (case.has_hidden, "another difference explains it"),
        (difference.may_follow, "it may follow from another difference"),
    ):
        if is_so:
            return [("possible", _note("alone", difference, f"{words}, but {doubt}"))]
    named = [each.place for each in case.differences if is_incidental(each.key)]
    missing = sorted({note.kind for note in case.unknown if not note.place})
    if named:
        words += f", but for {', '.join(named)}"
    if missing:
        words += f" (not recorded: {', '.join(missing)})"
    return [("probable", _note("alone", difference, words))]


def _weigh_timing(
    case: Candidates, difference: Difference
) -> list[tuple[Likelihood, EvidenceRecord]]:
    words = score_divergence(difference, case.divergence)
    if words is None:
        return []
    fits = fits_divergence(difference, case.divergence)
    others = [
        each
        for each in case.differences
        if each is not difference and fits_divergence(each, case.divergence) is not False
    ]
    standing: Likelihood = "unlikely" if fits is False and others else "possible"
    piece = EvidenceRecord(
        "timing", difference.place, words, step_start=case.divergence.step, record_kind="metric",
        record_name=case.divergence.metric_key, field="value",
    )  # fmt: skip
    return [(standing, piece)]


def _weigh_kind(
    case: Candidates, difference: Difference
) -> list[tuple[Likelihood, EvidenceRecord]]:
    if difference.kind == "seed":
        others = [each for each in case.differences if each.kind != "seed"]
        if case.verdict in _CHANGES and (others or case.floor is not None):
            words = "the change is larger than seed noise"
            return [("unlikely", _note("noise", difference, words))]
        if not others:
            return [("probable", _note("alone", difference, "no other difference"))]
    if difference.is_aside:
        return [("unlikely", _note("kind", difference, difference.words))]
    if difference.may_follow and any(not each.may_follow for each in case.differences):
        words = "may follow from the other differences"
        return [("possible", _note("kind", difference, words))]
    return []


def _order(cause: Cause, difference: Difference, case: Candidates) -> tuple[object, ...]:
    share = 0.0
    if cause.effect is not None and case.change:
        share = cause.effect.difference / case.change
    agreement = 0.0 if cause.effect is None else cause.effect.agreement or 0.0
    return (
        _STANDINGS.index(cause.standing),
        _rank_effect(cause.effect, case),
        fits_divergence(difference, case.divergence) is not True,
        -agreement,
        -share,
        is_incidental(difference.key),
        difference.may_follow,
        _KINDS.index(cause.kind),
        cause.kind == "package" and not _is_numeric(difference),
        cause.place,
    )


def _rank_effect(effect: Effect | None, case: Candidates) -> int:
    """What may explain the change by its size comes first, and what nobody knows next."""
    if effect is None:
        return 1
    bounds = [abs(bound) for bound in (effect.low, effect.high) if bound is not None]
    reach = max(bounds, default=abs(effect.difference))
    return 0 if reach >= _MOST_SHARE * abs(case.change or 0.0) else 2


def _is_numeric(difference: Difference) -> bool:
    name = difference.place.lower().replace("_", "-")
    return name in NUMERIC_PACKAGES or name.startswith(("python", "cuda", "blas", "nvidia-"))


def _note(
    kind: str, difference: Difference, summary: str, effect: Effect | None = None
) -> EvidenceRecord:
    return EvidenceRecord(
        kind, difference.place, summary, None if effect is None else effect.difference
    )


def _show(effect: Effect) -> str:
    text = f"{'+' if effect.difference >= 0 else ''}{_short(effect.difference)}"
    if effect.low is not None and effect.high is not None:
        text += f" ({_short(effect.low)} to {_short(effect.high)})"
    return text


def _short(value: float) -> str:
    return format_number(float(f"{value:.3g}"))
