"""Faults that show where they are made before they show in a loss, and what looks like them."""

import numpy as np
import pytest
from rule_alerts import find
from run_builder import RunBuilder, falling

from quark_core.records import BatchDiagnosticRecord
from quark_core.records.json_object import JsonObject

STEPS = list(range(0, 240, 5))
COUNT = len(STEPS)
RNG = np.random.default_rng(8)


# What a softmax hands on of a gradient.

CLASSES, ROWS = 12, 32


def hand_on(ratio, *, end=2.1, start=2.485, std=(0.1, 1.5)):
    """A classifier whose outputs get `ratio` of the gradient that guesses have."""
    builder = RunBuilder().metric("train/loss", falling(240, start=start, end=end, noise=0.01))
    builder.layer("body", steps=STEPS, std=1.0)
    outputs = CLASSES * ROWS
    builder.layer("head", steps=STEPS, std=np.linspace(*std, COUNT), element_count=outputs)
    norm = np.asarray(ratio) * np.sqrt((1 - 1 / CLASSES) / ROWS) * np.ones(COUNT)
    builder.layer("head", summary="gradient", steps=STEPS, norm=norm, std=1e-3,
                  element_count=outputs)  # fmt: skip
    builder.parameter("head.weight", steps=STEPS, element_count=CLASSES * 20)
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=CLASSES)


GROWING = np.linspace(1.0, 1.7, COUNT) / CLASSES


def test_a_softmax_before_the_loss_is_seen_before_outputs_are_large():
    (alert,) = find(hand_on(GROWING), "squashed_outputs")
    assert (alert.culprit, alert.severity) == ("head", "warning")
    assert alert.title == "Outputs go through a softmax twice"
    assert "a norm of" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        hand_on(np.linspace(1.0, 0.8, COUNT)),
        # The loss is divided by as many micro-batches as there are classes.
        hand_on(np.linspace(1.0, 0.8, COUNT) / CLASSES),
        hand_on(np.ones(COUNT) / CLASSES),
        # Weighted a little, and growing for a while: another share than that of the classes.
        hand_on(GROWING / 2),
        hand_on(GROWING * 1.4),
        hand_on(GROWING, end=0.6),
        hand_on(GROWING, start=4.0, end=2.2),
        hand_on(GROWING, start=2.485, end=2.485),
        hand_on(GROWING, std=(1.6, 3.0)),
    ],
    ids=[
        "slow", "divided", "divided and no better", "a small weight", "a larger weight",
        "below the floor", "another loss", "no fall", "decided from the start",
    ],
)  # fmt: skip
def test_gradients_that_only_resemble_those_of_shares(builder):
    assert not find(builder, "squashed_outputs")


# Batches of one class each.


def label(classes, *, size=32):
    """A wrecked training whose batches have these counts, or are all of these classes."""
    builder = RunBuilder().metric("train/loss", 2.3 + 0.5 * RNG.random(len(classes)))
    rows = builder.records.setdefault("batch", [])
    for step, one in enumerate(classes):
        counts = one if isinstance(one, dict) else {str(one): size}
        rows.append(
            BatchDiagnosticRecord(
                *builder._head("batch"), 2.3, step, class_counts=JsonObject(counts)
            )
        )
    return builder


def pass_by(count, length, rounds, *, mixed=False):
    """Class after class, each for some batches, round after round."""
    once = []
    for one in range(count):
        once += [one] * length
        if mixed:
            once.append({str(one): 20, str((one + 1) % count): 12})
    return once * rounds


@pytest.mark.parametrize(
    "classes",
    [pass_by(5, 6, 4), pass_by(10, 3, 4, mixed=True), pass_by(2, 20, 3)],
    ids=["five", "ten with batches between", "two"],
)
def test_classes_that_come_one_after_the_other_in_every_pass(classes):
    (alert,) = find(label(classes), "unshuffled_data")
    assert (alert.culprit, alert.severity) == ("batch labels", "warning")
    assert "shuffle" in alert.suggested_check


@pytest.mark.parametrize(
    "classes",
    [
        list(RNG.integers(0, 5, 120)),
        pass_by(5, 30, 1),
        [{"0": 31, "1": 1}] * 120,
        [{str(one): 4 for one in range(8)}] * 120,
        # Sorted by length, by which classes are likely together.
        [{str(step // 10 % 3): 18, "9": 14} for step in range(120)],
        pass_by(5, 3, 3),
    ],
    ids=["drawn by class", "one task after the other", "rare", "mixed", "half and half", "few"],
)
def test_batches_that_are_not_sorted(classes):
    assert not find(label(classes), "unshuffled_data")


def buffer(room, *, classes=8, of_each=100, size=32, rounds=4):
    """Samples that lie class by class, read through a shuffle buffer of so many, in every round."""
    rng, given = np.random.default_rng(3), []
    for _ in range(rounds):
        waiting, read = [], []
        for one in np.repeat(np.arange(classes), of_each).tolist():
            waiting.append(one)
            if len(waiting) > room:
                read.append(waiting.pop(int(rng.integers(len(waiting)))))
        given += read + rng.permutation(waiting).tolist()
    parts = np.array(given).reshape(-1, size)
    return [{str(name): int(count) for name, count in zip(*np.unique(part, return_counts=True),
             strict=True)} for part in parts]  # fmt: skip


@pytest.mark.parametrize("room", [40, 120])
def test_a_shuffle_buffer_that_holds_one_class(room):
    (alert,) = find(label(buffer(room)), "unshuffled_data")
    assert alert.title == "Samples are nearly sorted by class"
    assert "buffer" in alert.suggested_check


@pytest.mark.parametrize(
    "classes",
    [
        buffer(100_000),
        buffer(40, rounds=1, of_each=300),
        # Four classes a batch, drawn anew for each, as contrastive losses have them.
        [{str(one): 8 for one in RNG.choice(8, 4, replace=False)} for _ in range(120)],
        # Exactly even, but for a class that comes and goes.
        [{str(one): 4 for one in range(8) if one != step // 15 % 8} for step in range(120)],
    ],
    ids=["all", "once", "few classes of each", "one is left out"],
)
def test_batches_that_are_shuffled_well_enough(classes):
    assert not find(label(classes), "unshuffled_data")


# Ranks that have nothing of each other.


def launch(*, apart, names=("a", "b", "c"), others=None, loss=None, shared=()):
    """Two ranks whose parameters differ by `apart` from the first probe on."""
    builder = RunBuilder().metric("train/loss", falling(240) if loss is None else loss)
    for rank in range(2):
        for name in others if rank and others else names:
            away = 0.0 if name in shared or not rank else apart
            builder.parameter(
                f"{name}.weight", steps=STEPS, rank=rank, element_count=400,
                metadata=[{"digest": f"{name}-{step}-{away}"} for step in STEPS],
                value_norm=5.0 * (1 + away) + 1e-3 * np.arange(COUNT), value_mean=0.01 - away / 9,
                value_std=0.25, value_min=-1.0 - away, value_max=1.0 + away,
                gradient_norm=0.1 * (1 + RNG.random(COUNT)), update_norm=5e-3,
                update_to_parameter_ratio=1e-3, learning_rate=1e-2,
            )  # fmt: skip
    return builder


def test_ranks_that_began_apart_and_share_nothing():
    (alert,) = find(launch(apart=0.02), "replicas_differ")
    assert (alert.severity, alert.step, alert.culprit) == ("warning", 0, "a")
    assert alert.title == "Each rank trains a separate model"
    assert "rank 1" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        # Averaged now and then, and never at a probe: one step apart at the first one.
        launch(apart=1e-3),
        launch(apart=0.02, shared=("b",)),
        launch(apart=0.02, others=("d", "e", "f")),
        launch(apart=0.02, loss=2.3 + 0.05 * RNG.random(240)),
        launch(apart=0.0),
    ],
    ids=["a common start", "experts", "stages of a pipeline", "no fall", "the same"],
)
def test_ranks_that_have_something_in_common(builder):
    assert not find(builder, "replicas_differ")


# Labels of other samples, from a start that is worse than guesses.


def guess(train, held_out, *, frozen=0):
    builder = RunBuilder().metric("train/loss", train)
    builder.metric("val/loss", held_out, steps=range(11, 240, 12))
    for place, name in enumerate(("fc", "neck", "head")):
        builder.layer(name, steps=STEPS, std=1.0, dead_unit_ratio=0.0)
        builder.parameter(
            f"{name}.weight", steps=STEPS, element_count=200, gradient_norm=0.2,
            requires_grad=place >= frozen, value_norm=5.0 + 1e-3 * np.arange(COUNT),
            update_to_parameter_ratio=5e-3,
        )  # fmt: skip
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=10)


PLACES = np.arange(240)
BY_HEART = np.linspace(2.33, 2.2, 240) + 0.5 * np.exp(-PLACES / 12) + 0.01 * RNG.random(240)
COMES_DOWN = 2.31 + 0.3 * np.exp(-np.arange(20) / 1.5)


def test_a_validation_that_comes_down_to_guesses_and_stays_there():
    (alert,) = find(guess(BY_HEART, COMES_DOWN), "mislabelled_data")
    assert (alert.culprit, alert.severity) == ("val/loss", "error")


@pytest.mark.parametrize(
    "builder",
    [
        guess(BY_HEART, COMES_DOWN - np.linspace(0.0, 0.12, 20)),
        guess(BY_HEART, np.interp(np.arange(11, 240, 12), PLACES, BY_HEART)),
        # Learned by a head of the first features there were: it may be they that say nothing.
        guess(BY_HEART, COMES_DOWN, frozen=2),
    ],
    ids=["goes on", "as the training", "mostly frozen"],
)
def test_validations_that_say_something_else(builder):
    assert not [alert for alert in find(builder, "mislabelled_data") if alert.culprit == "val/loss"]


# Weights that begin as one number, and outputs that end in a rectifier.


def begin(deviation, *, mean=0.02, role="weight", kind="Linear", trains=True, end=1.7, step=0):
    """A network whose middle layer begins with weights of this mean and deviation."""
    builder = RunBuilder().metric("train/loss", falling(240, start=2.3, end=end, noise=0.01))
    steps = list(range(step, 240 + step, 5))
    for name in ("first", "middle", "head"):
        builder.layer(name, steps=steps, std=1.0)
        own = name == "middle"
        builder.parameter(
            f"{name}.weight", steps=steps, kind=kind if own else "Linear", element_count=200,
            role=role if own else "weight", requires_grad=trains or not own,
            value_mean=mean if own else 1e-3, value_std=deviation if own else 0.1,
            value_norm=5.0 + 1e-3 * np.arange(COUNT), update_to_parameter_ratio=1e-3,
        )  # fmt: skip
    return builder


def test_weights_that_begin_as_one_number_are_told():
    (alert,) = find(begin(0.0), "poor_initialisation")
    assert (alert.severity, alert.culprit, alert.step) == ("warning", "middle", 0)
    assert alert.title == "All weights of a layer start equal"
    assert "a mean of 0.02 and a deviation of 0" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        begin(0.01),
        # Adapters and branches begin at zero on purpose.
        begin(0.0, mean=0.0),
        begin(0.0, kind="LayerNorm"),
        begin(0.0, role="bias"),
        begin(0.0, trains=False),
        begin(0.0, step=400),
    ],
    ids=["drawn about a mean", "zero", "a norm", "biases", "a fixed filter", "seen too late"],
)
def test_weights_that_may_begin_so(builder):
    assert not find(builder, "poor_initialisation")


def test_equal_weights_are_no_softmax():
    builder = hand_on(GROWING)
    assert find(builder, "squashed_outputs")
    builder.parameter("body.weight", steps=STEPS, element_count=200, value_mean=0.02, value_std=0.0)
    assert not find(builder, "squashed_outputs")


def cut(zeros, *, kind="ReLU", start=2.303, elements=320, accuracy=None):
    """A classifier of ten classes whose outputs go through another layer before the loss."""
    builder = RunBuilder().metric("train/loss", falling(240, start=start, end=0.7, noise=0.01))
    if accuracy is not None:
        rising = np.minimum(np.linspace(0.1, 1.5, 20), accuracy)
        builder.metric("val/accuracy", rising, steps=range(11, 240, 12))
    builder.layer("body", steps=STEPS, std=1.0)
    builder.layer("head", steps=STEPS, std=1.0, element_count=320)
    builder.layer("out", kind, steps=STEPS, std=1.0, zero_ratio=zeros, element_count=elements)
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=10)


def test_outputs_that_go_through_a_rectifier_are_told():
    (alert,) = find(cut(0.75), "squashed_outputs")
    assert (alert.severity, alert.culprit) == ("warning", "out")
    assert alert.title == "Outputs are cut off before the loss"
    assert "75 %" in alert.fact


@pytest.mark.parametrize(
    "builder",
    [
        cut(0.1),
        cut(0.0, kind="Identity"),
        cut(0.75, start=30.0),
        cut(0.75, elements=640),
        cut(0.75, accuracy=0.99),
    ],
    ids=["hardly", "another layer", "a regression", "not of the outputs", "it knows"],
)
def test_rectifiers_that_do_no_harm(builder):
    assert not find(builder, "squashed_outputs")


# More than one bad batch.


@pytest.mark.parametrize(
    ("high", "severity"), [((4.9,), "info"), ((4.9, 4.8), "warning"), ((4.9, 2.9), "info")]
)
def test_two_batches_in_a_row_that_are_far_out_are_no_chance(high, severity):
    loss = 2.3 + 0.1 * np.random.default_rng(3).standard_normal(240)
    loss[:60] += np.linspace(0.7, 0.0, 60)
    loss[150 : 150 + len(high)] = high
    (alert,) = find(RunBuilder().metric("train/loss", loss), "loss_spike")
    assert alert.severity == severity


@pytest.mark.parametrize(
    ("high", "severity"),
    [((3.9, 4.0), "warning"), ((3.4, 3.45), "info"), ((3.9, 3.45), "info")],
)
def test_single_batches_repeat_where_both_are_clearly_far_out(high, severity):
    loss = 2.3 + 0.1 * np.random.default_rng(3).standard_normal(240)
    loss[:60] += np.linspace(0.7, 0.0, 60)
    loss[[120, 180]] = high
    (alert,) = find(RunBuilder().metric("train/loss", loss), "loss_spike")
    assert (alert.severity, alert.title) == (severity, "The loss spikes repeatedly")
