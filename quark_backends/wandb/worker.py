"""The mirror's own process: `python -m quark_backends.wandb.worker`.

It reads messages from what was its standard input and answers on what was its
standard output; both are null devices to everybody else in here. Signals are
left to the training process: when that is gone, the run is finished within
its timeout, and the process ends.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.wandb.frames import (
    Apply,
    Finish,
    Message,
    OpenRun,
    Reply,
)
from quark_backends.wandb.mirror import WandbMirror
from quark_core.errors import BackendError, BackendRejected, BackendUnauthorized
from quark_core.hosting.pipes import read_frame, write_frame
from quark_core.process import ProcessIdentity, current_process, is_alive, lower_priority

__all__ = ["main"]

_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
_GRACE_S = 5.0
# A type to msgspec, and to the checker one that a message may be taken for.
_ANY_MESSAGE: Any = Message


class _Worker:
    def __init__(self, source: RawIOBase, target: RawIOBase) -> None:
        self._source = source
        self._target = target
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._opening: OpenRun | None = None
        self._mirror: WandbMirror | None = None

    def run(self) -> int:
        """Serve until told to finish, or until the training process is gone."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        while True:
            message = self._messages.get()
            if message is None:
                break
            reply, last = self._serve(message)
            try:
                write_frame(self._target, reply)
            except OSError:
                # It is gone, and has not heard of this: what comes next says so.
                continue
            if last:
                return 0
        if self._mirror is not None:
            self._mirror.finish()
        return 1

    def _read(self) -> None:
        try:
            while (message := read_frame(self._source, _ANY_MESSAGE)) is not None:
                self._messages.put(message)
        except (OSError, msgspec.DecodeError) as error:
            sys.stderr.write(f"the connection broke: {error}\n")
        if self._mirror is None or not self._mirror.has_run:
            os._exit(1)  # perhaps in the middle of asking a server that does not answer
        self._messages.put(None)
        assert self._opening is not None
        timer = threading.Timer(self._opening.finish_timeout_s + _GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _serve(self, message: Message) -> tuple[Reply, bool]:
        """Answer a message; whether it was the last one."""
        try:
            if isinstance(message, OpenRun):
                return self._open(message), False
            if self._mirror is None:
                return Reply("unavailable", "no run is open"), True
            if isinstance(message, Finish):
                return Reply(text=self._mirror.finish()), True
            assert isinstance(message, Apply)
            text = self._mirror.apply(message.batches)
            return Reply(text=text, page=self._mirror.page), False
        except BackendRejected as error:
            return Reply("rejected", str(error)), False
        except BackendUnauthorized as error:
            return Reply("unauthorized", str(error)), True
        except BackendError as error:
            return Reply("unavailable", str(error)), True
        except Exception as error:  # noqa: BLE001 - W&B may raise anything
            return Reply("unavailable", f"W&B failed: {type(error).__name__}: {error}"), True

    def _open(self, message: OpenRun) -> Reply:
        known = set(sys.path)
        sys.path += [path for path in message.import_path if path and path not in known]
        folder = Path(message.folder)
        folder.mkdir(parents=True, exist_ok=True)
        other = _find_other(folder)
        if other is not None:
            return Reply(
                "unavailable", f"process {other.pid} still ends this run in W&B; the records wait"
            )
        (folder / "worker.json").write_bytes(msgspec.json.encode(current_process()))
        try:
            wandb: Any = importlib.import_module("wandb")
        except Exception as error:  # noqa: BLE001 - a wrong protobuf ends in a TypeError, for one
            return Reply(
                "unavailable",
                f"wandb is installed but cannot be imported ({type(error).__name__}: {error})",
            )
        self._opening = message
        self._mirror = WandbMirror(wandb, message)
        return Reply()


def _find_other(folder: Path) -> ProcessIdentity | None:
    """A process of an earlier training process that is not through yet."""
    try:
        found = msgspec.json.decode((folder / "worker.json").read_bytes(), type=ProcessIdentity)
    except (OSError, msgspec.DecodeError):
        return None
    return found if is_alive(found) else None


def main() -> int:
    """Serve the training process; returns the exit status."""
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    lower_priority()
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    target = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return _Worker(source, target).run()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # W&B's own handlers at exit could wait for a server for ever.
    os._exit(status)
