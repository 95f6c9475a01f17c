"""The embedded store as a backend."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quark_backends.removal import SupportsTrash
from quark_backends.store.databases.connection import (
    FilesChanged,
    OpenFiles,
    PutBack,
    SqliteConnection,
    StoreConnection,
)
from quark_backends.store.databases.layout import KeepsPayloads, StoreLayout
from quark_backends.store.databases.sqlite import (
    connect,
    ensure_store,
    find_store,
    no_database,
    remake_store,
)
from quark_backends.store.databases.write_ahead_log import (
    read_main_head,
    replace_database,
    replace_from_outside,
    was_replaced,
)
from quark_backends.store.databases.write_batching import SqliteTurns
from quark_backends.store.reading.reader import write_generation
from quark_backends.store.store_contract import TableStore
from quark_backends.store.upkeep.background_compaction import BackgroundCompaction, WriteGate
from quark_backends.store.upkeep.trash import RunTrash
from quark_backends.store.writing.edits import editing
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.backends.contract import BackendConfig, Batch, Generation, RunLocation
from quark_core.delivery.journal_folder import JournalFolder, journal_directory
from quark_core.errors import BackendUnavailable, SessionStoreError, StoreNotFoundError

if TYPE_CHECKING:
    from quark_backends.store.reading.reader import StoreReader

_log = logging.getLogger("quark")

T = TypeVar("T")

_SETTLE_S = 0.2
# How long the journal of a run that went with its store is waited for.
_JOURNAL_S = 10.0


class EmbeddedBackend(SupportsTrash, KeepsPayloads, TableStore):
    """One run's connection to the store under its storage root.

    Writing belongs to the lane's thread; reading goes over a connection of
    its own and outlives `close()`.

    Raises:
        SessionStoreError: The store cannot be made or opened, or there is
            none and `read_only` was asked for.
    """

    def __init__(self, config: BackendConfig) -> None:
        found = find_store(config.storage_dir)
        if config.read_only:
            if found is None:
                raise StoreNotFoundError(
                    f"no Quark store in '{config.storage_dir}' (no .quark folder). The first "
                    "run that you log there creates one"
                )
            if not found.db_path.exists():
                raise no_database(found)
        elif config.run_id:
            layout = found or StoreLayout(config.storage_dir)
            if not layout.db_path.exists() and _is_expected(config, layout):
                raise BackendUnavailable(_describe_moved(layout), backend="embedded")
        self._read_only = config.read_only
        self._layout = found if config.read_only and found else ensure_store(config.storage_dir)
        self._trash = RunTrash(self._layout, read_only=config.read_only)
        self._connect_reader = partial(connect, self._layout, read_only=True)
        super().__init__(self._connect_reader, self._layout.db_path, follows=config.read_only)
        self._connection: SqliteConnection | None = None
        self._ingest: BatchIngest | None = None
        self._gate = WriteGate()
        self._compaction = self._make_compaction()
        # The newest number of each writer that is in the store, and that is in its main file.
        self._heads: dict[tuple[str, str], int] = {}
        self._settled: dict[tuple[str, str], int] = {}
        self._main_file: object = None
        self._told = False
        self._patient_until_s = 0.0
        self._turns = None if config.read_only else SqliteTurns(self._layout)
        if not config.read_only:
            self._open()

    def write(self, batch: Batch) -> None:
        """Store one batch and sync it."""
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store several batches in one transaction and sync them."""
        records = sum(batch.count for batch in batches)
        self._compaction.wait_for_room(records)
        with self._gate.write():
            self._look_before_write()
            self._store(batches)
            self._files.note()
            for batch in batches:
                self._heads[batch.run_id, batch.writer_id] = batch.number
        self._compaction.note(len(batches), records)

    def _store(self, batches: Sequence[Batch]) -> None:
        assert self._ingest is not None
        try:
            self._ingest.write(batches)
        except BackendUnavailable as error:
            if not isinstance(error.__cause__, FilesChanged):
                raise
            if isinstance(error.__cause__, PutBack):
                try:
                    self._put_back(with_log=True)
                except sqlite3.Error as kept:
                    raise BackendUnavailable(str(kept), backend="embedded") from kept
            self._look_after_files()
            self._ingest.write(batches)

    def _open(self) -> None:
        self._connection = connect(self._layout)
        self._files = OpenFiles(self._layout)
        self._ingest = BatchIngest(self._connection, heads=self._heads)

    def _look_before_write(self) -> None:
        """Look after the files as far as the transaction does not itself."""
        lost = self._connection is None or self._files.find_lost()
        if lost or self._files.main_look != self._main_file:
            self._look_after_files()
        else:
            self._note_settled()

    def _look_after_files(self) -> None:
        """See that what is written comes to where everybody looks for it.

        Raises:
            BackendUnavailable: It does not, and cannot be made to now.
        """
        if self._ingest is None:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")
        self._note_settled()
        lost = self._files.find_lost()
        if not lost:
            lost = self._find_harmed()
        if lost:
            self._begin_anew(lost)

    def _find_harmed(self) -> list[Path]:
        """The database, where this process or another program has harmed what it has open of it.

        Raises:
            BackendUnavailable: It was harmed, and no copy can take its place now.
        """
        connection, path = self._connection, self._layout.db_path
        if connection is None:
            return [path]  # it was given up before, and none has taken its place
        try:
            if connection.is_robbed:
                replace_from_outside(path)
            elif self._is_put_back():
                self._put_back(with_log=False)
            else:
                return []
        except sqlite3.Error as error:
            raise BackendUnavailable(str(error), backend="embedded") from error
        return [path]

    def _is_put_back(self) -> bool:
        """Whether an older copy was written over the database: it lacks what was known in it."""
        main = self._files.main_look
        if main == self._main_file:
            return False
        if any(
            head < settled
            for (run_id, writer_id), settled in self._settled.items()
            if (head := read_main_head(self._layout.db_path, run_id, writer_id)) is not None
        ):
            return True
        self._main_file = main
        return False

    def _put_back(self, *, with_log: bool) -> None:
        """Go on with the older copy, with its own log, or without that of what it has overwritten.

        Raises:
            FilesChanged: No copy can take its place now.
        """
        connection, path = self._connection, self._layout.db_path
        assert connection is not None
        connection.begin_write()
        try:
            replace_database(path, f"an older copy replaced {path}", with_log=with_log)
        finally:
            connection.rollback()

    def _note_settled(self) -> bool:
        """Know what is in the main file for good, where all of the log is; whether it is."""
        descriptors = None if self._connection is None else self._connection.descriptors
        if descriptors is not None and not descriptors.is_settled:
            return False
        self._settled.update(self._heads)
        return True

    def settled_end(self, run_id: str, writer_id: str) -> int:
        """Number after the newest batch of a writer that is in the main file, and not in the log.

        What lies before it may be released everywhere else.
        """
        return self._settled.get((run_id, writer_id), -1) + 1

    def _begin_anew(self, lost: list[Path]) -> None:
        """Go on in a store at the path where somebody has deleted ours.

        Raises:
            BackendUnavailable: None can be made now; the next write tries again.
        """
        runs = sorted({run_id for run_id, _ in self._heads})
        descriptors = None if self._connection is None else self._connection.descriptors
        if descriptors is not None and descriptors.is_moved:
            # A folder is moved file by file, too.
            raise BackendUnavailable(_describe_moved(self._layout), backend="embedded")
        if not self._told and not was_replaced(self._layout.db_path):
            _log.error(
                "%s was deleted or replaced when run %s was open. Quark creates a missing store "
                "again, and fills it with the records of the run that still exist.",
                ", ".join(map(str, lost)),
                ", ".join(runs) or "of this process",
            )
        if not self._told:
            self._told = True
            self._patient_until_s = time.monotonic() + _JOURNAL_S
        # Only new connections see the files that are there now.
        self._compaction.close(0.0)
        self._compaction = self._make_compaction()
        if self._turns is not None:
            self._turns.close()
        self._close_readers()
        try:
            self._remake(runs)
        except (sqlite3.Error, SessionStoreError) as error:
            raise BackendUnavailable(
                f"the store {self._layout.root} was deleted and cannot be created again: {error}",
                backend="embedded",
            ) from error
        self._told = False

    def _remake(self, runs: list[str]) -> None:
        from quark_backends.embedded.store_rebuild import has_run, restore_run

        old, files = self._connection, self._files
        # What was harmed may read as something else: then the journals alone tell.
        source = old if old is not None and old.is_sound else None
        if files.has_database:
            # A folder is deleted file by file, and the database may be next.
            time.sleep(_SETTLE_S)
        if old is not None and files.has_database:
            # With the database in place, two connections of one process would share what is
            # known of a log that is gone: the old one ends before the new one begins.
            if source is not None and not files.has_log:
                old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            old.close()
            source = self._connection = old = None
        elif source is None and old is not None:
            old.close()
            self._connection = old = None
        elif source is not None and files.has_own_log and self._layout.db_path.exists():
            self._part_from_log(source)
        remake_store(self._layout)
        with closing(connect(self._layout)) as connection:
            for run_id in runs:
                root = self._layout.root.parent
                restore_run(source, connection, root, run_id, self._heads)
            unknown = [run_id for run_id in runs if not has_run(connection, run_id)]
        if unknown and time.monotonic() < self._patient_until_s:
            # What comes next of it would be refused, while its journal, which went with the
            # store, is only just being made anew.
            raise BackendUnavailable(
                f"no records of run {', '.join(unknown)} are restored yet", backend="embedded"
            )
        # What is in no place any more is told, and no longer expected.
        self._heads = dict.fromkeys(self._heads, -1)
        self._settled.clear()
        self._open()
        if source is not None:
            source.close()

    def _part_from_log(self, old: SqliteConnection) -> None:
        """Take the log from a database that was put in our one's place: it is not that one's.

        Pages of two databases would be mixed, unless one is a copy of the other.
        """
        path = self._layout.db_path
        # The index is that of the log, and so is the lock.
        old.execute("BEGIN IMMEDIATE")
        try:
            why = f"another database replaced {path}"
            try:
                replace_database(path, why)
            except FilesChanged:
                replace_database(path, why, with_log=False)
        finally:
            old.rollback()

    def close(self) -> None:
        """End compaction, and give up the writing connection; a helper does what is left."""
        if self._ingest is not None:
            try:
                with self._gate.write():
                    # Harmed since the last write: nobody would look after it any more.
                    self._look_after_files()
                    self._look_after_log()
            except BackendUnavailable as error:
                _log.error("%s", error)
        finished = self._compaction.close()
        if self._connection is not None:
            self.settle()
            self._connection.close()
            self._connection = None
        if self._turns is not None:
            self._turns.close()
        self._ingest = None
        if not finished:
            _find_helper(self._layout, start=True)

    def _look_after_log(self) -> None:
        """See that the log is what was written, as each write does.

        Raises:
            BackendUnavailable: It is not, and the store cannot be made whole now.
        """
        assert self._connection is not None
        try:
            self._connection.begin_write()
            self._connection.rollback()
        except FilesChanged:
            self._look_after_files()
        except sqlite3.Error as error:
            _log.debug("the write-ahead log of %s is not checked: %s", self._layout.db_path, error)

    def settle(self) -> bool:
        """Bring the log into the main file as far as others let it; whether all of it is there."""
        connection = self._connection
        try:
            if connection is not None and connection.is_sound:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                return self._note_settled()
        except sqlite3.Error as error:
            _log.debug("the write-ahead log of %s is kept: %s", self._layout.db_path, error)
        return False

    def _make_compaction(self) -> BackgroundCompaction:
        return BackgroundCompaction(
            partial(connect, self._layout), self._gate, partial(_find_helper, self._layout)
        )

    def _ask(self, run_id: str | None, read: Callable[[StoreReader], T]) -> T:
        """Has what was left compacted, where that would have made it quicker."""
        found = super()._ask(run_id, read)
        if self._read_only and self._readers.met_backlog():
            _find_helper(self._layout, start=True)
        return found

    def describe_upkeep(self) -> str | None:
        """A sentence while a process of its own compacts the store, or None."""
        if not _find_helper(self._layout, start=False):
            return None
        return "ended runs are being compacted; until then, reading their curves is slow"

    def locate(self, run_id: str) -> RunLocation:
        """Where a run lies."""
        return RunLocation(
            store_root=self._layout.root,
            db_path=self._layout.db_path,
            run_path=str(self._layout.run_path(run_id)),
        )

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        if self._ingest is None:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")
        with closing(connect(self._layout)) as connection:
            return write_generation(connection, generation)

    def _edit(self, apply: Callable[[StoreConnection], T]) -> T:
        if self._read_only:
            raise SessionStoreError(f"the store {self._layout.root} was opened for reading only")
        with closing(connect(self._layout)) as connection, editing(connection):
            return apply(connection)

    def _coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        if self._turns is None:
            raise SessionStoreError(f"the store {self._layout.root} was opened for reading only")
        return self._turns.run(apply)


def _describe_moved(layout: StoreLayout) -> str:
    return (
        f"{layout.db_path} was moved away. Move it back. If you moved all of {layout.root}, end "
        f"the run, and then run `quark sync {layout.root.parent}` to deliver the records"
    )


def _is_expected(config: BackendConfig, layout: StoreLayout) -> bool:
    """Whether a run's journals say that its store has taken records of it before."""
    path = journal_directory(layout.run_path(config.run_id or ""), config.run_id or "")
    return any(
        manifest.moved_to or JournalFolder(folder).mark(lane.name).done
        for folder in path.glob("*/")
        if (manifest := JournalFolder(folder).read_manifest()) is not None
        for lane in manifest.lanes
        if lane.primary
    )


def _find_helper(layout: StoreLayout, start: bool) -> bool:
    """Whether a process of its own compacts the store now; it may be started for that."""
    from quark_backends.embedded.compaction_process import find_helper

    return find_helper(layout, start=start)
