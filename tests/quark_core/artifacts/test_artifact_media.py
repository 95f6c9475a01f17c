"""Sound, video, points, pages, boxes and masks: what is stored is what was given, or it is said."""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
import wave
import zipfile

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from payload_tools import list_events, run_script
from PIL import Image

import quark
from quark_core.artifacts import media
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.errors import MissingLibraryError, SchemaValidationError

CHANCE = np.random.default_rng(0)
IMAGE = CHANCE.integers(0, 256, (40, 60, 3), dtype=np.uint8)


def read_wav(data):
    with wave.open(io.BytesIO(data)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return samples.reshape(-1, file.getnchannels()), file.getframerate()


@pytest.mark.parametrize(
    ("samples", "shape"),
    [
        (np.zeros(100), (100, 1)),
        (np.zeros((100, 2)), (100, 2)),
        (np.zeros((2, 100), dtype=np.float32), (100, 2)),
        (torch.zeros(1, 100), (100, 1)),
        ([0.0, 0.5, -0.5], (3, 1)),
        (np.zeros(0), (0, 1)),
        (np.arange(-5, 5, dtype=np.int16), (10, 1)),
    ],
)
def test_samples_of_any_layout_are_a_wav_file(artifacts, samples, shape):
    record = artifacts.log_audio("sound", samples, sample_rate_hz=8000, step=3)
    found, rate_hz = read_wav(artifacts.load(record))
    assert (found.shape, rate_hz) == (shape, 8000)
    assert (record.artifact_type, record.metadata["media_type"]) == ("audio", "audio/wav")
    assert record.metadata["duration_s"] == shape[0] / 8000
    assert record.payload_relative_path.endswith(".wav")


def test_samples_are_kept_to_half_a_step_and_what_cannot_be_is_counted(artifacts):
    samples = np.sin(np.arange(1000) / 7)
    found, _ = read_wav(artifacts.load(artifacts.log_audio("s", samples, sample_rate_hz=8000)))
    assert np.abs(found[:, 0] / 32767 - samples).max() <= 0.5 / 32767 + 1e-9
    record = artifacts.log_audio("s", [0.0, np.nan, np.inf, 2.0, -3.0], sample_rate_hz=8000)
    assert (record.metadata["non_finite"], record.metadata["clipped"]) == (2, 2)
    assert read_wav(artifacts.load(record))[0][:, 0].tolist() == [0, 0, 0, 32767, -32767]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"samples": np.zeros(9)}, "sample_rate_hz"),
        ({"samples": np.zeros(9), "sample_rate_hz": 0}, "sample_rate_hz"),
        ({"samples": np.zeros(9), "sample_rate_hz": "fast"}, "sample_rate_hz"),
        ({"samples": np.zeros((9, 9, 9)), "sample_rate_hz": 8000}, "samples"),
        ({"samples": np.array([70_000]), "sample_rate_hz": 8000}, "16-bit"),
        ({"samples": ["a"], "sample_rate_hz": 8000}, "samples"),
        ({"samples": object(), "sample_rate_hz": 8000}, "samples"),
        ({"samples": "/absent.wav"}, "absent.wav"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_audio("s", **arguments)


@pytest.mark.parametrize("as_float", [False, True])
def test_frames_become_a_video_that_plays(artifacts, as_float):
    av = pytest.importorskip("av")
    frames = np.zeros((12, 34, 51, 3), dtype=np.uint8)
    frames[:, :, :25, 0] = 200
    given = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255 if as_float else frames
    record = artifacts.log_video("v", given, fps=12, step=1).wait(60)
    assert record.metadata["frames"] == 12
    assert (record.metadata["width"], record.metadata["height"]) == (50, 34)
    with av.open(io.BytesIO(artifacts.load(record))) as container:
        found = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(found) == 12
    assert found[5].shape == (34, 50, 3)
    assert np.abs(found[5][:, 2:20, 0].astype(int) - 200).max() < 12


def test_frames_that_are_none_are_refused(artifacts, monkeypatch):
    pytest.importorskip("av")
    sizes = [np.zeros((8, 8, 3), dtype=np.uint8), np.zeros((8, 10, 3), dtype=np.uint8)]
    for frames, word in (
        ([], "empty"),
        (sizes, r"frames\[1\]"),
        ({"a": 1}, "frames"),
        (np.zeros((4, 8)), r"^frames\[0\] must have the shape"),
        (np.full((2, 8, 8, 3), 300), r"^frames\[0\] has integers from 300 to 300, .* 0 to 255$"),
        ([sizes[0], "no frame"], r"^frames\[1\] must be a PIL image"),
        (3, "frames"),
    ):
        with pytest.raises(SchemaValidationError, match=word):
            artifacts.log_video("v", frames)
    with pytest.raises(SchemaValidationError, match="fps"):
        artifacts.log_video("v", sizes[:1], fps=0)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingLibraryError, match="media"):
        artifacts.log_video("v", sizes[:1])


@pytest.mark.long
def test_a_file_of_5_gb_holds_up_nobody_and_is_never_in_memory(tmp_path):
    """Sparse, and as long as the limit is set to here: what counts is that it goes by pieces."""
    told = run_script(
        tmp_path,
        """
import resource, threading, time
from quark_core.artifacts import payload_folder
path = storage_dir + ".mp4"
with open(path, "wb") as file:
    file.write(b"\\0\\0\\0\\x18ftypmp42")
    file.truncate(int(sys.argv[2]))
session = quark.start_run(project="p", storage_dir=storage_dir)
artifacts = quark.ArtifactStore(session)
metrics = quark.MetricsLogger(session)
has_logged, write = threading.Event(), payload_folder._Partial.write
def write_later(partial, data):
    # Its first piece waits for what would not come where the file held up the loop.
    assert has_logged.wait(60)
    write(partial, data)
payload_folder._Partial.write = write_later
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pending = artifacts.log_video("clip", path)
returned = not pending.done
steps = 0
while not pending.done:
    metrics.log("loss", 1.0, step=steps)
    steps += 1
    if steps > 10:
        has_logged.set()
    time.sleep(0.001)
grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
record = pending.wait()
session.end_run()
print(returned, steps > 10, grown_mb < 100, record.size_bytes, record.metadata["media_type"])
""",
        300 * 2**20,
    )
    assert told.split() == ["True", "True", "True", str(300 * 2**20), "video/mp4"]


def test_the_end_of_a_run_waits_for_what_is_on_its_way(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(os.urandom(30 * 2**20))
    session = quark.start_run(project="p", storage_dir=tmp_path)
    pending = quark.ArtifactStore(session).log_video("clip", path)
    path.unlink()
    session.end_run()
    assert pending.done
    (record,) = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path)).read()
    assert record == pending.wait()


def test_what_a_thread_cannot_store_is_told_and_hurts_nothing(
    artifacts, session, monkeypatch, tmp_path
):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"x" * 100)
    ready = threading.Event()

    def fail(*_):
        ready.wait(60)
        raise SchemaValidationError("the sky has fallen")

    monkeypatch.setattr(artifacts, "_keep_opened", fail)
    pending = artifacts.log_video("clip", path)
    with pytest.raises(TimeoutError, match="clip"):
        pending.wait(0.01)
    ready.set()
    with pytest.raises(SchemaValidationError, match="sky"):
        pending.wait(60)
    artifacts.settle()
    (event,) = list_events(session, "artifact_not_kept")
    assert event.payload["artifact_key"] == "clip"


def test_boxes_of_all_forms_are_the_same_boxes(artifacts):
    box = [1.0, 2.0, 30.0, 31.0]
    forms = [
        [{"box": box, "label": 1, "score": 0.5}],
        {"boxes": torch.tensor([box]), "labels": torch.tensor([1]), "scores": torch.tensor([0.5])},
        {"boxes": [{"box": np.array(box), "label": np.int64(1), "score": np.float32(0.5)}]},
    ]
    for boxes in forms:
        record = artifacts.log_image("i", IMAGE, boxes=boxes)
        assert record.metadata["boxes"] == {"boxes": [{"box": box, "label": 1, "score": 0.5}]}
    for box_format, given in (("xywh", [1, 2, 29, 29]), ("cxcywh", [15.5, 16.5, 29, 29])):
        record = artifacts.log_image("i", IMAGE, boxes=np.array([given]), box_format=box_format)
        assert record.metadata["boxes"] == {"boxes": [{"box": box}]}
    grouped = artifacts.log_image("i", IMAGE, boxes={"truth": [box], "predictions": []})
    assert grouped.metadata["boxes"] == {"truth": [{"box": box}], "predictions": []}


def test_a_box_that_is_not_finite_is_left_out_with_a_warning(artifacts):
    boxes = [[0, 0, float("nan"), 3], [0, 0, 3, 3], {"box": [0, 0, 1, 1], "score": float("inf")}]
    with pytest.warns(RuntimeWarning, match="2 boxes are omitted"):
        record = artifacts.log_image("i", IMAGE, boxes=boxes)
    assert record.metadata["boxes"] == {"boxes": [{"box": [0, 0, 3, 3]}]}
    assert record.metadata["boxes_left_out"] == 2


@pytest.mark.parametrize(
    ("mask", "encoding"),
    [
        (CHANCE.integers(0, 5, (40, 60)), "L"),
        (CHANCE.integers(0, 2, (40, 60)).astype(bool), "L"),
        (torch.from_numpy(CHANCE.integers(0, 900, (1, 40, 60))), "RGB"),
        (np.full((40, 60), 2.0), "L"),
    ],
)
def test_a_mask_is_read_back_as_the_classes_it_had(artifacts, mask, encoding):
    record = artifacts.log_image("i", IMAGE, masks={"truth": mask}, class_labels=["road", "sky"])
    (said,) = record.metadata["masks"]
    (kept,) = artifacts.read(artifact_type="image_mask")
    assert (said["mask"], said["encoding"], said["sha256"]) == ("truth", encoding, kept.sha256)
    pixels = np.asarray(Image.open(io.BytesIO(artifacts.load(kept)))).astype(int)
    found = pixels if encoding == "L" else pixels[:, :, 0] + 256 * pixels[:, :, 1]
    assert (found == np.asarray(mask).reshape(40, 60)).all()
    assert record.metadata["class_labels"] == {"0": "road", "1": "sky"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"masks": np.zeros((40, 61), dtype=int)}, "40 high and 60 wide"),
        ({"masks": np.full((40, 60), 0.5)}, "integers"),
        ({"masks": np.full((40, 60), -1)}, "classes from -1"),
        ({"masks": np.full((40, 60), "a")}, "class numbers"),
        ({"boxes": [[1, 2, 3]]}, r"boxes\['boxes'\]\[0\]"),
        ({"boxes": 3}, "boxes"),
        ({"boxes": [["a", 1, 2, 3]]}, "numbers"),
        ({"boxes": [[1, 2, 3, 4]], "box_format": "yxyx"}, "box_format"),
        ({"class_labels": {"cat": "x"}}, "class_labels"),
        ({"class_labels": 3}, "class_labels"),
    ],
)
def test_what_does_not_fit_an_image_is_refused_and_nothing_is_stored(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_image("i", IMAGE, **arguments)
    assert artifacts.read() == ()


def test_a_list_is_a_batch_with_what_is_said_of_each(artifacts):
    records = artifacts.log_image(
        "batch", [IMAGE, Image.fromarray(IMAGE)],
        caption=["a", None], boxes=[None, [[0, 0, 1, 1]]], step=4,
    )  # fmt: skip
    assert [record.artifact_key for record in records] == ["batch/0", "batch/1"]
    assert records[0].metadata["caption"] == "a"
    assert "caption" not in records[1].metadata
    assert artifacts.read(step=4) == records
    for arguments, word in (({"caption": ["a"]}, "1 entries for 2"), ({"masks": "ab"}, "masks")):
        with pytest.raises(SchemaValidationError, match=word):
            artifacts.log_image("batch", [IMAGE, IMAGE], **arguments)
    with pytest.raises(SchemaValidationError, match="empty"):
        artifacts.log_image("batch", [])


def test_points_are_a_ply_file_without_those_that_are_nowhere(artifacts):
    points = CHANCE.normal(size=(50, 3)).astype(np.float32)
    points[7] = np.nan
    colors = CHANCE.integers(0, 256, (50, 3), dtype=np.uint8)
    record = artifacts.log_point_cloud("p", points, colors=colors)
    assert (record.metadata["points"], record.metadata["non_finite"]) == (49, 1)
    head, _, body = artifacts.load(record).partition(b"end_header\n")
    assert head.startswith(b"ply\nformat binary_little_endian 1.0\nelement vertex 49\n")
    kinds = [("xyz", "<f4", 3), ("rgb", "u1", 3)]
    found = np.frombuffer(body, dtype=kinds)
    keep = np.arange(50) != 7
    assert (found["xyz"] == points[keep]).all()
    assert (found["rgb"] == colors[keep]).all()
    for bad in (np.zeros((3, 2)), np.zeros(3), [["a", "b", "c"]], None):
        with pytest.raises(SchemaValidationError, match="points"):
            artifacts.log_point_cloud("p", bad)
    with pytest.raises(SchemaValidationError, match="colors"):
        artifacts.log_point_cloud("p", points, colors=colors[:3])


def test_pages_and_texts_are_kept_as_they_are(artifacts, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<b>x</b>")
    for record, value in (
        (artifacts.log_html("h", "<script>1</script>"), "<script>1</script>"),
        (artifacts.log_html("h", path), b"<b>x</b>"),
        (artifacts.log_markdown("m", "# \ud800"), "# \ud800"),
    ):
        assert artifacts.load(record) == value
        assert record.metadata["media_type"] == f"text/{record.artifact_type}"
    with pytest.raises(SchemaValidationError, match="html"):
        artifacts.log_html("h", 3)


def test_images_in_cells_are_artifacts_of_their_own(artifacts):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    rows = [
        [IMAGE, 1, "x", True],
        [torch.from_numpy(IMAGE), 2.5, None, False],
        [figure, None, "", None],
    ]
    record = artifacts.log_table("t", rows, columns=["image", "n", "text", "flag"])
    assert record.metadata["column_types"] == ["image", "number", "text", "boolean"]
    table = artifacts.load(record)
    cells = [row[0] for row in table["rows"]]
    assert cells[0] == cells[1] | {"width": 60, "height": 40}
    kept = {each.sha256 for each in artifacts.read(artifact_type="table_image")}
    assert {cell["image"] for cell in cells} == kept
    # A list of lists of numbers is what it was.
    plain = artifacts.log_table("t", {"a": [[1, 2], [3]], "b": [{"image": 1}, None]})
    assert artifacts.load(plain)["rows"] == [[[1, 2], {"image": 1}], [[3], None]]


def test_the_reader_of_arrays_says_what_it_cannot_read():
    with pytest.raises(SchemaValidationError, match="points"):
        media.read_array([[1], [2, 3]], "points")


RANDOM = np.random.default_rng(1)
# Many scores are equal, as those of a small model are.
TRUTH = RANDOM.integers(0, 2, 500)
SCORES = np.round(RANDOM.random(500) * 0.7 + TRUTH * 0.3, 2)


def test_a_matrix_counts_as_scikit_learn_does(artifacts):
    metrics = pytest.importorskip("sklearn.metrics")
    truth, told = RANDOM.integers(0, 4, 300), RANDOM.integers(0, 4, 300)
    record = artifacts.log_confusion_matrix("c", truth, told)
    found = artifacts.load(record)
    assert found["matrix"] == metrics.confusion_matrix(truth, told).tolist()
    assert found["labels"] == ["0", "1", "2", "3"]
    assert record.metadata["accuracy"] == metrics.accuracy_score(truth, told)


@pytest.mark.parametrize(
    ("truth", "told", "labels", "names", "matrix"),
    [
        ([0, 1], [1, 1], ["cat", "dog"], ["cat", "dog"], [[0, 1], [0, 1]]),
        (["b", "a"], ["b", "b"], None, ["a", "b"], [[0, 1], [0, 1]]),
        (["b", "a"], ["b", "b"], ["b", "a"], ["b", "a"], [[1, 0], [1, 0]]),
        ([5, 7], [5, 5], {5: "five", 7: "seven"}, ["five", "seven"], [[1, 0], [1, 0]]),
        ([0.0, 1.0], [True, False], [0, 1], ["0", "1"], [[0, 1], [1, 0]]),
        ([0], [0], ["a", "b", "c"], ["a", "b", "c"], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (["x", 1], ["x", 1], None, ["1", "x"], [[1, 0], [0, 1]]),
    ],
)
def test_classes_may_be_numbers_texts_or_have_names(artifacts, truth, told, labels, names, matrix):
    found = artifacts.load(artifacts.log_confusion_matrix("c", truth, told, labels=labels))
    assert found == {"labels": names, "matrix": matrix}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "y_true and y_pred, or matrix"),
        ({"y_true": [0]}, "y_true and y_pred"),
        ({"y_true": [0], "y_pred": [0, 1]}, "y_true has 1"),
        ({"y_true": [], "y_pred": []}, "empty"),
        ({"y_true": [[0.1, 0.9]], "y_pred": [1]}, "argmax"),
        ({"y_true": [0, 9], "y_pred": [0, 0], "labels": {0: "a"}}, "does not contain the class 9"),
        ({"matrix": [[1, 2]]}, "square"),
        ({"matrix": [[1, 2], [3, 4]], "labels": ["a"]}, "labels has 1"),
        ({"matrix": [["a"]]}, "numbers"),
        ({"y_true": range(1500), "y_pred": range(1500)}, "1500 classes"),
    ],
)
def test_what_is_no_matrix_is_refused(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_confusion_matrix("c", **arguments)


def test_areas_and_points_are_those_of_scikit_learn(artifacts):
    metrics = pytest.importorskip("sklearn.metrics")
    roc = artifacts.log_roc_curve("r", TRUTH, SCORES)
    assert roc.metadata["auc"]["1"] == pytest.approx(metrics.roc_auc_score(TRUTH, SCORES))
    (curve,) = artifacts.load(roc)["curves"]
    wanted = metrics.roc_curve(TRUTH, SCORES, drop_intermediate=False)
    assert np.allclose(curve["x"], wanted[0])
    assert np.allclose(curve["y"], wanted[1])
    assert np.allclose(curve["thresholds"][1:], wanted[2][1:])
    pr = artifacts.log_pr_curve("p", TRUTH, SCORES)
    area = metrics.average_precision_score(TRUTH, SCORES)
    assert pr.metadata["average_precision"]["1"] == pytest.approx(area)
    (curve,) = artifacts.load(pr)["curves"]
    precision, recall, _ = metrics.precision_recall_curve(TRUTH, SCORES)
    assert np.allclose(curve["x"], recall[::-1])
    assert np.allclose(curve["y"], precision[::-1])


def test_each_class_has_a_curve_and_points_may_be_given(artifacts):
    scores = RANDOM.random((100, 3))
    truth = RANDOM.choice(["a", "b", "c"], 100)
    record = artifacts.log_roc_curve("r", truth, scores, labels=["a", "b", "c"])
    assert list(record.metadata["auc"]) == ["a", "b", "c"]
    for points in (([0, 0.5, 1], [0, 1, 1]), {"fpr": [0, 0.5, 1], "tpr": [0, 1, 1]}):
        given = artifacts.log_roc_curve("r", points=points)
        assert given.metadata["auc"] == {"": 0.75}
    named = artifacts.log_pr_curve("p", points={"x": ([1, 0], [0.5, 1]), "y": ([0, 1], [1, 1])})
    assert named.metadata["average_precision"] == {"x": 0.5, "y": 1.0}


def test_what_has_no_area_says_so_and_what_is_not_finite_is_counted(artifacts):
    record = artifacts.log_roc_curve("r", [1, 1, 1], [0.1, np.nan, 0.3])
    (curve,) = artifacts.load(record)["curves"]
    assert (curve["area"], curve["left_out"], curve["positives"]) == (None, 1, 2)
    nothing = artifacts.log_pr_curve("p", [0, 0], [np.nan, np.nan])
    assert artifacts.load(nothing)["curves"][0]["area"] is None


def test_a_curve_of_many_points_is_thinned_and_its_area_is_not(artifacts):
    truth, scores = RANDOM.integers(0, 2, 50_000), RANDOM.random(50_000)
    record = artifacts.log_roc_curve("r", truth, scores)
    (curve,) = artifacts.load(record)["curves"]
    assert len(curve["x"]) == len(curve["thresholds"]) == 1000
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (0, 1, 1)
    assert record.size_bytes < 200_000


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "points"),
        ({"y_true": [0, 1]}, "points"),
        ({"y_true": [0], "y_score": [0.1, 0.2]}, "y_true"),
        ({"y_true": [], "y_score": []}, "y_true"),
        ({"y_true": [0, 1], "y_score": ["a", "b"]}, "y_score"),
        ({"y_true": ["x"], "y_score": [[1.0]], "labels": ["a"]}, "does not contain the class"),
        ({"points": ([0, 1], [1])}, "points has 2"),
        ({"points": 3}, "points"),
        ({"points": "ab"}, "points"),
    ],
)
def test_what_is_no_curve_is_refused(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_roc_curve("r", **arguments)


def test_a_histogram_of_values_is_that_of_numpy(artifacts):
    values = RANDOM.normal(size=(30, 40))
    record = artifacts.log_histogram("h", values, bins=20)
    counts, edges = np.histogram(values, bins=20)
    found = artifacts.load(record)
    assert found["counts"] == counts.tolist()
    assert np.allclose(found["bins"], edges)
    odd = artifacts.log_histogram("h", [np.nan, 1.0, np.inf, 1e308, -1e308])
    assert (odd.metadata["values"], odd.metadata["non_finite"]) == (5, 2)
    assert sum(artifacts.load(odd)["counts"]) == 3
    edges = artifacts.load(artifacts.log_histogram("h", [1, 2, 3], bins=[0, 2, 4]))
    assert edges == {"bins": [0, 2, 4], "counts": [1, 2]}
    assert sum(artifacts.load(artifacts.log_histogram("h", []))["counts"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [{}, {"values": [1], "counts": [1]}, {"values": ["a"]}, {"values": [1], "bins": 0},
     {"values": [1], "bins": [3, 1]}, {"values": [1], "bins": "auto!"}, {"counts": [1]}],
)  # fmt: skip
def test_what_is_no_histogram_is_refused(artifacts, arguments):
    with pytest.raises(SchemaValidationError):
        artifacts.log_histogram("h", **arguments)


@pytest.fixture
def figure():
    figure = matplotlib.figure.Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2, 3])
    return figure


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file_format", "media_type", "head"),
    [
        ("png", "image/png", b"\x89PNG\r\n\x1a\n"),
        ("svg", "image/svg+xml", b"<?xml"),
        ("pdf", "application/pdf", b"%PDF-"),
    ],
)
def test_a_matplotlib_figure_as_a_file(artifacts, figure, file_format, media_type, head):
    record = artifacts.log_figure("f", figure, file_format=file_format, step=2, namespace="eval")
    assert artifacts.load(record).startswith(head)
    assert (record.artifact_type, record.payload_format) == ("figure", "bytes")
    assert (record.artifact_key, record.step) == ("eval/f", 2)
    assert record.metadata == {"media_type": media_type, "library": "matplotlib"}
    assert record.payload_relative_path.endswith(f".{file_format}")


@pytest.mark.long
def test_the_size_follows_from_dpi(artifacts, figure):
    for arguments, size in (({}, (300, 150)), ({"dpi": 50}, (100, 50)), ({"dpi": 72.5}, (145, 72))):
        record = artifacts.log_figure("f", figure, **arguments)
        assert Image.open(io.BytesIO(artifacts.load(record))).size == size


@pytest.mark.long
def test_axes_stand_for_their_figure(artifacts):
    figure, axes = plt.subplots(1, 2)
    try:
        records = [artifacts.log_figure("f", given) for given in (figure, axes[0], axes[1])]
        assert len({record.sha256 for record in records}) == 1
        nested = figure.subfigures(1, 2)[0].subplots()
        nested.plot([1, 2])
        assert artifacts.log_figure("f", nested).sha256 != records[0].sha256
    finally:
        plt.close(figure)


def test_a_figure_that_is_changed_later_stays_as_it_was(artifacts, figure):
    record = artifacts.log_figure("f", figure)
    before = artifacts.load(record)
    figure.axes[0].plot([5, 1])
    assert artifacts.load(record) == before
    assert artifacts.log_figure("f", figure).sha256 != record.sha256


@pytest.mark.long
def test_a_plotly_figure_comes_back(artifacts):
    figure = go.Figure(
        [go.Scatter(x=np.arange(5), y=[1.0, None, 2.0, 3.5, 4.0]), go.Bar(y=[1, 2])],
        {"title": {"text": "loss ä"}},
    )
    record = artifacts.log_figure("f", figure, metadata={"mine": 1})
    assert (record.artifact_type, record.payload_format) == ("figure", "json")
    assert record.metadata == {"media_type": "application/json", "library": "plotly", "mine": 1}
    assert record.payload_relative_path.endswith(".json")
    assert go.Figure(artifacts.load(record)) == figure


@pytest.mark.parametrize(
    "figure", [None, 5, "figure.png", np.zeros((3, 3)), {"data": []}, object(), [1]]
)
def test_what_is_no_figure(artifacts, session, figure):
    with pytest.raises(quark.SchemaValidationError, match=r"^figure must be a matplotlib"):
        artifacts.log_figure("f", figure)
    assert artifacts.read() == ()
    assert not (session.run_path / "artifacts").exists()


def test_pyplot_stands_for_its_current_figure(artifacts):
    figure = plt.figure(figsize=(2, 1), dpi=50)
    try:
        figure.add_subplot().plot([1, 2])
        record = artifacts.log_figure("f", plt, dpi=50)
    finally:
        plt.close(figure)
    assert Image.open(io.BytesIO(artifacts.load(record))).size == (100, 50)


@pytest.mark.parametrize("file_format", ["jpg", "", None, 5, ["png"], "PNG"])
def test_an_unknown_file_format(artifacts, figure, file_format):
    with pytest.raises(quark.SchemaValidationError, match=r"^file_format must be one of 'png'"):
        artifacts.log_figure("f", figure, file_format=file_format)


@pytest.mark.parametrize("dpi", ["fine", -1, 0, [], float("nan")])
def test_a_dpi_that_cannot_be_drawn_with(artifacts, session, figure, dpi):
    with pytest.raises(quark.SchemaValidationError, match=r"^figure cannot be drawn"):
        artifacts.log_figure("f", figure, dpi=dpi)
    assert artifacts.read() == ()


@pytest.mark.long
def test_a_figure_that_cannot_be_drawn(artifacts, figure):
    figure.axes[0].set_title("$\\frac{1}{$")
    for log in (artifacts.log_figure, artifacts.log_image):
        with pytest.raises(quark.SchemaValidationError, match=r"^figure cannot be drawn: Value"):
            log("f", figure)
    assert artifacts.read() == ()


SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0..", "image/jpeg"),
        (b"GIF89a<script>", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
        (b"RIFF....WAVEfmt ", "audio/wav"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"\x1f\x8b\x08\0", "application/gzip"),
        (b"PAR1....", "application/vnd.apache.parquet"),
        (b"", "application/octet-stream"),
        (b"\x80\x05\x95", "application/octet-stream"),
        (b"a\0b", "application/octet-stream"),
        (b"\xfd\xfd\xfd", "application/octet-stream"),
        (b"plain text\n\x1b[1mbold\x1b[0m", "text/plain"),
        ("Grüße ".encode() * 2, "text/plain"),
        (b"\xef\xbb\xbfwith a mark", "text/plain"),
        ("a < b".encode("utf-16"), "text/plain"),
        (b"x = 1 < 2 <b>", "text/plain"),
        (b"<weights> 3", "text/plain"),
        (b'{"a": 1}', "application/json"),
        (b"  [1, 2]", "application/json"),
        (b"[section]\nkey = 1", "text/plain"),
        (b"{ braces }", "text/plain"),
        (b"<!DOCTYPE html><p>", "text/html"),
        (b"\n <SCRIPT>alert(1)</SCRIPT>", "text/html"),
        (b"<!-- hidden --><iframe src=x>", "text/html"),
        (b"<!-- never closed <script>", "text/html"),
        (b"<img src=x onerror=alert(1)>", "text/html"),
        ("<html>".encode("utf-16"), "text/html"),
        (b"<a", "text/html"),
        (SVG.encode(), "image/svg+xml"),
        (f'<?xml version="1.0"?>\n<!-- drawn -->\n{SVG}'.encode(), "image/svg+xml"),
        (b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "b">]><svg:svg>', "image/svg+xml"),
        (f"<!-- first -->{SVG}".encode(), "image/svg+xml"),
        (b'<?xml version="1.0"?><data/>', "application/xml"),
        (b'<?xml version="1.0"?><html xmlns="x">', "text/html"),
    ],
)
def test_a_payload_is_what_its_bytes_say(head, media_type):
    assert identify_media(head) == media_type


def test_a_text_may_be_cut_within_a_character():
    text = ("x" * (HEAD_BYTES - 1) + "é").encode()
    assert identify_media(text[:HEAD_BYTES]) == "text/plain"


def test_every_artifact_says_what_it_is(artifacts, tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a", "b")
    for payload, payload_format, media_type in (
        ("hello", None, "text/plain"),
        ("<script>alert(1)</script>", None, "text/html"),
        (b"\x89PNG\r\n\x1a\n", None, "image/png"),
        (file.getvalue(), None, "application/zip"),
        (pickle.dumps([1]), "bytes", "application/octet-stream"),
    ):
        record = artifacts.store("t", "n", payload, payload_format=payload_format)
        assert record.metadata == {"media_type": media_type}
    path = tmp_path / "innocent.png"
    path.write_bytes(b"<!doctype html><script>alert(1)</script>")
    for record in (artifacts.store_file("t", "n", path), artifacts.log_file(path)):
        assert record.metadata["media_type"] == "text/html"
        assert artifacts.load(record) == path.read_bytes()
    told_by_its_format = artifacts.store("t", "n", {"a": 1}, metadata={"mine": 2})
    assert told_by_its_format.payload_format == "json"
    assert told_by_its_format.metadata == {"mine": 2}
    said = artifacts.store("t", "n", b"1,2", metadata={"media_type": "text/csv"})
    assert said.metadata == {"media_type": "text/csv"}
