"""The formulas behind summaries of batches.

    mean, std       Arithmetic mean, and the standard deviation of a sample
                    (divided by n - 1).
    quantile        Linear interpolation between order statistics: type 7 of
                    Hyndman & Fan, "Sample Quantiles in Statistical Packages",
                    The American Statistician 50 (1996), numpy's default.
    z-score         (x - mean) / std. Among n values no |z| is above
                    (n - 1) / sqrt(n) (Shiffler, "Maximum Z Scores and
                    Outliers", The American Statistician 42 (1988)): a
                    threshold of 2.5 cannot be reached by fewer than 9.
    upper fence     Q3 + k (Q3 - Q1) (Tukey, "Exploratory Data Analysis",
                    1977, with k = 1.5).
    normalised      H / ln K with H = -sum p ln p (Shannon, "A Mathematical
    entropy         Theory of Communication", 1948) over the K classes seen:
                    1 where all are equally frequent (Pielou's evenness, 1966).
    imbalance       Count of the most over that of the least frequent class
    ratio           seen (Buda, Maki & Mazurowski, "A systematic study of the
                    class imbalance problem in convolutional neural networks",
                    Neural Networks 106 (2018)).

Values of any magnitude are scaled by a power of two first, so that no sum and
no difference overflows; that changes no bit of an ordinary result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Distribution", "describe_counted", "normalize_entropy"]

_LARGEST = 1.7976931348623157e308


class Distribution:
    """Statistics of at least one finite value.

    Attributes:
        count: Number of values.
        mean: Their mean.
        std: Their standard deviation; None for a single value, and where it
            is beyond float64. 0.0 where all are equal.
        low, high: The smallest and the largest.
        z_scores: Of each value; None where `std` is None or 0.
    """

    def __init__(self, values: Array) -> None:
        import numpy as np

        self._values = values
        self.count = len(values)
        self.low, self.high = float(values.min()), float(values.max())
        self._exponent = math.frexp(max(abs(self.low), abs(self.high)))[1]
        self._scaled = np.ldexp(values, -self._exponent)
        flat = self.low == self.high
        scaled_mean = float(self._scaled[0] if flat else np.mean(self._scaled))
        self.mean = self._unscale(scaled_mean) or 0.0
        self.std: float | None = None
        self.z_scores: Array | None = None
        if self.count < 2:
            return
        deviations = self._scaled - scaled_mean
        scaled_std = (
            0.0 if flat else math.sqrt(float(np.dot(deviations, deviations)) / (self.count - 1))
        )
        self.std = self._unscale(scaled_std)
        if scaled_std > 0.0:
            self.z_scores = deviations / scaled_std

    def quantile(self, share: float) -> float:
        """The value below which this share of all values lies."""
        import numpy as np

        found = self._unscale(float(np.quantile(self._scaled, share)))
        return self.high if found is None else min(max(found, self.low), self.high)

    def upper_fence(self, multiplier: float) -> float | None:
        """Tukey's upper fence; None where the quartiles are equal or it is beyond float64.

        Where half of all values are equal the fence would lie at that value,
        and whatever is above it would be an outlier.
        """
        import numpy as np

        q1, q3 = (float(q) for q in np.quantile(self._scaled, (0.25, 0.75)))
        return self._unscale(q3 + multiplier * (q3 - q1)) if q3 > q1 else None

    def _unscale(self, scaled: float) -> float | None:
        try:
            found = math.ldexp(scaled, self._exponent)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class CountedDistribution:
    """Statistics of non-negative integers, exact but for the last rounding.

    Attributes:
        count: Number of values.
        total: Their sum.
        mean, std, median: As in `Distribution`; `std` is None for a single value.
        low, high: The smallest and the largest.
    """

    count: int
    total: int
    mean: float
    std: float | None
    median: float
    low: int
    high: int


def describe_counted(counts: Mapping[int, int]) -> CountedDistribution | None:
    """Statistics of values, each given with how often it occurs; None without any."""
    ordered = sorted((value, count) for value, count in counts.items() if count)
    if not ordered:
        return None
    number = sum(count for _, count in ordered)
    total = sum(value * count for value, count in ordered)
    std = None
    if number > 1:
        squares = sum(value * value * count for value, count in ordered)
        std = math.sqrt((number * squares - total * total) / (number * (number - 1)))
    low_middle = _find_place(ordered, (number - 1) // 2)
    high_middle = _find_place(ordered, number // 2)
    return CountedDistribution(
        number,
        total,
        total / number,
        std,
        (low_middle + high_middle) / 2,
        ordered[0][0],
        ordered[-1][0],
    )


def normalize_entropy(counts: Mapping[str, int]) -> float | None:
    """Entropy over its largest possible value, 0 to 1; None below two classes."""
    seen = [count for count in counts.values() if count]
    if len(seen) < 2:
        return None
    total = sum(seen)
    entropy = -math.fsum(count / total * math.log(count / total) for count in seen)
    return min(1.0, max(0.0, entropy / math.log(len(seen))))


def _find_place(ordered: list[tuple[int, int]], place: int) -> int:
    """The value that stands at a place of the sorted values."""
    for value, count in ordered:
        if place < count:
            return value
        place -= count
    raise IndexError("beyond the last value")
