"""Reads one figure of layers or parameters over steps as a grid, from any backend that reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsGrid, SupportsRead
from quark_core.backends.forks import find_beginnings
from quark_core.backends.grids import Grid, GridBuilder, GridQuery
from quark_core.runs.reading import iterate, iterate_own

if TYPE_CHECKING:
    from quark_core.records.columns import Columns


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
