"""What a notebook is sent of a run that goes on: what is new, bounded, each point once."""

import threading

import pytest

import quark
from quark.page.cards import show_still
from quark.page.live_view import MOST_CURVES, LiveFeed
from quark.page.pack import decode_pack
from quark.page.report import open_session_source
from quark_core.errors import SessionStoreError

HOSTILE = "<img src=x onerror=alert(1)>"


class Followed:
    """A run, and what was sent of it."""

    def __init__(self, session):
        self.session = session
        self.metrics = quark.MetricsLogger(session)
        self.source = open_session_source(session, flushes=False)
        self.feed = LiveFeed(self.source, session.open_run)
        self.said = {}
        self.points = {}
        self.parts = []

    def log(self, steps, **values):
        for step in steps:
            for name, value in (values or {"loss": 1.0}).items():
                self.metrics.log(f"train/{name}", value, step=step)
        self.session.flush()

    def receive(self):
        """What the browser does of a part; the number of bytes, 0 where none came."""
        part = self.feed.read_news()
        if part is None:
            return 0
        head, columns = decode_pack(part)
        self.said.update(head)
        self.parts.append(head)
        if head["whole"]:
            self.points = {}
        for place, curve in enumerate(head["curves"]):
            known = self.points.setdefault(curve["name"], [])
            known.extend(zip(columns[f"{place}.step"], columns[f"{place}.mean"], strict=True))
        return len(part)


@pytest.fixture
def followed(tmp_path):
    session = quark.start_run(
        project="p", storage_dir=tmp_path, name=HOSTILE, config={"max_steps": 1000}
    )
    made = Followed(session)
    yield made
    made.feed.close()
    if session.status == "running":
        session.end_run()


def test_each_point_comes_once_and_nothing_where_nothing_came(followed):
    followed.log(range(10))
    followed.receive()
    assert followed.said["whole"]
    followed.receive()  # the analysis that was asked for may be there
    assert followed.receive() == 0
    for end in (20, 35, 36):
        followed.log(range(len(followed.points["train/loss"]), end))
        followed.receive()
        steps = [int(step) for step, _ in followed.points["train/loss"]]
        assert steps == list(range(end))
    assert not followed.said["whole"]
    numbers = [part["number"] for part in followed.parts]
    assert numbers == list(range(1, len(numbers) + 1))
    assert followed.said["run"]["newest_step"] == 35
    assert followed.said["progress"]["of"] == 1000


def test_what_has_not_changed_is_not_said_again(followed):
    followed.log(range(10))
    first = followed.receive()
    followed.log(range(10, 11))
    news = followed.receive()
    assert news < first
    assert not {"names", "findings", "metric_count"} & followed.parts[-1].keys()


def test_a_part_is_bounded_however_much_came(followed):
    followed.log([0])
    followed.receive()
    for step in range(1, 3001):
        followed.metrics.log("train/loss", float(step % 7), step=step)
    followed.session.flush()
    assert followed.receive() < 4_000
    assert len(followed.points["train/loss"]) <= 41
    assert followed.parts[-1]["curves"][0]["points"] == 3000


def test_a_metric_that_is_new_brings_all(followed):
    followed.log(range(10))
    followed.receive()
    followed.log(range(10, 12), loss=1.0, accuracy=0.5)
    followed.receive()
    assert followed.said["whole"]
    assert followed.said["names"] == ["train/loss", "train/accuracy"]
    assert len(followed.points["train/loss"]) == 12


def test_of_many_metrics_the_first_are_drawn_and_the_others_counted(followed):
    followed.log(range(3), **{f"m{place}": 1.0 for place in range(40)}, loss=2.0)
    followed.receive()
    assert len(followed.said["names"]) == MOST_CURVES
    # What the run is judged by, then as people count.
    assert followed.said["names"][:3] == ["train/loss", "train/m0", "train/m1"]
    assert followed.said["metric_count"] == 41


def test_what_the_monitor_has_raised_is_there_at_once(followed):
    raised = threading.Event()
    with quark.monitor(
        followed.session, every_n_steps=1, min_interval_s=0.01, on_alert=lambda _: raised.set()
    ):
        followed.log(range(30))
        followed.receive()
        followed.log(range(30, 60), loss=float("nan"))
        assert raised.wait(60)
        followed.receive()
        assert followed.said["findings"][0]["severity"] == "critical"
        assert followed.said["finding_count"] >= 1
        assert followed.said["health"]["known"]


def test_the_end_of_a_run_is_said(followed):
    followed.log(range(10))
    followed.receive()
    assert not followed.feed.is_over
    followed.session.end_run()
    followed.receive()
    assert followed.said["run"]["state"] == "completed"
    assert followed.feed.is_over


def test_a_store_that_cannot_be_read_is_an_error_and_the_next_part_goes_on(followed, monkeypatch):
    followed.log(range(10))
    followed.receive()
    followed.log(range(10, 12))

    def fail(*_):
        raise SessionStoreError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(followed.source.reader, "summarize", fail)
        with pytest.raises(SessionStoreError):
            followed.receive()
    said = decode_pack(followed.feed.say("The store cannot be read now"))[0]
    assert said["note"]
    followed.receive()
    assert len(followed.points["train/loss"]) == 12
    assert followed.said["note"] == ""


def test_the_last_state_in_words_needs_no_script_and_no_name_in_it_is_markup(followed):
    followed.log(range(300))
    followed.receive()
    still = show_still(followed.feed.said, followed.feed.lines)
    assert "&lt;img" in still
    assert "<img" not in still
    assert "step 299" in still
    assert "train/loss 1" in still
    assert "<svg" in still
    assert len(still) < 20_000


def test_a_run_without_metrics_is_shown_too(followed):
    followed.receive()
    assert followed.said["names"] == []
    assert "running" in show_still(followed.feed.said, followed.feed.lines)
