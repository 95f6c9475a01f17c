"""Edits and requests to stop where the journal is the store: each is a journal of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quark_core.backends.contract import Batch, StoredRun
from quark_core.backends.edits import EDIT_WRITER, apply_stop
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest, find_folders
from quark_core.delivery.segments import Origin
from quark_core.errors import SessionStoreError
from quark_core.records import LifecycleRecord
from quark_core.records.runs import StopRequest
from quark_core.system.folders import describe_link, find_foreign_link
from quark_core.system.process import current_process


def write_edit(
    storage_dir: Path, run_path: Path, stored: StoredRun, batches: Sequence[Batch]
) -> None:
    """Write the batches of an edit as a journal, which every reader plays with the others.

    Args:
        storage_dir: The storage root.
        run_path: The run's own directory.
        stored: The run.
        batches: Those of one writer.

    Raises:
        SessionStoreError: The folder cannot be written.
    """
    first = batches[0]
    # In the run's folder, whatever QUARK_JOURNAL_DIR says here: it is the run's readers' too.
    folder = JournalFolder(run_path / "journal" / first.writer_id)
    manifest = Manifest(
        run_id=first.run_id,
        writer_id=first.writer_id,
        attempt=first.attempt,
        rank=first.rank,
        project=stored.project.name,
        storage_dir=str(storage_dir),
        run_path=str(run_path),
        lanes=(LaneEntry("embedded", "embedded", primary=True),),
        process=current_process(),
    )
    link = find_foreign_link(run_path)
    if link is not None:
        raise SessionStoreError(describe_link(link))
    try:
        folder.write_manifest(manifest)
        origin = Origin(first.run_id, first.writer_id, first.attempt, first.rank)
        journal = Journal(folder.path, origin)
        journal.append(batches)
        journal.sync()
        journal.close()
    except OSError as error:
        raise SessionStoreError(f"{folder.path} cannot be written: {error}") from error
    folder.close()


def find_stop(storage_dir: Path, run_path: Path, run_id: str) -> StopRequest | None:
    """The request that stands for the newest attempt of a run, without playing its journals."""
    stops = []
    for path in sorted((run_path / "journal").glob(f"{EDIT_WRITER}*")):
        if (
            path.is_symlink()
            or JournalFolder(path, storage_dir=storage_dir).read_manifest() is None
        ):
            continue  # somebody else's doing
        for batch in JournalReader(path).read():
            if batch.kind == LifecycleRecord.KIND:
                stops += [
                    record
                    for record in batch.to_records()
                    if isinstance(record, LifecycleRecord) and record.action == "stop"
                ]
    if not stops:
        return None
    manifests = [folder.read_manifest() for folder in find_folders(storage_dir, run_id)]
    newest = max((each.attempt for each in manifests if each is not None), default=0)
    found: StopRequest | None = None
    for record in stops:
        if record.attempt == newest:
            found = apply_stop(found, record)
    return found
