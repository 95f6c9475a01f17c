"""log_figure: figures of matplotlib as files, of plotly as JSON."""

import io

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import plotly.graph_objects as go
import pytest
from PIL import Image

import quark


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
    with pytest.raises(quark.SchemaValidationError, match=r"^figure must be one of matplotlib"):
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
    with pytest.raises(quark.SchemaValidationError, match=r"^file_format must be one of png"):
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
