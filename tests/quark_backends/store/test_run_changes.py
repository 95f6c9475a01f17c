"""What came into a run since a cursor: each record once, also while the store is compacted."""

import itertools
import os
import shutil
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import START_US, Store, Writer
from tiers import count_examples

from quark_backends.store.reading.reader_pool import ReaderPool
from quark_backends.store.run_store import SqliteRunStore
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.backends.curves import CurveQuery
from quark_core.errors import BackendUnavailable, RunNotFoundError, SessionStoreError
from quark_core.records.query import Query

KINDS = ("metric", "layer", "event")
EVERY_POINT = CurveQuery.build(["loss"], entries=None)


def read(reader, run_id, cursor, *, kinds=("metric",), keys=None, max_rows=10_000, **asked):
    return reader.read_changes(run_id, cursor, kinds=kinds, keys=keys, max_rows=max_rows, **asked)


def show(changes, kind="metric"):
    """Identity of each record that came."""
    found = changes.records.get(kind)
    if found is None:
        return []
    return list(zip(found["writer_id"].tolist(), found["sequence"].tolist(), strict=True))


def log(writer, key, *steps):
    writer.write([writer.metric(key, float(step), step=step) for step in steps])


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize("compacts", [False, True])
def test_no_answer_has_more_than_was_asked_for(store, most, compacts):
    """A batch holds as many records as it likes, and each of them may be long."""
    log(store.writer, "loss", *range(20))
    store.writer.write(
        [store.writer.metric("a", 1.0, step=20), store.writer.metric("b", 1.0, step=20)]
    )
    other = Writer(store, 0)
    log(other, "loss", *range(5))
    cursor, seen = {}, []
    for turn in range(100):
        if compacts and turn == 4:
            # In the middle of a batch: its rows are found again among those of chunks.
            store.compact()
        changes = read(store.reader, store.run_id, cursor, max_rows=most)
        found = show(changes)
        assert len(found) <= most
        assert found or not changes.more
        seen += found
        cursor = changes.cursor
        if not changes.more:
            break
    assert len(seen) == len(set(seen)) == 27
    assert not read(store.reader, store.run_id, cursor)


def test_base_and_tail_meet_exactly(store):
    log(store.writer, "loss", *range(10))
    found = store.reader.read_series_many(store.run_id, EVERY_POINT)
    assert not read(store.reader, store.run_id, found.cursor)
    log(store.writer, "other", 10)
    log(store.writer, "loss", 10, 11)
    for compacted in (False, True):
        if compacted:
            store.compact()
        changes = read(store.reader, store.run_id, found.cursor, keys=["loss"])
        assert changes.records["metric"]["step"].tolist() == [10, 11]
        assert changes.records["metric"]["metric_key"].tolist() == ["loss", "loss"]
        every = read(store.reader, store.run_id, found.cursor)
        assert every.records["metric"]["step"].tolist() == [10, 10, 11]
        assert not read(store.reader, store.run_id, changes.cursor)
    heads = store.reader.read_heads(store.run_id)
    assert (heads.cursor, heads.outputs) == (changes.cursor, 0)


def test_late_records_are_given_whatever_their_sequence(store):
    writer = store.writer
    rows = [writer.metric("loss", 0.0, step=step) for step in range(6)]
    writer.write([rows[0], rows[3]])
    cursor = store.reader.read_heads(store.run_id).cursor
    writer.write([rows[5], rows[1]])
    writer.write([rows[2], rows[4]])
    for _ in range(2):
        assert [n for _, n in show(read(store.reader, store.run_id, cursor))] == [1, 2, 4, 5]
        store.compact()


@settings(max_examples=count_examples(100))
@given(data=st.data())
def test_every_record_comes_once_whatever_happens_between(tmp_path_factory, data):
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        writers = [store.writer, Writer(store, 0, rank=1)]
        seen = {kind: [] for kind in KINDS}
        cursor = data.draw(st.sampled_from([{}, dict(store.reader.read_heads("run0").cursor)]))
        steps = itertools.count()
        for action in data.draw(
            st.lists(st.sampled_from(["log", "layer", "compact", "read", "read one"]), max_size=25)
        ):
            writer = writers[data.draw(st.integers(0, 1))]
            if action == "log":
                log(writer, "loss", *(next(steps) for _ in range(data.draw(st.integers(1, 5)))))
            elif action == "layer":
                writer.write([writer.layer("net.0", next(steps))])
            elif action == "compact":
                compactor = Compactor(store.connection)
                for work in compactor.find_work(minimum=data.draw(st.integers(1, 3))):
                    compactor.compact(work)
            else:
                most = 1 if action == "read one" else 10_000
                changes = read(store.reader, "run0", cursor, kinds=KINDS, max_rows=most)
                assert changes.more or not changes.records or most > 1 or changes.cursor != cursor
                for kind in KINDS:
                    seen[kind] += show(changes, kind)
                cursor = changes.cursor
        while changes := read(store.reader, "run0", cursor, kinds=KINDS, max_rows=3):
            assert not changes.stale
            for kind in KINDS:
                seen[kind] += show(changes, kind)
            cursor = changes.cursor
        for kind in KINDS:
            rows = store.reader.read("run0", kind, Query())
            wanted = zip(rows["writer_id"].tolist(), rows["sequence"].tolist(), strict=True)
            assert sorted(seen[kind]) == sorted(wanted), kind
    finally:
        store.close()


def test_a_part_is_given_where_much_has_come(store):
    for step in range(0, 300, 10):
        log(store.writer, "loss", *range(step, step + 10))
        if step == 150:
            store.compact()
    cursor, seen, rounds = {}, [], 0
    while changes := read(store.reader, store.run_id, cursor, max_rows=35):
        assert len(show(changes)) <= 45
        seen += show(changes)
        cursor, rounds = changes.cursor, rounds + 1
    assert (len(seen), len(set(seen))) == (300, 300)
    assert rounds >= 300 // 45


def test_what_hides_a_part_makes_it_stale(store):
    log(store.writer, "loss", *range(6))
    cursor = store.reader.read_heads(store.run_id).cursor
    second = store.start()
    log(second, "loss", 6)
    changes = read(store.reader, store.run_id, cursor)
    assert show(changes) == [(second.id, 0)]
    third = store.start(from_step=4)
    changes = read(store.reader, store.run_id, changes.cursor)
    assert (changes.stale, changes.records) == (True, {})
    cursor = store.reader.read_heads(store.run_id).cursor
    log(third, "loss", 4)
    # A process that was thought dead goes on; nobody is shown what it logs.
    log(second, "loss", 7)
    changes = read(store.reader, store.run_id, cursor)
    assert show(changes) == [(third.id, 0)]
    assert len(show(read(store.reader, store.run_id, cursor, all_attempts=True))) == 2


def test_a_cursor_of_another_store_is_stale(store):
    log(store.writer, "loss", 0)
    cursor = dict(store.reader.read_heads(store.run_id).cursor)
    for other in ({**cursor, "nobody": 3}, {**cursor, store.writer.id: 99}, {store.writer.id: 1}):
        assert read(store.reader, store.run_id, other).stale
    with pytest.raises(RunNotFoundError):
        read(store.reader, "absent", {})


def test_a_live_run_that_is_compacted_meanwhile_is_followed(store):
    """Points come from one thread, a second compacts, and the base is read in between."""
    pool = ReaderPool(store.connect_reader, store.layout.db_path)
    done = threading.Event()

    def compact():
        connection = store.connect()
        compactor = Compactor(connection)
        while not done.is_set():
            for work in compactor.find_work(minimum=2):
                compactor.compact(work)
            time.sleep(0)
        connection.close()

    thread = threading.Thread(target=compact)
    thread.start()
    try:
        curves = cursor = None
        steps = []
        for step in range(120):
            log(store.writer, "loss", step)
            if step == 40:
                with pool.take() as reader:
                    curves = reader.read_series_many(store.run_id, EVERY_POINT)
                steps, cursor = curves.curves[0].step.tolist(), curves.cursor
            elif step > 40 and step % 7 == 0:
                with pool.take() as reader:
                    changes = read(reader, store.run_id, cursor)
                if changes:
                    steps += changes.records["metric"]["step"].tolist()
                cursor = changes.cursor
        with pool.take() as reader:
            changes = read(reader, store.run_id, cursor)
        steps += changes.records["metric"]["step"].tolist() if changes else []
        assert steps == list(range(120))
    finally:
        done.set()
        thread.join()
        pool.close()


def test_a_mark_changes_with_what_is_committed_only(store):
    pool = ReaderPool(store.connect_reader, store.layout.db_path)
    first = pool.read_mark(store.run_id)
    assert pool.read_mark(store.run_id) == first
    log(store.writer, "loss", 0)
    second = pool.read_mark(store.run_id)
    assert second != first
    assert pool.read_mark(store.run_id) == second
    with pytest.raises(RunNotFoundError):
        pool.read_mark("absent")
    pool.close()
    assert pool.read_mark(store.run_id) not in (first, second)
    pool.close()


def open_read_only(store):
    return SqliteRunStore(store.layout, read_only=True)


def test_a_store_opened_for_reading_refuses_to_write_and_shows_what_others_write(store):
    opened = open_read_only(store)
    try:
        with pytest.raises(BackendUnavailable, match="reading only"):
            opened.write_group([store.writer.batches[0]])
        mark = opened.read_mark(store.run_id)
        heads = opened.read_heads(store.run_id)
        log(store.writer, "loss", *range(3))
        assert opened.read_mark(store.run_id) != mark
        changes = read(opened, store.run_id, heads.cursor)
        assert len(show(changes)) == 3
        query = CurveQuery.build(["loss"], entries=2)
        curves = opened.read_series_many(store.run_id, query).curves
        assert [curve.points for curve in curves] == [3]
    finally:
        opened.close()


def test_what_takes_the_place_of_a_store_is_read(store, tmp_path_factory):
    log(store.writer, "loss", *range(3_000))
    store.compact()
    opened = open_read_only(store)
    try:
        query = CurveQuery.build(["loss"], entries=5)
        (before,) = opened.read_series_many(store.run_id, query).curves
        cursor = opened.read_heads(store.run_id).cursor
        mark = opened.read_mark(store.run_id)
        other = Store(tmp_path_factory.mktemp("other"))
        other.writer.write([other.writer.metric("loss", 7.0, step=step) for step in range(3_000)])
        other.compact()
        other.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        other.close()
        path = store.layout.db_path
        store.close()
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        aside = path.with_name("aside")
        shutil.copyfile(other.layout.db_path, aside)
        os.replace(aside, path)
        assert opened.read_mark(store.run_id) != mark
        assert read(opened, store.run_id, cursor).stale
        (after,) = opened.read_series_many(store.run_id, query).curves
        assert (before.high.max(), after.high.max()) == (2_999.0, 7.0)
        path.unlink()
        with pytest.raises(SessionStoreError):
            opened.read_heads(store.run_id)
        with pytest.raises(SessionStoreError):
            opened.read_mark(store.run_id)
    finally:
        opened.close()


def test_a_newer_store_is_refused_with_both_versions(store):
    store.connection.execute("PRAGMA user_version=99")
    with pytest.raises(SessionStoreError, match="version 99"):
        open_read_only(store)


def test_times_are_those_of_the_points(store):
    log(store.writer, "loss", 0, 1)
    changes = read(store.reader, store.run_id, {})
    assert changes.records["metric"]["time_us"].tolist() == [START_US, START_US + 1_000]
