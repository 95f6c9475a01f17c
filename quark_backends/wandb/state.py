"""What the mirror remembers on this machine: one file, `state.json` in its folder.

It is not synced: what a power cut takes is found in W&B's own file again.
"""

from __future__ import annotations

from typing import Any

import msgspec

STATE_NAME = "state.json"


class WriterHead(msgspec.Struct):
    """How far a writer is mirrored: its newest batch, and a hash of that."""

    number: int = -1
    digest: str = ""


class WandbFile(msgspec.Struct):
    """W&B's file of one process of the mirror.

    Attributes:
        path: The file.
        offset: Where what is not acknowledged begins.
        synced: Whether W&B's server had all of it in the end, as far as is known.
    """

    path: str
    offset: int = 0
    synced: bool = False


class WandbState(msgspec.Struct):
    """All that a later process of the mirror must know.

    Attributes:
        wandb_id: Id of the W&B run, or "" before there was one.
        url: Address of its page, or "" where W&B has only been offline.
        entity: W&B's user or team, or "" likewise.
        attempt: Newest attempt that was seen.
        start: Data of that attempt's start.
        config: Values of the newest configuration.
        tags: Tags that came later.
        status: Newest attempt's status; running until it has another one.
        signal: Signal that ended it, such as SIGTERM, or "".
        exit_code: Status with which its process ended, where that is known.
        ending: Why it broke off, or "".
        writers: Writers by their ids.
        file: The newest process's file, or None.
        names: Name -> key in W&B, where that is another.
        counts: Events by the name of their curve.
        levels: Alert's rule -> highest severity that W&B was told of.
        layers: Layers that have curves, in the order they were chosen.
        parameters: Likewise parameters.
        left_out: Kind -> records that have no curve.
        steps: What W&B's own `_step` is: `own`, the run's steps; `kept`, those until they
            no longer ascended; `counted`, the number of the row. "" before that is known.
        sent_step: The newest `_step` of a row that W&B has.
        has_steps: Whether a metric has come with a step.
        newest_steps: The lowest step of each of the newest two batches of metrics.
        metric_keys: Keys of metrics whose axis is W&B's own.
        held: What `StepRows` holds.
        used: Artifacts of others that the run has used.
        started_us: When the run began, or 0 where that is not known.
        best: Value and step of the objective's points that were better than all before them,
            the newest ones.
        best_of: The objective that they are of, and its direction.
        best_attempt: The newest attempt that they are of.
    """

    wandb_id: str = ""
    url: str = ""
    entity: str = ""
    attempt: int = -1
    start: dict[str, Any] = {}
    config: dict[str, Any] = {}
    tags: list[str] = []
    status: str = "running"
    signal: str = ""
    exit_code: int | None = None
    ending: str = ""
    writers: dict[str, WriterHead] = {}
    file: WandbFile | None = None
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    levels: dict[str, int] = {}
    layers: list[str] = []
    parameters: list[str] = []
    left_out: dict[str, int] = {}
    steps: str = ""
    sent_step: int = -1
    has_steps: bool = False
    newest_steps: list[int] = []
    metric_keys: list[str] = []
    held: bytes = b""
    used: list[str] = []
    started_us: int = 0
    best: list[tuple[float, int | None]] = []
    best_of: str = ""
    best_attempt: int = 0
