"""log_image: what is stored is what was seen, pixel for pixel."""

import importlib
import io

import matplotlib.figure
import numpy as np
import pytest
import torch
from PIL import Image

import quark
from quark_core.errors import MissingLibraryError

CHANCE = np.random.default_rng(0)
COLOR = CHANCE.integers(0, 256, (5, 7, 3), dtype=np.uint8)
ALPHA = CHANCE.integers(0, 256, (5, 7, 4), dtype=np.uint8)
GRAY = CHANCE.integers(0, 256, (5, 7), dtype=np.uint8)


@pytest.fixture
def show(artifacts):
    """Log an image, and return the record and what is read back."""

    def log(image, **arguments):
        record = artifacts.log_image("i", image, **arguments)
        found = Image.open(io.BytesIO(artifacts.load(record)))
        found.load()
        assert (record.artifact_type, record.payload_format) == ("image", "bytes")
        assert found.format == "PNG"
        said = record.metadata
        assert (said["media_type"], said["width"], said["height"], said["mode"]) == (
            "image/png",
            *found.size,
            found.mode,
        )
        assert record.payload_relative_path.endswith(".png")
        return record, found

    return log


def palette():
    return Image.fromarray(COLOR).convert("P", palette=Image.Palette.ADAPTIVE)


@pytest.mark.parametrize(
    ("image", "mode"),
    [
        (Image.fromarray(GRAY > 99), "1"),
        (Image.fromarray(GRAY), "L"),
        (Image.fromarray(GRAY).convert("LA"), "LA"),
        (palette(), "P"),
        (Image.fromarray(COLOR), "RGB"),
        (Image.fromarray(ALPHA), "RGBA"),
        (Image.fromarray(GRAY.astype(np.uint16) * 257), "I;16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pil_image_stays_what_it_is(show, image, mode):
    assert image.mode == mode
    _, found = show(image)
    assert found.mode == mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "RGBX", "I;16B"])
def test_a_pil_image_that_png_lacks_becomes_rgb(show, mode):
    image = Image.new(mode, (7, 5), 9 if mode == "I;16B" else 0)
    _, found = show(image)
    assert found.mode == "RGB"
    assert found.tobytes() == image.convert("RGB").tobytes()


def test_numbers_of_a_pil_image_are_those_of_an_array(show):
    floats = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
    integers = np.arange(12, dtype=np.int32).reshape(3, 4)
    for array in (floats, integers):
        _, of_array = show(array)
        _, of_image = show(Image.fromarray(array))
        assert of_image.tobytes() == of_array.tobytes()
        assert len(set(of_image.tobytes())) == 12


@pytest.mark.parametrize(("mode", "becomes"), [("PA", "RGBA"), ("RGBa", "RGBA"), ("La", "LA")])
def test_transparency_is_kept(show, mode, becomes):
    image = Image.fromarray(ALPHA).convert("RGBa").convert("RGBA")
    if mode != "RGBa":
        image = image.convert("LA")
    given = image.convert(mode)
    _, found = show(given)
    assert found.mode == becomes
    np.testing.assert_array_equal(np.asarray(found), np.asarray(given.convert(becomes)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["u1", "i8", "i2", "u4", ">i4"])
@pytest.mark.parametrize("array", [GRAY, COLOR, ALPHA], ids=["HW", "HWC", "HWCA"])
def test_integers_stand_for_themselves(show, array, dtype):
    record, found = show(array.astype(dtype))
    np.testing.assert_array_equal(np.asarray(found), array)
    assert record.metadata.keys() == {"media_type", "width", "height", "mode"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("array", "layout", "expected"),
    [
        (COLOR.transpose(2, 0, 1), None, COLOR),
        (COLOR.transpose(2, 0, 1), "CHW", COLOR),
        (COLOR, "HWC", COLOR),
        (GRAY, "HW", GRAY),
        (GRAY[None], None, GRAY),
        (GRAY[:, :, None], None, GRAY),
        (COLOR[:3, :, :], None, COLOR[:3]),
        (COLOR[:3], "CHW", None),
        (COLOR[:, ::-1], None, COLOR[:, ::-1]),
        (np.asfortranarray(COLOR), None, COLOR),
        (COLOR[:1, :1], None, COLOR[:1, :1]),
    ],
)
def test_layouts_of_numpy(show, artifacts, array, layout, expected):
    if expected is None:
        expected = array.transpose(1, 2, 0)
        assert expected.shape == (7, 3, 3)
    _, found = show(array, layout=layout)
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_channel_count_of_one_pixel_is_told_apart(show):
    array = np.arange(9, dtype=np.uint8).reshape(3, 1, 3)
    np.testing.assert_array_equal(np.asarray(show(array)[1]), array)
    tensor = torch.from_numpy(array)
    np.testing.assert_array_equal(np.asarray(show(tensor)[1]), array.transpose(1, 2, 0))


def test_booleans_and_floats(show):
    flags = GRAY > 99
    np.testing.assert_array_equal(np.asarray(show(flags)[1]), flags * 255)
    for dtype in ("f2", "f4", "f8"):
        record, found = show((COLOR / 255.0).astype(dtype))
        np.testing.assert_array_equal(np.asarray(found), COLOR)
        assert "clipped" not in record.metadata


def test_floats_beyond_0_to_1_are_cut_off_and_told(show):
    array = np.array([[-0.5, 0.0, 0.5], [1.0, 1.5, np.nan], [np.inf, -np.inf, 1.0]])
    with pytest.warns(RuntimeWarning, match="2 values outside 0 to 1.*normalize=True"):
        record, found = show(array)
    assert np.asarray(found).tolist() == [[0, 0, 128], [255, 255, 0], [0, 0, 255]]
    assert (record.metadata["clipped"], record.metadata["non_finite"]) == (2, 3)


def test_normalize_spreads_what_is_finite(show):
    record, found = show(np.array([[-10.0, np.nan], [0.0, 10.0]]), normalize=True)
    assert np.asarray(found).tolist() == [[0, 0], [128, 255]]
    assert record.metadata["non_finite"] == 1
    assert "clipped" not in record.metadata
    record, found = show(np.array([[-1000, 0], [500, 1000]]), normalize=True)
    assert np.asarray(found).tolist() == [[0, 128], [191, 255]]
    for flat in (np.full((2, 2), 7.0), np.full((2, 2), np.nan), np.full((2, 2), np.inf)):
        assert np.asarray(show(flat, normalize=True)[1]).tolist() == [[0, 0], [0, 0]]
    extreme = np.array([[-1.7e308, 1.7e308]])
    assert np.asarray(show(extreme, normalize=True)[1]).tolist() == [[0, 255]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_float_tensors(show, dtype):
    tensor = torch.from_numpy(COLOR.transpose(2, 0, 1).copy())
    _, found = show((tensor > 99).to(dtype))
    np.testing.assert_array_equal(np.asarray(found), (COLOR > 99) * 255)


def test_tensors_of_many_kinds(show):
    tensor = torch.from_numpy(COLOR.transpose(2, 0, 1).copy())
    for given in (tensor, tensor.long(), tensor.permute(1, 2, 0)):
        layout = "HWC" if given.shape[2] == 3 else None
        np.testing.assert_array_equal(np.asarray(show(given, layout=layout)[1]), COLOR)
    grown = (tensor / 255.0).requires_grad_()
    np.testing.assert_array_equal(np.asarray(show(grown)[1]), COLOR)
    assert grown.grad is None
    np.testing.assert_array_equal(np.asarray(show(tensor[0] > 99)[1]), (COLOR[..., 0] > 99) * 255)
    np.testing.assert_array_equal(np.asarray(show(tensor[:1])[1]), COLOR[..., 0])


NO_IMAGES = [
    None,
    5,
    [[1, 2], [3, 4]],
    b"\x89PNG",
    np.zeros(5),
    np.zeros(()),
    np.zeros((2, 2, 2)),
    np.zeros((1, 3, 4, 4)),
    np.zeros((0, 5)),
    np.zeros((0, 5, 3)),
    np.array([[256]]),
    np.array([[-1]]),
    np.array([["a"]]),
    np.array([[None]]),
    np.array([[1j]]),
    np.zeros((2, 2), "M8[s]"),
    torch.zeros(3, 4, 4, device="meta"),
    torch.zeros(4, 4).to_sparse(),
    torch.zeros(2, 2, dtype=torch.complex64),
    Image.new("RGB", (0, 0)),
    Image.new("RGB", (0, 5)),
]


def test_what_is_no_image(artifacts, session):
    for image in NO_IMAGES:
        with pytest.raises(quark.SchemaValidationError, match=r"^image"):
            artifacts.log_image("i", image)
    assert artifacts.read() == ()
    assert not (session.run_path / "artifacts").exists()


@pytest.mark.parametrize("layout", ["WHC", "", 5, ["HWC"], "hwc"])
def test_an_unknown_layout(artifacts, layout):
    with pytest.raises(quark.SchemaValidationError, match=r"^layout must be one of"):
        artifacts.log_image("i", COLOR, layout=layout)


@pytest.mark.parametrize("layout", ["HW", "CHW"])
def test_a_layout_that_does_not_fit(artifacts, layout):
    with pytest.raises(quark.SchemaValidationError, match=r"got \(5, 7, 3\)"):
        artifacts.log_image("i", COLOR, layout=layout)


@pytest.mark.parametrize(
    ("form", "suffix", "media_type"),
    [("PNG", "png", "image/png"), ("JPEG", "jpg", "image/jpeg"), ("GIF", "gif", "image/gif")],
)
def test_an_image_file_is_stored_as_it_is(artifacts, tmp_path, form, suffix, media_type):
    path = tmp_path / f"picture.{suffix}"
    frames = [Image.fromarray(COLOR), Image.fromarray(COLOR[::-1].copy())]
    more = {"save_all": True, "append_images": frames[1:]} if form == "GIF" else {}
    frames[0].save(path, format=form, **more)
    for given in (path, str(path)):
        record = artifacts.log_image("i", given, metadata={"mine": 1, "width": "wide"})
        assert artifacts.load(record) == path.read_bytes()
        assert record.payload_relative_path.endswith(f".{suffix}")
        assert record.metadata["media_type"] == media_type
        assert (record.metadata["height"], record.metadata["width"]) == (5, "wide")
        assert record.metadata["mine"] == 1


@pytest.mark.long
def test_a_file_that_is_no_image(artifacts, session, tmp_path):
    path = tmp_path / "picture.png"
    for content in (b"", b"not an image", b"\x89PNG\r\n\x1a\n"):
        path.write_bytes(content)
        with pytest.raises(quark.SchemaValidationError, match="is not an image file"):
            artifacts.log_image("i", path)
    assert artifacts.read() == ()
    assert not (session.run_path / "artifacts").exists()


def test_a_damaged_image_that_is_read_only_now(artifacts, tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.resize(COLOR, (500, 500, 3))).save(path)
    path.write_bytes(path.read_bytes()[:300])
    with Image.open(path) as lazy, pytest.raises(quark.SchemaValidationError, match=r"^image"):
        artifacts.log_image("i", lazy)


def test_a_matplotlib_figure_is_drawn(show, artifacts):
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
    figure.add_subplot().plot([1, 2])
    record = artifacts.log_image("i", figure)
    found = Image.open(io.BytesIO(artifacts.load(record)))
    assert found.size == (100, 50)
    assert record.metadata == {"media_type": "image/png"}


def test_without_pillow_the_extra_is_named(artifacts, tmp_path, monkeypatch):
    Image.fromarray(COLOR).save(tmp_path / "picture.png")
    real = importlib.import_module

    def refuse(name, package=None):
        if name.partition(".")[0] == "PIL":
            raise ImportError("No module named 'PIL'")
        return real(name, package)

    monkeypatch.setattr("quark_core.errors.import_module", refuse)
    for image in (COLOR, torch.zeros(3, 4, 4), tmp_path / "picture.png", object()):
        with pytest.raises(MissingLibraryError, match=r"quark-tracker\[media\]") as said:
            artifacts.log_image("i", image)
        assert "log_image() needs PIL" in str(said.value)
        assert said.value.name == "PIL"
    assert artifacts.read() == ()
