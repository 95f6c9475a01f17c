"""Lets processes that write often and little to one file write one after the other.

SQLite lets in whoever asks at the right moment: one that has just written and asks again, rather
than one that sleeps. Here one at a time waits in front of the database, and asks again and again
without sleeping long; the others, and whoever has just written, wait behind it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has none: there all ask the database
    fcntl = None  # type: ignore[assignment]

_IN_FRONT_S = (0.0001, 0.0003)
_BEHIND_S = (0.0004, 0.002)
# Whoever is in front may have been stopped there (SIGSTOP), and must not keep the others from
# working: after so long they ask the database themselves, for a while.
_PATIENCE_S = 2.0
_WITHOUT_S = 10.0


class Turnstile:
    """The place in front of a database; belongs to one thread at a time.

    Args:
        path: A file that is there, by whose lock the place is kept; nothing is read or written.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        self._without_until = 0.0
        if fcntl is not None:
            with suppress(OSError):  # without it all ask the database
                self._file = path.open("rb")

    def close(self) -> None:
        """Give the file up."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def pass_through(self, try_to_enter: Callable[[], bool], limit_s: float) -> bool:
        """Ask for the database until it is ours; whether it is.

        Args:
            try_to_enter: Asks once, without waiting.
            limit_s: How long to go on.
        """
        began = time.monotonic()
        deadline = began + limit_s
        is_in_front = began >= self._without_until and self._wait_behind(
            min(deadline, began + _PATIENCE_S)
        )
        try:
            pause = _IN_FRONT_S if is_in_front else _BEHIND_S
            while not try_to_enter():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(random.uniform(*pause))
            return True
        finally:
            if is_in_front:
                self._leave()

    def _wait_behind(self, deadline: float) -> bool:
        """Wait for the place in front; whether it was free in time."""
        if sys.platform == "win32":
            return False
        while self._file is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._without_until = time.monotonic() + _WITHOUT_S
                    return False
                time.sleep(random.uniform(*_BEHIND_S))
            except OSError:
                return False
            else:
                return True
        return False

    def _leave(self) -> None:
        if sys.platform != "win32" and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
