"""A training loss that rises for good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quark.analysis.analysis_context import Case, Progress
from quark.analysis.curves import Curve
from quark.analysis.metric_roles import is_player_loss
from quark.analysis.observations import count_run, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict, grade
from quark.analysis.rules.exploding_gradients import collect_gradients, read_loss
from quark_core.records.kinds.findings import AlertCategory

_LEAST_POINTS = 15
_FEWEST_POINTS, _FEWEST_LASTING = 6, 3  # of a run that is over and has lost all that it had won
_SHARE = 0.5  # of what was won, lost again
_RELAPSE_WEIGHT = 1.5  # in logarithms a third is as far as half of what was won is otherwise
_LASTING, _LEAST_LASTING = 0.08, 3  # of the run, and points, that it is up at the end
_LEAST_RISE = 0.05  # of the best level: less is a wobble
_CLEAR_ERRORS = 4.0  # standard errors beyond which a level is another one
_ONSET_SHARE = 0.15  # of the way up to the limit: there it has begun
_ERROR_REGRESSION, _CRITICAL_REGRESSION = 0.9, 2.0  # beyond 1 it is worse than untrained

_LEAST_VALIDATIONS = 4
_NO_WORSE = 0.25  # share of what the validation had won
_END_PART = 8  # an eighth of an accuracy's points are its start, and its end
_RESOLUTION = 1e-12  # in place of an accuracy that never rose

_ONSET_POINTS = 10  # in a row, of which four in five are up
_ONSET_MOSTLY = 0.8
_NEAR_PART = 4  # smoothing moves the beginning by less than a quarter of what follows the best


class Divergence(BaseRule):
    """Fires where the training loss has lost half of what it had won, and stays there.

    A validation that does not get worse acquits: a curriculum, or another
    weight of the loss. So does a rise that is over at the end. Where nothing of gradients was
    recorded it fires as well where the loss explodes, even if it comes down after it.
    """

    rule_id = "divergence"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_POINTS} points of the training loss"
    data = ("train/loss",)
    threshold = _SHARE

    def judge(self, case: Case) -> Verdict | None:
        """Look for a training loss that ends far above its best level, and has for a while.

        Silent where it comes back before the end, and, as long as it stays
        finite, where the loss is that of one of two players, whose level says
        little, or a validation says that nothing was lost.
        """
        found = self._judge_end(case)
        # Where gradients were recorded, they say it: see `exploding_gradients`.
        explosion = None if collect_gradients(case) else read_loss(case, [])
        if explosion is None:
            return found
        if found is not None and any(item.severity == "critical" for item in found.findings):
            explosion = replace(explosion, severity="critical")
        return Verdict(findings=(explosion,))

    def _judge_end(self, case: Case) -> Verdict | None:
        loss, progress = case.train_loss, case.outcome.train
        if loss is None or progress is None or progress.points < _FEWEST_POINTS:
            return None
        regression = max(progress.regression, _RELAPSE_WEIGHT * progress.relapse)
        limit = _find_limit(progress)
        lasting = _count_lasting(progress, limit)
        if progress.points < _LEAST_POINTS and not (
            case.run.ended and regression >= 1.0 and lasting >= _FEWEST_LASTING
        ):
            return None
        least = max(_LEAST_LASTING, round(_LASTING * len(progress.smoothed)))
        if lasting < least or regression < _SHARE:
            return self.stay_quiet("the training loss ends near its best level", regression)
        breaks = case.outcome.non_finite_step is not None
        if not breaks:
            if any(is_player_loss(key) for key in (loss.key, *case.run.metrics)):
                return self.stay_quiet(
                    "the loss is that of one of two players: it rises when the other one learns",
                    regression,
                )
            if _is_acquitted(case):
                return self.stay_quiet(
                    "the training loss rises and the validation does not get worse: a "
                    "curriculum, or a loss that is weighed otherwise",
                    regression,
                )
        first = _find_onset(loss, progress, limit, lasting)
        finding = _describe(case, loss, progress, regression, first, breaks=breaks)
        return Verdict(findings=(finding,), observed=regression, threshold=_SHARE)


def _find_limit(progress: Progress) -> float:
    """The level from which on a loss is up: half of what was won, or of its logarithm."""
    if progress.regression < _SHARE:
        return float(np.sqrt(progress.best * max(progress.final, progress.best)))
    won = max(progress.fall, _CLEAR_ERRORS * progress.error)
    return progress.best + max(_SHARE * won, _LEAST_RISE * abs(progress.best))


def _count_lasting(progress: Progress, limit: float) -> int:
    """Smoothed points at the end that are beyond a limit, after the best one."""
    is_high = progress.smoothed.value > limit
    is_high[: int(np.searchsorted(progress.smoothed.step, progress.best_step))] = False
    return count_run(is_high)


def _is_acquitted(case: Case) -> bool:
    """Whether a validation, or an accuracy, is about as good as it ever was, or a reward rises.

    The loss of a policy follows its samples and says nothing by its level.
    """
    if case.outcome.rewarded:
        return True
    validation = case.outcome.validation
    if validation is not None and validation.points >= _LEAST_VALIDATIONS:
        if _CLEAR_ERRORS * validation.error > _NO_WORSE * validation.fall:
            return False  # its noise would hide what the training loses
        return validation.regression < _NO_WORSE and validation.relapse == 0.0
    if case.outcome.accuracy is None or not case.outcome.other_progress:
        return False
    curve = case.validation_accuracy or case.train_accuracy
    if curve is None or len(curve.merged) < _LEAST_VALIDATIONS:
        return False
    values = curve.merged.value
    few = max(1, len(values) // _END_PART)
    best = float(np.max(values))
    won = max(best - float(np.median(values[:few])), _RESOLUTION)
    return float(np.median(values[-few:])) > best - _NO_WORSE * won


def _find_onset(loss: Curve, progress: Progress, limit: float, lasting: int) -> int:
    """First step from which the points themselves stay up, but for one in five.

    Smoothing sees a rise before it is there.
    """
    level = progress.smoothed
    smoothed = int(level.step[len(level) - lasting])
    low = progress.best + max(
        _CLEAR_ERRORS * progress.error, _ONSET_SHARE * (limit - progress.best)
    )
    curve = loss.finite.between(progress.best_step, None)
    high = (curve.value > low).astype(np.float64)
    if not len(high):
        return smoothed
    width = min(_ONSET_POINTS, len(high))
    share = np.convolve(high, np.ones(width), "full")[width - 1 :][: len(high)]
    ahead = np.minimum(width, len(high) - np.arange(len(high)))
    is_lasting = (high > 0) & (share >= _ONSET_MOSTLY * ahead)
    near = max(1, (int(curve.step[-1]) - progress.best_step) // _NEAR_PART)
    found = np.flatnonzero(is_lasting & (curve.step >= smoothed - near))
    return int(curve.step[found[0]]) if len(found) else smoothed


def _describe(
    case: Case, loss: Curve, progress: Progress, regression: float, first: int, *, breaks: bool
) -> Finding:
    last = int(progress.smoothed.step[-1])
    best, best_step = case.measure_best(loss)
    severity = grade(regression, 0.0, _ERROR_REGRESSION, _CRITICAL_REGRESSION)
    return Finding(
        culprit=loss.key,
        severity="critical" if breaks else severity,
        title="The training diverges",
        fact=say(
            "{key} was {best} at its best (step {step}) and is {end} at the end; it started "
            "from {start}.",
            key=loss.key, best=best, step=best_step,
            end=case.measure_curve(loss.key, "level at the end"),
            start=case.measure_curve(loss.key, "level at the start"),
        ),
        inference="The optimization loses what it had learned and does not recover.",
        suggested_check="Go back to the best checkpoint; look at the learning rate and "
        "its schedule, at the sign and the weights of the loss, at the data.",
        evidence=(
            observe("metric", loss.key, "lost again of what was won", regression, _SHARE, first,
                    last),
        ),
    )  # fmt: skip
