"""Checks of a run's learning: its progress, and the caveats about its result.

That no rule has found anything says little: most faults have no rule. A run is
healthy where its loss, or what the user named, got better by more than chance,
has kept what it won, and where what was held out agrees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from quark.analysis.analysis_context import (
    Case,
    NamedMetric,
    Outcome,
    Progress,
    find_guesses,
    find_unit,
    improves_clearly,
    is_zero_throughout,
    measure_progress,
    negate,
)
from quark.analysis.curves import Curve, LayerHistory
from quark.analysis.metric_roles import is_held_out, is_loss, is_player_loss
from quark.analysis.observations import format_number
from quark_core.records.names import decode_name

# Why it is not sure that a run that has learned has learned well.
#
# A rule names a fault that it knows. Here is what a run without one still has to show before it is
# called healthy, whatever may have gone wrong: that little is left of what there was to learn, that
# what was held out agrees with the training in both directions, that what was won is kept, that
# outputs differ by more than a constant, and that no layer is lost. It is no alert, as there are
# harmless reasons for each; the text names them.

_KEPT_LOSS = 0.75  # of the loss at the start: who keeps more has learned little, as far as is known
_KEPT_OF_FEW, _FEW, _NEAR = 0.62, 12, 0.15  # likewise of a few classes, from guesses on
_OTHER_MEASURE = 3.0  # times the training's, at its start and at its end: it is another measure
_KNOWN_BEFORE = 0.5  # of a guess's loss: who starts there has learned elsewhere, as for fine-tuning
_SAME_SCALE, _LEAST_SCALE = 1.5, 0.4  # times the training's start: losses of one kind begin there
_FORESEEN = 0.05  # of a guess's loss, held out: no text is known so well
_LEAST_SYMBOLS, _WHOLE = 16, 1e-6  # so near to a whole number
_RECURRENT = ("GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell")
_HARDER, _HARDER_BY = 1.3, 0.12  # times the validation's end; share of the start
_BY_DROPOUT = 0.25  # of the start: so much dropout may make of it
_ERRORS, _SURE = 4.0, 3.0  # standard errors; where the effect is large as well
_SHARED = 0.75  # share of what the training has won that what is held out has won as well
_LOST = 0.3  # share of what was won, lost again
_MAKES_HARDER = ("augment", "mixup", "cutmix", "cutout", "smoothing", "dropout", "drop_path")
_WITH_DROPOUT = ("Dropout", "StochasticDepth", "DropPath")
# Times the loss of guesses: no average of a classifier that works; and of one that works well.
_FAR_ABOVE, _SUMMED = 2.0, 10.0
_LIKE_A_SUM = (0.75, 1.5)  # times the loss of as many guesses as there are rows, at the start
_MOST_GUESSES = 12.0  # of more than a hundred thousand classes
_NO_ENTROPY = re.compile(r"perplexity|ppl|mse|mae|elbo|recon")
_LAST_ACCURACIES, _PLACES = 6, 1e-9
_LEAST_MAJORITY, _LIKE_SHARES = 0.6, 0.15  # of the accuracy; by which the loss may differ
# Scores of what is found, which are zero where nothing is.
_SCORES = re.compile(
    r"(^|[/_.-])(recall|sensitivity|tpr|precision|f1|fbeta|m?iou|jaccard|dice|map|mrr|ndcg|bleu|"
    r"rouge\w?|mcc|kappa|r2|exact_match|success(_rate)?|win_rate|hit_rate)"
    r"([/_.@-](at_?)?(\d+|macro|micro|weighted|mean|avg|epoch|step|val|test))*$"
)
_NO_SCORE, _LEAST_SCORES = 0.01, 3
# How far the outputs of samples lie apart, as it is noted where they may collapse.
_SPREADS = re.compile(
    r"(feature|embed\w*|repr\w*|proj\w*|output)s?[/_.-](std|deviation|spread|variance|rank)$"
)
_LEFT_SPREAD, _SPREAD_POINTS = 0.2, 3  # of that at the start
_LOST_UNITS, _LAST_PROBES = 0.97, 3
_MOST_TWO = 2  # outputs of a classifier of two classes
_SQUASHING = ("Tanh", "Sigmoid", "Hardtanh", "Hardsigmoid", "Softsign")


def find_doubt(case: Case, metric: str | None) -> str | None:
    """The first reason to doubt that a run has learned well, in words without a full stop, or None.

    Args:
        case: A run that has learned.
        metric: What it is judged by.
    """
    if case.outcome.rewarded:
        return None
    known_well = case.outcome.is_accurate
    doubt = None if known_well else _find_little_learned(case, metric) or _find_foreseen(case)
    doubt = (
        doubt
        or _find_far_above_guesses(case)
        or _find_lost_layer(case)
        or _find_empty_score(case)
        or _find_lost_spread(case)
        or _find_majority(case)
        or find_worse_than_guesses(case)
        or _find_loss(case.outcome)
        or _find_harder_training(case, metric)
    )
    return doubt if known_well else doubt or _find_gap(case.outcome)


def _find_little_learned(case: Case, metric: str | None) -> str | None:
    train, validation = case.outcome.train, case.outcome.validation
    main = train or validation
    if validation is not None and metric == validation.key:
        main = validation  # the training's noise hides what it wins
    if main is None or not (main.start > 0 and main.best > 0):
        return None
    ends = [(main.final, main.key)]
    if validation is not None and 0 < validation.start <= _SAME_SCALE * main.start:
        ends.append((validation.final, validation.key))
    end, key = max(ends)
    kept = end / main.start
    guesses = case.guess_loss
    knew = guesses is not None and main.start <= _KNOWN_BEFORE * guesses
    if kept <= (_KEPT_OF_FEW if _has_few_classes(case, main.start) else _KEPT_LOSS) or knew:
        return None
    return (
        f"{decode_name(key)} is still {format_number(100.0 * kept)} % of what "
        f"{decode_name(main.key)} was at the start: how "
        "low it can go is not known; log a score, or hold it against a run that went well"
    )


def _has_few_classes(case: Case, start: float) -> bool:
    """Whether a loss begins as guesses among few classes do, of inputs that are no symbols.

    Of symbols in a row the next one cannot be known, however well it is learned.
    """
    guesses = case.guess_loss
    if guesses is None or guesses > np.log(_FEW) or abs(start / guesses - 1.0) > _NEAR:
        return False
    layers = case.run.activations.values()
    return bool(layers) and not any(item.kind.startswith("Embedding") for item in layers)


def _find_foreseen(case: Case) -> str | None:
    validation, symbols = case.outcome.validation, _count_symbols(case)
    if symbols is None or validation is None:
        return None
    among = float(np.log(symbols))
    if validation.final > _FORESEEN * among:
        return None
    return (
        f"{decode_name(validation.key)} ends at {format_number(validation.final)}, a guess "
        f"among {symbols} "
        f"symbols has {format_number(among)}: make sure that no place sees the symbol that it is "
        "to say"
    )


def _count_symbols(case: Case) -> int | None:
    """Of a model that says the symbols that it reads, at every place at once: how many there are.

    The embedding and the last layer have as many weights, and each place gets a figure for every
    symbol. A recurrent one reads what it is to say only afterwards.
    """
    run = case.run
    layers = list(run.activations.values())
    if not layers or any(item.kind in _RECURRENT for item in layers):
        return None
    first, last = layers[0], layers[-1]
    table = run.parameters.get(f"{first.name}.weight")
    head = run.parameters.get(f"{last.name}.weight", table)
    if first.kind != "Embedding" or last.kind != "Linear" or table is None or head is None:
        return None
    weights = table.size
    sizes = [float(np.nanmedian(item["element_count"])) for item in (first, last)]
    if weights != head.size or not min(sizes) > 0:
        return None
    symbols = float(np.sqrt(weights * sizes[1] / sizes[0]))
    if symbols < _LEAST_SYMBOLS or abs(symbols - round(symbols)) > _WHOLE:
        return None
    return round(symbols) if weights % round(symbols) == 0 else None


def _find_lost_layer(case: Case) -> str | None:
    """A hidden layer that passes nothing on but signs, or nothing, from some probe to the end."""
    for item in list(case.run.activations.values())[:-1]:
        if len(item) < _LAST_PROBES:
            continue
        for share, name in _list_lost(item):
            level = float(np.nan_to_num(share[-_LAST_PROBES:]).min())
            if level >= _LOST_UNITS:
                return (
                    f"{format_number(100.0 * level)} % of {item.name} {name} at the end: nearly "
                    f"no gradient passes through {item.name}; look at the scale of its inputs "
                    "and weights"
                )
    return None


def _list_lost(item: LayerHistory) -> list[tuple[np.ndarray, str]]:
    lost = []
    if not is_zero_throughout(item):
        lost.append((item["dead_unit_ratio"], "gives nothing"))
    if item.kind in _SQUASHING:
        lost.append((item["saturation_ratio"], "is saturated"))
    return lost


def _find_empty_score(case: Case) -> str | None:
    """A score that stays at nothing, whatever the loss says."""
    for key, metric in sorted(case.run.metrics.items()):
        values = metric.finite.value
        if not _SCORES.search(key.lower()) or len(values) < _LEAST_SCORES:
            continue
        last = values[-max(_LEAST_SCORES, len(values) // 3) :]
        if float(np.abs(last).max()) <= _NO_SCORE:
            return (
                f"{decode_name(key)} ends at {format_number(float(last[-1]))}: nothing is found "
                "of what it "
                "counts, as where one answer is given to everything; weight or sample what is "
                "rare, or look at the threshold"
            )
    return None


def _find_lost_spread(case: Case) -> str | None:
    """A noted deviation of features that has gone, in a run whose loss may be glad of it."""
    for key, metric in sorted(case.run.metrics.items()):
        values = metric.finite.value
        if not _SPREADS.search(key.lower()) or len(values) < 2 * _SPREAD_POINTS:
            continue
        first = float(np.median(values[:_SPREAD_POINTS]))
        last = float(np.median(values[-_SPREAD_POINTS:]))
        if 0.0 <= last <= _LEFT_SPREAD * first:
            return (
                f"{decode_name(key)} went from {format_number(first)} to {format_number(last)}: "
                "what samples "
                "are mapped to hardly differs any more"
            )
    return None


def _find_majority(case: Case) -> str | None:
    """An accuracy of two classes that never moves, beside the loss that its share alone gives."""
    curve, validation = case.validation_accuracy, case.outcome.validation
    if curve is None or validation is None or (case.output_count or 0) > _MOST_TWO:
        return None
    values = curve.merged.value
    last = values[-max(_LAST_ACCURACIES, len(values) // 2) :]
    if len(last) < _LAST_ACCURACIES or float(np.ptp(last)) > _PLACES:
        return None
    share = float(last[-1]) / find_unit(float(last[-1]))
    if not _LEAST_MAJORITY <= share < 1.0:
        return None
    alone = float(-share * np.log(share) - (1.0 - share) * np.log(1.0 - share))
    if abs(validation.final / alone - 1.0) > _LIKE_SHARES:
        return None
    return (
        f"{decode_name(curve.key)} is {format_number(float(last[-1]))} in each of the last "
        f"{len(last)} "
        f"validations, and {decode_name(validation.key)} ends at "
        f"{format_number(validation.final)}: who always "
        f"says the more frequent class has {format_number(alone)}"
    )


def find_worse_than_guesses(case: Case) -> str | None:
    """A validation's cross-entropy that is worse than guesses, whatever the training's is."""
    validation, train, guesses = case.outcome.validation, case.outcome.train, case.guess_loss
    if validation is None or guesses is None or train is None or guesses <= 0:
        return None
    if train.start > _SAME_SCALE * guesses and _is_summed(case, validation.final):
        return None  # of another kind, or summed
    if train.start < _LEAST_SCALE * guesses or validation.best <= 0:
        return None
    if validation.final - guesses <= _ERRORS * validation.error:
        return None
    return (
        f"{decode_name(validation.key)} ends at {format_number(validation.final)}, and guesses "
        "have "
        f"{format_number(guesses)}: what is held out is said wrongly with confidence"
    )


def _is_summed(case: Case, end: float) -> bool:
    """Whether a validation loss may be one that is summed over the rows of a batch.

    Each wrong answer has a cross-entropy of log 2 at least, so that of a sum more is left.
    """
    accuracy = case.outcome.accuracy
    if case.output_layer is None or accuracy is None:
        return True
    layer, count = case.output_layer
    rows = float(np.nanmedian(layer["element_count"])) / count
    return end / max(rows, 1.0) >= (1.0 - accuracy) * float(np.log(2.0))


def _find_far_above_guesses(case: Case) -> str | None:
    """A classifier whose loss ends at many times what guesses have, whatever it won on the way.

    Where nobody says how many classes there are, guesses have the loss of more classes than
    anybody has. A loss that is summed over the rows of a batch looks alike: where the rows are
    known it begins as so many guesses, and where they are not, a high accuracy makes it probable.
    """
    accuracy = case.outcome.accuracy
    if case.chance_loss is None and accuracy is None:
        return None
    guesses = case.guess_loss or _MOST_GUESSES
    if _begins_as_a_sum(case, guesses):
        return None
    limit = (_SUMMED if case.outcome.is_accurate else _FAR_ABOVE) * guesses
    for item in (case.outcome.validation, case.outcome.train):
        if item is None or _NO_ENTROPY.search(item.key.lower()) or item.final <= limit:
            continue
        known = "guesses have" if case.guess_loss else "guesses among any number of classes have"
        return (
            f"{decode_name(item.key)} ends at {format_number(item.final)}, and {known} "
            f"{format_number(guesses)} at most: outputs are wrong with great confidence, as of "
            "inputs that are not normalised or steps that are too large; if the loss is summed "
            "over a batch, divide it by the batch's size"
        )
    return None


def _begins_as_a_sum(case: Case, guesses: float) -> bool:
    train = case.outcome.train
    if train is None or case.output_layer is None:
        return False
    layer, count = case.output_layer
    rows = float(np.nanmedian(layer["element_count"])) / count
    low, high = _LIKE_A_SUM
    return rows > 1.0 and low <= train.start / (rows * guesses) <= high


def _find_loss(outcome: Outcome) -> str | None:
    for item in (outcome.train, outcome.validation):
        if item is None or item.fall <= 0:
            continue
        lost = item.final - item.best - 2.0 * item.error
        if lost > _LOST * item.fall:
            return (
                f"{decode_name(item.key)} was {format_number(item.lowest)} at its best, and ends "
                f"at {format_number(item.final)}"
            )
    return None


def _are_of_one_kind(train: Progress | None, validation: Progress | None) -> bool:
    if train is None or validation is None:
        return False
    if not (train.start > 0 and min(train.best, validation.best) > 0):
        return False
    return _LEAST_SCALE * train.start <= validation.start <= _SAME_SCALE * train.start


def _find_harder_training(case: Case, metric: str | None) -> str | None:
    """A training loss that stays well above the validation's, and nothing says why."""
    train, validation = case.outcome.train, case.outcome.validation
    if train is None or validation is None or not _are_of_one_kind(train, validation):
        return None
    if metric == validation.key:
        return None  # single samples drown the training, and what is held out has none
    above = train.final - validation.final
    drops = any(item.kind.startswith(_WITH_DROPOUT) for item in case.run.activations.values())
    least = _BY_DROPOUT if drops else _HARDER_BY
    if train.final < _HARDER * validation.final or above < least * train.start:
        return None
    if above < _SURE * np.hypot(train.error, validation.error):
        return None
    if any(
        word in key.lower() and value for key, value in case.run.config.items()
        for word in _MAKES_HARDER
    ):  # fmt: skip
        return None
    return (
        f"{decode_name(train.key)} ends at {format_number(train.final)}, and "
        f"{decode_name(validation.key)} at "
        f"{format_number(validation.final)}: what is trained on is harder than what is held out, "
        "as with strong augmentation, or with labels of which a part is wrong; look at the samples "
        "with the highest losses, or name the augmentation in the configuration"
    )


def _find_gap(outcome: Outcome) -> str | None:
    """Much that the training has won and what is held out has not."""
    train, validation = outcome.train, outcome.validation
    if train is None or validation is None:
        return None
    if not _are_of_one_kind(train, validation):
        return _find_other_measure(train, validation)
    if train.final > _KEPT_LOSS * train.start:
        return None  # what it knew before is not in these figures
    start = max(train.start, validation.start)
    won, shared = start - train.final, start - validation.final
    if won <= 0 or shared >= _SHARED * won or validation.final <= train.final + train.error:
        return None
    return (
        f"{decode_name(train.key)} went from {format_number(train.start)} to "
        f"{format_number(train.final)}, and "
        f"{decode_name(validation.key)} ends at {format_number(validation.final)}: "
        f"{format_number(100.0 * shared / won)} % of what was won holds for what is held out"
    )


def _find_other_measure(train: Progress, validation: Progress) -> str | None:
    if not (train.start > 0 and min(train.best, validation.best) > 0):
        return None
    if validation.start < _OTHER_MEASURE * train.start:
        return None
    if validation.final < _OTHER_MEASURE * train.final:
        return None
    if validation.final * train.start <= train.final * validation.start:
        return None  # another measure, by which as large a share was won
    return (
        f"{decode_name(validation.key)} goes from {format_number(validation.start)} to "
        f"{format_number(validation.final)}, and {decode_name(train.key)} from "
        f"{format_number(train.start)} to "
        f"{format_number(train.final)}: inputs, targets or the loss are not made in one way for "
        "both"
    )


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
    is_validated = any(len(each.merged) >= _LEAST_VALIDATIONS for each in _list_held_out(case))
    judged = replace(judged, is_validated=is_validated, held_out_fault=fault)
    return replace(judged, missing=_find_missing(case, judged))


def _judge_records(case: Case) -> Learning:
    train, validation = case.train_loss, case.validation_loss
    if train is None and validation is None:
        return _judge_scores(case)
    main = train if train is not None else validation
    assert main is not None
    judged = _judge_curve(main, "min")
    if is_player_loss(main.key):
        return _check_other_metrics(case, judged)
    if judged.state == "not_learned" and train is not None and validation is not None:
        # With little left to win the training's noise hides what the validation shows.
        judged = _look_at_validation(judged, train, validation)
    elif judged.state == "learned" and train is not None and validation is not None:
        judged = _compare_losses(judged, train, validation)
    if judged.state != "learned":
        judged = _check_other_metrics(case, judged)
    if judged.state == "learned":
        judged = _add_caveat(case, _compare_with_chance(case, _compare_with_accuracy(case, judged)))
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
    unit = find_unit(max(own.start, own.end))
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


def _check_other_metrics(case: Case, judged: Learning) -> Learning:
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


def _compare_losses(judged: Learning, train: Curve, validation: Curve) -> Learning:
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


def _compare_with_accuracy(case: Case, judged: Learning) -> Learning:
    """A loss also falls where a model only learns how often each label comes."""
    curve = case.train_accuracy if case.train_accuracy is not None else case.validation_accuracy
    at_chance = None if curve is None else _find_chance(curve)
    if at_chance is None:
        return judged
    refuse = _refuse_held_out if curve is case.validation_accuracy else _refuse
    return refuse(judged, f"{judged.reason}, but {at_chance}")


def _compare_with_chance(case: Case, judged: Learning) -> Learning:
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
    unit = find_unit(float(curve.finite.value.max()))
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


def _add_caveat(case: Case, judged: Learning) -> Learning:
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
