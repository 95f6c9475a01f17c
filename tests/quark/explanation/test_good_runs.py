"""Which run is the last good one: an earlier one that completed, ended as well, uncritical."""

import pytest

import quark
from quark.analysis.explanation.history import (
    NothingGotWorseError,
    PastRun,
    RunInQuestion,
    find_good_run,
)
from quark.analysis.explanation.run_attributes import RunTraits
from quark_core.config.arguments import EXCHANGED_FIELD

BASE = {"lr": 0.1}


def make(number, value, *, state="completed", fields=None, digest="one", seed=None):
    traits = RunTraits({("config", "lr"): 1 if digest == "one" else 2}, frozenset())
    return PastRun(
        f"r{number}", traits, value, None, state, digest, seed, fields or {},
        started_at=f"2026-01-01T00:00:{number:02}Z",
    )  # fmt: skip


def find(runs, asked, direction="higher", critical=()):
    question = RunInQuestion(
        asked.run_id, asked.started_at, asked.config_digest, "val/acc", direction
    )
    history = sorted(runs, key=lambda run: run.started_at, reverse=True)
    return find_good_run(history, question, lambda run_id: run_id in critical).run_id


def test_it_is_the_newest_earlier_run_that_ended_as_well():
    runs = [make(n, 0.9 + n / 1000) for n in range(4)]
    asked = make(4, 0.5)
    later = [make(n, 0.95) for n in range(5, 8)]
    assert find([*runs, asked, *later], asked) == "r3"


@pytest.mark.parametrize("state", ["failed", "interrupted", "lost", "running"])
def test_a_run_that_did_not_complete_is_none(state):
    asked = make(4, 0.5)
    runs = [make(0, 0.9), make(1, 0.9), make(2, 0.99, state=state), make(3, None), asked]
    assert find(runs, asked) == "r1"


def test_a_critical_run_is_none_and_neither_is_one_that_checks_a_cause():
    asked = make(5, 0.5)
    runs = [make(n, 0.9) for n in range(3)]
    runs += [make(3, 0.91), make(4, 0.92, fields={EXCHANGED_FIELD: "lr"}), asked]
    assert find(runs, asked, critical={"r3"}) == "r2"
    with pytest.raises(quark.RunNotFoundError, match="critical"):
        find(runs, asked, critical={f"r{n}" for n in range(4)})


def test_one_of_the_same_seed_goes_before_others():
    asked = make(4, 0.5, seed=b"1")
    runs = [make(n, 0.9, seed=f"{n}".encode()) for n in range(4)]
    assert find([*runs, asked], asked) == "r1"


def test_of_another_configuration_it_is_none():
    asked = make(4, 0.5)
    with pytest.raises(quark.RunNotFoundError, match="no other run in this store has the config"):
        find([make(0, 0.9, digest="two"), asked], asked)


@pytest.mark.parametrize(("direction", "good", "bad"), [("higher", 0.9, 0.5), ("lower", 0.5, 0.9)])
def test_a_worse_run_is_none_even_if_there_is_no_other(direction, good, bad):
    asked = make(4, good)
    with pytest.raises(NothingGotWorseError, match=r"no result got worse.*quark why r0 r4"):
        find([make(0, bad), asked], asked, direction)


def test_what_differs_by_no_more_than_seeds_do_is_as_good():
    runs = [make(n, 0.9 + 0.01 * (-1) ** n * n) for n in range(5)]
    asked = make(9, 0.93)
    assert find([*runs, asked], asked) == "r4"


def test_where_all_others_began_later_it_says_so():
    asked = make(0, 0.9)
    with pytest.raises(quark.RunNotFoundError, match=r"none started before it.*quark why OTHER r0"):
        find([asked, make(1, 0.5)], asked)


def test_where_none_completed_it_says_so():
    asked = make(4, 0.9)
    with pytest.raises(quark.RunNotFoundError, match="none completed with val/acc"):
        find([make(0, 0.9, state="failed"), asked], asked)


def test_real_runs_a_critical_or_newer_or_foreign_one_is_not_taken(project):
    first = project.run(BASE, seed=1)
    second = project.run(BASE, seed=2)
    # It ends as well as the others, and its loss is no number on the way.
    with quark.start_run(
        project=project.name, storage_dir=project.root, config={**BASE, "seed": 3}
    ) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(30):
            metrics.log("val/acc", 0.9 * (1 - 0.7 ** (step + 1)), step=step)
            metrics.log("train/loss", float("nan") if step > 5 else 1.0, step=step)
    other = type(project)(project.root, "elsewhere")
    other.run(BASE, seed=4)
    bad = project.run(BASE, level=0.4, seed=5)
    project.run(BASE, seed=6)
    assert project.explain(bad, None).before.run_id == second
    assert project.explain(second, None).before.run_id == first
