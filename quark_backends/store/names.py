"""Names of metrics, each once in the store."""

from __future__ import annotations

import sqlite3

__all__ = ["NameTable"]

_MAX_KNOWN = 100_000


class NameTable:
    """Gives names their numbers, over one connection; belongs to its thread.

    Args:
        connection: The store; new names are made in its open transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._known: dict[str, int] = {}

    def find(self, text: str) -> int:
        """The number of a name, which is made where it is new."""
        found = self._known.get(text)
        if found is not None:
            return found
        execute = self._connection.execute
        row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        if row is None:
            execute("INSERT INTO name (text) VALUES (?) ON CONFLICT (text) DO NOTHING", (text,))
            row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        pk = row[0]
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[text] = pk
        return int(pk)

    def forget(self) -> None:
        """The transaction was taken back, and with it the names that it made."""
        self._known.clear()
