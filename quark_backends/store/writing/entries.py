"""Logs of texts that workers share: each entry has a number, and none is left out."""

from __future__ import annotations

from collections.abc import Sequence

from quark_backends.store.databases.connection import StoreConnection, writing
from quark_core.backends.coordination import AppendedEntries


def append_entries(
    connection: StoreConnection, log: str, entries: Sequence[str], request_id: str
) -> AppendedEntries:
    """See `SupportsCoordination.append_entries`; of entries that were checked.

    Who appends to the same log at the same moment waits for the row that counts them: so the
    numbers are in the order in which what was written becomes visible.
    """
    with writing(connection):
        connection.execute(
            "INSERT INTO log (pk, name, count) VALUES (?, ?, 0) ON CONFLICT (name) DO NOTHING",
            (connection.new_key(), log),
        )
        log_pk, count = connection.execute(
            f"SELECT pk, count FROM log WHERE name = ?{connection.for_update}", (log,)
        ).fetchone()
        known = connection.execute(
            "SELECT number, appended FROM entry WHERE log_pk = ? AND request_id = ?",
            (log_pk, request_id),
        ).fetchone()
        if known is not None:
            return AppendedEntries(first=known[0], count=known[1])
        connection.executemany(
            "INSERT INTO entry (log_pk, number, text, request_id, appended) VALUES (?, ?, ?, ?, ?)",
            [
                (log_pk, number, text, *((request_id, len(entries)) if first else (None, None)))
                for number, text, first in (
                    (count + place, text, place == 0) for place, text in enumerate(entries)
                )
            ],
        )
        connection.execute("UPDATE log SET count = ? WHERE pk = ?", (count + len(entries), log_pk))
    return AppendedEntries(first=count, count=len(entries))
