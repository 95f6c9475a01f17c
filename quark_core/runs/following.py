"""Reads for whoever looks on at a run: many curves at once, and what came since.

Any backend that reads is served. One without `Capability.CHANGES` is read row by
row, each time from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsChanges, SupportsRead
from quark_core.backends.curves import (
    Cursor,
    CurveQuery,
    CurveSet,
    RunChanges,
    RunHeads,
    check_cursor,
    check_keys,
    reduce_curves,
)
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, MetricRecord, parse_time
from quark_core.records.query import Query
from quark_core.runs.reading import check_rows, read_rows

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

__all__ = [
    "CHANGED_ROWS",
    "find_changes",
    "note_heads",
    "read_changes",
    "read_heads",
    "read_mark",
    "read_series_many",
    "reduce_series_many",
]

CHANGED_ROWS = 100_000
"""About how many records one answer to `read_changes` has, where nobody says otherwise."""

_ROWS = ":rows"


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
    if query.since_start:
        query = query.begin_at(parse_time(reader.load_run(run_id).run.created_at))
    if isinstance(reader, SupportsChanges):
        return reader.read_series_many(run_id, query)
    return reduce_series_many(reader, run_id, query)


def reduce_series_many(reader: SupportsRead, run_id: str, query: CurveQuery) -> CurveSet:
    """What `read_series_many` returns, out of all rows of these metrics."""
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
    if isinstance(reader, SupportsChanges):
        return reader.read_heads(run_id)
    return note_heads(reader, run_id, wanted, names)


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
    if isinstance(reader, SupportsChanges):
        return reader.read_changes(
            run_id,
            known,
            kinds=wanted,
            keys=names,
            all_attempts=bool(all_attempts),
            max_rows=bound,
        )
    return find_changes(
        reader, run_id, known, kinds=wanted, keys=names, all_attempts=bool(all_attempts)
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
    return reader.read_mark(run_id) if isinstance(reader, SupportsChanges) else None


def _check_kinds(kinds: object) -> tuple[str, ...]:
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise SchemaValidationError(
            f"kinds must be a list of kinds of records, not {type(kinds).__name__}"
        )
    for kind in kinds:
        if kind not in RECORD_TYPES:
            raise SchemaValidationError(
                f"kinds must be of {', '.join(sorted(RECORD_TYPES))}; got {kind!r:.60}"
            )
    return tuple(dict.fromkeys(kinds))


def _read_kind(
    reader: SupportsRead,
    run_id: str,
    kind: str,
    keys: Sequence[str] | None,
    all_attempts: bool,
) -> Columns:
    if kind == MetricRecord.KIND and keys is not None:
        return _read_metrics(reader, run_id, keys, all_attempts)
    return read_rows(reader, run_id, kind, Query(all_attempts=bool(all_attempts)))


def _read_metrics(
    reader: SupportsRead, run_id: str, keys: Sequence[str], all_attempts: bool
) -> Columns:
    """All of them in one read, since two reads are of two moments."""
    query = Query(any_of={"metric_key": tuple(keys)}, all_attempts=bool(all_attempts))
    return read_rows(reader, run_id, MetricRecord.KIND, query)


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
