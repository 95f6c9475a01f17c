"""What steps took and what the machine did, a row for each rank over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.page.pack import encode_pack
from quark_core.backends.grids import GridQuery
from quark_core.errors import SchemaValidationError
from quark_core.records import SystemTelemetryRecord
from quark_core.records.query import Query
from quark_core.runs.following import read_grid

if TYPE_CHECKING:
    from quark.page.api.parameters import Parameters
    from quark.page.api.source import PageSource
    from quark_core.backends.grids import Grid

_MAX_RANKS = 1_000
_BINS = 600
_MOST_BINS = 2_000
_LOOKED_AT = 512
# A rank whose newest step is so far behind the others', of all steps, no longer says anything.
_SILENT_SHARE = 0.05

FIELDS = {
    "step_time_ms": "step time, ms",
    "data_time_ms": "waiting for data, ms",
    "compute_time_ms": "computing, ms",
    "gpu_utilization_percent": "GPU in use, %",
    "gpu_memory_usage_percent": "GPU memory in use, %",
    "cpu_usage_percent": "processors of the node in use, %",
    "process_cpu_percent": "this process, % of a core",
    "ram_usage_percent": "memory of the node in use, %",
    "process_rss_bytes": "memory of this process, bytes",
    "workers_rss_bytes": "memory of its workers, bytes",
}
"""Field -> title, in the order in which they are shown."""


def pack_system(source: PageSource, run_id: str, parameters: Parameters) -> bytes:
    """One figure of the machine by rank and step, and which figures there are.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    field = parameters.get_word("field", "step_time_ms", tuple(FIELDS))
    low, high = parameters.get_integer("low"), parameters.get_integer("high")
    if low is not None and high is not None and low > high:
        raise SchemaValidationError(f"low must not be above high, got {low} and {high}")
    source.load_run(run_id)
    grid = read_grid(
        source.reader,
        run_id,
        GridQuery.build(
            SystemTelemetryRecord.KIND,
            field,
            by="rank",
            low=low,
            high=high,
            rows=_MAX_RANKS,
            bins=parameters.get_bounded("bins", _BINS, _MOST_BINS),
        ),
    )
    starts = grid.starts
    head = {
        "field": field,
        "title": FIELDS[field],
        "rows": [{"name": f"rank {name}", "type": None, "module": ""} for name in grid.names],
        "ranks": _describe_ranks(grid),
        "row_count": len(grid.names) + grid.left_out,
        "steps": [int(starts[0]), int(grid.ends[-1])] if len(starts) else None,
        "exact": grid.exact,
        "fields": _list_fields(source, run_id),
    }
    columns = {
        "step": starts.astype("f8"),
        "end": grid.ends.astype("f8"),
        "cells": grid.values.astype("f4"),
        "base": _measure_typical(grid),
    }
    return encode_pack(head, columns)


def _measure_typical(grid: Grid) -> Any:
    """For each rank the median of the medians of all: what a rank that lags is held against."""
    import numpy as np

    medians = _measure_medians(grid)
    known = [median for median in medians if np.isfinite(median)]
    typical = float(np.median(known)) if known else float("nan")
    return np.full(len(grid.names), typical, dtype="f4")


def _measure_medians(grid: Grid) -> list[float]:
    import numpy as np

    medians = []
    for row in grid.values:
        known = row[np.isfinite(row)]
        medians.append(float(np.median(known)) if len(known) else float("nan"))
    return medians


def _describe_ranks(grid: Grid) -> list[dict[str, Any]]:
    """Each rank with its pace; the silent first, then the slowest."""
    import numpy as np

    medians = _measure_medians(grid)
    known = [median for median in medians if np.isfinite(median)]
    typical = float(np.median(known)) if known else float("nan")
    lasts = []
    for row in grid.values:
        seen = np.flatnonzero(np.isfinite(row))
        lasts.append(int(grid.ends[seen[-1]]) if len(seen) else None)
    newest = max((last for last in lasts if last is not None), default=0)
    reach = newest - (int(grid.starts[0]) if len(grid.starts) else 0)
    ranks: list[dict[str, Any]] = [
        {
            "rank": name,
            "median": median,
            "ratio": median / typical if typical else None,
            "last_step": last,
            "is_silent": last is None or newest - last > max(1.0, _SILENT_SHARE * reach),
        }
        for name, median, last in zip(grid.names, medians, lasts, strict=True)
    ]
    ranks.sort(key=lambda rank: (not rank["is_silent"], -np.nan_to_num(rank["median"])))
    return ranks


def _list_fields(source: PageSource, run_id: str) -> list[dict[str, str]]:
    """Which figures there are, as far as the newest records tell."""
    rows = source.reader.read(run_id, SystemTelemetryRecord.KIND, Query(limit=_LOOKED_AT))
    return [
        {"field": field, "title": title}
        for field, title in FIELDS.items()
        if rows.count and (~rows.is_null(field)).any()
    ]
