"""A bound on how long a test of the kit may take, whatever the backend does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

__all__ = ["bound_time"]


@contextmanager
def bound_time(limit_s: float, what: str) -> Iterator[None]:
    """Fail what takes longer than a limit, also where it hangs in C code that can be interrupted.

    By the alarm clock of the main thread; where there is none (Windows,
    another thread) nothing is bounded. A clock that runs already, such as
    pytest-timeout's, goes on afterwards.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"{what} took longer than {limit_s:g} s")

    earlier_handler = signal.signal(signal.SIGALRM, fail)
    # It rings again, since the backend may hang a second time when it is closed after the test.
    earlier_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier_handler)
        if earlier_s:
            left_s = max(1e-3, earlier_s - (time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
