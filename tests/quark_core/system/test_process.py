"""Liveness: a process of this host is looked at, of one elsewhere the heartbeat decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

import quark
from quark_core.runs.backend_choice import open_reader
from quark_core.system import process
from quark_core.system.process import (
    LOST_AFTER_S,
    MemoryKills,
    ProcessIdentity,
    count_more_kills,
    current_process,
    find_loss,
    find_lost_reason,
    find_memory_kills,
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
    assert f"process {process.pid} has ended" in find_lost_reason("running", identity, now_us())


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


VERSION_2 = ("0::/user.slice/job 7\n", "user.slice/job 7/memory.events")
VERSION_1 = ("5:cpu:/\n4:memory:/docker/ab\n", "memory/docker/ab/memory.oom_control")
JOINED = ("4:cpu,memory:/x\n0::/\n", "cpu,memory/x/memory.oom_control")
# A container sees its own cgroup as the root, whatever its place says.
OWN = ("0::/../../elsewhere\n", "memory.events")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes the counter of a cgroup, and where the process says that it is."""
    monkeypatch.setattr(process, "CGROUPS", tmp_path / "fs")

    def write(line, name, count):
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\noom 3\noom_kill {count}\noom_group_kill 0\n")
        (tmp_path / "cgroup").write_text(line)
        return tmp_path / "cgroup"

    return write


@pytest.mark.parametrize("layout", [VERSION_2, VERSION_1, JOINED, OWN])
def test_the_counter_is_found_and_compared(cgroups, layout):
    before = find_memory_kills(cgroups(*layout, 2))
    assert before is not None
    assert before.count == 2
    assert count_more_kills(before) == 0
    cgroups(*layout, 3)
    assert count_more_kills(before) == 1


def test_where_there_is_none_nothing_is_said(tmp_path, cgroups):
    assert find_memory_kills(tmp_path / "nowhere") is None
    (tmp_path / "cgroup").write_text("0::/gone\n")
    assert find_memory_kills(tmp_path / "cgroup") is None
    assert count_more_kills(MemoryKills(str(tmp_path / "fs/gone/memory.events"), 0)) == 0


def test_no_other_file_is_read_for_what_a_run_says(tmp_path, cgroups):
    cgroups(*VERSION_2, 1)
    (tmp_path / "secret").write_text("oom_kill 9\n")
    for path in (tmp_path / "secret", tmp_path / "fs" / ".." / "secret"):
        assert count_more_kills(MemoryKills(str(path), 0)) == 0


def lose(identity, monkeypatch):
    monkeypatch.setattr(process, "is_alive", lambda _: False)
    return find_loss("running", identity, 0)


def test_a_process_that_vanished_as_memory_ran_out_says_so(cgroups, monkeypatch):
    kills = find_memory_kills(cgroups(*VERSION_2, 0))
    identity = msgspec.structs.replace(process.current_process(), memory_kills=kills)
    assert lose(identity, monkeypatch).cause == "vanished"
    cgroups(*VERSION_2, 1)
    loss = lose(identity, monkeypatch)
    assert loss.cause == "out_of_memory"
    assert "oom_kill rose by 1" in loss.message


@pytest.mark.parametrize("backend", [None, "csv"])
def test_what_the_run_has_outlived_counts_no_more(tmp_path, cgroups, monkeypatch, backend):
    """A worker that was killed is told with a heartbeat, and is no cause of what comes later."""
    place = cgroups(*VERSION_2, 0)
    monkeypatch.setattr(
        "quark_core.runs.attempts.find_memory_kills", lambda: find_memory_kills(place)
    )
    root = tmp_path / "store"
    session = quark.start_run(project="p", storage_dir=root, backends=backend)
    cgroups(*VERSION_2, 1)
    session.open_run.stream._on_beat()
    session.flush()
    for _ in range(3000):  # a mirror takes its time
        if session.report_delivery().complete:
            break
        time.sleep(0.02)
    reader = open_reader(root)
    if backend is not None:
        reader = quark.open_run(session.run_id, root, backend=backend).open_run.reader
    monkeypatch.setattr(process, "is_alive", lambda _: False)
    assert reader.load_run(session.run_id).ending.cause == "vanished"
    cgroups(*VERSION_2, 2)
    assert reader.load_run(session.run_id).ending.cause == "out_of_memory"
    monkeypatch.undo()
    session.end_run()
