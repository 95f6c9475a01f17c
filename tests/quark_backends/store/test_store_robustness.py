"""What damage, odd bodies, missing codecs and extremes must not do; each test names one promise."""

import contextlib
import struct
import warnings

import msgspec
import numpy as np
import pytest
import xxhash

from quark_backends.store import chunks
from quark_backends.store.writing.summaries import find_first_hidden, rebuild_metrics
from quark_core.backends.contract import Batch
from quark_core.errors import BackendRejected, BackendUnavailable, SessionStoreError
from quark_core.records.codec import zstd
from quark_core.records.query import Query


def read_values(store, **filters):
    return store.reader.read(store.run_id, "metric", Query(**filters))["value"].tolist()


def stored_figures(store):
    return store.connection.execute(
        "SELECT text, count, first, last, low, high FROM run_metric"
        " JOIN name ON name.pk = name_pk ORDER BY text"
    ).fetchall()


def visible_figures(store):
    found = {}
    for record in store.reader.read(store.run_id, "metric", Query()).to_records():
        found.setdefault(record.metric_key, []).append(record.value)
    return [(k, len(v), v[0], v[-1], min(v), max(v)) for k, v in sorted(found.items())]


def log_line(writer, count, key="loss"):
    writer.log(*[(key, float(row), row) for row in range(count)])


def damage(store, table, where, change):
    pk, body = store.connection.execute(f"SELECT pk, body FROM {table} WHERE {where}").fetchone()
    store.connection.execute(f"UPDATE {table} SET body = ? WHERE pk = ?", (change(body), pk))


def test_compaction_takes_no_batch_whose_checksum_is_wrong(store):
    writer = store.start()
    for step in range(5):
        writer.log(("loss", step + 0.5, step), ("loss", step + 0.25, step))

    def flip(body):
        place = body.index(struct.pack("<d", 2.5)) + 7
        return body[:place] + bytes([body[place] ^ 0x40]) + body[place + 1 :]

    damage(store, "batch", "kind = 'metric' AND number = 3", flip)
    before = read_values(store)
    assert len(before) == 8
    store.compact()
    assert read_values(store) == before
    assert store.count("damaged") == 1


@pytest.mark.long
def test_a_damaged_batch_never_raises_out_of_the_summaries(store):
    writer = store.start()
    for step in range(5):
        writer.log(("loss", step + 0.5, step), ("acc", step + 0.25, step))
    pk, body = store.connection.execute(
        "SELECT pk, body FROM batch WHERE kind = 'metric' AND number = 3"
    ).fetchone()
    (run_pk,) = store.connection.execute("SELECT pk FROM run").fetchone()
    (writer_pk,) = store.connection.execute("SELECT max(pk) FROM writer").fetchone()
    for place in range(len(body)):
        broken = body[:place] + bytes([body[place] ^ 0x41]) + body[place + 1 :]
        store.connection.execute("UPDATE batch SET body = ? WHERE pk = ?", (broken, pk))
        rebuild_metrics(store.connection, run_pk)
        find_first_hidden(store.connection, writer_pk, 2)
        assert stored_figures(store) == visible_figures(store)


def test_a_curve_of_which_all_is_hidden_is_empty(store):
    log_line(store.start(), 10_000)
    store.compact()
    store.start(from_step=0)
    series = store.reader.read_series(store.run_id, "loss", max_points=10)
    assert (len(series), series.points) == (0, 0)


def test_a_curve_of_which_little_is_visible_shows_every_point_that_fits(store):
    log_line(store.start(), 10_000)
    store.compact()
    store.start(from_step=90)
    series = store.reader.read_series(store.run_id, "loss", max_points=100)
    assert series.last.tolist() == [float(step) for step in range(90)]


def test_figures_are_right_where_a_resume_comes_in_one_group_with_what_it_hides(store):
    writer, taken = store.start(), []
    write, store.ingest.write = store.ingest.write, taken.extend
    log_line(writer, 10)
    store.start(from_step=5)
    store.ingest.write = write
    write(taken)
    assert stored_figures(store) == visible_figures(store) == [("loss", 5, 0.0, 4.0, 0.0, 4.0)]


@pytest.mark.parametrize("resumed_first", [False, True])
def test_figures_are_right_where_a_late_batch_hides_points_without_a_step(store, resumed_first):
    writer = store.start()
    if resumed_first:
        store.start(from_step=3)
    writer.write([writer.metric("loss", 1.0, None, 1, sequence=5)])
    if not resumed_first:
        store.start(from_step=3)
    writer.write([writer.metric("loss", 9.0, 7, sequence=2)])
    assert stored_figures(store) == visible_figures(store)


@pytest.fixture
def without_pcodec(store, monkeypatch):
    """A store of which a part was compressed by pcodec, which is then not there."""
    pytest.importorskip("pcodec")
    writer = store.start()
    generator = np.random.default_rng(0)
    for start in range(0, 1_000, 50):
        values = generator.normal(size=50).tolist()
        writer.log(*[("loss", value, start + row) for row, value in enumerate(values)])
    store.compact(codec=chunks.CODEC_PCODEC)
    monkeypatch.setattr(chunks, "_import_pcodec", lambda: None)
    return writer


@pytest.mark.parametrize("way", ["read", "filter", "iterate", "series", "replay"])
def test_a_missing_codec_is_a_clear_error_of_the_store(store, without_pcodec, way):
    reader, run_id = store.reader, store.run_id
    ways = {
        "read": lambda: reader.read(run_id, "metric", Query()).to_records(),
        "filter": lambda: reader.read(
            run_id, "metric", Query(equals={"metric_key": "loss"}, step_min=3)
        ).to_records(),
        "iterate": lambda: [
            part.to_records() for part in reader.iterate(run_id, "metric", Query(), rows=100)
        ],
        "series": lambda: reader.read_series(run_id, "loss", max_points=None),
        "replay": lambda: reader.read_batches(run_id, without_pcodec.id, 0, 100),
    }
    with pytest.raises(SessionStoreError, match="pip install"):
        ways[way]()
    assert store.count("damaged") == 0


def test_a_missing_codec_does_not_empty_the_figures_of_a_resumed_run(store, without_pcodec):
    before = stored_figures(store)
    with pytest.raises((BackendRejected, BackendUnavailable, SessionStoreError), match="pcodec"):
        store.start(from_step=500)
    assert stored_figures(store) == before


def test_what_a_reader_returns_cannot_change_what_it_returns_next(store):
    log_line(store.start(), 3)
    store.compact()
    found = store.reader.read(store.run_id, "metric", Query())
    # It may be read-only, as the tail's is.
    with contextlib.suppress(ValueError):
        found["value"][0] = 77.0
    assert read_values(store) == [0.0, 1.0, 2.0]


def test_means_of_huge_values_are_means(store):
    values = [1e308 if row % 3 else -1e308 for row in range(9_600)]
    store.start().log(*[("loss", value, row) for row, value in enumerate(values)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.compact()
        series = store.reader.read_series(store.run_id, "loss", max_points=10)
    np.testing.assert_allclose(series.mean, 1e308 / 3, rtol=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("missing", [True, False])
def test_a_rollup_with_any_wrong_byte_is_not_believed(store, missing):
    store.start().log(*[("loss", float(row % 777), row) for row in range(1_000)])
    store.compact()
    (rollup,) = store.connection.execute(
        "SELECT rollup FROM chunk WHERE kind = 'metric'"
    ).fetchone()
    good = store.reader.read_series(store.run_id, "loss", max_points=5)
    broken = [None]
    if not missing:
        broken = [
            rollup[:place] + bytes([rollup[place] ^ 0x40]) + rollup[place + 1 :]
            for place in range(len(rollup))
        ]
    for blob in broken:
        store.connection.execute("UPDATE chunk SET rollup = ? WHERE kind = 'metric'", (blob,))
        series = store.reader.read_series(store.run_id, "loss", max_points=5)
        assert series.points == 1_000
        for name in ("low", "high", "last", "low_step", "high_step"):
            # The blocks' bounds may differ where points are read instead, the extremes not.
            assert getattr(series, name).max() == getattr(good, name).max()


def test_a_damaged_frame_costs_its_own_batches_only(store):
    writer = store.start()
    for step in range(20):
        writer.log(("loss", 1.0, step))
    store.compact()
    for step in range(20, 40):
        writer.log(("loss", 1.0, step))
    store.compact()
    pk = store.connection.execute("SELECT max(rowid) FROM frame").fetchone()[0]
    store.connection.execute("UPDATE frame SET body = substr(body, 1, 9) WHERE rowid = ?", (pk,))
    found = store.reader.read_batches(store.run_id, writer.id, 0, 100)
    assert len(found) >= 20


def test_a_batch_of_a_newer_format_is_left_alone(store):
    writer = store.start()
    for step in range(3):
        writer.log(("loss", 1.0, step))

    pk, body = store.connection.execute(
        "SELECT pk, body FROM batch WHERE kind = 'metric'"
    ).fetchone()
    fields = msgspec.msgpack.decode(body[1:] if body[:1] == b"\0" else zstd.decompress(body[1:]))
    newer = b"\0" + msgspec.msgpack.encode([99, *fields[1:]])
    store.connection.execute(
        "UPDATE batch SET body = ?, digest = ? WHERE pk = ?",
        (newer, xxhash.xxh3_128_digest(newer), pk),
    )
    # Whatever a turn does with the others, it must not be called damaged.
    from quark_backends.store.upkeep.compaction import Compactor

    compactor = Compactor(store.connection)
    for work in compactor.find_work(minimum=1):
        compactor.compact(work)
    assert store.count("damaged") == 0
    kept = store.connection.execute("SELECT count(*) FROM batch WHERE pk = ?", (pk,)).fetchone()
    assert kept == (1,)


def test_a_lack_of_memory_is_not_taken_for_damage(store, monkeypatch):
    from quark_backends.store.upkeep import compaction

    writer = store.start()
    for step in range(3):
        writer.log(("loss", 1.0, step))
    open_body, calls = compaction.open_body, []

    def run_out(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return open_body(*arguments)

    monkeypatch.setattr(compaction, "open_body", run_out)
    with pytest.raises(MemoryError):
        store.compact()
    monkeypatch.undo()
    store.compact()
    assert store.count("damaged") == 0
    assert len(read_values(store)) == 3


def test_parts_of_many_metrics_are_not_single_rows(store):
    """Copies what is open for each chunk that it opens: quadratic in the number of metrics."""
    writer = store.start()
    for start in range(0, 256, 64):
        writer.log(
            *[(f"m{key}", 1.0, step) for step in range(start, start + 64) for key in range(100)]
        )
    store.compact()
    parts = [p.count for p in store.reader.iterate(store.run_id, "metric", Query(), rows=1_000)]
    assert sum(parts) == 25_600
    # Twice as many as needed is fair; one for each chunk is not.
    assert len(parts) <= 52


@pytest.mark.parametrize("steps", [(None, 2**63 - 1), (2**63 - 1, None), (0, 2**62), (2**62, 0)])
def test_the_widest_steps_are_read_after_compaction(store, steps):
    writer = store.start()
    writer.write([writer.metric("loss", 1.0, step, 0) for step in steps])
    store.compact()
    records = store.reader.read(store.run_id, "metric", Query()).to_records()
    assert tuple(record.step for record in records) == steps


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["metric", "layer"])
def test_a_malformed_batch_is_rejected_and_never_spoils_reading(store, kind):
    """Mutated bodies, as a client that is broken sends them."""
    generator = np.random.default_rng(1)
    writer, spoiled = store.start(), {}
    for _ in range(300):
        if kind == "metric":
            records = [writer.metric("abc"[row % 3], row / 7, row, 1) for row in range(5)]
        else:
            records = [writer.layer("abc"[row % 3], row, mean=row / 7) for row in range(5)]
        good = writer.batch(records)
        rest = good.body[1:] if good.body[:1] == b"\0" else zstd.decompress(good.body[1:])
        body = bytearray(rest)
        for _ in range(2):
            body[generator.integers(len(body))] = generator.choice([0, 1, 5, 255, 192])
        head = (good.run_id, good.writer_id, good.attempt, good.rank, good.number)
        try:
            store.ingest.write([Batch(*head, kind, 5, b"\0" + bytes(body))])
        except BackendRejected:
            continue
        except Exception as error:
            spoiled.setdefault(f"write: {type(error).__name__}", []).append(bytes(body))
            continue
        try:
            store.reader.read(store.run_id, kind, Query()).to_records()
            store.compact()
            store.reader.read(store.run_id, kind, Query()).to_records()
        except Exception as error:
            spoiled.setdefault(f"read: {type(error).__name__}", []).append(bytes(body))
        for table in ("batch", "chunk", "damaged"):
            store.connection.execute(f"DELETE FROM {table}")
        store.reader.close()
    assert {what: len(bodies) for what, bodies in spoiled.items()} == {}
