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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from quark_backends.store.connection import SqliteConnection
from quark_backends.store.database import connect
from quark_backends.store.layout import StoreLayout
from quark_backends.store.run_files import is_written, list_paths, trash_path
from quark_backends.store.run_rows import run_not_found
from quark_backends.store.sizes import list_trash, measure_runs, measure_store
from quark_core.errors import InvalidRunStateError, RunNotFoundError, SessionStoreError
from quark_core.keeping import (
    Collection,
    CollectionProgress,
    DamagedRecords,
    RunUsage,
    StoreUsage,
)
from quark_core.liveness import find_lost_reason
from quark_core.process import ProcessIdentity
from quark_core.records import format_time

__all__ = ["JournalTrash", "RunTrash", "SupportsTrash"]

# Fewer are not worth the chunks that they would become.
_FEW_BATCHES = 16

_log = logging.getLogger("quark")


class RunTrash:
    """See `SupportsRemoval`. Opens a connection per call; may be used from any thread.

    Args:
        layout: Where the store lies.
        read_only: Refuse whatever would change it.
    """

    def __init__(self, layout: StoreLayout, *, read_only: bool = False) -> None:
        self._layout = layout
        self._read_only = read_only

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""
        with self._open("read") as connection:
            return measure_store(connection, self._layout)

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
                "SELECT run.id, writer.id, kind, count, reason, found_us FROM damaged"
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

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        with self._open("changed") as connection:
            with _write(connection):
                for run_id in run_ids:
                    _check_removable(connection, run_id)
                now_us = time.time_ns() // 1000
                connection.executemany(
                    "UPDATE run SET trashed_us = ? WHERE id = ? AND trashed_us IS NULL",
                    [(now_us, run_id) for run_id in run_ids],
                )
            self._settle_folders(connection)

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        with self._open("changed") as connection:
            with _write(connection):
                for run_id in run_ids:
                    _check_restorable(connection, run_id)
                connection.executemany(
                    "UPDATE run SET trashed_us = NULL WHERE id = ?",
                    [(run_id,) for run_id in run_ids],
                )
            self._settle_folders(connection)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`."""
        from quark_backends.store.collection import TrashCollector

        with self._open("read" if dry_run else "changed") as connection:
            collector = TrashCollector(connection, self._layout, on_progress)
            if dry_run:
                return collector.plan(older_than_s)
            self._settle_folders(connection)
            _compact_ended(connection)
            return collector.collect(older_than_s)

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

    def _settle_folders(self, connection: sqlite3.Connection) -> None:
        """Put the folders where the database says that the runs are."""
        root = self._layout.root
        with _write(connection):
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


class JournalTrash(RunTrash):
    """Refuses all of it, for a store that is nothing but journals."""

    def list_damaged(self) -> list[DamagedRecords]:
        """Nothing: `quark doctor` finds what is damaged in the journals themselves."""
        return []

    def _open(self, purpose: str) -> NoReturn:
        root = self._layout.root
        raise SessionStoreError(
            f"{root} lies on a network file system, where runs are kept as journals only: there is "
            f"no database that could be {purpose} to measure or to remove them. Where it lies on a "
            f"local disk, `quark sync {root.parent}` makes a store of it"
        )


class SupportsTrash:
    """Hands the calls of `SupportsRemoval` on to a backend's trash."""

    _trash: RunTrash

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""
        return self._trash.measure_store()

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        return self._trash.measure_runs(run_ids)

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        return self._trash.list_trash()

    def list_damaged(self) -> list[DamagedRecords]:
        """See `SupportsRemoval`."""
        return self._trash.list_damaged()

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._trash.trash_runs(run_ids)

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._trash.restore_runs(run_ids)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`."""
        return self._trash.collect_trash(
            older_than_s=older_than_s, dry_run=dry_run, on_progress=on_progress
        )


def _compact_ended(connection: SqliteConnection) -> None:
    """What runs that have ended left as batches takes up less as chunks."""
    from quark_backends.store.compaction import Compactor

    compactor = Compactor(connection)
    while work := compactor.find_work(minimum=_FEW_BATCHES, ended_only=True):
        if not sum(compactor.compact(item) for item in work):
            return  # another process does it


def _check_removable(connection: sqlite3.Connection, run_id: str) -> None:
    row = connection.execute(
        "SELECT status, process, heartbeat_us FROM run WHERE id = ?", (run_id,)
    ).fetchone()
    if row is None:
        raise run_not_found(run_id)
    status, process, heartbeat_us = row
    identity = msgspec.json.decode(process, type=ProcessIdentity)
    if status == "running" and find_lost_reason(status, identity, heartbeat_us) is None:
        raise InvalidRunStateError(
            f"run_id {run_id} is alive (process {identity.pid}), so it cannot be removed; "
            "end it first, or wait until it is over"
        )


def _check_restorable(connection: sqlite3.Connection, run_id: str) -> None:
    row = connection.execute(
        "SELECT trashed_us, EXISTS (SELECT 1 FROM removed WHERE run_id = id) FROM run WHERE id = ?",
        (run_id,),
    ).fetchone()
    if row is None or row[0] is None:
        raise RunNotFoundError(f"run_id {run_id} is not in the trash")
    if row[1]:
        raise RunNotFoundError(
            f"run_id {run_id} cannot be restored: `quark gc` has begun to remove it for good"
        )


@contextmanager
def _write(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


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
