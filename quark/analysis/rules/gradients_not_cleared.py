"""Gradients that are never cleared, so that each is the sum of all before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark.analysis.analysis_context import Case
from quark.analysis.curves import ParameterHistory, list_owners
from quark.analysis.observations import between_steps, count_names, count_steps, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_PROBES = 3
_MOSTLY = 0.8  # of the probes from the first such one on
_NAMED = 5


class GradientsNotCleared(BaseRule):
    """Fires where steps use gradients again that an earlier step has used.

    Whether a gradient still holds what came before an earlier step of its
    optimizer is read from the gradient itself. One that sums up the
    micro-batches of one step is cleared after it and does not count.
    """

    rule_id = "gradients_not_cleared"
    category: AlertCategory = "optimization"
    needs = "it needs summaries of parameters and their optimizer (ParameterDiagnostics)"
    data = ("parameter gradients",)
    tables = ("parameters",)
    threshold = _MOSTLY

    def judge(self, case: Case) -> Verdict | None:
        """Look for gradients that were carried over a step of the optimizer, to the end."""
        trained = [
            item
            for item in case.run.parameters.values()
            if item.requires_grad and item.in_optimizer
            if bool((item["gradient_norm"] > 0).any())
        ]
        if not trained:
            return None
        found = [item for item in trained if _find_first(item) is not None]
        if found:
            return Verdict(findings=(_describe(found, len(trained)),))
        return self.stay_quiet(
            "no gradient still holds what an earlier step has used",
            max(float(item["carried_over"].mean()) for item in trained),
        )


def _find_first(item: ParameterHistory) -> int | None:
    """Row from which on the gradient is carried over to the end, or None."""
    carried = item["carried_over"] > 0
    rows = np.flatnonzero(carried)
    if len(rows) < _LEAST_PROBES or not carried[-_LEAST_PROBES:].any():
        return None
    # Single ones before it are another thing.
    for row in rows[: -(_LEAST_PROBES - 1)].tolist():
        if carried[row:].mean() >= _MOSTLY:
            return int(row)
    return None


def _describe(found: Sequence[ParameterHistory], count: int) -> Finding:
    item = min(found, key=lambda one: (int(one.step[_find_first(one) or 0]), one.order))
    row = _find_first(item) or 0
    first, last = int(item.step[row]), int(item.step[-1])
    modules = list_owners(found)
    is_all = len(found) == count
    return Finding(
        culprit=None if is_all else modules[0],
        severity="error",
        title="Gradients are never cleared",
        fact=say(
            "At {some} of {all} probes ({steps}) the gradients of {parameters} parameters still "
            "held what an earlier step had used.",
            some=count_steps(item.step[row:][item["carried_over"][row:] > 0].tolist()),
            all=count_steps(item.step[row:].tolist()), steps=between_steps(first, last),
            parameters=count_names(one.name for one in found),
        ),
        inference="Each step goes along the sum of all gradients since the start: old batches "
        "count as much as the new one, and the steps grow.",
        suggested_check="Call optimizer.zero_grad() once for each optimizer.step(), before the "
        "first backward() of the next step; see that it is the same optimizer, or model, and all "
        "of it.",
        evidence=tuple(
            observe("parameter", one.name, "share of probes with a gradient carried over",
                    float(one["carried_over"][row:].mean()), _MOSTLY, first, last)
            for one in found[:_NAMED]
        ),
        step=first,
        step_end=last,
        affected=tuple(modules if is_all else modules[1:]),
    )  # fmt: skip
