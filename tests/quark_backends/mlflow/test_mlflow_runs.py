"""Whole runs through a real MLflow server."""

import math
import time
from datetime import datetime

import pytest

import quark
from quark_core.records import MetricRecord
from quark_core.records.names import encode_name


def deliver_all(session, backend="mlflow", timeout_s=200):
    """Wait until the mirror has everything that was logged so far."""
    lanes = [lane for lane in session.open_run.stream._lanes if not lane.primary]
    session.open_run.flush()
    deadline = time.monotonic() + timeout_s
    while any(lane.report().waiting for lane in lanes):
        assert time.monotonic() < deadline, lanes[0].report()
        for lane in lanes:
            lane.nudge()
        time.sleep(0.05)


def expect(records, key):
    """What MLflow has for the records of a key."""
    return sorted(
        (
            record.epoch if record.step is None else record.step,
            repr(record.value if math.isfinite(record.value) else math.nan),
        )
        for record in records
        if record.metric_key == key
    )


def list_metrics(run):
    """Names of the user's own metrics."""
    return {name for name in run.data.metrics if not name.startswith("quark/")}


def without_times(points):
    return [point[:2] for point in points]


def start(tmp_path, server, project, **arguments):
    backends = f"mlflow:{server.uri}?quark=full"
    return quark.start_run(project=project, storage_dir=tmp_path, backends=backends, **arguments)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_every_point_is_there_once(tmp_path, server, project, find_runs, history):
    names = {
        "train/loss": "train/loss",
        "val/AR@100": "val/AR_at_100",
        "top 5 %": "top 5 _pct_",
        "Verlust/größe": "Verlust/größe",
        "损失": "损失",
        "a:b": "a_x3a_b",
    }
    with start(tmp_path, server, project) as session:
        metrics = quark.MetricsLogger(session)
        for index in range(50):
            for position, name in enumerate(names):
                # Repeated and backward steps; one in seven values is not finite.
                value = (math.nan, math.inf, -math.inf, 0.1, 0.2, 0.3, 0.3)[(index + position) % 7]
                metrics.log(name, value, step=(index * 7) % 20)
        metrics.log("by_epoch", 1.0, epoch=3)
        records = metrics.read(include_non_finite=True)
        deliver_all(session)
    assert len(records) == 301
    (run,) = find_runs()
    assert list_metrics(run) == {*names.values(), "by_epoch"}
    for name, theirs in names.items():
        points = without_times(history(run.info.run_id, theirs))
        assert points == expect(records, encode_name(name))
    assert without_times(history(run.info.run_id, "by_epoch")) == [(3, "1.0")]
    assert run.data.tags["quark.nonfinite.train/loss"].startswith("inf@7,-inf@")


@pytest.mark.long
def test_times_are_those_of_the_records(tmp_path, server, project, find_runs, history):
    with start(tmp_path, server, project) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(20):
            metrics.log("m", float(step), step=step)
        records = metrics.read()
    (run,) = find_runs()
    assert history(run.info.run_id, "m") == sorted(
        (record.step, repr(record.value), record.time_us // 1000) for record in records
    )


@pytest.mark.long
def test_params_and_tags(tmp_path, server, project, find_runs):
    config = {
        "lr": 0.1,
        "model": {"name": "resnet", "layers": [1, 2], "empty": {}},
        "model.name": "another",
        "none": None,
        "flag": True,
        "long": "x" * 7000,
        "odd@key": "",
    }
    session = start(
        tmp_path, server, project, config=config, tags=["a", "b@c"], name="first", notes="Notes."
    )
    session.add_tag("late")
    session.end_run()
    (run,) = find_runs()
    params = dict(run.data.params)
    long = params.pop("long")
    assert len(long) == 6000
    assert "7000 characters, sha256" in long
    (hashed,) = [key for key in params if key.startswith("model.name_h_")]
    assert params.pop(hashed) == "another"
    assert params == {
        "lr": "0.1",
        "model.name": "resnet",
        "model.layers": "[1,2]",
        "model.empty": "{}",
        "none": "None",
        "flag": "True",
        "odd_at_key": "",
    }
    tags = run.data.tags
    assert tags["quark.run_id"] == session.run_id
    assert tags["quark.project"] == project
    assert tags["quark.attempt"] == "0"
    assert tags["mlflow.note.content"] == "Notes."
    assert tags["mlflow.source.type"] == "LOCAL"
    assert tags["mlflow.source.name"]
    assert [tags[name] for name in ("a", "b_at_c", "late")] == ["true"] * 3
    assert run.info.run_name == "first"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "theirs"),
    [("completed", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")],
)
def test_status(tmp_path, server, project, find_runs, status, theirs):
    session = start(tmp_path, server, project)
    deliver_all(session)
    assert find_runs()[0].info.status == "RUNNING"
    session.end_run(status)
    (run,) = find_runs()
    assert run.info.status == theirs
    assert run.data.tags["quark.status"] == status
    ended = datetime.fromisoformat(session.context.run.ended_at)
    assert abs(run.info.end_time - ended.timestamp() * 1000) <= 1


@pytest.mark.long
def test_a_resumed_run_goes_on_in_its_mlflow_run(
    tmp_path, server, project, find_runs, history, capfd
):
    session = start(tmp_path, server, project, config={"lr": 0.1})
    quark.MetricsLogger(session).log("m", 1.0, step=1)
    session.end_run("failed")
    again = quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends=f"mlflow:{server.uri}?quark=full"
    )
    quark.MetricsLogger(again).log("m", 2.0, step=2)
    deliver_all(again)
    (run,) = find_runs()
    assert run.info.status == "RUNNING"
    assert run.data.tags["quark.attempt"] == "1"
    assert run.data.tags["quark.status"] == "running"
    again.end_run()
    (run,) = find_runs()
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    assert without_times(history(run.info.run_id, "m")) == [(1, "1.0"), (2, "2.0")]
    assert "View run" not in capfd.readouterr().out


@pytest.mark.long
def test_a_run_whose_mirror_state_is_lost_is_found_by_its_tag(
    tmp_path, server, project, find_runs, history
):
    session = start(tmp_path, server, project)
    quark.MetricsLogger(session).log("m", 1.0, step=1)
    session.end_run("failed")
    folder = session.run_path / "mirrors" / "mlflow"
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends=f"mlflow:{server.uri}?quark=full"
    )
    quark.MetricsLogger(again).log("m", 2.0, step=2)
    again.end_run()
    (run,) = find_runs()
    assert without_times(history(run.info.run_id, "m")) == [(1, "1.0"), (2, "2.0")]


@pytest.mark.long
def test_a_server_that_dies_and_comes_back_has_everything_once(
    tmp_path, mortal_server, project, mlflow, monkeypatch
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    session = start(tmp_path, mortal_server, project, config={"lr": 0.1})
    metrics = quark.MetricsLogger(session)

    def train(steps):
        began = time.monotonic()
        for step in steps:
            metrics.log("m", float(step), step=step)
            metrics.log("n", math.nan, step=step)
            time.sleep(0.002)
        return time.monotonic() - began

    train(range(100))
    deliver_all(session)
    train(range(100, 150))
    mortal_server.kill()
    assert train(range(150, 250)) < 60
    session.open_run.flush()
    (lane,) = [one for one in session.report_delivery().lanes if one.backend == "mlflow"]
    assert lane.waiting > 0
    mortal_server.start()
    train(range(250, 300))
    deliver_all(session)
    session.end_run()
    (lane,) = [one for one in session.report_delivery().lanes if one.backend == "mlflow"]
    assert lane.complete
    # Each reason once, however often it was tried.
    assert len(lane.errors) <= 6, lane.errors
    client = mlflow.MlflowClient(tracking_uri=mortal_server.uri)
    experiment = client.get_experiment_by_name(project)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    for key in ("m", "n"):
        points = client.get_metric_history(run.info.run_id, key)
        assert sorted(point.step for point in points) == list(range(300))


@pytest.mark.long
def test_the_users_own_run_is_left_alone(
    tmp_path, server, project, find_runs, mlflow, monkeypatch, client
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    mlflow.set_tracking_uri(server.uri)
    try:
        mlflow.set_experiment(f"own {project}")
        with mlflow.start_run() as own:
            mlflow.log_metric("mine", 1.0)
            with start(tmp_path, server, project, config={"lr": 0.1}) as session:
                quark.MetricsLogger(session).log("m", 1.0, step=0)
                deliver_all(session)
                assert mlflow.active_run().info.run_id == own.info.run_id
                mlflow.log_metric("mine", 2.0)
            assert mlflow.active_run().info.run_id == own.info.run_id
            assert mlflow.get_tracking_uri() == server.uri
            assert client.get_run(own.info.run_id).info.status == "RUNNING"
        found = client.get_run(own.info.run_id)
        assert set(found.data.metrics) == {"mine"}
        assert found.data.params == {}
        assert not any(key.startswith("quark.") for key in found.data.tags)
    finally:
        mlflow.set_tracking_uri(None)
    (run,) = find_runs()
    assert run.info.run_id != own.info.run_id
    assert list_metrics(run) == {"m"}


@pytest.mark.long
def test_plain_mlflow_goes_to_the_environments_server(
    tmp_path, server, project, find_runs, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    with quark.start_run(project=project, storage_dir=tmp_path, backends="mlflow") as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert len(find_runs()) == 1


def test_without_a_server_the_mirror_says_what_to_set(tmp_path, project, monkeypatch, caplog):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    with quark.start_run(project=project, storage_dir=tmp_path, backends="mlflow") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        assert isinstance(metrics.read()[0], MetricRecord)
    assert "Set MLFLOW_TRACKING_URI" in caplog.text


@pytest.mark.long
def test_groups_fields_and_digests_are_tags(tmp_path, server, project, find_runs):
    config = {"lr": 0.1, "seed": 1}
    with start(tmp_path, server, project, config=config, group=["b", "paper/fig3"]) as session:
        session.annotate(gpu="V100", accuracy=0.98, gone=1)
        session.add_to_group("a")
        session.remove_from_group("b")
    stored = quark.search_runs(storage_dir=tmp_path)[0].stored
    (run,) = find_runs(project)
    assert run.data.tags["quark.groups"] == "a, paper/fig3"
    assert run.data.tags["quark.field.gpu"] == "V100"
    assert run.data.tags["quark.field.accuracy"] == "0.98"
    assert run.data.tags["quark.config_digest"] == stored.digests.config
    assert run.data.tags["quark.structure_digest"] == stored.digests.structure
