"""A store for many callers at once, over SQLite or PostgreSQL: a server has one per workspace."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from quark_backends.store.background import BackgroundCompaction, WriteGate
from quark_backends.store.generations import store_generation, write_generation
from quark_backends.store.ingest import BatchIngest
from quark_backends.store.reader import StoreReader
from quark_core.errors import BackendUnavailable, SessionStoreError

if TYPE_CHECKING:
    from quark_backends.store.connection import StoreConnection
    from quark_backends.store.layout import StoreLayout
    from quark_backends.store.postgres import PostgresDatabase
    from quark_backends.store.search import RunFinder
    from quark_core.backend import Batch, Generation, StoredRun
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = ["RunStore"]

_READERS = 4


class _Writing(Protocol):
    """How a database is written to."""

    def write_group(self, batches: Sequence[Batch]) -> None:
        """See `RunStore.write_group`."""

    def write_generation(self, generation: Generation) -> int:
        """See `RunStore.write_generation`."""

    def close(self) -> None:
        """Give up what is open."""


class RunStore:
    """Reads and writes one store; may be used from any thread, by many at once.

    Use `over_sqlite` or `over_postgres`.

    Args:
        connect: Opens a connection for reading.
        connect_compaction: Opens a connection for compaction.
        writing: How it is written to.
        finder: Searches it.
        gate: Lets compaction wait for those who write in this process.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], StoreConnection],
        connect_compaction: Callable[[], StoreConnection],
        writing: _Writing,
        make_finder: Callable[[], RunFinder],
        gate: WriteGate,
    ) -> None:
        self._writing = writing
        self._readers = _Readers(connect)
        self._make_finder = make_finder
        self._finder: RunFinder | None = None
        self._lock = threading.Lock()
        self._compaction = BackgroundCompaction(connect_compaction, gate)

    @classmethod
    def over_sqlite(cls, layout: StoreLayout) -> RunStore:
        """The store in a folder that `ensure_store` made.

        Raises:
            SessionStoreError: It cannot be opened.
        """
        from quark_backends.store.database import connect

        gate = WriteGate()
        read = partial(connect, layout, read_only=True)

        def make_finder() -> RunFinder:
            from quark_backends.store.search import RunFinder

            return RunFinder(read)

        return cls(
            connect=read,
            connect_compaction=partial(connect, layout),
            writing=_SqliteWriting(partial(connect, layout), gate),
            make_finder=make_finder,
            gate=gate,
        )

    @classmethod
    def over_postgres(cls, database: PostgresDatabase) -> RunStore:
        """The store in a schema that has its tables; the database is closed by who made it."""

        def make_finder() -> RunFinder:
            from quark_backends.store.search import RunFinder

            return RunFinder(begin=database.begin_search)

        return cls(
            connect=database.connect,
            connect_compaction=database.connect,
            writing=_PostgresWriting(database),
            make_finder=make_finder,
            gate=WriteGate(),
        )

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store batches as one, each exactly once however often it comes; on disk when it returns.

        Raises:
            BackendRejected: One of them can never be stored; none was.
            BackendUnavailable: The store cannot take them now; none was, or
                nobody can tell, and then they are recognised when they come again.
        """
        if not batches:
            return
        self._writing.write_group(batches)
        self._compaction.note(len(batches))

    def write_generation(self, generation: Generation) -> int:
        """Store outputs of an analyzer; see `SupportsGenerations`."""
        return self._writing.write_generation(generation)

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        with self._readers.take() as reader:
            return reader.read(run_id, kind, query)

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """See `SupportsSeries`."""
        with self._readers.take() as reader:
            return reader.read_series(run_id, key, max_points=max_points, all_attempts=all_attempts)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; holds a connection until it is read to its end or closed."""
        return self._readers.any.iterate(run_id, kind, query, rows=rows)

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        with self._readers.take() as reader:
            return reader.read_batches(run_id, writer_id, start, limit)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        with self._readers.take() as reader:
            return reader.read_outputs(run_id, kind, analyzer)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._readers.take() as reader:
            return reader.load_run(run_id)

    def list_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,
        after: tuple[int, str] | None = None,
    ) -> list[StoredRun]:
        """Runs, newest first; see `StoreReader.list_runs`."""
        with self._readers.take() as reader:
            return reader.list_runs(
                project=project, limit=limit, store_name=store_name, after=after
            )

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """See `RunFinder.search`."""
        return self._find().search(search, store_name)

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return self._find().summarize(run_id)

    def close(self) -> None:
        """End compaction and give up what is open; nothing may be called meanwhile or later."""
        self._compaction.close()
        self._writing.close()
        self._readers.close()
        if self._finder is not None:
            self._finder.close()

    def _find(self) -> RunFinder:
        with self._lock:
            if self._finder is None:
                # SQLAlchemy is loaded by who searches only.
                self._finder = self._make_finder()
            return self._finder


class _Readers:
    """A few readers, each for one caller at a time; a caller waits where none is free."""

    def __init__(self, connect: Callable[[], StoreConnection]) -> None:
        self._all = [StoreReader(connect) for _ in range(_READERS)]
        # The last one given back is the next one taken: it knows what was read last.
        self._free: queue.LifoQueue[StoreReader] = queue.LifoQueue()
        for reader in self._all:
            self._free.put(reader)

    @property
    def any(self) -> StoreReader:
        """One of them, for what needs no turn."""
        return self._all[0]

    @contextmanager
    def take(self) -> Iterator[StoreReader]:
        """One that nobody else has."""
        reader = self._free.get()
        try:
            yield reader
        finally:
            self._free.put(reader)

    def close(self) -> None:
        """Give up their connections."""
        for reader in self._all:
            reader.close()


class _SqliteWriting:
    """One writer at a time: SQLite has no more."""

    def __init__(self, connect: Callable[[], StoreConnection], gate: WriteGate) -> None:
        self._connect = connect
        self._connection: StoreConnection | None = connect()
        self._ingest = BatchIngest(self._connection)
        self._gate = gate

    def write_group(self, batches: Sequence[Batch]) -> None:
        with self._gate.write():
            if self._connection is None:
                raise BackendUnavailable("the store was closed")
            self._ingest.write(batches)

    def write_generation(self, generation: Generation) -> int:
        with self._gate.write(), closing(self._connect()) as connection:
            return write_generation(connection, generation)

    def close(self) -> None:
        with self._gate.write():
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class _PostgresWriting:
    """As many writers as there are connections; those of one run take turns in the database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def write_group(self, batches: Sequence[Batch]) -> None:
        names = self._database.known_names
        try:
            self._database.run(lambda store: BatchIngest(store, names).write_once(batches))
        except SessionStoreError as error:
            # What is stored already cannot be read here now, and may be later.
            raise BackendUnavailable(str(error)) from error

    def write_generation(self, generation: Generation) -> int:
        return self._database.run(lambda connection: store_generation(connection, generation))

    def close(self) -> None:
        """The database outlives its stores."""
