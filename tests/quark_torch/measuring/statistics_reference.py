"""Statistics by their definitions, slowly, in float64 or better."""

import math

import numpy as np
import pytest
import torch

from quark_torch.measuring.tensor_statistics import TensorStatistics, Wanted

NOTHING_MORE = Wanted()


def as_doubles(tensor: torch.Tensor) -> np.ndarray:
    """Elements in their logical order."""
    tensor = tensor.detach()
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    if tensor.dtype.is_complex:
        tensor = tensor.resolve_conj().abs()
    return tensor.resolve_neg().to(torch.float64).contiguous().numpy()


def check(
    statistics: TensorStatistics, tensor: torch.Tensor, wanted: Wanted = NOTHING_MORE
) -> None:
    """Hold statistics against their definitions."""
    check_values(statistics, as_doubles(tensor), wanted)


def check_values(
    statistics: TensorStatistics, values: np.ndarray, wanted: Wanted = NOTHING_MORE
) -> None:
    finite = values[np.isfinite(values)]
    assert statistics.element_count == values.size
    assert statistics.finite_count == finite.size
    assert statistics.nan_count == np.isnan(values).sum()
    assert statistics.inf_count == np.isinf(values).sum()
    check_counts(statistics, values, finite, wanted)
    if not finite.size:
        moments = (statistics.mean, statistics.variance, statistics.std, statistics.norm)
        assert (*moments, statistics.minimum, statistics.maximum) == (None,) * 6
        return
    assert statistics.minimum == finite.min()
    assert statistics.maximum == finite.max()
    check_moments(statistics, finite)


def check_counts(statistics, values, finite, wanted):
    near_zero = saturated = units = dead = None
    if wanted.near_zero is not None:
        near_zero = (np.abs(finite) <= wanted.near_zero).sum()
    if wanted.saturation is not None:
        low, high = wanted.saturation
        saturated = ((finite <= low) | (finite >= high)).sum()
    if wanted.units is not None and values.size:
        rows = np.moveaxis(values, wanted.units, 0).reshape(values.shape[wanted.units], -1)
        units = len(rows)
        dead = (np.abs(rows) <= (wanted.near_zero or 0.0)).all(axis=1).sum()
    assert statistics.near_zero_count == near_zero
    assert statistics.saturated_count == saturated
    assert statistics.unit_count == units
    assert statistics.dead_unit_count == dead


def check_moments(statistics, finite):
    # Of numbers near one in magnitude, so that the reference itself has no trouble with range.
    exponent = math.frexp(np.abs(finite).max())[1]
    scaled = np.ldexp(np.ldexp(finite, -(exponent // 2)), exponent // 2 - exponent)
    count = scaled.size
    mean = math.fsum(scaled) / count
    variance = math.fsum((scaled - mean) ** 2) / count
    norm = math.sqrt(math.fsum(scaled**2))
    spread = math.sqrt(variance)
    # A mean may cancel: what it can be held to is the size of what was added up.
    slack = 2e-6 * spread + 1e-12 * abs(mean)
    smallest = 5e-324
    assert statistics.mean == pytest.approx(
        math.ldexp(mean, exponent), rel=1e-12, abs=math.ldexp(slack, exponent) + smallest
    )
    whole = safe_ldexp(norm, exponent)
    if whole is None:
        assert statistics.norm is None
    else:
        assert statistics.norm == pytest.approx(whole, rel=1e-6, abs=smallest)
    expected = safe_ldexp(variance, 2 * exponent)
    rounding = safe_ldexp(4e-30, 2 * exponent)
    if rounding is None:
        rounding = math.inf
    if rounding == math.inf and variance < 1e-25:
        return  # rounding alone decides whether it is zero or beyond the range
    if expected is None:
        assert statistics.variance is None
        assert statistics.std is None
    else:
        assert statistics.variance == pytest.approx(expected, rel=1e-5, abs=rounding + smallest)
        assert statistics.std == math.sqrt(statistics.variance)


def safe_ldexp(value, exponent):
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return None
