"""AnalyzerEngine on real runs: stored, replaced, appended, read back, explained."""

import math
import pickle
import random

import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.engine import analyze_run
from quark_core.errors import SchemaValidationError


def _log(session, *, diverges=True, count=200):
    rng = random.Random(0)
    with quark.MetricsLogger(session) as metrics:
        for step in range(count):
            loss = 2 * math.exp(-step / 30) + 0.1 + rng.gauss(0, 0.02)
            if diverges and step > count * 0.7:
                loss += 1.15 ** (step - count * 0.7)
            metrics.log("train/loss", loss, step=step)


@pytest.fixture
def session(tmp_path):
    session = quark.TrainingSession.start_run(project="p", storage_dir=tmp_path)
    yield session
    if session.status == "running":
        session.end_run()


def test_alerts_and_scores_are_stored_and_read_back(session):
    _log(session)
    analyzer = quark.AnalyzerEngine(session)
    result = analyzer.analyze()
    assert isinstance(result, quark.AnalyzerResult)
    assert (result.stored, result.generation, result.refusal) == (True, 1, None)
    assert {alert.rule_id for alert in result.alerts} >= {"divergence"}
    assert analyzer.read_alerts() == result.alerts
    assert analyzer.read_health_scores() == result.health_scores
    assert [score.score_key for score in result.health_scores] == [
        "overall", "optimization", "representation", "generalization", "runtime",
    ]  # fmt: skip
    assert len({alert.id for alert in result.alerts}) == len(result.alerts)


def test_filters_of_reads(session):
    _log(session)
    analyzer = quark.AnalyzerEngine(session)
    alerts = analyzer.analyze().alerts
    assert analyzer.read_alerts(rule_id="divergence") == tuple(
        alert for alert in alerts if alert.rule_id == "divergence"
    )
    assert analyzer.read_alerts(category="runtime") == ()
    assert analyzer.read_alerts(severity=alerts[0].severity)[0] == alerts[0]
    step = alerts[0].step
    assert alerts[0] in analyzer.read_alerts(step=step)
    assert alerts[0] not in analyzer.read_alerts(step_min=step + 1)
    assert alerts[0] not in analyzer.read_alerts(step_max=step - 1)
    assert analyzer.read_alerts(limit=1) == alerts[-1:]
    (overall,) = analyzer.read_health_scores(score_key="overall")
    assert overall.contributing_alert_ids == tuple(
        alert.id for alert in alerts if alert.severity != "info"
    )
    assert len(analyzer.read_health_scores(category="runtime")) == 1
    with pytest.raises(SchemaValidationError, match="step_min"):
        analyzer.read_alerts(step_min=-1)
    for wrong in ({"severity": "bad"}, {"category": "overall"}, {"severity": 3}):
        with pytest.raises(SchemaValidationError, match=next(iter(wrong))):
            analyzer.read_alerts(**wrong)
    for wrong in ({"score_key": "total"}, {"category": "speed"}):
        with pytest.raises(SchemaValidationError, match=next(iter(wrong))):
            analyzer.read_health_scores(**wrong)


def test_analyzing_again_replaces_and_gives_the_same_ids(session):
    _log(session)
    analyzer = quark.AnalyzerEngine(session)
    first, second = analyzer.analyze(), analyzer.analyze()
    assert second.generation == 2
    assert [alert.id for alert in first.alerts] == [alert.id for alert in second.alerts]
    assert [alert.fact for alert in first.alerts] == [alert.fact for alert in second.alerts]
    assert len(analyzer.read_alerts()) == len(second.alerts)


@pytest.mark.long
def test_analyzing_again_can_append(session):
    _log(session)
    config = quark.AnalyzerEngineConfig(replace_existing_outputs=False)
    analyzer = quark.AnalyzerEngine(session, config=config)
    first, second = analyzer.analyze(), analyzer.analyze()
    alerts = analyzer.read_alerts()
    assert alerts == first.alerts + second.alerts
    assert len({alert.id for alert in alerts}) == len(alerts)
    assert len(analyzer.analyze(replace_existing=True).alerts) == len(analyzer.read_alerts())


def test_a_run_that_has_ended_and_one_that_is_only_read(session, tmp_path):
    _log(session)
    session.end_run()
    result = quark.AnalyzerEngine(session).analyze()
    assert result.stored
    looked = quark.AnalyzerEngine(quark.open_run(session.run_id, tmp_path))
    assert looked.read_alerts() == result.alerts
    assert looked.analyze(store=True).generation == 2
    assert quark.AnalyzerEngine(session.context).read_alerts() == looked.read_alerts()


def test_a_healthy_run_gives_no_alert_and_says_what_is_not_known(session):
    _log(session, diverges=False)
    analyzer = quark.AnalyzerEngine(session)
    result = analyzer.analyze()
    assert result.alerts == ()
    scores = {score.score_key: score for score in result.health_scores}
    assert (scores["optimization"].status, scores["optimization"].word) == (
        "watch", "no problem found",
    )  # fmt: skip
    assert scores["representation"].status == "watch"
    assert scores["representation"].score == 50.0
    assert "Not known" in scores["representation"].summary
    assert "representation" in scores["overall"].summary
    explained = analyzer.explain("activation_collapse")
    assert explained.state == "no_data"
    assert explained.missing == ("layer activations",)
    assert analyzer.explain("divergence").state == "quiet"
    assert "threshold" in str(analyzer.explain("plateau"))


@pytest.mark.long
def test_an_empty_run_is_not_healthy(session):
    result = quark.AnalyzerEngine(session).analyze()
    assert result.alerts == ()
    assert {score.status for score in result.health_scores} == {"watch"}
    assert {verdict.state for verdict in result.verdicts.values()} == {"no_data"}


def test_a_session_of_another_type_and_bad_settings_are_refused(session):
    with pytest.raises(SchemaValidationError, match="session"):
        quark.AnalyzerEngine("run-1")
    with pytest.raises(SchemaValidationError, match="config"):
        quark.AnalyzerEngine(session, config=quark.AnalyzerThresholds())
    analyzer = quark.AnalyzerEngine(session)
    with pytest.raises(SchemaValidationError, match="replace_existing"):
        analyzer.analyze(replace_existing=1)
    with pytest.raises(SchemaValidationError, match="rule_id"):
        analyzer.explain("nonsense")
    with pytest.raises(SchemaValidationError, match="'nonsense' is not a rule"):
        quark.AnalyzerEngine(
            session, config=quark.AnalyzerEngineConfig(rules=("nonsense",))
        ).analyze()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "loud"}, "mode"),
        ({"thresholds": {}}, "thresholds"),
        ({"step_time_metric_keys": "system/step"}, "step_time_metric_keys"),
        ({"replace_existing_outputs": 1}, "replace_existing_outputs"),
        ({"excluded_rules": (1,)}, "excluded_rules"),
    ],
)
def test_bad_settings_name_the_field(settings, named):
    with pytest.raises(SchemaValidationError, match=named):
        quark.AnalyzerEngineConfig(**settings)


@pytest.mark.parametrize("value", [float("nan"), -1.0, "10", True])
def test_bad_thresholds_name_the_field(value):
    with pytest.raises(SchemaValidationError, match="overfitting_warning_gap"):
        quark.AnalyzerThresholds(overfitting_warning_gap=value)


def _explosive():
    builder = RunBuilder().metric("train/loss", falling())
    return builder.layer("a", summary="gradient", steps=range(0, 200, 5), norm=30.0)


def test_a_default_threshold_is_no_limit_and_a_passed_one_is():
    run = _explosive().build()
    (note,) = analyze_run(run).alerts
    assert (note.severity, note.metadata["documented_level"]) == ("info", "error")
    thresholds = quark.AnalyzerThresholds(exploding_gradient_error_norm=25.0)
    assert thresholds.passed == {"exploding_gradient_error_norm"}
    config = quark.AnalyzerEngineConfig(thresholds=thresholds)
    (alert,) = analyze_run(run, config).alerts
    assert (alert.rule_id, alert.severity, alert.culprit) == ("exploding_gradients", "error", "a")
    assert alert.metadata["hard_limit"] is True
    assert alert.evidence[0].threshold_value == 25.0


def test_the_absolute_mode_reads_the_documented_thresholds():
    config = quark.AnalyzerEngineConfig(mode="absolute")
    (alert,) = analyze_run(_explosive().build(), config).alerts
    assert (alert.rule_id, alert.severity) == ("exploding_gradients", "error")
    assert set(analyze_run(_explosive().build(), config).verdicts) == {
        "exploding_gradients", "vanishing_gradients", "stagnant_layers", "activation_collapse",
        "overfitting_onset", "runtime_bottleneck_risk",
    }  # fmt: skip


def test_the_limit_of_standing_still_tells_the_longest_stretch():
    norms = [1e-6, *[1.0] * 9, *[1e-6] * 5, *[1.0] * 5]
    run = RunBuilder().layer("a", summary="gradient", steps=range(20), norm=norms).build()
    (alert,) = analyze_run(
        run, quark.AnalyzerEngineConfig(mode="absolute", rules=("stagnant_layers",))
    ).alerts
    assert (alert.severity, alert.step) == ("error", 10)
    assert "5 probes in a row" in alert.fact


def test_a_limit_over_epochs_tells_the_epoch():
    builder = RunBuilder().metric("train/loss", [1.0] * 8, epochs=range(8))
    builder.metric("val/loss", [1.0] * 5 + [3.0] * 3, epochs=range(8))
    (alert,) = analyze_run(
        builder.build(), quark.AnalyzerEngineConfig(mode="absolute", rules=("overfitting_onset",))
    ).alerts
    assert (alert.step, alert.epoch) == (None, 5)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_few_points_are_not_healthy(count):
    result = analyze_run(RunBuilder().metric("train/loss", [2.0 - 0.1 * i for i in range(count)])
                         .build())  # fmt: skip
    assert {score.status for score in result.health_scores} == {"watch"}
    assert {score.score for score in result.health_scores} == {50.0}


def test_a_few_points_that_are_not_finite_are_no_watch():
    result = analyze_run(RunBuilder().metric("train/loss", [math.nan] * 3).build())
    assert result.health_scores[0].status == "critical"


@pytest.mark.parametrize("made", [quark.AnalyzerEngine, quark.PhaseAnalyzer])
def test_an_analyzer_belongs_to_its_process_and_its_result_does_not(session, made):
    _log(session)
    analyzer = made(session)
    with pytest.raises(TypeError, match=r"session\.context"):
        pickle.dumps(analyzer)
    result = analyzer.analyze()
    assert pickle.loads(pickle.dumps(result)).to_dict() == result.to_dict()


def test_rules_can_be_chosen():
    config = quark.AnalyzerEngineConfig(
        rules=("plateau", "divergence"), excluded_rules=("plateau",)
    )
    assert set(analyze_run(_explosive().build(), config).verdicts) == {"divergence"}


def test_the_csv_files_of_a_run_can_be_analyzed_and_keep_nothing(tmp_path):
    folder = tmp_path / "csv"
    session = quark.TrainingSession.start_run(
        project="p", storage_dir=tmp_path / "runs", backends=[f"csv:{folder}"]
    )
    _log(session)
    session.end_run()
    embedded = quark.AnalyzerEngine(session).analyze()
    opened = quark.open_run(session.run_id, tmp_path, backend=f"csv:{folder}")
    mirrored = quark.AnalyzerEngine(opened)
    result = mirrored.analyze()
    assert (result.stored, result.generation) == (False, None)
    assert "does not store outputs" in result.refusal
    assert [alert.fact for alert in result.alerts] == [alert.fact for alert in embedded.alerts]
    again = quark.AnalyzerEngine(opened.context).analyze()
    assert [alert.id for alert in again.alerts] == [alert.id for alert in result.alerts]
    with pytest.raises(quark.SessionStoreError, match="does not store outputs"):
        mirrored.read_alerts()


def test_a_backend_that_cannot_be_read_is_refused_by_name(session, tmp_path):
    with pytest.raises(SchemaValidationError, match="tensorboard"):
        quark.open_run(session.run_id, tmp_path, backend="tensorboard")
    with pytest.raises(quark.RunNotFoundError):
        quark.open_run("nothing", tmp_path, backend=f"csv:{tmp_path}")
