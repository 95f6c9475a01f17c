"""Signals that grow from layer to layer, both ways: a network that is too large from its start."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding

__all__ = ["read_depth"]

_GROWTH = 8.0
_GROWTH_TOGETHER = 200.0
_LEAST_LAYERS = 6
_PROBES = 5


def read_depth(case: Case, _series: list[Curve]) -> Finding | None:
    """Gradients that explode with the depth, at the first probes; None where they do not.

    Both the activations, forward, and the gradients, backward, have to grow
    eightfold between the first and the last of the hidden layers, and both
    together two hundredfold; the output has the scale of the targets.
    """
    names = [
        name
        for name in case.run.activations
        if name in case.run.gradients and len(case.run.gradients[name]) >= 1
    ]
    if len(names) < _LEAST_LAYERS:
        return None
    with np.errstate(invalid="ignore"):
        forward = np.array([_median(case.run.activations[name]["std"]) for name in names])
        backward = np.array([_median(case.run.gradients[name]["rms"]) for name in names])
    few = max(1, len(names) // 5)
    hidden = slice(-1 - few, -1)
    grown = _divide(np.nanmedian(forward[hidden]), np.nanmedian(forward[1 : 1 + few]))
    back = _divide(np.nanmedian(backward[1 : 1 + few]), np.nanmedian(backward[hidden]))
    if grown < _GROWTH or back < _GROWTH or grown * back < _GROWTH_TOGETHER:
        return None
    culprit = names[int(np.nanargmax(backward))]
    first = int(case.run.gradients[culprit].step[0])
    return Finding(
        culprit=culprit,
        severity="error",
        title="Gradients explode with the depth",
        fact=f"On the way back to the first layers gradients grow {format_number(back)} times, "
        f"and activations {format_number(grown)} times on theirs, from step {first} on.",
        inference="The weights are too large from the start: every layer amplifies its input.",
        suggested_check="Another initialisation (He, Xavier), normalisation, residual branches "
        "that begin small.",
        evidence=(
            observe("layer", culprit, "gradient of the first layers over that of the last", back,
                    _GROWTH, first),
            observe("layer", names[-1], "activation of the last layers over that of the first",
                    grown, _GROWTH, first),
        ),
        step=first,
        affected=tuple(name for name in names if name != culprit)[:10],
    )  # fmt: skip


def _median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    known = values[np.isfinite(values)][:_PROBES]
    return float(np.median(known)) if len(known) else np.nan


def _divide(one: float, other: float) -> float:
    return float(one / other) if other > 0 and np.isfinite(one) else 0.0
