"""Opens the store's SQLite file: makes it whole or not at all, refuses what is not ours."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path
from urllib.parse import quote

from quark_core.errors import SessionStoreError
from quark_core.schema import CURRENT_SCHEMA_VERSION

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "StoreLayout",
    "connect",
    "connect_memory",
    "ensure_marker",
    "ensure_store",
    "find_store",
    "load_schema",
]

SCHEMA_VERSION = CURRENT_SCHEMA_VERSION
"""Version of the tables, kept in SQLite's user_version."""

APPLICATION_ID = 0x51524B31
"""Marks a database file as ours ("QRK1"), kept in SQLite's application_id."""

STORE_FOLDER = ".quark"
_MARKER = "store.json"
_DATABASE = "quark.db"
_FORMAT = "quark-tracker embedded store"
_BUSY_TIMEOUT_S = 10.0


class StoreLayout:
    """Where things lie under a storage root."""

    __slots__ = ("db_path", "marker", "root")

    def __init__(self, storage_dir: Path) -> None:
        self.root = storage_dir / STORE_FOLDER
        self.db_path = self.root / _DATABASE
        self.marker = self.root / _MARKER

    def run_path(self, run_id: str) -> Path:
        """The run's own directory."""
        return self.root / "runs" / run_id


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
    _make_folder(layout, storage_dir, with_database=True)
    return layout


def ensure_marker(storage_dir: Path) -> StoreLayout:
    """Make the store's folder without a database, for a place where SQLite may not be used.

    Raises:
        SessionStoreError: As `ensure_store`.
    """
    layout = find_store(storage_dir)
    if layout is None:
        layout = StoreLayout(storage_dir)
        _make_folder(layout, storage_dir, with_database=False)
    return layout


def connect_memory() -> sqlite3.Connection:
    """A database in memory with the store's tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(load_schema())
    return connection


def load_schema() -> str:
    """The statements that make the tables; made from `tables.py`."""
    return Path(__file__).with_name("schema.sql").read_text("utf-8")


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
            _create_database(scratch / _DATABASE)
        (scratch / _MARKER).write_text(
            json.dumps({"format": _FORMAT, "schema_version": SCHEMA_VERSION}) + "\n"
        )
        scratch.chmod(0o777 & ~_umask())
        os.rename(scratch, layout.root)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # Another process may have been first; its store is as good.
        if find_store(storage_dir) is None:
            raise SessionStoreError(
                f"no store could be made in storage_dir {storage_dir}: {error}"
            ) from error
    except sqlite3.Error as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise SessionStoreError(
            f"no store could be made in storage_dir {storage_dir}: {error}"
        ) from error


def _add_database(layout: StoreLayout) -> None:
    """Give a folder that was made on a network file system the database that it lacks."""
    scratch = layout.db_path.with_name(f"{_DATABASE}.new{os.getpid()}")
    try:
        _create_database(scratch)
        try:
            os.link(scratch, layout.db_path)
        except FileExistsError:
            return  # another process was first
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise SessionStoreError(f"no database could be made in {layout.root}: {error}") from error


def find_store(storage_dir: Path) -> StoreLayout | None:
    """The store under a storage root, or None where there is none.

    Raises:
        SessionStoreError: There is a `.quark` folder that Quark did not make,
            or a store of a newer Quark.
    """
    layout = StoreLayout(storage_dir)
    try:
        text = layout.marker.read_text()
    except FileNotFoundError:
        if not layout.root.exists() or (layout.root.is_dir() and not any(layout.root.iterdir())):
            return None
        raise _foreign(layout) from None
    except OSError as error:
        raise SessionStoreError(f"the store {layout.root} cannot be read: {error}") from error
    try:
        ours = json.loads(text).get("format") == _FORMAT
    except (ValueError, AttributeError):
        ours = False
    if not ours:
        raise _foreign(layout)
    return layout


def connect(layout: StoreLayout, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode, usable from any one thread at a time.

    Raises:
        SessionStoreError: The file is no store of ours, is damaged, or was
            written by a newer Quark (the message gives both versions).
    """
    mode = "ro" if read_only else "rw"
    # The path goes into a URI: a "?" or "%" in it must not be read as syntax.
    uri = f"file:{quote(str(layout.db_path))}?mode={mode}"
    try:
        connection = sqlite3.connect(
            uri,
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_TIMEOUT_S,
            cached_statements=64,
        )
        try:
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if application_id != APPLICATION_ID:
                raise _foreign(layout)
            if version > SCHEMA_VERSION:
                raise SessionStoreError(
                    f"the store {layout.root} has schema version {version}, this Quark knows "
                    f"{SCHEMA_VERSION}: upgrade quark-tracker to open it. It was left as it was."
                )
            if not read_only:
                # FULL: an acknowledged batch must survive a power loss, not only a crash.
                connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise SessionStoreError(f"the store {layout.db_path} cannot be opened: {error}") from error
    return connection


def _create_database(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        # Lets `quark gc` give space back in small steps, beside a training that writes.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(
            f"BEGIN; {load_schema()} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
        )
    finally:
        connection.close()


def _foreign(layout: StoreLayout) -> SessionStoreError:
    return SessionStoreError(
        f"{layout.root} was not made by this Quark, so it is left alone. "
        "Choose another storage_dir, or move that folder away."
    )


def _umask() -> int:
    # The umask can only be read by setting it; mkdtemp makes private folders, and a
    # team shares its runs under whatever its umask allows.
    current = os.umask(0o077)
    os.umask(current)
    return current
