"""What the metrics of a fork begin with: the figures of its parent up to the step of the fork.

They are made when the fork begins, and again where all figures of it are. No point of a long
parent is read for them but those of a few chunks: the rest is in roll-ups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from quark_backends.store.databases.connection import writing
from quark_backends.store.writing.metric_figures import FigureRow, MetricFold, place_writer
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows

if TYPE_CHECKING:
    from quark_backends.store.databases.connection import StoreConnection

_log = logging.getLogger("quark")

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
    from quark_backends.store.writing.summaries import rebuild_metrics

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
    from quark_backends.store.reading.attempt_reaches import AttemptReaches, load_attempt_writers
    from quark_backends.store.writing.summaries import fold_batches

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
    from quark_backends.store.writing.summaries import fold_chunks

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

    from quark_backends.store.encoding.rollups import decode_rollups

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
