"""GPUs through NVML: every one, what is missing and why, which is ours."""

import os
import sys
import threading

import pytest
import torch
from fake_nvml import (
    FakeGpu,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NotSupported,
)

from quark_core.records import GpuReading
from quark_core.system import hardware_readings as gpus_module
from quark_core.system.hardware_readings import GpuReader, GpusReading, choose_gpu, find_local_rank

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
            == "NVML: there is no libnobody-has-this.so.1 of an NVIDIA driver here"
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
        ({}, {"gpu_index": 4}, "gpu_index 4 does not exist; the driver shows 4 GPUs: 0, 1, 2, 3"),
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
        "the driver shows no GPU",
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
