"""The mirror's own process: `python -m quark_backends.wandb.worker`.

When the training process is gone, the run is finished within its timeout, and
this process ends.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import sys
import tempfile
import threading
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.wandb.backend import (
    Apply,
    Finish,
    Message,
    OpenRun,
    Reply,
)
from quark_backends.wandb.mirror import WandbMirror
from quark_core.api import (
    BackendError,
    BackendRejected,
    BackendUnauthorized,
    ProcessIdentity,
    current_process,
    is_alive,
    read_frame,
    serve_parent,
    write_frame,
)

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
        self._scratch: Path | None = None
        self._cleaning = threading.Lock()

    def run(self) -> int:
        """Serve until told to finish, or until the training process is gone."""
        status = self._answer()
        self._clean()
        return status

    def _clean(self) -> None:
        """Remove what W&B would in its handlers at exit, which are not run."""
        with self._cleaning:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _answer(self) -> int:
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
            self._mirror.finish(is_last=False)
        return 1

    def _read(self) -> None:
        try:
            while (message := read_frame(self._source, _ANY_MESSAGE)) is not None:
                self._messages.put(message)
        except (OSError, msgspec.DecodeError) as error:
            sys.stderr.write(f"the connection broke: {error}\n")
        if self._mirror is None or not self._mirror.has_run:
            self._clean()
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
        sys.path += [path for path in message.import_path if path and path not in sys.path]
        folder = Path(message.folder)
        folder.mkdir(parents=True, exist_ok=True)
        other = _find_other(folder)
        if other is not None:
            return Reply(
                "unavailable", f"process {other.pid} still ends this run in W&B; the records wait"
            )
        (folder / "worker.json").write_bytes(msgspec.json.encode(current_process()))
        self._scratch = folder / "scratch"
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        tempfile.tempdir = str(self._scratch)
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


if __name__ == "__main__":
    serve_parent(lambda source, target: _Worker(source, target).run())
