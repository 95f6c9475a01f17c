"""What analyzers find, in a real MLflow: while the run is open, after its end, and by hand."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest

import quark
from quark.analysis import outputs
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.outputs import open_analysis
from quark.analysis.phases import PhaseAnalyzer
from quark_core.records import AlertRecord, PhaseRecord
from quark_core.records.query import Query
from quark_core.runs import recovery

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, of its libraries


@pytest.fixture
def train(tmp_path, project, monkeypatch):
    """A run whose loss is lost in the middle; still open."""
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")

    def start(uri, count=300):
        session = quark.start_run(
            project=project,
            storage_dir=tmp_path,
            backends=f"mlflow:{uri}?quark=full",
            config={"lr": 0.1},
        )
        metrics = quark.MetricsLogger(session)
        for step in range(count):
            metrics.log("train/loss", 1 / (step + 1) if step < 200 else float("nan"), step=step)
        return session

    return start


def find_the_run(mlflow, uri, project):
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def select_tags(run, start):
    return {key: text for key, text in run.data.tags.items() if key.startswith(start)}


def read_back(session, uri, kind):
    mirrored = quark.open_run(
        session.run_id, session.context.storage_dir, backend=f"mlflow:{uri}?quark=full"
    )
    return mirrored.open_run.read(kind, Query(all_attempts=True)).to_records()


def alert(rule_id, step=5):
    texts = ("Title", "Summary.", "Fact.", "Inference.")
    return AlertRecord(None, "", 0, 0, 0, 10**15, rule_id, "runtime", "error", *texts, step)


def phase(name):
    return PhaseRecord(None, "", 0, 0, 0, 10**15, name, name.title(), "", 0, 9)


@pytest.mark.long
def test_they_are_in_mlflow_when_the_run_has_ended(mlflow, server, train, project):
    with train(server.uri) as session:
        result = AnalyzerEngine(session).analyze()
        phases = PhaseAnalyzer(session).analyze().phases
    assert result.alerts
    assert phases
    client, found = find_the_run(mlflow, server.uri, project)
    assert found.info.status == "FINISHED"
    for one in result.alerts:
        assert json.loads(found.data.tags[f"quark.alert.{one.rule_id}"]) == one.to_dict()
        (point,) = client.get_metric_history(found.info.run_id, f"quark/alerts/{one.rule_id}")
        assert (point.step, point.timestamp) == (one.step or 0, one.time_us // 1000)
    for score in result.health_scores:
        told = found.data.tags[f"quark.health.{score.score_key}"]
        drawn = found.data.metrics.get(f"quark/health/{score.score_key}")
        if score.known:
            assert (told, drawn) == (score.status, pytest.approx(score.score))
        else:
            assert (told, drawn) == ("not known", None)
    names = [one["phase_name"] for one in json.loads(found.data.tags["quark.phases"])]
    assert names == [one.phase_name for one in phases]
    assert read_back(session, server.uri, "alert") == result.alerts
    assert read_back(session, server.uri, "phase") == phases


@pytest.mark.long
def test_after_the_end_state_and_time_of_the_mlflow_run_stay(mlflow, server, train, project):
    session = train(server.uri)
    session.end_run("failed")
    _, before = find_the_run(mlflow, server.uri, project)
    assert select_tags(before, "quark.health.") == {}
    result = AnalyzerEngine(quark.open_run(session.run_id, session.context.storage_dir)).analyze(
        store=True
    )
    _, after = find_the_run(mlflow, server.uri, project)
    assert (after.info.status, after.info.end_time) == ("FAILED", before.info.end_time)
    assert after.data.tags["quark.status"] == "failed"
    assert len(select_tags(after, "quark.health.")) == len(result.health_scores)
    assert read_back(session, server.uri, "alert") == result.alerts
    assert list(recovery.find_folders(session.context.storage_dir)) == []


@pytest.mark.long
def test_the_command_sends_them_too(mlflow, server, train, project):
    with train(server.uri) as session:
        pass
    root = session.context.storage_dir
    for _ in range(2):
        command = [sys.executable, "-m", "quark", "analyze", session.run_id, "-d", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
        assert (done.returncode, done.stderr) == (0, "")
    _, found = find_the_run(mlflow, server.uri, project)
    assert select_tags(found, "quark.generation.") == {
        "quark.generation.analyzer": "2",
        "quark.generation.phases": "2",
    }
    assert found.info.status == "FINISHED"
    scores = read_back(session, server.uri, "health_score")
    assert {one.writer_id for one in scores} == {"analyzer.1", "analyzer.2"}
    command = [sys.executable, "-m", "quark", "mirror", "verify", session.run_id, "-d", str(root)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)[0]["equal"]


@pytest.mark.long
def test_tags_show_the_newest_generation_only(mlflow, server, train, project):
    with train(server.uri) as session:
        pass
    target = open_analysis(session)
    target.write("analyzer", True, {"alert": [alert("first"), alert("second")]})
    target.write("other", True, {"alert": [alert("third")]})
    _, found = find_the_run(mlflow, server.uri, project)
    assert set(select_tags(found, "quark.alert.")) == {
        "quark.alert.first",
        "quark.alert.second",
        "quark.alert.third",
    }
    target.write("analyzer", True, {"alert": [alert("second", step=7)]})
    client, found = find_the_run(mlflow, server.uri, project)
    tags = select_tags(found, "quark.alert.")
    assert set(tags) == {"quark.alert.second", "quark.alert.third"}
    assert json.loads(tags["quark.alert.second"])["step"] == 7
    # What keeps rows keeps all.
    points = client.get_metric_history(found.info.run_id, "quark/alerts/second")
    assert sorted(point.step for point in points) == [5, 7]
    assert {one.writer_id for one in read_back(session, server.uri, "alert")} == {
        "analyzer.1",
        "analyzer.2",
        "other.1",
    }


@pytest.mark.long
def test_an_older_generation_that_comes_late_takes_no_tag(
    mlflow, server, train, project, monkeypatch
):
    with train(server.uri) as session:
        pass
    target = open_analysis(session)
    root = session.context.storage_dir
    target.write("phases", True, {"phase": [phase("stagnation")]})
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "deliver_outputs", lambda *_: None)
        target.write("phases", True, {"phase": [phase("divergence")]})
    journal = session.run_path / "journal" / "phases.2"
    journal.rename(root / "late")
    target.write("phases", True, {"phase": [phase("rapid_learning")]})
    for _ in range(2):  # the second time as after a process that died before its own mark
        shutil.copytree(root / "late", journal)
        recovery.sync(root)
        client, found = find_the_run(mlflow, server.uri, project)
        (shown,) = json.loads(found.data.tags["quark.phases"])
        assert shown["phase_name"] == "rapid_learning"
        names = [one.phase_name for one in read_back(session, server.uri, "phase")]
        assert sorted(names) == ["divergence", "rapid_learning", "stagnation"]
        assert len(client.get_metric_history(found.info.run_id, "quark/phase_index")) == 1


@pytest.mark.long
def test_a_server_that_is_down_gets_them_by_sync(mlflow, mortal_server, train, project, caplog):
    with train(mortal_server.uri) as session:
        pass
    mortal_server.kill()
    with caplog.at_level(logging.WARNING, logger="quark"):
        result = AnalyzerEngine(session).analyze()
    assert result.stored
    assert "quark sync" in caplog.text
    mortal_server.start()
    for _ in range(2):
        assert all(lane.state == "delivered" for lane in recovery.sync(session.context.storage_dir))
    client, found = find_the_run(mlflow, mortal_server.uri, project)
    assert found.info.status == "FINISHED"
    for one in result.alerts:
        name = f"quark/alerts/{one.rule_id}"
        assert len(client.get_metric_history(found.info.run_id, name)) == 1
    assert read_back(session, mortal_server.uri, "alert") == result.alerts


@pytest.mark.long
def test_where_the_mlflow_run_was_deleted_the_new_one_is_ended(mlflow, server, train, project):
    session = train(server.uri)
    session.end_run("interrupted")
    client, before = find_the_run(mlflow, server.uri, project)
    client.delete_run(before.info.run_id)
    AnalyzerEngine(session).analyze()
    _, found = find_the_run(mlflow, server.uri, project)
    assert found.info.run_id != before.info.run_id
    assert (found.info.status, found.info.end_time) == ("KILLED", before.info.end_time)
    assert found.data.params == {"lr": "0.1"}
    assert select_tags(found, "quark.health.")
