"""Fills a store that was made anew with what there still is of a run.

First of all that is the database which was deleted: whoever has it open can
read it. Where it cannot be read, the run's journals have what was not
released yet, and what is in neither is told by numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from quark_backends.store.databases.connection import StoreConnection, writing
from quark_backends.store.reading.incremental_reads import replay_batches
from quark_backends.store.reading.reader import add_generation, find_run, find_writers
from quark_backends.store.reading.stored_rows import StoredRows
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.backends.contract import Batch
from quark_core.delivery.journal import JournalReader, make_stand_ins
from quark_core.delivery.journal_folder import JournalFolder, LostBatches, Manifest, find_folders
from quark_core.delivery.sending import order_journals
from quark_core.errors import BackendRejected, RunNotFoundError

_log = logging.getLogger("quark")

_MANY = 256


def restore_run(
    old: StoreConnection | None,
    new: StoreConnection,
    storage_dir: Path,
    run_id: str,
    heads: Mapping[tuple[str, str], int],
) -> None:
    """Fill a store with a run, out of the deleted one and of the run's journals.

    Args:
        old: The deleted one, which is open still; None where it was not deleted.
        new: The store.
        storage_dir: Its storage root.
        run_id: The run.
        heads: Number of the newest batch that was stored, by run and writer.

    Raises:
        BackendUnavailable: The new one is busy or full.
    """
    lost: list[str] = []
    try:
        lost += [] if old is None else copy_run(old, new, run_id)
    except new.Error as error:
        _log.error("run %s: the deleted store cannot be read: %s", run_id, error)
    lost += play_journals(storage_dir, new, run_id, heads)
    if lost:
        _log.error("run %s: no copy exists any more: %s", run_id, "; ".join(lost))


def has_run(store: StoreConnection, run_id: str) -> bool:
    """Whether a store has a run."""
    return store.execute("SELECT 1 FROM run WHERE id = ?", (run_id,)).fetchone() is not None


def copy_run(old: StoreConnection, new: StoreConnection, run_id: str) -> list[str]:
    """Copy a run out of a database that is open and has no path any more.

    Args:
        old: That database.
        new: The store.
        run_id: The run.

    Returns:
        What could not be read there, by writer and numbers.

    Raises:
        The database's error: One of the two cannot be read or written.
        BackendUnavailable: The new one is busy or full.
    """
    lost: list[str] = []
    ingest = BatchIngest(new)
    old.begin_read()
    try:
        with suppress(RunNotFoundError):
            stored = StoredRows(old)
            for writer in find_writers(old, run_id):
                (head,) = old.execute(
                    "SELECT head FROM writer WHERE pk = ?", (writer.pk,)
                ).fetchone()
                wanted = 0
                while wanted <= head:
                    found = replay_batches(old, stored, writer, wanted, _MANY)
                    for batch in found:
                        if batch.number > wanted:
                            lost.append(_describe(writer.writer_id, wanted, batch.number - 1))
                        wanted = batch.number + 1
                    _write(ingest, found)
                    if not found:
                        lost.append(_describe(writer.writer_id, wanted, head))
                        break
            _copy_generations(old, new, run_id)
    finally:
        old.rollback()
    return lost


def play_journals(
    storage_dir: Path, new: StoreConnection, run_id: str, heads: Mapping[tuple[str, str], int]
) -> list[str]:
    """Store what the journals of a run still have, and say in the run what they have not.

    What is gone is noted beside the journal, whose process goes on, so that it is told later too.

    Returns:
        What they have not, by writer and numbers.
    """
    lost: list[str] = []
    ingest = BatchIngest(new)
    for folder, manifest in order_journals(find_folders(storage_dir)):
        if manifest.run_id != run_id or manifest.generation:
            continue
        writer_id = manifest.writer_id
        row = new.execute(
            "SELECT head FROM writer JOIN run ON run.pk = run_pk"
            " WHERE run.id = ? AND writer.id = ?",
            (run_id, writer_id),
        ).fetchone()
        wanted = 0 if row is None else row[0] + 1
        gaps: list[tuple[int, int]] = []
        for batch in JournalReader(folder.path, is_written=True).read(wanted):
            if batch.number > wanted:
                gaps.append((wanted, batch.number - 1))
                _write(ingest, _stand_in(new, folder, manifest, *gaps[-1]))
            wanted = batch.number + 1
            _write(ingest, [batch])
        head = heads.get((run_id, writer_id), -1)
        if head >= wanted:
            # The journal was put back, too.
            gaps.append((wanted, head))
            _write(ingest, _stand_in(new, folder, manifest, *gaps[-1]))
        if gaps:
            lanes = [entry.name for entry in manifest.lanes if entry.primary]
            noted = [LostBatches(lane, *gap) for lane in lanes for gap in gaps]
            folder.note_damage(manifest, noted, ["the store was replaced by an older copy"])
            lost += [_describe(writer_id, *gap) for gap in gaps]
    return lost


def _stand_in(
    new: StoreConnection, folder: JournalFolder, manifest: Manifest, first: int, last: int
) -> list[Batch]:
    starts = not has_run(new, manifest.run_id) and not manifest.awaits_run
    return make_stand_ins(folder, manifest, first, last, starts=starts)


def _write(ingest: BatchIngest, batches: list[Batch]) -> None:
    """Store batches; those that another process has brought there already stay as they are."""
    try:
        if batches:
            ingest.write(batches)
    except BackendRejected:
        for batch in batches:
            try:
                ingest.write([batch])
            except BackendRejected as error:
                _log.debug("run %s: %s", batch.run_id, error)


def _copy_generations(old: StoreConnection, new: StoreConnection, run_id: str) -> None:
    for _, rows in groupby(_list_outputs(old, run_id), key=lambda row: row[0]):
        outputs = list(rows)
        _, analyzer, number, replaces = outputs[0][:4]
        bodies = [(kind, count, body) for *_, kind, count, body in outputs if kind is not None]
        with writing(new):
            run_pk = find_run(new, run_id)
            known = new.execute(
                "SELECT 1 FROM generation WHERE run_pk = ? AND analyzer = ? AND number = ?",
                (run_pk, analyzer, number),
            ).fetchone()
            if known is None:
                add_generation(new, run_pk, analyzer, number, bool(replaces), bodies)


def _list_outputs(old: StoreConnection, run_id: str) -> Iterator[Any]:
    return iter(
        old.execute(
            "SELECT g.pk, analyzer, number, replaces, kind, count, body FROM generation AS g"
            " LEFT JOIN output ON generation_pk = g.pk WHERE run_pk = ? ORDER BY g.pk, output.pk",
            (find_run(old, run_id),),
        )
    )


def _describe(writer_id: str, first: int, last: int) -> str:
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    return f"{numbers} of writer {writer_id}"
