"""Which process is writing a run, and whether it still lives."""

from __future__ import annotations

import os
import platform
import time
from functools import lru_cache
from pathlib import Path

import msgspec

__all__ = ["ProcessIdentity", "current_process", "find_age_s", "is_alive"]


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, told apart from any other that ever had its pid.

    Attributes:
        host: Host, boot and pid namespace: where `pid` means something.
        pid: Process id.
        started: Start time of the process as the system counts it, "" if unknown.
    """

    host: str
    pid: int
    started: str


def current_process() -> ProcessIdentity:
    """Identity of this process."""
    pid = os.getpid()
    state = _read_state(pid)
    return ProcessIdentity(_host(), pid, state[1] if state else "")


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether the process runs; None where it lies on a host that cannot be asked from here."""
    if identity.host != _host():
        return None
    state = _read_state(identity.pid)
    return state is not None and state[0] != "Z" and state[1] == identity.started


def find_age_s() -> float:
    """How long ago this process was started, in seconds; of no clock that anybody can set."""
    state = _read_state(os.getpid())
    uptime = _read_text("/proc/uptime").partition(" ")[0]
    try:
        if state is not None and uptime:
            return max(0.0, float(uptime) - int(state[1]) / os.sysconf("SC_CLK_TCK"))
    except (ValueError, OSError):
        pass
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


@lru_cache(maxsize=1)
def _host() -> str:
    boot_id = _read_text("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "|".join((platform.node(), boot_id, namespace))


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _read_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, or None if there is none."""
    if os.path.exists("/proc/self/stat"):
        text = _read_text(f"/proc/{pid}/stat")
        # The command's name stands in parentheses and may hold anything.
        fields = text.rpartition(")")[2].split()
        return (fields[0], fields[19]) if len(fields) > 19 else None
    import psutil

    try:
        process = psutil.Process(pid)
        state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
        return state, f"{process.create_time():.2f}"
    except psutil.Error:
        return None
