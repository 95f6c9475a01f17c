"""The mirror's own process, as the training process sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import cast

from quark_backends.wandb.frames import Message, Reply, read_frame, write_frame
from quark_core.forking import importing

__all__ = ["WorkerGone", "WorkerProcess"]

_MODULE = "quark_backends.wandb.worker"
_KILL_WAIT_S = 5.0
# What a session of its own is on Windows.
_NEW_GROUP = int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0))
# Of another run of the user's, whose service and identity are not ours.
_DROPPED = (
    "WANDB_SERVICE",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "WANDB_NAME",
    "WANDB_NOTES",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_LAUNCH",
)
# Nothing goes to the user's home.
_PLACED = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR")


class WorkerGone(Exception):
    """The process ended, or was ended because it took too long."""


class WorkerProcess:
    """A process that mirrors one run; one request at a time, from any thread.

    It has a session of its own, so Ctrl-C in the terminal does not reach it,
    and it ends when this process does.

    Args:
        folder: Where it may keep files; `worker.log` is what it prints.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not sys.executable:
            raise WorkerGone("Python's own program is not known (sys.executable is empty)")
        with (folder / "worker.log").open("ab") as log, importing():
            # A fork in the middle of this would keep our ends of the pipes open.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=_make_environment(folder),
                start_new_session=True,
                creationflags=_NEW_GROUP,
            )
            self._sender = cast(RawIOBase, self._process.stdin)
            self._receiver = cast(RawIOBase, self._process.stdout)
            _alive.add(self)
        self._late = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def request(self, message: Message, timeout_s: float) -> Reply:
        """Send a message and wait for the reply.

        Raises:
            WorkerGone: The process ended meanwhile, or was killed after the timeout.
        """
        with self._deadline(timeout_s):
            try:
                write_frame(self._sender, message)
                reply = read_frame(self._receiver, Reply)
            except (OSError, ValueError) as error:
                raise self._explain(timeout_s) from error
        if reply is None:
            raise self._explain(timeout_s)
        return reply

    def end(self, *, wait_s: float = _KILL_WAIT_S) -> None:
        """Give the process up: it ends by itself in this time or is killed."""
        _alive.discard(self)
        with contextlib.suppress(OSError):
            self._sender.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._kill()
        with contextlib.suppress(OSError):
            self._receiver.close()

    def forget(self) -> None:
        """Close a forked child's copies of the pipes, which would hide our end from the process."""
        for stream in (self._sender, self._receiver):
            with contextlib.suppress(OSError):
                stream.close()
        # The process is not this one's child: nobody here may wait for it.
        self._process.returncode = 0

    @contextmanager
    def _deadline(self, timeout_s: float) -> Iterator[None]:
        timer = threading.Timer(timeout_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self._process.kill()

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)

    def _explain(self, timeout_s: float) -> WorkerGone:
        late = self._late
        self.end(wait_s=1.0)
        if late:
            return WorkerGone(f"the process of the W&B mirror did not answer in {timeout_s:g} s")
        code = self._process.returncode
        return WorkerGone(f"the process of the W&B mirror ended (exit status {code})")


def _make_environment(folder: Path) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if name not in _DROPPED}
    for name in _PLACED:
        environment.setdefault(name, str(folder))
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


_alive: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _after_in_child() -> None:
    for process in list(_alive):
        process.forget()
    _alive.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_in_child)
