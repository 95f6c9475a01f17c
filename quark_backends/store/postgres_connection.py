"""The store's statements over psycopg: `StoreConnection` for PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap, Buffer
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper, TextBinaryLoader, TextLoader

__all__ = ["PooledConnection", "PostgresConnection", "is_transient", "make_adapters"]

# Malformed for good: values out of range or of a wrong type, and what no row may lack.
_MALFORMED = ("22", "23502", "23514", "42804", "42883", "42846")
# The server or the network failed, or somebody else was quicker.
_TRANSIENT = ("08", "40", "53300", "57P", "23503", "23505")
_ESCAPES = str.maketrans({"\x00": "\x01\x01", "\x01": "\x01\x02"})


class PooledConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection of the pool.

    Attributes:
        store_schema: The schema whose tables it sees; None before it was chosen.
    """

    store_schema: str | None = None


class PostgresConnection:
    """See `StoreConnection`.

    Args:
        raw: A connection in autocommit mode.
        give_back: Takes the connection back when this one is closed.
    """

    product = "PostgreSQL"
    is_shared = True
    for_update = " FOR UPDATE"
    Error = psycopg.Error
    IntegrityError = psycopg.IntegrityError

    def __init__(
        self, raw: PooledConnection, give_back: Callable[[PooledConnection], None]
    ) -> None:
        self._raw = raw
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
        return self._raw.execute(_convert(sql), args, binary=True)

    def executemany(
        self, sql: str, rows: Iterable[Sequence[Any]], /
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """See `StoreConnection`; all rows go out together."""
        cursor = self._raw.cursor(binary=True)
        cursor.executemany(_convert(sql), list(rows))
        return cursor

    def insert(self, sql: str, args: Sequence[Any], /) -> int:
        """See `StoreConnection`."""
        key = self.new_key()
        self.execute(sql, (key, *args))
        return key

    def new_key(self) -> int:
        """See `StoreConnection`: 63 random bits, so that writers share no counter."""
        return secrets.randbits(63) or 1

    def begin_read(self) -> None:
        """See `StoreConnection`."""
        self._writes = False
        self._raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def begin_write(self) -> None:
        """See `StoreConnection`."""
        self._writes = True
        self._raw.execute("BEGIN ISOLATION LEVEL READ COMMITTED")

    def commit(self) -> None:
        """See `StoreConnection`.

        Raises:
            psycopg.Error: It was not committed, or nobody can tell.
        """
        done = self._raw.execute("COMMIT").statusmessage
        # A transaction in which something failed is taken back without an error.
        if self._writes and done != "COMMIT":
            raise psycopg.InternalError(f"the transaction was taken back ({done})")

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


def is_transient(error: psycopg.Error) -> bool:
    """Whether the same transaction may well succeed when it is tried again."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InternalError)
    return error.sqlstate.startswith(_TRANSIENT)


def make_adapters() -> AdaptersMap:
    """How values are sent and read, always as the same types as SQLite's.

    Integers are all of one size, so that a statement is prepared once. A text
    may hold NUL, which PostgreSQL's may not: it is escaped, in an order that
    stays that of the texts.
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


@lru_cache(maxsize=1024)
def _convert(sql: str) -> Any:
    """A statement as psycopg takes it; none of ours has a question mark in a text."""
    return sql.replace("%", "%%").replace("?", "%s")
