"""The mirror's own process, as the training process sees it."""

from __future__ import annotations

import os
from pathlib import Path

from quark_backends.wandb.frames import Message, Reply
from quark_core.hosting.child_process import ChildGone, ChildProcess

__all__ = ["WorkerGone", "WorkerProcess"]

WorkerGone = ChildGone

_MODULE = "quark_backends.wandb.worker"
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


class WorkerProcess:
    """A process that mirrors one run; one request at a time, from any thread.

    Args:
        folder: Where it may keep files; `worker.log` is what it prints.
    """

    def __init__(self, folder: Path) -> None:
        self._child = ChildProcess(
            _MODULE, "the W&B mirror", folder / "worker.log", _make_environment(folder)
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def request(self, message: Message, timeout_s: float) -> Reply:
        """Send a message and wait for the reply.

        Raises:
            WorkerGone: The process ended meanwhile, or was killed after the timeout.
        """
        return self._child.request(message, Reply, timeout_s)

    def end(self, *, wait_s: float = 5.0) -> None:
        """Give the process up: it ends by itself in this time or is killed."""
        self._child.end(wait_s=wait_s)


def _make_environment(folder: Path) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if name not in _DROPPED}
    for name in _PLACED:
        environment.setdefault(name, str(folder))
    return environment
