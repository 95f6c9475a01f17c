"""Waiting between two looks of a command that goes on, until something asks for the next."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_TERMINATED = 128
# What Windows has not, typed so that it is checked for Windows too.
_select: Any = select
_os: Any = os


class Waiting:
    """Waits between looks; a change of the window's size, or a reader who leaves, ends it early.

    Used by the main thread. SIGTERM and SIGHUP end the command with what it has to do at its
    end, as Ctrl-C does. Where a system has no such signals (Windows), a window of another size
    is seen at the next look, and a reader who has left by what is printed next.

    Args:
        on_suspend: What Ctrl-Z does, at the next wait: a picture is not left half drawn. Without
            it Ctrl-Z stops the process, as ever.
    """

    def __init__(self, on_suspend: Callable[[], None] | None = None) -> None:
        self._on_suspend = on_suspend
        self._suspended = False
        self._before: dict[int, Any] = {}
        self._alarm: _Alarm | None = None

    def __enter__(self) -> Waiting:
        handlers: dict[int, Callable[[int, FrameType | None], Any]] = {signal.SIGTERM: self._end}
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = self._end
        if hasattr(select, "poll") and hasattr(os, "set_blocking"):
            self._alarm = _Alarm()
            if hasattr(signal, "SIGWINCH"):
                handlers[signal.SIGWINCH] = lambda *_: None
            if self._on_suspend is not None and hasattr(signal, "SIGTSTP"):
                handlers[signal.SIGTSTP] = self._suspend
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._alarm is not None:
            self._alarm.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for so long; True, and at once, where what is shown must be shown anew.

        Raises:
            BrokenPipeError: Nobody reads what is printed any more.
        """
        if self._alarm is None:
            time.sleep(timeout_s)
            return False
        if not self._alarm.wait(timeout_s):
            return False
        if self._suspended and self._on_suspend is not None:
            self._suspended = False
            self._on_suspend()
        return True

    def ignore_interrupts(self) -> None:
        """Take no notice of Ctrl-C, and of whoever else wants an end, from now on."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, signal.SIG_IGN)

    def _suspend(self, *_: object) -> None:
        self._suspended = True

    def _end(self, number: int, _: FrameType | None) -> None:
        sys.exit(_TERMINATED + number)


class _Alarm:
    """Rings when a signal comes, and when nobody reads any more what this process prints."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            _os.set_blocking(end, False)
        self._before_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._poll = _select.poll()
        self._poll.register(self._reading, _select.POLLIN)
        self._stdout = -1
        with suppress(OSError):  # what is printed to has no file
            stdout = sys.stdout.fileno()
            # macOS takes a terminal for broken; one that goes says so by SIGHUP.
            if sys.platform != "darwin" or not stat.S_ISCHR(os.fstat(stdout).st_mode):
                self._stdout = stdout
                # Nothing is asked of it: that nobody reads any more is told unasked.
                self._poll.register(self._stdout, 0)

    def wait(self, timeout_s: float) -> bool:
        """Whether a signal came within so long.

        Raises:
            BrokenPipeError: Nobody reads what is printed any more.
        """
        ready = dict(self._poll.poll(timeout_s * 1e3))
        if self._stdout in ready:
            raise BrokenPipeError("nobody reads what is printed")
        if self._reading not in ready:
            return False
        with suppress(BlockingIOError):
            while os.read(self._reading, 512):
                pass
        return True

    def close(self) -> None:
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._reading)
        os.close(self._writing)
