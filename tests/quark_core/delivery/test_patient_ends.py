"""The end of a run goes on while something gets on, and is bounded where nothing does."""

import itertools
import threading
import time

import pytest

import quark
from quark_core.delivery import stream as stream_module
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.delivery_worker import Lane
from quark_core.delivery.segments import Origin
from quark_core.delivery.sending import Quarantine
from quark_core.delivery.stream import RunStream
from quark_core.runs import open_run
from quark_core.testing.fakes import BatchMaker, ScriptedBackend


class SlowBackend(ScriptedBackend):
    """Takes a moment for each batch."""

    def __init__(self, moment_s):
        super().__init__()
        self._moment_s = moment_s

    def write(self, batch):
        """See `ScriptedBackend`."""
        threading.Event().wait(self._moment_s)
        super().write(batch)


def open_stream(open_backend, batches, **arguments):
    log = BatchLog()
    lane = Lane("mirror", open_backend, log.open_cursor(), Quarantine(None, "mirror"))
    maker = BatchMaker("run0")
    for _ in range(batches):
        log.append(maker.metrics(("m", 0, 0.0)))
    stream = RunStream(Origin("run0"), log, [lane], **arguments)
    stream.start()
    return stream


@pytest.mark.long
def test_a_mirror_that_gets_on_is_waited_for():
    stream = open_stream(lambda: SlowBackend(0.05), 60)
    told = []
    report = stream.close(1.0, patience_s=30.0, on_overtime=told.append)
    assert report.complete
    assert [item.complete for item in told] == [False]


def test_an_end_with_hardly_any_time_does_not_spin():
    stream = open_stream(lambda: SlowBackend(0.005), 200, measure_work=lambda: next(looks))
    looks = itertools.count()
    began_s = time.monotonic()
    assert stream.close(0.02, patience_s=100.0).complete
    # It looks each 0.05 s at most, however long it has to wait.
    assert next(looks) <= (time.monotonic() - began_s) / 0.05 + 2


def test_without_patience_the_end_has_its_time_only():
    stream = open_stream(lambda: SlowBackend(0.05), 2000)
    assert not stream.close(0.5).complete


def test_a_mirror_that_drips_for_ever_is_not(monkeypatch):
    monkeypatch.setattr(stream_module, "PATIENCE_TIMES", 2)
    stream = open_stream(lambda: SlowBackend(0.1), 2000)
    while not stream.report().lanes[0].delivered:
        threading.Event().wait(0.001)
    (lane,) = stream.close(0.5, patience_s=0.5).lanes
    assert lane.waiting > 0
    assert lane.delivered > 0


def test_a_mirror_that_hangs_is_not():
    backend = ScriptedBackend(["hang"])
    stream = open_stream(lambda: backend, 2)
    told = []
    report = stream.close(0.5, patience_s=0.5, on_overtime=told.append)
    assert not report.complete
    assert told == []
    backend.release.set()


@pytest.mark.sampled
@pytest.mark.parametrize("works", [True, False])
def test_a_helper_that_imports_gets_on(works):
    opened, looks = threading.Event(), itertools.count()

    def measure():
        look = next(looks)
        if look >= 20:
            opened.set()
        return float(look) if works else 1.0

    def open_backend():
        opened.wait()
        return ScriptedBackend()

    stream = open_stream(open_backend, 3, measure_work=measure)
    report = stream.close(1.0, patience_s=30.0 if works else 1.0)
    assert report.complete is works
    opened.set()


def test_the_work_of_a_helper_is_no_progress_of_a_mirror_that_fails():
    backend = ScriptedBackend(["ok"], always="unavailable")
    counted = itertools.count()
    stream = open_stream(lambda: backend, 3, measure_work=lambda: float(next(counted)))
    while backend.calls < 2:
        threading.Event().wait(0.001)
    assert not stream.close(0.5, patience_s=0.5).complete


def test_writers_and_the_run_share_one_time_at_their_ends(tmp_path, monkeypatch):
    """After a flood each of them waited for the journal with a budget of its own."""
    session = quark.start_run(project="p", storage_dir=tmp_path)
    writers = [quark.MetricsLogger(session), quark.EventLogger(session)]
    stream = session.open_run.stream
    waited = []
    real = stream.hand_over

    def hand_over(timeout_s, *, patience_s=0.0):
        waited.append(timeout_s)
        real(30.0)
        # As where the journal's disk hangs, after the whole of that time.

    monkeypatch.setattr(stream, "hand_over", hand_over)
    for writer in writers:
        writer.close()
    session.end_run()
    whole_s, journal_s = open_run.settings.exit_timeout_s(), open_run.settings.journal_timeout_s()
    assert waited == [whole_s, journal_s, journal_s]
