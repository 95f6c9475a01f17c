"""Layers that should train and do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.limits import limit_stagnant_layers
from quark_core.analysis.observations import (
    count_run,
    find_sustained,
    format_number,
    observe,
    say_steps,
)
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis.run_data import ParameterHistory
from quark_core.analysis_records import AlertCategory

__all__ = ["StagnantLayers"]

_LEAST_PROBES = 3
_RATIO = 1e-3  # of the other weights' median update ratio
_MOVED = 2e-3  # of a weight's size, in all: then it does move
_PULL = 0.02  # of their median gradient, relative to the weights


class StagnantLayers:
    """Fires for a layer that gets gradients and stands still while others move.

    Either the optimizer does not have its parameters, or its updates are a
    thousandth of the other layers' in relation to its weights, or nothing
    leads from the loss to it. Frozen parameters (`requires_grad=False`) are
    meant to stand still. A run that has converged slows all layers together.
    """

    rule_id = "stagnant_layers"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_stagnant_layers(case)
        parameters = case.run.parameters
        trained = [item for item in parameters.values() if item.requires_grad]
        outside = {
            name: history
            for name, history in case.run.activations.items()
            if history.outside_optimizer
        }
        if len(trained) < 2 and not outside:
            return Verdict(
                findings=limited,
                reason="it needs summaries of parameters (ParameterDiagnostics or quark.watch)",
                missing=() if limited else ("parameter summaries",),
            )
        moving = _take_medians(trained, "update_to_parameter_ratio")
        pulling = _take_medians(trained, "gradient_norm", over="value_norm")
        found: dict[str, tuple[int, int, int, str, list[str], float]] = {}
        for item in trained:
            judged = _judge(item, trained, moving, pulling, case)
            if judged is None:
                continue
            first, last, probes, reason, ratio = judged
            entry = found.setdefault(item.module_name, (first, last, probes, reason, [], ratio))
            entry[4].append(item.name)
        for name, history in outside.items():
            if name not in found and len(history) >= _LEAST_PROBES:
                steps = history.step
                found[name] = (int(steps[0]), int(steps[-1]), len(steps), "outside", [name], 0.0)
        findings = [_describe(name, *entry, case) for name, entry in found.items()]
        if len(findings) > 1:
            findings = [_join(findings)]
        if findings or limited:
            return Verdict(findings=(*findings, *limited))
        return Verdict(
            reason="every parameter that should train is in an optimizer and moves",
            threshold=_RATIO,
        )


def _take_medians(
    trained: list[ParameterHistory], figure: str, *, over: str | None = None
) -> dict[int, float]:
    """Step -> median of a figure over the weights that have more than nothing of it."""
    values: dict[int, list[float]] = {}
    for item in trained:
        if item.role != "weight":
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = item[figure] if over is None else item[figure] / item[over]
        for step, ratio in zip(item.step.tolist(), ratios.tolist(), strict=True):
            if ratio > 0 and np.isfinite(ratio):
                values.setdefault(step, []).append(ratio)
    return {step: float(np.median(some)) for step, some in values.items()}


def _judge(
    item: ParameterHistory,
    trained: list[ParameterHistory],
    moving: dict[int, float],
    pulling: dict[int, float],
    case: Case,
) -> tuple[int, int, int, str, float] | None:
    """First and last step, probes, reason and ratio, where a parameter stands still."""
    steps = item.step
    if len(steps) < 2:
        return None
    gradients = item["gradient_norm"]
    outside = item["in_optimizer"] == 0.0
    if outside.any() and bool((np.nan_to_num(gradients[outside]) > 0).any()):
        stretch = find_sustained(outside, 2)
        if stretch is not None and stretch[1] == len(steps) - 1:
            first = int(steps[stretch[0]])
            return first, int(steps[-1]), stretch[1] - stretch[0] + 1, "outside", 0.0
        return None
    if item.role != "weight":
        return None
    found = _find_cut_off(item, trained, case)
    if found is not None:
        return found
    median = np.array([moving.get(step, np.nan) for step in steps.tolist()])
    ratios = item["update_to_parameter_ratio"]
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = ratios / median
        stands = (relative <= _RATIO) & (gradients > 0)
        # A gradient that is as small as the update has vanished: that is another rule's.
        pulls = np.array([pulling.get(step, np.nan) for step in steps.tolist()])
        stands &= gradients / item["value_norm"] > _PULL * pulls
    # A matrix that starts at zero has no ratio; its update says whether it moves.
    stands &= ~((item["value_norm"] == 0) & (item["update_norm"] > 0))
    known = np.isfinite(relative)
    if known.sum() < _LEAST_PROBES:
        return None
    rows = np.flatnonzero(known)
    least = max(_LEAST_PROBES, round(0.2 * len(rows)))
    stretch = find_sustained(stands[rows], least)
    if stretch is None or stretch[1] < len(rows) - 1 - max(1, len(rows) // 10):
        return None
    chosen = rows[stretch[0] : stretch[1] + 1]
    if _drift(item, chosen) > _MOVED:
        return None  # it moves at other steps than those that were looked at
    usual = float(np.median(relative[chosen]))
    return int(steps[chosen[0]]), int(steps[chosen[-1]]), len(chosen), "small updates", usual


def _find_cut_off(
    item: ParameterHistory, trained: list[ParameterHistory], case: Case
) -> tuple[int, int, int, str, float] | None:
    """Where a parameter gets no gradient to the end, and stands still, while others get some."""
    steps, gradients = item.step, item["gradient_norm"]
    count = len(steps)
    if count < _LEAST_PROBES or item.in_optimizer is False:
        return None
    missing = np.isnan(gradients) & (np.nan_to_num(item["non_finite_gradient_count"]) == 0)
    nothing = missing | (gradients == 0)
    lasting = count_run(nothing)
    if lasting < max(_LEAST_PROBES, round(0.1 * count)):
        return None
    chosen = np.arange(count - lasting, count)
    begin = int(steps[chosen[0]])
    if _drift(item, chosen) > 0.0 or not _others_get_gradients(item, trained, begin):
        return None
    if not missing[chosen].all() and case.ends_with_dead_layer:
        return None  # dead units pass nothing on: that is another rule's
    if not _is_called(item, case, steps[chosen]):
        return None
    return begin, int(steps[-1]), lasting, "no gradient", 0.0


def _drift(item: ParameterHistory, rows: NDArray[np.int64]) -> float:
    """How far a parameter's norm, mean or deviation went in some probes, over its norm's scale."""
    drifts = []
    for name in ("value_norm", "value_mean", "value_std"):
        values = item[name][rows]
        known = values[np.isfinite(values)]
        if len(known) > 1:
            scale = max(float(np.abs(known).max()), 1e-12)
            drifts.append(float(np.ptp(known)) / scale)
    return max(drifts, default=0.0)


def _is_called(item: ParameterHistory, case: Case, steps: NDArray[np.int64]) -> bool:
    """Whether the module of a parameter was called at half of the steps, or cannot be known."""
    activations = case.run.activations
    if not activations or not any(other in activations for other in _names(item.module_name)):
        return not activations or not item.module_name
    name = next(other for other in _names(item.module_name) if other in activations)
    return bool(np.isin(steps, activations[name].step).mean() >= 0.5)


def _names(module: str) -> list[str]:
    """A module, and those that hold it, from the inside out."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _others_get_gradients(
    item: ParameterHistory, trained: list[ParameterHistory], since: int
) -> bool:
    return any(
        other is not item and bool((other["gradient_norm"][other.step >= since] > 0).any())
        for other in trained
    )


_REASONS = {
    "outside": (
        "is in no optimizer",
        "The optimizer was made without it, or before it was replaced.",
        "Make the optimizer after the model is complete and give it all of its parameters; freeze "
        "with requires_grad_(False) what shall not train.",
    ),
    "no gradient": (
        "gets no gradient",
        "Nothing leads from the loss to it: its output is detached, or it is not used.",
        "Look for detach(), no_grad(), .item() or an argmax between it and the loss.",
    ),
    "small updates": (
        "hardly moves while the other layers do",
        "Its parameter group has a learning rate of (nearly) zero, or something undoes its "
        "updates.",
        "Look at the learning rate of its parameter group and at what the scheduler does to it.",
    ),
}


def _describe(
    module: str,
    first: int,
    last: int,
    probes: int,
    reason: str,
    names: list[str],
    ratio: float,
    case: Case,
) -> Finding:
    words, inference, check = _REASONS[reason]
    scale = case.thresholds
    named = module or names[0]
    detail = ""
    if reason == "small updates":
        detail = f": its updates are {format_number(ratio)} of the others', relative to the weights"
    severity = grade(
        probes,
        0.0,
        scale.stagnant_layer_error_probes,
        scale.stagnant_layer_critical_probes,
    )
    return Finding(
        culprit=named,
        severity=severity,
        title="Layer does not train",
        fact=f"{named} {words}{detail} ({probes} probes, {say_steps(first, last)}).",
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("layer", named, f"{words}: {', '.join(names[:4])}", ratio,
                    _RATIO if reason == "small updates" else None, first, last),
        ),
        step=first,
        step_end=last,
    )  # fmt: skip


def _join(findings: list[Finding]) -> Finding:
    """Several layers that stand still for a reason are one alert, in the name of the first."""
    worst = max(findings, key=lambda item: (item.severity == "critical", item.severity == "error"))
    others = tuple(item.culprit for item in findings if item is not worst and item.culprit)
    return Finding(
        culprit=worst.culprit,
        severity=worst.severity,
        title=f"{len(findings)} layers do not train",
        fact=worst.fact + f" The same holds for {len(others)} more: {', '.join(others[:5])}.",
        inference=worst.inference,
        suggested_check=worst.suggested_check,
        evidence=tuple(piece for item in findings[:5] for piece in item.evidence),
        step=min(item.step for item in findings if item.step is not None),
        step_end=worst.step_end,
        affected=others,
    )
