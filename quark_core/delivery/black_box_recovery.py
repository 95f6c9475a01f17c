"""Journals what a killed process left in its black box and not in its journal."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from quark_core.backend import Batch
from quark_core.codec import encode_records
from quark_core.delivery.black_box import read_black_box
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.delivery.origin import Origin
from quark_core.json_object import JsonObject
from quark_core.records import EventRecord, LifecycleRecord, StreamRecord
from quark_core.times import now_us

__all__ = ["recover_black_box"]

_log = logging.getLogger("quark")
_BATCH_RECORDS = 1000


def recover_black_box(folder: JournalFolder, manifest: Manifest) -> int:
    """Add to a journal what only its black box has, once its process is gone.

    What the journal has already is recognised by kind and sequence. May be
    called by several processes at once: one of them does it.

    Returns:
        How many records were added.
    """
    if manifest.black_box is None or folder.is_written(manifest):
        return 0
    path = Path(manifest.black_box)
    if not path.exists():
        return 0
    if not os.access(path, os.R_OK | os.W_OK):
        # Another user's: to read it as empty and delete it would lose what is in there.
        _log.warning("run %s: %s belongs to another user", manifest.run_id, path)
        return 0
    lease = folder.lease("black box")
    if not lease.take():
        return 0
    try:
        origin = Origin(manifest.run_id, manifest.writer_id, manifest.attempt, manifest.rank)
        kept = list(JournalReader(folder.path).read())
        known = {
            (batch.kind, sequence)
            for batch in kept
            for sequence in batch.decoded.to_list("sequence")
        }
        records, uncovered = read_black_box(path, origin)
        missing = [record for record in records if (record.KIND, record.sequence) not in known]
        if uncovered:
            # A gap that is counted, in the run itself, so that nobody takes its end for whole.
            known |= {(record.KIND, record.sequence) for record in missing}
            missing += _describe_gap(uncovered, known, origin)
        marks = [folder.mark(entry.name).done for entry in manifest.lanes]
        first = max([batch.number + 1 for batch in kept[-1:]] + marks, default=0)
        batches = _make_batches(missing, origin, first)
        if batches:
            journal = Journal.reopen(folder.path, origin)
            journal.append(batches)
            journal.sync()
            journal.close()
        path.unlink(missing_ok=True)
        if missing:
            _log.info("run %s: %d records came out of the black box", origin.run_id, len(missing))
        return len(missing)
    finally:
        lease.release()


def _describe_gap(
    uncovered: int, known: set[tuple[str, int]], origin: Origin
) -> list[StreamRecord]:
    """What a living process would have said of a gap: a lifecycle record and an event."""
    _log.warning(
        "run %s: the process was killed while its black box was full; "
        "at most its last %d calls are in no journal",
        origin.run_id,
        uncovered,
    )
    head: Any = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)
    data = JsonObject({"at_most": uncovered, "reason": "killed while the black box was full"})

    def next_place(kind: str) -> tuple[int, int]:
        taken = [sequence for found, sequence in known if found == kind]
        return max(taken, default=-1) + 1, now_us()

    return [
        EventRecord(
            *(*head, *next_place("event"), "records_dropped", "error", None, None, None, data)
        ),
        LifecycleRecord(*(*head, *next_place("lifecycle"), "gap", data)),
    ]


def _make_batches(records: list[StreamRecord], origin: Origin, first: int) -> list[Batch]:
    """Batches as the delivery thread would have made them: one kind each, lifecycle last."""
    by_kind: dict[str, list[StreamRecord]] = {}
    for record in records:
        by_kind.setdefault(record.KIND, []).append(record)
    batches: list[Batch] = []
    for kind in sorted(by_kind, key=lambda kind: kind == "lifecycle"):
        found = by_kind[kind]
        for start in range(0, len(found), _BATCH_RECORDS):
            part = found[start : start + _BATCH_RECORDS]
            batches.append(
                Batch(
                    origin.run_id or "",
                    origin.writer_id,
                    origin.attempt,
                    origin.rank,
                    first + len(batches),
                    kind,
                    len(part),
                    encode_records(part),
                )
            )
    return batches
