"""Rules over batch diagnostics and telemetry of real runs."""

import random

import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.engine import analyze_run
from quark_core.records import SystemTelemetryRecord
from quark_core.records.columns import Columns


@pytest.fixture
def session(tmp_path):
    with quark.TrainingSession.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


def _find(session, rule_id):
    analyzer = quark.AnalyzerEngine(session)
    return [a for a in analyzer.analyze().alerts if a.rule_id == rule_id], analyzer


def _log(session, *, hard, rare):
    rng = random.Random(0)
    with quark.DataDiagnostics(session) as diagnostics:
        for step in range(300):
            ids = rng.sample(range(100), 4)
            loss = 1.0 + rng.gauss(0, 0.02) + (0.8 if hard and 7 in ids else 0.0)
            labels = ["cat"] * 3 + ["dog" if not rare or step % 50 == 0 else "cat"]
            diagnostics.log_batch(loss, step=step, sample_ids=ids, labels=labels)


def test_a_sample_whose_batches_are_always_hard_is_named(session):
    _log(session, hard=True, rare=False)
    (alert,), _ = _find(session, "hard_data")
    assert alert.severity == "info"
    assert alert.evidence[0].source == "7"


def test_samples_that_are_alike_are_not(session):
    _log(session, hard=False, rare=False)
    alerts, analyzer = _find(session, "hard_data")
    assert alerts == []
    assert analyzer.explain("hard_data").state == "quiet"
    assert analyzer.explain("class_imbalance").state == "quiet"


@pytest.mark.long
def test_a_class_that_is_hardly_ever_seen_is_named(session):
    _log(session, hard=False, rare=True)
    (alert,), _ = _find(session, "class_imbalance")
    assert (alert.severity, alert.culprit) == ("info", "dog")


def _watched(gpu_percent, cpu_percent):
    builder = RunBuilder().metric("train/loss", falling())
    records = [
        SystemTelemetryRecord(
            "run-a", "writer-a", 1, 0, step, 1_767_225_600_000_000 + step, "step", step,
            cpu_usage_percent=cpu_percent, gpu_utilization_percent=gpu_percent,
        )
        for step in range(20)
    ]  # fmt: skip
    builder.records["telemetry"] = records
    assert Columns.from_records("telemetry", records).count == 20
    return analyze_run(builder.build())


def test_a_device_that_waits_for_a_busy_processor():
    (alert,) = _watched(15.0, 97.0).alerts
    assert (alert.rule_id, alert.severity) == ("data_bound", "info")
    assert _watched(90.0, 97.0).alerts == ()
    assert _watched(15.0, 20.0).verdicts["data_bound"].state == "quiet"
