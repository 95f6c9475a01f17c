"""The contract of a rule, the base class of the built-in rules, and the documented thresholds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import LayerHistory
from quark.analysis.observations import FigureKind, Text, keep_figures, limit, observe, say
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity, EvidenceRecord

SEVERITIES: tuple[AlertSeverity, ...] = ("info", "warning", "error", "critical")
"""From the mildest on."""

_OF_EVIDENCE: Any = object()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a rule holds to be wrong.

    Attributes:
        culprit: The layer, parameter or metric at fault; None for the whole run.
        severity: From how long it lasted and how large it is.
        title: A few words.
        fact: What was seen, with numbers: made by `quark.analysis.observations.say`, it keeps
            the records that they are from.
        inference: What follows from it.
        suggested_check: What to look at next.
        evidence: Observations that it rests on.
        step: Where it began, by default where its first piece of evidence does; None where only
            epochs are known.
        step_end: Where it was last seen, by default likewise.
        epoch: Where it began, in epochs.
        confidence: 0 to 1.
        affected: Other layers, parameters or metrics that show it.
        is_hard_limit: Whether it is a limit that the user has set.
        causes: What changed where it began; see `quark.analysis.causes`.
        aspect: Which of several faults it is, of a rule whose findings have causes of their own.
        documented_level: Of a note: which documented threshold it is at or
            beyond, though the run by itself gives no reason for an alert.
    """

    culprit: str | None
    severity: AlertSeverity
    title: str
    fact: str
    inference: str
    suggested_check: str
    evidence: tuple[EvidenceRecord, ...]
    step: int | None = _OF_EVIDENCE
    step_end: int | None = None
    epoch: int | None = None
    confidence: float = 1.0
    affected: tuple[str, ...] = ()
    is_hard_limit: bool = False
    causes: tuple[str, ...] = ()
    aspect: str = ""
    documented_level: AlertSeverity | None = None

    def __post_init__(self) -> None:
        if self.step is _OF_EVIDENCE:
            seen = self.evidence[0] if self.evidence else EvidenceRecord("", "", "")
            object.__setattr__(self, "step", seen.step_start)
            object.__setattr__(self, "step_end", seen.step_end)

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts, those of the evidence too; see `quark.analysis.observations`."""
        own = (self.title, self.fact, self.inference, self.suggested_check)
        return (*own, *(piece.summary for piece in self.evidence))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule says of one run.

    Attributes:
        findings: What is wrong; empty where the rule is quiet.
        state: `fired`, `quiet` where it looked and found nothing, or `no_data`.
        reason: Why it is quiet or could not look, in one sentence.
        missing: Which data it lacked.
        observed: The figure that came nearest to firing, or None.
        threshold: What it would have had to reach, or None.
    """

    findings: tuple[Finding, ...] = ()
    reason: str = ""
    missing: tuple[str, ...] = ()
    observed: float | None = None
    threshold: float | None = None

    @property
    def state(self) -> Literal["fired", "quiet", "no_data"]:
        """What came out; a note of a documented threshold is no firing."""
        if any(finding.documented_level is None for finding in self.findings):
            return "fired"
        return "no_data" if self.missing else "quiet"


@runtime_checkable
class Rule(Protocol):
    """A rule. One object serves any number of runs, from any thread; it keeps nothing.

    Attributes:
        rule_id: Its name, unique among all rules.
        category: What its alerts count for.
    """

    rule_id: str
    category: AlertCategory

    def check(self, case: Case) -> Verdict:
        """Look at a run; the same records always give the same verdict."""


def grade(observed: float, warning: float, error: float, critical: float) -> AlertSeverity:
    """Severity of a figure on an ascending scale; info below the first step."""
    if observed >= critical:
        return "critical"
    if observed >= error:
        return "error"
    return "warning" if observed >= warning else "info"


# The literal reading of the documented thresholds, for the absolute mode and for hard limits.
#
# In the adaptive mode only the levels that the caller has passed count; in the
# absolute mode all of them do. In the adaptive mode the others are noted where
# they are crossed, so that who reads the documentation finds its figures.

_NOTED = ("error", "critical")


@dataclass(frozen=True, slots=True)
class Limit:
    """A documented threshold of a rule, whose levels are fields of `AnalyzerThresholds`.

    Attributes:
        prefix, suffix: What stands before and after the severity in the names of these fields.
        title, check: Of what is found.
        words: What is held against it.
        scale: The field that makes all levels count where it is passed, or "".
        falls: Whether the lower value is the worse one.
    """

    prefix: str
    suffix: str
    title: str
    check: str
    words: str = ""
    scale: str = ""
    falls: bool = False

    def list_levels(self, case: Case) -> dict[AlertSeverity, float]:
        """The levels that count as limits, by severity, the mildest first."""
        passed = case.thresholds.passed
        names = {severity: f"{self.prefix}_{severity}_{self.suffix}" for severity in SEVERITIES[1:]}
        chosen = {
            severity: name
            for severity, name in names.items()
            if case.config.mode == "absolute" or name in passed
        }
        if not chosen and self.scale in passed:
            chosen = names
        return {severity: getattr(case.thresholds, name) for severity, name in chosen.items()}

    def list_reached(self, case: Case, value: float) -> list[tuple[AlertSeverity, float]]:
        """The levels that a value is at or beyond, the mildest first."""
        sign = -1.0 if self.falls else 1.0
        levels = self.list_levels(case).items()
        return [(severity, level) for severity, level in levels if sign * value >= sign * level]

    def is_beyond(
        self, values: NDArray[np.float64], reached: Sequence[tuple[AlertSeverity, float]]
    ) -> NDArray[np.bool_]:
        """Mark the values at or beyond the first of the levels, whatever its severity."""
        levels = [level for _, level in reached]
        return values <= max(levels) if self.falls else values >= min(levels)

    def find(
        self,
        case: Case,
        culprit: str,
        value: float,
        first: int,
        fact: Text,
        *,
        kind: str = "layer",
        unit: str = "step",
    ) -> Finding:
        """Describe a value that has reached a level.

        Args:
            case: The run.
            culprit, fact: As of a finding.
            value: What is held against the levels.
            first: Where it reached one, in steps or epochs.
            kind: Of the evidence.
            unit: Of `first`.
        """
        severity, level = self.list_reached(case, value)[-1]
        step, epoch = (first, None) if unit == "step" else (None, first)
        return Finding(
            culprit=culprit,
            severity=severity,
            title=self.title,
            fact=fact,
            inference=say(
                "This is at or beyond the configured limit of {limit}.", limit=limit(level)
            ),
            suggested_check=self.check,
            evidence=(observe(kind, culprit, fact, value, level, step),),
            step=step,
            epoch=epoch,
            is_hard_limit=True,
        )

    def find_layers(
        self, case: Case, layers: Mapping[str, LayerHistory], field: str
    ) -> tuple[Finding, ...]:
        """One finding for each layer whose worst value reaches a level."""
        pick, how = (np.min, "lowest") if self.falls else (np.max, "highest")
        out = []
        for name, layer in layers.items():
            known = np.isfinite(layer[field])
            values, steps = layer[field][known], layer.step[known]
            reached = self.list_reached(case, float(pick(values))) if len(values) else []
            if not reached:
                continue
            kind: FigureKind = "gradient" if layer.summary_type == "gradient" else "activation"
            fact = say(
                "The {words} of {name} reached {worst}.",
                words=self.words,
                name=name,
                worst=case.measure(kind, name, how, field),
            )
            first = int(steps[int(np.argmax(self.is_beyond(values, reached)))])
            out.append(self.find(case, name, float(pick(values)), first, fact))
        return tuple(out)


def join_findings(own: Iterable[Finding], limits: Iterable[Finding]) -> tuple[Finding, ...]:
    """What a rule has found and the limits that are reached, each culprit told of once.

    A limit at a culprit that the rule has found by itself is part of that
    finding, and sets its severity where it is the worse of the two.
    """
    found, others = list(own), []
    for reached in limits:
        same = [place for place, item in enumerate(found) if item.culprit == reached.culprit]
        if same:
            found[same[0]] = _join(found[same[0]], reached)
        else:
            others.append(reached)
    return (*found, *others)


def _join(own: Finding, reached: Finding) -> Finding:
    is_worse = SEVERITIES.index(reached.severity) > SEVERITIES.index(own.severity)
    return replace(
        own,
        severity=reached.severity if is_worse else own.severity,
        fact=say("{one} {other}", one=keep_figures(own.fact), other=keep_figures(reached.fact)),
        inference=say(
            "{one} {other}",
            one=keep_figures(own.inference), other=keep_figures(reached.inference),
        ),
        evidence=(*own.evidence, *reached.evidence),
        is_hard_limit=True,
    )  # fmt: skip


def note_documented(crossed: Iterable[Finding], found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Documented thresholds of an error or worse that are crossed, as notes.

    Where a finding has the same culprit already there is no note. Several
    layers that cross the same one are one note, at the worst of them.

    Args:
        crossed: What the absolute mode would find.
        found: What is found without it; its culprits need no note.
    """
    told = {name for item in found for name in (item.culprit, *item.affected)}
    groups: dict[str, list[Finding]] = {}
    for finding in crossed:
        if finding.culprit not in told and finding.severity in _NOTED:
            groups.setdefault(finding.title, []).append(finding)
    return tuple(_note(group) for group in groups.values())


def _note(group: list[Finding]) -> Finding:
    worst = max(group, key=lambda item: SEVERITIES.index(item.severity))
    level, (evidence, *_) = worst.severity, worst.evidence
    return replace(
        worst,
        severity="info",
        title=f"{worst.title} (documented {level} level)",
        inference=say(
            "This is at or beyond the documented {level} level of {threshold}. Held against the "
            'run itself it is no fault; mode="absolute" makes an alert of it.',
            level=level,
            threshold=limit(evidence.threshold_value or 0.0),
        ),
        affected=tuple(item.culprit for item in group if item is not worst and item.culprit),
        documented_level=level,
    )


class BaseRule(ABC):
    """A rule that says what it needs, and joins what it finds with the limits of the user.

    Attributes:
        rule_id, category: See `quark.analysis.rule.Rule`.
        needs: What is said where the data is not there, in one sentence.
        data: Names of that data.
        tables: Attributes of `RunData` without any of which the rule is not asked; () if it
            also judges by metrics.
        threshold: What the figure of its quiet verdicts is held against, or None.
    """

    rule_id: str
    category: AlertCategory
    needs: ClassVar[str]
    data: ClassVar[tuple[str, ...]]
    tables: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float | None] = None

    def check(self, case: Case) -> Verdict:
        """See `quark.analysis.rule.Rule`."""
        if self.tables and not case.run.has_any(self.tables):
            return Verdict(reason=self.needs, missing=self.data)
        limited = self.find_limits(case)
        if case.config.mode == "absolute" and limited:
            return Verdict(findings=limited)
        verdict = self.judge(case)
        own = () if verdict is None else verdict.findings
        found = join_findings(own, limited)
        if case.config.mode != "absolute":
            found += note_documented(self.find_limits(case.as_documented), found)
        if verdict is None:
            missing = () if limited else self.data
            return Verdict(findings=found, reason=self.needs, missing=missing)
        return replace(verdict, findings=found) if found else verdict

    def find_limits(self, case: Case) -> tuple[Finding, ...]:  # noqa: ARG002 - of those that have limits
        """List values at or beyond thresholds that count as they are; see `Limit`."""
        return ()

    @abstractmethod
    def judge(self, case: Case) -> Verdict | None:
        """What the rule says of a run by itself; None where the data that it needs is not there."""

    def stay_quiet(self, reason: str, observed: float | None = None) -> Verdict:
        """A verdict without findings, with the figure that came nearest to the threshold."""
        return Verdict(reason=reason, observed=observed, threshold=self.threshold)
