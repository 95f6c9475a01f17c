"""The lines of a run's console, as they were to be read: each one once, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from quark_core.records.kinds.basic import EventRecord
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.query import Query
from quark_core.runs.following import read_changes, read_heads
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.records.columns import Columns

LineKey = tuple[str, str, int]
"""Writer, stream and number of a line."""

# A progress bar has many records for one line, so more are read than are wanted.
_TIMES = 4
_LEAST_ROWS = 2_000
_MOST_CHANGES = 50_000


def find_key(record: ConsoleRecord) -> LineKey:
    """Which line a record is of."""
    return record.writer_id, record.stream, record.line


def fold_lines(records: Iterable[ConsoleRecord]) -> list[ConsoleRecord]:
    """The last state of each line, in the order of time, without what was wiped away."""
    last: dict[LineKey, ConsoleRecord] = {}
    left_out: dict[LineKey, int] = {}
    for record in sorted(records, key=lambda one: one.time_us):
        key = find_key(record)
        left_out[key] = left_out.get(key, 0) + record.left_out
        last.pop(key, None)
        last[key] = record
    return [
        msgspec.structs.replace(record, left_out=left_out[key])
        for key, record in last.items()
        if record.is_whole or record.text.strip() or left_out[key]
    ]


def read_lines(
    reader: SupportsRead,
    run_id: str,
    *,
    stream: str | None = None,
    rank: int | None = None,
    tail: int | None = None,
    is_wanted: Callable[[ConsoleRecord], bool] | None = None,
) -> list[ConsoleRecord]:
    """Lines of a run's console.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        stream: `stdout` or `stderr`; both by default.
        rank: Only what this rank has printed.
        tail: The newest so many; all by default.
        is_wanted: Which of them.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    equals: Mapping[str, str] = {} if stream is None else {"stream": stream}
    query = Query(equals=equals, rank=rank)
    return _cut(_find_lines(reader, run_id, query, tail, is_wanted, tuple), tail)


def _find_lines(
    reader: SupportsRead,
    run_id: str,
    query: Query,
    tail: int | None,
    is_wanted: Callable[[Any], bool] | None,
    read_later: Callable[[], Iterable[ConsoleRecord]],
) -> list[ConsoleRecord]:
    """At least the newest `tail` lines, with those of records that came while they were read."""
    limit = None if tail is None else max(_LEAST_ROWS, _TIMES * tail)
    while True:
        rows = read_rows(reader, run_id, ConsoleRecord.KIND, replace(query, limit=limit))
        records: Any = rows.to_records()
        lines = fold_lines(_drop_repeated([*records, *read_later()]))
        if is_wanted is not None:
            lines = [line for line in lines if is_wanted(line)]
        if limit is None or rows.count < limit or len(lines) >= (tail or 0):
            return lines
        limit *= _TIMES


def _drop_repeated(records: Iterable[Any]) -> list[Any]:
    return list({record.id: record for record in records}.values())


def _cut(records: list[Any], tail: int | None) -> list[Any]:
    return records if tail is None else records[max(0, len(records) - tail) :]


def read_newest_events(reader: SupportsRead, run_id: str, limit: int) -> Columns:
    """The newest events of a run, in the order of time: each rank's lie for themselves in a store.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    query = Query(limit=max(_LEAST_ROWS, _TIMES * limit) if limit else 0)
    return sort_by_time(reader.read(run_id, EventRecord.KIND, query)).keep_newest(limit)


def sort_by_time(rows: Columns) -> Columns:
    """Rows of several ranks in the order of time; those of a rank that tie stay as they are."""
    import numpy as np

    return rows.take(np.argsort(rows["time_us"], kind="stable"))


def read_text_lines(reader: SupportsRead, run_id: str, stream: str | None, last: int) -> list[str]:
    """The newest so many lines of a run's console, as texts.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    if not last:
        return []
    return [line.text for line in read_lines(reader, run_id, stream=stream, tail=last)]


class ConsoleFollower:
    """Reads what has come to a run's console since it was last asked.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        kinds: Further kinds of records that are wanted with it.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """

    def __init__(self, reader: SupportsRead, run_id: str, kinds: Sequence[str] = ()) -> None:
        self._reader = reader
        self._run_id = run_id
        self._kinds = (ConsoleRecord.KIND, *kinds)
        self._cursor = read_heads(reader, run_id, kinds=self._kinds).cursor

    def read_first(
        self,
        *,
        rank: int | None = None,
        tail: int | None = None,
        is_wanted: Callable[[Any], bool] | None = None,
    ) -> list[Any]:
        """Lines, and records of the further kinds, in the order of time.

        What comes while they are read is among them or comes by `read`, never by both.

        Args:
            rank: Only what this rank has printed.
            tail: The newest so many; all by default.
            is_wanted: Which of them.

        Raises:
            RunNotFoundError: An unknown run.
            SessionStoreError: The store cannot be read.
        """
        query = Query(rank=rank, limit=tail)
        others: list[Any] = []
        for kind in self._kinds[1:]:
            others += read_rows(self._reader, self._run_id, kind, query).to_records()
        later: list[ConsoleRecord] = []

        def read_later() -> list[ConsoleRecord]:
            for record in self.read():
                if record.KIND != ConsoleRecord.KIND:
                    others.append(record)
                elif rank is None or record.rank == rank:
                    later.append(record)
            return later

        lines: list[Any] = list(
            _find_lines(self._reader, self._run_id, Query(rank=rank), tail, is_wanted, read_later)
        )
        others = _drop_repeated(others)
        lines += others if is_wanted is None else filter(is_wanted, others)
        lines.sort(key=lambda record: record.time_us)
        return _cut(lines, tail)

    def read(self) -> list[Any]:
        """New records of all kinds, in the order of time.

        Where the store was replaced, what came meanwhile is skipped.

        Raises:
            SessionStoreError: The store cannot be read now; nothing is skipped for that.
        """
        found: list[Any] = []
        cursor = self._cursor
        while True:
            changes = read_changes(
                self._reader,
                self._run_id,
                cursor,
                kinds=self._kinds,
                max_rows=_MOST_CHANGES,
            )
            if changes.stale:
                cursor = read_heads(self._reader, self._run_id, kinds=self._kinds).cursor
                break
            cursor = changes.cursor
            for rows in changes.records.values():
                found.extend(rows.to_records())
            if not changes.more:
                break
        # Only now: what was found is given to nobody where a later part cannot be read.
        self._cursor = cursor
        return sorted(found, key=lambda record: record.time_us)
