"""Classes that training hardly ever sees."""

from __future__ import annotations

from collections import Counter

from quark_core.analysis.case import Case
from quark_core.analysis.observations import observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["ClassImbalance"]

_LEAST_BATCHES = 20
_RATIO = 20.0


class ClassImbalance:
    """Informs where the most frequent class is seen twenty times as often as the rarest.

    Whether that is wrong depends on the data: it is never more than info.
    """

    rule_id = "class_imbalance"
    category: AlertCategory = "generalization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        batches = case.run.batches
        if batches.count < _LEAST_BATCHES:
            return Verdict(
                reason=f"it needs {_LEAST_BATCHES} batches (DataDiagnostics)",
                missing=("batch diagnostics",),
            )
        total: Counter[str] = Counter()
        for counts in batches["class_counts"].tolist():
            if counts is not None:
                for name, count in counts.items():
                    if isinstance(count, (int, float)):
                        total[name] += int(count)
        if len(total) < 2:
            return Verdict(reason="no batch tells its classes", missing=("class_counts",))
        ranked = total.most_common()
        (most, highest), (least, lowest) = ranked[0], ranked[-1]
        ratio = highest / max(lowest, 1)
        if ratio < _RATIO:
            return Verdict(
                reason="the classes are seen about equally often",
                observed=ratio,
                threshold=_RATIO,
            )
        finding = Finding(
            culprit=least,
            severity="info",
            title="Classes are seen very unequally",
            fact=f"Class {least} was seen {lowest} times, class {most} {highest} times.",
            inference="The rare class weighs next to nothing in the loss.",
            suggested_check="Look at figures for each class; weigh or resample it if it matters.",
            evidence=(
                observe("class", least, "how often the most frequent class is seen for each time",
                        ratio, _RATIO),
            ),
            step=None,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=ratio, threshold=_RATIO)
