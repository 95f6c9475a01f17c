"""The lines of a run's console, as they were to be read: each one once, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.query import Query
from quark_core.runs.following import read_changes, read_heads
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead

__all__ = [
    "ConsoleFollower",
    "LineKey",
    "find_key",
    "fold_lines",
    "read_lines",
    "read_text_lines",
]

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
    limit = None if tail is None else max(_LEAST_ROWS, _TIMES * tail)
    while True:
        query = Query(equals=equals, rank=rank, limit=limit)
        rows = read_rows(reader, run_id, ConsoleRecord.KIND, query)
        records: Any = rows.to_records()
        lines = fold_lines(records)
        if is_wanted is not None:
            lines = [line for line in lines if is_wanted(line)]
        is_all = limit is None or rows.count < limit
        if tail is None or len(lines) >= tail or is_all:
            return lines if tail is None else lines[max(0, len(lines) - tail) :]
        limit = _TIMES * (limit or 1)


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

    def read(self) -> list[Any]:
        """New records of all kinds, in the order of time.

        Where the store was replaced, what came meanwhile is skipped.

        Raises:
            SessionStoreError: The store cannot be read now; nothing is skipped for that.
        """
        found: list[Any] = []
        while True:
            changes = read_changes(
                self._reader,
                self._run_id,
                self._cursor,
                kinds=self._kinds,
                max_rows=_MOST_CHANGES,
            )
            if changes.stale:
                heads = read_heads(self._reader, self._run_id, kinds=self._kinds)
                self._cursor = heads.cursor
                break
            self._cursor = changes.cursor
            for rows in changes.records.values():
                found.extend(rows.to_records())
            if not changes.more:
                break
        return sorted(found, key=lambda record: record.time_us)
