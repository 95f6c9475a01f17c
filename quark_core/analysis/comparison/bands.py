"""How far a figure moves by chance: within a run, from its residuals; between single runs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["count_effective_points", "estimate_median_error", "measure_gap"]

Floats = NDArray[np.float64]

_MEDIAN = math.sqrt(math.pi / 2.0)  # standard error of a median over that of a mean
_LAGGED = 4096
_FEWEST = 4
# Of a hundred validation samples one more or less right is chance, also at 0 and 1.
_RATE_MARGIN = 0.01


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


def measure_gap(primary: float, reference: float, scale: float, *, is_rate: bool) -> float:
    """How far two single runs lie apart, on a scale on which seeds of many tasks are alike.

    For rates the logarithm of the ratio of their odds, for positive values
    that of their ratio, for others the difference over `scale`.
    """
    if is_rate:
        return _log_odds(primary) - _log_odds(reference)
    if primary > 0.0 and reference > 0.0:
        return math.log(primary) - math.log(reference)
    difference = primary - reference
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.copysign(math.inf, difference)


def _log_odds(rate: float) -> float:
    inner = min(max(rate, _RATE_MARGIN), 1.0 - _RATE_MARGIN)
    return math.log(inner / (1.0 - inner))
