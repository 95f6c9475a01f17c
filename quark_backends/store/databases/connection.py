"""Connections of the store to SQLite or PostgreSQL, their files, and the queue of writers.

The statements are the same for both, with `?` where a value is bound. What
differs is said here: how a transaction begins, where keys come from, and
which errors mean what.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sqlite3
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from quark_backends.store.databases.layout import LOG_SUFFIX, StoreLayout
from quark_core.system.exit_status import call_last
from quark_core.system.process import writing_gate

if TYPE_CHECKING:
    from sqlalchemy import URL

# Lets processes that write often and little to one file write one after the other.
#
# SQLite lets in whoever asks at the right moment: one that has just written and asks again, rather
# than one that sleeps. Here one at a time waits in front of the database, and asks again and again
# without sleeping long; the others, and whoever has just written, wait behind it.

try:
    import fcntl
except ImportError:  # Windows has none: there all ask the database
    fcntl = None  # type: ignore[assignment]

_IN_FRONT_S = (0.0001, 0.0003)
_BEHIND_S = (0.0004, 0.002)
# Whoever is in front may have been stopped there (SIGSTOP), and must not keep the others from
# working: after so long they ask the database themselves, for a while.
_PATIENCE_S = 2.0
_WITHOUT_S = 10.0


class Turnstile:
    """The place in front of a database; belongs to one thread at a time.

    Args:
        path: A file that is there, by whose lock the place is kept; nothing is read or written.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        self._without_until = 0.0
        if fcntl is not None:
            with suppress(OSError):  # without it all ask the database
                self._file = path.open("rb")

    def close(self) -> None:
        """Give the file up."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def pass_through(self, try_to_enter: Callable[[], bool], limit_s: float) -> bool:
        """Ask for the database until it is ours; whether it is.

        Args:
            try_to_enter: Asks once, without waiting.
            limit_s: How long to go on.
        """
        began = time.monotonic()
        deadline = began + limit_s
        is_in_front = began >= self._without_until and self._wait_behind(
            min(deadline, began + _PATIENCE_S)
        )
        try:
            pause = _IN_FRONT_S if is_in_front else _BEHIND_S
            while not try_to_enter():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(random.uniform(*pause))
            return True
        finally:
            if is_in_front:
                self._leave()

    def _wait_behind(self, deadline: float) -> bool:
        """Wait for the place in front; whether it was free in time."""
        if sys.platform == "win32":
            return False
        while self._file is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._without_until = time.monotonic() + _WITHOUT_S
                    return False
                time.sleep(random.uniform(*_BEHIND_S))
            except OSError:
                return False
            else:
                return True
        return False

    def _leave(self) -> None:
        if sys.platform != "win32" and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)


# Which files an open connection writes to: those at its path, or some that took their place.
#
# SQLite writes to numbers of descriptors and believes its index of the write-ahead log. Other code
# of this process may close the numbers and open files of its own under them; another program may
# delete the files, replace them, or cut the log. All of that is found before the next write.

_INDEX_SUFFIX = "-shm"
_WITH_DATABASE = ("", LOG_SUFFIX, _INDEX_SUFFIX)
_DELETED = (-1, -1)
_CHANGE_TIMEOUT_S = 30.0

# Of the index: two equal heads, then how many frames are in the database already.
_HEAD = struct.Struct("=IIIBBHIIII8s8x")
_INDEX_BYTES = 2 * _HEAD.size + 4
_LOG_HEAD_BYTES = 32
_FRAME_HEAD = struct.Struct(">8x8sII")


class FilesChanged(sqlite3.OperationalError):
    """A connection's files are not what it believes, so that nothing was written."""


class PutBack(FilesChanged):
    """The store is an older copy of itself, log included: it lacks what was committed in it."""


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Keep all others out who change which files a store's folder has.

    Raises:
        TimeoutError: Another process has been at it for too long: it may have been stopped there.
    """
    if sys.platform == "win32":  # where a file that somebody has open cannot be deleted
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + _CHANGE_TIMEOUT_S
        while not _lock_folder(descriptor):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process has used it for {_CHANGE_TIMEOUT_S:g} s")
            time.sleep(0.005)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the descriptor too, and would keep the lock.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock_folder(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as good as it can be
        return True
    return True


def identify(path: str) -> tuple[int, int] | None:
    """Which file a path leads to; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _identify_open(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _list_descriptors() -> list[int]:
    """The numbers that are open in this process; empty where the system does not say."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    return []


class LogIndex(NamedTuple):
    """SQLite's index of a write-ahead log, which all processes share.

    Attributes:
        frames: How many frames the log holds.
        settled: How many of them are in the database file.
        page_bytes: Size of a page.
        checksum: Of the last frame, which is one of all before it, too.
        salt: Tells this log from the one before.
    """

    frames: int
    settled: int
    page_bytes: int
    checksum: tuple[int, int]
    salt: bytes

    @classmethod
    def parse(cls, data: bytes) -> LogIndex | None:
        """Read an index; None where it is just being changed, or none is there."""
        size = _HEAD.size
        if len(data) < _INDEX_BYTES or data[:size] != data[size : 2 * size]:
            return None
        _, _, _, is_made, _, page_bytes, frames, _, first, second, salt = _HEAD.unpack_from(data)
        if not is_made:
            return None
        (settled,) = struct.unpack_from("=I", data, 2 * size)
        # 65,536 does not fit.
        page_bytes = (page_bytes & 0xFE00) + ((page_bytes & 1) << 16)
        return cls(frames, settled, page_bytes, (first, second), salt)


class Descriptors:
    """The numbers by which one connection has its files open.

    Opening and closing one of the files would give up the locks that SQLite has on it in this
    process, so all is read through SQLite's own descriptors.

    Args:
        path: The database file.
        before: Which numbers were open before the connection was.
    """

    opening = threading.Lock()
    """Held while a connection is opened, so that what is new is that connection's."""

    def __init__(self, path: str, before: set[int]) -> None:
        self.path = path
        self._index_bytes = 0
        self._files: dict[str, tuple[tuple[int, int], list[int]]] = {}
        wanted = {suffix: identify(path + suffix) for suffix in _WITH_DATABASE}
        found: dict[str, list[int]] = {suffix: [] for suffix in _WITH_DATABASE}
        for number in _list_descriptors():
            identity = _identify_open(number)
            for suffix, known in wanted.items():
                if identity is not None and identity == known:
                    found[suffix].append(number)
        for suffix, numbers in found.items():
            known = wanted[suffix]
            if known is not None and numbers:
                # A connection shares the index with others, and may be given a number again.
                own = [number for number in numbers if number not in before]
                self._files[suffix] = known, own or numbers
        self.mend_index()

    @staticmethod
    def list_open() -> set[int]:
        """The numbers that are open now."""
        return set(_list_descriptors())

    def check(self) -> None:
        """See that what is written comes to the database at the path.

        Raises:
            FilesChanged: It does not.
        """
        self.check_open()
        if "" in self._files and identify(self.path) != self._files[""][0]:
            raise FilesChanged(f"{self.path} was deleted or replaced")

    def mend_index(self) -> None:
        """Give the index of the log its length again where another program has cut it.

        SQLite reads it as memory: behind the end of the file the process would end by signal 7.
        With an empty head SQLite makes it anew out of the log.
        """
        if _INDEX_SUFFIX in self._files:
            self._find_taken((_INDEX_SUFFIX,))

    def _mend(self, number: int, size: int) -> None:
        # Where a file that is mapped cannot be cut its descriptor is no number of ours either.
        if size < self._index_bytes and sys.platform != "win32":
            with suppress(OSError):
                os.ftruncate(number, self._index_bytes)
                os.pwrite(number, bytes(_INDEX_BYTES), 0)
        self._index_bytes = max(self._index_bytes, size)

    @property
    def is_moved(self) -> bool:
        """Whether the database lies somewhere else now, and nothing is at its path."""
        identity, numbers = self._files.get("", (_DELETED, []))
        if identify(self.path) is not None:
            return False
        return any(
            _identify_open(number) == identity and os.fstat(number).st_nlink for number in numbers
        )

    def find_taken(self) -> list[str]:
        """The files that none of the numbers leads to any more: other code has closed them."""
        return [self.path + suffix for suffix in self._find_taken(self._files)]

    def _find_taken(self, suffixes: Iterable[str]) -> list[str]:
        # This is done before each transaction, so that it costs little more than to ask the system.
        taken, fstat = [], os.fstat
        for suffix in suffixes:
            (device, inode), numbers = self._files[suffix]
            for number in numbers:
                try:
                    found = fstat(number)
                except OSError:
                    continue
                if found.st_ino == inode and found.st_dev == device:
                    if suffix == _INDEX_SUFFIX and found.st_size != self._index_bytes:
                        self._mend(number, found.st_size)
                    break
            else:
                taken.append(suffix)
        return taken

    def check_open(self) -> None:
        """See that SQLite's descriptors are its own, and the index as long as it was.

        Costs about 3 us.

        Raises:
            FilesChanged: They are not.
        """
        if self._find_taken(self._files):
            taken = ", ".join(self.find_taken())
            raise FilesChanged(f"other code has closed {taken}, a file that SQLite writes to")

    def read_index(self) -> LogIndex | None:
        """The index of the log; None where it cannot be read."""
        return LogIndex.parse(self._read(_INDEX_SUFFIX, _INDEX_BYTES, 0))

    @property
    def is_settled(self) -> bool:
        """Whether the database file has all that is in the log, as far as the system can tell."""
        # Where a system cannot say, a journal that waited for an answer would stay for ever.
        if _INDEX_SUFFIX not in self._files or not hasattr(os, "pread"):
            return True
        index = self.read_index()
        # Most often it has not: then nothing need be known of whose the descriptors are.
        return index is not None and index.settled >= index.frames and not self.find_taken()

    def find_damage(self) -> str | None:
        """What is wrong with the log, while nobody else writes; None where it is as it was left.

        The last frame's checksum is one of all frames before it, so that a log that was cut,
        replaced or put back differs there.
        """
        index = self.read_index()
        if index is None or not index.frames or LOG_SUFFIX not in self._files:
            return None
        place = _LOG_HEAD_BYTES + (index.frames - 1) * (index.page_bytes + 24)
        frame = self._read(LOG_SUFFIX, _FRAME_HEAD.size, place)
        if len(frame) < _FRAME_HEAD.size:
            return f"it contains fewer than the {index.frames} frames that were written"
        salt, first, second = _FRAME_HEAD.unpack(frame)
        head = self._read(LOG_SUFFIX, _LOG_HEAD_BYTES, 0)
        if head[16:24] != index.salt or salt != index.salt:
            return "it is not the write-ahead log that was written"
        if (first, second) != index.checksum:
            return "its last frame is not the one that was written"
        return None

    def _read(self, suffix: str, size: int, place: int) -> bytes:
        # Windows has no such call, and its descriptors are no numbers.
        if sys.platform == "win32" or not hasattr(os, "pread"):
            return b""
        identity, numbers = self._files.get(suffix, (_DELETED, []))
        for number in numbers:
            # Of several it is not known which are still its own; of one that was just seen.
            if len(numbers) == 1 or _identify_open(number) == identity:
                try:
                    return os.pread(number, size, place)
                except OSError:
                    continue
        return b""


class OpenFiles:
    """Which files an open connection writes to, as their paths were then.

    A file that was deleted stays open, and takes every write: only its path
    tells that nobody else will ever see them. A look costs a few microseconds.

    Args:
        layout: The store, right after it was opened.

    Attributes:
        main_look: Differs from before where the database file was written to; as `find_lost`
            has seen it last.
    """

    def __init__(self, layout: StoreLayout) -> None:
        path = str(layout.db_path)
        self.main_look: tuple[int, int, int] | None = None
        self._known = {path + suffix: identify(path + suffix) for suffix in _WITH_DATABASE}
        if self._known[path] is None:
            self._known[path] = _DELETED  # since it was opened
        self._layout = layout

    def note(self) -> None:
        """Know the files that SQLite makes at the first write."""
        for path, known in self._known.items():
            if known is None:
                self._known[path] = identify(path)

    def find_lost(self) -> list[Path]:
        """Those that are gone, or of which another one has taken the place."""
        lost = []
        self.main_look = None
        for path, known in self._known.items():
            if known is None:
                continue
            try:
                found = os.stat(path)
            except OSError:
                lost.append(Path(path))
                continue
            if (found.st_dev, found.st_ino) != known:
                lost.append(Path(path))
            if self.main_look is None:  # the database comes first
                self.main_look = found.st_ino, found.st_size, found.st_mtime_ns
        return lost

    @property
    def has_log(self) -> bool:
        """Whether there is a log at the path, be it the one that was opened or not."""
        return identify(f"{self._layout.db_path}{LOG_SUFFIX}") is not None

    @property
    def has_own_log(self) -> bool:
        """Whether the log is the one that was opened, and so goes with the database that was."""
        path = f"{self._layout.db_path}{LOG_SUFFIX}"
        return self._known[path] is not None and identify(path) == self._known[path]

    @property
    def has_database(self) -> bool:
        """Whether the database itself is the one that was opened."""
        path = str(self._layout.db_path)
        return identify(path) == self._known[path]


_TARGET = "target_session_attrs"
_VARIABLE = "PGTARGETSESSIONATTRS"
_TARGETS = ("any", "primary")


def find_refusal(url: URL) -> str | None:
    """Why no store can be written over such connections, and what to write instead, or None."""
    asked, place = url.query.get(_TARGET), f"{_TARGET}="
    if asked is None:
        asked, place = os.environ.get(_VARIABLE, "any"), f"the environment's {_VARIABLE}="
    if asked in _TARGETS:
        return None
    return (
        f"{place}{asked!s:.40} accepts no batches, or only at times: its sessions may be "
        f"read-only, or it is a standby. Set {_TARGET}=primary"
    )


_log = logging.getLogger("quark")

# A machine that has far too much to do may keep whoever writes waiting for seconds.
_BEGIN_TIMEOUT_S = 30.0
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

    store_name: str
    """The store's name in messages: "the store", with the path of its file if it has one."""

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
    store_name = "the store"
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
                self._try_to_begin, _BEGIN_TIMEOUT_S
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
