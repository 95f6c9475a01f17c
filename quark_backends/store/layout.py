"""Where things lie under a storage root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quark_core.backend import StoredRun
    from quark_core.run_summary import RunSummary

__all__ = ["DATABASE", "MARKER", "STORE_FOLDER", "StoreLayout"]

STORE_FOLDER = ".quark"
"""The store's folder under the storage root."""

MARKER = "store.json"
"""Marks the folder as ours."""

DATABASE = "quark.db"
"""The SQLite file."""


class StoreLayout:
    """The paths of one store."""

    __slots__ = ("db_path", "marker", "root")

    def __init__(self, storage_dir: Path) -> None:
        self.root = storage_dir / STORE_FOLDER
        self.db_path = self.root / DATABASE
        self.marker = self.root / MARKER

    def run_path(self, run_id: str) -> Path:
        """The run's own directory."""
        return self.root / "runs" / run_id

    def place(self, stored: StoredRun) -> StoredRun:
        """A run with the directory that it has here: the store may have been copied or moved."""
        path = str(self.run_path(stored.run.id or ""))
        if stored.run.run_path == path:
            return stored
        return replace(stored, run=msgspec.structs.replace(stored.run, run_path=path))

    def place_summary(self, summary: RunSummary) -> RunSummary:
        """A summed-up run with the directory that it has here; see `place`."""
        return replace(summary, stored=self.place(summary.stored))
