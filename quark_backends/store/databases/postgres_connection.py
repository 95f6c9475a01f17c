"""The store's statements over psycopg: `StoreConnection` for PostgreSQL."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap, Buffer
from psycopg.errors import Diagnostic
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper, TextBinaryLoader, TextLoader

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
                f"whether the transaction holds is not known: the server warned of "
                f"{self._warnings[0]!r} while it committed"
            )
        # A transaction in which something failed is taken back without an error.
        if done != "COMMIT":
            raise psycopg.InternalError(f"the transaction was taken back ({done})")


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
