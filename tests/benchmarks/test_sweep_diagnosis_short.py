"""What `stop_broken` saves, in short: real trainings with bad corners, all known to their end."""

import pytest

pytest.importorskip("sklearn")


@pytest.mark.parametrize(("seed", "count"), [(0, 30), (1, 90)])
@pytest.mark.long
@pytest.mark.timeout(900)
def test_time_of_broken_trials_is_saved_and_no_good_one_is_stopped(measure, seed, count):
    program = ("-m", "benchmarks.sweep_diagnosis", "--seeds", str(seed), "--trials")
    (row,) = measure(*program, short=str(count))
    found = row["found"]
    assert found["learn well"] > count / 6
    assert found["good ones stopped"] == 0
    assert found["stopped"] >= count / 5
    assert found["steps saved"] > 0.1
