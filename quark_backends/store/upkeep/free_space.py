"""Gives pages that hold nothing back to the disk, in steps that keep no training waiting."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.write_ahead_log import empty_log
from quark_core.backends.edits import CollectionProgress
from quark_core.system.process import ProcessIdentity, find_lost_reason

_STEP_S = 0.02
_SHORTEST_PAUSE_S = 0.002
_LEAST_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024 * 1024
_INCREMENTAL = 2
_PAGES_AT_ONCE = 16
_CHECK_EVERY = 100_000  # instructions of SQLite's, some milliseconds


class Stopped(Exception):
    """Whoever asked for the work wants no further step of it now."""


class StepPace:
    """Short transactions with pauses between them, so that others can write beside.

    Where nobody may stop the work, steps follow each other in one transaction
    until it has held the lock for a while: a pause after each of very many small
    ones would take longest of all. How much a step may do follows from how long
    the last one took.

    Args:
        connection: In autocommit mode; for one thread.
        should_stop: Asked before each step but the first: whoever asks again gets on.
    """

    def __init__(
        self, connection: StoreConnection, should_stop: Callable[[], bool] | None = None
    ) -> None:
        self._connection = connection
        self._should_stop = should_stop
        self._has_begun = False
        self._joins_steps = should_stop is None and not connection.is_shared
        self._begun_s = 0.0
        self.step_bytes = 1024 * 1024

    @contextmanager
    def step(self, *, is_work: bool = True) -> Iterator[int]:
        """Part of a transaction, which may change about so many bytes.

        It is committed by a later step, or by `finish`; what fails takes back what
        was not committed, each step of which leaves a whole store.

        Args:
            is_work: Whether it brings the work forward. What is done anew whenever
                the work goes on does not, so none is stopped before or for it.

        Raises:
            Stopped: There is to be no further one; nothing was begun.
        """
        if is_work:
            if self._has_begun and self._should_stop is not None and self._should_stop():
                raise Stopped
            self._has_begun = True
        if not self._connection.in_transaction:
            self._connection.begin_write()
            self._begun_s = time.monotonic()
        step_s = time.monotonic()
        try:
            yield self.step_bytes
        except BaseException:
            self._connection.rollback()
            raise
        now_s = time.monotonic()
        if now_s - step_s > _STEP_S:
            self.step_bytes = max(_LEAST_BYTES, self.step_bytes // 2)
        elif now_s - step_s < _STEP_S / 4:
            self.step_bytes = min(_MOST_BYTES, self.step_bytes * 2)
        if not self._joins_steps or now_s - self._begun_s >= _STEP_S / 2:
            self.finish()

    def finish(self) -> None:
        """Commit what the steps so far have done, and give others their turn."""
        if not self._connection.in_transaction:
            return
        try:
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        time.sleep(max(_SHORTEST_PAUSE_S, time.monotonic() - self._begun_s))


def give_space_back(
    connection: sqlite3.Connection,
    layout: StoreLayout,
    pace: StepPace,
    on_progress: CollectionProgress | None = None,
    *,
    in_steps: bool = False,
) -> tuple[str, ...]:
    """Make the database's files smaller by what they hold in vain.

    Args:
        connection: In no transaction.
        layout: Where the store lies.
        pace: How steps are taken.
        on_progress: See `SupportsRemoval`.
        in_steps: Whether that may be done in steps only, where others wait for the store.

    Returns:
        What could not be done now, and what to do about it.
    """
    notes = []
    pace.finish()
    if _read(connection, "freelist_count"):
        if _read(connection, "auto_vacuum") == _INCREMENTAL:
            _vacuum_in_steps(connection, pace, on_progress)
        elif in_steps:
            notes.append(
                f"{layout.db_path}, which an older version made, shrinks only as a whole, and "
                "requests would have to wait for that; what is free in it is used again"
            )
        else:
            notes += _vacuum_at_once(connection, layout, on_progress)
    pace.finish()
    # The file is then as short as it can be.
    empty_log(connection)
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
