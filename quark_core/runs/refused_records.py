"""Delivers what backends have refused before: what was wrong may have been mended since.

A store refuses the records of a run that it does not know, as where an empty one was at the place
of the real one for a while. What is refused again stays where it is. A store that has later records
of the same writer would take earlier ones for known: they come under numbers behind all others,
without the records that it refuses one by one. A mirror that does not say how far it came is left
as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import Backend, Batch, SupportsRead
from quark_core.delivery.attempt_starts import has_start
from quark_core.delivery.black_box_recovery import OpenLane
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.lane_files import lane_folder_name
from quark_core.delivery.quarantine import Quarantine, QuarantinedBatch
from quark_core.delivery.sending import FindPayload, send_payloads
from quark_core.delivery.sync import LaneSync, find_next
from quark_core.errors import BackendRejected, QuarkError, SchemaValidationError
from quark_core.records import RECORD_TYPES, LifecycleRecord, StreamRecord
from quark_core.records.codec import encode_records
from quark_core.records.malformed_bodies import MALFORMED, mend_body
from quark_core.records.query import Query
from quark_core.runs.output_delivery import find_owner
from quark_core.system.process import current_process

_log = logging.getLogger("quark")


def deliver_refused(storage_dir: Path, open_lane: OpenLane) -> list[LaneSync]:
    """Offer each backend once more what it has refused; may be repeated at any time.

    Args:
        storage_dir: The storage root.
        open_lane: Opens backends.

    Returns:
        What was taken now and what is refused again, by run and backend.
    """
    found = []
    for directory in sorted((storage_dir / ".quark" / "runs").glob("*/quarantine/*")):
        quarantine = Quarantine(directory, directory.name)
        items = sorted(quarantine.load(), key=_place)
        # The writer that begins an attempt comes before those that join it.
        writers = [list(group) for _, group in groupby(items, lambda item: item.batch.writer_id)]
        writers.sort(key=lambda group: not any(has_start(item.batch) for item in group))
        run_path = directory.parent.parent
        if writers and find_owner(journal_directory(run_path, writers[0][0].batch.run_id)):
            continue  # its process goes on writing there, with later numbers
        for group in writers:
            result = _deliver(storage_dir, quarantine, group, open_lane)
            if result.delivered or result.quarantined:
                found.append(result)
    return found


def _place(item: QuarantinedBatch) -> tuple[str, int]:
    return item.batch.writer_id, item.batch.number


def _deliver(
    storage_dir: Path, quarantine: Quarantine, items: list[QuarantinedBatch], open_lane: OpenLane
) -> LaneSync:
    first = items[0]
    batch = first.batch
    result = LaneSync(
        run_id=batch.run_id, writer_id=batch.writer_id, backend=first.backend, state="delivered"
    )
    assert quarantine.directory is not None
    run_path = quarantine.directory.parent.parent
    entry = LaneEntry(first.backend, first.specification or first.backend, primary=True)
    manifest = Manifest(
        batch.run_id,
        batch.writer_id,
        batch.attempt,
        batch.rank,
        first.project,
        str(storage_dir),
        str(run_path),
        (entry,),
        current_process(),
    )
    try:
        backend, idempotent = open_lane(manifest, entry)
    except QuarkError:
        return result  # it stays until the backend can be opened
    try:
        if idempotent:
            _offer(backend, quarantine, items, run_path, result)
    except QuarkError as error:
        result.reason = str(error)
    finally:
        backend.close()
    return result


def _offer(
    backend: Backend,
    quarantine: Quarantine,
    items: list[QuarantinedBatch],
    run_path: Path,
    result: LaneSync,
) -> None:
    assert quarantine.directory is not None
    find = [PayloadFolder(place).find for place in (quarantine.directory, run_path)]
    next_number = find_next(backend, items[0].batch.run_id, items[0].batch.writer_id)
    doubtful = []
    for batch in (item.batch for item in items):
        if next_number is not None and batch.number < next_number:
            doubtful.append(batch)
            continue
        try:
            send_payloads(backend, [batch], find)
            backend.write(batch)
        except BackendRejected as error:
            if has_start(batch):
                break  # without it the store takes nothing of the rest
            if next_number is None:
                result.quarantined[str(error)] = batch.count
            else:
                doubtful.append(batch)  # perhaps for one of its records
            continue
        if next_number is None:
            doubtful.append(batch)
        else:
            quarantine.remove(batch)
            result.delivered += batch.count
    known = _read_known(backend, doubtful)
    may_renumber = next_number is not None and not _has_journal(run_path, items[0].batch)
    for batch in doubtful:
        records, refused = _list_records(batch)
        missing = [each for each in records if _identify(each) not in known[batch.kind]]
        if missing and (not may_renumber or batch.kind == LifecycleRecord.KIND):
            refused[_OVERTAKEN] += len(missing)
        elif missing:
            later = _write_behind(backend, batch, missing, find)
            result.delivered += len(missing) - later.total()
            refused += later
        else:
            result.delivered += len(records)
        if not refused:
            quarantine.remove(batch)
        for reason, count in refused.items():
            result.quarantined[reason] = result.quarantined.get(reason, 0) + count


def _has_journal(run_path: Path, batch: Batch) -> bool:
    """Whether batches of a writer may still come under numbers of its own."""
    place = journal_directory(run_path, batch.run_id) / lane_folder_name(batch.writer_id)
    return JournalFolder(place).read_manifest() is not None


def _list_records(batch: Batch) -> tuple[list[StreamRecord], Counter[str]]:
    """The records of a batch that can be read, and how many cannot be, by reason."""
    try:
        return batch.to_records(), Counter()
    except (SchemaValidationError, *MALFORMED) as error:
        try:
            body, sound = mend_body(batch.decoded)
            records = body.to_records(
                run_id=batch.run_id,
                writer_id=batch.writer_id,
                attempt=batch.attempt,
                rank=batch.rank,
            )
        except (SchemaValidationError, *MALFORMED):
            return [], Counter({str(error): batch.count})
        found = [record for record, is_sound in zip(records, sound, strict=True) if is_sound]
        return found, Counter({str(error): batch.count - len(found)})


_OVERTAKEN = "it has later records already; to fill a mirror again: quark mirror replay"


def _write_behind(
    backend: Backend, batch: Batch, records: list[StreamRecord], find: Sequence[FindPayload]
) -> Counter[str]:
    """Store records under numbers behind all that a backend has of their writer, in few parts.

    Returns:
        How many it refuses, by reason: each of them alone.
    """
    number = find_next(backend, batch.run_id, batch.writer_id)
    try:
        part = msgspec.structs.replace(
            batch, number=number, count=len(records), body=encode_records(records)
        )
        send_payloads(backend, [part], find)
        backend.write(part)
    except (BackendRejected, SchemaValidationError, *MALFORMED) as error:
        if len(records) == 1:
            return Counter({str(error): 1})
        middle = len(records) // 2
        refused = _write_behind(backend, batch, records[:middle], find)
        return refused + _write_behind(backend, batch, records[middle:], find)
    return Counter()


def _read_known(backend: Backend, batches: list[Batch]) -> dict[str, set[tuple[str, int]]]:
    """Which records of the kinds of batches a backend has; none where it cannot be read."""
    reader: object = backend
    found: dict[str, set[tuple[str, int]]] = {batch.kind: set() for batch in batches}
    if isinstance(reader, SupportsRead):
        query = Query(all_attempts=True)
        for kind in (kind for kind in found if kind in RECORD_TYPES):
            records = reader.read(batches[0].run_id, kind, query).to_records()
            found[kind] = {(each.writer_id, each.sequence) for each in records}
    return found


def _identify(record: StreamRecord) -> tuple[str, int]:
    return record.writer_id, record.sequence
