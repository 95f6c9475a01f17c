"""Rules over data, ranks and devices: each fires on its fault, and is quiet of what looks alike."""

import numpy as np
import pytest
from kit.traced_texts import Records, find_untraced
from run_builder import RunBuilder, falling

from quark.analysis.engine import analyze_run
from quark_core.records import BatchDiagnosticRecord, SystemTelemetryRecord

CLOCK_US = 1_767_225_600_000_000
PROBES = list(range(0, 200, 5))


def _analyze(builder):
    result = analyze_run(builder.build())
    assert find_untraced(result.findings.values(), Records(builder.records)) == []
    return result


def _find(result, rule_id):
    return [alert for alert in result.alerts if alert.rule_id == rule_id]


# -- mislabelled data


def _train(
    *, wrong=0.0, hard=0.0, rare=0.0, samples=400, classes=5, epochs=24, size=16, seed=0,
):  # fmt: skip
    """Really trains a softmax regression, and logs each batch; returns who is labelled wrongly."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    if rare:
        labels[rng.random(samples) > rare] = 0
    centres = rng.standard_normal((classes, 12)) * 1.6
    inputs = centres[labels] + rng.standard_normal((samples, 12))
    odd = rng.random(samples) < hard
    # Halfway between two classes: hard, and rightly labelled.
    inputs[odd] = (centres[labels[odd]] + centres[(labels[odd] + 1) % classes]) / 2
    spoilt = np.flatnonzero(rng.random(samples) < wrong)
    labels[spoilt] = (labels[spoilt] + rng.integers(1, classes, len(spoilt))) % classes
    inputs = np.hstack([inputs, np.ones((samples, 1))])
    weights = np.zeros((13, classes))
    builder = RunBuilder()
    rows = builder.records.setdefault("batch", [])
    step = 0
    for epoch in range(epochs):
        for batch in np.array_split(rng.permutation(samples), samples // size):
            scores = inputs[batch] @ weights
            scores -= scores.max(axis=1, keepdims=True)
            chance = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            loss = float(-np.log(chance[np.arange(len(batch)), labels[batch]]).mean())
            chance[np.arange(len(batch)), labels[batch]] -= 1
            weights -= 0.1 * inputs[batch].T @ chance / len(batch)
            counts = {str(one): int((labels[batch] == one).sum()) for one in set(labels[batch])}
            rows.append(
                BatchDiagnosticRecord(
                    "run-a", "writer-a", 1, 0, step, CLOCK_US + step, loss, step, epoch, len(batch),
                    tuple(f"s{one}" for one in batch.tolist()), counts,
                )
            )  # fmt: skip
            step += 1
    return builder, {f"s{one}" for one in spoilt.tolist()}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wrong", [0.03, 0.08])
def test_samples_that_are_labelled_wrongly_are_named(wrong, seed):
    builder, spoilt = _train(wrong=wrong, seed=seed)
    (alert,) = _find(_analyze(builder), "mislabelled_data")
    assert alert.severity in ("warning", "error")
    named = set(alert.metadata["affected"])
    assert len(named & spoilt) >= 0.85 * len(named)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"hard": 0.1}, {"rare": 0.1}, {"hard": 0.3}, {"epochs": 4}],
    ids=["clean", "hard samples", "rare classes", "many hard samples", "few epochs"],
)
def test_samples_that_are_only_hard_are_not_called_wrong(options, seed):
    builder, _ = _train(seed=seed, **options)
    assert _find(_analyze(builder), "mislabelled_data") == []


def test_outliers_of_a_regression_are_not_called_wrong():
    rng = np.random.default_rng(0)
    targets = rng.standard_t(2, 400)
    builder, weight = RunBuilder(), 0.0
    rows = builder.records.setdefault("batch", [])
    inputs = targets * 0.5 + 0.1 * rng.standard_normal(400)
    step = 0
    for _ in range(20):
        for batch in np.array_split(rng.permutation(400), 25):
            off = weight * inputs[batch] - targets[batch]
            weight -= 0.02 * float((off * inputs[batch]).mean())
            rows.append(
                BatchDiagnosticRecord(
                    "run-a", "writer-a", 1, 0, step, CLOCK_US + step, float((off**2).mean()), step,
                    None, len(batch), tuple(batch.tolist()),
                )
            )  # fmt: skip
            step += 1
    assert _find(_analyze(builder), "mislabelled_data") == []


# -- constant inputs


def _layers(builder, shares, *, norm=10.0, kind="Linear"):
    builder.layer("fc0", kind, steps=PROBES, mean=0.1, std=1.0, norm=norm, dead_unit_ratio=0.0,
                  sample_variation_ratio=shares)  # fmt: skip
    return builder.layer("fc1", steps=PROBES, mean=0.1, std=1.0, norm=10.0, dead_unit_ratio=0.0,
                         sample_variation_ratio=shares)  # fmt: skip


def _flat(start=1.6):
    return start + 0.02 * np.random.default_rng(0).standard_normal(200)


def test_inputs_that_are_the_same_for_all_are_told():
    builder = _layers(RunBuilder().metric("train/loss", _flat()), 0.0)
    (alert,) = _find(_analyze(builder), "constant_inputs")
    assert (alert.title, alert.culprit, alert.severity) == (
        "All inputs are the same", "fc0", "error",
    )  # fmt: skip


def test_inputs_that_become_the_same_are_told_from_there_and_as_the_cause():
    shares = np.where(np.array(PROBES) >= 100, 0.0, 0.4)
    loss = falling()
    loss[100:] = _flat()[100:]
    result = _analyze(_layers(RunBuilder().metric("train/loss", loss), shares))
    (alert,) = _find(result, "constant_inputs")
    assert alert.step == 100
    assert "40 % before" in alert.fact
    for effect in _find(result, "activation_collapse"):
        assert effect.metadata["caused_by"] == alert.id


@pytest.mark.parametrize("with_layers", [True, False])
def test_blank_inputs_are_told_by_a_weight_that_gets_nothing_beside_its_bias(with_layers):
    builder = RunBuilder().metric("train/loss", _flat())
    if with_layers:
        _layers(builder, np.nan)
    builder.parameter("fc0.weight", steps=PROBES, value_norm=5.0, gradient_norm=0.0)
    builder.parameter("fc0.bias", steps=PROBES, role="bias", value_norm=1.0, gradient_norm=0.2)
    (alert,) = _find(_analyze(builder), "constant_inputs")
    assert (alert.title, alert.culprit) == ("Inputs are blank", "fc0")


@pytest.mark.parametrize(
    ("loss", "shares", "kind", "gradients"),
    [
        (_flat(), 1e-4, "Linear", (0.1, 0.2)),
        (falling(), 0.0, "ConvTranspose2d", (0.1, 0.2)),
        (_flat(), np.where(np.arange(40) == 20, 0.0, 0.3), "Linear", (0.1, 0.2)),
        (_flat(), 0.3, "Linear", (0.0, 0.0)),
        (_flat(), np.where(np.arange(40) < 20, 0.0, 0.3), "Linear", (0.1, 0.2)),
    ],
    ids=["alike but not the same", "a constant that is learned from", "one odd batch",
         "a first layer that nothing comes back to", "it is over"],
)  # fmt: skip
def test_inputs_that_say_something_are_not(loss, shares, kind, gradients):
    builder = _layers(RunBuilder().metric("train/loss", loss), shares, kind=kind)
    for name, gradient in zip(("weight", "bias"), gradients, strict=True):
        builder.parameter(f"fc0.{name}", steps=PROBES, role=name, value_norm=5.0,
                          gradient_norm=gradient)  # fmt: skip
    assert _find(_analyze(builder), "constant_inputs") == []


# -- ranks and devices


def _ranks(times, *, steps=120, seed=0, devices=None, waits=None):
    """Telemetry of ranks: step times in ms, each one number or one a step, with jitter."""
    rng = np.random.default_rng(seed)
    builder = RunBuilder().metric("train/loss", falling())
    rows = builder.records.setdefault("telemetry", [])
    for rank, own in enumerate(times):
        whole = np.broadcast_to(np.asarray(own, dtype=float), steps)
        whole = whole * (1 + 0.05 * rng.standard_normal(steps))
        wait = np.broadcast_to(np.asarray(0.0 if waits is None else waits[rank], float), steps)
        use, memory = (None, None) if devices is None else devices[rank]
        for step in range(steps):
            one = None if use is None else float(np.broadcast_to(use, steps)[step])
            rows.append(
                SystemTelemetryRecord(
                    "run-a", f"writer-{rank}", 1, rank, step, CLOCK_US + step, "step", step,
                    step_time_ms=float(whole[step]), data_time_ms=float(wait[step]),
                    compute_time_ms=float(max(whole[step] - wait[step], 0.0)),
                    gpu_utilization_percent=one, gpu_memory_usage_percent=memory,
                )
            )  # fmt: skip
    return builder


def test_a_rank_that_is_slower_from_some_step_on_is_named():
    late = np.where(np.arange(120) >= 60, 80.0, 50.0)
    (alert,) = _find(_analyze(_ranks([50, 50, late, 50])), "straggler_rank")
    assert (alert.culprit, alert.severity) == ("rank 2", "warning")
    assert 55 <= alert.step <= 70


def test_a_rank_that_waits_for_its_data_is_named_though_all_end_together():
    result = _analyze(_ranks([90, 90, 90], waits=[2.0, 40.0, 2.0]))
    (alert,) = _find(result, "straggler_rank")
    assert (alert.culprit, alert.title) == ("rank 1", "One rank is late for its data")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "times",
    [
        [50, 50, 50, 50],
        [50, 55, 50, 52],
        [np.where(np.arange(120) % 10 == 0, 200.0, 50.0), 50, 50],
        [np.where(np.arange(120) < 60, 90.0, 50.0), 50, 50],
        [2.0, 3.0, 2.0],
        [50, 50, 90, 90],
        [50],
    ],
    ids=["equal", "a tenth", "checkpoints of one", "it is over", "too short", "two of four",
         "one rank"],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_are_about_as_fast_are_not_stragglers(times, seed):
    assert _find(_analyze(_ranks(times, seed=seed)), "straggler_rank") == []


def test_a_device_that_is_held_and_idle_is_told():
    (alert,) = _find(_analyze(_ranks([60], devices=[(3.0, 40.0)], waits=[1.0])), "idle_device")
    assert alert.severity == "warning"
    assert "not on this device" in alert.fact


def test_a_device_that_waits_for_data_says_so():
    use = np.where(np.arange(120) >= 60, 8.0, 90.0)
    whole = np.where(np.arange(120) >= 60, 200.0, 50.0)
    waits = np.where(np.arange(120) >= 60, 150.0, 1.0)
    result = _analyze(_ranks([whole], devices=[(use, 60.0)], waits=[waits]))
    (alert,) = _find(result, "idle_device")
    assert alert.step == 60
    assert "90 % before" in alert.fact
    assert "A step waits 150 ms" in alert.fact
    (cause,) = _find(result, "runtime_bottleneck_risk")
    assert alert.metadata["caused_by"] == cause.id


def test_an_idle_device_beside_busy_ones_is_named_by_its_rank():
    devices = [(95.0, 60.0), (90.0, 60.0), (5.0, None)]
    (alert,) = _find(_analyze(_ranks([50, 50, 50], devices=devices)), "idle_device")
    assert alert.culprit == "rank 2"


@pytest.mark.parametrize(
    ("times", "device"),
    [
        (60, (90.0, 60.0)),
        (60, (35.0, 60.0)),
        (60, (0.0, 0.5)),
        (5, (4.0, 60.0)),
        (60, (np.where(np.arange(120) < 20, 0.0, 90.0), 60.0)),
        (60, (np.where(np.arange(120) % 4 == 0, 90.0, 5.0), 60.0)),
        (60, (np.where(np.arange(120) >= 60, 20.0, 90.0), 60.0)),
    ],
    ids=["busy", "a small model", "a training on the processor", "short steps", "loading first",
         "now and then", "less to do"],
)  # fmt: skip
def test_a_device_that_does_what_it_can_is_not_idle(times, device):
    assert _find(_analyze(_ranks([times], devices=[device])), "idle_device") == []


# -- memory


def _memory(values):
    builder = RunBuilder().metric("train/loss", falling())
    return builder.metric("system/process/rss_bytes", np.asarray(values) * 1024.0**2)


def test_memory_that_leaks_is_told_in_recorded_figures():
    grown = 2000 + 10.0 * np.arange(200) + np.random.default_rng(0).normal(0, 20, 200)
    (alert,) = _find(_analyze(_memory(grown)), "memory_growth")
    assert alert.severity == "warning"
    assert "MiB" in alert.fact


@pytest.mark.parametrize(
    "values",
    [
        2000 + 1500 * (1 - np.exp(-np.arange(200) / 20)),
        2000 + 400 * (np.arange(200) % 40) / 40,
        2000 + np.random.default_rng(0).normal(0, 100, 200),
        np.where(np.arange(200) < 120, 2000, 4000),
        100 + 0.5 * np.arange(200),
    ],
    ids=["a cache that fills", "garbage that is collected", "noise", "one step up", "little"],
)
def test_memory_that_levels_off_is_no_leak(values):
    assert _find(_analyze(_memory(values)), "memory_growth") == []


def test_rows_of_many_ranks_together_are_as_many_as_one_may_have(monkeypatch):
    monkeypatch.setattr("quark.analysis.run_data.TABLE_ROWS", 64)
    found = _ranks([50, 50, 50, 50]).build().rank_telemetry
    assert sorted(found) == [0, 1, 2, 3]
    assert sum(rows.count for rows in found.values()) <= 64
    assert all(rows.count >= 8 for rows in found.values())


def test_inputs_that_are_drowned_by_a_bias_are_told_behind_what_only_reshapes():
    builder = RunBuilder().metric("train/loss", _flat())
    for name, kind, share in (("flatten", "Flatten", 0.4), ("fc0", "Linear", 1e-9)):
        builder.layer(name, kind, steps=PROBES, mean=0.1, std=1.0, norm=10.0,
                      dead_unit_ratio=0.0, sample_variation_ratio=share)  # fmt: skip
    (alert,) = _find(_analyze(builder), "constant_inputs")
    assert alert.culprit == "fc0"
