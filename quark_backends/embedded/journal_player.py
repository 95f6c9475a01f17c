"""Plays the journals of a storage root into a database in memory.

The index of a segment is played in place of its batches. What it says of the
run, and what is in no chunk, goes into the tables; of chunks only where they
are. Their bytes are read from the index when a statement asks for them, and
checked then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quark_backends.embedded.segment_index import (
    DamagedIndex,
    JournalLook,
    Part,
    SegmentIndex,
    SegmentState,
    find_index,
)
from quark_backends.store.batch_bodies import digest_body
from quark_backends.store.databases.connection import SqliteConnection, close_with
from quark_backends.store.databases.sqlite import connect_memory
from quark_backends.store.writing.ingest import ADVANCE_HEAD, INSERT_BATCH, BatchIngest
from quark_backends.store.writing.metrics import MetricFold, NameTable, place_writer
from quark_core.backends.contract import Batch
from quark_core.delivery.journal import JournalReader, KnownSegment, make_stand_ins
from quark_core.delivery.journal_folder import JournalFolder, Manifest, find_folders
from quark_core.delivery.segments import parse_segment
from quark_core.delivery.sending import GROUP_BATCHES, begins_attempt, cut_groups, order_journals
from quark_core.errors import BackendRejected
from quark_core.system.folders import read_plain_file

_log = logging.getLogger("quark")

_FUNCTION = "quark_part"
# Bytes of a chunk, or the number of the part of an index that they are in.
_VIEW = f"""
ALTER TABLE chunk RENAME TO chunk_row;
CREATE VIEW chunk AS SELECT pk, writer_pk, kind, name_pk, first_sequence, last_sequence, step_low,
    step_high, count, codec, {_FUNCTION}(rollup) AS rollup, {_FUNCTION}(body) AS body
    FROM chunk_row;
"""
_INSERT_CHUNK = (
    "INSERT INTO chunk_row (writer_pk, kind, name_pk, first_sequence, last_sequence, step_low,"
    " step_high, count, codec, rollup, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


class IndexedSegments:
    """A database in memory with the store's tables, and the indexes that are played into it.

    Attributes:
        connection: The database.
        ingest: Stores batches in it.
        failed: An index that turned out to be damaged when a part of it was asked for: what
            was read meanwhile must be forgotten, and the index with it.
    """

    def __init__(self) -> None:
        self.connection: SqliteConnection = connect_memory()
        self.connection.create_function(_FUNCTION, 1, self._load)
        self.connection.executescript(_VIEW)
        self.ingest = BatchIngest(self.connection)
        self.failed: SegmentIndex | None = None
        self._parts: list[tuple[SegmentIndex, Part]] = []

    def play(self, index: SegmentIndex) -> bool:
        """Play an index, as if its segment's batches were stored.

        Returns:
            Whether that was possible; where it was not, nothing has changed, and the
            batches can be stored one by one.
        """
        head = index.head
        if self._is_superseded(index):
            return False
        is_new = self._find_writer(index) is None
        origin = (head.run_id, head.writer_id, head.attempt, head.rank)
        said = [
            Batch(*origin, kept.number, kept.kind, kept.count, kept.body)
            for kept in head.batches
            if kept.applies
        ]
        if is_new and not said:
            return False
        try:
            self.ingest.write(said)
        except BackendRejected as error:
            _log.debug("%s is read without its index: %s", index.path, error)
            return False
        self.connection.begin_write()
        try:
            self._add(index, is_new=is_new)
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        return True

    def _add(self, index: SegmentIndex, *, is_new: bool) -> None:
        """Add what is in chunks, and what else says nothing of the run itself."""
        from quark_backends.store.upkeep.compaction import NO_NAME  # numpy with it: late

        connection, head = self.connection, index.head
        found = self._find_writer(index)
        assert found is not None
        writer_pk, run_pk, attempt, started_us = found
        if is_new:
            # Its first batch may be one that is in a chunk.
            started_us = head.started_us
            connection.execute(
                "UPDATE writer SET started_us = ? WHERE pk = ?", (started_us, writer_pk)
            )
        connection.executemany(
            INSERT_BATCH,
            [
                (None, writer_pk, b.kind, b.number, b.count, digest_body(b.body), b.body)
                for b in head.batches
                if not b.applies
            ],
        )
        connection.executemany(
            "INSERT INTO frame (writer_pk, first_number, last_number, body) VALUES (?, ?, ?, ?)",
            [(writer_pk, *frame) for frame in head.frames],
        )
        names = NameTable(connection)
        connection.executemany(
            _INSERT_CHUNK,
            [
                (
                    writer_pk,
                    chunk.kind,
                    NO_NAME if chunk.key is None else names.find(chunk.key),
                    chunk.first_sequence,
                    chunk.last_sequence,
                    chunk.step_low,
                    chunk.step_high,
                    chunk.count,
                    chunk.codec,
                    None if chunk.rollup is None else self._place(index, chunk.rollup),
                    self._place(index, chunk.body),
                )
                for chunk in head.chunks
            ],
        )
        fold = MetricFold()
        place = place_writer(attempt, head.rank)
        fold.add_figures(head.figures, head.newest_step, place, started_us)
        fold.write(connection, run_pk, names.find)
        connection.execute(ADVANCE_HEAD, (head.end - 1, writer_pk))

    def _place(self, index: SegmentIndex, part: Part) -> int:
        self._parts.append((index, part))
        return len(self._parts) - 1

    def _load(self, stored: bytes | int | None) -> bytes | None:
        """What stands in the view: bytes as they are, those of a part where its number stands."""
        if not isinstance(stored, int):
            return stored
        index, part = self._parts[stored]
        try:
            return index.read_part(part)
        except DamagedIndex:
            self.failed = index
            raise

    def _find_writer(self, index: SegmentIndex) -> tuple[int, int, int, int] | None:
        """Number, run, attempt and start of the writer of a segment."""
        found: tuple[int, int, int, int] | None = self.connection.execute(
            "SELECT writer.pk, run_pk, writer.attempt, started_us FROM writer"
            " JOIN run ON run.pk = run_pk WHERE run.id = ? AND writer.id = ?",
            (index.head.run_id, index.head.writer_id),
        ).fetchone()
        return found

    def _is_superseded(self, index: SegmentIndex) -> bool:
        """Whether a later attempt hides some of a segment, so that its figures do not hold."""
        found = self.connection.execute(
            "SELECT 1 FROM attempt JOIN run ON run.pk = run_pk WHERE run.id = ? AND number > ?"
            " AND from_step IS NOT NULL",
            (index.head.run_id, index.head.attempt),
        ).fetchone()
        return found is not None


@dataclass(slots=True)
class _Progress:
    """How far one journal is played.

    Attributes:
        wanted: Number of the batch that comes next.
        look: What the journal looked like.
        read: Names of the segments that were read, or are known by an index.
        whole: Those among them that need not be opened again, with their state then.
    """

    wanted: int = 0
    look: JournalLook | None = None
    read: set[str] = field(default_factory=set)
    whole: dict[str, tuple[SegmentState, KnownSegment]] = field(default_factory=dict)


class JournalPlayer:
    """Keeps a database in memory that has what the journals of a root hold.

    A segment that was sealed is played by its index, which is made where there is none. An
    index that is damaged costs the time to do without it and nothing else. Not for several
    threads at once.

    Args:
        storage_dir: The storage root.
        lock: Whoever is at the database holds this.
    """

    def __init__(self, storage_dir: Path, lock: threading.RLock) -> None:
        self._storage_dir = storage_dir
        self._lock = lock
        self._tables: IndexedSegments | None = None
        self._close_tables: Callable[[], object] | None = None
        self._progress: dict[Path, _Progress] = {}
        self._refused: set[Path] = set()
        self._has_failed = False
        self._beginners: dict[Path, bool] = {}

    @property
    def connection(self) -> SqliteConnection:
        """The database; another one once what was played had to be forgotten."""
        return self._open().connection

    def play(self, run_id: str | None = None) -> None:
        """Play what has come into the journals since the last time.

        Args:
            run_id: Only into those of this run.
        """
        folders = find_folders(self._storage_dir, run_id)
        for folder, manifest in order_journals(folders, self._begins_attempt):
            if manifest.generation:
                continue  # outputs of an analyzer on their way to mirrors; here they are files
            if manifest.awaits_run and not self._has_run(manifest.run_id):
                continue  # the rank that begins the run has not journaled that yet
            try:
                self._play_folder(folder, manifest)
            except BaseException:
                # Half of something may be in the tables.
                self.forget()
                raise

    def forget_failed(self) -> bool:
        """Forget all that is played where an index has proved to be damaged; whether one has."""
        if self._tables is not None and self._tables.failed is not None:
            self.forget()
        found, self._has_failed = self._has_failed, False
        return found

    def _open(self) -> IndexedSegments:
        if self._tables is None:
            self._tables = IndexedSegments()
            self._close_tables = close_with(self, self._tables.connection.close, self._lock)
        return self._tables

    def forget(self) -> None:
        """Forget all that is played."""
        self._progress.clear()
        tables, self._tables = self._tables, None
        if tables is None or self._close_tables is None:
            return
        if tables.failed is not None:
            path = tables.failed.path
            _log.warning("the index %s is damaged: its segment is read without it", path)
            self._refused.add(path)
            self._has_failed = True
        self._close_tables()

    def _play_folder(self, folder: JournalFolder, manifest: Manifest) -> None:
        progress = self._progress.setdefault(folder.path, _Progress())
        look = JournalLook.take(folder, manifest)
        if look == progress.look:
            return
        states, sealed = look.states, look.sealed
        indexes: dict[str, SegmentIndex] = {}

        def find_known(name: str) -> KnownSegment | None:
            state, known = progress.whole.get(name, (None, None))
            if known is not None and state == states.get(name):
                return known
            if name in progress.read or name not in sealed:
                return None
            index = self._find_index(folder.path / name)
            if index is None:
                return None
            indexes[name] = index
            return KnownSegment(name, index.head.first, index.head.end)

        reader = JournalReader(folder.path, is_written=look.is_written, find_known=find_known)
        waiting: list[Batch] = []
        for part in reader.read_parts(progress.wanted):
            first = part.first if isinstance(part, KnownSegment) else part.number
            wanted = waiting[-1].number + 1 if waiting else progress.wanted
            if first > wanted:
                self._store(progress, waiting)
                self._stand_in(folder, manifest, wanted, first - 1)
            if isinstance(part, KnownSegment):
                self._store(progress, waiting)
                self._play_index(folder.path / part.name, indexes.pop(part.name))
                progress.wanted = part.end
                progress.whole[part.name] = (states[part.name], part)
                continue
            waiting.append(part)
            if len(waiting) >= GROUP_BATCHES:
                self._store(progress, waiting)
        self._store(progress, waiting)
        for first, last in reader.missing:
            if first >= progress.wanted:
                self._stand_in(folder, manifest, first, last)
        for name, known in reader.whole.items():
            if name in states:
                progress.whole[name] = (states[name], known)
        progress.read.update(states)
        progress.look = look

    def _find_index(self, segment: Path) -> SegmentIndex | None:
        from quark_backends.embedded.segment_index_builder import build_index

        if segment in self._refused:
            return None
        found = find_index(segment)
        if found is not None and found.path not in self._refused:
            return found
        # One that proved to be damaged is made anew.
        built = build_index(segment)
        if built is None:
            self._refused.add(segment)
        return built

    def _play_index(self, segment: Path, index: SegmentIndex) -> None:
        tables = self._open()
        if tables.play(index):
            return
        for group in cut_groups(parse_segment(read_plain_file(segment)).batches):
            self._write(group)

    def _store(self, progress: _Progress, batches: list[Batch]) -> None:
        """Store batches, and note that they are."""
        if batches:
            for group in cut_groups(batches):
                self._write(group)
            progress.wanted = batches[-1].number + 1
            batches.clear()

    def _write(self, batches: list[Batch]) -> None:
        """Store batches; as in the real store, what is refused is not there."""
        ingest = self._open().ingest
        try:
            ingest.write(batches)
        except BackendRejected as error:
            if len(batches) == 1:
                _log.debug("batch %d is omitted: %s", batches[0].number, error)
                return
            for batch in batches:
                self._write([batch])

    def _stand_in(
        self, folder: JournalFolder, manifest: Manifest, first: int, last: int | None
    ) -> None:
        """Store what stands for batches that damage has cost."""
        starts = not manifest.awaits_run and not self._has_attempt(manifest)
        for batch in make_stand_ins(folder, manifest, first, last, starts=starts):
            self._write([batch])

    def _begins_attempt(self, folder: JournalFolder) -> bool:
        known = self._beginners.get(folder.path)
        if known is None:
            known = begins_attempt(folder)
            if known or folder.path in self._progress:
                self._beginners[folder.path] = known
        return known

    def _has_attempt(self, manifest: Manifest) -> bool:
        row = self.connection.execute(
            "SELECT 1 FROM run WHERE id = ? AND attempt >= ?", (manifest.run_id, manifest.attempt)
        )
        return row.fetchone() is not None

    def _has_run(self, run_id: str) -> bool:
        row = self.connection.execute("SELECT 1 FROM run WHERE id = ?", (run_id,)).fetchone()
        return row is not None
