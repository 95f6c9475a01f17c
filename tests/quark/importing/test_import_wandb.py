"""Files of the real W&B, offline, and what was logged into them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import quark
from quark_core.runs.artifact_versions import list_versions
from quark_core.runs.backend_choice import open_reader

WRITE = """
import sys
import numpy as np, wandb
run = wandb.init(project="proj", id=sys.argv[2], name="fast", dir=sys.argv[1], notes="a note",
    config={"lr": 0.1, "opt": {"name": "adam"}, "api_key": "hunter2hunter2"}, tags=["base"],
    group="g1", job_type="train")
rng = np.random.default_rng(0)
for i in range(20):
    run.log({"loss": 1 / (i + 1), "nested": {"a": i}, "flag": i % 2 == 0,
        "bad": float("nan") if i == 3 else 1.0, "word": "x", "mAP_0.5": i / 20,
        ("val.acc", "val/acc")[i % 2]: i})
pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
run.log({"hist": wandb.Histogram(rng.normal(size=100).tolist()),
    "img": wandb.Image(pixels, caption="c"), "imgs": [wandb.Image(pixels), wandb.Image(pixels)],
    "table": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]]),
    "html": wandb.Html("<b>x</b>")})
run.config.update({"late": 3})
with open(sys.argv[1] + "/weights.txt", "w") as file:
    file.write("weights")
artifact = wandb.Artifact("model", type="model")
artifact.add_file(sys.argv[1] + "/weights.txt")
run.log_artifact(artifact, aliases=["best", "latest", "v7"])
run.alert("careful", "text of it", level="WARN")
run.save(sys.argv[1] + "/weights.txt", base_path=sys.argv[1])
with open(sys.argv[1] + "/wandb/beside.txt", "w") as file:
    file.write("beside")
run.save(sys.argv[1] + "/wandb/beside.txt", base_path=sys.argv[1])
run.define_metric("flag", summary="max")
run.summary["best_acc"] = 0.93
run.summary["loss"] = 0.01
run.summary["by_class"] = {"cat": 0.5}
run.finish(exit_code=int(sys.argv[3]))
"""


def log_run(folder, run_id="abc", code=0):
    folder.mkdir(exist_ok=True)
    environment = {name: text for name, text in os.environ.items() if "WANDB" not in name}
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        environment[f"WANDB_{name}"] = str(folder / "home")
    subprocess.run(
        [sys.executable, "-c", WRITE, str(folder), run_id, str(code)],
        env={**environment, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        check=True,
        capture_output=True,
    )
    return folder / "wandb"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """One run, logged once; each test has a copy."""
    return log_run(tmp_path_factory.mktemp("wandb"))


@pytest.fixture
def place(logged, tmp_path):
    shutil.copytree(logged, tmp_path / "wandb", symlinks=True)
    return tmp_path / "wandb"


def values(points):
    return [(step, value) for step, value, _ in points]


def test_everything_that_was_logged_is_there(place, take, read_points, store):
    (run,) = take("wandb", place)
    run_id = run["run_id"]
    assert values(read_points(run_id, "loss")) == [(i, 1 / (i + 1)) for i in range(20)]
    assert values(read_points(run_id, "nested/a")) == [(i, float(i)) for i in range(20)]
    assert values(read_points(run_id, "val/acc")) == [(i, float(i)) for i in range(20)]
    assert values(read_points(run_id, "mAP_0.5")) == [(i, i / 20) for i in range(20)]
    assert values(read_points(run_id, "flag"))[:2] == [(0, 1.0), (1, 0.0)]
    bad = values(read_points(run_id, "bad", include_non_finite=True))
    assert len(bad) == 20
    assert bad[3][1] != bad[3][1]
    opened = quark.open_run(run_id, storage_dir=store)
    record = opened.context.run
    assert (record.name, record.project_name, record.notes) == ("fast", "proj", "a note")
    assert record.tags == ("base", "job_type=train")
    assert record.groups == ("g1",)
    assert record.status == "completed"
    stored = open_reader(store).load_run(run_id)
    # The last value of a metric is no field, unless the summary says another one.
    assert dict(stored.fields) == {
        "word": "x",
        "best_acc": 0.93,
        "loss": 0.01,
        "by_class": {"cat": 0.5},
    }
    assert dict(stored.config.values) == {
        "lr": 0.1,
        "opt": {"name": "adam"},
        "api_key": "[redacted]",
        "late": 3,
    }
    artifacts = quark.ArtifactStore(opened)
    assert [one.step for one in artifacts.read(artifact_type="image")] == [20, 20, 20]
    (image,) = artifacts.read(artifact_key="img")
    assert artifacts.load(image).startswith(b"\x89PNG")
    assert image.metadata["caption"] == "c"
    (table,) = artifacts.read(artifact_type="table")
    assert artifacts.load(table) == {"columns": ["a", "b"], "rows": [[1, "x"], [2, "y"]]}
    (model,) = artifacts.read(artifact_type="model")
    assert artifacts.load(model) == b"weights"
    found = quark.search_runs(where="field.best_acc > 0.9 and 'g1' in groups", storage_dir=store)
    assert [each.run_id for each in found] == [run_id]


def test_what_is_not_taken_is_counted_and_listed(place, take):
    (run,) = take("wandb", place)
    listed = {(one["kind"], one["name"]): one for one in run["losses"]}
    assert set(listed) == {
        ("value", "word"),
        ("alias", "model/weights.txt:v7"),
        ("metric", "flag"),
        ("file", "weights.txt"),
        ("file", "wandb/beside.txt"),
    }
    assert listed["value", "word"]["count"] == 20
    # The folder was copied from where the run was logged, so a link leads to anybody's file.
    assert "Import a folder that has both" in listed["file", "weights.txt"]["reason"]


@pytest.mark.long
def test_a_saved_file_that_is_a_link_comes_from_where_the_run_was_logged(tmp_path, take, store):
    folder = tmp_path / "logged"
    logged = log_run(folder)
    (folder / ".netrc").write_text("private")
    (link,) = logged.glob("offline-run-*/files/weights.txt")
    assert link.is_symlink()
    (run,) = take("wandb", logged)
    artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], storage_dir=store))
    found = {one.artifact_key: artifacts.load(one) for one in artifacts.read(artifact_type="file")}
    assert found == {"weights.txt": b"weights", "wandb/beside.txt": b"beside"}
    # What is hidden there, and what lies elsewhere, was not logged.
    for secret in (folder / ".netrc", tmp_path / "elsewhere"):
        secret.write_text("private")
        link.unlink()
        link.symlink_to(secret)
        (run,) = take("wandb", logged, "-d", tmp_path / f"again-{secret.name}")
        losses = {one["name"]: one["reason"] for one in run["losses"]}
        assert str(secret) in losses["weights.txt"]


def test_aliases_name_the_version_and_an_alert_is_an_alert(place, take, store):
    (run,) = take("wandb", place)
    opened = quark.open_run(run["run_id"], storage_dir=store)
    (version,) = [
        one
        for one in list_versions(open_reader(store), "proj")
        if one.record.artifact_type == "model"
    ]
    assert version.aliases == ("best", "latest")
    (alert,) = quark.EventLogger(opened).read(event_type="alert_raised")
    assert alert.severity == "warning"
    assert dict(alert.payload) == {
        "title": "careful",
        "message": "text of it",
        "first_step": 20,
        "rule_id": "user_alert_careful",
    }


def test_a_file_that_is_cut_anywhere_brings_what_is_whole_and_the_rest_later(
    place, take, read_points
):
    (file,) = place.glob("offline-run-*/*.wandb")
    whole = file.read_bytes()
    expected = [(i, 1 / (i + 1)) for i in range(20)]
    run_id, steps = None, []
    for size in (len(whole) // 3, len(whole) // 2 + 13, len(whole) - 5, len(whole)):
        file.write_bytes(whole[:size])
        (run,) = take("wandb", place)
        run_id = run_id or run["run_id"]
        assert run["run_id"] == run_id
        found = values(read_points(run_id, "loss"))
        assert found == expected[: len(found)]
        steps.append(len(found))
    assert steps == sorted(steps)
    assert steps[-1] == 20


@pytest.mark.parametrize("place_in_record", [12, 5], ids=["in the text", "in the length"])
def test_a_damaged_file_gives_what_comes_before_the_damage_and_says_so(
    place, take, read_points, place_in_record
):
    (file,) = place.glob("offline-run-*/*.wandb")
    data = bytearray(file.read_bytes())
    # The first record begins behind seven bytes; each has a checksum, a length and a type.
    at, records = 7, 0
    while records < 30:
        at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        records += 1
    data[at + place_in_record] ^= 0xFF
    file.write_bytes(data)
    (run,) = take("wandb", place)
    assert any("damaged" in one["reason"] for one in run["losses"])
    found = values(read_points(run["run_id"], "loss"))
    assert found == [(i, 1 / (i + 1)) for i in range(len(found))]
    assert 0 < len(found) < 20


def test_a_file_that_names_anothers_file_as_an_artifact_does_not_get_it(place, take, store):
    from wandb.proto import wandb_internal_pb2 as types

    from quark.importing.neutral_run import Losses
    from quark.importing.sources.wandb_values import WandbValues

    secret = place / "id_rsa"
    secret.write_text("private")
    artifact = types.ArtifactRecord(name="model", type="model")
    artifact.manifest.contents.add(path="a", local_path=str(secret), digest="x", size=7)
    losses = Losses()
    found = WandbValues(place, losses)
    found.take_artifact(artifact, None)
    found.take("img", {"_type": "image-file", "path": "../id_rsa"}, 0, 0.0)
    (place / "link").symlink_to(secret)
    found.take("img2", {"_type": "image-file", "path": "link"}, 0, 0.0)
    assert not found.files
    assert len(losses.list()) == 3


@pytest.mark.long
def test_a_failed_run_has_failed(tmp_path, take, store):
    (run,) = take("wandb", log_run(tmp_path / "w", code=1))
    assert quark.open_run(run["run_id"], storage_dir=store).context.run.status == "failed"


def test_no_wandb_file_at_all_is_no_run(tmp_path, take):
    (tmp_path / "run-x.wandb").write_bytes(b"not one of theirs" * 100)
    (run,) = take("wandb", tmp_path, status=2)
    assert "does not name its run yet" in run["failure"]
    assert json.dumps(run)
