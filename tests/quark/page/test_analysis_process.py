"""Analyses in a process of their own: what ends that is told in the page, and the page goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from page_client import DEADLINE_S, PageClient, log_plain_run, wait_for_analysis
from ui_process import UiProcess

import quark
from quark.page.routes.page_source import open_source
from quark.page.routes.run_analysis import AnalysisLimits, AnalysisProcess
from quark_core.errors import RunNotFoundError
from quark_core.testing.fakes import BatchMaker

psutil = pytest.importorskip("psutil")

MIB = 2**20


@pytest.fixture
def analyze_in_process():
    """Opens a store, and gives a client of its page whose analyses have a process of their own."""
    clients = []

    def open_it(storage_dir, **limits):
        source = open_source(storage_dir)
        analyzer = AnalysisProcess(source, AnalysisLimits(**limits))
        clients.append(PageClient(source, analyzer=analyzer))
        return clients[-1]

    yield open_it
    for client in clients:
        client.app.state.page.desk.close(DEADLINE_S)
        client.source.close()


def wait_until(is_so):
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def stop(pid):
    """Stop a process, so that what it is asked for stays under way."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def read_analysis(client, run_id):
    return client.json(f"/api/runs/{run_id}/analysis")["analysis"]


def check_recovers(client, storage_dir):
    """The page goes on, and another run is analyzed by another process."""
    check_goes_on(client, storage_dir, 1)


def check_goes_on(client, storage_dir, count):
    assert client.json("/api/runs")["count"] == count
    other = log_plain_run(storage_dir)
    assert wait_for_analysis(client, other)["state"] == "computed"


@pytest.mark.long
def test_what_it_finds_is_what_is_found_in_this_process(tmp_path, analyze_in_process, look):
    run_id = log_plain_run(tmp_path)
    client = analyze_in_process(tmp_path)
    found = wait_for_analysis(client, run_id)
    assert found["state"] == "computed"
    assert found == wait_for_analysis(look(tmp_path), run_id)
    # Of one process are all, until it rests.
    pid = client.analyzer.pid
    assert pid not in (None, os.getpid())
    other = log_plain_run(tmp_path)
    assert wait_for_analysis(client, other)["state"] == "computed"
    assert client.analyzer.pid == pid
    client.analyzer.rest()
    assert not psutil.pid_exists(pid)
    with pytest.raises(RunNotFoundError):
        client.analyzer.analyze("absent")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_in_the_middle_is_told_of(tmp_path, analyze_in_process, number):
    run_id = log_plain_run(tmp_path)
    client = analyze_in_process(tmp_path)
    client.analyzer.prepare()
    pid = client.analyzer.pid
    stop(pid)
    assert read_analysis(client, run_id)["state"] == "computing"
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    found = wait_for_analysis(client, run_id)
    assert found["state"] == "failed"
    assert "unexpectedly" in found["note"]
    assert ("killed" in found["note"]) == (number == signal.SIGKILL)
    # It is not tried again and again.
    assert read_analysis(client, run_id)["computing"] is False
    check_recovers(client, tmp_path)


@pytest.mark.long
def test_an_analysis_that_takes_too_long_is_ended(tmp_path, analyze_in_process):
    run_id = log_plain_run(tmp_path)
    client = analyze_in_process(tmp_path, time_s=DEADLINE_S)
    client.analyzer.prepare()
    pid = client.analyzer.pid
    stop(pid)
    client.analyzer._limits = AnalysisLimits(time_s=0.1)
    found = wait_for_analysis(client, run_id)
    assert found["state"] == "failed"
    assert "after 0.1 s" in found["note"]
    assert f"quark analyze {run_id}" in found["note"]
    assert not psutil.pid_exists(pid)
    client.analyzer._limits = AnalysisLimits()
    check_recovers(client, tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded on Linux")
def test_an_analysis_that_needs_too_much_memory_is_told_of(tmp_path, analyze_in_process):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session:
        maker = BatchMaker(session.run_id)
        points = [("train/loss", step, 1.0 / (step + 1)) for step in range(60_000)]
        session.write(maker.metrics(*points).to_records())
    client = analyze_in_process(tmp_path, memory_bytes=4 * MIB)
    found = wait_for_analysis(client, session.run_id)
    assert found["state"] == "failed"
    assert "more than its limit of 4 MiB" in found["note"]
    assert client.analyzer.pid is None
    # Bounds that are usual are enough for it.
    other = analyze_in_process(tmp_path)
    assert wait_for_analysis(other, session.run_id)["state"] == "computed"


@pytest.mark.long
def test_one_that_has_held_much_is_not_kept(tmp_path, analyze_in_process):
    run_id = log_plain_run(tmp_path)
    client = analyze_in_process(tmp_path, kept_bytes=MIB)
    assert wait_for_analysis(client, run_id)["state"] == "computed"
    wait_until(lambda: client.analyzer.pid is None)


def test_no_process_that_can_be_started_is_told_of(tmp_path, analyze_in_process, monkeypatch):
    run_id = log_plain_run(tmp_path)
    client = analyze_in_process(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    found = wait_for_analysis(client, run_id)
    assert found["state"] == "failed"
    assert "cannot be started" in found["note"]


def find_children(pid):
    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.long
def test_it_ends_with_the_server_however_that_ends(tmp_path):
    run_id = log_plain_run(tmp_path)
    for end in ("interrupt", "kill"):
        ui = UiProcess(tmp_path, "--no-compact")
        try:
            assert ui.wait_for_analysis(run_id)["state"] == "computed"
            (child,) = find_children(ui.process.pid)
            stop(child) if end == "interrupt" else ui.process.kill()
        finally:
            code, _, err = ui.end()
        if end == "interrupt":
            assert (code, err) == (0, "")
        wait_until(lambda child=child: not psutil.pid_exists(child))


@pytest.mark.long
def test_a_server_does_not_load_what_analyzes(tmp_path):
    log_plain_run(tmp_path)
    code = (
        "import sys\n"
        "from quark.page.routes.page_source import open_source\n"
        "from quark.page.app import make_app\n"
        "make_app(open_source(sys.argv[1]))\n"
        "print(*[m for m in sys.modules if m.startswith('quark.analysis.rules')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def wait_for_verdict(client, *sides):
    end = time.monotonic() + DEADLINE_S
    while (said := client.json("/api/compare/verdict", side=sides))["state"] == "computing":
        assert time.monotonic() < end
        time.sleep(0.02)
    return said


@pytest.mark.long
def test_sides_are_compared_in_the_process_too(tmp_path, analyze_in_process, look):
    runs = [log_plain_run(tmp_path) for _ in range(2)]
    client = analyze_in_process(tmp_path)
    found = wait_for_verdict(client, *runs)
    assert found["state"] == "computed"
    own = wait_for_verdict(look(tmp_path), *runs)
    for said in (found, own):
        said["result"].pop("generated_at")
    assert found == own
    pid = client.analyzer.pid
    stop(pid)
    client.analyzer._limits = AnalysisLimits(time_s=0.1)
    late = wait_for_verdict(client, *runs[::-1])
    assert late["state"] == "failed"
    assert "quark compare" in late["note"]
    client.analyzer._limits = AnalysisLimits()
    check_goes_on(client, tmp_path, 2)
