"""What simulated histories (kit/attribution_worlds.py) say of three keys that changed."""

import math

import numpy as np
import pytest
from kit.attribution_worlds import simulate

from quark.analysis.explanation.attribution import _solve


@pytest.mark.sampled
@pytest.mark.parametrize(("runs", "least"), [(30, 0.7), (100, 0.75)])
def test_history_names_the_guilty_key(runs, least):
    counts = simulate(runs, 40, seed=3)
    first, probable = counts["first cause"], counts["probable"]
    assert first.right / first.asked >= least
    assert probable.right / probable.answered >= 0.85
    assert probable.answered / probable.asked >= 0.5


def test_below_twenty_runs_the_regression_is_silent():
    assert simulate(10, 20, seed=3)["ridge, always"].answered == 0


@pytest.mark.parametrize(("runs", "columns"), [(200, 106), (64, 64), (20, 33), (30, 200), (90, 7)])
def test_pieces_give_what_the_whole_regression_gives(runs, columns):
    draw = np.random.default_rng(runs)
    design, y = draw.random((runs, columns)), draw.random(runs)
    weights = np.bincount(draw.integers(0, runs, runs), minlength=runs).astype(np.float64)
    centre, level = weights @ design / weights.sum(), weights @ y / weights.sum()
    roots = np.sqrt(weights)[:, None]
    # The penalty as rows of the system: numpy's own least squares.
    whole = np.vstack([(design - centre) * roots, math.sqrt(0.1) * np.eye(columns)])
    target = np.concatenate([(y - level) * roots[:, 0], np.zeros(columns)])
    expected = np.linalg.lstsq(whole, target, rcond=None)[0]
    np.testing.assert_allclose(_solve(design, y, weights, 0.1), expected, rtol=1e-7, atol=1e-9)
