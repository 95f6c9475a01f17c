"""Several processes at one store, and at one run."""

import multiprocessing
import os
import random
import signal
import sqlite3
import time

import pytest
from kit.programs import run_code, start_code

import quark
from quark_core.records.query import Query
from quark_core.runs import recovery

WRITER = """
import sys, quark
with quark.start_run(project=sys.argv[2], storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(3000):
        metrics.log("m", float(step), step=step)
        if step % 100 == 0:
            metrics.flush()
print(session.run_id, session.report_delivery().complete)
"""


@pytest.mark.long
def test_two_processes_in_one_storage_dir_lose_nothing(tmp_path):
    children = [start_code(WRITER, tmp_path, f"project{index}") for index in range(3)]
    ended = [child.communicate()[0].split() for child in children]
    assert [complete for _, complete in ended] == ["True"] * 3
    for index, (run_id, _) in enumerate(ended):
        session = quark.open_run(run_id, tmp_path)
        assert (session.status, session.project_name) == ("completed", f"project{index}")
        values = [record.value for record in quark.MetricsLogger(session).read()]
        assert values == list(map(float, range(3000)))


def log_from_context(context, name):
    with quark.MetricsLogger(context) as metrics, quark.EventLogger(context) as events:
        for step in range(50):
            metrics.log(name, float(step), step=step)
        events.log("worker_done", payload={"worker": name})


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_processes_log_through_the_context(tmp_path, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    start = multiprocessing.get_context(method)
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("parent", 1.0, step=0)
        workers = [
            start.Process(target=log_from_context, args=(session.context, f"worker{index}"))
            for index in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        for index in range(2):
            found = metrics.read(metric_key=f"worker{index}")
            assert [record.step for record in found] == list(range(50))
        assert len({record.writer_id for record in metrics.read()}) == 3
    assert session.reload().status == "completed"
    done = quark.EventLogger(session).read(event_type="worker_done")
    assert sorted(event.payload["worker"] for event in done) == ["worker0", "worker1"]
    mirrored = sorted((session.run_path / "csv").glob("metrics_long*.csv"))
    lines = [line for path in mirrored for line in path.read_text().splitlines()[1:]]
    assert len(lines) == 101


def test_a_context_of_an_ended_run_only_reads(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    metrics = quark.MetricsLogger(session.context)
    assert [record.value for record in metrics.read()] == [1.0]
    with pytest.raises(quark.InvalidRunStateError, match="ended"):
        metrics.log("m", 2.0, step=1)


def test_a_context_joins_the_session_of_its_own_process(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        record = quark.MetricsLogger(session.context).log("m", 1.0, step=0)
        assert record.writer_id == session.open_run.origin.writer_id


LATE_WORKER = """
import os, sys, time, quark
known, tell_known = os.pipe()
ended, tell_ended = os.pipe()
with quark.start_run(project="p", storage_dir=sys.argv[1], backends="csv") as session:
    metrics = quark.MetricsLogger(session)
    metrics.log("parent", 0.0, step=0)
    pid = os.fork()
    if pid == 0:
        os.close(tell_ended)
        for step in range(50):
            metrics.log("worker", float(step), step=step)
            if step == 0:
                os.write(tell_known, b"x")
            if step == 40 and sys.argv[2] == "outlives":
                os.read(ended, 1)
            time.sleep(0.01)
        sys.exit(0)
    # The parent does not wait for its worker, which is known from its first record on.
    os.read(known, 1)
os.close(tell_ended)
print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("worker", "wait_s"), [("ends", 50), ("outlives", 0)])
def test_the_end_of_a_run_waits_for_a_living_worker_as_long_as_said(tmp_path, worker, wait_s):
    waits = {"QUARK_WRITERS_TIMEOUT_SECONDS": str(wait_s), "QUARK_EXIT_TIMEOUT_SECONDS": "100"}
    # It prints until the worker is gone too.
    done = run_code(LATE_WORKER, tmp_path, worker, env={**os.environ, **waits})
    if worker == "outlives":
        recovery.sync(tmp_path)
    session = quark.open_run(done.stdout.split()[0], tmp_path)
    found = quark.MetricsLogger(session).read(metric_key="worker")
    assert [record.step for record in found] == list(range(50))
    lifecycle = session.open_run.reader.read(session.run_id, "lifecycle", Query()).to_records()
    (end,) = [record for record in lifecycle if record.action == "status"]
    assert (end.time_us > found[-1].time_us) is (worker == "ends")
    assert session.status == "completed"


# A killed process leaves a clean store that holds a gap-free beginning of each thread's calls.

PROGRAM = """
import sys, threading, time, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
pace = float(sys.argv[2])
print(session.run_id, flush=True)
def work(name, begun):
    step = 0
    while True:
        metrics.log(name, float(step), step=step)
        step += 1
        begun.set()
        if pace:
            time.sleep(pace)
for index in range(2):
    begun = threading.Event()
    threading.Thread(target=work, args=(f"thread{index}", begun), daemon=True).start()
    begun.wait()
metrics.log("main", 0.0, step=0)
metrics.flush()
print("all log", flush=True)
step = 1
while True:
    metrics.log("main", float(step), step=step)
    step += 1
    time.sleep(0.01)
    if step % 10 == 0:
        metrics.flush()
        print(step, flush=True)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("pace_s", [0.0002, 0.005])
@pytest.mark.parametrize("seed", range(3))
def test_the_store_holds_a_gap_free_beginning(tmp_path, pace_s, seed, record_property):
    child = start_code(PROGRAM, tmp_path, pace_s)
    run_id = child.stdout.readline().strip()
    assert child.stdout.readline() == "all log\n"
    time.sleep(random.Random(seed).uniform(0.3, 0.9))
    child.send_signal(signal.SIGKILL)
    flushed = [int(line) for line in child.communicate()[0].split()]

    database = sqlite3.connect(tmp_path / ".quark" / "quark.db")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
    session = quark.open_run(run_id, tmp_path)
    assert session.open_run.reader.load_run(run_id).state == "lost"
    metrics = quark.MetricsLogger(session)
    for name in ("main", "thread0", "thread1"):
        steps = [record.step for record in metrics.read(metric_key=name)]
        assert steps == list(range(len(steps)))
    kept = len(metrics.read(metric_key="main"))
    assert kept >= max(flushed, default=0)
    # How many of the last moment's calls were lost is reported, never asserted: it is a clock's.
    record_property("kept_of_main", kept)

    # What was journaled and not yet in the store follows, and nothing comes twice.
    recovery.sync(tmp_path)
    assert recovery.survey(tmp_path) == []
    for name in ("main", "thread0", "thread1"):
        steps = [record.step for record in metrics.read(metric_key=name)]
        assert steps == list(range(len(steps)))
        assert steps
    recovered = len(metrics.read(metric_key="main"))
    assert recovered >= kept
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as resumed:
        quark.MetricsLogger(resumed).log("main", -1.0, step=recovered)
    assert len(metrics.read(metric_key="main")) == recovered + 1
