"""No run, however odd, makes a rule fail, and odd data alone raises no alarm."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_builder import RunBuilder, falling
from tiers import count_examples

from quark.analysis.engine import analyze_run

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
FIGURES = st.one_of(st.none(), FLOATS)


def _check(builder):
    result = analyze_run(builder.build())
    failed = [v.reason for v in result.verdicts.values() if v.reason.startswith("the rule failed")]
    assert failed == []
    for alert in result.alerts:
        for piece in alert.evidence:
            for value in (piece.observed_value, piece.threshold_value):
                assert value is None or math.isfinite(value)
    for score in result.health_scores:
        assert 0.0 <= score.score <= 100.0
    return result


def _loss(values, **where):
    return RunBuilder().metric("train/loss", values, **where)


@pytest.mark.parametrize(
    "builder",
    [
        RunBuilder(),
        _loss([1.0]),
        _loss([1.0, 0.5]),
        _loss([0.0] * 100),
        _loss([1e300, 1e-300] * 50),
        _loss(falling(), steps=[5] * 200),
        _loss(falling(), steps=[step // 3 for step in range(200)]),
        _loss(falling(), steps=[step if step < 100 else step + 10**9 for step in range(200)]),
        _loss(falling(), steps=list(range(200, 0, -1))),
        _loss(falling(20), epochs=list(range(20))),
        _loss(-falling()),
        _loss(1e-5 * falling()),
        _loss(1e6 * falling()),
    ],
    ids=[
        "empty", "one point", "two points", "zeros", "extremes", "one step", "several a step",
        "gap", "backwards", "epochs", "negative", "tiny", "huge",
    ],
)  # fmt: skip
def test_odd_losses_give_no_error(builder):
    _check(builder)


@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e6, 1e30])
def test_the_unit_of_the_loss_decides_nothing(scale):
    healthy = _check(_loss(scale * falling()))
    assert healthy.alerts == ()
    broken = falling()
    broken[120:] += np.linspace(0, 3, 80)
    ids = [alert.rule_id for alert in _check(_loss(scale * broken)).alerts]
    assert ids == [alert.rule_id for alert in _check(_loss(broken)).alerts]
    assert "divergence" in ids


def test_epochs_and_steps_are_read_together():
    steps = list(range(400))
    builder = RunBuilder().metric(
        "train/loss", falling(400), steps=steps, epochs=[step // 20 for step in steps]
    )
    validation = [2.0 - 0.15 * i if i < 8 else 0.95 + 0.1 * (i - 8) for i in range(20)]
    builder.metric("val/loss", validation, epochs=list(range(20)))
    (alert,) = _check(builder).alerts
    assert alert.rule_id == "overfitting_onset"
    assert 160 <= alert.step <= 260


@settings(max_examples=count_examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    loss=st.lists(FLOATS, max_size=60),
    validation=st.lists(FLOATS, max_size=20),
    times=st.lists(FLOATS, max_size=60),
)
def test_any_metrics(loss, validation, times):
    builder = _loss(loss).metric("val/loss", validation).metric("val/accuracy", validation)
    builder.metric("system/runtime/step_time_ms", times)
    builder.metric("system/runtime/data_time_ms", times[: len(times) // 2])
    _check(builder.metric("train/grad_norm", loss))


@settings(max_examples=count_examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_figures_of_layers_and_parameters(data):
    builder = _loss(data.draw(st.lists(FLOATS, max_size=40)))
    names = ("mean", "std", "norm", "dead_unit_ratio", "saturation_ratio", "zero_ratio")
    names += ("sample_variation_ratio",)
    for number in range(data.draw(st.integers(0, 4))):
        steps = sorted(data.draw(st.lists(st.integers(0, 100), max_size=12)))
        for summary in ("activation", "gradient"):
            figures = {
                name: data.draw(st.lists(FLOATS, min_size=len(steps), max_size=len(steps)))
                for name in names
            }
            builder.layer(f"layers.{number}", summary=summary, steps=steps, **figures)
        builder.parameter(
            f"layers.{number}.weight", steps=steps,
            requires_grad=data.draw(st.booleans()),
            in_optimizer=data.draw(st.one_of(st.none(), st.booleans())),
            **{
                name: data.draw(st.lists(FLOATS, min_size=len(steps), max_size=len(steps)))
                for name in ("value_norm", "gradient_norm", "update_norm",
                             "update_to_parameter_ratio")
            },
        )  # fmt: skip
    _check(builder)


@settings(max_examples=count_examples(10), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_same_records_give_the_same_result(seed):
    def build():
        loss = falling(120, seed=seed)
        loss[80:] += np.linspace(0, 4, 40)
        return analyze_run(_loss(loss).build()).to_dict()

    assert build() == build()
