"""The documented thresholds: alerts in the absolute mode, notes in the adaptive one."""

import numpy as np
import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.engine import analyze_run
from quark.analysis.rule import Limit

STEP_TIME = "system/runtime/step_time_ms"


def learned():
    builder = RunBuilder().metric("train/loss", falling())
    return builder.metric("val/loss", falling(20, noise=0.01), steps=range(9, 209, 10))


def slow(milliseconds):
    return learned().metric(STEP_TIME, np.full(200, milliseconds))


def analyze(builder, **settings):
    return analyze_run(builder.build(), quark.AnalyzerEngineConfig(**settings))


@pytest.mark.parametrize(
    ("milliseconds", "severity", "level"),
    [(200.0, None, None), (300.0, "warning", 250.0), (600.0, "error", 500.0),
     (1500.0, "critical", 1000.0)],
)  # fmt: skip
def test_the_absolute_mode_is_as_the_guide_says(milliseconds, severity, level):
    alerts = analyze(slow(milliseconds), mode="absolute").alerts
    found = [(a.rule_id, a.severity, a.evidence[0].threshold_value) for a in alerts]
    assert found == ([] if severity is None else [("runtime_bottleneck_risk", severity, level)])


def test_an_error_level_that_is_crossed_is_a_note_with_its_number():
    result = analyze(slow(600.0))
    (note,) = result.alerts
    assert (note.rule_id, note.severity) == ("runtime_bottleneck_risk", "info")
    assert note.metadata["documented_level"] == "error"
    assert "hard_limit" not in note.metadata  # nobody has set it
    assert "600" in note.fact
    assert "documented error level of 500" in note.inference
    assert note.evidence[0].threshold_value == 500.0


def test_a_note_is_no_firing_and_costs_no_points():
    result = analyze(slow(600.0))
    assert result.verdicts["runtime_bottleneck_risk"].state == "quiet"
    overall, *parts = result.health_scores
    assert overall.score == 100.0
    assert {part.score for part in parts if part.known} == {100.0}
    assert overall.contributing_alert_ids == ()


@pytest.mark.parametrize("milliseconds", [200.0, 300.0])
def test_below_the_error_level_there_is_no_note(milliseconds):
    assert analyze(slow(milliseconds)).alerts == ()


def test_layers_that_cross_the_same_level_are_one_note():
    builder = learned()
    for name in ("a", "b", "c"):
        builder.layer(name, summary="gradient", steps=range(0, 200, 5), norm=30.0)
    (note,) = analyze(builder).alerts
    assert (note.culprit, note.metadata["affected"]) == ("a", ["b", "c"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"thresholds": quark.AnalyzerThresholds(runtime_error_step_time_ms=500.0)},
        {"thresholds": quark.AnalyzerThresholds(runtime_warning_data_fraction=0.4)},
        {"thresholds": quark.AnalyzerThresholds(runtime_warning_jitter_ratio=0.1)},
    ],
)
def test_one_curve_gives_one_alert_for_one_thing(settings):
    times = np.full(200, 600.0)
    times[100:] = 1800.0
    builder = learned().metric(STEP_TIME, times)
    builder.metric("system/runtime/data_time_ms", times * np.repeat([0.1, 0.9], 100))
    dead = np.repeat([0.0, 1.0], 20)
    builder.layer("fc", steps=range(0, 200, 5), std=1.0 - dead, dead_unit_ratio=dead, norm=1.0)
    alerts = analyze(builder, **settings).alerts
    names = [(alert.rule_id, alert.culprit) for alert in alerts]
    assert ("runtime_bottleneck_risk", STEP_TIME) in names
    assert len(names) == len(set(names))


def test_a_limit_is_part_of_what_the_rule_has_found_by_itself():
    times = np.repeat([600.0, 1800.0], [103, 100])  # the first three warm up
    thresholds = quark.AnalyzerThresholds(runtime_critical_step_time_ms=1000.0)
    (own,) = analyze(learned().metric(STEP_TIME, times)).alerts
    (alert,) = analyze(learned().metric(STEP_TIME, times), thresholds=thresholds).alerts
    assert (alert.title, alert.severity) == (own.title, "critical")
    assert alert.fact.startswith(own.fact)
    assert "1200" in alert.fact
    assert alert.metadata["hard_limit"] is True
    assert alert.evidence[-1].threshold_value == 1000.0


def test_a_value_is_beyond_from_the_first_level_on_whatever_its_severity():
    gap = np.linspace(0.0, 0.5, 21)
    builder = RunBuilder().metric("train/loss", np.full(21, 1.0)).metric("val/loss", 1.0 + gap)
    thresholds = quark.AnalyzerThresholds(overfitting_critical_gap=0.1, overfitting_min_points=1)
    settings = {"mode": "absolute", "rules": ("overfitting_onset",), "thresholds": thresholds}
    (alert,) = analyze(builder, **settings).alerts
    assert (alert.severity, alert.step) == ("critical", int(np.argmax(gap >= 0.1)))
    reached = [("warning", 1.0), ("critical", 2.0)]
    falling_limit = Limit("loss", "level", title="", check="", falls=True)
    assert falling_limit.is_beyond(np.array([3.0, 2.0, 1.0]), reached).tolist() == [0, 1, 1]
