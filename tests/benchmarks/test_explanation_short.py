"""The exam of `quark why` in short: real trainings, what was changed, and what is said of it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

# The benchmarks are run from the root of the project and are not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import quark
from benchmarks.explanation_exam.campaign import ask, make_world
from benchmarks.explanation_exam.changes import CHANGES, NEUTRAL
from benchmarks.explanation_exam.first import FIRST
from benchmarks.explanation_exam.scoring import mark_change, mark_nothing
from benchmarks.explanation_exam.second.paper import SECOND

CHANGE = {change.name: change for change in (*CHANGES, *NEUTRAL)}


def test_the_first_paper_has_as_many_questions_as_the_design_asks_for():
    assert len(FIRST.parts["nothing"]) == 40
    assert {task.changes[0].kind for task in FIRST.parts["single"]} == {
        *("config", "code", "data", "package", "switch")
    }


@pytest.mark.parametrize("paper", [FIRST, SECOND], ids=["first", "second"])
def test_questions_have_names_of_their_own_and_the_short_ones_are_among_them(paper):
    names = [task.name for tasks in paper.parts.values() for task in tasks]
    assert len(set(names)) == len(names)
    for part, short in paper.short.items():
        assert {*short} <= {task.name for task in paper.parts[part]}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_change_is_found_and_a_comment_accuses_nobody(tmp_path):
    paper = replace(FIRST, list_history=lambda *_: ())
    world = make_world(paper, tmp_path / "world", script="train.py", short=True)
    clip = ask(world, tmp_path / "clip", [CHANGE["clip"]], seed=0, other=0)
    comment = ask(world, tmp_path / "comment", [CHANGE["comment"]], seed=1, other=1)

    assert clip.after_result > 2 * clip.before_result
    said = quark.explain_change(clip.before, clip.after, storage_dir=clip.store)
    found = mark_change(clip, said, [CHANGE["clip"]])
    assert (found.right, found.wrongly_excluded) == (True, ()), found.said
    # Another cause than the true one is no right answer.
    assert not mark_change(clip, said, [CHANGE["lr"]]).right

    assert comment.after_result == comment.before_result
    said = quark.explain_change(comment.before, comment.after, storage_dir=comment.store)
    assert mark_nothing(comment, said).right, said


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
