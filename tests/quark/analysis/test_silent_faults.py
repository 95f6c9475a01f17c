"""Trainings that run and learn something else than they should, and what looks like them."""

import numpy as np
import pytest
from rule_alerts import find
from run_builder import RunBuilder, falling

from quark_core.records import MetricRecord

STEPS = list(range(0, 240, 5))
COUNT = len(STEPS)
RNG = np.random.default_rng(5)


def noisy(level, count, noise):
    return level + noise * np.random.default_rng(9).standard_normal(count)


# Sorted, and never shuffled.


def by_epochs(loss, per_epoch=24, key="train/loss"):
    builder = RunBuilder()
    for step, value in enumerate(loss):
        head = builder._head("metric")
        namespace, _, name = key.rpartition("/")
        builder.records["metric"].append(
            MetricRecord(*head, key, namespace or None, name, float(value), step, step // per_epoch)
        )
    return builder


def sawtooth(epochs=10, classes=4, batches=6, noise=0.02):
    """Of each class the loss jumps up where it begins, and falls while it lasts."""
    jumps = np.array([0.6, 0.2, 0.9, 0.4])[:classes]
    once = np.concatenate([0.8 + jump * np.exp(-np.arange(batches) / 4) for jump in jumps])
    return np.tile(once, epochs) + noise * RNG.standard_normal(epochs * len(once))


@pytest.mark.parametrize("fall", [1.0, 0.3])
def test_samples_that_come_class_after_class(fall):
    builder = by_epochs(sawtooth() * np.linspace(1.0, fall, 240))
    (alert,) = find(builder, "unshuffled_data")
    assert (alert.culprit, alert.severity, alert.step) == ("train/loss", "warning", 0)
    assert "(steps 216 to 239)" in alert.fact
    assert "shuffle" in alert.suggested_check


def test_another_period_than_the_epoch_is_no_order_of_samples():
    assert not find(by_epochs(sawtooth(), per_epoch=35), "unshuffled_data")


@pytest.mark.parametrize(
    "builder",
    [
        by_epochs(falling(240)),
        # The same batches in every epoch, drawn at random once.
        by_epochs(np.tile(1.0 + 0.3 * np.random.default_rng(1).standard_normal(24), 10)),
        # A mean that starts anew with every epoch.
        by_epochs(np.concatenate([
            np.cumsum(part) / np.arange(1, 25) for part in falling(240).reshape(10, 24)
        ])),
        # A course that is small against the loss.
        by_epochs(10.0 + 0.3 * sawtooth()),
        # A rate that restarts with every epoch.
        by_epochs(sawtooth()).metric("lr", np.tile(np.linspace(0.1, 0.001, 24), 10)),
        by_epochs(sawtooth(epochs=3)),
        RunBuilder().metric("train/loss", sawtooth()),
    ],
    ids=["shuffled", "fixed batches", "running mean", "small", "restarts", "few", "no epochs"],
)  # fmt: skip
def test_losses_that_do_not_follow_sorted_samples(builder):
    assert not find(builder, "unshuffled_data")


# A softmax, or a sigmoid, before a loss that has one.


def classify(loss, std, *, outputs=12, kind="Linear"):
    builder = RunBuilder().metric("train/loss", loss)
    builder.layer("body", steps=STEPS, std=1.0)
    builder.layer("head", kind, steps=STEPS, std=std)
    builder.parameter("head.weight", steps=STEPS, element_count=outputs * 20)
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=outputs)


LARGE, SMALL = np.linspace(0.1, 11.0, COUNT), np.linspace(0.1, 1.5, COUNT)
FLOOR = float(np.log1p(11 / np.e))  # the least of a cross-entropy of shares of 12 classes
AT_FLOOR = FLOOR + (2.485 - FLOOR) * np.exp(-np.arange(240) / 20)


def with_softmax(loss, sharp):
    """A model that ends with a softmax, whose shares are sharp or stay undecided."""
    builder = classify(loss, SMALL)
    return builder.layer("shares", "Softmax", steps=STEPS, std=0.25 if sharp else 0.02)


@pytest.mark.parametrize(
    "builder",
    [classify(AT_FLOOR, SMALL), with_softmax(falling(240, start=2.485, end=1.75), sharp=True)],
    ids=["the losses end at the floor", "sharp shares"],
)
def test_outputs_that_grew_before_the_first_probe_are_squashed_too(builder):
    (alert,) = find(builder, "squashed_outputs")
    assert alert.title == "Outputs go through a softmax twice"


@pytest.mark.parametrize(
    ("outputs", "start", "end", "named"),
    [(12, 2.485, 1.9, "softmax"), (100, 4.605, 4.0, "softmax"), (1, 0.7, 0.5, "sigmoid")],
)
def test_outputs_that_are_squashed_before_the_loss(outputs, start, end, named):
    builder = classify(falling(240, start=start, end=end), LARGE, outputs=outputs)
    (alert,) = find(builder, "squashed_outputs")
    assert (alert.culprit, alert.severity) == ("head", "warning")
    assert alert.title == f"Outputs go through a {named} twice"


@pytest.mark.parametrize(
    "builder",
    [
        classify(falling(240, start=2.485, end=0.5), LARGE),
        # Smoothed labels: the loss has a floor, and outputs stay small.
        classify(falling(240, start=2.485, end=1.9), SMALL),
        classify(falling(240, start=4.0, end=2.0), LARGE),
        classify(noisy(2.485, 240, 0.02), LARGE),
        classify(AT_FLOOR * np.where(np.arange(240) == 200, 0.99, 1.0), SMALL),
        with_softmax(falling(240, start=2.485, end=1.75), sharp=False),
        with_softmax(falling(240, start=2.485, end=0.1), sharp=True),
        classify(falling(240, start=0.7, end=0.1), LARGE, outputs=1),
    ],
    ids=[
        "below the floor",
        "smoothed",
        "another loss",
        "no fall",
        "once below",
        "undecided",
        "logarithms of shares",
        "two classes",
    ],
)
def test_outputs_that_the_loss_sees(builder):
    assert not find(builder, "squashed_outputs")


# Labels of other samples.


def guess(train, held_out, *, accuracy=None, ratio=5e-3, dead=0.0):
    builder = RunBuilder().metric("train/loss", train)
    steps = range(11, 240, 12)
    builder.metric("val/loss", held_out, steps=steps)
    if accuracy is not None:
        builder.metric("val/accuracy", accuracy, steps=steps)
    for name in ("fc", "head"):
        builder.layer(name, steps=STEPS, std=1.0, dead_unit_ratio=dead)
        builder.parameter(
            f"{name}.weight", steps=STEPS, element_count=200, gradient_norm=0.2,
            value_norm=5.0 + 1e-3 * np.arange(COUNT), update_to_parameter_ratio=ratio,
        )  # fmt: skip
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=10)


BY_HEART = np.linspace(2.34, 2.22, 240) + noisy(0.0, 240, 0.03)
STANDS = noisy(2.31, 20, 0.004)


@pytest.mark.parametrize("accuracy", [None, noisy(0.1, 20, 0.01)])
def test_labels_of_other_samples_are_learned_by_heart_only(accuracy):
    builder = guess(BY_HEART, STANDS, accuracy=accuracy)
    (alert,) = find(builder, "mislabelled_data")
    assert (alert.culprit, alert.severity, alert.step) == ("val/loss", "error", 0)
    assert "20 validations" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        guess(noisy(2.303, 240, 0.03), STANDS),
        guess(BY_HEART, np.linspace(2.31, 2.26, 20)),
        guess(BY_HEART, STANDS, accuracy=np.linspace(0.1, 0.4, 20)),
        guess(BY_HEART, STANDS, ratio=1e-7),
        guess(BY_HEART, STANDS, dead=np.where(np.arange(COUNT) < 6, 0.0, 1.0)),
        guess(falling(240, start=2.3, end=0.3), np.linspace(2.3, 3.9, 20)),
        guess(BY_HEART - 1.0, STANDS - 1.0),
    ],
    ids=[
        "nothing by heart", "the validation falls", "accuracy rises", "hardly moves", "dead",
        "overfitting", "another level",
    ],
)  # fmt: skip
def test_other_trainings_near_the_loss_of_guesses(builder):
    assert not [alert for alert in find(builder, "mislabelled_data") if alert.culprit == "val/loss"]


# Two players, of which one has won.


def play(judge, gradient, key="discriminator/loss"):
    builder = RunBuilder().metric("generator/loss", noisy(0.7, 240, 0.05)).metric(key, judge)
    for index in range(4):
        builder.parameter(
            f"{index}.weight", steps=STEPS, element_count=400, gradient_norm=gradient,
            value_norm=5.0 + 1e-2 * np.arange(COUNT), update_to_parameter_ratio=1e-3,
        )  # fmt: skip
    return builder


WON = 0.7 * np.exp(-np.arange(240) / 5) + 1e-6
FADES = 1e-2 * np.exp(-np.arange(COUNT) / 3) + 1e-8


def test_a_player_that_is_never_wrong_leaves_the_other_no_gradient():
    (alert,) = find(play(WON, FADES), "vanishing_gradients")
    assert (alert.culprit, alert.severity) == ("0", "error")
    assert "discriminator/loss fell from 0.7 to" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        play(noisy(1.386, 240, 0.01), FADES),
        play(WON, 1e-2 * (1.0 + 0.2 * RNG.random(COUNT))),
        play(WON, FADES, key="loss"),
        play(-WON, FADES),
    ],
    ids=["balance", "it learns all the same", "no player", "a critic below zero"],
)
def test_games_and_trainings_that_nobody_has_won(builder):
    assert not find(builder, "vanishing_gradients")


# Which of several layers is the one to edit.


def collapse(*layers):
    builder = RunBuilder().metric("train/loss", np.append(falling(80, end=1.2), np.full(160, 1.2)))
    for name, kind, figures in layers:
        builder.layer(name, kind, steps=STEPS, **{"std": 1.0, "dead_unit_ratio": 0.0, **figures})
        if kind == "Linear":
            builder.parameter(
                f"{name}.weight", steps=STEPS, value_norm=5.0 + 0.1 * np.arange(COUNT)
            )
    return builder


def from_row(row, level, start=0.1):
    return np.where(np.arange(COUNT) < row, start, level)


def test_of_dead_layers_the_one_that_lets_nothing_pass_is_named():
    builder = collapse(
        ("fc0", "Linear", {}), ("act0", "ReLU", {"dead_unit_ratio": from_row(6, 0.9)}),
        ("fc1", "Linear", {}), ("act1", "ReLU", {"dead_unit_ratio": from_row(14, 1.0)}),
        ("head", "Linear", {}),
    )  # fmt: skip
    (alert,) = find(builder, "activation_collapse")
    assert alert.culprit == "fc1"
    assert {"act0", "act1"} <= set(alert.metadata["affected"])


def test_an_output_that_no_longer_follows_its_code_follows_from_the_code():
    builder = collapse(
        ("encoder", "Linear", {"sample_variation_ratio": 0.5}),
        ("mean", "Linear", {"std": from_row(20, 0.01, 1.0), "sample_variation_ratio": 0.6}),
        ("decoder", "Linear", {"sample_variation_ratio": from_row(4, 0.0005, 0.5)}),
        ("output", "Sigmoid", {"sample_variation_ratio": from_row(4, 0.0005, 0.5)}),
    )
    (alert,) = find(builder, "activation_collapse")
    assert alert.culprit == "mean"


def test_a_share_that_hovers_about_the_limit_for_a_moment_is_no_collapse():
    share = from_row(COUNT - 6, 0.07, 0.12)
    share[0] = 0.55
    builder = collapse(
        ("encoder", "Linear", {"sample_variation_ratio": 0.5}),
        ("decoder", "Linear", {"sample_variation_ratio": share}),
        ("output", "Sigmoid", {"sample_variation_ratio": 0.05}),
    )
    assert not find(builder, "activation_collapse")


@pytest.mark.parametrize(
    ("sign", "title"),
    [(-1.0, "Training and validation losses have opposite signs"), (1.0, "Overfitting sets in")],
)
def test_a_loss_of_the_wrong_sign_is_no_overfitting(sign, title):
    train = np.geomspace(1.0, 50.0, 240) * -1.0 if sign < 0 else falling(240)
    builder = RunBuilder().metric("train/loss", train)
    rising = np.concatenate([[2.0, 1.5, 1.2], np.geomspace(1.3, 60.0, 17)])
    builder.metric("val/loss", rising, steps=range(11, 240, 12))
    (alert,) = find(builder, "overfitting_onset")
    assert alert.title == title
