"""Fields of records as curves: of layers, parameters, the machine, mini-batches; histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quark.page.api.curve_pack import ShownCurve, lay_out_curves
from quark.page.api.parameters import MAX_ENTRIES, MAX_KEYS, Parameters
from quark.page.pack import encode_pack
from quark_core.backends.curves import make_curve
from quark_core.backends.grids import find_broken
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
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark.page.api.source import PageSource
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
            f"these are {len(curves)} curves, and at most {_MOST_CURVES} are given at once: "
            "name fewer fields"
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
                f"field must be a number of {kind} records, one of {', '.join(numbers)}; "
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
