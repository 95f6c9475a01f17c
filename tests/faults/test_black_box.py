"""The black box: what log() returned for survives SIGKILL, and nothing comes twice."""

import itertools
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import golden
import pytest

import quark
from quark_core import recovery
from quark_core.delivery.black_box import BlackBox, open_black_box, read_black_box
from quark_core.delivery.origin import Origin
from quark_core.json_object import JsonObject
from quark_core.metric_rows import MetricKey
from quark_core.query import Query
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or not hasattr(os, "posix_fallocate"),
    reason="needs shared memory",
)

ORIGIN = Origin("run0", "writer0")


def metric(sequence, value=0.0, **fields):
    return MetricRecord("run0", "writer0", 0, 0, sequence, 5, "a/b", "a", "b", value, 1, **fields)


def read_records(path):
    return read_black_box(path, ORIGIN)[0]


@pytest.fixture
def box(tmp_path):
    return BlackBox(tmp_path / "box", size_bytes=4096)


def test_every_kind_comes_back_as_it_was(box):
    kept = []
    append = box.wrap_append(kept.append)
    payload = JsonObject({"x": [1, None], "y": "ü"})
    records = [
        metric(0, float("inf"), description="d", metadata=payload),
        EventRecord("run0", "writer0", 0, 0, 0, 6, "saved", "info", 3, None, "ok", payload),
        LifecycleRecord("run0", "writer0", 0, 0, 0, 7, "heartbeat", None),
    ]
    for record in records:
        append(record)
    keys = (MetricKey("a/b", "a", "b"), MetricKey("c", None, "c"))
    append((1, 5, 1, None, keys, [1.0, 2.0]))
    found = read_records(box.path)
    assert found[:3] == records
    assert [(r.sequence, r.metric_key, r.namespace, r.value) for r in found[3:]] == [
        (1, "a/b", "a", 1.0),
        (2, "c", None, 2.0),
    ]
    assert kept[:3] == records


@pytest.mark.parametrize("kind", sorted(golden.RECORDS))
def test_every_record_of_the_schema_comes_back_as_it_was(kind, tmp_path):
    box = BlackBox(tmp_path / "large box", size_bytes=64 * 1024)
    append = box.wrap_append([].append)
    records = golden.RECORDS[kind]
    for record in records:
        append(record)
    origin = Origin("run-0", "writer-0", attempt=1, rank=2)
    found = read_black_box(box.path, origin)[0]
    # As texts, since NaN does not equal itself.
    assert list(map(repr, found)) == list(map(repr, records))


def test_the_ring_goes_round_and_reads_from_its_tail(box):
    append = box.wrap_append(lambda item: None)
    for sequence in range(2_000):
        append(metric(sequence))
        if sequence % 7 == 0:
            box.release(box.mark())
    expected = [sequence for sequence in range(2_000) if sequence > 1_995]
    assert [record.sequence for record in read_records(box.path)] == expected
    assert box.uncovered == 0


def test_a_full_ring_covers_the_oldest_and_counts_the_rest(box):
    append = box.wrap_append(lambda item: None)
    for sequence in range(500):
        append(metric(sequence))
    found = [record.sequence for record in read_records(box.path)]
    assert found == list(range(len(found)))
    assert box.uncovered == 500 - len(found) > 0
    assert read_black_box(box.path, ORIGIN)[1] == box.uncovered
    box.release(box.mark())
    append(metric(500))
    assert [record.sequence for record in read_records(box.path)] == [500]
    assert read_black_box(box.path, ORIGIN)[1] == 0


def test_torn_and_wrong_bytes_end_the_reading_quietly(box, tmp_path):
    append = box.wrap_append(lambda item: None)
    for sequence in range(5):
        append(metric(sequence))
    intact = box.path.read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        data = bytearray(intact[: generator.randrange(len(intact))])
        if data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path = tmp_path / "broken"
        path.write_bytes(data)
        found = [record.sequence for record in read_records(path)]
        assert found == list(range(found[0], found[0] + len(found))) if found else True
    assert read_records(tmp_path / "absent") == []


def test_without_shared_memory_or_when_told_so_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr("quark_core.delivery.black_box._SHARED_MEMORY", tmp_path / "absent")
    assert open_black_box(ORIGIN) is None
    monkeypatch.undo()
    monkeypatch.setenv("QUARK_BLACK_BOX", "0")
    assert open_black_box(ORIGIN) is None
    monkeypatch.delenv("QUARK_BLACK_BOX")
    monkeypatch.delattr(os, "posix_fallocate")
    assert open_black_box(ORIGIN) is None


def test_a_run_that_ends_leaves_nothing_in_shared_memory(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        name = f"quark-{session.run_id}-{session.open_run.origin.writer_id}"
        assert (Path("/dev/shm") / name).exists()
    assert not (Path("/dev/shm") / name).exists()


PROGRAM = """
import mmap, os, struct, sys, time, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1], backends="csv")
metrics = quark.MetricsLogger(session)
with open(sys.argv[2], "r+b") as file:
    counter = mmap.mmap(file.fileno(), 8)
pause = float(sys.argv[3])
print(session.run_id, flush=True)
step = 0
while True:
    metrics.log("m", float(step), step=step)
    step += 1
    struct.pack_into("<Q", counter, 0, step)
    if pause:
        time.sleep(pause)
    elif step % 200 == 0:
        time.sleep(0.001)
"""


@pytest.mark.parametrize(("pause_s", "seed"), list(itertools.product([0.0, 0.005], range(3))))
def test_what_log_returned_for_survives_a_kill(tmp_path, pause_s, seed):
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(counter), str(pause_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    run_id = child.stdout.readline().strip()
    time.sleep(random.Random(seed).uniform(0.2, 0.6))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with counter.open("r+b") as file:
        (returned,) = struct.unpack("<Q", mmap.mmap(file.fileno(), 8)[:])
    results = recovery.sync(tmp_path / "runs")
    assert {result.state for result in results} == {"delivered"}
    session = quark.open_run(run_id, tmp_path / "runs")
    steps = [record.step for record in quark.MetricsLogger(session).read(metric_key="m")]
    assert steps == list(range(len(steps)))
    # One more may have been accepted in the moment between log() and the counter.
    assert returned <= len(steps) <= returned + 1
    lines = (session.run_path / "csv" / "metrics_long.csv").read_text().splitlines()
    assert len(lines) == len(steps) + 1
    assert recovery.survey(tmp_path / "runs") == []
    assert not list(Path("/dev/shm").glob(f"quark-{run_id}-*"))


FULL = """
import os, signal, sys, quark
from quark_core.delivery import black_box
black_box.BlackBox.__init__.__kwdefaults__["size_bytes"] = 4096
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
session.open_run.background.join()
session.flush()
stream = session.open_run.stream
stream._tick = lambda *, sync: True
for step in range(1_000):
    metrics.log("m", float(step), step=step)
print(session.run_id, stream.report().uncovered, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_ring_could_not_cover_is_told_in_the_run_of_a_killed_process(tmp_path, caplog):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    run_id, uncovered = done.stdout.split()
    recovery.sync(tmp_path)
    session = quark.open_run(run_id, tmp_path)
    found = [record.step for record in quark.MetricsLogger(session).read()]
    assert found == list(range(1_000 - int(uncovered)))
    assert int(uncovered) > 900
    (event,) = quark.EventLogger(session).read(event_type="records_dropped")
    assert event.severity == "error"
    assert event.payload["at_most"] == int(uncovered)
    assert f"its last {uncovered} calls" in caplog.text
    lifecycle = session.open_run.reader.read(run_id, "lifecycle", Query()).to_records()
    assert [record.data["at_most"] for record in lifecycle if record.action == "gap"] == [
        int(uncovered)
    ]
