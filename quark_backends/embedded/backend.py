"""The embedded store as a backend."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from quark_backends.store.background import BackgroundCompaction, WriteGate
from quark_backends.store.database import connect, ensure_store, find_store, no_database
from quark_backends.store.generations import write_generation
from quark_backends.store.ingest import BatchIngest
from quark_backends.store.payloads import KeepsPayloads
from quark_backends.store.reader import StoreReader
from quark_backends.store.trash import RunTrash, SupportsTrash
from quark_core.backend import BackendConfig, Batch, Generation, RunLocation, StoredRun
from quark_core.errors import BackendUnavailable, SessionStoreError

if TYPE_CHECKING:
    from quark_backends.store.search import RunFinder
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = ["EmbeddedBackend"]


class EmbeddedBackend(SupportsTrash, KeepsPayloads):
    """One run's connection to the store under its storage root.

    Writing belongs to the lane's thread; reading goes over a connection of
    its own and outlives `close()`.

    Raises:
        SessionStoreError: The store cannot be made or opened, or there is
            none and `read_only` was asked for.
    """

    def __init__(self, config: BackendConfig) -> None:
        found = find_store(config.storage_dir)
        if config.read_only:
            if found is None:
                raise SessionStoreError(
                    f"storage_dir {config.storage_dir} holds no Quark store (no .quark folder)"
                )
            if not found.db_path.exists():
                raise no_database(found)
        self._layout = found if config.read_only and found else ensure_store(config.storage_dir)
        self._trash = RunTrash(self._layout, read_only=config.read_only)
        self._reader = StoreReader(lambda: connect(self._layout, read_only=True))
        self._finder: RunFinder | None = None
        self._connection: sqlite3.Connection | None = None
        self._ingest: BatchIngest | None = None
        self._gate = WriteGate()
        self._compaction = BackgroundCompaction(lambda: connect(self._layout), self._gate)
        if not config.read_only:
            self._connection = connect(self._layout)
            self._ingest = BatchIngest(self._connection)

    def write(self, batch: Batch) -> None:
        """Store one batch and sync it."""
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store several batches in one transaction and sync them."""
        if self._ingest is None:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")
        with self._gate.write():
            self._ingest.write(batches)
        self._compaction.note(len(batches))

    def close(self) -> None:
        """End compaction, wherever it is, and give up the writing connection."""
        self._compaction.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = self._ingest = None

    def locate(self, run_id: str) -> RunLocation:
        """Where a run lies."""
        return RunLocation(
            store_root=self._layout.root,
            db_path=self._layout.db_path,
            run_path=str(self._layout.run_path(run_id)),
        )

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        return self._reader.read(run_id, kind, query)

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """See `SupportsSeries`."""
        return self._reader.read_series(
            run_id, key, max_points=max_points, all_attempts=all_attempts
        )

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`."""
        return self._reader.iterate(run_id, kind, query, rows=rows)

    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`."""
        found = self._find().search(search)
        return [self._layout.place_summary(summary) for summary in found]

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return self._layout.place_summary(self._find().summarize(run_id))

    def _find(self) -> RunFinder:
        if self._finder is None:
            # SQLAlchemy is loaded by who searches only.
            from quark_backends.store.search import RunFinder

            self._finder = RunFinder(lambda: connect(self._layout, read_only=True))
        return self._finder

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        return self._reader.read_batches(run_id, writer_id, start, limit)

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        if self._ingest is None:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")
        with closing(connect(self._layout)) as connection:
            return write_generation(connection, generation)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        return self._reader.read_outputs(run_id, kind, analyzer)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return self._layout.place(self._reader.load_run(run_id))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        runs = self._reader.list_runs(project=project, limit=limit)
        return [self._layout.place(stored) for stored in runs]
