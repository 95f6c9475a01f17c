"""A long run leaves threads, descriptors, disk and memory as they were."""

import gc
import os
import threading
import tracemalloc
from pathlib import Path

import psutil
import pytest
from journaled import journaled_values, open_stream, put_metric
from kit.programs import log_steps, wait_until

import quark
from quark_core.testing.fakes import ScriptedBackend

DESCRIPTORS = Path("/proc/self/fd")


class CountingBackend(ScriptedBackend):
    """Keeps no batch, only their number of records and the last number."""

    def __init__(self):
        super().__init__()
        self.records = 0
        self.last = -1

    def write(self, batch):
        assert batch.number == self.last + 1
        self.last = batch.number
        self.records += batch.count


def count_descriptors():
    if not DESCRIPTORS.exists():
        pytest.skip("needs /proc")
    return len(os.listdir(DESCRIPTORS))


def size_of(directory):
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.long
def test_many_records_through_tiny_segments_leave_nothing(tmp_path):
    gc.collect()
    threads, descriptors = threading.active_count(), count_descriptors()
    backends = [CountingBackend(), CountingBackend()]
    stream = open_stream(
        tmp_path / "j", *backends, segment_bytes=20_000, window_bytes=50_000, tick_s=0.001
    )
    count, part, rss, disk = 200_000, 10_000, [], []
    for start in range(0, count, part):
        for value in range(start, start + part):
            put_metric(stream, value)
        stream.flush(30, "durable")
        stream.flush(30)
        for lane in stream._lanes:
            assert lane.wait_passed(stream._log.end, 30)
        stream.hand_over(5)
        rss.append(psutil.Process().memory_info().rss)
        disk.append(size_of(tmp_path))
        assert count_descriptors() <= descriptors + 10
        assert threading.active_count() <= threads + 3
    assert [backend.records for backend in backends] == [count, count]
    # One segment and what came since is all that stays, however long the run is.
    assert max(disk[len(disk) // 2 :]) < 2_000_000
    assert max(rss[-5:]) - rss[4] < 64 * 1024 * 1024
    assert len(stream._log._totals) < 100
    assert stream.close(60).complete
    gc.collect()
    assert wait_until(lambda: threading.active_count() <= threads)
    assert wait_until(lambda: count_descriptors() <= descriptors)


def test_sequences_and_steps_beyond_32_bits_are_kept(tmp_path):
    backend = ScriptedBackend()
    stream = open_stream(tmp_path / "j", backend)
    for _ in range(3):
        put_metric(stream, 1.0, step=2**62)
    stream.flush(60, "durable")
    assert journaled_values(tmp_path / "j") == [1.0] * 3
    stream.close(60)
    (batch,) = [batch for batch in backend.stored if batch.kind == "metric"][:1]
    assert batch.to_records()[0].step == 2**62


@pytest.mark.long
def test_runs_one_after_the_other_leave_no_thread_descriptor_or_file(tmp_path):
    def one_run():
        with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
            metrics = quark.MetricsLogger(session)
            log_steps(metrics, 200)
            assert len(metrics.read()) == 200
        assert session.report_delivery().complete
        assert list(tmp_path.glob(".quark/runs/*/journal")) == []

    one_run()
    gc.collect()
    threads, descriptors = threading.active_count(), count_descriptors()
    tracemalloc.start()
    one_run()
    gc.collect()
    grown = []
    for _ in range(2):
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(6):
            one_run()
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    # A thread that was told to end may not have come to it.
    assert wait_until(lambda: threading.active_count() <= threads)
    assert wait_until(lambda: count_descriptors() <= descriptors)
    # The interpreter's own tables grow by leaps, once; what leaks does so both times.
    assert min(grown) < 2 * 1024 * 1024
