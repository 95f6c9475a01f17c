"""The background sampler: one thread for all who watch, and none when nobody does."""

import gc
import os
import threading

import pytest

from quark_core.system.hardware_sampler import HardwareSampler, Watch


def watch_all(**options):
    return Watch(options.pop("interval_s", 0.02), processor=True, gpus=True, **options)


def test_one_thread_serves_all_and_ends_with_the_last(nvml, sampler, wait_until):
    first, second = watch_all(), watch_all()
    earlier = set(threading.enumerate())  # samplers of other tests may be about to end
    assert not sampler.running
    sampler.watch(first)
    sampler.watch(second)
    thread = sampler._thread
    started = set(threading.enumerate()) - earlier
    assert [t for t in started if t.name == "quark-hardware"] == [thread]
    assert thread.daemon
    wait_until(lambda: sampler.reading is not None)
    assert len(sampler.reading.gpus.gpus) == 2
    assert sampler.reading.processor.process_rss_bytes > 0
    sampler.unwatch(first)
    assert sampler.running
    sampler.unwatch(second)
    assert not sampler.running
    thread.join(30)
    assert not thread.is_alive()
    sampler.unwatch(second)  # once more does nothing
    sampler.watch(first)
    assert sampler.running


def test_readings_follow_each_other(nvml, sampler, wait_until):
    watch = watch_all()
    sampler.watch(watch)
    wait_until(lambda: sampler.reading is not None)
    first = sampler.reading
    nvml.gpus[0].answers["utilization"] = 77
    wait_until(lambda: sampler.reading.gpus.gpus[0].utilization_percent == 77.0)
    assert sampler.reading.taken_at_s > first.taken_at_s


def test_the_smallest_interval_wins(nvml, sampler, wait_until):
    slow, quick = watch_all(interval_s=3600.0), watch_all()
    sampler.watch(slow)
    wait_until(lambda: sampler.reading is not None)
    # The second reading, for shares of time, is early; then an hour would pass.
    wait_until(lambda: sampler.reading.processor.cpu_usage_percent is not None)
    kept = sampler.reading
    sampler.watch(quick)
    wait_until(lambda: sampler.reading is not kept)
    kept = sampler.reading
    wait_until(lambda: sampler.reading is not kept)


def test_only_what_is_wanted_is_read(nvml, sampler, wait_until):
    cpu_only = Watch(0.02, processor=True, gpus=False)
    sampler.watch(cpu_only)
    wait_until(lambda: sampler.reading is not None)
    assert sampler.reading.gpus is None
    assert nvml.calls == 0
    gpus_too = Watch(0.02, processor=False, gpus=True)
    sampler.watch(gpus_too)
    wait_until(lambda: sampler.reading.gpus is not None)
    sampler.unwatch(cpu_only)
    wait_until(lambda: sampler.reading.processor is None)


@pytest.mark.long
def test_it_ends_where_nobody_wants_readings_any_more(nvml, sampler, wait_until):
    wanted = threading.Event()
    wanted.set()
    watch = watch_all(wanted=wanted.is_set)
    sampler.watch(watch)
    wait_until(lambda: sampler.reading is not None)
    wanted.clear()
    wait_until(lambda: not sampler.running)
    forgotten = watch_all()
    sampler.watch(forgotten)
    assert sampler.running
    del forgotten
    gc.collect()
    wait_until(lambda: not sampler.running)


def test_a_driver_that_hangs_is_left_behind(nvml, sampler):
    nvml.hang = threading.Event()
    watch = watch_all()
    sampler.watch(watch)
    assert nvml.hanging.wait(30)
    hung = sampler._thread
    sampler.unwatch(watch)
    # It has returned although the driver has not.
    assert hung.is_alive()
    assert hung.daemon
    assert not sampler.running
    nvml.hang.set()
    hung.join(30)
    assert not hung.is_alive()
    assert sampler.reading is None  # nobody got what it had read


def test_reading_now_ends_where_the_driver_hangs(nvml, sampler, monkeypatch):
    monkeypatch.setattr("quark_core.system.hardware_sampler._FRESH_TIMEOUT_S", 0.05)
    nvml.hang = threading.Event()
    reading = sampler.read_now(processor=True, gpus=True)
    assert reading.gpus.unavailable == "NVML: the driver does not answer"
    assert reading.processor.cpu_usage_percent is not None
    assert not nvml.hang.is_set()
    nvml.hang.set()


def test_no_thread_is_to_be_had(nvml, sampler, monkeypatch, caplog):
    started = []

    def refuse(self):
        started.append(self)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    watch = watch_all()
    for _ in range(3):
        sampler.watch(watch)
    assert not sampler.running
    assert len(started) == 1
    assert caplog.text.count("can't start new thread") == 1
    assert "no thread" in sampler.read_now(processor=False, gpus=True).gpus.unavailable


def test_a_reader_that_fails_is_told_of_once(sampler, monkeypatch, caplog, wait_until):
    monkeypatch.setattr("quark_core.system.hardware_sampler._START_RETRY_S", 0.01)
    failed = []

    def fail(**options):
        failed.append(options)
        raise ValueError("broken")

    monkeypatch.setattr(sampler._processor, "read", fail)
    watch = Watch(0.01, processor=True, gpus=False)
    sampler.watch(watch)
    wait_until(lambda: len(failed) >= 3)
    sampler.unwatch(watch)
    assert caplog.text.count("ValueError: broken") == 1


def test_on_each_node_one_process_reads_the_node(nvml, sampler, monkeypatch, wait_until):
    monkeypatch.setenv("LOCAL_RANK", "1")
    watch = watch_all()
    sampler.watch(watch)
    wait_until(lambda: sampler.reading is not None)
    assert nvml.calls == 0
    reading = sampler.reading
    assert "local rank 0 samples the GPUs" in reading.gpus.unavailable
    assert reading.processor.ram_total_bytes is None
    assert reading.processor.process_rss_bytes > 0
    assert len(sampler.read_now(processor=True, gpus=True).gpus.gpus) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_what_a_child_takes_over_is_nothing(nvml, sampler, wait_until):
    watch = watch_all()
    sampler.watch(watch)
    wait_until(lambda: sampler.reading is not None)
    child = HardwareSampler()
    child.__dict__.update(sampler.__dict__)
    child._lock.acquire()  # as another thread of the parent may have, at the fork
    child.become_child()
    assert (child.running, child.reading, child._thread) == (False, None, None)
    opened = nvml.opened
    child.watch(watch)
    wait_until(lambda: child.reading is not None)
    assert nvml.opened == opened + 1
    child.unwatch(watch)
    sampler._lock.release()
