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
    """One observation that an alert, a score or a phase rests on.

    Attributes:
        kind: What was observed, such as `metric` or `layer`.
        source: Where: a metric key, or a module's name.
        summary: The observation in one sentence.
        observed_value: What was seen, or None.
        threshold_value: What it was held against, or None.
        step_start, step_end: The steps it was seen at, or None.
        record_kind: Kind of the records that it was seen in, such as `metric` or
            `parameter`; None where no curve of records shows it.
        record_name: Which of them: a metric key, a module, a parameter, or a rank as
            text; None where it is of all of them together.
        field: The field of the records that shows it, such as `gradient_norm`.
        summary_type: Of layers: activation or gradient.
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
    """Something that goes wrong in a run.

    Attributes:
        rule_id: The rule that found it.
        category: optimization, representation, generalization or runtime.
        severity: info, warning, error or critical.
        title: A few words.
        summary: One sentence.
        fact: What was seen.
        inference: What follows from it.
        step: Where it began, or None.
        epoch: Likewise.
        culprit: The layer or metric at fault, or None.
        suggested_check: What to look at next, or None.
        evidence: What it rests on.
        metadata: JSON values, or None: `caused_by` and `consequences` (ids of alerts),
            `affected` (more culprits), `step_end`, `confidence`.
        alert_id: The id that AnalyzerEngine gives: a hash of the run, the
            generation among those that readers see, rule, culprit and first step.
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
        """`alert_id` where there is one, else as of every record."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return self.alert_id or f"{self.writer_id}-{self.KIND}-{self.sequence}"


LITTLE_SEEN = "little_seen"
"""In the metadata of a score: the one call that lets the checks run which lacked their data."""


class HealthScoreRecord(StreamRecord, frozen=True, gc=False):
    """How well a run does in one respect.

    Attributes:
        score_key: overall, optimization, representation, generalization or runtime.
        category: The same category; `overall` for the one over all.
        score: 0 (worst) to 100; 50 where it is not known.
        status: healthy, watch, degraded or critical; watch where it is not known. `word` is what
            people are told.
        summary: One sentence.
        evidence: What it rests on.
        contributing_alert_ids: Ids of the alerts that lowered it.
        metadata: JSON values, or None.
        known: Whether anything was judged. Where not, score and status say nothing of
            the run, and are shown as "not known".
        unknown_reason: Why nothing was, or None.
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
        """Refuse a score that is none."""
        if not 0 <= self.score <= 100:
            raise SchemaValidationError(
                f"HealthScoreRecord.score must be from 0 to 100, got {self.score!r:.40}"
            )

    @property
    def word(self) -> str:
        """What people read in place of `status`, everywhere: one of these, or a status.

        "not known" where nothing was judged; "no problem found" where nothing speaks against
        the run, and too little was looked at to call it healthy.
        """
        if not self.is_known:
            return "not known"
        has_problem = self.status in ("degraded", "critical") or bool(self.contributing_alert_ids)
        if has_problem or LITTLE_SEEN not in (self.metadata or {}):
            return self.status
        return "no problem found"

    @property
    def is_known(self) -> bool:
        """Whether anything was judged, also of a record that is older than `known`."""
        metadata: dict[str, Any] = dict(self.metadata or {})
        unseen = metadata.get("rules_with_data") == 0 or metadata.get("known_categories") == []
        return self.known and (not unseen or bool(self.contributing_alert_ids))


class PhaseRecord(StreamRecord, frozen=True, gc=False):
    """A stretch of a run in one training regime.

    Attributes:
        phase_name: Such as `rapid_learning`.
        display_name: The same for people.
        summary: One sentence.
        step_start, step_end: Its first and last step, or None where only epochs are known.
        epoch_start, epoch_end: Likewise in epochs.
        evidence: What it rests on.
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
