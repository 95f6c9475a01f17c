"""ConsoleCapture: what the process prints becomes records of its run."""

from __future__ import annotations

import logging
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal

from quark_core.config.redaction import REDACTED, cut_text
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.runs.open_run import OpenRun
from quark_core.system.console.streams import NAMES, Line, console_taps

CaptureMode = Literal["sys", "fd"]

_log = logging.getLogger("quark")

_LONGEST_TEXT = 4096
_CUT = "…[cut]"
# Of a run so much is kept as it comes, then a trickle, and the newest lines at its end.
_WHOLE_CHARACTERS = 32 * 1024 * 1024
_TRICKLE_PER_S = 256
_TRICKLE_BURST = 16 * 1024
_NEWEST_LINES = 200
# A private key has so many lines at most; each of them alone does not look like one.
_KEY_LINES = 200
_KEY_BEGIN, _KEY_END, _KEY_NAME = "-----BEGIN", "-----END", "PRIVATE KEY-----"


class ConsoleCapture:
    """Puts the lines of this process's console into a run's stream.

    A line is in the run's black box when `print` returns. Lines are cut after 4,096 characters.
    Of a run 32 MB are kept as they come, then 256 bytes a second, and at its end the newest.

    Args:
        run: The run.
        mode: "sys" for what Python writes to `sys.stdout` and `sys.stderr`, "fd" for all that is
            written to the descriptors 1 and 2, child processes and C libraries included.
    """

    def __init__(self, run: OpenRun, mode: CaptureMode) -> None:
        self._run = run
        self._mode = mode
        self._channel = run.stream.channel(ConsoleRecord.KIND)
        self._origin = run.origin.head
        self._room = _WHOLE_CHARACTERS
        self._refilled_s = 0.0
        self._is_trickling = False
        # Two threads may be at it, one for each stream: nothing walks over it.
        self._newest: deque[tuple[str, Line]] = deque()
        self._left_out: dict[str, int] = {}
        self._key_lines: dict[str, int] = {}
        self._sink = self._put

    def start(self) -> None:
        """Take what is printed from now on."""
        if self._mode == "fd":
            try:
                self._capture_descriptors()
                return
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                _log.warning('capture="fd" is not available, so capture="sys" is used: %s', error)
                self._mode = "sys"
        console_taps.open(self._sink)

    def stop(self) -> None:
        """Take what was printed so far, and no more."""
        if self._mode == "fd":
            from quark_core.system.console.descriptors import descriptor_tee

            descriptor_tee.close(self._sink)
        console_taps.close(self._sink)
        for stream, line in self._take_newest(0):
            self._write(stream, line)

    def _capture_descriptors(self) -> None:
        from quark_core.system.console.descriptors import descriptor_tee, find_descriptors

        names = find_descriptors()
        if names:
            descriptor_tee.open(self._sink, names)
        others = tuple(name for name in NAMES if name not in names)
        if others:
            console_taps.open(self._sink, others)

    def _put(self, stream: str, line: Line) -> None:
        if self._run.is_over:
            return
        size = min(len(line.text), _LONGEST_TEXT)
        if self._is_trickling:
            now_s = time.monotonic()
            refill = int((now_s - self._refilled_s) * _TRICKLE_PER_S)
            if refill:
                self._refilled_s = now_s
                self._room = min(_TRICKLE_BURST, self._room + refill)
        if size > self._room:
            if not self._is_trickling:
                self._is_trickling = True
                self._room, self._refilled_s = 0, time.monotonic()
            self._keep_newest(stream, line)
            return
        self._room -= size
        # What comes now is newer, and they must not come after it.
        self._leave_out_newest(0)
        self._write(stream, line)

    def _keep_newest(self, stream: str, line: Line) -> None:
        self._leave_out_newest(_NEWEST_LINES - 1)
        self._newest.append((stream, line))

    def _leave_out_newest(self, left: int) -> None:
        """Count the oldest of them as left out, until so many are left."""
        for stream, line in self._take_newest(left):
            self._left_out[stream] = self._left_out.get(stream, 0) + 1 + line.left_out

    def _take_newest(self, left: int) -> Iterator[tuple[str, Line]]:
        """The oldest of them, until so many are left; each is given to one thread."""
        newest = self._newest
        while len(newest) > left:
            try:
                yield newest.popleft()
            except IndexError:  # the other stream's thread was first
                return

    def _write(self, stream: str, line: Line) -> None:
        text = line.text
        if _KEY_NAME in text or self._key_lines.get(stream):
            text = self._hide_key(stream, text)
        if len(text) > _LONGEST_TEXT:
            text = cut_text(text, _LONGEST_TEXT) + _CUT
        channel = self._channel
        channel.put(
            ConsoleRecord(
                *self._origin,
                channel.take_sequence(),
                line.time_us,
                stream,
                line.number,
                text,
                line.is_whole,
                line.left_out + self._left_out.pop(stream, 0),
            )
        )

    def _hide_key(self, stream: str, text: str) -> str:
        """A line of a private key that goes over several."""
        left = self._key_lines.get(stream, 0)
        if _KEY_END in text:
            self._key_lines[stream] = 0
            return text if _KEY_BEGIN in text else REDACTED
        if _KEY_BEGIN in text and _KEY_NAME in text:
            self._key_lines[stream] = _KEY_LINES
            return REDACTED
        self._key_lines[stream] = max(0, left - 1)
        return REDACTED if left else text
