"""What simulated histories say of three keys that changed; benchmarks/attribution.py has more."""

import pytest

from benchmarks.attribution import simulate


@pytest.mark.parametrize(("runs", "least"), [(30, 0.7), (100, 0.75)])
def test_history_names_the_guilty_key(runs, least):
    counts = simulate(runs, 40, seed=3)
    first, probable = counts["first cause"], counts["probable"]
    assert first.right / first.asked >= least
    assert probable.right / probable.answered >= 0.85
    assert probable.answered / probable.asked >= 0.5


def test_below_twenty_runs_the_regression_is_silent():
    assert simulate(10, 20, seed=3)["ridge, always"].answered == 0
