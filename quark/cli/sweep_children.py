"""The process of a trial: started in a group of its own, and ended with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from quark_core.config.redaction import redact_text

_CHUNK_BYTES = 65_536
_TAIL_BYTES = 8_192
_MOST_BYTES = 1_000_000
_KILL_S = 1.0
_REASON_CHARACTERS = 300
# What Windows has not, typed so that it is checked for Windows too.
_os: Any = os
_subprocess: Any = subprocess


class TrialProcess:
    """A command that runs for one trial.

    It is the first of a group of processes of its own, so that Ctrl-C of the terminal reaches
    the one who has started it alone, and signals reach all that the command starts. What it
    writes to standard error is passed on by `poll`, and the last line of it kept.

    Args:
        command: Program and arguments; no shell is between.
        environment: All of its environment.
        label: What each line of its output begins with, where several run at once; "" where
            standard output is the one of this process.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], label: str = ""
    ) -> None:
        self.was_interrupted = False
        """Whether it has been asked to end."""
        self.was_killed = False
        """Whether it was ended at once."""
        self.started_at = time.monotonic()
        self._errors = _Output(sys.stderr, label)
        self._printed = _Output(sys.stdout, label) if label else None
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if self._printed is None else self._printed.fd,
                stderr=self._errors.fd,
                **_make_group(),
            )
        except BaseException:
            self._close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def duration_s(self) -> float:
        """How long ago it was started, in seconds."""
        return time.monotonic() - self.started_at

    @property
    def last_line(self) -> str:
        """The last line that it has written to standard error and that says something."""
        return self._errors.last_line

    def poll(self) -> int | None:
        """Pass on what it writes; its exit status once it has ended, below 0 the signal by which.

        Once there is a status nothing more is passed on.
        """
        status = self._process.poll()
        for output in self._outputs:
            output.pass_on(to_end=status is not None)
        if status is not None:
            self._close()
        return status

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask it, and what it has started, to end; a second call does nothing."""
        if self.was_interrupted or self._process.poll() is not None:
            return
        self.was_interrupted = True
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(_find_break())

    def kill(self) -> None:
        """End it at once, with all that it has started, in sessions of their own too."""
        if self._process.poll() is not None:
            return
        self.was_killed = True
        # Launchers give each of their workers a session, which no signal to the group reaches.
        others = _list_descendants(self._process.pid)
        with suppress(OSError):
            if sys.platform != "win32":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        for other in others:
            with suppress(Exception):  # it is gone, or another user's
                other.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)

    @property
    def _outputs(self) -> list[_Output]:
        return [each for each in (self._printed, self._errors) if each is not None]

    def _close(self) -> None:
        for output in self._outputs:
            output.close()


class _Output:
    """What a process writes, in memory, until it is passed on.

    Not a pipe: a training whose agent was killed would break at the next line that it prints.

    Args:
        target: The stream of this process that it is passed on to.
        label: What each line begins with there, or "".
    """

    def __init__(self, target: Any, label: str) -> None:
        self._target = target
        self._label = label.encode()
        self._file: Any = None
        if hasattr(os, "memfd_create"):
            self.fd = int(_os.memfd_create("quark-trial"))
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            self.fd = self._file.fileno()
        self._is_appended = _append_always(self.fd)
        self._read_bytes = 0
        self._line = b""
        self._tail = b""
        self._is_cut = False
        self._is_open = True

    @property
    def last_line(self) -> str:
        """The last line that says something, without what looks like a secret."""
        lines = self._tail.decode("utf-8", "replace").replace("\r", "\n").split("\n")
        if self._is_cut:
            # It may begin within a word, and so within a secret that nobody would know again.
            _, _, lines[0] = lines[0].partition(" ")
        said = [line.strip() for line in lines if line.strip()]
        return redact_text(said[-1])[:_REASON_CHARACTERS] if said else ""

    def pass_on(self, *, to_end: bool) -> None:
        """Pass on what is new; `to_end` says that nothing comes after it."""
        while self._is_open:
            chunk = self._read()
            if not chunk:
                break
            self._read_bytes += len(chunk)
            self._is_cut = self._is_cut or len(self._tail) + len(chunk) > _TAIL_BYTES
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            self._write(chunk)
        if to_end and self._line:
            self._write(b"\n")
        if self._is_open and self._is_appended and self._read_bytes > _MOST_BYTES:
            with suppress(OSError):
                os.ftruncate(self.fd, 0)
                self._read_bytes = 0

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._file is not None:
            self._file.close()
        else:
            os.close(self.fd)

    def _read(self) -> bytes:
        if sys.platform != "win32":
            return os.pread(self.fd, _CHUNK_BYTES, self._read_bytes)
        else:  # noqa: RET505 - without it this would be unreachable elsewhere
            self._file.seek(self._read_bytes)
            return bytes(self._file.read(_CHUNK_BYTES))

    def _write(self, chunk: bytes) -> None:
        if self._label:
            # A line of another trial must not stand in the midst of one of this.
            *lines, self._line = (self._line + chunk).split(b"\n")
            chunk = b"".join(self._label + line + b"\n" for line in lines)
        stream = getattr(self._target, "styled", self._target)
        with suppress(OSError, ValueError):
            buffer = getattr(stream, "buffer", None)
            if buffer is None:
                stream.write(chunk.decode("utf-8", "replace"))
            else:
                buffer.write(chunk)
            stream.flush()


def describe_exit(status: int) -> str:
    """How a process has ended, in words: `ended with status 3`, `was ended by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"


def _make_group() -> dict[str, Any]:
    if sys.platform == "win32":
        return {"creationflags": _subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def _find_break() -> int:
    return int(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))


def _append_always(fd: int) -> bool:
    """Have what is written to a file go to its end, wherever that is; whether that can be."""
    if sys.platform == "win32":
        return False
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return True


def _list_descendants(pid: int) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []
