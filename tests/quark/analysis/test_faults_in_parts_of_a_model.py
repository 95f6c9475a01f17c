"""What is wrong with a part of a model, or of a launch, and what looks like it."""

import numpy as np
import pytest
from rule_alerts import find
from run_builder import RunBuilder, falling

STEPS = list(range(0, 240, 5))
COUNT = len(STEPS)


# Frozen weights that nothing was ever trained into.


def draw_uniform(rng, inputs, count):
    return rng.uniform(-1, 1, count) / inputs**0.5


def draw_normal(rng, inputs, count):
    return rng.standard_normal(count) * (2.0 / inputs) ** 0.5


def draw_small(rng, _inputs, count):
    return 0.02 * rng.standard_normal(count)


def train(rng, inputs, count):
    """What training leaves: heavier tails, and a mean that is not zero."""
    return draw_uniform(rng, inputs, count) + 0.03 * rng.standard_t(3, count) + 0.01


def lengthen(rng, inputs, count):
    return 1.4 * draw_normal(rng, inputs, count) * (1 + 0.3 * rng.standard_normal(count))


def freeze(draw, *, frozen=("a", "b", "c"), end=1.6, start=2.3, moves=0.0, seed=5):
    """A network of three layers and a head, of which some are frozen as they were drawn."""
    rng = np.random.default_rng(seed)
    builder = RunBuilder().metric("train/loss", falling(240, start=start, end=end, noise=0.01))
    sizes = {"a": (64, 40), "b": (40, 40), "c": (40, 40), "head": (40, 10)}
    for name, (inputs, outputs) in sizes.items():
        trains = name not in frozen
        values = (draw_uniform if trains else draw)(rng, inputs, inputs * outputs)
        builder.parameter(
            f"{name}.weight", steps=STEPS, element_count=values.size, requires_grad=trains,
            value_mean=values.mean(), value_std=values.std(), value_min=values.min(),
            value_max=values.max(), update_to_parameter_ratio=1e-3 if trains else 0.0,
            value_norm=np.sqrt((values**2).sum())
            + (1e-3 if trains else moves) * np.arange(COUNT),
        )  # fmt: skip
        builder.parameter(
            f"{name}.bias", steps=STEPS, role="bias", element_count=outputs, requires_grad=trains
        )
    return builder


@pytest.mark.parametrize("draw", [draw_uniform, draw_normal, draw_small])
@pytest.mark.parametrize("frozen", [("a", "b", "c"), ("a", "b")])
def test_frozen_weights_that_are_as_they_were_drawn(draw, frozen):
    (alert,) = find(freeze(draw, frozen=frozen), "mostly_frozen")
    assert (alert.severity, alert.culprit) == ("warning", "a")
    assert alert.title == "Frozen layers were never trained"


@pytest.mark.parametrize(
    "builder",
    [
        freeze(train),
        freeze(lengthen),
        # Features that were drawn, and that suffice.
        freeze(draw_uniform, end=0.4),
        freeze(draw_uniform, frozen=("a",)),
        # A copy that follows the network in training, without a gradient.
        freeze(draw_uniform, moves=1e-3),
        freeze(draw_uniform, frozen=()),
    ],
    ids=["trained", "of another size", "chance will do", "less than half", "follows", "none"],
)
def test_frozen_weights_that_may_be_so(builder):
    assert not find(builder, "mostly_frozen")


# Ranks that began alike and go their own ways.


def part(distances, *, names=("a", "b", "c"), shared=(), updates=0.1, alike=False):
    """Two ranks whose parameters are so far apart from probe to probe."""
    rng = np.random.default_rng(9)
    builder = RunBuilder().metric("train/loss", falling(240))
    for rank in range(2):
        for name in names:
            away = np.zeros(COUNT) if name in shared or not rank else np.asarray(distances)
            builder.parameter(
                f"{name}.weight", steps=STEPS, rank=rank, element_count=400,
                metadata=[
                    {"digest": f"{name}-{step}-{far}"}
                    for step, far in zip(STEPS, away, strict=True)
                ],
                value_norm=5.0 + away + 1e-3 * np.arange(COUNT), value_mean=0.01, value_std=0.25,
                value_min=-1.0, value_max=1.0,
                gradient_norm=0.1 * np.ones(COUNT) if alike else 0.1 * (1 + rng.random(COUNT)),
                update_norm=updates * np.ones(COUNT), update_to_parameter_ratio=1e-3,
                learning_rate=1e-2,
            )  # fmt: skip
    return builder


FARTHER = np.linspace(0.01, 2.0, COUNT)
NOW_AND_THEN = 0.1 * (1 + np.arange(COUNT) % 4)


def test_ranks_that_go_farther_and_farther_apart():
    (alert,) = find(part(FARTHER), "replicas_differ")
    assert (alert.severity, alert.culprit) == ("warning", "a")
    assert "farther and farther apart" in alert.fact
    assert "the wrapper" in alert.suggested_check


@pytest.mark.parametrize(
    "builder",
    [
        # Averaged after so many steps: never more than so many updates apart.
        part(NOW_AND_THEN),
        part(NOW_AND_THEN * np.linspace(0.1, 3.0, COUNT), updates=0.1 * np.linspace(0.1, 3, COUNT)),
        part(FARTHER, shared=("b",)),
        part(np.zeros(COUNT), alike=True),
        part(FARTHER * 0.02),
    ],
    ids=["averaged", "averaged with a warm-up", "experts", "the same", "within a few updates"],
)
def test_ranks_that_stay_near_each_other(builder):
    assert not find(builder, "replicas_differ")


# A loss too noisy to be flat, with a validation that is.


def stand(train, held_out):
    """A noisy training loss with a validation every twelve steps."""
    builder = RunBuilder().metric("train/loss", train)
    builder.metric("val/loss", held_out, steps=range(11, 240, 12))
    builder.layer("head", steps=STEPS, std=1.0)
    return builder.parameter("head.weight", steps=STEPS, element_count=200, gradient_norm=0.2)


def scatter(level, noise, *, seed=4, count=240):
    return level + noise * np.random.default_rng(seed).standard_normal(count)


FLAT = scatter(0.8, 0.01, count=20)


@pytest.mark.parametrize("held_out", [FLAT, FLAT + np.linspace(0.0, 0.05, 20)])
def test_neither_training_nor_validation_wins_anything(held_out):
    (alert,) = find(stand(scatter(0.8, 0.24), held_out), "plateau")
    assert alert.title == "Nothing is learned"


@pytest.mark.parametrize(
    "builder",
    [
        stand(scatter(0.8, 0.24), FLAT - np.linspace(0.0, 0.15, 20)),
        stand(scatter(0.8, 0.24) - np.linspace(0.0, 0.4, 240), FLAT),
        stand(scatter(0.8, 0.9), FLAT),
        # Learned before the first validation.
        stand(scatter(0.8, 0.1) + 1.6 * np.exp(-np.arange(240) / 4), FLAT),
        stand(scatter(0.8, 0.24), scatter(0.8, 0.24, count=20)),
    ],
    ids=["held out falls", "training falls", "too noisy", "at once", "noisy validation"],
)
def test_noise_in_which_something_is_won(builder):
    assert not find(builder, "plateau")


# A sigmoid before a loss that has one.


def squash(loss, mean, std=None, *, kind="Sigmoid", penalty=0.0):
    """Outputs that go through a sigmoid; their mean goes from about a half to nothing."""
    std = 0.1 * mean if std is None else std
    labels, mean = 0.1, np.asarray(mean)
    every = np.interp(np.arange(240), STEPS, mean)
    values = loss(every, labels) + penalty
    builder = RunBuilder().metric("train/loss", values)
    builder.layer("body", steps=STEPS, std=1.0)
    builder.layer("head", steps=STEPS, std=np.linspace(0.1, 3.0, COUNT), element_count=640)
    builder.layer("out", kind, steps=STEPS, mean=mean, std=std, minimum=0.8 * mean,
                  maximum=np.minimum(1.2 * mean, 0.99), element_count=640)  # fmt: skip
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=1)


def squash_again(share, labels):
    return np.log1p(np.exp(share)) - labels * share


def see_shares(share, labels):
    return -labels * np.log(share) - (1 - labels) * np.log(1 - share)


FALLING = 0.003 + 0.5 * np.exp(-np.arange(COUNT) / 6)


def test_a_sigmoid_whose_shares_are_squashed_again():
    (alert,) = find(squash(squash_again, FALLING), "squashed_outputs")
    assert (alert.severity, alert.culprit) == ("warning", "out")
    assert alert.title == "Outputs go through a sigmoid twice"


@pytest.mark.parametrize(
    "builder",
    [
        squash(see_shares, np.maximum(FALLING, 0.1)),
        squash(see_shares, FALLING),
        squash(see_shares, np.maximum(FALLING, 0.1), penalty=0.2),
        squash(lambda share, labels: (share - labels) ** 2, FALLING),
        squash(lambda share, labels: np.abs(share - labels), FALLING),
        squash(squash_again, FALLING, kind="Identity"),
        # Undecided to the end: any loss about there says as much.
        squash(squash_again, np.full(COUNT, 0.5)),
    ],
    ids=["shares", "too sure", "a penalty", "squares", "distances", "no sigmoid", "undecided"],
)
def test_sigmoids_that_the_loss_expects(builder):
    assert not find(builder, "squashed_outputs")


# A scale of the loss that never comes down.


def scale(overflows, *, skipped=True, weights=0):
    """A training in half precision whose gradients are infinite at these probes."""
    builder = RunBuilder().metric("train/loss", scatter(2.3, 0.01))
    overflows = np.asarray(overflows) * np.ones(COUNT)
    builder.layer("head", steps=STEPS, std=1.0)
    builder.layer("head", summary="gradient", steps=STEPS, std=1e-3, inf_count=overflows)
    return builder.parameter(
        "head.weight", steps=STEPS, gradient_norm=0.1, value_norm=5.0,
        non_finite_value_count=np.full(COUNT, weights), update_norm=0.0,
        metadata=[
            {"update_missing": "step_skipped", "skipped": bool(skipped and count)}
            for count in overflows
        ],
    )  # fmt: skip


def test_an_overflow_at_every_step_names_the_scale():
    (alert,) = find(scale(1), "non_finite_values")
    assert alert.title == "Gradients overflow and steps are skipped"
    assert "init_scale" in alert.suggested_check


@pytest.mark.parametrize("builder", [scale(1, skipped=False), scale(1, weights=3)])
def test_what_is_not_finite_by_itself_names_no_scale(builder):
    (alert,) = find(builder, "non_finite_values")
    assert alert.title == "Values are not finite"


def test_overflows_by_which_a_scale_is_found_are_none():
    assert not find(scale(np.arange(COUNT) < 6), "non_finite_values")
