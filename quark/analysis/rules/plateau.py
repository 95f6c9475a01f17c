"""A training that learns nothing at all."""

from __future__ import annotations

import numpy as np

from quark.analysis.analysis_context import (
    Case,
    Progress,
    improves_otherwise,
    is_above_chance,
    is_at_chance,
    measure_progress,
)
from quark.analysis.curves import Curve
from quark.analysis.observations import observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_POINTS = 30
_LEAST_EPOCHS = 8  # of a point an epoch, which is the mean of many steps
_RELATIVE = 0.02  # share of the start by which a loss that learns has fallen
_LOST_AGAIN, _LOST_ERRORS = 0.5, 8  # share of what was won, in errors too: that is divergence
_CERTAIN, _CERTAIN_EPOCHS = 0.06, 0.02  # share of the start by which it may have fallen unseen
_AT_ONCE = 0.3  # share of its first value that a fast learner is below it from its first points on
_FIRST_PART = 5  # after a fifth of the run, what is learned once is learned
_AT_CHANCE = 0.03  # share by which a loss may differ from that of guesses
_AWAY_FROM_ZERO = 5.0  # deviations: the level of a loss that may be negative says something
_LEAST_FLAT = 6
_DRIFT_ERRORS = 2.0
_SIGNIFICANT = 4.0  # errors by which a fall is no chance
_MOST_SIGNIFICANT = 1e6  # what is shown of a curve without noise
_HELD_OUT_POINTS = 8  # of a validation that says what a noisy training loss does not
_NOISY = 0.2  # share of the start by which a noisy training loss may have fallen unseen
_LONG = 4  # times the points that are needed: long enough for an error
_CONFIDENCE = 0.8  # it may begin later


class Plateau(BaseRule):
    """Fires where no loss falls and no accuracy or reward rises over the whole run.

    A fall to the loss of guesses, as by an output that learns how frequent the
    classes are, is no learning either. A run that starts with little left to
    learn is no plateau: a high accuracy acquits, and so does a loss that has
    fallen far by its first few points.
    """

    rule_id = "plateau"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_POINTS} points of a loss"
    data = ("train/loss",)
    threshold = _RELATIVE

    def judge(self, case: Case) -> Verdict | None:
        """Look for a loss that ends where it started, within a noise that would show a fall.

        Silent where anything else gets better, where the training breaks down
        or loses again what it had won (those are other rules'), where the noise
        hides what a slow fall would be, where the model knows something from
        its start, and for losses about zero, whose level says nothing.
        """
        progress = case.outcome.loss
        if progress is None or not _has_enough(case, progress):
            return None
        level = _find_guesses(case, progress)
        reason = None if level is not None else _find_acquittal(case, progress)
        if reason is not None:
            return self.stay_quiet(reason, progress.relative_fall)
        fall = progress.start - min(progress.best, progress.final)
        significance = fall / progress.error if progress.error > 0 else float("inf") * (fall > 0)
        return Verdict(
            findings=(_describe(progress, level, case),),
            observed=min(significance, _MOST_SIGNIFICANT),
            threshold=_SIGNIFICANT,
        )


def _has_enough(case: Case, progress: Progress) -> bool:
    """Whether there are enough points: fewer where each is the mean of an epoch."""
    return progress.points >= _LEAST_POINTS or (
        progress.points >= _LEAST_EPOCHS and case.run.ended and is_by_epochs(progress.values)
    )


def is_by_epochs(curve: Curve) -> bool:
    """Whether each point of a curve is of another epoch."""
    if curve.unit == "epoch":
        return True
    return int(curve.epoch.min()) >= 0 and len(np.unique(curve.epoch)) == len(curve)


def _find_guesses(case: Case, progress: Progress) -> float | None:
    """The level at which a loss stays after the run's first fifth, where guesses have that loss.

    None where it goes on falling, where anything else gets better, and where
    nothing says what guesses have.
    """
    outcome = case.outcome
    if outcome.non_finite_step is not None or improves_otherwise(case):
        return None
    if outcome.is_accurate or (outcome.train is None and outcome.other_progress):
        return None
    values = progress.values
    later = measure_progress(values.take(slice(len(values) // _FIRST_PART, None)))
    if later is None or (later.has_fallen and later.relative_fall > _RELATIVE):
        return None
    if not _is_flat(later) or later.final <= 0:
        return None
    level = float(np.median(later.values.value))
    chance = case.chance_loss
    if chance is not None:
        return level if abs(level - chance) <= _AT_CHANCE * chance else None
    return level if is_at_chance(case, level) else None


def _find_acquittal(case: Case, progress: Progress) -> str | None:
    """Why a loss, flat or not, is no plateau; None where it is one."""
    outcome = case.outcome
    known = [item for item in (outcome.train, outcome.validation) if item is not None]
    is_other_matter = (
        outcome.non_finite_step is not None
        or improves_otherwise(case)
        or (progress.has_fallen and progress.relative_fall > _RELATIVE)
        or (outcome.train is None and outcome.other_progress)
        or outcome.is_accurate
        or _has_lost_again(progress)
    )
    if is_other_matter:
        return "a loss falls, or an accuracy rises"
    if not any(_is_flat(item) for item in known) and not _wins_nothing(case):
        return "the loss is too noisy to tell a plateau from a slow fall"
    if is_above_chance(case, progress.start):
        return "it starts with more right answers than an untrained model has at that loss"
    if (
        progress.first > 0
        and progress.final < (1.0 - _AT_ONCE) * progress.first
        and (progress.first - progress.final > _SIGNIFICANT * progress.noise)
    ):
        return "it had learned what it could within its first points"
    if progress.final <= 0 and abs(progress.final) < _AWAY_FROM_ZERO * progress.noise:
        return "a loss about zero says nothing by its level alone"
    return None


def _has_lost_again(progress: Progress) -> bool:
    """Whether it had won something and lost most of it."""
    lost = progress.final - progress.best
    return progress.regression > _LOST_AGAIN and lost > _LOST_ERRORS * progress.error


def _describe(progress: Progress, guesses: float | None, case: Case) -> Finding:
    told = say("" if guesses is None else ", which guesses have,")
    first, last = int(progress.smoothed.step[0]), int(progress.smoothed.step[-1])
    return Finding(
        culprit=progress.key,
        # A loss that may be negative has no level that would be a bad one.
        severity="error"
        if progress.points >= _LONG * _LEAST_POINTS and progress.final > 0
        else "warning",
        title="Nothing is learned",
        fact=say(
            "{key} went from {start} to {end}{told} over {points} points; from point to point it "
            "varies by {noise}.",
            key=progress.key, told=told,
            start=case.measure_curve(progress.key, "level at the start"),
            end=case.measure_curve(progress.key, "level at the end"),
            points=case.measure_curve(progress.key, "count"),
            noise=case.measure_curve(progress.key, "noise"),
        ),
        inference="The updates do not lower the loss: they are too small or too "
        "large, lead nowhere, or there is nothing to learn from the data.",
        suggested_check="Try to fit a single batch; look at the learning rate, the "
        "labels, the inputs, and at which parameters the optimizer has.",
        evidence=(
            observe("metric", progress.key, "share by which it fell", progress.relative_fall,
                    _RELATIVE, first, last),
        ),
        confidence=_CONFIDENCE,
    )  # fmt: skip


def _is_flat(progress: Progress) -> bool:
    """Whether the noise is small enough to say that a curve does not fall."""
    doubt = abs(progress.drift) + _DRIFT_ERRORS * progress.drift_error
    certain = _CERTAIN if progress.points >= _LEAST_POINTS else _CERTAIN_EPOCHS
    return progress.points >= _LEAST_FLAT and doubt <= certain * abs(progress.start)


def _wins_nothing(case: Case) -> bool:
    """Whether a noisy training loss and the validation beside it are both no lower at the end.

    Each by its last third against its first. A validation is the mean of many samples, and says
    of a fall more than a noisy training loss does; a rise is no fall.
    """
    train, held_out = case.outcome.train, case.outcome.validation
    if train is None or held_out is None or train.points < _LEAST_POINTS:
        return False
    if held_out.points < _HELD_OUT_POINTS or min(train.final, held_out.final) <= 0:
        return False
    return all(
        item.drift <= _DRIFT_ERRORS * item.drift_error
        and max(item.drift, 0.0) + _DRIFT_ERRORS * item.drift_error <= most * item.start
        for item, most in ((train, _NOISY), (held_out, _CERTAIN))
    )
