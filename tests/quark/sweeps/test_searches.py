"""Which trials our own searches propose, and which they stop."""

import math
import random

import pytest
from sweep_training import SPACE

import quark
from quark_core.errors import SchemaValidationError


def settle(sweep, trial, value, state="completed"):
    """Have a claimed trial end with a figure, without a run."""
    if state == "completed":
        trial.complete(value)
    else:
        trial.fail("broken on purpose")


def work_off(sweep, score, fails=()):
    """Work at a whole sweep without runs; what each trial was."""
    worked = []
    for trial in sweep:
        worked.append(trial)
        settle(sweep, trial, score(trial), "failed" if trial.number in fails else "completed")
    return worked


def test_random_draws_the_same_for_whoever_comes(open_sweep, root):
    first = open_sweep(trials=5, seed=3)
    drawn = [trial.parameters for trial in work_off(first, lambda t: t["lr"])]
    assert len(drawn) == 5
    other = open_sweep("again", trials=5, seed=3)
    assert [trial.parameters for trial in work_off(other, lambda t: 0)] == drawn
    assert len({tuple(each.items()) for each in drawn}) == 5


def test_more_trials_may_be_asked_for_later(open_sweep):
    assert len(work_off(open_sweep(trials=3), lambda t: 1.0)) == 3
    more = open_sweep(trials=8)
    assert [trial.number for trial in work_off(more, lambda t: 1.0)] == [3, 4, 5, 6, 7]
    whole = open_sweep("whole", trials=8)
    work_off(whole, lambda t: 1.0)
    assert [t.parameters for t in more.trials()] == [t.parameters for t in whole.trials()]


def test_without_a_bound_there_is_always_one_more(open_sweep):
    sweep = open_sweep(trials=None)
    for count, trial in enumerate(sweep):
        trial.complete(1.0)
        if count == 6:
            break
    assert [trial.number for trial in sweep.trials()] == list(range(7))
    assert not sweep.is_over


def test_a_grid_is_tried_whole_or_in_part(open_sweep):
    space = {"lr": [0.1, 0.01, 0.001], "layers": quark.integers(1, 3)}
    whole = open_sweep(space=space, search="grid", trials=None)
    tried = [tuple(trial.parameters.values()) for trial in work_off(whole, lambda t: 1.0)]
    assert tried == [(lr, layers) for lr in (0.1, 0.01, 0.001) for layers in (1, 2, 3)]
    part = open_sweep("part", space=space, search="grid", trials=4, seed=1)
    some = [tuple(trial.parameters.values()) for trial in work_off(part, lambda t: 1.0)]
    assert len(set(some)) == 4
    assert set(some) < set(tried)
    rest = open_sweep("part", space=space, search="grid", trials=50, seed=1)
    some += [tuple(trial.parameters.values()) for trial in work_off(rest, lambda t: 1.0)]
    assert sorted(some) == sorted(tried)


def test_halving_goes_on_with_the_best_of_each_rung(open_sweep):
    sweep = open_sweep(search="halving", trials=9, budget=90)
    worked = work_off(sweep, lambda t: t["lr"])
    assert [t.rung for t in worked] == [0] * 9 + [1] * 3 + [2]
    assert [t.budget for t in worked] == [10] * 9 + [30] * 3 + [90]
    best = sorted(worked[:9], key=lambda t: -t["lr"])[:3]
    assert [t["lr"] for t in worked[9:12]] == [t["lr"] for t in best]
    assert worked[9].origin["parent"] == best[0].number
    assert worked[12].parameters == best[0].parameters
    assert sweep.best.number == 12
    assert sweep.is_over


def test_halving_ends_where_few_are_left_and_takes_no_failed_trial(open_sweep):
    # Seed 003's own settings: the best 30 % go on until three or fewer are left.
    sweep = open_sweep(search="halving(rate=0.3, least=3)", trials=10, mode="min")
    worked = work_off(sweep, lambda t: t["lr"], fails={0, 1, 2, 3, 4, 5, 6, 7})
    assert len(worked) == 10 + 2
    assert {t["lr"] for t in worked[10:]} == {t["lr"] for t in worked[8:10]}
    assert worked[0].budget is None


def test_halving_of_which_all_failed_is_over(open_sweep):
    sweep = open_sweep(search="halving", trials=3)
    assert len(work_off(sweep, lambda t: 1.0, fails={0, 1, 2})) == 3
    assert sweep.best is None


def test_halving_waits_for_the_figure_that_a_training_returns_after_its_run(open_sweep):
    sweep = open_sweep(search="halving", trials=3)
    trials = [sweep.claim() for _ in range(3)]
    for trial, value in zip(trials[1:], (0.2, 0.3), strict=True):
        trial.complete(value)
    with trials[0].start_run():
        pass
    assert sweep.trials()[0].state == "completed"
    other = open_sweep(search="halving", trials=3)
    assert other.claim() is None
    trials[0].take_result(0.9)
    trials[0].finish()
    promoted = other.claim()
    assert promoted.origin["parent"] == 0
    promoted.complete(0.9)


def test_halving_goes_on_without_a_figure_that_does_not_come(open_sweep, monkeypatch):
    monkeypatch.setattr("quark.sweeps.search_algorithms.PATIENCE_S", 0.5)
    sweep = open_sweep(search="halving", trials=3)
    for trial in sweep:
        if trial.number == 0:
            with trial.start_run():
                pass
        else:
            trial.complete(0.1 * trial.number)
    assert [t.origin.get("parent") for t in sweep.trials()[3:]] == [2]


def test_halving_prefers_trials_within_the_constraints(open_sweep):
    sweep = open_sweep(search="halving", trials=3, constraints=["latency <= 1"])
    for trial in sweep:
        if trial.rung:
            trial.complete({"val/acc": 0.5, "latency": 0.5})
            continue
        fast = trial.number == 1
        trial.complete({"val/acc": 0.1 if fast else 0.9, "latency": 0.5 if fast else 2.0})
    assert sweep.trials()[3].origin["parent"] == 1
    assert sweep.best.number == 3


def test_asha_stops_what_is_not_among_the_best_at_a_rung(open_sweep):
    sweep = open_sweep(search="asha", trials=9, budget=27, space={"lr": quark.uniform(0, 1)})
    assert sweep.search.rungs == (1, 3, 9)
    for trial in sweep:
        for step in range(27):
            trial.report(trial["lr"], step=step)
            if trial.should_stop():
                break
        if trial.should_stop():
            continue
        trial.complete()
    trials = sweep.trials()
    # One after the other: a trial goes on at a rung where it is in the best third so far.
    costs = {1: [], 3: [], 9: []}
    for trial in trials:
        lasts, expected = True, ("completed", 26)
        for rung in (1, 3, 9):
            costs[rung].append(-trial.parameters["lr"])
            rank = sorted(costs[rung]).index(-trial.parameters["lr"])
            if rank >= max(1, len(costs[rung]) // 3):
                lasts, expected = False, ("pruned", rung)
                break
        assert (trial.state, trial.step) == expected, (trial, lasts)
    assert {trial.state for trial in trials} == {"completed", "pruned"}
    pruned = next(trial for trial in trials if trial.state == "pruned")
    assert pruned.reason == f"not among the best at step {pruned.step}"
    assert pruned.values == (pruned.parameters["lr"],)


def test_asha_finds_nearly_the_best_for_a_part_of_the_steps(open_sweep):
    sweep = open_sweep(search="asha", trials=60, budget=81, space={"lr": quark.uniform(0, 1)})
    noise = random.Random(5)
    steps = 0
    for trial in sweep:
        for step in range(81):
            steps += 1
            trial.report(trial["lr"] + noise.gauss(0, 0.3 / math.sqrt(step + 1)), step=step)
            if trial.should_stop():
                break
        else:
            trial.complete()
    trials = sweep.trials()
    ranked = sorted((t.parameters["lr"] for t in trials), reverse=True)
    assert sweep.best.parameters["lr"] >= ranked[8]
    assert steps < 60 * 81 / 3


def test_reports_of_strangers_are_passed_over(open_sweep):
    sweep = open_sweep(search="asha", trials=2, budget=27, space={"lr": quark.uniform(0, 1)})
    texts = ["nonsense", "[]", "{}", '{"trial": "1", "rung": 1, "value": 5}',
             '{"trial": 9, "rung": 2, "value": 5}', '{"trial": 9, "rung": 1, "value": "high"}',
             '{"trial": 9, "rung": 1, "value": NaN}']  # fmt: skip
    sweep.store.append_entries(f"{sweep.id}/reports", texts, request_id="x")
    trial = sweep.claim()
    trial.report(0.5, step=1)
    assert not trial.should_stop()
    trial.suspend()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": "halving", "trials": None}, "trials is required"),
        ({"search": "halving(rate=2)"}, "rate must be between 0 and 1"),
        ({"search": "halving(least=0)"}, "least must be at least 1"),
        (
            {"search": "halving(eta=3)"},
            "halving has no setting 'eta'. Its settings are rate, least",
        ),
        ({"search": "halving(rate=fast)"}, "rate must be a number"),
        ({"search": "halving", "metric": ["a", "b"]}, "metric must be a single metric"),
        ({"search": "asha"}, "budget is required"),
        ({"search": "asha", "budget": 9, "metric": ["a", "b"]}, "metric must be a single metric"),
        ({"search": "grid"}, r"space\['lr'\] is continuous"),
        ({"search": "random(n=3)"}, "random has no setting 'n'"),
    ],
)
def test_a_search_that_does_not_fit_is_refused_before_there_is_a_sweep(
    open_sweep, changes, message
):
    with pytest.raises(SchemaValidationError, match=message):
        open_sweep(space=SPACE, **changes)
    with pytest.raises(SchemaValidationError, match="does not exist"):
        open_sweep(space=None)
