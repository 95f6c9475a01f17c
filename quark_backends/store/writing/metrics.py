"""Names and statistics of metrics, kept current and right where a resumed run repeats steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.attempt_progress import AttemptReaches, load_attempt_writers
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import HiddenRows, Reach
from quark_core.records.codec import DecodedBody

_MAX_KNOWN = 100_000
# Bound parameters of one statement.
_MANY = 500
_INSERT = "INSERT INTO name (pk, text) VALUES (?, ?) ON CONFLICT (text) DO NOTHING"


class NameTable:
    """Gives names their numbers, over one connection; belongs to its thread.

    Args:
        connection: The store; new names are made in its open transaction.
        known: What is committed of them, which other threads may know too.
    """

    def __init__(self, connection: StoreConnection, known: dict[str, int] | None = None) -> None:
        self._connection = connection
        self._known: dict[str, int] = {} if known is None else known
        # Of the open transaction: nobody else may use what may be taken back.
        self._found: dict[str, int] = {}

    def find(self, text: str) -> int:
        """The number of a name, which is made where it is new."""
        found = self._known.get(text) or self._found.get(text)
        if found is not None:
            return found
        execute = self._connection.execute
        row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        if row is None:
            execute(_INSERT, (self._connection.new_key(), text))
            row = execute("SELECT pk FROM name WHERE text = ?", (text,)).fetchone()
        pk = int(row[0])
        self._found[text] = pk
        return pk

    def find_all(self, texts: Iterable[str]) -> bool:
        """Find names that will be asked for, in few round trips; whether some had to be made."""
        known, found, connection = self._known, self._found, self._connection
        # In one order everywhere: who makes the same names waits, and does not deadlock.
        wanted = sorted(text for text in set(texts) if text not in known and text not in found)
        for is_made in (False, True):
            for start in range(0, len(wanted), _MANY):
                part = wanted[start : start + _MANY]
                if is_made:
                    connection.executemany(_INSERT, [(connection.new_key(), t) for t in part])
                marks = ", ".join("?" * len(part))
                found.update(
                    connection.execute(f"SELECT text, pk FROM name WHERE text IN ({marks})", part)
                )
            wanted = [text for text in wanted if text not in found]
            if not wanted:
                return is_made
        return True

    def keep(self) -> None:
        """The transaction was committed."""
        if self._found:
            if len(self._known) + len(self._found) > _MAX_KNOWN:
                self._known.clear()
            self._known.update(self._found)
            self._found.clear()

    def forget(self) -> None:
        """The transaction was taken back, and with it the names that it made."""
        self._found.clear()


FigureRow = tuple[str, int, int, float, float, float, int, float, int, int | None, int]
"""Key, count, how many are not finite, low and high (infinite where there is none), value and
sequence of the first point and of the last, step of the last or None, and its time."""

# Below this many rows plain Python is as quick as numpy is to set up, and needs no import of it.
_FEW_ROWS = 64
_MANY_ROWS = 5_000

_UPSERT = """
INSERT INTO run_metric (run_pk, name_pk, count, non_finite, first, last, low, high, last_step,
    last_us, first_place, first_started_us, first_sequence, last_place, last_started_us,
    last_sequence)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run_pk, name_pk) DO UPDATE SET
    count = run_metric.count + excluded.count,
    non_finite = run_metric.non_finite + excluded.non_finite,
    low = CASE WHEN excluded.low < run_metric.low THEN excluded.low
        ELSE coalesce(run_metric.low, excluded.low) END,
    high = CASE WHEN excluded.high > run_metric.high THEN excluded.high
        ELSE coalesce(run_metric.high, excluded.high) END,
    (first, first_place, first_started_us, first_sequence) = (SELECT
        CASE WHEN earlier THEN excluded.first ELSE run_metric.first END,
        CASE WHEN earlier THEN excluded.first_place ELSE run_metric.first_place END,
        CASE WHEN earlier THEN excluded.first_started_us ELSE run_metric.first_started_us END,
        CASE WHEN earlier THEN excluded.first_sequence ELSE run_metric.first_sequence END
        FROM (SELECT (excluded.first_place, excluded.first_started_us, excluded.first_sequence)
            < (run_metric.first_place, run_metric.first_started_us, run_metric.first_sequence)
            AS earlier) AS places),
    (last, last_step, last_us, last_place, last_started_us, last_sequence) = (SELECT
        CASE WHEN later THEN excluded.last ELSE run_metric.last END,
        CASE WHEN later THEN excluded.last_step ELSE run_metric.last_step END,
        CASE WHEN later THEN excluded.last_us ELSE run_metric.last_us END,
        CASE WHEN later THEN excluded.last_place ELSE run_metric.last_place END,
        CASE WHEN later THEN excluded.last_started_us ELSE run_metric.last_started_us END,
        CASE WHEN later THEN excluded.last_sequence ELSE run_metric.last_sequence END
        FROM (SELECT (excluded.last_place, excluded.last_started_us, excluded.last_sequence)
            >= (run_metric.last_place, run_metric.last_started_us, run_metric.last_sequence)
            AS later) AS places)
"""

# What nearly every batch does: it goes on where its own writer was.
_GO_ON = """
UPDATE run_metric SET count = count + ?, last = ?, last_step = ?, last_us = ?, last_sequence = ?,
    low = coalesce(min(low, ?), ?), high = coalesce(max(high, ?), ?)
WHERE run_pk = ? AND name_pk = ? AND last_place = ? AND last_started_us = ? AND last_sequence < ?
"""


def place_writer(attempt: int, rank: int) -> int:
    """A number that orders writers by attempt and rank."""
    return (attempt << 24) | min(rank, (1 << 24) - 1)


class _Figures:
    """What is known of one metric; its fields are those of the table."""

    __slots__ = (
        "count",
        "first",
        "first_place",
        "high",
        "last",
        "last_place",
        "last_step",
        "last_us",
        "low",
        "non_finite",
    )

    def __init__(self, first: float, first_place: tuple[int, int, int]) -> None:
        self.count = self.non_finite = 0
        self.low, self.high = math.inf, -math.inf
        self.first = self.last = first
        self.first_place = self.last_place = first_place
        self.last_step: int | None = None
        self.last_us = 0


class _FigureColumns(NamedTuple):
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


class MetricFold:
    """Sums up metric rows of one run in memory, then adds them to the store's figures."""

    def __init__(self) -> None:
        self._figures: dict[str, _Figures] = {}
        # The first columns stay as they are: mostly there are no others, and these are written.
        self._columns: _FigureColumns | None = None
        self.newest_step = -1

    def add_body(
        self, body: DecodedBody, place: int, started_us: int, hidden: HiddenRows | None
    ) -> None:
        """Add a batch of metrics of one writer.

        Args:
            body: The batch.
            place: `place_writer` of the writer.
            started_us: When the writer started.
            hidden: Rows that do not count.

        Raises:
            SchemaValidationError: The batch is malformed.
        """
        _check_body(body)
        few = _FEW_ROWS if "numpy" in sys.modules else _MANY_ROWS
        if body.count <= few or body.column("metric_key").encoding not in ("t", "c"):
            self._add_rows(body, place, started_us, hidden)
        else:
            self._add_arrays(body, place, started_us, hidden)

    def add_column(self, key: str, columns: Mapping[str, Any], place: int, started_us: int) -> None:
        """Add rows of one metric, as arrays `value`, `step`, `time_us` and `sequence`."""
        if len(columns["value"]):
            self._merge_columns()
            self._add_group(
                key,
                columns["value"],
                columns["step"],
                columns["time_us"],
                columns["sequence"],
                (place, started_us),
            )

    def list_figures(self) -> list[FigureRow]:
        """What is known of each metric, for `add_figures`; of rows of one writer."""
        self._merge_columns()
        return [
            (
                key,
                f.count,
                f.non_finite,
                f.low,
                f.high,
                f.first,
                f.first_place[-1],
                f.last,
                f.last_place[-1],
                f.last_step,
                f.last_us,
            )
            for key, f in self._figures.items()
        ]

    def add_figures(
        self, rows: Iterable[FigureRow], newest_step: int, place: int, started_us: int
    ) -> None:
        """Add what `list_figures` gave of other rows of a writer."""
        self._merge_columns()
        self.newest_step = max(self.newest_step, newest_step)
        for key, count, non_finite, low, high, first, first_at, last, last_at, step, us in rows:
            earlier, later = (place, started_us, first_at), (place, started_us, last_at)
            figures = self._figures.get(key)
            if figures is None:
                figures = self._figures[key] = _Figures(first, earlier)
            figures.count += count
            figures.non_finite += non_finite
            figures.low = min(figures.low, low)
            figures.high = max(figures.high, high)
            if earlier < figures.first_place:
                figures.first, figures.first_place = first, earlier
            if later >= figures.last_place:
                figures.last, figures.last_place = last, later
                figures.last_step, figures.last_us = step, us

    def list_keys(self) -> Iterable[str]:
        """The metrics that it has figures of."""
        return self._figures if self._columns is None else self._columns.keys

    def write(
        self,
        connection: StoreConnection,
        run_pk: int,
        find_name: Callable[[str], int],
        *,
        goes_on: bool = True,
    ) -> None:
        """Add the figures to the store's, inside the caller's transaction.

        Args:
            connection: The store.
            run_pk: The run.
            find_name: Gives the number of a metric's name, which it makes where it is new.
            goes_on: Whether the store may have figures of all these metrics already.
        """
        columns = self._columns
        # Where round trips cost, one statement that always holds is better than a quick try.
        if (
            columns is None
            or not goes_on
            or connection.is_shared
            or not _append_figures(connection, run_pk, find_name, columns)
        ):
            self._write_figures(connection, run_pk, find_name)
        if self.newest_step >= 0:
            connection.execute(
                "UPDATE run SET newest_step = ? WHERE pk = ? AND coalesce(newest_step, -1) < ?",
                (self.newest_step, run_pk, self.newest_step),
            )

    def _write_figures(
        self, connection: StoreConnection, run_pk: int, find_name: Callable[[str], int]
    ) -> None:
        self._merge_columns()
        rows = [
            (
                run_pk,
                find_name(key),
                f.count,
                f.non_finite,
                f.first if math.isfinite(f.first) else None,
                f.last if math.isfinite(f.last) else None,
                f.low if f.low != math.inf else None,
                f.high if f.high != -math.inf else None,
                f.last_step,
                f.last_us,
                *f.first_place,
                *f.last_place,
            )
            for key, f in self._figures.items()
        ]
        connection.executemany(_UPSERT, rows)

    def _merge_columns(self) -> None:
        """Take what waits as columns among the figures."""
        if self._columns is not None:
            columns, self._columns = self._columns, None
            self._merge(columns)

    def _merge(self, columns: _FigureColumns) -> None:
        place, started_us, *lists = columns
        rows = (
            (*row[:2], 0, *row[2:8], None if row[8] < 0 else row[8], row[9])
            for row in zip(*lists, strict=True)
        )
        self.add_figures(rows, -1, place, started_us)

    def _add_rows(
        self, body: DecodedBody, place: int, started_us: int, hidden: HiddenRows | None
    ) -> None:
        columns = [
            body.to_list(name)
            for name in ("metric_key", "value", "step", "epoch", "time_us", "sequence")
        ]
        if {len(column) for column in columns} != {body.count}:
            raise SchemaValidationError("columns of a batch differ in length")
        self._merge_columns()
        for key, value, step, epoch, time_us, sequence in zip(*columns, strict=True):
            if hidden is not None and hidden.is_hidden(step, sequence, epoch, key):
                continue
            here = (place, started_us, sequence)
            figures = self._figures.get(key)
            if figures is None:
                figures = self._figures[key] = _Figures(value, here)
            figures.count += 1
            if math.isfinite(value):
                figures.low = min(figures.low, value)
                figures.high = max(figures.high, value)
            else:
                figures.non_finite += 1
            if here < figures.first_place:
                figures.first, figures.first_place = value, here
            if here >= figures.last_place:
                figures.last, figures.last_place = value, here
                figures.last_step, figures.last_us = step, time_us
            if step is not None and step > self.newest_step:
                self.newest_step = step

    def _add_arrays(
        self, body: DecodedBody, place: int, started_us: int, hidden: HiddenRows | None
    ) -> None:
        import numpy as np

        column = body.column("metric_key")
        if column.encoding == "c":
            texts, codes = [column.head], np.zeros(body.count, dtype=np.int8)
        else:
            texts, width = column.head
            codes = np.frombuffer(column.data, dtype=f"<i{width}")
        values, steps = body.to_array("value"), body.to_array("step")
        times, sequences = body.to_array("time_us"), body.to_array("sequence")
        if {len(values), len(steps), len(times), len(sequences), len(codes)} != {body.count}:
            raise SchemaValidationError("columns of a batch differ in length")
        if hidden is not None:
            series = np.array(texts, dtype=object)[codes] if hidden.reaches else ""
            epochs = body.to_array("epoch") if hidden.reaches else None
            kept = ~hidden.find_hidden(steps, sequences, epochs, series)
            codes, values, steps = codes[kept], values[kept], steps[kept]
            times, sequences = times[kept], sequences[kept]
        if not len(codes):
            return
        self.newest_step = max(self.newest_step, int(steps.max()))
        rounds = _count_rounds(codes)
        if rounds and bool((sequences[1:] > sequences[:-1]).all()) and np.isfinite(values).all():
            width = len(codes) // rounds
            table = values.reshape(rounds, width)
            self._add_columns(
                _FigureColumns(
                    place,
                    started_us,
                    [texts[code] for code in codes[:width].tolist()],
                    [rounds] * width,
                    table.min(axis=0).tolist(),
                    table.max(axis=0).tolist(),
                    values[:width].tolist(),
                    sequences[:width].tolist(),
                    values[-width:].tolist(),
                    sequences[-width:].tolist(),
                    steps[-width:].tolist(),
                    times[-width:].tolist(),
                )
            )
            return
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        ends = [*starts[1:].tolist(), len(codes)]
        values, steps = values[order], steps[order]
        times, sequences = times[order], sequences[order]
        if not _rises(sequences, starts) or not np.isfinite(values).all():
            self._merge_columns()
            for start, end in zip(starts.tolist(), ends, strict=True):
                rows = slice(start, end)
                key = texts[codes[start]]
                here = (place, started_us)
                self._add_group(key, values[rows], steps[rows], times[rows], sequences[rows], here)
            return
        last = np.array(ends) - 1
        self._add_columns(
            _FigureColumns(
                place,
                started_us,
                [texts[code] for code in codes[starts].tolist()],
                np.diff([*starts.tolist(), len(codes)]).tolist(),
                np.minimum.reduceat(values, starts).tolist(),
                np.maximum.reduceat(values, starts).tolist(),
                values[starts].tolist(),
                sequences[starts].tolist(),
                values[last].tolist(),
                sequences[last].tolist(),
                steps[last].tolist(),
                times[last].tolist(),
            )
        )

    def _add_columns(self, columns: _FigureColumns) -> None:
        if self._columns is None and not self._figures:
            self._columns = columns
            return
        self._merge_columns()
        self._merge(columns)

    def _add_group(
        self, key: str, values: Any, steps: Any, times: Any, sequences: Any, place: tuple[int, int]
    ) -> None:
        """Add rows of one metric, in any order."""
        import numpy as np

        first, last = int(sequences.argmin()), int(sequences.argmax())
        earlier, later = (*place, int(sequences[first])), (*place, int(sequences[last]))
        figures = self._figures.get(key)
        if figures is None:
            figures = self._figures[key] = _Figures(float(values[first]), earlier)
        finite = values[np.isfinite(values)]
        figures.count += len(values)
        figures.non_finite += len(values) - len(finite)
        if len(finite):
            figures.low = min(figures.low, float(finite.min()))
            figures.high = max(figures.high, float(finite.max()))
        if earlier < figures.first_place:
            figures.first, figures.first_place = float(values[first]), earlier
        if later >= figures.last_place:
            figures.last, figures.last_place = float(values[last]), later
            step = int(steps[last])
            figures.last_step, figures.last_us = (None if step < 0 else step), int(times[last])
        self.newest_step = max(self.newest_step, int(steps.max()))


def _check_body(body: DecodedBody) -> None:
    """Refuse a batch that lacks what no metric is without."""
    for name in ("metric_key", "value", "time_us", "sequence"):
        column = body.column(name)
        lacks = bool(column.nulls) or (column.encoding == "c" and column.head is None)
        if lacks or (column.encoding == "t" and None in column.head[0]):
            raise SchemaValidationError(f"{name} is missing from some of its metrics")


def _rises(sequences: Any, starts: Any) -> bool:
    """Whether sequences rise within each group."""
    rises = sequences[1:] > sequences[:-1]
    rises[starts[1:] - 1] = True
    return bool(rises.all())


def _append_figures(
    connection: StoreConnection,
    run_pk: int,
    find_name: Callable[[str], int],
    columns: _FigureColumns,
) -> bool:
    """Add figures that follow what the store has of their writer; whether they do."""
    steps = [None if step < 0 else step for step in columns.last_steps]
    rows = list(
        zip(
            columns.counts,
            columns.lasts,
            steps,
            columns.last_times,
            columns.last_sequences,
            *(columns.lows, columns.lows),
            *(columns.highs, columns.highs),
            repeat(run_pk),
            map(find_name, columns.keys),
            repeat(columns.place),
            repeat(columns.started_us),
            columns.first_sequences,
            strict=False,
        )
    )
    connection.execute("SAVEPOINT figures")
    done = connection.executemany(_GO_ON, rows).rowcount == len(rows)
    if not done:
        connection.execute("ROLLBACK TO figures")
    connection.execute("RELEASE figures")
    return done


def _count_rounds(codes: Any) -> int:
    """How often the codes go round, as those of equal steps do; 0 where they do not."""
    import numpy as np

    again = np.flatnonzero(codes[1:] == codes[0])
    width = int(again[0]) + 1 if len(again) else len(codes)
    if len(codes) % width or not np.array_equal(codes[width:], codes[:-width]):
        return 0
    return len(codes) // width if len(set(codes[:width].tolist())) == width else 0


# Keeps figures right while a resumed run repeats steps, which replaces earlier points.
#
# What a batch replaces is no difference that could be added to figures: these are made again of
# what is visible. That reads the run's metrics, so that it is done now and then while steps are
# repeated, and once more when the attempt ends or the next one begins.

# Making figures again may take one part of so many of a writer's time.
_SHARE = 20
_KEPT_RUNS = 256
# Below so many rows plain Python is as quick as numpy is to set up.


@dataclass(slots=True)
class _Run:
    """What is known of a run.

    Attributes:
        attempt: Its newest attempt that has logged metrics.
        reached: Metric -> how far earlier attempts had come.
        behind: Metric that the newest attempt repeats -> how far that has come. Its next point
            replaces what earlier attempts logged up to there, also where it lies beyond them.
        is_due: Whether points were replaced that the figures count.
        rests_until: When the figures may be made again, by the monotonic clock.
    """

    attempt: int
    reached: dict[str, Reach] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    is_due: bool = False
    rests_until: float = 0.0


class Overlaps:
    """Knows of which runs the figures must be made again; belongs to one thread.

    Args:
        connection: The store.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._runs: dict[int, _Run] = {}

    def knows(self, run_pk: int, attempt: int) -> bool:
        """Whether `note` need not read what the run has stored."""
        run = self._runs.get(run_pk)
        return run is not None and run.attempt >= attempt

    def note(self, run_pk: int, attempt: int, body: DecodedBody) -> bool:
        """Take note of a batch of metrics; whether the figures must be made again now.

        Args:
            run_pk: The run.
            attempt: The attempt of its writer.
            body: The batch, which is stored already.
        """
        known = self.knows(run_pk, attempt)
        run = self._runs[run_pk] if known else self._load(run_pk, attempt)
        if attempt < run.attempt:
            run.is_due = True  # it comes late: what it repeats of is not known here
        elif run.reached and _repeats(run, body):
            run.is_due = True
        return run.is_due and time.monotonic() >= run.rests_until

    def settle(self, run_pk: int, attempt: int) -> bool:
        """Whether the figures must be made again for good, since an attempt begins or ends."""
        if attempt < 1:
            return False
        run = self._runs.get(run_pk)
        if run is None:
            run = self._load(run_pk, attempt)
        return run.is_due

    def rest(self, run_pk: int, duration_s: float) -> None:
        """The figures of a run were made again, which took so long."""
        run = self._runs.get(run_pk)
        if run is not None:
            run.is_due = False
            run.rests_until = time.monotonic() + _SHARE * duration_s

    def forget(self) -> None:
        """The transaction was undone: what is known of runs may not be so."""
        self._runs.clear()

    def _load(self, run_pk: int, attempt: int) -> _Run:
        writers = load_attempt_writers(self._connection, run_pk)
        run = _Run(max([attempt, *(writer.attempt for writer in writers)]))
        while len(self._runs) >= _KEPT_RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[run_pk] = run
        if any(each.has_from_step for each in writers if each.attempt == run.attempt):
            return run
        kind, reaches = MetricRecord.KIND, AttemptReaches()
        earlier = [each for each in writers if each.attempt < run.attempt]
        found = reaches.find(self._connection, earlier, kind, needs_first=False)
        for its in found.values():
            for series, reach in its.items():
                known = run.reached.get(series)
                if known is None or (reach.on_epochs, -reach.last) < (known.on_epochs, -known.last):
                    run.reached[series] = reach
        newest = [each for each in writers if each.attempt == run.attempt]
        for series, reach in (
            reaches.find(self._connection, newest, kind).get(run.attempt, {}).items()
        ):
            known = run.reached.get(series)
            if known is not None and reach.first <= known.last:
                run.is_due = True
                run.behind[series] = reach.last
        return run


def _repeats(run: _Run, body: DecodedBody) -> bool:
    """Whether a batch of the newest attempt replaces points; notes how far it has come."""
    column = body.column("metric_key")
    is_behind = bool(run.behind)
    if column.encoding in ("c", "t"):
        texts = [column.head] if column.encoding == "c" else column.head[0]
        if run.reached.keys().isdisjoint(texts):
            return False
        is_behind = not run.behind.keys().isdisjoint(texts)
    if body.count > _FEW_ROWS and not is_behind:
        steps = body.to_array("step")
        # Mostly all of them are beyond whatever was reached.
        if int(steps.min()) > max(reach.last for reach in run.reached.values()):
            return False
    replaces = False
    for key, step, epoch in zip(
        body.to_list("metric_key"), body.to_list("step"), body.to_list("epoch"), strict=True
    ):
        reach = run.reached.get(key)
        place = epoch if reach is not None and reach.on_epochs and step is None else step
        if reach is None or place is None:
            continue
        if place <= reach.last:
            run.behind[key] = max(place, run.behind.get(key, place))
            replaces = True
        elif run.behind.pop(key, None) is not None:
            replaces = True
    return replaces
