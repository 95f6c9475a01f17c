"""Finds runs by their summaries: which, then the rows, then the metrics of those."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from quark_backends.store.databases.connection import close_with
from quark_backends.store.reading.table_rows import (
    ROW_SIZE,
    RUN_COLUMNS,
    RUN_TABLES,
    cut_numbers,
    run_not_found,
    to_stored_run,
)
from quark_core.backends.run_summary import MetricSummary, RunSummary
from quark_core.config.redaction import redact_text
from quark_core.errors import SessionStoreError
from quark_core.records import format_time
from quark_core.records.base import now_us

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.records.query import RunSearch

# Of texts of runs that are decoded at once: some become forty times as much.
_PART_BYTES = 2**20
_METRIC_BYTES = 40
# Runs a statement, written for SQLite, with values for its places.
Ask = Callable[[str, Sequence[Any]], Iterable[Sequence[Any]]]


class RunFinder:
    """Searches over a connection of its own; may be used from any thread.

    Args:
        connect: Opens a connection to SQLite for reading, in autocommit mode;
            one search at a time is made over it.
        begin: Instead of it, begins a transaction that reads, of any database;
            as many searches are made at once as it lets begin.
        lock: Whoever is at the connection holds this; by default it is this finder's alone.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection] | None = None,
        *,
        begin: Callable[[], AbstractContextManager[Connection]] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._connect = connect
        self._given = begin
        self._file = ""
        self._opened: sqlite3.Connection | None = None
        self._engine: Engine | None = None
        self._close_connection: Callable[[], object] | None = None
        self._look: object = None
        self._lock = lock or threading.RLock()

    def close(self) -> None:
        """Give up the connection; a later search opens another."""
        with self._lock:
            self._close()

    def follow(self, look: object) -> None:
        """Give it up where the database file looks otherwise than the last time.

        Args:
            look: As `ReaderPool.look` has it.
        """
        with self._lock:
            if look != self._look:
                self._close()
            self._look = look

    def _close(self) -> None:
        if self._close_connection is not None:
            self._close_connection()
        self._opened = self._engine = self._close_connection = None

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """The runs that fit, in the order that is asked for, newest first by default.

        What it returns is the store at one moment. Runs in the trash are left out.

        Args:
            search: What is asked for.
            store_name: Only runs that were started for a storage root of this label.

        Raises:
            SchemaValidationError: A name that no run of the searched project
                has; the message points at its column.
            SessionStoreError: The store cannot be read.
        """
        return list(self.iterate_search(search, store_name))

    def iterate_search(
        self, search: RunSearch, store_name: str | None = None, *, start: int = 0
    ) -> Generator[RunSummary, None, None]:
        """What `search` returns, a few runs at a time in memory; of one thread.

        Args:
            search: What is asked for.
            store_name: Only runs that were started for a storage root of this label.
            start: How many of the first are left out.

        Raises:
            SchemaValidationError: A name that no run of the searched project
                has; the message points at its column.
            SessionStoreError: The store cannot be read.
        """
        if search.where is None and not search.order_by:
            with self._begin_plainly() as ask:
                yield from _load_summaries(ask, _list_newest(ask, search, store_name)[start:])
            return
        from sqlalchemy import select

        from quark_backends.store.databases.tables import METADATA
        from quark_backends.store.reading.search_conditions import (
            SearchConditions,
            StoredNames,
            find_alive,
        )
        from quark_core.search.resolution import resolve_names

        run = METADATA.tables["run"]
        with self._begin() as connection:
            names = StoredNames(connection, search.project, store_name)
            resolved = resolve_names(search, names)
            if resolved is None or resolved.limit == 0:
                return
            asks_liveness = any(
                field.scope == "run" and field.name in ("state", "duration")
                for field in resolved.fields
            )
            alive = find_alive(connection) if asks_liveness else ()
            conditions = SearchConditions(resolved, names.metric_names, alive, now_us(), store_name)
            statement = (
                select(run.c.pk)
                .select_from(conditions.tables)
                .where(conditions.make_condition())
                .order_by(*conditions.make_order())
                .limit(resolved.limit)
            )
            pks = connection.scalars(statement).all()[start:]
            yield from _load_summaries(_ask_over(connection), pks)

    def search_page(self, page: PageSearch, store_name: str | None = None) -> RunPage:
        """One page of the runs that fit, of each the chosen columns; see `SupportsPages`.

        Args:
            page: What is asked for.
            store_name: Only runs that were started for a storage root of this label.

        Raises:
            SchemaValidationError: As `search`, or a cursor of another search.
            SessionStoreError: The store cannot be read.
        """
        from quark_backends.store.reading.run_pages import load_page

        with self._begin() as connection:
            return load_page(connection, page, store_name)

    def list_names(
        self, project: str | None, text: str, limit: int, store_name: str | None = None
    ) -> RunNames:
        """The names that runs have; see `SupportsPages`.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        from quark_backends.store.reading.run_pages import load_names

        with self._begin() as connection:
            return load_names(connection, project, text, limit, store_name)

    def summarize(self, run_id: str) -> RunSummary:
        """One run with its metrics summed up, in the trash or not.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        with self._begin_plainly() as ask:
            pks = [pk for (pk,) in ask("SELECT pk FROM run WHERE id = ?", (run_id,))]
            if not pks:
                raise run_not_found(run_id)
            return next(_load_summaries(ask, pks))

    @contextmanager
    def _begin_plainly(self) -> Iterator[Ask]:
        """As `_begin`, for statements that are written out: they need no SQLAlchemy in SQLite.

        To load it takes longer than most of them.
        """
        if self._given is not None:
            with self._begin() as connection:
                yield _ask_over(connection)
            return
        with self._lock:
            try:
                opened = self._open()
                opened.execute("BEGIN")
                try:
                    yield opened.execute
                finally:
                    opened.rollback()
            except sqlite3.Error as error:
                raise self._refuse(error) from error

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """A transaction that reads, so that all statements of a search see one moment."""
        from sqlalchemy.exc import SQLAlchemyError

        if self._given is not None:
            try:
                with self._given() as connection:
                    yield connection
            except SQLAlchemyError as error:
                said = redact_text(str(getattr(error, "orig", None) or error))
                raise SessionStoreError(f"the store cannot be searched: {said}") from error
            return
        with self._lock:
            try:
                if self._engine is None:
                    self._engine = _make_engine(self._open())
                with self._engine.begin() as connection:
                    yield connection
            except (SQLAlchemyError, sqlite3.Error) as error:
                raise self._refuse(getattr(error, "orig", None) or error) from error

    def _refuse(self, reason: object) -> SessionStoreError:
        store = f"store {self._file}" if self._file else "store"
        return SessionStoreError(f"the {store} cannot be searched: {reason}")

    def _open(self) -> sqlite3.Connection:
        assert self._connect is not None
        if self._opened is None:
            self._opened = self._connect()
            self._close_connection = close_with(self, self._opened.close, self._lock)
            # Messages name it; it is empty where the store is in memory.
            self._file = self._opened.execute("PRAGMA database_list").fetchone()[2]
        return self._opened


def _make_engine(opened: sqlite3.Connection) -> Engine:
    from sqlalchemy import create_engine, event
    from sqlalchemy.pool import StaticPool

    engine = create_engine("sqlite://", creator=lambda: opened, poolclass=StaticPool)

    # The driver is in autocommit mode and begins nothing by itself.
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _ask_over(connection: Connection) -> Ask:
    """Statements that are written out, over a connection of SQLAlchemy's."""
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"

    def ask(sql: str, values: Sequence[Any]) -> Iterable[Sequence[Any]]:
        return connection.exec_driver_sql(sql.replace("?", mark), tuple(values))

    return ask


def _list_newest(ask: Ask, search: RunSearch, store_name: str | None) -> list[int]:
    """Numbers of the runs of a search that asks for nothing of them, newest first."""
    conditions, values = ["trashed_us IS NULL"], list[Any]()
    if not search.archived:
        conditions.append("archived_us IS NULL")
    if search.project is not None:
        conditions.append("project_id = (SELECT id FROM project WHERE name = ?)")
        values.append(search.project)
    if store_name is not None:
        conditions.append("store_name = ?")
        values.append(store_name)
    sql = f"SELECT pk FROM run WHERE {' AND '.join(conditions)} ORDER BY created_us DESC, pk DESC"
    if search.limit is not None:
        sql += " LIMIT ?"
        values.append(search.limit)
    return [pk for (pk,) in ask(sql, values)]


def _load_summaries(ask: Ask, run_pks: Sequence[int]) -> Iterator[RunSummary]:
    """The runs of these numbers, in their order."""
    for part in _cut_by_size(ask, run_pks):
        summaries: dict[int, RunSummary] = {}
        metrics = _load_metrics(ask, part)
        for pk, newest_step, *row in ask(
            f"SELECT run.pk, newest_step, {RUN_COLUMNS} FROM {RUN_TABLES} "
            f"WHERE run.pk IN ({_mark(part)})",
            part,
        ):
            found = metrics.get(pk)
            summaries[pk] = RunSummary(
                stored=to_stored_run(row),
                newest_step=newest_step,
                last_metric_at=None if found is None else format_time(found.last_us),
                metrics={} if found is None else found,
            )
        yield from (summaries[pk] for pk in part)


def _cut_by_size(ask: Ask, run_pks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of runs in parts, whose rows together are decoded without taking much memory."""
    for numbers in cut_numbers(run_pks):
        found = ask(
            f"SELECT run.pk, {ROW_SIZE},"
            " (SELECT count(*) FROM run_metric WHERE run_metric.run_pk = run.pk)"
            f" FROM run WHERE run.pk IN ({_mark(numbers)})",
            numbers,
        )
        sizes = {pk: texts + metrics * _METRIC_BYTES for pk, texts, metrics in found}
        part: list[int] = []
        size_bytes = 0
        for pk in numbers:
            size_bytes += sizes[pk]
            if part and size_bytes > _PART_BYTES:
                yield tuple(part)
                part, size_bytes = [], sizes[pk]
            part.append(pk)
        yield tuple(part)


def _mark(values: Sequence[object]) -> str:
    """A place for each of the values of a statement."""
    return ", ".join("?" * len(values))


class _Metrics(Mapping[str, MetricSummary]):
    """Metrics of a run; a page of runs has thousands, so each is made when asked for."""

    __slots__ = ("_made", "_rows")

    def __init__(self, rows: Mapping[str, Sequence[Any]]) -> None:
        self._rows = rows
        self._made: dict[str, MetricSummary] = {}

    @property
    def last_us(self) -> int:
        """Time of the latest of the metrics' newest points, in microseconds."""
        return max(int(row[-1]) for row in self._rows.values())

    def __getitem__(self, key: str) -> MetricSummary:
        made = self._made.get(key)
        if made is not None:
            return made
        _, _, count, non_finite, first, last, low, high, last_step, _ = self._rows[key]
        made = self._made[key] = MetricSummary(
            key=key,
            count=count,
            non_finite=non_finite,
            first=first,
            last=last,
            low=low,
            high=high,
            last_step=last_step,
        )
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(dict(self))


_METRIC_COLUMNS = """
    run_pk, name_pk, count, non_finite, first, last, low, high, last_step, last_us
"""


def _load_metrics(ask: Ask, run_pks: Sequence[int]) -> dict[int, _Metrics]:
    wanted = f"run_pk IN ({_mark(run_pks)})"
    if len(run_pks) == 1:
        # Each name stands in one row, and there may be a million.
        named = ask(
            f"SELECT {_METRIC_COLUMNS}, name.text FROM run_metric "
            f"JOIN name ON name.pk = name_pk WHERE {wanted} ORDER BY name.text",
            run_pks,
        )
        found = {row[-1]: tuple(row)[:-1] for row in named}
        return {run_pks[0]: _Metrics(found)} if found else {}
    rows = list(ask(f"SELECT {_METRIC_COLUMNS} FROM run_metric WHERE {wanted}", run_pks))
    # A few names stand in thousands of rows: each is read once.
    keys: dict[int, str] = {}
    for part in cut_numbers(list({row[1] for row in rows})):
        texts = ask(f"SELECT pk, text FROM name WHERE pk IN ({_mark(part)})", part)
        keys.update((pk, text) for pk, text in texts)
    ranks = {pk: rank for rank, pk in enumerate(sorted(keys, key=keys.__getitem__))}
    rows.sort(key=lambda row: ranks[row[1]])
    by_run: dict[int, dict[str, Sequence[Any]]] = {}
    for row in rows:
        by_run.setdefault(row[0], {})[keys[row[1]]] = row
    return {pk: _Metrics(named_rows) for pk, named_rows in by_run.items()}
