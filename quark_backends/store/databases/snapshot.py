"""Reads a store that must stay as it is: on a disk mounted read-only, in somebody else's folder.

SQLite cannot read a database in WAL mode where it may make no files beside
it. What is whole in one file is then read as immutable; what is not, and what
must be migrated to be read, is copied into a temporary folder. A copy is as
of the moment it was made; it goes when a newer one takes its place and when
the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from quark_backends.store.databases.connection import SqliteConnection
from quark_backends.store.databases.log_owner import has_strange_log
from quark_backends.store.databases.sqlite import is_unwritable, open_database
from quark_core.errors import SessionStoreError

_log = logging.getLogger("quark")

_Mark = tuple[tuple[int, int, int] | None, ...]


class _Copies:
    """The copies of this process, by what they are of and what was done to them."""

    def __init__(self) -> None:
        self.forget()
        # A fork's copies are its parent's, and so is a lock that a thread held meanwhile.
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.remove)

    def forget(self) -> None:
        """Begin anew, and leave alone what is there."""
        # Making one copy may need another: what is migrated is first made readable.
        self._lock = threading.RLock()
        self._made: dict[tuple[Path, str], tuple[_Mark, Path]] = {}

    def find(self, db_path: Path, kind: str, make: Callable[[Path], None]) -> Path:
        """A copy that is as new as the database, made by `make` where there is none."""
        with self._lock:
            mark = _mark(db_path)
            known, copy = self._made.get((db_path, kind), (None, None))
            if copy is not None and known == mark and copy.exists():
                return copy
            folder = Path(tempfile.mkdtemp(prefix="quark-store-"))
            try:
                make(folder / db_path.name)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            if copy is not None:
                # Who still reads the older one has it open, and keeps it.
                shutil.rmtree(copy.parent, ignore_errors=True)
            self._made[db_path, kind] = (mark, folder / db_path.name)
            return folder / db_path.name

    def remove(self) -> None:
        """Remove what this process has made."""
        for _, copy in self._made.values():
            shutil.rmtree(copy.parent, ignore_errors=True)
        self._made.clear()


_copies = _Copies()


def open_unwritable(db_path: Path) -> SqliteConnection:
    """Open a database for reading where SQLite may make no files beside it.

    Raises:
        SessionStoreError: It has to be copied, and there is no room.
        sqlite3.Error: It cannot be read.
    """
    log = _log_file(db_path)
    _check_readable(db_path, log)
    try:
        whole = log.stat().st_size == 0 or has_strange_log(db_path)
    except FileNotFoundError:
        whole = True
    except OSError as error:
        raise SessionStoreError(f"the store {db_path} cannot be read: {error}") from error
    if whole:
        return open_database(db_path, "mode=ro&immutable=1")
    copy = keep_copy(db_path, "whole", lambda copy: _copy_files(db_path, copy))
    return open_database(copy, "mode=ro")


def open_still(db_path: Path) -> SqliteConnection:
    """Open a database for reading, of whatever version, wherever it lies.

    Raises:
        SessionStoreError: As `open_unwritable`.
        sqlite3.Error: It cannot be read.
    """
    try:
        return open_database(db_path, "mode=ro")
    except sqlite3.OperationalError as error:
        if not is_unwritable(error):
            raise
    return open_unwritable(db_path)


def keep_copy(db_path: Path, kind: str, make: Callable[[Path], None]) -> Path:
    """A copy of a database that is gone when this process ends; for any thread.

    Args:
        db_path: The database.
        kind: What tells this copy from other copies of the database.
        make: Makes the copy at the path that it is given; called where there
            is none that is as new as the database.

    Raises:
        SessionStoreError: There is no room.
        sqlite3.Error: What `make` raises.
    """
    try:
        return _copies.find(db_path, kind, make)
    except OSError as error:
        raise _no_room(db_path, error) from error
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            raise _no_room(db_path, error) from error
        raise


def copy_database(db_path: Path, copy: Path) -> None:
    """Copy a database of whatever version, as of one moment, also while it is written.

    Raises:
        SessionStoreError: As `open_unwritable`.
        sqlite3.Error: It cannot be read, or not be written.
    """
    with closing(open_still(db_path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def _copy_files(db_path: Path, copy: Path) -> None:
    _log.info("reading the store %s from a copy: it cannot be read where it lies", db_path.parent)
    shutil.copyfile(db_path, copy)
    shutil.copyfile(_log_file(db_path), _log_file(copy))


def _check_readable(*paths: Path) -> None:
    for path in paths:
        if path.exists() and not os.access(path, os.R_OK):
            raise SessionStoreError(
                f"the store {path} cannot be read: you lack the permission. "
                "Change the file's permissions, or ask its owner to."
            )


def _log_file(db_path: Path) -> Path:
    return db_path.with_name(f"{db_path.name}-wal")


def _mark(db_path: Path) -> _Mark:
    """Tells two states of a database apart."""
    marks: list[tuple[int, int, int] | None] = []
    for path in (db_path, _log_file(db_path)):
        try:
            found = path.stat()
        except OSError:
            marks.append(None)
        else:
            marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(marks)


def _no_room(db_path: Path, error: Exception) -> SessionStoreError:
    return SessionStoreError(
        f"the store {db_path} can only be read from a copy, and none could be made in "
        f"{tempfile.gettempdir()}: {error}. Set TMPDIR to a folder that has room for it."
    )
