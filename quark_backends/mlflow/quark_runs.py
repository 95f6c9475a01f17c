"""A run of Quark's as the segments among its artifacts have it: exactly as it was written.

What is known of the run is put together out of its lifecycle records.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_backends.mirror_state import make_file_name
from quark_backends.mlflow.artifacts import RECORDS
from quark_backends.mlflow.client import Server
from quark_backends.mlflow.outbox import read_segment
from quark_backends.mlflow.points import TimeRange, make_points, name_key
from quark_core.api import (
    Batch,
    FingerprintRecord,
    JsonObject,
    LifecycleRecord,
    MetricRecord,
    Query,
    StoredRun,
    StreamRecord,
    describe_run,
    encode_records,
    select_rows,
    split_name,
)

if TYPE_CHECKING:
    from quark_core.api import Columns

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
        # Everything is said of a run by its lifecycle, and its sources by a fingerprint.
        self._story = self._list(LifecycleRecord.KIND, FingerprintRecord.KIND)
        starts = [
            record
            for record in self.list_records(LifecycleRecord.KIND)
            if isinstance(record, LifecycleRecord) and record.action == "start"
        ]
        self._starts = sorted(starts, key=lambda record: (record.attempt, record.time_us))

    @property
    def attempt(self) -> int:
        """The newest attempt; -1 where no start is known."""
        return self._starts[-1].attempt if self._starts else -1

    @property
    def is_running(self) -> bool:
        """Whether no end is known."""
        return self.attempt < 0 or describe_run(self._story).run.status == "running"

    @property
    def from_steps(self) -> dict[int, int]:
        """Attempt -> the step that it was resumed from."""
        steps = {start.attempt: start.data for start in self._starts if start.data}
        return {
            attempt: int(data["from_step"])
            for attempt, data in steps.items()
            if data.get("from_step") is not None
        }

    def describe(self, heartbeat_us: int | None, end: tuple[str, int] | None) -> StoredRun:
        """The run, and what only MLflow knows of it.

        Args:
            heartbeat_us: When it was last heard of.
            end: Status and time of an end that the segments may not have.
        """
        stored = describe_run(self._story)
        known: list[LifecycleRecord] = []
        origin = (self.run_id, "mlflow", self.attempt, 0)
        if heartbeat_us is not None:
            known.append(LifecycleRecord(*origin, 0, heartbeat_us, "heartbeat"))
        if end is not None and stored.run.status == "running":
            data = JsonObject({"status": end[0]})
            known.append(LifecycleRecord(*origin, 1, end[1], "status", data))
        if known:
            body = encode_records(known)
            told = Batch(*origin, 0, LifecycleRecord.KIND, len(known), body)
            stored = describe_run([*self._story, told])
        return stored

    def read_all(self, kind: str) -> Columns:
        """Every row of one kind, in persistence order."""
        every = Query(all_attempts=True, include_non_finite=True)
        return select_rows([*self._story, *self._list(kind)], kind, every)

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
            attempt = self._find_attempt(time_ms)
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

    def _find_attempt(self, time_ms: int) -> int:
        """The attempt that was the newest at a time."""
        begun = (start.attempt for start in self._starts if start.time_us // 1000 <= time_ms)
        return max(begun, default=self._starts[0].attempt if self._starts else 0)

    def _list(self, *kinds: str) -> list[Batch]:
        """The batches of some kinds in the order of their numbers, however often they were sent."""
        found: dict[tuple[str, int], Batch] = {}
        for path in self._paths:
            for batch in read_segment(path, self.run_id):
                if batch.kind in kinds:
                    found.setdefault((batch.writer_id, batch.number), batch)
        return sorted(found.values(), key=lambda batch: batch.number)


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
