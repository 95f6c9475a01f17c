"""A validation that gets worse while the training gets better."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve, estimate_noise, smooth
from quark_core.analysis.limits import limit_overfitting_gap
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis_records import AlertCategory

__all__ = ["OverfittingOnset"]

_LEAST_AFTER = 4  # validation points after the best one
_LEAST_POINTS = 6
_NOISE = 4.0
_SHARE = 0.04  # of what the validation had won
_RISE = 0.125  # of its best level
_ACCURACY_LOST = 0.05
_ACCURACY_BEST = 0.2  # below it nothing had been learned


class OverfittingOnset:
    """Fires where the validation loss rises for good from its best level while training improves.

    Both curves are smoothed; the rise has to stand out of the noise of the
    validation loss and be a tenth of what had been won. A gap that is constant
    is none. Without validation losses, a validation accuracy that falls while
    the training's rises is read in the same way.
    """

    rule_id = "overfitting_onset"
    category: AlertCategory = "generalization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_overfitting_gap(case)
        pairs = [
            (case.validation_loss, case.train_loss or case.train_accuracy, False),
            (case.validation_accuracy, case.train_accuracy or case.train_loss, True),
        ]
        # An accuracy is coarse: it speaks where there is no loss.
        usable = [pair for pair in pairs if pair[0] is not None][:1]
        if not usable:
            return Verdict(
                findings=limited,
                reason="it needs a validation loss or accuracy",
                missing=() if limited else ("val/loss", "val/accuracy"),
            )
        if case.outcome.non_finite_step is not None:
            return Verdict(findings=limited, reason="the training broke down by itself")
        best: float | None = None
        for validation, train, rises in usable:
            assert validation is not None
            finding, share = _look(validation, train, rises, case)
            if finding is not None:
                return Verdict(findings=(finding, *limited))
            if share is not None:
                best = share if best is None else max(best, share)
        if limited:
            return Verdict(findings=limited)
        if best is None:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} validation points, {_LEAST_AFTER} of them "
                "after the best one",
                missing=("more validation points",),
            )
        return Verdict(
            reason="the validation is not much worse than at its best"
            if best <= _SHARE
            else "the validation is worse than at its best, but within its noise, not for good, or "
            "not while the training improved",
            observed=best,
            threshold=_SHARE,
        )


def _look(
    validation: Curve, train: Curve | None, rises: bool, case: Case
) -> tuple[Finding | None, float | None]:
    curve = validation.merged
    values = -curve.value if rises else curve.value
    count = len(values)
    if count < _LEAST_POINTS:
        return None, None
    window = max(3, min(count // 6, 21) | 1)
    level = smooth(values, window)
    best = int(np.argmin(level))
    after = count - 1 - best
    if after < _LEAST_AFTER:
        return None, 0.0
    # Early points are noisier: the rise is held against the noise where it is.
    later = values[max(0, best - window) :]
    noise = estimate_noise(values)
    if len(later) >= _LEAST_POINTS:
        noise = min(noise, estimate_noise(later))
    tail = max(3, min(after // 3, count // 5))
    final = float(np.median(values[-tail:]))
    rise = final - float(level[best])
    won = _find_start(values, train, rises) - float(level[best])
    error = noise * np.sqrt(1.0 / tail + 1.0 / window)
    share = rise / won if won > 0 else (np.inf if rise > 0 else 0.0)
    limits = rise > _NOISE * error and share > _SHARE and rise > _RISE * abs(float(level[best]))
    # Accuracies fall by little when the loss has long risen.
    if rises:
        unit = 100.0 if float(values.min()) < -1.5 else 1.0
        limits = rise > max(_NOISE * error, _ACCURACY_LOST * unit)
        limits = limits and -float(level[best]) > _ACCURACY_BEST * unit
    if not limits:
        return None, share
    # It has to go up most of the way: a level that was reached at once and kept is a change of
    # the data or of the loss, and a bump that goes back is none.
    rest = level[best:]
    if float(np.max(rest)) - final > 0.6 * rise:
        return None, share
    if train is None or not _improves(train, int(curve.step[best]), curve.unit):
        return None, share
    # It begins where the level was at its best for the last time.
    near = np.flatnonzero(level <= level[best] + max(error, 0.1 * rise))
    onset = min(int(near[-1]) + 1, count - 1)
    first = int(curve.step[best])
    name = "accuracy" if rises else "loss"
    sign = -1.0 if rises else 1.0
    scale = case.thresholds
    severity = grade(
        share, 0.0, scale.overfitting_error_gap, max(1.0, scale.overfitting_critical_gap)
    )
    assert train is not None
    says = "fell" if rises else "rose"
    fact = (
        f"The validation {name} was best at {curve.unit} {first} "
        f"({format_number(sign * float(level[best]))}) and {says} to "
        f"{format_number(sign * final)} since, while {train.key} went on improving."
    )
    evidence = (
        observe("metric", validation.key, f"worse than its best by {format_number(share)} of what "
                "it had won", share, _SHARE, first, int(curve.step[-1])),
        observe("metric", train.key, "went on improving", start=first),
    )  # fmt: skip
    return (
        Finding(
            culprit=validation.key,
            severity=severity,
            title="Overfitting sets in",
            fact=fact,
            inference="The model learns the training samples by heart from there on.",
            suggested_check="Keep the checkpoint of the best validation, stop early, regularise "
            "(weight decay, dropout, augmentation) or get more data.",
            evidence=evidence,
            step=int(curve.step[onset]) if curve.unit == "step" else None,
            epoch=int(curve.step[onset]) if curve.unit == "epoch" else None,
            step_end=int(curve.step[-1]) if curve.unit == "step" else None,
            confidence=0.8 if rises else 0.95,
        ),
        share,
    )


def _find_start(values: NDArray[np.float64], train: Curve | None, rises: bool) -> float:
    """The level before learning: of the validation, or of the training, which begins sooner."""
    start = float(np.median(values[:2]))
    if train is None or not len(train.merged) or ("acc" in train.key.lower()) is not rises:
        return start
    first = float(np.median(train.merged.value[:3]))
    return max(start, -first if rises else first)


def _improves(train: Curve, since: int, unit: str) -> bool:
    """Whether the training is better at its end than around a step, or has nothing left to win."""
    curve = train.merged
    if len(curve) < 4:
        return False
    is_accuracy = "acc" in train.key.lower()
    values = -curve.value if is_accuracy else curve.value
    few = max(1, min(10, len(values) // 8))
    final = float(np.median(values[-few:]))
    start = float(np.median(values[:few]))
    if curve.unit != unit:
        return final < start
    near = values[(curve.step <= since)][-few:]
    before = float(np.median(near)) if len(near) else start
    won = start - final
    # Nothing left to win: what remains is a small share of what there was.
    return final < before or (won > 0 and before - final > -0.02 * won)
