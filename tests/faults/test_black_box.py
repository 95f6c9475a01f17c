"""The black box: what log() returned for survives SIGKILL, and nothing comes twice."""

import itertools
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import golden
import pytest
from kit.programs import start_code, wait_until

import quark
from quark_core.delivery import crash_buffer
from quark_core.delivery.channel import MetricKey
from quark_core.delivery.crash_buffer import BlackBox, StreamAccounts, open_black_box
from quark_core.delivery.crash_buffer_recovery import (
    find_entry_span,
    iterate_entries,
    read_black_box,
    restore_records,
)
from quark_core.delivery.segments import Origin
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.runs import recovery

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or not hasattr(os, "posix_fallocate"),
    reason="needs shared memory",
)

ORIGIN = Origin("run0", "writer0")


def metric(sequence, value=0.0, **fields):
    return MetricRecord("run0", "writer0", 0, 0, sequence, 5, "a/b", "a", "b", value, 1, **fields)


def read_records(path, origin=ORIGIN):
    return [r for entry in iterate_entries(path) for r in restore_records(entry, origin)]


def read_sequences(path):
    return sorted(record.sequence for record in read_records(path))


@pytest.fixture
def make_box(tmp_path):
    # In shared memory as a real one is: elsewhere statvfs would speak of another file system.
    made = []

    def make(capacity_bytes=1 << 20, segment_bytes=4096):
        path = crash_buffer.find_box_path(f"test-{os.getpid()}", f"{len(made)}")
        box = BlackBox(path, ORIGIN, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
        made.append(box)
        return box

    yield make
    for box in made:
        box.remove()


def release(box, *, up_to):
    """As the delivery thread does once it has journaled what is before a mark."""
    mark = box.mark()
    accounts = StreamAccounts()
    accounts.add("metric", [(0, up_to)])
    box.save_accounts(accounts)
    box.release(mark)


def test_every_kind_comes_back_as_it_was(make_box):
    box = make_box()
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
    assert list(map(find_entry_span, iterate_entries(box.path))) == [
        ("metric", 0, 1),
        ("event", 0, 1),
        ("lifecycle", 0, 1),
        ("metric", 1, 3),
    ]


@pytest.mark.parametrize("kind", sorted(golden.RECORDS))
def test_every_record_of_the_schema_comes_back_as_it_was(kind, make_box):
    box = make_box()
    append = box.wrap_append([].append)
    records = golden.RECORDS[kind]
    for record in records:
        append(record)
    found = read_records(box.path, Origin("run-0", "writer-0", attempt=1, rank=2))
    # As texts, since NaN does not equal itself.
    assert list(map(repr, found)) == list(map(repr, records))
    spans = list(map(find_entry_span, iterate_entries(box.path)))
    assert spans == [(kind, record.sequence, record.sequence + 1) for record in records]


def test_segments_are_used_again_and_what_is_new_is_known(make_box):
    box = make_box()
    append = box.wrap_append(lambda item: None)
    for sequence in range(3_000):
        append(metric(sequence))
        if sequence % 70 == 69:
            release(box, up_to=sequence + 1)
            accounts = read_black_box(box.path).accounts
            found = read_sequences(box.path)
            assert [number for number in found if not accounts.knows("metric", number)] == []
    for sequence in range(3_000, 3_040):
        append(metric(sequence))
    accounts = read_black_box(box.path).accounts
    found = read_sequences(box.path)
    new = [number for number in found if not accounts.knows("metric", number)]
    assert new == list(range(accounts.spans["metric"].stop, 3_040))
    assert box.uncovered == 0
    assert len(list(box.path.glob("*.records"))) <= 6


def test_the_box_grows_up_to_its_bound_and_counts_the_rest(make_box):
    box = make_box(capacity_bytes=64 * 1024)
    append = box.wrap_append(lambda item: None)
    for sequence in range(5_000):
        append(metric(sequence))
    found = read_sequences(box.path)
    assert found == list(range(len(found)))
    assert 48 * 1024 < sum(p.stat().st_size for p in box.path.glob("*.records")) <= 64 * 1024
    assert box.uncovered == 5_000 - len(found) > 0
    assert read_black_box(box.path).uncovered == box.uncovered
    release(box, up_to=5_000)
    append(metric(5_000))
    assert 5_000 in read_sequences(box.path)
    assert read_black_box(box.path).uncovered == 0


def test_a_grown_box_shrinks_again(make_box):
    box = make_box(capacity_bytes=1 << 22)
    append = box.wrap_append(lambda item: None)
    for sequence in range(30_000):
        append(metric(sequence))
    grown = sum(p.stat().st_size for p in box.path.glob("*.records"))
    assert grown > 1 << 19
    for _ in range(3):
        release(box, up_to=30_000)
    assert sum(p.stat().st_size for p in box.path.glob("*.records")) < grown // 2
    append(metric(30_000))
    assert 30_000 in read_sequences(box.path)
    assert box.uncovered == 0


def test_an_entry_larger_than_a_segment_gets_one_of_its_own(make_box):
    box = make_box()
    append = box.wrap_append([].append)
    payload = JsonObject({"x": "y" * 50_000})
    large = EventRecord("run0", "writer0", 0, 0, 0, 6, "saved", "info", 3, None, "ok", payload)
    append(metric(0))
    append(large)
    append(metric(1))
    assert read_records(box.path) == [metric(0), large, metric(1)]


def test_half_of_the_shared_memory_is_left_to_others(make_box, monkeypatch):
    box = make_box(capacity_bytes=1 << 30)
    room = os.statvfs("/dev/shm")

    class Scarce:
        f_blocks, f_frsize, f_bavail = room.f_blocks, room.f_frsize, room.f_blocks // 2

    monkeypatch.setattr(crash_buffer.os, "statvfs", lambda path: Scarce)
    append = box.wrap_append(lambda item: None)
    for sequence in range(1_000):
        append(metric(sequence))
    assert box.uncovered > 0
    assert len(list(box.path.glob("*.records"))) == 2
    with pytest.raises(OSError, match="half of the shared memory"):
        box.keep_frames([(0, b"x")])


def test_threads_that_log_at_once_are_all_covered(make_box):
    box = make_box(capacity_bytes=1 << 26)
    append = box.wrap_append(lambda item: None)
    numbers = itertools.count()
    stop = threading.Event()

    def deliver():
        while not stop.wait(0.001):
            box.provide()

    def log():
        for _ in range(4_000):
            append(metric(next(numbers)))

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=log) for _ in range(8)]
        provider = threading.Thread(target=deliver)
        for thread in (provider, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        provider.join()
    finally:
        sys.setswitchinterval(0.005)
    assert read_sequences(box.path) == list(range(32_000))
    assert box.uncovered == 0


@pytest.mark.long
def test_a_signal_handler_that_logs_in_the_middle_of_a_call_is_covered(make_box):
    box = make_box(capacity_bytes=1 << 26)
    append = box.wrap_append(lambda item: None)
    numbers = itertools.count()
    before = signal.signal(signal.SIGALRM, lambda *_: append(metric(next(numbers))))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(50_000):
            append(metric(next(numbers)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    total = next(numbers)
    assert total > 50_000
    assert read_sequences(box.path) == list(range(total))


def test_torn_and_wrong_bytes_end_the_reading_quietly(make_box, tmp_path):
    box = make_box()
    append = box.wrap_append(lambda item: None)
    for sequence in range(5):
        append(metric(sequence))
    (segment,) = [p for p in box.path.glob("*.records") if p.read_bytes()[0]]
    intact = segment.read_bytes()
    generator = random.Random(0)
    (tmp_path / "broken").mkdir()
    path = tmp_path / "broken" / "000000.records"
    for _ in range(300):
        data = bytearray(intact[: generator.randrange(len(intact))])
        if data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        found = read_sequences(tmp_path / "broken")
        assert found == list(range(len(found)))
    assert read_records(tmp_path / "absent") == []


def test_a_kill_while_the_accounts_are_saved_leaves_those_before(make_box, tmp_path):
    box = make_box()
    accounts = StreamAccounts()
    for number in range(1, 4):
        accounts.next_number = number
        accounts.add("metric", [(number * 10, number * 10 + 5)])
        box.save_accounts(accounts)
    data = bytearray((box.path / "head").read_bytes())
    newest = crash_buffer.ACCOUNTS_AT[3 % 2]
    data[newest + crash_buffer.ACCOUNTS_HEAD.size + 2] ^= 0xFF
    (tmp_path / "head").write_bytes(data)
    assert read_black_box(box.path).accounts.next_number == 3
    torn = read_black_box(tmp_path).accounts
    assert torn.next_number == 2
    assert torn.knows("metric", 24)
    assert not torn.knows("metric", 30)


def test_without_shared_memory_or_when_told_so_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(crash_buffer, "SHARED_MEMORY", tmp_path / "absent")
    assert open_black_box(ORIGIN, 1 << 20) is None
    monkeypatch.undo()
    monkeypatch.setenv("QUARK_BLACK_BOX", "0")
    assert open_black_box(ORIGIN, 1 << 20) is None
    monkeypatch.delenv("QUARK_BLACK_BOX")
    monkeypatch.delattr(os, "posix_fallocate")
    assert open_black_box(ORIGIN, 1 << 20) is None


def test_a_run_that_ends_leaves_nothing_in_shared_memory(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        name = f"quark-{session.run_id}-{session.open_run.origin.writer_id}"
        assert (Path("/dev/shm") / name).exists()
    assert not (Path("/dev/shm") / name).exists()


PROGRAM = """
import mmap, os, sys, time, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1], backends="csv")
metrics = quark.MetricsLogger(session)
with open(sys.argv[2], "r+b") as file:
    # One store of eight bytes; struct would clear them first, and a kill could come between.
    counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
pause = float(sys.argv[3])
print(session.run_id, flush=True)
step = 0
while True:
    metrics.log("m", float(step), step=step)
    step += 1
    counter[0] = step
    if pause:
        time.sleep(pause)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(("pause_s", "seed"), list(itertools.product([0.0, 0.005], range(4))))
def test_what_log_returned_for_survives_a_kill(tmp_path, pause_s, seed):
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    child = start_code(PROGRAM, tmp_path / "runs", counter, pause_s)
    run_id = child.stdout.readline().strip()
    assert wait_until(lambda: any(counter.read_bytes()))
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
from quark_core.runs import backend_choice
from quark_core.delivery import crash_buffer
backend_choice.choose_capacity = lambda: 64 * 1024
crash_buffer.BlackBox.__init__.__kwdefaults__["segment_bytes"] = 4096
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
session.open_run.background.join()
session.flush()
stream = session.open_run.stream
stream._tick = lambda *, sync: True
for step in range(5_000):
    metrics.log("m", float(step), step=step)
print(session.run_id, stream.report().uncovered, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_what_there_was_no_room_for_is_told_in_the_run_of_a_killed_process(tmp_path, caplog):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    run_id, uncovered = done.stdout.split()
    recovery.sync(tmp_path)
    session = quark.open_run(run_id, tmp_path)
    found = [record.step for record in quark.MetricsLogger(session).read()]
    assert found == list(range(5_000 - int(uncovered)))
    assert int(uncovered) > 3_000
    (event,) = quark.EventLogger(session).read(event_type="records_dropped")
    assert event.severity == "error"
    assert event.payload["at_most"] == int(uncovered)
    assert f"at most {uncovered} records are lost" in caplog.text
    lifecycle = session.open_run.reader.read(run_id, "lifecycle", Query()).to_records()
    assert [record.data["at_most"] for record in lifecycle if record.action == "gap"] == [
        int(uncovered)
    ]


DROPPED = """
import os, signal, sys, time, quark
from collections import deque
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
session.open_run.background.join()
session.flush()
stream = session.open_run.stream
channel = stream.channel("metric")
# A queue of 1,000, and a delivery thread that stands still: what a hanging disk brings about.
channel.items = deque(maxlen=1_000)
channel.append = stream._black_box.wrap_append(
    channel.items.append, lambda: 2 * len(channel.items) >= 1_000
)
metrics = quark.MetricsLogger(session)
tick, stream._tick = stream._tick, lambda *, sync: True
for step in range(60_000):
    metrics.log("m", float(step), step=step)
if sys.argv[2] == "told":
    stream._tick = tick
    deadline = time.monotonic() + 30
    while not channel.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    session.flush("journaled")
print(session.run_id, channel.lost, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["untold", "told"])
def test_what_a_full_queue_let_go_is_never_more_than_what_is_told(tmp_path, when):
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, str(tmp_path), when], stdout=subprocess.PIPE, text=True
    )
    run_id, _ = done.stdout.split()
    recovery.sync(tmp_path)
    session = quark.open_run(run_id, tmp_path)
    steps = [record.step for record in quark.MetricsLogger(session).read(metric_key="m")]
    assert len(steps) == len(set(steps))
    lost = 60_000 - len(steps)
    events = quark.EventLogger(session).read(event_type="records_dropped")
    told = sum(
        event.payload.get("at_most", 0) + sum(event.payload.get("records", {}).values())
        for event in events
    )
    assert told >= lost
    # Before it is told, a kill finds in shared memory what the queue let go.
    assert (lost > 0) == (when == "told")


CRASHING = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "os._exit": "os._exit(0)",
    "abort": "os.abort()",
    "execv": "os.execv('/bin/true', ['true'])",
    "execv of another training": "os.execv(sys.executable, [sys.executable, '-c', 'import time; "
    "print(flush=True); time.sleep(60)'])",
}
CRASHES = """
import os, sys, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
print(session.run_id, flush=True)
for step in range(20_000):
    metrics.log("m", float(step), step=step)
exec(sys.argv[2])
"""


@pytest.mark.sampled
@pytest.mark.parametrize("crash", sorted(CRASHING))
def test_whatever_ends_a_process_in_the_middle_costs_nothing(tmp_path, crash):
    child = start_code(CRASHES, tmp_path, CRASHING[crash], stderr=subprocess.DEVNULL)
    try:
        run_id = child.stdout.readline().strip()
        # The end, or the first line of what came in its place under the same pid.
        if not child.stdout.readline():
            child.wait()
        results = recovery.sync(tmp_path)
    finally:
        child.kill()
        child.communicate()
    assert {result.state for result in results} == {"delivered"}
    records = quark.MetricsLogger(quark.open_run(run_id, tmp_path)).read(metric_key="m")
    assert [record.step for record in records] == list(range(20_000))
