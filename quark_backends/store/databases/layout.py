"""Where things lie under a storage root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quark_core.artifacts.payload_folder import make_file_name
from quark_core.config.arguments import check_run_id
from quark_core.errors import SchemaValidationError

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun
    from quark_core.backends.run_summary import RunSummary

STORE_FOLDER = ".quark"
"""The store's folder under the storage root."""

MARKER = "store.json"
"""Marks the folder as ours."""

DATABASE = "quark.db"
"""The SQLite file."""

LOG_SUFFIX = "-wal"
"""Ends the name of SQLite's write-ahead log."""

OWNER_SUFFIX = "-owner"
"""Ends the name of the note which file the log was written for."""

_DATABASE_ENDS = ("", "-wal", "-shm", "-journal", OWNER_SUFFIX)
_FOLDERS = ("runs", "trash", "launches")


def name_folder(run_id: str) -> str:
    """The name of a run's folder: its id, or what is harmless of one that only a stranger gives."""
    try:
        return check_run_id(run_id)
    except SchemaValidationError:
        return make_file_name(run_id)


class StoreLayout:
    """The paths of one store."""

    __slots__ = ("_runs", "db_path", "marker", "root")

    def __init__(self, storage_dir: Path) -> None:
        self.root = storage_dir / STORE_FOLDER
        self.db_path = self.root / DATABASE
        self.marker = self.root / MARKER
        self._runs = self.root / "runs"

    def run_path(self, run_id: str) -> Path:
        """The run's own directory."""
        return self._runs / name_folder(run_id)

    @property
    def files(self) -> tuple[Path, ...]:
        """The store's own files and folders; none of them may be a link."""
        database = [self.db_path.with_name(f"{DATABASE}{end}") for end in _DATABASE_ENDS]
        return (self.marker, *database, *(self.root / name for name in _FOLDERS))

    def place(self, stored: StoredRun) -> StoredRun:
        """A run with the directory that it has here: the store may have been copied or moved."""
        path = str(self.run_path(stored.run.id or ""))
        if stored.run.run_path == path:
            return stored
        return replace(stored, run=msgspec.structs.replace(stored.run, run_path=path))

    def place_summary(self, summary: RunSummary) -> RunSummary:
        """A summed-up run with the directory that it has here; see `place`."""
        placed = self.place(summary.stored)
        return summary if placed is summary.stored else replace(summary, stored=placed)
