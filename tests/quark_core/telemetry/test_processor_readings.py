"""CPU, RAM and processes through psutil."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from quark_core.system.hardware_readings import ProcessorReader

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
    done = subprocess.run(
        [sys.executable, "-c", program + "finally:\n    child.kill()\n"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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
    assert first.unavailable == "shares of time need a second reading"
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
