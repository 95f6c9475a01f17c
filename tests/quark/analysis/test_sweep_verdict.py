"""Whether the best of a sweep is really the best: held against truths that are made up."""

import math

import msgspec
import numpy as np
import pytest

import quark
from quark.analysis.metric_roles import find_best_trial, list_objectives, pick_comparable
from quark.analysis.sweep_analysis import judge_sweep
from quark_core.records.json_object import JsonObject
from quark_core.records.sweeps import StoredSweep, StoredTrial

SWEEPS = 800
AT = "2026-05-07T09:30:00.000000Z"


def make_sweep(metric="val/acc", mode="max", project="p", **more):
    definition = JsonObject({"metric": metric, "mode": mode, **more})
    return StoredSweep("s1", project, "s", definition, "running", JsonObject(), AT, AT)


def make_trials(rows, state="completed"):
    """Trials of `(parameters, values)`."""
    return [
        StoredTrial("s1", number, JsonObject(parameters), JsonObject(), state, values=tuple(values))
        for number, (parameters, values) in enumerate(rows)
    ]


def judge(rows, metric="val/acc", mode="max"):
    (verdict,) = judge_sweep(make_sweep(metric, mode), make_trials(rows))
    return verdict


def play(generator, truths, repeats, noise=1.0, draw=None):
    """A sweep of configurations with known truths, each run so often with other seeds."""
    draw = draw or generator.standard_normal
    noises = np.broadcast_to(noise, len(truths))
    rows = []
    for at, truth in enumerate(truths):
        for seed, error in enumerate(np.atleast_1d(draw(repeats[at]))):
            rows.append(({"lr": float(at), "seed": seed}, [truth + noises[at] * error]))
    return judge(rows)


def is_true(verdict, truths, repeats):
    """Whether the configuration that is called the best is better than each other."""
    first = int(np.searchsorted(np.cumsum(repeats), verdict.best, side="right"))
    return truths[first] > max(np.delete(truths, first))


def count_accusations(make, *, sweeps=SWEEPS, **settings):
    """How many sweeps are told a best that is none, and how many the true one."""
    generator = np.random.default_rng(20_260)
    wrong = right = 0
    for _ in range(sweeps):
        truths, repeats = make(generator)
        verdict = play(generator, truths, repeats, **settings)
        if verdict.verdict == "better":
            told = is_true(verdict, truths, repeats)
            right, wrong = right + told, wrong + (not told)
    return wrong, right


# Of each 1 % may be told wrongly; five deviations beyond that is no chance.
MOST_WRONG = SWEEPS * 0.01 + 5 * math.sqrt(SWEEPS * 0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "noise"),
    [
        (lambda g: (np.zeros(2), [3, 3]), 1.0),
        (lambda g: (np.zeros(12), [3] * 3 + [1] * 9), 1.0),
        (lambda g: (np.r_[3.0, 3.0, np.zeros(10)], [2] * 4 + [1] * 8), 1.0),
        (lambda g: (-(g.uniform(-1, 1, 12) ** 2), [2] * 12), 1.0),
        # Bad corners that do not learn, where seeds hardly differ, and such that diverge.
        (lambda g: (np.r_[np.zeros(8), -9.0 * np.ones(8)], [2] * 16), np.r_[[1.0] * 8, [1e-3] * 8]),
        (
            lambda g: (np.r_[np.zeros(8), -99.0 * np.ones(8)], [2] * 16),
            np.r_[[1.0] * 8, [30.0] * 8],
        ),
    ],
    ids=["two", "twelve equal", "two tops", "bowl", "quiet corners", "wild corners"],
)
def test_a_best_that_is_none_is_told_once_in_a_hundred_at_most(make, noise):
    wrong, _ = count_accusations(make, noise=noise)
    assert wrong <= MOST_WRONG


@pytest.mark.long
def test_noise_with_long_tails_leads_to_no_more():
    generator = np.random.default_rng(7)
    wrong, _ = count_accusations(
        lambda g: (np.zeros(10), [2] * 10), draw=lambda size: generator.standard_t(3, size)
    )
    assert wrong <= MOST_WRONG


@pytest.mark.long
def test_a_best_that_is_far_ahead_is_found():
    wrong, right = count_accusations(lambda g: (np.r_[6.0, np.zeros(11)], [3] * 12), sweeps=300)
    assert wrong == 0
    assert right >= 295


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_the_true_best_is_among_those_that_may_be_it(spread):
    generator = np.random.default_rng(11)
    missed = 0
    for _ in range(600):
        truths = generator.normal(0.0, spread, 15)
        repeats = [2] * 15
        verdict = play(generator, truths, repeats)
        kept = {number // 2 for number in verdict.alike}
        missed += int(np.argmax(truths)) not in kept
        assert verdict.best in verdict.alike
        assert verdict.alike_count == len(verdict.alike)
    # Five in a hundred may be.
    assert missed <= 30 + 5 * math.sqrt(30)


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_what_the_best_will_reach_again_is_not_its_luck(spread):
    generator = np.random.default_rng(13)
    lucks, errors = [], []
    for _ in range(300):
        truths = generator.normal(0.0, spread, 30)
        repeats = [2, 1] * 15
        verdict = play(generator, truths, repeats)
        first = int(np.searchsorted(np.cumsum(repeats), verdict.best, side="right"))
        lucks.append(verdict.best_value - truths[first])
        errors.append(verdict.expected_again - truths[first])
    # Choosing the best of 30 adds more than a deviation of one run; most of it is taken off.
    assert np.mean(lucks) > 1.0
    assert abs(np.mean(errors)) < 0.35 * np.mean(lucks)


def test_the_words_say_what_was_found():
    rows = [({"lr": lr, "seed": seed}, [value + 0.001 * seed])
            for lr, value in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.5)) for seed in range(3)]  # fmt: skip
    verdict = judge(rows)
    assert verdict.verdict == "better"
    assert (verdict.best, verdict.second, verdict.compared) == (2, 5, 3)
    assert sorted(verdict.best_trials) == [0, 1, 2]
    assert verdict.headline == "The config of trial 2 (3 runs) is really the best"
    assert "from 9 runs of this sweep" in verdict.reason
    assert verdict.noise.source == "sweep"
    assert verdict.noise.degrees == 6
    assert verdict.advice == ""
    assert verdict.is_spread
    assert 0.89 < verdict.expected_again < verdict.best_value
    # Plain numbers, as whatever sends them on wants them.
    assert msgspec.json.decode(msgspec.json.encode(verdict.to_dict()))["verdict"] == "better"


def test_lower_is_better_where_the_sweep_says_so():
    rows = [({"lr": lr, "seed": seed}, [value + 0.01 * seed])
            for lr, value in ((0.1, 0.9), (0.2, 0.2), (0.3, 0.5)) for seed in range(3)]  # fmt: skip
    verdict = judge(rows, "val/loss", "min")
    assert (verdict.verdict, verdict.best, verdict.best_value) == ("better", 3, 0.21)
    assert verdict.expected_again >= verdict.best_value


def test_two_configurations_with_seeds_are_told_apart():
    rows = [({"lr": lr, "seed": s}, [lr + 0.01 * s]) for lr in (1, 2) for s in range(3)]
    verdict = judge(rows)
    assert (verdict.verdict, verdict.best, verdict.noise.degrees) == ("better", 5, 4)


def test_without_seeds_nobody_knows():
    verdict = judge([({"lr": at / 7}, [at / 10]) for at in range(8)])
    assert (verdict.verdict, verdict.noise, verdict.p_value) == ("cannot_tell", None, None)
    assert verdict.advice == "Run the best few again with 3 seeds each: trials 7, 6, 5, 4, 3."
    assert verdict.alike == ()


def test_a_training_that_is_repeated_bit_by_bit_says_nothing_of_chance():
    rows = [({"lr": lr}, [lr]) for lr in (0.1, 0.2, 0.3)] * 4
    verdict = judge(rows)
    assert (verdict.verdict, verdict.compared, verdict.noise) == ("cannot_tell", 3, None)


def test_seeds_that_change_nothing_leave_only_what_differs():
    rows = [({"lr": lr, "seed": s}, [lr]) for lr in (0.1, 0.2, 0.3) for s in range(3)]
    assert judge(rows).verdict == "better"
    rows += [({"lr": 0.9, "seed": s}, [0.3]) for s in range(3)]
    verdict = judge(rows)
    assert (verdict.verdict, verdict.alike_count) == ("no_difference", 2)


def test_noise_of_what_learns_nothing_is_not_that_of_the_best():
    rows = [({"lr": at}, [0.9 + 0.001 * at]) for at in range(10)]
    rows += [({"lr": 100 + at, "seed": s}, [0.1 + 1e-6 * s]) for at in range(9) for s in range(2)]
    verdict = judge(rows)
    assert (verdict.verdict, verdict.noise) == ("cannot_tell", None)


def test_a_lucky_single_value_is_named():
    rows = [({"lr": 1, "seed": s}, [v]) for s, v in enumerate((0.95, 0.80, 0.79))]
    rows += [({"lr": 2, "seed": s}, [v]) for s, v in enumerate((0.90, 0.91, 0.92))]
    verdict = judge(rows)
    assert verdict.best == 5
    assert "Trial 0 has the best single value, 0.95, but its 3 runs have 0.8467" in verdict.reason


def test_of_trials_only_those_that_had_the_whole_budget_are_compared():
    def make(number, state, value, budget=None, constraints=None):
        origin = JsonObject({} if budget is None else {"budget": budget})
        values = None if value is None else (value,)
        return StoredTrial("s1", number, JsonObject({"lr": number}), origin, state,
                           values=values, constraints=constraints)  # fmt: skip

    trials = [
        make(0, "completed", 0.9, budget=1),
        make(1, "completed", 0.8, budget=9),
        make(2, "pruned", 0.99),
        make(3, "failed", None),
        make(4, "completed", 0.7, budget=9),
        make(5, "completed", 0.95, budget=9, constraints=(0.5,)),
        make(6, "completed", math.nan, budget=9, constraints=(0.0,)),
    ]
    assert [trial.number for trial in pick_comparable(make_sweep(), trials)] == [1, 4, 6]
    # Of what was not measured nobody knows whether it keeps its bounds.
    bounded = make_sweep(constraints=["ms <= 3"])
    assert [trial.number for trial in pick_comparable(bounded, trials)] == [6]
    (verdict,) = judge_sweep(make_sweep(), trials)
    assert (verdict.best, verdict.second, verdict.compared) == (1, 4, 2)
    assert find_best_trial(make_sweep(), trials) is trials[1]
    assert find_best_trial(make_sweep(mode="min"), trials) is trials[4]
    assert find_best_trial(make_sweep(), trials[2:4]) is None


def test_of_a_halving_the_rung_is_compared_that_the_last_one_was_chosen_in():
    trials = [
        StoredTrial("s1", number, JsonObject({"lr": lr}), JsonObject({"rung": rung}), "completed",
                    values=(value,))
        for number, (lr, rung, value) in enumerate(
            [(1, 0, 0.1), (2, 0, 0.2), (3, 0, 0.3), (2, 1, 0.5), (3, 1, 0.6), (3, 2, 0.55)]
        )
    ]  # fmt: skip
    assert find_best_trial(make_sweep(), trials).number == 5
    (verdict,) = judge_sweep(make_sweep(), trials)
    assert (verdict.best, verdict.second, verdict.compared) == (4, 3, 2)
    assert verdict.reason.endswith("Only trial 5 went further; it was selected from these.")


def test_nothing_and_one_are_told():
    assert judge([]).headline == "No trial is completed yet"
    assert judge([({"lr": 1}, [math.inf])]).headline == "No completed trial has the metric"
    only = judge([({"lr": 1, "seed": s}, [0.5 + s]) for s in range(3)])
    assert (only.verdict, only.compared, only.best) == ("cannot_tell", 1, 2)


def test_each_objective_has_its_verdict():
    sweep = make_sweep(["val/acc", "latency_ms"], ["max", "min"])
    trials = make_trials([({"lr": at}, [at, at]) for at in range(4)])
    first, second = judge_sweep(sweep, trials)
    assert (first.metric, first.best) == ("val/acc", 3)
    assert (second.metric, second.best) == ("latency_ms", 0)


def test_objectives_are_read_of_whatever_stands_there():
    assert list_objectives({"metric": "val/acc", "mode": "max"}) == [("val/acc", "max")]
    assert list_objectives({"metric": ["a/loss", 3], "mode": "up"}) == [("a/loss", "min")]
    assert list_objectives({"metric": "val/acc"}) == [("val/acc", "max")]
    assert list_objectives({}) == []


@pytest.mark.long
def test_runs_of_the_project_say_what_chance_does(tmp_path):
    """Where the sweep has no seeds, others of the project have been run with some."""
    generator = np.random.default_rng(3)
    for lr in (0.1, 0.2):
        for seed in range(3):
            with quark.start_run(
                project="p", storage_dir=tmp_path, config={"lr": lr, "seed": seed}
            ) as session:
                value = 0.9 + 0.01 * generator.standard_normal()
                quark.MetricsLogger(session).log("val/acc", value, step=1)
    rows = [({"lr": at + 1.0}, [value]) for at, value in enumerate((0.99, 0.6, 0.5, 0.4))]
    run = quark.open_run(session.run_id, tmp_path)
    (verdict,) = judge_sweep(make_sweep(), make_trials(rows), run.open_run.reader)
    assert verdict.noise.source == "project"
    assert verdict.noise.degrees == 4
    assert verdict.verdict == "better"
    assert "from 6 other runs of the project" in verdict.reason
