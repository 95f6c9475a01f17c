"""Sweeps of a store, for every kind of store that has their tables."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quark_backends.store.databases.connection import (
    SqliteConnection,
    StoreConnection,
    close_with,
    is_busy,
)
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.open_files import OpenFiles
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.databases.turnstile import Turnstile
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from quark_backends.store.reading.reader_pool import ReaderPool
    from quark_core.backends.coordination import AppendedEntries, NewTrial, TrialWish
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
    from quark_core.system.process import ProcessIdentity

__all__ = ["KeepsSweeps", "SqliteTurns"]

_log = logging.getLogger("quark")

T = TypeVar("T")

# Where the database is busy though nobody writes: somebody mends or empties its log.
_PAUSE_S = (0.001, 0.01)
_PATIENCE_S = 10.0
_MOST_ENTRIES = 10_000


class KeepsSweeps(ABC):
    """Implements `SupportsCoordination` over the tables of a store."""

    _readers: ReaderPool

    @abstractmethod
    def _coordinate(self, apply: Callable[[StoreConnection], T]) -> T:
        """Run a function that is a transaction of its own.

        Raises:
            SessionStoreError: The store is busy, full or out of reach.
        """

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing import trials
        from quark_core.backends.coordination import check_sweep

        project, name, kept = check_sweep(project, name, definition, max_failures)
        return self._coordinate(
            lambda connection: trials.open_sweep(connection, project, name, kept, max_failures)
        )

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing import trials

        found = self._coordinate(
            lambda connection: trials.update_sweep(connection, sweep_id, state)
        )
        _log.info("sweep %r of project %r is %s: %s", found.name, found.project, found.state, by)
        return found

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.trials import add_trials
        from quark_core.backends.coordination import check_key, check_new_trials

        checked = check_new_trials(trials)
        check_key(key, "key")
        return self._coordinate(lambda connection: add_trials(connection, sweep_id, checked, key))

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.trials import claim_trial
        from quark_core.backends.coordination import check_key, check_lease

        check_key(request_id, "request_id")
        lease = check_lease(lease_s)
        return self._coordinate(
            lambda connection: claim_trial(connection, sweep_id, request_id, worker, lease, wish)
        )

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.trials import settle_trial
        from quark_core.backends.coordination import check_lease, check_result
        from quark_core.records.sweeps import TrialClaim

        told = None if result is None else check_result(result)
        lease = check_lease(lease_s)
        claim = TrialClaim(sweep_id, number, token)
        return self._coordinate(lambda connection: settle_trial(connection, claim, told, lease))

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.entries import append_entries
        from quark_core.backends.coordination import check_entries, check_key

        checked = check_entries(entries)
        check_key(log, "log")
        check_key(request_id, "request_id")
        return self._coordinate(
            lambda connection: append_entries(connection, log, checked, request_id)
        )

    def read_entries(self, log: str, start: int, *, limit: int = _MOST_ENTRIES) -> list[str]:
        """See `SupportsCoordination`."""
        with self._readers.take() as reader:
            return reader.read_entries(log, start, min(limit, _MOST_ENTRIES))

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.edits import store_field
        from quark_core.backends.coordination import check_exchange

        exchange = check_exchange(field, expect, value)
        return self._coordinate(lambda connection: store_field(connection, run_id, exchange, by))

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """See `SupportsCoordination`."""
        from quark_backends.store.writing.belonging import store_belonging_field
        from quark_core.backends.coordination import check_exchange

        exchange = check_exchange(field, expect, value)
        is_set = self._coordinate(
            lambda connection: store_belonging_field(connection, project, path, exchange)
        )
        if is_set:
            where = f"group {path!r} of project {project!r}" if path else f"project {project!r}"
            _log.info("field %r of %s was set by %s", field, where, by)
        return is_set

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """See `SupportsCoordination`."""
        with self._readers.take() as reader:
            return reader.list_sweeps(project)

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        with self._readers.take() as reader:
            return reader.load_sweep(sweep_id)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        with self._readers.take() as reader:
            return reader.list_trials(sweep_id, start, limit)


class SqliteTurns:
    """One connection by which the threads of a process take turns with other processes.

    Opened when it is first needed, and kept: a claim takes less time than to open one.

    Args:
        layout: The store.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection: SqliteConnection | None = None
        self._close: Callable[[], object] | None = None
        self._files: OpenFiles | None = None
        self._turnstile: Turnstile | None = None

    def run(self, apply: Callable[[StoreConnection], T]) -> T:
        """Run a function that is one transaction; again and again while others write.

        Raises:
            SessionStoreError: The store is busy for longer than 10 s, full or out of reach.
        """
        if self._pid != os.getpid():
            # A fork's connection is its parent's, which must not be closed from here.
            _of_parents.append(self._connection)
            self._begin_anew()
        with self._lock:
            try:
                return self._run(apply)
            except sqlite3.Error as error:
                self._drop()
                raise SessionStoreError(f"the store cannot be written: {error}") from error

    def _run(self, apply: Callable[[StoreConnection], T]) -> T:
        connection = self._open()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                done = apply(connection)
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise
            else:
                assert self._files is not None
                self._files.note()
                return done
            time.sleep(random.uniform(*_PAUSE_S))

    def close(self) -> None:
        """Give the connection up; a later call opens another."""
        if self._pid == os.getpid():
            with self._lock:
                self._drop()

    def _open(self) -> SqliteConnection:
        if self._files is not None and self._files.find_lost():
            self._drop()
        if self._connection is None:
            self._connection = connect(self._layout)
            self._close = close_with(self, self._connection.close)
            self._connection.execute("PRAGMA busy_timeout=0")
            self._turnstile = Turnstile(self._layout.marker)
            self._connection.turnstile = self._turnstile
            self._files = OpenFiles(self._layout)
        return self._connection

    def _drop(self) -> None:
        if self._close is not None:
            self._close()
        if self._turnstile is not None:
            self._turnstile.close()
        self._connection = self._close = self._files = self._turnstile = None


# Connections of the processes that this one was forked from.
_of_parents: list[SqliteConnection | None] = []
