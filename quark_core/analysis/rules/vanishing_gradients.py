"""Gradients that do not reach the first layers, in a training that hardly learns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.limits import limit_vanishing_gradients
from quark_core.analysis.observations import find_sustained, format_number, observe, say_steps
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis.run_data import History, LayerHistory
from quark_core.analysis_records import AlertCategory, EvidenceRecord

__all__ = ["VanishingGradients"]

_RATIO = 1e-3  # of the layer with the largest gradient
_LEAST_PROBES = 3
_LEAST_LAYERS = 3
_NOTHING = 1e-4
_UNDERFLOW = 1e-13
_NO_DEPTH = ("Embedding", "EmbeddingBag", "LayerNorm", "BatchNorm1d", "BatchNorm2d", "RMSNorm")


@dataclass(frozen=True)
class _Depth:
    """Size of the gradient of an element, layers by probes, the first layer first."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]
    sizes: NDArray[np.float64]


class VanishingGradients:
    """Fires where early layers get a thousandth of the largest gradient, and little is learned.

    Sizes are root mean squares of an element's gradient: of weight matrices
    where parameters were watched, else of the layers' outputs. An optimizer
    that scales each parameter by itself learns all the same; therefore the
    outcome decides.
    """

    rule_id = "vanishing_gradients"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_vanishing_gradients(case)
        depths = [
            depth
            for depth in (_of_parameters(case), *_of_layers(case))
            if len(depth.names) >= _LEAST_LAYERS and len(depth.steps) >= _LEAST_PROBES
        ]
        if not depths:
            return Verdict(
                findings=limited,
                reason=f"it needs gradients of {_LEAST_LAYERS} layers in {_LEAST_PROBES} probes",
                missing=() if limited else ("layer gradients", "parameter gradients"),
            )
        best: float | None = None
        for depth in depths:
            finding, ratio = _look(depth, case)
            if finding is not None:
                return Verdict(findings=(finding, *limited))
            if ratio is not None:
                best = ratio if best is None else min(best, ratio)
        if limited:
            return Verdict(findings=limited)
        return Verdict(
            reason="the first layers get gradients of a size with the others, or the training "
            "learns all the same",
            observed=best,
            threshold=_RATIO,
        )


def _of_parameters(case: Case) -> _Depth:
    chosen = [
        parameter
        for parameter in case.run.parameters.values()
        if parameter.role == "weight"
        and parameter.requires_grad
        and parameter.kind not in _NO_DEPTH
        and float(np.nanmax(parameter["element_count"], initial=0.0)) > 16
        and bool(np.isfinite(parameter["gradient_norm"]).any())
    ]
    return _align(
        [(item.name, item, item["gradient_norm"], item["element_count"]) for item in chosen]
    )


def _of_layers(case: Case) -> list[_Depth]:
    """Chains of layers: each part of the model that has several by itself, as of two players."""
    parts: dict[str, list[LayerHistory]] = {}
    for item in case.run.gradients.values():
        if item.name in case.run.activations:
            parts.setdefault(item.name.partition(".")[0], []).append(item)
    large = [part for part in parts.values() if len(part) >= _LEAST_LAYERS]
    if len(large) < 2:
        large = [[item for part in parts.values() for item in part]]
    return [
        _align([(item.name, item, item["norm"], item["element_count"]) for item in part])
        for part in large
    ]


def _align(
    parts: list[tuple[str, History, NDArray[np.float64], NDArray[np.float64]]],
) -> _Depth:
    if not parts:
        return _Depth((), np.empty(0, np.int64), np.empty((0, 0)))
    steps = np.unique(np.concatenate([item.step for _, item, _, _ in parts]))
    sizes = np.full((len(parts), len(steps)), np.nan)
    for row, (_, item, norms, counts) in enumerate(parts):
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes[row, np.searchsorted(steps, item.step)] = norms / np.sqrt(counts)
    return _Depth(tuple(name for name, _, _, _ in parts), steps, sizes)


def _stands_still(names: tuple[str, ...], case: Case) -> bool:
    """Whether a first layer's updates are a hundredth of the others', relative to the weights.

    Optimizers that scale each parameter train on the smallest gradients.
    """
    levels = {
        item.name: float(np.nanmedian(np.append(item["update_to_parameter_ratio"], np.nan)))
        for item in case.run.parameters.values()
        if item.role == "weight" and bool((item["update_to_parameter_ratio"] > 0).any())
    }
    if len(levels) < _LEAST_LAYERS:
        return False
    first = [levels[name] for name in names if name in levels]
    first += [levels[f"{name}.weight"] for name in names if f"{name}.weight" in levels]
    return bool(first) and min(first) < 0.01 * max(levels.values())


def _find_underflow(depth: _Depth) -> NDArray[np.bool_] | None:
    """Probes at which half of the layers get nothing at all and others do; None where few do."""
    zero = depth.sizes == 0
    share = zero.sum(axis=0) / len(depth.names)
    found = (share >= 0.5) & (depth.sizes > 0).any(axis=0)
    return None if found.mean() < 0.5 else np.asarray(found)


def _look(depth: _Depth, case: Case) -> tuple[Finding | None, float | None]:
    first_half = max(1, len(depth.names) // 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = np.max(np.where(np.isfinite(depth.sizes), depth.sizes, -np.inf), axis=0)
        largest[largest < 0] = np.nan
        ratios = depth.sizes / largest
        lowest = np.nanmin(np.where(np.isnan(ratios), np.inf, ratios)[:first_half], axis=0)
    # No layer gets any, or less than the resolution of any weight: an underflow, or a flat loss.
    nothing = largest <= _UNDERFLOW
    has_dead = case.ends_with_dead_layer
    # A gradient of exactly nothing is an underflow, or the doing of dead units.
    vanished = (lowest <= _RATIO) & (lowest > 0)
    if not has_dead:
        vanished |= nothing
    underflows = None if has_dead else _find_underflow(depth)
    if underflows is not None:
        vanished = underflows
    broken = case.outcome.non_finite_step
    if broken is not None:
        vanished &= depth.steps < broken
    stretch = find_sustained(vanished, max(_LEAST_PROBES, round(0.2 * len(vanished))))
    usual = float(np.median(lowest[np.isfinite(lowest)])) if np.isfinite(lowest).any() else None
    if stretch is None:
        return None, usual
    stands = _stands_still(depth.names[: max(1, first_half)], case)
    stands = stands or (usual is not None and usual <= _NOTHING and case.outcome.stalls)
    lost = bool(nothing[stretch[0] : stretch[1] + 1].all())
    unknown = lost and not case.outcome.has_metrics
    if not (case.outcome.is_poor or underflows is not None or stands or unknown):
        return None, usual
    rows = slice(stretch[0], stretch[1] + 1)
    begin, end = int(depth.steps[stretch[0]]), int(depth.steps[stretch[1]])
    window = np.where(np.isfinite(ratios[:first_half, rows]), ratios[:first_half, rows], 1.0)
    levels = np.median(window, axis=1)
    culprit = depth.names[int(np.argmin(levels))]
    ratio = float(levels.min())
    share = (stretch[1] - stretch[0] + 1) / len(vanished)
    affected = [
        name
        for name, level in zip(depth.names, levels, strict=False)
        if level <= _RATIO and name != culprit
    ]
    scale = case.thresholds
    severity = grade(
        share, 0.0, scale.vanishing_gradient_error_ratio, scale.vanishing_gradient_critical_ratio
    )
    if bool(nothing[rows].all()):
        fact = f"No layer gets any gradient ({say_steps(begin, end)})."
        inference = "The gradient underflows, or the loss does not depend on the parameters."
    else:
        top = depth.names[int(np.nanargmax(np.nanmedian(depth.sizes[:, rows], axis=1)))]
        fact = (
            f"An element of {culprit} gets {format_number(ratio)} of the gradient of one of {top} "
            f"({say_steps(begin, end)}), and the loss hardly falls."
        )
        inference = "The gradient fades on its way back; the first layers do not train."
    evidence: tuple[EvidenceRecord, ...] = (
        observe("layer", culprit, "gradient against that of the layer with the largest",
                ratio, _RATIO, begin, end),
    )  # fmt: skip
    loss = case.outcome.train or case.outcome.validation
    if loss is not None:
        evidence += (
            observe("metric", loss.key, f"from {format_number(loss.start)} to "
                    f"{format_number(loss.final)}", loss.relative_fall, 0.1),
        )  # fmt: skip
    return (
        Finding(
            culprit=culprit.removesuffix(".weight"),
            severity=severity,
            title="Gradients vanish",
            fact=fact,
            inference=inference,
            suggested_check="Other activations (ReLU, GELU), residual connections, "
            "normalisation, another initialisation; with half precision a larger loss scale.",
            evidence=evidence,
            step=begin,
            step_end=end,
            confidence=0.9,
            affected=tuple(affected),
        ),
        ratio,
    )
