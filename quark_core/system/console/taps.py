"""Taps on `sys.stdout` and `sys.stderr`: what Python writes there is also given to who listens.

The stream stays the object that it is, with one attribute of its own: `write`. So its file,
encoding and buffer are what they were, and whoever has taken hold of it before, such as a handler
of `logging`, is heard too. What is written goes where it went, first, with what that returns or
raises. Then its text is queued; at the end of a line whoever wrote it makes lines of what is
queued, unless somebody is at that already. No lock is waited for, so that threads, signal handlers
and what is printed while a line is being made hold up nobody.

A forked child has no taps: what it prints goes where it goes. What Quark's own threads print is
left out, so that no line makes another one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from quark_core.system.console.lines import Line, LineAssembler

_log = logging.getLogger("quark")

ConsoleSink = Callable[[str, Line], None]
"""Gets the name of a stream and a line of it; it must neither wait nor raise."""

_OWN_THREADS = "quark-"
_TICK_S = 1.0
_MOST_QUEUED = 256
# What is printed while lines are made is taken up so many times before it waits for the next end.
_MOST_ROUNDS = 8
NAMES = ("stdout", "stderr")
_NOTHING = object()


class StreamFeed:
    """Makes lines of one stream's text, for all who listen; any thread may write.

    Args:
        name: `stdout` or `stderr`.
        sinks: Who listens, at each moment.
    """

    def __init__(self, name: str, sinks: Callable[[], tuple[ConsoleSink, ...]]) -> None:
        self.name = name
        self.queue: deque[str] = deque()
        self.is_on = True
        self._sinks = sinks
        self._turn = threading.Lock()
        self._lines = LineAssembler(self._give)

    def restart(self) -> None:
        """Begin anew, after an end."""
        self.queue.clear()
        self._lines = LineAssembler(self._give)
        self.is_on = True

    def drain(self) -> None:
        """Make lines of what is queued, unless that is being done."""
        queue, turn = self.queue, self._turn
        for _ in range(_MOST_ROUNDS):
            if not queue or not turn.acquire(blocking=False):
                return
            try:
                self._lines.feed(self._take())
            except Exception as error:  # noqa: BLE001 - what is printed must not end a training
                self._fail(error)
            finally:
                turn.release()

    def leave_out(self, lines: int) -> None:
        """Count lines that came and that nobody has."""
        with self._turn:
            self._lines.leave_out(lines)

    def tick(self) -> None:
        """Tell what waits."""
        self._tell(is_last=False, timeout_s=0.0)

    def finish(self, *, is_last: bool) -> None:
        """Make lines of all that is queued, as somebody listens no more; the last one everything.

        It waits for a thread that is at that already, for a second at most.
        """
        self._tell(is_last=is_last, timeout_s=_TICK_S)

    def _tell(self, *, is_last: bool, timeout_s: float) -> None:
        self.drain()
        if not self._turn.acquire(timeout=timeout_s):
            return
        try:
            # Whoever had the turn may have let go of it before it took these.
            if self.queue:
                self._lines.feed(self._take())
            self._lines.finish() if is_last else self._lines.tick()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
        finally:
            self._turn.release()

    def _take(self) -> str:
        queue = self.queue
        try:
            first = queue.popleft()
            if not queue:
                return first
            return "".join((first, *(queue.popleft() for _ in range(len(queue)))))
        except IndexError:  # in a forked child, whose queue was cleared
            return ""

    def _give(self, line: Line) -> None:
        for sink in self._sinks():
            sink(self.name, line)

    def _fail(self, error: Exception) -> None:
        if self.is_on:
            self.is_on = False
            self.queue.clear()
            _log.warning("%s is captured no longer: %s: %s", self.name, type(error).__name__, error)


class _Tap:
    """The `write` of one stream, as long as anybody listens."""

    def __init__(self, stream: Any, feed: StreamFeed) -> None:
        self.stream = stream
        self.feed = feed
        self._before = vars(stream).get("write", _NOTHING)
        self.write = self._make_write(stream.write)
        stream.write = self.write

    def _make_write(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        feed = self.feed
        queue, drain = feed.queue, feed.drain
        current_thread = threading.current_thread

        def write(text: str, /) -> Any:
            written = original(text)
            if feed.is_on and not current_thread().name.startswith(_OWN_THREADS):
                queue.append(text)
                if "\n" in text or "\r" in text or len(queue) > _MOST_QUEUED:
                    drain()
            return written

        return write

    def remove(self) -> bool:
        """Give the stream its own `write` back; False where somebody has put theirs on top."""
        if vars(self.stream).get("write") is not self.write:
            return False
        if self._before is _NOTHING:
            del self.stream.write
        else:
            self.stream.write = self._before
        return True


class ConsoleTaps:
    """The taps of this process; they are there while anybody listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[str, tuple[ConsoleSink, ...]] = dict.fromkeys(NAMES, ())
        self._taps: list[_Tap] = []
        # Below what somebody else has put on top: they are used again where they are.
        self._left: list[_Tap] = []
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def open(self, sink: ConsoleSink, names: tuple[str, ...] = NAMES) -> None:
        """Give all lines of these streams from now on to this one too."""
        with self._lock:
            for name in names:
                self._sinks[name] = (*self._sinks[name], sink)
                if len(self._sinks[name]) == 1:
                    self._install(name)
            if self._taps and self._thread is None:
                self._start_thread()

    def close(self, sink: ConsoleSink) -> None:
        """Give what waits, and then no more; the last one takes the taps away."""
        for tap in list(self._taps):
            if sink in self._sinks[tap.feed.name]:
                tap.feed.finish(is_last=len(self._sinks[tap.feed.name]) == 1)
        with self._lock:
            for name, sinks in self._sinks.items():
                self._sinks[name] = tuple(one for one in sinks if one is not sink)
            for tap in list(self._taps):
                if self._sinks[tap.feed.name]:
                    continue
                self._taps.remove(tap)
                tap.feed.is_on = False
                if not tap.remove():
                    self._left.append(tap)
            if not self._taps:
                self._ended.set()
                self._thread = None

    def become_child(self) -> None:
        """Leave the parent's streams alone: this process was forked."""
        self._lock = threading.Lock()
        self._sinks = dict.fromkeys(NAMES, ())
        for tap in self._taps:
            tap.feed.is_on = False
            tap.feed.queue.clear()
            tap.remove()
        self._taps, self._left = [], []
        self._thread = None
        self._ended = threading.Event()

    def _install(self, name: str) -> None:
        stream = getattr(sys, name, None)
        if stream is None or any(tap.stream is stream for tap in self._taps):
            return
        feed = StreamFeed(name, lambda: self._sinks[name])
        try:
            self._taps.append(self._find_left(stream, name) or _Tap(stream, feed))
        except (AttributeError, TypeError) as error:
            _log.debug("%s cannot be captured: %s", name, error)

    def _start_thread(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._tick, args=(self._ended,), name="quark-console", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # lines come all the same, those that go on at their end

    def _find_left(self, stream: Any, name: str) -> _Tap | None:
        for tap in self._left:
            if tap.stream is stream and tap.feed.name == name:
                self._left.remove(tap)
                tap.feed.restart()
                return tap
        return None

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            for tap in list(self._taps):
                tap.feed.tick()


console_taps = ConsoleTaps()
"""Of this process."""

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=console_taps.become_child)
