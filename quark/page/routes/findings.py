"""The curve that a piece of evidence was seen in, whatever records it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import numpy as np

from quark.analysis.evidence import read_evidence
from quark.analysis.fixes import read_fixes
from quark.analysis.health import order_alerts
from quark.page.routes.curves import ShownCurve, pack_curves
from quark.page.routes.parameters import MAX_ENTRIES, Parameters
from quark_core.backends.curves import make_curve
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, EvidenceRecord, MetricRecord
from quark_core.records.names import decode_name
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import Analysis
    from quark_core.records import AlertRecord, HealthScoreRecord

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
    kind = parameters.get_word("kind", "", _KINDS)
    if not kind:
        raise SchemaValidationError(f"kind must be one of {', '.join(map(repr, _KINDS))}")
    field = parameters.get_text("field")
    if field is None or kind not in RECORD_TYPES or field not in column_types(kind):
        raise SchemaValidationError(f"field must be a field of {kind} records, got {field!r:.60}")
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
        raise SchemaValidationError(f"field {field!r} of {kind} is not a curve") from error
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


_UNSAID = (
    "this analysis does not record why the other rules had no data; `quark analyze` shows and "
    "stores it"
)


def describe_analysis(analysis: Analysis | None, *, computing: bool = False) -> dict[str, Any]:
    """What is known, or that it is being computed."""
    if analysis is None:
        return {
            "state": "computing",
            "mark": None,
            "computing": computing,
            "at": None,
            "generation": None,
            "note": None,
            "scores": [],
            "findings": [],
            "phases": [],
            "phase_notes": [],
            "rules": {"count": None, "with_data": None, "missing": None, "note": None},
        }
    return {
        "state": analysis.state,
        "mark": analysis.mark,
        "computing": computing,
        "at": analysis.at,
        "generation": analysis.generation,
        "note": analysis.note,
        "scores": [_describe_score(score) for score in analysis.scores],
        "findings": [
            {**_describe_alert(alert), "depth": depth}
            for alert, depth in order_alerts(analysis.alerts)
        ],
        "phases": [
            {
                "name": phase.phase_name,
                "title": phase.display_name,
                "summary": phase.summary,
                "from": phase.step_start,
                "to": phase.step_end,
                "epoch_from": phase.epoch_start,
                "epoch_to": phase.epoch_end,
            }
            for phase in analysis.phases
        ],
        "phase_notes": list(analysis.phase_notes),
        "rules": _describe_rules(analysis),
    }


def _describe_alert(alert: AlertRecord) -> dict[str, Any]:
    metadata: dict[str, Any] = dict(alert.metadata or {})
    return {
        "id": alert.id,
        "rule": alert.rule_id,
        "category": alert.category,
        "severity": alert.severity,
        "title": alert.title,
        "summary": alert.summary,
        "fact": alert.fact,
        "inference": alert.inference,
        "advice": alert.suggested_check,
        "fix": read_fixes().get(alert.rule_id),
        "culprit": alert.culprit,
        "step": alert.step,
        "step_end": metadata.get("step_end"),
        "epoch": alert.epoch,
        "confidence": metadata.get("confidence"),
        "caused_by": metadata.get("caused_by"),
        "consequences": metadata.get("consequences") or [],
        "affected": metadata.get("affected") or [],
        "is_note": metadata.get("documented_level") is not None,
        "evidence": [_describe_evidence(evidence) for evidence in alert.evidence],
    }


def _describe_evidence(evidence: EvidenceRecord) -> dict[str, Any]:
    is_metric = evidence.kind == MetricRecord.KIND
    return {
        "kind": evidence.kind,
        "source": evidence.source,
        "name": decode_name(evidence.source) if is_metric else evidence.source,
        "field": evidence.field,
        "summary": evidence.summary,
        "observed": evidence.observed_value,
        "threshold": evidence.threshold_value,
        "from": evidence.step_start,
        "to": evidence.step_end,
        "read": address_evidence(evidence),
    }


def _describe_score(score: HealthScoreRecord) -> dict[str, Any]:
    metadata: dict[str, Any] = dict(score.metadata or {})
    return {
        "key": score.score_key,
        "score": score.score,
        "status": score.status,
        "word": score.word,
        "known": score.is_known,
        "reason": score.unknown_reason,
        "summary": score.summary,
        "rules": metadata.get("rules"),
        "rules_with_data": metadata.get("rules_with_data"),
        "alerts": list(score.contributing_alert_ids),
    }


def _describe_rules(analysis: Analysis) -> dict[str, Any]:
    coverage = analysis.coverage
    if coverage is not None:
        missing = [
            {"rule": rule_id, "reason": reason, "data": list(data)}
            for rule_id, reason, data in coverage.without_data
        ]
        with_data = coverage.count - len(missing)
        return {"count": coverage.count, "with_data": with_data, "missing": missing, "note": None}
    overall = next((score for score in analysis.scores if score.score_key == "overall"), None)
    metadata: dict[str, Any] = {} if overall is None else dict(overall.metadata or {})
    asked, answered = metadata.get("rules"), metadata.get("rules_with_data")
    kept = _list_unseen(analysis.scores)
    is_unsaid = asked is not None and answered != asked and kept is None
    return {
        "count": asked,
        "with_data": answered,
        "missing": kept,
        "note": _UNSAID if is_unsaid else None,
    }


def _list_unseen(scores: Sequence[HealthScoreRecord]) -> list[dict[str, Any]] | None:
    """The rules that had no data, as their categories' scores keep them; None where none do."""
    found = []
    is_kept = False
    for score in scores:
        kept = dict(score.metadata or {}).get("rules_without_data")
        if not isinstance(kept, Mapping):
            continue
        is_kept = True
        for rule_id, said in kept.items():
            reason = said.get("reason") if isinstance(said, Mapping) else None
            data = said.get("data") if isinstance(said, Mapping) else None
            # Scores may be anybody's.
            if isinstance(reason, str) and isinstance(data, list):
                found.append({"rule": rule_id, "reason": reason, "data": list(map(str, data))})
    return sorted(found, key=lambda item: str(item["rule"])) if is_kept else None
