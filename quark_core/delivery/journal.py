"""The journal of one writer: append-only segments that survive the process."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quark_core.backend import Batch
from quark_core.delivery.files import Files
from quark_core.delivery.origin import Origin
from quark_core.delivery.segments import (
    SEGMENT_SUFFIX,
    DamagedSegment,
    encode_frame,
    encode_header,
    parse_segment,
    segment_name,
)

__all__ = ["Journal", "JournalReader"]

_log = logging.getLogger("quark")

SEGMENT_BYTES = 16 * 1024 * 1024
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
        frames = [(batch.number, encode_frame(batch)) for batch in batches]
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
        self.end = batches[-1].number + 1

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

    @property
    def size_bytes(self) -> int:
        """Length of all segments that are not released yet."""
        return sum(segment.size_bytes for segment in self._segments.values())

    def close(self) -> None:
        """Sync what can be synced and close the newest segment."""
        try:
            self.sync()
        except OSError as error:
            _log.warning("the journal %s could not be synced: %s", self.directory, error)
        self._abandon_segment()

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
        raise OSError(errno.EBADF, "other code closed the journal's file")

    def _abandon_segment(self) -> None:
        if self._descriptor is not None:
            try:
                self._check_descriptor()
            except OSError as error:
                _log.debug("closing a segment of %s: %s", self.directory, error)
                return
            descriptor, self._descriptor = self._descriptor, None
            try:
                self.files.close(descriptor)
            except OSError as error:
                _log.debug("closing a segment of %s: %s", self.directory, error)


class JournalReader:
    """Reads a writer's journal, also while it is being written, from any thread.

    Args:
        directory: The writer's directory.
        files: File operations.
        on_damage: Told of each segment that is damaged, with what is wrong.
    """

    def __init__(
        self,
        directory: Path,
        *,
        files: Files | None = None,
        on_damage: Callable[[str, str], None] | None = None,
    ) -> None:
        self._directory = directory
        self._files = files or Files()
        self._on_damage = on_damage
        self._told: set[str] = set()

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Batches from a number on, in order, each once.

        A segment is read up to its first damaged frame; later segments are
        read all the same. The newest segment may end in a torn frame, which
        is only what a killed process leaves.
        """
        wanted = start
        names = self.segment_names()
        for position, name in enumerate(names):
            try:
                data = self._files.read(self._directory / name)
            except FileNotFoundError:
                continue  # released while it was being looked for
            try:
                parsed = parse_segment(data)
            except DamagedSegment as error:
                self._report(name, str(error))
                continue
            if parsed.damage is not None and position < len(names) - 1:
                self._report(name, parsed.damage)
            for batch in parsed.batches:
                if batch.number >= wanted:
                    wanted = batch.number + 1
                    yield batch

    def segment_names(self) -> list[str]:
        """Names of the segments, oldest first."""
        names = self._files.list_names(self._directory)
        return [name for name in names if name.endswith(SEGMENT_SUFFIX)]

    def _report(self, name: str, damage: str) -> None:
        if name in self._told:
            return
        self._told.add(name)
        _log.warning("journal segment %s: %s", self._directory / name, damage)
        if self._on_damage is not None:
            self._on_damage(name, damage)
