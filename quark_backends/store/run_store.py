"""A store for many callers at once, over SQLite or PostgreSQL: a server has one per workspace."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quark_backends.store.databases.connection import OpenFiles
from quark_backends.store.databases.write_batching import SqliteTurns
from quark_backends.store.reading.reader import store_generation, write_generation
from quark_backends.store.reading.reader_pool import ReaderPool
from quark_backends.store.upkeep.background_compaction import BackgroundCompaction, WriteGate
from quark_backends.store.writing.edits import (
    editing,
    store_edit,
    store_group_edit,
    store_project_edit,
    store_stop,
)
from quark_backends.store.writing.ingest import BatchIngest
from quark_backends.store.writing.sweeps import KeepsSweeps
from quark_core.errors import BackendUnavailable, SessionStoreError

if TYPE_CHECKING:
    from pathlib import Path

    from quark_backends.store.databases.connection import StoreConnection
    from quark_backends.store.databases.layout import StoreLayout
    from quark_backends.store.databases.postgres import PostgresDatabase
    from quark_backends.store.reading.search import RunFinder
    from quark_backends.store.upkeep.trash import StoreTrash
    from quark_core.backends.contract import Batch, Generation
    from quark_core.backends.curves import (
        Cursor,
        CurveQuery,
        CurveSet,
        RunChanges,
        RunHeads,
    )
    from quark_core.backends.edits import BelongingEdit, RunEdit, StoredGroup, StoredProject
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.runs import StopRequest

_log = logging.getLogger("quark")

T = TypeVar("T")


class _Writing(Protocol):
    """How a database is written to."""

    let_go: set[str]
    """See `RunStore.let_go`."""

    def write_group(self, batches: Sequence[Batch], /) -> None:
        """See `RunStore.write_group`."""

    def write_generation(self, generation: Generation, /) -> int:
        """See `RunStore.write_generation`."""

    def edit_run(self, run_id: str, edit: RunEdit, by: str, /) -> None:
        """See `SupportsEdits.edit_run`."""

    def request_stop(self, run_id: str, by: str, reason: str | None, /) -> StopRequest:
        """See `SupportsEdits.request_stop`."""

    def change(self, apply: Callable[[StoreConnection], None], /) -> None:
        """Run a function that changes the store in one transaction of its own."""

    def coordinate(self, apply: Callable[[StoreConnection], T], /) -> T:
        """As `change`, of what is done often and quickly."""

    def coordinate_together(self, calls: Sequence[Callable[[], Any]], /) -> list[Any]:
        """See `RunStore.coordinate_together`."""

    def close(self) -> None:
        """Give up what is open."""


class RunStore(KeepsSweeps):
    """Reads and writes one store; may be used from any thread, by many at once.

    Use `over_sqlite` or `over_postgres`.

    Args:
        connect: Opens a connection for reading.
        connect_compaction: Opens a connection for compaction.
        writing: How it is written to.
        make_finder: Makes what searches it.
        make_trash: Makes what measures and removes runs.
        gate: Lets compaction wait for those who write in this process; None where nothing is
            written, and nothing compacted.
        path: The database file, where it is one.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], StoreConnection],
        connect_compaction: Callable[[], StoreConnection],
        writing: _Writing,
        make_finder: Callable[[], RunFinder],
        make_trash: Callable[[], StoreTrash],
        gate: WriteGate | None,
        path: Path | None = None,
    ) -> None:
        self._writing = writing
        self._readers = ReaderPool(connect, path, follows=gate is None)
        self._make_finder = make_finder
        self._make_trash = make_trash
        self._finder: RunFinder | None = None
        self._lock = threading.Lock()
        self._compaction = None if gate is None else BackgroundCompaction(connect_compaction, gate)
        if self._compaction is not None:
            # Whoever wrote here before may have left some of it.
            self._compaction.resume()

    @classmethod
    def over_sqlite(cls, layout: StoreLayout, *, read_only: bool = False) -> RunStore:
        """The store in a folder that `ensure_store` made.

        Args:
            layout: The store.
            read_only: Nothing is written to any run, and nothing compacted: for who looks on,
                also where nothing may be written. An older store is migrated, or read from a
                migrated copy where it may not be; whatever takes the file's place is read then.

        Raises:
            SessionStoreError: It cannot be opened, or a newer Quark wrote it (the message
                gives both versions).
        """
        from quark_backends.store.databases.sqlite import connect

        gate = None if read_only else WriteGate()
        read = partial(connect, layout, read_only=True)
        if read_only:
            # What cannot be read is told now, and not by the first read.
            read().close()

        def make_finder() -> RunFinder:
            from quark_backends.store.reading.search import RunFinder

            return RunFinder(read)

        def make_trash() -> StoreTrash:
            from quark_backends.store.upkeep.trash import RunTrash

            return RunTrash(layout, read_only=read_only)

        write = partial(connect, layout)
        return cls(
            connect=read,
            connect_compaction=write,
            writing=_NoWriting() if gate is None else _SqliteWriting(layout, gate),
            make_finder=make_finder,
            make_trash=make_trash,
            gate=gate,
            path=layout.db_path,
        )

    @classmethod
    def over_postgres(cls, database: PostgresDatabase, *, read_only: bool = False) -> RunStore:
        """The store in a schema that has its tables; the database is closed by who made it.

        Args:
            database: The schema.
            read_only: Nothing is written to any run, and nothing compacted.
        """

        def make_finder() -> RunFinder:
            from quark_backends.store.reading.search import RunFinder

            return RunFinder(begin=database.begin_search)

        def make_trash() -> StoreTrash:
            from quark_backends.store.upkeep.trash import SharedTrash

            return SharedTrash(database)

        return cls(
            connect=database.connect,
            connect_compaction=database.connect,
            writing=_NoWriting() if read_only else _PostgresWriting(database),
            make_finder=make_finder,
            make_trash=make_trash,
            gate=None if read_only else WriteGate(),
        )

    @property
    def trash(self) -> StoreTrash:
        """Measures and removes its runs."""
        return self._make_trash()

    @property
    def let_go(self) -> set[str]:
        """Removed runs whose late batches `write_group` has acknowledged, and not stored."""
        return self._writing.let_go

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
        if self._compaction is not None:
            self._compaction.note(len(batches), sum(batch.count for batch in batches))

    def write_generation(self, generation: Generation) -> int:
        """Store outputs of an analyzer; see `SupportsGenerations`."""
        return self._writing.write_generation(generation)

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`."""
        self._writing.edit_run(run_id, edit, by)
        return self.load_run(run_id)

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`."""
        return self._writing.request_stop(run_id, by, reason)

    def list_groups(
        self, project: str | None = None, store_name: str | None = None
    ) -> list[StoredGroup]:
        """See `SupportsBelonging`; of the runs of one storage root's label."""
        with self._readers.take() as reader:
            return reader.list_groups(project, store_name)

    def load_project(self, project: str, store_name: str | None = None) -> StoredProject:
        """See `SupportsBelonging`; of the runs of one storage root's label."""
        with self._readers.take() as reader:
            return reader.load_project(project, store_name)

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """See `SupportsBelonging`."""
        self._writing.change(lambda connection: store_project_edit(connection, project, edit))
        _log.info("project %r was updated by %s", project, by)
        return self.load_project(project)

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """See `SupportsBelonging`."""
        self._writing.change(lambda connection: store_group_edit(connection, project, path, edit))
        _log.info("group %r of project %r was updated by %s", path, project, by)
        with self._readers.take() as reader:
            return reader.load_group(project, path)

    def _coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        return self._writing.coordinate(apply)

    def coordinate_together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make calls of `SupportsCoordination` one after the other; in SQLite one sync is for all.

        Args:
            calls: Each calls a method of this store.

        Returns:
            Of each what it returned or raised; none of them may be answered sooner.
        """
        return self._writing.coordinate_together(calls)

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`."""
        with self._readers.take() as reader:
            return reader.find_stop(run_id)

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        with self._readers.take() as reader:
            return reader.read(run_id, kind, query)

    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """See `SupportsSeries`."""
        with self._readers.take() as reader:
            return reader.read_series(
                run_id, key, max_points=max_points, all_attempts=all_attempts, rank=rank
            )

    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """See `SupportsGrid`."""
        with self._readers.take() as reader:
            return reader.read_grid(run_id, query)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; holds a connection until it is read to its end or closed."""
        return self._readers.any.iterate(run_id, kind, query, rows=rows)

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        with self._readers.take() as reader:
            return reader.read_series_many(run_id, query)

    def read_heads(self, run_id: str) -> RunHeads:
        """See `SupportsChanges`."""
        with self._readers.take() as reader:
            return reader.read_heads(run_id)

    def read_changes(
        self,
        run_id: str,
        cursor: Cursor,
        *,
        kinds: Sequence[str],
        keys: Sequence[str] | None = None,
        all_attempts: bool = False,
        max_rows: int,
    ) -> RunChanges:
        """See `SupportsChanges`."""
        with self._readers.take() as reader:
            return reader.read_changes(
                run_id,
                cursor,
                kinds=kinds,
                keys=keys,
                all_attempts=all_attempts,
                max_rows=max_rows,
            )

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`."""
        return self._readers.read_mark(run_id)

    def read_batches(self, run_id: str, writer_id: str, *bounds: int) -> list[Batch]:
        """See `StoreReader.read_batches`."""
        with self._readers.take() as reader:
            return reader.read_batches(run_id, writer_id, *bounds)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        with self._readers.take() as reader:
            return reader.read_outputs(run_id, kind, analyzer)

    def iterate_outputs(
        self, run_id: str, kind: str, analyzer: str | None = None, *, limit: int | None = None
    ) -> Iterator[Columns]:
        """See `StoreReader.iterate_outputs`; holds a connection as `iterate` does."""
        return self._readers.any.iterate_outputs(run_id, kind, analyzer, limit=limit)

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

    def measure_runs(self, **which: Any) -> list[int]:
        """See `StoreReader.measure_runs`."""
        with self._readers.take() as reader:
            return reader.measure_runs(**which)

    def iterate_search(
        self, search: RunSearch, store_name: str | None = None, *, start: int = 0
    ) -> Generator[RunSummary, None, None]:
        """See `RunFinder.iterate_search`."""
        return self._find().iterate_search(search, store_name, start=start)

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """See `RunFinder.search`."""
        return self._find().search(search, store_name)

    def search_page(self, search: PageSearch, store_name: str | None = None) -> RunPage:
        """See `RunFinder.search_page`."""
        return self._find().search_page(search, store_name)

    def list_names(
        self, project: str | None, text: str, limit: int, store_name: str | None = None
    ) -> RunNames:
        """See `RunFinder.list_names`."""
        return self._find().list_names(project, text, limit, store_name)

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return self._find().summarize(run_id)

    def close(self) -> None:
        """End compaction and give up what is open; nothing may be called meanwhile or later."""
        if self._compaction is not None:
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
            if self._compaction is None:
                self._finder.follow(self._readers.look())
            return self._finder


def _call(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - handed to whoever asked
        return error


class _NoWriting:
    """Refuses what is to be written."""

    def __init__(self) -> None:
        self.let_go: set[str] = set()

    def write_group(self, _batches: Sequence[Batch], /) -> None:
        raise BackendUnavailable("the store was opened for reading only")

    def write_generation(self, _generation: Generation, /) -> int:
        raise BackendUnavailable("the store was opened for reading only")

    def edit_run(self, _run_id: str, _edit: RunEdit, _by: str, /) -> None:
        raise BackendUnavailable("the store was opened for reading only")

    def request_stop(self, _run_id: str, _by: str, _reason: str | None, /) -> StopRequest:
        raise BackendUnavailable("the store was opened for reading only")

    def change(self, _apply: Callable[[StoreConnection], None], /) -> None:
        raise BackendUnavailable("the store was opened for reading only")

    def coordinate(self, _apply: Callable[[StoreConnection], T], /) -> T:
        raise BackendUnavailable("the store was opened for reading only")

    def coordinate_together(self, calls: Sequence[Callable[[], Any]], /) -> list[Any]:
        return [_call(each) for each in calls]

    def close(self) -> None:
        """Nothing is open."""


class _SqliteWriting:
    """One writer at a time: SQLite has no more."""

    def __init__(self, layout: StoreLayout, gate: WriteGate) -> None:
        from quark_backends.store.databases.sqlite import connect

        self._connect = partial(connect, layout)
        self._layout = layout
        self._connection: StoreConnection | None = self._connect()
        self._files = OpenFiles(layout)
        self._turns = SqliteTurns(layout)
        self._ingest = BatchIngest(self._connection)
        self.let_go = self._ingest.let_go
        self._gate = gate

    def write_group(self, batches: Sequence[Batch]) -> None:
        with self._gate.write():
            if self._connection is None:
                raise BackendUnavailable("the store was closed")
            if self._files.find_lost():
                self._begin_anew()
            self._ingest.write(batches)
            self._files.note()

    def _begin_anew(self) -> None:
        """Go on with the files that have taken the place of ours."""
        assert self._connection is not None
        try:
            connection = self._connect()
        except SessionStoreError as error:
            raise BackendUnavailable(str(error)) from error
        self._connection.close()
        self._connection = connection
        self._files = OpenFiles(self._layout)
        self._ingest = BatchIngest(connection, let_go=self.let_go)

    def write_generation(self, generation: Generation) -> int:
        with self._gate.write(), closing(self._connect()) as connection:
            return write_generation(connection, generation)

    def edit_run(self, run_id: str, edit: RunEdit, by: str) -> None:
        with self._gate.write(), closing(self._connect()) as connection, editing(connection):
            store_edit(connection, run_id, edit, by)

    def request_stop(self, run_id: str, by: str, reason: str | None) -> StopRequest:
        with self._gate.write(), closing(self._connect()) as connection, editing(connection):
            return store_stop(connection, run_id, by, reason)

    def change(self, apply: Callable[[StoreConnection], None]) -> None:
        with self._gate.write(), closing(self._connect()) as connection, editing(connection):
            apply(connection)

    def coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        # Nobody has to wait for the disk's sync, but who is answered.
        with self._turns.syncing(), self._gate.write():
            return self._turns.run(apply)

    def coordinate_together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        try:
            with self._turns.syncing():
                return [_call(each) for each in calls]
        except SessionStoreError as error:
            return [error] * len(calls)

    def close(self) -> None:
        self._turns.close()
        with self._gate.write():
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class _PostgresWriting:
    """As many writers as there are connections; those of one run take turns in the database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self.let_go: set[str] = set()

    def write_group(self, batches: Sequence[Batch]) -> None:
        try:
            self._database.run(lambda connection: self._write(connection, batches))
        except SessionStoreError as error:
            # What is stored already cannot be read here now, and may be later.
            raise BackendUnavailable(str(error)) from error

    def write_generation(self, generation: Generation) -> int:
        return self._database.run(lambda connection: store_generation(connection, generation))

    def edit_run(self, run_id: str, edit: RunEdit, by: str) -> None:
        self._database.run(lambda connection: store_edit(connection, run_id, edit, by))

    def request_stop(self, run_id: str, by: str, reason: str | None) -> StopRequest:
        return self._database.run(lambda connection: store_stop(connection, run_id, by, reason))

    def change(self, apply: Callable[[StoreConnection], None]) -> None:
        self._database.run(apply)

    def coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        return self._database.run(apply)

    def coordinate_together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return [_call(each) for each in calls]

    def _write(self, connection: StoreConnection, batches: Sequence[Batch]) -> None:
        ingest = BatchIngest(connection, self._database.known_names, self.let_go)
        ingest.write_once(batches)

    def close(self) -> None:
        """The database outlives its stores."""
