"""A few readers of one store, for many threads, and what tells them that something has changed."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quark_backends.store.databases.connection import StoreConnection, close_with
from quark_backends.store.reading.reader import StoreReader
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from quark_backends.store.reading.stored_rows import BlockCache

# Of those who read and search at once.
_READERS = 6
# What nothing can be written beside is perhaps read from a copy, which is not made anew more often.
_STILL_S = 30.0


class ReaderPool:
    """Readers, each for one caller at a time; a caller waits where none is free.

    A connection is opened by whoever reads first with it.

    Args:
        connect: Opens a connection for reading.
        path: The database file, where it is one.
        follows: Whether it is looked at before each read, so that what has taken its place is
            read, and not what was deleted.
    """

    def __init__(
        self,
        connect: Callable[[], StoreConnection],
        path: Path | None = None,
        *,
        follows: bool = False,
    ) -> None:
        self._blocks = _SharedBlocks()
        self._all = [StoreReader(connect, self._blocks.find) for _ in range(_READERS)]
        # The last one given back is the next one taken: it knows what was read last.
        self._free: queue.LifoQueue[StoreReader] = queue.LifoQueue()
        for reader in self._all:
            self._free.put(reader)
        self._connect = connect
        self._path = path
        self._follows = follows
        self._met_backlog = False
        self._look: object = None
        self._looked_at = float("-inf")
        self._seen: dict[StoreReader, object] = {}
        self._mark: _FileMark | None = None
        self._lock = threading.Lock()
        self._mark_lock = threading.Lock()

    @property
    def any(self) -> StoreReader:
        """One of them, for what needs no turn."""
        return self._all[0]

    @contextmanager
    def take(self) -> Iterator[StoreReader]:
        """One that nobody else has."""
        reader = self._free.get()
        try:
            if self._follows and self._path is not None:
                self._follow(reader, self._path)
            yield reader
            self._met_backlog |= reader.met_backlog()
        finally:
            self._free.put(reader)

    def _follow(self, reader: StoreReader, path: Path) -> None:
        look = self._look_at(path)
        with self._lock:
            before = self._seen.get(reader, look)
            self._seen[reader] = look
        if before != look:
            reader.close()

    def _look_at(self, path: Path) -> object:
        """How the database file looks now, or did a while ago where it may have to be copied."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < _STILL_S and _is_beside_nothing_new(path):
                return self._look
            look = _look_at(path)
            if self._look != look:
                # Chunks of another file may have the numbers of this one's.
                self._blocks.forget()
            self._look, self._looked_at = look, now
            return look

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`."""
        if self._path is None:
            with self.take() as reader:
                heads = reader.read_heads(run_id)
                return f"{sorted(heads.cursor.items())}/{heads.outputs}"
        look = self._look_at(self._path)
        with self._mark_lock:
            if self._mark is None or self._mark.look != look:
                if self._mark is not None:
                    self._mark.close()
                    self._mark = None
                self._mark = _FileMark(self._connect, look)
            return self._mark.read(run_id)

    def met_backlog(self) -> bool:
        """Whether, since the last call, much was read that ought to be compacted."""
        met, self._met_backlog = self._met_backlog, False
        return met

    def close(self) -> None:
        """Give up the connections; a later read opens others."""
        for reader in self._all:
            reader.close()
        self._blocks.forget()
        with self._mark_lock:
            if self._mark is not None:
                self._mark.close()
                self._mark = None


class _SharedBlocks:
    """What the readers of a pool keep of chunks, made when the first of them needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: BlockCache | None = None

    def find(self) -> BlockCache:
        """The cache of the file that is there."""
        from quark_backends.store.reading.stored_rows import BlockCache

        with self._lock:
            if self._cache is None:
                self._cache = BlockCache()
            return self._cache

    def forget(self) -> None:
        """Let go of it; who reads still has what he has found."""
        with self._lock:
            self._cache = None


class _FileMark:
    """Tells by a connection of its own whether anything was committed to a database file."""

    _opened = 0

    def __init__(self, connect: Callable[[], StoreConnection], look: object) -> None:
        self.look = look
        self._connection = connect()
        self._lock = threading.RLock()
        self.close = close_with(self, self._connection.close, self._lock)
        _FileMark._opened += 1
        # Versions can only be compared that one connection has given.
        self._name = _FileMark._opened
        self._version = -1
        self._known: set[str] = set()

    def read(self, run_id: str) -> str:
        """The mark of a run."""
        with self._lock:
            return self._read(run_id)

    def _read(self, run_id: str) -> str:
        connection = self._connection
        try:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self._known.clear()
                self._version = version
            if run_id not in self._known:
                from quark_backends.store.reading.reader import find_run

                find_run(connection, run_id)
                self._known.add(run_id)
        except connection.Error as error:
            raise SessionStoreError(f"{connection.store_name} cannot be read: {error}") from error
        return f"{self._name}.{version}"


def _is_beside_nothing_new(path: Path) -> bool:
    """Whether a file is there, and nothing can be made where it lies."""
    return not os.access(path.parent, os.W_OK) and os.path.exists(path)


def _look_at(path: Path) -> object:
    """Tells two files apart, and of one that cannot be followed where it lies its states."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if os.access(path.parent, os.W_OK):
        return found.st_dev, found.st_ino
    states = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
    try:
        log = os.stat(f"{path}-wal")
    except OSError:
        return tuple(states)
    return (*states, log.st_size, log.st_mtime_ns)
