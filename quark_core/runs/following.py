"""Reads of curves, one or many at once, of grids, and of what came since.

Any backend that reads is served. One without `Capability.CHANGES` is read row by
row, each time from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsChanges, SupportsGrid, SupportsRead, SupportsSeries
from quark_core.backends.curves import (
    Cursor,
    Curve,
    CurveQuery,
    CurveSet,
    RunChanges,
    RunHeads,
    Window,
    check_cursor,
    check_keys,
    reduce_curves,
    sort_curve,
)
from quark_core.backends.forks import FORKED_KINDS, Beginning, find_beginnings
from quark_core.backends.grids import Grid, GridBuilder, GridQuery
from quark_core.backends.series import Series, check_max_points, join_series
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import RECORD_TYPES, MetricRecord, parse_time
from quark_core.records.checks import check_choice
from quark_core.records.query import Query, check_index
from quark_core.runs.reading import (
    check_rows,
    iterate,
    iterate_own,
    read_rows,
    reduce_columns,
)

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

CHANGED_ROWS = 100_000
"""About how many records one answer to `read_changes` has, where nobody says otherwise."""

_ROWS = ":rows"
# So often are rows read again in whose midst others came.
_TURNS = 5
# Between the run that a part of a fork's cursor is of, and the name that it has there.
_OF = ">"


def read_series(
    reader: SupportsRead,
    run_id: str,
    key: str,
    max_points: int | None = None,
    all_attempts: bool = False,
    rank: int | None = None,
) -> Series:
    """One metric of a run as a curve; without any entry where the run has no such metric.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        key: The metric's stored key.
        max_points: At most so many entries; None gives every point.
        all_attempts: Also points that a later attempt, resumed from an
            earlier step, has hidden.
        rank: Of this rank; by default across all that have logged it.

    Raises:
        SchemaValidationError: `max_points` is not a positive integer, or
            `rank` no non-negative one.
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    bound, wanted = check_max_points(max_points), check_index(rank, "rank")
    beginnings = find_beginnings(reader, run_id)
    if not isinstance(reader, SupportsSeries) or (beginnings and bound is None):
        query = Query(equals={"metric_key": key}, all_attempts=all_attempts, rank=wanted)
        return reduce_columns(key, read_rows(reader, run_id, MetricRecord.KIND, query), bound)
    own = reader.read_series(run_id, key, max_points=bound, all_attempts=all_attempts, rank=wanted)
    if not beginnings:
        return own
    curves = CurveQuery(
        keys=(key,),
        entries=bound,
        ranks=None if wanted is None else (wanted,),
        all_attempts=all_attempts,
    )
    parts: list[Series] = []
    for beginning in beginnings:
        parts += _read_beginning(reader, beginning, curves, needs_cursor=False).curves
    return join_series([*parts, own], bound)


def read_series_many(reader: SupportsRead, run_id: str, query: CurveQuery) -> CurveSet:
    """Several metrics of a run as curves of one moment, cheap however many points there are.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        query: Which metrics, through which window; of `CurveQuery.build`.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    beginnings = find_beginnings(reader, run_id)
    if query.since_start:
        oldest = beginnings[0].created_at if beginnings else None
        query = query.begin_at(parse_time(oldest or reader.load_run(run_id).run.created_at))
    own = _read_own_curves(reader, run_id, query)
    if not beginnings:
        return own
    place = {key: number for number, key in enumerate(query.keys)}
    curves, cursor = list(own.curves), dict(own.cursor)
    for beginning in beginnings:
        before = _read_beginning(reader, beginning, query, needs_cursor=True)
        curves += before.curves
        cursor |= _mark_cursor(beginning, before.cursor)
    curves.sort(key=lambda c: (place[c.key], c.attempt, -1 if c.rank is None else c.rank))
    return CurveSet(curves=tuple(curves), cursor=cursor)


def _read_beginning(
    reader: SupportsRead, beginning: Beginning, query: CurveQuery, *, needs_cursor: bool
) -> CurveSet:
    """A fork's curves of a run before it, and how far that run had come as they were read."""
    window = query.window
    run_id = beginning.run_id
    cursor: Cursor = {}
    found: tuple[Curve, ...] = ()
    try:
        if window.axis == "step" or (window.is_open and query.entries is not None):
            low = window.low if window.axis == "step" else None
            high = beginning.last_step
            if window.high is not None:
                high = min(window.high, high)
            if low is None or low <= high:
                its = replace(query, window=Window(low=low, high=high))
                by_step = _read_own_curves(reader, run_id, its)
                cursor = by_step.cursor
                found = tuple(sort_curve(curve, window.axis) for curve in by_step.curves)
            elif needs_cursor:
                cursor = _read_own_heads(reader, run_id, query.keys)
        else:
            # No window is of steps and of epochs or times at once.
            rows, cursor = _read_rows_and_heads(reader, beginning, query, needs_cursor=needs_cursor)
            found = reduce_curves(rows, query)
    except RunNotFoundError:
        cursor = {}
    curves = [replace(curve, attempt=curve.attempt + beginning.shift) for curve in found]
    return CurveSet(curves=tuple(curves), cursor=cursor)


def _read_rows_and_heads(
    reader: SupportsRead, beginning: Beginning, query: CurveQuery, *, needs_cursor: bool
) -> tuple[Columns, Cursor]:
    """Rows of a run and how far it had come; where it never rests, some may come once more."""
    run_id, keys = beginning.run_id, query.keys
    cursor = _read_own_heads(reader, run_id, keys) if needs_cursor else {}
    for turn in range(_TURNS):
        rows = _read_metrics(reader, run_id, keys, query.all_attempts, beginning.last_step)
        after = _read_own_heads(reader, run_id, keys) if needs_cursor else {}
        if after == cursor or turn == _TURNS - 1:
            break
        cursor = after
    return rows, cursor


def _read_own_curves(reader: SupportsRead, run_id: str, query: CurveQuery) -> CurveSet:
    if isinstance(reader, SupportsChanges):
        return reader.read_series_many(run_id, query)
    return reduce_series_many(reader, run_id, query)


def reduce_series_many(reader: SupportsRead, run_id: str, query: CurveQuery) -> CurveSet:
    """What a backend with `Capability.CHANGES` returns, out of all rows of these metrics."""
    rows = _read_metrics(reader, run_id, query.keys, query.all_attempts)
    cursor: dict[str, int] = {}
    _note_rows(cursor, MetricRecord.KIND, rows)
    return CurveSet(curves=reduce_curves(rows, query), cursor=cursor)


def read_heads(
    reader: SupportsRead,
    run_id: str,
    *,
    kinds: Sequence[str] = (MetricRecord.KIND,),
    keys: Sequence[str] | None = None,
) -> RunHeads:
    """How far a run has come, to ask from there on for what comes.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        kinds, keys: What will be asked for: a backend without `Capability.CHANGES` has to
            read it for that.

    Raises:
        As `read_changes`.
    """
    wanted, names = _check_kinds(kinds), None if keys is None else check_keys(keys)
    own = _read_own_run_heads(reader, run_id, wanted, names)
    cursor = dict(own.cursor)
    for beginning in find_beginnings(reader, run_id):
        cursor |= _mark_cursor(
            beginning, _read_own_heads(reader, beginning.run_id, names, _choose_forked(wanted))
        )
    return replace(own, cursor=cursor)


def _read_own_run_heads(
    reader: SupportsRead, run_id: str, kinds: Sequence[str], keys: Sequence[str] | None
) -> RunHeads:
    if isinstance(reader, SupportsChanges):
        return reader.read_heads(run_id)
    return note_heads(reader, run_id, kinds, keys)


def _read_own_heads(
    reader: SupportsRead,
    run_id: str,
    keys: Sequence[str] | None,
    kinds: Sequence[str] = (MetricRecord.KIND,),
) -> Cursor:
    try:
        return _read_own_run_heads(reader, run_id, kinds, keys).cursor
    except RunNotFoundError:
        return {}


def _choose_forked(kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if kind in FORKED_KINDS]


def _mark_cursor(beginning: Beginning, cursor: Cursor) -> dict[str, int]:
    """A run's cursor as a part of that of a fork; it says whose it is also where it is empty."""
    run_id = beginning.run_id
    return {f"{_OF}{run_id}": 0, **{f"{run_id}{_OF}{name}": at for name, at in cursor.items()}}


def _split_cursor(cursor: Cursor) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """A fork's own cursor, and those of the runs before it, by run."""
    own: dict[str, int] = {}
    others: dict[str, dict[str, int]] = {}
    for name, at in cursor.items():
        run_id, sign, its = name.partition(_OF)
        if not sign:
            own[name] = at
        elif run_id:
            others.setdefault(run_id, {})[its] = at
        else:
            others.setdefault(its, {})
    return own, others


def note_heads(
    reader: SupportsRead, run_id: str, kinds: Sequence[str], keys: Sequence[str] | None
) -> RunHeads:
    """What `read_heads` returns, out of all rows."""
    cursor: dict[str, int] = {}
    for kind in kinds:
        _note_rows(cursor, kind, _read_kind(reader, run_id, kind, keys, False))
    return RunHeads(cursor=cursor)


def read_changes(
    reader: SupportsRead,
    run_id: str,
    cursor: Cursor,
    *,
    kinds: Sequence[str] = (MetricRecord.KIND,),
    keys: Sequence[str] | None = None,
    all_attempts: bool = False,
    max_rows: int = CHANGED_ROWS,
) -> RunChanges:
    """What has come into a run since a cursor, each record once.

    A cursor goes on for what it was made with: the same keys and kinds. Who wants
    another metric reads its curve, and asks for what comes to it with that cursor.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        cursor: That of a `CurveSet`, of `RunHeads` or of the changes before; an empty one
            asks for everything.
        kinds: Kinds of records.
        keys: Stored keys of the metrics that are wanted; None for all.
        all_attempts: As in `CurveQuery`.
        max_rows: Where more has come, about so many records of it, and `more`. A backend
            without `Capability.CHANGES` gives all.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    known, wanted, bound = check_cursor(cursor), _check_kinds(kinds), check_rows(max_rows)
    names = None if keys is None else check_keys(keys)
    ask = _ChangesAsked(wanted, names, bool(all_attempts), bound)
    own, others = _split_cursor(known)
    beginnings = find_beginnings(reader, run_id)
    # An empty cursor asks for everything, and any other is of a fork of just these runs.
    if known and {beginning.run_id for beginning in beginnings} != set(others):
        return RunChanges(cursor=known, stale=True)
    found = ask.read(reader, run_id, own)
    for beginning in reversed(beginnings):
        its = ask.read_beginning(reader, beginning, others.get(beginning.run_id, {}))
        found = _join_changes(beginning, its, found)
    return found


@dataclass(frozen=True, slots=True)
class _ChangesAsked:
    """What is asked for, checked; see `read_changes`."""

    kinds: tuple[str, ...]
    keys: tuple[str, ...] | None
    all_attempts: bool
    max_rows: int

    def read(self, reader: SupportsRead, run_id: str, cursor: Cursor) -> RunChanges:
        """What has come into one run itself."""
        if isinstance(reader, SupportsChanges):
            return reader.read_changes(
                run_id,
                cursor,
                kinds=self.kinds,
                keys=self.keys,
                all_attempts=self.all_attempts,
                max_rows=self.max_rows,
            )
        return find_changes(
            reader,
            run_id,
            cursor,
            kinds=self.kinds,
            keys=self.keys,
            all_attempts=self.all_attempts,
        )

    def read_beginning(
        self, reader: SupportsRead, beginning: Beginning, cursor: Cursor
    ) -> RunChanges:
        """What has come into a run before a fork, as the fork has it: it may go on, too."""
        its = replace(self, kinds=tuple(_choose_forked(self.kinds)))
        if not its.kinds:
            return RunChanges(cursor=cursor)
        try:
            found = its.read(reader, beginning.run_id, cursor)
        except RunNotFoundError:
            return RunChanges(cursor=cursor)
        records = {kind: beginning.select(rows) for kind, rows in found.records.items()}
        some = {kind: rows for kind, rows in records.items() if rows.count}
        return replace(found, records=some)


def _join_changes(beginning: Beginning, before: RunChanges, after: RunChanges) -> RunChanges:
    """What came into a fork and into a run before it."""
    from quark_core.records.columns import Columns

    records = dict(before.records)
    for kind, rows in after.records.items():
        earlier = [records[kind]] if kind in records else []
        records[kind] = Columns.concatenate(kind, [*earlier, rows])
    stale = before.stale or after.stale
    return RunChanges(
        cursor={**after.cursor, **_mark_cursor(beginning, before.cursor)},
        records={} if stale else records,
        more=before.more or after.more,
        stale=stale,
        outputs=after.outputs,
    )


def find_changes(
    reader: SupportsRead,
    run_id: str,
    cursor: Cursor,
    *,
    kinds: Sequence[str],
    keys: Sequence[str] | None,
    all_attempts: bool,
) -> RunChanges:
    """What `read_changes` returns, out of all rows; nothing is left for later."""
    following = dict(cursor)
    records: dict[str, Columns] = {}
    for kind in kinds:
        rows = _read_kind(reader, run_id, kind, keys, all_attempts)
        new = _take_new(rows, cursor, kind)
        if new is None:
            return RunChanges(cursor=cursor, stale=True)
        if new.count:
            records[kind] = new
        _note_rows(following, kind, rows)
    return RunChanges(cursor=following, records=records)


def read_mark(reader: SupportsRead, run_id: str) -> str | None:
    """A text that stays the same as long as nothing in the run has changed.

    None where the backend can only tell by reading, as one without `Capability.CHANGES`.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    if not isinstance(reader, SupportsChanges):
        return None
    marks = [reader.read_mark(run_id)]
    for beginning in find_beginnings(reader, run_id):
        try:
            marks.append(reader.read_mark(beginning.run_id))
        except RunNotFoundError:
            marks.append("")
    return " ".join(marks)


def _check_kinds(kinds: object) -> tuple[str, ...]:
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise SchemaValidationError(
            f"kinds must be a list of record kinds, not {type(kinds).__name__}"
        )
    known = sorted(RECORD_TYPES)
    return tuple(dict.fromkeys(check_choice(kind, "each of kinds", known) for kind in kinds))


def _read_kind(
    reader: SupportsRead,
    run_id: str,
    kind: str,
    keys: Sequence[str] | None,
    all_attempts: bool,
) -> Columns:
    if kind == MetricRecord.KIND and keys is not None:
        return _read_metrics(reader, run_id, keys, all_attempts)
    return reader.read(run_id, kind, Query(all_attempts=bool(all_attempts)))


def _read_metrics(
    reader: SupportsRead,
    run_id: str,
    keys: Sequence[str],
    all_attempts: bool,
    last_step: int | None = None,
) -> Columns:
    """All of them in one read, since two reads are of two moments."""
    query = Query(
        any_of={"metric_key": tuple(keys)}, all_attempts=bool(all_attempts), step_max=last_step
    )
    return reader.read(run_id, MetricRecord.KIND, query)


def _note_rows(cursor: dict[str, int], kind: str, rows: Columns) -> None:
    """Write down for each writer its next sequence, and how many rows are below it."""
    import numpy as np

    writers = rows["writer_id"].astype(str)
    for writer in np.unique(writers).tolist():
        sequences = rows["sequence"][writers == writer]
        cursor[f"{writer}/{kind}"] = int(sequences.max()) + 1
        cursor[f"{writer}/{kind}{_ROWS}"] = len(sequences)


def _take_new(rows: Columns, cursor: Mapping[str, int], kind: str) -> Columns | None:
    """Rows beyond a cursor; None where those below it are not those that it was made of."""
    import numpy as np

    writers, sequences = rows["writer_id"].astype(str), rows["sequence"]
    is_new = np.ones(rows.count, dtype=np.bool_)
    found = set(np.unique(writers).tolist())
    suffix = f"/{kind}"
    noted = {name.removesuffix(suffix): at for name, at in cursor.items() if name.endswith(suffix)}
    for writer, start in noted.items():
        below = (writers == writer) & (sequences < start)
        if writer not in found or int(below.sum()) != cursor.get(f"{writer}{suffix}{_ROWS}"):
            return None
        is_new &= ~below
    return rows.take(is_new)


def read_grid(reader: SupportsRead, run_id: str, query: GridQuery) -> Grid:
    """A figure over rows and steps; without rows where the run has no such records.

    A backend with `SupportsGrid` decodes only what the grid is of; any other is read part
    by part.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    if find_beginnings(reader, run_id, query.kind):
        return _build_grid(iterate(reader, run_id, query.kind, query.query), query)
    if isinstance(reader, SupportsGrid):
        return reader.read_grid(run_id, query)
    return read_grid_of_records(reader, run_id, query)


def read_grid_of_records(reader: SupportsRead, run_id: str, query: GridQuery) -> Grid:
    """The same by reading every record, whatever the backend says that it can do."""
    return _build_grid(iterate_own(reader, run_id, query.kind, query.query), query)


def _build_grid(parts: Iterable[Columns], query: GridQuery) -> Grid:
    builder = GridBuilder(query)
    for part in parts:
        builder.add_columns(part)
    return builder.make_grid()
