"""The simulation of verdicts in short: few false calls, and no less power than Welch's test."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("scipy")
verdicts = pytest.importorskip("verdicts")

FEW = 30
COMPARISONS = 120
# One cell in a hundred thousand is so far beyond its share by chance.
FAR = 4.3


def check_cell(cell, comparisons, owes_power):
    assert cell.contradictions == 0
    assert cell.false_calls <= 0.05 + FAR * cell.error, cell
    assert cell.wrong_calls <= 0.05 + FAR * cell.error, cell
    if cell.primary == cell.reference == 1:
        assert (cell.false_calls, cell.power) == (0.0, 0.0)
    if owes_power and min(cell.primary, cell.reference) >= 3:
        error = math.sqrt(max(0.01, cell.welch_power * (1 - cell.welch_power)) / comparisons)
        assert cell.power >= cell.welch_power - FAR * error, cell


@pytest.mark.sampled
@pytest.mark.parametrize("scenario", verdicts.SCENARIOS, ids=lambda scenario: scenario.name)
def test_verdicts_are_seldom_false(scenario):
    counts = scenario.seeds[-2]
    cell = verdicts.measure_cell(scenario, counts, FEW)
    check_cell(cell, FEW, scenario.is_plain)


@pytest.mark.long
@pytest.mark.parametrize("scenario", verdicts.SCENARIOS, ids=lambda scenario: scenario.name)
def test_verdicts_are_seldom_false_with_any_number_of_seeds(scenario):
    for counts in scenario.seeds:
        cell = verdicts.measure_cell(scenario, counts, COMPARISONS)
        check_cell(cell, COMPARISONS, scenario.is_plain)


def test_the_simulation_would_see_a_verdict_that_is_too_bold():
    """Welch's test by itself, on ends that one side has not logged, is wrong each time."""
    (scenario,) = [each for each in verdicts.SCENARIOS if each.name == "last step not logged"]
    cell = verdicts.measure_cell(scenario, (5, 5), 20)
    assert cell.welch_false_calls > 0.5
    assert cell.false_calls <= 0.05
