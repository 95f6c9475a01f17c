"""Whether a run has learned something: the evidence that a good health score needs.

That no rule has found anything says little: most faults have no rule. A run is
healthy where its loss, or what the user named, got better by more than chance,
has kept what it won, and where what was held out agrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from quark.analysis.case import Case, NamedMetric, find_guesses
from quark.analysis.curves import Curve
from quark.analysis.doubts import find_doubt, find_worse_than_guesses
from quark.analysis.metric_roles import is_held_out, is_loss, is_player_loss
from quark.analysis.observations import format_number
from quark.analysis.outcome import (
    PERCENT_FROM,
    Progress,
    improves_clearly,
    measure_progress,
    negate,
)
from quark_core.records.names import decode_name

_LEAST_POINTS, _ENOUGH_POINTS = 5, 10
_MANY_STEPS = 50  # over which five points are enough as well
_SIGNIFICANT = 4.0  # standard errors
_LEAST_GAIN = 0.02  # of the start
_KEPT = 0.5  # share of what was won that is still there at the end
_LEAST_VALIDATIONS = 3
_AGREES = 0.5  # share of what the training has won that the validation has too
_CHANCE, _CHANCE_STEP = 0.6, 0.03  # an accuracy below it that has not risen by so much
_LISTED = 6

State = Literal["learned", "not_learned", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What is known of whether a run has learned.

    Attributes:
        state: `learned`, `not_learned`, or `unknown` where nothing says.
        metric: Key of the metric that it is judged by, or None.
        mode: Whether that is better when lower or higher.
        named: Whether the user named it.
        reason: Why, in a few words without a full stop, with the figures that it rests on.
        start, end: Level of the metric before learning and at the end, or None.
        is_validated: Whether anything held out was measured often enough.
        fails_held_out: Whether the training got better, and what was held out did not.
        doubt: Why it is not sure that a run that has learned has learned well, or None: it has
            kept most of its loss, or knows more than can be known.
        held_out_fault: Why what is held out shows nothing that was learned, whatever the training
            does, or None.
        missing: The one call that lets more checks run, where those that matter for a run of
            this kind had no data; else None.
        never_logged: The objective, where it was named and the run has no point of it; else None.
    """

    state: State
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    named: bool = False
    reason: str
    start: float | None = None
    end: float | None = None
    is_validated: bool = False
    fails_held_out: bool = False
    doubt: str | None = None
    held_out_fault: str | None = None
    missing: str | None = None
    never_logged: str | None = None


def is_sound(learning: Learning) -> bool:
    """Whether a run may be held up to others: it has learned, and nothing is doubtful of it."""
    return learning.state == "learned" and learning.doubt is None


def judge_learning(case: Case) -> Learning:
    """Whether the run has learned, by its losses and scores, and by the objective that is named.

    An objective adds to what the records say and takes nothing away of it: where it got better
    and the losses did not, that stays as a doubt.
    """
    judged = _judge_records(case)
    if case.objective is not None:
        judged = _judge_objective(case, judged, case.objective)
    fault = find_held_out_fault(case)
    if fault is not None and judged.state == "learned":
        judged = _refuse_held_out(judged, f"{judged.reason}, but {fault}")
    elif fault is None and judged.state != "learned":
        fault = _find_standstill(case)
    judged = replace(judged, is_validated=_is_validated(case), held_out_fault=fault)
    return replace(judged, missing=_find_missing(case, judged))


def _judge_records(case: Case) -> Learning:
    train, validation = case.train_loss, case.validation_loss
    if train is None and validation is None:
        return _judge_scores(case)
    main = train if train is not None else validation
    assert main is not None
    judged = _judge_curve(main, "min")
    if is_player_loss(main.key):
        return _look_elsewhere(case, judged)
    if judged.state == "not_learned" and train is not None and validation is not None:
        # With little left to win the training's noise hides what the validation shows.
        judged = _look_at_validation(judged, train, validation)
    elif judged.state == "learned" and train is not None and validation is not None:
        judged = _hold_against(judged, train, validation)
    if judged.state != "learned":
        judged = _look_elsewhere(case, judged)
    if judged.state == "learned":
        judged = _doubt(case, _hold_against_guesses(case, _hold_against_accuracy(case, judged)))
    return judged


def _judge_objective(case: Case, judged: Learning, objective: NamedMetric) -> Learning:
    """What the records have said, and what the named metric says beside it."""
    if objective.curve is None:
        others = _list_keys(case) or "nothing"
        said = f"the objective {objective.metric} was never logged; the run has {others}"
        if judged.state == "learned":
            return replace(judged, doubt=judged.doubt or said, never_logged=objective.metric)
        if judged.state == "not_learned":
            return replace(_add(judged, said), never_logged=objective.metric)
        return Learning(
            state="unknown", metric=objective.metric, mode=objective.mode, named=True, reason=said,
            never_logged=objective.metric,
        )  # fmt: skip
    own = replace(_judge_curve(objective.curve, objective.mode), named=True)
    if objective.curve.key == judged.metric:
        # By its name it was taken for a loss; the mode that is declared goes before that.
        return replace(judged, named=True) if objective.mode == judged.mode else own
    if own.state == "not_learned":
        return judged if judged.state == "learned" and _is_known_well(case, own) else own
    if own.state == "unknown":
        return own if judged.state == "unknown" else _add(judged, own.reason)
    return replace(own, doubt=judged.reason if judged.state == "not_learned" else judged.doubt)


def _is_known_well(case: Case, own: Learning) -> bool:
    """Whether an objective that did not get better was measured only when most was learned.

    So it is where the losses agree that it is of, or an accuracy is beyond chance.
    """
    if own.start is None or own.end is None:
        return False
    loss = case.validation_loss
    if loss is not None and own.metric == loss.key:
        return own.end <= own.start
    accuracies = (case.train_accuracy, case.validation_accuracy)
    if own.metric not in [curve.key for curve in accuracies if curve is not None]:
        return False
    unit = 100.0 if max(own.start, own.end) > PERCENT_FROM else 1.0
    return own.end >= max(own.start - _CHANCE_STEP * unit, _CHANCE * unit)


def _judge_scores(case: Case) -> Learning:
    """Of a run without a loss: its accuracies and rewards."""
    scores = [
        curve for curve in (case.train_accuracy, case.validation_accuracy) if curve is not None
    ]
    judged = [_judge_curve(curve, "max") for curve in (*scores, *case.scores)]
    best = next((item for item in judged if item.state == "learned"), None)
    if best is None and judged:
        best = judged[0]
    if best is not None:
        return best
    others = _list_keys(case)
    among = f" among {others}; name it with objective=" if others else ": no metric was logged"
    return Learning(state="unknown", reason=f"no loss was recognised{among}")


def _look_elsewhere(case: Case, judged: Learning) -> Learning:
    """What else says that the run has learned, where its loss does not."""
    if any(is_player_loss(key) for key in case.run.metrics if is_loss(key)):
        # Two players that are equally good have losses that stand still.
        reason = "the losses of two players say nothing of it; name what does with objective="
        judged = Learning(
            state="unknown", metric=judged.metric, reason=reason, start=judged.start, end=judged.end
        )
    rewards = [_judge_curve(curve, "max") for curve in case.scores]
    return next((item for item in rewards if item.state == "learned"), judged)


def _judge_curve(curve: Curve, mode: Literal["min", "max"]) -> Learning:
    sign = 1.0 if mode == "min" else -1.0
    downwards = curve if mode == "min" else negate(curve)
    key = curve.key
    if len(curve) and not len(curve.finite):
        return Learning(
            state="not_learned", metric=key, mode=mode, reason=f"{decode_name(key)} is never finite"
        )
    progress = measure_progress(downwards)
    if progress is None or not _is_long_enough(curve):
        points = len(curve.merged)
        kind = "point" if len(curve.finite) == len(curve) else "finite point"
        plural = "" if points == 1 else "s"
        reason = f"{points} {kind}{plural} of {decode_name(key)} are too few to judge by"
        return Learning(state="unknown", metric=key, mode=mode, reason=reason)
    start, end = sign * progress.start, sign * progress.final
    said = f"{format_number(start)} to {format_number(end)}"
    made = Learning(
        state="learned", metric=key, mode=mode, reason=f"{decode_name(key)} went from {said}",
        start=start, end=end,
    )  # fmt: skip
    if not np.isfinite(curve.value[-1]):
        return _refuse(made, f"{decode_name(key)} ends as {format_number(float(curve.value[-1]))}")
    if not _has_improved(progress):
        return _refuse(made, f"{decode_name(key)} did not get better: {said}")
    if progress.final - progress.best > (1.0 - _KEPT) * progress.fall + 2.0 * progress.error:
        best = format_number(sign * progress.lowest)
        return _refuse(
            made, f"{decode_name(key)} has lost what it won: {said}, and was {best} at its best"
        )
    return made


def _has_improved(progress: Progress) -> bool:
    gain = progress.start - progress.best
    scale = abs(progress.start)
    if progress.start <= 0 or progress.best <= 0:
        scale = float(np.ptp(progress.smoothed.value))
    if gain <= _LEAST_GAIN * scale:
        return False
    drifts = progress.drift > _SIGNIFICANT * progress.drift_error
    return gain > _SIGNIFICANT * progress.error or drifts


def _is_long_enough(curve: Curve) -> bool:
    merged = curve.merged
    count = len(merged)
    if count >= _ENOUGH_POINTS:
        return True
    span = int(merged.step[-1] - merged.step[0]) if count else 0
    return count >= _LEAST_POINTS and (merged.unit == "epoch" or span >= _MANY_STEPS)


def _look_at_validation(judged: Learning, train: Curve, validation: Curve) -> Learning:
    """Whether the validation gets better while the training stands still within its noise."""
    theirs, ours = _judge_curve(validation, "min"), measure_progress(train)
    is_worse = ours is None or ours.final - ours.start > _SIGNIFICANT * ours.error
    return theirs if theirs.state == "learned" and not is_worse else judged


def _hold_against(judged: Learning, train: Curve, validation: Curve) -> Learning:
    """Whether the validation has won what the training has."""
    key = validation.key
    if len(validation) and not len(validation.finite):
        return _refuse_held_out(judged, f"{decode_name(key)} is never finite")
    ours, theirs = measure_progress(train), measure_progress(validation)
    if ours is None or theirs is None:
        return judged
    said = f"{format_number(theirs.start)} to {format_number(theirs.final)}"
    if _has_improved(theirs):
        if theirs.final - theirs.best > theirs.fall + 2.0 * theirs.error:
            return _refuse_held_out(judged, f"{decode_name(key)} has lost what it won: {said}")
        return _add(judged, f"{decode_name(key)} from {said}")
    # Its first value may come after most was learned.
    if theirs.final <= ours.final + (1.0 - _AGREES) * (ours.start - ours.final):
        return _add(judged, f"{decode_name(key)} ends at {format_number(theirs.final)}")
    return _refuse_held_out(
        judged, f"{judged.reason}, but {decode_name(key)} did not get better: {said}"
    )


def _hold_against_accuracy(case: Case, judged: Learning) -> Learning:
    """A loss also falls where a model only learns how often each label comes."""
    curve = case.train_accuracy if case.train_accuracy is not None else case.validation_accuracy
    at_chance = None if curve is None else _find_chance(curve)
    if at_chance is None:
        return judged
    refuse = _refuse_held_out if curve is case.validation_accuracy else _refuse
    return refuse(judged, f"{judged.reason}, but {at_chance}")


def _hold_against_guesses(case: Case, judged: Learning) -> Learning:
    """A loss that was worse than that of guesses falls too where it comes to be that of guesses."""
    guesses = find_guesses(case)
    if judged.state != "learned" or guesses is None:
        return judged
    said = f"guesses have {format_number(guesses)}"
    if case.chance_loss is None:
        said = f"guesses among {case.output_count} outputs have {format_number(guesses)}"
    return _refuse(judged, f"{judged.reason}, and {said}")


def find_held_out_fault(case: Case) -> str | None:
    """Why what is held out cannot be called learned: no number, or no better than guesses."""
    for curve in _list_held_out(case):
        if len(curve) and not len(curve.finite):
            return f"{decode_name(curve.key)} is never finite"
        if len(curve) and not np.isfinite(curve.value[-1]):
            return f"{decode_name(curve.key)} ends as {format_number(float(curve.value[-1]))}"
    accuracy = case.validation_accuracy
    at_chance = None if accuracy is None else _find_chance(accuracy)
    if at_chance is not None or case.outcome.rewarded:
        return at_chance
    return find_worse_than_guesses(case) or _find_guessing(case)


def _find_guessing(case: Case) -> str | None:
    """A validation loss that is that of guesses, where nothing says that more is known."""
    validation, guesses = case.outcome.validation, find_guesses(case)
    if validation is None or guesses is None:
        return None
    return (
        f"{decode_name(validation.key)} ends at {format_number(validation.final)}, and guesses "
        f"have {format_number(guesses)}"
    )


def _find_standstill(case: Case) -> str | None:
    """Of a run that has not learned, what is held out and has not got better either."""
    validation, accuracy = case.outcome.validation, case.validation_accuracy
    if validation is None or _has_improved(validation):
        return None
    if accuracy is not None and improves_clearly(accuracy):
        return None
    said = f"{format_number(validation.start)} to {format_number(validation.final)}"
    return f"{decode_name(validation.key)} did not get better: {said}"


def _find_chance(curve: Curve) -> str | None:
    """Why an accuracy is that of guesses, as far as it can be known: low, and it has not risen."""
    progress = measure_progress(negate(curve))
    if progress is None:
        return None
    unit = 100.0 if float(curve.finite.value.max()) > PERCENT_FROM else 1.0
    start, end = -progress.start / unit, -progress.final / unit
    least = max(_CHANCE_STEP, _SIGNIFICANT * progress.error / unit)
    if end >= _CHANCE or end - start > least or -progress.best / unit - start > least:
        return None
    said = f"{format_number(start * unit)} to {format_number(end * unit)}"
    return f"{decode_name(curve.key)} did not get better: {said}"


def _find_missing(case: Case, judged: Learning) -> str | None:
    """The call that a run of this kind lacks most: what is held out, then what is in the model."""
    if judged.state != "learned":
        return None
    run, metric = case.run, str(judged.metric)
    is_declared = judged.named and not is_loss(metric)  # such as the distance of what a game makes
    if not judged.is_validated and not is_declared and not case.outcome.rewarded:
        return 'metrics.log("val/loss", value, step=step)'
    if run.with_torch and not (run.parameters or run.gradients):
        return "quark.watch(session, model, optimizer)"
    return None


def _doubt(case: Case, judged: Learning) -> Learning:
    """Whether a run that has learned may not have learned well."""
    if judged.state != "learned":
        return judged
    return replace(judged, doubt=find_doubt(case, judged.metric))


def _list_held_out(case: Case) -> list[Curve]:
    held_out = [case.validation_loss, case.validation_accuracy]
    objective = case.objective
    if objective is not None and is_held_out(objective.metric):
        held_out.append(objective.curve)
    return [curve for curve in held_out if curve is not None]


def _is_validated(case: Case) -> bool:
    return any(len(curve.merged) >= _LEAST_VALIDATIONS for curve in _list_held_out(case))


def _list_keys(case: Case) -> str:
    keys = [
        key
        for key, curve in case.run.metrics.items()
        if len(curve) and not key.startswith(("system/", "quark/"))
    ]
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return ", ".join(keys[:_LISTED]) + more


def _refuse(judged: Learning, reason: str) -> Learning:
    return replace(judged, state="not_learned", reason=reason)


def _refuse_held_out(judged: Learning, reason: str) -> Learning:
    return replace(judged, state="not_learned", reason=reason, fails_held_out=True)


def _add(judged: Learning, reason: str) -> Learning:
    return replace(judged, reason=f"{judged.reason}, {reason}")
