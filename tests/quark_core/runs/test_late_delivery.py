"""Whoever reads a mirror waits for the process that still writes it, and is told why."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quark_core.runs.late_delivery import wait_for_late_delivery

RUN = "0123456789abcdef"


@pytest.fixture
def deliver(tmp_path):
    """Start a process that looks like one that delivers the run, for some seconds."""
    started = []

    def begin(seconds):
        command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        process = subprocess.Popen([*command, "quark_core.runs.late_delivery", str(tmp_path), RUN])
        started.append(process)
        note = tmp_path / ".quark" / "runs" / RUN / "late_delivery"
        note.parent.mkdir(parents=True)
        note.write_text(str(process.pid))
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_wait_that_is_noticed_is_told_once(tmp_path, deliver, caplog):
    process = deliver(60)

    class EndAfterMessage(logging.Handler):
        def emit(self, record):
            threading.Timer(0.5, process.kill).start()

    handler = EndAfterMessage()
    logging.getLogger("quark").addHandler(handler)
    try:
        wait_for_late_delivery(tmp_path, 60)
    finally:
        logging.getLogger("quark").removeHandler(handler)
    (told,) = [each.getMessage() for each in caplog.records]
    assert told == "run 01234567 is still being written to its mirrors: waiting for it"


def test_no_wait_is_no_message(tmp_path, deliver, caplog):
    deliver(60).kill()
    begin = time.monotonic()
    time.sleep(0.2)
    wait_for_late_delivery(tmp_path, 20.0)
    assert time.monotonic() - begin < 10.0
    assert caplog.records == []


def test_a_process_that_just_began_is_waited_for(tmp_path, deliver, monkeypatch):
    process, read = deliver(60), Path.read_bytes

    def read_before_the_arguments_are_there(path):
        if path.name != "cmdline":
            return read(path)
        threading.Timer(0.3, process.kill).start()
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_before_the_arguments_are_there)
    begin = time.monotonic()
    wait_for_late_delivery(tmp_path, 60)
    assert 0.3 <= time.monotonic() - begin < 30
