"""The stream frames records into numbered batches and never loses one on the way."""

import threading

import pytest

from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.channel import LONG_FRAME_RECORDS, Channel, MetricKey
from quark_core.delivery.delivery_worker import Lane
from quark_core.delivery.segments import Origin
from quark_core.delivery.sending import Quarantine
from quark_core.delivery.stream import RunStream
from quark_core.errors import SessionStoreError
from quark_core.records import EventRecord, LifecycleRecord
from quark_core.records.json_object import JsonObject
from quark_core.testing.fakes import ScriptedBackend


def open_stream(backend, **arguments):
    log = BatchLog()
    lane = Lane("primary", lambda: backend, log.open_cursor(), Quarantine(None, "x"), primary=True)
    stream = RunStream(Origin("run0"), log, [lane], **arguments)
    stream.start()
    return stream


def put_event(stream, event_type="e", *, payload=None):
    channel, origin = stream.channel("event"), stream.origin
    head = (origin.run_id, origin.writer_id, 0, 0, channel.take_sequence(), 1)
    record = EventRecord(*head, event_type, "info", payload=payload)
    channel.append(record)
    return record


def put_lifecycle(stream):
    channel, origin = stream.channel("lifecycle"), stream.origin
    channel.append(
        LifecycleRecord(
            origin.run_id, origin.writer_id, 0, 0, channel.take_sequence(), 1, "heartbeat"
        )
    )


def test_batches_are_numbered_without_gaps_over_all_kinds():
    backend = ScriptedBackend()
    stream = open_stream(backend)
    for _ in range(5):
        put_lifecycle(stream)
        put_event(stream)
        stream.flush(60)
    stream.close(60)
    assert [batch.number for batch in backend.stored] == list(range(len(backend.stored)))
    assert {batch.writer_id for batch in backend.stored} == {stream.origin.writer_id}


def test_lifecycle_is_the_last_of_a_tick():
    backend = ScriptedBackend()
    stream = open_stream(backend, tick_s=60)
    put_lifecycle(stream)
    put_event(stream)
    stream.flush(60)
    stream.close(60)
    assert [batch.kind for batch in backend.stored] == ["event", "lifecycle"]


def test_records_survive_the_way_in_order():
    backend = ScriptedBackend()
    stream = open_stream(backend)
    records = [put_event(stream, f"e{number}") for number in range(1000)]
    report = stream.close(60)
    stored = [record for batch in backend.stored for record in batch.to_records()]
    assert stored == records
    assert report.lanes[0].complete
    assert max(batch.count for batch in backend.stored) <= 100


def test_frames_are_as_large_as_writers_want_while_few_wait_and_grow_with_the_queue():
    channel = Channel("event", capacity_items=10**6)
    channel.fit_frames(100)

    def drain(waiting):
        put = [EventRecord("r", "w", 0, 0, n, 1, "e", "info") for n in range(waiting)]
        for record in put:
            channel.append(record)
        frames = []
        while channel.items:
            items, records = channel.take_frame()
            assert records == len(items)
            frames.append(items)
        assert [item for items in frames for item in items] == put
        return [len(items) for items in frames]

    assert drain(1_000) == [100] * 10
    assert drain(5_000) == [5_000]
    assert drain(3 * LONG_FRAME_RECORDS + 250) == [LONG_FRAME_RECORDS] * 3 + [100, 100, 50]


def test_rows_make_a_long_queue_by_the_values_that_they_hold():
    channel = Channel("metric", capacity_items=10**6)
    keys = tuple(MetricKey(f"m{n}", None, f"m{n}") for n in range(1_000))
    for step in range(40):
        channel.append((step * 1_000, 1, step, None, keys, [0.5] * 1_000))
    frames = [channel.take_frame()[1] for _ in range(3)]
    # A row is never cut: the last one of a frame may carry it past the bound.
    assert frames == [17_000, 17_000, 6_000]
    assert channel.take_frame() == ([], 0)


def test_a_flush_that_is_not_answered_says_so_and_loses_nothing():
    backend = ScriptedBackend(["hang"])
    stream = open_stream(backend)
    put_event(stream)
    with pytest.raises(SessionStoreError, match="Nothing is lost"):
        stream.flush(0.1)
    assert stream.report().lanes[0].waiting == 1
    backend.release.set()
    stream.flush(60)
    assert backend.count_records == 1
    stream.close(60)


def test_what_is_not_yet_framed_counts_as_waiting():
    stream = open_stream(ScriptedBackend(), tick_s=60)
    for _ in range(7):
        put_event(stream)
    lane = stream.report().lanes[0]
    assert (lane.submitted, lane.waiting, lane.delivered) == (7, 7, 0)
    stream.close(60)
    assert stream.report().lanes[0].delivered == 7


def test_a_frame_that_cannot_be_encoded_is_counted_and_costs_no_other(caplog):
    backend = ScriptedBackend()
    stream = open_stream(backend)
    stream.channel("event").append(object())
    stream.flush(60)
    put_event(stream)
    lane = stream.close(60).lanes[0]
    assert (lane.submitted, lane.delivered, lane.dropped) == (2, 1, 1)
    assert "could not be encoded" in caplog.text


def test_a_stream_without_lanes_keeps_nothing_and_starts_no_thread():
    before = set(threading.enumerate())  # some may be those of other tests, and about to end
    stream = RunStream(Origin("run0"))
    stream.start()
    put_event(stream)
    stream.flush(1)
    assert len(stream.channel("event").items) == 0
    assert stream.close(1).lanes == ()
    assert set(threading.enumerate()) <= before


def test_closing_twice_gives_the_same_report():
    stream = open_stream(ScriptedBackend())
    put_event(stream)
    assert stream.close(60) is stream.close(60)
    stream.flush(60)
    assert stream.report().lanes[0].delivered == 1


def test_a_frame_is_closed_at_256_kb_whatever_a_batch_may_hold():
    backend = ScriptedBackend()
    stream = open_stream(backend)
    stream.channel("event").fit_frames(10_000)
    text = JsonObject({"text": "x" * 10_000})
    for _ in range(100):
        put_event(stream, payload=text)
    (lane,) = stream.close(60).lanes
    assert lane.delivered == 100
    sizes = [batch.count for batch in backend.stored]
    assert sum(sizes) == 100
    assert max(sizes) <= 27  # 26 records of 10 kB and the one that goes beyond


def test_the_next_tick_comes_sooner_where_much_comes_in():
    backend = ScriptedBackend()
    stream = open_stream(backend)
    framer = stream._framer
    framer._framed_bytes = 256 * 1024
    assert framer.choose_wait(0.05, 0.05) == 0.05
    framer._framed_bytes = 4 * 256 * 1024
    assert framer.choose_wait(0.05, 0.05) == pytest.approx(0.0125)
    assert framer.choose_wait(0.05, 0.05) == 0.05
    framer._framed_bytes = 10**9
    assert framer.choose_wait(0.05, 0.05) == pytest.approx(0.005)
    stream.close(60)
