"""Nothing of an attempt comes to a store before its start, however long the start takes."""

import threading

import pytest

import quark
from quark_core.delivery import channel, stream


@pytest.fixture
def slow_start(monkeypatch):
    """The start has its number and is not in its channel before two heartbeats have passed."""
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.001)
    beats = threading.Semaphore(0)
    beat, put = stream.RunStream._beat, channel.Channel.put
    held = []

    def beat_and_tell(self):
        beat(self)
        beats.release()

    def put_late(self, record):
        if getattr(record, "action", None) == "start":
            # A beat's tick is over when the next beat comes.
            held.append([beats.acquire(timeout=60) for _ in range(3)])
        return put(self, record)

    monkeypatch.setattr(stream.RunStream, "_beat", beat_and_tell)
    monkeypatch.setattr(channel.Channel, "put", put_late)
    return held


@pytest.mark.parametrize("backends", [None, "csv"])
def test_heartbeats_wait_for_the_start(tmp_path, slow_start, backends):
    with quark.start_run(
        project="p", storage_dir=tmp_path, backends=backends, system_metrics=False
    ) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert session.report_delivery().complete
    quark.resume_run(
        run_id=session.run_id,
        storage_dir=tmp_path,
        backends=backends,
        reopen=True,
        system_metrics=False,
    ).end_run()
    assert slow_start == [[True] * 3] * 2

    run = quark.open_run(session.run_id, tmp_path)
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert [record.value for record in quark.MetricsLogger(run).read(metric_key="m")] == [1.0]
