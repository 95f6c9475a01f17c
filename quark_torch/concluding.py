"""Makes records of what a probed step has read, off the thread that trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["conclude_later", "wait_for_conclusions"]

_log = logging.getLogger("quark.torch")

Work = Callable[[], None]


class _Conclusions:
    """Work that is done in order on one daemon thread, which is started by the first of it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Have it done soon; at once where no thread is to be had."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="quark-probes", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.debug("records are made on the training thread: %s", error)
                else:
                    self._thread = thread
            if self._thread is not None:
                self._waiting.append(work)
                self._changed.notify_all()
                return
        _do(work)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all that was submitted is done; whether it is."""
        with self._changed:
            if self._thread is threading.current_thread():
                return True
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                work = self._waiting.popleft()
                self._busy = True
            _do(work)


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
