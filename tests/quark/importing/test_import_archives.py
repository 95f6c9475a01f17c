"""Archives of Comet's and ClearML's offline modes, with the messages that their clients write."""

import json
import zipfile

import quark
from quark_core.runs.backend_choice import open_reader

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def values(points):
    return [(step, value) for step, value, _ in points]


def make_comet(path):
    def param(name, value):
        param = {"paramName": name, "paramValue": value, "source": "manual", "step": None}
        return {"payload": {"local_timestamp": 1000, "param": param}, "type": "parameter_msg"}

    def metric(name, value, step, epoch):
        metric = {"epoch": epoch, "metricName": name, "metricValue": value, "step": step}
        payload = {"local_timestamp": 1_700_000_000_000 + (step or 0), "metric": metric}
        return {"payload": payload, "type": "metric_msg"}

    upload = {
        "additional_params": {"fileName": "img", "step": 3, "assetId": "x"},
        "file_path": "../../tmpfile",
        "upload_type": "visualization",
        "local_timestamp": 1_700_000_000_000,
    }
    messages = [
        {"payload": {"key": "Name", "value": "r1"}, "type": "log_other"},
        param("lr", 0.1),
        param("opt|name", "adam"),
        param("api_key", "hunter2hunter2"),
        *(metric("loss", 1 / (step + 1), step, step // 10) for step in range(20)),
        param("curr_step", 7),
        metric("free", 2.0, None, None),
        {"payload": {"output": "x", "stderr": True}, "type": "standard_output"},
        {"payload": upload, "type": "file_upload"},
    ]
    known = {
        "offline_id": "6af2957bd30c",
        "project_name": "proj",
        "workspace": "ws",
        "start_time": 1_699_999_999_000,
        "stop_time": 1_700_000_001_000,
        "tags": ["base"],
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("experiment.json", json.dumps(known))
        archive.writestr("messages.json", "\n".join(map(json.dumps, messages)) + "\n")
        archive.writestr("tmpfile", PNG)


def test_comets_archive_comes_once(tmp_path, take, read_points, store):
    make_comet(tmp_path / "6af2957bd30c.zip")
    (run,) = take("comet", tmp_path)
    assert (run["name"], run["project"]) == ("r1", "ws/proj")
    assert read_points(run["run_id"], "loss") == [
        (step, 1 / (step + 1), (1_700_000_000_000 + step) * 1000) for step in range(20)
    ]
    assert values(read_points(run["run_id"], "free")) == [(7, 2.0)]
    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {
        "lr": 0.1,
        "opt": {"name": "adam"},
        "api_key": "[redacted]",
    }
    assert stored.run.tags == ("base",)
    artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], storage_dir=store))
    (image,) = artifacts.read(artifact_type="image")
    assert (artifacts.load(image), image.step) == (PNG, 3)
    assert [one["kind"] for one in run["losses"]] == ["console"]
    (again,) = take("comet", tmp_path)
    assert (again["points"], again["files"]) == (0, 0)


def make_clearml(path):
    def scalar(metric, variant, value, step):
        return {
            "timestamp": 1_700_000_000_000 + max(step, 0),
            "type": "training_stats_scalar",
            "iter": step,
            "metric": metric,
            "variant": variant,
            "value": value,
        }

    plot = {**scalar("hist", "s", None, 1), "type": "plot", "plot_str": '{"data": []}'}
    lines = [
        [scalar("loss", "train", 1 / (step + 1), step) for step in range(10)],
        [scalar("Summary", "best", 0.1, -(2**31)), plot],
    ]
    entry = {"name": "lr", "section": "General", "type": "float", "value": "0.1"}
    key = {"name": "api_key", "type": "str", "value": "hunter2hunter2"}
    task = {
        "id": "offline-1",
        "name": "r1",
        "project_name": "proj",
        "comment": "a note",
        "tags": ["base"],
        "offline_folder": "/home/ada/offline-1",
        "hyperparams": {"General": {"lr": entry, "api_key": key}},
        "execution": {
            "artifacts": [
                {"key": "art", "uri": "/home/ada/offline-1/data/art.json"},
                {"key": "far", "uri": "s3://bucket/x"},
            ]
        },
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("task.json", json.dumps(task))
        archive.writestr("metrics.jsonl", "\n".join(map(json.dumps, lines)) + "\n")
        archive.writestr("data/art.json", '{"a": 1}')


def test_clearmls_archive_comes_once(tmp_path, take, read_points, store):
    make_clearml(tmp_path / "offline-1.zip")
    (run,) = take("clearml", tmp_path)
    assert (run["name"], run["project"]) == ("r1", "proj")
    assert read_points(run["run_id"], "loss/train") == [
        (step, 1 / (step + 1), (1_700_000_000_000 + step) * 1000) for step in range(10)
    ]
    assert values(read_points(run["run_id"], "Summary/best")) == [(9, 0.1)]
    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {"lr": 0.1, "api_key": "[redacted]"}
    assert (stored.run.notes, stored.run.tags) == ("a note", ("base",))
    artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], storage_dir=store))
    (file,) = artifacts.read(artifact_type="file")
    assert artifacts.load(file) == b'{"a": 1}'
    assert len(artifacts.read(artifact_type="figure")) == 1
    assert [(one["kind"], one["name"]) for one in run["losses"]] == [("artifact", "far")]
    (again,) = take("clearml", tmp_path)
    assert (again["points"], again["files"]) == (0, 0)


def test_what_is_no_archive_fails_alone(tmp_path, take):
    (tmp_path / "a.zip").write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x", "y")
    for tool in ("comet", "clearml"):
        assert all(run["failure"] for run in take(tool, tmp_path, status=2))
