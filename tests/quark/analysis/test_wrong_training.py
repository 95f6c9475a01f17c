"""Trainings that run, but wrongly: what records say of the loop, the optimizer and the modes."""

import numpy as np
import pytest
from rule_alerts import find, verdict
from run_builder import RunBuilder, falling

from quark.analysis.engine import analyze_run

STEPS = list(range(0, 200, 10))
COUNT = len(STEPS)
RNG = np.random.default_rng(3)
FLAT = 2.3 + 0.02 * RNG.standard_normal(200)
ALARMS = ("warning", "error", "critical")


def moving(start=5.0):
    return start + 1e-2 * np.arange(COUNT)


def noisy(level=0.1):
    return level * (1.0 + 0.3 * RNG.random(COUNT))


def weight(builder, name, **changed):
    """A weight that trains, but for what is said otherwise."""
    figures = {
        "value_norm": moving(), "value_mean": 0.1 + 1e-4 * np.arange(COUNT), "value_std": 0.5,
        "value_min": -1.0, "value_max": moving(1.0), "gradient_norm": noisy(),
        "update_norm": 5e-3, "update_to_parameter_ratio": 1e-3, "learning_rate": 1e-2,
    }  # fmt: skip
    settings = {key: changed.pop(key) for key in (*changed,) if key in SETTINGS}
    return builder.parameter(name, steps=STEPS, **settings, **(figures | changed))


SETTINGS = ("requires_grad", "in_optimizer", "element_count", "metadata", "rank", "kind", "role")

STILL = {
    "value_norm": 5.0, "value_mean": 0.1, "value_std": 0.5, "value_min": -1.0, "value_max": 1.0,
    "update_norm": np.nan, "update_to_parameter_ratio": np.nan,
}  # fmt: skip
NO_STEP = {"update_missing": "no_optimizer_step"}


def model(loss, layers=4, **changed):
    builder = RunBuilder().metric("train/loss", loss)
    for index in range(layers):
        weight(builder, f"layers.{index}.weight", **changed)
    return builder


def alarms(builder):
    return {
        alert.rule_id for alert in analyze_run(builder.build()).alerts if alert.severity in ALARMS
    }


def from_row(first, values, others):
    """The first values up to a row, others from there on."""
    return np.where(np.arange(COUNT) < first, values, others)


def still_from(first, updates=np.nan):
    """A weight that moves up to a row and stands still from there on."""
    still = STILL | {"update_norm": updates, "update_to_parameter_ratio": updates}
    return {
        key: from_row(first, moving() if key == "value_norm" else 1e-3, value)
        for key, value in still.items()
    }


# The optimizer has stopped stepping.


def test_an_optimizer_that_never_steps():
    (alert,) = find(model(FLAT, **STILL, metadata=NO_STEP), "optimizer_not_stepping")
    assert (alert.severity, alert.step) == ("critical", 0)
    assert "20 of 20" in alert.fact


def test_an_optimizer_that_stops_on_the_way():
    marks, loss = [None] * 8 + [NO_STEP] * 12, np.append(falling(80), FLAT[:120])
    (alert,) = find(model(loss, **still_from(8), metadata=marks), "optimizer_not_stepping")
    assert alert.step == 80


def test_an_optimizer_that_is_not_told_of_and_weights_that_never_change():
    builder = model(FLAT, **STILL, in_optimizer=None)
    assert find(builder, "optimizer_not_stepping")


def test_steps_at_a_rate_of_zero_that_was_never_another():
    still = STILL | {"update_norm": 0.0, "update_to_parameter_ratio": 0.0, "learning_rate": 0.0}
    (alert,) = find(model(FLAT, **still), "optimizer_not_stepping")
    assert "learning rate of zero" in alert.fact


def test_one_of_two_optimizers_stops():
    builder = model(falling())
    for index in range(2):
        weight(builder, f"critic.{index}.weight", **STILL, metadata=NO_STEP)
    (alert,) = find(builder, "optimizer_not_stepping")
    assert alert.culprit == "critic.0"
    assert alert.metadata["affected"] == ["critic.1"]


def test_accumulation_with_snapshots_of_each_micro_batch():
    values = np.repeat(5.0 + 1e-2 * np.arange(COUNT // 4), 4)
    marks = [None if row % 4 == 3 else NO_STEP for row in range(COUNT)]
    builder = model(
        falling(), **(STILL | {"value_norm": values, "value_mean": values / 50}), metadata=marks
    )
    assert not find(builder, "optimizer_not_stepping")


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_has_only_summed_micro_batches_so_far(ended):
    marks = [NO_STEP | {"accumulated": row + 1} for row in range(COUNT)]
    run = model(FLAT, **STILL, metadata=marks).build()
    run.ended = ended
    found = {alert.rule_id for alert in analyze_run(run).alerts}
    assert ("optimizer_not_stepping" in found) is ended


def test_an_optimizer_whose_steps_are_not_seen_while_the_weights_move():
    builder = model(falling(), update_norm=np.nan, metadata=NO_STEP)
    assert not find(builder, "optimizer_not_stepping")


def test_a_schedule_that_has_come_to_its_end():
    rate = from_row(16, np.linspace(1e-2, 5e-4, COUNT), 0.0)
    builder = model(falling(), **still_from(16, 0.0), learning_rate=rate)
    assert not find(builder, "optimizer_not_stepping")


def test_a_training_that_has_converged_to_the_last_bit():
    builder = model(falling(), **still_from(8, 0.0), gradient_norm=from_row(8, 0.1, 1e-6))
    assert not find(builder, "optimizer_not_stepping")


def test_weights_that_are_lost_rest_for_another_reason():
    lost = from_row(8, moving(), np.nan)
    builder = model(
        falling(),
        **(STILL | {"value_norm": lost, "update_norm": from_row(8, 1e-3, np.nan)}),
        gradient_norm=from_row(8, 0.1, np.nan),
        non_finite_value_count=from_row(8, 0.0, 10.0),
    )
    assert not find(builder, "optimizer_not_stepping")
    assert find(builder, "non_finite_values")


def test_warm_up_from_a_rate_of_zero():
    rate = np.linspace(0.0, 1e-2, COUNT)
    builder = model(falling(), learning_rate=rate, update_norm=rate / 2)
    assert not find(builder, "optimizer_not_stepping")


def test_frozen_weights_are_meant_to_stand_still():
    builder = model(falling())
    weight(builder, "body.weight", **STILL, requires_grad=False, gradient_norm=np.nan)
    assert not find(builder, "optimizer_not_stepping")


def test_a_discriminator_that_rests_for_a_while():
    rests = (np.arange(COUNT) // 3) % 2 == 1
    norm = 5.0 + 1e-2 * np.cumsum(~rests)
    builder = model(falling())
    still = STILL | {"value_norm": norm, "value_max": norm, "value_mean": norm / 50}
    marks = [NO_STEP if rest else None for rest in rests]
    weight(builder, "critic.0.weight", **still, metadata=marks)
    assert not find(builder, "optimizer_not_stepping")


# Gradients are never cleared.


def test_gradients_that_are_never_cleared():
    marks = [{"carried_over": True, "accumulated": row + 1} for row in range(COUNT)]
    (alert,) = find(model(falling(), metadata=marks), "gradients_not_cleared")
    assert (alert.severity, alert.step) == ("error", 0)
    assert "zero_grad" in alert.suggested_check


def test_gradients_that_are_no_longer_cleared():
    marks = [None] * 10 + [{"carried_over": True}] * 10
    (alert,) = find(model(falling(), metadata=marks), "gradients_not_cleared")
    assert alert.step == 100


def test_accumulated_gradients_are_cleared_every_k_steps():
    marks = [{"accumulated": row % 4 + 1} if row % 4 else None for row in range(COUNT)]
    assert not find(model(falling(), metadata=marks), "gradients_not_cleared")


def test_a_gradient_that_is_carried_over_once():
    marks = [{"carried_over": True} if row == 7 else None for row in range(COUNT)]
    assert not find(model(falling(), metadata=marks), "gradients_not_cleared")


# Modes.


def with_dropout(builder, evaluations):
    marks = [None] * COUNT
    for row, seen in evaluations.items():
        marks[row] = {"evaluation": seen}
    return builder.layer(
        "drop", "Dropout", steps=STEPS, std=1.0, mean=0.0, norm=10.0, metadata=marks
    )


VALIDATIONS = list(range(0, 200, 20))


def validated(**changed):
    builder = model(falling(), **changed)
    return builder.metric("val/loss", falling(len(VALIDATIONS)), steps=VALIDATIONS)


def test_dropout_is_active_in_the_validation():
    seen = {row: {"step": STEPS[row - 1], "training": True} for row in range(1, COUNT, 2)}
    (alert,) = find(with_dropout(validated(), seen), "training_mode_in_evaluation")
    assert (alert.severity, alert.culprit, alert.step) == ("warning", "drop", 0)
    assert "model.eval()" in alert.suggested_check


def test_a_validation_in_evaluation_mode():
    seen = {row: {"step": STEPS[row - 1], "training": False} for row in range(1, COUNT, 2)}
    builder = with_dropout(validated(), seen)
    assert not find(builder, "training_mode_in_evaluation")
    assert "evaluation mode" in verdict(builder, "training_mode_in_evaluation").reason


def test_labels_that_the_model_makes_itself_in_every_step():
    seen = {row: {"step": STEPS[row - 1], "training": True} for row in range(1, COUNT)}
    assert not find(with_dropout(validated(), seen), "training_mode_in_evaluation")


def test_statistics_of_batches_that_are_brought_up_to_date_once():
    seen = {row: {"step": STEPS[row - 1], "training": False} for row in range(1, COUNT, 2)}
    seen[9] = {"step": STEPS[8], "training": True}
    assert not find(with_dropout(validated(), seen), "training_mode_in_evaluation")


def test_a_training_in_evaluation_mode():
    marks = [None] * 4 + [{"evaluation_mode": True}] * 16
    (alert,) = find(model(falling(), metadata=marks), "training_mode_in_evaluation")
    assert (alert.title, alert.step) == ("The model trains in evaluation mode", 40)


def test_a_single_step_in_evaluation_mode():
    marks = [None] * 10 + [{"evaluation_mode": True}] + [None] * 9
    assert not find(model(falling(), metadata=marks), "training_mode_in_evaluation")


# Nearly everything is frozen.


def with_frozen(builder, share=0.99, **changed):
    trained = 400 * (1 - share) / share
    weight(
        builder, "body.weight", **STILL, requires_grad=False, gradient_norm=np.nan,
        element_count=int(400 / (1 - share)) if trained else 0, in_optimizer=False, **changed,
    )  # fmt: skip
    return builder


def test_nearly_everything_is_frozen_and_nothing_is_learned():
    (alert,) = find(with_frozen(model(FLAT)), "mostly_frozen")
    assert alert.severity == "error"  # as grave as the plateau that follows
    assert alert.culprit == "body"


def test_a_head_on_a_frozen_body_that_learns():
    assert not find(with_frozen(model(falling())), "mostly_frozen")


def test_a_rest_that_comes_down_to_guesses_has_not_learned():
    builder = with_frozen(model(falling(start=2.9, end=2.31, noise=0.02)))
    builder.parameter("head.bias", role="bias", steps=STEPS, element_count=10)
    (alert,) = find(builder, "mostly_frozen")
    assert "from 2.84 to 2.31" in alert.fact
    better = with_frozen(model(falling(start=2.9, end=1.5, noise=0.02)))
    better.parameter("head.bias", role="bias", steps=STEPS, element_count=10)
    assert not find(better, "mostly_frozen")


def only(kind, loss):
    builder = RunBuilder().metric("train/loss", loss)
    weight(builder, "norm.weight", kind=kind, element_count=8)
    for name in ("conv.weight", "head.weight"):
        weight(builder, name, **STILL, requires_grad=False, gradient_norm=np.nan)
    return builder


@pytest.mark.parametrize("kind", ["BatchNorm2d", "LayerNorm", "LlamaRMSNorm"])
def test_only_normalisations_may_train(kind):
    assert find(only(kind, falling(start=1.6, end=1.1)), "mostly_frozen")


@pytest.mark.parametrize(
    "builder",
    [
        only("BatchNorm2d", falling(start=1.6, end=0.3)),
        only("BatchNorm2d", falling(start=1.6, end=1.1)).metric("accuracy", 0.97 - 0.4 * falling()),
        only("Linear", falling(start=1.6, end=1.1)),
    ],
    ids=["they suffice", "a score is good", "a small head"],
)
def test_little_that_trains_and_suffices(builder):
    assert not find(builder, "mostly_frozen")


def test_a_body_that_is_half_frozen_and_does_not_learn():
    assert not find(with_frozen(model(FLAT), 0.5), "mostly_frozen")


def test_everything_is_frozen_on_the_way_and_the_loss_goes_on_as_before():
    builder = model(
        np.append(falling(80), 0.1 + 0.02 * RNG.standard_normal(120)),
        **still_from(8),
        gradient_norm=from_row(8, 0.1, np.nan),
        requires_grad=[row < 8 for row in range(COUNT)],
    )
    (alert,) = find(builder, "mostly_frozen")
    assert (alert.severity, alert.step) == ("error", 80)


def test_an_input_is_trained_through_a_frozen_model():
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(3):
        weight(builder, f"layers.{index}.weight", **STILL, requires_grad=False)
    assert not find(builder, "mostly_frozen")


# The optimizer has other parameters.


def test_the_optimizer_was_made_for_another_model():
    still = STILL | {"update_norm": np.nan}
    (alert,) = find(model(FLAT, **still, in_optimizer=False), "parameters_not_optimized")
    assert alert.severity == "critical"
    assert "none of the 4" in alert.fact


def test_most_of_the_model_is_left_out():
    builder = model(falling(), layers=2)
    for index in range(3):
        weight(builder, f"encoder.{index}.weight", **STILL, in_optimizer=False)
    (alert,) = find(builder, "parameters_not_optimized")
    assert alert.culprit == "encoder.0"
    assert alert.metadata["affected"] == ["encoder.1", "encoder.2"]


def test_one_layer_that_is_left_out_is_the_rule_of_layers():
    builder = model(falling())
    weight(builder, "head.weight", **STILL, in_optimizer=False)
    assert find(builder, "stagnant_layers")
    assert not find(builder, "parameters_not_optimized")
    assert "stagnant_layers" in verdict(builder, "parameters_not_optimized").reason


def test_small_adapters_that_are_left_out_are_the_rule_of_layers():
    builder = model(falling(), layers=2, element_count=1000)
    for index in range(3):
        weight(builder, f"adapter.{index}.weight", **STILL, in_optimizer=False)
    assert find(builder, "stagnant_layers")
    assert not find(builder, "parameters_not_optimized")


def with_head(loss, **changed):
    builder = model(loss, layers=2)
    for name in ("layers.0", "layers.1", "head"):
        builder.layer(name, steps=STEPS, std=1.0)
    still = STILL | {"update_norm": np.nan}
    return weight(builder, "head.weight", **(still | changed))


def test_the_head_was_replaced_after_the_optimizer_was_made():
    result = analyze_run(with_head(FLAT, in_optimizer=False).build())
    (alert,) = [item for item in result.alerts if item.rule_id == "parameters_not_optimized"]
    assert (alert.culprit, alert.severity, alert.step) == ("head", "critical", 0)
    assert alert.title == "The output layer is in no optimizer"
    assert "2 of the 3" in alert.fact
    (layer,) = [item for item in result.alerts if item.rule_id == "stagnant_layers"]
    assert layer.metadata["caused_by"] == alert.id


@pytest.mark.parametrize(
    "builder",
    [
        with_head(falling(), in_optimizer=False, requires_grad=False, gradient_norm=np.nan),
        with_head(falling(), in_optimizer=False, gradient_norm=0.0),
        with_head(falling(), **{key: moving() for key in STILL}),
    ],
    ids=["frozen", "not used", "trained"],
)
def test_a_head_that_is_no_fault_of_the_optimizer(builder):
    assert not find(builder, "parameters_not_optimized")


def test_frozen_parameters_need_no_optimizer():
    builder = model(falling(), layers=1)
    for index in range(4):
        weight(
            builder, f"body.{index}.weight", **STILL, in_optimizer=False, requires_grad=False,
            gradient_norm=np.nan,
        )  # fmt: skip
    assert not find(builder, "parameters_not_optimized")


def test_layers_that_join_the_optimizer_on_the_way():
    builder = model(falling(), layers=1)
    for index in range(4):
        weight(builder, f"body.{index}.weight", in_optimizer=[row > 9 for row in range(COUNT)])
    assert not find(builder, "parameters_not_optimized")


# Replicas.


def replicas(builder, parted_from=None, layers=("a", "b"), shard=False, gradients_part=True):
    for name in layers:
        for rank in range(2):
            parts = parted_from is not None and rank == 1 and name != "a"
            away = from_row(parted_from or 0, 0.0, 1e-2) if parts else np.zeros(COUNT)
            marks = [
                {"digest": f"{row}-{away[row]}"} | ({"scope": "local_shard"} if shard else {})
                for row in range(COUNT)
            ]
            weight(
                builder, f"{name}.weight", rank=rank, metadata=marks,
                value_norm=moving() * (1 + away),
                gradient_norm=0.1 + (away if gradients_part else 0.0),
            )  # fmt: skip
    return builder


def test_replicas_that_part():
    builder = replicas(RunBuilder().metric("train/loss", falling()), 7)
    (alert,) = find(builder, "replicas_differ")
    assert (alert.severity, alert.step, alert.culprit) == ("error", 70, "b")
    assert "rank 1" in alert.fact


def test_replicas_that_are_the_same():
    builder = replicas(RunBuilder().metric("train/loss", falling()))
    assert not find(builder, "replicas_differ")
    assert "same" in verdict(builder, "replicas_differ").reason


def test_shards_are_different_by_design():
    builder = replicas(RunBuilder().metric("train/loss", falling()), 0, shard=True)
    assert not find(builder, "replicas_differ")


def test_replicas_that_are_averaged_now_and_then():
    builder = RunBuilder().metric("train/loss", falling())
    away = np.where(np.arange(COUNT) % 4 == 3, 0.0, 1e-3)
    for rank in range(2):
        marks = [{"digest": f"{row}-{rank * away[row]}"} for row in range(COUNT)]
        weight(
            builder, "b.weight", rank=rank, metadata=marks, value_norm=moving() * (1 + rank * away)
        )
    assert not find(builder, "replicas_differ")


def test_replicas_that_differ_from_the_start_though_they_share_gradients():
    builder = replicas(RunBuilder().metric("train/loss", falling()), 0, gradients_part=False)
    (alert,) = find(builder, "replicas_differ")
    assert alert.step == 0


def test_experts_are_each_their_own_from_the_start():
    builder = replicas(RunBuilder().metric("train/loss", falling()), 0)
    assert not find(builder, "replicas_differ")


@pytest.mark.parametrize("loss", [falling(), falling(start=200.0, end=10.0, noise=1.0)])
def test_a_healthy_training_is_none_of_it(loss):
    assert not alarms(model(loss))


def test_weights_that_are_nan_do_not_say_that_the_optimizer_rests():
    probes = list(range(0, 200, 5))
    loss = falling()
    loss[100:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    broken = np.where(np.array(probes) >= 100, np.nan, 0.1)
    for name in ("fc0.weight", "fc1.weight"):
        norms = np.where(np.isnan(broken), np.nan, 5.0 + 0.01 * np.arange(len(probes)))
        builder.parameter(name, steps=probes, value_norm=norms, gradient_norm=broken,
                          update_norm=np.where(np.isnan(broken), 0.0, 5e-3),
                          update_to_parameter_ratio=np.where(np.isnan(broken), 0.0, 1e-3),
                          non_finite_value_count=np.isnan(broken) * 10.0)  # fmt: skip
    assert find(builder, "optimizer_not_stepping") == []
