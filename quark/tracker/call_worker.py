"""Drives one backend of the user's own, call by call, on a thread that is its own."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from quark_core.backends.tracker_backend import TrackerBackend

_log = logging.getLogger("quark")
_MAX_WAITING = 100_000
# A thread that wakes for each call takes the interpreter from training each time.
_LINGER_S = 0.02
_MAX_REASONS = 100
# Stands among the calls and tells who waits that those before it have returned.
_NOTHING = ""


class CallReport(msgspec.Struct, frozen=True):
    """What became of the calls of one backend.

    Attributes:
        backend: Its name.
        done: Calls that returned.
        failed: Calls that raised.
        waiting: Calls that have not been made.
        dropped: Calls that were not kept because too many waited.
    """

    backend: str
    done: int
    failed: int
    waiting: int
    dropped: int


class _Call(msgspec.Struct):
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: threading.Event | None = None
    last: bool = False


class CallLane:
    """Makes the calls of a backend in order. Whatever it does (raise, hang) stays in here.

    Args:
        name: How messages name the backend.
        make: Makes the backend, on the lane's thread.
    """

    def __init__(self, name: str, make: Callable[[], TrackerBackend]) -> None:
        self.name = name
        self.backend: TrackerBackend | None = None
        self.failure: BaseException | None = None
        self._make = make
        self._calls: deque[_Call] = deque()
        self._there = threading.Event()
        self._hurry = threading.Event()
        self._ready = threading.Event()
        self._closed = False
        self._done = self._failed = self._dropped = 0
        self._in_call = ""
        self._reasons: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"quark-tracker-{name}", daemon=True)
        _lanes.add(self)

    @classmethod
    def of(cls, backend: TrackerBackend) -> CallLane:
        """A lane for a backend that is made already."""
        return cls(str(getattr(backend, "name", None) or type(backend).__name__), lambda: backend)

    def describe_failure(self) -> str:
        """What to say of a backend that could not be made."""
        error = self.failure
        if isinstance(error, ImportError):
            return f"tracker backend {self.name!r} is not available (missing dependency: {error})"
        return f"tracker backend {self.name!r} was not created: {type(error).__name__}: {error}"

    def start(self, timeout_s: float) -> bool:
        """Start the thread and wait for the backend to be made; whether it was, or was refused."""
        self._thread.start()
        return self._ready.wait(timeout_s)

    def submit(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Have a method called when those before it have returned. Never waits."""
        self._put(_Call(method, arguments, keywords))

    def call(self, timeout_s: float, method: str, *arguments: Any, **keywords: Any) -> bool:
        """As `submit`, but wait for it; whether it was made within the time."""
        made = threading.Event()
        if not self._put(_Call(method, arguments, keywords, made)):
            return False
        self._hurry.set()
        return made.wait(timeout_s)

    def wait(self, deadline: float) -> bool:
        """Wait until all calls so far have returned, until a moment of `time.monotonic`.

        Returns whether they have; at once that they have not, where the backend itself asks.
        """
        if self._thread is threading.current_thread():
            return False
        if self._closed or self.failure is not None or self._thread.ident is None:
            return not self._calls and not self._thread.is_alive()
        mark = _Call(_NOTHING, (), {}, threading.Event())
        assert mark.made is not None
        self._calls.append(mark)
        self._hurry.set()
        self._there.set()
        return mark.made.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Take no more calls, and let `finish` be the last one."""
        if not self._closed:
            self._closed = True
            self._calls.append(_Call("finish", (), {}, last=True))
            self._hurry.set()
            self._there.set()

    def join(self, deadline: float) -> bool:
        """Wait for the last call until a moment of `time.monotonic`; whether it has returned."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return True
        _log.warning(
            "tracker backend %s hangs in %s(); %d calls were not made",
            self.name,
            self._in_call or "its constructor",
            self.report().waiting,
        )
        return False

    def report(self) -> CallReport:
        """What became of the calls so far."""
        return CallReport(
            self.name,
            self._done,
            self._failed,
            len(self._calls),
            self._dropped,
        )

    def abandon(self) -> None:
        """This process was forked: the backend is the parent's, and so is its thread."""
        self._closed = True

    def _put(self, call: _Call) -> bool:
        if self._closed or self.failure is not None:
            return False
        if len(self._calls) >= _MAX_WAITING:
            self._dropped += 1
            self._tell(f"{_MAX_WAITING} calls wait, and further calls are dropped")
            return False
        self._calls.append(call)
        if not self._there.is_set():
            self._there.set()
        return True

    def _run(self) -> None:
        try:
            self.backend = self._make()
        except BaseException as error:  # noqa: BLE001 - even sys.exit must not end more than this
            self.failure = error
        self._ready.set()
        backend = self.backend
        if backend is None:
            self._calls.clear()
            return
        ended = False
        while not ended:
            self._there.wait()
            self._hurry.wait(_LINGER_S)
            self._hurry.clear()
            self._there.clear()
            while self._calls and not ended:
                call = self._calls.popleft()
                self._make_call(backend, call)
                ended = call.last
                if call.made is not None:
                    call.made.set()

    def _make_call(self, backend: TrackerBackend, call: _Call) -> None:
        if call.method == _NOTHING:
            return
        self._in_call = call.method
        try:
            getattr(backend, call.method)(*call.arguments, **call.keywords)
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed += 1
            self._tell(f"{call.method}() failed: {type(error).__name__}: {error}")
        else:
            self._done += 1

    def _tell(self, reason: str) -> None:
        """Log a reason, once."""
        if reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
            _log.warning("tracker backend %s: %s", self.name, reason)


_lanes: weakref.WeakSet[CallLane] = weakref.WeakSet()


def _become_child() -> None:
    for lane in list(_lanes):
        lane.abandon()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)
