"""Measurements of layers, parameters, batches, steps and hardware as curves, maps and rows."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quark.page.pack import encode_pack
from quark.page.recent import Recent
from quark.page.routes.curves import ShownCurve, lay_out_curves
from quark.page.routes.parameters import MAX_ENTRIES, MAX_KEYS, Parameters
from quark_core.backends.curves import make_curve
from quark_core.backends.grids import FINITE, NOT_FINITE, Grid, GridQuery, find_broken
from quark_core.errors import SchemaValidationError
from quark_core.records import (
    BatchDiagnosticRecord,
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)
from quark_core.records.query import Query
from quark_core.records.schema import column_types
from quark_core.runs.following import read_grid
from quark_core.runs.reading import iterate, read_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.routes.analyses import AnalysisDesk
    from quark.page.routes.page_source import PageSource
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.columns import Columns

_NAME_COLUMNS = {
    LayerSummaryRecord.KIND: "module_name",
    ParameterSummaryRecord.KIND: "parameter_name",
    SystemTelemetryRecord.KIND: None,
    BatchDiagnosticRecord.KIND: None,
}
_SUMMARIES = ("", "activation", "gradient")
_PLACES = frozenset({"attempt", "rank", "sequence", "time_us", "step", "epoch", "call_index"})
_AXES = {"step": "step", "time": "time_us", "epoch": "epoch"}
_ENTRIES = 1_000
_MAX_FIELDS = 60
_MOST_CURVES = 400
_MOST_RIDGES = 60


def pack_module(source: PageSource, run_id: str, parameters: Parameters) -> bytes:
    """Curves of fields of records, and the histograms beside them.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    kind = parameters.get_word("kind", LayerSummaryRecord.KIND, tuple(_NAME_COLUMNS))
    names = parameters.get_texts("name", MAX_KEYS)
    column = _NAME_COLUMNS[kind]
    if column is not None and not names:
        raise SchemaValidationError(f"name must name a {kind}")
    fields = _check_fields(kind, parameters.get_texts("field", _MAX_FIELDS))
    summary_type = parameters.get_word("summary", "", _SUMMARIES) or None
    if summary_type is not None and kind != LayerSummaryRecord.KIND:
        raise SchemaValidationError("summary goes with kind=layer")
    x = parameters.get_word("x", "step", tuple(_AXES))
    entries = parameters.get_bounded("entries", _ENTRIES, MAX_ENTRIES)
    low, high = parameters.get_integer("low"), parameters.get_integer("high")
    rows = _read(source, run_id, kind, names, low, high)
    rows = _choose_rank(rows)
    curves = _make_curves(rows, kind, fields, summary_type, entries, _AXES[x])
    if len(curves) > _MOST_CURVES:
        raise SchemaValidationError(
            f"these are {len(curves)} curves; at most {_MOST_CURVES} are allowed at once. "
            "Request fewer fields"
        )
    # Even a layer of which nothing is known is one of a run that there is.
    head: dict[str, Any] = {"kind": kind}
    columns: dict[str, Any] = {}
    if parameters.get_flag("ridges"):
        head["ridges"] = _lay_out_ridges(source, run_id, names, low, high, columns)
    listed, arrays = lay_out_curves(curves, x=x)
    return encode_pack({**head, "curves": listed}, {**arrays, **columns})


def _check_fields(kind: str, fields: Sequence[str]) -> list[str]:
    """The fields that are asked for, or all numbers of the kind."""
    numbers = [
        name
        for name, encoding in column_types(kind).items()
        if encoding in ("i", "f") and name not in _PLACES
    ]
    for field in fields:
        if field not in numbers:
            raise SchemaValidationError(
                f"field must be a numeric field of {kind} records, one of {', '.join(numbers)}; "
                f"got {field!r:.60}"
            )
    return list(fields) or numbers


def _read(
    source: PageSource,
    run_id: str,
    kind: str,
    names: Sequence[str],
    low: int | None,
    high: int | None,
) -> Columns:
    column = _NAME_COLUMNS[kind]
    query = Query(step_min=low, step_max=high)
    if column is None:
        return read_rows(source.reader, run_id, kind, query)
    rows = read_rows(source.reader, run_id, kind, replace(query, any_of={column: tuple(names)}))
    if not rows.count and kind == ParameterSummaryRecord.KIND:
        # The parameters of these modules.
        modules = {"module_name": tuple(names)}
        rows = read_rows(source.reader, run_id, kind, replace(query, any_of=modules))
    return rows


def _choose_rank(rows: Columns) -> Columns:
    """Where several ranks have written, the lowest one speaks."""
    if not rows.count:
        return rows
    ranks = rows["rank"]
    least = ranks.min()
    return rows if (ranks == least).all() else rows.take(ranks == least)


def _make_curves(
    rows: Columns,
    kind: str,
    fields: Sequence[str],
    summary_type: str | None,
    entries: int,
    axis: str,
) -> list[ShownCurve]:
    import numpy as np

    if not rows.count:
        return []
    column = _NAME_COLUMNS[kind]
    groups: list[tuple[str | None, str | None, int, Columns]] = []
    for name in [None] if column is None else list(dict.fromkeys(rows[column].tolist())):
        named = rows if column is None else rows.take(rows[column] == name)
        kinds: list[str | None] = [None]
        if kind == LayerSummaryRecord.KIND:
            kinds = [one for one in _SUMMARIES[1:] if summary_type in (None, one)]
        for one in kinds:
            its = named if one is None else named.take(named["summary_type"] == one)
            groups += [
                (name, one, attempt, its.take(its["attempt"] == attempt))
                for attempt in np.unique(its["attempt"]).tolist()
            ]
    curves = []
    for name, one, attempt, its in groups:
        for field in fields:
            broken = find_broken(its, kind, field)
            known = np.flatnonzero(~_find_nulls(its, field) | broken)
            if not len(known):
                continue
            curve = make_curve(
                f"{kind}/{name or ''}/{field}",
                attempt,
                int(its["rank"][0]),
                its["step"][known],
                its["epoch"][known],
                its["time_us"][known],
                np.where(broken, np.nan, its[field].astype(np.float64))[known],
                axis=axis,
                entries=entries,
            )
            said = {"key": None, "kind": kind, "name": name, "field": field, "summary": one}
            curves.append(ShownCurve(curve, said))
    return curves


def _find_nulls(rows: Columns, field: str) -> Any:
    values = rows[field]
    return rows.is_null(field) if values.dtype.kind == "f" else values < 0


def _lay_out_ridges(
    source: PageSource,
    run_id: str,
    names: Sequence[str],
    low: int | None,
    high: int | None,
    columns: dict[str, Any],
) -> list[dict[str, Any]]:
    """Histograms of the parameters of these modules, oldest first, evenly spaced."""
    import numpy as np

    kind = ParameterDistributionRecord.KIND
    found: Columns | None = None
    for column in ("module_name", "parameter_name"):
        query = Query(any_of={column: tuple(names)}, step_min=low, step_max=high)
        found = read_rows(source.reader, run_id, kind, query)
        if found.count:
            break
    if found is None or not found.count:
        return []
    found = _choose_rank(found)
    ridges: list[dict[str, Any]] = []
    labels = zip(found["parameter_name"].tolist(), found["distribution_type"].tolist(), strict=True)
    groups: dict[tuple[str, str], list[int]] = {}
    for row, label in enumerate(labels):
        groups.setdefault(label, []).append(row)
    for (parameter, of), members in groups.items():
        rows = np.array(members)
        rows = rows[np.argsort(found["step"][rows], kind="stable")]
        if len(rows) > _MOST_RIDGES:
            rows = rows[np.linspace(0, len(rows) - 1, _MOST_RIDGES).round().astype(np.int64)]
        records: Any = found.take(rows).to_records()
        for record in records:
            place = len(ridges)
            edges, counts = f"ridge.{place}.edges", f"ridge.{place}.counts"
            columns[edges] = np.array(record.bin_edges, dtype="f4")
            columns[counts] = np.array(record.counts, dtype="f4")
            ridges.append(
                {
                    "parameter": parameter,
                    "type": of,
                    "step": record.step,
                    "edges": edges,
                    "counts": counts,
                }
            )
    return ridges


_MAX_ROWS = 1_000
_MAX_BINS = 2_000
_BINS = 1_000
_ROWS = 1_000
_KINDS = (LayerSummaryRecord.KIND, ParameterSummaryRecord.KIND)
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
        self._bases = Recent[tuple[str, ...], dict[str, float]](_MOST_KEPT)

    def pack(self, run_id: str, parameters: Parameters) -> bytes:
        """A map.

        Raises:
            SchemaValidationError: A bad parameter.
            RunNotFoundError: There is no such run.
        """
        kind = parameters.get_word("kind", _KINDS[0], _KINDS)
        field = parameters.get_text("field")
        if field is None:
            raise SchemaValidationError(f"field must be a numeric {kind} field, such as norm")
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
        head = {
            "kind": kind,
            "field": field,
            "summary": summary_type,
            "rows": [
                {"name": name, "type": None, "module": name.rpartition(".")[0]}
                for name in grid.names
            ],
            "depth": grid.depth,
            "bins": len(grid.starts),
            "fields": self._list_fields(run_id),
            "marks": marks,
        }
        return _pack_grid(grid, head, bad=grid.marks == NOT_FINITE, base=base)

    def _find_base(self, summary: RunSummary, query: GridQuery, grid: Grid) -> NDArray[Any]:
        """For each row its own beginning: of the whole run, however small the window is."""
        import numpy as np

        run_id, began = summary.run_id, summary.stored.run.created_at
        key = (run_id, began, query.kind, query.field, query.summary_type or "", str(query.rows))
        if query.low is None:
            known = _measure_bases(grid)
            with self._lock:
                self._bases[key] = known
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


def _pack_grid(grid: Grid, head: Mapping[str, Any], **columns: NDArray[Any]) -> bytes:
    """A map: what is said of it, its cells, and what else there is of each row or cell."""
    starts = grid.starts
    said = {
        **head,
        "row_count": len(grid.names) + grid.left_out,
        "steps": [int(starts[0]), int(grid.ends[-1])] if len(starts) else None,
        "exact": grid.exact,
    }
    cells = {"step": starts.astype("f8"), "end": grid.ends.astype("f8")}
    return encode_pack(said, {**cells, "cells": grid.values.astype("f4"), **columns})


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


_MOST_HARD = 50
_MOST_CLASSES = 200
_MOST_IDS = 20


def describe_batches(source: PageSource, run_id: str) -> dict[str, Any]:
    """What `DataDiagnostics.summarize` says, and the mean loss of the batches with each class.

    Raises:
        RunNotFoundError: There is no such run.
    """
    from quark_core.writers.data_diagnostics import BatchReading

    run = source.open_run(run_id)
    found = BatchReading(run).summarize(hard_batch_limit=_MOST_HARD).to_dict()
    for name in ("hard_batches", "loss_outliers", "sequence_length_outliers"):
        for batch in found[name]:
            ids = batch["sample_ids"] or ()
            batch["sample_ids"], batch["sample_count"] = list(ids[:_MOST_IDS]), len(ids)
    exposure = found["exposure"]
    exposure["class_count"] = len(exposure["class_counts"])
    for name in ("class_counts", "class_fractions"):
        exposure[name] = dict(list(exposure[name].items())[:_MOST_CLASSES])
    losses = _measure_classes(source, run_id)
    return {"summary": found, "class_losses": {name: losses[name] for name in exposure[
        "class_counts"] if name in losses}}  # fmt: skip


def _measure_classes(source: PageSource, run_id: str) -> dict[str, float]:
    """The mean of the losses of the batches with a class, each by how many of it were there."""
    import numpy as np

    total: dict[str, float] = defaultdict(float)
    weight: dict[str, float] = defaultdict(float)
    for part in iterate(source.reader, run_id, BatchDiagnosticRecord.KIND, Query()):
        losses = part["loss"]
        for loss, counts in zip(losses.tolist(), part["class_counts"], strict=True):
            if counts is None or not np.isfinite(loss):
                continue
            for label, count in counts.items():
                total[label] += loss * count
                weight[label] += count
    return {label: total[label] / weight[label] for label in total if weight[label]}


_MAX_RANKS = 1_000
_SYSTEM_BINS = 600
_MOST_BINS = 2_000
# A rank whose newest step is so far behind the others', of all steps, no longer says anything.
_SILENT_SHARE = 0.05

FIELDS = {
    "step_time_ms": "step time, ms",
    "data_time_ms": "waiting for data, ms",
    "compute_time_ms": "computing, ms",
    "gpu_utilization_percent": "GPU utilization, %",
    "gpu_memory_usage_percent": "GPU memory used, %",
    "cpu_usage_percent": "CPU of the node, %",
    "process_cpu_percent": "CPU of this process, % of a core",
    "ram_usage_percent": "node memory used, %",
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
    import numpy as np

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
            bins=parameters.get_bounded("bins", _SYSTEM_BINS, _MOST_BINS),
        ),
    )
    medians = _measure_medians(grid)
    known = [median for median in medians if np.isfinite(median)]
    # What a rank that lags is held against: the median of the medians of all.
    typical = float(np.median(known)) if known else float("nan")
    head = {
        "field": field,
        "title": FIELDS[field],
        "rows": [{"name": f"rank {name}", "type": None, "module": ""} for name in grid.names],
        "ranks": _describe_ranks(grid, medians, typical),
        "fields": _list_fields(source, run_id),
    }
    return _pack_grid(grid, head, base=np.full(len(grid.names), typical, dtype="f4"))


def _measure_medians(grid: Grid) -> list[float]:
    import numpy as np

    medians = []
    for row in grid.values:
        known = row[np.isfinite(row)]
        medians.append(float(np.median(known)) if len(known) else float("nan"))
    return medians


def _describe_ranks(grid: Grid, medians: Sequence[float], typical: float) -> list[dict[str, Any]]:
    """Each rank with its pace; the silent first, then the slowest."""
    import numpy as np

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
