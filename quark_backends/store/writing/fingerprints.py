"""What runs are searched by besides: the newest fingerprint of each subject and key."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.encoding.bodies import open_body
from quark_core.errors import SchemaValidationError
from quark_core.records.attempts import HiddenRows
from quark_core.records.codec import DecodedBody
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord

_log = logging.getLogger("quark")

_FIELDS = ("subject", "key", "digest", "level", "step", "sketch", "time_us", "sequence")
_UPSERT = """
INSERT INTO run_fingerprint (run_pk, subject, key, digest, level, step, sketch, time_us, sequence,
    attempt, rank)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run_pk, subject, key) DO UPDATE SET digest = excluded.digest, level = excluded.level,
    step = excluded.step, sketch = excluded.sketch, time_us = excluded.time_us,
    sequence = excluded.sequence, attempt = excluded.attempt, rank = excluded.rank
WHERE (excluded.attempt, -excluded.rank, excluded.time_us, excluded.sequence)
    >= (run_fingerprint.attempt, -run_fingerprint.rank, run_fingerprint.time_us,
        run_fingerprint.sequence)
"""

_Row = tuple[Any, ...]


def apply_fingerprints(
    connection: StoreConnection,
    run_pk: int,
    attempt: int,
    rank: int,
    body: DecodedBody,
    hidden: HiddenRows | None,
) -> None:
    """Take note of a batch's fingerprints, inside the caller's transaction.

    Args:
        connection: The store.
        run_pk: The run.
        attempt, rank: Of the writer.
        body: The batch.
        hidden: Which of its rows a later attempt has hidden.
    """
    newest: dict[tuple[str, str], _Row] = {}
    for row in _list_rows([body.to_list(name) for name in _FIELDS], hidden):
        known = newest.get((row[0], row[1]))
        if known is None or row[-2:] >= known[-2:]:
            newest[row[0], row[1]] = row
    _write(connection, run_pk, attempt, rank, newest.values())


def rebuild_fingerprints(connection: StoreConnection, run_pk: int) -> None:
    """Find a run's newest fingerprints again, of all that is stored of it and not hidden.

    Inside the caller's transaction. What cannot be read is left out, with a warning.
    """
    connection.execute("DELETE FROM run_fingerprint WHERE run_pk = ?", (run_pk,))
    connection.execute("UPDATE run SET code_digest = NULL WHERE pk = ?", (run_pk,))
    writers = connection.execute(
        "SELECT pk, attempt, rank, hidden_step, sequence FROM writer"
        " LEFT JOIN hidden ON writer_pk = pk AND kind = ? WHERE run_pk = ?",
        (FingerprintRecord.KIND, run_pk),
    ).fetchall()
    for writer_pk, attempt, rank, hidden_step, sequence in writers:
        hidden = None if hidden_step is None else HiddenRows(hidden_step, sequence)
        for columns in _load(connection, writer_pk):
            _write(connection, run_pk, attempt, rank, _list_rows(columns, hidden))


def _load(connection: StoreConnection, writer_pk: int) -> Iterator[list[Sequence[Any]]]:
    """The fields of a writer's fingerprints, of each batch and chunk."""
    mine = (writer_pk, FingerprintRecord.KIND)
    batches = connection.execute(
        "SELECT digest, body FROM batch WHERE writer_pk = ? AND kind = ? ORDER BY number", mine
    ).fetchall()
    chunks = connection.execute(
        "SELECT body FROM chunk WHERE writer_pk = ? AND kind = ? ORDER BY first_sequence", mine
    ).fetchall()
    for digest, body in batches:
        try:
            opened = open_body(body, digest)
            yield [opened.to_list(name) for name in _FIELDS]
        except SchemaValidationError as error:
            _log.warning("a batch of fingerprints cannot be read: %s", error)
    if not chunks:
        return
    from quark_backends.store.encoding.chunks import decode_chunk

    for (body,) in chunks:
        try:
            chunk = decode_chunk(FingerprintRecord.KIND, body)
            columns = {name: chunk.array(name).tolist() for name in _FIELDS}
        except SchemaValidationError as error:
            _log.warning("a chunk of fingerprints cannot be read: %s", error)
            continue
        # Of integers, what is missing is below zero there.
        columns["step"] = [None if step < 0 else step for step in columns["step"]]
        yield [columns[name] for name in _FIELDS]


def _list_rows(columns: Sequence[Sequence[Any]], hidden: HiddenRows | None) -> Iterator[_Row]:
    for row in zip(*columns, strict=True):
        subject, key, digest, level, step, sketch, time_us, sequence = row
        if hidden is None or not hidden.is_hidden(step, sequence):
            kept = None if sketch is None else json.dumps(sketch)
            yield subject, key, digest, level, step, kept, time_us, sequence


def _write(
    connection: StoreConnection, run_pk: int, attempt: int, rank: int, rows: Iterable[_Row]
) -> None:
    found = [(run_pk, *row, attempt, rank) for row in rows]
    if not found:
        return
    connection.executemany(_UPSERT, found)
    if any(row[1:3] == ("code", SOURCES_KEY) for row in found):
        connection.execute(
            "UPDATE run SET code_digest = (SELECT digest FROM run_fingerprint WHERE run_pk = ?"
            " AND subject = 'code' AND key = ?) WHERE pk = ?",
            (run_pk, SOURCES_KEY, run_pk),
        )
