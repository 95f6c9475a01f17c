"""The quick way of figures: rows of one writer that go on where it was."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

from quark_backends.store.connection import StoreConnection

__all__ = ["Stretch", "continue_figures", "count_rounds"]

# What nearly every batch does: it goes on where its own writer was.
_GO_ON = """
UPDATE run_metric SET count = count + ?, last = ?, last_step = ?, last_us = ?, last_sequence = ?,
    low = coalesce(min(low, ?), ?), high = coalesce(max(high, ?), ?)
WHERE run_pk = ? AND name_pk = ? AND last_place = ? AND last_started_us = ? AND last_sequence < ?
"""


class Stretch(NamedTuple):
    """Figures of several metrics over rows of one writer in order, all finite; lists by metric."""

    place: int
    started_us: int
    keys: list[str]
    counts: list[int]
    lows: list[float]
    highs: list[float]
    firsts: list[float]
    first_sequences: list[int]
    lasts: list[float]
    last_sequences: list[int]
    last_steps: list[int]
    last_times: list[int]


def continue_figures(
    connection: StoreConnection,
    run_pk: int,
    find_name: Callable[[str], int],
    stretch: Stretch,
) -> bool:
    """Add a stretch that follows what the store has of its writer; whether it was one."""
    steps = [None if step < 0 else step for step in stretch.last_steps]
    rows = list(
        zip(
            stretch.counts,
            stretch.lasts,
            steps,
            stretch.last_times,
            stretch.last_sequences,
            *(stretch.lows, stretch.lows),
            *(stretch.highs, stretch.highs),
            repeat(run_pk),
            map(find_name, stretch.keys),
            repeat(stretch.place),
            repeat(stretch.started_us),
            stretch.first_sequences,
            strict=False,
        )
    )
    connection.execute("SAVEPOINT figures")
    done = connection.executemany(_GO_ON, rows).rowcount == len(rows)
    if not done:
        connection.execute("ROLLBACK TO figures")
    connection.execute("RELEASE figures")
    return done


def count_rounds(codes: Any) -> int:
    """How often the codes go round, as those of equal steps do; 0 where they do not."""
    import numpy as np

    again = np.flatnonzero(codes[1:] == codes[0])
    width = int(again[0]) + 1 if len(again) else len(codes)
    if len(codes) % width or not np.array_equal(codes[width:], codes[:-width]):
        return 0
    return len(codes) // width if len(set(codes[:width].tolist())) == width else 0
