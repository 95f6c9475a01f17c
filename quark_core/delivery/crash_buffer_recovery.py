"""Reads the crash buffer of a killed process, and journals what its journal lacks."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from quark_core.backends.contract import Backend, Batch, SupportsReplay
from quark_core.delivery.channel import MetricKey, expand_row
from quark_core.delivery.crash_buffer import (
    ACCOUNTS_AT,
    ACCOUNTS_BYTES,
    ACCOUNTS_HEAD,
    ENTRY,
    FRAMES_NAME,
    HEAD_BYTES,
    HEAD_NAME,
    MAGIC,
    NOTES,
    NOTES_AT,
    RECORDS_SUFFIX,
    SHARED_MEMORY,
    StreamAccounts,
    find_box_path,
    is_own_box,
    remove_black_box,
)
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import SEGMENT_SUFFIX, DamagedSegment, Origin, parse_segment
from quark_core.errors import RunNotFoundError
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    StreamRecord,
)
from quark_core.records.base import now_us
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject, decode_json
from quark_core.records.names import split_name
from quark_core.records.schema import column_types, restorers
from quark_core.system.folders import find_moved, is_surely_gone
from quark_core.system.process import is_alive

_KINDS = {1: MetricRecord.KIND, 3: EventRecord.KIND, 4: LifecycleRecord.KIND}


@dataclass(slots=True)
class BoxContents:
    """What is in a black box, but for its records: `iterate_entries` gives those.

    Attributes:
        batches: Batches that the journal did not take when they were made.
        accounts: What its process knew to be in batches; None where that cannot be told.
        uncovered: At most so many records more were accepted and are in no journal.
        was_filling: Whether the process may have had to let go of records.
    """

    batches: list[Batch] = field(default_factory=list)
    accounts: StreamAccounts | None = None
    uncovered: int = 0
    was_filling: bool = False


def read_black_box(path: Path) -> BoxContents:
    """What is in a black box whose process is gone; none is as good as an empty one.

    Raises:
        OSError: It is there and cannot be read.
    """
    contents = BoxContents()
    if path.is_dir():
        _read_head(path / HEAD_NAME, contents)
        contents.batches = _read_frames(path / FRAMES_NAME)
    return contents


def iterate_entries(path: Path) -> Iterator[Any]:
    """The entries of a black box in the order they came, journaled ones among them.

    Raises:
        OSError: It is there and cannot be read.
    """
    if path.is_dir():
        yield from _read_segments(path)


def find_entry_span(entry: Any) -> tuple[str, int, int]:
    """Kind of an entry's records, their first sequence number and the one after the last."""
    kind = entry[0]
    if kind == 2:
        return MetricRecord.KIND, entry[1], entry[1] + len(entry[-1])
    if kind == 5:
        return entry[1], entry[2][0], entry[2][0] + 1
    return _KINDS[kind], entry[1], entry[1] + 1


def _read_head(path: Path, contents: BoxContents) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # its process was killed while it made the box
    if len(data) < HEAD_BYTES or data[: len(MAGIC)] != MAGIC:
        return
    uncovered, journaled, filling = NOTES.unpack_from(data, NOTES_AT)
    contents.uncovered = max(0, uncovered - journaled)
    contents.was_filling = bool(filling)
    newest = -1
    for place in ACCOUNTS_AT:
        generation, length, checksum = ACCOUNTS_HEAD.unpack_from(data, place)
        start = place + ACCOUNTS_HEAD.size
        body = data[start : start + min(length, ACCOUNTS_BYTES)]
        expected = xxhash.xxh32_intdigest(body, generation & 0xFFFFFFFF)
        if generation <= newest or len(body) != length or checksum != expected or not body:
            continue
        contents.accounts = StreamAccounts.decode(body)
        newest = generation
    if contents.accounts is None:
        contents.accounts = StreamAccounts()  # nothing was in a batch yet


def _read_frames(path: Path) -> list[Batch]:
    """Batches by number; what was kept later may have lower ones."""
    found: dict[int, Batch] = {}
    for segment in sorted(path.glob(f"*{SEGMENT_SUFFIX}")):
        try:
            batches = parse_segment(segment.read_bytes()).batches
        except DamagedSegment:
            continue  # its process was killed while it began it
        found.update((batch.number, batch) for batch in batches)
    return [found[number] for number in sorted(found)]


def _read_segments(path: Path) -> Iterator[Any]:
    for segment in sorted(path.glob(f"*{RECORDS_SUFFIX}")):
        data = segment.read_bytes()
        position = 0
        while position + ENTRY.size <= len(data):
            length, checksum = ENTRY.unpack_from(data, position)
            start = position + ENTRY.size
            body = data[start : start + length]
            if not body or len(body) != length or xxhash.xxh32_intdigest(body) != checksum:
                break
            try:
                yield msgspec.msgpack.decode(body)
            except msgspec.DecodeError:
                break
            position = start + length


def restore_records(entry: Any, origin: Origin) -> list[Any]:
    """The records of an entry; none where it is of a kind that is not known here."""
    head: Any = origin.head
    plain: Any
    kind, *fields = entry
    if kind == 1:
        sequence, time_us, key, value, step, epoch, description, metadata = fields
        names = (key, *split_name(key))
        rest: Any = (value, step, epoch, description, _to_object(metadata))
        return [MetricRecord(*(*head, sequence, time_us, *names, *rest))]
    if kind == 2:
        sequence, time_us, step, epoch, names, values = fields
        keys = tuple(MetricKey(name, *split_name(name)) for name in names)
        return list(expand_row((sequence, time_us, step, epoch, keys, values), origin.head))
    if kind == 3:
        *plain, payload = fields
        return [EventRecord(*(*head, *plain, _to_object(payload)))]
    if kind == 4:
        *plain, body = fields
        return [LifecycleRecord(*(*head, *plain, _to_object(body)))]
    if kind == 5 and fields[0] in RECORD_TYPES:
        name, plain = fields
        restore = restorers(name)
        types = column_types(name)
        values = [
            None
            if value is None
            else restore[field](value)
            if field in restore
            # Only JSON objects travel as bytes.
            else _to_object(value)
            if types[field] == "j"
            else value
            for field, value in zip(types, plain, strict=True)
        ]
        record_type: Any = RECORD_TYPES[name]
        return [record_type(*head, *values)]
    return []


def _to_object(encoded: bytes | None) -> JsonObject | None:
    return None if encoded is None else decode_json(encoded)


# Journals what a killed process left in its black box and not in its journal.
#
# A box is deleted by the start or sync of its own store, once it is journaled.
# Where the store was deleted, that never comes, and the box would keep its memory
# until the machine is started anew. It must be told from a store that is out of
# reach, such as on a disk that is not mounted; see `is_surely_gone`.

_log = logging.getLogger("quark")

_BATCH_RECORDS = 5_000
_REPLAY_BATCHES = 256
_OTHERS_S = 5.0

OpenLane = Callable[[Manifest, LaneEntry], tuple[Backend, bool]]
"""Opens the backend of a lane; returns it and whether a batch may be sent to it twice."""


@dataclass(slots=True)
class Unjournaled:
    """What only the black box of a killed process has.

    Attributes:
        batches: Batches that are not in the journal, in the order of their numbers.
        records: How many records are in no batch yet.
        lost: At most so many records were accepted and are nowhere.
        accounts: Which records are in batches.
        certain: Whether the accounts say all; else the primary may have more.
    """

    batches: list[Batch] = field(default_factory=list)
    records: int = 0
    lost: int = 0
    accounts: StreamAccounts = field(default_factory=StreamAccounts)
    certain: bool = True

    @property
    def waiting(self) -> int:
        """Records that wait for the journal."""
        return self.records + sum(batch.count for batch in self.batches)


def find_black_box(folder: JournalFolder, manifest: Manifest) -> Path | None:
    """The black box that belongs to a journal, or None where there is none.

    Raises:
        OSError: There is one by its name that is not to be touched: of another
            user, of another journal, or of a process that lives. To read it as
            empty and delete it would lose what is in there.
    """
    path = find_box_path(manifest.run_id, manifest.writer_id)
    if manifest.black_box is None or path is None or not os.path.lexists(path):
        return None
    if not is_own_box(path):
        raise PermissionError(f"{path} is not a folder, or belongs to another user")
    own = JournalFolder(path).read_manifest()
    if own is not None and own.journal is not None:
        if is_alive(own.process):
            raise OSError(f"the process of {path} is still running")
        home = Path(own.journal)
        # A store may have been moved; one that is still there keeps what is its own.
        if not _is_same(home, folder.path) and _knows_box(JournalFolder(home).read_manifest()):
            raise OSError(
                f"this is a copy of the journal {home}, without the last records of its "
                "process. Run `quark sync` on that store to deliver them there"
            )
    return path


def describe_gone(manifest: Manifest) -> str:
    """What to say of a process that was killed with the shared memory that it had, for people."""
    return (
        f"the shared memory of its process ({manifest.black_box}) is not accessible from here. "
        "If its machine or container is gone, the last records that were not journaled are "
        "lost: about 50 ms, or more on a busy machine"
    )


def _is_same(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def find_unjournaled(folder: JournalFolder, manifest: Manifest) -> Unjournaled:
    """What the black box of a journal's process has and the journal has not; touches nothing.

    Raises:
        OSError: The black box cannot be read.
    """
    path = find_black_box(folder, manifest)
    if path is None:
        return Unjournaled()
    contents = read_black_box(path)
    found = Unjournaled(
        accounts=contents.accounts or StreamAccounts(), certain=contents.accounts is not None
    )
    end = 0
    # What is damaged is told by whoever delivers the journal.
    for batch in JournalReader(folder.path, on_damage=lambda *_: None).read():
        found.accounts.add_batch(batch)
        end = batch.number + 1
    # What the journal let go, every lane had passed; so had it what lies below its end.
    found.batches = [batch for batch in contents.batches if batch.number >= end]
    for batch in found.batches:
        found.accounts.add_batch(batch)
    seen = found.accounts.copy()
    for entry in iterate_entries(path):
        kind, start, stop = find_entry_span(entry)
        fresh = [number for number in range(start, stop) if not seen.knows(kind, number)]
        found.records += len(fresh)
        if fresh:
            seen.add(kind, [(start, stop)])
    found.lost = _count_lost(contents, seen)
    return found


def _count_lost(contents: BoxContents, seen: StreamAccounts) -> int:
    """Records that are nowhere: exact, or an upper bound where shared memory was full."""
    lost = contents.uncovered + seen.exposed
    if contents.was_filling:
        # Otherwise a number that is missing is of a call that had not returned.
        lost += seen.count_untold()
    return lost


def recover_black_box(folder: JournalFolder, manifest: Manifest, open_lane: OpenLane) -> int:
    """Add to a journal what only its black box has, once its process is gone.

    Batches keep their numbers and bytes. Records that are in no batch get new
    numbers, after all that the journal, the box and the lanes' marks know of;
    where the box cannot say, since it is damaged, the primary is asked
    what it has, and as long as it does not answer the box stays. May be
    called by several processes at once: one of them does it, and the others
    wait for that.

    Returns:
        How many records were added.
    """
    if manifest.black_box is None or folder.is_written(manifest):
        return 0
    try:
        path = find_black_box(folder, manifest)
    except OSError as error:
        _log.warning("run %s: %s", manifest.run_id, error)
        return 0
    if path is None:
        if folder.lacks_end:
            _log.warning("run %s: %s", manifest.run_id, describe_gone(manifest))
            folder.close()
        return 0
    lease = folder.lease("black box")
    deadline = time.monotonic() + _OTHERS_S
    while not lease.take():
        # Whoever goes on before the other process is through would deliver half of it.
        if time.monotonic() >= deadline or not os.path.lexists(path):
            return 0
        time.sleep(0.02)
    try:
        return _recover(folder, manifest, path, open_lane)
    except OSError as error:
        _log.warning(
            "run %s: the records in %s cannot be journaled now (%s). They stay there",
            manifest.run_id,
            path,
            error,
        )
        return 0
    finally:
        lease.release()


def _recover(folder: JournalFolder, manifest: Manifest, path: Path, open_lane: OpenLane) -> int:
    origin = Origin(manifest.run_id, manifest.writer_id, manifest.attempt, manifest.rank)
    if not os.path.lexists(path):
        return 0  # another process was quicker
    found = find_unjournaled(folder, manifest)
    if (
        found.records
        and not found.certain
        and not _ask_primary(manifest, found.accounts, open_lane)
    ):
        # Numbers that the primary has already must not be given to other records.
        raise OSError("its primary store does not answer which records it has")
    marks = [folder.mark(entry.name) for entry in manifest.lanes]
    first = max([found.accounts.next_number] + [mark.begun for mark in marks])
    added = found.waiting
    batches = _make_batches(path, found, origin, first)
    journal: Journal | None = None
    for batch in _chain(found.batches, batches):
        journal = journal or Journal.reopen(folder.path, origin)
        journal.append([batch])
    if journal is not None:
        journal.sync()
        journal.close()
    remove_black_box(path)
    folder.close()
    if added:
        _log.info("run %s: %d records were recovered from the crash buffer", origin.run_id, added)
    return added


def _chain(first: list[Batch], rest: Iterator[Batch]) -> Iterator[Batch]:
    yield from first
    yield from rest


def _ask_primary(manifest: Manifest, accounts: StreamAccounts, open_lane: OpenLane) -> bool:
    """Account for all batches that the primary has of a writer; whether it said."""
    for entry in manifest.lanes:
        if not entry.primary:
            continue
        try:
            primary, _ = open_lane(manifest, entry)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises that cannot be opened
            _log.debug("run %s: %s: %s", manifest.run_id, entry.name, error)
            return False
        try:
            if not isinstance(primary, SupportsReplay):
                return True
            start = 0
            while batches := primary.read_batches(
                manifest.run_id, manifest.writer_id, start, _REPLAY_BATCHES
            ):
                for batch in batches:
                    accounts.add_batch(batch)
                start = batches[-1].number + 1
        except RunNotFoundError:
            return True  # its start is in the box, too
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("run %s: %s: %s", manifest.run_id, entry.name, error)
            return False
        finally:
            primary.close()
    return True


def _make_batches(path: Path, found: Unjournaled, origin: Origin, first: int) -> Iterator[Batch]:
    """Batches as the delivery thread would have made them: one kind each, lifecycle last."""
    accounts = found.accounts
    waiting: dict[str, list[StreamRecord]] = {}
    unknown: Counter[str] = Counter()
    number = first

    def make(kind: str) -> Batch:
        nonlocal number
        records = waiting.pop(kind)
        head = (origin.run_id or "", origin.writer_id, origin.attempt, origin.rank)
        number += 1
        return Batch(*head, number - 1, kind, len(records), encode_records(records))

    for entry in iterate_entries(path):
        kind, start, stop = find_entry_span(entry)
        if accounts.covers(kind, start, stop):
            continue
        if kind not in RECORD_TYPES:
            unknown[kind] += sum(not accounts.knows(kind, one) for one in range(start, stop))
        records = [
            record
            for record in restore_records(entry, origin)
            if not accounts.knows(kind, record.sequence)
        ]
        accounts.add(kind, [(start, stop)])
        waiting.setdefault(kind, []).extend(records)
        if kind != LifecycleRecord.KIND and len(waiting[kind]) >= _BATCH_RECORDS:
            yield make(kind)
    if found.lost:
        # A gap that is told, in the run itself, so that nobody takes its end for whole.
        reason = "killed when shared memory was full"
        for record in _describe_gap(found.lost, reason, accounts, origin):
            waiting.setdefault(record.KIND, []).append(record)
    for kind, count in unknown.items():
        reason = f"killed, and the plugin that defines records of kind {kind!r} is not installed"
        for record in _describe_gap(count, reason, accounts, origin):
            waiting.setdefault(record.KIND, []).append(record)
    for kind in sorted(waiting, key=lambda kind: kind == LifecycleRecord.KIND):
        if waiting[kind]:
            yield make(kind)


def _describe_gap(
    lost: int, reason: str, accounts: StreamAccounts, origin: Origin
) -> list[StreamRecord]:
    """What a living process would have said of a gap: an event and a lifecycle record."""
    _log.warning("run %s: at most %d records are lost: %s", origin.run_id, lost, reason)
    head: Any = origin.head
    data = JsonObject({"at_most": lost, "reason": reason})

    def next_place(kind: str) -> tuple[int, int]:
        spans = accounts.spans.get(kind)
        start = 0 if spans is None else spans.stop
        accounts.add(kind, [(start, start + 1)])
        return start, now_us()

    return [
        EventRecord(
            *(*head, *next_place("event"), "records_dropped", "error", None, None, None, data)
        ),
        LifecycleRecord(*(*head, *next_place("lifecycle"), "gap", data)),
    ]


def find_orphan_boxes(storage_dir: Path) -> Iterator[tuple[JournalFolder, Manifest]]:
    """Black boxes of dead processes of a storage root whose journals do not know of them.

    Such a journal never came into being, or is an older copy that was restored.
    """
    try:
        names = os.listdir(SHARED_MEMORY)
    except OSError:
        return
    for name in sorted(names):
        if not name.startswith("quark-"):
            continue
        folder = JournalFolder(SHARED_MEMORY / name)
        # Anybody may put something there; what it says is believed of this user's own only.
        if not is_own_box(folder.path):
            continue
        manifest = folder.read_manifest()
        if (
            manifest is not None
            and manifest.journal is not None
            and manifest.storage_dir == str(storage_dir)
            and is_alive(manifest.process) is False
            and not _knows_box(JournalFolder(Path(manifest.journal)).read_manifest())
        ):
            yield folder, manifest


def _knows_box(manifest: Manifest | None) -> bool:
    return manifest is not None and manifest.black_box is not None


def revive_journals(storage_dir: Path) -> None:
    """Make the journals that are not there, for what is in their boxes; or tell them of it."""
    for folder, manifest in find_orphan_boxes(storage_dir):
        home = manifest.journal
        assert home is not None
        # A store may have been moved a moment before the end: its journal is there with it.
        moved = [find_moved(place) for place in manifest.places if place.path == home]
        if moved and moved[0] is not None:
            manifest = msgspec.structs.replace(manifest, moved_to=str(moved[0]))
        try:
            JournalFolder(Path(home)).write_manifest(manifest)
        except OSError as error:
            _log.warning("run %s: records in %s wait: %s", manifest.run_id, folder.path, error)


# Of a box that does not say whose it is, or where its store was.
_OWNERLESS_S = 30 * 86400.0


def sweep_black_boxes() -> list[Path]:
    """Delete this user's black boxes whose process and store are gone; never raises.

    Returns:
        Those that were deleted.
    """
    swept = []
    for path in _find_boxes():
        try:
            if _is_left(path):
                remove_black_box(path)
                swept.append(path)
        except Exception as error:  # noqa: BLE001 - whatever stands in there, the others come next
            _log.debug("the crash buffer %s is ignored: %s", path, error)
    if swept:
        _log.info("%d crash buffers of deleted stores were deleted", len(swept))
    return swept


def _find_boxes() -> Iterator[Path]:
    try:
        names = sorted(os.listdir(SHARED_MEMORY))
    except OSError:
        return
    for name in names:
        path = SHARED_MEMORY / name
        # Anybody may put something there; only what is this user's own is looked at.
        if name.startswith("quark-") and is_own_box(path):
            yield path


def _is_left(path: Path) -> bool:
    """Whether nobody can ever need a box."""
    manifest = JournalFolder(path).read_manifest()
    if manifest is None:
        return _is_old(path)
    if is_alive(manifest.process) is not False:
        return False
    if any(map(_may_be_there, (manifest.storage_dir, manifest.run_path, manifest.journal))):
        return False
    if not manifest.places:
        return _is_old(path)
    return all(is_surely_gone(place) for place in manifest.places)


def _may_be_there(path: str | None) -> bool:
    """Whether a path is there; so where nobody can see."""
    try:
        os.lstat(path or "")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _is_old(path: Path) -> bool:
    """Whether nothing of a box was changed for a month, and no process here has it mapped."""
    newest = max(file.lstat().st_ctime for file in (path, *path.glob("*")))
    return time.time() - newest > _OWNERLESS_S and not _is_mapped(path)


def _is_mapped(path: Path) -> bool:
    wanted = os.fsencode(path)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if wanted in Path("/proc", name, "maps").read_bytes():
                    return True
            except OSError:
                continue
    return False
