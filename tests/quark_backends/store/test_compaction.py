"""Compaction changes how records are stored, and nothing of what is read."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Store
from tiers import count_examples

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from quark_backends.store.upkeep.compaction import CHUNK_ROWS, Compactor
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query

ALL = Query()
CODECS = [CODEC_ZSTD, CODEC_PCODEC]


def read(store, kind="metric", query=ALL):
    return store.reader.read(store.run_id, kind, query).to_records()


def by_bits(records):
    """As they are, with NaN equal to itself."""
    return [repr(record) for record in records]


@pytest.mark.sampled
@pytest.mark.parametrize("codec", CODECS)
def test_every_record_is_there_once_before_and_after(store, codec):
    writer = store.start()
    generator = random.Random(0)
    for number in range(150):
        writer.log(
            *[
                (f"train/m{index}", generator.gauss(0, 1), number * 10 + row)
                for row in range(10)
                for index in range(3)
            ]
        )
    before = read(store)
    assert len(before) == 4_500
    store.compact(codec=codec)
    assert store.count("batch") == 0
    assert read(store) == before
    writer.log(("train/m0", 1.0, 9_999))
    assert read(store)[:-1] == before
    store.compact(codec=codec)
    assert len(read(store)) == 4_501
    # Three metrics, one of them with a small second chunk, and the lifecycle of two attempts.
    assert store.count("chunk") == 4 + 2


VALUES = st.floats(width=64) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-300])
STEPS = st.none() | st.integers(0, 50) | st.integers(0, 2**62)
POINTS = st.tuples(
    st.sampled_from(["a", "b/c", "b/d", "e"]),
    VALUES,
    STEPS,
    st.none() | st.integers(0, 3),
    st.sampled_from([None, "text", "größer"]),
    st.sampled_from([None, JsonObject({"x": [1, None]})]),
    st.integers(-(10**15), 10**15),
)


@pytest.mark.long
@settings(
    max_examples=count_examples(60),
    deadline=None,
)
@given(
    st.lists(st.lists(POINTS, min_size=1, max_size=30), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.sampled_from(CODECS),
    st.randoms(use_true_random=False),
)
def test_any_records_in_any_order_are_read_as_they_were(
    tmp_path_factory, batches, compactions, codec, generator
):
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        writer = store.start()
        count = sum(map(len, batches))
        sequences = list(range(count))
        # Threads interleave a little between taking a number and handing over.
        for place in range(count - 1):
            if generator.random() < 0.2:
                sequences[place : place + 2] = sequences[place : place + 2][::-1]
        logged = []
        for points, compacted in zip(batches, compactions, strict=False):
            records = [
                writer.metric(
                    key,
                    value,
                    0 if step is None and epoch is None else step,
                    epoch,
                    description=description,
                    metadata=metadata,
                    time_us=time_us,
                    sequence=sequences.pop(0),
                )
                for key, value, step, epoch, description, metadata, time_us in points
            ]
            logged += writer.write(records)
            if compacted:
                store.compact(codec=codec)
        expected = by_bits(sorted(logged, key=lambda record: record.sequence))
        assert by_bits(read(store)) == expected
        parts = list(store.reader.iterate(store.run_id, "metric", ALL, rows=7))
        assert max(part.count for part in parts) <= 7
        assert by_bits(record for part in parts for record in part.to_records()) == expected
    finally:
        store.close()


@pytest.mark.long
def test_other_kinds_keep_their_rows_together_by_step(store):
    writer = store.start()
    for step in range(40):
        records = [
            writer.layer(
                f"encoder.{index}",
                step,
                tensor_shape=(8, index),
                mean=index / 7,
                std=None if index % 2 else math.nan,
            )
            for index in range(500)
        ]
        writer.write(records[:300])
        writer.write(records[300:])
    writer.write(
        [EventRecord(*writer.head("event"), "saved", "info", payload=JsonObject({"a": 1}))]
    )
    before, events = read(store, "layer"), read(store, "event")
    store.compact()
    assert by_bits(read(store, "layer")) == by_bits(before)
    assert read(store, "event") == events
    bounds = store.connection.execute(
        "SELECT step_low, step_high, count FROM chunk WHERE kind = 'layer' ORDER BY step_low"
    ).fetchall()
    # Whole steps, as many as fit.
    assert [high - low + 1 for low, high, _ in bounds] == [16, 16, 8]
    assert all(count == 500 * (high - low + 1) for low, high, count in bounds)
    one = read(store, "layer", Query(equals={"module_name": "encoder.7"}, step_min=20))
    assert [record.step for record in one] == list(range(20, 40))


@pytest.mark.long
def test_chunks_grow_until_they_are_full_and_then_stay(store):
    writer = store.start()
    for number in range(400):
        writer.log(*[("loss", float(row), number * 50 + row) for row in range(50)])
        if number % 16 == 0:
            store.compact()
    store.compact()
    counts = [
        row[0]
        for row in store.connection.execute(
            "SELECT count FROM chunk WHERE kind = 'metric' ORDER BY first_sequence"
        )
    ]
    assert counts[:2] == [CHUNK_ROWS, CHUNK_ROWS]
    assert sum(counts) == 20_000
    assert len(counts) <= 5
    assert [r.step for r in read(store)] == list(range(20_000))


def test_a_damaged_batch_is_set_aside_with_its_reason_and_the_rest_goes_on(store, caplog):
    writer = store.start()
    for step in range(5):
        writer.log(("loss", float(step), step))
    store.connection.execute(
        "UPDATE batch SET body = substr(body, 1, 20) WHERE kind = 'metric' AND number = 3"
    )
    assert [r.step for r in read(store)] == [0, 1, 3, 4]
    assert caplog.text.count("is damaged, its 1 records are omitted") == 1
    assert [r.step for r in read(store)] == [0, 1, 3, 4]
    assert caplog.text.count("is damaged") == 1
    store.compact()
    assert [r.step for r in read(store)] == [0, 1, 3, 4]
    (row,) = store.connection.execute("SELECT source, kind, number, count, reason FROM damaged")
    assert row[:4] == ("batch", "metric", 3, 1)
    assert row[4]


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_damaged_chunk_is_told_and_the_rest_is_read(store, caplog, place):
    writer = store.start()
    writer.log(*[("loss", float(row), row) for row in range(3 * CHUNK_ROWS)])
    store.compact()
    order = {"first": "first_sequence", "middle": "abs(step_low - 8192)", "last": "-step_low"}
    (pk, low, body) = store.connection.execute(
        f"SELECT pk, step_low, body FROM chunk WHERE kind = 'metric' ORDER BY {order[place]}"
    ).fetchone()
    broken = bytearray(body)
    broken[len(body) // 2] ^= 4
    store.connection.execute("UPDATE chunk SET body = ? WHERE pk = ?", (bytes(broken), pk))
    expected = [s for s in range(3 * CHUNK_ROWS) if not low <= s < low + CHUNK_ROWS]
    assert [r.step for r in read(store)] == expected
    assert "checksum" in caplog.text


def test_a_batch_that_comes_again_after_compaction_changes_nothing(store):
    writer = store.start()
    batches = [writer.batch([writer.metric("loss", float(n), n)]) for n in range(20)]
    store.ingest.write(batches)
    store.compact()
    store.ingest.write(batches)
    assert [r.step for r in read(store)] == list(range(20))
    (count,) = store.connection.execute("SELECT count FROM run_metric").fetchone()
    assert count == 20


def test_compacted_batches_are_given_back_with_their_numbers(store):
    writer = store.start()
    batches = []
    for number in range(30):
        records = [writer.metric(f"m{row % 3}", float(row), number) for row in range(7)]
        batches.append(writer.batch(records[::-1] if number % 5 == 0 else records))
        batches.append(writer.batch([EventRecord(*writer.head("event"), "saved", "info")]))
    store.ingest.write(batches)
    first = batches[0].number
    before = store.reader.read_batches(store.run_id, writer.id, first, 1_000)
    assert before == batches
    store.compact()
    after = store.reader.read_batches(store.run_id, writer.id, first, 1_000)
    assert [(b.number, b.kind, b.count) for b in after] == [
        (b.number, b.kind, b.count) for b in batches
    ]
    assert [b.to_records() for b in after] == [b.to_records() for b in batches]
    some = store.reader.read_batches(store.run_id, writer.id, first + 20, 5)
    assert [b.number for b in some] == list(range(first + 20, first + 25))


def test_two_compactors_do_not_do_the_same_work_twice(store):
    writer = store.start()
    for step in range(200):
        writer.log(("loss", float(step), step))
    first, second = Compactor(store.connection), Compactor(store.connect())
    (work,) = [w for w in first.find_work(minimum=2) if w.kind == "metric"]
    planned = second._commit

    def be_late(turn):
        assert first.compact(work) == 200
        return planned(turn)

    second._commit = be_late
    assert second.compact(work) == 0
    second._connection.close()
    assert [r.step for r in read(store)] == list(range(200))
    assert np.isfinite(store.reader.read_series(store.run_id, "loss", max_points=3).mean).all()


@pytest.mark.sampled
@pytest.mark.parametrize("gone", ["merged", "with its batches"])
def test_a_chunk_that_another_process_took_meanwhile_is_not_called_damaged(store, caplog, gone):
    writer = store.start()
    for step in range(100):
        writer.log(("loss", float(step), step))
    store.compact()
    for step in range(100, 300):
        writer.log(("loss", float(step), step))
    compactor, other = Compactor(store.connection), Compactor(store.connect())
    (work,) = [w for w in compactor.find_work(minimum=2) if w.kind == "metric"]
    find_tail = compactor._find_tail

    def be_late(turn, name_pk):
        tail = find_tail(turn, name_pk)
        if gone == "merged":
            other._connection.execute("UPDATE chunk SET pk = pk + 1000 WHERE pk = ?", tail[0][:1])
        else:
            assert other.compact(work) == 200
        return tail

    compactor._find_tail = be_late
    assert compactor.compact(work) == (200 if gone == "merged" else 0)
    other._connection.close()
    assert not [text for text in caplog.messages if "damaged" in text or "run0" in text]
    assert store.count("damaged") == 0
    assert [r.step for r in read(store)] == list(range(300))


def test_a_kind_that_only_a_newer_quark_knows_is_left_alone(store):
    writer = store.start()
    writer.log(("loss", 1.0, 0))
    store.connection.execute("UPDATE batch SET kind = 'hologram' WHERE kind = 'metric'")
    store.compact()
    assert store.connection.execute("SELECT kind FROM batch").fetchall() == [("hologram",)]


def test_records_with_large_values_make_small_chunks(store):
    """A turn, and a chunk that is merged with it, are in memory at once, as values."""
    payload = JsonObject({"values": [{}] * 1_000})
    for number in range(15):
        heads = [store.writer.head("event") for _ in range(100)]
        store.writer.write([EventRecord(*head, "t", "info", payload=payload) for head in heads])
        if number > 10:
            store.compact()
    counts = [
        n for (n,) in store.connection.execute("SELECT count FROM chunk WHERE kind = 'event'")
    ]
    # Each record takes 75 kB.
    assert sum(counts) == 1_500
    assert max(counts) <= 600
    read = store.reader.read(store.run_id, "event", Query())
    assert read["sequence"].tolist() == list(range(1_500))
