"""What changed where a fault set in is told with it; a consequence is never above its cause."""

import numpy as np
import pytest
from kit.traced_texts import Records, find_untraced
from run_builder import RunBuilder, falling

from quark.analysis.engine import _link_causes, analyze_run
from quark.analysis.rule import SEVERITIES, Finding
from quark_core.records import BatchDiagnosticRecord, SystemTelemetryRecord

PROBES = list(range(0, 200, 5))
ONSET = 150


def _analyze(builder):
    result = analyze_run(builder.build())
    assert find_untraced(result.findings.values(), Records(builder.records)) == []
    return result


def _exploding(builder=None, *, at=ONSET):
    """A run whose gradients and loss explode at a step."""
    builder = builder or RunBuilder()
    loss = falling()
    loss[at:] += 1.2 ** np.arange(200 - at)
    builder.metric("train/loss", loss)
    scale = np.where(np.array(PROBES) >= at, 1e3, 1.0)
    for number in range(3):
        name = f"layers.{number}"
        builder.layer(name, steps=PROBES, mean=0.0, std=1.0, norm=10.0, dead_unit_ratio=0.0)
        builder.layer(name, summary="gradient", steps=PROBES, norm=0.1 * scale)
    return builder


def _find(result, rule_id):
    (alert,) = [alert for alert in result.alerts if alert.rule_id == rule_id]
    return alert


def _stalled(**parameter):
    """A run that learns nothing, with two weights."""
    rng = np.random.default_rng(0)
    builder = RunBuilder().metric("train/loss", 2.3 + 0.01 * rng.standard_normal(200))
    gradients = rng.uniform(0.05, 0.2, len(PROBES))
    settings = {"value_norm": 5.0, "gradient_norm": gradients, "update_norm": 5e-3,
                "update_to_parameter_ratio": 1e-3} | parameter  # fmt: skip
    for name in ("fc0.weight", "fc1.weight"):
        builder.parameter(name, steps=PROBES, **settings)
    return builder


def test_a_rate_that_jumps_is_told_with_its_step():
    rate = np.full(200, 0.01)
    rate[ONSET - 3 :] = 1.0
    alert = _find(_analyze(_exploding(RunBuilder().metric("optimizer/lr", rate))),
                  "exploding_gradients")  # fmt: skip
    assert "The learning rate (optimizer/lr) went from 0.01 to 1 at step 147." in alert.fact
    assert alert.metadata["causes"] == ["learning_rate"]
    assert alert.suggested_check.startswith("Look at what sets the learning rate")


def test_a_rate_of_a_parameter_group_is_told_between_two_probes():
    rate = np.where(np.array(PROBES) >= ONSET - 5, 0.5, 0.01)
    builder = _exploding().parameter("layers.1.weight", steps=PROBES, learning_rate=rate)
    alert = _find(_analyze(builder), "exploding_gradients")
    assert "of layers.1.weight went from 0.01 to 0.5 from step 140 to 145." in alert.fact


def test_a_rate_that_grows_all_along_is_told():
    rate = 1e-3 * 1.05 ** np.arange(200)
    alert = _find(_analyze(_exploding(RunBuilder().metric("lr", rate))), "exploding_gradients")
    assert alert.metadata["causes"] == ["learning_rate"]


@pytest.mark.parametrize(
    "rate",
    [
        np.full(200, 0.01),
        0.01 * np.cos(np.linspace(0, np.pi / 2, 200)),
        np.minimum(0.01, 0.001 * np.arange(200)),
        np.where(np.arange(200) < 20, 0.001, 0.01),
        np.where(np.arange(200) < ONSET, 0.01, 0.001),
    ],
    ids=["constant", "cosine", "warm-up long ago", "a step long ago", "a step down"],
)
def test_a_rate_that_did_not_rise_there_is_no_cause(rate):
    alert = _find(_analyze(_exploding(RunBuilder().metric("optimizer/lr", rate))),
                  "exploding_gradients")  # fmt: skip
    assert "causes" not in alert.metadata


def test_weight_decay_that_shrinks_the_weights_is_told():
    norms = 5.0 * 0.97 ** np.arange(len(PROBES))
    builder = _stalled(value_norm=norms, learning_rate=0.1, weight_decay=0.5)
    alert = _find(_analyze(builder), "plateau")
    assert "Weight decay shrinks the weights" in alert.fact
    assert alert.metadata["causes"] == ["weight_decay"]


def test_weight_decay_of_a_usual_size_is_no_cause():
    alert = _find(_analyze(_stalled(learning_rate=1e-3, weight_decay=0.01)), "plateau")
    assert "causes" not in alert.metadata


def test_a_rate_that_moves_nothing_is_told():
    alert = _find(_analyze(_stalled(learning_rate=1e-9)), "plateau")
    assert "is never above 1e-09" in alert.fact


def test_gradients_that_are_clipped_to_nothing_are_told():
    alert = _find(_analyze(_stalled(gradient_norm=1e-4)), "plateau")
    assert "All gradients together have a norm of 0.000141" in alert.fact
    assert "causes" not in _find(_analyze(_stalled()), "plateau").metadata


def test_a_loss_scale_that_fell_is_told():
    scale = np.where(np.arange(200) < ONSET - 4, 65536.0, 16.0)
    alert = _find(_analyze(_exploding(RunBuilder().metric("amp/loss_scale", scale))),
                  "exploding_gradients")  # fmt: skip
    assert "The loss scale (amp/loss_scale) went from 65536 to 16" in alert.fact


def test_steps_that_were_skipped_are_told():
    builder = _stalled()
    builder.records["telemetry"] = [
        SystemTelemetryRecord(
            "run-a", "writer-a", 1, 0, step, 1_767_225_600_000_000 + step, "step", step,
            step_time_ms=10.0, skipped_step_count=step,
        )
        for step in range(200)
    ]  # fmt: skip
    alert = _find(_analyze(builder), "plateau")
    assert "The optimizer skipped 199 steps of 200" in alert.fact


def _broken(nan_count, *, weights=0):
    loss = falling()
    loss[145:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    count = np.where(np.array(PROBES) >= 145, 100, 0)
    count[PROBES.index(145)] = nan_count
    for number in range(3):
        builder.layer(f"layers.{number}", steps=PROBES, mean=0.0, std=1.0, norm=10.0,
                      dead_unit_ratio=0.0, nan_count=count)  # fmt: skip
    broken = np.where(np.array(PROBES) >= 145, weights, 0)
    return builder.parameter("layers.0.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.1,
                             non_finite_value_count=broken)  # fmt: skip


def test_a_batch_that_held_nan_is_told():
    alert = _find(_analyze(_broken(10)), "non_finite_values")
    assert "The batch at step 145 held NaN values: layers.0, the first layer, gives 10" in (
        alert.fact
    )
    assert alert.metadata["causes"] == ["batch"]


def test_weights_that_broke_are_not_blamed_on_the_batch():
    assert "causes" not in _find(_analyze(_broken(10, weights=50)), "non_finite_values").metadata


@pytest.mark.parametrize(("nan_count", "is_told"), [(60, True), (32, False), (640, False)])
def test_samples_that_broke_all_units_are_told_from_units_that_broke_for_all(nan_count, is_told):
    loss = falling()
    loss[145:] = np.nan
    count = np.where(np.array(PROBES) >= 145, 640, 0)
    count[PROBES.index(145)] = nan_count
    gone = np.where(np.array(PROBES) >= 145, 1, 0)
    builder = RunBuilder().metric("train/loss", loss)
    # 32 samples of 20 units.
    builder.layer("fc", steps=PROBES, element_count=640, norm=10.0, std=1.0, nan_count=count)
    builder.parameter("fc.bias", steps=PROBES, role="bias", element_count=20, value_norm=1.0,
                      non_finite_value_count=gone)  # fmt: skip
    alert = _find(_analyze(builder), "non_finite_values")
    assert ("causes" in alert.metadata) is is_told


def test_a_batch_with_a_sequence_that_is_far_too_long_is_told():
    builder = _exploding()
    builder.records["batch"] = [
        BatchDiagnosticRecord(
            "run-a", "writer-a", 1, 0, step, 1_767_225_600_000_000 + step,
            float(builder.records["metric"][step].value), step, batch_size=2,
            sample_ids=(f"a{step}", f"b{step}"),
            sequence_lengths=(100, 4096 if step == ONSET - 1 else 120),
        )
        for step in range(200)
    ]  # fmt: skip
    alert = _find(_analyze(builder), "exploding_gradients")
    assert (
        "The batch at step 149 had a sequence of 4096, those before it of 120 (median)"
        in alert.fact
    )
    assert "a149, b149" in alert.fact


def test_data_that_changed_is_told():
    mean = np.where(np.arange(200) < ONSET - 2, 0.1, 12.0)
    alert = _find(_analyze(_exploding(RunBuilder().metric("data/input_mean", mean))),
                  "exploding_gradients")  # fmt: skip
    assert "data/input_mean went from 0.1 to 12 at step 148" in alert.fact


def test_a_cause_is_as_grave_as_what_follows_and_comes_first():
    updates = np.where(np.array(PROBES) >= ONSET - 10, 0.06, 1e-3)
    builder = _exploding()
    for number in range(3):
        builder.parameter(
            f"layers.{number}.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.1,
            update_norm=5 * updates, update_to_parameter_ratio=updates,
        )  # fmt: skip
    result = _analyze(builder)
    ranks = {alert.id: SEVERITIES.index(alert.severity) for alert in result.alerts}
    effects = [alert for alert in result.alerts if "caused_by" in alert.metadata]
    assert effects
    for effect in effects:
        assert ranks[effect.metadata["caused_by"]] >= ranks[effect.id]


def test_what_begins_first_is_the_cause_of_two_that_may_bring_each_other_about():
    loss = falling()
    loss[150:] += 1.2 ** np.arange(50)
    loss[158:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    scale = np.where(np.array(PROBES) >= 150, 1e3, 1.0)
    for number in range(3):
        builder.layer(f"layers.{number}", steps=PROBES, norm=10.0, std=1.0)
        builder.layer(f"layers.{number}", summary="gradient", steps=PROBES, norm=scale)
    result = _analyze(builder)
    cause, effect = _find(result, "exploding_gradients"), _find(result, "non_finite_values")
    assert effect.metadata["caused_by"] == cause.id


def test_a_loss_that_grows_until_it_is_nan_diverges_first():
    loss = falling()
    loss[150:] += 10.0 ** np.arange(50)
    loss[156:] = np.nan
    result = _analyze(RunBuilder().metric("train/loss", loss))
    cause, effect = _find(result, "divergence"), _find(result, "non_finite_values")
    assert cause.step < effect.step
    assert effect.metadata["caused_by"] == cause.id
    assert "caused_by" not in cause.metadata


@pytest.mark.parametrize(
    ("cause", "effect"),
    [
        ("gradients_not_cleared", "overfitting_onset"),
        ("vanishing_gradients", "update_ratio"),
        ("update_ratio", "vanishing_gradients"),
    ],
)
def test_a_finding_that_begins_later_follows_from_its_cause(cause, effect):
    found = [
        (rule, Finding(culprit="fc", severity="error", title="t", fact="f", inference="i",
                       suggested_check="c", evidence=(), step=step))
        for rule, step in ((effect, 100), (cause, 0))
    ]  # fmt: skip
    assert _link_causes(found, tolerance=10) == {0: 1}


def test_the_culprit_of_dead_units_is_the_module_that_feeds_them():
    dead = np.where(np.array(PROBES) >= 100, 1.0, 0.1)
    builder = RunBuilder().metric("train/loss", falling())
    alike = np.where(np.array(PROBES) >= 100, 1e-6, 0.5)
    for number in range(3):
        kinds = {f"fc{number}": "Linear", f"act{number}": "ReLU"}
        for name, kind in kinds.items():
            gone = dead if name == "act1" else 0.1
            builder.layer(
                name,
                kind,
                steps=PROBES,
                mean=0.0,
                std=1.0,
                norm=10.0,
                dead_unit_ratio=gone,
                sample_variation_ratio=alike if number else 0.5,
            )
        builder.parameter(f"fc{number}.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.1)
    alert = _find(_analyze(builder), "activation_collapse")
    assert (alert.title, alert.culprit) == ("Units are dead", "fc1")
    assert "act1" in alert.metadata["affected"]
    assert "100 % of the units of act1 give nothing for any sample" in alert.fact


def test_small_updates_of_layers_that_gradients_do_not_reach_are_no_cause():
    rng = np.random.default_rng(0)
    builder = RunBuilder().metric("train/loss", 2.3 + 0.01 * rng.standard_normal(200))
    for number in range(6):
        size = 10.0 ** (number - 6)
        builder.parameter(
            f"layers.{number}.weight", steps=PROBES, value_norm=5.0, gradient_norm=size,
            update_norm=1e-3 * size, update_to_parameter_ratio=2e-4 * size,
        )  # fmt: skip
    result = _analyze(builder)
    cause, effect = _find(result, "vanishing_gradients"), _find(result, "update_ratio")
    assert effect.metadata["caused_by"] == cause.id


@pytest.mark.parametrize(("waits", "part"), [(90.0, "waiting for data"), (1.0, "computation")])
def test_steps_that_get_slower_say_in_which_part(waits, part):
    builder = RunBuilder().metric("train/loss", falling())
    slow = np.arange(200) >= 40
    whole = np.where(slow, 150.0, 50.0) + np.random.default_rng(0).normal(0, 1, 200)
    # A wait that comes now and then: waiting is no large share of the time.
    builder.metric("system/step_time_ms", whole)
    builder.metric("system/data_time_ms", np.where(slow, min(waits, 55.0), 1.0))
    alert = _find(_analyze(builder), "runtime_bottleneck_risk")
    assert part in alert.title
