"""What clients send: batches of 1,000 points, 20 metrics by 50 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from storage.stores import START_US, WRITER_ID, make_losses, make_metric_batches

from quark_core.backends.contract import Batch
from quark_core.backends.registry import default_registry
from quark_core.records import LifecycleRecord
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.runs.backend_choice import choose_primary, open_primary
from quark_core.system.process import current_process

KEYS, STEPS = 20, 50
ROWS = KEYS * STEPS


def open_backend(storage_dir: Path, run_id: str) -> Any:
    """The primary that the environment names, opened for one run."""
    choice = choose_primary(default_registry())
    return open_primary(choice, choice.configure(storage_dir, run_id=run_id, project="bench"))


def make_batches(run_id: str, count: int) -> tuple[Batch, list[Batch]]:
    """The start of a run, and so many batches of its metrics."""
    values = make_losses(count * STEPS, KEYS)
    batches = [
        Batch(run_id, WRITER_ID, 0, 0, number, batch.kind, batch.count, batch.body)
        for number, batch in enumerate(make_metric_batches(values, rows=ROWS), start=1)
    ]
    return make_start(run_id), batches


def make_start(run_id: str, *, store: str = "bench") -> Batch:
    """The lifecycle record that makes the run in a project store, as batch 0."""
    data = {
        "project": {"id": "p-bench", "name": "bench", "root_path": "/bench"},
        "run": {
            "name": None,
            "notes": None,
            "parent_run_id": None,
            "lineage_root_run_id": run_id,
            "run_path": f"bench://{run_id}",
            "git_commit": None,
            "strict_mode": False,
            "tags": [],
        },
        "store": {"name": store, "path": "/bench"},
        "process": msgspec.to_builtins(current_process()),
    }
    record = LifecycleRecord(run_id, WRITER_ID, 0, 0, 0, START_US, "start", JsonObject(data))
    return Batch(run_id, WRITER_ID, 0, 0, 0, "lifecycle", 1, encode_records([record]))
