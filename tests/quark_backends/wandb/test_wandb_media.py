"""Media in W&B are of W&B's own kinds, artifacts have their files and aliases; all offline."""

import json
from importlib.util import find_spec

import pytest

import quark

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)
pytest.importorskip("PIL")
np = pytest.importorskip("numpy")


def find_row(mirrored, key):
    (row,) = [row for row in mirrored.rows if key in row]
    return row


def find_file(mirrored, said):
    return mirrored.paths[0].parent / "files" / said["path"]


@pytest.mark.long
def test_each_kind_is_shown_as_what_it_is(start, read_mirror):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    with start() as session:
        artifacts = quark.ArtifactStore(session)
        metrics = quark.MetricsLogger(session)
        for step in range(3):
            metrics.log("loss", float(step), step=step)
        artifacts.log_image(
            "look",
            pixels,
            step=2,
            caption="first",
            boxes=[{"box": (1, 1, 4, 5), "label": "cat", "score": 0.5}],
            masks=np.ones((8, 8), dtype=np.int64),
            class_labels={1: "cat"},
        )
        artifacts.log_audio("sound", np.zeros(800), sample_rate_hz=8000, step=2, caption="hush")
        artifacts.log_html("page", "<p>Hello</p>", step=2)
        artifacts.log_point_cloud("cloud", np.random.default_rng(1).random((20, 6)), step=2)
        artifacts.log_histogram("weights", bins=[0, 1, 2], counts=[3, 4], step=2)
        artifacts.log_table("preds", {"id": [1], "said": ["a"]}, step=2)
        artifacts.log_confusion_matrix("confused", [0, 1, 1], [0, 1, 0], step=2)
        artifacts.log_pr_curve("pr", points={"recall": [0, 1], "precision": [1.0, 0.5]}, step=2)
        artifacts.log_markdown("words", "# Words", step=2)
    mirrored = read_mirror(session.run_path)
    kinds = {
        "look": "image-file",
        "sound": "audio-file",
        "page": "html-file",
        "cloud": "object3D-file",
        "weights": "histogram",
        "preds": "table-file",
        "confused_table": "table-file",
        "pr_table": "table-file",
    }
    for key, kind in kinds.items():
        row = find_row(mirrored, key)
        assert row[key]["_type"] == kind, key
        assert row["_step"] == 2, key
    look = find_row(mirrored, "look")["look"]
    assert look["caption"] == "first"
    (name,) = look["boxes"]
    boxes = json.loads(find_file(mirrored, look["boxes"][name]).read_text())
    (box,) = boxes["box_data"]
    assert box["position"] == {"minX": 1, "minY": 1, "maxX": 4, "maxY": 5}
    assert (box["class_id"], box["box_caption"], box["scores"]) == (1, "cat", {"score": 0.5})
    assert look["masks"]
    table = json.loads(
        find_file(mirrored, find_row(mirrored, "confused_table")["confused_table"]).read_text()
    )
    assert sum(row[2] for row in table["data"]) == 3
    assert not [key for key in mirrored.keys if key == "words"]
    assert {each.type for each in mirrored.of("artifact")} >= {"markdown", "image", "audio"}
    # Parts of others are no artifacts of their own.
    assert "image_mask" not in {each.type for each in mirrored.of("artifact")}


def list_entries(artifact):
    return {entry.path for entry in artifact.manifest.contents}


@pytest.mark.long
def test_directories_references_and_aliases(start, read_mirror, tmp_path):
    place = tmp_path / "data" / "inner"
    place.mkdir(parents=True)
    (place / "b.txt").write_text("b")
    (tmp_path / "data" / "a.bin").write_bytes(b"\x00a")
    with start() as session:
        artifacts = quark.ArtifactStore(session)
        artifacts.log_directory(tmp_path / "data", name="bundle", aliases=["best"]).wait()
        artifacts.log_reference("corpus", "s3://bucket/corpus.tar")
        session.use_artifact("bundle:best")
    mirrored = read_mirror(session.run_path)
    bundles = [each for each in mirrored.of("artifact") if each.name == "bundle"]
    assert list_entries(bundles[0]) == {"a.bin", "inner/b.txt"}
    assert "best" in bundles[-1].aliases
    assert len({each.digest for each in bundles}) == 1
    (corpus,) = [each for each in mirrored.of("artifact") if each.name == "corpus"]
    (entry,) = corpus.manifest.contents
    assert entry.ref == "s3://bucket/corpus.tar"
    (used,) = mirrored.config["quark_used"]
    assert used.startswith("bundle")


@pytest.mark.long
def test_samples_are_tables(start, read_mirror):
    with start() as session:
        samples = quark.SampleLogger(session, "eval/generations")
        for step in (1, 2):
            samples.log_many(
                [
                    {"prompt": "p", "completion": "c", "reward": 0.5, "lang": "en"},
                    {"prompt": "q", "completion": "d", "note": {"a": 1}},
                ],
                step=step,
            )
    mirrored = read_mirror(session.run_path)
    rows = [row for row in mirrored.rows if "eval/generations" in row]
    found = [json.loads(find_file(mirrored, row["eval/generations"]).read_text()) for row in rows]
    assert found[0]["columns"][:4] == ["prompt", "completion", "reward", "lang"]
    assert [row[:3] for table in found for row in table["data"]] == [
        ["p", "c", 0.5],
        ["q", "d", None],
    ] * 2
    axis = mirrored.axes["eval/generations"]
    assert [row[axis] for row in rows] == [1, 2]


@pytest.mark.long
def test_edits_after_the_end_reach_w_and_b(start, read_mirror, tmp_path):
    with start(name="before", notes="Old.", tags=["a", "b"]) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    quark.edit_run(
        session.run_id,
        name="after",
        notes="New.",
        add_tags=["best"],
        remove_tags=["a"],
        storage_dir=tmp_path,
    )
    mirrored = read_mirror(session.run_path)
    run = mirrored.of("run")[-1]
    assert (run.display_name, run.notes) == ("after", "New.")
    assert set(run.tags) == {"b", "best"}
    assert {each.run_id for each in mirrored.of("run")} == {session.run_id}
    assert mirrored.exit_codes[-1] == 0
    assert mirrored.points("loss") == [(0, 1)]


@pytest.mark.long
def test_what_data_a_run_had_is_in_its_configuration(start, read_mirror):
    with start() as session:
        record = session.fingerprint_data("train", [1, 2, 3]).wait(30)
    mirrored = read_mirror(session.run_path)
    assert mirrored.config["quark_data/train"] == f"full {record.digest}"
