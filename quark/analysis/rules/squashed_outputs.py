"""Outputs that are squashed before a loss that squashes them itself."""

from __future__ import annotations

import numpy as np

from quark.analysis.analysis_context import Case, Progress
from quark.analysis.curves import LayerHistory, take_early
from quark.analysis.observations import Figure, Text, between_steps, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark.analysis.rules.poor_initialisation import find_equal_weights
from quark_core.records.kinds.findings import AlertCategory

_LEAST_POINTS, _LEAST_PROBES = 30, 5
_AT_GUESSES = 0.05  # share by which the first losses may differ from that of guesses
_SLACK = 0.02  # of the bounds, for what is rounded or added, as a penalty is
_LARGE, _GROWN = 4.0, 4.0  # deviation of the outputs at the end, and times that at the start
_LATE_PART = 5  # the last fifth of the probes
_FIRST_PROBES, _UNDECIDED = 3, 1.0  # in which outputs still deviate by less than this
_LEAST_CLASSES = 4  # with fewer the gradient does not grow as shares become sure
_LIKE_SHARES = 0.15  # share by which the first gradients may differ from those through shares
_GROWN_GRADIENT = 1.25  # times the first ones, while the loss falls
_EXACT, _NEAR_FLOOR = 1e-3, 0.01  # of the floor: below it at most, above it at the end
_SHARP = 0.5  # of the deviation that shares of zero and one have
_CUTTING = ("ReLU", "ReLU6")
_NEAR_GUESSES = 0.15  # share by which a first cross-entropy of what is cut may differ from guesses
_CUT = 0.5  # share of the outputs that are cut off at the end
_LAST_PROBES = 3
_SQUASHING = ("Sigmoid", "Hardsigmoid")
_CURVATURE = 0.25  # at most, of log(1 + exp(s))
_FITS = 0.95  # share of the probes whose loss is that of shares squashed once more
_MOVED = 0.1  # by which the mean share has gone from where it began
_WELL = 0.95  # accuracy with which nothing is amiss


class SquashedOutputs(BaseRule):
    """Fires where the loss stays within what shares can give, and outputs or gradients show it.

    A cross-entropy of shares, as a softmax before it gives, cannot get below
    log(1 + (K - 1) / e) among K classes, nor above log(K - 1 + e): the outputs
    grow and grow to come near it. Of a sigmoid before a binary loss it is likewise.
    Also where the last layer is a sigmoid whose losses can be those of its shares squashed once
    more, at every probe, and cannot be those of the shares themselves at the first.
    Also where the losses end at that floor, or the last layer is a softmax whose
    shares are sharp while the loss keeps the bounds.
    Also where outputs of a classifier end in a rectifier: a class whose output is below zero for
    all samples has no gradient any more.
    """

    rule_id = "squashed_outputs"
    category: AlertCategory = "optimization"
    needs = (
        f"it needs the activations of a last linear layer with a bias in {_LEAST_PROBES} probes, "
        f"and {_LEAST_POINTS} points of the training loss"
    )
    data = ("layer activations", "parameter summaries", "train/loss")
    tables = ("activations",)
    threshold = _LARGE

    def judge(self, case: Case) -> Verdict | None:
        """Hold the losses against their bounds, and the outputs against their first size.

        Silent as soon as one loss is beyond the bounds: then it has seen the
        outputs themselves. Smoothed labels keep outputs small.
        """
        progress, layer = case.outcome.train, case.output_layer
        if progress is None or progress.points < _LEAST_POINTS or layer is None:
            return None
        history, count = layer
        cut = _find_cut(case, history, count, progress)
        if cut is not None:
            return Verdict(findings=(_describe_cut(case, history, cut),))
        squash = _find_squash(case, history, progress)
        if squash is not None:
            return Verdict(findings=(_describe_squash(case, history, squash, progress),))
        if find_equal_weights(case.run.parameters, case.run.activations):
            return self.stay_quiet("the units of a layer are alike, so that little can be told")
        std = history["std"][np.isfinite(history["std"])]
        if len(std) < _LEAST_PROBES:
            return None
        late = float(np.median(std[-max(1, len(std) // _LATE_PART) :]))
        early = float(np.median(take_early(std)))
        if _is_handed_on(case, history, count, progress):
            finding = _describe(case, progress, history, count, by_gradient=True)
            return Verdict(findings=(finding,), observed=late, threshold=_LARGE)
        is_grown = late >= max(_LARGE, _GROWN * early) or _is_at_floor(progress, count)
        if not is_grown and not _is_softmax_sharp(case, history, count):
            return self.stay_quiet("the outputs stay small", late)
        if not _is_bounded(progress, count) or not progress.has_fallen:
            return self.stay_quiet("the loss is not bounded as that of shares is", late)
        finding = _describe(case, progress, history, count)
        return Verdict(findings=(finding,), observed=late, threshold=_LARGE)


def _is_bounded(progress: Progress, count: int) -> bool:
    """Whether all losses lie where those of shares of so many classes do, from guesses on."""
    values = progress.values.value
    if count > 1:
        highest = float(np.log(count - 1.0 + np.e))
        lowest, guesses = highest - 1.0, (float(np.log(count)),) * 2
    else:
        lowest, highest = float(np.log1p(np.exp(-1.0))), float(np.log1p(np.exp(1.0)))
        # Of a share of one half, with all labels one and all labels zero.
        guesses = float(np.log1p(np.exp(-0.5))), float(np.log1p(np.exp(0.5)))
    low, high = guesses[0] * (1.0 - _AT_GUESSES), guesses[1] * (1.0 + _AT_GUESSES)
    begins = low <= progress.first <= high
    return (
        begins
        and float(values.min()) >= lowest - _SLACK * abs(lowest)
        and float(values.max()) <= highest + _SLACK * highest
    )


def _is_at_floor(progress: Progress, count: int) -> bool:
    """Whether the losses end at the least that shares allow and none is below it, as by chance.

    The first probe may come too late to see the outputs small.
    """
    values, floor = progress.values.value, float(np.log1p((count - 1.0) / np.e))
    late = float(np.median(values[-max(1, len(values) // _LATE_PART) :]))
    return (
        count > 1
        and float(values.min()) >= (1.0 - _EXACT) * floor
        and late <= (1.0 + _NEAR_FLOOR) * floor
    )


def _is_softmax_sharp(case: Case, head: LayerHistory, count: int) -> bool:
    """Whether a softmax follows the last linear layer, and its shares come near to zero and one.

    The logarithms of such shares leave the bounds: only a loss that squashes them again cannot.
    """
    layers = list(case.run.activations.values())
    if count < 2 or len(layers) < 2 or layers[-2].name != head.name:
        return False
    std = layers[-1]["std"][np.isfinite(layers[-1]["std"])]
    if layers[-1].kind != "Softmax" or len(std) < _LEAST_PROBES:
        return False
    late = float(np.median(std[-max(1, len(std) // _LATE_PART) :]))
    return late >= _SHARP * float(np.sqrt(count - 1.0)) / count


def _is_handed_on(case: Case, layer: LayerHistory, count: int, progress: Progress) -> bool:
    """Whether the outputs' gradients are those that a softmax hands on, at first and later."""
    gradient = case.run.gradients.get(layer.name)
    if gradient is None or count < _LEAST_CLASSES or not progress.has_fallen:
        return False
    norm, elements = gradient["norm"], gradient["element_count"]
    known = np.isfinite(norm) & (norm > 0) & (elements > 0)
    if known.sum() < max(_LEAST_PROBES, 2 * _FIRST_PROBES):
        return False
    if not float(np.nanmax(layer["std"][:_FIRST_PROBES])) < _UNDECIDED:
        return False
    # Of a mean cross-entropy of guesses: each row's share less its label, over the rows.
    rows = elements[known] / count
    ratio = norm[known] * np.sqrt(rows / (1.0 - 1.0 / count))
    first = float(np.median(ratio[:_FIRST_PROBES]))
    if abs(first * count - 1.0) > _LIKE_SHARES:
        return False
    later = float(np.median(ratio[-max(_FIRST_PROBES, len(ratio) // _LATE_PART) :]))
    return later >= _GROWN_GRADIENT * first and _is_bounded(progress, count)


def _find_cut(
    case: Case, head: LayerHistory, count: int, progress: Progress
) -> LayerHistory | None:
    """The rectifier that a classifier's outputs go through before the loss, or None."""
    layers = list(case.run.activations.values())
    if len(layers) < 2 or layers[-2].name != head.name or not layers[-1].kind.startswith(_CUTTING):
        return None
    cut, chance = layers[-1], float(np.log(count)) if count > 1 else 0.0
    if count < 2 or abs(progress.first / chance - 1.0) > _NEAR_GUESSES or len(cut) < _LEAST_PROBES:
        return None
    if (case.outcome.accuracy or 0.0) >= _WELL:
        return None
    sizes = [float(np.nanmedian(item["element_count"])) for item in (head, cut)]
    level = float(np.median(np.nan_to_num(cut["zero_ratio"][-_LAST_PROBES:])))
    return cut if sizes[0] == sizes[1] and level >= _CUT else None


def _find_squash(case: Case, head: LayerHistory, progress: Progress) -> LayerHistory | None:
    """The sigmoid whose shares a binary loss takes for scores, or None.

    The mean of log(1 + exp(s)) - y s over shares s with any labels y lies between
    log(1 + exp(m)) - m and log(1 + exp(m)) + v / 8, for the mean m and the variance v of s.
    """
    layers = list(case.run.activations.values())
    if len(layers) < 2 or layers[-2].name != head.name or layers[-1].kind not in _SQUASHING:
        return None
    squash, sizes = layers[-1], [np.nanmedian(item["element_count"]) for item in layers[-2:]]
    steps, own, theirs = np.intersect1d(squash.step, progress.values.step, return_indices=True)
    if sizes[0] != sizes[1] or len(steps) < _LEAST_PROBES:
        return None
    loss = progress.values.value[theirs]
    mean, std, least, most = (squash[key][own] for key in ("mean", "std", "minimum", "maximum"))
    again = np.log1p(np.exp(mean))
    fits = (loss >= (again - mean) * (1 - _SLACK)) & (
        loss <= (again + std**2 * _CURVATURE / 2) * (1 + _SLACK)
    )
    if not fits.mean() >= _FITS or not abs(mean[-1] - mean[0]) >= _MOVED:
        return None
    low, high = float(least[0]), float(most[0])
    if not 0.0 < low <= high < 1.0:
        return None
    # A logarithm of a share is no farther from that of their mean than the steepest slope says.
    logs, away = -np.log([mean[0], 1.0 - mean[0]]), float(std[0]) / min(low, 1.0 - high)
    is_of_shares = logs.min() - away <= loss[0] <= logs.max() + away
    return None if is_of_shares else squash


def _describe_squash(
    case: Case, head: LayerHistory, squash: LayerHistory, progress: Progress
) -> Finding:
    first, last = int(squash.step[0]), int(squash.step[-1])
    return Finding(
        culprit=squash.name,
        severity="warning",
        title="Outputs go through a sigmoid twice",
        fact=say(
            "The outputs of {head} go through {name} ({kind}), whose mean goes from {early} to "
            "{late}; {key} stays between {lowest} and {highest} ({steps}), as a loss of these "
            "shares would not, and one that squashes them once more does.",
            head=head.name, name=squash.name, kind=squash.kind, key=progress.key,
            early=case.measure("activation", squash.name, "first value", "mean"),
            late=case.measure("activation", squash.name, "value", "mean"),
            lowest=case.measure_curve(progress.key, "lowest"),
            highest=case.measure_curve(progress.key, "highest"), steps=between_steps(first, last),
        ),
        inference="A share that is squashed again stays in the middle: a clear no cannot be said, "
        "a clear yes neither, and the best answer is the same for nearly all samples.",
        suggested_check="Drop the sigmoid where the loss has one (BCEWithLogitsLoss), or take "
        "BCELoss; apply the sigmoid once where predictions are made.",
        evidence=(
            observe("layer", squash.name, "mean of the outputs at the end",
                    float(squash["mean"][-1]), None, first, last),
        ),
    )  # fmt: skip


def _describe_cut(case: Case, head: LayerHistory, cut: LayerHistory) -> Finding:
    late, last = int(cut.step[-_LAST_PROBES]), int(cut.step[-1])
    return Finding(
        culprit=cut.name,
        severity="warning",
        title="Outputs are cut off before the loss",
        fact=say(
            "The outputs of {head} go through {name} ({kind}), and {share} of what it gives is "
            "zero ({steps}).",
            head=head.name, name=cut.name, kind=cut.kind, steps=between_steps(late, last),
            share=case.measure("activation", cut.name, "median", "zero_ratio", first=late).percent,
        ),
        inference="A score below zero cannot be said, and a class whose score is there for all "
        "samples gets no gradient.",
        suggested_check="Give the loss the outputs of the last linear layer themselves.",
        evidence=(
            observe("layer", cut.name, "share of outputs that are zero",
                    float(np.median(cut["zero_ratio"][-_LAST_PROBES:])), _CUT, late, last),
        ),
        step=int(cut.step[0]),
        step_end=last,
    )  # fmt: skip


def _describe(
    case: Case,
    progress: Progress,
    layer: LayerHistory,
    count: int,
    *,
    by_gradient: bool = False,
) -> Finding:
    key, steps = progress.key, layer.step
    late = int(steps[-max(1, len(steps) // _LATE_PART)])
    early = int(steps[len(take_early(layer["std"])) - 1])
    name = "softmax" if count > 1 else "sigmoid"
    first, last = int(steps[0]), int(steps[-1])
    bounds: dict[str, Figure | Text | str] = {
        "key": key,
        "lowest": case.measure_curve(key, "lowest"),
        "highest": case.measure_curve(key, "highest"),
        "steps": between_steps(first, last),
    }
    if by_gradient:
        fact = say(
            "The gradient at {layer} has a norm of {early} at first, which is what a softmax of "
            "undecided outputs leaves of a cross-entropy's, and of {late} at the end; {key} "
            "stays between {lowest} and {highest} ({steps}), as if it saw shares only.",
            layer=layer.name, early=case.measure("gradient", layer.name, "median", "norm",
                                            last=int(steps[_FIRST_PROBES - 1])),
            late=case.measure("gradient", layer.name, "median", "norm", first=late), **bounds,
        )  # fmt: skip
    else:
        fact = say(
            "The outputs of {layer} deviate by {late} at the end, by {early} at first, and {key} "
            "stays between {lowest} and {highest} ({steps}), as if it saw shares only.",
            layer=layer.name,
            late=case.measure("activation", layer.name, "median", "std", first=late),
            early=case.measure("activation", layer.name, "median", "std", last=early),
            **bounds,
        )
    return Finding(
        culprit=layer.name,
        severity="warning",
        title=f"Outputs go through a {name} twice",
        fact=fact,
        inference=f"A {name} before a loss that has one itself leaves it hardly anything to see: "
        "the loss cannot come near zero, and gradients are small.",
        suggested_check=f"Give the loss the outputs themselves, without the {name}; apply it only "
        "where shares are shown.",
        evidence=(
            observe("layer", layer.name, "deviation of the outputs at the end",
                    float(np.median(layer["std"][steps >= late])), _LARGE, late, last),
        ),
        step=first,
        step_end=last,
    )  # fmt: skip
