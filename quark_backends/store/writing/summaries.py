"""Summaries that runs are searched by: tags, configuration, fingerprints, forks."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from quark_backends.store.batch_bodies import open_body
from quark_backends.store.databases.connection import StoreConnection, writing
from quark_backends.store.reading.attempt_progress import (
    AttemptReaches,
    find_hidden_metrics,
    load_attempt_writers,
)
from quark_backends.store.writing.metrics import FigureRow, MetricFold, NameTable, place_writer
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows, can_be_hidden
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
    from quark_backends.store.chunks import decode_chunk

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


# What the metrics of a fork begin with: the figures of its parent up to the step of the fork.
#
# They are made when the fork begins, and again where all figures of it are. No point of a long
# parent is read for them but those of a few chunks: the rest is in roll-ups.

_MOST_ANCESTORS = 1_000
_LAST_STEP = 2**63 - 2
_ALL_SEQUENCES = -1
_MANY = 500

# A point without a step is nobody's but the run's that logged it.
_COPY = """
INSERT INTO run_metric (run_pk, name_pk, count, non_finite, first, last, low, high, last_step,
    last_us, first_place, first_started_us, first_sequence, last_place, last_started_us,
    last_sequence)
SELECT ?, name_pk, count, non_finite, first, last, low, high, last_step, last_us,
    first_place - ?, first_started_us, first_sequence, last_place - ?, last_started_us,
    last_sequence
FROM run_metric WHERE run_pk = ? AND last_step IS NOT NULL
"""


class _Ancestor(NamedTuple):
    """A run that a fork descends from.

    Attributes:
        pk: Its number.
        attempt: Its newest attempt.
        newest_step: Highest step of its metrics, with those of its own parents.
        parent: Id of the run that it was forked from itself, or None.
        fork_step: Where.
    """

    pk: int
    attempt: int
    newest_step: int | None
    parent: str | None
    fork_step: int | None


class _Chunk(NamedTuple):
    key: str
    pk: int
    first_sequence: int
    last_sequence: int
    step_low: int
    step_high: int
    has_rollup: bool

    def is_whole(self, hidden: HiddenRows) -> bool:
        """Whether all of its points have a step, and none is hidden."""
        # Of sequences a fork asks nothing: every point without a step is hidden from it.
        bounds = (self.step_low, self.step_high, _ALL_SEQUENCES, self.key)
        return self.has_rollup and self.step_low >= 0 and hidden.is_whole(*bounds)


def begin_fork(
    connection: StoreConnection, run_id: str | None, find_name: Callable[[str], int]
) -> None:
    """Give a run that was just made the figures that it has of its parent."""
    (run_pk,) = connection.execute("SELECT pk FROM run WHERE id = ?", (run_id,)).fetchone()
    add_fork_figures(connection, run_pk, find_name)


def add_fork_figures(
    connection: StoreConnection, run_pk: int, find_name: Callable[[str], int]
) -> None:
    """Add to the figures of a run what it has of its parent; nothing where it is no fork.

    Inside the caller's transaction, before the figures of the run itself are added. A parent
    that the store does not have adds nothing.
    """
    row = connection.execute(
        "SELECT id, fork_run_id, fork_step FROM run WHERE pk = ?", (run_pk,)
    ).fetchone()
    if row is None or row[1] is None or row[2] is None:
        return
    run_id, parent, step = row
    fold, seen, last_step, shift = MetricFold(), {run_id}, min(int(step), _LAST_STEP), 0
    while parent is not None and parent not in seen and len(seen) <= _MOST_ANCESTORS:
        seen.add(parent)
        found = connection.execute(
            "SELECT pk, attempt, newest_step, fork_run_id, fork_step FROM run"
            " WHERE id = ? AND trashed_us IS NULL",
            (parent,),
        ).fetchone()
        if found is None:
            break
        ancestor = _Ancestor(*found)
        shift += ancestor.attempt + 1
        is_whole = ancestor.newest_step is None or ancestor.newest_step <= last_step
        # The figures of one that repeats steps may be behind; see `overlaps`.
        if is_whole and ancestor.attempt == 0:
            # With what it has of its own parents.
            _copy_figures(connection, run_pk, ancestor, shift)
            break
        _fold_run(connection, ancestor.pk, last_step, shift, fold)
        parent = None if ancestor.fork_step is None else ancestor.parent
        if ancestor.fork_step is not None:
            last_step = min(last_step, ancestor.fork_step)
    fold.write(connection, run_pk, find_name)


def rebuild_forks(connection: StoreConnection) -> None:
    """Make the figures of all forks again, each after its parent's; in a transaction of its own.

    For tables into which runs come in any order, a fork perhaps before its parent.
    """
    with writing(connection):
        forks = connection.execute(
            "SELECT pk FROM run WHERE fork_step IS NOT NULL ORDER BY created_us, pk"
        ).fetchall()
        for (run_pk,) in forks:
            rebuild_metrics(connection, run_pk)


def shorten_fork(connection: StoreConnection, run_pk: int, from_step: int) -> None:
    """Leave out of what a fork has of its parent what an attempt of it does again."""
    connection.execute(
        "UPDATE run SET fork_step = ? WHERE pk = ? AND fork_step >= ?",
        (from_step - 1 if from_step > 0 else None, run_pk, from_step),
    )


def _copy_figures(
    connection: StoreConnection, run_pk: int, ancestor: _Ancestor, shift: int
) -> None:
    lower = place_writer(shift, 0)
    connection.execute(_COPY, (run_pk, lower, lower, ancestor.pk))
    connection.execute(
        "UPDATE run SET newest_step = ? WHERE pk = ?", (ancestor.newest_step, run_pk)
    )


def _fold_run(
    connection: StoreConnection, run_pk: int, last_step: int, shift: int, fold: MetricFold
) -> None:
    """Add what a run itself has up to a step."""
    from quark_backends.store.reading.attempt_progress import AttemptReaches, load_attempt_writers

    writers = connection.execute(
        "SELECT pk, attempt, rank, started_us, hidden_step FROM writer WHERE run_pk = ?", (run_pk,)
    ).fetchall()
    others, reaches = load_attempt_writers(connection, run_pk), AttemptReaches()
    for writer_pk, attempt, rank, started_us, hidden_step in writers:
        beyond = last_step + 1 if hidden_step is None else min(last_step + 1, hidden_step)
        replaced = reaches.find_hidden(connection, others, writer_pk, MetricRecord.KIND)
        hidden = HiddenRows(beyond, _ALL_SEQUENCES, replaced)
        place = place_writer(attempt - shift, rank)
        fold_batches(connection, writer_pk, fold, place, started_us, hidden)
        _fold_chunks(connection, writer_pk, fold, place, started_us, hidden)


def _fold_chunks(
    connection: StoreConnection,
    writer_pk: int,
    fold: MetricFold,
    place: int,
    started_us: int,
    hidden: HiddenRows,
) -> None:

    rows = connection.execute(
        "SELECT text, chunk.pk, first_sequence, last_sequence, step_low, step_high,"
        " rollup IS NOT NULL FROM chunk JOIN name ON name.pk = name_pk"
        " WHERE writer_pk = ? AND kind = ? AND step_low < ? AND step_high >= 0"
        " ORDER BY text, first_sequence",
        (writer_pk, MetricRecord.KIND, hidden.step),
    ).fetchall()
    decoded: list[int] = []
    for _, group in groupby((_Chunk(*row) for row in rows), key=lambda chunk: chunk.key):
        chunks = list(group)
        whole = [chunk for chunk in chunks if chunk.is_whole(hidden)]
        # What comes first and last of a metric, no roll-up says.
        ends = {chunk.pk for chunk in whole[:1]}
        ends |= {chunk.pk for chunk in sorted(whole, key=lambda c: c.last_sequence)[-1:]}
        inner = [chunk for chunk in whole if chunk.pk not in ends]
        known = list(_sum_rollups(connection, inner))
        newest = max((chunk.step_high for chunk, _ in known), default=-1)
        fold.add_figures([row for _, row in known], newest, place, started_us)
        done = {chunk.pk for chunk, _ in known}
        decoded += [chunk.pk for chunk in chunks if chunk.pk not in done]
    fold_chunks(connection, decoded, fold, place, started_us, hidden)


def _sum_rollups(
    connection: StoreConnection, chunks: Sequence[_Chunk]
) -> Iterator[tuple[_Chunk, FigureRow]]:
    """What the roll-ups say of chunks of one metric; not of those that cannot be read."""
    import numpy as np

    from quark_backends.store.rollups import decode_rollups

    for start in range(0, len(chunks), _MANY):
        part = chunks[start : start + _MANY]
        marks = ", ".join("?" * len(part))
        found = dict(
            connection.execute(
                f"SELECT pk, rollup FROM chunk WHERE pk IN ({marks})",
                [chunk.pk for chunk in part],
            ).fetchall()
        )
        for chunk in part:
            try:
                (blocks,) = decode_rollups([bytes(found[chunk.pk])])
            except SchemaValidationError as error:
                _log.debug("the roll-up of chunk %d cannot be read: %s", chunk.pk, error)
                continue
            finite = bool(np.isfinite(blocks.low).any())
            row = (
                chunk.key,
                int(blocks.count.sum()),
                int(blocks.non_finite.sum()),
                float(np.nanmin(blocks.low)) if finite else math.inf,
                float(np.nanmax(blocks.high)) if finite else -math.inf,
                math.nan,
                chunk.first_sequence,
                float(blocks.last[-1]),
                chunk.last_sequence,
                chunk.step_high,
                0,
            )
            yield chunk, row


def rebuild_metrics(
    connection: StoreConnection,
    run_pk: int,
    find_name: Callable[[str], int] | None = None,
) -> None:
    """Make the figures of a run's metrics and its newest step again.

    Args:
        connection: The store.
        run_pk: The run.
        find_name: Gives the number of a metric's name.
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
    from quark_backends.store.chunks import decode_chunk

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
