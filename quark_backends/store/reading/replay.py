"""Gives a mirror that is behind the batches that the journal had to let go."""

from __future__ import annotations

import logging
from itertools import accumulate

import numpy as np

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.encoding.chunks import BatchSpan, decode_spans
from quark_backends.store.reading.stored_rows import StoredRows, WriterRow
from quark_core.backends.contract import Batch
from quark_core.errors import SchemaValidationError
from quark_core.records.codec import encode_records
from quark_core.records.columns import Columns
from quark_core.records.query import Query

_log = logging.getLogger("quark")

_ALL = Query(all_attempts=True)


def replay_batches(
    connection: StoreConnection,
    stored: StoredRows,
    writer: WriterRow,
    start: int,
    limit: int,
    limit_bytes: int | None = None,
) -> list[Batch]:
    """A writer's batches from a number on, in order, at most `limit`, and of so many bytes.

    Of what is larger it is the first.

    A batch that was compacted is made again: the same records under the same
    number, though not the same bytes.
    """
    sizes = dict(
        connection.execute(
            "SELECT number, length(body) FROM batch WHERE writer_pk = ? AND number >= ?"
            " ORDER BY number LIMIT ?",
            (writer.pk, start, limit),
        ).fetchall()
    )
    compacted = _find_spans(connection, writer, start)
    wanted = sorted({*sizes, *compacted})[:limit]
    if limit_bytes is not None:
        totals = accumulate(sizes.get(number, 0) for number in wanted)
        wanted = wanted[: max(1, sum(total <= limit_bytes for total in totals))]
    batches = {
        row[0]: Batch(writer.run_id, writer.writer_id, writer.attempt, writer.rank, *row)
        for row in connection.execute(
            "SELECT number, kind, count, body FROM batch"
            " WHERE writer_pk = ? AND number BETWEEN ? AND ? ORDER BY number",
            (writer.pk, start, wanted[-1] if wanted else start),
        )
    }
    rows: dict[str, Columns] = {}
    out = []
    for number in wanted:
        if number in batches:
            out.append(batches[number])
            continue
        kind, span = compacted[number]
        if kind not in rows:
            spans = [s for k, s in (compacted[n] for n in wanted if n in compacted) if k == kind]
            rows[kind] = _load_rows(stored, writer, kind, spans)
        batch = _make_batch(writer, kind, span, rows[kind])
        if batch is not None:
            out.append(batch)
    return out


def _load_rows(stored: StoredRows, writer: WriterRow, kind: str, spans: list[BatchSpan]) -> Columns:
    """The compacted rows of one kind that spans speak of, and some more."""
    sequences = [sequence for span in spans for sequence in span.sequences]
    low, high = min(sequences), max(sequences)
    entries = [
        entry
        for entry in stored.find_chunks(writer, kind, _ALL)
        if entry.last_sequence >= low and entry.first_sequence <= high
    ]
    return stored.join_chunks(writer, kind, entries)


def _find_spans(
    connection: StoreConnection, writer: WriterRow, start: int
) -> dict[int, tuple[str, BatchSpan]]:
    bodies = connection.execute(
        "SELECT body FROM frame WHERE writer_pk = ? AND last_number >= ?", (writer.pk, start)
    )
    found: dict[int, tuple[str, BatchSpan]] = {}
    for (body,) in bodies:
        try:
            kind, spans = decode_spans(body)
        except SchemaValidationError as error:
            _log.warning("writer %s: batches cannot be given back: %s", writer.writer_id, error)
            continue
        found.update({s.number: (kind, s) for s in spans if s.number >= start})
    return found


def _make_batch(writer: WriterRow, kind: str, span: BatchSpan, rows: Columns) -> Batch | None:
    """The batch with those of its records that can still be read; None where none can."""
    wanted = np.array(span.sequences)
    places = np.searchsorted(rows["sequence"], wanted)
    places, wanted = places[places < rows.count], wanted[places < rows.count]
    records = rows.take(places[rows["sequence"][places] == wanted]).to_records()
    if not records:
        return None
    return Batch(
        writer.run_id,
        writer.writer_id,
        writer.attempt,
        writer.rank,
        span.number,
        kind,
        len(records),
        encode_records(records),
    )
