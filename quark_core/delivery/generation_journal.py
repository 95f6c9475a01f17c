"""The journal of an analysis: what an analyzer found, on its way to the run's mirrors.

The primary has numbered and stored it already. For the mirrors it becomes a
writer of its own, `<analyzer>.<number>`, of attempt 0 and rank 0, with lanes
for the mirrors only; whoever delivers left-over journals delivers it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quark_core.backends.contract import Batch
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.lane_files import lane_folder_name
from quark_core.delivery.segments import Origin
from quark_core.records import RECORD_TYPES, StreamRecord
from quark_core.records.codec import decode_body, encode_records
from quark_core.system.process import current_process

_WRITER = re.compile(r"(?P<analyzer>.+)\.(?P<number>[1-9][0-9]*)", re.DOTALL)
_BATCH_RECORDS = 500


def split_generation(writer_id: str) -> tuple[str, int] | None:
    """Analyzer and number of the generation that a writer is; None for a process's own writer."""
    match = _WRITER.fullmatch(writer_id)
    return None if match is None else (match["analyzer"], int(match["number"]))


def frame_outputs(outputs: Mapping[str, Sequence[StreamRecord]]) -> list[Batch]:
    """One generation as batches, numbered from 0: the same ones whenever it is framed.

    Args:
        outputs: Records by kind, under the identity that a store returns them with.
    """
    batches: list[Batch] = []
    for kind in RECORD_TYPES:
        records = outputs.get(kind, ())
        for part in _cut(records):
            first = part[0]
            run_id = first.run_id or ""
            origin = (run_id, first.writer_id, first.attempt, first.rank)
            # What a store gives back may be spelled otherwise, such as 3 as 3.0: so it is
            # spelled here as it comes back.
            read = decode_body(encode_records(part)).to_records(
                run_id=run_id, writer_id=first.writer_id, attempt=first.attempt, rank=first.rank
            )
            batches.append(Batch(*origin, len(batches), kind, len(part), encode_records(read)))
    return batches


def journal_outputs(
    directory: Path,
    batches: Sequence[Batch],
    lanes: tuple[LaneEntry, ...],
    *,
    project: str,
    storage_dir: Path,
    run_path: Path,
) -> JournalFolder:
    """Write a generation's batches as a journal that nothing more is written to.

    Args:
        directory: Where the run's journals lie.
        batches: What `frame_outputs` made; at least one.
        lanes: The mirrors.
        project: Name of the run's project.
        storage_dir: The user's storage root.
        run_path: The run's own directory.

    Raises:
        OSError: It cannot be written, or is there already; nothing is left of it.
    """
    first = batches[0]
    found = split_generation(first.writer_id)
    folder = JournalFolder(directory / lane_folder_name(first.writer_id))
    folder.path.mkdir(parents=True)  # one that is there already is another's
    try:
        folder.write_manifest(
            Manifest(
                run_id=first.run_id,
                writer_id=first.writer_id,
                attempt=first.attempt,
                rank=first.rank,
                project=project,
                storage_dir=str(storage_dir),
                run_path=str(run_path),
                lanes=lanes,
                process=current_process(),
                generation=1 if found is None else found[1],
            )
        )
        origin = Origin(first.run_id, first.writer_id, first.attempt, first.rank)
        journal = Journal(folder.path, origin)
        try:
            journal.append(batches)
        finally:
            journal.close()
    except OSError:
        folder.remove(note=False)
        raise
    folder.close()
    return folder


def _cut(records: Sequence[StreamRecord]) -> Iterator[Sequence[StreamRecord]]:
    for start in range(0, len(records), _BATCH_RECORDS):
        yield records[start : start + _BATCH_RECORDS]
