"""A training loss that rises for good."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve
from quark_core.analysis.metric_roles import is_player_loss
from quark_core.analysis.observations import count_run, format_number, observe
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis_records import AlertCategory

__all__ = ["Divergence"]

_LEAST_POINTS = 15
_SHARE = 0.5  # of what was won, lost again
_LASTING = 0.08  # of the run


class Divergence:
    """Fires where the training loss has lost half of what it had won, and stays there.

    A validation that does not get worse acquits: a curriculum, or another
    weight of the loss. So does a rise that is over at the end.
    """

    rule_id = "divergence"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        loss, progress = case.train_loss, case.outcome.train
        if loss is None or progress is None or progress.points < _LEAST_POINTS:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} points of the training loss",
                missing=("train/loss",),
            )
        # In logarithms a third is as far as half of what was won is otherwise.
        regression = max(progress.regression, 1.5 * progress.relapse)
        level = progress.smoothed
        won = max(progress.fall, 4.0 * progress.error)
        least = max(3, round(_LASTING * len(level)))
        limit = progress.best + max(_SHARE * won, 0.05 * abs(progress.best))
        if progress.regression < _SHARE:
            limit = float(np.sqrt(progress.best * max(progress.final, progress.best)))
        is_high = level.value > limit
        is_high[: int(np.searchsorted(level.step, progress.best_step))] = False
        lasting = count_run(is_high)
        breaks = case.outcome.non_finite_step
        quiet = Verdict(
            reason="the training loss ends near its best level",
            observed=regression,
            threshold=_SHARE,
        )
        if lasting < least or regression < _SHARE:
            return quiet
        if breaks is None and any(is_player_loss(key) for key in (loss.key, *case.run.metrics)):
            return Verdict(
                reason="the loss is that of one of two players: it rises when the other one learns",
                observed=regression,
                threshold=_SHARE,
            )
        if breaks is None and self._is_acquitted(case):
            return Verdict(
                reason="the training loss rises and the validation does not get worse: a "
                "curriculum, or a loss that is weighed otherwise",
                observed=regression,
                threshold=_SHARE,
            )
        low = progress.best + max(4.0 * progress.error, 0.15 * (limit - progress.best))
        first = _find_onset(loss, int(level.step[len(level) - lasting]), progress.best_step, low)
        # Beyond where it started it is worse than untrained.
        severity = grade(regression, 0.0, 0.9, 2.0)
        return Verdict(
            findings=(
                Finding(
                    culprit=loss.key,
                    severity="critical" if breaks is not None else severity,
                    title="The training diverges",
                    fact=f"{loss.key} was {format_number(progress.best)} at its best "
                    f"(step {progress.best_step}) and is {format_number(progress.final)} at the "
                    f"end; it started from {format_number(progress.start)}.",
                    inference="The optimization loses what it had learned and does not recover.",
                    suggested_check="Go back to the best checkpoint; look at the learning rate and "
                    "its schedule, at the sign and the weights of the loss, at the data.",
                    evidence=(
                        observe("metric", loss.key, "lost again of what was won", regression,
                                _SHARE, first, int(level.step[-1])),
                    ),
                    step=first,
                    step_end=int(level.step[-1]),
                ),
            ),
            observed=regression,
            threshold=_SHARE,
        )  # fmt: skip

    @staticmethod
    def _is_acquitted(case: Case) -> bool:
        validation = case.outcome.validation
        if validation is not None and validation.points >= 4:
            return validation.regression < 0.25 and validation.relapse == 0.0
        if case.outcome.accuracy is not None and case.outcome.other_progress:
            curve = case.validation_accuracy or case.train_accuracy
            if curve is not None and len(curve.merged) >= 4:
                values = curve.merged.value
                few = max(1, len(values) // 8)
                best = float(np.max(values))
                start = float(np.median(values[:few]))
                return float(np.median(values[-few:])) > best - 0.25 * max(best - start, 1e-12)
        return False


def _find_onset(loss: Curve, smoothed: int, best_step: int, limit: float) -> int:
    """First step from which the points themselves stay beyond the limit, but for one in five.

    Smoothing sees a rise before it is there.
    """
    curve = loss.finite.between(best_step, None)
    high = (curve.value > limit).astype(np.float64)
    if not len(high):
        return smoothed
    width = min(10, len(high))
    share = np.convolve(high, np.ones(width), "full")[width - 1 :][: len(high)]
    lasting = (high > 0) & (share >= 0.8 * np.minimum(width, len(high) - np.arange(len(high))))
    near = curve.step >= smoothed - max(1, (int(curve.step[-1]) - best_step) // 4)
    found = np.flatnonzero(lasting & near)
    return int(curve.step[found[0]]) if len(found) else smoothed
