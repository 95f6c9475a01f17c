"""A forked child has a sampler, counts and records of its own."""

import os
import subprocess
import sys

import pytest
from kit.programs import run_code

import quark

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.mark.long
def test_parent_and_child_both_sample(tmp_path):
    program = """
import os, sys, threading, time, warnings
sys.path.insert(0, sys.argv[2])
import fake_nvml, quark
from quark_core.system.hardware_sampler import shared_sampler
warnings.simplefilter("ignore", DeprecationWarning)
nvml = sys.modules["pynvml"] = fake_nvml.FakeNvml([fake_nvml.FakeGpu(0)])

def wait():
    while shared_sampler.reading is None:
        time.sleep(0.01)

def names():
    return [thread.name for thread in threading.enumerate()]

with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    config = quark.SystemTelemetryConfig(sample_interval_s=0.05)
    telemetry = quark.SystemTelemetry(session, config=config)
    other = quark.SystemTelemetry(session, config=config)
    telemetry.record_step(0, overflow_occurred=True)
    other.record_step(0)
    wait()
    telemetry.record_step(1)
    opened = nvml.opened
    pid = os.fork()
    if pid == 0:
        assert "quark-hardware" not in names()
        assert shared_sampler.reading is None
        first = telemetry.record_step(10)
        assert first.overflow_count == 0, first
        assert "quark-hardware" in names()
        wait()
        second = telemetry.record_step(11, skipped_step=True)
        assert nvml.opened == opened + 1
        assert second.gpus[0].name == "Fake 0", second
        assert second.process_rss_bytes > 0
        other.record_step(12)
        other.close()
        assert shared_sampler.running
        telemetry.close()
        assert not shared_sampler.running
        session.flush("journaled")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    telemetry.record_step(2)
    telemetry.close()
    other.close()
    print(session.run_id)
"""
    done = run_code(program, tmp_path, os.path.dirname(__file__))
    assert "Traceback" not in done.stderr, done.stderr
    session = quark.open_run(done.stdout.split()[0], tmp_path)
    records = quark.SystemTelemetry(session).read()
    parent = [r for r in records if r.writer_id == records[0].writer_id]
    child = [r for r in records if r.writer_id != records[0].writer_id]
    assert [(r.step, r.overflow_count) for r in parent] == [(0, 1), (0, 0), (1, 1), (2, 1)]
    assert [(r.step, r.skipped_step_count) for r in child] == [(10, 0), (11, 1), (12, 0)]
    metrics = quark.MetricsLogger(session).read(metric_key="system/process/rss_bytes", step=11)
    assert [r.value for r in metrics] == [float(child[1].process_rss_bytes)]


@pytest.mark.long
def test_the_sampler_keeps_no_process_alive(tmp_path):
    program = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import fake_nvml, quark
nvml = sys.modules["pynvml"] = fake_nvml.FakeNvml([fake_nvml.FakeGpu(0)])
nvml.hang = threading.Event()
session = quark.start_run(project="p", storage_dir=sys.argv[1])
telemetry = quark.SystemTelemetry(session)
telemetry.record_step(0)
assert nvml.hanging.wait(30)
session.end_run()
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=280,  # the driver hangs for longer
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
