"""The process that stands between a training and its terminal where descriptors are captured.

Run as a script, by itself and without any package. It reads what is written to pipes, or pseudo
terminals, writes it where it would have gone, and sends a copy back. It waits for nobody who
trains: neither for an interpreter's lock nor for a reader of the copies, of which some are left out
and counted where they are not taken. It outlives a training that is killed by what was written
before, and ends with the last one who could write.

    arguments   the descriptors to read copies for, each with where it goes ("3:5,4:6"), the one
                that copies are sent to, the one that questions come from
    a copy      place of the stream u8 · length u32 · bytes; place 254 says how many newlines were
                left out of the stream that its first byte names, 255 answers a question
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
from typing import Any

HEAD = struct.Struct("<BI")
LEFT_OUT = struct.Struct("<BQ")
SKIPPED, ANSWER = 254, 255

_PIECE_BYTES = 64 * 1024
_MOST_WAITING_BYTES = 4 * 1024 * 1024
# What Windows has not, where this never runs, typed so that it is checked for Windows too.
_os: Any = os
_select: Any = select


class Tee:
    """Reads, writes on, and sends copies."""

    def __init__(self, streams: list[tuple[int, int]], copies: int, questions: int) -> None:
        self._streams = dict(streams)
        self._places = {source: place for place, (source, _) in enumerate(streams)}
        self._copies: int | None = copies
        self._questions = questions
        self._waiting = bytearray()
        self._skipped: dict[int, int] = {}
        self._is_watching = False
        self._poll = _select.poll()
        for source in self._streams:
            self._poll.register(source, _select.POLLIN)
        self._poll.register(questions, _select.POLLIN)

    def run(self) -> None:
        """Work until nobody can write any more."""
        self._send(ANSWER, b"")
        while self._streams:
            self._hand_back()
            self._watch_copies()
            for descriptor, _ in self._poll.poll():
                if descriptor == self._questions:
                    self._answer()
                elif descriptor in self._streams:
                    self._copy(descriptor)
        self._hand_back()

    def _watch_copies(self) -> None:
        """Be woken when there is room for copies, while any wait for it."""
        if self._copies is not None and bool(self._waiting) != self._is_watching:
            self._is_watching = not self._is_watching
            if self._is_watching:
                self._poll.register(self._copies, _select.POLLOUT)
            else:
                self._poll.unregister(self._copies)

    def _copy(self, source: int) -> bool:
        """Pass on a piece; whether there was one."""
        try:
            data = os.read(source, _PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a pseudo terminal that nobody has open any more
            data = b""
        if not data:
            self._poll.unregister(source)
            del self._streams[source]
            return False
        write_whole(self._streams[source], data)
        place = self._places[source]
        if len(self._waiting) > _MOST_WAITING_BYTES:
            self._skipped[place] = self._skipped.get(place, 0) + data.count(b"\n")
        else:
            self._send(place, data)
        return True

    def _answer(self) -> None:
        """Say when all is passed on that was written before the question."""
        asked = os.read(self._questions, 64)
        if not asked:
            self._poll.unregister(self._questions)
            return
        for source in list(self._streams):
            while self._copy(source):
                pass
        self._tell_skipped()
        self._send(ANSWER, b"")

    def _send(self, place: int, data: bytes) -> None:
        if self._copies is not None:
            self._waiting += HEAD.pack(place, len(data)) + data

    def _tell_skipped(self) -> None:
        for place, count in self._skipped.items():
            self._send(SKIPPED, LEFT_OUT.pack(place, count))
        self._skipped = {}

    def _hand_back(self) -> None:
        """Send as much as is taken."""
        try:
            while self._waiting and self._copies is not None:
                del self._waiting[: os.write(self._copies, self._waiting[:_PIECE_BYTES])]
                if not self._waiting and self._skipped:
                    self._tell_skipped()
        except BlockingIOError:
            pass
        except OSError:  # whoever wanted them is gone
            if self._is_watching:
                self._poll.unregister(self._copies)
            self._copies = None
            self._waiting.clear()


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it; where it cannot go anywhere any more, it goes nowhere."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 1.0)
        except OSError:
            return


def main() -> None:
    """Do it for the descriptors of the command line."""
    # So that it is nobody's child, whom a training that waits for its own would find.
    if _os.fork():
        os._exit(0)
    for name in ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGTSTP", "SIGTTOU"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    pairs = [pair.partition(":") for pair in sys.argv[1].split(",")]
    streams = [(int(source), int(goal)) for source, _, goal in pairs]
    copies, questions = int(sys.argv[2]), int(sys.argv[3])
    for source, _ in streams:
        _os.set_blocking(source, False)
    _os.set_blocking(copies, False)
    Tee(streams, copies, questions).run()


if __name__ == "__main__":
    main()
