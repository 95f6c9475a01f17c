"""Statistics of tensors, and how those of parts become those of a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import msgspec


class Wanted(NamedTuple):
    """What a caller needs beside the moments and the range; the less, the cheaper.

    Attributes:
        near_zero: Epsilon: count the elements that do not exceed it in magnitude.
        saturation: Low and high: count the elements at or below the one or at
            or above the other.
        units: Dimension whose entries are units (channels, features): count
            the units none of whose elements exceeds the epsilon in magnitude.
            Without `near_zero` the epsilon is 0.
    """

    near_zero: float | None = None
    saturation: tuple[float, float] | None = None
    units: int | None = None


class TensorStatistics(msgspec.Struct, frozen=True, gc=False):
    """Statistics of one tensor, over its finite elements; None where there is none.

    Attributes:
        element_count: All elements, also those that a sparse tensor does not store.
        finite_count, nan_count, inf_count: Of those that were read, how many are
            finite, NaN, and infinite of either sign.
        mean: Sum over number.
        variance: Mean squared distance from the mean (of the population); None
            also where it exceeds the range of a float64.
        norm: Euclidean; likewise.
        minimum, maximum: Smallest and largest element.
        near_zero_count, saturated_count: As `Wanted` says; None where not wanted.
        unit_count, dead_unit_count: Units, and those of them that are dead; likewise.
        density: Stored elements over all, for a sparse tensor only.
        notes: What a reader must know, such as `complex: of the magnitudes`.
        sample_variation: Share of the energy that differs between samples, 0 to
            1, as `measure_variation` of `measures.py` defines it; None
            without units, and where it is not known.
    """

    element_count: int
    finite_count: int
    nan_count: int
    inf_count: int
    mean: float | None
    variance: float | None
    norm: float | None
    minimum: float | None
    maximum: float | None
    near_zero_count: int | None = None
    saturated_count: int | None = None
    unit_count: int | None = None
    dead_unit_count: int | None = None
    density: float | None = None
    notes: tuple[str, ...] = ()
    sample_variation: float | None = None

    @property
    def std(self) -> float | None:
        """Square root of the variance."""
        return None if self.variance is None else math.sqrt(self.variance)

    def divide(self, scale: float) -> TensorStatistics:
        """Statistics of the tensor divided by a number above 0; counts stay as they are."""
        mean, norm, low, high = (
            None if value is None else value / scale
            for value in (self.mean, self.norm, self.minimum, self.maximum)
        )
        variance = None if self.variance is None else self.variance / scale / scale
        return msgspec.structs.replace(
            self, mean=mean, variance=variance, norm=norm, minimum=low, maximum=high
        )


class Partial(NamedTuple):
    """Sums over some elements: the finite ones, and how many are not.

    `squares` is the sum of squared distances from `mean`. Where `exponent` is
    not 0, these two are of elements divided by two to its power.
    """

    finite_count: int
    nan_count: int
    inf_count: int
    near_zero_count: int
    saturated_count: int
    mean: float
    squares: float
    minimum: float
    maximum: float
    exponent: int = 0


NOTHING = Partial(0, 0, 0, 0, 0, 0.0, 0.0, math.inf, -math.inf)


def merge(parts: Iterable[Partial]) -> Partial:
    """Parts of one exponent as one (Chan's update; exact but for rounding)."""
    merged = NOTHING
    for part in parts:
        merged = _merge_two(merged, part)
    return merged


def _merge_two(first: Partial, second: Partial) -> Partial:
    count = first.finite_count + second.finite_count
    mean, squares = first.mean, first.squares
    if second.finite_count:
        share = second.finite_count / count
        # In halves, since the distance of two ends of the range overflows.
        half = second.mean / 2 - mean / 2
        mean += 2 * (half * share)
        squares += second.squares + 4 * half * half * first.finite_count * share
    return Partial(
        count,
        first.nan_count + second.nan_count,
        first.inf_count + second.inf_count,
        first.near_zero_count + second.near_zero_count,
        first.saturated_count + second.saturated_count,
        mean,
        squares,
        min(first.minimum, second.minimum),
        max(first.maximum, second.maximum),
        second.exponent,
    )


def conclude(
    part: Partial,
    element_count: int,
    wanted: Wanted,
    *,
    repeats: int = 1,
    units: tuple[int, int] | None = None,
    density: float | None = None,
    notes: tuple[str, ...] = (),
    variation: float | None = None,
) -> TensorStatistics:
    """Statistics of a tensor of whose elements this is known, each `repeats` times."""
    count = part.finite_count
    mean: float | None = None
    variance: float | None = None
    norm: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    if count:
        minimum, maximum = part.minimum, part.maximum
        mean, variance, exponent = part.mean, part.squares / count, part.exponent
        norm = math.sqrt(part.squares + count * mean * mean) * math.sqrt(repeats)
        # The usual case without calls, since this is done for every tensor.
        if exponent or not (isfinite(mean) and isfinite(variance) and isfinite(norm)):
            mean = _scaled(mean, exponent)
            variance, norm = _scaled(variance, 2 * exponent), _scaled(norm, exponent)
        if mean is not None and not minimum <= mean <= maximum:
            # Rounding may leave the mean of near-equal elements just outside.
            mean = min(max(mean, minimum), maximum)
    return TensorStatistics(
        element_count,
        count * repeats,
        part.nan_count * repeats,
        part.inf_count * repeats,
        mean,
        variance,
        norm,
        minimum,
        maximum,
        None if wanted.near_zero is None else part.near_zero_count * repeats,
        None if wanted.saturation is None else part.saturated_count * repeats,
        None if units is None else units[0],
        None if units is None else units[1],
        density,
        notes,
        variation,
    )


def _scaled(value: float, exponent: int) -> float | None:
    """Value times two to the power, or None where no float64 holds it."""
    if exponent:
        try:
            value = math.ldexp(value, exponent)
        except OverflowError:
            return None
    return value if math.isfinite(value) else None
