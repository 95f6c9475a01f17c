"""Migrates the tables of a store of an older version, in SQLite or PostgreSQL."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quark_backends.store.databases import sqlite
from quark_backends.store.databases.connection import SqliteConnection
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import (
    SCHEMA_VERSION,
    connect,
    find_store,
    is_unwritable,
    open_database,
    read_marker,
    read_version,
    write_marker,
)
from quark_core.errors import SchemaMigrationError, SessionStoreError
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.system.process import ProcessIdentity, find_lost_reason

if TYPE_CHECKING:
    from sqlalchemy import Connection


@contextmanager
def alembic_lock() -> Iterator[None]:
    """Around a transaction that migrates: Alembic keeps what it works on in globals."""
    with _lock:
        yield


def upgrade_tables(core: Connection, revision: str, *, stamped: str | None = None) -> None:
    """Bring the tables to a revision, inside the caller's transaction and `alembic_lock`.

    Args:
        core: The connection.
        revision: The revision.
        stamped: What a store has that does not say it; None where such a one is empty.
    """
    # It tells each of its steps at INFO; one line about a migration is enough.
    logger = logging.getLogger("alembic")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        from alembic import command
        from alembic.config import Config
        from sqlalchemy import inspect

        config = Config()
        config.attributes["connection"] = core
        place = str(Path(__file__).with_name("migrations"))
        # Alembic's options are read with interpolation.
        config.set_main_option("script_location", place.replace("%", "%%"))
        if stamped is not None and not inspect(core).has_table("alembic_version"):
            command.stamp(config, stamped)
        command.upgrade(config, revision)
    finally:
        logger.setLevel(level)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
# A fork copies a lock as it was held.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_lock)


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

_log = logging.getLogger("quark")

_FIRST_WAIT_S = 10.0
_LONG_WAIT_S = 600.0
# Stores from before this version have no summaries.
_SUMMARIES_SINCE = 2
# A larger store is rewritten, so that it can shrink, only where that was asked for.
_SMALL_BYTES = 64 * 2**20


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
            raise SchemaMigrationError(
                f"storage_dir {storage_dir} holds no Quark store (no .quark folder)"
            )
        if layout.db_path.exists():
            with closing(sqlite.open_still(layout.db_path)) as connection:
                version = read_version(connection, layout.root)
            if version < SCHEMA_VERSION:
                _upgrade(layout.db_path, layout.root, wait_s=_LONG_WAIT_S)
            _let_shrink(layout.db_path, at_most_bytes=None)
        _renew_marker(layout, migrated_at)
    except (_NotNowError, SessionStoreError, OSError, sqlite3.Error) as error:
        raise SchemaMigrationError(str(error)) from error
    return SCHEMA_VERSION


def open_older(layout: StoreLayout, *, read_only: bool) -> SqliteConnection:
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
        copy = sqlite.keep_copy(
            layout.db_path, "migrated", lambda copy: _copy_and_upgrade(layout, copy, reason)
        )
        return open_database(copy, "mode=ro")
    except SchemaMigrationError as error:
        raise SessionStoreError(str(error)) from error
    except sqlite3.Error as error:
        raise SessionStoreError(f"the store {layout.db_path} cannot be opened: {error}") from error


def _copy_and_upgrade(layout: StoreLayout, copy: Path, reason: str) -> None:
    _log.info("reading the store %s from a migrated copy: %s", layout.root, reason)
    sqlite.copy_database(layout.db_path, copy)
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
                with alembic_lock():
                    _run_transaction(connection, root, wait_s, is_copy=is_copy)
    except sqlite3.Error as error:
        what = f"the store {root} cannot be migrated to schema version {SCHEMA_VERSION}"
        name = getattr(error, "sqlite_errorname", "")
        if is_unwritable(error):
            raise _NotNowError(f"{what}: it cannot be written here ({error})") from error
        if name.startswith("SQLITE_BUSY"):
            raise _NotNowError(
                f"{what}: another process has been writing to it for {wait_s:.0f} s; try again"
            ) from error
        raise SchemaMigrationError(f"{what}: {error}. It was left as it was.") from error


def _run_transaction(
    connection: SqliteConnection, root: Path, wait_s: float, *, is_copy: bool
) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import StaticPool

    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    try:
        # Alembic takes part in the transaction that it finds, and leaves its end to us.
        with engine.connect() as core, core.begin():
            _begin(connection, root, wait_s)
            version = read_version(connection, root)
            if version == SCHEMA_VERSION:
                return  # another process was first
            _check_whole(connection, root)
            if not is_copy:
                _refuse_living_runs(connection, root, version)
                _log.warning(
                    "migrating the store %s from schema version %d to %d; an older Quark cannot "
                    "open it any more",
                    root,
                    version,
                    SCHEMA_VERSION,
                )
            upgrade_tables(core, f"{SCHEMA_VERSION:04d}", stamped=f"{version:04d}")
            if version < _SUMMARIES_SINCE:
                _make_summaries(connection)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise error.orig from error
        raise
    finally:
        engine.dispose()


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
        _log.warning("waiting for another process that migrates or writes the store %s", root)
        connection.execute(f"PRAGMA busy_timeout={(wait_s - first_s) * 1000:.0f}")
        connection.execute("BEGIN IMMEDIATE")


def _check_whole(connection: sqlite3.Connection, root: Path) -> None:
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise SchemaMigrationError(
            f"the store {root} is damaged ({found[0]}), so it is not migrated and was left as it "
            "was. Put a backup in its place, or save what can be read with `sqlite3 .recover`."
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
            f"the store {root} has schema version {version} and run {living[0]}{more} of an older "
            f"Quark is writing to it, so it cannot be migrated to {SCHEMA_VERSION} now: wait until "
            "it has ended, or choose another storage_dir. Reading works meanwhile."
        )


def _make_summaries(connection: SqliteConnection) -> None:
    from quark_backends.store.writing.summaries import rebuild_summaries

    for (run_pk,) in connection.execute("SELECT pk FROM run ORDER BY pk").fetchall():
        rebuild_summaries(connection, run_pk)


def _finish(layout: StoreLayout) -> None:
    """What is good to do after a migration, and is done later where it fails."""
    try:
        _renew_marker(layout, format_time(now_us()))
    except OSError as error:
        _log.warning("the store %s is migrated, but not its marker: %s", layout.root, error)
    _let_shrink(layout.db_path, at_most_bytes=_SMALL_BYTES)


def _renew_marker(layout: StoreLayout, migrated_at: str) -> None:
    marker = read_marker(layout)
    if marker is None or marker.get("schema_version") != SCHEMA_VERSION:
        write_marker(layout.root, migrated_at=migrated_at)


def _let_shrink(db_path: Path, *, at_most_bytes: int | None) -> None:
    """Let a store of version 1 give space back in small steps, which takes rewriting it once."""
    try:
        with closing(open_database(db_path, "mode=rw")) as connection:
            if connection.execute("PRAGMA auto_vacuum").fetchone()[0]:
                return
            size_bytes = db_path.stat().st_size
            if at_most_bytes is not None and size_bytes > at_most_bytes:
                return
            # The new file goes through a temporary one and the write-ahead log.
            if shutil.disk_usage(db_path.parent).free < 3 * size_bytes:
                return
            connection.execute("PRAGMA busy_timeout=0")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("VACUUM")
    except (sqlite3.Error, OSError) as error:
        _log.debug("the store %s cannot shrink yet: %s", db_path, error)
