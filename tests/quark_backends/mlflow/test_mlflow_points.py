"""Metric records as MLflow points: nothing falls together, and a replay changes nothing."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_backends.mlflow.points import make_points, note_infinities
from quark_backends.mlflow.run import MlflowWriter
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

NAMES = {"m": "m", "n": "n"}
VALUES = st.tuples(
    st.sampled_from(["m", "n"]),
    st.integers(min_value=0, max_value=2),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]),
)


def identity(point):
    value = None if math.isnan(point.value) else point.value
    return point.name, point.step, point.timestamp_ms, value


def test_a_point_has_the_time_and_step_of_its_record():
    maker = BatchMaker("run0")
    records = [
        *maker.metrics(("m", 7, 1.0)).to_records(),
        *maker.metrics(("m", None, 2.0), epoch=4).to_records(),
        *maker.metrics(("m", None, 3.0), epoch=None).to_records(),
    ]
    points, _ = make_points(records, NAMES)
    assert [point.step for point in points] == [7, 4, 2]
    assert {point.timestamp_ms for point in points} == {FIRST_TIME_US // 1000}


def test_infinities_are_sent_as_nan_and_noted():
    records = BatchMaker("run0").metrics(
        ("m", 1, math.inf), ("m", 2, -math.inf), ("m", 3, math.inf), ("n", 4, math.nan)
    )
    points, _ = make_points(records.to_records(), NAMES)
    assert all(math.isnan(point.value) for point in points)
    assert note_infinities(points) == {"m": {"inf": 1, "-inf": 2}}


@given(st.lists(st.lists(VALUES, min_size=1, max_size=20), max_size=6))
def test_equal_points_of_one_moment_stay_apart_over_batches(batches):
    maker = BatchMaker("run0")
    made = [maker.metrics(*values).to_records() for values in batches]
    state = MlflowWriter()
    sent = []
    for records in made:
        points, recent = make_points(records, NAMES, state.recent)
        again, _ = make_points(records, NAMES, state.recent)
        assert list(map(identity, again)) == list(map(identity, points))
        sent += map(identity, points)
        # As it is after a restart.
        state = msgspec.json.decode(
            msgspec.json.encode(MlflowWriter(recent=recent)), type=MlflowWriter
        )
    assert len(set(sent)) == len(sent)


@pytest.mark.long
def test_many_equal_points_take_no_more_time_than_others():
    records = BatchMaker("run0").metrics(*[("m", 0, 0.0)] * 50_000).to_records()
    points, recent = make_points(records, NAMES)
    assert len(set(map(identity, points))) == 50_000
    assert len(recent) == 1
