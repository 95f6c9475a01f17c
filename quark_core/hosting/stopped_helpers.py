"""Ends helper processes that are stopped and whose training is gone.

A helper ends by itself when the process that started it is gone, but not while
it is stopped (SIGSTOP): then it keeps its memory and its files for ever. Each
has in its environment what it runs and who started it, so that it is known for
what it is; nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import signal

import msgspec

from quark_core.system.process import ProcessIdentity, current_process, is_alive

HELPER = "QUARK_HELPER_OF"
_PROCESSES = "/proc"
# Windows has none, nor any of these processes.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class _Helper(msgspec.Struct, frozen=True):
    """What a helper runs, and the process that it helps."""

    module: str
    parent: ProcessIdentity


def describe_helper(module: str) -> dict[str, str]:
    """What goes into the environment of a helper of this process.

    Args:
        module: What it runs.
    """
    return {HELPER: msgspec.json.encode(_Helper(module, current_process())).decode()}


def end_stopped_helpers() -> list[int]:
    """Kill this user's stopped helpers on this machine whose training is gone; their pids.

    Sees them where there is a /proc, and never raises.
    """
    try:
        pids = [int(name) for name in os.listdir(_PROCESSES) if name.isdigit()]
    except OSError:
        return []
    return [pid for pid in pids if _is_stopped(pid) and _end(pid)]


def _is_stopped(pid: int) -> bool:
    if not hasattr(os, "geteuid"):  # Windows has none, and no such processes
        return False
    try:
        if os.stat(f"{_PROCESSES}/{pid}").st_uid != os.geteuid():
            return False
        # The command's name stands in parentheses and may hold anything.
        return _read(pid, "stat").rpartition(b")")[2].split()[:1] == [b"T"]
    except OSError:
        return False


def _end(pid: int) -> bool:
    """Kill a process if it is such a helper; whether it was."""
    open_process = getattr(os, "pidfd_open", None)
    send = getattr(signal, "pidfd_send_signal", None)
    if open_process is None or send is None:
        return False
    descriptor = -1
    try:
        # From here on the pid cannot come to mean another process.
        descriptor = open_process(pid)
        if not (_is_stopped(pid) and _is_left(pid)):
            return False
        send(descriptor, _KILL)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    return True


def _is_left(pid: int) -> bool:
    """Whether a process is a helper whose parent is gone."""
    prefix = f"{HELPER}=".encode()
    found = [e for e in _read(pid, "environ").split(b"\0") if e.startswith(prefix)]
    if not found:
        return False
    try:
        helper = msgspec.json.decode(found[0][len(prefix) :], type=_Helper)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    # What a helper has started inherits its environment, and is not ours to end.
    runs = helper.module.encode() in _read(pid, "cmdline").split(b"\0")
    return runs and is_alive(helper.parent) is False


def _read(pid: int, name: str) -> bytes:
    with open(f"{_PROCESSES}/{pid}/{name}", "rb") as file:
        return file.read()
