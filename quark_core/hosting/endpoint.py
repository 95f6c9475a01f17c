"""The helper's end: what such a process does first and last.

It lets training go first where cores are scarce, as long as there is training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from io import RawIOBase
from pathlib import Path
from typing import NoReturn

from quark_core.hosting.messages import AS_EQUAL

_NICENESS = 10
_OUT_OF_MEMORY_SCORE = 500
# Linux lets a user ask once in 0.1 s, whichever process asks.
_TRIES = 8
_TRY_EVERY_S = 0.11


def lower_priority(*, is_nice: bool = True) -> None:
    """Make this process nicer than the one that started it, and the first to go for its memory.

    Args:
        is_nice: False for the latter alone.
    """
    if is_nice and hasattr(os, "nice"):  # Windows has none
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        _set_session(os.getpid(), _NICENESS)
    with contextlib.suppress(OSError):  # only Linux has it
        # Where memory runs out, training is not what the system ends.
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_SCORE))


def lower_started() -> None:
    """Lower the priority of the child processes that started sessions of their own.

    They inherit the niceness of their parent, but not that of its session.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            _set_session(process.pid, _NICENESS)


def restore_priority(pid: int) -> None:
    """Let a helper, and what it has started, have its share again: it is waited for.

    Where this user may not make processes less nice, their sessions are, as far as
    the system has such.
    """
    if sys.platform == "win32" or not hasattr(os, "nice"):  # Windows has none
        return
    import psutil

    own, own_session = os.nice(0), _find_session_niceness()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            _set_session(process.pid, own_session)
            with contextlib.suppress(psutil.Error, OSError):
                # On Linux each thread has its own.
                for thread in process.threads():
                    os.setpriority(os.PRIO_PROCESS, thread.id, own)


def _find_session_niceness() -> int:
    """That of this process's own session; 0 where the system has none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _set_session(pid: int, niceness: int) -> None:
    """Set that of the session that a process leads.

    Linux shares cores among sessions first (`sched_autogroup_enabled`), and the
    niceness of a process counts among those of its session only.
    """
    if not hasattr(os, "getsid"):  # Windows has none
        return
    path = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):
        if not path.exists() or os.getsid(pid) != pid:
            return
        for _ in range(_TRIES):
            try:
                path.write_text(str(niceness))
            except BlockingIOError:
                time.sleep(_TRY_EVERY_S)
            else:
                return


_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def serve_parent(serve: Callable[[RawIOBase, RawIOBase], int], *, is_nice: bool = True) -> NoReturn:
    """Run a helper process, and end it as soon as it has served.

    Signals are left to the process that started it. Standard input and output
    are the pipes to that one, and null devices to everybody else in here.

    Args:
        serve: Reads messages from its first argument and answers on its
            second; returns the exit status.
        is_nice: Whether the process that started it goes first where cores are scarce.
    """
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    lower_priority(is_nice=is_nice and AS_EQUAL not in sys.argv)
    faulthandler.enable()
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    target = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        # The end of this process is the end of the pipes, whatever a library has forked.
        os.register_at_fork(after_in_child=lambda: _forget(source, target))
    status = serve(source, target)
    sys.stderr.flush()
    # Handlers of libraries at exit could wait for a server for ever.
    os._exit(status)


def _forget(*streams: RawIOBase) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def extend_import_path(paths: Iterable[str]) -> None:
    """Let this process import what the one that started it can."""
    known = set(sys.path)
    sys.path += [path for path in paths if path and path not in known]
