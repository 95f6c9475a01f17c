"""Optimizers that hold other parameters than those of the model."""

from __future__ import annotations

from collections.abc import Sequence

from quark.analysis.analysis_context import Case
from quark.analysis.curves import ParameterHistory, list_owners
from quark.analysis.observations import between_steps, count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_PROBES = 2
_LEAST_MODULES, _SHARE = 2, 0.5  # that are left out, their share and that of their elements
_NAMED = 5


class ParametersNotOptimized(BaseRule):
    """Fires where the optimizer has none of the model's trainable parameters, few, or not the head.

    So it is where it was made for another model, or before this one was built
    anew or its last layer was replaced, and where a whole part of the model was
    forgotten. Other single layers that are left out are told of by `stagnant_layers`.
    """

    rule_id = "parameters_not_optimized"
    category: AlertCategory = "optimization"
    needs = "it needs summaries of parameters and their optimizer (ParameterDiagnostics)"
    data = ("parameter summaries with in_optimizer",)
    tables = ("parameters",)
    threshold = _SHARE

    def judge(self, case: Case) -> Verdict | None:
        """Look for parameters that should train and are in no optimizer at the end of the run."""
        trained = [
            item
            for item in case.run.parameters.values()
            if item.requires_grad and item.in_optimizer is not None
        ]
        if not trained:
            return None
        outside = [item for item in trained if _is_outside(item)]
        if not outside:
            return self.stay_quiet("every parameter that should train is in an optimizer", 0.0)
        modules, left_out = list_owners(trained), list_owners(outside)
        whole = _count(list(case.run.parameters.values()))
        share = min(len(left_out) / len(modules), _count(outside) / whole)
        if len(outside) == len(trained):
            if case.outcome.has_learned:
                return self.stay_quiet(
                    "the optimizer has no parameter of the model and the loss falls: something "
                    "else is trained"
                )
            return Verdict(findings=(_describe(outside, trained, left_out),))
        if len(left_out) >= _LEAST_MODULES and share >= _SHARE:
            return Verdict(findings=(_describe(outside, trained, left_out),))
        head = [item for item in outside if item.module_name == _find_output(case)]
        if any(bool((item["gradient_norm"] > 0).any()) for item in head):
            return Verdict(findings=(_describe(head, trained, list_owners(head), is_head=True),))
        return self.stay_quiet(
            "the optimizer has most of the model; stagnant_layers tells of layers that are left "
            "out",
            share,
        )


def _is_outside(item: ParameterHistory) -> bool:
    last = item["in_optimizer"][-_LEAST_PROBES:]
    return len(last) == _LEAST_PROBES and bool((last == 0.0).all())


def _find_output(case: Case) -> str | None:
    """The last module with weights that is called: what gives the model's output."""
    holders = {item.module_name for item in case.run.parameters.values() if item.role == "weight"}
    called = [name for name in case.run.activations if name in holders]
    return called[-1] if called else None


def _count(items: Sequence[ParameterHistory]) -> float:
    """Elements of parameters."""
    sizes = (item.size for item in items)
    return max(1.0, sum(sizes))


def _describe(
    outside: Sequence[ParameterHistory],
    trained: Sequence[ParameterHistory],
    modules: Sequence[str],
    *,
    is_head: bool = False,
) -> Finding:
    is_all = len(outside) == len(trained)
    names = {item.name for item in outside}
    held = [item.name for item in trained if item.name not in names]
    item = outside[0]
    inside = item["in_optimizer"] != 0.0
    row = int(inside.nonzero()[0][-1]) + 1 if inside.any() else 0
    first, last = int(item.step[row]), int(item.step[-1])
    title = "Most of the model is in no optimizer"
    if is_all or is_head:
        title = (
            "The optimizer has other parameters than the model"
            if is_all
            else "The output layer is in no optimizer"
        )
    return Finding(
        culprit=None if is_all else modules[0],
        severity="critical" if is_all else "error",
        title=title,
        fact=say(
            "The optimizer holds {held} of the {all} parameters that should train ({steps}); in no "
            "optimizer: {modules}.",
            held=count_names(held) if held else say("none"),
            all=count_names(item.name for item in trained),
            steps=between_steps(first, last),
            modules=", ".join(modules[:_NAMED]),
        ),
        inference="It was made for another model or for a part of it, or before the model was "
        "built anew: its steps leave these weights as they are.",
        suggested_check="Make the optimizer after the model is complete, wrapped and loaded, of "
        "model.parameters(); freeze with requires_grad_(False) what shall not train.",
        evidence=tuple(
            observe("parameter", one.name, "is in no optimizer", 0.0, 1.0, first, last)
            for one in outside[:_NAMED]
        ),
        step=first,
        step_end=last,
        affected=tuple(modules if is_all else modules[1:]),
    )
