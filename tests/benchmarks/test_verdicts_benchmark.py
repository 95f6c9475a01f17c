"""The simulation of verdicts in short: few false calls, and no less power than Welch's test."""

import math

import pytest

pytest.importorskip("scipy")

# One cell in a hundred thousand is so far beyond its share by chance.
FAR = 4.3


def check_cells(cells):
    assert len({cell["scenario"] for cell in cells}) == 20
    for cell in cells:
        allowed = 0.05 + FAR * cell["error"]
        assert cell["contradictions"] == 0, cell
        assert cell["false_calls"] <= allowed, cell
        assert cell["wrong_calls"] <= allowed, cell
        if cell["primary"] == cell["reference"] == 1:
            assert (cell["false_calls"], cell["power"]) == (0.0, 0.0)
        if cell["is_plain"] and min(cell["primary"], cell["reference"]) >= 3:
            share = cell["welch_power"]
            error = math.sqrt(max(0.01, share * (1 - share)) / cell["comparisons"])
            assert cell["power"] >= share - FAR * error, cell


def test_verdicts_are_seldom_false(measure):
    cells = measure("benchmarks/verdicts.py", "--comparisons", "30")
    check_cells(cells)
    # The simulation would see a verdict that is too bold: Welch's test by itself, on ends that
    # one side has not logged, is wrong each time.
    (bold,) = [cell for cell in cells if cell["scenario"] == "last step not logged"]
    assert bold["welch_false_calls"] > 0.5
    assert bold["false_calls"] <= 0.05


@pytest.mark.long
@pytest.mark.timeout(900)
def test_verdicts_are_seldom_false_with_any_number_of_seeds(measure):
    check_cells(measure("benchmarks/verdicts.py", "--comparisons", short="120"))
