"""What `stop_broken` saves, in short: real trainings with bad corners, all known to their end."""

import sys
from pathlib import Path

import pytest

# The benchmarks are run from the root of the project and are not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("sklearn")

from benchmarks.sweep_diagnosis import describe, replay
from benchmarks.sweep_trainings import CHANCE, draw_parameters, record


@pytest.mark.parametrize(("seed", "count"), [(0, 30), (1, 90)])
@pytest.mark.long
@pytest.mark.timeout(900)
def test_time_of_broken_trials_is_saved_and_no_good_one_is_stopped(seed, count):
    courses = [record(draw_parameters(seed, number)) for number in range(count)]
    assert sum(course.last > 5 * CHANCE for course in courses) > count / 6
    tally = replay(courses)
    figures = describe(tally, count)
    assert tally.good == []
    assert figures["stopped"] >= count / 5
    assert figures["steps saved"] > 0.1
