"""A curve of few entries stands for all points: nothing is left out of its figures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.backends.series import check_max_points, reduce_points
from quark_core.errors import SchemaValidationError


def reduce_values(values, max_points=None, steps=None):
    steps = list(range(len(values))) if steps is None else steps
    array = np.array(steps, dtype=np.int64)
    return reduce_points(
        "k",
        array,
        np.where(array < 0, 3, -1),
        array * 10 + 5,
        np.array(values, dtype=np.float64),
        max_points,
    )


points = st.lists(
    st.tuples(
        st.floats() | st.sampled_from([0.1, 1e308, -1e308, math.nan, math.inf]),
        st.integers(-1, 1000),
    ),
    max_size=60,
)


@given(points, st.none() | st.integers(1, 70))
def test_each_entry_says_the_truth_about_its_points(pairs, max_points):
    values = [value for value, _ in pairs]
    steps = [step for _, step in pairs]
    series = reduce_values(values, max_points, steps)
    assert series.points == len(values)
    assert len(series) == (len(values) if max_points is None else min(len(values), max_points))
    assert series.exact == (len(series) == len(values))
    if len(series):
        assert series.count.max() - series.count.min() <= 1
    start = 0
    for entry in range(len(series)):
        stop = start + int(series.count[entry])
        part = list(zip(values[start:stop], steps[start:stop], strict=True))
        finite = [(value, step) for value, step in part if math.isfinite(value)]
        assert series.step[entry] == part[0][1]
        assert series.time_us[entry] == part[0][1] * 10 + 5
        assert series.epoch[entry] == (3 if part[0][1] < 0 else -1)
        assert series.last[entry] == part[-1][0] or math.isnan(part[-1][0])
        assert series.non_finite[entry] == len(part) - len(finite)
        if finite:
            low, high = min(v for v, _ in finite), max(v for v, _ in finite)
            assert (series.low[entry], series.high[entry]) == (low, high)
            assert series.low_step[entry] == next(s for v, s in finite if v == low)
            assert series.high_step[entry] == next(s for v, s in finite if v == high)
            assert low <= series.mean[entry] <= high
            exact = math.fsum(v / len(finite) for v, _ in finite)
            size = max(abs(low), abs(high))
            assert math.isclose(series.mean[entry], exact, rel_tol=1e-9, abs_tol=size * 1e-9)
        else:
            assert math.isnan(series.low[entry])
            assert math.isnan(series.high[entry])
            assert math.isnan(series.mean[entry])
            assert series.low_step[entry] == series.high_step[entry] == -1
        start = stop
    assert start == len(values)


def test_a_spike_of_one_point_among_a_million_is_seen():
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[654_321] = 1e6
    values[123_456] = -1e6
    series = reduce_values(values, 1000)
    assert len(series) == 1000
    top, bottom = int(series.high.argmax()), int(series.low.argmin())
    assert (series.high[top], series.high_step[top]) == (1e6, 654_321)
    assert (series.low[bottom], series.low_step[bottom]) == (-1e6, 123_456)


def test_a_mean_of_values_whose_sum_is_too_large_is_right():
    series = reduce_values([1.5e308, 1.7e308, 1.6e308, 1.0], 1)
    assert series.mean[0] == pytest.approx(1.2e308)


def test_an_exact_series_is_its_points():
    series = reduce_values([2.0, math.nan, math.inf, -1.0], 4, [5, 6, 7, -1])
    assert series.exact
    assert series.step.tolist() == [5, 6, 7, -1]
    assert series.last.tolist()[0::3] == [2.0, -1.0]
    assert series.last[2] == math.inf
    for figure in (series.low, series.high, series.mean):
        assert figure[[0, 3]].tolist() == [2.0, -1.0]
        assert np.isnan(figure[[1, 2]]).all()
    assert series.low_step.tolist() == [5, -1, -1, -1]
    assert series.non_finite.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, "3", 2**63])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(SchemaValidationError, match="max_points"):
        check_max_points(bound)


def test_no_bound_stays_none():
    assert check_max_points(None) is None
    assert check_max_points(np.int32(7)) == 7
