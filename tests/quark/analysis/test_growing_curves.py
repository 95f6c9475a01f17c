"""A monitor takes up what is new: curves grow, and are those of all rows."""

import math

import numpy as np
import pytest
from run_builder import make_part

from quark.analysis import monitor_state, run_data
from quark.analysis.monitor_state import GrowingCurves
from quark.analysis.run_data import RunData, make_curve


def read_at_once(parts):
    return RunData(None, "r", iterate=lambda *_: iter(parts)).metrics


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, curve in expected.items():
        np.testing.assert_array_equal(found[name].step, curve.step)
        np.testing.assert_array_equal(found[name].value, curve.value)


def make_values(count):
    values = np.random.default_rng(5).normal(size=count)
    values[count // 3] = 90.0
    values[-3:] = math.nan
    return values


@pytest.mark.parametrize("bound", [100_000, 2_048])
def test_at_each_look_the_curves_are_those_of_all_rows(monkeypatch, bound):
    monkeypatch.setattr(run_data, "METRIC_POINTS", bound)
    values, parts, curves = make_values(20_000), [], GrowingCurves()
    for start in range(0, len(values), 2_500):
        parts.append(make_part("m", start, values[start : start + 2_500]))
        curves.add(parts[-1])
        found, whole = curves.load(), read_at_once(parts)
        assert_same(found, whole)
        assert curves.newest_us == int(parts[-1]["time_us"][-1])


def test_a_look_at_a_sample_changes_nothing_of_the_next(monkeypatch):
    monkeypatch.setattr(run_data, "METRIC_POINTS", 2_048)
    values = make_values(20_000)
    seldom, often = GrowingCurves(), GrowingCurves()
    for start in range(0, len(values), 100):
        part = make_part("m", start, values[start : start + 100])
        seldom.add(part)
        often.add(part)
        often.load()
    assert_same(often.load(), seldom.load())


def test_only_what_has_new_points_is_made_again(monkeypatch):
    made = []

    def note(key, points):
        made.append(key)
        return make_curve(key, points)

    monkeypatch.setattr(monitor_state, "make_curve", note)
    curves = GrowingCurves()
    curves.add(make_part("a", 0, np.ones(10)))
    curves.add(make_part("b", 0, np.ones(10)))
    first = curves.load()
    curves.add(make_part("b", 10, np.ones(5)))
    second = curves.load()
    assert made == ["a", "b", "b"]
    assert second["a"] is first["a"]
    assert len(second["b"]) == 15


def test_the_lowest_rank_speaks_wherever_it_begins():
    curves = GrowingCurves()
    curves.add(make_part("m", 0, np.ones(5), rank=2))
    curves.add(make_part("m", 0, np.zeros(5), rank=1))
    curves.add(make_part("m", 5, np.ones(5), rank=3))
    assert curves.load()["m"].value.tolist() == [0.0] * 5
