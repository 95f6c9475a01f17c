"""Compaction beside writers, readers and kills: every record is there, once, at every moment."""

import os
import random
import signal
import sqlite3
import threading
import time

import pytest
from stores import Store

import quark
from quark_backends.store.background import BackgroundCompaction, WriteGate
from quark_backends.store.compaction import Compactor
from quark_backends.store.database import connect
from quark_backends.store.reader import StoreReader
from quark_core.query import Query

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


def compact_for_ever(layout):
    """In a child: compact again and again, with little in each turn, until killed."""
    connection = connect(layout)
    compactor = Compactor(connection)
    while True:
        for work in compactor.find_work(minimum=2):
            compactor.compact(work)


@needs_fork
def test_a_hundred_kills_in_the_middle_of_compaction_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("quark_backends.store.compaction._TURN_BATCHES", 3)
    generator = random.Random(0)
    store = Store(tmp_path)
    writer = store.start()
    total = halfway = 0
    for _ in range(100):
        log_batches(writer, total, 40)
        total += 40
        before = count_waiting(store)
        # A fork copies what SQLite knows of the locks that its parent holds.
        store.close()
        pid = os.fork()
        if pid == 0:
            try:
                compact_for_ever(store.layout)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
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
    # The kills did come in the middle of the work, not before or after it.
    assert halfway >= 20
    store.compact()
    assert read_steps(store, "loss") == list(range(total))
    store.close()


@needs_fork
def test_a_reader_in_another_process_always_sees_what_was_acknowledged(tmp_path):
    store = Store(tmp_path)
    writer = store.start()
    log_batches(writer, 0, 50)
    store.close()
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(sending)
        try:
            os._exit(watch(store, receiving))
        finally:
            os._exit(4)
    os.close(receiving)
    store.connection = connect(store.layout)
    store.ingest = type(store.ingest)(store.connection)
    gate = WriteGate()
    compaction = BackgroundCompaction(lambda: connect(store.layout), gate)
    total = 50
    for _ in range(60):
        with gate.write():
            log_batches(writer, total, 20)
        total += 20
        os.write(sending, total.to_bytes(4, "little"))
        compaction.note(20)
        time.sleep(0.005)
    compaction.close(10)
    os.close(sending)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    chunks = store.connection.execute("SELECT count(*) FROM chunk").fetchone()[0]
    assert chunks > 0
    store.reader = StoreReader(lambda: connect(store.layout, read_only=True))
    assert read_steps(store, "loss") == list(range(total))
    store.close()


def watch(store, receiving):
    """In a child: read until the writer ends; 0 where every read was right."""
    os.set_blocking(receiving, False)
    reader = StoreReader(lambda: connect(store.layout, read_only=True))
    acknowledged, reads = 50, 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data = os.read(receiving, 4096)
        except BlockingIOError:
            pass
        else:
            if not data:
                return 0 if reads > 20 else 3
            acknowledged = int.from_bytes(data[-4:], "little")
        found = reader.read(store.run_id, "metric", Query())
        steps = found["step"].tolist()
        expected = [step for step in range(len(steps) // 2) for _ in range(2)]
        if steps != expected or len(steps) < 2 * acknowledged:
            return 1
        series = reader.read_series(store.run_id, "loss", max_points=7)
        if series.points < acknowledged or series.low.min() != 0.0:
            return 2
        reads += 1
    return 5


def test_a_session_is_compacted_while_it_logs(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(600):
            metrics.log("loss", float(step), step=step)
            if step % 3 == 0:
                metrics.flush()
        deadline = time.monotonic() + 20
        while count_chunks(session) == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert count_chunks(session) > 0
        assert [record.step for record in metrics.read()] == list(range(600))
        names = [thread.name for thread in threading.enumerate()]
        assert "quark-compaction" in names
    assert "quark-compaction" not in [thread.name for thread in threading.enumerate()]
    assert [record.step for record in metrics.read()] == list(range(600))


def count_chunks(session):
    connection = sqlite3.connect(session.context.db_path)
    try:
        return connection.execute("SELECT count(*) FROM chunk WHERE kind = 'metric'").fetchone()[0]
    finally:
        connection.close()


def test_what_a_quick_run_leaves_is_compacted_at_its_end(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(60_000):
            metrics.log("loss", float(step), step=step)
        metrics.flush()
    connection = sqlite3.connect(session.context.db_path)
    (left,) = connection.execute("SELECT count(*) FROM batch WHERE kind = 'metric'").fetchone()
    connection.close()
    assert left < 512
    assert count_chunks(session) > 0
    assert metrics.columns()["step"].tolist() == list(range(60_000))


def test_a_short_run_starts_no_thread_for_it(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush()
        assert "quark-compaction" not in [thread.name for thread in threading.enumerate()]


def test_compaction_waits_while_a_batch_is_being_written():
    gate, order = WriteGate(), []
    entered, leave = threading.Event(), threading.Event()

    def write():
        with gate.write():
            entered.set()
            leave.wait(5)
            order.append("written")

    def compact():
        with gate.step_in():
            order.append("compacted")

    writer = threading.Thread(target=write)
    writer.start()
    assert entered.wait(5)
    compaction = threading.Thread(target=compact)
    compaction.start()
    time.sleep(0.05)
    assert order == []
    leave.set()
    writer.join(5)
    compaction.join(5)
    assert order == ["written", "compacted"]


def test_a_store_that_is_out_of_reach_costs_compaction_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("quark_backends.store.background._AFTER_FAILURE_S", 0.01)
    calls = []

    def fail():
        calls.append(1)
        raise sqlite3.OperationalError("disk I/O error")

    compaction = BackgroundCompaction(fail, WriteGate())
    compaction.note(64)
    compaction.note(64)
    deadline = time.monotonic() + 5
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    compaction.close(5)
    assert calls
    assert "Traceback" not in caplog.text
