"""Event files of the real writers, read by TensorBoard itself and by Quark."""

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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
    assert read_points(first["run_id"], "loss") == scalars_of(logged / "exp1")["loss"]


def test_config_histograms_images_and_texts_come_too_and_secrets_do_not(logged, take, store):
    (run,) = take("tensorboard", logged)
    opened = quark.open_run(run["run_id"], storage_dir=store)
    assert opened.context.run.status == "completed"
    from quark_core.runs.composition import open_reader

    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {"lr": 0.1, "bs": 32, "api_key": "[redacted]"}
    artifacts = quark.ArtifactStore(opened)
    images = artifacts.read(artifact_type="image")
    assert [image.step for image in images] == [0, 50]
    assert artifacts.load(images[0]).startswith(b"\x89PNG")
    texts = artifacts.read(artifact_type="text")
    assert [artifacts.load(text) for text in texts] == ["hello 0", "hello 50"]
