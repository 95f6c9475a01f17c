"""What is physically dead is told whatever the loss does: units, codes, weights that stay put."""

import numpy as np
import pytest
from rule_alerts import faults
from run_builder import RunBuilder, falling

PROBES = list(range(0, 400, 5))
COUNT = len(PROBES)


def after(probe, value, before=0.0):
    made = np.full(COUNT, float(before))
    made[probe:] = value
    return made


def with_layers(changed, builder=None, kind="ReLU"):
    """Four layers, of which some figures of the third are changed."""
    builder = builder or RunBuilder().metric("train/loss", falling(400))
    for number in range(4):
        figures = {
            "std": 1.0, "mean": 0.1, "norm": 10.0, "dead_unit_ratio": 0.02,
            "sample_variation_ratio": 0.5,
        }  # fmt: skip
        if number == 2:
            figures |= changed
        builder.layer(f"layers.{number}", kind, steps=PROBES, **figures)
    return builder


def test_most_units_that_die_at_once_are_told_though_the_loss_falls_on():
    (alert,) = faults(with_layers({"dead_unit_ratio": after(30, 0.86)}), "activation_collapse")
    assert (alert.culprit, alert.step) == ("layers.2", 150)


@pytest.mark.parametrize(
    "dead",
    [np.linspace(0.05, 0.86, COUNT), np.full(COUNT, 0.86), after(30, 0.6)],
    ids=["thinned out by a penalty", "sparse from the start", "more than before"],
)
def test_a_layer_that_is_sparse_has_not_died(dead):
    assert faults(with_layers({"dead_unit_ratio": dead}), "activation_collapse") == []


def test_units_that_die_with_an_accuracy_that_is_good_are_not_missed_by_it():
    builder = RunBuilder().metric("train/loss", falling(400))
    builder.metric("train/accuracy", np.full(400, 0.97))
    assert (
        faults(with_layers({"dead_unit_ratio": after(30, 0.86)}, builder), "activation_collapse")
        == []
    )


def test_a_layer_with_two_ends_that_is_stuck_at_both_though_the_loss_falls():
    def build(upper, zeros):
        return with_layers({"saturation_ratio": upper, "zero_ratio": zeros}, kind="ReLU6")

    (alert,) = faults(build(0.46, 0.48), "activation_collapse")
    assert (alert.culprit, alert.title) == ("layers.2", "Units are saturated")
    assert faults(build(0.02, 0.9), "activation_collapse") == []
    assert faults(build(0.3, 0.4), "activation_collapse") == []


def test_all_units_that_die_by_the_last_three_probes_are_told():
    (alert,) = faults(with_layers({"dead_unit_ratio": after(77, 1.0)}), "activation_collapse")
    assert alert.step == 385
    assert faults(with_layers({"dead_unit_ratio": after(78, 1.0)}), "activation_collapse") == []


def test_a_representation_that_collapses_by_its_second_probe():
    """From the encoder on samples differ by a few percent, and the loss is flat."""
    loss = -1.0 + 1.1 * np.exp(-np.arange(400) / 3.0)
    noise = 0.02 * np.random.default_rng(0).random(COUNT)

    def build(later):
        builder = RunBuilder().metric("train/loss", loss)
        for number in range(4):
            share = 0.03 + noise if number in (1, later) or number > later else np.full(COUNT, 0.5)
            share[0] = 0.5
            builder.layer(
                f"layers.{number}", steps=PROBES, std=1.0, mean=0.1, norm=10.0,
                sample_variation_ratio=share,
            )  # fmt: skip
        return builder

    (alert,) = faults(build(2), "activation_collapse")
    assert alert.culprit == "layers.1"
    # One of two heads gives a constant, and what comes after it does not.
    assert faults(build(4), "activation_collapse") == []


def code(metric, kl, others=("train/recon_loss",)):
    builder = RunBuilder().metric("train/loss", falling(400)).metric(metric, kl)
    for key in others:
        builder.metric(key, falling(400))
    return builder


def test_a_code_that_is_empty_is_told_and_one_that_is_used_or_is_no_code_is_not():
    empty = 0.2 * np.exp(-np.arange(400) / 40.0)
    (alert,) = faults(code("train/kl", empty), "activation_collapse")
    assert (alert.culprit, alert.title) == ("train/kl", "The latent code is empty")
    assert (
        faults(code("train/kl", 4.0 - 3.9 * np.exp(-np.arange(400) / 40.0)), "activation_collapse")
        == []
    )
    assert faults(code("ppo/approx_kl", 0.01 * np.ones(400), ()), "activation_collapse") == []
    assert (
        faults(code("train/kl", 0.01 * np.ones(400), ("train/reward",)), "activation_collapse")
        == []
    )


def shrinking(**more):
    grown = np.concatenate([np.linspace(0.1, 1.0, 20), np.geomspace(1.0, 0.04, 20)])
    return with_layers({"std": np.concatenate([grown, np.full(COUNT - 40, 0.04)]), **more})


def test_outputs_that_had_grown_and_are_gone_again():
    (alert,) = faults(shrinking(), "activation_collapse")
    assert alert.title == "Outputs shrink to nothing"
    blown = np.concatenate([np.ones(10), np.full(8, 1e5), np.ones(COUNT - 18)])
    assert faults(with_layers({"std": blown}), "activation_collapse") == []


FIGURES = {
    "value_mean": 0.1, "value_std": 0.5, "value_min": -1.0, "value_max": 1.0,
    "gradient_norm": 0.1, "update_norm": 5e-3, "update_to_parameter_ratio": 1e-3,
}  # fmt: skip
MOVING = 5.0 + 0.01 * np.arange(COUNT)


def with_parameters(changed, name="layers.2.weight", role="weight", others=3, **settings):
    builder = RunBuilder().metric("train/loss", falling(400))
    for number in range(others):
        builder.parameter(f"others.{number}.weight", steps=PROBES, value_norm=MOVING, **FIGURES)
    figures = {**FIGURES, "value_norm": 5.0, **changed}
    return builder.parameter(name, steps=PROBES, role=role, **settings, **figures)


NOT_MOVING = {"update_norm": 0.0, "update_to_parameter_ratio": 0.0}

STANDSTILLS = {
    "weights of zero and a rate of zero": with_parameters(
        {"value_norm": 0.0, "value_mean": 0.0, "value_std": 0.0, "value_min": 0.0,
         "value_max": 0.0, "update_norm": 0.0, "update_to_parameter_ratio": np.nan}
    ),
    "a parameter that is neither weight nor bias": with_parameters(
        NOT_MOVING, name="embedding.position", role="other"
    ),
    "no updates are recorded": with_parameters(
        {"update_norm": np.nan, "update_to_parameter_ratio": np.nan}, in_optimizer=None
    ),
    "updates are undone": with_parameters({}),
    "still early on, then moving, then still again": with_parameters(
        {"update_to_parameter_ratio": np.where((np.arange(COUNT) < 20) | (np.arange(COUNT) > 45),
                                               0.0, 1e-3),
         "update_norm": np.where((np.arange(COUNT) < 20) | (np.arange(COUNT) > 45), 0.0, 5e-3),
         "value_norm": 5.0 + 0.01 * np.clip(np.arange(COUNT) - 20, 0, 26)}
    ),
    "still for the last eighth": with_parameters(
        {"update_to_parameter_ratio": after(70, 0.0, 1e-3), "update_norm": after(70, 0.0, 5e-3),
         "value_norm": np.minimum(MOVING, MOVING[70])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STANDSTILLS))
def test_a_parameter_with_gradients_that_stays_as_it_is(name):
    (alert,) = faults(STANDSTILLS[name], "stagnant_layers")
    assert alert.culprit in ("layers.2", "embedding")


@pytest.mark.parametrize(
    ("update", "fact"),
    [(1e-3, "though the optimizer updates it"), (1e-8, "lost in rounding"), (0.0, "not changed")],
)
def test_a_parameter_that_stays_says_whether_its_updates_can_change_it(update, fact):
    figures = {"update_norm": 5.0 * update, "update_to_parameter_ratio": update}
    (alert,) = faults(with_parameters(figures), "stagnant_layers")
    assert fact in alert.fact


def test_most_layers_with_a_rate_of_nothing_are_no_measure_for_each_other():
    builder = RunBuilder().metric("train/loss", falling(400))
    builder.parameter("head.weight", steps=PROBES, value_norm=MOVING, **FIGURES)
    slow = {**FIGURES, "update_norm": 5e-10, "update_to_parameter_ratio": 1e-10}
    for number in range(4):
        builder.parameter(f"body.{number}.weight", steps=PROBES, value_norm=5.0, **slow)
    (alert,) = faults(builder, "stagnant_layers")
    assert {alert.culprit, *alert.metadata["affected"]} == {f"body.{n}" for n in range(4)}


SOUND = {
    "frozen": with_parameters(NOT_MOVING, requires_grad=False),
    "no gradient of its own": with_parameters({**NOT_MOVING, "gradient_norm": 0.0}, role="other"),
    "a bias": with_parameters(NOT_MOVING, name="layers.2.bias", role="bias"),
    "it moves and its norm does not": with_parameters(
        {"value_mean": 0.1 + 1e-4 * np.arange(COUNT)}
    ),
    "its gradient has vanished": with_parameters({**NOT_MOVING, "gradient_norm": 1e-8}),
    "only its norm is recorded": with_parameters(
        {"value_mean": np.nan, "value_std": np.nan, "value_min": np.nan, "value_max": np.nan}
    ),
}


@pytest.mark.parametrize("name", list(SOUND))
def test_other_parameters_do_not_stand_still(name):
    assert faults(SOUND[name], "stagnant_layers") == []


def test_a_run_that_has_ended_to_move_as_a_whole_is_not_a_layer_that_stands_still():
    builder = RunBuilder().metric("train/loss", falling(400))
    still = {**FIGURES, **NOT_MOVING}
    for number in range(4):
        builder.parameter(f"layers.{number}.weight", steps=PROBES, value_norm=5.0, **still)
    assert faults(builder, "stagnant_layers") == []


def test_a_layer_that_was_set_to_zero_and_stays_there_belongs_to_the_standstills():
    builder = with_parameters({**NOT_MOVING, "gradient_norm": 0.0})
    for name in ("others.0", "layers.2"):
        is_zero = name == "layers.2"
        builder.layer(
            name, "Linear", steps=PROBES, std=0.0 if is_zero else 1.0, mean=0.0, norm=1.0,
            dead_unit_ratio=1.0 if is_zero else 0.0,
        )  # fmt: skip
    assert faults(builder, "activation_collapse") == []
    (alert,) = faults(builder, "stagnant_layers")
    assert "gets no gradient" in alert.fact


def without_gradients(loss, scale=0.0):
    builder = RunBuilder().metric("train/loss", loss)
    for number in range(4):
        builder.parameter(
            f"layers.{number}.weight", steps=PROBES, value_norm=MOVING,
            **{**FIGURES, "gradient_norm": scale},
        )  # fmt: skip
    return builder


def test_gradients_of_exactly_nothing_are_told_though_the_loss_falls():
    (alert,) = faults(without_gradients(falling(400)), "vanishing_gradients")
    assert alert.fact.startswith("No layer gets any gradient")
    assert faults(without_gradients(falling(400), 1e-3), "vanishing_gradients") == []
    hinge = np.maximum(falling(400, end=-0.2, noise=0.0), 0.0)
    zero_at = int(np.argmax(hinge == 0.0))
    some = np.where(np.array(PROBES) < zero_at, 0.1, 0.0)
    assert faults(without_gradients(hinge, some), "vanishing_gradients") == []
