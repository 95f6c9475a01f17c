"""The curve that a piece of evidence was seen in, whatever records it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from quark.analysis.evidence import read_evidence
from quark.page.api.curve_pack import ShownCurve, pack_curves
from quark.page.api.parameters import MAX_ENTRIES, Parameters
from quark_core.backends.curves import make_curve
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, EvidenceRecord, MetricRecord
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark.page.api.source import PageSource

_ENTRIES = 1_000
_KINDS = ("layer", "parameter", "telemetry", "batch")
_SUMMARIES = ("", "activation", "gradient")
# What records of older versions are drawn by, which do not say their field.
_USUAL_FIELDS = {"layer": "norm", "parameter": "gradient_norm"}


def address_evidence(piece: EvidenceRecord) -> str | None:
    """What is asked for below a run's address for its curve, or None where it has none."""
    kind, name, field = piece.record_kind, piece.record_name, piece.field
    if kind is None:
        # As older versions have stored it, and rules of others that know no better.
        kind, name, field = piece.kind, piece.source, _USUAL_FIELDS.get(piece.kind)
        if kind == "telemetry":
            name, field = None, piece.source
    if kind == MetricRecord.KIND:
        return f"series?{urlencode({'key': name})}" if name else None
    if kind not in _KINDS or field is None or field not in column_types(kind):
        return None
    asked = {"kind": kind, "name": name, "field": field, "summary": piece.summary_type}
    return f"evidence?{urlencode({key: value for key, value in asked.items() if value})}"


def pack_evidence(source: PageSource, run_id: str, parameters: Parameters) -> bytes:
    """The curve of a piece of evidence, out of what `address_evidence` has made of it.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    import numpy as np

    kind = parameters.get_word("kind", "", _KINDS)
    if not kind:
        raise SchemaValidationError(f"kind must be one of {', '.join(_KINDS)}")
    field = parameters.get_text("field")
    if field is None or kind not in RECORD_TYPES or field not in column_types(kind):
        raise SchemaValidationError(f"field must be one of {kind} records, got {field!r:.60}")
    name = parameters.get_text("name")
    if kind == "telemetry" and name is not None:
        parameters.get_integer("name")
    summary_type = parameters.get_word("summary", "", _SUMMARIES) or None
    piece = EvidenceRecord(
        kind, name or kind, "", record_kind=kind, record_name=name, field=field,
        summary_type=summary_type if kind == "layer" else None,
    )  # fmt: skip
    low, high = parameters.get_integer("low"), parameters.get_integer("high")
    entries = parameters.get_bounded("entries", _ENTRIES, MAX_ENTRIES)
    source.load_run(run_id)
    try:
        found = read_evidence(source.reader, run_id, piece, low=low, high=high)
    except (TypeError, ValueError) as error:
        raise SchemaValidationError(f"field {field!r} of {kind} is no curve") from error
    curves = []
    if found is not None and len(found):
        none = np.full(len(found), -1, dtype=np.int64)
        step, epoch = (found.step, none) if found.unit == "step" else (none, found.step)
        times = np.zeros(len(found), dtype=np.int64)
        axis = "step" if found.unit == "step" else "epoch"
        curve = make_curve(
            f"{kind}/{name or ''}/{field}", 0, 0, step, epoch, times, found.value,
            axis=axis, entries=entries,
        )  # fmt: skip
        said = {"key": None, "kind": kind, "name": name, "field": field, "summary": summary_type}
        curves.append(ShownCurve(curve, {**said, "attempt": None, "rank": None}))
    return pack_curves(curves, {"kind": kind})
