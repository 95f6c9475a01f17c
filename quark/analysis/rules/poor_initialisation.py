"""Weights that begin alike, or whose first outputs grow or shrink from layer to layer."""

from __future__ import annotations

import numpy as np

from quark.analysis.case import Case
from quark.analysis.figures import Figure, at_step, measure, say
from quark.analysis.histories import LayerHistory, ParameterHistory
from quark.analysis.initialisation import LATEST_STEP, find_equal_weights
from quark.analysis.observations import observe
from quark.analysis.rule import Finding, Verdict
from quark.analysis.rules.base import BaseRule
from quark_core.records.kinds.findings import AlertCategory

_FACTOR = 30.0  # from the first hidden layers to the last ones
_LEAST_LAYERS = 5
_ENDS = 2  # the last layer has the scale of the targets, the first one that of the inputs
_END_PART = 4  # the first and the last quarter of the hidden layers are compared
_CONFIDENCE = 0.8  # normalisation in between makes up for it
_NAMED = 5


class PoorInitialisation(BaseRule):
    """Informs where the first activations change thirtyfold between the hidden layers.

    What comes of it, if anything does, is told by the rules of gradients. Warns where all weights
    of a hidden layer begin as one number: its units are and stay one.
    """

    rule_id = "poor_initialisation"
    category: AlertCategory = "optimization"
    needs = f"it needs activations of {_LEAST_LAYERS} layers from the start"
    data = ("layer activations of the first steps", "parameter summaries of the first steps")
    tables = ("activations", "parameters")
    threshold = _FACTOR

    def judge(self, case: Case) -> Verdict | None:
        """Look for first activations that grow or shrink from the first layers to the last ones.

        Silent where the probes begin later than the initialisation can be seen,
        and of the outermost two layers, whose scales are those of the data.
        """
        equal = find_equal_weights(case.run.parameters, case.run.activations)
        if equal:
            return Verdict(findings=(_describe_equal(case, equal),))
        layers = [
            item
            for item in case.run.activations.values()
            if len(item) and np.isfinite(item["std"][0]) and item["std"][0] > 0
        ]
        hidden = layers[1:-1]
        if not layers or min(int(item.step[0]) for item in layers) > LATEST_STEP:
            return None
        if len(hidden) < _LEAST_LAYERS - _ENDS:
            return Verdict(reason=self.needs, missing=(f"{_LEAST_LAYERS} layers in the model",))
        levels = np.array([float(item["std"][0]) for item in hidden])
        few = max(1, len(levels) // _END_PART)
        ratio = float(np.median(levels[-few:]) / np.median(levels[:few]))
        factor = max(ratio, 1.0 / ratio)
        if factor < _FACTOR:
            return self.stay_quiet("the first activations are of one size over the layers", factor)
        does = "grow" if ratio > 1 else "shrink"
        step = int(hidden[-1].step[0])
        finding = Finding(
            culprit=hidden[-1].name,
            severity="info",
            title="The initialisation is out of scale",
            fact=say(
                "At step {step} the activations {does} from {first} to {last}: their deviation is "
                "{early} there and {late} here.",
                step=at_step(step), does=does, first=hidden[0].name, last=hidden[-1].name,
                early=_measure_first(hidden[0], case), late=_measure_first(hidden[-1], case),
            ),
            inference="Gradients change by as much on their way back.",
            suggested_check="An initialisation for this activation (He, Xavier), or normalisation.",
            evidence=tuple(
                observe("layer", item.name, "deviation of its first outputs",
                        float(item["std"][0]), None, step)
                for item in (hidden[0], hidden[-1])
            ),
            step=step,
            confidence=_CONFIDENCE,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=factor, threshold=_FACTOR)


def _measure_first(item: LayerHistory, case: Case) -> Figure:
    """Deviation of a layer's first output."""
    last = int(item.step[0])
    return measure(case.run, "activation", item.name, "value", "std", last=last)


def _describe_equal(case: Case, equal: list[ParameterHistory]) -> Finding:
    worst = equal[0]
    step = int(worst.step[0])
    names = [item.module_name or item.name for item in equal]
    return Finding(
        culprit=names[0],
        severity="error" if case.outcome.is_poor else "warning",
        title="All weights of a layer begin equal",
        fact=say(
            "At step {step} the weights of {name} have a mean of {mean} and a deviation of "
            "{deviation}.",
            step=at_step(step), name=worst.name,
            mean=measure(case.run, "parameter", worst.name, "value", "value_mean", last=step),
            deviation=measure(case.run, "parameter", worst.name, "value", "value_std", last=step),
        ),
        inference="Units with equal weights give the same and get the same gradients: the layer "
        "stays one unit, however wide it is.",
        suggested_check="Draw the weights at random (He, Xavier); constants are for biases and "
        "normalisations only.",
        evidence=(
            observe("parameter", worst.name, "deviation of the weights at the start",
                    float(worst["value_std"][0]), None, step),
        ),
        step=step,
        affected=tuple(names[1:_NAMED]),
    )  # fmt: skip
