"""Runs opened from MLflow: those that Quark mirrored, and those that never saw it."""

import dataclasses
import json
import math

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_backends.mlflow.reader import parse_param
from quark_core.errors import (
    InvalidRunStateError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records.query import Query
from quark_core.testing.fakes import BatchMaker

pytestmark = pytest.mark.filterwarnings(
    "ignore:metric .* breaks Quark's naming rule:RuntimeWarning"
)


def train(tmp_path, server, project, losses, **arguments):
    backends = f"mlflow:{server.uri}?quark=full"
    session = quark.start_run(project=project, storage_dir=tmp_path, backends=backends, **arguments)
    with session, quark.MetricsLogger(session) as metrics:
        for step, loss in enumerate(losses):
            metrics.log("train/loss", loss, step=step, description="Cross entropy.")
            metrics.log("val/AR@100", loss / 2, step=step, epoch=step // 10)
        metrics.log("by_epoch", math.inf, epoch=3, metadata={"k": [1]})
        session.add_log("half way", step=5)
    return session


@pytest.mark.long
def test_our_run_is_read_as_the_store_has_it(tmp_path, server, project, find_runs):
    session = train(
        tmp_path, server, project, [1.0, math.nan, 0.5], config={"a": {"b": 1}}, tags=["x@y"]
    )
    (run,) = find_runs()
    uri = f"mlflow:{server.uri}?quark=full"
    for run_id in (session.run_id, run.info.run_id):
        opened = quark.open_run(run_id, tmp_path, backend=uri)
        assert opened.run_id == session.run_id
        for kind in ("metric", "event"):
            ours = session.open_run.read(kind, Query()).to_records()
            theirs = opened.open_run.read(kind, Query()).to_records()
            assert repr(theirs) == repr(ours)
        assert opened.status == "completed"
        assert opened.context.run.tags == ("x@y",)
        stored = opened.open_run.reader.load_run(session.run_id)
        assert stored.config.values == {"a": {"b": 1}}
        assert stored.environment is not None
    read = quark.MetricsLogger(opened).read(metric_key="val/AR@100")
    assert [record.value for record in read if math.isfinite(record.value)] == [0.5, 0.25]
    assert [record.epoch for record in read] == [0] * len(read)
    with pytest.raises(InvalidRunStateError, match="reading only"):
        quark.MetricsLogger(opened).log("m", 1.0, step=0)


@pytest.mark.long
def test_a_resumed_run_hides_what_it_did_again(tmp_path, server, project):
    session = train(tmp_path, server, project, [3.0, 2.0, 1.0])
    uri = f"mlflow:{server.uri}?quark=full"
    again = quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends=uri, from_step=1, reopen=True
    )
    with again, quark.MetricsLogger(again) as metrics:
        metrics.log("train/loss", 0.5, step=1)
    opened = quark.open_run(session.run_id, tmp_path, backend=uri)
    metrics = quark.MetricsLogger(opened)
    assert [r.value for r in metrics.read(metric_key="train/loss")] == [3.0, 0.5]
    assert len(metrics.read(metric_key="train/loss", all_attempts=True)) == 4


@pytest.mark.long
def test_artifacts_are_read_back(tmp_path, server, project):
    session = quark.start_run(
        project=project, storage_dir=tmp_path, backends=f"mlflow:{server.uri}?quark=full"
    )
    with session:
        artifacts = quark.ArtifactStore(session)
        artifacts.store("report", "report", {"a": 1}, step=3)
        artifacts.store("blob", "blob", b"\x00\x01", step=3)
    opened = quark.open_run(session.run_id, tmp_path, backend=f"mlflow:{server.uri}?quark=full")
    artifacts = quark.ArtifactStore(opened)
    loaded = {record.artifact_key: artifacts.load(record) for record in artifacts.read()}
    assert loaded == {"report": {"a": 1}, "blob": b"\x00\x01"}


@pytest.mark.long
def test_a_run_that_never_saw_quark(tmp_path, server, project, foreign):
    run, parent = foreign
    opened = quark.open_run(run.info.run_id, tmp_path, backend=f"mlflow:{server.uri}?quark=full")
    assert opened.status == "interrupted"
    record = opened.context.run
    assert (record.name, record.notes, record.tags) == ("trial", "Notes.", ("best", "team=vision"))
    assert record.parent_run_id == record.lineage_root_run_id == parent.info.run_id
    assert opened.project_name == project
    stored = opened.open_run.reader.load_run(run.info.run_id)
    assert stored.config.values == {
        "flag": True,
        "layers": [1, 2],
        "lr": 0.1,
        "model.depth": 18,
        "name": "resnet",
        "none": None,
        "version": "007",
    }
    assert stored.environment.values["mlflow"]["tags"]["team"] == "vision"
    metrics = quark.MetricsLogger(opened)
    read = metrics.read(metric_key="train loss")
    assert [(r.step, r.epoch, r.time_us) for r in read] == [
        (step, None, (10**12 + step) * 1000) for step in range(200)
    ]
    (odd,) = metrics.read(metric_key="val/acc", include_non_finite=True)
    assert (odd.step, odd.metadata) == (None, {"mlflow_step": -3})
    assert [r.step for r in metrics.read(metric_key="train loss", step_min=3, limit=2)] == [
        198,
        199,
    ]
    series = quark.series(opened, "train loss", max_points=10)
    assert series.points == 200


@pytest.mark.long
def test_it_is_analyzed_compared_and_exported(tmp_path, server, project, foreign):
    run, _ = foreign
    uri = f"mlflow:{server.uri}?quark=full"
    opened = quark.open_run(uri, run.info.run_id)
    result = quark.AnalyzerEngine(opened).analyze()
    assert {score.score_key for score in result.health_scores} >= {"overall"}
    with quark.start_run(project=project, storage_dir=tmp_path, config={"lr": 0.2}) as ours:
        metrics = quark.MetricsLogger(ours)
        for step in range(200):
            metrics.log("train loss", 2 * math.exp(-step / 30) + 0.1, step=step)
    comparison = quark.ComparisonEngine(ours).compare(opened)
    (diff,) = [one for one in comparison.metric_diffs if "loss" in one.metric_key]
    # One run a side says nothing of the deviation between seeds.
    assert (diff.verdict, diff.last.difference) == ("inconclusive", pytest.approx(0, abs=1e-3))
    target = tmp_path / "out"
    told = CliRunner().invoke(
        cli,
        ["export", run.info.run_id, "--format", "jsonl", "-o", str(target), "--backend", uri],
    )
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in (target / "metric.jsonl").read_text().splitlines()]
    assert len(lines) == 201
    assert json.loads((target / "run.json").read_text())["run"]["name"] == "trial"


@pytest.mark.long
def test_runs_of_a_project_are_listed(tmp_path, server, project, foreign, definition, config):
    session = train(tmp_path, server, project, [1.0], config={"lr": 0.3})
    reader = definition.open(config)
    found = reader.list_runs(project=project)
    assert [stored.run.id for stored in found] == [
        session.run_id,
        foreign[0].info.run_id,
        foreign[1].info.run_id,
    ]
    assert found[0].config.values == {"lr": 0.3}
    assert (found[0].state, found[1].state, found[2].state) == (
        "completed",
        "interrupted",
        "running",
    )
    assert [stored.run.id for stored in reader.list_runs(project=project, limit=1)] == [
        session.run_id
    ]
    assert reader.list_runs(project="absent") == []


@pytest.mark.long
def test_points_that_came_after_the_last_upload_are_read_too(definition, config, tmp_path, server):
    backend = definition.open(config)
    maker = BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 0.0), ("m", 0, 0.0), ("m", 1, math.inf)))
    backend.write(maker.metrics(("e", None, 1.0), epoch=4))
    backend._writing.send_files()
    # As if the process were killed before the next upload.
    backend.write(maker.metrics(("m", 2, 2.0), ("m", 0, 0.0)))
    backend.write(maker.metrics(("e", None, 2.0), epoch=5))
    reader = definition.open(dataclasses.replace(config, read_only=True))
    columns = reader.read("run0", "metric", Query())
    rows = zip(
        columns["metric_key"].tolist(),
        columns["step"].tolist(),
        columns["epoch"].tolist(),
        columns["value"].tolist(),
        strict=True,
    )
    assert sorted(map(str, rows)) == sorted(
        map(
            str,
            [
                ("m", 0, -1, 0.0),
                ("m", 0, -1, 0.0),
                ("m", 0, -1, 0.0),
                ("m", 1, -1, math.inf),
                ("m", 2, -1, 2.0),
                ("e", -1, 4, 1.0),
                ("e", -1, 5, 2.0),
            ],
        )
    )
    assert len(set(columns["sequence"].tolist())) == 7


@pytest.mark.long
def test_without_artifacts_the_points_are_read(definition, config, client, find_runs):
    backend = definition.open(config)
    maker = BatchMaker("run0")

    def refuse(*_):
        raise PermissionError("planted")

    backend._server._client.log_artifact = refuse
    backend.write(maker.start(tags=["t"]))
    backend.write(maker.metrics(("a/x", 3, 0.5), ("b", 1, 1.5)))
    backend.write(maker.lifecycle(("status", {"status": "failed"})))
    reader = definition.open(dataclasses.replace(config, read_only=True))
    columns = reader.read("run0", "metric", Query())
    assert sorted(columns["metric_key"].tolist()) == ["a/x", "b"]
    stored = reader.load_run("run0")
    assert (stored.run.status, stored.run.tags, stored.config.values) == (
        "failed",
        ("t",),
        {"lr": 0.1},
    )
    assert reader.read("run0", "event", Query()).count == 0


def test_what_cannot_be_opened_is_said(tmp_path, server, project, monkeypatch):
    with pytest.raises(RunNotFoundError, match="absent"):
        quark.open_run("absent", tmp_path, backend=f"mlflow:{server.uri}?quark=full")
    missing = tmp_path / "none.db"
    with pytest.raises(SessionStoreError, match="no MLflow store"):
        quark.open_run("absent", tmp_path, backend=f"mlflow+sqlite:///{missing}")
    assert not missing.exists()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(SessionStoreError, match="cannot be reached"):
        quark.open_run("absent", tmp_path, backend="mlflow+http://127.0.0.1:9")
    with pytest.raises(SchemaValidationError):
        quark.open_run("", tmp_path, backend=f"mlflow:{server.uri}?quark=full")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # MLflow's own code, on SQLAlchemy's newest version
def test_a_store_in_a_file(tmp_path, project, mlflow, monkeypatch):
    """No server: MLflow in this process, and nothing in the working directory."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'runs' / 'x.db'}"
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "120")
    with quark.start_run(
        project=project, storage_dir=tmp_path / "root", backends=f"mlflow:{uri}?quark=full"
    ) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=1)
    opened = quark.open_run(session.run_id, tmp_path, backend=f"mlflow:{uri}?quark=full")
    assert [r.value for r in quark.MetricsLogger(opened).read()] == [1.0]
    made = {path.name for path in tmp_path.iterdir()}
    if mlflow.__version__.startswith("2."):
        made.discard("mlruns")  # MLflow 2 makes that empty folder for itself
    assert made == {"root", "runs"}
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert run.info.artifact_uri.startswith((tmp_path / "runs" / "mlartifacts").as_uri())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1.5e-3", -0.0015),
        ("1e400", "1e400"),
        ("9" * 30, "9" * 30),
        ("01", "01"),
        ("nan", "nan"),
        ("True", True),
        ("none", "none"),
        ('{"a": [1]}', {"a": [1]}),
        ("[NaN]", "[NaN]"),
        ("['a']", "['a']"),
        ("", ""),
    ],
)
def test_params_become_what_they_were(text, value):
    assert parse_param(text) == value
    assert type(parse_param(text)) is type(value)
