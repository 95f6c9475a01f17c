"""Delivers what processes have left behind in their journals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backend import Backend, Batch, SupportsGroups, SupportsReplay
from quark_core.delivery.black_box import read_black_box
from quark_core.delivery.black_box_recovery import recover_black_box
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.lane_files import LaneMark, lane_folder_name
from quark_core.delivery.origin import Origin
from quark_core.delivery.payload_delivery import (
    FindPayload,
    send_payloads,
    set_payloads_aside,
)
from quark_core.delivery.quarantine import Quarantine
from quark_core.errors import BackendRejected

__all__ = ["KeepLane", "LaneSync", "OpenLane", "count_boxed", "count_waiting", "sync_folder"]

_log = logging.getLogger("quark")
_GROUP_LIMIT = 64

OpenLane = Callable[[Manifest, LaneEntry], tuple[Backend, bool]]
"""Opens the backend of a lane; returns it and whether a batch may be sent to it twice."""

KeepLane = Callable[[Backend, Exception | None], bool]
"""Says whether a backend stays open after a journal, given what it failed with."""


@dataclass(slots=True, kw_only=True)
class LaneSync:
    """What became of one lane of one journal. All counts are records.

    Attributes:
        run_id: The run.
        writer_id: The writer.
        backend: Name of the lane.
        state: delivered, waiting (the backend does not take it now), held
            (another process drives the lane), kept (the journal is the store)
            or pending (a dry run).
        delivered: Acknowledged now.
        waiting: Still to be delivered.
        quarantined: Refused for good, by reason.
        unknown: In flight when the writer died, to a backend that may have them.
        damage: Damaged segments, each with what is wrong.
        reason: Why it waits, or who holds it.
    """

    run_id: str
    writer_id: str
    backend: str
    state: str = "pending"
    delivered: int = 0
    waiting: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    damage: list[str] = field(default_factory=list)
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def count_waiting(folder: JournalFolder, manifest: Manifest) -> list[LaneSync]:
    """What waits in a journal for each of its lanes, without touching it.

    What a killed process left in its black box only waits too: whoever
    delivers the journal takes it over first.
    """
    found = []
    boxed, reason = count_boxed(folder, manifest)
    for entry in manifest.lanes:
        result = LaneSync(run_id=manifest.run_id, writer_id=manifest.writer_id, backend=entry.name)
        mark = folder.mark(entry.name)
        reader = JournalReader(folder.path, on_damage=_note_damage(result))
        result.waiting = boxed + sum(batch.count for batch in reader.read(mark.done))
        lease = folder.lease(entry.name)
        if not lease.is_stale():
            result.state = "held"
            result.reason = f"process {lease.holder.pid if lease.holder else '?'} delivers it"
        elif reason is not None:
            result.reason = reason
        elif result.waiting == 0:
            result.state = "delivered"
        found.append(result)
    return found


def count_boxed(folder: JournalFolder, manifest: Manifest) -> tuple[int, str | None]:
    """What a process that is gone left in its black box and not in its journal; touches nothing.

    Returns:
        The records that are only in the black box, and why the journal is not
        all that there is to deliver: None where it is, or the process lives.
    """
    if manifest.black_box is None or folder.is_written(manifest):
        return 0, None
    path = Path(manifest.black_box)
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return 0, None
    except OSError as error:
        # Another user's, mostly: what is in it is not known, and may be all of the run.
        return 0, f"its process was killed, and its black box {path} cannot be read: {error}"
    origin = Origin(manifest.run_id, manifest.writer_id, manifest.attempt, manifest.rank)
    records, uncovered = read_black_box(path, origin)
    journaled = {
        (batch.kind, sequence)
        for batch in JournalReader(folder.path).read()
        for sequence in batch.decoded.to_list("sequence")
    }
    boxed = sum((record.KIND, record.sequence) not in journaled for record in records)
    reasons = []
    if boxed:
        reasons.append(f"its last {boxed} records are in its black box only")
    if uncovered:
        reasons.append(f"at most its last {uncovered} calls are lost: its black box was full")
    return boxed, f"its process was killed: {'; '.join(reasons)}" if reasons else None


def sync_folder(
    folder: JournalFolder,
    manifest: Manifest,
    open_lane: OpenLane,
    *,
    on_progress: Callable[[int], None] | None = None,
    keep_lane: KeepLane | None = None,
) -> list[LaneSync]:
    """Deliver one journal to all of its lanes that nobody else drives, and delete it when done.

    May be repeated, and run beside the journal's own process, at any time.

    Args:
        folder: The journal.
        manifest: What it says of itself.
        open_lane: Opens backends.
        on_progress: Told of each number of records that are done with.
        keep_lane: Says whether a backend stays open; by default each is closed.
    """
    results = []
    # Asked before anything is read: what a living writer adds meanwhile must not be deleted unread.
    is_final = not folder.is_written(manifest)
    recover_black_box(folder, manifest)
    if manifest.black_box is not None and Path(manifest.black_box).exists():
        is_final = False  # another process is about to journal what is in there
    for entry in manifest.lanes:
        result = LaneSync(run_id=manifest.run_id, writer_id=manifest.writer_id, backend=entry.name)
        results.append(result)
        lease = folder.lease(entry.name)
        if not lease.take():
            holder = lease.holder
            result.state = "held"
            result.reason = f"process {holder.pid if holder else '?'} delivers it"
            continue
        try:
            _sync_lane(folder, manifest, entry, open_lane, result, on_progress, keep_lane)
        finally:
            lease.release()
    if is_final and all(result.state == "delivered" for result in results):
        if any(result.damage for result in results):
            _log.warning("the journal %s is damaged; its files are kept", folder.path)
        else:
            folder.remove(unknown={result.backend: result.unknown for result in results})
    else:
        folder.prune()
    return results


def _sync_lane(
    folder: JournalFolder,
    manifest: Manifest,
    entry: LaneEntry,
    open_lane: OpenLane,
    result: LaneSync,
    on_progress: Callable[[int], None] | None,
    keep_lane: KeepLane | None,
) -> None:
    mark = folder.mark(entry.name)
    reader = JournalReader(folder.path, on_damage=_note_damage(result))
    quarantine = Quarantine(
        Path(manifest.run_path) / "quarantine" / lane_folder_name(entry.name), entry.name
    )
    backend: Backend | None = None
    failure: Exception | None = None
    try:
        batches = _fill_gaps(folder, manifest, reader.read(mark.done), mark.done, open_lane, result)
        first = next(batches, None)
        if first is not None:
            backend, idempotent = open_lane(manifest, entry)
            if getattr(backend, "keeps_journal", False):
                result.state = "kept"
                result.reason = (
                    "storage_dir lies on a network file system: the journal is the store"
                )
                return
            # In the journal lie those that went nowhere but to backends.
            find = [PayloadFolder(place).find for place in (folder.path, Path(manifest.run_path))]
            for group in _group(chain([first], batches), _GROUP_LIMIT if idempotent else 1):
                if idempotent or group[0].number >= mark.begun:
                    _write(backend, group, quarantine, result, find, mark)
                else:
                    # Sent once already, perhaps: sending it again could store it twice.
                    result.unknown += group[0].count
                mark.finish(group[-1].number + 1)
                if on_progress is not None:
                    on_progress(sum(batch.count for batch in group))
        result.state = "delivered"
    except Exception as error:  # noqa: BLE001 - the other lanes must still be delivered
        failure = error
        result.state = "waiting"
        result.reason = f"{type(error).__name__}: {error}"
        result.waiting = sum(batch.count for batch in reader.read(mark.done))
    finally:
        mark.close()
        if backend is not None and not (keep_lane is not None and keep_lane(backend, failure)):
            _close(backend, result)


def _close(backend: Backend, result: LaneSync) -> None:
    """Close a backend that has its records; what it could not finish is its own to keep."""
    try:
        backend.close()
    except Exception as error:  # noqa: BLE001 - the other lanes and journals must still be delivered
        _log.warning("backend %s: run %s: %s", result.backend, result.run_id, error)
        result.reason = result.reason or f"{type(error).__name__}: {error}"


def _fill_gaps(
    folder: JournalFolder,
    manifest: Manifest,
    batches: Iterator[Batch],
    start: int,
    open_lane: OpenLane,
    result: LaneSync,
) -> Iterator[Batch]:
    """The journal's batches, with those that it had to let go taken from the primary."""
    wanted = start
    for batch in batches:
        if batch.number > wanted and result.backend not in _primary_names(manifest):
            replayed = _replay(manifest, wanted, batch.number, open_lane)
            yield from replayed
            missing = batch.number - wanted - len(replayed)
            if missing:
                _log.warning("journal %s: %d batches are gone", folder.path, missing)
        wanted = batch.number + 1
        yield batch


def _primary_names(manifest: Manifest) -> set[str]:
    return {entry.name for entry in manifest.lanes if entry.primary}


def _replay(manifest: Manifest, start: int, stop: int, open_lane: OpenLane) -> list[Batch]:
    for entry in manifest.lanes:
        if entry.primary:
            primary, _ = open_lane(manifest, entry)
            try:
                if isinstance(primary, SupportsReplay):
                    found = primary.read_batches(
                        manifest.run_id, manifest.writer_id, start, stop - start
                    )
                    return [batch for batch in found if batch.number < stop]
            finally:
                primary.close()
    return []


def _write(
    backend: Backend,
    batches: list[Batch],
    quarantine: Quarantine,
    result: LaneSync,
    find: Sequence[FindPayload],
    mark: LaneMark,
) -> None:
    if len(batches) > 1 and isinstance(backend, SupportsGroups):
        try:
            send_payloads(backend, batches, find)
            mark.begin(batches[-1].number + 1)
            backend.write_group(batches)
        except BackendRejected:
            # Which of them is refused shows when they go singly.
            _log.debug("a group was refused; its batches go one by one")
        else:
            result.delivered += sum(batch.count for batch in batches)
            return
    for batch in batches:
        try:
            send_payloads(backend, [batch], find)
            mark.begin(batch.number + 1)
            backend.write(batch)
        except BackendRejected as error:
            quarantine.put(batch, str(error))
            set_payloads_aside([batch], find[0], quarantine.directory)
            reasons = result.quarantined
            reasons[str(error)] = reasons.get(str(error), 0) + batch.count
        else:
            result.delivered += batch.count


def _group(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def _note_damage(result: LaneSync) -> Callable[[str, str], None]:
    def note(name: str, damage: str) -> None:
        result.damage.append(f"{name}: {damage}")

    return note
