"""What the built-in rules share: data that is not there, limits of the user, quiet verdicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from quark.analysis.case import Case
from quark.analysis.limits import join_findings, note_documented
from quark.analysis.rule import Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory


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
        """What is at or beyond thresholds that count as they are; see `limits`."""
        return ()

    @abstractmethod
    def judge(self, case: Case) -> Verdict | None:
        """What the rule says of a run by itself; None where the data that it needs is not there."""

    def stay_quiet(self, reason: str, observed: float | None = None) -> Verdict:
        """A verdict without findings, with the figure that came nearest to the threshold."""
        return Verdict(reason=reason, observed=observed, threshold=self.threshold)
