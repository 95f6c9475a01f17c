"""Runs of a real MLflow store, read by its own client and by Quark."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

import quark

mlflow = pytest.importorskip("mlflow")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's own, of its libraries
    pytest.mark.long,
]


@pytest.fixture
def uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    address = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(address)
    mlflow.set_experiment("exp")
    yield address
    mlflow.set_tracking_uri(before)


def history(uri, run_id, name):
    found = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)
    return [(point.step, point.value, point.timestamp * 1000) for point in found]


def test_every_point_is_the_one_that_mlflow_has_and_all_else_is_there(
    uri, take, read_points, store
):
    with mlflow.start_run(run_name="parent", description="a note", tags={"team": "a"}) as parent:
        mlflow.log_params({"lr": 0.1, "layers": 3, "password": "hunter2hunter2"})
        for step in range(50):
            mlflow.log_metric("loss", 1 / (step + 1), step=step)
        mlflow.log_metric("neg", 1.0, step=-1)
        mlflow.log_text("hello", "notes/a.txt")
        mlflow.log_image(np.zeros((8, 8, 3), dtype=np.uint8), key="dogs", step=3)
        mlflow.log_table({"a": [1, 2], "b": ["x", "y"]}, "t.json")
        with mlflow.start_run(run_name="child", nested=True):
            mlflow.log_metric("x", 1.0)
    first, second = take("mlflow", uri)
    assert (first["name"], first["project"]) == ("parent", "exp")
    assert read_points(first["run_id"], "loss") == history(uri, parent.info.run_id, "loss")
    opened = quark.open_run(first["run_id"], storage_dir=store)
    record = opened.context.run
    assert (record.notes, record.tags, record.status) == ("a note", ("team=a",), "completed")
    child = quark.open_run(second["run_id"], storage_dir=store).context.run
    assert child.parent_run_id == first["run_id"]
    artifacts = quark.ArtifactStore(opened)
    (image,) = artifacts.read(artifact_type="image")
    assert (image.artifact_key, image.step) == ("dogs", 3)
    (table,) = artifacts.read(artifact_type="table")
    assert artifacts.load(table)["columns"] == ["a", "b"]
    (text,) = artifacts.read(artifact_key="notes/a.txt")
    assert artifacts.load(text) == b"hello"
    assert [(one["kind"], one["name"]) for one in first["losses"]] == [("point", "neg")]
    assert [(one["points"], one["files"]) for one in take("mlflow", uri)] == [(0, 0), (0, 0)]


def test_points_that_mlflow_puts_between_those_that_were_taken_come_once(uri, take, read_points):
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.create_run(client.get_experiment_by_name("exp").experiment_id)
    for step in range(5):
        client.log_metric(run.info.run_id, "loss", float(step), 1000 * step + 1000, step)
    (first,) = take("mlflow", uri)
    client.log_metric(run.info.run_id, "loss", 9.0, 2500, 9)
    client.log_metric(run.info.run_id, "loss", 10.0, 9000, 10)
    client.set_terminated(run.info.run_id, "FAILED")
    (second,) = take("mlflow", uri)
    assert second["points"] == 2
    found = read_points(first["run_id"], "loss")
    assert sorted(found) == sorted(history(uri, run.info.run_id, "loss"))


def test_a_server_that_is_not_there_is_one_clear_line(tmp_path, store):
    from click.testing import CliRunner

    from quark.cli.main import cli
    from quark_core.errors import QuarkError

    with pytest.raises(QuarkError, match="does not answer"):
        CliRunner().invoke(
            cli,
            ["import", "mlflow", "http://127.0.0.1:9", "-d", str(store)],
            catch_exceptions=False,
        )


def test_a_server_that_dies_in_the_middle_leaves_nothing_twice(uri, take, read_points, monkeypatch):
    from quark_backends.mlflow.client import Server
    from quark_core.errors import BackendUnavailable

    with mlflow.start_run() as one:
        for name in ("a", "b", "c"):
            for step in range(10):
                mlflow.log_metric(name, step, step=step)
    with mlflow.start_run():
        mlflow.log_metric("x", 1.0)
    load, calls = Server.load_points, []

    def die(self, run_id, name):
        calls.append(name)
        if name == "b":
            raise BackendUnavailable("connection refused")
        return load(self, run_id, name)

    monkeypatch.setattr(Server, "load_points", die)
    monkeypatch.setattr("quark.importing.sources.mlflow.PORTION_POINTS", 10)
    first, second = take("mlflow", uri, status=1)
    assert "does not answer" in first["failure"]
    assert "Import again" in second["failure"]
    assert calls == ["a", "b"]
    monkeypatch.setattr(Server, "load_points", load)
    first, second = take("mlflow", uri)
    assert (first["points"], second["points"]) == (20, 1)
    for name in ("a", "b", "c"):
        assert read_points(first["run_id"], name) == history(uri, one.info.run_id, name)


@pytest.mark.parametrize("way", ["elsewhere", "above", "link"])
def test_files_are_taken_from_below_the_store_only(uri, take, store, tmp_path, way):
    """A stranger's database may name any folder of this machine as that of a run's artifacts."""
    secret = tmp_path.parent / f"{tmp_path.name}-private"
    secret.mkdir()
    (secret / "id_rsa").write_text("PRIVATE")
    with mlflow.start_run() as run:
        mlflow.log_text("hello", "a.txt")
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    if way == "link":
        (folder / "id_rsa").symlink_to(secret / "id_rsa")
    else:
        place = f"file://{secret}" if way == "elsewhere" else f"{tmp_path}/../{secret.name}"
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            database.execute("UPDATE runs SET artifact_uri = ?", (place,))
    (taken,) = take("mlflow", uri)
    artifacts = quark.ArtifactStore(quark.open_run(taken["run_id"], storage_dir=store))
    kept = [artifacts.load(record) for record in artifacts.read()]
    assert b"PRIVATE" not in kept
    assert kept == ([b"hello"] if way == "link" else [])
    assert [(one["kind"], one["name"]) for one in taken["losses"]] == [("artifact", "id_rsa")]
    assert "outside of the imported store" in str(taken["losses"])
