"""A terminal of this process's own, a command in it, and a training that does what it is told."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

DEADLINE_S = 60

# The child's terminal becomes its controlling one, so that Ctrl-C and sizes reach it.
_TAKE = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_TRAINING = """
import json, sys
import quark
with quark.start_run(**json.loads(sys.argv[1])) as session:
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    print(session.run_id, flush=True)
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "log":
            metrics.log_many(rest[0], step=rest[1])
        elif word == "say":
            session.add_log(rest[0])
        elif word == "fail":
            raise ValueError(rest[0])
        session.flush("stored")
        print("done", flush=True)
"""
OWN = re.compile(r"\x1b\[(?:[0-9;]*[mHK]|\?(?:1049|25)[hl])")


class Training:
    """A run in a process of its own; each order is stored when the call returns."""

    def __init__(self, folder, **arguments):
        given = json.dumps({"project": "vision", "storage_dir": str(folder), **arguments})
        # A fixture of others names their runs by it.
        kept = {name: value for name, value in os.environ.items() if name != "QUARK_RUN_ID"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAINING, given],
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.run_id = self.process.stdout.readline().strip()
        assert self.run_id

    def tell(self, *order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def log(self, step, **values):
        self.tell("log", values, step)

    def end(self, failing=None):
        if failing is not None:
            self.process.stdin.write(json.dumps(["fail", failing]) + "\n")
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class Terminal:
    """A pseudo-terminal with a command in it."""

    def __init__(self, *words, columns=80, rows=24, **environment):
        self.controller, terminal = pty.openpty()
        self.resize(columns, rows)
        kept = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        settings = {
            "TERM": "xterm-256color",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONFAULTHANDLER": "1",
            **environment,
        }
        self.modes = termios.tcgetattr(terminal)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE, sys.executable, "-m", "quark", *map(str, words)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**kept, **settings},
        )
        # Kept open, so that its modes can be asked for afterwards.
        self._terminal = terminal
        self.data = b""

    def resize(self, columns, rows):
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys):
        os.write(self.controller, keys)

    @property
    def text(self):
        """All that was written so far."""
        while select.select([self.controller], [], [], 0)[0]:
            self.data += os.read(self.controller, 65536)
        return self.data.decode("utf-8", "replace")

    @property
    def screen(self):
        """The newest picture, by lines."""
        last = self.text.rpartition("\x1b[1;1H")[2].partition("\x1b[?25h")[0]
        return [OWN.sub("", line) for line in re.split(r"\x1b\[\d+;1H", last)]

    def wait_for(self, holds):
        """Wait until something is true of this terminal; returns it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := holds(self)):
            if time.monotonic() > deadline:
                raise AssertionError(f"it was not so in time: {self.text[-3000:]!r}")
            time.sleep(0.01)
        return found

    def wait_for_text(self, text):
        return self.wait_for(lambda it: text in it.text)

    def wait_for_end(self):
        """Exit status, once the command has ended."""
        self.wait_for(lambda it: it.text is not None and it.process.poll() is not None)
        return self.process.returncode

    @property
    def rest(self):
        """What was written, without what the screen and styles are made of."""
        return OWN.sub("", self.text).replace("\r\n", "\n")

    def is_whole(self):
        """Whether the terminal is as it was: its modes, its main screen, its cursor."""
        text = self.text
        is_left = text.rfind("\x1b[?1049l") >= text.rfind("\x1b[?1049h")
        has_cursor = text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l")
        return is_left and has_cursor and termios.tcgetattr(self._terminal) == self.modes

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        os.close(self._terminal)
        os.close(self.controller)
