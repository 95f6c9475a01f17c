"""How a backend hands what is asked of sweeps, trials and logs on to whatever keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quark_core.backends.coordination import MOST_ENTRIES

if TYPE_CHECKING:
    from quark_core.backends.coordination import (
        AppendedEntries,
        NewTrial,
        SupportsCoordination,
        TrialWish,
    )
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
    from quark_core.system.process import ProcessIdentity

__all__ = ["SharesTrials"]


class SharesTrials:
    """Hands the calls of `SupportsCoordination` on to what keeps a backend's trials."""

    _coordination: SupportsCoordination

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """See `SupportsCoordination`."""
        return self._coordination.open_sweep(project, name, definition, max_failures=max_failures)

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        return self._coordination.update_sweep(sweep_id, state, by=by)

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        return self._coordination.add_trials(sweep_id, trials, key=key)

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
        return self._coordination.claim_trial(
            sweep_id, request_id=request_id, worker=worker, lease_s=lease_s, wish=wish
        )

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """See `SupportsCoordination`."""
        return self._coordination.settle_trial(sweep_id, number, token, result, lease_s=lease_s)

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """See `SupportsCoordination`."""
        return self._coordination.append_entries(log, entries, request_id=request_id)

    def read_entries(self, log: str, start: int, *, limit: int = MOST_ENTRIES) -> list[str]:
        """See `SupportsCoordination`."""
        return self._coordination.read_entries(log, start, limit=limit)

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """See `SupportsCoordination`."""
        return self._coordination.compare_and_set(run_id, field, expect, value, by=by)

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """See `SupportsCoordination`."""
        return self._coordination.compare_and_set_group(project, path, field, expect, value, by=by)

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """See `SupportsCoordination`."""
        return self._coordination.list_sweeps(project)

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        return self._coordination.load_sweep(sweep_id)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        return self._coordination.list_trials(sweep_id, start=start, limit=limit)
