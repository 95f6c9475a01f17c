"""Why it is not sure that a run that has learned has learned well.

A rule names a fault that it knows. Here is what a run without one still has to show before it is
called healthy, whatever may have gone wrong: that little is left of what there was to learn, that
what was held out agrees with the training in both directions, that what was won is kept, that
outputs differ by more than a constant, and that no layer is lost. It is no alert, as there are
harmless reasons for each; the text names them.
"""

from __future__ import annotations

import re

import numpy as np

from quark.analysis.case import Case, is_zero_throughout
from quark.analysis.histories import LayerHistory
from quark.analysis.observations import format_number
from quark.analysis.outcome import PERCENT_FROM, Outcome, Progress
from quark_core.records.names import decode_name

_GOOD_ACCURACY = 0.9
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
    known_well = (case.outcome.accuracy or 0.0) >= _GOOD_ACCURACY
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
    weights = float(np.nanmax(table["element_count"], initial=0.0))
    sizes = [float(np.nanmedian(item["element_count"])) for item in (first, last)]
    if weights != float(np.nanmax(head["element_count"], initial=0.0)) or not min(sizes) > 0:
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
    share = float(last[-1]) / (100.0 if float(last[-1]) > PERCENT_FROM else 1.0)
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
    limit = (_FAR_ABOVE if (accuracy or 0.0) < _GOOD_ACCURACY else _SUMMED) * guesses
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
