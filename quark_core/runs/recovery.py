"""Finds the journals that processes left behind, and delivers them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import Backend, Batch, SupportsRead
from quark_core.delivery.crash_buffer_recovery import (
    OpenLane,
    find_orphan_boxes,
    recover_black_box,
    revive_journals,
    sweep_black_boxes,
)
from quark_core.delivery.delivery_state import lane_folder_name
from quark_core.delivery.journal import split_generation
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    find_damaged,
    find_folders,
    find_other_part,
    find_paths,
    find_unreadable,
    join_parts,
    journal_directory,
)
from quark_core.delivery.segments import Origin
from quark_core.delivery.sending import (
    FindPayload,
    Quarantine,
    QuarantinedBatch,
    has_start,
    order_journals,
    send_payloads,
)
from quark_core.delivery.sync import (
    LaneSync,
    SharedLanes,
    SyncLog,
    count_boxed,
    count_waiting,
    find_next,
    sync_folder,
)
from quark_core.errors import BackendRejected, QuarkError, SchemaValidationError
from quark_core.hosting.child_process import end_stopped_helpers
from quark_core.records import RECORD_TYPES, LifecycleRecord, StreamRecord
from quark_core.records.codec import MALFORMED, encode_records, mend_body
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_lane
from quark_core.runs.output_delivery import OutputDelivery, find_owner
from quark_core.system.process import current_process, start_thread

# Delivers what backends have refused before: what was wrong may have been mended since.
#
# A store refuses the records of a run that it does not know, as where an empty one was at the place
# of the real one for a while. What is refused again stays where it is. A store that has later
# records of the same writer would take earlier ones for known: they come under numbers behind all
# others, without the records that it refuses one by one. A mirror that does not say how far it came
# is left as it is.

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


_OVERTAKEN = "it already has later records. To fill a mirror again, run: quark mirror replay"


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


_WRITERS_POLL_S = 0.02
_LONGEST_WAIT_S = 10.0
_LEFTOVERS_S = 5.0
_CLEAR_EVERY_S = 60.0
_clear_again_at_s = 0.0


@dataclass(frozen=True, slots=True)
class QuarantinedCount:
    """Records of one run that one backend refused for one reason."""

    run_id: str
    backend: str
    reason: str
    batches: int
    records: int

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class DamagedJournal:
    """A journal that damage has cost something.

    Attributes:
        run_id, writer_id: Whose it is.
        path: Its folder, whose files stay.
        found_at: When that was found.
        missing: What is gone, by lane.
        damage: What is wrong with which file.
    """

    run_id: str
    writer_id: str
    path: str
    found_at: str
    missing: tuple[str, ...]
    damage: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def list_lost(storage_dir: Path, run_id: str | None = None) -> list[DamagedJournal]:
    """The journals of a storage root that damage has cost something, as far as they were synced.

    Args:
        storage_dir: The storage root.
        run_id: Only those of this run.
    """
    return [
        DamagedJournal(
            note.run_id,
            note.writer_id,
            str(folder.path),
            note.found_at,
            tuple(f"{lost.lane}: {lost.describe()}" for lost in note.lost),
            note.damage,
        )
        for folder, note in find_damaged(storage_dir, run_id)
    ]


def survey(storage_dir: Path) -> list[LaneSync]:
    """What waits in each journal of a storage root, for each lane; touches nothing."""
    found = []
    for folder in find_folders(storage_dir):
        manifest = folder.read_manifest()
        if manifest is None:
            continue
        lanes = count_waiting(folder, manifest)
        other = find_other_part(folder)
        for lane in lanes if other is not None else ():
            lane.state = "held" if folder.is_written(manifest) else "pending"
            lane.reason = (
                "the store was moved while the run was being written. One part is in "
                f"{folder.path}, another in {other.path if other else ''}. `quark sync` joins them"
            )
        found += lanes
    for folder, manifest in find_orphan_boxes(storage_dir):
        found += count_waiting(folder, manifest)
    return found + _list_left_alone(storage_dir)


def _list_left_alone(storage_dir: Path) -> list[LaneSync]:
    """The journals that nobody can deliver before a person has looked at them."""
    return [
        LaneSync(
            run_id=folder.path.parents[1].name,
            writer_id=folder.path.name,
            backend="?",
            state="waiting",
            reason=reason,
        )
        for folder, reason in find_unreadable(storage_dir)
    ]


def has_journals(storage_dir: Path) -> bool:
    """Whether there is any journal of a storage root, whatever is in it."""
    found = chain(
        find_folders(storage_dir), find_orphan_boxes(storage_dir), find_unreadable(storage_dir)
    )
    return next(found, None) is not None


def count_unstored(storage_dir: Path, run_id: str, *, keeps_journal: bool = False) -> int:
    """How many records of a run its primary store lacks, with nobody at work to deliver them.

    Reads the run's own journals only, and touches nothing.

    Args:
        storage_dir: The storage root.
        run_id: The run.
        keeps_journal: The journals are the store, which then lacks only what
            a killed process left in its black box.
    """
    run_path = storage_dir / ".quark" / "runs" / run_id
    directories = {run_path / "journal", journal_directory(run_path, run_id)}
    waiting = 0
    for path in (path for each in sorted(directories) for path in find_paths(each, "*/")):
        folder = JournalFolder(path)
        manifest = folder.read_manifest()
        if manifest is None or manifest.run_id != run_id or folder.is_written(manifest):
            continue
        if keeps_journal:
            waiting += count_boxed(folder, manifest)[0]
            continue
        primaries = {entry.name for entry in manifest.lanes if entry.primary}
        waiting += sum(
            lane.waiting
            for lane in count_waiting(folder, manifest)
            if lane.backend in primaries and lane.state == "pending"
        )
    return waiting


def sync(
    storage_dir: Path,
    *,
    on_progress: Callable[[int], None] | None = None,
    run_id: str | None = None,
    open_lane: OpenLane = open_lane,
) -> list[LaneSync]:
    """Deliver every journal of a storage root, as far as the backends take it.

    Lanes that a living process drives are left to it. May be repeated, and run
    at any time, by several processes at once.

    Args:
        storage_dir: The storage root.
        on_progress: Told of each number of records that are done with.
        run_id: Only those of this run.
        open_lane: Opens backends.
    """
    found: list[LaneSync] = []
    revive_journals(storage_dir)
    lanes = SharedLanes(open_lane)
    try:
        for folder, manifest in order_journals(join_parts(find_folders(storage_dir, run_id))):
            _close_others(lanes, manifest.run_id, found)
            owner = find_owner(folder.path.parent) if manifest.generation else None
            if owner is None:
                found += sync_folder(
                    folder, manifest, lanes.open, on_progress=on_progress, keep_lane=lanes.keep
                )
                continue
            # A second process beside the one that has the mirrors open would only be in its way.
            held = count_waiting(folder, manifest)
            for lane in held:
                lane.state = "held"
                lane.reason = f"process {owner.process.pid} has the run open and delivers it"
            found += held
    finally:
        _close_others(lanes, None, found)
    if run_id is not None:
        return found
    found += deliver_refused(storage_dir, open_lane)
    found += _list_left_alone(storage_dir)
    _clear_leftovers(timeout_s=_LEFTOVERS_S)
    return found


def _close_others(lanes: SharedLanes, run_id: str | None, results: list[LaneSync]) -> None:
    """Close the mirrors of runs that are through, and say with them what could not be finished."""
    failures = lanes.close(but_run_id=run_id)
    for result in results if failures else ():
        failure = failures.get((result.run_id, result.backend))
        result.reason = result.reason or failure


def journal_black_boxes(storage_dir: Path) -> None:
    """Journal what killed processes left in shared memory, which does not outlive the machine."""
    revive_journals(storage_dir)
    for folder in find_folders(storage_dir):
        manifest = folder.read_manifest()
        if manifest is not None:
            recover_black_box(folder, manifest, open_lane)


def adopt_orphans(storage_dir: Path) -> threading.Thread | None:
    """Deliver, in the background, what processes that are gone have left behind.

    Returns:
        The thread that does it, or None where there is nothing to adopt.
    """
    revive_journals(storage_dir)
    orphans = [folder for folder in join_parts(find_folders(storage_dir)) if _is_orphan(folder)]
    if not orphans:
        return None
    return start_thread(_adopt, args=(orphans,), name="quark-adopt")


def adopt_run(storage_dir: Path, run_id: str, timeout_s: float) -> None:
    """Deliver what processes that are gone have left of one run; waits for so long at most."""
    revive_journals(storage_dir)
    orphans = [
        folder
        for folder in join_parts(find_folders(storage_dir))
        if (manifest := folder.read_manifest()) is not None
        and manifest.run_id == run_id
        and _is_orphan(folder)
    ]
    thread = start_thread(_adopt, args=(orphans,), name="quark-adopt") if orphans else None
    if thread is not None:
        thread.join(timeout_s)


class ChildDelivery:
    """Delivers, from a run's own process, what its forked children and its analyzers journal.

    Args:
        directory: Where the run's journals lie.
        origin: The process's own writer, whose journal its lanes deliver;
            writers of earlier attempts are not waited for.
        leads: Whether the process ends the run, which comes after what the
            other ranks have journaled; until then each delivers its own.
        open_lane: Opens backends.
    """

    def __init__(
        self,
        directory: Path,
        origin: Origin,
        *,
        leads: bool = True,
        open_lane: OpenLane = open_lane,
    ) -> None:
        self.open_lane = open_lane
        self._directory = directory
        self._origin = origin
        self._leads = leads
        self._ranks: dict[str, int] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lanes = SharedLanes(open_lane, rests=True)
        self._log = SyncLog()
        # When a journal that waits for a mirror is tried again, and how long that wait is.
        self._waits: dict[str, tuple[float, float]] = {}
        # Mirrors may be out of reach for long, and what children log must not wait for that.
        self._outputs = OutputDelivery(directory, origin.writer_id, open_lane)

    def poll(self) -> None:
        """Begin to deliver what is there, on threads of its own, if none is at it already."""
        names = self._list_names()
        found = self._find(names, own_rank=True)
        now = time.monotonic()
        due = [f for f in found if self._waits.get(f.path.name, (now, 0.0))[0] <= now]
        if due or not found:
            self._deliver(due)
        if self._leads:
            self._outputs.poll(names)

    def poll_outputs(self) -> None:
        """Begin to deliver what analyzers have journaled now, without waiting for it."""
        if self._leads:
            self._outputs.poll(self._list_names())

    def _deliver(self, folders: list[JournalFolder]) -> None:
        """Have a thread deliver journals, or with none of them close the mirrors."""
        # The stream's thread and whoever ends the run may both come here.
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                return
            if folders or self._lanes.is_open:
                self._thread = start_thread(self._run, args=(folders,), name="quark-children")

    def _run(self, folders: list[JournalFolder]) -> None:
        """The thread."""
        if not folders:
            self._lanes.close()
        for folder, results in _deliver_journals(folders, self._lanes, self._log):
            name = folder.path.name
            if all(result.state != "waiting" for result in results):
                self._waits.pop(name, None)
                continue
            # To count what waits, all of the journal is read.
            wait_s = min(2.0 * self._waits.get(name, (0.0, 0.5))[1], _LONGEST_WAIT_S)
            self._waits[name] = time.monotonic() + wait_s, wait_s

    def finish(self, timeout_s: float, *, writers_timeout_s: float) -> None:
        """Deliver all that the run's other writers have journaled, before the run's end does.

        Args:
            timeout_s: How long delivery may take.
            writers_timeout_s: How long, within that, to wait for writers of
                this attempt that still have the run open; what they log later
                comes after the run's end.
        """
        deadline = time.monotonic() + timeout_s
        writers_deadline = time.monotonic() + min(timeout_s, writers_timeout_s)
        self._lanes.hurry()
        if self._leads:
            self._outputs.hurry(self._list_names())
        while self._count_writing() and time.monotonic() < writers_deadline:
            self._deliver(self._find_all())
            time.sleep(_WRITERS_POLL_S)
        for _ in range(2):  # what was under way may have missed what came last
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            self._deliver(self._find_all())
        for _ in range(2):
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            self._deliver([])
        # Half of what is left is for the run's own records, with its end among them.
        self._outputs.join(max(0.0, deadline - time.monotonic()) / 2)

    def finish_outputs(self, timeout_s: float) -> None:
        """Try once more what analyzers found and a mirror has not taken, after the run's end.

        One that had not got the run itself before has it now.

        Args:
            timeout_s: How long that may take; what is left is said on the log.
        """
        if not self._leads:
            return
        left = self._outputs.finish(self._list_names, timeout_s)
        if left:
            _log.warning(
                "run %s: %d analyses wait for its mirrors. To deliver them, run: quark sync",
                self._origin.run_id,
                left,
            )

    def _count_writing(self) -> int:
        """How many other writers of this attempt may still journal something."""
        found = self._find_all()
        manifests = [(folder, folder.read_manifest()) for folder in found]
        return sum(
            manifest is not None
            and manifest.attempt == self._origin.attempt
            and folder.is_written(manifest)
            for folder, manifest in manifests
        )

    def _list_names(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except OSError:
            return []

    def _find_all(self) -> list[JournalFolder]:
        return self._find(self._list_names(), own_rank=not self._leads)

    def _find(self, names: list[str], *, own_rank: bool) -> list[JournalFolder]:
        others = {
            name: JournalFolder(self._directory / name)
            for name in names
            if name != self._origin.writer_id and split_generation(name) is None
        }
        if not own_rank:
            return list(others.values())
        return [
            f for name, f in others.items() if self._find_rank(name, f) in (None, self._origin.rank)
        ]

    def _find_rank(self, name: str, folder: JournalFolder) -> int | None:
        """Whose journal it is, or None; read once, since there may be one for each rank."""
        if name not in self._ranks:
            manifest = folder.read_manifest()
            if manifest is None:
                return None
            self._ranks[name] = manifest.rank
        return self._ranks[name]


def count_quarantined(storage_dir: Path) -> list[QuarantinedCount]:
    """What the backends have refused, by run, backend and reason."""
    found = []
    for directory in find_paths(storage_dir / ".quark" / "runs", "*/quarantine/*"):
        counts: dict[tuple[str, str], list[int]] = {}
        for item in Quarantine(directory, directory.name).load():
            counts.setdefault((item.backend, item.reason), []).append(item.batch.count)
        run_id = directory.parent.parent.name
        found += [
            QuarantinedCount(run_id, backend, reason, len(records), sum(records))
            for (backend, reason), records in counts.items()
        ]
    return found


def _is_orphan(folder: JournalFolder) -> bool:
    manifest = folder.read_manifest()
    if manifest is None or (manifest.generation and find_owner(folder.path.parent) is not None):
        return False
    return all(folder.lease(entry.name).is_stale() for entry in manifest.lanes)


def _adopt(orphans: list[JournalFolder]) -> None:
    lanes = SharedLanes(open_lane)
    for _ in _deliver_journals(orphans, lanes, SyncLog()):
        pass
    lanes.close()


def _deliver_journals(
    folders: list[JournalFolder], lanes: SharedLanes, log: SyncLog
) -> Iterator[tuple[JournalFolder, list[LaneSync]]]:
    for folder, manifest in order_journals(folders):
        try:
            results = sync_folder(folder, manifest, lanes.open, keep_lane=lanes.keep)
        except Exception:  # noqa: BLE001 - this must not reach the run
            _log.exception("the journal %s could not be delivered", folder.path)
            continue
        log.note(f"journal {manifest.writer_id} of run {manifest.run_id}", results)
        yield folder, results


def clear_leftovers_at_start(after: threading.Thread | None) -> None:
    """Clear what others left, unless this process did so a moment ago; does not wait for it.

    A process that trains one run after another would look through the whole machine for each.

    Args:
        after: Delivers what was left in this store; its boxes are looked at when it has ended.
    """
    global _clear_again_at_s
    now_s = time.monotonic()
    if now_s >= _clear_again_at_s:
        _clear_again_at_s = now_s + _CLEAR_EVERY_S
        _clear_leftovers(after=after)


def _clear_leftovers(*, after: threading.Thread | None = None, timeout_s: float = 0.0) -> None:
    """End stopped helpers and delete black boxes that nobody can need; never raises.

    Done on a thread, since a path of another store may lie on a disk that hangs.

    Args:
        after: Delivers what was left in this store, which may have been moved: its boxes
            look like those of a store that is gone until that has been done.
        timeout_s: How long to wait for all of it.
    """
    thread = start_thread(_clear, args=(after,), name="quark-leftovers")
    if thread is not None and timeout_s > 0.0:
        thread.join(timeout_s)


def _clear(after: threading.Thread | None) -> None:
    if after is not None:
        after.join()
    ended = end_stopped_helpers()
    if ended:
        _log.info("stopped helper processes of ended training processes were ended: %s", ended)
    sweep_black_boxes()
