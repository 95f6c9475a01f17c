"""Reads of rows, in parts and of curves, from any backend that reads, and of runs open here.

A backend may be older than a filter: what another process or a plugin gives is
looked at again, so that rows of other ranks are never taken for those of one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsRead, SupportsSeries
from quark_core.backends.run_summary import RunSummary
from quark_core.backends.series import (
    Beginning,
    Series,
    check_max_points,
    choose_rank_points,
    find_beginnings,
    join_series,
    merge_ranks,
    reduce_points,
)
from quark_core.errors import QuarkError, RunNotFoundError, SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.names import check_key, decode_name, encode_name
from quark_core.records.query import Query, check_index

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.runs.open_run import OpenRun
    from quark_core.runs.run_reader import RunReader

_log = logging.getLogger("quark")

# Beyond this the comparison of names would take longer than the read that found nothing.
_MAX_COMPARED = 10_000
_MAX_LISTED = 10


def describe_unknown_metric(name: str, keys: Iterable[str]) -> str | None:
    """What to say of a metric that is not among these, with the names near it; None without any."""
    # What a search is made of is not imported for a run that nothing is searched in.
    from quark_core.search.resolution import suggest_names

    shown = decode_name(name)
    near = suggest_names(shown, map(decode_name, islice(keys, _MAX_COMPARED)))
    if not near:
        return None
    return f"has no metric {shown!r}; near it: {', '.join(map(repr, near))}"


def refuse_unknown_metric(name: str, keys: Collection[str], argument: str, whose: str) -> None:
    """Refuse a metric that is not among these: nothing can be judged by it.

    Args:
        name: The metric, as somebody has named it.
        keys: Stored keys of those there are.
        argument: What has named it.
        whose: Who does not have it, such as `the run`.

    Raises:
        SchemaValidationError: It says what there is.
    """
    if encode_name(decode_name(name)) in keys:
        return
    said = describe_unknown_metric(name, keys)
    if said is None:
        shown = ", ".join(repr(decode_name(key)) for key in islice(keys, _MAX_LISTED))
        more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
        has = f"there are {shown}{more}" if keys else "nothing was logged there"
        said = f"has no metric {decode_name(name)!r}; {has}"
    raise SchemaValidationError(f"{argument}: {whose} {said}")


def tell_unknown_metric(run: OpenRun, key: str) -> None:
    """Warn once of a metric that was read and that the run does not have, where one is near it.

    Costs nothing more once it was looked up: a script may ask again and again for what is
    yet to be logged.

    Args:
        run: The run, flushed.
        key: The stored key.
    """
    from quark_core.runs.run_search import summarize_run

    if run.reader is None or run.context.run_id is None or not run.warns_first("missed", key):
        return
    try:
        keys = summarize_run(run.reader, run.context.run_id).metrics
    except QuarkError:
        return
    if key not in keys and (said := describe_unknown_metric(key, keys)):
        _log.warning("run %s %s; nothing was read", run.context.run_id, said)


PART_ROWS = 65_536
"""Rows of one part, where nobody says otherwise."""


def read_rows(reader: SupportsRead, run_id: str, kind: str, query: Query) -> Columns:
    """Rows of a run, those that a fork has of its parent first, in persistence order.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    found = read_own_rows(reader, run_id, kind, query)
    parts, count = [found], found.count
    for beginning in reversed(find_beginnings(reader, run_id, kind)):
        if query.limit is not None and count >= query.limit:
            break
        part = read_beginning(reader, beginning, kind, query)
        if part is not None:
            parts.insert(0, part)
            count += part.count
    if len(parts) == 1:
        return found
    from quark_core.records.columns import Columns

    some = [part for part in parts if part.count]
    return (Columns.concatenate(kind, some) if some else found).keep_newest(query.limit)


def read_own_rows(reader: SupportsRead, run_id: str, kind: str, query: Query) -> Columns:
    """What `reader.read` returns, also where it passes over the query's rank.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    found = reader.read(run_id, kind, query)
    if query.rank is None or _is_of(found, query.rank):
        return found
    if query.limit is not None:
        # The newest of all ranks are not those of this one.
        found = reader.read(run_id, kind, replace(query, limit=None))
    return found.take(found["rank"] == query.rank).keep_newest(query.limit)


def read_beginning(
    reader: SupportsRead, beginning: Beginning, kind: str, query: Query
) -> Columns | None:
    """What a fork has of a run before it, of what is asked of the fork; None for nothing."""
    its = beginning.bound(query)
    if its is None:
        return None
    try:
        return beginning.adopt(read_own_rows(reader, beginning.run_id, kind, its))
    except RunNotFoundError:
        return None  # it went this moment; the next read says so


def iterate(
    reader: SupportsRead, run_id: str, kind: str, query: Query, rows: int = PART_ROWS
) -> Iterator[Columns]:
    """What `read_rows` returns, in parts of about `rows` rows, in order.

    A backend with `SupportsSeries` holds one part at a time in memory; any
    other is read whole and handed out in slices. Nothing is read before the
    first part is asked for; the parts are those of one moment, of a fork those
    of each of the runs that it descends from.

    Raises:
        SchemaValidationError: `rows` is not a positive integer.
        RunNotFoundError: An unknown run; when the first part is asked for.
        SessionStoreError: The store cannot be read; likewise.
    """
    return _iterate_all(reader, run_id, kind, query, check_rows(rows))


def _iterate_all(
    reader: SupportsRead, run_id: str, kind: str, query: Query, size: int
) -> Iterator[Columns]:
    beginnings = find_beginnings(reader, run_id, kind)
    if beginnings and query.limit is not None:
        yield from _slice(read_rows(reader, run_id, kind, query), size)
        return
    for beginning in beginnings:
        its = beginning.bound(query)
        if its is None:
            continue
        try:
            for part in iterate_own(reader, beginning.run_id, kind, its, size):
                yield beginning.adopt(part)
        except RunNotFoundError:
            continue
    yield from iterate_own(reader, run_id, kind, query, size)


def iterate_own(
    reader: SupportsRead, run_id: str, kind: str, query: Query, rows: int = PART_ROWS
) -> Iterator[Columns]:
    """As `iterate`, of what the run has logged itself, as mirrors and exports of it have it."""
    if not isinstance(reader, SupportsSeries) or (query.rank, query.limit).count(None) == 0:
        yield from _slice(read_own_rows(reader, run_id, kind, query), rows)
        return
    parts = reader.iterate(run_id, kind, query, rows=rows)
    yield from parts if query.rank is None else _sift(parts, query.rank)


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
    can_reduce = isinstance(reader, SupportsSeries) and _knows_rank(reader)
    query = Query(equals={"metric_key": key}, all_attempts=all_attempts, rank=wanted)
    if not can_reduce or (beginnings and bound is None):
        return reduce_columns(key, read_rows(reader, run_id, MetricRecord.KIND, query), bound)
    assert isinstance(reader, SupportsSeries)
    own = reader.read_series(run_id, key, max_points=bound, all_attempts=all_attempts, rank=wanted)
    if not beginnings:
        return own
    from quark_core.backends.curves import CurveQuery
    from quark_core.runs.following import read_beginning_curves

    curves = CurveQuery(
        keys=(key,),
        entries=bound,
        ranks=None if wanted is None else (wanted,),
        all_attempts=all_attempts,
    )
    parts: list[Series] = []
    for beginning in beginnings:
        parts += read_beginning_curves(reader, beginning, curves)
    return join_series([*parts, own], bound)


def reduce_columns(key: str, columns: Columns, max_points: int | None) -> Series:
    """The points of one metric, given as columns, as a curve of their rank or across ranks."""
    import numpy as np

    constant = columns.find_constant("rank")
    ranks = [constant[0]] if constant else np.unique(columns["rank"]).tolist()
    if len(ranks) < 2:
        names = ("step", "epoch", "time_us", "value")
        step, epoch, time_us, value = (columns[name] for name in names)
        found = reduce_points(key, step, epoch, time_us, value, max_points)
        return replace(found, ranks=tuple(ranks) if columns.count else ())
    attempts = []
    for attempt in np.unique(columns["attempt"]):
        parts = []
        for rank in ranks:
            its = columns.take((columns["attempt"] == attempt) & (columns["rank"] == rank))
            if its.count:
                parts.append(reduce_columns(key, its, choose_rank_points(max_points)))
        attempts.append(parts)
    return merge_ranks(key, attempts, max_points)


def check_rows(rows: object) -> int:
    """Return the size of a part as a plain int.

    Raises:
        SchemaValidationError: Not a positive integer.
    """
    size = check_index(rows, "rows")
    if not size:
        raise SchemaValidationError(f"rows must be a positive integer, got {rows!r:.20}")
    return size


def _slice(columns: Columns, rows: int) -> Iterator[Columns]:
    for start in range(0, columns.count, rows):
        yield columns.take(slice(start, start + rows))


def _sift(parts: Iterator[Columns], rank: int) -> Iterator[Columns]:
    for part in parts:
        if _is_of(part, rank):
            yield part
        elif (own := part.take(part["rank"] == rank)).count:
            yield own


def _is_of(columns: Columns, rank: int) -> bool:
    """Whether all rows are of one rank."""
    constant = columns.find_constant("rank")
    return constant == (rank,) if constant else bool((columns["rank"] == rank).all())


def _knows_rank(reader: SupportsSeries) -> bool:
    """Whether its curves can be of one rank: those of an older plugin cannot."""
    return "rank" in inspect.signature(reader.read_series).parameters


_SHOWN = 128


def series(
    run: object,
    key: str,
    *,
    max_points: int | None = None,
    all_attempts: bool = False,
    rank: int | None = None,
) -> Series:
    """One metric of a run as a curve, cheap however many points it has.

    Flushes the run where this process holds it open.

    Args:
        run: A TrainingSession (`quark.open_run` gives one of any run), or a
            RunContext.
        key: The metric's key, as it was logged or as it is stored.
        max_points: At most so many entries, each of which stands for about
            equally many points, with their extremes; None gives every point.
        all_attempts: Also points that a later attempt, resumed from an
            earlier step, has hidden.
        rank: The curve of this rank of the launch. By default the curve is
            across all ranks that have logged the metric: of one rank it is
            that rank's; of several an entry stands for the points of all of
            them at a step or in a stretch of steps, with their extremes.

    Returns:
        The curve, without any entry where the run has no such metric; its
        `ranks` says whose points these are.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
        SessionStoreError: The store cannot be read.
    """
    from quark_core.runs.opening import resolve_target

    if isinstance(run, (str, RunSummary)):
        run_id = run if isinstance(run, str) else run.run_id
        raise SchemaValidationError(
            f"run must be an opened run, not {type(run).__name__}: open it with "
            f"quark.open_run({run_id[:_SHOWN]!r}) and give what that returns"
        )
    try:
        target = resolve_target(run)
    except SchemaValidationError as error:
        message = str(error).replace("session", "run", 1)
        raise SchemaValidationError(f"{message}; quark.open_run(run_id) opens a run") from None
    return read_run_series(target, key, max_points, all_attempts, rank)


def read_run_series(
    run: OpenRun,
    key: str,
    max_points: int | None,
    all_attempts: bool = False,
    rank: int | None = None,
) -> Series:
    """Flush, then read one metric; arguments and errors as in `series`."""
    from quark_core.records.columns import Columns

    stored_key = encode_key(key, "key")
    bound, wanted = check_max_points(max_points), check_index(rank, "rank")
    source = _flush(run)
    if source is None:
        return reduce_columns(stored_key, Columns.empty(MetricRecord.KIND), bound)
    reader, run_id = source
    found = read_series(reader, run_id, stored_key, bound, bool(all_attempts), wanted)
    if not len(found.count):
        tell_unknown_metric(run, stored_key)
    return found


def iterate_run(
    run: OpenRun | RunReader, kind: str, query: Query, rows: int = PART_ROWS
) -> Iterator[Columns]:
    """Flush now, then return the rows that fit in parts; see `quark_core.runs.reading.iterate`."""
    size = check_rows(rows)
    source = _flush(run)
    if source is None:
        return iter(())
    reader, run_id = source
    return iterate(reader, run_id, kind, query, size)


def encode_key(name: str, argument: str) -> str:
    """The stored form of a metric's name, of which either form may be given.

    Raises:
        SchemaValidationError: Not a str, empty or too long.
    """
    checked = check_key(name, argument)
    # A name that decodes to something else is itself a stored form.
    return checked if decode_name(checked) != checked else encode_name(checked)


def _flush(run: OpenRun | RunReader) -> tuple[SupportsRead, str] | None:
    """Bring what was logged to the primary; returns it, or None where nothing is kept."""
    run.catch_up()
    if run.reader is None or run.context.run_id is None:
        return None
    return run.reader, run.context.run_id
