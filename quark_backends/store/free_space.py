"""Gives pages that hold nothing back to the disk, in steps that keep no training waiting."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from quark_backends.store.layout import StoreLayout
from quark_core.keeping import CollectionProgress
from quark_core.liveness import find_lost_reason
from quark_core.process import ProcessIdentity

__all__ = ["StepPace", "give_space_back"]

_STEP_S = 0.02
_SHORTEST_PAUSE_S = 0.002
_LEAST_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024 * 1024
_CHECKPOINTS = 10
_CHECKPOINT_PATIENCE_MS = 100
_INCREMENTAL = 2
_PAGES_AT_ONCE = 16
_CHECK_EVERY = 100_000  # instructions of SQLite's, some milliseconds


class StepPace:
    """Short transactions with pauses between them, so that others can write beside.

    How much a step may do follows from how long the last one held the lock.

    Args:
        connection: In autocommit mode; for one thread.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.step_bytes = 1024 * 1024

    @contextmanager
    def step(self) -> Iterator[int]:
        """One transaction, which may change about so many bytes."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        begun_s = time.monotonic()
        try:
            yield self.step_bytes
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        held_s = time.monotonic() - begun_s
        if held_s > _STEP_S:
            self.step_bytes = max(_LEAST_BYTES, self.step_bytes // 2)
        elif held_s < _STEP_S / 4:
            self.step_bytes = min(_MOST_BYTES, self.step_bytes * 2)
        time.sleep(max(_SHORTEST_PAUSE_S, held_s))


def give_space_back(
    connection: sqlite3.Connection,
    layout: StoreLayout,
    pace: StepPace,
    on_progress: CollectionProgress | None = None,
) -> tuple[str, ...]:
    """Make the database's files smaller by what they hold in vain.

    Returns:
        What could not be done now, and what to do about it.
    """
    notes = []
    if _read(connection, "freelist_count"):
        if _read(connection, "auto_vacuum") == _INCREMENTAL:
            _vacuum_in_steps(connection, pace, on_progress)
        else:
            notes += _vacuum_at_once(connection, layout, on_progress)
    _checkpoint(connection)
    return tuple(notes)


def _vacuum_in_steps(
    connection: sqlite3.Connection, pace: StepPace, on_progress: CollectionProgress | None
) -> None:
    page_bytes = _read(connection, "page_size")
    total = _read(connection, "freelist_count")
    done = 0
    # Pages that others free meanwhile are left to the next time, or this might never end.
    while done < total:
        with pace.step():
            before = _read(connection, "page_count")
            stop_s = time.monotonic() + _STEP_S
            while done < total and time.monotonic() < stop_s:
                # One by one: Python's driver stops at the first page of several.
                for _ in range(min(_PAGES_AT_ONCE, total - done)):
                    connection.execute("PRAGMA incremental_vacuum(1)")
                    done += 1
            if _read(connection, "page_count") == before:
                return
        if on_progress is not None:
            on_progress("giving space back", done * page_bytes, total * page_bytes)


def _vacuum_at_once(
    connection: sqlite3.Connection, layout: StoreLayout, on_progress: CollectionProgress | None
) -> list[str]:
    """For a store that was not made to shrink in steps: rewrite it, which also makes it such."""
    page_bytes = _read(connection, "page_size")
    size_bytes = _read(connection, "page_count") * page_bytes
    free_bytes = _read(connection, "freelist_count") * page_bytes
    kept = f"{free_bytes / 1e6:.1f} MB stay in {layout.db_path} and are used again"
    why = "an older version made it, so it shrinks only as a whole"
    if alive := _list_alive(connection):
        return [f"{kept}: {why}, and {', '.join(alive)} still writes; run `quark gc` after that"]
    needed_bytes = 2 * (size_bytes - free_bytes)
    if shutil.disk_usage(layout.root).free < needed_bytes:
        return [f"{kept}: {why}, which takes {needed_bytes / 1e6:.0f} MB of free disk for a while"]
    if on_progress is not None:
        on_progress("rewriting the database", 0, size_bytes)
    # A signal is seen only while Python runs, and SQLite's work is one call.
    connection.set_progress_handler(lambda: 0, _CHECK_EVERY)
    try:
        connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise KeyboardInterrupt from error
        return [f"{kept}: {why}, and that failed: {error}"]
    finally:
        connection.set_progress_handler(None, 0)
    return []


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Bring what was written into the database file, which makes it as short as it can be.

    Best effort: whoever reads an older state keeps it from being done, and
    waiting for them would keep those waiting who write.
    """
    patience_ms = _read(connection, "busy_timeout")
    connection.execute(f"PRAGMA busy_timeout={_CHECKPOINT_PATIENCE_MS}")
    try:
        for _ in range(_CHECKPOINTS):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return
            time.sleep(_STEP_S)
    except sqlite3.OperationalError:
        return  # busy: the next writer's checkpoint does it
    finally:
        connection.execute(f"PRAGMA busy_timeout={patience_ms}")


def _list_alive(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT id, status, process, heartbeat_us FROM run WHERE status = 'running'"
    ).fetchall()
    return [
        f"run {run_id}"
        for run_id, status, process, heartbeat_us in rows
        if not find_lost_reason(
            status, msgspec.json.decode(process, type=ProcessIdentity), heartbeat_us
        )
    ]


def _read(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
