"""Sums of many values that add up: mean and deviation to the last digits, quantiles within 6 %.

Two sums of any two parts of the values, added, are the sum of all of them, in whatever order:
windows of time, threads, ranks and attempts are put together by that alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log2
from typing import Any

BUCKETS_PER_OCTAVE = 8
"""A bucket's ends are 9 % apart, so that its middle is within 4.5 % of whatever is in it."""

_ZERO = "zero"
_BELOW_ZERO = "n"


class Tally:
    """How many values there were, their mean, deviation and extremes, and where they lie.

    Attributes:
        count: How many finite values.
        mean: Their mean; 0.0 without any.
        m2: Sum of their squared deviations from it.
        low, high: The smallest and the largest; infinite without any.
        non_finite: How many others.
        above, below: Bucket -> values, of those above zero, and of the magnitudes of those below.
        zeros: Values that are zero.
    """

    __slots__ = ("above", "below", "count", "high", "low", "m2", "mean", "non_finite", "zeros")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0
        self.low = math.inf
        self.high = -math.inf
        self.non_finite = 0
        self.above: dict[int, int] = {}
        self.below: dict[int, int] = {}
        self.zeros = 0

    def add_values(self, values: Sequence[float]) -> None:
        """Count further values."""
        if not isfinite(sum(values)):
            finite = [value for value in values if isfinite(value)]
            self.non_finite += len(values) - len(finite)
            values = finite
        if not values:
            return
        count = len(values)
        mean = sum(values) / count
        if not isfinite(mean):  # values so large that their sum is none
            mean = sum(value / count for value in values)
        m2 = sum([(value - mean) * (value - mean) for value in values])
        self._add_moments(count, mean, m2)
        self.low = min(self.low, min(values))
        self.high = max(self.high, max(values))
        self._count_buckets(values)

    def _count_buckets(self, values: Iterable[float]) -> None:
        above = self.above
        for value in values:
            if value > 0.0:
                bucket = floor(BUCKETS_PER_OCTAVE * log2(value))
                above[bucket] = above.get(bucket, 0) + 1
            elif value < 0.0:
                bucket = floor(BUCKETS_PER_OCTAVE * log2(-value))
                self.below[bucket] = self.below.get(bucket, 0) + 1
            else:
                self.zeros += 1

    def add(self, other: Tally) -> None:
        """Count what another one has counted."""
        self.non_finite += other.non_finite
        if not other.count:
            return
        self._add_moments(other.count, other.mean, other.m2)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.zeros += other.zeros
        for mine, others in ((self.above, other.above), (self.below, other.below)):
            for bucket, count in others.items():
                mine[bucket] = mine.get(bucket, 0) + count

    def _add_moments(self, count: int, mean: float, m2: float) -> None:
        """Mean and squared deviations of both, as Chan, Golub and LeVeque add them."""
        both = self.count + count
        delta = mean - self.mean
        self.m2 += m2 + delta * delta * (self.count / both) * count
        self.mean = mean if not self.count else self.mean + delta * (count / both)
        self.count = both

    @property
    def total(self) -> float:
        """Sum of the values."""
        return self.mean * self.count

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the values themselves (not an estimate of a larger whole)."""
        if not self.count or not isfinite(self.m2):
            return None
        return math.sqrt(max(0.0, self.m2) / self.count)

    def find_quantile(self, share: float) -> float | None:
        """A value that such a share of all values do not exceed, within 6 %; None without any.

        Args:
            share: From 0 to 1.
        """
        counted = self.zeros + sum(self.above.values()) + sum(self.below.values())
        if not counted:
            return None
        if share <= 0.0:
            return self.low
        if share >= 1.0:
            return self.high
        left = math.ceil(share * counted)
        for value, count in self._list_buckets():
            left -= count
            if left <= 0:
                return min(self.high, max(self.low, value))
        return self.high

    def _list_buckets(self) -> Iterable[tuple[float, int]]:
        """The middle of each bucket and how many values it has, from the lowest on."""
        for bucket in sorted(self.below, reverse=True):
            yield -_find_middle(bucket), self.below[bucket]
        if self.zeros:
            yield 0.0, self.zeros
        for bucket in sorted(self.above):
            yield _find_middle(bucket), self.above[bucket]

    def encode_buckets(self) -> dict[str, int]:
        """The buckets as `AggregateRecord.buckets` has them."""
        named = {f"{_BELOW_ZERO}{bucket}": self.below[bucket] for bucket in sorted(self.below)}
        if self.zeros:
            named[_ZERO] = self.zeros
        named.update((str(bucket), self.above[bucket]) for bucket in sorted(self.above))
        return named

    def decode_buckets(self, named: Mapping[str, Any] | None) -> None:
        """Take the buckets out of a record; what is none is left out: others have written it."""
        for name, count in (named or {}).items():
            if type(count) is not int or count < 0:
                continue
            if name == _ZERO:
                self.zeros += count
                continue
            side = self.below if name.startswith(_BELOW_ZERO) else self.above
            try:
                bucket = int(name.removeprefix(_BELOW_ZERO))
            except ValueError:
                continue
            side[bucket] = side.get(bucket, 0) + count


def _find_middle(bucket: int) -> float:
    try:
        return float(2.0 ** ((bucket + 0.5) / BUCKETS_PER_OCTAVE))
    except OverflowError:
        return math.inf
