"""Gradients that grow without bound, and take the training with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve, trailing_median
from quark_core.analysis.limits import limit_gradient_norms
from quark_core.analysis.metric_roles import find_gradient_norm
from quark_core.analysis.observations import (
    find_sustained,
    format_number,
    observe,
    rank_by,
    say_steps,
)
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis.rules.depth_growth import read_depth, read_start
from quark_core.analysis_records import AlertCategory, AlertSeverity, EvidenceRecord

__all__ = ["ExplodingGradients"]

_FACTOR = 10.0  # times the run's own recent median
_EARLY_FACTOR = 3.0  # times the level of the first probes: late noise about nothing is none
_LEAST_PROBES = 2
_LEAST_LOSSES = 3
_WINDOW = 20
_LOSS_FACTOR = 5.0


@dataclass(frozen=True)
class _Surge:
    name: str
    kind: str
    first: int
    last: int
    ratio: float
    level: float
    baseline: float


class ExplodingGradients:
    """Fires where gradients surge over their own history and the loss suffers for it.

    A surge is ten times the median of the probes before and three times the
    level of the first ones, in two probes in a row, or in the last one before
    the loss ceases to be finite. Without gradients the loss itself is read: it
    explodes, or ends as NaN after growth. A network that is too large from its
    start has no history of its own: there, gradients that grow from layer to
    layer on their way back, as the activations do on theirs, count.
    """

    rule_id = "exploding_gradients"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_gradient_norms(case)
        series = _collect(case)
        surges = [surge for item in series if (surge := _find_surge(item, case)) is not None]
        if surges:
            return Verdict(findings=(_describe(surges, case), *limited))
        for read in (_read_loss, read_depth, read_start):
            if (finding := read(case, series)) is not None:
                return Verdict(findings=(finding, *limited))
        if limited:
            return Verdict(findings=limited)
        loss = case.train_loss
        if not series and (loss is None or len(loss.finite) < _LEAST_LOSSES):
            return Verdict(
                reason="there are no gradients, no gradient norm and no training loss",
                missing=("layer gradients", "parameter gradients", "train/loss"),
            )
        ratios = [_highest_ratio(item.value) for item in series]
        highest = max((ratio for ratio in ratios if ratio is not None), default=None)
        return Verdict(
            reason="no gradient rose far above its own history"
            if highest is None or highest < _FACTOR
            else "a gradient rose far above its own history, but not for long, or the loss did not "
            "suffer",
            observed=highest,
            threshold=_FACTOR,
        )


def _collect(case: Case) -> list[Curve]:
    """Norms of gradients: of layers, of weights, and as the run logs it."""
    out = []
    for history in case.run.gradients.values():
        values = history["rms"].copy()
        bad = (np.nan_to_num(history["nan_count"]) + np.nan_to_num(history["inf_count"])) > 0
        values[bad] = np.inf
        out.append(_make_curve(f"layer {history.name}", history.step, values))
    if not out:
        for parameter in case.run.parameters.values():
            values = parameter["gradient_norm"].copy()
            values[np.nan_to_num(parameter["non_finite_gradient_count"]) > 0] = np.inf
            known = ~np.isnan(values)
            if known.any():
                name = f"parameter {parameter.name}"
                out.append(_make_curve(name, parameter.step[known], values[known]))
    logged = find_gradient_norm(case.run.metrics)
    if logged is not None:
        out.append(Curve(f"metric {logged.key}", logged.step, logged.value, logged.epoch))
    return out


def _make_curve(key: str, step: NDArray[np.int64], value: NDArray[np.float64]) -> Curve:
    return Curve(key, step, value, np.full(len(step), -1))


def _find_surge(curve: Curve, case: Case) -> _Surge | None:
    values = np.where(np.isnan(curve.value), np.inf, curve.value)
    finite = np.isfinite(values)
    if len(values) < 3 or not finite[0]:
        return None
    shown = np.where(finite, values, np.nanmax(np.where(finite, values, np.nan)) * 1e3)
    baseline = trailing_median(shown, _WINDOW)
    early = float(np.median(shown[: max(1, min(5, len(shown) // 4))]))
    with np.errstate(divide="ignore", invalid="ignore"):
        is_high = (shown > _FACTOR * baseline) & (shown > _EARLY_FACTOR * early)
    # What was high raises the median after it: a surge lasts while it stays above the early level.
    start = int(np.argmax(is_high)) if is_high.any() else None
    if start is None:
        return None
    for begin in np.flatnonzero(is_high).tolist():
        base = max(float(baseline[begin]), 1e-300)
        stays = shown[begin:] > max(0.5 * _FACTOR * base, _EARLY_FACTOR * early)
        length = int(np.argmin(stays)) if not stays.all() else len(stays)
        ends = begin + length == len(shown)
        breaks = case.outcome.non_finite_step is not None
        if length < _LEAST_PROBES and not (ends and breaks):
            continue
        step = int(curve.step[begin])
        if not case.outcome.worsens_after(step):
            continue
        peak = float(shown[begin : begin + length].max())
        kind, _, name = curve.key.partition(" ")
        return _Surge(
            name, kind, step, int(curve.step[begin + length - 1]), peak / base, peak, base
        )
    return None


def _describe(surges: list[_Surge], case: Case) -> Finding:
    begin = min(surge.first for surge in surges)
    early = [surge for surge in surges if surge.first == begin]
    # A layer with weights says more than what lies between two of them.
    holders = {item.module_name for item in case.run.parameters.values()}
    weighty = [surge for surge in early if surge.name in holders]
    ranked = rank_by({surge.name: surge.ratio for surge in weighty or early})
    by_name = {surge.name: surge for surge in surges}
    worst = by_name[ranked[0]]
    last = max(surge.last for surge in surges)
    severity: AlertSeverity = "critical"
    if case.outcome.non_finite_step is None:
        severity = grade(worst.ratio, 0.0, 25.0, 1e3)
    where = worst.name if worst.kind != "metric" else f"the metric {worst.name}"
    loss = case.outcome.train or case.outcome.validation
    evidence = [
        observe(
            worst.kind,
            item.name,
            f"{format_number(item.level)} at its highest against a median of "
            f"{format_number(item.baseline)} before",
            item.ratio,
            _FACTOR,
            item.first,
            item.last,
        )
        for item in sorted(surges, key=lambda item: (item.first, -item.ratio))[:5]
    ]
    if loss is not None:
        evidence.append(_observe_loss(case, begin))
    return Finding(
        culprit=worst.name,
        severity=severity,
        title="Gradients explode",
        fact=f"The gradient of {where} rose to {format_number(worst.ratio)} times its own median "
        f"from step {begin} on"
        + (f", and {len(surges) - 1} more did so" if len(surges) > 1 else "")
        + f" ({say_steps(begin, last)}).",
        inference="The steps are too large for the loss's curvature there, and the loss got worse "
        "after it.",
        suggested_check="Look at the learning rate and the data at that step; clip the gradient's "
        "norm, lower the rate or lengthen the warm-up.",
        evidence=tuple(evidence),
        step=begin,
        step_end=last,
        affected=tuple(item.name for item in surges if item.name != worst.name),
    )


def _observe_loss(case: Case, step: int) -> EvidenceRecord:
    item = case.outcome.train or case.outcome.validation
    assert item is not None
    if case.outcome.non_finite_step is not None:
        return observe(
            "metric", item.key, "the loss ceased to be finite", start=case.outcome.non_finite_step
        )
    return observe(
        "metric",
        item.key,
        f"the loss went from {format_number(item.level_before(step))} to "
        f"{format_number(item.highest_after(step))}",
        item.highest_after(step),
        item.level_before(step),
        step,
    )


def _read_loss(case: Case, series: list[Curve]) -> Finding | None:
    """An explosion that only the loss shows: huge values, or growth that ends as NaN."""
    loss = case.train_loss
    if loss is None or len(loss.finite) < 3:
        return None
    values = loss.finite.value
    progress = case.outcome.train
    if progress is None:
        return None
    few = max(1, min(10, len(values) // 5))
    top = float(np.max(values[:few]))
    unit = max(abs(progress.start), progress.fall, 1e-300)
    limit = max(top, progress.start) + _LOSS_FACTOR * unit
    breaks = case.outcome.non_finite_step
    high = values > limit
    if breaks is not None:
        tail = values[-5:]
        before = float(np.median(values[:-5])) if len(values) > 8 else progress.start
        growing = float(tail.max()) > before + max(unit, 6.0 * progress.noise)
        if not growing and not high[-5:].any():
            return None
        begin_rows = np.flatnonzero(values[-5:] > before + 0.5 * unit)
        first = int(loss.finite.step[-len(tail) :][begin_rows[0]]) if len(begin_rows) else breaks
        end = breaks
    else:
        stretch = find_sustained(high, max(3, len(values) // 100))
        if stretch is None:
            return None
        first, end = int(loss.finite.step[stretch[0]]), int(loss.finite.step[stretch[1]])
    # Where gradients were watched and stayed calm, the loss alone says divergence.
    if breaks is None and series and _highest_seen(series, first) < 3.0:
        return None
    peak = float(values.max())
    said = "and then ceased to be finite" if breaks is not None else "and stayed there"
    return Finding(
        culprit=loss.key,
        severity="critical" if breaks is not None else "error",
        title="Gradients explode",
        fact=f"The loss rose from {format_number(progress.level_before(first))} to "
        f"{format_number(peak)} {said} ({say_steps(first, end)}).",
        inference="Steps this far uphill come from exploding gradients; no probe of the gradients "
        "themselves shows it.",
        suggested_check="Watch the gradients (quark.watch), clip their norm, lower the rate.",
        evidence=(
            observe("metric", loss.key, f"highest finite loss {format_number(peak)}", peak, limit,
                    first, end),
        ),
        step=first,
        step_end=end,
        confidence=0.7,
    )  # fmt: skip


def _highest_seen(series: list[Curve], step: int) -> float:
    """Highest ratio of any gradient to its median before a step, from then on."""
    best = 0.0
    for curve in series:
        before = curve.value[(curve.step < step) & np.isfinite(curve.value)]
        after = curve.value[curve.step >= step]
        if len(before) and len(after):
            after = np.where(np.isfinite(after), after, np.inf)
            best = max(best, float(after.max() / max(float(np.median(before)), 1e-300)))
        elif not len(before):
            return np.inf
    return best


def _highest_ratio(values: NDArray[np.float64]) -> float | None:
    finite = values[np.isfinite(values)]
    if len(finite) < 3:
        return None
    base = trailing_median(finite, _WINDOW)[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = finite[1:] / base
    ratios = ratios[np.isfinite(ratios)]
    return float(ratios.max()) if len(ratios) else None
