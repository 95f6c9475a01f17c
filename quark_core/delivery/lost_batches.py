"""What stands in a run for batches that damage to its journal has cost.

They are told in the run itself, by records under the numbers of the batches
that are gone: whoever delivers the journal makes the same ones, so that they
are there once, and every other batch keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quark_core.backends.contract import Batch
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.errors import SchemaValidationError
from quark_core.records import EventRecord, LifecycleRecord, ProjectRecord, StreamRecord
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject

_REASON = "the journal was damaged"


def make_stand_ins(
    folder: JournalFolder, manifest: Manifest, first: int, last: int | None, *, starts: bool
) -> list[Batch]:
    """The batches that say that others are gone: an event, under the first number.

    Args:
        folder: The journal, which nothing more is written to.
        manifest: What it says of itself.
        first, last: Numbers of the first and the last batch that is gone; the
            last is None where nobody knows how many there were.
        starts: Whether the store lacks the start of the writer's attempt; where
            that is among what is gone, one is made of what the manifest has.
    """
    survey = _Survey(folder, first, last)
    data: dict[str, Any] = {"reason": _REASON, "batches": [first, last]}
    if survey.records:
        data["records"] = survey.records
    head: Any = (manifest.run_id, manifest.writer_id, manifest.attempt, manifest.rank)

    def place(kind: str) -> tuple[int, int]:
        # Behind all that is left, and another one for each gap.
        return survey.newest.get(kind, -1) + 1 + first, survey.time_us

    event = EventRecord(
        *(*head, *place("event"), "records_dropped", "error", None, None, None, JsonObject(data))
    )
    records: list[list[StreamRecord]] = [[event]]
    if starts and not survey.has_start:
        start = LifecycleRecord(*(*head, 0, survey.time_us, "start", _describe_start(manifest)))
        gap = LifecycleRecord(*(*head, *place("lifecycle"), "gap", JsonObject(data)))
        records.insert(0, [start, gap])
    numbers = range(first, first + 1 if last is None else last + 1)
    return [
        Batch(*(*head, number, part[0].KIND, len(part), encode_records(part)))
        for number, part in zip(numbers, records, strict=False)
    ]


class _Survey:
    """What the rest of a journal says of a gap in it.

    Attributes:
        newest: Highest sequence of each kind, in all of the journal.
        records: How many records of a kind the gap has cost, where those of
            that kind on both sides of it tell.
        time_us: When what is before it was logged, or what comes after it.
        has_start: Whether the start of the attempt is there.
    """

    def __init__(self, folder: JournalFolder, first: int, last: int | None) -> None:
        self.newest: dict[str, int] = {}
        self.time_us = 0
        self.has_start = False
        before: dict[str, int] = {}
        after: dict[str, int] = {}
        for batch, sequences, times in _read(folder):
            kind = batch.kind
            self.newest[kind] = max(self.newest.get(kind, -1), *sequences)
            if batch.number < first:
                before[kind] = max(before.get(kind, -1), *sequences)
                self.time_us = max(self.time_us, *times)
            elif last is not None and batch.number > last:
                after[kind] = min(after.get(kind, sequences[0]), *sequences)
                self.time_us = self.time_us or min(times)
            if kind == LifecycleRecord.KIND and "start" in batch.decoded.to_list("action"):
                self.has_start = True
        counts = {kind: after[kind] - before.get(kind, -1) - 1 for kind in after}
        self.records = {kind: count for kind, count in counts.items() if count > 0}


def _read(folder: JournalFolder) -> Iterator[tuple[Batch, list[int], list[int]]]:
    """Each batch with its records' sequences and times; those of newer kinds are left out."""
    for batch in JournalReader(folder.path, on_damage=lambda *_: None).read():
        try:
            sequences = batch.decoded.to_list("sequence")
            times = batch.decoded.to_list("time_us")
        except SchemaValidationError:
            continue
        if sequences:
            yield batch, sequences, times


def _describe_start(manifest: Manifest) -> JsonObject:
    """The start of an attempt, as far as its journal's manifest knows it."""
    project = manifest.project
    return JsonObject(
        {
            "project": {
                "id": ProjectRecord.derive_id(project),
                "name": project,
                "root_path": manifest.storage_dir,
            },
            "run": {
                "name": None,
                "notes": None,
                "parent_run_id": None,
                "lineage_root_run_id": manifest.run_id,
                "run_path": manifest.run_path,
                "git_commit": None,
                "strict_mode": False,
                "tags": [],
            },
            "process": msgspec.to_builtins(manifest.process),
        }
    )
