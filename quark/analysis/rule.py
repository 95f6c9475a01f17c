"""What a rule is: it looks at one run and says what is wrong, or why it is quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from quark_core.records.kinds.findings import AlertCategory, AlertSeverity, EvidenceRecord

if TYPE_CHECKING:
    from quark.analysis.case import Case

SEVERITIES: tuple[AlertSeverity, ...] = ("info", "warning", "error", "critical")
"""From the mildest on."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a rule holds to be wrong.

    Attributes:
        culprit: The layer, parameter or metric at fault; None for the whole run.
        severity: From how long it lasted and how large it is.
        title: A few words.
        fact: What was seen, with numbers: made by `quark.analysis.figures.say`, it keeps
            the records that they are from.
        inference: What follows from it.
        suggested_check: What to look at next.
        evidence: Observations that it rests on.
        step: Where it began; None where only epochs are known.
        step_end: Where it was last seen.
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
    step: int | None
    step_end: int | None = None
    epoch: int | None = None
    confidence: float = 1.0
    affected: tuple[str, ...] = ()
    is_hard_limit: bool = False
    causes: tuple[str, ...] = ()
    aspect: str = ""
    documented_level: AlertSeverity | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts, those of the evidence too; see `quark.analysis.figures`."""
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
