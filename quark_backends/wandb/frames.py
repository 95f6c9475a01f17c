"""What the training process and the mirror's own process say to each other.

The training process sends one message and reads one reply, framed as
`quark_core.hosting.pipes` says; nothing comes unasked.
"""

from __future__ import annotations

import msgspec

from quark_core.backend import Batch

__all__ = [
    "Apply",
    "Finish",
    "Message",
    "OpenRun",
    "Reply",
    "WandbOptions",
]


class WandbOptions(msgspec.Struct, frozen=True):
    """What the user chose for the mirror.

    Attributes:
        mode: online, offline or disabled; None is WANDB_MODE, else online.
        entity: W&B's user or team; None is WANDB_ENTITY, else the account's own.
        project: W&B's project; None is WANDB_PROJECT, else the run's project.
        group: Group of the W&B run; None is the run's lineage, if it has a parent.
        job_type: Its job type.
        tags: Tags besides those of the run.
        strict_names: Whether names of metrics are changed so that W&B's table sorts by them.
        layers: How many layers, and how many parameters, have series; None is all.
    """

    mode: str | None = None
    entity: str | None = None
    project: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    strict_names: bool = False
    layers: int | None = 50


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
