"""What the store's SQL runs over: a connection to SQLite or to PostgreSQL.

The statements are the same for both, with `?` where a value is bound. What
differs is said here: how a transaction begins, where keys come from, and
which errors mean what.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from quark_backends.store.databases.open_files import Descriptors
from quark_backends.store.databases.turnstile import Turnstile
from quark_core.system.exit_status import call_last
from quark_core.system.process import writing_gate

_log = logging.getLogger("quark")

# A machine that has far too much to do may keep whoever writes waiting for seconds.
_PATIENCE_S = 30.0
# How long the end of a process waits for all threads that are at connections.
_IN_USE_S = 5.0


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


def close_with(
    owner: object, close: Callable[[], object], lock: _Lock | None = None
) -> Callable[[], object]:
    """Close what an object has opened, once: when it is dropped or this process ends.

    A forked child leaves it to its parent: a thread of the parent's may have been at it. Closing
    a connection that another thread is at ends the process by signal 11. So the end of the
    process closes connections once its runs have ended, waits for the threads that are at one,
    and leaves a connection open which is not given back in time.

    Args:
        owner: The object.
        close: Closes it; must not refer to the owner, or that is never dropped.
        lock: Whoever is at it holds this.

    Returns:
        What closes it now.
    """
    closing = _Closing(close, lock)
    _open[id(closing)] = closing
    # Python would do it before the runs end, where they have begun before.
    weakref.finalize(owner, closing).atexit = False
    call_last(_close_all, closes=True)
    return closing


class _Closing:
    """Closes something once."""

    def __init__(self, close: Callable[[], object], lock: _Lock | None) -> None:
        self._pid = os.getpid()
        self._close = close
        self._lock = lock

    def __call__(self) -> None:
        if _open.pop(id(self), None) is None or self._pid != os.getpid():
            return
        left_s = min(_IN_USE_S, max(0.0, _last_moment_s - time.monotonic()))
        if self._lock is None:
            self._close()
        elif self._lock.acquire(timeout=left_s):
            try:
                self._close()
            finally:
                self._lock.release()
        else:
            _at_it.append(self)


_open: dict[int, _Closing] = {}
_last_moment_s = math.inf
# Those that a thread still was at when the process ended.
_at_it: list[_Closing] = []


def _close_all() -> None:
    """Close what is open as the process ends; all threads that are at it have one time."""
    global _last_moment_s
    _last_moment_s = time.monotonic() + _IN_USE_S
    for close in reversed(list(_open.values())):
        try:
            close()
        except Exception:  # noqa: BLE001 - the others must still be closed
            _log.debug("a connection cannot be closed", exc_info=True)


class StoreCursor(Protocol):
    """Rows of a statement."""

    @property
    def rowcount(self) -> int:
        """How many rows were changed."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> list[Any]:
        """All rows that are left."""

    def __iter__(self) -> Iterator[Any]:
        """The rows that are left."""

    def close(self) -> object:
        """Let go of the rows."""


class StoreConnection(Protocol):
    """A connection that is in a transaction only between `begin_…` and its end.

    Belongs to one thread at a time.
    """

    product: str
    """What messages call the database."""

    is_shared: bool
    """Whether several processes write at once, so that a run must be locked first;
    round trips cost there, and statements are sent together."""

    for_update: str
    """Ends a SELECT of runs that nobody else may write until the transaction ends."""

    skip_locked: str
    """As `for_update`, leaving out what somebody else has at this moment."""

    @property
    def Error(self) -> type[Exception]:  # noqa: N802 - as DB-API has it
        """Root of the database's errors."""

    @property
    def IntegrityError(self) -> type[Exception]:  # noqa: N802 - as DB-API has it
        """A constraint forbids it."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def execute(self, sql: str, args: Sequence[Any] = (), /) -> StoreCursor:
        """Run one statement."""

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> StoreCursor:
        """Run one statement for each row of values.

        Rows of an INSERT may go in as one, so none of them may stand in another's
        way; of other statements `rowcount` is that of all.
        """

    def insert(self, sql: str, args: Sequence[Any], /) -> int:
        """Insert a row whose first value is its key, which is given here; returns the key."""

    def new_key(self) -> int | None:
        """A key for a new row; None where the database gives it by itself."""

    def read_clock_us(self) -> int:
        """The time in microseconds since 1970, of the one clock that all who share a store read."""

    def begin_read(self) -> None:
        """Begin a transaction that sees one moment of the store."""

    def begin_write(self) -> None:
        """Begin a transaction that writes."""

    def commit(self) -> None:
        """End the transaction; what it wrote is on disk."""

    def rollback(self) -> None:
        """Take the transaction back; does nothing where none is open."""

    def is_malformed(self, error: Exception) -> bool:
        """Whether an error says that a value can never be stored."""

    def close(self) -> None:
        """Give the connection up."""


def is_busy(error: sqlite3.Error) -> bool:
    """Whether SQLite fails because somebody else is at the database."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _keep_for_ever(connection: sqlite3.Connection) -> None:
    """Have nothing ever close a connection, the end of the interpreter included."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


@contextmanager
def writing(connection: StoreConnection) -> Iterator[None]:
    """One transaction that writes: committed at the end, taken back where anything is raised."""
    connection.begin_write()
    try:
        yield
        connection.commit()
    except BaseException:
        connection.rollback()
        raise


class SqliteConnection(sqlite3.Connection):
    """A connection to a database file, in autocommit mode (`isolation_level=None`)."""

    product = "SQLite"
    is_shared = False
    # A transaction that writes is the only one anyway.
    for_update = ""
    skip_locked = ""
    turnstile: Turnstile | None = None
    """Where it waits for its turn to write; None where it waits as SQLite does."""
    written = 0
    """How many transactions that write have been committed."""
    descriptors: Descriptors | None = None
    """By which numbers its files are open; None where it has none."""
    _is_writing = False

    @property
    def is_robbed(self) -> bool:
        """Whether other code has closed the descriptors that SQLite goes on using."""
        return self.descriptors is not None and bool(self.descriptors.find_taken())

    @property
    def is_sound(self) -> bool:
        """Whether what is read is what was written: its descriptors and its log are its own."""
        descriptors = self.descriptors
        return descriptors is None or not (descriptors.find_taken() or descriptors.find_damage())

    def insert(self, sql: str, args: Sequence[Any], /) -> int:
        """See `StoreConnection`."""
        return self.execute(sql, (None, *args)).lastrowid or 0

    def new_key(self) -> int | None:
        """See `StoreConnection`."""
        return None

    def read_clock_us(self) -> int:
        """See `StoreConnection`: a file on a local disk is used on one machine."""
        return time.time_ns() // 1000

    def begin_read(self) -> None:
        """See `StoreConnection`."""
        if self.descriptors is not None:
            self.descriptors.mend_index()
        self.execute("BEGIN")

    def begin_write(self) -> None:
        """See `StoreConnection`."""
        self._end_writing()
        writing_gate.enter()
        self._is_writing = True
        try:
            # The last try says what is wrong, after the one place or the other was waited for.
            if self.turnstile is None or not self.turnstile.pass_through(
                self._try_to_begin, _PATIENCE_S
            ):
                self.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._end_writing()
            raise

    def _try_to_begin(self) -> bool:
        try:
            self.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            return False
        return True

    def commit(self) -> None:
        """See `StoreConnection`."""
        self.execute("COMMIT")
        self.written += self._is_writing
        self._end_writing()

    def rollback(self) -> None:
        """See `StoreConnection`."""
        try:
            if self.in_transaction:
                self.execute("ROLLBACK")
        finally:
            self._end_writing()

    def close(self) -> None:
        """See `StoreConnection`; one that was robbed stays open for ever.

        SQLite would write into and close what other code has opened under its numbers.
        """
        try:
            if self.descriptors is not None:
                self.descriptors.mend_index()
            if self.is_robbed:
                _keep_for_ever(self)
            else:
                super().close()
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            writing_gate.leave()

    def is_malformed(self, error: Exception) -> bool:
        """See `StoreConnection`."""
        if isinstance(error, sqlite3.ProgrammingError):
            return "bind" in str(error)
        return isinstance(
            error, sqlite3.IntegrityError | sqlite3.InterfaceError | sqlite3.DataError
        )
