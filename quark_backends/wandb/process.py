"""The mirror's own process, as the training process sees it, and what the two say to each other.

The training process sends one message and reads one reply, framed as
`quark_core.hosting.protocol` says; nothing comes unasked.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quark_backends.wandb.options import WandbOptions
from quark_core.api import Batch, ChildGone, ChildProcess


class OpenRun(msgspec.Struct, frozen=True, tag=True):
    """Get ready to mirror a run; W&B itself is asked at the first batch.

    Attributes:
        run_id: The run.
        project: Its project.
        folder: Where the mirror keeps its files.
        options: What the user chose.
        import_path: `sys.path` of the training process.
        finish_timeout_s: How long the end may take.
    """

    run_id: str
    project: str
    folder: str
    options: WandbOptions
    import_path: tuple[str, ...]
    finish_timeout_s: float


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Mirror batches; the reply comes when W&B's own file on this machine has them."""

    batches: tuple[Batch, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End the W&B run as the mirrored run ended, and end the process."""


class Reply(msgspec.Struct, frozen=True):
    """What became of a message.

    Attributes:
        outcome: ok, rejected, unavailable or unauthorized.
        text: Why, or with ok what the user should know.
        page: Address of the W&B run's page, where it has one.
    """

    outcome: str = "ok"
    text: str = ""
    page: str = ""


Message = OpenRun | Apply | Finish


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
_HOST = "https://api.wandb.ai"
# Nothing goes to the user's home.
_PLACED = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR")


class WorkerProcess:
    """A process that mirrors one run; one request at a time, from any thread.

    Args:
        folder: Where it may keep files; `worker.log` is what it prints.
    """

    def __init__(self, folder: Path) -> None:
        self._child = ChildProcess(
            _MODULE,
            "the W&B mirror",
            folder / "worker.log",
            _make_environment(folder),
            finishes=True,
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
    # Else W&B would believe a file `wandb/settings` in the working directory, which may be
    # anybody's, and show that host the user's key.
    environment.setdefault("WANDB_BASE_URL", _find_own_host(environment))
    return environment


def _find_own_host(environment: Mapping[str, str]) -> str:
    """The host of the user's own settings of W&B, or its default."""
    place = environment.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.join(place, "settings"))
        return parser.get("default", "base_url", fallback=_HOST) or _HOST
    except (configparser.Error, OSError, UnicodeDecodeError):
        return _HOST
