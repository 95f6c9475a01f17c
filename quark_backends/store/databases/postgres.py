"""A store in PostgreSQL: one schema of a database, its connections and their pool."""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.adapt import AdaptersMap, Buffer
from psycopg.errors import Diagnostic
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper, TextBinaryLoader, TextLoader
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from quark_backends.store.databases.connection import find_refusal, writing
from quark_backends.store.databases.sqlite import SCHEMA_VERSION
from quark_core.config.redaction import redact_text
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    SchemaMigrationError,
    SessionStoreError,
)

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

# Malformed for good: values out of range or of a wrong type, and what no row may lack.
_MALFORMED = ("22", "23502", "23514", "42804", "42883", "42846")
# The server or the network failed, or somebody else was quicker.
_TRANSIENT = ("08", "40", "53300", "57P", "23503", "23505")
# What an INSERT says once of each row.
_VALUES = re.compile(r"VALUES (\([?, ]+\))")
_MANY_VALUES = 4_000
_ESCAPES = str.maketrans({"\x00": "\x01\x01", "\x01": "\x01\x02"})


class UnknownOutcome(psycopg.OperationalError):
    """Nobody can tell whether a transaction holds; the connection is closed."""


class PooledConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection to which a warning is no success."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        warnings: list[str] = []
        self._warnings = warnings

        # Not a method: the connection would hold itself.
        def note(diagnostic: Diagnostic) -> None:
            if diagnostic.severity_nonlocalized == "WARNING":
                warnings.append(diagnostic.message_primary or "it does not say of what")

        self.add_notice_handler(note)

    def commit(self) -> None:
        """End the transaction; what it wrote is where the server was told to keep it.

        Raises:
            UnknownOutcome: The server warned of something. A commit that waits for a
                standby and is cancelled is one, on one machine only.
            psycopg.Error: It was not committed, or nobody can tell.
        """
        if self.info.transaction_status == TransactionStatus.IDLE:
            return
        self._warnings.clear()
        done = self.execute("COMMIT").statusmessage
        if self._warnings:
            self.close()
            raise UnknownOutcome(
                "it is unknown if the transaction is committed: the server warned of "
                f"{self._warnings[0]!r} during the commit"
            )
        # A transaction in which something failed is taken back without an error.
        if done != "COMMIT":
            raise psycopg.InternalError(f"the transaction was rolled back ({done})")


class PostgresConnection:
    """See `StoreConnection`.

    Between two transactions the server knows nothing of this connection: a pooler
    may hand each to another one. So every transaction says first what it may see and
    how long it may take, and a statement outside of any gets one of its own.

    Args:
        raw: A connection in autocommit mode, which prepares nothing.
        settings: Statements that hold for one transaction, with which each begins.
        give_back: Takes the connection back when this one is closed.
    """

    product = "PostgreSQL"
    store_name = "the store"
    is_shared = True
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    Error = psycopg.Error
    IntegrityError = psycopg.IntegrityError

    def __init__(
        self, raw: PooledConnection, settings: str, give_back: Callable[[PooledConnection], None]
    ) -> None:
        self._raw = raw
        self._settings = settings
        self._give_back: Callable[[PooledConnection], None] | None = give_back
        self._writes = False

    @property
    def in_transaction(self) -> bool:
        """See `StoreConnection`."""
        return self._raw.info.transaction_status in (
            TransactionStatus.ACTIVE,
            TransactionStatus.INTRANS,
            TransactionStatus.INERROR,
        )

    def execute(self, sql: str, args: Sequence[Any] = (), /) -> psycopg.Cursor[tuple[Any, ...]]:
        """See `StoreConnection`."""
        with self._transaction():
            return self._cursor().execute(_convert(sql), args, binary=True)

    def executemany(
        self, sql: str, rows: Iterable[Sequence[Any]], /
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """See `StoreConnection`; all rows go out together."""
        found = list(rows)
        cursor = self._cursor()
        with self._transaction():
            if not found or (values := _VALUES.search(sql)) is None:
                cursor.executemany(_convert(sql), found)
                return cursor
            # Nothing is prepared: the server reads and plans each statement that it gets.
            step = max(1, _MANY_VALUES // max(1, len(found[0])))
            for start in range(0, len(found), step):
                part = found[start : start + step]
                cursor.execute(
                    _convert(_repeat(sql, values.span(1), len(part))),
                    list(chain.from_iterable(part)),
                    binary=True,
                )
        return cursor

    def insert(self, sql: str, args: Sequence[Any], /) -> int:
        """See `StoreConnection`."""
        key = self.new_key()
        self.execute(sql, (key, *args))
        return key

    def new_key(self) -> int:
        """See `StoreConnection`: 63 random bits, so that writers share no counter."""
        return secrets.randbits(63) or 1

    def read_clock_us(self) -> int:
        """See `StoreConnection`: that of the server, whoever asks."""
        row = self.execute(
            "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        ).fetchone()
        assert row is not None
        return int(row[0])

    def begin_read(self) -> None:
        """See `StoreConnection`."""
        self._begin("REPEATABLE READ READ ONLY", writes=False)

    def begin_write(self) -> None:
        """See `StoreConnection`."""
        self._begin("READ COMMITTED", writes=True)

    def commit(self) -> None:
        """See `StoreConnection`.

        Raises:
            psycopg.Error: It was not committed, or nobody can tell.
        """
        if self._writes:
            self._raw.commit()
        else:
            self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """See `StoreConnection`."""
        if self.in_transaction and not self._raw.broken:
            self._raw.execute("ROLLBACK")

    def is_malformed(self, error: Exception) -> bool:
        """See `StoreConnection`."""
        if not isinstance(error, psycopg.Error):
            return False
        if error.sqlstate is None:
            # Of the driver itself: a value that it cannot send.
            return isinstance(error, psycopg.ProgrammingError | psycopg.DataError)
        return error.sqlstate.startswith(_MALFORMED)

    def close(self) -> None:
        """Give the connection back; what it had begun is taken back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                self.rollback()
            except psycopg.Error:
                self._raw.close()
            finally:
                give_back(self._raw)

    def _cursor(self) -> psycopg.Cursor[tuple[Any, ...]]:
        # It takes statements as they are; reading them again would cost as much as sending.
        return psycopg.RawCursor(self._raw)

    def _begin(self, mode: str, *, writes: bool) -> None:
        self._writes = writes
        # One message, so that what begins has been told where it is.
        self._raw.execute(f"BEGIN ISOLATION LEVEL {mode}; {self._settings}".encode())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The transaction that is open, or one for a single statement."""
        if self.in_transaction:
            yield
            return
        self.begin_write()
        try:
            yield
            self.commit()
        except BaseException:
            self.rollback()
            raise


def is_transient(error: psycopg.Error) -> bool:
    """Whether the same transaction may well succeed when it is tried again."""
    if isinstance(error, UnknownOutcome):
        return False  # it would wait for what the one before it did not get
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InternalError)
    return error.sqlstate.startswith(_TRANSIENT)


def make_adapters() -> AdaptersMap:
    """How values are sent and read, always as the same types as SQLite's.

    Integers are all of one size, as the columns are. A text may hold NUL, which
    PostgreSQL's may not: it is escaped, in an order that stays that of the texts.
    """
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(bool, Int8BinaryDumper)
    adapters.register_dumper(str, _TextDumper)
    for name in ("text", "varchar"):
        adapters.register_loader(name, _TextLoader)
        adapters.register_loader(name, _TextBinaryLoader)
    return adapters


class _TextDumper(StrBinaryDumper):
    def dump(self, obj: str) -> Buffer | None:
        if "\x00" in obj or "\x01" in obj:
            obj = obj.translate(_ESCAPES)
        return obj.encode()


class _TextLoader(TextLoader):
    def load(self, data: Buffer) -> str:
        return _unescape(str(data, "utf-8"))


class _TextBinaryLoader(TextBinaryLoader):
    def load(self, data: Buffer) -> str:
        return _unescape(str(data, "utf-8"))


def _unescape(text: str) -> str:
    if "\x01" not in text:
        return text
    return text.replace("\x01\x01", "\x00").replace("\x01\x02", "\x01")


def _repeat(sql: str, place: tuple[int, int], count: int) -> str:
    """A statement that says what stands at a place several times."""
    start, end = place
    return ", ".join([sql[:end], *[sql[start:end]] * (count - 1)]) + sql[end:]


@lru_cache(maxsize=1024)
def _convert(sql: str) -> bytes:
    """A statement as the server takes it; none of ours has a question mark in a text."""
    first, *rest = sql.split("?")
    return "".join([first, *(f"${n}{part}" for n, part in enumerate(rest, 1))]).encode()


_SECOND_MS = 1000
_CONNECT_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_S = 60
_LOCK_TIMEOUT_S = 15
# Whoever iterates over a run holds a moment of the store open.
_IDLE_TIMEOUT_S = 600
_MIGRATION_TIMEOUT_S = 600


class PostgresPool:
    """Connections to one database, which the stores in its schemas share; for any thread.

    Nothing is connected until something is asked for.

    Args:
        url: As SQLAlchemy writes it: `postgresql+psycopg://user@host:port/database`.
        max_connections: At most so many at once.
        wait_s: How long a caller waits for one.

    Raises:
        SessionStoreError: The URL is malformed.
    """

    def __init__(self, url: str, *, max_connections: int = 16, wait_s: float = 10.0) -> None:
        self.url = _parse(url)
        self.name = redact_text(self.url.render_as_string(hide_password=True))
        self._arguments = _find_arguments(self.url)
        self._pool = ConnectionPool(
            connection_class=PooledConnection,
            kwargs={**self._arguments, "autocommit": True, "context": make_adapters()},
            min_size=0,
            max_size=max_connections,
            open=False,
            timeout=wait_s,
            # A server that was started again leaves connections behind that are none.
            check=ConnectionPool.check_connection,
            reconnect_timeout=wait_s,
            num_workers=2,
            name="quark",
        )

    def take(
        self, schema: str, *, statement_timeout_s: int = _STATEMENT_TIMEOUT_S
    ) -> PostgresConnection:
        """A connection that sees the tables of a schema; closing it gives it back.

        Args:
            schema: The schema.
            statement_timeout_s: How long a statement may take.

        Raises:
            SessionStoreError: None was to be had in time.
        """
        try:
            self._pool.open()
            raw = self._pool.getconn()
        except (PoolTimeout, TooManyRequests, PoolClosed, psycopg.Error) as error:
            raise SessionStoreError(
                f"the database {self.name} cannot be reached: {redact_text(str(error))}"
            ) from error
        return PostgresConnection(raw, _settings(schema, statement_timeout_s), self._pool.putconn)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def make_engine(url: URL, **options: Any) -> Engine:
    """An engine of SQLAlchemy whose connections are as those of a pool, but for their values.

    Args:
        url: The database.
        options: For SQLAlchemy.
    """
    from sqlalchemy import create_engine

    arguments = _find_arguments(url)

    return create_engine(
        url,
        creator=lambda: PooledConnection.connect(**arguments),
        use_native_hstore=False,
        **options,
    )


def _parse(url: str) -> URL:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    # What cannot be read may hold a password where nobody expects one.
    if parsed is None or parsed.drivername not in ("postgresql", "postgresql+psycopg"):
        raise SessionStoreError(
            "the store's URL must have the form postgresql+psycopg://user@host:port/database"
        )
    if refusal := find_refusal(parsed):
        raise SessionStoreError(f"the store's URL: {refusal}")
    return parsed.set(drivername="postgresql+psycopg")


def _find_arguments(url: URL) -> dict[str, Any]:
    """What psycopg and libpq are told; a pooler refuses whatever sets a session up."""
    _, arguments = url.get_dialect()().create_connect_args(url)
    arguments.pop("context", None)
    return {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "keepalives_idle": 30,
        "tcp_user_timeout": 20_000,
        "application_name": "quark",
        "client_encoding": "utf8",
        **arguments,
        # A statement that is prepared belongs to one connection of the server.
        "prepare_threshold": None,
    }


def _settings(schema: str, statement_timeout_s: int) -> str:
    """Statements with which each transaction begins; they end with it."""
    return (
        f"SET LOCAL search_path TO {quote_schema(schema)};"
        f" SET LOCAL statement_timeout TO {statement_timeout_s * _SECOND_MS};"
        f" SET LOCAL lock_timeout TO {_LOCK_TIMEOUT_S * _SECOND_MS};"
        f" SET LOCAL idle_in_transaction_session_timeout TO {_IDLE_TIMEOUT_S * _SECOND_MS};"
        # A commit that comes with one is none.
        " SET LOCAL client_min_messages TO warning"
    )


def quote_schema(schema: str) -> str:
    """The name of a schema as SQL has it."""
    return sql.Identifier(schema).as_string(None)


VERSION_TABLE = "store_version"
"""The table whose one row has the version of a store's tables."""


def set_version(version: int) -> tuple[str, ...]:
    """The statements that say which version a store's tables have."""
    return (
        f"CREATE TABLE IF NOT EXISTS {VERSION_TABLE} (version bigint NOT NULL)",
        f"DELETE FROM {VERSION_TABLE}",
        f"INSERT INTO {VERSION_TABLE} VALUES ({version})",
    )


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
                f"schema must be lowercase letters, digits and _, at most 63, got {schema!r:.60}"
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
            raise SchemaMigrationError(f"{self.name} cannot be created: {error}") from error
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
        for attempt in range(_ATTEMPTS):
            version = self.read_version()
            if version is not None and version > SCHEMA_VERSION:
                raise SchemaMigrationError(str(self._newer(version)))
            if version == SCHEMA_VERSION:
                return version
            try:
                self._make_tables(since=version)
            except psycopg.Error as error:
                # Another process that migrates too makes one of the two fail.
                if attempt == _ATTEMPTS - 1:
                    reason = redact_text(str(error))
                    raise SchemaMigrationError(
                        f"{self.name} cannot be migrated to schema version {SCHEMA_VERSION}: "
                        f"{reason}. It was not changed."
                    ) from error
                time.sleep(_FIRST_PAUSE_S * 4**attempt)
        return self.migrate()

    def _make_tables(self, *, since: int | None) -> None:
        from quark_backends.store.databases.tables import POSTGRESQL, list_statements

        connection = self._pool.take(self.schema, statement_timeout_s=_MIGRATION_TIMEOUT_S)
        with closing(connection), writing(connection):
            for statement in list_statements(POSTGRESQL, since=since):
                connection.execute(statement)
            for statement in set_version(SCHEMA_VERSION):
                connection.execute(statement)

    def close(self) -> None:
        """Close the connections, unless other stores have them too."""
        if self._owns_pool:
            self._pool.close()

    def _read_version(self, connection: PostgresConnection) -> int | None:
        try:
            row = connection.execute(f"SELECT version FROM {VERSION_TABLE}").fetchone()
        except psycopg.errors.UndefinedTable:
            return None
        except psycopg.Error as error:
            raise SessionStoreError(f"{self.name} cannot be read: {error}") from error
        return None if row is None else int(row[0])

    def _check_version(self, version: int | None) -> None:
        if version is None or version < SCHEMA_VERSION:
            found = "has no store" if version is None else f"has schema version {version}"
            raise SessionStoreError(
                f"{self.name} {found}, but this Quark requires version {SCHEMA_VERSION}. Run "
                "`quark db upgrade`, or `quark serve --migrate`"
            )
        if version > SCHEMA_VERSION:
            raise self._newer(version)

    def _newer(self, version: int) -> SessionStoreError:
        return SessionStoreError(
            f"{self.name} has schema version {version}, but this Quark supports up to "
            f"{SCHEMA_VERSION}. Upgrade quark-tracker to use it. It was not changed."
        )
