"""A run of Quark's as the segments among its artifacts have it: exactly as it was written.

What is known of the run is put together out of its lifecycle records.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quark_backends.mirror_records import change_belonging
from quark_backends.mirror_state import make_file_name
from quark_backends.mlflow.artifacts import RECORDS
from quark_backends.mlflow.client import Server
from quark_backends.mlflow.outbox import read_segment
from quark_backends.mlflow.points import TimeRange, make_points, name_key
from quark_core.api import (
    Batch,
    ConfigSnapshot,
    EnvironmentSnapshot,
    LifecycleRecord,
    MetricRecord,
    ProcessIdentity,
    ProjectRecord,
    RunEnding,
    RunRecord,
    StoredRun,
    StreamRecord,
    find_loss,
    format_time,
    hide_superseded,
    renew_process,
    split_name,
)

if TYPE_CHECKING:
    from quark_core.api import Columns

# A run of Quark's as the segments among its artifacts have it: exactly as it was written.
#
# What is known of the run is put together out of its lifecycle records.

_Identity = tuple[int, int, float | None]


class SegmentCopies:
    """Copies of segments on this machine, made anew where they have grown."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._sizes: dict[Path, int] = {}

    def fetch(self, server: Server, mlflow_run_id: str) -> list[Path]:
        """The segments of a run as they are now.

        Raises:
            BackendUnavailable: The artifacts cannot be read.
        """
        paths = []
        for file in server.list_files(mlflow_run_id, RECORDS):
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="quark-mlflow-"))
                # Whoever opens a run only to look at it never says that they are done.
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            path = (
                self._folder / make_file_name(mlflow_run_id, has_dots=False) / Path(file.path).name
            )
            if not file.size_bytes or self._sizes.get(path) != file.size_bytes:
                path.parent.mkdir(parents=True, exist_ok=True)
                server.download(mlflow_run_id, file.path, path)
                self._sizes[path] = file.size_bytes
            paths.append(path)
        return paths

    def remove(self) -> None:
        """Delete the copies."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        self._sizes.clear()


class OwnRun:
    """One run, out of its segments.

    Args:
        run_id: The run.
        paths: Its segments.
    """

    def __init__(self, run_id: str, paths: Sequence[Path]) -> None:
        self.run_id = run_id
        self._paths = paths
        self._starts: dict[str, int] = {}
        self._ranks: dict[str, tuple[int, int]] = {}
        lifecycle = []
        for batch in self._scan():
            if batch.writer_id not in self._starts:
                records = batch.to_records()
                self._starts[batch.writer_id] = min(record.time_us for record in records)
                self._ranks[batch.writer_id] = batch.attempt, batch.rank
            if batch.kind == LifecycleRecord.KIND:
                lifecycle.append(batch)
        ordered = sorted(lifecycle, key=self._position)
        records = [record for batch in ordered for record in batch.to_records()]
        self.story = RunStory.tell(r for r in records if isinstance(r, LifecycleRecord))

    def read(self, kind: str) -> Columns:
        """Every row of one kind that no later attempt has hidden, in persistence order."""
        return hide_superseded(self.read_all(kind), self.story.from_steps)

    def read_all(self, kind: str) -> Columns:
        """Every row of one kind, in persistence order."""
        from quark_core.api import Columns

        by_writer: dict[str, list[Columns]] = {}
        for batch in self._list(kind):
            origin = {
                "run_id": self.run_id,
                "writer_id": batch.writer_id,
                "attempt": batch.attempt,
                "rank": batch.rank,
            }
            columns = Columns.from_body(batch.decoded, origin)
            by_writer.setdefault(batch.writer_id, []).append(columns)
        writers = sorted(by_writer, key=self._order)
        parts = [Columns.concatenate(kind, by_writer[one]).order_by_sequence() for one in writers]
        return Columns.concatenate(kind, parts)

    def list_records(self, kind: str) -> Iterator[StreamRecord]:
        """Records of one kind, batch by batch."""
        for batch in self._list(kind):
            yield from batch.to_records()

    def count_points(self, names: Mapping[str, str]) -> dict[str, Counter[_Identity]]:
        """Name in MLflow -> the points that the segments account for.

        Args:
            names: `name_key` of a metric -> its name in MLflow.
        """
        found: dict[str, Counter[_Identity]] = {}
        recent: dict[str, list[TimeRange]] = {}
        for batch in self._list(MetricRecord.KIND):
            records = [r for r in batch.to_records() if isinstance(r, MetricRecord)]
            records = [record for record in records if name_key(record) in names]
            points, ranges = make_points(records, names, recent.get(batch.writer_id, ()))
            recent[batch.writer_id] = ranges
            for point in points:
                at = _identify(point.timestamp_ms, point.step, point.value)
                found.setdefault(point.name, Counter())[at] += 1
        return found

    def continue_from(self, columns: Columns, extra: Sequence[tuple[str, int, Any]]) -> Columns:
        """Rows and the points that the segments do not have, in the order of their times.

        Args:
            columns: Every metric of the segments.
            extra: Key, rank, and timestamp in ms, step and value of each point.
        """
        from quark_core.api import Columns

        if not extra:
            return columns
        epochs = {
            key
            for key, step, epoch in zip(
                columns["metric_key"].tolist(),
                columns["step"].tolist(),
                columns["epoch"].tolist(),
                strict=True,
            )
            if step < 0 <= epoch
        }
        last = max(columns["sequence"].tolist(), default=-1)
        made = []
        for number, (key, rank, (time_ms, step, value)) in enumerate(
            sorted(extra, key=lambda one: one[2][:2])
        ):
            attempt = self.story.find_attempt(time_ms)
            # Nobody may take it for a record of the run's writers, by its number.
            origin = (self.run_id, f"mlflow-{attempt}-{rank}", attempt, rank)
            is_epoch = key in epochs
            made.append(
                MetricRecord(
                    *origin,
                    last + 1 + number,
                    time_ms * 1000,
                    key,
                    *split_name(key),
                    value,
                    None if is_epoch or step < 0 else step,
                    step if is_epoch else None,
                )
            )
        parts = [columns, Columns.from_records(MetricRecord.KIND, made)]
        joined = Columns.concatenate(MetricRecord.KIND, parts)
        import numpy as np

        # What a resumed run repeats is told by the point that it logged first.
        time_ms = joined["time_us"] // 1000
        order = np.lexsort((joined["step"], time_ms, joined["rank"], joined["attempt"]))
        return joined.take(order)

    def _list(self, kind: str) -> list[Batch]:
        batches = [batch for batch in self._scan() if batch.kind == kind]
        return sorted(batches, key=self._position)

    def _position(self, batch: Batch) -> tuple[Any, ...]:
        return *self._order(batch.writer_id), batch.number

    def _order(self, writer_id: str) -> tuple[Any, ...]:
        return *self._ranks[writer_id], self._starts[writer_id], writer_id

    def _scan(self) -> Iterator[Batch]:
        """Every batch once, however often it was sent."""
        seen: set[tuple[str, int]] = set()
        for path in self._paths:
            for batch in read_segment(path, self.run_id):
                if (batch.writer_id, batch.number) not in seen:
                    seen.add((batch.writer_id, batch.number))
                    yield batch


def find_extra(
    points: Sequence[tuple[int, int, float]], known: Counter[_Identity]
) -> list[tuple[int, int, float]]:
    """Those of MLflow's points that segments do not account for."""
    left = known.copy()
    extra = []
    for time_ms, step, value in points:
        at = _identify(time_ms, step, value)
        if left[at] > 0:
            left[at] -= 1
        else:
            extra.append((time_ms, step, value))
    return extra


def _identify(time_ms: int, step: int, value: float) -> _Identity:
    return time_ms, step, None if value != value else value


@dataclass(slots=True)
class RunStory:
    """What is known of a run after some of its lifecycle records.

    Attributes:
        from_steps: Attempt -> the step that it was resumed from.
        starts: Attempt -> when it was started.
        heartbeat_us: When it was last heard of.
    """

    from_steps: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
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
    _exit_code: int | None = None
    _ending: RunEnding | None = None
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
            self.starts.setdefault(record.attempt, record.time_us)
            if record.attempt < self._attempt:
                return
            if self._attempt < 0:
                self._created_us = record.time_us
                self._tags = set(data["run"]["tags"])
            if data.get("from_step") is not None:
                self.from_steps[record.attempt] = int(data["from_step"])
            self._attempt, self._status, self._ended_us = record.attempt, "running", None
            self._exit_code = self._ending = None
            self._run, self._project = {**self._run, **data["run"]}, dict(data["project"])
            self._process = data.get("process")
        elif record.action == "tag":
            self._tags.add(data["tag"])
        elif record.action in ("group", "fields", "edit"):
            self._run.update(change_belonging(self._run, record))
        elif record.attempt != self._attempt:
            return
        elif record.action == "config":
            self._config = data
        elif record.action == "environment":
            self._environment = data
        elif record.action == "heartbeat" and self._process is not None:
            self._process = renew_process(self._process, data)
        elif record.action == "status":
            self.end(data["status"], record.time_us)
            self._exit_code = data.get("exit_code")
            self._ending = RunEnding.from_data(data.get("ending"))
        if record.action != "heartbeat":
            self._updated_us = max(self._updated_us, record.time_us)

    def end(self, status: str, at_us: int) -> None:
        """The run has ended."""
        self._status, self._ended_us = status, at_us

    @property
    def attempt(self) -> int:
        """The newest attempt; -1 where no start is known."""
        return self._attempt

    def find_attempt(self, time_ms: int) -> int:
        """The attempt that was the newest at a time."""
        begun = (one for one, at_us in self.starts.items() if at_us // 1000 <= time_ms)
        return max(begun, default=max(0, min(self.starts, default=0)))

    @property
    def is_running(self) -> bool:
        """Whether no end is known."""
        return self._status == "running"

    def to_stored(self, run_id: str) -> StoredRun:
        """The run."""
        process = None
        if self._process is not None:
            process = msgspec.convert(self._process, ProcessIdentity)
        loss = find_loss(self._status, process, self.heartbeat_us)
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
                groups=tuple(run.get("groups") or ()),
            ),
            state=self._status if loss is None else "lost",
            config=None if self._config is None else ConfigSnapshot.from_data(self._config),
            environment=(
                None
                if self._environment is None
                else EnvironmentSnapshot.from_data(self._environment)
            ),
            heartbeat_at=format_time(self.heartbeat_us),
            lost_reason=None if loss is None else loss.message,
            exit_code=self._exit_code,
            ending=loss or self._ending,
            fields=run.get("fields") or {},
        )
