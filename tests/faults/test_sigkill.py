"""A killed process leaves a clean store that holds a gap-free beginning of each thread's calls."""

import random
import signal
import sqlite3
import time

import pytest
from kit.programs import start_code

import quark
from quark_core.runs import recovery

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
