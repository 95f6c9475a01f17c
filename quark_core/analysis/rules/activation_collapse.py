"""Layers whose outputs no longer say anything: dead, saturated or all the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.limits import limit_activations
from quark_core.analysis.observations import format_number, observe, say_steps
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis.run_data import LayerHistory
from quark_core.analysis_records import AlertCategory

__all__ = ["ActivationCollapse"]

_LEAST_PROBES = 3
_DEAD, _ALL_DEAD = 0.7, 0.97
_DEAD_RISE = 0.3
_SATURATED, _SATURATION_RISE = 0.85, 0.3
_STD, _STD_ALONE = 0.05, 1e-3
_FLAT = 1e-4
_ALIKE, _ALIKE_DROP = 1e-3, 0.02
_NEARLY_ALIKE, _NEARLY_DROP = 0.05, 0.3
_LEAST_EARLY = 0.01
_BOTH_ENDS = 0.95
_SHALLOW = 1e-3  # of what the first layers tell apart
_GOOD_ACCURACY = 0.9
_LINEAR = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
_TWO_ENDED = ("ReLU6", "Hardswish")
_ALL_SATURATED, _LARGE_RISE = 0.98, 0.5


class ActivationCollapse:
    """Fires where a layer's units die, saturate or give one value, to the end of the run.

    Dead units are those that give nothing for the whole batch; the share of
    zeros is not looked at, since half of a healthy ReLU layer are zeros. A
    layer with (nearly) all units dead fires by itself; less, saturation and a
    shrunken deviation only where the training suffers.
    """

    rule_id = "activation_collapse"
    category: AlertCategory = "representation"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_activations(case)
        layers = [item for item in case.run.activations.values() if len(item) >= _LEAST_PROBES]
        if not layers:
            return Verdict(
                findings=limited,
                reason=f"it needs activations in {_LEAST_PROBES} probes",
                missing=() if limited else ("layer activations",),
            )
        last = max(item.order for item in layers)
        found = [
            finding
            for item in layers
            if (finding := _look(item, case, is_hidden=item.order < last)) is not None
        ]
        if found:
            return Verdict(findings=(_join(found, case.run.last_step or 0), *limited))
        if limited:
            return Verdict(findings=limited)
        highest = max(float(np.nan_to_num(item["dead_unit_ratio"]).max()) for item in layers)
        return Verdict(
            reason="no layer's units are dead, saturated or alike to the end of the run in a "
            "training that suffers",
            observed=highest,
            threshold=_DEAD,
        )


def _early(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known[: max(1, min(5, len(known) // 4))])) if len(known) else np.nan


def _lowest_early(values: NDArray[np.float64]) -> float:
    """The lowest of the first probes: what happens at once is no early level."""
    known = values[np.isfinite(values)][:5]
    return float(known.min()) if len(known) else 0.0


def _to_the_end(mask: NDArray[np.bool_]) -> int | None:
    """Index from which a mask holds (but for single probes) to the end, for long enough."""
    count = len(mask)
    least = max(_LEAST_PROBES, round(0.1 * count))
    if count < least or mask[-least:].mean() < 0.8:
        return None
    # Holds from where at most a tenth of what follows is an exception.
    tail = np.cumsum(~mask[::-1])[::-1] / np.arange(count, 0, -1)
    first = int(np.argmax(mask & (tail <= 0.1)))
    return first if mask[first] and tail[first] <= 0.1 else None


def _look(item: LayerHistory, case: Case, *, is_hidden: bool) -> Finding | None:
    suffers = case.outcome.is_poor
    dead, saturation, std = (item[name] for name in ("dead_unit_ratio", "saturation_ratio", "std"))
    start = _to_the_end(np.nan_to_num(dead) >= _ALL_DEAD)
    if start == 0 and item.kind in _LINEAR:
        return None  # it was set to zero on purpose, and has not left it: that is another rule's
    if start is None:
        limit = max(_DEAD, min(_ALL_DEAD, _lowest_early(dead) + _DEAD_RISE))
        start = _to_the_end(np.nan_to_num(dead) >= limit)
        if start is not None and not (
            suffers or case.outcome.worsens_after(int(item.step[max(0, start - 1)]))
        ):
            start = None
    if start is not None:
        level = float(np.median(dead[start:]))
        scale = case.thresholds
        severity = grade(
            level, 0.0, scale.activation_collapse_error_dead_unit_ratio,
            scale.activation_collapse_critical_dead_unit_ratio,
        )  # fmt: skip
        return _describe(
            item, start, "Units are dead",
            f"{level:.0%} of the units of {item.name} give nothing for any sample",
            "Dead units get no gradient and do not come back by themselves.",
            "A lower rate, another initialisation, smaller biases, LeakyReLU or GELU.",
            level, _DEAD, severity,
        )  # fmt: skip
    if item.kind in _TWO_ENDED:
        # Below its range it gives zeros, which count as inactive: at either end nothing passes.
        saturation = saturation + np.nan_to_num(item["zero_ratio"])
    start = _to_the_end(np.nan_to_num(saturation) >= _SATURATED)
    both_ends = item.kind in _TWO_ENDED and (case.outcome.stalls and not case.outcome.rewarded)
    if start is not None and both_ends and np.median(saturation[start:]) < _BOTH_ENDS:
        both_ends = False
    if start is not None and (
        suffers
        or both_ends
        or case.outcome.worsens_after(int(item.step[start]))
        or (is_hidden and _is_gone(saturation, start, case))
    ):
        level = float(np.median(saturation[start:]))
        scale = case.thresholds
        severity = grade(
            level, 0.0, scale.activation_collapse_error_saturation_ratio,
            scale.activation_collapse_critical_saturation_ratio,
        )  # fmt: skip
        return _describe(
            item, start, "Units are saturated",
            f"{level:.0%} of the outputs of {item.name} are at the ends of its range",
            "There its slope is nearly zero, so that hardly any gradient passes.",
            "Normalise its inputs, start with smaller weights, lower the rate.",
            level, _SATURATED, severity,
        )  # fmt: skip
    return _look_at_samples(item, case, is_hidden=is_hidden) or _look_at_deviation(item, std, case)


def _is_gone(saturation: NDArray[np.float64], start: int, case: Case) -> bool:
    """Whether a hidden layer is saturated beyond doubt, or the accuracy is known to be low."""
    level = float(np.median(saturation[start:]))
    if level >= _ALL_SATURATED and level - np.nan_to_num(_early(saturation)) >= _LARGE_RISE:
        return True
    accuracy = case.outcome.accuracy
    return accuracy is not None and accuracy < _GOOD_ACCURACY


def _look_at_samples(item: LayerHistory, case: Case, *, is_hidden: bool) -> Finding | None:
    """Whether all samples get the same output, though its features still differ."""
    shares = item["sample_variation_ratio"]
    early = _early(shares)
    before = _first_layer_share(case)
    if case.outcome.is_poor and is_hidden and early <= _SHALLOW * before:
        early = before  # what the first layers tell apart is lost on the way, from the start
    if not early > _LEAST_EARLY:
        return None
    limit = min(_ALIKE, _ALIKE_DROP * early)
    known = np.nan_to_num(shares, nan=1.0)
    start = _to_the_end(known <= limit)
    suffers = (case.outcome.is_poor or case.outcome.stalls) and not case.outcome.rewarded
    if start is None and is_hidden and suffers:
        # Less is enough where the training stands still; an output may have its targets' mean.
        limit = min(_NEARLY_ALIKE, _NEARLY_DROP * early)
        start = _to_the_end(known <= limit)
    if start is None:
        return None
    level = float(np.median(shares[start:]))
    scale = case.thresholds
    return _describe(
        item, start, "Samples are no longer told apart",
        f"{format_number(100 * level)} % of the energy of {item.name} differ between samples, "
        f"{format_number(100 * early)} % at the start",
        "The representation has collapsed: every sample gets (nearly) the same output.",
        "Look for missing negatives, a penalty or a quantizer that one value satisfies, a rate "
        "that is too large.",
        level, limit,
        grade(-level, -1.0, -scale.activation_collapse_error_std,
              -scale.activation_collapse_critical_std),
    )  # fmt: skip


def _first_layer_share(case: Case) -> float:
    """How much of their energy differs between samples in the first layers; 0 if not known."""
    levels = [_early(item["sample_variation_ratio"]) for item in case.run.activations.values()]
    known = [level for level in levels[:3] if np.isfinite(level)]
    return max(known, default=0.0)


def _look_at_deviation(item: LayerHistory, std: NDArray[np.float64], case: Case) -> Finding | None:
    early = _early(std)
    if not np.isfinite(early):
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.nan_to_num(std / early, nan=1.0)
        flat = np.nan_to_num(std / np.maximum(np.abs(item["mean"]), 1e-300), nan=1.0) <= _FLAT
    start = _to_the_end((relative <= _STD_ALONE) | (flat & (std <= 0.1 * early)))
    if start is None and (case.outcome.is_poor or case.outcome.stalls):
        start = _to_the_end(relative <= _STD)
    if start is None:
        return None
    level = float(np.median(relative[start:]))
    scale = case.thresholds
    return _describe(
        item, start, "Outputs are all alike",
        f"The outputs of {item.name} vary {format_number(level)} times as much as at the start",
        "The layer gives (nearly) the same for every sample.",
        "Look for a representation that collapses: missing negatives, a strong penalty, a rate "
        "that is too large.",
        level, _STD,
        grade(-level, -1.0, -scale.activation_collapse_error_std,
              -scale.activation_collapse_critical_std),
    )  # fmt: skip


def _describe(
    item: LayerHistory,
    start: int,
    title: str,
    fact: str,
    inference: str,
    check: str,
    level: float,
    threshold: float,
    severity: str,
) -> Finding:
    first, last = int(item.step[start]), int(item.step[-1])
    return Finding(
        culprit=item.name,
        severity=severity,  # type: ignore[arg-type]
        title=title,
        fact=f"{fact} ({say_steps(first, last)}).",
        inference=inference,
        suggested_check=check,
        evidence=(observe("layer", item.name, fact, level, threshold, first, last),),
        step=first,
        step_end=last,
    )


def _join(found: list[Finding], span: int) -> Finding:
    """One alert for all layers, in the name of the worst of those where it began."""
    begin = min(item.step or 0 for item in found)
    early = [item for item in found if (item.step or 0) <= begin + 0.1 * span]
    # Of layers that are equally gone the first one made the others so.
    gone = max(_badness(item) for item in early)
    worst = next(item for item in early if _badness(item) >= gone - 0.03 * abs(gone))
    if len(found) == 1:
        return worst
    others = tuple(item.culprit for item in found if item is not worst and item.culprit)
    pieces = tuple(piece for item in found[:6] for piece in item.evidence)
    return Finding(
        culprit=worst.culprit,
        severity=worst.severity,
        title=worst.title,
        fact=f"{worst.fact} So do others: {', '.join(others[:5])}"
        + (f" and {len(others) - 5} more." if len(others) > 5 else "."),
        inference=worst.inference,
        suggested_check=worst.suggested_check,
        evidence=pieces,
        step=begin,
        step_end=worst.step_end,
        affected=others,
    )


def _badness(finding: Finding) -> float:
    """How far a layer is gone, 0 to 1: a share of units, or what a deviation has lost."""
    piece = finding.evidence[0]
    level = piece.observed_value or 0.0
    return 1.0 - level if (piece.threshold_value or 0.0) < _DEAD else level
