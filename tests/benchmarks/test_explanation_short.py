"""The exam of `quark why` in short: real trainings, what was changed, and what is said of it."""

import pytest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_short_paper_is_passed(tmp_path, measure):
    exam = ("-m", "benchmarks.explanation_exam", "--out", str(tmp_path / "runs"))
    parts = measure(*exam, short="--short")
    assert {part: len(each) for part, each in parts.items()} == {
        "single": 4,
        "pairs": 2,
        "nothing": 4,
    }
    assert all(mark["right"] for each in parts.values() for mark in each)
