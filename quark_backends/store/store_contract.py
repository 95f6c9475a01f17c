"""Answers that every kind of store gives in the same way: reads, searches, edits."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.reading.reader_pool import ReaderPool
from quark_backends.store.writing.edits import (
    store_edit,
    store_group_edit,
    store_project_edit,
    store_stop,
)
from quark_backends.store.writing.sweeps import KeepsSweeps

if TYPE_CHECKING:
    from quark_core.backends.edits import BelongingEdit, RunEdit, StoredGroup, StoredProject
    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.runs import StopRequest

_log = logging.getLogger("quark")

P = ParamSpec("P")
T = TypeVar("T")


def of_run(
    method: Callable[Concatenate[StoreReader, P], T],
) -> Callable[Concatenate[StoreReads, P], T]:
    """A method of a store that asks a reader the same; its first argument is a run's id."""

    @wraps(method)
    def ask(self: StoreReads, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run_id = str(args[0] if args else kwargs["run_id"])
        return self._ask(run_id, lambda reader: method(reader, *args, **kwargs))

    return ask


def of_store(
    method: Callable[Concatenate[StoreReader, P], T],
) -> Callable[Concatenate[StoreReads, P], T]:
    """A method of a store that asks a reader the same, of all runs."""

    @wraps(method)
    def ask(self: StoreReads, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._ask(None, lambda reader: method(reader, *args, **kwargs))

    return ask


class StoreReads(ABC):
    """Implements the protocols of `quark_core.backends.contract` that read."""

    @abstractmethod
    def _ask(self, run_id: str | None, read: Callable[[StoreReader], T]) -> T:
        """Ask a reader of a run, or of all where it is None."""

    def _search(self, ask: Callable[[StoreReader], T]) -> T:
        """Ask a reader of all runs what is known of them."""
        return self._ask(None, ask)

    def _place(self, stored: StoredRun) -> StoredRun:
        """A run with the directory that it has here."""
        return stored

    def _place_summary(self, summary: RunSummary) -> RunSummary:
        """A summed-up run with the directory that it has here."""
        return summary

    read = of_run(StoreReader.read)
    read_series = of_run(StoreReader.read_series)
    read_series_many = of_run(StoreReader.read_series_many)
    read_heads = of_run(StoreReader.read_heads)
    read_changes = of_run(StoreReader.read_changes)
    read_grid = of_run(StoreReader.read_grid)
    read_batches = of_run(StoreReader.read_batches)
    read_outputs = of_run(StoreReader.read_outputs)
    find_stop = of_run(StoreReader.find_stop)
    list_configurations = of_store(StoreReader.list_configurations)
    list_labels = of_store(StoreReader.list_labels)

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`; by default it is how far the run has come."""
        heads = self.read_heads(run_id)
        return f"{sorted(heads.cursor.items())}/{heads.outputs}"

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return self._place(self._ask(run_id, lambda reader: reader.load_run(run_id)))

    def list_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,
        after: tuple[int, str] | None = None,
    ) -> list[StoredRun]:
        """Runs, newest first; see `StoreReader.list_runs`."""
        found = self._ask(
            None,
            lambda reader: reader.list_runs(
                project=project, limit=limit, store_name=store_name, after=after
            ),
        )
        return list(map(self._place, found))

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """See `StoreReader.search`."""
        found = self._search(lambda reader: reader.search(search, store_name))
        return list(map(self._place_summary, found))

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return self._place_summary(self._search(lambda reader: reader.summarize(run_id)))

    def search_page(self, search: PageSearch, store_name: str | None = None) -> RunPage:
        """See `StoreReader.search_page`."""
        return self._search(lambda reader: reader.search_page(search, store_name))

    def list_names(
        self, project: str | None, text: str, limit: int, store_name: str | None = None
    ) -> RunNames:
        """See `StoreReader.list_names`."""
        return self._search(lambda reader: reader.list_names(project, text, limit, store_name))


class TableStore(KeepsSweeps, StoreReads):
    """A store with tables: several read it at once, and edits of it are transactions.

    Args:
        connect: Opens a connection for reading.
        path: The database file, where it is one.
        follows: Whether what has taken the file's place is read, as `ReaderPool` has it.
    """

    def __init__(
        self, connect: Callable[[], StoreConnection], path: Path | None, *, follows: bool
    ) -> None:
        self._readers = ReaderPool(connect, path, follows=follows)

    @abstractmethod
    def _edit(self, apply: Callable[[StoreConnection], T]) -> T:
        """Run a function that changes the store in one transaction of its own."""

    list_groups = of_store(StoreReader.list_groups)
    load_project = of_store(StoreReader.load_project)
    list_sweeps = of_store(StoreReader.list_sweeps)
    load_sweep = of_store(StoreReader.load_sweep)
    list_trials = of_store(StoreReader.list_trials)
    read_entries = of_store(StoreReader.read_entries)

    def _ask(self, run_id: str | None, read: Callable[[StoreReader], T]) -> T:
        del run_id
        with self._readers.take() as reader:
            return read(reader)

    def _close_readers(self) -> None:
        """Give up what is open for reading; a later read opens it again."""
        self._readers.close()

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`."""
        return self._readers.read_mark(run_id)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; holds a connection until it is read to its end or closed."""
        return self._readers.any.iterate(run_id, kind, query, rows=rows)

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`."""
        self._edit(lambda connection: store_edit(connection, run_id, edit, by))
        return self.load_run(run_id)

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`."""
        return self._edit(lambda connection: store_stop(connection, run_id, by, reason))

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """See `SupportsBelonging`."""
        self._edit(lambda connection: store_project_edit(connection, project, edit))
        _log.info("project %r was updated by %s", project, by)
        return self.load_project(project)

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """See `SupportsBelonging`."""
        self._edit(lambda connection: store_group_edit(connection, project, path, edit))
        _log.info("group %r of project %r was updated by %s", path, project, by)
        return self._ask(None, lambda reader: reader.load_group(project, path))
