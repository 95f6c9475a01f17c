"""Reads in parts and reads of curves, from any backend that reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark_core.backend import SupportsRead, SupportsSeries
from quark_core.errors import SchemaValidationError
from quark_core.query import Query, check_index
from quark_core.records import MetricRecord
from quark_core.series import Series, check_max_points, reduce_points

if TYPE_CHECKING:
    from quark_core.columns import Columns

__all__ = ["PART_ROWS", "check_rows", "iterate", "read_series", "reduce_columns"]

PART_ROWS = 65_536
"""Rows of one part, where nobody says otherwise."""


def iterate(
    reader: SupportsRead, run_id: str, kind: str, query: Query, rows: int = PART_ROWS
) -> Iterator[Columns]:
    """What `reader.read` returns, in parts of about `rows` rows, in order.

    A backend with `SupportsSeries` holds one part at a time in memory; any
    other is read whole and handed out in slices. Nothing is read before the
    first part is asked for; the parts are those of one moment.

    Raises:
        SchemaValidationError: `rows` is not a positive integer.
        RunNotFoundError: An unknown run; when the first part is asked for.
        SessionStoreError: The store cannot be read; likewise.
    """
    size = check_rows(rows)
    if isinstance(reader, SupportsSeries):
        return reader.iterate(run_id, kind, query, rows=size)
    return _slice(reader, run_id, kind, query, size)


def read_series(
    reader: SupportsRead,
    run_id: str,
    key: str,
    max_points: int | None = None,
    all_attempts: bool = False,
) -> Series:
    """One metric of a run as a curve; without any entry where the run has no such metric.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        key: The metric's stored key.
        max_points: At most so many entries; None gives every point.
        all_attempts: Also points that a later attempt, resumed from an
            earlier step, has hidden.

    Raises:
        SchemaValidationError: `max_points` is not a positive integer.
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    bound = check_max_points(max_points)
    if isinstance(reader, SupportsSeries):
        return reader.read_series(run_id, key, max_points=bound, all_attempts=all_attempts)
    query = Query(equals={"metric_key": key}, all_attempts=all_attempts)
    columns = reader.read(run_id, MetricRecord.KIND, query)
    return reduce_columns(key, columns, bound)


def reduce_columns(key: str, columns: Columns, max_points: int | None) -> Series:
    """The points of one metric, given as columns, as a curve; see `reduce_points`."""
    step, epoch, time_us, value = (columns[name] for name in ("step", "epoch", "time_us", "value"))
    return reduce_points(key, step, epoch, time_us, value, max_points)


def check_rows(rows: object) -> int:
    """Return the size of a part as a plain int.

    Raises:
        SchemaValidationError: Not a positive integer.
    """
    size = check_index(rows, "rows")
    if not size:
        raise SchemaValidationError(f"rows must be a positive integer, got {rows!r:.20}")
    return size


def _slice(
    reader: SupportsRead, run_id: str, kind: str, query: Query, rows: int
) -> Iterator[Columns]:
    columns = reader.read(run_id, kind, query)
    for start in range(0, columns.count, rows):
        yield columns.take(slice(start, start + rows))
