"""Weights whose first outputs grow or shrink from layer to layer."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["PoorInitialisation"]

_FACTOR = 30.0
_LEAST_LAYERS = 5


class PoorInitialisation:
    """Informs where the first activations change thirtyfold between the hidden layers.

    What comes of it, if anything does, is told by the rules of gradients.
    """

    rule_id = "poor_initialisation"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        layers = [
            item
            for item in case.run.activations.values()
            if len(item) and np.isfinite(item["std"][0]) and item["std"][0] > 0
        ]
        # The last layer has the scale of the targets, the first one that of the inputs.
        hidden = layers[1:-1]
        if len(hidden) < _LEAST_LAYERS - 2 or min(int(item.step[0]) for item in layers) > 50:
            return Verdict(
                reason=f"it needs activations of {_LEAST_LAYERS} layers from the start",
                missing=("layer activations of the first steps",),
            )
        levels = np.array([float(item["std"][0]) for item in hidden])
        few = max(1, len(levels) // 4)
        ratio = float(np.median(levels[-few:]) / np.median(levels[:few]))
        factor = max(ratio, 1.0 / ratio)
        if factor < _FACTOR:
            return Verdict(
                reason="the first activations are of one size over the layers",
                observed=factor,
                threshold=_FACTOR,
            )
        does = "grow" if ratio > 1 else "shrink"
        step = int(hidden[-1].step[0])
        finding = Finding(
            culprit=hidden[-1].name,
            severity="info",
            title="The initialisation is out of scale",
            fact=f"At step {step} the activations {does} {format_number(factor)} times from "
            f"{hidden[0].name} to {hidden[-1].name}.",
            inference="Gradients change by as much on their way back.",
            suggested_check="An initialisation for this activation (He, Xavier), or normalisation.",
            evidence=tuple(
                observe("layer", item.name, "deviation of its first outputs",
                        float(item["std"][0]), None, step)
                for item in (hidden[0], hidden[-1])
            ),
            step=step,
            confidence=0.8,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=factor, threshold=_FACTOR)
