"""Delivers what processes have left behind in their journals."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import (
    HELD_FILE,
    Backend,
    Batch,
    SupportsChanges,
    SupportsGroups,
    SupportsRead,
    SupportsReplay,
)
from quark_core.delivery.crash_buffer import find_box_path
from quark_core.delivery.crash_buffer_recovery import (
    OpenLane,
    describe_gone,
    find_black_box,
    find_unjournaled,
    recover_black_box,
)
from quark_core.delivery.delivery_state import LaneMark, lane_folder_name
from quark_core.delivery.journal import JournalReader, make_stand_ins
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    LostBatches,
    Manifest,
    journal_directory,
)
from quark_core.delivery.sending import (
    GROUP_BATCHES,
    FindPayload,
    Quarantine,
    StartWatch,
    cut_groups,
    send_payloads,
    set_payloads_aside,
)
from quark_core.errors import BackendRejected, BackendUnavailable, RunNotFoundError, describe_error
from quark_core.system.folders import describe_link, find_foreign_link

_log = logging.getLogger("quark")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0

# Run and name of a lane.
_Key = tuple[str, str]


class SharedLanes:
    """Opens each mirror of a run once for many journals, since that may take seconds.

    The primary is opened for each. A mirror that only cannot take records now
    stays open; one that fails otherwise is closed, and opened anew for the
    next journal. So is one whose journal another process was at meanwhile, such
    as `quark sync`: what it remembers of the writer is older than its files
    then. For one thread at a time, which holds the lease of the lane.

    Args:
        open_lane: Opens backends.
        rests: Whether a mirror that has failed is not asked again before 1 s
            has passed, then ever later, up to a minute.
    """

    def __init__(self, open_lane: OpenLane, *, rests: bool = False) -> None:
        self._open_lane = open_lane
        self._rests = rests
        self._opened: dict[_Key, tuple[Backend, bool]] = {}
        # How far each open mirror left each writer, and the journal that it is at.
        self._left: dict[tuple[_Key, str], int] = {}
        self._at: tuple[Manifest, LaneEntry] | None = None
        # When each may be asked again, how long that rest is, and what it failed with.
        self._resting: dict[_Key, tuple[float, float, Exception]] = {}

    @property
    def is_open(self) -> bool:
        """Whether there is a mirror to close."""
        return bool(self._opened)

    def open(self, manifest: Manifest, entry: LaneEntry) -> tuple[Backend, bool]:
        """As `OpenLane` says.

        Raises:
            BackendUnavailable: It rests; what it failed with is said again.
        """
        if entry.primary:
            return self._open_lane(manifest, entry)
        key = manifest.run_id, entry.name
        until, _, error = self._resting.get(key, (0.0, 0.0, None))
        if time.monotonic() < until:
            raise BackendUnavailable(str(error), backend=entry.name) from error
        done = _find_done(manifest, entry)
        if self._left.get((key, manifest.writer_id), done) != done:
            self._close(key)
        self._at = manifest, entry
        if key not in self._opened:
            try:
                self._opened[key] = self._open_lane(manifest, entry)
            except Exception as failure:
                self._let_rest(key, failure)
                raise
        return self._opened[key]

    def keep(self, backend: Backend, error: Exception | None) -> bool:
        """Whether a backend stays open; where it does not, its caller closes it.

        Args:
            backend: It, after a journal.
            error: What it failed with; None where it has the journal.
        """
        key = next((key for key, (kept, _) in self._opened.items() if kept is backend), None)
        if key is None or self._at is None:
            return False
        manifest, entry = self._at
        self._left[key, manifest.writer_id] = _find_done(manifest, entry)
        if error is None:
            self._resting.pop(key, None)
            return True
        self._let_rest(key, error)
        if not isinstance(error, BackendUnavailable):
            self._forget(key)
            return False
        return True

    def hurry(self) -> None:
        """Let no mirror rest any longer."""
        self._resting.clear()

    def close(self, *, but_run_id: str | None = None) -> dict[_Key, str]:
        """Close the mirrors, except for those of one run.

        Returns:
            Run and name -> what a mirror could not finish.
        """
        found = {k: self._close(k) for k in list(self._opened) if k[0] != but_run_id}
        return {key: failure for key, failure in found.items() if failure is not None}

    def _close(self, key: _Key) -> str | None:
        backend = self._forget(key)
        try:
            if backend is not None:
                backend.close()
        except Exception as error:  # noqa: BLE001 - the others must still be closed
            _log.warning("backend %s: run %s: %s", key[1], key[0], error)
            return describe_error(error)
        return None

    def _forget(self, key: _Key) -> Backend | None:
        backend, _ = self._opened.pop(key, (None, False))
        self._left = {each: done for each, done in self._left.items() if each[0] != key}
        return backend

    def _let_rest(self, key: _Key, error: Exception) -> None:
        if self._rests:
            _, last_s, _ = self._resting.get(key, (0.0, _FIRST_REST_S / 2, None))
            rest_s = min(2.0 * last_s, _LONGEST_REST_S)
            self._resting[key] = time.monotonic() + rest_s, rest_s, error


def _find_done(manifest: Manifest, entry: LaneEntry) -> int:
    """How far a lane of a journal is, as the disk has it."""
    directory = journal_directory(Path(manifest.run_path), manifest.run_id)
    folder = JournalFolder(directory / lane_folder_name(manifest.writer_id))
    return folder.mark(entry.name).done


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
        missing: First and last number of each gap that no store can fill; the
            last is None where nobody knows how many batches there were.
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
    missing: list[tuple[int, int | None]] = field(default_factory=list)
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
    is_written = folder.is_written(manifest)
    for entry in manifest.lanes:
        result = LaneSync(run_id=manifest.run_id, writer_id=manifest.writer_id, backend=entry.name)
        mark = folder.mark(entry.name)
        reader = _open_reader(folder, result, is_written=is_written)
        result.waiting = boxed + sum(batch.count for batch in reader.read(mark.done))
        result.missing = reader.missing
        lease = folder.lease(entry.name)
        if not lease.is_stale():
            result.state = "held"
            result.reason = f"process {lease.holder.pid if lease.holder else '?'} is delivering it"
        elif reason is not None:
            result.reason = reason
        elif result.waiting == 0:
            result.state = "delivered"
        found.append(result)
    return found


class SyncLog:
    """Says on the log what becomes of journals that are looked at again and again: what is new."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str, str], int] = {}

    def note(self, what: str, results: Iterable[LaneSync]) -> None:
        """Say what was delivered of a journal, and what waits where that is another number.

        Args:
            what: The journal, for people.
            results: What became of its lanes.
        """
        for result in results:
            lane = result.run_id, result.writer_id, result.backend
            if not result.delivered and result.waiting == self._waiting.get(lane, 0):
                continue
            self._waiting[lane] = result.waiting
            _log.info(
                "%s to %s: %d records delivered, %d wait",
                what,
                result.backend,
                result.delivered,
                result.waiting,
            )


def count_boxed(folder: JournalFolder, manifest: Manifest) -> tuple[int, str | None]:
    """What a process that is gone left in its black box and not in its journal; touches nothing.

    Returns:
        The records that are only in the black box, and why the journal is not
        all that there is to deliver: None where it is, or the process lives.
    """
    if manifest.black_box is None or folder.is_written(manifest):
        return 0, None
    try:
        found = find_unjournaled(folder, manifest)
    except OSError as error:
        # What is in it is not known, and may be all of the run.
        return 0, f"its process has ended, and its crash buffer cannot be read: {error}"
    reasons = []
    path = find_box_path(manifest.run_id, manifest.writer_id)
    if folder.lacks_end and (path is None or not os.path.lexists(path)):
        return 0, describe_gone(manifest)
    if found.waiting:
        reasons.append(f"its last {found.waiting} records are in its crash buffer only")
    if found.lost:
        reasons.append(f"at most {found.lost} records are lost, because the crash buffer was full")
    return found.waiting, f"its process has ended: {'; '.join(reasons)}" if reasons else None


def sync_folder(
    folder: JournalFolder,
    manifest: Manifest,
    open_lane: OpenLane,
    *,
    on_progress: Callable[[int], None] | None = None,
    keep_lane: KeepLane | None = None,
    primary_only: bool = False,
) -> list[LaneSync]:
    """Deliver one journal to all of its lanes that nobody else drives, and delete it when done.

    May be repeated, and run beside the journal's own process, at any time.

    Args:
        folder: The journal.
        manifest: What it says of itself.
        open_lane: Opens backends.
        on_progress: Told of each number of records that are done with.
        keep_lane: Says whether a backend stays open; by default each is closed.
        primary_only: Whether mirrors are left for another time.
    """
    try:
        folder.set_strange_aside()
    except OSError as error:
        return [_hold_back(manifest, entry, str(error)) for entry in manifest.lanes]
    link = find_foreign_link(folder.path)
    if link is not None:
        return [_hold_back(manifest, entry, describe_link(link)) for entry in manifest.lanes]
    results = []
    # Asked before anything is read: what a living writer adds meanwhile must not be deleted unread.
    is_final = is_gone = not folder.is_written(manifest)
    recover_black_box(folder, manifest, open_lane)
    box, unread = find_box_path(manifest.run_id, manifest.writer_id), None
    if manifest.black_box is not None and box is not None and os.path.lexists(box):
        is_final = False  # another process is about to journal what is in there
        unread = _explain_unread_box(folder, manifest) if is_gone else None
    for entry in manifest.lanes:
        if primary_only and not entry.primary:
            continue
        result = LaneSync(run_id=manifest.run_id, writer_id=manifest.writer_id, backend=entry.name)
        results.append(result)
        lease = folder.lease(entry.name)
        if not lease.take():
            holder = lease.holder
            result.state = "held" if lease.is_there else "waiting"
            result.reason = f"process {holder.pid if holder else '?'} is delivering it"
            if not lease.is_there:
                result.reason = f"its folder {folder.path} cannot be written"
            continue
        try:
            delivery = _LaneDelivery(folder, manifest, entry, open_lane, result, is_final=is_final)
            delivery.run(on_progress, keep_lane)
            # A later look finds it in the main file of its store, and lets the journal go.
            is_final = is_final and delivery.is_settled
        finally:
            lease.release()
        if unread is not None and result.state == "delivered":
            result.state, result.reason = "waiting", unread
    for what in dict.fromkeys(what for result in results for what in result.damage):
        _log.warning("journal %s: %s", folder.path, what)
    is_whole = all(result.state == "delivered" for result in results)
    if is_final and is_whole and len(results) == len(manifest.lanes):
        unknown = {result.backend: result.unknown for result in results}
        if folder.read_damage() is not None:
            folder.set_aside(unknown=unknown)
            _log.warning("the journal %s was damaged; its files are kept", folder.path)
        elif any(result.damage for result in results):
            _log.warning("the journal %s is kept, because part of it cannot be read", folder.path)
        else:
            folder.remove(unknown=unknown)
    else:
        if is_final and primary_only and all(r.state in ("delivered", "kept") for r in results):
            folder.note_stored()
        folder.prune()
    return results


def _explain_unread_box(folder: JournalFolder, manifest: Manifest) -> str | None:
    """Why what a process that is gone left in its black box is not for this journal, or None."""
    try:
        find_black_box(folder, manifest)
    except OSError as error:
        return str(error)
    return None


def _hold_back(manifest: Manifest, entry: LaneEntry, reason: str) -> LaneSync:
    return LaneSync(
        run_id=manifest.run_id,
        writer_id=manifest.writer_id,
        backend=entry.name,
        state="waiting",
        reason=reason,
    )


class _LaneDelivery:
    """Delivers one journal to one of its lanes.

    Args:
        folder: The journal.
        manifest: What it says of itself.
        entry: The lane.
        open_lane: Opens backends.
        result: Takes what becomes of it.
        is_final: Whether nothing more is written to the journal.
    """

    def __init__(
        self,
        folder: JournalFolder,
        manifest: Manifest,
        entry: LaneEntry,
        open_lane: OpenLane,
        result: LaneSync,
        *,
        is_final: bool,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._entry = entry
        self._open_lane = open_lane
        self._result = result
        self._is_final = is_final
        self._found: list[str] = []
        self._reader = JournalReader(
            folder.path,
            on_damage=lambda name, what: self._found.append(f"{name}: {what}"),
            is_written=not is_final,
        )
        self._backend: Backend | None = None
        self._idempotent = False
        self.is_settled = True
        """Whether the backend has for good what it was given."""
        note = folder.read_damage()
        self._noted = [] if note is None else list(note.lost)

    def run(self, on_progress: Callable[[int], None] | None, keep_lane: KeepLane | None) -> None:
        """Deliver what can be delivered now."""
        folder, manifest, entry, result = self._folder, self._manifest, self._entry, self._result
        mark = folder.mark(entry.name)
        quarantine = Quarantine(
            Path(manifest.run_path) / "quarantine" / lane_folder_name(entry.name),
            entry.name,
            specification=entry.specification,
            project=manifest.project,
        )
        watch = StartWatch.of_journal(quarantine, manifest.writer_id) if entry.primary else None
        failure: Exception | None = None
        try:
            start = self._find_start(mark.done, watch, quarantine)
            batches = self._reader.read(start)
            first = next(batches, None)
            if first is not None or self._reader.missing:
                if self._backend is None:
                    self._backend, self._idempotent = self._open_lane(manifest, entry)
                idempotent = self._idempotent
                if getattr(self._backend, "keeps_journal", False):
                    self._keep(batches)
                    return
                head = [] if first is None else [first]
                # In the journal lie those that went nowhere but to backends.
                places = (folder.path, Path(manifest.run_path))
                find = [PayloadFolder(place).find for place in places]
                whole = self._fill_gaps(chain(head, batches), start)
                for group in cut_groups(whole, GROUP_BATCHES if idempotent else 1):
                    if idempotent or group[0].number >= mark.begun:
                        write = partial(_write, self._backend, group, quarantine, result, find)
                        try:
                            write(mark, watch)
                        except BackendUnavailable as error:
                            if error.lacks_from is None or not idempotent:
                                raise
                            self._fill_again(error.lacks_from, group[0].number, find, str(error))
                            write(mark, watch)
                    else:
                        # Sent once already, perhaps: sending it again could store it twice.
                        result.unknown += group[0].count
                    mark.finish(group[-1].number + 1)
                    if on_progress is not None:
                        on_progress(sum(batch.count for batch in group))
            elif self._is_final and not entry.primary and _holds_something(manifest, entry):
                # All of the journal is taken, and not all of it is on: see `HELD_FILE`.
                self._backend, _ = self._open_lane(manifest, entry)
                if isinstance(self._backend, SupportsGroups):
                    self._backend.write_group([])
            if result.missing or self._reader.left_alone:
                result.damage += self._found
            settle = getattr(self._backend, "settle", None)
            self.is_settled = settle is None or settle()
            result.state = "delivered"
        except Exception as error:  # noqa: BLE001 - the other lanes must still be delivered
            failure = error
            result.state = "waiting"
            result.reason = describe_error(error)
            reader = _open_reader(folder, result, is_written=not self._is_final)
            result.waiting = sum(batch.count for batch in reader.read(mark.done))
        finally:
            mark.close()
            backend = self._backend
            if backend is not None and not (keep_lane is not None and keep_lane(backend, failure)):
                _close(backend, result)

    def _fill_again(self, first: int, end: int, find: Sequence[FindPayload], reason: str) -> None:
        """Give a mirror what it had before and has lost, out of the primary and the journal."""
        _log.warning("backend %s: %s; its records are sent again", self._entry.name, reason)
        assert self._backend is not None
        found = {batch.number: batch for batch in self._replay(first, end - 1)}
        reader = JournalReader(self._folder.path, is_written=not self._is_final)
        for batch in reader.read(first):
            if batch.number >= end:
                break
            found.setdefault(batch.number, batch)
        for _, batch in sorted(found.items()):
            send_payloads(self._backend, [batch], find)
            with suppress(BackendRejected):  # it is in quarantine since the first time
                self._backend.write(batch)

    def _find_start(self, done: int, watch: StartWatch | None, quarantine: Quarantine) -> int:
        """Where to begin: a store may have been put back or damaged since it took the last ones."""
        if watch is None or watch.refusal is not None or not done:
            return done
        self._backend, self._idempotent = self._open_lane(self._manifest, self._entry)
        if getattr(self._backend, "keeps_journal", False) or not self._idempotent:
            return done
        found = find_next(self._backend, self._manifest.run_id, self._manifest.writer_id)
        if found is None or found >= done:
            return done
        # The last ones that it lacks may be those that it has refused.
        refused = quarantine.list_numbers(self._manifest.writer_id)
        while found in refused:
            found += 1
        return min(found, done)

    def _keep(self, batches: Iterable[Batch]) -> None:
        """Leave a journal that is the store as it is; what is wrong with it is said."""
        result = self._result
        for _ in batches:
            pass
        result.missing += self._reader.missing
        result.damage += self._found
        result.state = "kept"
        result.reason = "storage_dir is on a network file system, so the journal is the store"

    def _fill_gaps(self, batches: Iterable[Batch], start: int) -> Iterator[Batch]:
        """The journal's batches, with those that it lacks taken from the primary.

        What nobody has is told, and stood in for.
        """
        wanted = start
        for batch in batches:
            if batch.number > wanted:
                yield from self._fill(wanted, batch.number - 1)
            wanted = batch.number + 1
            yield batch
        for first, last in self._reader.missing:
            if last is None and first >= wanted:
                yield from self._lose(first, None)
            elif last is not None and last >= wanted:
                yield from self._fill(max(first, wanted), last)

    def _fill(self, first: int, last: int) -> Iterator[Batch]:
        """Batches that are not in the journal."""
        wanted = first
        for batch in self._replay(first, last):
            if self._find_noted(batch.number) is not None:
                continue  # what stands in for it has come there already
            if batch.number > wanted:
                yield from self._lose(wanted, batch.number - 1)
            wanted = batch.number + 1
            if not self._entry.primary:
                yield batch
        if wanted <= last and not self._reader.left_alone:
            yield from self._lose(wanted, last)

    def _replay(self, first: int, last: int) -> list[Batch]:
        """Those of the batches that the primary has."""
        entry = next((entry for entry in self._manifest.lanes if entry.primary), None)
        if entry is None:
            return []
        if self._entry.primary:
            return _read_batches(self._backend, self._manifest, first, last)
        primary, _ = self._open_lane(self._manifest, entry)
        try:
            return _read_batches(primary, self._manifest, first, last)
        finally:
            primary.close()

    def _lose(self, first: int, last: int | None) -> list[Batch]:
        """Tell that batches are gone for good, before anything behind them is delivered."""
        manifest, result = self._manifest, self._result
        # As it was found first: what stands in for it must be the same each time.
        noted = self._find_noted(first)
        wanted, first, last = first, *((noted.first, noted.last) if noted else (first, last))
        lost = LostBatches(result.backend, first, last)
        result.missing.append((first, last))
        if not self._found:
            self._found.append(lost.describe())
        self._folder.note_damage(manifest, [lost], self._found)
        self._noted.append(lost)
        if not self._is_final:
            return []
        starts = self._entry.primary and not _has_attempt(self._backend, manifest)
        found = make_stand_ins(self._folder, manifest, first, last, starts=starts)
        return [batch for batch in found if batch.number >= wanted]

    def _find_noted(self, number: int) -> LostBatches | None:
        """The gap, known already, that a batch is in."""
        return next((lost for lost in self._noted if lost.covers(number)), None)


def _holds_something(manifest: Manifest, entry: LaneEntry) -> bool:
    """Whether a mirror of the run has taken records that it has not passed on yet."""
    try:
        mirrors = Path(manifest.run_path) / "mirrors" / entry.name.partition(":")[0]
        return any(mirrors.glob(f"*/{HELD_FILE}"))
    except OSError:
        return False


def _close(backend: Backend, result: LaneSync) -> None:
    """Close a backend that has its records; what it could not finish is its own to keep."""
    try:
        backend.close()
    except Exception as error:  # noqa: BLE001 - the other lanes and journals must still be delivered
        _log.warning("backend %s: run %s: %s", result.backend, result.run_id, error)
        result.reason = result.reason or describe_error(error)


def find_next(backend: object, run_id: str, writer_id: str) -> int | None:
    """Number of a writer's next batch by what a backend has; None where it does not tell."""
    if not isinstance(backend, SupportsChanges):
        return None
    try:
        return backend.read_heads(run_id).cursor.get(writer_id, 0)
    except RunNotFoundError:
        return 0
    except Exception as error:  # noqa: BLE001 - then what it has is read, or believed
        _log.debug("run %s: its progress is unknown: %s", run_id, error)
        return None


def _read_batches(backend: object, manifest: Manifest, first: int, last: int) -> list[Batch]:
    """Batches of a journal's writer as a store has them; none where it has no such run."""
    if not isinstance(backend, SupportsReplay):
        return []
    try:
        found = backend.read_batches(manifest.run_id, manifest.writer_id, first, last - first + 1)
    except RunNotFoundError:
        return []
    return [batch for batch in found if batch.number <= last]


def _has_attempt(backend: object, manifest: Manifest) -> bool:
    """Whether a store has the start of a writer's attempt."""
    if manifest.awaits_run or not isinstance(backend, SupportsRead):
        return True
    try:
        return backend.load_run(manifest.run_id).run.attempt >= manifest.attempt
    except RunNotFoundError:
        return False


def _write(
    backend: Backend,
    batches: list[Batch],
    quarantine: Quarantine,
    result: LaneSync,
    find: Sequence[FindPayload],
    mark: LaneMark,
    watch: StartWatch | None,
) -> None:
    refusal = None if watch is None else watch.refusal
    if len(batches) > 1 and refusal is None and isinstance(backend, SupportsGroups):
        try:
            send_payloads(backend, batches, find)
            mark.begin(batches[-1].number + 1)
            backend.write_group(batches)
        except BackendRejected:
            # Which of them is refused shows when they go singly.
            _log.debug("a group was rejected; its batches are sent one by one")
        else:
            result.delivered += sum(batch.count for batch in batches)
            if watch is not None:
                watch.note_stored(backend, batches)
            return
    for batch in batches:
        try:
            if watch is not None and watch.refusal is not None:
                raise BackendRejected(watch.refusal)
            send_payloads(backend, [batch], find)
            mark.begin(batch.number + 1)
            backend.write(batch)
        except BackendRejected as error:
            if watch is not None:
                watch.note_refused(batch, str(error))
            quarantine.put(batch, str(error))
            set_payloads_aside([batch], find[0], quarantine.directory)
            reasons = result.quarantined
            reasons[str(error)] = reasons.get(str(error), 0) + batch.count
        else:
            result.delivered += batch.count
            if watch is not None:
                watch.note_stored(backend, [batch])


def _open_reader(folder: JournalFolder, result: LaneSync, *, is_written: bool) -> JournalReader:
    """Reads a journal, and notes what is wrong with it."""

    def note(name: str, damage: str) -> None:
        result.damage.append(f"{name}: {damage}")

    return JournalReader(folder.path, on_damage=note, is_written=is_written)
