"""Which files an open connection writes to: those at its path, or some that were deleted."""

from __future__ import annotations

import os
from pathlib import Path

from quark_backends.store.databases.connection import SqliteConnection
from quark_backends.store.databases.layout import StoreLayout

__all__ = ["OpenFiles"]

_WITH_DATABASE = ("", "-wal", "-shm")
_DELETED = (-1, -1)


class OpenFiles:
    """Which files an open connection writes to, as their paths were then.

    A file that was deleted stays open, and takes every write: only its path
    tells that nobody else will ever see them. A look costs a few microseconds.

    Args:
        layout: The store, right after it was opened.
    """

    def __init__(self, layout: StoreLayout) -> None:
        path = str(layout.db_path)
        self._known = {path + suffix: identify(path + suffix) for suffix in _WITH_DATABASE}
        if self._known[path] is None:
            self._known[path] = _DELETED  # since it was opened
        self._layout = layout

    def note(self) -> None:
        """Know the files that SQLite makes at the first write."""
        for path, known in self._known.items():
            if known is None:
                self._known[path] = identify(path)

    def find_lost(self) -> list[Path]:
        """Those that are gone, or of which another one has taken the place."""
        return [
            Path(path)
            for path, known in self._known.items()
            if known is not None and identify(path) != known
        ]

    def merge_log(self, connection: SqliteConnection) -> None:
        """Bring into the database what is in its deleted log only.

        Where another process has begun a new log meanwhile, that would harm what
        is in there: what is lost then is in the journals of its runs.
        """
        if identify(f"{self._layout.db_path}-wal") is None:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    @property
    def has_database(self) -> bool:
        """Whether the database itself is the one that was opened."""
        path = str(self._layout.db_path)
        return identify(path) == self._known[path]


def identify(path: str) -> tuple[int, int] | None:
    """Which file a path leads to; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
