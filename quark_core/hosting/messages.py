"""What a process and the helper that hosts one of its backends say to each other.

The process sends one message and reads one reply; nothing comes unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quark_core.backend import Batch
from quark_core.process import ProcessIdentity

__all__ = [
    "CloseBackend",
    "Message",
    "OpenBackend",
    "PutPayload",
    "ReadPayload",
    "Reply",
    "WriteBatches",
]


class OpenBackend(msgspec.Struct, frozen=True, tag=True):
    """Open the backend.

    Attributes:
        name: Name of the backend.
        opener: What opens it, as `module:function`.
        capabilities: What its definition declares.
        config: The fields of its `BackendConfig`, paths as texts.
        parent: The process that asks.
        folder: Where helpers of this run's mirror of this name note that they live.
        import_path: `sys.path` of that process.
        log_level: Messages of lower levels are not passed on.
    """

    name: str
    opener: str
    capabilities: tuple[str, ...]
    config: Mapping[str, Any]
    parent: ProcessIdentity
    folder: str
    import_path: tuple[str, ...]
    log_level: int


class WriteBatches(msgspec.Struct, frozen=True, tag=True):
    """Store batches, as one."""

    batches: tuple[Batch, ...]


class PutPayload(msgspec.Struct, frozen=True, tag=True):
    """Keep a payload, which lies in a file."""

    run_id: str
    sha256: str
    size_bytes: int
    path: str


class ReadPayload(msgspec.Struct, frozen=True, tag=True):
    """Copy a payload that the backend has into a new file."""

    run_id: str
    sha256: str
    into: str


class CloseBackend(msgspec.Struct, frozen=True, tag=True):
    """Close the backend, and end the process."""


class Reply(msgspec.Struct, frozen=True):
    """What became of a message.

    Attributes:
        outcome: ok, or the name of the error that was raised.
        text: What the error says.
        retry_after_s: When to come again, where the error says so.
        said: Level and text of what was logged meanwhile.
    """

    outcome: str = "ok"
    text: str = ""
    retry_after_s: float | None = None
    said: tuple[tuple[int, str], ...] = ()


Message = OpenBackend | WriteBatches | PutPayload | ReadPayload | CloseBackend
