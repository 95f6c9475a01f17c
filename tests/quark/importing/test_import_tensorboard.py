"""Event files of the real writers, read by TensorBoard itself and by Quark."""

import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

import quark

ALL = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}


def scalars_of(folder):
    """Each scalar, of either form, as TensorBoard's own reader has it."""
    events = EventAccumulator(str(folder), size_guidance=ALL).Reload()
    tags = events.Tags()
    plain = {
        tag: [(e.step, e.value, round(e.wall_time * 1e6)) for e in events.Scalars(tag)]
        for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        found = [(e, make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if all(array.size == 1 and array.dtype.kind == "f" for _, array in found):
            plain[tag] = [(e.step, float(a), round(e.wall_time * 1e6)) for e, a in found]
    return plain


@pytest.fixture
def logged(tmp_path):
    folder = tmp_path / "runs"
    rng = np.random.default_rng(0)
    with SummaryWriter(folder / "exp1") as writer:
        for step in range(100):
            writer.add_scalar("loss", 1 / (step + 1), step)
            writer.add_scalar("a tag/with odd@letters", step * 0.1, step)
            writer.add_scalar("tensor", step * 0.3, step, new_style=True)
        writer.add_scalar("bad", float("nan"), 3)
        for step in (0, 50):
            writer.add_histogram("layer1.weight", rng.normal(size=1000), step)
            writer.add_image("sample", rng.random((3, 16, 16)), step)
            writer.add_text("note", f"hello {step}", step)
        writer.add_hparams({"lr": 0.1, "bs": 32, "api_key": "hunter2hunter2"}, {"hp/acc": 0.5})
    return folder


def test_every_point_is_the_one_that_tensorboard_reads(logged, take, read_points):
    (run,) = take("tensorboard", logged)
    told = scalars_of(logged / "exp1")
    assert len(told["loss"]) == 100
    for tag in ("loss", "tensor"):
        assert read_points(run["run_id"], tag) == told[tag]
    odd = "a tag/with odd@letters"
    encoded = "a_x20_tag/with_x20_odd_x40_letters"
    assert read_points(run["run_id"], encoded) == told[odd]
    ((step, value, _),) = read_points(run["run_id"], "bad", include_non_finite=True)
    assert step == 3
    assert value != value


def test_a_second_import_brings_nothing_and_a_third_only_what_is_new(logged, take, read_points):
    (first,) = take("tensorboard", logged)
    (second,) = take("tensorboard", logged)
    assert second["run_id"] == first["run_id"]
    assert (second["points"], second["records"], second["files"]) == (0, 0, 0)
    with SummaryWriter(logged / "exp1") as writer:
        writer.add_scalar("loss", 0.5, 200)
    (third,) = take("tensorboard", logged)
    assert third["points"] == 1
    # TensorBoard reads files in the order of their names, of which the tenth is before the ninth.
    points = scalars_of(logged / "exp1")["loss"]
    assert sorted(read_points(first["run_id"], "loss")) == sorted(points)


def test_config_histograms_images_and_texts_come_too_and_secrets_do_not(logged, take, store):
    (run,) = take("tensorboard", logged)
    opened = quark.open_run(run["run_id"], storage_dir=store)
    assert opened.context.run.status == "completed"
    from quark_core.runs.backend_choice import open_reader

    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {"lr": 0.1, "bs": 32, "api_key": "[redacted]"}
    artifacts = quark.ArtifactStore(opened)
    images = artifacts.read(artifact_type="image")
    assert [image.step for image in images] == [0, 50]
    assert artifacts.load(images[0]).startswith(b"\x89PNG")
    texts = artifacts.read(artifact_type="markdown")
    assert [artifacts.load(text) for text in texts] == ["hello 0", "hello 50"]
    histograms = artifacts.read(artifact_key="layer1.weight")
    (first, _) = (artifacts.load(one) for one in histograms)
    events = EventAccumulator(str(logged / "exp1"), size_guidance=ALL).Reload()
    told = events.Histograms("layer1.weight")[0].histogram_value
    assert sum(first["counts"]) == told.num == 1000
    assert (first["bins"][0], first["bins"][-1]) == (told.min, told.max)
    assert len(first["counts"]) <= 129
    below = np.cumsum(told.bucket)
    summed = dict(zip(told.bucket_limit, below.tolist(), strict=True))
    for edge, count in zip(first["bins"][1:-1], np.cumsum(first["counts"]), strict=False):
        assert summed[edge] == count


def write_events(path, *events):
    """An event file of these events, by TensorBoard's own writer."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def scalar(tag, step, value, time_s=1e9):
    event = Event(step=step, wall_time=time_s + step)
    event.summary.value.add(tag=tag, simple_value=value)
    return event


def test_a_file_that_is_cut_anywhere_brings_what_is_whole_and_the_rest_later(
    logged, take, read_points
):
    (path,) = (logged / "exp1").glob("events*")
    whole = path.read_bytes()
    told = scalars_of(logged / "exp1")["loss"]
    run_id, counts = None, []
    for size in (len(whole) // 5, len(whole) // 2 + 3, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        (run,) = take("tensorboard", logged)
        run_id = run_id or run["run_id"]
        found = read_points(run_id, "loss")
        assert found == told[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert counts[-1] == 100


def test_a_damaged_file_gives_what_comes_before_and_says_how_much_is_lost(
    logged, take, read_points
):
    (path,) = (logged / "exp1").glob("events*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    (run,) = take("tensorboard", logged)
    (loss,) = run["losses"]
    assert loss["kind"] == "bytes"
    assert "checksum" in loss["reason"] or "length" in loss["reason"]
    found = read_points(run["run_id"], "loss")
    assert found == scalars_of(logged / "exp1")["loss"][: len(found)]
    assert found


def test_a_restart_hides_what_was_at_its_step_and_beyond(tmp_path, take, read_points):
    folder = tmp_path / "runs" / "exp"
    first = [Event(wall_time=1e9, file_version="brain.Event:2")]
    first += [scalar("loss", step, float(step)) for step in range(10)]
    write_events(folder / "events.out.tfevents.1.a", *first)
    start = Event(wall_time=2e9, step=5)
    start.session_log.status = SessionLog.START
    again = [scalar("loss", step, step + 0.5, 2e9) for step in (5, 6)]
    header = Event(wall_time=2e9, file_version="brain.Event:2")
    write_events(folder / "events.out.tfevents.2.a", header, start, *again)
    (run,) = take("tensorboard", folder.parent)
    found = [(step, value) for step, value, _ in read_points(run["run_id"], "loss")]
    assert found == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5)]
    assert read_points(run["run_id"], "loss") == scalars_of(folder)["loss"]
    assert len(read_points(run["run_id"], "loss", all_attempts=True)) == 12


def test_train_and_validation_are_one_run_and_other_folders_runs_of_their_own(
    tmp_path, take, read_points
):
    root = tmp_path / "logs"
    for place, part in enumerate(("train", "validation")):
        write_events(root / "keras" / part / "events.out.tfevents.1.h", scalar("loss", 0, place))
    write_events(root / "other" / "events.out.tfevents.1.h", scalar("loss", 0, 7.0))
    keras, other = take("tensorboard", root)
    assert (keras["name"], other["name"]) == ("keras", "other")
    assert read_points(keras["run_id"], "train/loss")[0][1] == 0.0
    assert read_points(keras["run_id"], "validation/loss")[0][1] == 1.0
    assert read_points(other["run_id"], "loss")[0][1] == 7.0
    # A folder whose name comes before in the alphabet makes no other run of it.
    write_events(root / "keras" / "eval" / "events.out.tfevents.2.h", scalar("loss", 5, 3.0, 2e9))
    again, _ = take("tensorboard", root)
    assert (again["run_id"], again["points"], again["new"]) == (keras["run_id"], 1, False)


def test_the_series_of_add_scalars_are_metrics_of_the_run(tmp_path, take, read_points):
    with SummaryWriter(tmp_path / "runs" / "exp") as writer:
        writer.add_scalar("own", 1.0, 0)
        writer.add_scalars("losses/all", {"train": 1.0, "val": 2.0}, 5)
    (run,) = take("tensorboard", tmp_path / "runs")
    assert read_points(run["run_id"], "losses/all/val")[0][:2] == (5, 2.0)


def test_a_copied_folder_is_the_same_run(logged, take, tmp_path):
    (first,) = take("tensorboard", logged)
    shutil.copytree(logged, tmp_path / "copy")
    (second,) = take("tensorboard", tmp_path / "copy")
    assert second["run_id"] == first["run_id"]
    assert second["points"] == 0
    shutil.copytree(logged / "exp1", logged / "kept" / "exp1")
    one, other = take("tensorboard", logged, status=1)
    assert one["failure"] is None
    assert "twice" in other["failure"]


def test_what_is_no_event_file_fails_alone(logged, take):
    (logged / "bad").mkdir()
    (logged / "bad" / "events.out.tfevents.1.h").write_bytes(b"\x08" + b"\0" * 11 + b"junkjunk" * 4)
    bad, good = take("tensorboard", logged, status=1)
    assert "not an event file" in bad["failure"]
    assert good["points"] > 100


def test_after_an_import_runs_are_analyzed_and_compared(tmp_path, take, store, read_points):
    for name, rate in (("slow", 0.01), ("fast", 0.1)):
        with SummaryWriter(tmp_path / "runs" / name) as writer:
            for step in range(200):
                writer.add_scalar("train/loss", float(np.exp(-rate * step)), step)
    fast, slow = take("tensorboard", tmp_path / "runs")
    fast_last = read_points(fast["run_id"], "train/loss")[-1][1]
    one, two = (quark.open_run(run["run_id"], storage_dir=store) for run in (fast, slow))
    assert quark.AnalyzerEngine(one).analyze().health_scores
    (diff,) = quark.ComparisonEngine(one).compare(two).metric_diffs
    assert (diff.metric_key, diff.last.primary) == ("train/loss", fast_last)
    assert diff.last.difference < 0
