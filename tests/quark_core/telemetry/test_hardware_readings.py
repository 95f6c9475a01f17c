"""The background sampler: one thread for all who watch, and none when nobody does."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
from fake_nvml import (
    FakeGpu,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NotSupported,
)
from kit.programs import run_code

from quark_core.records import GpuReading
from quark_core.system import hardware_readings as gpus_module
from quark_core.system.hardware_readings import (
    GpuReader,
    GpusReading,
    ProcessorReader,
    choose_gpu,
    find_local_rank,
)
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
    assert caplog.text.count("its thread cannot be started") == 1
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


# A worker that uses memory and time, in a process whose only child it is: servers and helpers of
# other tests come and go among the children of this one.
WITH_A_WORKER = """
import subprocess, sys, time, psutil
from quark_core.system.hardware_readings import ProcessorReader

program = "import sys; kept = bytearray(64 << 20); print('up', flush=True)\\nwhile True: pass"
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\\n"
worker, reader = psutil.Process(child.pid), ProcessorReader()
try:
    before = reader.read(fresh=True)
    assert before.worker_count == 1, before
"""


def run_with_a_worker(body):
    program = WITH_A_WORKER + textwrap.indent(textwrap.dedent(body), "    ")
    run_code(program + "finally:\n    child.kill()\n")


def test_figures_are_plausible():
    reader = ProcessorReader()
    reading = reader.read(fresh=True)
    assert reading.unavailable is None
    assert 0 <= reading.cpu_usage_percent <= 100
    assert 0 < reading.ram_used_bytes < reading.ram_total_bytes
    assert reading.ram_usage_percent == pytest.approx(
        100 * reading.ram_used_bytes / reading.ram_total_bytes
    )
    assert reading.ram_total_bytes == psutil.virtual_memory().total
    assert 0 < reading.process_rss_bytes < reading.ram_total_bytes
    assert reading.process_rss_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert 0 <= reading.process_cpu_percent <= 110 * os.cpu_count()
    assert reading.worker_count >= 0


def test_shares_of_time_need_two_readings(monkeypatch):
    reader = ProcessorReader()
    first = reader.read()
    assert (first.cpu_usage_percent, first.process_cpu_percent) == (None, None)
    assert first.unavailable == "shares of time require a second reading"
    assert first.ram_used_bytes > 0
    time.sleep(0.15)
    second = reader.read()
    assert second.unavailable is None
    assert second.cpu_usage_percent is not None
    # Readings in quick succession all look back over a window that says something.
    for _ in range(50):
        assert reader.read().cpu_usage_percent is not None


def test_ours_and_psutils_own_percentages_do_not_meet(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("its state is the user's")

    monkeypatch.setattr(psutil, "cpu_percent", refuse)
    monkeypatch.setattr(psutil.Process, "cpu_percent", refuse)
    assert ProcessorReader().read(fresh=True).unavailable is None


@pytest.mark.long
def test_workers_are_counted_with_their_memory_and_time():
    run_with_a_worker("""
        assert before.workers_rss_bytes > 64 << 20
        began_s, used_s = time.monotonic(), worker.cpu_times().user
        # It spins meanwhile and this process sleeps.
        while worker.cpu_times().user - used_s < 0.2:
            time.sleep(0.05)
        share = reader.read().process_cpu_percent
        # The window is a little longer than what was measured here, and begins before it.
        assert share > 50 * 0.2 / (time.monotonic() - began_s), share
        child.kill()
        child.wait()
        after = reader.read()
        assert after.worker_count == 0
        assert after.workers_rss_bytes < before.workers_rss_bytes
        assert after.unavailable is None
    """)


def test_an_ended_worker_that_nobody_waited_for_counts_no_more():
    run_with_a_worker("""
        child.kill()
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
        assert reader.read().worker_count == 0
    """)


def test_workers_are_not_listed_at_every_reading(monkeypatch):
    listed = []
    real = psutil.Process.children

    def children(self, recursive=False):
        listed.append(self.pid)
        return real(self, recursive=recursive)

    monkeypatch.setattr(psutil.Process, "children", children)
    reader = ProcessorReader()
    for _ in range(5):
        reader.read()
    assert len(listed) == 1
    reader.read(fresh=True)
    assert len(listed) > 1


def test_a_process_that_is_not_the_first_of_its_node_reads_only_itself():
    reader = ProcessorReader()
    reader.read(node=False)
    time.sleep(0.15)
    reading = reader.read(node=False)
    assert reading.cpu_usage_percent is reading.ram_used_bytes is reading.ram_total_bytes is None
    assert reading.process_rss_bytes > 0
    assert reading.process_cpu_percent is not None
    assert "local rank 0 samples" in reading.unavailable
    # Asked by name, it reads the node too.
    assert reader.read(fresh=True).cpu_usage_percent is not None


def test_psutil_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    reading = ProcessorReader().read(fresh=True)
    assert reading.unavailable.startswith("psutil: ModuleNotFoundError")
    assert reading.process_rss_bytes is None


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("cpu_times", {"cpu_usage_percent"}),
        ("virtual_memory", {"ram_usage_percent", "ram_used_bytes", "ram_total_bytes"}),
        (
            "Process",
            {"process_cpu_percent", "process_rss_bytes", "worker_count", "workers_rss_bytes"},
        ),
    ],
)
def test_what_psutil_cannot_say_costs_only_that(monkeypatch, name, missing):
    def refuse(*args, **kwargs):
        raise psutil.AccessDenied(msg="hidden")

    monkeypatch.setattr(psutil, name, refuse)
    reading = ProcessorReader().read(fresh=True)
    fields = [field for field in ProcessorReader().read().__slots__ if field != "unavailable"]
    assert {field for field in fields if getattr(reading, field) is None} == missing
    assert f"psutil.{name}: AccessDenied: hidden" in reading.unavailable


VISIBLE_DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES")  # the fixtures take it away


def test_every_gpu_is_read(nvml):
    reading = GpuReader().read()
    assert reading.unavailable is None
    assert reading.gaps == {}
    assert reading.gpus[0] == GpuReading(
        index=0,
        name="Fake 0",
        uuid="GPU-0000-aaaa",
        utilization_percent=10.0,
        memory_used_bytes=2**30,
        memory_total_bytes=2**34,
        memory_usage_percent=6.25,
        temperature_celsius=40.0,
        power_watts=100.5,
    )
    assert reading.gpus[1].index == 1
    assert reading.gpus[1].utilization_percent == 20.0


def test_texts_of_an_older_binding_are_decoded(nvml):
    nvml.gpus = [FakeGpu(0, name=b"Old", uuid=b"GPU-old")]
    assert [(gpu.name, gpu.uuid) for gpu in GpuReader().read().gpus] == [("Old", "GPU-old")]


def test_what_a_gpu_cannot_say_costs_only_that_field(nvml):
    nvml.gpus = [
        FakeGpu(
            0, power=NVMLError_NotSupported("no"), utilization=NVMLError_NotSupported("Not Supp")
        ),
        FakeGpu(1, temperature=NVMLError_NotSupported("no"), name=NVMLError_NotSupported("no")),
    ]
    reading = GpuReader().read()
    first, second = reading.gpus
    assert (first.power_watts, first.utilization_percent) == (None, None)
    assert (first.memory_used_bytes, first.temperature_celsius) == (2**30, 40.0)
    assert (second.name, second.temperature_celsius, second.utilization_percent) == (None, None, 20)
    # Temperature and power may be missing without a word: no main figure depends on them.
    assert list(reading.gaps) == [0]
    assert "utilization: NVMLError_NotSupported: Not Supp" in reading.gaps[0]


def test_a_node_without_a_driver_is_asked_again_only_after_a_while(nvml, monkeypatch):
    nvml.init_error = NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    reader = GpuReader()
    for _ in range(3):
        reading = reader.read()
        assert reading.gpus is None
        assert reading.unavailable == (
            "NVML: NVMLError_LibraryNotFound: NVML Shared Library Not Found"
        )
    assert nvml.calls == 1
    monkeypatch.setattr(gpus_module, "_RETRY_INTERVAL_S", 0.0)
    reader = GpuReader()
    reader.read()
    nvml.init_error = None
    assert len(reader.read().gpus) == 2


def test_a_lost_gpu_comes_back_once_the_driver_is_opened_anew(nvml, monkeypatch):
    reader = GpuReader()
    assert reader.read().gaps == {}
    lost = NVMLError_GpuIsLost("GPU is lost")
    healthy = dict(nvml.gpus[1].answers)
    nvml.gpus[1].answers.update(dict.fromkeys(("utilization", "memory", "temperature"), lost))
    reading = reader.read()
    assert reading.gpus[0].utilization_percent == 10.0
    assert reading.gpus[1] == GpuReading(1, "Fake 1", "GPU-1111-aaaa", power_watts=100.501)
    assert "GPU is lost" in reading.gaps[1]
    assert (nvml.opened, nvml.closed) == (1, 0)
    # Its handle is refused too when the driver is opened again.
    nvml.gpus[1].answers["handle"] = lost
    monkeypatch.setattr(reader, "_open_at_s", 1e-9)
    reading = reader.read()
    assert (nvml.opened, nvml.closed) == (2, 1)
    assert reading.gpus[1] == GpuReading(1)
    assert "GPU is lost" in reading.gaps[1]
    nvml.gpus[1].answers = healthy
    assert reader.read().gpus[1] == GpuReading(1)
    monkeypatch.setattr(reader, "_open_at_s", 1e-9)
    assert reader.read().gpus[1].utilization_percent == 20.0


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader().read().unavailable.startswith("pynvml: ModuleNotFoundError")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the binding is asked")
def test_without_a_driver_the_binding_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(gpus_module, "_LIBRARY", "libnobody-has-this.so.1")
    reader = GpuReader()
    for _ in range(2):
        reading = reader.read()
        assert (
            reading.unavailable
            == "NVML: libnobody-has-this.so.1 of an NVIDIA driver is not installed"
        )
    assert "pynvml" not in sys.modules
    # A driver that is installed later is found; the C library is there for certain.
    monkeypatch.setattr(gpus_module, "_LIBRARY", "libc.so.6")
    monkeypatch.setattr(reader, "_open_at_s", 0.0)
    reader.read()
    assert "pynvml" in sys.modules


def test_a_broken_package_is_no_exception(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", object())
    reading = GpuReader().read()
    assert reading.gpus is None
    assert "AttributeError" in reading.unavailable


def test_a_reason_is_text_that_json_can_hold(nvml):
    nvml.init_error = OSError("no file \udcff" + "x" * 1000)
    reason = GpuReader().read().unavailable
    assert reason.encode()
    assert len(reason) < 300


def test_a_driver_that_hangs_holds_up_no_second_thread(nvml):
    nvml.hang = threading.Event()
    reader = GpuReader()
    first = threading.Thread(target=reader.read, daemon=True)
    first.start()
    assert nvml.hanging.wait(30)
    reading = reader.read(timeout_s=0.01)
    assert reading == GpusReading(unavailable="NVML: the driver does not answer")
    assert first.is_alive()
    nvml.hang.set()
    first.join(30)
    nvml.hang = None
    assert len(reader.read().gpus) == 2


FOUR = GpusReading(
    tuple(GpuReading(i, uuid=f"GPU-{letter * 4}-0") for i, letter in enumerate("abcd")),
    mig_parents={"MIG-1111-2222": 2},
)


@pytest.mark.parametrize(
    ("environ", "choice", "index"),
    [
        ({}, {}, 0),
        ({"LOCAL_RANK": "3"}, {}, 3),
        ({"LOCAL_RANK": "9"}, {}, 0),
        ({"SLURM_LOCALID": "2"}, {}, 2),
        ({"LOCAL_RANK": "3"}, {"gpu_index": 1}, 1),
        ({"LOCAL_RANK": "3"}, {"device_index": 2}, 2),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}, 2),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": "1"}, {}, 3),
        ({"CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "1"}, {}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, {"device_index": 1}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"gpu_index": 0}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cccc-0"}, {}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-d,0"}, {}, 3),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1111-2222"}, {}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-bbbb-0/1/0"}, {}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, {"device_index": 0}, 1),
    ],
    ids=str,
)
def test_which_gpu_is_meant(environ, choice, index):
    choice = {"gpu_index": None, "device_index": None, **choice}
    assert choose_gpu(FOUR, **choice, environ=environ) == (index, None)


@pytest.mark.parametrize(
    ("environ", "choice", "words"),
    [
        ({}, {"gpu_index": 4}, "gpu_index 4 does not exist. The driver reports 4 GPUs: 0, 1, 2, 3"),
        ({}, {"device_index": 4}, "device index 4"),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, {"device_index": 1}, "1 GPU: 1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, "CUDA_VISIBLE_DEVICES=''"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, {}, "CUDA_VISIBLE_DEVICES='7'"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, {}, "CUDA_VISIBLE_DEVICES"),  # could be any of them
        ({"CUDA_VISIBLE_DEVICES": "MIG-zzzz"}, {}, "CUDA_VISIBLE_DEVICES"),
    ],
    ids=str,
)
def test_why_no_gpu_is_meant(environ, choice, words):
    choice = {"gpu_index": None, "device_index": None, **choice}
    index, reason = choose_gpu(FOUR, **choice, environ=environ)
    assert index is None
    assert words in reason


def test_a_driver_without_gpus_is_a_reason(nvml):
    nvml.gpus = []
    reading = GpuReader().read()
    assert reading.gpus == ()
    assert choose_gpu(reading, gpu_index=None, device_index=None) == (
        None,
        "the driver reports no GPU",
    )


def test_parts_of_a_gpu_lead_to_it(nvml):
    nvml.gpus = [FakeGpu(0), FakeGpu(1, migs=["MIG-a", "MIG-b"])]
    reading = GpuReader().read()
    assert reading.mig_parents == {"MIG-a": 1, "MIG-b": 1}
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-b"}
    assert choose_gpu(reading, gpu_index=None, device_index=None, environ=environ) == (1, None)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"RANK": "5"}, 0),  # a global rank says nothing of the node
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"LOCAL_RANK": "x", "SLURM_LOCALID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
    ],
    ids=str,
)
def test_local_ranks(environ, rank):
    assert find_local_rank(environ) == rank


@pytest.mark.gpu
def test_a_real_gpu():
    reading = GpuReader().read()
    assert reading.gpus, reading.unavailable
    for gpu in reading.gpus:
        assert gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert 0 < gpu.memory_used_bytes < gpu.memory_total_bytes
        assert gpu.utilization_percent is None or 0 <= gpu.utilization_percent <= 100
    index, reason = choose_gpu(reading, gpu_index=0, device_index=None)
    assert (index, reason) == (0, None)


@pytest.mark.gpu
def test_the_gpu_that_is_read_is_the_one_that_computes():
    environ = {} if VISIBLE_DEVICES is None else {"CUDA_VISIBLE_DEVICES": VISIBLE_DEVICES}
    reading = GpuReader().read()
    index, reason = choose_gpu(reading, gpu_index=None, device_index=0, environ=environ)
    assert reason is None
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    gpu = GpuReader().read().gpus[index]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_used_bytes >= block.numel()
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    if uuid is not None:  # PyTorch tells it from 2.5 on
        assert gpu.uuid == f"GPU-{uuid}"
