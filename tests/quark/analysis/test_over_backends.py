"""The analyzers say the same of a run, whichever backend it is read from."""

import math
import random

import pytest

import quark

pytest.importorskip("httptools", reason="the service stands on it")
from service_fixtures import serving


def _train(storage_dir, backends=None):
    rng = random.Random(0)
    session = quark.TrainingSession.start_run(
        project="p", storage_dir=storage_dir, backends=backends
    )
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(240):
            loss = 2 * math.exp(-step / 30) + 0.1 + rng.gauss(0, 0.02)
            metrics.log("train/loss", loss, step=step)
            if step % 10 == 9:
                late = max(0, step - 120) / 60
                metrics.log("val/loss", loss + 0.05 + late, step=step)
            wait = 60.0 if step > 160 else 1.0
            metrics.log("system/runtime/step_time_ms", 40 + wait + rng.gauss(0, 1), step=step)
            metrics.log("system/runtime/data_time_ms", wait, step=step)
    return session


def _describe(session):
    result = quark.AnalyzerEngine(session).analyze()
    alerts = [(a.rule_id, a.severity, a.culprit, a.step, a.fact) for a in result.alerts]
    scores = [(s.score_key, s.score, s.status) for s in result.health_scores]
    phases = [
        (p.phase_name, p.step_start, p.step_end)
        for p in quark.PhaseAnalyzer(session).analyze().phases
    ]
    return alerts, scores, phases


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return _describe(_train(tmp_path_factory.mktemp("embedded")))


@pytest.mark.long
def test_there_is_something_to_say(expected):
    alerts, _, phases = expected
    assert {alert[0] for alert in alerts} == {"overfitting_onset", "runtime_bottleneck_risk"}
    assert "overfitting_onset" in {phase[0] for phase in phases}


@pytest.mark.long
def test_the_journal_as_the_store(tmp_path, monkeypatch, expected):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    session = _train(tmp_path)
    assert _describe(session) == expected
    assert _describe(quark.open_run(session.run_id, tmp_path)) == expected


@pytest.mark.long
def test_the_csv_mirror(tmp_path, expected):
    session = _train(tmp_path, backends=[f"csv:{tmp_path / 'mirror'}"])
    opened = quark.open_run(session.run_id, tmp_path, backend=f"csv:{tmp_path / 'mirror'}")
    assert _describe(opened) == expected
    comparison = quark.ComparisonEngine(session).compare(opened)
    assert {diff.verdict for diff in comparison.metric_diffs} <= {"equivalent", None}


@pytest.mark.sampled
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_service(tmp_path, monkeypatch, request, store, expected):
    url = request.getfixturevalue("postgres_url") if store == "postgres" else None
    with serving(tmp_path / "server", store_url=url) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("analysts", "ingest", "read"))
        session = _train(tmp_path / "here")
        assert _describe(session) == expected
        opened = quark.open_run(session.run_id, tmp_path / "there")
        assert _describe(opened) == expected
        alerts = quark.AnalyzerEngine(opened).read_alerts()
        assert {alert.rule_id for alert in alerts} == {alert[0] for alert in expected[0]}
        comparison = quark.ComparisonEngine(session).compare(opened)
        assert {diff.verdict for diff in comparison.metric_diffs} <= {"equivalent", None}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # MLflow's own code, on SQLAlchemy's newest version
def test_the_mlflow_mirror(tmp_path, monkeypatch, expected):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "100")
    uri = f"mlflow+sqlite:///{tmp_path / 'mlflow.db'}"
    session = _train(tmp_path, backends=[uri])
    opened = quark.open_run(session.run_id, tmp_path, backend=uri)
    assert _describe(opened) == expected
    comparison = quark.ComparisonEngine(session).compare(opened)
    assert {diff.verdict for diff in comparison.metric_diffs} <= {"equivalent", None}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # as above
def test_the_same_curves_logged_to_mlflow_alone(tmp_path, expected):
    mlflow = pytest.importorskip("mlflow")
    session = _train(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("p", str(tmp_path / "a"))).info.run_id
    points = [
        mlflow.entities.Metric(r.metric_key, r.value, r.time_us // 1000, r.step)
        for r in quark.MetricsLogger(session).read()
    ]
    for begin in range(0, len(points), 1000):
        client.log_batch(run_id, metrics=points[begin : begin + 1000])
    client.set_terminated(run_id)
    opened = quark.open_run(run_id, tmp_path, backend=f"mlflow+{uri}")
    assert _describe(opened) == expected
