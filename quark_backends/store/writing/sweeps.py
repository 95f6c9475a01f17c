"""Sweeps of a store, for every kind of store that has their tables."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.writing.edits import store_belonging_field, store_field
from quark_backends.store.writing.trials import (
    add_trials,
    append_entries,
    claim_trial,
    open_sweep,
    settle_trial,
    update_sweep,
)
from quark_core.backends.coordination import (
    AppendedEntries,
    NewTrial,
    TrialWish,
    check_entries,
    check_exchange,
    check_key,
    check_lease,
    check_new_trials,
    check_result,
    check_sweep,
)
from quark_core.records.sweeps import (
    StoredSweep,
    StoredTrial,
    SweepState,
    TrialClaim,
    TrialResult,
)
from quark_core.system.process import ProcessIdentity

_log = logging.getLogger("quark")

T = TypeVar("T")


class KeepsSweeps(ABC):
    """Implements what `SupportsCoordination` changes, over the tables of a store."""

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
        project, name, kept = check_sweep(project, name, definition, max_failures)
        return self._coordinate(
            lambda connection: open_sweep(connection, project, name, kept, max_failures)
        )

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        found = self._coordinate(lambda connection: update_sweep(connection, sweep_id, state))
        _log.info("sweep %r of project %r is %s: %s", found.name, found.project, found.state, by)
        return found

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
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
        check_key(request_id, "request_id")
        lease = check_lease(lease_s)
        return self._coordinate(
            lambda connection: claim_trial(connection, sweep_id, request_id, worker, lease, wish)
        )

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """See `SupportsCoordination`."""
        told = None if result is None else check_result(result)
        lease = check_lease(lease_s)
        claim = TrialClaim(sweep_id, number, token)
        return self._coordinate(lambda connection: settle_trial(connection, claim, told, lease))

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """See `SupportsCoordination`."""
        checked = check_entries(entries)
        check_key(log, "log")
        check_key(request_id, "request_id")
        return self._coordinate(
            lambda connection: append_entries(connection, log, checked, request_id)
        )

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """See `SupportsCoordination`."""
        exchange = check_exchange(field, expect, value)
        return self._coordinate(lambda connection: store_field(connection, run_id, exchange, by))

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """See `SupportsCoordination`."""
        exchange = check_exchange(field, expect, value)
        is_set = self._coordinate(
            lambda connection: store_belonging_field(connection, project, path, exchange)
        )
        if is_set:
            where = f"group {path!r} of project {project!r}" if path else f"project {project!r}"
            _log.info("field %r of %s was set by %s", field, where, by)
        return is_set
