"""Records of what analyzers find out about a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, Record, StreamRecord
from quark_core.records.json_object import JsonObject

AlertSeverity = Literal["info", "warning", "error", "critical"]
"""Severities of alerts, the mildest first."""
AlertCategory = Literal["optimization", "representation", "generalization", "runtime"]
"""The part of a training that an alert is about."""
HealthScoreKey = Literal["overall", "optimization", "representation", "generalization", "runtime"]
"""The parts of a training that have a health score, and the score over all."""
HealthStatus = Literal["healthy", "watch", "degraded", "critical"]
"""The words for a health score, the best first."""


class EvidenceRecord(Record, frozen=True, gc=False):
    """One observation behind an alert, a score or a phase.

    Attributes:
        kind: Kind of observation, such as `metric` or `layer`.
        source: Metric key or module name.
        summary: The observation in one sentence.
        observed_value: Observed value, or None.
        threshold_value: Threshold, or None.
        step_start, step_end: First and last step of the observation, or None.
        record_kind: Kind of the records that show it, such as `metric` or `parameter`, or None.
        record_name: Name of the metric, module or parameter, or the rank as text. None if it
            concerns all of them.
        field: Field of the records that shows it, such as `gradient_norm`.
        summary_type: For layers: `activation` or `gradient`.
    """

    kind: str
    source: str
    summary: str
    observed_value: float | None = None
    threshold_value: float | None = None
    step_start: int | None = None
    step_end: int | None = None
    record_kind: str | None = None
    record_name: str | None = None
    field: str | None = None
    summary_type: str | None = None


class AlertRecord(StreamRecord, frozen=True, gc=False):
    """Problem found in a run.

    Attributes:
        rule_id: ID of the rule.
        category: `optimization`, `representation`, `generalization` or `runtime`.
        severity: `info`, `warning`, `error` or `critical`.
        title: Short title.
        summary: One sentence.
        fact: Observation.
        inference: Conclusion.
        step: First step of the problem, or None.
        epoch: First epoch of the problem, or None.
        culprit: Layer or metric with the problem, or None.
        suggested_check: Next step for you, or None.
        evidence: Observations behind the alert.
        metadata: JSON values, or None: `caused_by` and `consequences` (alert IDs), `affected`
            (further layers or metrics), `step_end`, `confidence`.
        alert_id: ID from AnalyzerEngine: a hash of the run, generation, rule, layer or metric, and
            first step.
    """

    rule_id: str
    category: str
    severity: str
    title: str
    summary: str
    fact: str
    inference: str
    step: int | None = None
    epoch: int | None = None
    culprit: str | None = None
    suggested_check: str | None = None
    evidence: tuple[EvidenceRecord, ...] = ()
    metadata: JsonObject | None = None
    alert_id: str | None = None

    KIND: ClassVar[str] = "alert"
    TABLE: ClassVar[str] = "alerts"
    IS_ANALYSIS: ClassVar[bool] = True
    RULES: ClassVar[FieldRules] = FieldRules(
        words={"category": get_args(AlertCategory), "severity": get_args(AlertSeverity)},
        plain=(
            "rule_id",
            "alert_id",
        ),
    )

    @property
    def id(self) -> str:
        """`alert_id` if set, else the ID of the record."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return self.alert_id or f"{self.writer_id}-{self.KIND}-{self.sequence}"


LITTLE_SEEN = "little_seen"
"""In the metadata of a score: the one call that lets the checks run which lacked their data."""


class HealthScoreRecord(StreamRecord, frozen=True, gc=False):
    """Health score of a run in one category.

    Attributes:
        score_key: `overall`, `optimization`, `representation`, `generalization` or `runtime`.
        category: The same category.
        score: 0 (worst) to 100; 50 if unknown.
        status: `healthy`, `watch`, `degraded` or `critical`; `watch` if unknown.
        summary: One sentence.
        evidence: Observations behind the score.
        contributing_alert_ids: IDs of the alerts that lowered it.
        metadata: JSON values, or None.
        known: Whether there was data to judge. If False, ignore score and status.
        unknown_reason: Reason for missing data, or None.
    """

    score_key: str
    category: str
    score: float
    status: str
    summary: str = ""
    evidence: tuple[EvidenceRecord, ...] = ()
    contributing_alert_ids: tuple[str, ...] = ()
    metadata: JsonObject | None = None
    known: bool = True
    unknown_reason: str | None = None

    KIND: ClassVar[str] = "health_score"
    TABLE: ClassVar[str] = "health_scores"
    IS_ANALYSIS: ClassVar[bool] = True
    RULES: ClassVar[FieldRules] = FieldRules(
        words={
            "score_key": get_args(HealthScoreKey),
            "category": get_args(HealthScoreKey),
            "status": get_args(HealthStatus),
        },
        finite=("score",),
        plain=("contributing_alert_ids",),
    )

    def check(self) -> None:
        """Reject an invalid score."""
        if not 0 <= self.score <= 100:
            raise SchemaValidationError(
                f"HealthScoreRecord.score must be from 0 to 100, got {self.score!r:.40}"
            )

    @property
    def word(self) -> str:
        """Status for display: `status`, "not known", or "no problem found".

        "no problem found" means that no rule fired, but too little was checked to call the run
        healthy.
        """
        if not self.is_known:
            return "not known"
        has_problem = self.status in ("degraded", "critical") or bool(self.contributing_alert_ids)
        if has_problem or LITTLE_SEEN not in (self.metadata or {}):
            return self.status
        return "no problem found"

    @property
    def is_known(self) -> bool:
        """Whether there was data to judge; also for records older than `known`."""
        metadata: dict[str, Any] = dict(self.metadata or {})
        unseen = metadata.get("rules_with_data") == 0 or metadata.get("known_categories") == []
        return self.known and (not unseen or bool(self.contributing_alert_ids))


class PhaseRecord(StreamRecord, frozen=True, gc=False):
    """Phase of a run.

    Attributes:
        phase_name: Name, such as `rapid_learning`.
        display_name: Name for display.
        summary: One sentence.
        step_start, step_end: First and last step, or None if only epochs are known.
        epoch_start, epoch_end: First and last epoch, or None.
        evidence: Observations behind the phase.
        metadata: JSON values, or None.
    """

    phase_name: str
    display_name: str
    summary: str
    step_start: int | None = None
    step_end: int | None = None
    epoch_start: int | None = None
    epoch_end: int | None = None
    evidence: tuple[EvidenceRecord, ...] = ()
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "phase"
    TABLE: ClassVar[str] = "phases"
    RULES: ClassVar[FieldRules] = FieldRules(
        plain=(
            "phase_name",
            "display_name",
        )
    )
    HAS_FIGURES: ClassVar[bool] = False
    IS_ANALYSIS: ClassVar[bool] = True


ALERT_RAISED = "alert_raised"
"""The type of the event that records a raised alert."""

USER_ALERT = "user_alert"
"""What the rules of alerts begin with that no analysis has found."""

_MAX_SLUG = 40


def complete_alert(payload: Mapping[str, Any] | None, step: int | None) -> JsonObject:
    """What the event carries of an alert; one without a rule gets one by its title.

    Args:
        payload: What was given: `title` and `message`, as a rule.
        step: Where it was raised, or None.
    """
    given = dict(payload or {})
    if isinstance(given.get("rule_id"), str):
        return JsonObject(given)
    title = str(given.get("title") or given.get("message") or "alert")
    slug = re.sub(r"\W+", "_", title.lower(), flags=re.ASCII).strip("_")[:_MAX_SLUG]
    rule_id = f"{USER_ALERT}_{slug}" if slug else USER_ALERT
    return JsonObject({"title": title, "first_step": step, **given, "rule_id": rule_id})


def is_user_alert(rule_id: str) -> bool:
    """Whether the rule of an alert says that user code raised the alert, not an analysis."""
    return rule_id.startswith(USER_ALERT)
