"""Batches as a run's stream would make them, without a session."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quark_core.backend import Batch
from quark_core.codec import encode_records
from quark_core.json_object import JsonObject
from quark_core.names import split_name
from quark_core.process import current_process
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord, StreamRecord
from quark_core.testing.samples import FIRST_TIME_US, make_samples

__all__ = ["FIRST_TIME_US", "BatchMaker"]


class BatchMaker:
    """One writer's stream into a run, batch by batch, with numbers and sequences kept.

    Args:
        run_id: The run.
        attempt: Attempt of the writer.
        rank: Its rank.
        writer_id: Its id; each writer of a run needs one of its own.
        started_us: Time of its first record; each further one is a microsecond later.
    """

    def __init__(
        self,
        run_id: str,
        *,
        attempt: int = 0,
        rank: int = 0,
        writer_id: str = "writer0",
        started_us: int = FIRST_TIME_US,
    ) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self.writer_id = writer_id
        self._times = itertools.count(started_us)
        self._numbers = itertools.count()
        self._sequences: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def start(
        self,
        *,
        project: str = "conformance",
        tags: Sequence[str] = (),
        from_step: int | None = None,
    ) -> Batch:
        """The start of an attempt, with a configuration."""
        data = {
            "project": {"id": f"p-{project}", "name": project, "root_path": "/nowhere"},
            "run": {
                "name": None,
                "notes": None,
                "parent_run_id": None,
                "lineage_root_run_id": self.run_id,
                "run_path": f"/nowhere/{self.run_id}",
                "git_commit": None,
                "strict_mode": False,
                "tags": list(tags),
            },
            "process": msgspec.to_builtins(current_process()),
            **({} if from_step is None else {"from_step": from_step}),
        }
        config = {"values": {"lr": 0.1}, "notes": []}
        return self.lifecycle(("start", data), ("config", config))

    def lifecycle(self, *actions: tuple[str, Mapping[str, Any]]) -> Batch:
        """One batch of lifecycle records."""
        return self.batch(
            [
                LifecycleRecord(*self._head("lifecycle"), action, JsonObject(data))
                for action, data in actions
            ]
        )

    def metrics(self, *values: tuple[str, int | None, float], **fields: Any) -> Batch:
        """One batch of metrics, each given as (key, step, value); other fields for all of them."""
        records = []
        for key, step, value in values:
            named = {"step": step, "epoch": 0 if step is None else None, **fields}
            records.append(
                MetricRecord(*self._head("metric"), key, *split_name(key), value, **named)
            )
        return self.batch(records)

    def events(self, *types: str, severity: str = "info", **fields: Any) -> Batch:
        """One batch of events of these types."""
        return self.batch(
            [EventRecord(*self._head("event"), name, severity, **fields) for name in types]
        )

    def samples(self, kind: str) -> Batch:
        """One batch of sample records of any kind; a second one of a kind would repeat them."""
        return self.batch(
            make_samples(
                kind, self.run_id, writer_id=self.writer_id, attempt=self.attempt, rank=self.rank
            )
        )

    def batch(self, records: Sequence[StreamRecord]) -> Batch:
        """One batch of any records of one kind, under the next number."""
        return Batch(
            self.run_id,
            self.writer_id,
            self.attempt,
            self.rank,
            next(self._numbers),
            records[0].KIND,
            len(records),
            encode_records(records),
        )

    def _head(self, kind: str) -> tuple[str, str, int, int, int, int]:
        sequence = next(self._sequences[kind])
        return (
            self.run_id,
            self.writer_id,
            self.attempt,
            self.rank,
            sequence,
            next(self._times),
        )
