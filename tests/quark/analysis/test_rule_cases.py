"""Cases that exams of real trainings have taught the rules."""

import numpy as np
import pytest
from rule_alerts import find
from run_builder import RunBuilder, falling

from quark.analysis.engine import analyze_run

PROBES = list(range(0, 200, 5))
COUNT = len(PROBES)
FLAT = 2.3 + 0.02 * np.random.default_rng(0).standard_normal(200)


def _ids(builder):
    alerts = analyze_run(builder.build()).alerts
    return [alert.rule_id for alert in alerts if "documented_level" not in alert.metadata]


def _weights(builder, number, changed=None):
    for index in range(number):
        settings = {
            "value_norm": 5.0, "value_mean": 0.1, "gradient_norm": 0.1, "update_norm": 5e-3,
            "update_to_parameter_ratio": 1e-3,
        }  # fmt: skip
        if index == 1:
            settings |= changed or {}
        builder.parameter(f"layers.{index}.weight", steps=PROBES, **settings)
    return builder


def pull_together(shares, key):
    builder = RunBuilder().metric(key, -1.0 + 0.9 * np.exp(-np.arange(240) / 20.0))
    for index in range(3):
        builder.layer(
            f"encoder.{index}", steps=PROBES, std=1.0, mean=0.1, norm=10.0,
            sample_variation_ratio=shares if index == 2 else 0.5,
        )  # fmt: skip
    return builder


def test_a_loss_that_alike_outputs_satisfy_is_no_excuse_for_them():
    gone = np.concatenate([np.linspace(0.5, 0.1, 8), np.full(COUNT - 8, 0.04)])
    (alert,) = find(pull_together(gone, "train/similarity_loss"), "activation_collapse")
    assert (alert.culprit, alert.title) == ("encoder.2", "The representation collapses")
    assert not find(pull_together(gone, "train/loss"), "activation_collapse")
    assert not find(pull_together(np.full(COUNT, 0.4), "cosine_loss"), "activation_collapse")


def test_samples_that_are_no_longer_told_apart():
    shares = np.full(COUNT, 0.5)
    shares[15:] = 1e-5
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(3):
        builder.layer(
            f"encoder.{index}", steps=PROBES, std=1.0, mean=0.1, norm=10.0,
            sample_variation_ratio=shares if index == 1 else 0.5,
        )  # fmt: skip
    (alert,) = find(builder, "activation_collapse")
    assert (alert.culprit, alert.step) == ("encoder.1", 75)
    assert alert.title == "The representation collapses"


def test_a_network_that_amplifies_every_signal_from_the_start():
    builder = RunBuilder().metric("train/loss", 50 * falling())
    for index in range(7):
        growth = 3.0**index
        builder.layer(f"layers.{index}", steps=PROBES, std=growth, mean=0.0, norm=10 * growth)
        builder.layer(
            f"layers.{index}", summary="gradient", steps=PROBES, norm=0.1 * 3.0 ** (6 - index)
        )
    (alert,) = find(builder, "exploding_gradients")
    assert (alert.title, alert.step) == ("Gradients explode with the depth", 0)


def test_weights_that_change_the_loss_too_much_from_the_start():
    builder = RunBuilder().metric("train/loss", 1e3 * falling())
    builder.parameter(
        "cell.weight_hh_l0", kind="RNN", steps=PROBES, value_norm=5.0, gradient_norm=1e6,
        update_to_parameter_ratio=1e-4, update_norm=5e-4,
    )  # fmt: skip
    (alert,) = find(builder, "exploding_gradients")
    assert (alert.culprit, alert.step) == ("cell", 0)


def test_gradients_below_the_resolution_of_half_precision():
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(4):
        builder.parameter(
            f"layers.{index}.weight", steps=PROBES, value_norm=5.0,
            gradient_norm=0.0 if index < 3 else 1e-3, update_norm=5e-3,
            update_to_parameter_ratio=1e-3,
        )  # fmt: skip
    (alert,) = find(builder, "vanishing_gradients")
    assert alert.step == 0


def test_a_branch_that_is_cut_off_in_the_middle():
    gradients = np.full(COUNT, 0.1)
    gradients[16:] = np.nan
    moved = np.where(np.arange(COUNT) < 16, 5.0 + 0.01 * np.arange(COUNT), 5.16)
    builder = RunBuilder().metric("train/loss", falling())
    _weights(builder, 4, {"gradient_norm": gradients, "value_norm": moved, "update_norm": 0.0})
    (alert,) = find(builder, "stagnant_layers")
    assert (alert.culprit, alert.step) == ("layers.1", 80)


def test_weights_that_move_at_other_steps_than_those_looked_at_are_not_stagnant():
    builder = RunBuilder().metric("train/loss", falling())
    moved = 5.0 + 0.02 * np.arange(COUNT)
    changed = {"update_norm": 0.0, "update_to_parameter_ratio": 0.0, "value_norm": moved}
    assert _ids(_weights(builder, 4, changed)) == []


def test_an_expert_that_is_not_called_is_not_stagnant():
    builder = RunBuilder().metric("train/loss", falling())
    _weights(builder, 4, {"gradient_norm": np.full(COUNT, np.nan), "update_norm": 0.0})
    for index in (0, 2, 3):
        builder.layer(f"layers.{index}", steps=PROBES, std=1.0, mean=0.0, norm=10.0)
    builder.layer("layers.1", steps=PROBES[:2], std=1.0, mean=0.0, norm=10.0)
    assert _ids(builder) == []


def test_a_layer_that_was_set_to_zero_has_not_collapsed():
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(3):
        builder.layer(
            f"layers.{index}", "Linear", steps=PROBES, std=0.0 if index == 1 else 1.0, mean=0.0,
            norm=0.0, dead_unit_ratio=1.0 if index == 1 else 0.0,
        )  # fmt: skip
    assert _ids(builder) == []


def test_the_loss_of_a_player_neither_diverges_nor_stands_still():
    rising = -2.0 + np.linspace(0, 2.2, 200)
    assert _ids(RunBuilder().metric("train/critic_loss", rising)) == []
    builder = RunBuilder().metric("train/loss", FLAT).metric("train/judge_loss", FLAT)
    assert _ids(builder) == []


def test_step_times_that_vary_with_the_batch_from_the_start_only_inform():
    rng = np.random.default_rng(0)
    builder = RunBuilder().metric("train/loss", falling(300))
    builder.metric("system/runtime/step_time_ms", rng.choice([20.0, 40.0, 60.0], 300))
    alerts = analyze_run(builder.build()).alerts
    assert [(alert.rule_id, alert.severity) for alert in alerts] == [
        ("runtime_bottleneck_risk", "info")
    ]


def test_a_noisy_loss_that_may_be_falling_is_no_plateau():
    noisy = 2.0 + 0.6 * np.random.default_rng(0).standard_normal(100)
    assert _ids(RunBuilder().metric("train/loss", np.abs(noisy))) == []


def test_a_loss_that_fell_far_and_rises_tenfold_diverges():
    loss = 200 * 0.9 ** np.arange(200) + 2 + 0.1 * np.random.default_rng(0).standard_normal(200)
    loss[150:] = 30 + np.random.default_rng(1).standard_normal(50)
    (alert,) = find(RunBuilder().metric("train/loss", loss), "divergence")
    assert 148 <= alert.step <= 152


@pytest.mark.parametrize(("first", "fires"), [(0.35, False), (1.5, True)])
def test_first_updates_that_overwrite_the_weights(first, fires):
    ratios = np.full(COUNT, 1e-3)
    ratios[0] = first
    builder = RunBuilder().metric("train/loss", falling())
    _weights(builder, 4, {"update_to_parameter_ratio": ratios, "update_norm": 5.0 * ratios})
    assert ("update_ratio" in _ids(builder)) is fires


def test_memory_that_grows_warns():
    grown = 1e9 + 5e6 * np.arange(200)
    builder = RunBuilder().metric("train/loss", falling())
    builder.metric("system/process/rss_bytes", grown)
    assert _ids(builder) == ["memory_growth"]
    steady = RunBuilder().metric("train/loss", falling())
    steady.metric("system/process/rss_bytes", np.full(200, 1e9))
    assert _ids(steady) == []


def test_a_loss_that_swings_and_an_initialisation_out_of_scale_inform():
    swinging = 1.0 + 0.3 * (-1.0) ** np.arange(200)
    swinging[:20] += np.linspace(2, 0, 20)
    (alert,) = find(RunBuilder().metric("train/loss", swinging), "oscillation")
    assert alert.severity == "info"
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(7):
        builder.layer(f"layers.{index}", steps=PROBES, std=0.2**index, mean=0.0, norm=1.0)
    (alert,) = find(builder, "poor_initialisation")
    assert (alert.severity, alert.culprit) == ("info", "layers.5")
