"""A run as its lifecycle records tell it, put together when they are read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quark_core.backend import StoredRun
from quark_core.json_object import JsonObject
from quark_core.liveness import find_lost_reason
from quark_core.process import ProcessIdentity
from quark_core.records import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    LifecycleRecord,
    ProjectRecord,
    RunRecord,
    format_time,
)

__all__ = ["RunStory"]


@dataclass(slots=True)
class RunStory:
    """What is known of a run after some of its lifecycle records.

    Attributes:
        from_steps: Attempt -> the step that it was resumed from.
        heartbeat_us: When it was last heard of.
    """

    from_steps: dict[int, int] = field(default_factory=dict)
    heartbeat_us: int = 0
    _run: dict[str, Any] = field(default_factory=dict)
    _project: dict[str, Any] = field(default_factory=dict)
    _process: dict[str, Any] | None = None
    _tags: set[str] = field(default_factory=set)
    _attempt: int = -1
    _status: str = "running"
    _created_us: int = 0
    _updated_us: int = 0
    _ended_us: int | None = None
    _config: Mapping[str, Any] | None = None
    _environment: Mapping[str, Any] | None = None

    @classmethod
    def tell(cls, records: Iterable[LifecycleRecord]) -> RunStory:
        """The story that records tell, in persistence order."""
        story = cls()
        for record in records:
            story.apply(record)
        return story

    def apply(self, record: LifecycleRecord) -> None:
        """Add one record; what an older attempt says of itself changes nothing."""
        data: Mapping[str, Any] = record.data or {}
        self.heartbeat_us = max(self.heartbeat_us, record.time_us)
        if record.action == "start":
            if record.attempt < self._attempt:
                return
            if self._attempt < 0:
                self._created_us = record.time_us
                self._tags = set(data["run"]["tags"])
            if data.get("from_step") is not None:
                self.from_steps[record.attempt] = int(data["from_step"])
            self._attempt, self._status, self._ended_us = record.attempt, "running", None
            self._run, self._project = dict(data["run"]), dict(data["project"])
            self._process = data.get("process")
        elif record.action == "tag":
            self._tags.add(data["tag"])
        elif record.attempt != self._attempt:
            return
        elif record.action == "config":
            self._config = data
        elif record.action == "environment":
            self._environment = data
        elif record.action == "status":
            self.end(data["status"], record.time_us)
        if record.action != "heartbeat":
            self._updated_us = max(self._updated_us, record.time_us)

    def end(self, status: str, at_us: int) -> None:
        """The run has ended."""
        self._status, self._ended_us = status, at_us

    @property
    def attempt(self) -> int:
        """The newest attempt; -1 where no start is known."""
        return self._attempt

    @property
    def is_running(self) -> bool:
        """Whether no end is known."""
        return self._status == "running"

    def to_stored(self, run_id: str) -> StoredRun:
        """The run."""
        process = None
        if self._process is not None:
            process = msgspec.convert(self._process, ProcessIdentity)
        lost_reason = find_lost_reason(self._status, process, self.heartbeat_us)
        created_at, updated_at = format_time(self._created_us), format_time(self._updated_us)
        run, project = self._run, self._project
        return StoredRun(
            project=ProjectRecord(
                project["id"], project["name"], project["root_path"], created_at, updated_at
            ),
            run=RunRecord(
                id=run_id,
                project_id=project["id"],
                project_name=project["name"],
                status=self._status,
                parent_run_id=run.get("parent_run_id"),
                lineage_root_run_id=run.get("lineage_root_run_id"),
                resume_count=self._attempt,
                run_path=run["run_path"],
                git_commit=run.get("git_commit"),
                strict_mode=bool(run.get("strict_mode")),
                tags=tuple(sorted(self._tags)),
                attempt=self._attempt,
                name=run.get("name"),
                notes=run.get("notes"),
                created_at=created_at,
                updated_at=updated_at,
                ended_at=None if self._ended_us is None else format_time(self._ended_us),
            ),
            state=self._status if lost_reason is None else "lost",
            config=None if self._config is None else ConfigSnapshot.from_data(self._config),
            environment=(
                None
                if self._environment is None
                else EnvironmentSnapshot(JsonObject(self._environment))
            ),
            heartbeat_at=format_time(self.heartbeat_us),
            lost_reason=lost_reason,
        )
