"""The literal reading of the documented thresholds, for the absolute mode and for hard limits.

In the adaptive mode only the levels that the caller has passed count; in the
absolute mode all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.metric_roles import find_curve
from quark_core.analysis.observations import count_run, format_number, observe
from quark_core.analysis.rule import SEVERITIES, Finding
from quark_core.analysis_records import AlertSeverity

__all__ = [
    "limit_activations",
    "limit_gradient_norms",
    "limit_overfitting_gap",
    "limit_runtime",
    "limit_stagnant_layers",
    "limit_vanishing_gradients",
    "list_levels",
]

Levels = Mapping[AlertSeverity, float]
Floats = NDArray[np.float64]


def list_levels(case: Case, prefix: str, suffix: str) -> Levels:
    """The levels that count as limits, by severity."""
    passed = case.thresholds.passed
    out: dict[AlertSeverity, float] = {}
    for severity in SEVERITIES[1:]:
        name = f"{prefix}_{severity}_{suffix}"
        if case.config.mode == "absolute" or name in passed:
            out[severity] = getattr(case.thresholds, name)
    return out


def limit_gradient_norms(case: Case) -> tuple[Finding, ...]:
    """Layers whose gradient's norm is at or beyond a limit."""
    levels = list_levels(case, "exploding_gradient", "norm")
    return _collect(
        (
            _Reading(name, history["norm"], history.step)
            for name, history in case.run.gradients.items()
        ),
        levels,
        "Gradient norm beyond its limit",
        "gradient norm",
        "Look at the learning rate, clip the gradient's norm.",
    )


def limit_vanishing_gradients(case: Case) -> tuple[Finding, ...]:
    """The share of gradient samples whose norm is below the limit."""
    thresholds = case.thresholds
    levels = dict(list_levels(case, "vanishing_gradient", "ratio"))
    if not levels and "vanishing_gradient_norm" in thresholds.passed:
        levels = {
            severity: getattr(thresholds, f"vanishing_gradient_{severity}_ratio")
            for severity in SEVERITIES[1:]
        }
    histories = case.run.gradients
    if not levels or not histories:
        return ()
    norms = np.concatenate([history["norm"] for history in histories.values()])
    norms = norms[np.isfinite(norms)]
    if len(norms) < thresholds.vanishing_gradient_min_samples:
        return ()
    share = float((norms < thresholds.vanishing_gradient_norm).mean())
    severity = _reached(share, levels)
    if severity is None:
        return ()
    shares = {
        name: float((history["norm"] < thresholds.vanishing_gradient_norm).mean())
        for name, history in histories.items()
    }
    culprit = max(shares, key=lambda name: shares[name])
    return (
        _make(
            culprit, severity, "Gradients below their limit",
            f"{share:.0%} of {len(norms)} gradient samples have a norm below "
            f"{format_number(thresholds.vanishing_gradient_norm)}.",
            "Look at the depth, the initialisation and the loss's scale.",
            "layer", share, levels[severity], int(min(h.step[0] for h in histories.values())),
        ),
    )  # fmt: skip


def limit_stagnant_layers(case: Case) -> tuple[Finding, ...]:
    """Layers whose gradient stays below the limit for several probes in a row."""
    thresholds = case.thresholds
    levels = dict(list_levels(case, "stagnant_layer", "probes"))
    if not levels and "stagnant_layer_gradient_norm" in thresholds.passed:
        levels = {
            severity: getattr(thresholds, f"stagnant_layer_{severity}_probes")
            for severity in SEVERITIES[1:]
        }
    if not levels:
        return ()
    out = []
    for name, history in case.run.gradients.items():
        start, probes = _find_longest(history["norm"] < thresholds.stagnant_layer_gradient_norm)
        severity = _reached(probes, levels) if probes else None
        if severity is not None:
            first = int(history.step[start])
            out.append(
                _make(
                    name, severity, "Layer stands still",
                    f"The gradient's norm of {name} was below "
                    f"{format_number(thresholds.stagnant_layer_gradient_norm)} for "
                    f"{probes} probes in a row.",
                    "See whether the layer is meant to train.",
                    "layer", float(probes), levels[severity], first,
                )
            )  # fmt: skip
    return tuple(out)


def limit_activations(case: Case) -> tuple[Finding, ...]:
    """Layers with too many dead units, too much saturation, or too small a deviation."""
    parts = (
        ("dead_unit_ratio", "dead_unit_ratio", "share of dead units", False),
        ("saturation_ratio", "saturation_ratio", "share of saturated elements", False),
        ("std", "std", "standard deviation", True),
    )
    out: list[Finding] = []
    for figure, suffix, words, falls in parts:
        levels = list_levels(case, "activation_collapse", suffix)
        readings = (
            _Reading(name, history[figure], history.step)
            for name, history in case.run.activations.items()
        )
        out += _collect(
            readings, levels, "Activations collapse", words,
            "Look at the layer's inputs, its initialisation and the learning rate.", falls=falls,
        )  # fmt: skip
    return tuple(out)


def limit_overfitting_gap(case: Case) -> tuple[Finding, ...]:
    """The validation loss's distance from the training loss, at its end."""
    levels = list_levels(case, "overfitting", "gap")
    train, validation = case.train_loss, case.validation_loss
    if not levels or train is None or validation is None:
        return ()
    ours, theirs = train.merged, validation.merged
    points = min(len(ours), len(theirs))
    if points < case.thresholds.overfitting_min_points or ours.unit != theirs.unit:
        return ()
    at = np.interp(theirs.step, ours.step, ours.value)
    gap = theirs.value - at
    severity = _reached(float(gap[-1]), levels)
    if severity is None:
        return ()
    beyond = gap >= min(levels.values())
    first = int(theirs.step[len(gap) - count_run(beyond)])
    return (
        _make(
            validation.key, severity, "Validation loss far above training loss",
            f"The validation loss ends {format_number(float(gap[-1]))} above the training loss.",
            "Look at regularisation, early stopping and the size of the data.",
            "metric", float(gap[-1]), levels[severity], first, unit=theirs.unit,
        ),
    )  # fmt: skip


def limit_runtime(case: Case) -> tuple[Finding, ...]:
    """Mean step time, the share that waits for data, and jitter."""
    metrics, config = case.run.metrics, case.config
    step_time = find_curve(metrics, config.step_time_metric_keys)
    if step_time is None or not len(step_time.finite):
        return ()
    times = step_time.finite.value
    mean = float(times.mean())
    parts = [("step_time_ms", "mean step time in ms", mean)]
    if len(times) > 1 and mean > 0:
        parts.append(("jitter_ratio", "deviation of step times over their mean",
                      float(times.std()) / mean))  # fmt: skip
    data_time = find_curve(metrics, config.data_time_metric_keys)
    if data_time is not None and mean > 0 and len(data_time.finite):
        share = float(data_time.finite.value.mean()) / mean
        parts.append(("data_fraction", "share of a step that waits for data", share))
    out = []
    for suffix, words, value in parts:
        levels = list_levels(case, "runtime", suffix)
        severity = _reached(value, levels)
        if severity is not None:
            out.append(
                _make(
                    step_time.key, severity, "Steps beyond a time limit",
                    f"The {words} is {format_number(value)}.",
                    "Profile a step: loading, computing, synchronising.",
                    "metric", value, levels[severity], int(step_time.step[0]),
                    unit=step_time.unit,
                )
            )  # fmt: skip
    return tuple(out)


@dataclass(frozen=True)
class _Reading:
    name: str
    values: Floats
    step: NDArray[np.int64]


def _collect(
    readings: Iterable[_Reading],
    levels: Levels,
    title: str,
    words: str,
    check: str,
    *,
    falls: bool = False,
) -> tuple[Finding, ...]:
    """One finding for each reading whose worst value reaches a level."""
    if not levels:
        return ()
    sign = -1.0 if falls else 1.0
    signed: Levels = {severity: sign * level for severity, level in levels.items()}
    out = []
    for reading in readings:
        known = np.isfinite(reading.values)
        if not known.any():
            continue
        values, steps = sign * reading.values[known], reading.step[known]
        severity = _reached(float(values.max()), signed)
        if severity is None:
            continue
        first = int(steps[int(np.argmax(values >= min(signed.values())))])
        worst = sign * float(values.max())
        out.append(
            _make(
                reading.name, severity, title,
                f"The {words} of {reading.name} reached {format_number(worst)}.", check,
                "layer", worst, levels[severity], first,
            )
        )  # fmt: skip
    return tuple(out)


def _make(
    culprit: str,
    severity: AlertSeverity,
    title: str,
    fact: str,
    check: str,
    kind: str,
    observed: float,
    threshold: float,
    first: int,
    *,
    unit: str = "step",
) -> Finding:
    step, epoch = (first, None) if unit == "step" else (None, first)
    return Finding(
        culprit=culprit,
        severity=severity,
        title=title,
        fact=fact,
        inference=f"This is at or beyond the configured limit of {format_number(threshold)}.",
        suggested_check=check,
        evidence=(observe(kind, culprit, fact, observed, threshold, step),),
        step=step,
        epoch=epoch,
        is_hard_limit=True,
    )


def _reached(value: float, levels: Levels) -> AlertSeverity | None:
    """The worst level that a value is at or beyond."""
    found = [
        severity for severity in SEVERITIES if severity in levels and value >= levels[severity]
    ]
    return found[-1] if found else None


def _find_longest(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Index and length of the longest stretch of true values, the first of equals."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])
