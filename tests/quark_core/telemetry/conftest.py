"""A sampler for each test, and a driver that is not there."""

import sys

import kit.programs
import pytest
from fake_nvml import FakeGpu, FakeNvml

from quark_core.system import hardware_sampler as sampler_module
from quark_core.writers import telemetry, telemetry_recording

LAUNCHER_VARIABLES = (
    "LOCAL_RANK SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID"
    " MV2_COMM_WORLD_LOCAL_RANK PMI_LOCAL_RANK PALS_LOCAL_RANKID FLUX_TASK_LOCAL_ID"
    " CUDA_VISIBLE_DEVICES"
).split()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def sampler(monkeypatch):
    """The process's sampler, new for each test and at rest after it."""
    own = sampler_module.HardwareSampler()
    # Who asks for a sample gets the GPUs' figures within two seconds, or goes without.
    monkeypatch.setattr(sampler_module, "_FRESH_TIMEOUT_S", 60.0)
    monkeypatch.setattr(sampler_module, "shared_sampler", own)
    monkeypatch.setattr(telemetry, "shared_sampler", own)
    monkeypatch.setattr(telemetry_recording, "shared_sampler", own)
    yield own
    # Watches that a test let go of would end the thread only at its next reading.
    for watch in [sampler_module.Watch(1.0, processor=False, gpus=False), *own._watches]:
        own.unwatch(watch)
    assert not own.running


@pytest.fixture
def nvml(monkeypatch):
    """A node with two GPUs."""
    fake = FakeNvml([FakeGpu(0), FakeGpu(1)])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def wait_until():
    """Wait for another thread; the limit only ends a test that has failed."""

    def wait(condition):
        assert kit.programs.wait_until(condition, 30), "it never came"

    return wait
