"""A store in PostgreSQL: one schema of a database, beside those of other workspaces."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import psycopg

from quark_backends.store.databases.postgres_connection import PostgresConnection, is_transient
from quark_backends.store.databases.postgres_pool import PostgresPool, quote_schema
from quark_backends.store.databases.sqlite import SCHEMA_VERSION
from quark_core.config.redaction import redact_text
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    SchemaMigrationError,
    SessionStoreError,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

_Result = TypeVar("_Result")

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.02


class PostgresDatabase:
    """The store of one workspace: the tables of one schema; for any thread.

    Args:
        url: See `PostgresPool`; ignored where `pool` is given.
        schema: The schema: lower-case letters, digits and `_`, at most 63.
        pool: Connections that stores of the same database share; one of its own by default.
        max_connections, wait_s: Of a pool of its own.

    Raises:
        SessionStoreError: The URL or the schema's name is malformed.
    """

    def __init__(
        self,
        url: str = "",
        *,
        schema: str,
        pool: PostgresPool | None = None,
        max_connections: int = 16,
        wait_s: float = 10.0,
    ) -> None:
        if not _SCHEMA_NAME.fullmatch(schema):
            raise SessionStoreError(
                f"schema must be lower-case letters, digits and _, at most 63, got {schema!r}"
            )
        self.schema = schema
        self._owns_pool = pool is None
        self._pool = pool or PostgresPool(url, max_connections=max_connections, wait_s=wait_s)
        self._is_checked = False
        self.known_names: dict[str, int] = {}

    @property
    def name(self) -> str:
        """What messages call it; without a password."""
        return f"{self._pool.name} (schema {self.schema})"

    def connect(self) -> PostgresConnection:
        """A connection to the store, which is given back when it is closed.

        Raises:
            SessionStoreError: The database cannot be reached, has no such
                store, or one of another version; the message says what to do.
        """
        connection = self.take()
        if not self._is_checked:
            try:
                self._check_version(self._read_version(connection))
            except BaseException:
                connection.close()
                raise
            self._is_checked = True
        return connection

    def run(self, work: Callable[[PostgresConnection], _Result]) -> _Result:
        """Do work that is a transaction of its own, and again where that may help.

        Args:
            work: Leaves nothing behind when it raises; is called up to five times.

        Raises:
            BackendRejected: Something else in the store forbids it, each time.
            BackendUnavailable: The database cannot take it now.
        """
        last: psycopg.Error | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))
            try:
                connection = self.connect()
            except SessionStoreError as error:
                raise BackendUnavailable(str(error)) from error
            try:
                return work(connection)
            except psycopg.Error as error:
                last = error
                if isinstance(error, psycopg.IntegrityError):
                    # A store that was put back from a backup has other numbers.
                    self.known_names.clear()
                if not is_transient(error):
                    break
            finally:
                connection.close()
        assert last is not None
        if isinstance(last, psycopg.IntegrityError):
            raise BackendRejected(f"the store has something that forbids it: {last}") from last
        raise BackendUnavailable(f"PostgreSQL: {redact_text(str(last))}") from last

    @contextmanager
    def begin_search(self) -> Iterator[Connection]:
        """See `PostgresPool.begin_search`."""
        if not self._is_checked:
            self.connect().close()
        with self._pool.begin_search(self.schema) as connection:
            yield connection

    def take(self) -> PostgresConnection:
        """As `connect`, whatever is in the schema, or is not.

        Raises:
            SessionStoreError: The database cannot be reached.
        """
        return self._pool.take(self.schema)

    def read_version(self) -> int | None:
        """Version of the tables, or None where there are none.

        Raises:
            SessionStoreError: The database cannot be reached.
        """
        connection = self.take()
        try:
            return self._read_version(connection)
        finally:
            connection.close()

    def create(self) -> int:
        """Make the schema and its tables where they are not; as `migrate` besides."""
        connection = self.take()
        try:
            # IF NOT EXISTS still needs the right to make one, and may lose a race.
            found = connection.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname = ?", (self.schema,)
            ).fetchone()
            if found is None:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quote_schema(self.schema)}")
        except psycopg.errors.UniqueViolation:
            pass  # another process was first
        except psycopg.Error as error:
            raise SchemaMigrationError(f"{self.name} cannot be made: {error}") from error
        finally:
            connection.close()
        return self.migrate()

    def migrate(self) -> int:
        """Bring the tables to the version of this Quark; returns that version.

        May be called by several processes at once.

        Raises:
            SchemaMigrationError: A newer Quark made them, or it failed; they
                were left as they were.
            SessionStoreError: The database cannot be reached.
        """
        from sqlalchemy.exc import SQLAlchemyError

        from quark_backends.store.databases.revisions import alembic_lock, upgrade_tables

        for attempt in range(_ATTEMPTS):
            version = self.read_version()
            if version is not None and version > SCHEMA_VERSION:
                raise SchemaMigrationError(str(self._newer(version)))
            if version == SCHEMA_VERSION:
                return version
            try:
                with alembic_lock(), self._pool.begin_migration(self.schema) as core:
                    upgrade_tables(core, f"{SCHEMA_VERSION:04d}")
            except (SQLAlchemyError, psycopg.Error) as error:
                # Another process that migrates too makes one of the two fail.
                if attempt == _ATTEMPTS - 1:
                    reason = redact_text(str(getattr(error, "orig", None) or error))
                    raise SchemaMigrationError(
                        f"{self.name} cannot be migrated to schema version {SCHEMA_VERSION}: "
                        f"{reason}. It was left as it was."
                    ) from error
                time.sleep(_FIRST_PAUSE_S * 4**attempt)
        return self.migrate()

    def close(self) -> None:
        """Close the connections, unless other stores have them too."""
        if self._owns_pool:
            self._pool.close()

    def _read_version(self, connection: PostgresConnection) -> int | None:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except psycopg.errors.UndefinedTable:
            return None
        except psycopg.Error as error:
            raise SessionStoreError(f"{self.name} cannot be read: {error}") from error
        return None if row is None else int(row[0])

    def _check_version(self, version: int | None) -> None:
        if version is None or version < SCHEMA_VERSION:
            found = "has no store" if version is None else f"has schema version {version}"
            raise SessionStoreError(
                f"{self.name} {found}, this Quark needs version {SCHEMA_VERSION}: "
                "run `quark db upgrade`, or `quark serve --migrate`"
            )
        if version > SCHEMA_VERSION:
            raise self._newer(version)

    def _newer(self, version: int) -> SessionStoreError:
        return SessionStoreError(
            f"{self.name} has schema version {version}, this Quark knows {SCHEMA_VERSION}: "
            "upgrade quark-tracker to use it. It was left as it was."
        )
