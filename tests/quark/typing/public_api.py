"""What a type checker must see in the public API; read by mypy, never run."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import quark


def use(session: quark.TrainingSession) -> None:
    assert_type(session.run_id, str | None)
    assert_type(session.reload(), quark.RunContext)
    assert_type(session.add_log("x"), quark.EventRecord)
    metrics = quark.MetricsLogger(session)
    assert_type(metrics.log("m", np.float32(1.0).item(), step=0), quark.MetricRecord)
    assert_type(metrics.read(), tuple[quark.MetricRecord, ...])
    assert_type(metrics.flush(), tuple[quark.MetricRecord, ...])
    assert_type(metrics.columns()["value"], NDArray[Any])
    with quark.EventLogger(session) as events:
        assert_type(events, quark.EventLogger)
        assert_type(events.read(), tuple[quark.EventRecord, ...])
    assert_type(session.end_run("failed"), quark.RunContext)
    session.end_run("lost")  # type: ignore[arg-type]
    metrics.log("m", "high", step=0)  # type: ignore[call-overload]
    metrics.log("m", 1.0, steps=0)  # type: ignore[call-overload]
    metrics.log("m", step=0)  # type: ignore[call-overload]
    metrics.log({"m": 1.0}, 3)  # type: ignore[call-overload]
    metrics.log({"m": {"a": 1.0}}, step=0)
    with session.step(3) as scope:
        assert_type(scope.step, int | None)
    session.config.update({"lr": 0.1}, seed=1)
    session.config["lr"] = 0.2
    metrics.read()[0].value = 2.0  # type: ignore[misc]


def analyze(session: quark.TrainingSession) -> None:
    thresholds = quark.AnalyzerThresholds(exploding_gradient_warning_norm=20.0)
    config = quark.AnalyzerEngineConfig(thresholds=thresholds, val_loss_metric_keys=("v/l",))
    analyzer = quark.AnalyzerEngine(session, config=config)
    result = analyzer.analyze(replace_existing=False)
    assert_type(result, quark.AnalyzerResult)
    assert_type(result.alerts[0].evidence, tuple[quark.EvidenceRecord, ...])
    assert_type(result.to_dict(), dict[str, Any])
    assert_type(analyzer.read_alerts(severity="error", step_min=3), tuple[quark.AlertRecord, ...])
    assert_type(analyzer.read_health_scores(), tuple[quark.HealthScoreRecord, ...])
    phases = quark.PhaseAnalyzer(
        session,
        config=quark.PhaseAnalyzerConfig(
            thresholds=quark.PhaseAnalyzerThresholds(initialization_points=3)
        ),
    )
    assert_type(phases.analyze(), quark.PhaseAnalysisResult)
    assert_type(phases.read_phases(step=3), tuple[quark.PhaseRecord, ...])
    target = quark.MetricTargetSpec("val/accuracy", 0.8, "at_least")
    engine = quark.ComparisonEngine(
        session, config=quark.ComparisonEngineConfig(metric_targets=(target,))
    )
    assert_type(engine.compare([session, "a"], baseline=True), quark.RunComparisonResult)
    assert_type(engine.compare_to_baseline("a"), quark.RunComparisonResult)
    assert_type(quark.ComparisonEngine.compare_runs(session, "a"), quark.RunComparisonResult)
    with quark.monitor(session, on_alert=print, halt_on="error") as monitor:
        assert_type(monitor.alerts, tuple[quark.AlertRecord, ...])
    quark.monitor(session, halt_on="info")  # type: ignore[arg-type]
    quark.MetricTargetSpec("a", 1.0, "above")  # type: ignore[arg-type]
    quark.AnalyzerEngineConfig(mode="strict")  # type: ignore[arg-type]
    quark.AnalyzerEngine(session, config)  # type: ignore[call-arg]
