"""What a process leaves of compaction is finished by another one, once, and reads as it did."""

import os
import signal
import sqlite3
import subprocess
import threading
import time

import pytest
from click.testing import CliRunner
from stores import Store

import quark
from quark.cli.main import cli
from quark_backends.embedded.compaction_process import LEASE, compact_store, find_helper
from quark_backends.store.databases.sqlite import connect, find_store
from quark_backends.store.upkeep.background_compaction import BackgroundCompaction, WriteGate
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.delivery.delivery_state import Lease
from quark_core.records.codec import Column
from quark_core.records.query import Query

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
KEYS = [f"train/m{number}" for number in range(20)]


def wait_until(condition, timeout_s=100.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def count_batches(db_path, kind="metric"):
    connection = sqlite3.connect(db_path)
    try:
        (found,) = connection.execute("SELECT count(*) FROM batch WHERE kind = ?", (kind,))
        return found[0]
    finally:
        connection.close()


def fill(store, batches, rows=40):
    """A run that has ended, with its points in batches."""
    writer, step = store.start(), 0
    made = []
    for _ in range(batches):
        records = [
            writer.metric(key, float(step + place), step + row)
            for row in range(rows // len(KEYS))
            for place, key in enumerate(KEYS)
        ]
        step += rows // len(KEYS)
        made.append(writer.batch(records))
    store.ingest.write(made)
    writer.lifecycle("status", {"status": "completed", "ended_at": None})
    return step


def is_at_work(layout):
    return (layout.root / LEASE).exists()


@pytest.mark.long
def test_the_end_of_a_run_leaves_the_rest_to_a_process_that_ends_by_itself(tmp_path, monkeypatch):
    # As where the second that the end may take is over before the first turn.
    monkeypatch.setattr(BackgroundCompaction, "_compact", lambda self, connection: None)
    values = dict.fromkeys(map("m{}".format, range(200)), 0.5)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(800):
            metrics.log_many(values, step=step)
    layout = session.context.store_root
    assert wait_until(lambda: count_batches(layout / "quark.db") == 0)
    assert wait_until(lambda: not (layout / LEASE).exists())
    found = metrics.columns()
    assert found.count == 160_000
    assert metrics.series("m7", max_points=None).step.tolist() == list(range(800))


@pytest.mark.long
def test_a_reader_has_what_was_left_compacted(tmp_path):
    store = Store(tmp_path)
    steps = fill(store, 1_100)
    store.close()
    with quark.open_run("run0", storage_dir=tmp_path) as run:
        metrics = quark.MetricsLogger(run)
        before = metrics.columns(metric_key="train/m3")
        assert before["step"].tolist() == list(range(steps))
        assert wait_until(lambda: count_batches(store.layout.db_path) == 0)
        assert wait_until(lambda: not is_at_work(store.layout))
        assert metrics.columns(metric_key="train/m3")["step"].tolist() == list(range(steps))


def test_a_reader_of_little_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    store = Store(tmp_path)
    steps = fill(store, 300)
    store.close()
    with quark.open_run("run0", storage_dir=tmp_path) as run:
        assert len(quark.MetricsLogger(run).read(metric_key="train/m3")) == steps


@pytest.mark.long
@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_where_one_is_killed_the_next_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("quark_backends.store.upkeep.compaction._TURN_BATCHES", 50)
    store = Store(tmp_path)
    steps = fill(store, 400)
    store.close()
    pid = os.fork()
    if pid == 0:
        compact, turns = Compactor.compact, []

        def die_in_the_third(compactor, work):
            turns.append(work)
            if len(turns) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return compact(compactor, work)

        Compactor.compact = die_in_the_third
        try:
            compact_store(store.layout)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert 0 < count_batches(store.layout.db_path) < 400
    assert is_at_work(store.layout)
    assert not find_helper(store.layout, start=False)
    assert compact_store(store.layout)
    assert count_batches(store.layout.db_path) == 0
    assert not is_at_work(store.layout)
    reader = store.reader
    found = reader.read("run0", "metric", Query(equals={"metric_key": "train/m5"}))
    assert found["step"].tolist() == list(range(steps))
    reader.close()


@pytest.mark.long
def test_one_at_a_time_works_at_a_store(store, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    fill(store, 200)
    lease = Lease(store.layout.root / LEASE)
    assert lease.take()
    assert find_helper(store.layout, start=True)
    assert not compact_store(store.layout)
    assert store.count("chunk") == 0
    lease.release()
    assert compact_store(store.layout)
    assert store.count("chunk") > 0


def test_threads_do_nothing_while_a_process_of_its_own_is_at_work(store):
    fill(store, 200)
    asked = []

    def find(start):
        asked.append(start)
        return True

    compaction = BackgroundCompaction(store.connect, WriteGate(), find)
    compaction.note(200, 8_000)
    assert wait_until(lambda: len(asked) >= 3)
    assert not compaction.close(60)
    # Few records are no reason to start one.
    assert set(asked) == {False}
    assert store.count("chunk") == 0


def test_one_is_asked_for_where_much_waits_and_the_lane_waits_until_there_is_room(
    store, monkeypatch
):
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._ENOUGH_RECORDS", 1_000)
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._MUCH_RECORDS", 2_000)
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._MOST_RECORDS", 4_000)
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._ROOM_S_PER_RECORD", 1.0)
    fill(store, 200)
    asked = []

    def find(start):
        asked.append(start)
        if start:
            store_of_helper = store.connect()
            for work in Compactor(store_of_helper).find_work(minimum=1):
                Compactor(store_of_helper).compact(work)
            store_of_helper.close()
        return True

    compaction = BackgroundCompaction(store.connect, WriteGate(), find)
    compaction.note(200, 8_000)
    compaction.wait_for_room(500)
    assert True in asked
    assert count_batches(store.layout.db_path) == 0
    assert compaction.close(60)


def test_the_end_of_a_run_waits_until_little_is_left_to_the_helper(store, monkeypatch):
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._ENOUGH_RECORDS", 1_000)
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._MUCH_RECORDS", 2_000)
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._FEW_RECORDS", 2_000)
    fill(store, 200)
    closing = threading.Event()

    def help_from_the_end_on():
        closing.wait()
        connection = store.connect()
        for work in Compactor(connection).find_work(minimum=1):
            Compactor(connection).compact(work)
        connection.close()

    helper = threading.Thread(target=help_from_the_end_on)
    helper.start()
    compaction = BackgroundCompaction(store.connect, WriteGate(), lambda start: True)
    compaction.note(200, 8_000)
    threading.Timer(0.1, closing.set).start()
    compaction.close(100)
    assert count_batches(store.layout.db_path) == 0
    helper.join()


@pytest.mark.sampled
@pytest.mark.parametrize("who", ["helper", "thread"])
def test_what_another_process_was_first_at_is_tried_again(store, monkeypatch, who):
    fill(store, 200)
    compact, turns = Compactor.compact, []

    def be_second(compactor, work):
        turns.append(work)
        return 0 if len(turns) == 1 else compact(compactor, work)

    monkeypatch.setattr(Compactor, "compact", be_second)
    if who == "helper":
        assert compact_store(store.layout)
    else:
        compaction = BackgroundCompaction(store.connect, WriteGate())
        compaction.note(200, 8_000)
        assert wait_until(lambda: count_batches(store.layout.db_path) == 0)
        assert compaction.close(60)
    assert count_batches(store.layout.db_path) == 0


def test_none_is_started_where_helpers_are_turned_off_or_the_store_cannot_be_written(
    store, monkeypatch
):
    monkeypatch.setattr(subprocess, "Popen", None)
    with monkeypatch.context() as patch:
        patch.setenv("QUARK_HELPER_PROCESSES", "0")
        assert not find_helper(store.layout, start=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not find_helper(store.layout, start=True)


@pytest.mark.long
def test_sync_compacts_what_was_left(tmp_path):
    store = Store(tmp_path)
    steps = fill(store, 200)
    store.close()
    done = CliRunner().invoke(cli, ["sync", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert count_batches(store.layout.db_path) == 0
    with quark.open_run("run0", storage_dir=tmp_path) as run:
        assert len(quark.MetricsLogger(run).read(metric_key="train/m3")) == steps


@pytest.mark.long
def test_a_tight_loop_leaves_few_batches(tmp_path):
    values = dict.fromkeys(KEYS, 0.5)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(30_000):
            metrics.log_many(values, step=step)
    connection = connect(find_store(tmp_path))
    (batches,) = connection.execute(
        "SELECT max(head) FROM writer JOIN run ON run.pk = run_pk WHERE run.id = ?",
        (session.run_id,),
    ).fetchone()
    connection.close()
    # One for each hundred records they would be 6,000.
    assert batches < 1_000
    assert metrics.columns(metric_key="train/m3")["step"].tolist() == list(range(30_000))


@pytest.mark.long
def test_a_reader_of_one_key_decodes_only_its_rows(store, monkeypatch):
    writer = store.start()
    for start in range(0, 3_000, 100):
        writer.log(*[(key, 0.25, start + row) for row in range(100) for key in KEYS])
    decoded = []
    to_array = Column.to_array

    def count_rows(column, count, rows=None):
        found = to_array(column, count, rows)
        decoded.append(len(found))
        return found

    monkeypatch.setattr(Column, "to_array", count_rows)
    query = Query(equals={"metric_key": "train/m3"})
    found = store.reader.read("run0", "metric", query)
    assert found["step"].tolist() == list(range(3_000))
    assert max(decoded) == 100
    decoded.clear()
    series = store.reader.read_series("run0", "train/m4", max_points=10)
    assert series.points == 3_000
    assert max(decoded) == 100
    decoded.clear()
    assert store.reader.read("run0", "metric", Query(equals={"metric_key": "none"})).count == 0
    parts = list(store.reader.iterate("run0", "metric", query, rows=500))
    assert sum(part.count for part in parts) == 3_000
    assert not decoded or max(decoded) == 100


QUERIES = [
    Query(equals={"metric_key": "train/m3"}),
    Query(equals={"namespace": "train", "metric_name": "m5"}, step_min=100, step_max=900),
    Query(equals={"metric_name": "m0"}, limit=50),
    Query(equals={"metric_key": "other"}),
    Query(any_of={"metric_key": ("train/m1", "train/m2")}, step=1_234),
    Query(step_min=1_500),
]


@pytest.mark.long
def test_what_is_read_is_the_same_before_during_and_after(store, monkeypatch):
    monkeypatch.setattr("quark_backends.store.upkeep.compaction._TURN_BATCHES", 11)
    writer = store.start()
    for start in range(0, 2_000, 50):
        points = [(key, start + row / 7, start + row) for row in range(50) for key in KEYS]
        points += [("other", float("nan"), start)] if start % 200 == 0 else []
        writer.log(*points)

    def read():
        reader = type(store.reader)(store.connect_reader)
        found = [repr(reader.read("run0", "metric", query).to_records()) for query in QUERIES]
        for query in QUERIES[:2]:
            parts = reader.iterate("run0", "metric", query, rows=333)
            found.append(repr([record for part in parts for record in part.to_records()]))
        series = reader.read_series("run0", "train/m3", max_points=None)
        found.append((series.step.tolist(), series.last.tolist()))
        curve = reader.read_series("run0", "train/m3", max_points=20)
        found.append((curve.points, curve.low.min(), curve.high.max(), curve.last[-1]))
        reader.close()
        return found

    before = read()
    compactor, turns = Compactor(store.connection), 0
    while work := [w for w in compactor.find_work(minimum=1) if w.kind == "metric"]:
        assert compactor.compact(work[0]) > 0
        assert read() == before
        turns += 1
    assert turns == 4
