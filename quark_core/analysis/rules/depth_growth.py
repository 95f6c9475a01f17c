"""Signals that grow from layer to layer, both ways: a network that is too large from its start."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding

__all__ = ["read_depth", "read_start"]

_GROWTH = 8.0
_GROWTH_TOGETHER = 200.0
_LEAST_LAYERS = 5
_STEADY = 0.8  # rank correlation with the depth
_KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LazyLinear")
_PROBES = 5
_ELASTICITY = 120.0
_FIRST_PROBES = 3


def read_depth(case: Case, _series: list[Curve]) -> Finding | None:
    """Gradients that explode with the depth, at the first probes; None where they do not.

    Both the activations, forward, and the gradients, backward, have to grow
    eightfold between the first and the last of the hidden layers, and both
    together two hundredfold; the output has the scale of the targets.
    """
    names = [
        name
        for name, item in case.run.activations.items()
        if item.kind in _KINDS and name in case.run.gradients and len(case.run.gradients[name])
    ]
    if len(names) < _LEAST_LAYERS:
        return None
    with np.errstate(invalid="ignore"):
        forward = np.array([_median(case.run.activations[name]["std"]) for name in names])
        backward = np.array([_median(case.run.gradients[name]["rms"]) for name in names])
    forward, backward = forward[:-1], backward[:-1]
    grown = _divide(float(forward[-1]), float(forward[0]))
    back = _divide(float(backward[0]), float(backward[-1]))
    steady = min(_correlate_ranks(forward), -_correlate_ranks(backward))
    if steady < _STEADY:
        return None
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


def read_start(case: Case, _series: list[Curve]) -> Finding | None:
    """Gradients that are explosive at the first probes, without regard to any history.

    The norm of a weight's gradient times the weight's norm, over the loss, says
    by how many percent the loss changes for a percent of the weight. It has no
    unit; the loss has to be positive throughout for it to have a meaning.
    """
    progress = case.outcome.train
    if progress is None or not min(progress.best, progress.final) > 0 or progress.start <= 0:
        return None
    highest, culprit, first = 0.0, "", 0
    for item in case.run.parameters.values():
        if item.role != "weight":
            continue
        products = (item["gradient_norm"] * item["value_norm"])[:_FIRST_PROBES]
        known = products[np.isfinite(products)]
        level = float(np.median(known)) / progress.start if len(known) else 0.0
        if level > highest:
            highest, culprit, first = level, item.module_name or item.name, int(item.step[0])
    if highest < _ELASTICITY:
        return None
    return Finding(
        culprit=culprit,
        severity="error",
        title="Gradients are explosive from the start",
        fact=f"At step {first} a percent of the weights of {culprit} changes the loss by "
        f"{format_number(highest)} percent.",
        inference="Signals are amplified many times on their way, as by a recurrence whose weights "
        "are too large.",
        suggested_check="Smaller or orthogonal initial weights, a gated cell, gradient clipping.",
        evidence=(
            observe("layer", culprit, "norms of gradient and weight over the loss", highest,
                    _ELASTICITY, first),
        ),
        step=first,
        confidence=0.8,
    )  # fmt: skip


def _correlate_ranks(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Rank correlation with the place, by Spearman."""
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) if len(values) > 2 else 0.0


def _median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    known = values[np.isfinite(values)][:_PROBES]
    return float(np.median(known)) if len(known) else np.nan


def _divide(one: float, other: float) -> float:
    return float(one / other) if other > 0 and np.isfinite(one) else 0.0
