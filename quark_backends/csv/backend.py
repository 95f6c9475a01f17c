"""The CSV mirror as a backend.

Files of a run:

    metrics_long.csv  one row per value, append-only: the truth
    metrics.csv       one row per step, one column per metric; derived
    events.csv        one row per event, append-only
    config.json       the newest attempt's configuration
    run.json          project, run and status
    state.json        how far the append-only files are acknowledged

They lie in `csv/` of the run's directory, or in `DIR/<run id>/` for
`csv:DIR` (a relative DIR counts from storage_dir).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from quark_backends.csv.files import (
    AppendOnlyTable,
    FolderClaim,
    MirrorState,
    WriterState,
    write_atomically,
)
from quark_backends.csv.reader import CsvReader
from quark_backends.csv.run_file import RunFile
from quark_backends.csv.wide import write_wide_table
from quark_core.backend import BackendConfig, Batch, StoredRun
from quark_core.errors import BackendRejected, BackendUnavailable, SchemaValidationError
from quark_core.json_object import encode_json
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord, format_time

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.query import Query

__all__ = ["EVENT_HEADER", "METRIC_HEADER", "CsvBackend"]

METRIC_HEADER = (
    "step",
    "epoch",
    "key",
    "value",
    "timestamp",
    "attempt",
    "rank",
    "sequence",
    "description",
    "metadata",
    "writer",
)
EVENT_HEADER = (
    "step",
    "epoch",
    "event_type",
    "severity",
    "status",
    "payload",
    "timestamp",
    "attempt",
    "rank",
    "sequence",
    "writer",
)
_WIDE_EVERY_S = 60.0
# The derived table may take this share of the lane's time at most.
_WIDE_SHARE = 0.05


class CsvBackend:
    """Mirrors one run into CSV files; see the module for which.

    A batch is acknowledged when its rows are synced and `state.json` says so;
    rows beyond that are cut off before the next batch, so none is there twice.
    """

    def __init__(self, config: BackendConfig) -> None:
        self._root = _find_root(config)
        self._reader = CsvReader(self._root)
        self._folder: Path | None = None
        if config.read_only or config.run_id is None:
            return
        self._folder = self._reader.folder_of(config.run_id)
        try:
            self._claim = FolderClaim(self._folder)
            suffix = self._claim.suffix
            self._state_path = self._folder / f"state{suffix}.json"
            MirrorState.load(self._state_path)
        except OSError as error:
            raise BackendUnavailable(f"CSV files: {error}", backend="csv") from error
        self._tables = {
            kind: AppendOnlyTable(
                self._folder / f"{name}{suffix}.csv",
                header,
            )
            for kind, name, header in (
                (MetricRecord.KIND, "metrics_long", METRIC_HEADER),
                (EventRecord.KIND, "events", EVENT_HEADER),
            )
        }
        self._run_file = RunFile(self._folder)
        self._wide_due = time.monotonic() + _WIDE_EVERY_S
        self._wide_stale = False

    def write(self, batch: Batch) -> None:
        """Append a batch's rows and sync them.

        Raises:
            BackendRejected: Other content under a known number.
            BackendUnavailable: The files cannot be written now.
        """
        if self._folder is None:
            raise BackendUnavailable("the CSV mirror was opened for reading only", backend="csv")
        with self._claim.lock:
            self._write(self._folder, batch)
        if self._wide_stale and time.monotonic() >= self._wide_due:
            self._derive()

    def _write(self, folder: Path, batch: Batch) -> None:
        try:
            # Read anew: another lane of this process may have written in between.
            state = MirrorState.load(self._state_path)
        except OSError as error:
            raise BackendUnavailable(f"CSV files: {error}", backend="csv") from error
        for kind, table in self._tables.items():
            table.size_bytes = state.sizes_bytes.get(kind, 0)
        writer = state.writers.get(batch.writer_id)
        digest = xxhash.xxh3_64_hexdigest(batch.body)
        if writer is not None and batch.number <= writer.head:
            if batch.number == writer.head and digest != writer.digest:
                raise BackendRejected(
                    f"batch {batch.number} of writer {batch.writer_id} came again with other "
                    "content",
                    backend="csv",
                )
            return
        try:
            records: Any = batch.to_records()
        except SchemaValidationError as error:
            raise BackendRejected(str(error), backend="csv") from error
        started_us = writer.started_us if writer else min(r.time_us for r in records)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sizes = {**state.sizes_bytes, **self._store(batch.kind, records)}
            latest = WriterState(batch.attempt, batch.rank, started_us, batch.number, digest)
            state = MirrorState({**state.writers, batch.writer_id: latest}, sizes)
            write_atomically(self._state_path, msgspec.json.encode(state))
        except OSError as error:
            raise BackendUnavailable(f"CSV files: {error}", backend="csv") from error

    def close(self) -> None:
        """Write the derived table a last time and leave the folder to the next process."""
        if self._folder is None:
            return
        try:
            if self._wide_stale:
                self._derive()
        finally:
            self._claim.release()

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`; metrics and events are kept."""
        return self._reader.read(run_id, kind, query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return self._reader.load_run(run_id)

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        return self._reader.list_runs(project=project, limit=limit)

    def _store(self, kind: str, records: list[Any]) -> dict[str, int]:
        """Store the records; returns the new size of the file they went to."""
        if kind == MetricRecord.KIND:
            self._wide_stale = True
            return {kind: self._tables[kind].append(map(_metric_row, records))}
        if kind == EventRecord.KIND:
            return {kind: self._tables[kind].append(map(_event_row, records))}
        if kind == LifecycleRecord.KIND:
            for record in records:
                self._run_file.apply(record)
        return {}

    def _derive(self) -> None:
        assert self._folder is not None
        began = time.monotonic()
        write_wide_table(self._folder)
        took_s = time.monotonic() - began
        self._wide_stale = False
        self._wide_due = time.monotonic() + max(_WIDE_EVERY_S, took_s / _WIDE_SHARE)


def _find_root(config: BackendConfig) -> Path | None:
    """The folder that holds a folder per run; None for each run's own directory."""
    if config.location:
        return (config.storage_dir / Path(config.location).expanduser()).resolve()
    if config.run_path is not None:
        return config.run_path.parent
    return config.storage_dir / ".quark" / "runs"


def _metric_row(record: MetricRecord) -> tuple[Any, ...]:
    return (
        record.step,
        record.epoch,
        record.metric_key,
        repr(record.value),
        format_time(record.time_us),
        record.attempt,
        record.rank,
        record.sequence,
        record.description,
        None if record.metadata is None else encode_json(record.metadata).decode(),
        record.writer_id,
    )


def _event_row(record: EventRecord) -> tuple[Any, ...]:
    return (
        record.step,
        record.epoch,
        record.event_type,
        record.severity,
        record.status,
        None if record.payload is None else encode_json(record.payload).decode(),
        format_time(record.time_us),
        record.attempt,
        record.rank,
        record.sequence,
        record.writer_id,
    )
