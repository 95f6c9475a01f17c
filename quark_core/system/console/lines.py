"""Makes lines of what is written to a console: whole, folded, and not too many.

A progress bar writes its line again after a carriage return, and several of them move the cursor
up: each is one line here, which is told again at a bounded rate. Where more comes than is worth
keeping, the first lines are told, then some, and the newest once it gets calmer; how many were
left out is counted. Time and memory are bounded, whatever comes.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
