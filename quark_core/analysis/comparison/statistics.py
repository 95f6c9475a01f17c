"""Tests and intervals for a few runs a side, without a statistics library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from quark_core.analysis.comparison.distributions import student_quantile, two_sided_p

__all__ = [
    "MeanTest",
    "adjust_by_holm",
    "bootstrap_iqm",
    "compare_means",
    "estimate_effect",
    "make_generator",
    "permute_pairs",
    "permute_sides",
    "probability_of_improvement",
    "score_runs",
    "take_iqm",
]

Floats = NDArray[np.float64]

_EXACT_SPLITS = 20_000
_DRAWS = 9_999
_RESAMPLES = 2_000
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class MeanTest:
    """A t test of the difference of two means.

    Attributes:
        method: welch, paired or prediction.
        difference: First mean less second.
        error: Its standard error.
        df: Degrees of freedom.
    """

    method: str
    difference: float
    error: float
    df: float

    @property
    def p_value(self) -> float:
        """Two-sided."""
        return two_sided_p(self.t, self.df)

    @property
    def t(self) -> float:
        """The difference in standard errors; infinite where these are 0."""
        if self.error > 0.0:
            return self.difference / self.error
        return math.copysign(math.inf, self.difference) if self.difference else 0.0

    def interval(self, level: float) -> tuple[float, float]:
        """The confidence interval of the difference."""
        half = student_quantile(0.5 + level / 2.0, self.df) * self.error
        return self.difference - half, self.difference + half


def compare_means(first: Floats, second: Floats, *, paired: bool = False) -> MeanTest | None:
    """Welch's test; of pairs the paired test; of one value against several their prediction.

    Returns None where neither side has two values.
    """
    one, two = len(first), len(second)
    difference = float(np.mean(first) - np.mean(second))
    if paired:
        apart = first - second
        if one < 2:
            return None
        return MeanTest("paired", difference, float(apart.std(ddof=1)) / math.sqrt(one), one - 1)
    if one < 2 and two < 2:
        return None
    if one < 2 or two < 2:
        group = first if one > 1 else second
        error = float(group.std(ddof=1)) * math.sqrt(1.0 + 1.0 / len(group))
        return MeanTest("prediction", difference, error, len(group) - 1)
    a, b = float(first.var(ddof=1)) / one, float(second.var(ddof=1)) / two
    weights = a * a / (one - 1) + b * b / (two - 1)
    df = (a + b) * (a + b) / weights if weights > 0.0 else one + two - 2
    return MeanTest("welch", difference, math.sqrt(a + b), df)


def score_runs(figures: Sequence[tuple[Floats, Floats, int]]) -> tuple[Floats, Floats]:
    """One score a run out of several figures: the mean of their distances from all runs' mean.

    Each is measured in the deviation of all runs of both sides together,
    which does not know the sides, so that a test of the scores keeps its
    level whatever the figures have in common (Laeuter 1996).

    Args:
        figures: First side, second side, and 1 or -1 for what is better.
    """
    first = np.zeros(len(figures[0][0]))
    second = np.zeros(len(figures[0][1]))
    for one, two, sign in figures:
        everyone = np.concatenate([one, two])
        # Halves, since the distance of two huge values may overflow.
        centre = float((everyone / len(everyone)).sum())
        spread = float(np.abs(everyone / 2.0 - centre / 2.0).max())
        if spread <= 0.0:
            continue
        units = (everyone / 2.0 - centre / 2.0) / spread
        units = sign * units / float(units.std())
        first += units[: len(one)] / len(figures)
        second += units[len(one) :] / len(figures)
    return first, second


def adjust_by_holm(p_values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's weighted step-down procedure.

    At a level of a, those up to a are the ones that are rejected, and the
    chance of any false one among them is at most a.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index] / weights[index])
    adjusted = [1.0] * len(p_values)
    left, highest = math.fsum(weights), 0.0
    for index in order:
        highest = max(highest, min(1.0, p_values[index] / weights[index] * left))
        adjusted[index] = highest
        left -= weights[index]
    return adjusted


def permute_sides(first: Floats, second: Floats) -> float:
    """Share of the ways to deal the runs to two sides that part them at least as far.

    All ways where there are few, else 9999 drawn ones, the same for the same values.
    """
    everyone = np.concatenate([first, second])
    count, total = len(first), len(first) + len(second)
    observed = abs(float(first.mean() - second.mean()))
    if math.comb(total, count) <= _EXACT_SPLITS:
        sides = _deal(total, count)
        extra = 0
    else:
        order = make_generator(everyone).random((_DRAWS, total)).argsort(axis=1)
        sides = (order < count).astype(np.float64)
        extra = 1
    sums = sides @ everyone
    apart = np.abs(sums / count - (everyone.sum() - sums) / (total - count))
    far = int((apart >= observed - _ROUNDING * max(1.0, observed)).sum())
    return (far + extra) / (len(sides) + extra)


def permute_pairs(differences: Floats) -> float:
    """The same for pairs: share of the ways to swap their members."""
    count = len(differences)
    observed = abs(float(differences.mean()))
    if 2**count <= _EXACT_SPLITS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
        extra = 0
    else:
        signs = make_generator(differences).choice(np.array([-1.0, 1.0]), (_DRAWS, count))
        extra = 1
    means = np.abs(signs @ differences / count)
    far = int((means >= observed - _ROUNDING * max(1.0, observed)).sum())
    return (far + extra) / (len(signs) + extra)


def estimate_effect(first: Floats, second: Floats) -> float | None:
    """Hedges' g: the difference of the means in deviations, corrected for few values."""
    freedom = max(len(first) - 1, 0) + max(len(second) - 1, 0)
    if freedom < 2:
        return None
    squares = sum(
        float(((side - side.mean()) ** 2).sum()) for side in (first, second) if len(side) > 1
    )
    deviation = math.sqrt(squares / freedom)
    if deviation <= 0.0:
        return None
    correction = 1.0 - 3.0 / (4.0 * freedom - 1.0)
    return float(first.mean() - second.mean()) / deviation * correction


def probability_of_improvement(first: Floats, second: Floats, sign: int) -> float:
    """Share of pairs in which the first side is better; ties count half."""
    apart = sign * (first[:, None] - second[None, :])
    return float(((apart > 0).sum() + 0.5 * (apart == 0).sum()) / apart.size)


def take_iqm(values: Floats) -> float:
    """Interquartile mean: that of the values without the lowest and highest quarter."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def bootstrap_iqm(first: Floats, second: Floats, level: float) -> tuple[float, float]:
    """Percentile interval of the difference of interquartile means; each side is resampled."""
    generator = make_generator(np.concatenate([first, second]))
    sides = []
    for values in (first, second):
        count, cut = len(values), len(values) // 4
        drawn = np.sort(values[generator.integers(0, count, (_RESAMPLES, count))], axis=1)
        sides.append(drawn[:, cut : count - cut].mean(axis=1))
    low, high = np.quantile(sides[0] - sides[1], [0.5 - level / 2.0, 0.5 + level / 2.0])
    return float(low), float(high)


def make_generator(values: Floats) -> np.random.Generator:
    """Random numbers that are the same for the same values."""
    seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).tobytes())
    return np.random.Generator(np.random.PCG64(seed))


@lru_cache(maxsize=16)
def _deal(total: int, count: int) -> Floats:
    chosen = list(itertools.combinations(range(total), count))
    sides = np.zeros((len(chosen), total))
    sides[np.arange(len(chosen))[:, None], np.array(chosen)] = 1.0
    return sides
