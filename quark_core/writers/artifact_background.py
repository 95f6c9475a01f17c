"""Artifacts that are large are stored by a thread, while training goes on."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from quark_core.config import settings
from quark_core.errors import InvalidRunStateError, SessionStoreError

if TYPE_CHECKING:
    from quark_core.records import ArtifactRecord

_log = logging.getLogger("quark")

A = TypeVar("A")
B = TypeVar("B")

_MOST_WAITING = 64
_LOOK_S = 0.05


class PendingArtifact:
    """An artifact that a thread is storing; what `log_video` and `log_directory` return.

    Its methods may be called from any thread.

    Attributes:
        name: The artifact's key.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._done = threading.Event()
        self._record: ArtifactRecord | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is stored, or never will be."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> ArtifactRecord:
        """The record, once the payload is on the disk.

        Args:
            timeout_s: How long to wait; as long as it takes by default.

        Raises:
            TimeoutError: It is not stored yet; it goes on.
            SchemaValidationError, SessionStoreError, RetentionHookError: Why it is not stored.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"artifact {self.name!r} is not stored within {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._record is not None
        return self._record

    def settle(self, work: Callable[[], ArtifactRecord]) -> BaseException | None:
        """Do the work, and keep what came of it; returns why it failed."""
        try:
            self._record = work()
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._error = error
        finally:
            self._done.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """It is not stored, and will not be."""
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        state = "stored" if self._record else "failed" if self._error else "on its way"
        return f"PendingArtifact({self.name!r}, {state})"


def map_in_threads(work: Callable[[A], B], items: Sequence[A], threads: int, name: str) -> list[B]:
    """What `work` makes of each item, in their order; done by this thread and some more.

    `concurrent.futures` takes nothing more once the main thread is through, and what a script
    promised on its last line is done after that. Nor may a thread be started there in Python 3.12.

    Args:
        work: Called with each item, from any of the threads.
        items: The items.
        threads: How many threads at most.
        name: Name of the threads.
    """
    made: list[B | None] = [None] * len(items)
    failed: list[BaseException] = []
    left = iter(range(len(items)))

    def run() -> None:
        # `next` of a range is one step of the interpreter, so that each is taken once.
        for place in left:
            if failed:
                return
            try:
                made[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - whoever called is told
                failed.append(error)

    others = []
    for _ in range(min(threads, len(items)) - 1):
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break  # none to spare, or the process ends
        others.append(thread)
    run()
    for thread in others:
        thread.join()
    if failed:
        raise failed[0]
    return cast("list[B]", made)


class ArtifactThread:
    """Stores one artifact after the other, beside training; starts with the first of them.

    Args:
        on_failure: Called with the name of an artifact that could not be stored, and why.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pid = 0
        self._progress = 0
        self._is_over = False

    def submit(self, name: str, work: Callable[[], ArtifactRecord]) -> PendingArtifact:
        """Have something stored; waits where 64 artifacts wait already."""
        pending = PendingArtifact(name)
        with self._lock:
            if self._pid != os.getpid():
                # The first one, or a forked child, which has none of its parent's threads.
                self._pid = os.getpid()
                self._work: queue.Queue[tuple[PendingArtifact, Callable[[], ArtifactRecord]]] = (
                    queue.Queue(_MOST_WAITING)
                )
                self._waiting = 0
                threading.Thread(target=self._run, name="quark-artifacts", daemon=True).start()
            self._waiting += 1
        self._work.put((pending, work))
        return pending

    def advance(self, _amount: int = 1) -> None:
        """Something got on."""
        self._progress += 1

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait until all is stored, or nothing has got on for so long; whether all is."""
        if self._pid != os.getpid():
            return True
        limit_s = settings.exit_timeout_s() if timeout_s is None else timeout_s
        seen, since = self._progress, time.monotonic()
        while self._waiting > 0:
            if self._progress != seen:
                seen, since = self._progress, time.monotonic()
            if time.monotonic() - since > limit_s:
                self._is_over = True
                _log.warning(
                    "%d artifacts are not stored: nothing has got on for %.0f s",
                    self._waiting,
                    limit_s,
                )
                return False
            time.sleep(_LOOK_S)
        return True

    def _run(self) -> None:
        while True:
            pending, work = self._work.get()
            if self._is_over:
                pending.fail(InvalidRunStateError("the run has ended before this was stored"))
            else:
                error = pending.settle(work)
                if error is not None:
                    self._tell(pending.name, error)
            self._progress += 1
            with self._lock:
                self._waiting -= 1

    def _tell(self, name: str, error: BaseException) -> None:
        try:
            self._on_failure(name, error)
        except (SessionStoreError, InvalidRunStateError):
            _log.warning("artifact %r is not stored: %s", name, error)
