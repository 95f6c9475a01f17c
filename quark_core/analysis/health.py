"""Health scores: what the alerts leave of a hundred, in each respect and over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quark_core.analysis.observations import observe
from quark_core.analysis.rule import SEVERITIES
from quark_core.analysis_records import (
    AlertRecord,
    AlertSeverity,
    EvidenceRecord,
    HealthScoreRecord,
    HealthStatus,
)
from quark_core.json_object import JsonObject

__all__ = ["CATEGORIES", "Coverage", "score_health"]

CATEGORIES = ("optimization", "representation", "generalization", "runtime")

_PENALTY: Mapping[str, float] = {"info": 2.0, "warning": 15.0, "error": 35.0, "critical": 60.0}
_CAP: Mapping[str, float] = {"info": 100.0, "warning": 80.0, "error": 60.0, "critical": 30.0}
_UNKNOWN = 50.0
_HEALTHY, _WATCH, _DEGRADED = 85.0, 65.0, 35.0


class Coverage(msgspec.Struct, frozen=True):
    """Of one category: how many rules could look at the run, and how many there are."""

    looked: int
    rules: int


def score_health(
    alerts: Sequence[AlertRecord],
    coverage: Mapping[str, Coverage],
    span: tuple[int, int] | None,
    blank: HealthScoreRecord,
) -> tuple[HealthScoreRecord, ...]:
    """The overall score and one for each category.

    An alert takes points by its severity (2, 15, 35, 60), weighed by its
    confidence and by the share of the run that it lasts; consequences of
    another alert take half. No score is above the cap of its worst alert (100,
    80, 60, 30). Where no rule of a category could look at the run, its score is
    50 and its status `watch`: nothing is known. The overall score is the mean of
    the lowest known category and the mean of all known ones, and capped likewise.

    Args:
        alerts: What was found.
        coverage: By category.
        span: First and last step of the run, or None.
        blank: A record that gives identity and time.
    """
    out = [_score(name, alerts, coverage[name], span, blank) for name in CATEGORIES]
    known = [item for item, name in zip(out, CATEGORIES, strict=True) if coverage[name].looked]
    overall = _UNKNOWN
    if known:
        scores = [item.score for item in known]
        overall = 0.5 * (min(scores) + sum(scores) / len(scores))
        overall = min([overall, *(_CAP[alert.severity] for alert in alerts)])
    ids = tuple(alert.id for alert in alerts if alert.severity != "info")
    words = ", ".join(f"{item.score_key} {item.score:.0f}" for item in known) or "no data"
    unknown = [name for name in CATEGORIES if not coverage[name].looked]
    if known and unknown:
        words += f"; nothing is known of {', '.join(unknown)}"
    whole = msgspec.structs.replace(
        blank,
        score_key="overall",
        category="overall",
        score=round(overall, 1),
        status=_rate(overall) if known else "watch",
        summary=f"{_say_worst(alerts)} {words}." if known else "No rule had the data it needs.",
        evidence=tuple(
            observe("score", item.score_key, item.summary, item.score, _HEALTHY) for item in known
        ),
        contributing_alert_ids=ids,
        metadata=JsonObject({"known_categories": [item.score_key for item in known]}),
    )
    return (whole, *out)


def _score(
    category: str,
    alerts: Sequence[AlertRecord],
    coverage: Coverage,
    span: tuple[int, int] | None,
    blank: HealthScoreRecord,
) -> HealthScoreRecord:
    own = [alert for alert in alerts if alert.category == category]
    metadata = JsonObject({"rules": coverage.rules, "rules_with_data": coverage.looked})
    if not coverage.looked and not own:
        return msgspec.structs.replace(
            blank,
            score_key=category,
            category=category,
            score=_UNKNOWN,
            status="watch",
            summary="Not known: no rule had the data it needs.",
            metadata=metadata,
        )
    score = 100.0
    for alert in own:
        score -= _PENALTY[alert.severity] * _weigh(alert, span)
    score = max(0.0, min([score, *(_CAP[alert.severity] for alert in own)]))
    evidence: list[EvidenceRecord] = [
        observe("alert", alert.rule_id, alert.fact, start=alert.step) for alert in own[:5]
    ]
    if not own:
        evidence.append(
            observe("rules", category, f"{coverage.looked} of {coverage.rules} rules looked and "
                    "found nothing", float(coverage.looked), float(coverage.rules))
        )  # fmt: skip
    return msgspec.structs.replace(
        blank,
        score_key=category,
        category=category,
        score=round(score, 1),
        status=_rate(score),
        summary=_say_worst(own),
        evidence=tuple(evidence),
        contributing_alert_ids=tuple(alert.id for alert in own if alert.severity != "info"),
        metadata=metadata,
    )


def _weigh(alert: AlertRecord, span: tuple[int, int] | None) -> float:
    metadata: Mapping[str, Any] = alert.metadata or {}
    weight = float(metadata.get("confidence", 1.0))
    if metadata.get("caused_by"):
        weight *= 0.5
    if span is not None and alert.step is not None and span[1] > span[0]:
        last = metadata.get("step_end") or span[1]
        share = min(1.0, max(0.0, (last - alert.step) / (span[1] - span[0])))
        weight *= 0.5 + 0.5 * share
    return weight


def _rate(score: float) -> HealthStatus:
    if score >= _HEALTHY:
        return "healthy"
    if score >= _WATCH:
        return "watch"
    return "degraded" if score >= _DEGRADED else "critical"


def _say_worst(alerts: Sequence[AlertRecord]) -> str:
    if not alerts:
        return "Nothing was found."
    ranks: dict[AlertSeverity, int] = {name: index for index, name in enumerate(SEVERITIES)}
    worst = max(alerts, key=lambda alert: ranks[alert.severity])  # type: ignore[index]
    count = len(alerts)
    more = "" if count == 1 else f" and {count - 1} more"
    return f"{worst.title} ({worst.severity}){more}."
