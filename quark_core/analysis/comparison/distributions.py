"""Student's t distribution, which is all that the comparison needs of a statistics library."""

from __future__ import annotations

import math

__all__ = ["student_cdf", "student_quantile", "two_sided_p"]

_TERMS = 300
_STEPS = 200
_TINY = 1e-300
_PRECISION = 3e-16
_LARGE = 1e5


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
