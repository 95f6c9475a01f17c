"""Taps on `sys.stdout` and `sys.stderr`, and the lines made of the text."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quark_core.system.process import start_thread

# Makes lines of what is written to a console: whole, folded, and not too many.
#
# A progress bar writes its line again after a carriage return, and several of them move the cursor
# up: each is one line here, which is told again at a bounded rate. Where more comes than is worth
# keeping, the first lines are told, then some, and the newest once it gets calmer; how many were
# left out is counted. Time and memory are bounded, whatever comes.

LONGEST_LINE = 16 * 1024
"""Characters that are kept of a line; what comes after them is not looked at."""

# Of one piece of text so much at its beginning and at its end is looked at.
_LONGEST_PIECE = 512 * 1024
_BURST_LINES = 4000
_LINES_PER_S = 2000
_BURST_CHARACTERS = 1024 * 1024
_CHARACTERS_PER_S = 256 * 1024
_HELD_LINES = 100
# A line that goes on is told so often, and less often once it is a minute old.
_SHOW_EVERY_S = 1.0
_SHOW_OLD_EVERY_S = 10.0
_OLD_S = 60.0
_MOST_ROWS = 64

_CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[PX^_][^\x1b]*(?:\x1b\\)?"
    r"|[ -/]*[0-~])"
)
_MOVES = re.compile(r"(\n|\x1b\[[0-9]{0,4}[AB])")
_UP, _DOWN = "A", "B"


class Line(NamedTuple):
    """A line of a stream, as `ConsoleRecord` has it."""

    number: int
    text: str
    is_whole: bool
    left_out: int
    time_us: int


class LineAssembler:
    """Makes lines of one stream's text. One thread at a time may call it.

    Args:
        give: Gets each line, in their order.
    """

    def __init__(self, give: Callable[[Line], None]) -> None:
        self._give = give
        self._rest = ""
        self._number = 0
        self._shown = ""
        self._began_s = 0.0
        self._show_at_s = 0.0
        # Lines above or below the one that is written: the cursor may come back to them.
        self._rows: dict[int, str] = {}
        self._changed: set[int] = set()
        self._held: deque[tuple[int, str, int]] = deque()
        self._left_out = 0
        self._budget = _Budget()

    def feed(self, text: str) -> None:
        """Take what was written next."""
        now_s = time.monotonic()
        if len(text) > _LONGEST_PIECE:
            text = self._shorten(text)
        if self._rows or ("\x1b[" in text and _moves_up(text)):
            self._feed_rows(text, now_s)
            return
        if not self._rest:
            self._began_s = now_s
            self._show_at_s = now_s + _SHOW_EVERY_S
        lines = (self._rest + text).split("\n")
        rest = lines.pop()
        if lines:
            self._shown = ""
            self._began_s = now_s
            self._show_at_s = now_s + _SHOW_EVERY_S
            first, self._number = self._number, self._number + len(lines)
            self._give_lines(first, lines, now_s)
        self._rest = _fold(rest)[:LONGEST_LINE] if "\r" in rest else rest[:LONGEST_LINE]
        if "\r" in rest and now_s >= self._show_at_s:
            self._show(now_s)

    def leave_out(self, lines: int) -> None:
        """Count lines that came and that nobody has."""
        self._left_out += lines
        self._number += lines

    def tick(self) -> None:
        """Tell what waits to be told; called now and then."""
        now_s = time.monotonic()
        if self._held and self._budget.find_room(now_s) >= len(self._held):
            self._give_held(now_s)
        if now_s >= self._show_at_s and now_s - self._began_s >= _SHOW_EVERY_S:
            self._show(now_s)

    def finish(self) -> None:
        """Tell everything: nothing more is written."""
        now_s = time.monotonic()
        self._give_held(now_s)
        self._show(now_s)

    def _show(self, now_s: float) -> None:
        """Tell how far the lines have come that go on."""
        is_old = now_s - self._began_s > _OLD_S
        self._show_at_s = now_s + (_SHOW_OLD_EVERY_S if is_old else _SHOW_EVERY_S)
        if self._held:
            self._give_held(now_s)
        for number in sorted(self._changed):
            self._tell(number, self._rows.get(number, ""), is_whole=False)
        self._changed.clear()
        if self._rest != self._shown:
            self._shown = self._rest
            self._tell(self._number, self._rest, is_whole=False)

    def _give_lines(self, first: int, lines: Sequence[str], now_s: float) -> None:
        """Tell whole lines, as many as there is room for."""
        room = self._budget.find_room(now_s)
        if self._held and room >= len(self._held) + len(lines):
            room -= self._give_held(now_s)
        given = min(room, len(lines))
        if given and self._held:
            # Those came before these, and nobody must read them after.
            self._left_out += len(self._held)
            self._held.clear()
        size = 0
        for place in range(given):
            line = lines[place]
            size += len(line)
            if size > self._budget.characters:
                given = place
                break
            self._tell(first + place, line, is_whole=True)
        self._budget.spend(given, size)
        if given < len(lines):
            self._hold(first, lines, given)

    def _hold(self, first: int, lines: Sequence[str], given: int) -> None:
        """Keep the newest lines for a calmer moment."""
        begin = max(given, len(lines) - _HELD_LINES)
        self._left_out += begin - given
        now_us = time.time_ns() // 1000
        for place in range(begin, len(lines)):
            if len(self._held) >= _HELD_LINES:
                self._held.popleft()
                self._left_out += 1
            self._held.append((first + place, lines[place][:LONGEST_LINE], now_us))

    def _give_held(self, now_s: float) -> int:
        given = size = 0
        while self._held:
            number, text, time_us = self._held.popleft()
            size += len(text)
            given += 1
            self._tell(number, text, is_whole=True, time_us=time_us)
        self._budget.find_room(now_s)
        self._budget.spend(given, size)
        return given

    def _tell(self, number: int, text: str, *, is_whole: bool, time_us: int | None = None) -> None:
        if "\r" in text:
            text = _fold(text).rstrip("\r")
        if "\x1b" in text:
            text = _CONTROLS.sub("", text)
        left_out, self._left_out = self._left_out, 0
        time_us = time.time_ns() // 1000 if time_us is None else time_us
        self._give(Line(number, text[:LONGEST_LINE], is_whole, left_out, time_us))

    def _shorten(self, text: str) -> str:
        """The beginning and the end of a long piece; its lines between are counted."""
        half = _LONGEST_PIECE // 2
        begin = text.rfind("\n", 0, half) + 1 or half
        end = text.find("\n", len(text) - half) + 1 or len(text) - half
        skipped = text.count("\n", begin, end)
        self._left_out += skipped
        head = (self._rest + text[:begin]).split("\n")
        self._rest = head.pop()[:LONGEST_LINE]
        first = self._number
        self._number += len(head) + skipped
        self._give_lines(first, head, time.monotonic())
        return text[end:]

    def _feed_rows(self, text: str, now_s: float) -> None:
        """Take text in which the cursor goes up and down."""
        if not self._rows:
            self._began_s = now_s
        for part in _MOVES.split(text):
            if part == "\n":
                self._end_row(now_s)
            elif part[:2] == "\x1b[" and part[-1:] in (_UP, _DOWN):
                count = min(int(part[2:-1] or 1), _MOST_ROWS)
                step = max(-count, -self._number) if part[-1] == _UP else count
                self._move_to(self._number + step)
            elif part:
                self._rest = _fold(self._rest + part)[:LONGEST_LINE]
        if now_s >= self._show_at_s:
            self._show(now_s)

    def _end_row(self, now_s: float) -> None:
        following = self._number + 1
        if following <= max(self._rows, default=self._number):
            self._move_to(following)
            return
        # Below all of them: what stands above stays.
        self._rows[self._number] = self._rest
        for number in sorted(self._rows):
            if number == self._number or number in self._changed:
                self._give_lines(number, [self._rows[number]], now_s)
        self._forget_rows()
        self._number, self._rest, self._shown = following, "", ""

    def _move_to(self, number: int) -> None:
        if self._rows.get(self._number) != self._rest:
            self._changed.add(self._number)
        self._rows[self._number] = self._rest
        self._number = number
        self._rest = self._shown = self._rows.get(number, "")
        if len(self._rows) > _MOST_ROWS:
            self._forget_rows()

    def _forget_rows(self) -> None:
        self._rows.clear()
        self._changed.clear()


class _Budget:
    """How much may be told: a burst, and so much a second."""

    def __init__(self) -> None:
        self.lines = float(_BURST_LINES)
        self.characters = float(_BURST_CHARACTERS)
        self._at_s = time.monotonic()

    def find_room(self, now_s: float) -> int:
        """How many lines may be told now."""
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self._at_s = now_s
            self.lines = min(_BURST_LINES, self.lines + passed_s * _LINES_PER_S)
            self.characters = min(_BURST_CHARACTERS, self.characters + passed_s * _CHARACTERS_PER_S)
        return int(self.lines) if self.lines > 0 and self.characters > 0 else 0

    def spend(self, lines: int, characters: int) -> None:
        """Note that so much was told."""
        self.lines -= lines
        self.characters -= characters


def _moves_up(text: str) -> bool:
    return any(part[:2] == "\x1b[" and part[-1] == _UP for part in _MOVES.findall(text))


def _fold(text: str) -> str:
    """What is left to be seen of a line after its carriage returns.

    One at the end stays: what comes next is written over it.
    """
    head = text.rstrip("\r")
    end = "\r" if len(head) < len(text) else ""
    return head.rpartition("\r")[2] + end


# Taps on `sys.stdout` and `sys.stderr`: what Python writes there is also given to who listens.
#
# The stream stays the object that it is, with one attribute of its own: `write`. So its file,
# encoding and buffer are what they were, and whoever has taken hold of it before, such as a handler
# of `logging`, is heard too. What is written goes where it went, first, with what that returns or
# raises. Then its text is queued; at the end of a line whoever wrote it makes lines of what is
# queued, unless somebody is at that already. No lock is waited for, so that threads, signal
# handlers and what is printed while a line is being made hold up nobody.
#
# A forked child has no taps: what it prints goes where it goes. What Quark's own threads print is
# left out, so that no line makes another one.

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
            _log.warning("%s is no longer captured: %s: %s", self.name, type(error).__name__, error)


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
        # Without one lines come all the same, those that go on at their end.
        self._thread = start_thread(self._tick, args=(self._ended,), name="quark-console")

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
