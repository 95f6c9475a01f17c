"""Statistics for a few runs a group, and the verdict on a metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from quark.analysis.comparison.results import MetricDiff
from quark.analysis.config import ComparisonEngineConfig

Floats = NDArray[np.float64]

_TERMS = 300
_STEPS = 200
_TINY = 1e-300
_PRECISION = 3e-16
_LARGE = 1e5

_MEDIAN = math.sqrt(math.pi / 2.0)  # standard error of a median over that of a mean
_LAGGED = 4096
_FEWEST = 4
_EXACT_SPLITS = 20_000
_DRAWS = 9_999
_RESAMPLES = 2_000
_ROUNDING = 1e-12
_FEWEST_PAIRS = 2
# Seldom enough that pairing by chance does not add to false calls.
_SURELY_PAIRED = 0.001
_POWER = 0.8
_MOST_RUNS = 1_000


def student_cdf(t: float, df: float) -> float:
    """Probability of a value up to `t`, with `df` degrees of freedom (any positive number)."""
    tail = 0.5 * two_sided_p(t, df)
    return 1.0 - tail if t > 0 else tail


def two_sided_p(t: float, df: float) -> float:
    """Probability of a value at least as far from 0 as `t`."""
    if math.isnan(t) or math.isnan(df):
        return 1.0
    if math.isinf(t):
        return 0.0
    square = t * t
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2.0))
    if math.isinf(square):
        return 0.0
    return _incomplete_beta(df / 2.0, 0.5, df / (df + square), square / (df + square))


def student_quantile(probability: float, df: float) -> float:
    """The value up to which a share `probability` lies, above 0 and below 1.

    By Newton's method from 0: the distribution is concave above 0, so that
    each step stays below the value and none goes astray.
    """
    if probability < 0.5:
        return -student_quantile(1.0 - probability, df)
    value = 0.0
    for _ in range(_STEPS):
        density = _student_density(value, df)
        if not density > 0.0:
            break
        step = (probability - student_cdf(value, df)) / density
        value += step
        if abs(step) <= 1e-13 * value:
            break
    return value


def _student_density(t: float, df: float) -> float:
    if math.isinf(df):
        return math.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
    if math.isnan(df):
        return 0.0
    height = math.exp(_log_inverse_beta(df / 2.0, 0.5)) / math.sqrt(df)
    return height * math.exp(-0.5 * (df + 1.0) * math.log1p(t * t / df))


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz); y is 1 - x."""
    if x <= 0.0:
        return 0.0
    if y <= 0.0:
        return 1.0
    front = math.exp(_log_inverse_beta(a, b) + a * _log(x, y) + b * _log(y, x))
    # The fraction converges fast on this side of the mean only.
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _continued_fraction(a, b, x) / a
    return 1.0 - front * _continued_fraction(b, a, y) / b


def _log_inverse_beta(a: float, b: float) -> float:
    """Logarithm of 1 / B(a, b), where b is one half."""
    if a < _LARGE:
        return math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    # The two large logarithms would cancel each other's digits.
    return 0.5 * math.log(a) - 1.0 / (8.0 * a) - math.lgamma(b)


def _log(value: float, rest: float) -> float:
    """Logarithm of a value of which 1 - value is known as well."""
    return math.log(value) if value < 0.5 else math.log1p(-rest)


def _continued_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _TERMS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            value *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def estimate_median_error(values: Floats) -> float | None:
    """Standard error of the median of a stretch of one run; None of fewer than four points.

    A straight line is taken off, since a curve that still falls is no noise.
    Points that follow each other are alike: their number counts as
    `count_effective_points` says.
    """
    count = len(values)
    if count < _FEWEST:
        return None
    x = np.arange(count, dtype=np.float64) - (count - 1) / 2.0
    scale = float(np.abs(values).max()) or 1.0
    scaled = values / scale
    centred = scaled - scaled.mean()
    residuals = centred - x * (float(x @ centred) / float(x @ x))
    deviation = math.sqrt(float(residuals @ residuals) / (count - 2))
    error = _MEDIAN * deviation / math.sqrt(count_effective_points(residuals)) * scale
    return error if math.isfinite(error) else None


def count_effective_points(residuals: Floats) -> float:
    """To how many independent points these amount, 1 at least and their number at most.

    The sum of the autocorrelations is cut where two neighbours of it no longer
    add up to more than 0 (Geyer 1992); it is taken from the last 4096 points.
    """
    count = len(residuals)
    sample = residuals[-_LAGGED:]
    sample = sample - sample.mean()
    power = float(sample @ sample)
    if count < _FEWEST or power <= 0.0:
        return float(count)
    spectrum = np.fft.rfft(sample, 2 * len(sample))
    correlations = np.fft.irfft(np.abs(spectrum) ** 2)[: len(sample)] / power
    pairs = correlations[: len(sample) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0.0)
    kept = pairs[: int(ends[0])] if len(ends) else pairs
    length = 2.0 * float(kept.sum()) - 1.0
    return float(min(count, max(1.0, count / max(length, 1.0))))


@dataclass(frozen=True, slots=True)
class MeanTest:
    """A t test of the difference of two means.

    Attributes:
        method: welch, paired, prediction or known_deviation.
        difference: First mean less second.
        error: Its standard error.
        df: Degrees of freedom.
        variance: Variance of the difference of one run of each side.
    """

    method: str
    difference: float
    error: float
    df: float
    variance: float

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


def compare_means(
    first: Floats, second: Floats, *, paired: bool = False, resolution: float = 0.0
) -> MeanTest | None:
    """Welch's test; of pairs the paired test; of one value against several their prediction.

    Args:
        first, second: The values of either side.
        paired: Whether they stand in pairs.
        resolution: The step between two values that the metric can have, where it is known:
            ties say only that runs lie within one, so no variance is below that of a coin
            that falls on the one value or the other.

    Returns:
        The test, or None where neither side has two values.
    """
    one, two = len(first), len(second)
    if one < 2 and two < 2:
        return None
    difference = float(np.mean(first) - np.mean(second))
    least = resolution * resolution / 4.0
    if paired:
        variance = max(_vary(first - second), least)
        return MeanTest("paired", difference, math.sqrt(variance / one), one - 1, variance)
    if one < 2 or two < 2:
        group = first if one > 1 else second
        variance = max(_vary(group), least)
        error = math.sqrt(variance * (1.0 + 1.0 / len(group)))
        return MeanTest("prediction", difference, error, len(group) - 1, 2.0 * variance)
    variances = max(_vary(first), least), max(_vary(second), least)
    a, b = variances[0] / one, variances[1] / two
    weights = a * a / (one - 1) + b * b / (two - 1)
    df = (a + b) * (a + b) / weights if weights > 0.0 else one + two - 2
    return MeanTest("welch", difference, math.sqrt(a + b), df, sum(variances))


def _vary(values: Floats) -> float:
    return float(values.var(ddof=1))


def go_together(first: Floats, second: Floats) -> bool:
    """Whether pairs are surely more alike than chance makes them, by their correlation."""
    count = len(first)
    if count != len(second) or count <= _FEWEST_PAIRS:
        return False
    one, two = first - first.mean(), second - second.mean()
    size = math.sqrt(float(one @ one) * float(two @ two))
    if not (math.isfinite(size) and size > 0.0):
        return False
    r = min(float(one @ two) / size, 1.0)
    rest = 1.0 - r * r
    t = r * math.sqrt((count - 2) / rest) if rest > 0.0 else math.inf
    return r > 0.0 and two_sided_p(t, count - 2) / 2.0 <= _SURELY_PAIRED


def count_deciding_runs(test: MeanTest, change: float, level: float) -> int:
    """How many runs a side show a change of this size in four cases out of five."""
    if change <= 0.0 or not math.isfinite(test.variance):
        return _MOST_RUNS
    share = 0.5 + level / 2.0
    normal = student_quantile(share, math.inf) + student_quantile(_POWER, math.inf)
    count = max(2, math.ceil(min(_MOST_RUNS, test.variance * (normal / change) ** 2)))
    while count < _MOST_RUNS:
        df = math.inf
        if test.method != "known_deviation":
            df = count - 1 if test.method == "paired" else 2 * (count - 1)
        needed = student_quantile(share, df) + student_quantile(_POWER, df)
        if change * math.sqrt(count) >= needed * math.sqrt(test.variance):
            break
        count += 1
    return count


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


def rank_values(values: Floats) -> Floats:
    """Ranks from 1 on, ascending; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts).astype(np.float64)
    return np.asarray((last - (counts - 1) / 2.0)[group], dtype=np.float64)


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


# What may be said about one metric of two sides: better, worse, equivalent or inconclusive.
#
# Each run counts with one figure, the last value of its own curve: a schedule ends with its
# run, so no figure from before the end tells what a run reached. One test looks at these ends,
# Welch's, and the interval that is shown is that test's own, so that *better* never stands
# beside an interval that holds 0. Where runs end in values that are not finite there is no
# difference to be measured: the ends are compared by their ranks, those runs last.

_MANY_RUNS = 1_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric over the runs of both sides.

    Attributes:
        key: The metric.
        sign: 1 where higher is better, -1 where lower is, 0 where neither is known.
        ends: Last values of the primary's and of the reference's runs; NaN for those that
            diverged.
        copies: Of either side, whether all its runs have the same points.
        earlier: Values at the last common step, where the side that ends first may only have
            logged its end no more; else None.
        resolution: The step between two values of the metric where some ends are tied, else 0.
        paired: Whether the runs stand in the order of matching seeds.
        same_runs: Whether both sides are the same runs.
        identical: Whether all points of both sides are the same.
    """

    key: str
    sign: int
    ends: tuple[Floats, Floats]
    copies: tuple[bool, bool] = (False, False)
    earlier: tuple[Floats, Floats] | None = None
    resolution: float = 0.0
    paired: bool = False
    same_runs: bool = False
    identical: bool = False

    @property
    def has_diverged(self) -> bool:
        """Whether any run has."""
        return any(bool(np.isnan(side).any()) for side in self.ends)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said, and why."""

    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the test of one metric found, before it is corrected for the others.

    Attributes:
        method: As in `MetricDiff.method`.
        counts: Runs of either side that count.
        sign: 1 where the primary is better, -1 where it is worse, 0 where the sides are level.
        p_value: Two-sided; None where there is no test.
        permutation_p_value: That of a permutation test.
        end: The test of the ends, in the metric's own unit.
        early: What is said without a test.
        doubt: Why neither better nor worse may be said whatever the test says, or None.
        remarks: What to know besides.
    """

    method: str
    counts: tuple[int, int] = (0, 0)
    sign: int = 0
    p_value: float | None = None
    permutation_p_value: float | None = None
    end: MeanTest | None = None
    early: Verdict | None = None
    remarks: tuple[str, ...] = ()
    doubt: str | None = None


def weigh(sample: Sample, config: ComparisonEngineConfig) -> Evidence:
    """Test one metric."""
    if sample.sign == 0:
        end = None if sample.has_diverged else _compare_ends(sample, sample.ends)
        said = Verdict(None, "it is unknown from the name if higher or lower is better")
        return Evidence("none" if end is None else end.method, end=end, early=said)
    if sample.same_runs:
        return _say("identical", "equivalent", "both sides are the same runs")
    if all(bool(np.isnan(side).all()) for side in sample.ends):
        return _say("divergence", "inconclusive", "both sides end in values that are not finite")
    if sample.identical:
        return _say("identical", "equivalent", "all points are the same")
    remarks: list[str] = []
    ends = _drop_copies(sample, remarks)
    if len(ends[0]) == len(ends[1]) == 1:
        return _weigh_single(sample, ends, remarks, config)
    if sample.has_diverged:
        return _weigh_ranks(sample, ends, remarks)
    return _weigh_groups(sample, ends, remarks, config)


def conclude(
    evidence: Evidence,
    adjusted_p: float | None,
    tolerance: float,
    config: ComparisonEngineConfig,
) -> Verdict:
    """The verdict of one metric, its p-value corrected for the other metrics."""
    if evidence.early is not None:
        return evidence.early
    p, corrected = evidence.p_value or 0.0, adjusted_p or 0.0
    told = "".join(f"; {remark}" for remark in evidence.remarks)
    by = "p = " if evidence.method != "permutation" else "by ranks p = "
    if corrected <= config.error_rate and evidence.sign:
        if evidence.doubt is not None:
            return Verdict("inconclusive", f"{by}{p:.2g}, but {evidence.doubt}{told}")
        name = "better" if evidence.sign > 0 else "worse"
        more = f", corrected for the other metrics {corrected:.2g}" if corrected > p else ""
        return Verdict(name, f"{by}{p:.2g}{more}{told}")
    end = evidence.end
    if end is not None:
        low, high = end.interval(1.0 - config.error_rate)
        if -tolerance <= low and high <= tolerance:
            inside = f"the difference is between {low:.3g} and {high:.3g}"
            return Verdict("equivalent", f"{inside}, within the tolerance of {tolerance:.3g}{told}")
    if p <= config.error_rate:
        why = f"p = {p:.2g} alone, but {corrected:.2g} after correction for the other metrics"
        return Verdict("inconclusive", why + told)
    return Verdict("inconclusive", _say_who_decides(evidence, tolerance, config) + told)


def may_be_worse(diff: MetricDiff) -> bool:
    """Whether the primary ends worse by more than the tolerance, and nobody can tell if by chance.

    Of runs that diverged there is no difference: then the values that are not finite count.
    """
    if diff.verdict != "inconclusive":
        return False
    if diff.last.difference is None:
        return diff.primary_non_finite_count > diff.reference_non_finite_count
    loss = diff.last.difference * (-1.0 if diff.direction == "higher" else 1.0)
    return loss > (diff.tolerance or 0.0)


def _say_who_decides(evidence: Evidence, tolerance: float, config: ComparisonEngineConfig) -> str:
    """How many runs would show a change that matters, or the one that is seen."""
    one, two = evidence.counts
    runs = f"{one} run{'s' if one > 1 else ''}" if one == two else f"{one} and {two} runs"
    p = f"p = {evidence.p_value:.2g}"
    end = evidence.end
    if end is None:
        return f"inconclusive with {runs}: by ranks {p}; more would decide"
    level, has = 1.0 - config.error_rate, min(one, two)
    change = tolerance
    count = count_deciding_runs(end, change, level)
    if count <= has or change <= 0.0:
        # The runs can show such a change, but the one that is seen may be larger than that.
        change = abs(end.difference)
        count = max(has + 1, count_deciding_runs(end, change, level))
    many = f"{count}" if count < _MANY_RUNS else f"more than {_MANY_RUNS}"
    side = "" if one == two else " a side"
    return (
        f"inconclusive with {runs}; {many}{side} would decide ({p}; so many show a change of "
        f"{change:.2g} in four cases of five)"
    )


def _weigh_single(
    sample: Sample,
    ends: tuple[Floats, Floats],
    remarks: Sequence[str],
    config: ComparisonEngineConfig,
) -> Evidence:
    """One run a side says nothing of how far seeds lie apart, however far these two do."""
    primary, reference = float(ends[0][0]), float(ends[1][0])
    deviation = config.seed_deviations.get(sample.key)
    if math.isnan(primary) or math.isnan(reference):
        side, sign = ("primary", -1) if math.isnan(primary) else ("reference", 1)
        told = f"the {side} ends in values that are not finite, the other does not; "
        return _say("divergence", "inconclusive", told + _ask_for_seeds(remarks), sign)
    difference = primary - reference
    sign = sample.sign * ((difference > 0) - (difference < 0))
    if deviation is None:
        return _say("single_seed", "inconclusive", _ask_for_seeds(remarks), sign)
    variance = 2.0 * deviation * deviation
    test = MeanTest("known_deviation", difference, math.sqrt(variance), math.inf, variance)
    return Evidence("known_deviation", (1, 1), sign, test.p_value, end=test)


def _ask_for_seeds(remarks: Sequence[str]) -> str:
    told = "".join(f"{remark}; " for remark in remarks)
    return (
        f"{told}inconclusive with 1 run: the seed noise is unknown; use three or more runs a side"
    )


def _weigh_groups(
    sample: Sample,
    ends: tuple[Floats, Floats],
    remarks: list[str],
    config: ComparisonEngineConfig,
) -> Evidence:
    test = _compare_ends(sample, ends)
    assert test is not None, "one side has two runs"
    sign = sample.sign * int(np.sign(test.difference))
    counts = len(ends[0]), len(ends[1])
    if test.error == 0.0 and test.difference and test.method != "paired":
        told = "the runs of each side end at one value, so the seed noise is unknown"
        return _say("none", "inconclusive", told, sign)
    permuted = permute_pairs(ends[0] - ends[1]) if test.method == "paired" else permute_sides(*ends)
    if test.method == "prediction":
        remarks.append("one run compared with the spread of the other side's")
    doubt = None
    if sample.earlier is not None:
        before = compare_means(*sample.earlier, resolution=sample.resolution)
        if (
            before is None
            or before.p_value > config.error_rate
            or (before.difference * test.difference < 0.0)
        ):
            doubt = (
                "one side's last point comes slightly before the other's, by less than the "
                "distance of two points, and at the last common step the two do not differ this "
                "way; log the last step"
            )
    return Evidence(
        test.method, counts, sign, test.p_value, permuted, test, None, tuple(remarks), doubt
    )


def _weigh_ranks(sample: Sample, ends: tuple[Floats, Floats], remarks: list[str]) -> Evidence:
    """By ranks: nobody can say how far a run that diverged is behind.

    It stands as far behind the worst of the others as that one stands behind the best.
    """
    signed = sample.sign * np.concatenate(ends)
    ended = ~np.isnan(signed)
    scores = np.full(len(signed), -1.0)
    scores[ended] = (rank_values(signed[ended]) - 1.0) / max(1, int(ended.sum()) - 1)
    one, two = scores[: len(ends[0])], scores[len(ends[0]) :]
    bad = [int(np.isnan(side).sum()) for side in sample.ends]
    remarks.append(
        f"{bad[0]} of the primary's and {bad[1]} of the reference's runs end in values that are "
        "not finite"
    )
    p = permute_sides(one, two)
    sign = int(np.sign(float(one.mean() - two.mean())))
    counts = len(one), len(two)
    return Evidence("permutation", counts, sign, p, p, None, None, tuple(remarks))


def _compare_ends(sample: Sample, ends: tuple[Floats, Floats]) -> MeanTest | None:
    """Welch's test; the paired one only where pairs of seeds surely go together.

    Pairs halve the degrees of freedom, and most seeds of two configurations have nothing in
    common: then they would only hide what there is to see.
    """
    paired = sample.paired and len(ends[0]) == len(ends[1]) and go_together(*ends)
    return compare_means(*ends, paired=paired, resolution=sample.resolution)


def _drop_copies(sample: Sample, remarks: list[str]) -> tuple[Floats, Floats]:
    """Runs of a side that are the same in every point are one run."""
    out = []
    for name, side, is_copied in zip(
        ("primary", "reference"), sample.ends, sample.copies, strict=True
    ):
        if is_copied and len(side) > 1:
            remarks.append(f"the {name}'s runs are identical, so they count as one")
        out.append(side[:1] if is_copied else side)
    return out[0], out[1]


def _say(method: str, name: str, reason: str, sign: int = 0) -> Evidence:
    return Evidence(method, sign=sign, early=Verdict(name, reason))
