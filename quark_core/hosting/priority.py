"""Lets training go first where cores are scarce."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["lower_priority", "lower_started"]

_NICENESS = 10
# Linux lets a user ask once in 0.1 s, whichever process asks.
_TRIES = 8
_TRY_EVERY_S = 0.11


def lower_priority() -> None:
    """Make this process nicer than the one that started it."""
    if hasattr(os, "nice"):  # Windows has none
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        _lower_session(os.getpid())


def lower_started() -> None:
    """Make those processes nicer too that a library has started in sessions of their own.

    They have the niceness of their parent, but not that of its session.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            _lower_session(process.pid)


def _lower_session(pid: int) -> None:
    """Do it for the session that a process leads.

    Linux shares cores among sessions first (`sched_autogroup_enabled`), and the
    niceness of a process counts among those of its session only.
    """
    path = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):
        if not path.exists() or os.getsid(pid) != pid:
            return
        for _ in range(_TRIES):
            try:
                path.write_text(str(_NICENESS))
            except BlockingIOError:
                time.sleep(_TRY_EVERY_S)
            else:
                return
