"""A validation that gets worse while the training gets better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, find_unit
from quark.analysis.curves import Curve, estimate_noise, smooth
from quark.analysis.observations import count_run, observe, say
from quark.analysis.rule import BaseRule, Finding, Limit, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LIMIT = Limit(
    "overfitting",
    "gap",
    title="Validation loss far above training loss",
    check="Look at regularisation, early stopping and the size of the data.",
)

_LEAST_POINTS = 6
_LEAST_AFTER = 4  # validation points after the best one
_FEWEST, _FEWEST_AFTER = 5, 3  # enough where each of them is worse than the one before
_FEW_RISE, _FEW_SHARE = 0.25, 0.2  # of its best level, of what had been won: no noise is so large
_WINDOW_PART, _LEAST_WINDOW, _MOST_WINDOW = 6, 3, 21  # of the smoothing
_TAIL_PART, _TAIL_OF_ALL, _LEAST_TAIL = 3, 5, 3  # the end: a third of what follows the best point
_NOISE = 4.0  # standard errors that the rise has to have
_SHARE = 0.04  # of what the validation had won
_RISE = 0.125  # of its best level
_ACCURACY_LOST = 0.05
_ACCURACY_BEST = 0.2  # below it nothing had been learned
_MOST_GIVEN_BACK = 0.6  # share of the rise by which it may have been higher: more was a bump
_NEAR_BEST = 0.1  # share of the rise within which it is at its best still

_START_POINTS, _TRAIN_START_POINTS = 2, 3
_LEAST_TRAIN_POINTS = 4
_TRAIN_PART, _MOST_TRAIN_POINTS = 8, 10  # its level somewhere: an eighth of its points
_LITTLE_LEFT = 0.02  # of what the training had won: what it may give back of that

_BY_HEART = 0.05  # of the training loss at the start: what is left where samples are known by heart
_NOTHING_WON = 0.15  # of a validation loss: less than this is not what such a training should win
_ONE_SCALE = 2.0  # times the training loss at the start: on another scale it tells nothing

_CONFIDENCE, _ACCURACY_CONFIDENCE = 0.95, 0.8  # an accuracy is coarse
# Title, inference and check of a validation that gets worse.
_USUAL = (
    "Overfitting sets in",
    "The model learns the training samples by heart from there on.",
    "Keep the checkpoint of the best validation, stop early, regularise "
    "(weight decay, dropout, augmentation) or get more data.",
)
_BY_SIGN = (
    "Training and validation losses have opposite signs",
    "The training minimizes the negative of a loss, as a wrong sign does: the better it gets, the "
    "worse the validation.",
    "Look at the sign of the loss that backward() is called on.",
)
_ALONE_CONFIDENCE = 0.7  # without the training it may be a divergence


@dataclass(frozen=True)
class _Rise:
    """A validation curve against its best level, turned so that less is better.

    Attributes:
        validation: All its points.
        curve: With one a step.
        values: Their values, turned.
        level: The same, smoothed.
        best: Index of the best level.
        final: Level at the end.
        error: Standard error of the rise.
        share: The rise over what had been won; infinite where nothing had been.
        is_accuracy: Whether the values were turned.
        tail: Points at the end whose median is the final level.
    """

    validation: Curve
    curve: Curve
    values: Floats
    level: Floats
    best: int
    final: float
    error: float
    share: float
    is_accuracy: bool
    tail: int = 1

    @property
    def best_level(self) -> float:
        """The best level."""
        return float(self.level[self.best])

    @property
    def size(self) -> float:
        """From the best level to the end."""
        return self.final - self.best_level

    @property
    def won(self) -> float:
        """What had been won up to the best level; 0 where nothing had been."""
        return self.size / self.share if 0.0 < self.share < np.inf else 0.0

    @property
    def best_step(self) -> int:
        """Where the best level is."""
        return int(self.curve.step[self.best])


class OverfittingOnset(BaseRule):
    """Fires where the validation loss rises for good from its best level while training improves.

    Both curves are smoothed; the rise has to stand out of the noise of the
    validation loss and be a tenth of what had been won. A gap that is constant
    is none. Without validation losses, a validation accuracy that falls while
    the training's rises is read in the same way.
    """

    rule_id = "overfitting_onset"
    category: AlertCategory = "generalization"
    needs = "it needs a validation loss or accuracy"
    data = ("val/loss", "val/accuracy")
    threshold = _SHARE

    def check(self, case: Case) -> Verdict:
        """See `quark.analysis.rule.Rule`; a broken training is held to limits only."""
        is_validated = case.validation_loss is not None or case.validation_accuracy is not None
        if is_validated and case.outcome.non_finite_step is not None:
            limited = self.find_limits(case)
            return Verdict(findings=limited, reason="the training broke down by itself")
        return super().check(case)

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """A limit on the gap between the losses, at the end of the validation."""
        train, validation = case.train_loss, case.validation_loss
        if train is None or validation is None:
            return ()
        ours, theirs = train.merged, validation.merged
        points = min(len(ours), len(theirs))
        if (
            not points
            or points < case.thresholds.overfitting_min_points
            or ours.unit != theirs.unit
        ):
            return ()
        gap = theirs.value - np.interp(theirs.step, ours.step, ours.value)
        reached = _LIMIT.list_reached(case, float(gap[-1]))
        if not reached:
            return ()
        first = int(theirs.step[len(gap) - count_run(_LIMIT.is_beyond(gap, reached))])
        fact = say(
            "The validation loss ends at {validation}, the training loss at {train}.",
            validation=case.measure_curve(validation.key, "value"),
            train=case.measure_curve(train.key, "value"),
        )
        end = float(gap[-1])
        return (
            _LIMIT.find(case, validation.key, end, first, fact, kind="metric", unit=theirs.unit),
        )

    def judge(self, case: Case) -> Verdict | None:
        """Look for a validation that ends above its best level while the training improved.

        Silent within the noise, of a bump that goes back, where the training
        gets worse as well (that is divergence), and before four points follow
        the best one. An accuracy speaks where there is no loss, or where the loss
        rises within its noise.
        """
        # By None: a curve without points is false.
        is_accuracy = case.validation_loss is None
        if is_accuracy:
            validation, train = case.validation_accuracy, case.train_accuracy or case.train_loss
        else:
            validation, train = case.validation_loss, case.train_loss or case.train_accuracy
        if validation is None:
            return None
        rise = _measure_rise(validation, train, is_accuracy=is_accuracy)
        if rise is None:
            count = len(validation.merged)
            return Verdict(
                reason=f"too few validations ({count} of {_LEAST_POINTS})",
                missing=("more validation points",),
            )
        if _is_overfitting(rise, train):
            return Verdict(findings=(_describe(rise, train, case),))
        if rise.share > _SHARE and (found := _read_accuracy(case)) is not None:
            return Verdict(findings=(found,))
        if (learned := _find_learned_by_heart(case, rise)) is not None:
            return Verdict(findings=(learned,))
        count, after = len(rise.values), len(rise.values) - 1 - int(np.argmin(rise.values))
        if count < _LEAST_POINTS:
            return Verdict(
                reason=f"too few validations ({count} of {_LEAST_POINTS})",
                missing=("more validation points",),
            )
        if after < _LEAST_AFTER and rise.values[-1] > rise.best_level:
            return self.stay_quiet(
                f"too few validations after the best one ({after} of {_LEAST_AFTER}) to tell a "
                "rise from noise",
                rise.share,
            )
        return self.stay_quiet(
            "the validation is not much worse than at its best"
            if rise.share <= _SHARE
            else "the validation is worse than at its best, but within its noise, not for good, or "
            "not while the training improved",
            rise.share,
        )


def _read_accuracy(case: Case) -> Finding | None:
    """What the accuracy says where the loss rises within its noise: it may fall clearly."""
    accuracy, train = case.validation_accuracy, case.train_accuracy or case.train_loss
    if case.validation_loss is None or accuracy is None or train is None:
        return None
    fall = _measure_rise(accuracy, train, is_accuracy=True)
    if fall is None or not _is_overfitting(fall, train):
        return None
    return _describe(fall, train, case)


def _find_learned_by_heart(case: Case, rise: _Rise) -> Finding | None:
    """A training that comes to nearly nothing beside a validation that never got better."""
    train = case.train_loss
    if rise.is_accuracy or train is None or len(train.finite) < _LEAST_TRAIN_POINTS:
        return None
    values = train.finite.value
    few = max(1, min(_MOST_TRAIN_POINTS, len(values) // _TRAIN_PART))
    first, last = float(np.median(values[:few])), float(np.median(values[-few:]))
    start = float(np.median(rise.values[:_START_POINTS]))
    if float(values.min()) < 0.0 or last > _BY_HEART * first:
        return None
    if not first / _ONE_SCALE <= start <= first * _ONE_SCALE:
        return None
    if rise.best_level < (1.0 - _NOTHING_WON) * start:
        return None
    key, steps = rise.validation.key, rise.curve.step
    return Finding(
        culprit=key,
        severity="error",
        title="Only the training samples are learned",
        fact=say(
            "{train} fell from {first} to {last}, and {key} began at {start} and ends at {final}; "
            "its lowest is {lowest}.",
            train=train.key, key=key,
            first=case.measure_curve(train.key, "first value"),
            last=case.measure_curve(train.key, "value"),
            start=case.measure_curve(key, "first value"),
            final=case.measure_curve(key, "value"),
            lowest=case.measure_curve(key, "lowest"),
        ),
        inference="What is learned holds for the samples of the training alone: they are known by "
        "heart, or the held-out ones are of another kind.",
        suggested_check="Look at whether both sets are prepared in the same way, at the running "
        "statistics of batch normalisation, and whether the inputs tell the labels at all; then "
        "less capacity, regularisation, more data.",
        evidence=(
            observe("metric", key, "never much better than at its start",
                    rise.best_level / start, 1.0 - _NOTHING_WON, int(steps[0]), int(steps[-1])),
            observe("metric", train.key, "comes to nearly nothing", last / first, _BY_HEART),
        ),
        step=int(steps[0]) if rise.curve.unit == "step" else None,
        epoch=int(steps[0]) if rise.curve.unit == "epoch" else None,
        step_end=int(steps[-1]) if rise.curve.unit == "step" else None,
        confidence=_CONFIDENCE,
    )  # fmt: skip


def _measure_rise(validation: Curve, train: Curve | None, *, is_accuracy: bool) -> _Rise | None:
    """How far the validation is above its best level at the end; None of too few points."""
    curve = validation.merged
    values = -curve.value if is_accuracy else curve.value
    count = len(values)
    if count < _FEWEST:
        return None
    if count < _LEAST_POINTS or count - 1 - int(np.argmin(values)) == _FEWEST_AFTER:
        return _measure_few(validation, curve, values, train, is_accuracy=is_accuracy)
    window = max(_LEAST_WINDOW, min(count // _WINDOW_PART, _MOST_WINDOW) | 1)
    level = smooth(values, window)
    if level[0] - values[0] > _NOISE * estimate_noise(values):
        level[0] = values[0]  # at its best before the first look: smoothing takes what came after
    best = int(np.argmin(level))
    after = count - 1 - best
    if after < _LEAST_AFTER:
        return _Rise(validation, curve, values, level, best, float(level[best]), 0.0, 0.0,
                     is_accuracy)  # fmt: skip
    # Early points are noisier: the rise is held against the noise where it is.
    later = values[max(0, best - window) :]
    noise = estimate_noise(values)
    if len(later) >= _LEAST_POINTS:
        noise = min(noise, estimate_noise(later))
    tail = max(_LEAST_TAIL, min(after // _TAIL_PART, count // _TAIL_OF_ALL))
    final = float(np.median(values[-tail:]))
    size = final - float(level[best])
    won = _find_start(values, train, is_accuracy) - float(level[best])
    error = noise * np.sqrt(1.0 / tail + 1.0 / window)
    share = size / won if won > 0 else (np.inf if size > 0 else 0.0)
    return _Rise(validation, curve, values, level, best, final, error, share, is_accuracy, tail)


def _measure_few(
    validation: Curve, curve: Curve, values: Floats, train: Curve | None, *, is_accuracy: bool
) -> _Rise:
    """The rise of very few validations: nothing, unless each is worse than the one before."""
    best = int(np.argmin(values))
    level, final = float(values[best]), float(values[-1])
    won = max(_find_start(values, train, is_accuracy), float(values[0])) - level
    later = values[best:]
    size = final - level
    is_clear = (
        not is_accuracy
        and len(later) > _FEWEST_AFTER
        and bool((np.diff(later) > 0).all())
        and size > _FEW_RISE * _find_unit(level, won)
        and size > _FEW_SHARE * won
    )
    if not is_clear:
        return _Rise(validation, curve, values, values, best, level, 0.0, 0.0, is_accuracy)
    share = size / won if won > 0 else np.inf
    return _Rise(validation, curve, values, values, best, final, 0.0, share, is_accuracy)


def _find_unit(level: float, won: float) -> float:
    """What a rise is held against: the best level, or what was won where that is below zero.

    The zero of a loss that may be negative says nothing.
    """
    return abs(level) if level > 0 else max(min(abs(level), won), 0.0)


def _is_overfitting(rise: _Rise, train: Curve | None) -> bool:
    """Whether a rise is large, for good, and the training's doing.

    Where nothing is known of the training, it has to be the larger.
    """
    if not _is_large(rise):
        return False
    if train is None and not (
        rise.size > _FEW_RISE * _find_unit(rise.best_level, rise.won) and rise.share > _FEW_SHARE
    ):
        return False
    # It has to go up most of the way: a level that was reached at once and kept is a change of
    # the data or of the loss, and a bump that goes back is none.
    if float(np.max(rise.level[rise.best :])) - rise.final > _MOST_GIVEN_BACK * rise.size:
        return False
    return train is None or _improves(train, rise.best_step, rise.curve.unit)


def _is_large(rise: _Rise) -> bool:
    """Whether a rise stands out of the noise, and matters."""
    if not rise.is_accuracy:
        return bool(
            rise.size > _NOISE * rise.error
            and rise.share > _SHARE
            and rise.size > _RISE * _find_unit(rise.best_level, rise.won)
        )
    # Accuracies fall by little when the loss has long risen.
    unit = find_unit(-float(rise.values.min()))
    has_learned = -rise.best_level > _ACCURACY_BEST * unit
    return bool(rise.size > max(_NOISE * rise.error, _ACCURACY_LOST * unit) and has_learned)


def _find_start(values: Floats, train: Curve | None, is_accuracy: bool) -> float:
    """The level before learning: of the validation, or of the training, which begins sooner."""
    start = float(np.median(values[:_START_POINTS]))
    if train is None or not len(train.merged) or ("acc" in train.key.lower()) is not is_accuracy:
        return start
    first = float(np.median(train.merged.value[:_TRAIN_START_POINTS]))
    return max(start, -first if is_accuracy else first)


def _improves(train: Curve, since: int, unit: str) -> bool:
    """Whether the training is better at its end than around a step, or has nothing left to win."""
    curve = train.merged
    if len(curve) < _LEAST_TRAIN_POINTS:
        return False
    is_accuracy = "acc" in train.key.lower()
    values = -curve.value if is_accuracy else curve.value
    few = max(1, min(_MOST_TRAIN_POINTS, len(values) // _TRAIN_PART))
    final = float(np.median(values[-few:]))
    start = float(np.median(values[:few]))
    if curve.unit != unit:
        return final < start
    near = values[(curve.step <= since)][-few:]
    before = float(np.median(near)) if len(near) else start
    won = start - final
    # Nothing left to win: what remains is a small share of what there was.
    return final < before or (won > 0 and before - final > -_LITTLE_LEFT * won)


def _find_confidence(rise: _Rise, train: Curve | None) -> float:
    if train is None:
        return _ALONE_CONFIDENCE
    return _ACCURACY_CONFIDENCE if rise.is_accuracy else _CONFIDENCE


def _have_opposite_signs(rise: _Rise, train: Curve | None) -> bool:
    """Whether all losses of the training are negative, and all of the validation positive."""
    if rise.is_accuracy or train is None:
        return False
    return bool((train.finite.value < 0).all() and (rise.curve.value > 0).all())


def _describe(rise: _Rise, train: Curve | None, case: Case) -> Finding:
    curve, first, last = rise.curve, rise.best_step, int(rise.curve.step[-1])
    key, unit, count = rise.validation.key, rise.curve.unit, len(rise.values)
    # It begins where the level was at its best for the last time.
    near = np.flatnonzero(rise.level <= rise.best_level + max(rise.error, _NEAR_BEST * rise.size))
    onset = int(curve.step[min(int(near[-1]) + 1, count - 1)])
    name, says = ("accuracy", "fell") if rise.is_accuracy else ("loss", "rose")
    best, best_step = case.measure_best(rise.validation, rises=rise.is_accuracy)
    final = case.measure_curve(key, "median", first=int(curve.step[-rise.tail]))
    scale = case.thresholds
    title, inference, check = _BY_SIGN if _have_opposite_signs(rise, train) else _USUAL
    return Finding(
        culprit=key,
        severity=grade(
            rise.share, 0.0, scale.overfitting_error_gap, max(1.0, scale.overfitting_critical_gap)
        ),
        title=title,
        fact=say(
            "The validation {name} was best at {unit} {first} ({best}) and {says} to {final} "
            "since, {while_}.",
            name=name, unit=unit, first=best_step, best=best, says=says, final=final,
            while_=say("while {train} went on improving", train=train.key) if train
            else say("for good"),
        ),
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("metric", key, say("worse than its best by {by}", by=final - best),
                    rise.share, _SHARE, first, last),
            *(() if train is None else (
                observe("metric", train.key, "went on improving", start=first),
            )),
        ),
        step=onset if unit == "step" else None,
        epoch=onset if unit == "epoch" else None,
        step_end=last if unit == "step" else None,
        confidence=_find_confidence(rise, train),
    )  # fmt: skip
