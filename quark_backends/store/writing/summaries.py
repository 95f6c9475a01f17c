"""What runs are searched by: tags and configuration, and all summaries made again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.encoding.bodies import open_body
from quark_backends.store.reading.attempt_reaches import (
    AttemptReaches,
    find_hidden_metrics,
    load_attempt_writers,
)
from quark_backends.store.writing.fork_figures import add_fork_figures
from quark_backends.store.writing.metric_figures import MetricFold, place_writer
from quark_backends.store.writing.names import NameTable
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows, can_be_hidden

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
    rebuild_metrics(connection, run_pk, knows_forks=False)


def rebuild_metrics(
    connection: StoreConnection,
    run_pk: int,
    find_name: Callable[[str], int] | None = None,
    *,
    knows_forks: bool = True,
) -> None:
    """Make the figures of a run's metrics and its newest step again.

    Args:
        connection: The store.
        run_pk: The run.
        find_name: Gives the number of a metric's name.
        knows_forks: Whether the tables say what is a fork, as those of an older version do not.
    """
    find_name = find_name or NameTable(connection).find
    connection.execute("DELETE FROM run_metric WHERE run_pk = ?", (run_pk,))
    connection.execute("UPDATE run SET newest_step = NULL WHERE pk = ?", (run_pk,))
    fold = MetricFold()
    writers = connection.execute(
        "SELECT pk, attempt, rank, started_us, hidden_step, sequence FROM writer"
        " LEFT JOIN hidden ON writer_pk = pk AND kind = ? WHERE run_pk = ?",
        (MetricRecord.KIND, run_pk),
    ).fetchall()
    others, reaches = load_attempt_writers(connection, run_pk), AttemptReaches()
    for writer_pk, attempt, rank, started_us, hidden_step, sequence in writers:
        hidden = find_hidden_metrics(connection, reaches, others, writer_pk, hidden_step, sequence)
        place = place_writer(attempt, rank)
        fold_batches(connection, writer_pk, fold, place, started_us, hidden)
        chunks = connection.execute(
            "SELECT pk FROM chunk WHERE writer_pk = ? AND kind = ?", (writer_pk, MetricRecord.KIND)
        ).fetchall()
        fold_chunks(connection, [pk for (pk,) in chunks], fold, place, started_us, hidden)
    if knows_forks:
        add_fork_figures(connection, run_pk, find_name)
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
    from quark_backends.store.encoding.chunks import decode_chunk

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


def fold_batches(
    connection: StoreConnection,
    writer_pk: int,
    fold: MetricFold,
    place: int,
    started_us: int,
    hidden: HiddenRows | None,
) -> None:
    """Add the points of a writer's batches that are not compacted and not hidden."""
    rows = connection.execute(
        "SELECT number, digest, body FROM batch WHERE writer_pk = ? AND kind = ? ORDER BY number",
        (writer_pk, MetricRecord.KIND),
    )
    for number, digest, body in rows:
        try:
            fold.add_body(open_body(body, digest), place, started_us, hidden)
        except SchemaValidationError as error:
            _log.warning("batch %d of writer %d cannot be read: %s", number, writer_pk, error)


def fold_chunks(
    connection: StoreConnection,
    chunk_pks: Sequence[int],
    fold: MetricFold,
    place: int,
    started_us: int,
    hidden: HiddenRows | None,
) -> None:
    """Add the points of chunks of one writer that are not hidden."""
    from quark_backends.store.encoding.chunks import decode_chunk

    for chunk_pk in chunk_pks:
        key, body = connection.execute(
            "SELECT text, body FROM chunk JOIN name ON name.pk = name_pk WHERE chunk.pk = ?",
            (chunk_pk,),
        ).fetchone()
        try:
            chunk = decode_chunk(MetricRecord.KIND, body)
            arrays = {name: chunk.array(name) for name in ("value", "step", "time_us", "sequence")}
            epochs = chunk.array("epoch") if hidden is not None and hidden.reaches else None
        except SchemaValidationError as error:
            _log.warning("chunk %d cannot be read: %s", chunk_pk, error)
            continue
        if hidden is not None:
            kept = ~hidden.find_hidden(arrays["step"], arrays["sequence"], epochs, key)
            arrays = {name: values[kept] for name, values in arrays.items()}
        fold.add_column(key, arrays, place, started_us)


def write_tags(connection: StoreConnection, run_pk: int, tags: Iterable[str]) -> None:
    """Make the tags that are searched those of a run."""
    connection.execute("DELETE FROM run_tag WHERE run_pk = ?", (run_pk,))
    connection.executemany(
        "INSERT INTO run_tag (run_pk, tag) VALUES (?, ?)", [(run_pk, tag) for tag in set(tags)]
    )


def write_groups(connection: StoreConnection, run_pk: int, groups: Iterable[str]) -> None:
    """Make the groups that are searched those of a run."""
    connection.execute("DELETE FROM run_group_member WHERE run_pk = ?", (run_pk,))
    connection.executemany(
        "INSERT INTO run_group_member (run_pk, path) VALUES (?, ?)",
        [(run_pk, path) for path in groups],
    )


def write_config(connection: StoreConnection, run_pk: int, values: Mapping[str, Any]) -> None:
    """Make the configuration that is searched that of a run."""
    _write_values(connection, "run_config", run_pk, values)


def write_fields(connection: StoreConnection, run_pk: int, values: Mapping[str, Any]) -> None:
    """Make the fields that are searched those of a run."""
    _write_values(connection, "run_field", run_pk, values)


def _write_values(
    connection: StoreConnection, table: str, run_pk: int, values: Mapping[str, Any]
) -> None:
    connection.execute(f"DELETE FROM {table} WHERE run_pk = ?", (run_pk,))
    # Of leaves whose keys are the same once they are joined, the last one counts.
    rows = {row[0]: (run_pk, *row) for row in flatten_config(values)}
    connection.executemany(
        f"INSERT INTO {table} (run_pk, key, type, number, text) VALUES (?, ?, ?, ?, ?)",
        list(rows.values()),
    )


def flatten_config(
    values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, float | None, str | None]]:
    """Key, type, number and text of each leaf of a configuration; lists are leaves.

    Keys of nested mappings are joined by a dot.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten_config(value, f"{key}.")
        elif value is None:
            yield key, "null", None, None
        elif isinstance(value, bool):
            yield key, "bool", float(value), None
        elif isinstance(value, (int, float)):
            try:
                number = float(value)
                # SQLite keeps no NaN; no other database shall find one either.
                yield key, "number", None if number != number else number, None
            except OverflowError:
                yield key, "text", None, str(value)
        elif isinstance(value, str):
            yield key, "text", None, value
        else:
            yield key, "json", None, json.dumps(value, ensure_ascii=False)
