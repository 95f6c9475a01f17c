"""Stores to write batches into, without a session in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.upkeep.compaction import Compactor
from quark_backends.store.upkeep.garbage_collection import StepPace, give_space_back
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.backends.contract import Batch
from quark_core.records import LifecycleRecord
from quark_core.records.codec import encode_columns, encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.names import split_name
from quark_core.system.process import current_process

Array = Any

RUN_ID = "benchrun0000"
WRITER_ID = "w00000000"
START_US = 1_767_225_600_000_000
STEP_US, JITTER_US = 20_000, 200
ENDED_AFTER_US = 6 * 3_600_000_000
# As the lane takes them together when it is behind, and as compaction wants them.
GROUP_BATCHES = 64


class BenchStore:
    """An embedded store with one run, written to and compacted by hand.

    Args:
        storage_dir: Where it is made.
        codec: How chunks are compressed; the best that is installed by default.
        durable: Whether a commit waits for the disk, as the store really does.
    """

    def __init__(
        self, storage_dir: Path, *, codec: int | None = None, durable: bool = False
    ) -> None:
        self.layout = ensure_store(storage_dir)
        self.connection = connect(self.layout)
        if not durable:
            self.connection.execute("PRAGMA synchronous=OFF")
        self.ingest = BatchIngest(self.connection)
        self.codec = codec
        self.ingest.write([_make_start(storage_dir)])

    def add_run(self, run_id: str) -> None:
        """Begin another run beside the first."""
        self.ingest.write([_make_start(self.layout.root.parent, run_id)])

    def end_run(self, run_id: str = RUN_ID) -> None:
        """Have a run end as completed; nothing of it may follow."""
        ((head,),) = self.connection.execute("SELECT MAX(head) FROM writer").fetchall()
        end = JsonObject({"status": "completed"})
        time_us = START_US + ENDED_AFTER_US
        record = LifecycleRecord(run_id, WRITER_ID, 0, 0, 0, time_us, "status", end)
        body = encode_records([record])
        self.ingest.write([Batch(run_id, WRITER_ID, 0, 0, head + 1, "lifecycle", 1, body)])

    def open_reader(self) -> StoreReader:
        """A reader that has read nothing yet."""
        return StoreReader(lambda: connect(self.layout, read_only=True))

    def fill(
        self, batches: Iterable[Batch], *, compacting: bool = False, run_id: str = RUN_ID
    ) -> None:
        """Store batches in groups.

        Args:
            batches: What is stored.
            compacting: Whether to compact after each group, as a run does in the background.
            run_id: The run that they are of, whatever they say.
        """
        remaining = (replace(batch, run_id=run_id) for batch in batches)
        while group := list(islice(remaining, GROUP_BATCHES)):
            self.ingest.write(group)
            if compacting:
                self.compact(minimum=GROUP_BATCHES // 2)

    def compact(self, *, minimum: int = 1) -> None:
        """Compact whatever has so many batches."""
        compactor = Compactor(self.connection, codec=self.codec)
        while work := compactor.find_work(minimum=minimum):
            for item in work:
                compactor.compact(item)

    def give_space_back(self) -> None:
        """Take free pages off the file, as `quark gc` does."""
        give_space_back(self.connection, StepPace(self.connection))

    def measure_bytes(self) -> int:
        """Size of everything in the store's folder, once the WAL is in the database."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return sum(path.stat().st_size for path in self.layout.root.rglob("*") if path.is_file())

    def close(self) -> None:
        """Give up the connection."""
        self.connection.close()


def make_times(steps: int) -> Array:
    """Microseconds of each step: every 20 ms, with the jitter of a real loop."""
    pauses = np.random.default_rng(1).normal(STEP_US, JITTER_US, steps).round().astype(np.int64)
    return START_US + np.cumsum(pauses)


def make_losses(steps: int, keys: int = 1, *, single: bool = True, seed: int = 0) -> Array:
    """Noisy losses, one row a step.

    Args:
        steps: Rows.
        keys: Columns.
        single: Whether they come out of single precision, as a model's do.
        seed: Of the noise.
    """
    curve = 2.5 * np.exp(-np.arange(steps) / max(steps / 5, 1)) + 0.3
    noise = np.random.default_rng(seed).normal(1.0, 0.05, (steps, keys))
    losses = curve[:, None] * noise
    return losses.astype(np.float32).astype(np.float64) if single else losses


def name_keys(count: int) -> list[str]:
    """Keys of so many metrics; a single one is the loss."""
    return ["loss"] if count == 1 else [f"train/metric{index}" for index in range(count)]


def make_metric_batches(
    values: Array, *, rows: int = 1_000, first: int = 0, total: int | None = None
) -> Iterator[Batch]:
    """Batches as a run's only writer makes them: all metrics of a step, then the next step.

    Args:
        values: One row a step, one column a metric.
        rows: Records in a batch; a multiple of the metrics.
        first: Step of the first row.
        total: Steps of the whole run, which the time stamps are made for.
    """
    steps, width = values.shape
    keys = name_keys(width)
    names = [split_name(key) for key in keys]
    times = make_times(total or steps)[first : first + steps]
    per_batch = rows // width
    for start in range(0, steps, per_batch):
        part = slice(start, min(start + per_batch, steps))
        count = part.stop - part.start
        sequence = (first + start) * width
        columns = {
            "sequence": list(range(sequence, sequence + count * width)),
            "time_us": np.repeat(times[part], width).tolist(),
            "metric_key": keys * count,
            "namespace": [namespace for namespace, _ in names] * count,
            "metric_name": [name for _, name in names] * count,
            "value": values[part].ravel().tolist(),
            "step": np.repeat(np.arange(first + start, first + part.stop), width).tolist(),
            "epoch": [None] * (count * width),
        }
        yield make_batch((first + start) // per_batch + 1, "metric", columns)


def make_batch(number: int, kind: str, columns: dict[str, Sequence[Any]]) -> Batch:
    """A batch of the run's only writer."""
    count = len(columns["sequence"])
    body = encode_columns(kind, count, columns)
    return Batch(RUN_ID, WRITER_ID, 0, 0, number, kind, count, body)


def _make_start(storage_dir: Path, run_id: str = RUN_ID) -> Batch:
    data = JsonObject(
        {
            "project": {"id": "p0", "name": "bench", "root_path": str(storage_dir)},
            "run": {
                "name": None,
                "notes": None,
                "parent_run_id": None,
                "lineage_root_run_id": run_id,
                "run_path": str(storage_dir),
                "git_commit": None,
                "strict_mode": False,
                "tags": [],
            },
            "process": msgspec.to_builtins(current_process()),
            "from_step": None,
        }
    )
    record = LifecycleRecord(run_id, WRITER_ID, 0, 0, 0, START_US, "start", data)
    return Batch(run_id, WRITER_ID, 0, 0, 0, "lifecycle", 1, encode_records([record]))
