"""Runs on their way out: hidden in the trash first, taken back, or removed for good.

The database says which runs are in the trash (`run.trashed_us`); their folders
lie in `trash/` instead of `runs/`. Whoever changes the first puts the second
right afterwards, under the lock that all writers wait for, so a process that
is killed in between leaves nothing but work for the next one.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, StoreConnection, writing
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.reading.table_rows import run_not_found
from quark_backends.store.upkeep.usage import (
    is_written,
    list_paths,
    list_trash,
    measure_runs,
    measure_shared_store,
    measure_store,
    trash_path,
)
from quark_core.backends.edits import (
    Collection,
    CollectionProgress,
    DamagedRecords,
    RunUsage,
    StoreUsage,
)
from quark_core.errors import InvalidRunStateError, RunNotFoundError, SessionStoreError
from quark_core.records import format_time
from quark_core.system.process import ProcessIdentity, find_lost_reason

if TYPE_CHECKING:
    from quark_backends.store.databases.postgres import PostgresDatabase

# Fewer are not worth the chunks that they would become.
_FEW_BATCHES = 16
_ASKED_AT_ONCE = 500

_log = logging.getLogger("quark")


class StoreTrash(ABC):
    """What every trash has, whatever lies in the database and whatever in folders."""

    _layout: StoreLayout | None = None

    @abstractmethod
    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""

    @abstractmethod
    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""

    @abstractmethod
    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            return measure_runs(connection, self._layout, run_ids)

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            return list_trash(connection, self._layout)

    def list_damaged(self) -> list[DamagedRecords]:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            rows = connection.execute(
                "SELECT run.id, writer.id, damaged.kind, count, reason, found_us FROM damaged"
                " JOIN writer ON writer.pk = writer_pk JOIN run ON run.pk = run_pk"
                " ORDER BY found_us DESC, damaged.pk DESC"
            ).fetchall()
        return [
            DamagedRecords(
                run_id=run_id,
                writer_id=writer_id,
                kind=kind,
                records=count,
                reason=reason,
                found_at=format_time(found_us),
            )
            for run_id, writer_id, kind, count, reason, found_us in rows
        ]

    def plan_collection(
        self, older_than_s: float, run_ids: Sequence[str] | None = None
    ) -> Collection:
        """What `collect_trash` would do."""
        from quark_backends.store.upkeep.garbage_collection import TrashCollector

        with self._open("read") as connection:
            return TrashCollector(connection, self._layout).plan(older_than_s, run_ids)

    def collect_for(
        self, limit_s: float, older_than_s: float, run_ids: Sequence[str] | None = None
    ) -> tuple[Collection, bool]:
        """As `collect_trash`, for about so long.

        Returns:
            What was done, and whether all of it is: if not, the next call goes on.
        """
        from quark_backends.store.upkeep.garbage_collection import TrashCollector

        deadline_s = time.monotonic() + limit_s
        with self._open("changed") as connection:
            collector = TrashCollector(
                connection, self._layout, should_stop=lambda: time.monotonic() > deadline_s
            )
            return collector.collect(older_than_s, run_ids), not collector.is_stopped

    def check_kept(self, run_id: str) -> None:
        """See that the store has a run, which may be in the trash.

        Raises:
            RunNotFoundError: It never had it, or it is removed for good.
        """
        with self._open("read") as connection:
            found = connection.execute(
                "SELECT EXISTS (SELECT 1 FROM removed WHERE run_id = ?),"
                " EXISTS (SELECT 1 FROM run WHERE id = ?)",
                (run_id, run_id),
            ).fetchone()
        if found[0]:
            raise RunNotFoundError(
                f"run_id {run_id}: this run was permanently deleted from this store"
            )
        if not found[1]:
            raise run_not_found(run_id)

    def list_gone(self, run_ids: Sequence[str]) -> list[str]:
        """Those of these runs of which no row is left, and none will come."""
        gone: list[str] = []
        with self._open("read") as connection:
            for start in range(0, len(run_ids), _ASKED_AT_ONCE):
                asked = run_ids[start : start + _ASKED_AT_ONCE]
                rows = connection.execute(
                    f"SELECT run_id FROM removed WHERE run_id IN ({', '.join('?' * len(asked))})"
                    " AND NOT EXISTS (SELECT 1 FROM run WHERE id = run_id)",
                    asked,
                )
                gone += [row[0] for row in rows.fetchall()]
        return gone

    @abstractmethod
    def _open(self, purpose: str) -> AbstractContextManager[StoreConnection]:
        """A connection that is closed when it is left.

        Args:
            purpose: "read" or "changed".

        Raises:
            SessionStoreError: There is none, or the database failed meanwhile.
        """


class RunTrash(StoreTrash):
    """See `SupportsRemoval`. Opens a connection per call; may be used from any thread.

    Args:
        layout: Where the store lies.
        read_only: Refuse whatever would change it.
    """

    _layout: StoreLayout

    def __init__(self, layout: StoreLayout, *, read_only: bool = False) -> None:
        self._layout = layout
        self._read_only = read_only

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            return measure_store(connection, self._layout)

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        with self._open("changed") as connection:
            _mark(connection, run_ids)
            self._place_folders(connection)

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        with self._open("changed") as connection:
            _unmark(connection, run_ids)
            self._place_folders(connection)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`."""
        from quark_backends.store.upkeep.garbage_collection import TrashCollector

        if dry_run:
            return self.plan_collection(older_than_s, run_ids)
        with self._open("changed") as connection:
            self._place_folders(connection)
            _compact_ended(connection)
            collector = TrashCollector(connection, self._layout, on_progress)
            return collector.collect(older_than_s, run_ids)

    @contextmanager
    def _open(self, purpose: str) -> Iterator[SqliteConnection]:
        reading = purpose == "read"
        if self._read_only and not reading:
            raise SessionStoreError(f"the store {self._layout.root} was opened for reading only")
        connection = connect(self._layout, read_only=reading)
        try:
            yield connection
        except sqlite3.Error as error:
            raise SessionStoreError(
                f"the store {self._layout.db_path} cannot be {purpose}: {error}"
            ) from error
        finally:
            connection.close()

    def _place_folders(self, connection: SqliteConnection) -> None:
        """Put the folders where the database says that the runs are."""
        root = self._layout.root
        with writing(connection):
            trashed = {
                row[0] for row in connection.execute("SELECT id FROM run WHERE trashed_us NOTNULL")
            }
            for run_id in trashed:
                source = self._layout.run_path(run_id)
                # A journal is not taken away from the process that writes it.
                if not is_written(source):
                    _move(source, trash_path(self._layout, run_id))
            for path in list_paths(root / "trash"):
                known = connection.execute("SELECT 1 FROM run WHERE id = ?", (path.name,))
                if path.name not in trashed and known.fetchone():
                    _move(path, self._layout.run_path(path.name))


class SharedTrash(StoreTrash):
    """The same in PostgreSQL, where there are tables alone; payloads are with the service.

    Args:
        database: The store; closed by who made it.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            return measure_shared_store(connection, self._database.name)

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._database.run(lambda connection: _mark(connection, run_ids))

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._database.run(lambda connection: _unmark(connection, run_ids))

    @contextmanager
    def _open(self, purpose: str) -> Iterator[StoreConnection]:
        connection = self._database.connect()
        try:
            yield connection
        except connection.Error as error:
            raise SessionStoreError(
                f"the store {self._database.name} cannot be {purpose}: {error}"
            ) from error
        finally:
            connection.close()


class JournalTrash(RunTrash):
    """Refuses all of it, for a store that is nothing but journals."""

    def list_damaged(self) -> list[DamagedRecords]:
        """Nothing: `quark doctor` finds what is damaged in the journals themselves."""
        return []

    def _open(self, purpose: str) -> NoReturn:
        root = self._layout.root
        raise SessionStoreError(
            f"{root} is on a network file system and stores runs as journals only. No "
            f"database can be {purpose} there to measure or delete runs. On a local disk, "
            f"`quark sync {root.parent}` creates a database"
        )


def _compact_ended(connection: SqliteConnection) -> None:
    """What runs that have ended left as batches takes up less as chunks."""
    from quark_backends.store.upkeep.compaction import Compactor

    compactor = Compactor(connection)
    while work := compactor.find_work(minimum=_FEW_BATCHES, ended_only=True):
        if not sum(compactor.compact(item) for item in work):
            return  # another process does it


def _mark(connection: StoreConnection, run_ids: Sequence[str]) -> None:
    """Say of runs that they are in the trash, all or none; see `SupportsRemoval`."""
    # In one order everywhere: who locks the same runs waits, and does not deadlock.
    run_ids = sorted(set(run_ids))
    with writing(connection):
        for run_id in run_ids:
            _check_removable(connection, run_id)
        now_us = time.time_ns() // 1000
        connection.executemany(
            "UPDATE run SET trashed_us = ? WHERE id = ? AND trashed_us IS NULL",
            [(now_us, run_id) for run_id in run_ids],
        )


def _unmark(connection: StoreConnection, run_ids: Sequence[str]) -> None:
    """Say of runs that they are not in the trash any more, all or none; see `SupportsRemoval`."""
    run_ids = sorted(set(run_ids))
    with writing(connection):
        for run_id in run_ids:
            _check_restorable(connection, run_id)
        connection.executemany(
            "UPDATE run SET trashed_us = NULL WHERE id = ?", [(run_id,) for run_id in run_ids]
        )


def _check_removable(connection: StoreConnection, run_id: str) -> None:
    row = connection.execute(
        f"SELECT status, process, heartbeat_us FROM run WHERE id = ?{connection.for_update}",
        (run_id,),
    ).fetchone()
    if row is None:
        raise run_not_found(run_id)
    status, process, heartbeat_us = row
    identity = msgspec.json.decode(process, type=ProcessIdentity)
    if status == "running" and find_lost_reason(status, identity, heartbeat_us) is None:
        raise InvalidRunStateError(
            f"run_id {run_id} is running (process {identity.pid}), so it cannot be removed. End "
            "it first, or wait until it ends"
        )


def _check_restorable(connection: StoreConnection, run_id: str) -> None:
    row = connection.execute(
        f"SELECT trashed_us FROM run WHERE id = ?{connection.for_update}", (run_id,)
    ).fetchone()
    if row is None or row[0] is None:
        raise RunNotFoundError(f"run_id {run_id} is not in the trash")
    # A statement of its own: one that waited for the lock would not see the tombstone.
    if connection.execute("SELECT 1 FROM removed WHERE run_id = ?", (run_id,)).fetchone():
        raise RunNotFoundError(
            f"run_id {run_id} cannot be restored: `quark gc` has started to delete it permanently"
        )


def _move(source: Path, target: Path) -> None:
    """Move a folder; into one that is there already, file by file, with nothing overwritten."""
    if not os.path.lexists(source):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            os.rename(source, target)
        elif source.is_dir() and target.is_dir() and not source.is_symlink():
            for path in list_paths(source):
                _move(path, target / path.name)
            source.rmdir()
        else:
            os.rename(source, _find_free_name(target))
    except OSError as error:
        # The database has the last word; the next call tries again.
        _log.warning("%s could not be moved to %s: %s", source, target, error)


def _find_free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free
