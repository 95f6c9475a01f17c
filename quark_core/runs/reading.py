"""Reads of rows, whole or in parts, from any backend that reads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsRead, SupportsSeries
from quark_core.backends.forks import Beginning, find_beginnings
from quark_core.backends.series import (
    Series,
    choose_rank_points,
    merge_ranks,
    reduce_points,
)
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.names import check_key, decode_name, encode_name
from quark_core.records.query import Query, check_index

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

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
    return f"has no metric {shown!r}; similar names: {', '.join(map(repr, near))}"


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
        has = f"the metrics are {shown}{more}" if keys else "no metric was logged"
        said = f"has no metric {decode_name(name)!r}; {has}"
    raise SchemaValidationError(f"{argument}: {whose} {said}")


PART_ROWS = 65_536
"""Rows of one part, where nobody says otherwise."""


def read_rows(reader: SupportsRead, run_id: str, kind: str, query: Query) -> Columns:
    """Rows of a run, those that a fork has of its parent first, in persistence order.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    found = reader.read(run_id, kind, query)
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


def read_beginning(
    reader: SupportsRead, beginning: Beginning, kind: str, query: Query
) -> Columns | None:
    """What a fork has of a run before it, of what is asked of the fork; None for nothing."""
    its = beginning.bound(query)
    if its is None:
        return None
    try:
        return beginning.adopt(reader.read(beginning.run_id, kind, its))
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
    if isinstance(reader, SupportsSeries):
        yield from reader.iterate(run_id, kind, query, rows=rows)
    else:
        yield from _slice(reader.read(run_id, kind, query), rows)


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


def encode_key(name: str, argument: str) -> str:
    """The stored form of a metric's name, of which either form may be given.

    Raises:
        SchemaValidationError: Not a str, empty or too long.
    """
    checked = check_key(name, argument)
    # A name that decodes to something else is itself a stored form.
    return checked if decode_name(checked) != checked else encode_name(checked)
