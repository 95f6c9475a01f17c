"""What people with curl send: a run to start, tags, log lines, a status, a heartbeat.

Requests and replies of the protocol's typed control routes. Each becomes a
batch of lifecycle or event records with a writer of its own, and goes through
the same ingest as the batches of a training.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "HeartbeatRequest",
    "LogRequest",
    "StartRequest",
    "StatusRequest",
    "TagRequest",
]

_Label = Annotated[str, Meta(min_length=1, max_length=250)]
_Index = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs`: start a run, with its configuration.

    Attributes:
        project: Its project.
        run_id: Its id; a random one where it is left out.
        name, notes: For people.
        tags: As in `quark.start_run`.
        config: JSON values; what looks like a secret is redacted.
        parent_run_id: The run of the workspace that it descends from.
        store: Label of the project store that it belongs to.
    """

    project: _Label
    run_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    name: _Label | None = None
    notes: Annotated[str, Meta(max_length=100_000)] | None = None
    tags: Annotated[list[_Label], Meta(max_length=1000)] = []
    config: dict[str, Any] = {}
    parent_run_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    store: _Label = "default"


class TagRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/tags`."""

    tags: Annotated[list[_Label], Meta(min_length=1, max_length=1000)]


class LogRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs/{run_id}/logs`: one log line.

    Attributes:
        message: The line.
        identifier: How grave it is.
        event_type: What it is filed under.
        step, epoch: Where the training was.
        payload: More, as JSON values.
    """

    message: Annotated[str, Meta(max_length=1_000_000)]
    identifier: Literal["Info", "Warning", "Error"] = "Info"
    event_type: Annotated[str, Meta(min_length=1, max_length=250)] = "user_log"
    step: _Index | None = None
    epoch: _Index | None = None
    payload: dict[str, Any] | None = None


class StatusRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/status`: the run has ended."""

    status: Literal["completed", "failed", "interrupted"]


class HeartbeatRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/heartbeat`: the run lives; it counts as lost a minute after one."""
