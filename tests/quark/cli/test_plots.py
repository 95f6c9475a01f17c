"""Small plots show what matters, whatever the values are."""

import math

import numpy as np
import pytest

from quark.cli.plots import draw_curve

BLANK = " "


def draw(values, x=None, **size):
    values = np.asarray(values, dtype=float)
    x = np.arange(len(values)) if x is None else np.asarray(x)
    return draw_curve(x, values, **size).split("\n")


def measure(lines):
    assert len({len(line) for line in lines}) == 1
    return len(lines[0]), len(lines)


def used_columns(lines):
    return [
        column for column in range(len(lines[0])) if any(line[column] != BLANK for line in lines)
    ]


@pytest.mark.parametrize("spike", [1.0, -1.0])
@pytest.mark.parametrize("place", [0, 54_321, 99_999])
def test_a_spike_of_one_point_among_many_is_seen(spike, place):
    values = np.zeros(100_000)
    values[place] = spike
    lines = draw(values)
    edge = lines[0] if spike > 0 else lines[-1]
    (columns,) = [[column for column, mark in enumerate(edge) if mark != BLANK]]
    assert columns
    assert all(abs(column - place / 100_000 * 36) <= 1.5 for column in columns)


def test_both_extremes_within_one_column_are_seen():
    values = np.zeros(100_000)
    values[50_000], values[50_001] = 1.0, -1.0
    lines = draw(values)
    assert lines[0].strip(BLANK)
    assert lines[-1].strip(BLANK)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (36, 4), (80, 20)])
@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0, 0.5], [7.0] * 5, [3.0], [math.nan] * 3, [], list(range(10_000))],
    ids=["curve", "constant", "one point", "nan", "empty", "many"],
)
def test_width_and_height_are_exact(values, size):
    width, height = size
    assert measure(draw(values, width=width, height=height)) == size


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e300, 1e-300, 5e-324])
def test_a_constant_is_a_level_line_over_the_whole_width(value):
    lines = draw([value] * 10)
    drawn = [line for line in lines if line.strip(BLANK)]
    assert len(drawn) == 1
    assert BLANK not in drawn[0]


def test_one_point_is_one_mark():
    lines = draw([2.0], x=[17])
    assert sum(mark != BLANK for line in lines for mark in line) == 1


@pytest.mark.parametrize("values", [[], [math.nan] * 3, [math.inf, -math.inf]])
def test_nothing_finite_is_blank(values):
    assert draw(values) == [BLANK * 36] * 4


def test_a_rising_curve_rises_from_left_to_right():
    lines = draw(np.arange(100))
    assert lines[0].strip(BLANK)
    assert lines[0].startswith(BLANK * 9)
    assert lines[-1].endswith(BLANK * 9)
    assert used_columns(lines) == list(range(36))


def test_values_that_are_not_finite_leave_a_gap():
    values = np.ones(360)
    values[120:240] = math.nan
    columns = used_columns(draw(values))
    assert {0, 5, 10, 25, 30, 35} <= set(columns)
    assert not set(range(13, 23)) & set(columns)


def test_the_order_of_the_points_does_not_matter():
    x = np.random.default_rng(0).permutation(1000)
    assert draw(np.sin(x / 100), x=x) == draw(np.sin(np.arange(1000) / 100))


@pytest.mark.parametrize("count", [3, 1000])
def test_all_points_at_one_step_are_one_column(count):
    assert len(used_columns(draw(np.arange(count), x=[5] * count))) == 1


@pytest.mark.parametrize(
    ("values", "x"),
    [
        ([-1.7e308, 0.0, 1.7e308], None),
        ([1.79e308] * 3, None),
        ([1.0, 1.0 + 2.3e-16, 1.0], None),
        ([0.0, 1.0], [2**62, 2**62 + 1]),
    ],
    ids=["widest", "greatest", "narrowest", "steps that floats cannot tell apart"],
)
def test_extremes_are_drawn(values, x):
    lines = draw(values, x=x)
    assert measure(lines) == (36, 4)
    assert used_columns(lines)


def test_in_ascii_a_spike_of_one_point_is_seen_too():
    y = np.linspace(1.0, 0.5, 2000)
    y[1200] = 4.0
    lines = draw_curve(np.arange(2000), y, width=40, height=6, ascii_only=True).split("\n")
    assert {len(line) for line in lines} == {40}
    assert set("".join(lines)) <= set(" .':")
    # It reaches from the curve to the top, and is one column wide.
    assert lines[0].strip(" ") != ""
    assert lines[0].index(lines[0].strip(" ")) == round(1200 / 1999 * 39)
    assert len(lines[0].strip(" ")) == 1


@pytest.mark.parametrize("y", [[1.0], [2.0, 2.0], [np.nan, 1.0, np.inf, 1e308, -1e308], [np.nan]])
def test_in_ascii_anything_can_be_drawn(y):
    lines = draw_curve(np.arange(len(y)), np.array(y), width=9, height=3, ascii_only=True)
    assert [len(line) for line in lines.split("\n")] == [9, 9, 9]
    assert bool(lines.strip()) == bool(np.isfinite(y).any())
