"""The journal of one writer: append-only segments that survive the process."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from quark_core.backends.contract import Batch
from quark_core.delivery.delivery_state import Files, lane_folder_name
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import (
    END_MARK,
    SEGMENT_SUFFIX,
    DamagedPart,
    DamagedSegment,
    NewerSegment,
    Origin,
    ParsedSegment,
    encode_end_mark,
    encode_frame,
    encode_header,
    parse_segment,
    read_end_mark,
    read_origin,
    segment_name,
)
from quark_core.errors import SchemaValidationError
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LifecycleRecord,
    ProjectRecord,
    StreamRecord,
)
from quark_core.records.codec import decode_body, encode_records
from quark_core.records.json_object import JsonObject
from quark_core.system.folders import NotPlainFile
from quark_core.system.process import current_process

_log = logging.getLogger("quark")

SEGMENT_BYTES = 16 * 1024 * 1024
"""A new segment is begun beyond this size."""

# What is not yet synced is kept in memory, since a failed sync may lose it.
_UNSYNCED_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class _Segment:
    first_number: int
    size_bytes: int


class Journal:
    """Writes batches to segments; belongs to one thread.

    A batch is journaled when `append` returns: it survives the process. It is
    durable when `sync` returns: it survives the machine. After a failed sync
    nothing may be trusted that was written since the last good one, because
    the system marks pages as clean that never reached the disk: a new segment
    is begun and those batches are written again.

    Args:
        directory: The writer's own directory; made when the first batch comes.
        origin: Run, writer, attempt and rank.
        files: File operations.
        segment_bytes: A new segment is begun beyond this size.
        prepare: Called before a segment is begun, to see that the directory
            is as it must be.
    """

    def __init__(
        self,
        directory: Path,
        origin: Origin,
        *,
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.directory = directory
        self._origin = origin
        self.files = files or Files()
        self._segment_bytes = segment_bytes
        self._prepare = prepare
        self._descriptor: int | None = None
        self._identity: tuple[int, int] | None = None
        self._size_bytes = 0
        self._index = 0
        self._segments: dict[str, _Segment] = {}
        self._unsynced: list[tuple[int, bytes]] = []
        self._unsynced_bytes = 0
        self._rewrite = False
        self.moved_to: Path | None = None
        """Where its earlier segments lie, if the directory was moved under it."""
        self.end = 0
        """Number after the newest journaled batch."""
        self.durable_end = 0
        """Number after the newest durable batch."""

    @classmethod
    def reopen(cls, directory: Path, origin: Origin) -> Journal:
        """Go on with a journal whose process is gone, in a segment after the last."""
        journal = cls(directory, origin)
        names = JournalReader(directory).segment_names()
        if names:
            journal._index = int(names[-1].removesuffix(SEGMENT_SUFFIX))
        return journal

    @property
    def must_rewrite(self) -> bool:
        """Whether a sync has failed and what is not durable must be written again."""
        return self._rewrite

    def append(self, batches: Sequence[Batch]) -> None:
        """Write batches after those that are there; all of them, or none when it raises.

        Raises:
            OSError: The disk is full, gone or broken; call again later.
        """
        self.append_frames([(batch.number, encode_frame(batch)) for batch in batches])

    def append_frames(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Write batches whose frames are made already, each with its number.

        Raises:
            OSError: As of `append`.
        """
        if self._unsynced_bytes > _UNSYNCED_BYTES:
            self.sync()
        if self._rewrite:
            self._begin_segment(self._unsynced)
            self._rewrite = False
        if self._descriptor is None or self._size_bytes >= self._segment_bytes:
            self._sync_before_leaving()
            self._begin_segment(frames)
        else:
            self._write(b"".join(frame for _, frame in frames))
            self._segments[segment_name(self._index)].size_bytes = self._size_bytes
        self._unsynced += frames
        self._unsynced_bytes += sum(len(frame) for _, frame in frames)
        self.end = frames[-1][0] + 1

    def sync(self) -> None:
        """Bring everything appended so far to the disk.

        Raises:
            OSError: It did not get there; it will be written again.
        """
        if not self._unsynced:
            return
        if self._rewrite or self._descriptor is None:
            self._begin_segment(self._unsynced)
            self._rewrite = False
        assert self._descriptor is not None
        try:
            self._check_descriptor()
            self.files.sync(self._descriptor)
            # Data in a file that somebody deleted is synced to nowhere.
            if not self.files.exists(self.directory / segment_name(self._index)):
                raise FileNotFoundError(f"{self.directory} was deleted")
        except OSError:
            self._abandon_segment()
            self._rewrite = True
            raise
        self._unsynced.clear()
        self._unsynced_bytes = 0
        self.durable_end = self.end

    def release(self, number: int) -> None:
        """Delete the segments that hold only batches before a number; never the newest."""
        names = sorted(self._segments)
        for name, following in pairwise(names):
            if self._segments[following].first_number > number:
                return
            try:
                self.files.remove(self.directory / name)
            except OSError:
                return
            del self._segments[name]

    def discard(self) -> None:
        """Delete all segments: somebody else has what is in them."""
        self._abandon_segment()
        self._unsynced.clear()
        self._unsynced_bytes = 0
        self._rewrite = False
        for name in list(self._segments):
            try:
                self.files.remove(self.directory / name)
            except OSError as error:
                _log.debug("removing %s: %s", self.directory / name, error)
            del self._segments[name]

    @property
    def unsynced(self) -> Sequence[tuple[int, bytes]]:
        """Number and frame of the batches that are not durable yet, oldest first."""
        return self._unsynced

    @property
    def size_bytes(self) -> int:
        """Length of all segments that are not released yet."""
        return sum(segment.size_bytes for segment in self._segments.values())

    def close(self) -> None:
        """Sync what can be synced, close the newest segment, and note with which number it ends."""
        try:
            self.sync()
        except OSError as error:
            _log.warning("the journal %s could not be synced: %s", self.directory, error)
        else:
            self._note_end()
        self._abandon_segment()

    def _note_end(self) -> None:
        """Without this a reader could not tell a file that was cut from one that was killed."""
        if not self._segments:
            return
        path = self.directory / END_MARK
        try:
            self.files.remove(path)
            descriptor = self.files.create(path)
            try:
                self.files.write(descriptor, encode_end_mark(self.end))
            finally:
                self.files.close(descriptor)
        except OSError as error:
            _log.debug("the end of the journal %s cannot be saved: %s", self.directory, error)

    def _begin_segment(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Begin a segment with these frames in it; no segment is left half begun."""
        self._abandon_segment()
        self.files.make_directory(self.directory)
        if self._prepare is not None:
            self._prepare()
        first = frames[0][0] if frames else self.end
        origin = self._origin
        header = encode_header(
            origin.run_id or "", origin.writer_id, origin.attempt, origin.rank, first
        )
        self._index += 1
        name = segment_name(self._index)
        path = self.directory / name
        self._descriptor = self.files.create(path)
        self._identity = self.files.identify(self._descriptor)
        self._size_bytes = 0
        try:
            self._write(header + b"".join(frame for _, frame in frames))
        except OSError:
            self._abandon_segment()
            try:
                self.files.remove(path)
            except OSError as error:
                _log.debug("removing the unfinished segment %s: %s", path, error)
            raise
        self._segments[name] = _Segment(first, self._size_bytes)

    def _write(self, data: bytes) -> None:
        """Write all of it, or take back what was written of it and raise."""
        self._check_descriptor()
        assert self._descriptor is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self.files.write(self._descriptor, rest) :]
        except OSError:
            try:
                self.files.truncate(self._descriptor, self._size_bytes)
            except OSError:
                # The torn frame stays where it is; readers stop there and go to the next segment.
                self._abandon_segment()
            raise
        self._size_bytes += len(data)

    def _sync_before_leaving(self) -> None:
        if self._descriptor is not None and self._unsynced:
            self.sync()

    def _check_descriptor(self) -> None:
        """See that the descriptor is still ours before anything is done with it.

        User code may close descriptors that it does not own; the number then
        goes to the next file that is opened, which must not be written to.
        """
        assert self._descriptor is not None
        try:
            identity = self.files.identify(self._descriptor)
        except OSError:
            identity = None
        if identity == self._identity:
            return
        self._descriptor = None
        # Nobody synced what was written through it.
        self._rewrite = True
        raise OSError(errno.EBADF, "other code closed the journal file")

    def _abandon_segment(self) -> None:
        if self._descriptor is not None:
            try:
                self._check_descriptor()
            except OSError as error:
                _log.debug("closing a segment of %s: %s", self.directory, error)
                return
            descriptor, self._descriptor = self._descriptor, None
            self._find_moved(descriptor)
            try:
                self.files.close(descriptor)
            except OSError as error:
                _log.debug("closing a segment of %s: %s", self.directory, error)

    def _find_moved(self, descriptor: int) -> None:
        """See where a segment went that is not at its path any more."""
        name = segment_name(self._index)
        if self.moved_to is None and not self.files.exists(self.directory / name):
            path = self.files.locate(descriptor)
            if path is not None and path.name == name:
                self.moved_to = path.parent


@dataclass(slots=True)
class _Doubtful:
    """Segments with damage, until it is known what later ones have of the same batches."""

    damaged: dict[str, list[DamagedPart]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    lowest: int = 0
    newest: int = -1
    tail: DamagedPart | None = None

    def add(self, name: str, parsed: ParsedSegment, wanted: int, *, is_oldest: bool) -> None:
        """Take in a segment, of which batches before `wanted` are not asked for."""
        if not self.damaged:
            # What came before the oldest segment was released.
            begins = parsed.first_number if is_oldest and parsed.header_is_whole else None
            self.lowest = max(wanted, begins or 0)
        for batch in parsed.batches:
            if batch.number >= wanted:
                self.batches.setdefault(batch.number, batch)
            self.newest = max(self.newest, batch.number)
        if parsed.damaged:
            self.damaged[name] = parsed.damaged
        self.tail = parsed.damaged_end

    def find_missing(self, end: int | None) -> list[tuple[int, int | None]]:
        """First and last number of each gap.

        Args:
            end: Number that comes after all of these; None where nobody knows
                it, and then the last gap has no end.
        """
        missing: list[tuple[int, int | None]] = []
        expected = self.lowest
        for number in sorted(self.batches):
            if number > expected:
                missing.append((expected, number - 1))
            expected = max(expected, number + 1)
        if end is not None and end > expected:
            missing.append((expected, end - 1))
        elif end is None and self.tail is not None and not self.tail.is_torn:
            missing.append((expected, None))
        return missing


@dataclass(frozen=True, slots=True)
class KnownSegment:
    """A whole segment of which whoever reads knows already what is in it.

    Attributes:
        name: Its name.
        first: Number of its first batch.
        end: Number after its last; between the two none is missing.
    """

    name: str
    first: int
    end: int


class JournalReader:
    """Reads a writer's journal, also while it is being written, from any thread.

    Args:
        directory: The writer's directory.
        files: File operations.
        on_damage: Told of each segment that is damaged and costs something,
            with what is wrong and the numbers of the batches that are missing;
            without it, the log is told.
        is_written: Whether its process may be writing it now: how it ends is
            not judged then.
        find_known: Says of a segment's name what is known of it, or None; `read_parts`
            does not open what is known.
    """

    def __init__(
        self,
        directory: Path,
        *,
        files: Files | None = None,
        on_damage: Callable[[str, str], None] | None = None,
        is_written: bool = False,
        find_known: Callable[[str], KnownSegment | None] = lambda _name: None,
    ) -> None:
        self._directory = directory
        self._files = files or Files()
        self._on_damage = on_damage
        self._is_written = is_written
        self._find_known = find_known
        self._told: set[str] = set()
        self._origin: Origin | None = None
        self.missing: list[tuple[int, int | None]] = []
        """First and last number of each gap in what was read so far; the last is None where
        nobody knows how many batches there were."""
        self.left_alone = False
        """Whether there is a segment of a newer version, or one that nobody can say whose it is."""
        self.whole: dict[str, KnownSegment] = {}
        """By name, the segments among those read so far that nothing is wrong with."""

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Batches from a number on, in order, each once.

        Whatever is damaged, each frame that is whole is read. A journal whose
        process was killed may end in a torn frame, which is no damage; one
        that was closed says itself with which number it ends.
        """
        for part in self.read_parts(start):
            assert isinstance(part, Batch)  # nothing is known that stands for others
            yield part

    def read_parts(self, start: int = 0) -> Iterator[Batch | KnownSegment]:
        """What `read` returns, with whole segments that are known in place of their batches."""
        wanted, is_oldest = start, True
        doubtful: _Doubtful | None = None
        for name in self.segment_names():
            known = self._find_known(name)
            if known is not None and doubtful is not None and known.first > doubtful.newest:
                yield from self._settle(doubtful, known.first)
                wanted = max(wanted, known.first)
                doubtful = None
            if known is not None and doubtful is None and _is_apart(known, wanted):
                if known.first > wanted and not is_oldest:
                    self._miss(wanted, known.first, name)
                if known.end > wanted:
                    wanted = known.end
                    yield known
                is_oldest = False
                continue
            parsed = self._parse(name)
            if parsed is None:
                is_oldest = True  # whatever it holds is not missing
                continue
            first = parsed.first_number
            if doubtful is not None and first is not None and first > doubtful.newest:
                yield from self._settle(doubtful, first)
                wanted = max(wanted, first)
                doubtful = None
            if doubtful is not None or parsed.damaged:
                doubtful = doubtful or _Doubtful()
                doubtful.add(name, parsed, wanted, is_oldest=is_oldest)
            elif parsed.is_contiguous:
                end = parsed.batches[-1].number + 1
                self.whole[name] = KnownSegment(name, parsed.batches[0].number, end)
            for batch in parsed.batches if doubtful is None else ():
                if batch.number > wanted and not is_oldest:
                    self._miss(wanted, batch.number, name)
                is_oldest = False
                if batch.number >= wanted:
                    wanted = batch.number + 1
                    yield batch
            is_oldest = False
        yield from self._finish(doubtful, wanted)

    def segment_names(self) -> list[str]:
        """Names of the segments, oldest first."""
        names = self._files.list_names(self._directory)
        return [name for name in names if name.endswith(SEGMENT_SUFFIX)]

    def _parse(self, name: str) -> ParsedSegment | None:
        """What is in a segment; None where nothing of it can be read."""
        try:
            data = self._files.read(self._directory / name)
        except (FileNotFoundError, NotPlainFile):
            return None  # released meanwhile, or no segment: who delivers it sets it aside
        try:
            try:
                return parse_segment(data)
            except NewerSegment:
                raise
            except DamagedSegment:
                return parse_segment(data, self._find_origin())
        except DamagedSegment as error:
            self.left_alone = True
            self._report(name, str(error))
            return None

    def _find_origin(self) -> Origin | None:
        """Whose journal it is, by its manifest or by any segment's header."""
        if self._origin is None:
            manifest = JournalFolder(self._directory).read_manifest()
            if manifest is not None:
                self._origin = Origin(
                    manifest.run_id, manifest.writer_id, manifest.attempt, manifest.rank
                )
        for name in self.segment_names() if self._origin is None else ():
            with contextlib.suppress(OSError, DamagedSegment):
                self._origin = read_origin(self._files.read(self._directory / name))
                break
        return self._origin

    def _settle(self, doubtful: _Doubtful, end: int | None) -> list[Batch]:
        """What there is of segments with damage, after telling what is not."""
        missing = doubtful.find_missing(end)
        for name, parts in doubtful.damaged.items():
            what = ", ".join(part.describe() for part in parts)
            if missing:
                self._report(name, f"{what}; {_describe_gaps(missing)}")
            elif not all(part.is_torn for part in parts):
                _log.info(
                    "journal segment %s: %s; all batches are intact", self._directory / name, what
                )
        self.missing += missing
        return [doubtful.batches[number] for number in sorted(doubtful.batches)]

    def _finish(self, doubtful: _Doubtful | None, wanted: int) -> list[Batch]:
        """What is left of segments with damage, after telling what is not there up to the end."""
        end = None if self._is_written or self.left_alone else self._read_end()
        if doubtful is not None:
            if self._is_written:
                doubtful.tail = None
            return self._settle(doubtful, end)
        if end is not None and end > wanted:
            self._miss(wanted, end, END_MARK)
        return []

    def _miss(self, first: int, end: int, name: str) -> None:
        """Tell of batches that are not there, though nothing is damaged."""
        self.missing.append((first, end - 1))
        self._report(name, _describe_gaps([(first, end - 1)]))

    def _read_end(self) -> int | None:
        """Number after the last batch, where the journal was closed."""
        try:
            return read_end_mark(self._files.read(self._directory / END_MARK))
        except OSError:
            return None

    def _report(self, name: str, damage: str) -> None:
        if name in self._told:
            return
        self._told.add(name)
        if self._on_damage is not None:
            self._on_damage(name, damage)
        else:
            _log.warning("journal segment %s: %s", self._directory / name, damage)


def _is_apart(known: KnownSegment, wanted: int) -> bool:
    """Whether all of a segment, or nothing of it, comes before the batch that is wanted next."""
    return known.end <= wanted or known.first >= wanted


def _describe_gaps(missing: Sequence[tuple[int, int | None]]) -> str:
    """Numbers of batches that are missing, for a person."""
    parts = []
    for first, last in missing:
        if last is None:
            parts.append(f"those from {first} on")
        else:
            parts.append(f"{first}" if last == first else f"{first} to {last}")
    if missing[0][1] is None:
        return f"batches from {missing[0][0]} on are missing"
    one = len(missing) == 1 and missing[0][0] == missing[0][1]
    return f"batch {parts[0]} is missing" if one else f"batches {', '.join(parts)} are missing"


# What stands in a run for batches that damage to its journal has cost.
#
# They are told in the run itself, by records under the numbers of the batches
# that are gone: whoever delivers the journal makes the same ones, so that they
# are there once, and every other batch keeps its number.

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


# The journal of an analysis: what an analyzer found, on its way to the run's mirrors.
#
# The primary has numbered and stored it already. For the mirrors it becomes a
# writer of its own, `<analyzer>.<number>`, of attempt 0 and rank 0, with lanes
# for the mirrors only; whoever delivers left-over journals delivers it too.

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
