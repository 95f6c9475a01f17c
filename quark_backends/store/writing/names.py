"""Names of metrics, each once in the store."""

from __future__ import annotations

from collections.abc import Iterable

from quark_backends.store.databases.connection import StoreConnection

_MAX_KNOWN = 100_000
# Bound parameters of one statement.
_MANY = 500
_INSERT = "INSERT INTO name (pk, text) VALUES (?, ?) ON CONFLICT (text) DO NOTHING"


class NameTable:
    """Gives names their numbers, over one connection; belongs to its thread.

    Args:
        connection: The store; new names are made in its open transaction.
        known: What is committed of them, which other threads may know too.
    """

    def __init__(self, connection: StoreConnection, known: dict[str, int] | None = None) -> None:
        self._connection = connection
        self._known: dict[str, int] = {} if known is None else known
        # Of the open transaction: nobody else may use what may be taken back.
        self._found: dict[str, int] = {}

    def find(self, text: str) -> int:
        """The number of a name, which is made where it is new."""
        found = self._known.get(text) or self._found.get(text)
        if found is not None:
            return found
        execute = self._connection.execute
        row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        if row is None:
            execute(_INSERT, (self._connection.new_key(), text))
            row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        pk = int(row[0])
        self._found[text] = pk
        return pk

    def find_all(self, texts: Iterable[str]) -> bool:
        """Find names that will be asked for, in few round trips; whether some had to be made."""
        known, found, connection = self._known, self._found, self._connection
        # In one order everywhere: who makes the same names waits, and does not deadlock.
        wanted = sorted(text for text in set(texts) if text not in known and text not in found)
        for is_made in (False, True):
            for start in range(0, len(wanted), _MANY):
                part = wanted[start : start + _MANY]
                if is_made:
                    connection.executemany(_INSERT, [(connection.new_key(), t) for t in part])
                marks = ", ".join("?" * len(part))
                found.update(
                    connection.execute(f"SELECT text, pk FROM name WHERE text IN ({marks})", part)
                )
            wanted = [text for text in wanted if text not in found]
            if not wanted:
                return is_made
        return True

    def keep(self) -> None:
        """The transaction was committed."""
        if self._found:
            if len(self._known) + len(self._found) > _MAX_KNOWN:
                self._known.clear()
            self._known.update(self._found)
            self._found.clear()

    def forget(self) -> None:
        """The transaction was taken back, and with it the names that it made."""
        self._found.clear()
