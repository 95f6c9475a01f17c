"""timer: blocks that are timed, whatever they are and whoever leaves them."""

import asyncio
import contextlib
import gc
import os
import threading
import time

import pytest

import quark
from quark_core.records.query import Query
from quark_core.writers import loop_metrics as aggregates_module
from quark_core.writers.step_timing import PendingSteps


def time_blocks(metrics, key, count, sleep_s=0.0):
    for _ in range(count):
        with metrics.timer(key):
            if sleep_s:
                time.sleep(sleep_s)


def test_chrono_of_track_keeps_mean_deviation_extremes_and_count(metrics):
    time_blocks(metrics, "batch_time", 11, sleep_s=0.002)
    timer = metrics.read_aggregates("batch_time")["batch_time"]
    assert (timer.count, timer.failed, timer.unit, timer.keep) == (10, 0, "s", "timer")
    assert timer.clock == "wall_clock"
    assert 0.002 <= timer.low <= timer.mean <= timer.high
    assert timer.deviation >= 0
    assert timer.first >= 0.002
    assert timer.total == pytest.approx(timer.mean * 10 + timer.first)
    assert timer.low <= timer.quantile(0.5) <= timer.high
    assert 0 < timer.share <= 1.0


def test_the_first_block_is_kept_apart(metrics):
    time_blocks(metrics, "step", 1, sleep_s=0.1)
    time_blocks(metrics, "step", 5)
    timer = metrics.read_aggregates()["step"]
    assert timer.first >= 0.1 > timer.high
    assert timer.count == 5


def test_an_exception_passes_through_as_it_is_and_the_block_has_failed(metrics):
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised, metrics.timer("bad"):
        raise error
    assert raised.value is error
    timer = metrics.read_aggregates()["bad"]
    assert (timer.failed, timer.count, timer.first) == (1, 0, None)


def test_blocks_are_nested_and_recursive_and_one_object_is_entered_twice(metrics):
    def descend(depth):
        with metrics.timer("recursive"):
            time.sleep(0.005)
            if depth:
                descend(depth - 1)

    descend(3)
    kept = metrics.timer("kept")
    with kept:
        time.sleep(0.02)
        with kept:
            pass
    with kept:
        time.sleep(0.02)
    found = metrics.read_aggregates()
    assert found["recursive"].count == 3  # and the innermost, which ended first
    assert found["recursive"].first < found["recursive"].high
    assert found["recursive"].high >= 0.02
    assert found["kept"].low >= 0.02
    assert found["kept"].first < 0.02


def test_generators_that_hold_blocks_do_not_mix_their_times(metrics):
    def produce(pause_s):
        with metrics.timer("held"):
            time.sleep(pause_s)
            yield 1
            yield 2

    first, second = produce(0.03), produce(0.0)
    next(first), next(second)
    assert list(first) == [2]
    assert list(second) == [2]
    closed = produce(0.0)
    next(closed)
    closed.close()
    failing = produce(0.0)
    next(failing)
    with pytest.raises(KeyError):
        failing.throw(KeyError("x"))
    timer = metrics.read_aggregates()["held"]
    assert timer.first >= 0.03  # which the second one's start did not overwrite
    assert (timer.count, timer.failed) == (1, 2)


def test_chrono_decorates_functions_of_every_kind(metrics):
    @metrics.timer("plain")
    def plain(a, *, b):
        """What it says."""
        return a + b

    @metrics.timer("async")
    async def wait():
        await asyncio.sleep(0.01)
        return 5

    @metrics.timer("generator")
    def produce():
        received = yield 1
        yield received
        return 3

    @metrics.timer("stream")
    async def stream():
        yield 1
        yield 2

    async def drain():
        return [item async for item in stream()]

    assert plain(1, b=2) == 3
    assert (plain.__name__, plain.__doc__) == ("plain", "What it says.")
    assert asyncio.run(wait()) == 5
    walk = produce()
    assert (next(walk), walk.send("x")) == (1, "x")
    assert list(walk) == []
    assert asyncio.run(drain()) == [1, 2]
    found = metrics.read_aggregates()
    assert {each.key for each in found} == {"plain", "async", "generator", "stream"}
    assert found["async"].first >= 0.01


def test_eight_threads_that_time_at_once_lose_nothing(metrics):
    blocks = 4_000
    threads = [
        threading.Thread(target=time_blocks, args=(metrics, "shared", blocks)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.read_aggregates("shared")  # a window ends while they are at it
    found = metrics.read_aggregates("shared")["shared"]
    assert found.count == 8 * blocks - 1


def test_windows_add_up(metrics, session):
    for _ in range(4):
        time_blocks(metrics, "windowed", 10)
        session.flush()
    timer = metrics.read_aggregates()["windowed"]
    assert timer.count == 39
    records = session.open_run.read("aggregate", Query()).to_records()
    assert [record.count for record in records] == [9, 10, 10, 10]
    assert [record.first is None for record in records] == [False, True, True, True]


def test_a_record_leaves_by_itself_when_its_window_is_over(metrics, session, monkeypatch):
    monkeypatch.setattr(aggregates_module, "_WINDOW_S", 0.1)
    time_blocks(metrics, "slow", 5)
    channel = session.open_run.stream.channel("aggregate")
    deadline = time.monotonic() + 20
    while not channel.count_drawn() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert channel.count_drawn() == 1
    time.sleep(0.3)
    assert channel.count_drawn() == 1  # nothing new, and so no record


def test_clocks_that_are_set_back_change_no_time(metrics, monkeypatch):
    with metrics.timer("jump"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
        monkeypatch.setattr(aggregates_module.time, "time_ns", lambda: 1_000_000)
    time_blocks(metrics, "jump", 3)
    monkeypatch.undo()
    timer = metrics.read_aggregates()["jump"]
    assert timer.count == 3
    assert timer.low >= 0
    assert timer.high < 60


def test_a_run_that_ends_inside_a_block_ends_and_the_block_goes_on(tmp_path, caplog):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)

    @metrics.timer("evaluate")
    def evaluate():
        return 7

    time_blocks(metrics, "outer", 2)
    with metrics.timer("outer"):
        session.end_run()
    assert evaluate() == 7
    with metrics.timer("late"):
        pass
    assert caplog.text.count("no longer timed") == 1
    with pytest.raises(quark.InvalidRunStateError, match="aggregate"):
        metrics.aggregate("x", 1.0)
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read_aggregates()
    assert [(each.key, each.count) for each in found] == [("outer", 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_a_block_counts_nothing_twice(metrics, session):
    time_blocks(metrics, "parent", 3)
    with metrics.timer("parent"):
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                time_blocks(metrics, "child", 4)
                session.open_run.end_stream("done", 5.0)
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = metrics.read_aggregates()
        if len(found) == 2:
            break
        time.sleep(0.1)
    assert found["parent"].count == 3
    assert found["child"].count == 3


def test_bad_keys_and_devices_are_named(metrics):
    with pytest.raises(quark.SchemaValidationError, match="key must be a str"):
        metrics.timer(3)
    with pytest.raises(quark.SchemaValidationError, match="key must not be empty"):
        metrics.timer("")
    with pytest.raises(quark.SchemaValidationError, match=r'write @metrics\.timer\("name"\)'):
        metrics.timer(len)
    with pytest.raises(quark.SchemaValidationError, match="device must be a torch device"):
        metrics.timer("x", device="gpu")
    metrics.aggregate("taken", 1.0)
    with pytest.raises(
        quark.SchemaValidationError, match="keep: 'taken' is already aggregated with 'stat'"
    ):
        metrics.timer("taken")


def test_a_key_with_dots_names_no_path(metrics):
    with pytest.warns(RuntimeWarning, match="naming rule"):
        time_blocks(metrics, "../../etc/passwd", 2)
    assert metrics.read_aggregates("../../etc/passwd")[0].key == "../../etc/passwd"


class FakeEvent:
    def __init__(self, clock):
        self.clock = clock
        clock.now += 1
        self.at_ms = float(clock.now)

    def query(self):
        return self.clock.passed

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


class FakeClock:
    """A device whose marks are a millisecond apart, and which is behind the host."""

    def __init__(self):
        self.now = 0
        self.passed = False

    def mark(self):
        return FakeEvent(self)

    def can_query(self):
        return True


def test_times_of_a_device_come_in_when_it_has_passed_and_nobody_waits(metrics, monkeypatch):
    from quark_core.writers import loop_metrics

    clock = FakeClock()
    monkeypatch.setattr(loop_metrics, "find_clock", lambda _device: clock)
    for _ in range(3):
        with metrics.timer("kernel", device=True):
            time.sleep(0.01)
    assert len(metrics.read_aggregates("kernel")) == 0
    clock.passed = True
    with metrics.timer("kernel", device=True), metrics.timer("kernel", device=True):
        pass
    timer = metrics.read_aggregates()["kernel"]
    assert timer.clock == "cuda_events"
    assert timer.count == 4
    assert timer.first == pytest.approx(0.001)
    assert timer.high == pytest.approx(0.003)


def test_a_device_that_never_answers_gives_the_hosts_times_at_the_end(tmp_path, monkeypatch):
    from quark_core.writers import loop_metrics

    monkeypatch.setattr(loop_metrics, "find_clock", lambda _device: FakeClock())
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        with metrics.timer("kernel", device=True):
            time.sleep(0.01)
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read_aggregates()
    assert found["kernel"].clock == "wall_clock"
    assert found["kernel"].first >= 0.01


def test_chrono_of_a_device_times_work_there_or_falls_back(metrics, session, device):
    import torch

    values = torch.ones(64, 64, device=device)
    for _ in range(5):
        with metrics.timer("matmul", device=device):
            values = values @ values / 64
    with pytest.raises(ZeroDivisionError), metrics.timer("matmul", device=True):
        1 / 0  # noqa: B018
    session.open_run.settle_writers()
    timer = metrics.read_aggregates()["matmul"]
    assert (timer.count, timer.failed) == (4, 1)
    assert timer.clock == ("cuda_events" if device.type == "cuda" else "wall_clock")


def test_pending_blocks_of_a_device_are_bounded():
    clock, kept = FakeClock(), []
    pending = PendingSteps(clock)
    for _ in range(3_000):
        pending.add(None, None, lambda times, timing: kept.append(timing))
    assert len(pending) <= 1_024
    assert len(kept) >= 1_900
    gc.collect()
