"""The store of one workspace in a SQLite file."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quark_backends.store.background import BackgroundCompaction, WriteGate
from quark_backends.store.database import connect, ensure_store
from quark_backends.store.generations import write_generation
from quark_backends.store.ingest import BatchIngest
from quark_backends.store.reader import StoreReader
from quark_backends.store.search import RunFinder
from quark_core.backend import Batch, Generation, StoredRun

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = ["SqliteStore", "open_sqlite"]

_READERS = 4


class SqliteStore:
    """Reads over several connections at once, writes over one; see `WorkspaceStore`.

    Args:
        storage_dir: The workspace's storage root; the store is made if there is none.
    """

    def __init__(self, storage_dir: Path) -> None:
        self._layout = layout = ensure_store(storage_dir)
        self._connection = connect(layout)
        self._ingest = BatchIngest(self._connection)
        self._gate = WriteGate()
        self._compaction = BackgroundCompaction(lambda: connect(layout), self._gate)
        self._readers: queue.SimpleQueue[StoreReader] = queue.SimpleQueue()
        for _ in range(_READERS):
            self._readers.put(StoreReader(lambda: connect(layout, read_only=True)))
        self._finder = RunFinder(lambda: connect(layout, read_only=True))

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store batches in one transaction; from one thread at a time."""
        with self._gate.write():
            self._ingest.write(batches)
        self._compaction.note(len(batches))

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        with closing(connect(self._layout)) as connection:
            return write_generation(connection, generation)

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        with self._reader() as reader:
            return reader.read(run_id, kind, query)

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """See `SupportsSeries`."""
        with self._reader() as reader:
            return reader.read_series(run_id, key, max_points=max_points, all_attempts=all_attempts)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`."""
        # It reads over a connection of its own unless the query has a limit.
        reader = StoreReader(lambda: connect(self._layout, read_only=True))
        with closing(reader):
            yield from reader.iterate(run_id, kind, query, rows=rows)

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        with self._reader() as reader:
            return reader.read_batches(run_id, writer_id, start, limit)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        with self._reader() as reader:
            return reader.read_outputs(run_id, kind, analyzer)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._reader() as reader:
            return reader.load_run(run_id)

    def list_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,  # noqa: ARG002 - this version of the store knows none
    ) -> list[StoredRun]:
        """See `SupportsRead`."""
        with self._reader() as reader:
            return reader.list_runs(project=project, limit=limit)

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:  # noqa: ARG002
        """See `SupportsSearch`."""
        return self._finder.search(search)

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return self._finder.summarize(run_id)

    def close(self) -> None:
        """End compaction and give up the connections; called once, when nothing uses them."""
        self._compaction.close()
        self._connection.close()
        for _ in range(_READERS):
            self._readers.get().close()
        self._finder.close()

    @contextmanager
    def _reader(self) -> Iterator[StoreReader]:
        reader = self._readers.get()
        try:
            yield reader
        finally:
            self._readers.put(reader)


def open_sqlite(workspaces: Path) -> Callable[[str], SqliteStore]:
    """What opens the store of a workspace under a folder."""
    return lambda workspace: SqliteStore(workspaces / workspace)
