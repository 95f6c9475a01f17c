"""What a rule answers, checked and made plain: a rule may be of anyone.

An alert is stored, sent and shown as JSON, so a figure that is NaN, or a
number of numpy's, must not come so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite, isnan

import msgspec

from quark_core.analysis.rule import SEVERITIES, Finding, Verdict
from quark_core.analysis_records import EvidenceRecord
from quark_core.query import check_index

__all__ = ["check_verdict"]


def check_verdict(answer: object) -> Verdict:
    """The verdict with plain numbers and tuples; a figure that is not finite becomes None.

    Raises:
        TypeError: It is no verdict, or a part of it is of another type; the message names it.
        ValueError: An unknown severity, a confidence that is NaN, or a text
            that UTF-8 cannot hold.
        SchemaValidationError: A step or an epoch that is no non-negative 64-bit integer.
    """
    if not isinstance(answer, Verdict):
        raise TypeError(f"check() must return a Verdict, not {type(answer).__name__}")
    return Verdict(
        findings=tuple(_check_finding(item) for item in _list(answer.findings, "findings")),
        reason=_check_text(answer.reason, "reason"),
        missing=_check_texts(answer.missing, "missing"),
        observed=_check_figure(answer.observed, "observed"),
        threshold=_check_figure(answer.threshold, "threshold"),
    )


def _check_finding(item: object) -> Finding:
    if not isinstance(item, Finding):
        raise TypeError(f"findings must hold Findings, not {type(item).__name__}")
    if item.severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {', '.join(SEVERITIES)}, got {item.severity!r}")
    if isnan(item.confidence):
        raise ValueError("confidence must lie between 0 and 1, got NaN")
    for name in ("title", "fact", "inference", "suggested_check"):
        _check_text(getattr(item, name), name)
    return replace(
        item,
        culprit=None if item.culprit is None else _check_text(item.culprit, "culprit"),
        evidence=tuple(_check_evidence(piece) for piece in _list(item.evidence, "evidence")),
        step=check_index(item.step, "step"),
        step_end=check_index(item.step_end, "step_end"),
        epoch=check_index(item.epoch, "epoch"),
        confidence=min(1.0, max(0.0, float(item.confidence))),
        affected=_check_texts(item.affected, "affected"),
        is_hard_limit=bool(item.is_hard_limit),
    )


def _check_evidence(piece: object) -> EvidenceRecord:
    if not isinstance(piece, EvidenceRecord):
        raise TypeError(f"evidence must hold EvidenceRecords, not {type(piece).__name__}")
    for name in ("kind", "source", "summary"):
        _check_text(getattr(piece, name), f"evidence: {name}")
    return msgspec.structs.replace(
        piece,
        observed_value=_check_figure(piece.observed_value, "evidence: observed_value"),
        threshold_value=_check_figure(piece.threshold_value, "evidence: threshold_value"),
        step_start=check_index(piece.step_start, "evidence: step_start"),
        step_end=check_index(piece.step_end, "evidence: step_end"),
    )


def _check_figure(value: object, name: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}") from None
    return number if isfinite(number) else None


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {type(value).__name__}")
    value.encode()
    return str(value)


def _check_texts(values: object, name: str) -> tuple[str, ...]:
    return tuple(_check_text(value, name) for value in _list(values, name))


def _list(values: object, name: str) -> Iterable[object]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a tuple, not {type(values).__name__}")
    return values
