"""Where more comes than can go, memory stays bounded and every record is accounted for."""

import errno
import gc
import os
import threading
import tracemalloc

import pytest
from journaled import adds_up, open_stream, put_event, put_metric, stored_values
from kit.programs import log_steps, wait_until

import quark
from quark_core.delivery.channel import MetricKey
from quark_core.delivery.delivery_state import Files
from quark_core.errors import SessionStoreError
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.testing.fakes import ScriptedBackend

CAPACITY = 256 * 1024  # 1,024 items of a channel


class StoppedFiles(Files):
    """A disk that takes nothing until it is let."""

    def __init__(self):
        self.stopped = True

    def write(self, descriptor, data):
        if self.stopped:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


def open_small(directory, backend, files, log_bytes=20_000, **arguments):
    return open_stream(
        directory,
        backend,
        files=files,
        log_bytes=log_bytes,
        window_bytes=log_bytes,
        capacity_bytes=CAPACITY,
        tick_s=0.001,
        **arguments,
    )


def hold_delivery(stream):
    """Let nothing be framed any more."""
    stands = threading.Event()
    stream._tick = lambda *, sync: stands.set()
    assert stands.wait(60)


def test_a_burst_into_a_stopped_journal_is_bounded_counted_and_told(tmp_path):
    files, backend, told = StoppedFiles(), ScriptedBackend(always="unavailable"), []
    stream = open_small(tmp_path / "j", backend, files, on_gap=told.append)
    for value in range(100_000):
        put_metric(stream, value)
    assert wait_until(lambda: adds_up(stream.report().lanes[0]))
    assert len(stream.channel("metric").items) <= CAPACITY // 256
    files.stopped = False
    backend._always = "ok"
    assert wait_until(lambda: told and stream.report().lanes[0].waiting == 0)
    (lane,) = stream.close(60).lanes
    assert adds_up(lane)
    assert lane.submitted == 100_000
    assert (lane.waiting, lane.unknown) == (0, 0)
    assert lane.dropped > 0
    assert sum(gap["metric"] for gap in told) == lane.dropped
    found = stored_values(backend)
    assert found == sorted(set(found))
    assert len(found) == lane.delivered == 100_000 - lane.dropped
    assert found[-1] == 99_999  # the newest are kept


def test_a_gap_is_told_in_the_run_itself(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        session.flush()
        session.open_run.background.join()
        stream = session.open_run.stream
        tick = stream._tick
        hold_delivery(stream)
        stream._memory._capacity_bytes = 500 * 256
        log_steps(metrics, 3000)
        bound = stream._memory.bound
        bound(may_tell=True)
        stream._tick = tick
        session.flush()
        (event,) = events.read(event_type="records_dropped")
        assert event.severity == "error"
        found = [record.value for record in metrics.read()]
        gone = event.payload["records"]["metric"]
        assert len(found) + gone == 3_000
        assert found == list(map(float, range(gone, 3_000)))
        assert session.report_delivery().lanes[0].dropped == gone
        lifecycle = session.open_run.reader.read(session.run_id, "lifecycle", Query()).to_records()
        (gap,) = [record for record in lifecycle if record.action == "gap"]
        assert gap.data["records"] == {"metric": gone}


def test_what_sums_up_goes_before_what_users_say(tmp_path):
    backend, told = ScriptedBackend(), []
    stream = open_stream(
        tmp_path / "j", backend, capacity_bytes=CAPACITY, tick_s=0.001, on_gap=told.append
    )
    tick = stream._tick
    hold_delivery(stream)
    for value in range(1_000):
        put_metric(stream, value)
    for _ in range(900):
        put_event(stream)
    stream._memory.bound(may_tell=True)
    excess = 1_900 - CAPACITY // 256
    assert stream.channel("metric").lost == excess
    assert stream.channel("event").lost == 0
    assert told == [{"metric": excess}]
    stream._tick = tick
    (lane,) = stream.close(60).lanes
    assert adds_up(lane)
    assert (lane.submitted, lane.dropped) == (1_900, excess)
    assert stored_values(backend) == list(map(float, range(excess, 1_000)))


def test_a_flush_says_no_while_records_wait_before_a_full_memory(tmp_path):
    """What stands in the queue because memory is full is not stored, and not journaled."""
    files, backend = StoppedFiles(), ScriptedBackend(always="hang")
    stream = open_small(tmp_path / "j", backend, files, log_bytes=1_500)
    for value in range(1_000):
        put_metric(stream, value)
    assert wait_until(lambda: stream._log.is_full)
    for level in ("stored", "journaled", "durable"):
        with pytest.raises(SessionStoreError):
            stream.flush(0.2, level)
    backend._always = "ok"
    backend.release.set()
    try:
        stream.flush(2, "stored")
    except SessionStoreError:
        pass
    else:
        assert stored_values(backend) == list(map(float, range(1_000)))
    files.stopped = False
    stream.flush(60, "durable")
    stream.flush(60, "stored")
    assert stored_values(backend) == list(map(float, range(1_000)))
    assert stream.close(60).complete


def test_what_waits_before_a_full_memory_is_delivered_at_the_end(tmp_path):
    files, backend = StoppedFiles(), ScriptedBackend(always="hang")
    stream = open_small(tmp_path / "j", backend, files, log_bytes=1_500)
    for value in range(1_000):
        put_metric(stream, value)
    assert wait_until(lambda: stream._log.is_full)
    files.stopped = False
    backend._always = "ok"
    backend.release.set()
    (lane,) = stream.close(60).lanes
    assert (lane.delivered, lane.waiting) == (1_000, 0)
    assert stored_values(backend) == list(map(float, range(1_000)))


@pytest.mark.long
@pytest.mark.parametrize("large", ["rows", "payloads"])
def test_memory_is_bounded_by_bytes_not_by_the_number_of_calls(tmp_path, large):
    """A row of many values, or an event with a large payload, weighs what it weighs."""
    files, backend = StoppedFiles(), ScriptedBackend(always="unavailable")
    stream = open_small(tmp_path / "j", backend, files)
    keys = tuple(MetricKey(f"m{i}", None, f"m{i}") for i in range(500))
    channel = stream.channel("metric")
    put_metric(stream, 0)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(1_000):
        if large == "rows":
            sequence = min([channel.take_sequence() for _ in keys])
            values = [float(step * i) for i in range(len(keys))]
            channel.append((sequence, 1, step, None, keys, values))
        else:
            put_event(stream, payload=JsonObject({"text": f"{step}" * 5_000}))
    # What a burst brings between two ticks goes at the next.
    bounded = wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < 20 * CAPACITY)
    tracemalloc.stop()
    (lane,) = stream.close(0.1).lanes
    assert bounded
    assert adds_up(lane)
