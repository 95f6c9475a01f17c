"""Captures what is written to the descriptors 1 and 2, by whatever in this process or below it.

Each of them, or both as one where they go to the same place, becomes a pipe, or a pseudo terminal
where it was a terminal, that a process of its own reads (`tee_process`): a thread of this one could
not while a library in C that prints holds the interpreter's lock, and both would wait for ever.
Where that process dies, the descriptors are put back and what is still in the pipes is passed on by
a thread.
"""

from __future__ import annotations

import codecs
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quark_core.system.console import tee_process
from quark_core.system.console.streams import ConsoleSink, StreamFeed

_log = logging.getLogger("quark")

DESCRIPTORS = {"stdout": 1, "stderr": 2}
_START_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 2.0
_TICK_S = 1.0
_PIECE_BYTES = 256 * 1024
_RESCUE_S = 5.0
# What Windows has not, typed so that it is checked for Windows too.
_os: Any = os


def find_descriptors() -> tuple[str, ...]:
    """Streams of Python's that write to their descriptors, as those of a notebook do not."""
    found = []
    for name, descriptor in DESCRIPTORS.items():
        stream = getattr(sys, name, None)
        try:
            is_there = stream is None or stream.fileno() == descriptor
        except (OSError, ValueError, AttributeError):
            is_there = False
        if is_there:
            found.append(name)
    return tuple(found)


@dataclass(slots=True)
class _Stream:
    """What is captured of one descriptor, or of both."""

    name: str
    descriptors: tuple[int, ...]
    saved: int
    reading: int
    writing: int
    feed: StreamFeed
    decode: Callable[[bytes], str] = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace").decode
    )


class DescriptorTee:
    """The captured descriptors of this process; they are captured while anybody listens."""

    _sinks: tuple[ConsoleSink, ...]
    _streams: list[_Stream]
    _thread: threading.Thread | None

    def __init__(self) -> None:
        self.become_child()

    def open(self, sink: ConsoleSink, names: tuple[str, ...]) -> None:
        """Give all lines from now on to this one too.

        Raises:
            OSError: Descriptors cannot be captured here.
        """
        if os.name != "posix":
            raise OSError("descriptors cannot be captured on this system")
        with self._lock:
            if not self._sinks:
                self._install(names)
            self._sinks = (*self._sinks, sink)

    def close(self, sink: ConsoleSink) -> None:
        """Give what was written so far, and then no more; the last one puts all back."""
        with self._lock:
            is_last = self._sinks == (sink,)
            _flush()
            if is_last:
                self._restore()
                self._is_ending = True
            self._ask()
            for stream in self._streams:
                stream.feed.finish(is_last=is_last)
            self._sinks = tuple(one for one in self._sinks if one is not sink)
            if is_last:
                self._release()

    def become_child(self) -> None:
        """Leave it to the parent: what this child writes is captured there, and only there."""
        self._lock = threading.Lock()
        self._sinks = ()
        self._streams = []
        self._copies = self._questions = -1
        self._thread = None
        self._answered = threading.Event()
        self._is_ending = False

    def _install(self, names: tuple[str, ...]) -> None:
        opened: list[int] = []
        try:
            streams = [self._open_stream(*group, opened) for group in _group(names)]
            if not streams:
                raise OSError("neither stdout nor stderr is open")
            copies, copies_to = os.pipe()
            opened += [copies, copies_to]
            asked, questions = os.pipe()
            opened += [asked, questions]
            _start_process(streams, copies_to, asked)
            os.close(copies_to)
            os.close(asked)
            opened = [one for one in opened if one not in (copies_to, asked)]
            if not select.select([copies], [], [], _START_TIMEOUT_S)[0]:
                raise OSError("the capturing process does not start")
            if not os.read(copies, tee_process.HEAD.size):
                raise OSError("the capturing process has ended")
        except BaseException:
            for descriptor in opened:
                with suppress(OSError):
                    os.close(descriptor)
            raise
        self._streams, self._copies, self._questions = streams, copies, questions
        self._answered = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(
            target=self._read, args=(copies, streams), name="quark-console-fd", daemon=True
        )
        self._thread.start()
        _flush()
        for stream in streams:
            for descriptor in stream.descriptors:
                os.dup2(stream.writing, descriptor)

    def _open_stream(self, name: str, descriptors: tuple[int, ...], opened: list[int]) -> _Stream:
        saved = os.dup(descriptors[0])
        opened.append(saved)
        reading, writing = _open_terminal(saved) or os.pipe()
        opened += [reading, writing]
        feed = StreamFeed(name, lambda: self._sinks)
        return _Stream(name, descriptors, saved, reading, writing, feed)

    def _restore(self) -> None:
        """Put the descriptors back."""
        for stream in self._streams:
            for descriptor in stream.descriptors:
                with suppress(OSError):
                    os.dup2(stream.saved, descriptor)

    def _ask(self) -> None:
        """Wait until all is passed on, and read here, that was written before."""
        self._answered.clear()
        with suppress(OSError):
            os.write(self._questions, b"?")
            self._answered.wait(_DRAIN_TIMEOUT_S)

    def _release(self) -> None:
        """Let go of everything; children that still write are served by the process alone."""
        streams, self._streams = self._streams, []
        thread, self._thread = self._thread, None
        ours = [one for s in streams for one in (s.saved, s.writing)]
        for descriptor in (self._questions, *ours):
            with suppress(OSError):
                os.close(descriptor)
        self._questions = -1
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * _TICK_S)
        if thread is None or not thread.is_alive():
            for descriptor in (self._copies, *(s.reading for s in streams)):
                with suppress(OSError):
                    os.close(descriptor)

    def _read(self, copies: int, streams: list[_Stream]) -> None:
        """Take the copies, until there are no more or nobody wants them."""
        waiting = bytearray()
        while not (self._is_ending and self._answered.is_set()):
            ready, _, _ = select.select([copies], [], [], _TICK_S)
            if self._thread is not threading.current_thread():
                return
            if ready:
                data = os.read(copies, _PIECE_BYTES)
                if not data:
                    self._rescue(streams)
                    return
                waiting += data
                self._take(waiting, streams)
            else:
                for stream in streams:
                    stream.feed.tick()

    def _take(self, waiting: bytearray, streams: list[_Stream]) -> None:
        head = tee_process.HEAD
        while len(waiting) >= head.size:
            place, length = head.unpack_from(waiting)
            end = head.size + length
            if len(waiting) < end:
                return
            data = bytes(waiting[head.size : end])
            del waiting[:end]
            if place == tee_process.ANSWER:
                self._answered.set()
            elif place == tee_process.SKIPPED:
                number, count = tee_process.LEFT_OUT.unpack(data)
                streams[number].feed.leave_out(count)
            else:
                self._note(streams[place], data)

    def _rescue(self, streams: list[_Stream]) -> None:
        """Go on without the process that has died; what was written keeps its order."""
        for stream in streams:
            _os.set_blocking(stream.reading, False)
            until_s = time.monotonic() + _DRAIN_TIMEOUT_S
            while (data := _read_ready(stream.reading)) and time.monotonic() < until_s:
                tee_process.write_whole(stream.saved, data)
                self._note(stream, data)
        interval_s = sys.getswitchinterval()
        try:
            # Who prints needs the interpreter's lock between two writes: as long as this thread
            # keeps it, nothing can overtake what is still in the pipes.
            sys.setswitchinterval(_RESCUE_S)
            kept = [(stream, _put_back(stream)) for stream in streams]
        finally:
            sys.setswitchinterval(interval_s)
        _log.warning("the console is no longer captured: its capturing process has ended")
        for stream, data in kept:
            self._note(stream, data)
        self._answered.set()

    @staticmethod
    def _note(stream: _Stream, data: bytes) -> None:
        stream.feed.queue.append(stream.decode(data))
        stream.feed.drain()


def _read_ready(descriptor: int) -> bytes:
    """What can be read of a descriptor at once; nothing where there is nothing."""
    try:
        return os.read(descriptor, _PIECE_BYTES)
    except OSError:
        return b""


def _put_back(stream: _Stream) -> bytes:
    """Put the descriptors of a stream back, behind what is still in its pipe; returns that."""
    if not select.select([], [stream.saved], [], 0)[1]:
        # Who reads the terminal does not: nobody may wait for that with the lock held.
        for descriptor in stream.descriptors:
            os.dup2(stream.saved, descriptor)
        data = _read_ready(stream.reading)
        tee_process.write_whole(stream.saved, data)
        return data
    # Late: it is needed where a process was killed. Calls of a PyDLL keep the lock.
    from ctypes import PyDLL, create_string_buffer

    library = PyDLL(None)
    piece = create_string_buffer(_PIECE_BYTES)
    data = b""
    for step in range(2):
        while (length := library.read(stream.reading, piece, _PIECE_BYTES)) > 0:
            data += piece.raw[:length]
            rest = length
            while (
                rest > 0
                and (done := library.write(stream.saved, piece[length - rest : length], rest)) > 0
            ):
                rest -= done
        if step == 0:
            for descriptor in stream.descriptors:
                library.dup2(stream.saved, descriptor)
    return data


def _group(names: tuple[str, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Streams with their descriptors; both are one where they go to one terminal or file.

    Through two pipes their lines would come in another order than they were written.
    """
    found: list[tuple[str, tuple[int, ...]]] = [(name, (DESCRIPTORS[name],)) for name in names]
    if len(found) == len(DESCRIPTORS) and os.path.sameopenfile(*DESCRIPTORS.values()):
        return [(names[0], tuple(DESCRIPTORS.values()))]
    return found


def _start_process(streams: list[_Stream], copies_to: int, asked: int) -> None:
    """Start the process that reads; it is nobody's child once it runs."""
    pairs = ",".join(f"{stream.reading}:{stream.saved}" for stream in streams)
    passed = [one for stream in streams for one in (stream.reading, stream.saved)]
    subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            str(Path(tee_process.__file__)),
            pairs,
            str(copies_to),
            str(asked),
        ],
        pass_fds=(*passed, copies_to, asked),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=_START_TIMEOUT_S,
        check=True,
    )


def _open_terminal(descriptor: int) -> tuple[int, int] | None:
    """A pseudo terminal like the terminal that a descriptor is; None where it is none."""
    if sys.platform == "win32" or not os.isatty(descriptor):
        return None
    try:
        import fcntl
        import pty
        import termios

        master, slave = pty.openpty()
        attributes: list[Any] = termios.tcgetattr(descriptor)
        # Line ends are made by the terminal itself, once.
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        size = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    except (ImportError, OSError):
        return None
    return master, slave


def _flush() -> None:
    for name in DESCRIPTORS:
        with suppress(Exception):
            getattr(sys, name).flush()


descriptor_tee = DescriptorTee()
"""Of this process."""

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=descriptor_tee.become_child)
