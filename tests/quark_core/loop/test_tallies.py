"""Sums of parts are the sum of the whole, however the parts were cut."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_core.records.running_statistics import Tally
from tests.tiers import count_examples

numbers = st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False)
many = st.lists(numbers, min_size=1, max_size=60)
few = settings(max_examples=count_examples(300), deadline=None)


def tally(values):
    made = Tally()
    made.add_values(values)
    return made


def merge(parts):
    """In a tree, from the last to the first, so that no order is a special one."""
    made = [tally(part) for part in parts]
    while len(made) > 1:
        right, left = made.pop(), made.pop(0)
        right.add(left)
        made.append(right)
    return made[0]


@st.composite
def cut(draw):
    values = draw(many)
    places = sorted(draw(st.lists(st.integers(0, len(values)), max_size=8)))
    edges = [0, *places, len(values)]
    parts = [values[a:b] for a, b in itertools.pairwise(edges)]
    return values, draw(st.permutations(parts))


@few
@given(cut())
def test_parts_in_any_grouping_and_order_are_the_whole(given_parts):
    values, parts = given_parts
    whole, merged = tally(values), merge(parts)
    scale = max(1.0, *(abs(value) for value in values))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(statistics.fmean(values), abs=1e-9 * scale)
    assert merged.deviation == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-7 * scale)
    assert (merged.low, merged.high) == (min(values), max(values))
    assert merged.encode_buckets() == whole.encode_buckets()


@few
@given(
    st.lists(st.one_of(st.floats(1e-9, 1e9), st.floats(-1e9, -1e-9)), min_size=1, max_size=80),
    st.floats(0.01, 0.99),
)
def test_a_quantile_is_within_six_percent(values, share):
    expected = sorted(values)[math.ceil(share * len(values)) - 1]
    assert tally(values).find_quantile(share) == pytest.approx(expected, rel=0.06)


def test_extremes_of_float64_neither_raise_nor_spoil_the_rest():
    made = tally([1.7e308, 1.7e308, -1.7e308, 5e-324, 0.0, math.nan, math.inf, -math.inf])
    assert (made.count, made.non_finite) == (5, 3)
    assert math.isfinite(made.mean)
    assert made.deviation is None
    assert made.find_quantile(0) == -1.7e308
    assert made.find_quantile(1) == 1.7e308
    assert sum(made.encode_buckets().values()) == 5


def test_buckets_come_back_from_a_record_and_what_is_none_is_left_out():
    made = tally([-3.0, 0.0, 2.0, 2.0])
    again = Tally()
    again.decode_buckets({**made.encode_buckets(), "no": 1, "4": -1, "nn": True, "5": "x"})
    assert again.encode_buckets() == made.encode_buckets()
