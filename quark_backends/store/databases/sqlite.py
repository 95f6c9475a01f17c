"""Opens the store's SQLite file: makes it, refuses what is not ours, migrates an older one."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, changing
from quark_backends.store.databases.layout import (
    APPLICATION_ID,
    DATABASE,
    MARKER,
    OWNER_SUFFIX,
    STORE_FOLDER,
    StoreLayout,
)
from quark_backends.store.databases.tables import SQLITE, list_statements, load_schema
from quark_backends.store.databases.write_ahead_log import (
    WritingConnection,
    empty_log,
    has_strange_log,
    measure_log,
    note_owner,
    open_database,
    set_strange_log_aside,
)
from quark_core.errors import SchemaMigrationError, SessionStoreError, StoreUnavailableError
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.schema import CURRENT_SCHEMA_VERSION
from quark_core.system.folders import read_plain_file
from quark_core.system.process import ProcessIdentity, find_lost_reason

SCHEMA_VERSION = CURRENT_SCHEMA_VERSION
"""Version of the tables, kept in SQLite's user_version."""

OLDEST_VERSION = 5
"""The oldest version that is migrated."""

_FORMAT = "quark-tracker embedded store"
# What processes make in a store's folder by themselves.
_IGNORE = ".gitignore"
_OF_RUNS = frozenset({_IGNORE, "aside", "launches", "runs", "sources", f"{DATABASE}{OWNER_SUFFIX}"})
_UNFINISHED = (f"{MARKER}.new", f"{DATABASE}.new")
# Nobody's training waits for it.
_CHECKPOINT_S = 600.0


def ensure_store(storage_dir: Path) -> StoreLayout:
    """Make the store under a storage root if there is none, and check it if there is.

    The folder is prepared aside and renamed, so that no other process ever
    sees half of it.

    Raises:
        SessionStoreError: The root cannot be written, the folder is not ours,
            or a newer Quark wrote it. Nothing was altered.
    """
    layout = find_store(storage_dir)
    if layout is not None:
        if not layout.db_path.exists():
            _add_database(layout)
        return layout
    layout = StoreLayout(storage_dir)
    if layout.root.exists() and _is_remains(layout):
        remake_store(layout)
    else:
        _make_folder(layout, storage_dir, with_database=True)
    return layout


def remake_store(layout: StoreLayout, *, with_database: bool = True) -> None:
    """Make what a store lacks whose files were deleted while runs had it open.

    Raises:
        SessionStoreError: It cannot be written.
    """
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        # The marker comes first: a database without one is not used, and one may be added later.
        if not layout.marker.exists():
            _write_ignore(layout.root)
            write_marker(layout.root)
        if with_database and not layout.db_path.exists():
            _add_database(layout)
    except OSError as error:
        raise SessionStoreError(f"the store {layout.root} cannot be recreated: {error}") from error


def ensure_marker(storage_dir: Path) -> StoreLayout:
    """Make the store's folder without a database, for a place where SQLite may not be used.

    Raises:
        SessionStoreError: As `ensure_store`.
    """
    layout = find_store(storage_dir)
    if layout is None:
        layout = StoreLayout(storage_dir)
        if layout.root.exists() and _is_remains(layout):
            remake_store(layout, with_database=False)
        else:
            _make_folder(layout, storage_dir, with_database=False)
    return layout


def connect_memory() -> SqliteConnection:
    """A database in memory with the store's tables."""
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=SqliteConnection
    )
    connection.executescript(load_schema())
    return connection


def _make_folder(layout: StoreLayout, storage_dir: Path, *, with_database: bool) -> None:
    import tempfile  # late: it takes milliseconds, and a store is made once

    try:
        storage_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{STORE_FOLDER}-new-", dir=storage_dir))
    except OSError as error:
        raise SessionStoreError(
            f"storage_dir {storage_dir} cannot be written: {error.strerror or error}. "
            "Choose another storage_dir or change its permissions."
        ) from error
    try:
        if with_database:
            _create_database(scratch / DATABASE)
        _write_ignore(scratch)
        write_marker(scratch)
        scratch.chmod(0o777 & ~_umask())
        os.rename(scratch, layout.root)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # Another process may have been first; its store is as good.
        if find_store(storage_dir) is None:
            raise SessionStoreError(
                f"no store could be created in storage_dir {storage_dir}: {error}"
            ) from error
    except sqlite3.Error as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise SessionStoreError(
            f"no store could be created in storage_dir {storage_dir}: {error}"
        ) from error


def _add_database(layout: StoreLayout) -> None:
    """Give a folder that was made on a network file system the database that it lacks."""
    scratch = layout.db_path.with_name(f"{DATABASE}.new{os.getpid()}-{os.urandom(4).hex()}")
    try:
        try:
            _create_database(scratch)
            with changing(layout.root):
                # Another process may have been first, and the log be that of its database.
                if not layout.db_path.exists():
                    for suffix in ("-wal", "-shm"):
                        # Of a database that is gone: SQLite would play it into the new one.
                        layout.db_path.with_name(DATABASE + suffix).unlink(missing_ok=True)
                    with suppress(FileExistsError):
                        os.link(scratch, layout.db_path)
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise SessionStoreError(f"no database can be created in {layout.root}: {error}") from error


def find_store(storage_dir: Path) -> StoreLayout | None:
    """The store under a storage root, or None where there is none.

    Raises:
        SessionStoreError: There is a `.quark` folder that Quark did not make,
            one with links in place of its files, or a store of a newer Quark.
    """
    layout = StoreLayout(storage_dir)
    links = [path for path in layout.files if path.is_symlink()]
    if links:
        raise SessionStoreError(
            f"{links[0]} is a link, which may be an attack, so the store is not used. To keep a "
            f"store elsewhere, make {layout.root} itself the link."
        )
    try:
        marker = read_marker(layout)
    except FileNotFoundError:
        if not layout.root.exists() or (layout.root.is_dir() and _is_remains(layout)):
            return None
        try:
            marker = read_marker(layout)  # another process may have made the store since
        except OSError:
            raise _no_marker(layout, "missing") from None
    except OSError as error:
        raise SessionStoreError(f"the store {layout.root} cannot be read: {error}") from error
    if marker is None:
        raise _no_marker(layout, "damaged")
    version = marker.get("schema_version")
    # Where there is a database, it says itself which version it has.
    if isinstance(version, int) and version > SCHEMA_VERSION and not layout.db_path.exists():
        raise _newer(layout.root, version)
    return layout


def _is_remains(layout: StoreLayout) -> bool:
    """Whether a folder holds nothing, or only what runs put there after it was deleted.

    They know it as theirs, and go on with their journals in it.
    """
    from quark_core.delivery.journal_folder import JournalFolder

    # Another process may be making the store: its unfinished files are nobody else's.
    names = {path.name for path in layout.root.iterdir() if not path.name.startswith(_UNFINISHED)}
    if names - _OF_RUNS:
        return False
    files = (path for path in layout.root.rglob("*") if path.name != _IGNORE)
    if any(path.is_file() for path in files if not path.name.startswith(_UNFINISHED)):
        journals = layout.root.glob("runs/*/journal/*/")
        return any(JournalFolder(path).read_manifest() is not None for path in journals)
    return True


def connect(layout: StoreLayout, *, read_only: bool = False) -> SqliteConnection:
    """A connection in autocommit mode, usable from any one thread at a time.

    A store of an older version is migrated first; see `_open_older`.

    Raises:
        StoreUnavailableError: It is to be read, and there is none at this place now.
        SessionStoreError: The file is no store of ours, is damaged, cannot be
            written, was written by a newer Quark (the message gives both
            versions), or is of an older version and cannot be migrated now.
    """
    try:
        try:
            connection = _open_own(layout, read_only=read_only)
        except sqlite3.OperationalError as error:
            if not is_unwritable(error):
                raise
            if not read_only:
                _check_writable(layout)
                raise
            if not layout.db_path.exists():
                raise store_gone(layout) from error

            connection = open_unwritable(layout.db_path)
        connection.store_name = f"the store {layout.db_path}"
        try:
            version = read_version(connection, layout.root)
            if version == SCHEMA_VERSION:
                if not read_only:
                    _check_writable(layout)
                    # FULL: an acknowledged batch must survive a power loss, not only a crash.
                    connection.execute("PRAGMA synchronous=FULL")
                    with suppress(sqlite3.OperationalError):
                        # A copy by VACUUM INTO lacks it; those who read do without.
                        connection.execute("PRAGMA journal_mode=WAL").fetchall()
                    note_owner(layout.db_path)
                    if isinstance(connection, WritingConnection):
                        connection.note_open(layout.db_path)
                return connection
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise SessionStoreError(f"the store {layout.db_path} cannot be opened: {error}") from error
    connection.close()
    return _open_older(layout, read_only=read_only)


def _open_own(layout: StoreLayout, *, read_only: bool) -> SqliteConnection:
    """Open a store's database, without a log that belongs to another file.

    Raises:
        SessionStoreError: It is to be written, and there is such a log that cannot be set aside.
        sqlite3.Error: As `open_database`.
    """
    path = layout.db_path
    if path.exists() and not path.is_file():
        raise SessionStoreError(f"{path} is not a file. Move it away and put the database back")
    try:
        set_strange_log_aside(path)
    except OSError as error:
        if not has_strange_log(path):
            pass
        elif read_only:
            return open_database(path, "mode=ro&immutable=1")
        else:
            raise SessionStoreError(
                f"the write-ahead log next to {path} belongs to another file and cannot be "
                f"moved away: {error}. Check the permissions of {layout.root}."
            ) from error
    return open_database(path, "mode=ro" if read_only else "mode=rw")


def checkpoint_file(layout: StoreLayout) -> int:
    """Bring a store's log into its database file, where others have left it; of any version.

    Returns:
        The bytes that are still in its log, because somebody uses it or there is no room.

    Raises:
        SessionStoreError: It is no store of ours, cannot be read, or not be written here.
    """
    if not measure_log(layout.db_path):
        return 0
    try:
        with closing(_open_own(layout, read_only=False)) as connection:
            read_version(connection, layout.root)
            empty_log(connection, limit_s=_CHECKPOINT_S)
    except sqlite3.Error as error:
        raise SessionStoreError(f"the store {layout.db_path} cannot be written: {error}") from error
    return measure_log(layout.db_path)


def read_version(connection: sqlite3.Connection, root: Path) -> int:
    """Version of a store's tables, which is at most `SCHEMA_VERSION`.

    Raises:
        SessionStoreError: It is no store of ours, or that of a newer Quark.
        sqlite3.Error: It cannot be read.
    """
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application_id != APPLICATION_ID or version < OLDEST_VERSION:
        raise _foreign(root)
    if version > SCHEMA_VERSION:
        raise _newer(root, version)
    return version


def is_unwritable(error: sqlite3.Error) -> bool:
    """Whether SQLite fails because it may not write where the database lies."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))


def _write_ignore(folder: Path) -> None:
    """Have git leave a store's folder alone, unless somebody has said something else there."""
    # A store without it is as good.
    with suppress(OSError), (folder / _IGNORE).open("x") as file:
        file.write("*\n")


def write_marker(folder: Path, **more: str) -> None:
    """Write the file that says whose folder it is, at once or not at all.

    Args:
        folder: The store's folder.
        more: What the marker says besides, such as `migrated_at`.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps({"format": _FORMAT, "schema_version": SCHEMA_VERSION, **more})
    scratch = folder / f"{MARKER}.new{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with scratch.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, folder / MARKER)
    finally:
        scratch.unlink(missing_ok=True)


def read_marker(layout: StoreLayout) -> dict[str, Any] | None:
    """What a store's marker says, or None where it is not ours.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
    """
    try:
        marker = json.loads(read_plain_file(layout.marker))
    except (ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and marker.get("format") == _FORMAT else None


def _create_database(path: Path) -> None:
    # Nobody sees the file before it is whole, so that it is synced once, at its end.
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=OFF")
        # Lets `quark gc` give space back in small steps, beside a training that writes.
        # First of all: it has no effect once anything is in the file.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.executescript(
            f"BEGIN; {load_schema()} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
        )
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _check_writable(layout: StoreLayout) -> None:
    # On a read-only disk SQLite opens for writing where its files lie there already,
    # and fails when the first batch is stored.
    for path in (layout.root, layout.db_path):
        if not os.access(path, os.W_OK):
            raise SessionStoreError(
                f"the store {path} cannot be written: it is on a read-only disk, or you do not "
                "have write permission. Choose another storage_dir or change its permissions."
            )


def no_database(layout: StoreLayout) -> SessionStoreError:
    """The error for a store without its database, by whether journals hold its runs."""
    from quark_core.delivery.journal import JournalReader
    from quark_core.delivery.journal_folder import find_folders
    from quark_core.delivery.sync import count_boxed

    storage_dir = layout.root.parent
    for folder in find_folders(storage_dir):
        manifest = folder.read_manifest()
        if manifest is not None and manifest.generation:
            continue  # what was found out about a run, but not the run
        journaled = next(iter(JournalReader(folder.path).read()), None) is not None
        if journaled or (manifest is not None and count_boxed(folder, manifest)[1]):
            return SessionStoreError(
                f"the runs in {layout.root} are still in journals, because the folder was on a "
                f"network file system. To create a store from them, run: quark sync {storage_dir}"
            )
    return SessionStoreError(
        f"{DATABASE} is missing from {layout.root}, and its journals cannot restore it. Restore "
        f"{DATABASE} (with {DATABASE}-wal, if it exists) from a backup or from the original of "
        "this folder. Its data is stored nowhere else. The next run that starts here creates a "
        "new database."
    )


def store_gone(layout: StoreLayout) -> StoreUnavailableError:
    """The error for a store that was there when it was opened for reading."""
    return StoreUnavailableError(
        f"the store {layout.root} is missing: it was deleted or moved, or its disk is not "
        "mounted. Quark reads it again when it is back"
    )


def _no_marker(layout: StoreLayout, what: str) -> SessionStoreError:
    """The error for a folder whose marker is missing or damaged; it may be ours all the same."""
    try:
        with layout.db_path.open("rb") as file:
            head = file.read(100)
    except OSError:
        head = b""
    if len(head) < 100 or int.from_bytes(head[68:72], "big") != APPLICATION_ID:
        return _foreign(layout.root)
    text = json.dumps({"format": _FORMAT, "schema_version": int.from_bytes(head[60:64], "big")})
    return SessionStoreError(
        f"{layout.marker}, which marks the folder as a Quark store, is {what}, although "
        f"{DATABASE} belongs to Quark. Create that file again with this one line: {text}"
    )


def _foreign(root: Path) -> SessionStoreError:
    return SessionStoreError(
        f"{root} was not created by this Quark, so it is not used. Choose another storage_dir, "
        "or move that folder away."
    )


def _newer(root: Path, version: int) -> SessionStoreError:
    return SessionStoreError(
        f"the store {root} has schema version {version}, but this Quark supports up to "
        f"{SCHEMA_VERSION}. Upgrade quark-tracker to open it. The store was not changed."
    )


def _umask() -> int:
    # The umask can only be read by setting it; mkdtemp makes private folders, and a
    # team shares its runs under whatever its umask allows.
    current = os.umask(0o077)
    os.umask(current)
    return current


# Reads a store that must stay as it is: on a disk mounted read-only, in somebody else's folder.
#
# SQLite cannot read a database in WAL mode where it may make no files beside
# it. What is whole in one file is then read as immutable; what is not, and what
# must be migrated to be read, is copied into a temporary folder. A copy is as
# of the moment it was made; it goes when a newer one takes its place and when
# the process ends.

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
    _log.info("reading the store %s from a copy: it cannot be read in place", db_path.parent)
    shutil.copyfile(db_path, copy)
    shutil.copyfile(_log_file(db_path), _log_file(copy))


def _check_readable(*paths: Path) -> None:
    for path in paths:
        if path.exists() and not os.access(path, os.R_OK):
            raise SessionStoreError(
                f"the store {path} cannot be read: permission denied. Change the file's "
                "permissions, or ask its owner to do so."
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
        f"the store {db_path} can only be read from a copy, but no copy could be created in "
        f"{tempfile.gettempdir()}: {error}. Set TMPDIR to a folder with enough space."
    )


# Brings a store of an older version to the tables of today.
#
# One transaction holds all of it, SQLite's `user_version` included, so a store
# is of the old version or of the new one, whenever the process is killed and
# however many begin at once. Nothing that was stored is rewritten, which is why
# no backup is taken: a migration that rewrites or drops something must take one.
#
# A store is not migrated under a living run of an older Quark: that one could
# open no further connection, and would not keep the summaries current. It can
# be read meanwhile, from a migrated copy.

_FIRST_WAIT_S = 10.0
_LONG_WAIT_S = 600.0


class _NotNowError(SchemaMigrationError):
    """The store is sound, but this process may not alter it at this time."""


def migrate(storage_dir: Path, migrated_at: str) -> int:
    """Migrate the store under a storage root, and return the version that it has then.

    A store that has the current version is left as it is.

    Args:
        storage_dir: The storage root.
        migrated_at: What the marker says of when it was done.

    Raises:
        SchemaMigrationError: There is no store of ours, it is newer than this
            Quark, damaged, in use by an older one, or cannot be written. It
            was left as it was.
    """
    try:
        layout = find_store(storage_dir)
        if layout is None:
            raise SchemaMigrationError(f"no Quark store in '{storage_dir}' (no .quark folder)")
        if layout.db_path.exists():
            with closing(open_still(layout.db_path)) as connection:
                version = read_version(connection, layout.root)
            if version < SCHEMA_VERSION:
                _upgrade(layout.db_path, layout.root, wait_s=_LONG_WAIT_S)
        _renew_marker(layout, migrated_at)
    except (_NotNowError, SessionStoreError, OSError, sqlite3.Error) as error:
        raise SchemaMigrationError(str(error)) from error
    return SCHEMA_VERSION


def _open_older(layout: StoreLayout, *, read_only: bool) -> SqliteConnection:
    """A connection to a store that was found to be of an older version.

    The store is migrated where it lies. Where that is not possible now, it is
    read from a migrated copy, and refused for writing.

    Raises:
        SessionStoreError: It cannot be migrated; the message says why.
    """
    try:
        try:
            _upgrade(
                layout.db_path, layout.root, wait_s=_FIRST_WAIT_S if read_only else _LONG_WAIT_S
            )
        except _NotNowError as error:
            if not read_only:
                raise
            reason = str(error)
        else:
            _finish(layout)
            return connect(layout, read_only=read_only)
        copy = keep_copy(
            layout.db_path, "migrated", lambda copy: _copy_and_upgrade(layout, copy, reason)
        )
        return open_database(copy, "mode=ro")
    except SchemaMigrationError as error:
        raise SessionStoreError(str(error)) from error
    except sqlite3.Error as error:
        raise SessionStoreError(f"the store {layout.db_path} cannot be opened: {error}") from error


def _copy_and_upgrade(layout: StoreLayout, copy: Path, reason: str) -> None:
    _log.info("reading the store %s from a migrated copy: %s", layout.root, reason)
    copy_database(layout.db_path, copy)
    # Runs that live in the store do not live in its copy.
    _upgrade(copy, layout.root, wait_s=_FIRST_WAIT_S, is_copy=True)


def _upgrade(db_path: Path, root: Path, *, wait_s: float, is_copy: bool = False) -> None:
    """Bring a database to the current version; does nothing where it has it.

    Args:
        db_path: The database.
        root: What messages call the store.
        wait_s: How long to wait for another process that writes or migrates.
        is_copy: Whether nobody else knows the database.

    Raises:
        SchemaMigrationError: It cannot be done; nothing was altered.
        SessionStoreError: It is no store of ours, or that of a newer Quark.
    """
    try:
        with closing(open_database(db_path, "mode=rw")) as connection:
            if read_version(connection, root) < SCHEMA_VERSION:
                connection.execute("PRAGMA synchronous=FULL")
                _run_transaction(connection, root, wait_s, is_copy=is_copy)
    except sqlite3.Error as error:
        what = f"the store {root} cannot be migrated to schema version {SCHEMA_VERSION}"
        name = getattr(error, "sqlite_errorname", "")
        if is_unwritable(error):
            raise _NotNowError(f"{what}: it cannot be written ({error})") from error
        if name.startswith("SQLITE_BUSY"):
            raise _NotNowError(
                f"{what}: another process has been writing to it for {wait_s:.0f} s. Try again"
            ) from error
        raise SchemaMigrationError(f"{what}: {error}. The store was not changed.") from error


def _run_transaction(
    connection: SqliteConnection, root: Path, wait_s: float, *, is_copy: bool
) -> None:
    try:
        _begin(connection, root, wait_s)
        version = read_version(connection, root)
        if version == SCHEMA_VERSION:
            return  # another process was first
        _check_whole(connection, root)
        if not is_copy:
            _refuse_living_runs(connection, root, version)
            _log.warning(
                "migrating the store %s from schema version %d to %d; older versions of Quark "
                "cannot open it afterwards",
                root,
                version,
                SCHEMA_VERSION,
            )
        for statement in list_statements(SQLITE, since=version):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    finally:
        connection.rollback()


def _begin(connection: sqlite3.Connection, root: Path, wait_s: float) -> None:
    """Begin, so that no other process writes until the end."""
    first_s = min(wait_s, _FIRST_WAIT_S)
    connection.execute(f"PRAGMA busy_timeout={first_s * 1000:.0f}")
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        name = getattr(error, "sqlite_errorname", "")
        if first_s == wait_s or not name.startswith("SQLITE_BUSY"):
            raise
        _log.warning("waiting for another process that is migrating or writing the store %s", root)
        connection.execute(f"PRAGMA busy_timeout={(wait_s - first_s) * 1000:.0f}")
        connection.execute("BEGIN IMMEDIATE")


def _check_whole(connection: sqlite3.Connection, root: Path) -> None:
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise SchemaMigrationError(
            f"the store {root} is damaged ({found[0]}), so it was not migrated or changed. "
            "Replace it with a backup, or recover the readable part with `sqlite3 .recover`."
        )


def _refuse_living_runs(connection: sqlite3.Connection, root: Path, version: int) -> None:
    living = []
    rows = connection.execute(
        "SELECT id, process, heartbeat_us FROM run WHERE status = 'running' ORDER BY pk"
    )
    for run_id, process, heartbeat_us in rows:
        identity = msgspec.json.decode(process, type=ProcessIdentity)
        if find_lost_reason("running", identity, heartbeat_us) is None:
            living.append(run_id)
    if living:
        more = f" and {len(living) - 1} more" if len(living) > 1 else ""
        raise _NotNowError(
            f"the store {root} has schema version {version}, and run {living[0]}{more} of an "
            f"older Quark is writing to it. It cannot be migrated to {SCHEMA_VERSION} now. Wait "
            "until the run ends, or choose another storage_dir. Reading works meanwhile."
        )


def _finish(layout: StoreLayout) -> None:
    """What is good to do after a migration, and is done later where it fails."""
    try:
        _renew_marker(layout, format_time(now_us()))
    except OSError as error:
        _log.warning("the store %s is migrated, but its marker file is not: %s", layout.root, error)


def _renew_marker(layout: StoreLayout, migrated_at: str) -> None:
    marker = read_marker(layout)
    if marker is None or marker.get("schema_version") != SCHEMA_VERSION:
        write_marker(layout.root, migrated_at=migrated_at)
