"""A helper process, as the training process sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from quark_core.hosting.protocol import AS_EQUAL, read_frame, write_frame
from quark_core.system.exit_status import call_last
from quark_core.system.process import (
    ProcessIdentity,
    current_process,
    importing,
    is_alive,
    list_members,
)

# Ends helper processes that are stopped and whose training is gone.
#
# A helper ends by itself when the process that started it is gone, but not while
# it is stopped (SIGSTOP): then it keeps its memory and its files for ever. Each
# has in its environment what it runs and who started it, so that it is known for
# what it is; nothing else is touched.

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


_log = logging.getLogger("quark")
_KILL_WAIT_S = 5.0
# What a session of its own is on Windows.
_NEW_GROUP = int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0))
_Reply = TypeVar("_Reply")
_starts_equals = False


class ChildGone(Exception):
    """The process ended, or was ended because it took too long.

    Attributes:
        exit_status: With which it ended, below 0 by a signal; None where it never was.
        was_late: Whether it took too long.
    """

    def __init__(
        self, message: str, *, exit_status: int | None = None, was_late: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.was_late = was_late


class ChildProcess:
    """A process that runs a module and answers requests; one at a time, from any thread.

    It has a session of its own, so Ctrl-C in the terminal does not reach it,
    and it ends when this process does: the module must see to that. One that has
    something to finish then is not killed.

    Args:
        module: What it runs.
        title: How errors name it.
        log_path: Where what it prints goes; None for where this process prints its errors.
        environment: Its environment variables; Python finds this Quark in any case.
        finishes: Whether it may outlive this process, within bounds of its own.

    Raises:
        ChildGone: Python's own program is not known.
        OSError: It cannot be started.
    """

    def __init__(
        self,
        module: str,
        title: str,
        log_path: Path | None,
        environment: Mapping[str, str],
        *,
        finishes: bool = False,
    ) -> None:
        self._title = title
        self._finishes = finishes
        self._late = False
        if not sys.executable:
            raise ChildGone("the Python interpreter is unknown (sys.executable is empty)")
        with _open_log(log_path) as log, importing():
            # A fork in the middle of this would keep our ends of the pipes open.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *([AS_EQUAL] if _starts_equals else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**_add_quark(environment), **describe_helper(module)},
                start_new_session=True,
                creationflags=_NEW_GROUP,
            )
            self._sender = cast(RawIOBase, self._process.stdin)
            self._receiver = cast(RawIOBase, self._process.stdout)
            _alive.add(self)
        call_last(_kill_left)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def request(
        self, message: Any, reply_type: type[_Reply], timeout_s: float | None = None
    ) -> _Reply:
        """Send a message and wait for the reply, for ever without a timeout.

        Raises:
            ChildGone: The process ended meanwhile, or was killed after the timeout.
        """
        with self._deadline(timeout_s):
            try:
                write_frame(self._sender, message)
                reply = read_frame(self._receiver, reply_type)
            except (OSError, ValueError) as error:
                raise self._explain(timeout_s) from error
        if reply is None:
            raise self._explain(timeout_s)
        return reply

    def end(self, *, wait_s: float = _KILL_WAIT_S) -> None:
        """Give the process up: it ends by itself in this time or is killed."""
        _alive.discard(self)
        with contextlib.suppress(OSError):
            self._sender.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._kill()
        with contextlib.suppress(OSError):
            self._receiver.close()

    def leave(self) -> None:
        """Give it up at the end of this process: it is killed, unless it finishes by itself."""
        if not self._finishes:
            self.end(wait_s=0.0)
            return
        _alive.discard(self)
        with contextlib.suppress(OSError):
            self._sender.close()
        # Nobody waits for it.
        self._process.returncode = 0

    def forget(self) -> None:
        """Close a forked child's copies of the pipes, which would hide our end from the process."""
        for stream in (self._sender, self._receiver):
            with contextlib.suppress(OSError):
                stream.close()
        # The process is not this one's child: nobody here may wait for it.
        self._process.returncode = 0

    @contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        if timeout_s is None:
            yield
            return
        timer = threading.Timer(timeout_s, self._expire)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # no more threads may be had
            _log.debug("the process of %s has no time limit now: %s", self._title, error)
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self._process.kill()

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)

    def _explain(self, timeout_s: float | None) -> ChildGone:
        late = self._late
        self.end(wait_s=1.0)
        code = self._process.returncode
        if late:
            text = f"the process of {self._title} did not answer in {timeout_s:g} s"
            return ChildGone(text, exit_status=code, was_late=True)
        text = f"the process of {self._title} ended (exit status {code})"
        return ChildGone(text, exit_status=code)


def _open_log(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    if path is None:
        return contextlib.nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _add_quark(environment: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


_alive: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def measure_work() -> float:
    """Processor time in s that all such processes, and those that they started, have used.

    0 where this cannot be known: without psutil's calls, say.
    """
    alive = list_members(_alive)
    if not alive:
        return 0.0
    try:
        with importing():
            import psutil
    except (ImportError, AttributeError, OSError) as error:
        _log.debug("the load of helper processes cannot be measured: %s", error)
        return 0.0
    total_s = 0.0
    for process in alive:
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(process.pid)
            for each in (first, *first.children(recursive=True)):
                times = each.cpu_times()
                total_s += times.user + times.system
    return total_s


def start_helpers_as_equals() -> None:
    """Start all further ones with the priority of this process, which trains nothing."""
    global _starts_equals
    _starts_equals = True


def prefer_helpers() -> None:
    """Let all such processes have their share of the machine again: the training has ended."""
    with importing():
        from quark_core.hosting.protocol import restore_priority

    for process in list_members(_alive):
        restore_priority(process.pid)


def _kill_left() -> None:
    """Kill what has not ended: one that is stopped, or is kept by a native call, never sees why."""
    for process in list_members(_alive):
        process.leave()


def _after_in_child() -> None:
    for process in list_members(_alive):
        process.forget()
    _alive.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_in_child)
