"""Journals as a killed process leaves them, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from storage.stores import WRITER_ID

from quark_core.backends.contract import Batch
from quark_core.backends.registry import default_registry
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.segments import Origin
from quark_core.runs.backend_choice import choose_primary
from quark_core.system.process import current_process
from serving.work import make_start

_GROUP = 64


def leave_journal(storage_dir: Path, run_id: str, parts: Sequence[Batch]) -> int:
    """Write the journal of a run that the service has never heard of; returns its size."""
    run_path = storage_dir / ".quark" / "runs" / run_id
    folder = JournalFolder(journal_directory(run_path, run_id) / WRITER_ID)
    # A process of this machine that is gone: its pid is there, and began at another time.
    process = msgspec.structs.replace(current_process(), started="1")
    folder.write_manifest(
        Manifest(
            run_id=run_id,
            writer_id=WRITER_ID,
            attempt=0,
            rank=0,
            project="bench",
            storage_dir=str(storage_dir),
            run_path=str(run_path),
            lanes=(LaneEntry("service", choose_primary(default_registry()).specification, True),),
            process=process,
        )
    )
    journal = Journal(folder.path, Origin(run_id, writer_id=WRITER_ID))
    journal.append([make_start(run_id)])
    for start in range(0, len(parts), _GROUP):
        journal.append(
            [
                Batch(run_id, WRITER_ID, 0, 0, number, part.kind, part.count, part.body)
                for number, part in enumerate(parts[start : start + _GROUP], start=start + 1)
            ]
        )
    journal.sync()
    journal.close()
    return sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
