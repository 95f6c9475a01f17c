"""What a store of journals alone says where sweeps are asked for: it has none, and can have none.

Two processes on a network file system cannot agree on who has a trial; a journal belongs to
one writer.
"""

# ruff: noqa: ARG002 - they have the arguments of the contract

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from quark_core.backends.coordination import AppendedEntries, NewTrial, TrialWish
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
    from quark_core.system.process import ProcessIdentity


class KeepsNoSweeps(ABC):
    """Has the methods of `SupportsCoordination`; those that would change something refuse it."""

    @abstractmethod
    def _name_store(self) -> str:
        """What messages call the store."""

    def _refuse(self) -> NoReturn:
        from quark_core.backends.coordination import refuse_coordination

        raise refuse_coordination(self._name_store())

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """Refused."""
        self._refuse()

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """Refused."""
        self._refuse()

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """Refused."""
        self._refuse()

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """Refused."""
        self._refuse()

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """Refused."""
        self._refuse()

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """Refused."""
        self._refuse()

    def read_entries(self, log: str, start: int, *, limit: int = 0) -> list[str]:
        """None: there are no logs."""
        del log, start, limit
        return []

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """Refused."""
        self._refuse()

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """Refused."""
        self._refuse()

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """None: there are no sweeps."""
        del project
        return []

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """There is none."""
        from quark_core.backends.coordination import unknown_sweep

        raise unknown_sweep(sweep_id)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """There are none."""
        from quark_core.backends.coordination import unknown_sweep

        raise unknown_sweep(sweep_id)
