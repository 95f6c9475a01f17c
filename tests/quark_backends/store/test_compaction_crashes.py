"""Compaction beside writers, readers and kills: every record is there, once, at every moment."""

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time

import pytest
from stores import Store

import quark
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.upkeep.background_compaction import BackgroundCompaction, WriteGate
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.records.query import Query

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
# Python warns of every fork of a process with threads; the child here uses none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def read_steps(store, key=None):
    equals = {} if key is None else {"metric_key": key}
    return store.reader.read(store.run_id, "metric", Query(equals=equals))["step"].tolist()


def count_waiting(store):
    rows = store.connection.execute("SELECT count(*) FROM batch WHERE kind = 'metric'")
    return rows.fetchone()[0]


def log_batches(writer, first, count):
    batches = []
    for step in range(first, first + count):
        points = [("loss", float(step), step), ("train/acc", step / 2, step)]
        batches.append(writer.batch([writer.metric(*point) for point in points]))
    writer.store.ingest.write(batches)


def compact_for_ever(layout, begun):
    """In a child: compact again and again, with little in each turn, until killed."""
    connection = connect(layout)
    compactor = Compactor(connection)
    os.write(begun, b"x")
    while True:
        for work in compactor.find_work(minimum=2):
            compactor.compact(work)


@pytest.mark.long
@needs_fork
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_many_kills_in_the_middle_of_compaction_lose_nothing(tmp_path, monkeypatch, kills):
    monkeypatch.setattr("quark_backends.store.upkeep.compaction._TURN_BATCHES", 3)
    generator = random.Random(0)
    store = Store(tmp_path)
    writer = store.start()
    total = halfway = 0
    killed = 0
    # Until enough came in the middle of the work, not before or after it.
    while killed < kills or halfway < kills // 5:
        killed += 1
        log_batches(writer, total, 40)
        total += 40
        before = count_waiting(store)
        # A fork copies what SQLite knows of the locks that its parent holds.
        store.close()
        reads, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                compact_for_ever(store.layout, begun)
            finally:
                os._exit(1)
        # Killed at another moment each time, and at one in the middle on a busy machine, too.
        os.read(reads, 1)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(reads)
        os.close(begun)
        store.connection = connect(store.layout)
        store.ingest = type(store.ingest)(store.connection)
        store.reader = StoreReader(lambda: connect(store.layout, read_only=True))
        assert read_steps(store, "loss") == list(range(total))
        assert read_steps(store, "train/acc") == list(range(total))
        halfway += 0 < count_waiting(store) < before
    assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert store.connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert store.connection.execute(
        "SELECT count FROM run_metric JOIN name ON name.pk = name_pk ORDER BY text"
    ).fetchall() == [(total,), (total,)]
    store.compact()
    assert read_steps(store, "loss") == list(range(total))
    store.close()


@pytest.mark.long
@needs_fork
def test_a_reader_in_another_process_always_sees_what_was_acknowledged(tmp_path):
    store = Store(tmp_path)
    writer = store.start()
    log_batches(writer, 0, 50)
    store.close()
    receiving, sending = os.pipe()
    counting, counted = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(sending)
        try:
            os._exit(watch(store, receiving, counted))
        finally:
            os._exit(4)
    os.close(receiving)
    os.close(counted)
    os.set_blocking(counting, False)
    store.connection = connect(store.layout)
    store.ingest = type(store.ingest)(store.connection)
    gate = WriteGate()
    compaction = BackgroundCompaction(lambda: connect(store.layout), gate)
    total = 50
    writes = reads = 0
    while writes < 60 or reads <= 20:
        with gate.write():
            log_batches(writer, total, 20)
        total += 20
        writes += 1
        with contextlib.suppress(BlockingIOError):
            told = os.read(counting, 4096)
            assert told, "the reader has ended before the writer"
            reads += len(told)
        os.write(sending, total.to_bytes(4, "little"))
        compaction.note(20, 40)
        time.sleep(0.005)
    compaction.close(10)
    os.close(sending)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(counting)
    chunks = store.connection.execute("SELECT count(*) FROM chunk").fetchone()[0]
    assert chunks > 0
    store.reader = StoreReader(lambda: connect(store.layout, read_only=True))
    assert read_steps(store, "loss") == list(range(total))
    store.close()


def watch(store, receiving, counted):
    """In a child: read until the writer ends; 0 where every read was right."""
    os.set_blocking(receiving, False)
    reader = StoreReader(lambda: connect(store.layout, read_only=True))
    acknowledged = 50
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline:
        try:
            data = os.read(receiving, 4096)
        except BlockingIOError:
            pass
        else:
            if not data:
                return 0
            acknowledged = int.from_bytes(data[-4:], "little")
        found = reader.read(store.run_id, "metric", Query())
        steps = found["step"].tolist()
        expected = [step for step in range(len(steps) // 2) for _ in range(2)]
        if steps != expected or len(steps) < 2 * acknowledged:
            return 1
        series = reader.read_series(store.run_id, "loss", max_points=7)
        if series.points < acknowledged or series.low.min() != 0.0:
            return 2
        os.write(counted, b".")
    return 5


@pytest.mark.long
def test_a_session_is_compacted_while_it_logs(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(600):
            metrics.log("loss", float(step), step=step)
            if step % 3 == 0:
                metrics.flush()
        wait_until(lambda: count_chunks(session) > 0)
        assert [record.step for record in metrics.read()] == list(range(600))
        threads = find_threads()
        assert threads
    wait_until(lambda: not threads & find_threads())
    assert [record.step for record in metrics.read()] == list(range(600))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def find_threads():
    """Threads that compact; those of other tests may be about to end."""
    return {thread for thread in threading.enumerate() if thread.name == "quark-compaction"}


def count_chunks(session):
    connection = sqlite3.connect(session.context.db_path)
    try:
        return connection.execute("SELECT count(*) FROM chunk WHERE kind = 'metric'").fetchone()[0]
    finally:
        connection.close()


@pytest.mark.long
def test_what_a_quick_run_leaves_is_compacted_at_its_end(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(60_000):
            metrics.log("loss", float(step), step=step)
            if step % 200 == 199:
                session.flush("journaled")  # a batch of its own, as many as a slow run makes
        metrics.flush()
    # On a busy machine another process does it, after the end.
    wait_until(lambda: count_chunks(session) > 0)
    connection = sqlite3.connect(session.context.db_path)
    (left,) = connection.execute("SELECT count(*) FROM batch WHERE kind = 'metric'").fetchone()
    connection.close()
    assert left < 512
    assert metrics.columns()["step"].tolist() == list(range(60_000))


def test_a_short_run_starts_no_thread_for_it(tmp_path):
    earlier = find_threads()
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush()
        assert find_threads() <= earlier


def test_compaction_waits_while_a_batch_is_being_written():
    gate, order = WriteGate(), []
    entered, leave = threading.Event(), threading.Event()

    def write():
        with gate.write():
            entered.set()
            leave.wait(60)
            order.append("written")

    def compact():
        with gate.step_in():
            order.append("compacted")

    writer = threading.Thread(target=write)
    writer.start()
    assert entered.wait(60)
    compaction = threading.Thread(target=compact)
    compaction.start()
    time.sleep(0.05)
    assert order == []
    leave.set()
    writer.join(60)
    compaction.join(60)
    assert order == ["written", "compacted"]


def test_a_store_that_is_out_of_reach_costs_compaction_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("quark_backends.store.upkeep.background_compaction._AFTER_FAILURE_S", 0.01)
    calls = []

    def fail():
        calls.append(1)
        raise sqlite3.OperationalError("disk I/O error")

    compaction = BackgroundCompaction(fail, WriteGate())
    compaction.note(64, 64)
    compaction.note(64, 64)
    wait_until(lambda: calls)
    compaction.close(60)
    assert "Traceback" not in caplog.text
