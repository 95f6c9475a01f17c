"""A metric that the user names is the one that a run is judged by, from any backend."""

import numpy as np
import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.engine import analyze_run
from quark_core.config.objective import Objective, parse_objective, read_objective
from quark_core.errors import SchemaValidationError


def find_overall(run, **settings):
    result = analyze_run(run, quark.AnalyzerEngineConfig(**settings))
    return result.health_scores[0]


def log_curve(session, name, values):
    metrics = quark.MetricsLogger(session)
    for step, value in enumerate(values):
        metrics.log(name, float(value), step=step)


def test_an_unknown_metric_is_judged_where_it_is_named():
    run = RunBuilder().metric("energy", falling()).build()
    assert find_overall(run).known is False
    score = find_overall(run, objective="energy")
    assert (score.known, score.status) == (True, "healthy")
    learning = score.metadata["learning"]
    assert (learning["metric"], learning["mode"], learning["named"]) == ("energy", "min", True)
    assert "energy" in score.summary


def test_a_named_loss_that_diverges_is_seen_by_the_rules():
    rising = np.concatenate([falling(100), np.exp(np.arange(100) / 8.0)])
    run = RunBuilder().metric("energy", rising).build()
    result = analyze_run(run, quark.AnalyzerEngineConfig(objective="energy"))
    assert any(alert.severity != "info" for alert in result.alerts)
    assert result.health_scores[0].status != "healthy"


@pytest.mark.parametrize(("mode", "is_healthy"), [("max", True), ("min", False)])
def test_the_mode_says_which_way_is_better(mode, is_healthy):
    run = RunBuilder().metric("energy", -falling()).metric("loss", falling()).build()
    score = find_overall(run, objective="energy", objective_mode=mode)
    assert (score.known, score.status == "healthy") == (True, is_healthy)


def test_without_a_mode_the_name_says():
    run = RunBuilder().metric("win/score", -falling()).build()
    assert find_overall(run, objective="win/score").status == "healthy"


def test_an_objective_that_was_never_logged_is_told_and_takes_nothing_away():
    run = RunBuilder().metric("train/loss", falling()).build()
    score = find_overall(run, objective="val/lost")
    assert (score.known, score.score, score.word) == (True, 80.0, "watch")
    learning = score.metadata["learning"]
    said = "the objective val/lost was never logged; the run has train/loss"
    assert (learning["doubt"], learning["never_logged"]) == (said, "val/lost")
    score = find_overall(RunBuilder().metric("energy", falling()).build(), objective="val/lost")
    assert (score.known, score.score) == (False, 50.0)
    assert score.unknown_reason == "the objective val/lost was never logged; the run has energy"


def test_the_objective_is_kept_with_the_run_and_in_its_mirrors(tmp_path):
    with quark.start_run(
        project="p", storage_dir=tmp_path, backends="csv:mirror", config={"lr": 0.1},
        objective="energy.mean", mode="max",
    ) as session:  # fmt: skip
        log_curve(session, "energy.mean", -falling())
    for place in (None, "csv:mirror"):
        opened = quark.open_run(session.run_id, tmp_path, backend=place)
        score = quark.AnalyzerEngine(opened).analyze(store=False).health_scores[0]
        learning = score.metadata["learning"]
        assert (score.known, learning["state"], learning["doubt"]) == (True, "learned", None)
        assert learning["mode"] == "max"
    stored = session.open_run.reader.load_run(session.run_id)
    assert stored.config.values["lr"] == 0.1
    assert read_objective(stored.config.values) == Objective("energy.mean", "max")


def test_settings_come_before_what_the_run_was_started_with(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, objective="a") as session:
        log_curve(session, "a", falling())
        log_curve(session, "b", -falling())
    config = quark.AnalyzerEngineConfig(objective="b", objective_mode="min")
    engine = quark.AnalyzerEngine(session, config=config)
    assert engine.analyze().health_scores[0].metadata["learning"]["metric"] == "b"


@pytest.mark.long
def test_the_environment_names_it_too(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_OBJECTIVE", "energy:max")
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    assert read_objective(
        session.open_run.reader.load_run(session.run_id).config.values
    ) == Objective("energy", "max")
    with quark.start_run(project="p", storage_dir=tmp_path, objective="loss") as session:
        pass
    assert read_objective(
        session.open_run.reader.load_run(session.run_id).config.values
    ) == Objective("loss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "loss", "mode": "less"}, "mode must be 'min' or 'max', got 'less'"),
        ({"mode": "min"}, "mode='min' needs objective="),
        ({"objective": 3}, "objective must be a str, not int"),
        ({"objective": " "}, "objective must not be empty"),
    ],
)
def test_bad_objectives_are_refused_by_name(tmp_path, arguments, message):
    with pytest.raises(SchemaValidationError, match=message):
        quark.start_run(project="p", storage_dir=tmp_path, **arguments)


def test_a_bad_environment_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_OBJECTIVE", ":max")
    with pytest.raises(SchemaValidationError, match="QUARK_OBJECTIVE: objective must not be empty"):
        quark.start_run(project="p", storage_dir=tmp_path)


def test_a_metric_may_have_a_colon_in_its_name():
    assert parse_objective("a:b", "x") == Objective("a:b")
    assert parse_objective("a:b:max", "x") == Objective("a:b", "max")
