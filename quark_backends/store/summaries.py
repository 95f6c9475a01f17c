"""Makes the summaries of a run again from what is stored of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from quark_backends.store.bodies import open_body
from quark_backends.store.connection import StoreConnection
from quark_backends.store.figures import MetricFold, place_writer
from quark_backends.store.names import NameTable
from quark_backends.store.run_labels import write_config, write_tags
from quark_core.attempts import HiddenRows, can_be_hidden
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord

__all__ = ["find_first_hidden", "rebuild_metrics", "rebuild_summaries"]

_log = logging.getLogger("quark")


def rebuild_summaries(connection: StoreConnection, run_pk: int) -> None:
    """Make metrics, tags, configuration and newest step of a run again.

    Inside the caller's transaction. What cannot be read is left out, with a warning.
    """
    tags, config = connection.execute(
        "SELECT tags, config FROM run WHERE pk = ?", (run_pk,)
    ).fetchone()
    write_tags(connection, run_pk, json.loads(tags))
    write_config(connection, run_pk, {} if config is None else json.loads(config)["values"])
    rebuild_metrics(connection, run_pk)


def rebuild_metrics(
    connection: StoreConnection, run_pk: int, find_name: Callable[[str], int] | None = None
) -> None:
    """Make the figures of a run's metrics and its newest step again."""
    find_name = find_name or NameTable(connection).find
    connection.execute("DELETE FROM run_metric WHERE run_pk = ?", (run_pk,))
    connection.execute("UPDATE run SET newest_step = NULL WHERE pk = ?", (run_pk,))
    fold = MetricFold()
    writers = connection.execute(
        "SELECT pk, attempt, rank, started_us, hidden_step, sequence FROM writer"
        " LEFT JOIN hidden ON writer_pk = pk AND kind = ? WHERE run_pk = ?",
        (MetricRecord.KIND, run_pk),
    ).fetchall()
    for writer_pk, attempt, rank, started_us, hidden_step, sequence in writers:
        hidden = None if hidden_step is None else HiddenRows(hidden_step, sequence)
        place = place_writer(attempt, rank)
        _fold_batches(connection, writer_pk, fold, place, started_us, hidden)
        _fold_chunks(connection, writer_pk, fold, place, started_us, hidden)
    fold.write(connection, run_pk, find_name)


def find_first_hidden(connection: StoreConnection, writer_pk: int, step: int) -> dict[str, int]:
    """For each kind of a writer's records, the lowest sequence at a step or beyond it."""
    found: dict[str, int] = {}

    def note(kind: str, steps: list[int], sequences: list[int]) -> None:
        at = [s for at, s in zip(steps, sequences, strict=True) if at is not None and at >= step]
        if at:
            found[kind] = min(found.get(kind, at[0]), *at)

    batches = connection.execute(
        "SELECT kind, digest, body FROM batch WHERE writer_pk = ?", (writer_pk,)
    )
    for kind, digest, body in batches:
        if not can_be_hidden(kind):
            continue
        try:
            decoded = open_body(body, digest)
            note(kind, decoded.to_list("step"), decoded.to_list("sequence"))
        except SchemaValidationError as error:
            _log.warning("a batch of %s records cannot be read: %s", kind, error)
    from quark_backends.store.chunks import decode_chunk

    chunks = connection.execute(
        "SELECT kind, body FROM chunk WHERE writer_pk = ? AND step_high >= ?", (writer_pk, step)
    )
    for kind, body in chunks:
        if not can_be_hidden(kind):
            continue
        try:
            chunk = decode_chunk(kind, body)
            note(kind, chunk.array("step").tolist(), chunk.array("sequence").tolist())
        except SchemaValidationError as error:
            _log.warning("a chunk of %s records cannot be read: %s", kind, error)
    return found


def _fold_batches(
    connection: StoreConnection,
    writer_pk: int,
    fold: MetricFold,
    place: int,
    started_us: int,
    hidden: HiddenRows | None,
) -> None:
    rows = connection.execute(
        "SELECT number, digest, body FROM batch WHERE writer_pk = ? AND kind = ? ORDER BY number",
        (writer_pk, MetricRecord.KIND),
    )
    for number, digest, body in rows:
        try:
            fold.add_body(open_body(body, digest), place, started_us, hidden)
        except SchemaValidationError as error:
            _log.warning("batch %d of writer %d cannot be read: %s", number, writer_pk, error)


def _fold_chunks(
    connection: StoreConnection,
    writer_pk: int,
    fold: MetricFold,
    place: int,
    started_us: int,
    hidden: HiddenRows | None,
) -> None:
    from quark_backends.store.chunks import decode_chunk

    rows = connection.execute(
        "SELECT chunk.pk, text, body FROM chunk JOIN name ON name.pk = name_pk"
        " WHERE writer_pk = ? AND kind = ?",
        (writer_pk, MetricRecord.KIND),
    )
    for chunk_pk, key, body in rows:
        try:
            chunk = decode_chunk(MetricRecord.KIND, body)
            arrays = {name: chunk.array(name) for name in ("value", "step", "time_us", "sequence")}
        except SchemaValidationError as error:
            _log.warning("chunk %d cannot be read: %s", chunk_pk, error)
            continue
        if hidden is not None:
            kept = ~hidden.find_hidden(arrays["step"], arrays["sequence"])
            arrays = {name: values[kept] for name, values in arrays.items()}
        fold.add_column(key, arrays, place, started_us)
