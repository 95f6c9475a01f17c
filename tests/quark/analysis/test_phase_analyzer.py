import json

import msgspec
import numpy as np
import pytest

import quark
from quark.analysis.config import PhaseAnalyzerConfig, PhaseAnalyzerThresholds
from quark.analysis.phases import PhaseAnalyzer
from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.runs.open_run import OpenRun
from quark_core.sessions.session import TrainingSession


def log(session, count=150, first=0):
    metrics = quark.MetricsLogger(session)
    for step in range(first, count):
        metrics.log("train/loss", 0.3 + 2 * np.exp(-step / 20), step=step, epoch=step // 50)
    return metrics


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        log(session)
        yield session


@pytest.mark.long
def test_a_running_run_is_analyzed_with_what_was_just_logged(session):
    result = PhaseAnalyzer(session).analyze()
    assert result.run_id == session.run_id
    assert result.stored
    assert result.generation == 1
    assert result.phases[-1].step_end == 149
    assert result.phases[-1].epoch_end == 2
    log(session, 200, 150)
    assert PhaseAnalyzer(session.context).analyze().phases[-1].step_end == 199


@pytest.mark.sampled
@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_what_is_stored_is_what_was_returned(tmp_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        log(session)
        running = PhaseAnalyzer(session)
        found = running.analyze()
        assert running.read_phases() == found.phases
    ended = PhaseAnalyzer(quark.open_run(session.run_id, tmp_path))
    assert ended.read_phases() == found.phases
    again = ended.analyze(store=True)
    assert again.generation == 2
    assert ended.read_phases() == PhaseAnalyzer(session).read_phases() == again.phases
    for one, two in zip(again.phases, found.phases, strict=True):
        assert msgspec.structs.replace(one, writer_id=two.writer_id) == two


@pytest.mark.long
def test_appending_keeps_and_replacing_hides_what_was_there(session):
    analyzer = PhaseAnalyzer(session)
    count = len(analyzer.analyze().phases)
    analyzer.analyze(replace_existing=False)
    assert len(analyzer.read_phases()) == 2 * count
    assert len({phase.id for phase in analyzer.read_phases()}) == 2 * count
    analyzer.analyze()
    assert len(analyzer.read_phases()) == count
    keeping = PhaseAnalyzer(session, config=PhaseAnalyzerConfig(replace_existing_outputs=False))
    keeping.analyze()
    assert len(analyzer.read_phases()) == 2 * count
    keeping.analyze(replace_existing=True)
    assert len(analyzer.read_phases()) == count


def test_phases_are_read_by_name_and_by_overlap(session):
    analyzer = PhaseAnalyzer(session)
    phases = analyzer.analyze().phases
    rapid = next(phase for phase in phases if phase.phase_name == "rapid_learning")
    assert analyzer.read_phases(phase_name="rapid_learning") == (rapid,)
    for step in (rapid.step_start, rapid.step_end):
        assert analyzer.read_phases(step=step) == (rapid,)
    place = phases.index(rapid)
    assert analyzer.read_phases(step_min=rapid.step_end) == phases[place:]
    assert analyzer.read_phases(step_max=rapid.step_start) == phases[: place + 1]
    assert analyzer.read_phases(step_min=rapid.step_end + 1) == phases[place + 1 :]
    both = {"step_min": rapid.step_end, "step_max": rapid.step_end + 1}
    assert analyzer.read_phases(**both) == phases[place : place + 2]
    assert analyzer.read_phases(limit=1) == phases[-1:]
    assert analyzer.read_phases(step=10**9) == ()
    assert analyzer.read_phases(phase_name="divergence") == ()


def test_phases_of_epochs_fit_no_bound_on_steps(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for epoch in range(30):
            metrics.log("train/loss", 0.3 + 2 * np.exp(-epoch / 5), epoch=epoch)
        analyzer = PhaseAnalyzer(session)
        phases = analyzer.analyze().phases
        assert phases[-1].epoch_end == 29
        assert analyzer.read_phases() == phases
        assert analyzer.read_phases(step_min=0) == ()


def test_a_run_without_metrics_has_no_phases_and_says_why(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        analyzer = PhaseAnalyzer(session)
        result = analyzer.analyze()
        assert result.phases == analyzer.read_phases() == ()
        assert result.stored
        assert "no training or validation loss or accuracy" in result.notes[0]


@pytest.mark.long
def test_an_analysis_that_finds_nothing_replaces_one_that_did(session):
    analyzer = PhaseAnalyzer(session)
    assert analyzer.analyze().phases
    other = PhaseAnalyzerConfig(thresholds=PhaseAnalyzerThresholds(initialization_points=10**6))
    assert len(PhaseAnalyzer(session, config=other).analyze().phases) == 1
    assert [p.phase_name for p in analyzer.read_phases()] == ["initialization_adaptation"]


@pytest.mark.long
def test_a_backend_that_only_reads_gives_a_result_that_is_not_stored(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        log(session)
    reader = CsvBackend(BackendConfig(storage_dir=tmp_path, read_only=True))
    stream = RunStream(Origin(session.run_id))
    foreign = TrainingSession(OpenRun(session.context, stream, reader, refusal="only read"))
    analyzer = PhaseAnalyzer(foreign)
    result = analyzer.analyze()
    assert not result.stored
    assert result.generation is None
    assert "CsvBackend" in result.notes[-1]
    own = PhaseAnalyzer(session).analyze()
    assert [p.summary for p in result.phases] == [p.summary for p in own.phases]
    with pytest.raises(SessionStoreError, match="does not store outputs"):
        analyzer.read_phases()


def test_a_result_is_json(session):
    result = PhaseAnalyzer(session).analyze()
    made = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert made["run_id"] == session.run_id
    assert made["stored"] is True
    assert [phase["phase_name"] for phase in made["phases"]] == [
        phase.phase_name for phase in result.phases
    ]
    assert made["phases"][0]["id"] == "phases.1-phase-0"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda a: a.read_phases(phase_name="learning"), "phase_name must be one of"),
        (lambda a: a.read_phases(phase_name=3), "phase_name must be one of"),
        (lambda a: a.read_phases(step=-1), "step must not be negative"),
        (lambda a: a.read_phases(step_min=1.5), "step_min must be"),
        (lambda a: a.read_phases(step_max=True), "step_max must be"),
        (lambda a: a.read_phases(limit="x"), "limit must be"),
        (lambda a: a.analyze(replace_existing=1), "replace_existing must be"),
    ],
)
def test_bad_arguments_are_named(session, call, told):
    with pytest.raises(SchemaValidationError, match=told):
        call(PhaseAnalyzer(session))


def test_bad_settings_are_named(session):
    with pytest.raises(SchemaValidationError, match="config must be a PhaseAnalyzerConfig"):
        PhaseAnalyzer(session, config={})
    with pytest.raises(SchemaValidationError, match="session must be"):
        PhaseAnalyzer("run")
    for arguments, told in (
        ({"thresholds": 3}, "thresholds must be"),
        ({"replace_existing_outputs": 1}, "replace_existing_outputs must be"),
        ({"train_loss_metric_keys": "loss"}, "train_loss_metric_keys must be"),
        ({"val_loss_metric_keys": (1,)}, "val_loss_metric_keys must"),
    ):
        with pytest.raises(SchemaValidationError, match=told):
            PhaseAnalyzerConfig(**arguments)
    for name in ("overfitting_min_gap", "initialization_points"):
        for value in (-1, float("nan"), float("inf"), "1", True):
            with pytest.raises(SchemaValidationError, match=f"{name} must be"):
                PhaseAnalyzerThresholds(**{name: value})
    with pytest.raises(SchemaValidationError, match="whole number"):
        PhaseAnalyzerThresholds(initialization_points=1.5)


def test_the_defaults_are_the_documented_ones():
    config = PhaseAnalyzerConfig()
    assert config.replace_existing_outputs is True
    assert config.train_loss_metric_keys == ("train/loss", "training/loss")
    assert config.val_loss_metric_keys == ("val/loss", "validation/loss")
    assert config.train_accuracy_metric_keys == ("train/accuracy", "training/accuracy", "train/acc")
    assert config.val_accuracy_metric_keys == ("val/accuracy", "validation/accuracy", "val/acc")
    assert vars(config.thresholds) | {"_passed": None} == {
        "_passed": None,
        "initialization_points": 2,
        "rapid_learning_min_relative_change": 0.18,
        "stagnation_max_relative_change": 0.01,
        "overfitting_min_gap": 0.12,
        "overfitting_min_train_relative_change": 0.015,
        "overfitting_min_validation_regression": 0.015,
        "divergence_min_relative_regression": 0.15,
        "divergence_from_best_ratio": 0.25,
    }


def test_a_threshold_counts_as_passed_when_it_was_an_argument():
    import dataclasses

    passed = PhaseAnalyzerThresholds(initialization_points=2, overfitting_min_gap=0.3)
    assert passed.passed == {"initialization_points", "overfitting_min_gap"}
    assert PhaseAnalyzerThresholds(3).passed == {"initialization_points"}
    assert PhaseAnalyzerThresholds().passed == frozenset()
    assert dataclasses.replace(passed, overfitting_min_gap=0.4).passed == {"overfitting_min_gap"}
    assert passed.limit("overfitting_min_gap") == 0.3
    assert passed.limit("divergence_from_best_ratio") is None
