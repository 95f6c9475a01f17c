"""Classes that training hardly ever sees."""

from __future__ import annotations

from collections import Counter

from quark.analysis.analysis_context import Case
from quark.analysis.observations import observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_BATCHES = 20  # fewer show what was drawn, not what there is
_RATIO = 20.0  # of the most frequent class to the rarest


class ClassImbalance(BaseRule):
    """Informs where the most frequent class is seen twenty times as often as the rarest.

    Whether that is wrong depends on the data: it is never more than info.
    """

    rule_id = "class_imbalance"
    category: AlertCategory = "generalization"
    needs = f"it needs {_LEAST_BATCHES} batches (DataDiagnostics)"
    data = ("batch diagnostics",)
    tables = ("batches",)
    threshold = _RATIO

    def judge(self, case: Case) -> Verdict | None:
        """Look for a class that all batches together have far less of than of another.

        Silent where the rarest class is seen at least a twentieth as often,
        whatever single batches hold.
        """
        batches = case.run.batches
        if batches.count < _LEAST_BATCHES:
            return None
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
            return self.stay_quiet("the classes are seen about equally often", ratio)
        finding = Finding(
            culprit=least,
            severity="info",
            title="Classes are imbalanced",
            fact=say(
                "Class {least} was seen {lowest} times, class {most} {highest} times.",
                least=least, lowest=case.count_class(least), most=most,
                highest=case.count_class(most),
            ),
            inference="The rare class weighs next to nothing in the loss.",
            suggested_check="Look at figures for each class; weigh or resample it if it matters.",
            evidence=(
                observe("class", least, "how often the most frequent class is seen for each time",
                        ratio, _RATIO),
            ),
            step=None,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=ratio, threshold=_RATIO)
