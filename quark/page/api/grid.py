"""A figure of layers or parameters over steps, as a map is drawn of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from quark.page.api.parameters import Parameters
from quark.page.pack import encode_pack
from quark_core.backends.grids import FINITE, NOT_FINITE, Grid, GridQuery
from quark_core.errors import SchemaValidationError
from quark_core.records import LayerSummaryRecord, ParameterSummaryRecord
from quark_core.records.query import Query
from quark_core.runs.following import read_grid
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.api.analyses import AnalysisDesk
    from quark.page.api.source import PageSource
    from quark_core.backends.run_summary import RunSummary

_MAX_ROWS = 1_000
_MAX_BINS = 2_000
_BINS = 1_000
_ROWS = 1_000
_KINDS = (LayerSummaryRecord.KIND, ParameterSummaryRecord.KIND)
_SUMMARIES = ("", "activation", "gradient")
# So many of the newest records tell which fields there are.
_LOOKED_AT = 512
_FIRST_VALUES = 5
_MOST_KEPT = 64

MAP_FIELDS: dict[str, tuple[tuple[str, str | None, str], ...]] = {
    "layer": (
        ("norm", "gradient", "gradient norm"),
        ("norm", "activation", "activation norm"),
        ("std", "activation", "activation spread"),
        ("mean", "activation", "activation mean"),
        ("dead_unit_ratio", "activation", "dead units"),
        ("saturation_ratio", "activation", "saturated elements"),
        ("zero_ratio", "gradient", "zero gradients"),
        ("sample_variation_ratio", "activation", "variation between samples"),
    ),
    "parameter": (
        ("gradient_norm", None, "gradient norm"),
        ("update_to_parameter_ratio", None, "update ratio"),
        ("update_norm", None, "update norm"),
        ("value_norm", None, "weight norm"),
        ("value_std", None, "weight spread"),
        ("gradient_near_zero_ratio", None, "gradients near zero"),
        ("learning_rate", None, "learning rate"),
    ),
}
"""Kind -> what there may be a map of: field, summary type, title."""


class GridDesk:
    """Answers maps; every method may be called from any thread.

    Args:
        source: What is looked at.
        desk: The analyses, for the marks of alerts.
    """

    def __init__(self, source: PageSource, desk: AnalysisDesk) -> None:
        self._source = source
        self._desk = desk
        self._lock = threading.Lock()
        self._bases: OrderedDict[tuple[str, ...], dict[str, float]] = OrderedDict()

    def pack(self, run_id: str, parameters: Parameters) -> bytes:
        """A map.

        Raises:
            SchemaValidationError: A bad parameter.
            RunNotFoundError: There is no such run.
        """
        kind = parameters.get_word("kind", _KINDS[0], _KINDS)
        field = parameters.get_text("field")
        if field is None:
            raise SchemaValidationError(f"field must be a number of {kind} records, such as norm")
        summary_type = parameters.get_word("summary", "", _SUMMARIES) or None
        low, high = parameters.get_integer("low"), parameters.get_integer("high")
        query = GridQuery.build(
            kind,
            field,
            summary_type=summary_type,
            low=low,
            high=high,
            rows=parameters.get_bounded("rows", _ROWS, _MAX_ROWS),
            bins=parameters.get_bounded("bins", _BINS, _MAX_BINS),
        )
        summary = self._source.summarize(run_id)
        grid = read_grid(self._source.reader, run_id, query)
        base = self._find_base(summary, query, grid)
        marks = self._find_marks(summary, grid)
        starts = grid.starts
        head = {
            "kind": kind,
            "field": field,
            "summary": summary_type,
            "rows": [
                {"name": name, "type": None, "module": name.rpartition(".")[0]}
                for name in grid.names
            ],
            "row_count": len(grid.names) + grid.left_out,
            "depth": grid.depth,
            "bins": len(starts),
            "steps": [int(starts[0]), int(grid.ends[-1])] if len(starts) else None,
            "exact": grid.exact,
            "fields": self._list_fields(run_id),
            "marks": marks,
        }
        return encode_pack(
            head,
            {
                "step": starts.astype("f8"),
                "end": grid.ends.astype("f8"),
                "cells": grid.values.astype("f4"),
                "bad": grid.marks == NOT_FINITE,
                "base": base,
            },
        )

    def _find_base(self, summary: RunSummary, query: GridQuery, grid: Grid) -> NDArray[Any]:
        """For each row its own beginning: of the whole run, however small the window is."""
        import numpy as np

        run_id, began = summary.run_id, summary.stored.run.created_at
        key = (run_id, began, query.kind, query.field, query.summary_type or "", str(query.rows))
        if query.low is None:
            known = _measure_bases(grid)
            with self._lock:
                self._bases[key] = known
                self._bases.move_to_end(key)
                while len(self._bases) > _MOST_KEPT:
                    self._bases.popitem(last=False)
        else:
            with self._lock:
                found = self._bases.get(key)
            if found is None or not set(grid.names) <= set(found):
                whole = GridQuery.build(
                    query.kind,
                    query.field,
                    summary_type=query.summary_type,
                    rows=query.rows,
                    bins=_BINS,
                )
                found = _measure_bases(read_grid(self._source.reader, run_id, whole))
                with self._lock:
                    self._bases[key] = found
            known = found
        return np.array([known.get(name, np.nan) for name in grid.names], dtype="f4")

    def _find_marks(self, summary: RunSummary, grid: Grid) -> list[dict[str, Any]]:
        """Where alerts lie: on the rows that they name, and on the module that holds these."""
        analysis = self._desk.find(summary)
        if analysis is None:
            return []
        rows = {name: place for place, name in enumerate(grid.names)}
        marks = []
        for alert in analysis.alerts:
            affected: Any = dict(alert.metadata or {}).get("affected") or []
            names = [alert.culprit, *(name for name in affected if isinstance(name, str))]
            for name in dict.fromkeys(filter(None, names)):
                row = _find_row(rows, str(name))
                if row is not None and alert.step is not None:
                    marks.append(
                        {
                            "row": row,
                            "step": alert.step,
                            "finding": alert.id,
                            "severity": alert.severity,
                        }
                    )
        return marks

    def _list_fields(self, run_id: str) -> list[dict[str, Any]]:
        """What there is to see besides, as far as the newest records tell."""
        found = []
        for kind in _KINDS:
            rows = read_rows(self._source.reader, run_id, kind, Query(limit=_LOOKED_AT))
            if not rows.count:
                continue
            for field, summary_type, title in MAP_FIELDS[kind]:
                has = ~rows.is_null(field)
                if summary_type is not None:
                    has = has & (rows["summary_type"] == summary_type)
                if has.any():
                    found.append(
                        {"kind": kind, "field": field, "summary": summary_type, "title": title}
                    )
        return found


def _measure_bases(grid: Grid) -> dict[str, float]:
    import numpy as np

    bases = {}
    for name, values, marks in zip(grid.names, grid.values, grid.marks, strict=True):
        finite = np.isfinite(values)
        # What there was of a tensor that is not finite is no beginning, unless there is no other.
        whole = finite & (marks == FINITE)
        known = values[whole if whole.any() else finite][:_FIRST_VALUES]
        bases[name] = float(np.median(known)) if len(known) else float("nan")
    return bases


def _find_row(rows: dict[str, int], name: str) -> int | None:
    """The row of a module or parameter, or of the nearest module around it."""
    while name:
        if name in rows:
            return rows[name]
        name = name.rpartition(".")[0]
    return None
