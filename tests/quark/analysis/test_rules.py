"""Every rule fires on what it is for, names the culprit and the step, and is quiet else."""

import numpy as np
import pytest
from run_builder import RunBuilder, falling

from quark.analysis.engine import analyze_run

PROBES = list(range(0, 200, 5))
COUNT = len(PROBES)


def _analyze(builder):
    return analyze_run(builder.build())


def _find(result, rule_id):
    return [alert for alert in _list_alerts(result) if alert.rule_id == rule_id]


def _list_alerts(result):
    """Alerts without notes of documented thresholds."""
    return [alert for alert in result.alerts if "documented_level" not in alert.metadata]


def _gradients(builder, scale):
    """Gradients of four layers, times a factor for each probe."""
    for number in range(4):
        name = f"layers.{number}"
        builder.layer(name, steps=PROBES, mean=0.0, std=1.0, norm=10.0, dead_unit_ratio=0.0)
        builder.layer(
            name, summary="gradient", steps=PROBES, norm=0.1 * np.asarray(scale) * np.ones(COUNT)
        )
    return builder


def test_exploding_gradients_name_the_layer_and_the_probe():
    scale = np.ones(COUNT)
    scale[30:] = 10.0 ** np.arange(1, 11)
    loss = falling()
    loss[150:] += 1.2 ** np.arange(50)
    result = _analyze(_gradients(RunBuilder().metric("train/loss", loss), scale))
    (alert,) = _find(result, "exploding_gradients")
    assert alert.severity == "critical"
    assert alert.culprit == "layers.0"
    assert alert.step in (150, 155)
    assert set(alert.metadata["affected"]) == {"layers.1", "layers.2", "layers.3"}
    assert alert.evidence[0].observed_value > alert.evidence[0].threshold_value


def test_gradients_that_surge_while_the_loss_falls_on_are_no_explosion():
    scale = np.ones(COUNT)
    scale[20:24] = 30.0
    result = _analyze(_gradients(RunBuilder().metric("train/loss", falling()), scale))
    assert _list_alerts(result) == []
    assert result.verdicts["exploding_gradients"].state == "quiet"
    assert result.verdicts["exploding_gradients"].observed > 10


def _play(factor, lost):
    """A generator whose gradient and loss rise once its discriminator has learned."""
    scale = np.ones(COUNT)
    scale[20:] = factor
    theirs = falling()
    theirs[100:] *= lost
    ours = 0.7 + 0.1 * np.random.default_rng(3).standard_normal(200)
    ours[100:] += 2.0 * lost
    builder = RunBuilder().metric("train/d_loss", theirs).metric("train/g_loss", ours)
    return _find(_analyze(_gradients(builder, scale)), "exploding_gradients")


def test_gradients_of_a_player_that_rise_are_an_explosion_only_where_the_game_breaks():
    assert _play(40.0, 1.0) == []
    assert _play(3000.0, 1.0) == []
    (alert,) = _play(3000.0, 1e4)
    assert alert.severity == "critical"


def test_an_explosion_is_seen_in_the_loss_alone():
    loss = falling()
    loss[150:] = 0.2 * 1.6 ** np.arange(50)
    result = _analyze(RunBuilder().metric("train/loss", loss))
    assert result.verdicts["exploding_gradients"].state == "no_data"
    (alert,) = _find(result, "divergence")
    assert alert.title == "The loss explodes"
    assert "gradient" not in str(alert.to_dict()).lower()
    assert alert.culprit == "train/loss"
    assert 150 <= alert.step <= 165


def test_vanishing_gradients_are_told_where_nothing_is_learned():
    def build(loss):
        builder = RunBuilder().metric("train/loss", loss)
        for number in range(6):
            builder.parameter(
                f"layers.{number}.weight", steps=PROBES, value_norm=5.0,
                gradient_norm=10.0 ** (number - 6), update_to_parameter_ratio=1e-3,
                update_norm=5e-3,
            )  # fmt: skip
        return builder

    flat = 2.3 + 0.02 * np.random.default_rng(0).standard_normal(200)
    (alert,) = _find(_analyze(build(flat)), "vanishing_gradients")
    assert alert.culprit == "layers.0"
    assert "layers.1.weight" in alert.metadata["affected"]
    assert _find(_analyze(build(falling())), "vanishing_gradients") == []


def _parameters(builder, **changed):
    for number in range(4):
        settings = {
            "value_norm": 5.0, "gradient_norm": 0.1, "update_norm": 5e-3,
            "update_to_parameter_ratio": 1e-3,
        }  # fmt: skip
        if number == 2:
            settings |= changed
        builder.parameter(f"layers.{number}.weight", steps=PROBES, **settings)
    return builder


def test_a_layer_that_is_in_no_optimizer_is_stagnant():
    builder = RunBuilder().metric("train/loss", falling())
    _parameters(builder, in_optimizer=False, update_norm=0.0, update_to_parameter_ratio=0.0)
    (alert,) = _analyze(builder).alerts
    assert (alert.rule_id, alert.culprit, alert.step) == ("stagnant_layers", "layers.2", 0)
    assert alert.severity == "critical"
    assert "no optimizer" in alert.fact


def test_a_layer_whose_rate_becomes_zero_is_stagnant_from_there():
    updates = np.full(COUNT, 1e-3)
    updates[20:] = 0.0
    builder = RunBuilder().metric("train/loss", falling())
    _parameters(builder, update_to_parameter_ratio=updates, update_norm=5 * updates)
    (alert,) = _analyze(builder).alerts
    assert (alert.rule_id, alert.culprit, alert.step) == ("stagnant_layers", "layers.2", 100)


def test_a_layer_that_nothing_leads_to_is_stagnant():
    builder = RunBuilder().metric("train/loss", falling())
    _parameters(
        builder, gradient_norm=np.full(COUNT, np.nan), update_norm=0.0,
        update_to_parameter_ratio=0.0,
    )  # fmt: skip
    (alert,) = _analyze(builder).alerts
    assert alert.culprit == "layers.2"
    assert "gets no gradient" in alert.fact


@pytest.mark.parametrize(
    "changed",
    [
        {"requires_grad": False, "gradient_norm": np.full(COUNT, np.nan), "update_norm": 0.0,
         "update_to_parameter_ratio": 0.0},
        {"in_optimizer": False, "gradient_norm": np.full(COUNT, np.nan)},
    ],
    ids=["frozen", "outside and without gradient"],
)  # fmt: skip
def test_a_layer_that_is_meant_to_stand_still_is_not_stagnant(changed):
    builder = RunBuilder().metric("train/loss", falling())
    assert _list_alerts(_analyze(_parameters(builder, **changed))) == []


def test_a_rate_that_is_annealed_to_zero_is_no_stagnation():
    updates = 1e-3 * np.cos(np.linspace(0, np.pi / 2, COUNT)) ** 4
    builder = RunBuilder().metric("train/loss", falling())
    for number in range(4):
        builder.parameter(
            f"layers.{number}.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.1,
            update_norm=5 * updates, update_to_parameter_ratio=updates,
        )  # fmt: skip
    assert _list_alerts(_analyze(builder)) == []


def _activations(builder, **changed):
    for number in range(3):
        settings = {
            "std": 1.0, "mean": 0.1, "norm": 10.0, "dead_unit_ratio": 0.02, "zero_ratio": 0.6,
        }  # fmt: skip
        if number == 1:
            settings |= changed
        builder.layer(f"layers.{number}", "ReLU", steps=PROBES, **settings)
    return builder


def test_a_layer_whose_units_all_die_has_collapsed():
    dead = np.full(COUNT, 0.05)
    dead[18:] = 1.0
    builder = RunBuilder().metric("train/loss", falling())
    (alert,) = _analyze(_activations(builder, dead_unit_ratio=dead)).alerts
    assert (alert.rule_id, alert.culprit, alert.step) == ("activation_collapse", "layers.1", 90)
    assert alert.category == "representation"


def test_many_zeros_and_some_dead_units_are_no_collapse():
    builder = RunBuilder().metric("train/loss", falling())
    _activations(builder, dead_unit_ratio=0.5, zero_ratio=0.9, std=1e-3)
    assert _list_alerts(_analyze(builder)) == []


def test_saturation_counts_where_nothing_is_learned():
    def build(loss):
        builder = RunBuilder().metric("train/loss", loss)
        builder.metric("train/accuracy", np.full(200, 0.95 if loss[-1] < 1 else 0.1))
        return _activations(builder, saturation_ratio=0.97)

    flat = 2.3 + 0.02 * np.random.default_rng(0).standard_normal(200)
    alerts = _find(_analyze(build(flat)), "activation_collapse")
    assert [alert.culprit for alert in alerts] == ["layers.1"]
    assert _find(_analyze(build(falling())), "activation_collapse") == []


def test_overfitting_begins_where_the_validation_turns():
    steps = list(range(0, 400, 20))
    validation = [2.0 - 0.15 * i if i < 8 else 0.95 + 0.1 * (i - 8) for i in range(20)]
    builder = RunBuilder().metric("train/loss", falling(400))
    (alert,) = _analyze(builder.metric("val/loss", validation, steps=steps)).alerts
    assert (alert.rule_id, alert.culprit) == ("overfitting_onset", "val/loss")
    assert 160 <= alert.step <= 260


@pytest.mark.parametrize(
    "validation",
    [
        [2.0 * 0.8**i + 0.6 for i in range(20)],
        [2.0 * 0.8**i + 0.6 + (1.0 if i == 12 else 0.0) for i in range(20)],
        [1.0] * 20,
        [0.5, 0.9, 1.4],
    ],
    ids=["constant gap", "one bad evaluation", "never moves", "three points"],
)
def test_other_validations_are_no_overfitting(validation):
    builder = RunBuilder().metric("train/loss", falling(400))
    builder.metric("val/loss", validation, steps=list(range(0, 20 * len(validation), 20)))
    assert _find(_analyze(builder), "overfitting_onset") == []


def _timed(step_time, data_time=None):
    builder = RunBuilder().metric("train/loss", falling(len(step_time)))
    builder.metric("system/runtime/step_time_ms", step_time)
    if data_time is not None:
        builder.metric("system/runtime/data_time_ms", data_time)
    return _analyze(builder)


def _steady(count=300, level=50.0):
    return level * (1 + 0.02 * np.random.default_rng(1).standard_normal(count))


def test_steps_that_wait_for_data_are_a_bottleneck():
    data = _steady(level=5.0)
    data[150:] = 60.0
    result = _timed(_steady() + data, data)
    (alert,) = _find(result, "runtime_bottleneck_risk")
    assert 120 <= alert.step <= 160
    assert alert.category == "runtime"


def test_steps_that_get_slower_are_a_bottleneck():
    (alert,) = _find(_timed(_steady() * np.linspace(1, 3, 300)), "runtime_bottleneck_risk")
    assert alert.title == "Steps get slower"


def _by_work(key, work, times):
    builder = RunBuilder().metric("loss", falling(len(times)))
    builder.metric("system/runtime/step_time_ms", times).metric(key, work)
    return _find(_analyze(builder), "runtime_bottleneck_risk")


def _lengths(count=300):
    """Of episodes that get longer as an agent learns, each by chance."""
    return np.random.default_rng(2).geometric(1 / np.linspace(20, 200, count)) + 10.0


@pytest.mark.parametrize("key", ["episode/length", "ep_len", "reward", "train/seq_len"])
def test_steps_that_have_more_to_do_are_no_slower(key):
    work = _lengths()
    assert _by_work(key, work, 3.0 + 0.8 * work * _steady(level=1.0)) == []


def test_steps_that_get_slower_by_more_than_their_work_are_told():
    work = _lengths()
    for own in (np.linspace(1, 6, 300), np.where(np.arange(300) < 200, 1.0, 8.0)):
        (alert,) = _by_work("ep_len", work, own * (20.0 + 0.8 * work))
        assert (alert.title, alert.severity) != ("", "info")


def test_a_counter_is_no_work():
    slower = _steady() * np.linspace(1, 3, 300)
    for key, work in (
        ("total_env_steps", np.arange(1.0, 301.0)),
        ("batch_size", np.full(300, 8.0)),
    ):
        (alert,) = _by_work(key, work, slower)
        assert alert.title == "Steps get slower"


def test_slower_steps_of_an_agent_that_learns_are_a_remark_where_no_length_is_known():
    reward = np.linspace(-90.0, -5.0, 300) + np.random.default_rng(4).normal(0, 3, 300)
    (alert,) = _by_work("reward", reward, _steady() * np.linspace(1, 3, 300))
    assert alert.severity == "info"


def test_one_slow_first_step_is_no_note_either():
    """What compiles takes seconds, and would be most of a mean."""
    times = _steady(60)
    times[0] = 30_000.0
    data = np.full(60, 2.0)
    data[0] = 29_000.0
    assert _timed(times, data).alerts == ()
    (note,) = _timed(np.full(60, 1500.0)).alerts
    assert note.severity == "info"


def test_stalls_without_a_period_are_a_bottleneck():
    times = _steady()
    times[np.random.default_rng(3).choice(300, 12, replace=False)] = 2500.0
    (alert,) = _find(_timed(times), "runtime_bottleneck_risk")
    assert alert.title == "Steps stall"


def test_slow_steps_evaluations_and_a_first_compilation_are_none():
    slow = _steady(level=900.0)
    assert _list_alerts(_timed(slow)) == []
    periodic = _steady()
    periodic[::25] += 600.0
    periodic[0] = 9000.0
    assert _list_alerts(_timed(periodic)) == []


def test_a_loss_that_becomes_nan_is_critical_and_the_layer_is_named():
    loss = falling()
    loss[100:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    nan = np.zeros(COUNT)
    nan[20:] = 5
    result = _analyze(_activations(builder, nan_count=nan))
    (alert,) = _find(result, "non_finite_values")
    assert (alert.severity, alert.culprit, alert.step) == ("critical", "layers.1", 100)


def test_masks_of_infinity_and_one_nan_of_another_metric_are_none():
    other = np.full(200, 0.5)
    other[7] = np.nan
    builder = RunBuilder().metric("train/loss", falling()).metric("precision", other)
    assert _list_alerts(_analyze(_activations(builder, inf_count=12))) == []


def test_repeated_spikes_warn_and_one_informs():
    loss = falling()
    loss[90] = 3.0
    (alert,) = _analyze(RunBuilder().metric("train/loss", loss)).alerts
    assert (alert.rule_id, alert.severity, alert.step) == ("loss_spike", "info", 90)
    for step in (120, 150, 180):
        loss[step] = 3.0
    (alert,) = _analyze(RunBuilder().metric("train/loss", loss)).alerts
    assert (alert.severity, alert.step) == ("warning", 90)


def test_a_loss_that_rises_for_good_diverges_unless_the_validation_disagrees():
    loss = falling()
    loss[120:] += np.linspace(0, 3, 80)
    steps = list(range(0, 200, 10))
    worse = [loss[step] + 0.1 for step in steps]
    better = [2.0 * 0.8**i + 0.3 for i in range(20)]
    builder = RunBuilder().metric("train/loss", loss).metric("val/loss", worse, steps=steps)
    (alert,) = _find(_analyze(builder), "divergence")
    assert 120 <= alert.step <= 150
    builder = RunBuilder().metric("train/loss", loss).metric("val/loss", better, steps=steps)
    assert _find(_analyze(builder), "divergence") == []


def test_a_warm_restart_is_no_divergence():
    loss = np.concatenate([falling(100), 0.8 + 0.0 * np.arange(5), falling(95, start=0.8)])
    assert _list_alerts(_analyze(RunBuilder().metric("train/loss", loss))) == []


def test_a_loss_that_never_falls_is_a_plateau_unless_there_is_nothing_left_to_learn():
    flat = 2.3 + 0.02 * np.random.default_rng(0).standard_normal(200)
    (alert,) = _analyze(RunBuilder().metric("train/loss", flat)).alerts
    assert (alert.rule_id, alert.severity) == ("plateau", "error")
    tuned = RunBuilder().metric("train/loss", flat / 100)
    assert _list_alerts(_analyze(tuned.metric("train/accuracy", np.full(200, 0.98)))) == []


def test_updates_as_large_as_the_weights_are_too_large():
    builder = RunBuilder().metric("train/loss", falling())
    _parameters(builder, update_to_parameter_ratio=0.9, update_norm=4.5)
    (alert,) = _analyze(builder).alerts
    assert (alert.rule_id, alert.culprit) == ("update_ratio", "layers.2")


def test_updates_that_are_far_too_small_are_told_where_nothing_is_learned():
    flat = 2.3 + 0.02 * np.random.default_rng(0).standard_normal(200)
    builder = RunBuilder().metric("train/loss", flat)
    for number in range(3):
        builder.parameter(
            f"layers.{number}.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.1,
            update_norm=1e-8, update_to_parameter_ratio=2e-9,
        )  # fmt: skip
    result = _analyze(builder)
    assert [alert.rule_id for alert in result.alerts] == ["update_ratio", "plateau"]
    (effect,) = _find(result, "plateau")
    (cause,) = _find(result, "update_ratio")
    assert effect.metadata["caused_by"] == cause.id
    assert list(cause.metadata["consequences"]) == [effect.id]
