"""Nothing of an attempt comes to a store before its start, however long the start takes."""

import os
import threading

import pytest
from kit.programs import run_code

import quark
from quark_core.delivery import channel, stream
from quark_core.runs import recovery


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


# Where the journal is the store, it matters which one is played first.

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
import quark
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    children = []
    for number in range(1, 7):
        child = os.fork()
        if child == 0:
            metrics.log("m", float(number), step=number)
            metrics.close()
            session.open_run.end_stream("done", 5.0)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_of_a_run_are_played_after_its_start(tmp_path, monkeypatch):
    done = run_code(PROGRAM, tmp_path, env={**os.environ, "QUARK_JOURNAL_ONLY": "1"})
    run_id = done.stdout.strip()

    def read():
        session = quark.open_run(run_id, storage_dir=tmp_path)
        return sorted(r.value for r in quark.MetricsLogger(session).read())

    everything = [float(number) for number in range(7)]
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    assert read() == everything
    # The same journals, brought to where a database may be used.
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    results = recovery.sync(tmp_path)
    assert all(not result.quarantined for result in results)
    assert read() == everything
