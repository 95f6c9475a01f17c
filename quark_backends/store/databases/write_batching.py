"""Lets the threads of a process take turns at writing with other processes, little and often.

What makes a commit slow is the disk's sync, and under `synchronous=FULL` nobody else writes
meanwhile. Here SQLite commits without it, and the log is synced when the database is free again:
whoever syncs it then syncs what others have committed, too. Nobody is answered before that, so
what was answered survives a power loss as it does under FULL.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from quark_backends.store.databases.connection import (
    OpenFiles,
    SqliteConnection,
    StoreConnection,
    Turnstile,
    close_with,
    is_busy,
)
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.databases.write_ahead_log import empty_log, find_log
from quark_core.errors import SessionStoreError

T = TypeVar("T")

# Where the database is busy though nobody writes: somebody mends or empties its log.
_PAUSE_S = (0.001, 0.01)
_PATIENCE_S = 10.0
# There a log that somebody has open could not be deleted by whoever closes the database last.
_SYNCS_APART = sys.platform != "win32"


class SqliteTurns:
    """One connection by which the threads of a process take turns with other processes.

    Opened when it is first needed, and kept: a claim takes less time than to open one.

    Args:
        layout: The store.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: SqliteConnection | None = None
        self._close: Callable[[], object] | None = None
        self._files: OpenFiles | None = None
        self._turnstile: Turnstile | None = None
        self._log: _OpenLog | None = None
        self._is_unsynced = False
        self._put_off = _PutOff()

    def run(self, apply: Callable[[StoreConnection], T]) -> T:
        """Run a function that is one transaction, on the disk when this returns.

        It is run again and again while others write. Inside of `syncing` it is on the disk when
        that block ends.

        Raises:
            SessionStoreError: The store is busy for longer than 30 s, full or out of reach. Where
                its log could not be synced, what was written is there, and may be gone after a
                power loss.
        """
        if self._pid != os.getpid():
            # A fork's connection is its parent's, which must not be closed from here.
            _of_parents.append(self._connection)
            self._begin_anew()
        with self._lock:
            try:
                done, log = self._run(apply)
            except sqlite3.Error as error:
                self._drop()
                raise SessionStoreError(f"the store cannot be written: {error}") from error
        if log is None:
            return done
        if self._put_off.logs is None:
            self._sync(log)
        elif log not in self._put_off.logs:
            self._put_off.logs.append(log)
        return done

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Put off what this thread would sync meanwhile to the end of the block: one sync for all.

        Nobody is told before what was run inside. Of a block in another one the outer one syncs.

        Raises:
            SessionStoreError: As `run`, of everything that was run.
        """
        if self._put_off.logs is not None:
            yield
            return
        logs = self._put_off.logs = []
        try:
            yield
        finally:
            self._put_off.logs = None
            # Also where the block has failed: a call that is made again may find what it wrote.
            for log in logs:
                self._sync(log)

    def _run(self, apply: Callable[[StoreConnection], T]) -> tuple[T, _OpenLog | None]:
        """The function's result, and the log that is to be synced, if any."""
        if self._is_unsynced:
            # Asked again, it may find what it wrote, and would write nothing that is synced.
            self._settle_log()
        connection = self._open()
        before = connection.written
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                done = apply(connection)
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise
            else:
                assert self._files is not None
                self._files.note()
                # It may have found what another has written, who is syncing that still.
                is_written = connection.written != before
                return done, self._find_log() if is_written else None
            time.sleep(random.uniform(*_PAUSE_S))

    def _find_log(self) -> _OpenLog | None:
        """The log that commits go to, which is there as soon as one has; None under FULL."""
        if self._log is None and _SYNCS_APART:
            with suppress(OSError):
                self._log = _OpenLog(self._layout)
            if self._log is None:
                # Not to be opened: what is in it is brought into the database.
                self._settle_log()
        return self._log

    def _sync(self, log: _OpenLog) -> None:
        try:
            log.sync()
        except OSError as error:
            # The system may have let go of what it could not write, and forget that: a later sync
            # would not tell. So it is written anew, from the log into the database.
            with self._lock:
                if self._log is log:
                    self._log = None
                try:
                    self._settle_log(error)
                except sqlite3.Error as failure:
                    self._drop()
                    raise SessionStoreError(f"the store cannot be written: {failure}") from failure

    def _settle_log(self, error: OSError | None = None) -> None:
        """Have what is in the log on the disk, in the database; the lock is held.

        It is opened anew where somebody has closed it meanwhile.
        """
        self._is_unsynced = True
        if not empty_log(self._open()):
            self._drop()
            raise SessionStoreError(
                f"the write-ahead log of the store {self._layout.db_path} cannot be "
                f"synced{'' if error is None else f': {error}'}"
            ) from error
        self._is_unsynced = False

    def close(self) -> None:
        """Give the connection up; a later call opens another."""
        if self._pid == os.getpid():
            with self._lock:
                self._drop()

    def _open(self) -> SqliteConnection:
        if self._files is not None and self._files.find_lost():
            self._drop()
        if self._connection is None:
            self._connection = connect(self._layout)
            self._close = close_with(self, self._connection.close, self._lock)
            self._connection.execute("PRAGMA busy_timeout=0")
            if _SYNCS_APART:
                self._connection.execute("PRAGMA synchronous=NORMAL")
            self._turnstile = Turnstile(self._layout.marker)
            self._connection.turnstile = self._turnstile
            self._files = OpenFiles(self._layout)
        return self._connection

    def _drop(self) -> None:
        if self._close is not None:
            self._close()
        if self._turnstile is not None:
            self._turnstile.close()
        self._connection = self._close = self._files = self._turnstile = self._log = None


class _PutOff(threading.local):
    """What a thread is to sync at the end of a block; None outside of one."""

    logs: list[_OpenLog] | None = None


class _OpenLog:
    """The log of a database, open for syncing; closed when nobody syncs it any more.

    Args:
        layout: The store, to which something was written.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._failure: OSError | None = None
        self._file = os.open(find_log(layout.db_path), os.O_RDONLY)
        close_with(self, partial(os.close, self._file))

    def sync(self) -> None:
        """Have on the disk what is in it now; from any thread.

        Raises:
            OSError: It may not be.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            self._failure = error
            raise
        # The system says once that it could not: to whichever thread asks first.
        if self._failure is not None:
            raise OSError(*self._failure.args)


# Connections of the processes that this one was forked from.
_of_parents: list[SqliteConnection | None] = []
