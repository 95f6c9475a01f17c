"""A store for many callers at once, over SQLite or PostgreSQL: a server has one per workspace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quark_backends.store.databases.connection import OpenFiles
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.databases.write_batching import SqliteTurns
from quark_backends.store.reading.reader import store_generation, write_generation
from quark_backends.store.store_contract import TableStore
from quark_backends.store.upkeep.background_compaction import BackgroundCompaction, WriteGate
from quark_backends.store.writing.edits import editing
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.errors import BackendUnavailable, SessionStoreError

if TYPE_CHECKING:
    from pathlib import Path

    from quark_backends.store.databases.connection import StoreConnection
    from quark_backends.store.databases.layout import StoreLayout
    from quark_backends.store.databases.postgres import PostgresDatabase
    from quark_backends.store.upkeep.trash import StoreTrash
    from quark_core.backends.contract import Batch, Generation
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.columns import Columns
    from quark_core.records.query import RunSearch

T = TypeVar("T")


class RunStore(TableStore):
    """Reads and writes one store; may be used from any thread, by many at once.

    Args:
        connect_reading: Opens a connection for reading.
        connect_writing: Opens a connection for compaction.
        read_only: Nothing is written to any run, and nothing compacted.
        path: The database file, where it is one.

    Attributes:
        let_go: Removed runs whose late batches `write_group` has acknowledged, and not stored.
    """

    def __init__(
        self,
        connect_reading: Callable[[], StoreConnection],
        connect_writing: Callable[[], StoreConnection],
        *,
        read_only: bool,
        path: Path | None = None,
    ) -> None:
        super().__init__(connect_reading, path, follows=read_only)
        self.let_go: set[str] = set()
        self._read_only = read_only
        # Lets compaction wait for those who write in this process.
        self._gate = WriteGate()
        self._compaction: BackgroundCompaction | None = None
        if not read_only:
            self._compaction = BackgroundCompaction(connect_writing, self._gate)
            # Whoever wrote here before may have left some of it.
            self._compaction.resume()

    @property
    @abstractmethod
    def trash(self) -> StoreTrash:
        """Measures and removes its runs."""

    @abstractmethod
    def _write(self, batches: Sequence[Batch]) -> None:
        """Store batches as one."""

    @abstractmethod
    def write_generation(self, generation: Generation) -> int:
        """Store outputs of an analyzer; see `SupportsGenerations`."""

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store batches as one, each exactly once however often it comes; on disk when it returns.

        Raises:
            BackendRejected: One of them can never be stored; none was.
            BackendUnavailable: The store cannot take them now; none was, or
                nobody can tell, and then they are recognised when they come again.
        """
        if not batches:
            return
        self._check_writable()
        self._write(batches)
        if self._compaction is not None:
            self._compaction.note(len(batches), sum(batch.count for batch in batches))

    def _check_writable(self) -> None:
        if self._read_only:
            raise BackendUnavailable("the store was opened for reading only")

    def measure_runs(self, **which: Any) -> list[int]:
        """See `StoreReader.measure_runs`."""
        return self._ask(None, lambda reader: reader.measure_runs(**which))

    def coordinate_together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make calls of `SupportsCoordination` one after the other; in SQLite one sync is for all.

        Args:
            calls: Each calls a method of this store.

        Returns:
            Of each what it returned or raised; none of them may be answered sooner.
        """
        return [_call(each) for each in calls]

    def iterate_outputs(
        self, run_id: str, kind: str, analyzer: str | None = None, *, limit: int | None = None
    ) -> Iterator[Columns]:
        """See `StoreReader.iterate_outputs`; holds a connection as `iterate` does."""
        return self._readers.any.iterate_outputs(run_id, kind, analyzer, limit=limit)

    def iterate_search(
        self, search: RunSearch, store_name: str | None = None, *, start: int = 0
    ) -> Generator[RunSummary, None, None]:
        """See `StoreReader.iterate_search`; holds a connection as `iterate` does."""
        return self._readers.any.iterate_search(search, store_name, start=start)

    def close(self) -> None:
        """End compaction and give up what is open; nothing may be called meanwhile or later."""
        if self._compaction is not None:
            self._compaction.close()
        self._close_writing()
        self._close_readers()

    def _close_writing(self) -> None:
        """Give up what is open for writing."""


def _call(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - handed to whoever asked
        return error


class SqliteRunStore(RunStore):
    """The store in a folder that `ensure_store` made; one writes at a time: SQLite lets no more.

    Args:
        layout: The store.
        read_only: For who looks on, also where nothing may be written. An older store is
            migrated, or read from a migrated copy where it may not be; whatever takes the
            file's place is read then.

    Raises:
        SessionStoreError: It cannot be opened, or a newer Quark wrote it (the message
            gives both versions).
    """

    def __init__(self, layout: StoreLayout, *, read_only: bool = False) -> None:
        read = partial(connect, layout, read_only=True)
        self._layout = layout
        self._connect = partial(connect, layout)
        self._connection: StoreConnection | None = None
        if read_only:
            # What cannot be read is told now, and not by the first read.
            read().close()
        else:
            self._open()
        self._turns = SqliteTurns(layout)
        super().__init__(read, self._connect, read_only=read_only, path=layout.db_path)
        if not read_only:
            self.let_go = self._ingest.let_go

    def _open(self, let_go: set[str] | None = None) -> None:
        self._connection = self._connect()
        self._files = OpenFiles(self._layout)
        self._ingest = BatchIngest(self._connection, let_go=let_go)

    @property
    def trash(self) -> StoreTrash:
        """See `RunStore`."""
        from quark_backends.store.upkeep.trash import RunTrash

        return RunTrash(self._layout, read_only=self._read_only)

    def _write(self, batches: Sequence[Batch]) -> None:
        with self._gate.write():
            before = self._connection
            if before is None:
                raise BackendUnavailable("the store was closed")
            if self._files.find_lost():
                # Others have taken the place of ours.
                try:
                    self._open(self.let_go)
                except SessionStoreError as error:
                    raise BackendUnavailable(str(error)) from error
                before.close()
            self._ingest.write(batches)
            self._files.note()

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        self._check_writable()
        with self._gate.write(), closing(self._connect()) as connection:
            return write_generation(connection, generation)

    def _edit(self, apply: Callable[[StoreConnection], T]) -> T:
        self._check_writable()
        with self._gate.write(), closing(self._connect()) as connection, editing(connection):
            return apply(connection)

    def _coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        self._check_writable()
        # Nobody has to wait for the disk's sync, but who is answered.
        with self._turns.syncing(), self._gate.write():
            return self._turns.run(apply)

    def coordinate_together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """See `RunStore`."""
        try:
            with self._turns.syncing():
                return super().coordinate_together(calls)
        except SessionStoreError as error:
            return [error] * len(calls)

    def _close_writing(self) -> None:
        self._turns.close()
        with self._gate.write():
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class PostgresRunStore(RunStore):
    """The store in a schema that has its tables; those who write one run take turns in there.

    Args:
        database: The schema; it is closed by who made it.
        read_only: Nothing is written to any run, and nothing compacted.
    """

    def __init__(self, database: PostgresDatabase, *, read_only: bool = False) -> None:
        self._database = database
        super().__init__(database.connect, database.connect, read_only=read_only)

    @property
    def trash(self) -> StoreTrash:
        """See `RunStore`."""
        from quark_backends.store.upkeep.trash import SharedTrash

        return SharedTrash(self._database)

    def _write(self, batches: Sequence[Batch]) -> None:
        def write(connection: StoreConnection) -> None:
            ingest = BatchIngest(connection, self._database.known_names, self.let_go)
            ingest.write_once(batches)

        try:
            self._database.run(write)
        except SessionStoreError as error:
            # What is stored already cannot be read here now, and may be later.
            raise BackendUnavailable(str(error)) from error

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        return self._edit(lambda connection: store_generation(connection, generation))

    def _edit(self, apply: Callable[[StoreConnection], T]) -> T:
        self._check_writable()
        return self._database.run(apply)

    _coordinate = _edit
