"""The small plots of alerts: what is drawn, and where the mark stands."""

import math

import numpy as np
import pytest
from diagnosed_runs import succeed

from quark.analysis.curves import Curve
from quark.cli.analysis_view import CulpritCurve, describe_curve, draw_culprit

WIDTH = 40


def make(values, *, steps=None, unit="step"):
    values = np.asarray(values, dtype=float)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    return CulpritCurve("loss", Curve("loss", steps, values, np.full(len(values), -1), unit))


def draw(item, first):
    return draw_culprit(item, first, WIDTH, "red").plain.split("\n")


@pytest.mark.parametrize(("first", "column"), [(0, 0), (50, 19), (99, 39), (500, 39)])
def test_the_mark_stands_under_its_step(first, column):
    *curve, mark = draw(make(np.linspace(0, 1, 100)), first)
    assert mark.index("▲") == column
    assert f"step {first}" in mark
    assert len(curve) == 2
    assert max(map(len, [*curve, mark])) <= WIDTH


def test_without_a_step_there_is_no_mark():
    assert len(draw(make([1.0, 2.0, 3.0]), None)) == 2


def test_a_curve_over_epochs_says_so():
    item = make([1.0, 2.0], steps=[3, 4], unit="epoch")
    assert draw(item, 4)[-1].rstrip().endswith("epoch 4 ▲")
    assert describe_curve(item) == "loss, 1 to 2, epochs 3 to 4"


def test_what_comes_from_the_step_on_has_the_style_of_the_alert():
    text = draw_culprit(make(np.linspace(0, 1, 100)), 50, WIDTH, "red")
    first, second = text.plain.split("\n")[:2]
    for row, start in ((first, 0), (second, len(first) + 1)):
        styles = {
            text.plain[i]: str(span.style)
            for span in text.spans
            for i in range(span.start, span.end)
            if start <= i < start + len(row)
        }
        assert set(styles.values()) <= {"cyan", "red"}
    assert {str(span.style) for span in text.spans} == {"cyan", "red"}


def test_what_ends_in_nan_ends_in_crosses():
    upper, lower, mark = draw(make([1.0] * 50 + [math.nan] * 50), 50)
    assert mark.index("▲") == 19
    for row in (upper, lower):
        assert set(row[20:]) == {"\u00d7"}
        assert "\u00d7" not in row[:20]


def test_single_points_that_are_not_finite_are_no_crosses():
    values = np.linspace(0, 1, 100)
    values[[10, 60]] = math.inf
    item = make(values)
    assert "\u00d7" not in "".join(draw(item, 5))
    assert describe_curve(item) == "loss, 0 to 1, 2 not finite, steps 0 to 99"


@pytest.mark.parametrize("values", [[math.nan] * 5, [7.0] * 5, [1e308, -1e308], [0.0, 1e-320]])
def test_odd_curves_are_drawn(values):
    item = make(values)
    assert len(draw(item, 1)) == 3
    assert describe_curve(item).endswith(f"steps 0 to {len(values) - 1}")


def test_what_spans_decades_is_on_a_log_scale():
    grows = make(np.geomspace(1e-3, 1e6, 90))
    assert "on a log scale" in describe_curve(grows)
    straight = make(np.linspace(1.0, 10.0, 90))
    assert "log" not in describe_curve(straight)
    assert draw(grows, None) == draw(straight, None)
    assert "log" not in describe_curve(make([0.0, 1.0, 1e9]))


def test_one_step_for_all_points_is_drawn():
    assert draw(make([1.0, 2.0], steps=[5, 5]), 5)[-1] == "▲ step 5"


def test_values_that_are_not_finite_are_crosses(invoke, tmp_path, log_run):
    values = succeed()["train/loss"][:120] + [math.nan] * 60
    log_run(tmp_path, "nan", values={"train/loss": values})
    text = invoke("analyze", "nan", "-d", tmp_path, "--rule", "non_finite_values").stdout
    assert "\u00d7\u00d7\u00d7" in text
    assert "60 not finite" in text
    assert "▲ step 120" in text
