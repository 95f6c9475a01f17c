"""Makes records of what a probed step has read, off the thread that trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["conclude_later", "wait_for_conclusions"]

_log = logging.getLogger("quark.torch")

Work = Callable[[], None]


class _Conclusions:
    """Work that is done in order on one daemon thread, which is started by the first of it."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._waiting: SimpleQueue[Work] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Have it done soon; at once where no thread is to be had."""
        if self._thread is None and not self._start():
            _do(work)
        else:
            self._waiting.put(work)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all that was submitted until now is done; whether it is."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        done = threading.Event()
        self._waiting.put(done.set)
        return done.wait(timeout_s)

    def _start(self) -> bool:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="quark-probes", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.debug("records are made on the training thread: %s", error)
                    return False
                self._thread = thread
            return True

    def _run(self) -> None:
        while True:
            _do(self._waiting.get())


def _do(work: Work) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - what comes after it must still be done
        _log.warning("Statistics of a step were lost: %s", error)


_conclusions = _Conclusions()


def conclude_later(work: Work) -> None:
    """Do some work soon on a thread of ours, in the order in which it is given."""
    _conclusions.submit(work)


def wait_for_conclusions(timeout_s: float | None) -> float | None:
    """Wait until all of it is done; what is left of the time, or None for no bound.

    Raises:
        TimeoutError: It took longer.
    """
    begin = time.monotonic()
    if not _conclusions.wait(timeout_s):
        raise TimeoutError
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))


def _become_child() -> None:
    # The thread, and what it was at, are the parent's.
    global _conclusions
    _conclusions = _Conclusions()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)
