"""Connections to one PostgreSQL database, for the stores in its schemas."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from quark_backends.store.postgres_connection import (
    PooledConnection,
    PostgresConnection,
    make_adapters,
)
from quark_core.errors import SessionStoreError
from quark_core.redaction import redact_text

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

__all__ = ["PostgresPool", "quote_schema"]

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
            kwargs={
                **self._arguments,
                "autocommit": True,
                "context": make_adapters(),
                "options": self._timeouts(_STATEMENT_TIMEOUT_S, _LOCK_TIMEOUT_S),
            },
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
        try:
            if raw.store_schema != schema:
                raw.store_schema = None
                raw.execute("SELECT set_config('search_path', %s, false)", (quote_schema(schema),))
                raw.store_schema = schema
        except BaseException as error:
            self._pool.putconn(raw)
            if isinstance(error, psycopg.Error):
                raise SessionStoreError(f"the database {self.name}: {error}") from error
            raise
        return PostgresConnection(raw, self._pool.putconn)

    @contextmanager
    def begin_search(self, schema: str) -> Iterator[Connection]:
        """A connection of SQLAlchemy in a transaction that sees one moment of a schema."""
        with self._find_engine().connect() as connection, connection.begin():
            connection.exec_driver_sql(f"SET LOCAL search_path TO {quote_schema(schema)}")
            yield connection

    @contextmanager
    def begin_migration(self, schema: str) -> Iterator[Connection]:
        """A connection of SQLAlchemy in a transaction that may alter the tables of a schema."""
        from sqlalchemy import create_engine
        from sqlalchemy.pool import NullPool

        engine = create_engine(
            self.url,
            poolclass=NullPool,
            connect_args={
                **self._extra,
                "options": self._timeouts(_MIGRATION_TIMEOUT_S, _LOCK_TIMEOUT_S)
                + f" -c search_path={quote_schema(schema)}",
            },
        )
        try:
            with engine.connect() as connection, connection.begin():
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

    def _timeouts(self, statement_s: int, lock_s: int) -> str:
        return (
            f"{self._arguments.get('options', '')}"
            f" -c statement_timeout={statement_s}s -c lock_timeout={lock_s}s"
            f" -c idle_in_transaction_session_timeout={_IDLE_TIMEOUT_S}s"
        )

    @property
    def _extra(self) -> dict[str, Any]:
        names = ("connect_timeout", "keepalives_idle", "tcp_user_timeout", "application_name")
        return {name: self._arguments[name] for name in names}

    def _find_engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                from sqlalchemy import create_engine

                self._engine = create_engine(
                    self.url,
                    isolation_level="REPEATABLE READ",
                    pool_size=_SEARCHES,
                    max_overflow=0,
                    pool_timeout=self._wait_s,
                    pool_pre_ping=True,
                    use_native_hstore=False,
                    connect_args={
                        **self._extra,
                        "context": make_adapters(),
                        "client_encoding": "utf8",
                        "options": self._timeouts(_STATEMENT_TIMEOUT_S, _LOCK_TIMEOUT_S)
                        + " -c default_transaction_read_only=on",
                    },
                )
            return self._engine


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
    return parsed.set(drivername="postgresql+psycopg")


def _find_arguments(url: URL) -> dict[str, Any]:
    """What libpq is told."""
    arguments = {**url.query, **url.translate_connect_args(username="user", database="dbname")}
    return {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "keepalives_idle": 30,
        "tcp_user_timeout": 20_000,
        "application_name": "quark",
        "client_encoding": "utf8",
        **arguments,
    }


def quote_schema(schema: str) -> str:
    """The name of a schema as SQL has it."""
    return sql.Identifier(schema).as_string(None)
