"""Liveness: a process of this host is looked at, of one elsewhere the heartbeat decides."""

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from quark_core.system.process import (
    LOST_AFTER_S,
    ProcessIdentity,
    current_process,
    find_lost_reason,
    is_alive,
)

HOUR_US = 3_600_000_000
# Says who it is, then takes a line as its name and stays.
CHILD = """
import sys, time, msgspec
from quark_core.system.process import current_process
print(msgspec.json.encode(current_process()).decode(), flush=True)
name = sys.stdin.readline().strip()
with open("/proc/self/comm", "w") as comm:
    comm.write(name)
print(open("/proc/self/comm").read(), flush=True)
time.sleep(1000)
"""


def now_us(age_us=0):
    return time.time_ns() // 1000 - age_us


def move(process, **fields):
    return msgspec.structs.replace(process, **fields)


@pytest.fixture
def child():
    """A running process, and what it says of itself."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process, msgspec.json.decode(process.stdout.readline(), type=ProcessIdentity)
        process.kill()


def test_this_process_is_alive_however_old_its_heartbeat():
    process = current_process()

    assert process.pid == os.getpid()
    assert process == current_process()
    assert is_alive(process) is True
    assert find_lost_reason("running", process, now_us(HOUR_US)) is None


def test_another_process_of_this_host_is_alive_until_it_is_killed(child):
    process, identity = child
    assert identity.pid == process.pid
    assert identity.host == current_process().host
    assert is_alive(identity) is True

    process.kill()
    process.wait()

    assert is_alive(identity) is False
    assert f"process {process.pid} is gone" in find_lost_reason("running", identity, now_us())


def test_a_zombie_is_not_alive(child):
    process, identity = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert is_alive(identity) is False
    assert find_lost_reason("running", identity, now_us()) is not None


def test_a_stopped_process_is_alive(child):
    process, identity = child
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert is_alive(identity) is True


def test_another_process_with_the_same_pid_is_not_the_one():
    earlier = move(current_process(), started="1")

    assert is_alive(earlier) is False
    assert find_lost_reason("running", earlier, now_us()) is not None


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="needs /proc")
@pytest.mark.parametrize("command", ["a (b) R 1 2", "a) Z 1"])
def test_a_command_of_an_odd_name_is_alive(child, command):
    process, identity = child
    process.stdin.write(command.encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline().decode().strip() == command

    assert is_alive(identity) is True


def test_a_process_of_another_host_cannot_be_asked():
    elsewhere = move(current_process(), host="another host")

    assert is_alive(elsewhere) is None


@pytest.mark.parametrize("pid", [1, 2**22 + 1])
@pytest.mark.parametrize("known", [True, False])
def test_elsewhere_only_the_age_of_the_heartbeat_counts(pid, known):
    process = ProcessIdentity("another host", pid, "1") if known else None
    limit_us = int(LOST_AFTER_S * 1e6)

    assert find_lost_reason("running", process, now_us()) is None
    assert find_lost_reason("running", process, now_us(limit_us // 2)) is None
    assert find_lost_reason("running", process, now_us(-HOUR_US)) is None
    assert "no heartbeat" in find_lost_reason("running", process, now_us(2 * limit_us))


@pytest.mark.parametrize("status", ["completed", "failed", "interrupted"])
def test_a_run_that_has_ended_is_never_lost(status):
    gone = move(current_process(), started="1")

    assert find_lost_reason(status, gone, now_us(HOUR_US)) is None
    assert find_lost_reason(status, None, now_us(HOUR_US)) is None


def test_a_heartbeat_from_the_future_is_no_negative_age():
    gone = move(current_process(), started="1")

    assert "-" not in find_lost_reason("running", gone, now_us(-HOUR_US))
