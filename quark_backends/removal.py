"""How a backend hands measuring and removing runs on to whatever does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark_core.backends.edits import (
        Collection,
        CollectionProgress,
        DamagedRecords,
        RunUsage,
        StoreUsage,
        SupportsRemoval,
    )


class SupportsTrash:
    """Hands the calls of `SupportsRemoval` on to a backend's trash."""

    _trash: SupportsRemoval

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`."""
        return self._trash.measure_store()

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        return self._trash.measure_runs(run_ids)

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        return self._trash.list_trash()

    def list_damaged(self) -> list[DamagedRecords]:
        """See `SupportsRemoval`."""
        return self._trash.list_damaged()

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._trash.trash_runs(run_ids)

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`."""
        self._trash.restore_runs(run_ids)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`."""
        return self._trash.collect_trash(
            older_than_s=older_than_s,
            run_ids=run_ids,
            dry_run=dry_run,
            on_progress=on_progress,
        )
