"""The embedded store where SQLite may not be used: the journal is the store.

On a network file system a run is kept in its journal, whose segments stay.
Reading plays them into a database in memory, with the tables of the real
one, so every reader works unchanged. `quark sync`, run where the folder lies
on a local disk, makes an ordinary store of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quark_backends.embedded.generation_files import GenerationFiles
from quark_backends.store.connection import SqliteConnection
from quark_backends.store.database import connect_memory, ensure_marker, find_store
from quark_backends.store.ingest import BatchIngest
from quark_backends.store.layout import StoreLayout
from quark_backends.store.payloads import KeepsPayloads
from quark_backends.store.reader import StoreReader, find_run
from quark_backends.store.trash import JournalTrash, SupportsTrash
from quark_core.backend import BackendConfig, Batch, Generation, RunLocation, StoredRun
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import find_folders
from quark_core.delivery.journal_order import order_journals
from quark_core.errors import BackendRejected, BackendUnavailable, SessionStoreError

if TYPE_CHECKING:
    from quark_backends.store.search import RunFinder
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = ["JournalBackend"]


class JournalBackend(SupportsTrash, KeepsPayloads):
    """Serves a storage root out of its journals.

    Raises:
        SessionStoreError: The root cannot be written, or holds a `.quark`
            folder that is not ours.
    """

    keeps_journal = True
    """Tells the stream that the journal's segments must stay."""

    def __init__(self, config: BackendConfig) -> None:
        self._storage_dir = config.storage_dir
        self._read_only = config.read_only
        if config.read_only:
            if find_store(config.storage_dir) is None:
                raise SessionStoreError(
                    f"storage_dir {config.storage_dir} holds no Quark store (no .quark folder)"
                )
        else:
            ensure_marker(config.storage_dir)
        self._layout = StoreLayout(config.storage_dir)
        self._trash = JournalTrash(self._layout)
        self._played: dict[Path, int] = {}
        self._generations: set[Path] = set()
        self._finder: RunFinder | None = None
        self._lock = threading.Lock()
        self._connection: SqliteConnection | None = None
        self._reader = StoreReader(self._connect)

    def write(self, batch: Batch) -> None:
        """Nothing to do: what comes here is in the journal already."""
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Nothing to do, as in `write`."""
        if self._read_only and batches:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")

    def close(self) -> None:
        """Reading goes on; there is nothing else to give up."""

    def locate(self, run_id: str) -> RunLocation:
        """Where a run lies."""
        return RunLocation(
            store_root=self._layout.root,
            db_path=None,
            run_path=str(self._layout.run_path(run_id)),
        )

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        with self._lock:
            self._play()
            return self._reader.read(run_id, kind, query)

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """See `SupportsSeries`."""
        with self._lock:
            self._play()
            return self._reader.read_series(
                run_id, key, max_points=max_points, all_attempts=all_attempts
            )

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; here all of it is in memory anyway."""
        found = self.read(run_id, kind, query)
        for start in range(0, found.count, rows):
            yield found.take(slice(start, start + rows))

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        with self._lock:
            self._play()
            return self._reader.read_batches(run_id, writer_id, start, limit)

    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`."""
        with self._lock:
            self._play()
            found = self._find().search(search)
            return [self._layout.place_summary(summary) for summary in found]

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        with self._lock:
            self._play()
            return self._layout.place_summary(self._find().summarize(run_id))

    def _find(self) -> RunFinder:
        if self._finder is None:
            # SQLAlchemy is loaded by who searches only.
            from quark_backends.store.search import RunFinder

            self._finder = RunFinder(self._connect)
        return self._finder

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        self.load_run(generation.run_id)
        return GenerationFiles(self._layout.run_path(generation.run_id)).write(generation)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        with self._lock:
            self._play()
            run_pk = find_run(self._connect(), run_id)
            files = GenerationFiles(self._layout.run_path(run_id))
            files.play(self._connect(), run_pk, self._generations)
            return self._reader.read_outputs(run_id, kind, analyzer)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._lock:
            self._play()
            return self._layout.place(self._reader.load_run(run_id))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        with self._lock:
            self._play()
            runs = self._reader.list_runs(project=project, limit=limit)
            return [self._layout.place(stored) for stored in runs]

    def _connect(self) -> SqliteConnection:
        if self._connection is None:
            self._connection = connect_memory()
        return self._connection

    def _play(self) -> None:
        """Play what has come into the journals since the last time."""
        ingest = BatchIngest(self._connect())
        for folder, manifest in order_journals(find_folders(self._storage_dir)):
            if manifest.generation:
                continue  # outputs of an analyzer on their way to mirrors; here they are files
            if manifest.awaits_run and not self._has_run(manifest.run_id):
                continue  # the rank that begins the run has not journaled that yet
            for batch in JournalReader(folder.path).read(self._played.get(folder.path, 0)):
                # As in the real store, what is refused is not there.
                with contextlib.suppress(BackendRejected):
                    ingest.write([batch])
                self._played[folder.path] = batch.number + 1

    def _has_run(self, run_id: str) -> bool:
        row = self._connect().execute("SELECT 1 FROM run WHERE id = ?", (run_id,)).fetchone()
        return row is not None
