"""The start is a suspect and not the baseline, and of several surges the worst one is told."""

import numpy as np
import pytest
from run_builder import RunBuilder, falling

from quark.analysis.analysis_context import measure_progress
from quark.analysis.curves import Curve
from quark.analysis.engine import analyze_run

PROBES = list(range(0, 200, 5))
COUNT = len(PROBES)
RNG = np.random.default_rng(0)


def find(builder, rule_id):
    alerts = analyze_run(builder.build()).alerts
    found = [alert for alert in alerts if alert.rule_id == rule_id]
    return [alert for alert in found if "documented_level" not in alert.metadata]


def alarm(builder):
    alerts = analyze_run(builder.build()).alerts
    return {alert.rule_id for alert in alerts if alert.severity != "info"}


def with_gradients(loss, scale, layers=3):
    builder = RunBuilder().metric("train/loss", loss)
    for number in range(layers):
        builder.layer(f"layers.{number}", steps=PROBES, mean=0.0, std=1.0, norm=10.0)
        builder.layer(
            f"layers.{number}", summary="gradient", steps=PROBES, norm=0.1 * np.asarray(scale)
        )
    return builder


def blow_up(level, count=200, first=4.0, noise=0.1, at=5):
    """From `first` to 1e9 times `level` by a step, then at the level for good."""
    rise = np.geomspace(first, 1e9 * level, at)
    stay = level * np.exp(noise * np.random.default_rng(1).standard_normal(count - at))
    return np.concatenate([rise, stay])


START_EXPLOSIONS = {
    "stays at 1e13": blow_up(1e13),
    "comes down to three times its start": np.concatenate(
        [[2.3, 900.0, 4e4, 8e3, 2e3], 7 + 100 * np.exp(-np.arange(195) / 9.0)]
    ),
    "comes back to guesses": np.concatenate(
        [[2.3, 80.0, 700.0, 300.0, 90.0], 2.3 + 40 * np.exp(-np.arange(195) / 4.0)]
    ),
    "a noise as large as what it reaches": np.concatenate(
        [[0.7, 50.0, 4e5], np.exp(np.random.default_rng(2).normal(2.5, 1.0, 197))]
    ),
    "few points": blow_up(1e13, count=12, at=4),
}


@pytest.mark.parametrize("name", list(START_EXPLOSIONS))
def test_a_loss_that_explodes_in_its_first_steps_is_held_against_its_first_value(name):
    (alert,) = find(RunBuilder().metric("train/loss", START_EXPLOSIONS[name]), "divergence")
    assert alert.step <= 10
    assert alert.severity in ("error", "critical")


STARTS_THAT_ARE_SOUND = {
    "falls": falling(),
    "a high first batch": np.concatenate([[9.0], falling(199)]),
    "a low first batch": np.concatenate([[1.2], falling(199)]),
    "thrown off and better for it": np.concatenate(
        [[1.0, 3.0, 6.0, 4.0, 2.0], falling(195, 1.0, 0.05)]
    ),
    "learned in five steps": np.concatenate(
        [[8.0, 4.0, 1.5, 0.6], 0.5 + 0.02 * RNG.standard_normal(396)]
    ),
    "batches of one sample": np.exp(RNG.normal(0.0, 1.0, 600)) * falling(600, 1.0, 0.1, 0.0),
    "large targets": 1e6 * (falling() + 0.3 * RNG.standard_normal(200).clip(-2, 2) * falling()),
}


@pytest.mark.parametrize("name", list(STARTS_THAT_ARE_SOUND))
def test_other_starts_are_no_explosion(name):
    assert alarm(RunBuilder().metric("train/loss", STARTS_THAT_ARE_SOUND[name])) == set()


def test_the_loss_of_an_actor_rises_with_its_rewards():
    noise = np.random.default_rng(3).standard_normal(220)
    loss = 1.6 + 4.0 * np.exp(-np.arange(220) / 30.0) + 0.2 * noise
    loss[:4] = [-0.2, 0.6, 1.9, 2.4]
    reward = 9.0 - 10.0 * np.exp(-np.arange(220) / 12.0) + 0.3 * noise
    builder = RunBuilder().metric("train/loss", loss).metric("train/reward", reward)
    assert find(builder, "exploding_gradients") == []
    assert "The loss explodes" not in [alert.title for alert in find(builder, "divergence")]


def test_a_negative_loss_that_explodes_at_once():
    loss = 1e6 * np.exp(0.1 * np.random.default_rng(4).standard_normal(200))
    loss[:4] = [-3.0, -1.0, 40.0, 3e4]
    loss[150:] = -10.0
    (alert,) = find(RunBuilder().metric("train/loss", loss), "divergence")
    assert alert.step <= 5


def test_gradients_that_explode_by_their_second_probe_are_no_baseline():
    scale = np.full(COUNT, 3e5)
    scale[0] = 1.0
    (alert,) = find(with_gradients(blow_up(1e6), scale), "exploding_gradients")
    assert (alert.step, alert.evidence[0].source) == (5, alert.culprit)
    assert alert.culprit.startswith("layers.")


def test_gradients_that_grow_once_the_head_has_left_zero_did_not_explode():
    scale = np.full(COUNT, 30.0)
    scale[0] = 0.01
    assert find(with_gradients(falling(), scale), "exploding_gradients") == []


def test_a_single_probe_counts_where_the_loss_blows_up_with_it():
    scale = np.ones(COUNT)
    scale[10] = 1e4
    scale[11:] = 0.0  # the units are dead after it
    loss = falling()
    loss[49:] = 60.0 + RNG.standard_normal(151)
    (alert,) = find(with_gradients(loss, scale), "exploding_gradients")
    assert alert.step == 50
    recovering = falling()
    recovering[50] = 60.0
    assert find(with_gradients(recovering, scale), "exploding_gradients") == []


def test_the_worst_surge_is_told_and_the_others_are_evidence():
    scale = np.ones(COUNT)
    scale[6:9] = 15.0
    scale[28:] = 4e4
    loss = falling()
    loss[30:42] += 1.5
    loss[140:] = 500.0 + 5.0 * RNG.standard_normal(60)
    (alert,) = find(with_gradients(loss, scale), "exploding_gradients")
    assert (alert.step, alert.severity) == (140, "critical")
    assert alert.evidence[0].observed_value == pytest.approx(4e4)
    assert any(piece.step_start == 30 for piece in alert.evidence)


def test_what_never_came_back_from_its_first_surge_began_there():
    scale = np.ones(COUNT)
    scale[10:13] = 200.0
    scale[28:] = 1e4
    loss = falling()
    loss[50:] = 20.0 + 0.1 * RNG.standard_normal(150)
    loss[140:] += 10.0
    (alert,) = find(with_gradients(loss, scale), "exploding_gradients")
    assert alert.step == 50


def test_a_gradient_that_is_not_finite_has_no_figure():
    scale = np.ones(COUNT)
    loss = falling()
    loss[100:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    bad = np.zeros(COUNT)
    bad[20:] = 7
    builder.layer("head", steps=PROBES, mean=0.0, std=1.0, norm=10.0)
    builder.layer("head", summary="gradient", steps=PROBES, norm=0.1 * scale, nan_count=bad)
    (alert,) = find(builder, "exploding_gradients")
    assert "ceased to be finite" in alert.fact
    assert alert.evidence[0].observed_value is None


def test_gradients_that_are_infinite_at_the_first_probe():
    loss = np.concatenate([[1e30], np.full(49, np.nan)])
    builder = RunBuilder().metric("train/loss", loss)
    count = np.full(10, 500)
    builder.parameter(
        "cell.weight_hh_l0", kind="RNN", steps=range(0, 50, 5), value_norm=9.0,
        gradient_norm=np.nan, non_finite_gradient_count=count,
    )  # fmt: skip
    (alert,) = find(builder, "exploding_gradients")
    assert (alert.culprit, alert.step) == ("cell", 0)
    overflows = RunBuilder().metric("train/loss", falling(50))
    overflows.parameter(
        "cell.weight_hh_l0", kind="RNN", steps=range(0, 50, 5), value_norm=9.0, gradient_norm=0.1,
        non_finite_gradient_count=np.array([500, 500] + [0] * 8),
    )  # fmt: skip
    assert find(overflows, "exploding_gradients") == []


def progress_of(values):
    steps = np.arange(len(values))
    return measure_progress(
        Curve("loss", steps, np.asarray(values, dtype=float), steps - steps - 1)
    )


def test_the_level_before_learning_is_the_first_value_where_the_next_ones_leave_it():
    blown = progress_of(blow_up(1e13))
    assert (blown.start, blown.first, blown.blows_up, blown.best) == (4.0, 4.0, True, 4.0)
    assert blown.has_blown_up
    assert not blown.has_fallen
    usual = progress_of(falling())
    assert not usual.blows_up
    assert usual.start == pytest.approx(np.median(falling()[:10]))


def test_smoothing_hides_no_burst():
    loss = falling(1000)
    loss[600:604] = 30.0
    progress = progress_of(loss)
    assert progress.smoothed.value.max() < 3.0
    assert progress.highest_after(590) == 30.0
    assert progress.highest_after(700) < 1.0
