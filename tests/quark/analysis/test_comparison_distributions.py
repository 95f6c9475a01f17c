"""Student's t: known values and properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.analysis.comparison.significance import (
    student_cdf,
    student_quantile,
    two_sided_p,
)


@pytest.mark.parametrize(
    ("probability", "df", "value"),
    # From printed tables of critical values.
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.95, 4, 2.13184679),
        (0.975, 4, 2.77644511),
        (0.975, 8, 2.30600414),
        (0.995, 8, 3.35538733),
        (0.975, 30, 2.04227246),
        (0.9995, 10, 4.58689386),
        (0.975, 1e7, 1.95996422),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_of_the_tables(probability, df, value):
    assert student_quantile(probability, df) == pytest.approx(value, abs=2e-6)
    assert student_quantile(1 - probability, df) == pytest.approx(-value, abs=2e-6)
    assert student_cdf(value, df) == pytest.approx(probability, abs=1e-8)


def test_one_degree_of_freedom_is_cauchys_distribution():
    for t in (-50.0, -1.0, -1e-6, 0.0, 0.3, 2.0, 1e5):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)


def test_two_degrees_of_freedom_have_a_closed_form():
    for t in (-9.0, -0.4, 0.01, 1.0, 30.0):
        exact = 0.5 + t / (2 * math.sqrt(2 + t * t))
        assert student_cdf(t, 2) == pytest.approx(exact, abs=1e-12)


def test_infinite_degrees_are_the_normal_distribution():
    assert two_sided_p(1.959963985, math.inf) == pytest.approx(0.05, abs=1e-9)
    assert two_sided_p(2.0, 1e9) == pytest.approx(two_sided_p(2.0, math.inf), abs=1e-8)


def test_what_is_no_number_proves_nothing():
    assert two_sided_p(math.nan, 3) == 1.0
    assert two_sided_p(2.0, math.nan) == 1.0
    assert two_sided_p(math.inf, 3) == 0.0
    assert two_sided_p(1e200, 3) == 0.0
    assert two_sided_p(0.0, 3) == 1.0


@given(st.floats(-40, 40), st.floats(0.5, 500))
def test_a_distribution_is_one(t, df):
    value = student_cdf(t, df)
    assert 0.0 <= value <= 1.0
    assert value + student_cdf(-t, df) == pytest.approx(1.0, abs=1e-12)
    assert student_cdf(t + 0.5, df) >= value - 1e-12
