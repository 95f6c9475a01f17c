"""`quark.db` is the whole store once its last writer has ended, whoever that was."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_backends.store.databases import write_ahead_log
from quark_backends.store.databases.sqlite import checkpoint_file, connect, ensure_store, find_store
from quark_backends.store.databases.write_ahead_log import empty_log, find_log, measure_log

HEAD = """
import os, signal, sys, time, quark
storage_dir = sys.argv[1]

def train(steps=50, **arguments):
    session = quark.start_run(project="p", storage_dir=storage_dir, **arguments)
    metrics = quark.MetricsLogger(session)
    for step in range(steps):
        metrics.log("loss", 1.0, step=step)
    return session, metrics
"""


def count_copied(storage_dir, into):
    """Runs and points in a copy of `quark.db` and of nothing else."""
    copy = into / ".quark"
    copy.mkdir(parents=True)
    for name in ("quark.db", "store.json"):
        shutil.copy(storage_dir / ".quark" / name, copy / name)
    points = {}
    for summary in quark.search_runs(storage_dir=into):
        session = quark.open_run(summary.run_id, into)
        points[summary.run_id] = len(quark.MetricsLogger(session).read(metric_key="loss"))
    return points


def run_script(storage_dir, script, expected=0):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, str(storage_dir)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "100"},
    )
    assert done.returncode == expected, done.stderr
    return done


def call(*arguments):
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


READS = """
for _ in range(3):
    session, metrics = train()
    assert len(metrics.read()) == 50
    session.end_run()
    assert len(metrics.read()) == 50
"""
SEARCHES = """
for _ in range(3):
    session, metrics = train()
    assert quark.search_runs(storage_dir=storage_dir)
    session.end_run()
"""
ANALYZES = """
for _ in range(3):
    session, metrics = train()
    session.end_run()
    quark.AnalyzerEngine(session).analyze()
"""
FORKS = """
import multiprocessing

def work(metrics):
    for step in range(25, 50):
        metrics.log("loss", 1.0, step=step)

for _ in range(3):
    session, metrics = train(25)
    metrics.read()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(metrics,))
    worker.start()
    worker.join()
    session.end_run()
"""
# A child that trains on its own must not believe that its parent's connections are its own.
FORKED_RUNS = """
outer, _ = train()
outer.open_run.reader.list_runs()
for _ in range(2):
    if not (child := os.fork()):
        session, metrics = train()
        metrics.read()
        session.end_run()
        os._exit(0)
    os.waitpid(child, 0)
outer.end_run()
"""


@pytest.mark.sampled
@pytest.mark.parametrize("script", [READS, SEARCHES, ANALYZES, FORKS, FORKED_RUNS])
def test_the_file_alone_is_the_store_once_its_process_has_ended(tmp_path, script):
    run_script(tmp_path / "store", script)
    assert sorted(count_copied(tmp_path / "store", tmp_path / "copy").values()) == [50] * 3


@pytest.mark.long
def test_outputs_of_an_analyzer_are_in_the_file_too(tmp_path):
    run_script(tmp_path / "store", ANALYZES)
    copied = count_copied(tmp_path / "store", tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / ".quark" / "quark.db") as connection:
        (found,) = connection.execute("SELECT count(DISTINCT run_pk) FROM generation").fetchone()
    connection.close()
    assert (found, len(copied)) == (3, 3)


@pytest.mark.long
def test_the_rank_that_ends_last_leaves_a_whole_file(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("QUARK_", "SLURM_"))}
    script = HEAD + (
        "session, metrics = train(ranks='all')\n"
        "session.flush()\n"
        "time.sleep(0.3 * (2 - int(os.environ['RANK'])))\n"
        "session.end_run()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "store")],
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29671",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    ended = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert list(count_copied(tmp_path / "store", tmp_path / "copy").values()) == [150]


@pytest.mark.long
def test_what_a_killed_process_leaves_is_told_and_made_whole_by_sync(tmp_path):
    store = tmp_path / "store"
    run_script(
        store,
        "session, metrics = train()\nsession.flush()\nos.kill(os.getpid(), signal.SIGKILL)",
        expected=-9,
    )
    assert count_copied(store, tmp_path / "before") == {}
    told = call("doctor", "-d", store)
    assert "of new data that quark.db lacks" in told
    assert f"quark sync {store}" in told
    assert json.loads(call("doctor", "-d", store, "--json"))["store"]["log_bytes"] > 0
    call("sync", store)
    assert list(count_copied(store, tmp_path / "after").values()) == [50]
    assert "alone" not in call("doctor", "-d", store)
    assert json.loads(call("doctor", "-d", store, "--json"))["store"]["log_bytes"] == 0


def test_the_session_can_read_after_its_end(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    metrics.log("loss", 1.0, step=0)
    assert len(metrics.read()) == 1
    session.end_run()
    assert measure_log(tmp_path / ".quark" / "quark.db") == 0
    assert [record.value for record in metrics.read()] == [1.0]
    assert quark.search_runs(storage_dir=tmp_path)[0].state == "completed"
    assert session.reload().status == "completed"


@pytest.mark.long
def test_somebody_who_reads_an_older_state_keeps_no_run_from_ending(tmp_path):
    layout = ensure_store(tmp_path)
    reader = connect(layout, read_only=True)
    reader.begin_read()
    reader.execute("SELECT * FROM run").fetchall()
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    assert session.report_delivery().complete
    assert measure_log(layout.db_path) > 0  # it could not be brought in
    assert call("sync", tmp_path)
    assert measure_log(layout.db_path) > 0
    reader.commit()
    assert checkpoint_file(layout) == 0
    reader.close()
    assert len(count_copied(tmp_path, tmp_path / "copy")) == 1


def fill_log(layout):
    """Leave a log that the file lacks all of; returns the connection that writes."""
    writer, reader = connect(layout), connect(layout, read_only=True)
    reader.begin_read()
    reader.execute("SELECT * FROM run").fetchall()
    for number in range(64):
        writer.execute(
            "INSERT INTO project (id, name, root_path, created_us, updated_us)"
            " VALUES (?, ?, ?, 0, 0)",
            (f"p{number}", f"p{number}", "x" * 100_000),
        )
    reader.commit()
    reader.close()
    return writer


def test_a_log_that_takes_too_long_is_left_for_later_with_nothing_lost(tmp_path, monkeypatch):
    layout = ensure_store(tmp_path)
    monkeypatch.setattr(write_ahead_log, "_LARGE_BYTES", 0)
    writer = fill_log(layout)
    size_bytes = measure_log(layout.db_path)

    class Now(threading.Thread):  # a timer whose time is over at once
        def __init__(self, _after_s, call):
            super().__init__()
            self.call = call
            self.stop = threading.Event()

        def run(self):
            while not self.stop.is_set():
                self.call()

        def cancel(self):
            self.stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(write_ahead_log.threading, "Timer", Now)
        assert empty_log(writer) is False
        assert measure_log(layout.db_path) == size_bytes
        writer.close()
    assert measure_log(layout.db_path) == size_bytes  # SQLite has not gone on with it either
    assert checkpoint_file(layout) == 0
    with sqlite3.connect(layout.db_path) as connection:
        assert connection.execute("SELECT count(*) FROM project").fetchone() == (64,)
    connection.close()


def test_where_no_thread_can_be_had_a_large_log_stays(tmp_path, monkeypatch):
    layout = ensure_store(tmp_path)
    monkeypatch.setattr(write_ahead_log, "_LARGE_BYTES", 0)
    writer = fill_log(layout)

    def refuse(_self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.close()
    assert measure_log(layout.db_path) > 0
    monkeypatch.undo()
    assert checkpoint_file(layout) == 0


def test_of_several_connections_the_oldest_empties_the_log(tmp_path, monkeypatch):
    layout = ensure_store(tmp_path)
    first, second = connect(layout), connect(layout)
    second.execute("UPDATE run SET status = status")
    with connect(layout, read_only=True) as reader:
        second.execute("PRAGMA user_version = 3")
        second.close()
        assert measure_log(layout.db_path) > 0
        first.close()
        assert measure_log(layout.db_path) == 0
    reader.close()


def test_a_store_that_is_not_ours_keeps_its_log(tmp_path):
    layout = ensure_store(tmp_path)
    keeper = sqlite3.connect(layout.db_path)
    keeper.execute("PRAGMA application_id = 7")
    keeper.commit()
    before = find_log(layout.db_path).read_bytes()
    assert before
    with pytest.raises(quark.SessionStoreError, match="not created by this Quark"):
        checkpoint_file(layout)
    with pytest.raises(quark.SessionStoreError, match="not created by this Quark"):
        connect(find_store(tmp_path))
    assert find_log(layout.db_path).read_bytes() == before
    keeper.close()


@pytest.mark.long
def test_writers_of_other_processes_write_on_while_the_log_is_emptied(tmp_path):
    store = tmp_path / "store"
    ready = tmp_path / "ready"
    script = (
        "from pathlib import Path\n"
        "session, metrics = train()\nsession.flush()\n"
        f"Path({str(ready)!r}).touch()\n"
        "deadline = time.monotonic() + 200\n"
        f"while Path({str(ready)!r}).exists() and time.monotonic() < deadline:\n"
        "    metrics.log('loss', 1.0, step=0)\n    metrics.read(limit=1)\n"
        "session.end_run()\nassert session.report_delivery().complete\n"
    )
    other = subprocess.Popen([sys.executable, "-c", HEAD + script, str(store)])
    deadline = time.monotonic() + 200
    while not ready.exists():
        assert other.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(5):
        with quark.start_run(project="q", storage_dir=store) as session:
            quark.MetricsLogger(session).log("loss", 1.0, step=0)
        assert session.report_delivery().complete
    ready.unlink()
    assert other.wait(250) == 0
    assert len(count_copied(store, tmp_path / "copy")) == 6
