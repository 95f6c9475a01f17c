"""Brings what SQLite has in its write-ahead log into the database file.

SQLite does so by itself when the last of all connections is closed, unless
that one only reads: then `quark.db` alone lacks what was written last. So
whoever writes does it when they stop. Who still writes, in this process or in
another one, does it again later; what a killed process leaves is brought in by
the next writer to stop, or by `checkpoint_file`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from pathlib import Path

from quark_backends.store.databases.connection import SqliteConnection
from quark_backends.store.databases.layout import LOG_SUFFIX
from quark_backends.store.databases.open_files import FilesChanged

# How long whoever stops writing waits for those who read, and for the disk.
_PATIENCE_S = 1.0
_BUSY_MS = 100
_PAUSE_S = 0.02
# A larger log may take a disk longer than the end of a run should wait.
_LARGE_BYTES = 16 * 2**20


class _OpenWriters:
    """The connections of this process that write, by file, the oldest first."""

    def __init__(self) -> None:
        self.forget()
        # A fork's connections are its parent's, and so is a lock that a thread held meanwhile.
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew."""
        self._lock = threading.Lock()
        self._open: dict[str, list[weakref.ref[WritingConnection]]] = {}

    def add(self, connection: WritingConnection) -> None:
        """Take note of a connection that was opened."""
        with self._lock:
            self._open.setdefault(connection.path, []).append(weakref.ref(connection))

    def remove(self, connection: WritingConnection) -> bool:
        """Forget a connection that is being closed.

        Returns:
            Whether it is for this one to empty the log: an older one does so
            when it is closed, which is that of a run's lane.
        """
        with self._lock:
            found = [each for ref in self._open.pop(connection.path, []) if (each := ref())]
            left = [each for each in found if each is not connection]
            if left:
                self._open[connection.path] = [weakref.ref(each) for each in left]
            return found[:1] == [connection]


_writers = _OpenWriters()


class WritingConnection(SqliteConnection):
    """A connection that writes, and leaves a whole file behind as far as others let it.

    Attributes:
        path: The database file; empty where it is not to be touched by closing.
    """

    path = ""

    def note_open(self, path: Path) -> None:
        """Say that this writes a store of ours, in this file."""
        self.path = os.path.realpath(path)
        _writers.add(self)

    def begin_write(self) -> None:
        """See `StoreConnection`; nothing is written where the files are not what they were.

        Raises:
            FilesChanged: They are not; a damaged log has been put aside. A new connection sees
                what is there now.
        """
        descriptors = self.descriptors
        if descriptors is not None:
            descriptors.check()
        super().begin_write()
        damage = None if descriptors is None else descriptors.find_damage()
        if descriptors is None or damage is None:
            return
        from quark_backends.store.databases.replacement import replace_database

        why = f"the write-ahead log of {descriptors.path} was changed by another program: {damage}"
        try:
            replace_database(Path(descriptors.path), why)
        finally:
            self.rollback()
        raise FilesChanged(why)

    def commit(self) -> None:
        """See `StoreConnection`; looked at on both sides, since COMMIT is what writes.

        Raises:
            FilesChanged: Other code has closed the files: whether it was stored is not known.
        """
        descriptors = self.descriptors
        if descriptors is not None and self._is_writing:
            descriptors.check_open()
            super().commit()
            descriptors.check_open()
        else:
            super().commit()

    def close(self) -> None:
        """Empty the log, within a second or so, and close; never fails for the log."""
        if self.descriptors is not None:
            self.descriptors.mend_index()
        if self.path and _writers.remove(self) and self.is_sound:
            try:
                # What is left then is left to whoever writes or syncs next.
                if not empty_log(self) and measure_log(Path(self.path)) > _LARGE_BYTES:
                    # SQLite would go on with it, for as long as that takes.
                    self.interrupt()
            except (sqlite3.Error, OSError):
                pass  # such as one that was closed already; the data is safe where it is
        self.path = ""
        super().close()


def find_log(db_path: Path) -> Path:
    """Where the write-ahead log of a database lies, if there is one."""
    return db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")


def measure_log(db_path: Path) -> int:
    """Bytes that a database has in its log, and may lack in its file; 0 where the file is whole."""
    try:
        return find_log(db_path).stat().st_size
    except OSError:
        return 0


def empty_log(connection: sqlite3.Connection, *, limit_s: float = _PATIENCE_S) -> bool:
    """Bring what is in the log into the file, and cut the log to nothing; whether that is done.

    Whoever reads an older state, in any process, keeps it from being done; so
    does, for the moment, whoever writes. A log that is large is given up when
    the time is over, with nothing lost: what is in it stays in it.

    Args:
        connection: For writing, in no transaction.
        limit_s: How long a large log may take.
    """
    (before_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    deadline = time.monotonic() + _PATIENCE_S
    timer = threading.Timer(limit_s, connection.interrupt) if _is_large(connection) else None
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        while True:
            # The first blocks nobody, and leaves little for the second to do.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
    except (sqlite3.OperationalError, RuntimeError):
        # Interrupted, busy, or no room for it; or no thread can be had any more.
        return False
    finally:
        if timer is not None and timer.ident is not None:
            timer.cancel()
            timer.join()  # it must not hit what the connection does next
        connection.execute(f"PRAGMA busy_timeout={before_ms}")


def _is_large(connection: sqlite3.Connection) -> bool:
    """Whether bringing the log in may take longer than anybody should wait unasked."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return measure_log(Path(path)) > _LARGE_BYTES
