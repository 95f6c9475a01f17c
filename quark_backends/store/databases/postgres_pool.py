"""Connections to one PostgreSQL database, for the stores in its schemas."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from quark_backends.store.databases.postgres_connection import (
    PooledConnection,
    PostgresConnection,
    make_adapters,
)
from quark_backends.store.databases.postgres_url import find_refusal
from quark_core.config.redaction import redact_text
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from psycopg.adapt import AdaptersMap
    from sqlalchemy import URL, Connection, Engine

_SECOND_MS = 1000
_CONNECT_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_S = 60
_LOCK_TIMEOUT_S = 15
# Whoever iterates over a run holds a moment of the store open.
_IDLE_TIMEOUT_S = 600
_MIGRATION_TIMEOUT_S = 600
# Searches have connections of their own: SQLAlchemy keeps them.
_SEARCHES = 4


class PostgresPool:
    """Connections to one database, which the stores in its schemas share; for any thread.

    Nothing is connected until something is asked for.

    Args:
        url: As SQLAlchemy writes it: `postgresql+psycopg://user@host:port/database`.
        max_connections: At most so many at once, besides those of searches.
        wait_s: How long a caller waits for one.

    Raises:
        SessionStoreError: The URL is malformed.
    """

    def __init__(self, url: str, *, max_connections: int = 16, wait_s: float = 10.0) -> None:
        self.url = _parse(url)
        self.name = redact_text(self.url.render_as_string(hide_password=True))
        self._arguments = _find_arguments(self.url)
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._engine: Engine | None = None
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

    def take(self, schema: str) -> PostgresConnection:
        """A connection that sees the tables of a schema; closing it gives it back.

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
        return PostgresConnection(raw, _settings(schema, _STATEMENT_TIMEOUT_S), self._pool.putconn)

    @contextmanager
    def begin_search(self, schema: str) -> Iterator[Connection]:
        """A connection of SQLAlchemy in a transaction that sees one moment of a schema."""
        with self._find_engine().connect() as connection, connection.begin():
            connection.exec_driver_sql(_settings(schema, _STATEMENT_TIMEOUT_S))
            yield connection

    @contextmanager
    def begin_migration(self, schema: str) -> Iterator[Connection]:
        """A connection of SQLAlchemy in a transaction that may alter the tables of a schema."""
        from sqlalchemy.pool import NullPool

        engine = make_engine(self.url, poolclass=NullPool)
        try:
            with engine.connect() as connection, connection.begin():
                connection.exec_driver_sql(_settings(schema, _MIGRATION_TIMEOUT_S))
                yield connection
        finally:
            engine.dispose()

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None

    def _find_engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = make_engine(
                    self.url,
                    adapters=make_adapters(),
                    read_only=True,
                    isolation_level="REPEATABLE READ",
                    pool_size=_SEARCHES,
                    max_overflow=0,
                    pool_timeout=self._wait_s,
                    pool_pre_ping=True,
                )
            return self._engine


def make_engine(
    url: URL, *, adapters: AdaptersMap | None = None, read_only: bool = False, **options: Any
) -> Engine:
    """An engine of SQLAlchemy whose connections are as those of a pool.

    Args:
        url: The database.
        adapters: How values are sent and read; as psycopg does by default.
        read_only: Whether all of its transactions are.
        options: For SQLAlchemy.
    """
    from sqlalchemy import create_engine

    arguments = _find_arguments(url)

    def connect() -> PooledConnection:
        raw = PooledConnection.connect(**arguments, context=adapters)
        raw.read_only = read_only
        return raw

    return create_engine(url, creator=connect, use_native_hstore=False, **options)


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
            "the store's URL must be like postgresql+psycopg://user@host:port/database"
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
