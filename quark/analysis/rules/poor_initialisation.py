"""Weights that begin alike, or whose first outputs grow or shrink from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quark.analysis.analysis_context import Case
from quark.analysis.curves import LayerHistory, ParameterHistory
from quark.analysis.observations import Figure, at_step, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

LATEST_STEP = 50
"""Of a first probe that still shows the initialisation."""

# The extremes of normal draws lie within this factor of the usual ones.
_USUAL_FACTOR = 1.5
_EQUAL = 0.01  # deviation over mean: drawn weights have a mean of hardly anything
_LEAST_ELEMENTS = 8
_LEAST_DRAWN = 64  # elements, with fewer of which extremes say little
_CENTRED = 4.0  # standard errors of the mean of a draw
_UNIFORM, _LIKE_UNIFORM = 3.0**0.5, 0.07  # bound over deviation, and share it may differ by
_NORMALS = (0.02, 1.0)  # deviations of normal draws that do not depend on the size of a layer
_DRAWN_ERRORS = 3.0  # standard errors of the deviation of a draw
_MIXING = ("Linear", "Conv1d", "Conv2d", "Conv3d", "RNN", "GRU", "LSTM", "RNNCell", "GRUCell",
           "LSTMCell")  # fmt: skip


def find_equal_weights(
    parameters: Mapping[str, ParameterHistory], activations: Mapping[str, LayerHistory]
) -> list[ParameterHistory]:
    """Hidden weights that train and began all as one number other than zero.

    Units with equal weights give the same and get the same gradients: they stay one unit. The last
    layer is left out, as labels tell its units apart, and so are zeros, from which adapters and
    branches begin on purpose.

    Args:
        parameters: Of the run, in the order of their first records.
        activations: Of the run, likewise; where there are none, the last weights are those
            of the last record.
    """
    weights = [
        item
        for item in parameters.values()
        if item.role == "weight" and item.kind.startswith(_MIXING) and len(item)
    ]
    called = [name for name in activations if any(item.module_name == name for item in weights)]
    last = called[-1] if called else (weights[-1].module_name if weights else None)
    return [item for item in weights if item.module_name != last and _is_equal(item)]


def _is_equal(item: ParameterHistory) -> bool:
    first = int(item.step[0])
    count, mean, deviation = (
        float(item[name][0]) for name in ("element_count", "value_mean", "value_std")
    )
    if first > LATEST_STEP or not item.requires_grad or not count >= _LEAST_ELEMENTS:
        return False
    return bool(np.isfinite(mean)) and mean != 0.0 and deviation <= _EQUAL * abs(mean)


def is_as_drawn(item: ParameterHistory, outputs: float | None = None) -> bool:
    """Whether weights are, from their first summary to the last, as a framework draws them.

    A uniform draw ends at the root of three deviations on both sides, which weights that were
    trained leave; a normal one has the deviation of its scheme (of its fan, where that is
    known) and about the extremes of so many draws.

    Args:
        item: A parameter.
        outputs: How many outputs its layer has, or None where that is not known.
    """
    count, mean, deviation, lowest, highest, norm = (
        float(item[name][0])
        for name in ("element_count", "value_mean", "value_std", "value_min", "value_max",
                     "value_norm")
    )  # fmt: skip
    if not count >= _LEAST_DRAWN or not deviation > 0 or not lowest < 0 < highest:
        return False
    if float(item["value_norm"][-1]) != norm or float(item["value_max"][-1]) != highest:
        return False
    if abs(mean) > _CENTRED * deviation / count**0.5:
        return False
    ends = np.array([-lowest, highest]) / deviation
    if bool((np.abs(ends / _UNIFORM - 1.0) <= _LIKE_UNIFORM).all()):
        return True
    schemes = list(_NORMALS)
    if outputs:
        inputs = count / outputs
        schemes += [(2.0 / inputs) ** 0.5, inputs**-0.5, (2.0 / (inputs + outputs)) ** 0.5]
    error = _DRAWN_ERRORS / (2.0 * count) ** 0.5
    # Half of the largest of n draws lie above this, and hardly any two above it by a third.
    usual = (2.0 * np.log(count)) ** 0.5
    is_of_scheme = any(abs(deviation / each - 1.0) <= error for each in schemes)
    return is_of_scheme and bool(
        ((ends > usual / _USUAL_FACTOR) & (ends < usual * _USUAL_FACTOR)).all()
    )


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
            title="Weights are initialized at a wrong scale",
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
    return case.measure("activation", item.name, "value", "std", last=last)


def _describe_equal(case: Case, equal: list[ParameterHistory]) -> Finding:
    worst = equal[0]
    step = int(worst.step[0])
    names = [item.owner for item in equal]
    return Finding(
        culprit=names[0],
        severity="error" if case.outcome.is_poor else "warning",
        title="All weights of a layer start equal",
        fact=say(
            "At step {step} the weights of {name} have a mean of {mean} and a deviation of "
            "{deviation}.",
            step=at_step(step), name=worst.name,
            mean=case.measure("parameter", worst.name, "value", "value_mean", last=step),
            deviation=case.measure("parameter", worst.name, "value", "value_std", last=step),
        ),
        inference="Units with equal weights give the same and get the same gradients: the layer "
        "stays one unit, however wide it is.",
        suggested_check="Draw the weights at random (He, Xavier); constants are for biases and "
        "normalisations only.",
        evidence=(
            observe("parameter", worst.name, "deviation of the weights at the start",
                    float(worst["value_std"][0]), None, step),
        ),
        affected=tuple(names[1:_NAMED]),
    )  # fmt: skip
