"""Outcomes do not acquit by noise, few points are said to be few, and costs are costs."""

import numpy as np
import pytest
from rule_alerts import faults, verdict
from run_builder import RunBuilder, falling

from quark.analysis.analysis_context import improves_clearly
from quark.analysis.curves import Curve, find_resolution
from quark.analysis.engine import analyze_run
from quark.analysis.run_data import RunData
from quark_core.records import BatchDiagnosticRecord
from quark_core.records.json_object import JsonObject

RNG = np.random.default_rng(0)
FLAT = 2.303 + 0.02 * RNG.standard_normal(300)


def curve(values):
    steps = np.arange(len(values))
    return Curve("accuracy", steps, np.asarray(values, dtype=float), steps - steps - 1)


def of_samples(shares, samples, seed=0):
    """Accuracies of so many samples that are right with these probabilities."""
    shares = np.asarray(shares)
    return np.random.default_rng(seed).binomial(samples, shares) / samples


@pytest.mark.parametrize(
    ("values", "improves"),
    [
        ([0.10] * 5 + [0.14] * 15, False),
        ([10.0] * 5 + [14.0] * 15, False),
        (of_samples(np.full(20, 0.1), 50), False),
        (of_samples(np.full(400, 0.1), 16), False),
        (of_samples(np.linspace(0.1, 0.9, 20), 50), True),
        (of_samples(np.linspace(0.1, 0.9, 400), 8), True),
        (100.0 * of_samples(np.linspace(0.1, 0.6, 30), 1000), True),
        (np.linspace(0.001, 0.012, 60), True),
        (np.linspace(0.9, 0.2, 60), False),
        (np.full(30, 0.5), False),
    ],
    ids=[
        "two of fifty samples", "the same in percent", "guesses", "guesses of small batches",
        "learned, of fifty", "learned, of batches of eight", "learned, in percent",
        "a thousand classes", "worse", "never another",
    ],
)  # fmt: skip
def test_an_accuracy_improves_by_more_than_it_can_resolve(values, improves):
    assert improves_clearly(curve(values)) is improves


def test_the_resolution_of_a_share_is_that_of_its_samples():
    assert find_resolution(np.array([0.1, 0.14, 0.12, 0.12 + 1e-12])) == pytest.approx(0.02)
    assert find_resolution(np.array([0.5, 0.5])) == 0.0


def test_a_plateau_is_not_acquitted_by_two_samples_or_a_penalty_that_falls():
    builder = RunBuilder().metric("train/loss", FLAT)
    builder.metric("val/accuracy", [0.10] * 5 + [0.14] * 10, steps=range(0, 300, 20))
    builder.metric("train/reg_loss", falling(300))
    (alert,) = faults(builder, "plateau")
    assert alert.severity == "error"
    two_tasks = RunBuilder().metric("train/loss", FLAT).metric("train/box_loss", falling(300))
    assert faults(two_tasks, "plateau") == []


ONCE = np.concatenate([np.linspace(3.4, 2.31, 20), FLAT[:280]])


def with_labels(loss, counts):
    builder = RunBuilder().metric("train/loss", loss)
    builder.records["batch"] = [
        BatchDiagnosticRecord(*builder._head("batch"), 2.3, step, class_counts=JsonObject(counts))
        for step in range(30)
    ]
    return builder


def with_classes(loss, classes):
    run = RunBuilder().metric("train/loss", loss)
    return RunData(run.read, "run-a", config={"model": {"depth": 3}, "num_classes": classes})


def test_what_falls_to_the_loss_of_guesses_and_stays_there_has_learned_nothing():
    guesses = RunBuilder().metric("train/loss", ONCE)
    guesses.metric("train/accuracy", of_samples(np.full(300, 0.1), 64))
    (alert,) = faults(guesses, "plateau")
    assert "which guesses have" in alert.fact
    assert faults(with_labels(ONCE, {str(n): 6 for n in range(10)}), "plateau")
    assert analyze_run(with_classes(ONCE, 10)).alerts[0].rule_id == "plateau"


def test_what_falls_once_to_less_than_guesses_have_is_no_plateau():
    knows = RunBuilder().metric("train/loss", ONCE)
    knows.metric("train/accuracy", of_samples(np.full(300, 0.45), 64))
    assert faults(knows, "plateau") == []
    assert faults(RunBuilder().metric("train/loss", ONCE), "plateau") == []
    assert faults(with_labels(ONCE, {str(n): 6 for n in range(40)}), "plateau") == []
    assert analyze_run(with_classes(ONCE, 100)).alerts == ()
    goes_on = np.concatenate([np.linspace(3.4, 2.35, 20), np.linspace(2.35, 2.1, 280)])
    assert analyze_run(with_classes(goes_on, 10)).alerts == ()


def test_a_negative_loss_that_is_flat_is_a_plateau_and_one_about_zero_is_none():
    (alert,) = faults(RunBuilder().metric("train/loss", FLAT - 8.0), "plateau")
    assert alert.severity == "warning"
    about_zero = RunBuilder().metric(
        "train/loss", -0.01 + 0.2 * np.random.default_rng(7).standard_normal(300)
    )
    assert faults(about_zero, "plateau") == []
    falls = (
        -4.0
        + 3.0 * np.exp(-np.arange(300) / 60.0)
        + 0.02 * np.random.default_rng(7).standard_normal(300)
    )
    assert faults(RunBuilder().metric("train/loss", falls), "plateau") == []


EPOCHS = 2.303 + 0.002 * np.random.default_rng(7).standard_normal(10)


def test_a_point_an_epoch_needs_fewer_points_once_the_run_is_over():
    assert faults(RunBuilder().metric("train/loss", EPOCHS, epochs=range(10)), "plateau")
    assert faults(RunBuilder().metric("train/loss", EPOCHS), "plateau") == []
    slow = np.linspace(2.303, 2.2, 10)
    assert faults(RunBuilder().metric("train/loss", slow, epochs=range(10)), "plateau") == []
    back = [2.3, 1.6, 1.1, 0.8, 0.75, 1.2, 1.9, 2.6, 3.0, 3.1]
    assert faults(RunBuilder().metric("train/loss", back, epochs=range(10)), "divergence")
    wobble = [2.3, 1.6, 1.1, 0.8, 0.75, 0.9, 0.8, 0.7, 0.72, 0.7]
    assert faults(RunBuilder().metric("train/loss", wobble, epochs=range(10)), "divergence") == []
    run = RunBuilder().metric("train/loss", back)
    going_on = RunData(run.read, "run-a", ended=False)
    assert [a for a in analyze_run(going_on).alerts if a.rule_id == "divergence"] == []


def test_a_noisy_validation_acquits_no_divergence():
    loss = falling(300)
    loss[180:] += np.linspace(0, 3, 120)
    steps = list(range(0, 300, 20))
    noisy = 1.5 + 1.2 * np.random.default_rng(5).standard_normal(len(steps))
    builder = RunBuilder().metric("train/loss", loss)
    assert faults(builder.metric("val/loss", np.abs(noisy), steps=steps), "divergence")
    calm = RunBuilder().metric("train/loss", loss)
    better = [2.0 * 0.8**i + 0.3 for i in range(15)]
    assert faults(calm.metric("val/loss", better, steps=steps), "divergence") == []


def validated(values, train=True):
    count = 40 * len(values)
    builder = RunBuilder().metric("val/loss", values, steps=range(39, count, 40))
    scale = 10.0 * falling(count) - 60.0 if max(values) < 0 else falling(count)
    return builder.metric("train/loss", scale) if train else builder


@pytest.mark.parametrize(
    "values",
    [
        [2.0, 1.0, 1.3, 1.7, 2.2],
        [1.6, 2.2, 2.4, 2.5, 2.6],
        [3.0, 2.0, 1.4, 1.1, 1.5, 1.9, 2.4],
        [-40.0, -50.0, -52.0, -50.0, -49.0, -48.0, -46.5, -45.0],
    ],
    ids=["five", "five, from the first", "three after the best", "negative throughout"],
)
def test_few_validations_that_only_get_worse_are_enough(values):
    assert faults(validated(values), "overfitting_onset")


def test_a_validation_that_was_at_its_best_at_its_first_point():
    values = [5.6, 6.6, 6.8, 6.9, 6.95, 6.94, 6.95, 6.93, 6.94, 6.95, 6.93, 6.94]
    (alert,) = faults(validated(values), "overfitting_onset")
    assert alert.step <= 119
    flat = [6.6, 6.6, 6.8, 6.7, 6.75, 6.7, 6.8, 6.7, 6.7, 6.75, 6.8, 6.7]
    assert faults(validated(flat), "overfitting_onset") == []


def hold_out(values, *, left=1e-3):
    """A training that comes from 2.3 down to so much, beside these held-out losses."""
    train = left + (2.3 - left) * np.exp(-np.arange(400) / 25.0)
    builder = RunBuilder().metric("train/loss", train)
    return builder.metric("val/loss", values, steps=range(39, 400, 40))


def test_samples_that_are_known_by_heart_beside_others_of_which_nothing_is_known():
    rng = np.random.default_rng(4)
    noisy = 2.25 + 0.15 * rng.standard_normal(10)
    (alert,) = faults(hold_out(noisy), "overfitting_onset")
    assert (alert.title, alert.severity) == ("Only the training samples are learned", "error")
    assert "never much better than at its start" in [entry.summary for entry in alert.evidence]


@pytest.mark.parametrize(
    "builder",
    [
        hold_out(2.3 - 0.06 * np.arange(10)),
        hold_out(2.25 + 0.15 * np.random.default_rng(4).standard_normal(10), left=0.3),
        hold_out(40.0 + np.random.default_rng(4).standard_normal(10)),
        hold_out(0.4 + 0.02 * np.random.default_rng(4).standard_normal(10)),
    ],
    ids=["something is won", "not by heart", "on another scale", "learned before the first look"],
)
def test_what_is_not_known_by_heart_alone(builder):
    assert faults(builder, "overfitting_onset") == []


def test_an_accuracy_that_falls_clearly_says_what_the_noise_of_the_loss_hides():
    rng = np.random.default_rng(8)
    loss = 0.7 + np.exp(-np.arange(28) / 3.0) + np.maximum(0, np.arange(28) - 13) * 0.008
    loss += 0.07 * rng.standard_normal(28)
    accuracy = np.concatenate([np.linspace(0.68, 0.87, 13), np.linspace(0.87, 0.72, 15)])
    assert faults(validated(loss), "overfitting_onset") == []
    both = validated(loss).metric("val/accuracy", accuracy, steps=range(39, 28 * 40, 40))
    (alert,) = faults(both, "overfitting_onset")
    assert alert.culprit == "val/accuracy"
    kept = np.concatenate([np.linspace(0.68, 0.87, 13), np.full(15, 0.865)])
    same = validated(loss).metric("val/accuracy", kept, steps=range(39, 28 * 40, 40))
    assert faults(same, "overfitting_onset") == []


def test_the_loss_of_a_policy_whose_reward_rises_does_not_diverge():
    rng = np.random.default_rng(0)
    loss = -0.3 * np.exp(-(((np.arange(400) - 80) / 50.0) ** 2)) - 0.02
    reward = 1.0 - 0.8 * np.exp(-np.arange(400) / 60.0) + 0.03 * rng.standard_normal(400)
    builder = RunBuilder().metric("train/loss", loss + 0.01 * rng.standard_normal(400))
    assert faults(builder, "divergence")
    assert faults(builder.metric("train/reward", reward), "divergence") == []


def test_of_too_few_validations_that_is_said():
    for values in ([1.0, 0.8, 0.9], [2.0, 1.0, 1.1, 0.9, 0.8], [2.0, 1.0, 1.05, 1.1, 1.12]):
        said = verdict(validated(values), "overfitting_onset")
        assert said.reason == f"too few validations ({len(values)} of 6)"
        assert said.state == "no_data"
    late = verdict(validated([2.0, 1.5, 1.2, 1.1, 1.0, 1.05, 1.1]), "overfitting_onset")
    assert late.reason.startswith("too few validations after the best one (2 of 4)")


def test_a_validation_without_any_training_metric_has_to_rise_by_more():
    rising = [1.3, 1.3, 1.6, 1.9, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6]
    (alert,) = faults(validated(rising, train=False), "overfitting_onset")
    assert alert.metadata["confidence"] < 0.8
    mild = [2.0, 1.5, 1.2, 1.0, 1.0, 1.05, 1.1, 1.15, 1.17, 1.2]
    assert faults(validated(mild, train=False), "overfitting_onset") == []


def timed(times, data=None):
    builder = RunBuilder().metric("train/loss", falling(len(times)))
    builder.metric("system/runtime/step_time_ms", times)
    if data is not None:
        builder.metric("system/runtime/data_time_ms", data)
    return faults(builder, "runtime_bottleneck_risk")


def steady(count=300, level=50.0):
    return level * (1 + 0.02 * np.random.default_rng(1).standard_normal(count))


@pytest.mark.parametrize(("cost", "fires"), [(1200.0, True), (500.0, False)])
def test_regular_stalls_are_sound_as_long_as_they_do_not_cost_two_fifths(cost, fires):
    times = steady()
    times[24::25] += cost
    found = timed(times)
    assert bool(found) is fires
    if fires:
        assert (found[0].title, found[0].severity) == (
            "Regular stalls cost much of the time", "warning",
        )  # fmt: skip


def test_steps_too_short_for_the_clock_may_stall_for_long():
    times = steady(level=3.0)
    times[np.random.default_rng(6).choice(np.arange(10, 300), 14, replace=False)] = 400.0
    (alert,) = timed(times)
    assert alert.title == "Steps stall"
    hiccups = steady(level=3.0)
    hiccups[np.random.default_rng(6).choice(np.arange(10, 300), 14, replace=False)] = 20.0
    assert timed(hiccups) == []


def test_steps_that_get_slower_for_the_last_fifth_only():
    times = steady()
    times[235:] *= 3.0
    (alert,) = timed(times)
    assert alert.title == "Steps get slower"
    assert 225 <= alert.step <= 245
    visitor = steady()
    visitor[150:215] *= 3.0
    assert timed(visitor) == []


def test_the_worst_wait_for_data_is_told_and_not_the_first():
    data = steady(600, level=2.0)
    data[60:180] = 30.0
    data[360:] = 900.0
    (alert,) = timed(steady(600) + data, data)
    assert alert.severity == "critical"
    assert 340 <= alert.step <= 380
