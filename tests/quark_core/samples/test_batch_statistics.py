"""The formulas, against the statistics module and numpy."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiers import count_examples

from quark_core.samples.survey import Distribution, describe_counted, normalize_entropy

_SETTINGS = settings(deadline=None, max_examples=count_examples(200))
VALUES = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=50)
ANY = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30)


@_SETTINGS
@given(VALUES)
def test_mean_deviation_and_scores_are_those_of_the_statistics_module(values):
    found = Distribution(np.array(values))
    size = max(map(abs, values))
    assert (found.count, found.low, found.high) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-14 * size)
    if len(values) == 1:
        assert found.std is found.z_scores is None
        return
    deviation = statistics.stdev(values)
    assert found.std == pytest.approx(deviation, rel=1e-9, abs=1e-14 * size)
    if min(values) == max(values):
        assert found.std == 0.0
        assert found.z_scores is None
        return
    assume(deviation > 1e-6 * size)
    expected = [(value - statistics.fmean(values)) / deviation for value in values]
    np.testing.assert_allclose(found.z_scores, expected, rtol=1e-6, atol=1e-6)


@_SETTINGS
@given(VALUES, st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values, share):
    found = Distribution(np.array(values))
    assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=1e-12, abs=1e-300)
    if len(values) > 1:
        first, second, third = statistics.quantiles(values, n=4, method="inclusive")
        assert found.quantile(0.5) == pytest.approx(second, rel=1e-9, abs=1e-5)
        fence = found.upper_fence(1.5)
        if fence is not None and third - first > 1e-3:
            assert fence == pytest.approx(third + 1.5 * (third - first), rel=1e-9, abs=1e-5)


@_SETTINGS
@given(ANY)
@example([1.7e308, -1.7e308])
@example([1.7e308] * 4 + [1.6e308])
@example([5e-324, 0.0, 1e-323])
@example([-0.0, 0.0])
@example([1.7e308, 5e-324, -1.7e308, 0.0])
def test_no_magnitude_gives_nan(values):
    found = Distribution(np.array(values))
    assert found.low <= found.mean <= found.high
    assert found.std is None or (math.isfinite(found.std) and found.std >= 0)
    for share in (0, 0.25, 0.5, 0.9, 1):
        assert found.low <= found.quantile(share) <= found.high
    fence = found.upper_fence(1.5)
    assert fence is None or fence >= found.quantile(0.75)
    if found.z_scores is not None:
        assert np.isfinite(found.z_scores).all()
        # Shiffler's bound.
        count = len(values)
        assert np.abs(found.z_scores).max() <= (count - 1) / math.sqrt(count) * (1 + 1e-9)


def test_equal_values_are_flat_however_they_round():
    for value in (0.1, 1 / 3, 1e300, -7.7, 5e-324):
        found = Distribution(np.array([value] * 7))
        assert (found.mean, found.std, found.z_scores) == (value, 0.0, None)
        assert found.upper_fence(1.5) is None


def test_a_fence_between_equal_quartiles_is_at_rest():
    assert Distribution(np.array([1.0] * 9 + [5.0])).upper_fence(1.5) is None
    assert Distribution(np.array([1.0, 2.0, 3.0, 4.0])).upper_fence(0.0) == 3.25


@_SETTINGS
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 9), min_size=1, max_size=60))
def test_counted_integers_are_exact(values):
    counts = {value: values.count(value) for value in values}
    found = describe_counted({**counts, 123_456: counts.get(123_456, 0)})
    assert (found.count, found.total) == (len(values), sum(values))
    assert (found.low, found.high) == (min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.median == pytest.approx(statistics.median(values), rel=1e-12)
    if len(values) > 1:
        assert found.std == pytest.approx(statistics.stdev(values), rel=1e-9)
    else:
        assert found.std is None


def test_nothing_counted():
    assert describe_counted({}) is None
    assert describe_counted({3: 0}) is None


@_SETTINGS
@given(st.dictionaries(st.text(max_size=2), st.integers(0, 1000), max_size=20))
def test_entropy(counts):
    found = normalize_entropy(counts)
    seen = [count for count in counts.values() if count]
    if len(seen) < 2:
        assert found is None
        return
    shares = np.array(seen) / sum(seen)
    expected = -(shares * np.log(shares)).sum() / np.log(len(seen))
    assert found == pytest.approx(expected, rel=1e-9)
    assert 0 <= found <= 1
    assert normalize_entropy(dict.fromkeys("abc", 7)) == pytest.approx(1.0)
