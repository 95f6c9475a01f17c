"""Reads of a run that is open in this process: what it has logged is flushed first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark_core import settings
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.names import check_name, decode_name, encode_name
from quark_core.query import Query
from quark_core.reading import PART_ROWS, check_rows, iterate, read_series, reduce_columns
from quark_core.records import MetricRecord
from quark_core.run_summary import RunSummary
from quark_core.series import Series, check_max_points

if TYPE_CHECKING:
    from quark_core.backend import SupportsRead
    from quark_core.columns import Columns
    from quark_core.open_run import OpenRun

__all__ = ["encode_key", "iterate_run", "read_run_series", "series"]


_SHOWN = 128


def series(
    run: object, key: str, *, max_points: int | None = None, all_attempts: bool = False
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

    Returns:
        The curve, without any entry where the run has no such metric.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
        SessionStoreError: The store cannot be read.
    """
    from quark_core.opening import resolve_target

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
    return read_run_series(target, key, max_points, all_attempts)


def read_run_series(
    run: OpenRun, key: str, max_points: int | None, all_attempts: bool = False
) -> Series:
    """Flush, then read one metric; arguments and errors as in `series`."""
    from quark_core.columns import Columns

    stored_key = encode_key(key, "key")
    bound = check_max_points(max_points)
    source = _flush(run)
    if source is None:
        return reduce_columns(stored_key, Columns.empty(MetricRecord.KIND), bound)
    reader, run_id = source
    return read_series(reader, run_id, stored_key, bound, bool(all_attempts))


def iterate_run(run: OpenRun, kind: str, query: Query, rows: int = PART_ROWS) -> Iterator[Columns]:
    """Flush now, then return the rows that fit in parts; see `quark_core.reading.iterate`."""
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
    checked = check_name(name, argument)
    # A name that decodes to something else is itself a stored form.
    return checked if decode_name(checked) != checked else encode_name(checked)


def _flush(run: OpenRun) -> tuple[SupportsRead, str] | None:
    """Bring what was logged to the primary; returns it, or None where nothing is kept."""
    if run.forked:
        raise SessionStoreError(
            "a forked process can log to its parent's run but not read it: read in the "
            "parent, or in a process that was spawned"
        )
    # What is read is in the primary then; the mirrors' share need not be on the disk for it.
    run.stream.flush(settings.persistence_timeout_s(), sync=False)
    if run.reader is None or run.context.run_id is None:
        return None
    return run.reader, run.context.run_id
