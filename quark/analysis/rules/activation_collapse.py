"""Layers whose outputs no longer say anything: dead, saturated or all the same."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, is_zero_throughout
from quark.analysis.curves import SMALLEST, Curve, LayerHistory, median_filter, take_early
from quark.analysis.observations import Figure, Text, between_steps, count_names, observe, say
from quark.analysis.rule import SEVERITIES, BaseRule, Finding, Limit, Verdict, grade
from quark.analysis.run_data import RunData
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity

_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LazyLinear", "Embedding", "Bilinear")


def find_feeding_module(run: RunData, name: str) -> str:
    """The module whose weights make what this one gives: itself, or the nearest before it.

    An activation such as ReLU has nothing to edit: whether its units are dead is decided by the
    layer that feeds it. Modules count in the order in which they were called.
    """
    holders = {item.module_name for item in run.parameters.values()}
    kinds = {other: item.kind for other, item in run.activations.items()}
    if name not in kinds:
        return name
    called = list(kinds)
    for other in reversed(called[: called.index(name) + 1]):
        if other in holders or kinds[other] in _WEIGHTED:
            return other
    return name


Floats = NDArray[np.float64]

_LEAST_PROBES = 3  # one or two may be odd batches
_LASTING, _MOST_LASTING = 0.1, 20  # share of the probes, and number, that the end has to have
_MOSTLY = 0.8  # share of the end that has it: single probes may be exceptions
_EXCEPTIONS = 0.1  # share of exceptions from the beginning on

_DEAD, _ALL_DEAD = 0.7, 0.97
_DEAD_RISE = 0.3  # above the first probes: a sparse layer has many idle units from the start
_FIRST_PROBES = 5  # what happens within them is no early level
_JUMP, _JUMP_PROBES, _DEAD_AT_ONCE = 0.5, 2, 0.8  # by so much from probe to probe: no slow thinning

_SATURATED = 0.85
_BOTH_ENDS = 0.95  # of a layer with two flat ends, in a training that only stalls
_STUCK, _UPPER_END = 0.9, 0.2  # of it at either end, and at the upper one, whatever the loss does
_ALL_SATURATED, _LARGE_RISE = 0.98, 0.5  # beyond doubt: it was not so, and is it wholly

_ALIKE, _ALIKE_DROP = 1e-3, 0.02  # share of the energy between samples; of its early share
_NEARLY_ALIKE, _NEARLY_DROP = 0.08, 0.3  # the same in a training that stands still
_NEARLY_LASTING = 0.2  # share of the probes that this lasts: what hovers about it is no collapse
# Losses that are as low as can be where all outputs are one.
_LIKENESS = re.compile(r"simil|cosine|(^|[/_.-])cos([/_.-]|$)|byol|simsiam")
_LEAST_EARLY = 0.01  # less was never told apart
_SHALLOW = 1e-3  # of what the first layers tell apart
_FIRST_LAYERS = 3

_STD, _STD_ALONE = 0.05, 1e-3  # of the early deviation, where the training suffers and where not
_SHRUNK, _PEAK_PROBES, _MOST_GROWN = 0.12, 5, 30.0  # of its highest level, no explosion's
_FLAT = 1e-4  # deviation over the mean: one value
_FLAT_STD = 0.1  # of the early deviation, which what is flat has to have lost as well

_FILTER_PROBES = 3  # shares of single batches are noisy
_LOST_AFTER, _KEPT_BEFORE = 0.1, 0.15  # share between samples of all later layers, of a former one
_LATENT_STD, _LATENT_OUTPUT = 0.3, 0.2  # of their early deviation, of the output's early share
_KL = re.compile(r"(^|[/_.-])(kl|kld|kl_loss|kl_div|kl_divergence)$")
_RECONSTRUCTION = re.compile(r"recon|elbo|vae|nll")
_NO_CODE, _CODE_LOST = 0.05, 0.25  # nats of the code at the end, and of what it had at its highest
_LEAST_KL_POINTS = 20

_TWO_ENDED = ("ReLU6", "Hardswish")
_SQUASHING = ("Tanh", "Sigmoid", "Softsign")

_OF_UNITS = ("Units are dead", "Units are saturated")
_BY_CAUSE = (
    *_OF_UNITS,
    "The representation collapses",
    "The latent code is no longer used",
    "Outputs shrink to nothing",
    "Outputs are all alike",
)

_TOGETHER = 0.1  # share of the run within which layers count as having begun together
_LATEST = 0.75  # of the run: by then a layer before it must show it too
_EQUALLY_GONE = 0.03  # share by which one is no worse than another
_MOST_NAMED = 5
_MOST_EVIDENCE = 6

_LIMITS = tuple(
    Limit(
        "activation_collapse",
        suffix,
        title="Activations collapse",
        check="Look at the layer's inputs, its initialisation and the learning rate.",
        words=words,
        falls=suffix == "std",
    )
    for suffix, words in (
        ("dead_unit_ratio", "share of dead units"),
        ("saturation_ratio", "share of saturated elements"),
        ("std", "standard deviation"),
    )
)


class ActivationCollapse(BaseRule):
    """Fires where a layer's units die, saturate or give one value, to the end of the run.

    Dead units are those that give nothing for the whole batch; the share of
    zeros is not looked at, since half of a healthy ReLU layer are zeros. A
    layer with (nearly) all units dead fires by itself; less, saturation and a
    shrunken deviation only where the training suffers.
    """

    rule_id = "activation_collapse"
    category: AlertCategory = "representation"
    needs = f"it needs activations in {_LEAST_PROBES} probes"
    data = ("layer activations",)
    threshold = _DEAD

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """Limits on dead units, saturation and deviation."""
        layers = case.run.activations
        return tuple(
            finding
            for limit in _LIMITS
            for finding in limit.find_layers(case, layers, limit.suffix)
        )

    def judge(self, case: Case) -> Verdict | None:
        """Look for layers that are dead, saturated or alike from some probe to the last one.

        Silent where it passes again before the end, where a layer is zero from
        its first probe on, as one that was set so on purpose, and, but for
        what is beyond doubt, in a training that goes well.
        """
        layers = [item for item in case.run.activations.values() if len(item) >= _LEAST_PROBES]
        code = _look_at_code(case)
        if not layers:
            return None if code is None else Verdict(findings=(code,))
        last = max(item.order for item in layers)
        found = [
            finding
            for item in layers
            if (finding := _look(item, case, is_hidden=item.order < last)) is not None
        ]
        found = found or _look_at_latent(layers, case)
        if found:
            return Verdict(findings=(_join(found, case),))
        if code is not None:
            return Verdict(findings=(code,))
        highest = max(float(np.nan_to_num(item["dead_unit_ratio"]).max()) for item in layers)
        return self.stay_quiet(
            "no layer's units are dead, saturated or alike to the end of the run in a "
            "training that suffers",
            highest,
        )


def _look(item: LayerHistory, case: Case, *, is_hidden: bool) -> Finding | None:
    """The first of the ways to collapse that a layer shows, the surest first."""
    if is_zero_throughout(item):
        return None  # it was set to zero on purpose, and has not left it: that is another rule's
    return (
        _look_at_dead_units(item, case)
        or _look_at_saturation(item, case, is_hidden=is_hidden)
        or _look_at_samples(item, case, is_hidden=is_hidden)
        or _look_at_deviation(item, case)
    )


def _dead(item: LayerHistory) -> Floats:
    """Share of dead units by probe, 0 where it is not known."""
    return np.asarray(np.nan_to_num(item["dead_unit_ratio"]))


def _early(values: Floats) -> float:
    """The level of the first probes, or of the very first where that is higher.

    What is lost by the second probe is no level that anything could be held against.
    """
    known = values[np.isfinite(values)]
    return max(float(np.median(take_early(known))), float(known[0])) if len(known) else np.nan


def _lowest_early(values: Floats) -> float:
    """The lowest of the first probes: what happens at once is no early level."""
    known = values[np.isfinite(values)][:_FIRST_PROBES]
    return float(known.min()) if len(known) else 0.0


def _to_the_end(mask: NDArray[np.bool_], *, is_certain: bool = False) -> int | None:
    """Index from which a mask holds (but for single probes) to the end, for long enough.

    Of what is certain at every single probe, three probes are.
    """
    count = len(mask)
    least = max(_LEAST_PROBES, min(_MOST_LASTING, round(_LASTING * count)))
    if is_certain and count >= _LEAST_PROBES and bool(mask[-_LEAST_PROBES:].all()):
        least = _LEAST_PROBES
    if count < least or mask[-least:].mean() < _MOSTLY:
        return None
    # Holds from where at most a tenth of what follows is an exception.
    tail = np.cumsum(~mask[::-1])[::-1] / np.arange(count, 0, -1)
    first = int(np.argmax(mask & (tail <= _EXCEPTIONS)))
    return first if mask[first] and tail[first] <= _EXCEPTIONS else None


def _look_at_dead_units(item: LayerHistory, case: Case) -> Finding | None:
    """Whether nearly all units are dead, or many more than at first in a training that suffers."""
    dead = _dead(item)
    start = _to_the_end(dead >= _ALL_DEAD, is_certain=True)
    if start is None:
        limit = max(_DEAD, min(_ALL_DEAD, _lowest_early(item["dead_unit_ratio"]) + _DEAD_RISE))
        start = _to_the_end(dead >= limit)
        if start is None:
            return None
        before = int(item.step[max(0, start - 1)])
        suffers = case.outcome.is_poor or case.outcome.worsens_after(before)
        if not (suffers or _die_at_once(dead, start, case)):
            return None
    level = float(np.median(item["dead_unit_ratio"][start:]))
    scale = case.thresholds
    return _describe(
        item, start, "Units are dead",
        say("{level} of the units of {name} give nothing for any sample", name=item.name,
            level=_measure(item, case, "dead_unit_ratio", start).percent),
        "Dead units get no gradient and do not come back by themselves.",
        "A lower rate, another initialisation, smaller biases, LeakyReLU or GELU.",
        level, _DEAD,
        grade(level, 0.0, scale.activation_collapse_error_dead_unit_ratio,
              scale.activation_collapse_critical_dead_unit_ratio),
    )  # fmt: skip


def _die_at_once(dead: Floats, start: int, case: Case) -> bool:
    """Whether most units died from one probe to the next: a falling loss is no excuse for that.

    A penalty that thins a layer out takes many probes for it.
    """
    before = dead[max(0, start - _JUMP_PROBES) : start]
    if not len(before) or float(np.median(dead[start:])) < _DEAD_AT_ONCE:
        return False
    return not case.outcome.is_accurate and float(dead[start] - before.min()) >= _JUMP


def _look_at_saturation(item: LayerHistory, case: Case, *, is_hidden: bool) -> Finding | None:
    """Whether a layer's outputs are at the ends of its range, and that does harm."""
    saturation = item["saturation_ratio"]
    if item.kind in _TWO_ENDED:
        # Below its range it gives zeros, which count as inactive: at either end nothing passes.
        saturation = saturation + np.nan_to_num(item["zero_ratio"])
    start = _to_the_end(np.nan_to_num(saturation) >= _SATURATED)
    if start is None:
        return None
    outcome = case.outcome
    both_ends = (
        item.kind in _TWO_ENDED
        and not outcome.rewarded
        and (
            (outcome.stalls and not np.median(saturation[start:]) < _BOTH_ENDS)
            or _is_stuck_at_both_ends(item, saturation, start, case)
        )
    )
    does_harm = (
        outcome.is_poor
        or both_ends
        or outcome.worsens_after(int(item.step[start]))
        or (is_hidden and _is_gone(saturation, start, case))
    )
    is_lost = is_hidden and _is_lost(item)
    if not (does_harm or is_lost):
        return None
    level = float(np.median(saturation[start:]))
    scale = case.thresholds
    shown = _measure(item, case, "saturation_ratio", start)
    if item.kind in _TWO_ENDED:
        shown = shown + _measure(item, case, "zero_ratio", start)
    return _describe(
        item, start, "Units are saturated",
        say("{level} of the outputs of {name} are at the ends of its range", name=item.name,
            level=shown.percent),
        "There its slope is nearly zero, so that hardly any gradient passes.",
        "Normalise its inputs, start with smaller weights, lower the rate.",
        level, _SATURATED,
        grade(level, 0.0, scale.activation_collapse_error_saturation_ratio,
              scale.activation_collapse_critical_saturation_ratio) if does_harm else "warning",
    )  # fmt: skip


def _is_lost(item: LayerHistory) -> bool:
    """Whether a squashing layer is nearly all at its ends at every one of the last probes.

    Later layers may learn from its signs; what comes before it learns only by paths past it.
    """
    last = np.nan_to_num(item["saturation_ratio"][-_MOST_LASTING:])
    return item.kind in _SQUASHING and bool((last >= _ALL_DEAD).all())


def _is_stuck_at_both_ends(item: LayerHistory, saturation: Floats, start: int, case: Case) -> bool:
    """Whether hardly anything lies between the ends, with much of it at the upper one.

    The zeros alone are those of any rectified layer. A loss that the layers
    after it bring down is no excuse, an accuracy that is good is.
    """
    if case.outcome.is_accurate:
        return False
    upper = float(np.median(item["saturation_ratio"][start:]))
    return upper >= _UPPER_END and float(np.median(saturation[start:])) >= _STUCK


def _is_gone(saturation: Floats, start: int, case: Case) -> bool:
    """Whether a hidden layer is saturated beyond doubt, or the accuracy is known to be low."""
    level = float(np.median(saturation[start:]))
    if level >= _ALL_SATURATED and level - np.nan_to_num(_early(saturation)) >= _LARGE_RISE:
        return True
    return case.outcome.accuracy is not None and not case.outcome.is_accurate


def _look_at_samples(item: LayerHistory, case: Case, *, is_hidden: bool) -> Finding | None:
    """Whether all samples get the same output, though its features still differ."""
    field = "sample_variation_ratio"
    shares = item[field]
    early, other = _early(shares), None
    before = _first_layer_share(case)
    if case.outcome.is_poor and is_hidden and early <= _SHALLOW * before[0]:
        # What the first layers tell apart is lost on the way, from the start.
        early, other = before[0], before[1]
    if not early > _LEAST_EARLY:
        return None
    limit = min(_ALIKE, _ALIKE_DROP * early)
    known = np.nan_to_num(shares, nan=1.0)
    start = _to_the_end(known <= limit)
    suffers = (case.outcome.is_poor or case.outcome.stalls) and not case.outcome.rewarded
    train = case.outcome.train
    is_enough = train is not None and bool(_LIKENESS.search(train.key.lower()))
    if start is None and (is_enough or (is_hidden and suffers and _is_lost_after(item, case))):
        # Less is enough where the training stands still; an output may have its targets' mean.
        # Or where the loss says nothing against it.
        limit = min(_NEARLY_ALIKE, _NEARLY_DROP * early)
        start = _to_the_end(median_filter(known, _FILTER_PROBES) <= limit)
        if start is not None and len(known) - start < _NEARLY_LASTING * len(known):
            start = None
    if start is None:
        return None
    level = float(np.median(shares[start:]))
    return _describe(
        item, start, "The representation collapses",
        say(
            "{level} of the energy of {name} differs between samples, {early} {where}",
            level=_measure(item, case, field, start).percent, name=item.name,
            early=_measure_early(other or item, case, field).percent,
            where="at the start" if other is None
            else say("in {other}, which comes before it", other=other.name),
        ),
        "The representation has collapsed: every sample gets (nearly) the same output.",
        "Look for missing negatives, a penalty or a quantizer that one value satisfies, a rate "
        "that is too large.",
        level, limit, _grade_deviation(level, case),
    )  # fmt: skip


def _is_lost_after(item: LayerHistory, case: Case) -> bool:
    """Whether no later layer tells samples apart either: one of several paths may be constant."""
    later = [
        float(np.median(median_filter(known, _FILTER_PROBES)[-_LEAST_PROBES:]))
        for other in case.run.activations.values()
        if other.order > item.order
        and len(
            known := other["sample_variation_ratio"][np.isfinite(other["sample_variation_ratio"])]
        )
    ]
    return max(later, default=0.0) <= _LOST_AFTER


def _look_at_latent(layers: list[LayerHistory], case: Case) -> list[Finding]:
    """A code that has shrunk, in a training that stalls, and an output that no longer follows it.

    Neither alone says anything: layers before a normalisation shrink, and an
    output learns the mean of its targets.
    """
    outcome = case.outcome
    if not (outcome.is_poor or outcome.stalls) or outcome.rewarded:
        return []
    if outcome.is_accurate or len(layers) < _FIRST_LAYERS:
        return []
    shares = [item["sample_variation_ratio"] for item in layers]
    output, former = shares[-1], shares[:_FIRST_LAYERS]
    if not np.isfinite(output).any():
        return []
    is_lost = np.nan_to_num(output, nan=1.0) <= _LATENT_OUTPUT * _early(output)
    start = _to_the_end(median_filter(is_lost.astype(np.float64), _FILTER_PROBES) > 0)
    if (
        start is None
        or not np.nanmax([np.nanmedian(some[start:]) for some in former]) > _KEPT_BEFORE
    ):
        return []
    for item in layers[1:-1]:
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = np.nan_to_num(item["std"] / _early(item["std"]), nan=1.0)
        begin = _to_the_end(relative <= _LATENT_STD)
        if begin is None:
            continue
        level = float(np.median(relative[begin:]))
        return [
            _describe(
                item, begin, "The latent code is no longer used",
                _tell_unused(item, begin, layers[-1], start, case),
                "What comes after it gives (nearly) the same for every sample.",
                "Look for a weight of the prior (KL) that is too large; warm it up, or leave "
                "each dimension some free bits.",
                level, _LATENT_STD, _grade_deviation(level, case),
            )
        ]  # fmt: skip
    return []


def _tell_unused(
    item: LayerHistory, begin: int, output: LayerHistory, start: int, case: Case
) -> Text:
    field = "sample_variation_ratio"
    return say(
        "The outputs of {name} deviate by {late} from their mean, by {early} at the start, and "
        "{left} of the energy of {output} differs between samples, {had} at the start",
        name=item.name, late=_measure(item, case, "std", begin),
        early=_measure_early(item, case, "std"), output=output.name,
        left=_measure(output, case, field, start).percent,
        had=_measure_early(output, case, field).percent,
    )  # fmt: skip


def _look_at_code(case: Case) -> Finding | None:
    """Whether the divergence from the prior of an autoencoder falls to nothing: an empty code."""
    metrics = case.run.metrics
    if not any(_RECONSTRUCTION.search(key.lower()) for key in metrics):
        return None
    fits = [curve for key, curve in metrics.items() if _KL.search(key.lower())]
    curve: Curve | None = max((item.merged for item in fits), key=len, default=None)
    if curve is None or len(curve) < _LEAST_KL_POINTS or float(curve.value.min()) < 0:
        return None
    values = median_filter(curve.value, _FILTER_PROBES)
    highest = float(values.max())
    low = values <= min(_NO_CODE, _CODE_LOST * highest)
    start = _to_the_end(low)
    if start is None:
        return None
    first, last, level = (
        int(curve.step[start]),
        int(curve.step[-1]),
        float(np.median(values[start:])),
    )
    fact = say(
        "{key} is {level} nats ({steps}); it was {highest} at its highest",
        key=curve.key, steps=between_steps(first, last, curve.unit),
        level=case.measure_curve(curve.key, "median", first=first),
        highest=case.measure_curve(curve.key, "highest"),
    )  # fmt: skip
    return Finding(
        culprit=curve.key,
        severity="warning",
        title="The latent code is empty",
        fact=say("{fact}.", fact=fact),
        inference="Every sample has the prior's code: nothing of it reaches what is reconstructed.",
        suggested_check="Look for a weight of the prior (KL) that is too large; warm it up, or "
        "leave each dimension some free bits.",
        evidence=(observe("metric", curve.key, fact, level, _NO_CODE, first, last),),
        step=first if curve.unit == "step" else None,
        step_end=last if curve.unit == "step" else None,
        epoch=first if curve.unit == "epoch" else None,
    )


def _first_layer_share(case: Case) -> tuple[float, LayerHistory | None]:
    """How much of their energy differs between samples in the first layers, and where most does."""
    levels = [
        (_early(item["sample_variation_ratio"]), item) for item in case.run.activations.values()
    ]
    known = [entry for entry in levels[:_FIRST_LAYERS] if np.isfinite(entry[0])]
    return max(known, key=lambda entry: entry[0], default=(0.0, None))


def _look_at_deviation(item: LayerHistory, case: Case) -> Finding | None:
    """Whether a layer's outputs vary far less than at first, or not at all."""
    std = item["std"]
    early = _early(std)
    if not np.isfinite(early):
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.nan_to_num(std / early, nan=1.0)
        flat = np.nan_to_num(std / np.maximum(np.abs(item["mean"]), SMALLEST), nan=1.0) <= _FLAT
    start = _to_the_end((relative <= _STD_ALONE) | (flat & (std <= _FLAT_STD * early)))
    if start is None and (case.outcome.is_poor or case.outcome.stalls):
        start = _to_the_end(relative <= _STD)
    if start is None:
        return _look_at_shrinking(item, early, case)
    level = float(np.median(relative[start:]))
    return _describe(
        item, start, "Outputs are all alike",
        say("The outputs of {name} deviate by {late} from their mean, by {early} at the start: "
            "{share} of it is left", name=item.name, late=_measure(item, case, "std", start),
            early=_measure_early(item, case, "std"), share=(
                _measure(item, case, "std", start) / _measure_early(item, case, "std")
            ).percent),
        "The layer gives (nearly) the same for every sample.",
        "Look for a representation that collapses: missing negatives, a strong penalty, a rate "
        "that is too large.",
        level, _STD, _grade_deviation(level, case),
    )  # fmt: skip


def _look_at_shrinking(item: LayerHistory, early: float, case: Case) -> Finding | None:
    """Whether outputs that had grown with the training are nearly gone again."""
    if case.outcome.is_accurate or case.outcome.rewarded:
        return None
    std = np.nan_to_num(item["std"], nan=np.inf)
    levels = median_filter(std, _PEAK_PROBES)
    known = levels[np.isfinite(levels)]
    peak = float(known.max(initial=0.0))
    if not 0.0 < peak <= _MOST_GROWN * early:
        return None  # what comes down from an explosion has not collapsed
    start = _to_the_end(std <= _SHRUNK * peak)
    if start is None:
        return None
    level = float(np.median(std[start:])) / peak
    return _describe(
        item, start, "Outputs shrink to nothing",
        say("The outputs of {name} deviate by {late} from their mean, by {most} at their highest",
            name=item.name, late=_measure(item, case, "std", start),
            most=case.measure("activation", item.name, "highest", "std")),
        "The layer gives less and less to tell samples apart by.",
        "Look for a representation that collapses: missing negatives, a strong penalty, a rate "
        "that is too large.",
        level, _SHRUNK, _grade_deviation(level, case),
    )  # fmt: skip


def _grade_deviation(level: float, case: Case) -> AlertSeverity:
    """Severity of what is left of a deviation: the less, the worse."""
    scale = case.thresholds
    error, critical = scale.activation_collapse_error_std, scale.activation_collapse_critical_std
    return grade(-level, -1.0, -error, -critical)


def _measure(item: LayerHistory, case: Case, field: str, start: int) -> Figure:
    """The median of a figure of a layer from a probe on."""
    first = int(item.step[start])
    return case.measure("activation", item.name, "median", field, first=first)


def _measure_early(item: LayerHistory, case: Case, field: str) -> Figure:
    """The same at the first probes that show it."""
    known = item.step[np.isfinite(item[field])]
    last = int(known[len(take_early(item[field][np.isfinite(item[field])])) - 1])
    return case.measure("activation", item.name, "median", field, last=last)


def _describe(
    item: LayerHistory,
    start: int,
    title: str,
    fact: Text,
    inference: str,
    check: str,
    level: float,
    threshold: float,
    severity: AlertSeverity,
) -> Finding:
    first, last = int(item.step[start]), int(item.step[-1])
    return Finding(
        culprit=item.name,
        severity=severity,
        title=title,
        fact=say("{fact} ({steps}).", fact=fact, steps=between_steps(first, last)),
        inference=inference,
        suggested_check=check,
        evidence=(observe("layer", item.name, fact, level, threshold, first, last),),
    )


def _join(found: list[Finding], case: Case) -> Finding:
    """One alert for all layers, in the name of the worst of those where it began.

    Dead and saturated units are told before what they bring about: samples that are no longer
    told apart. The culprit is the module to edit.
    """
    span = case.run.last_step or 0
    begin = min(item.step or 0 for item in found)
    early = [item for item in found if (item.step or 0) <= begin + _TOGETHER * span]
    cause = min(_BY_CAUSE.index(item.title) for item in early)
    early = [item for item in early if _BY_CAUSE.index(item.title) == cause]
    # Of layers that are equally gone the first one made the others so.
    gone = max(_badness(item) for item in early)
    worst = next(item for item in early if _badness(item) >= gone - _EQUALLY_GONE * abs(gone))
    worst = _find_source(worst, found, span)
    shown = worst.culprit or ""
    culprit = find_feeding_module(case.run, shown) if worst.title in _OF_UNITS else shown
    others = tuple(
        item.culprit
        for item in found
        if item is not worst and item.culprit and item.culprit != culprit
    )
    fact: Text = say("{fact}", fact=worst.fact)
    if culprit != shown:
        fact = say("{fact} {shown} is fed by {culprit}.", fact=fact, shown=shown, culprit=culprit)
    if others:
        more = others[_MOST_NAMED:]
        fact = say(
            "{fact} The same holds for {others}{more}.",
            fact=fact, others=", ".join(others[:_MOST_NAMED]),
            more=say(" and {count} more", count=count_names(more)) if more else say(""),
        )  # fmt: skip
    affected = others if culprit == shown else (shown, *others)
    return replace(
        worst,
        culprit=culprit,
        severity=max((item.severity for item in found), key=SEVERITIES.index),
        fact=fact,
        evidence=(
            *worst.evidence,
            *(piece for item in found if item is not worst for piece in item.evidence),
        )[:_MOST_EVIDENCE],
        step=begin,
        affected=affected,
    )


def _find_source(worst: Finding, found: list[Finding], span: int) -> Finding:
    """What made a layer so, of the others, which are in the order of the layers.

    Of layers with dead units that is the first one whose units are all dead: nothing passes it.
    Of others it is the first that is gone for the last quarter: those behind it can but follow,
    though it may show there first, as where noise is left of a code.
    """
    if worst.title == _OF_UNITS[0]:
        gone = [item for item in found if item.title == worst.title]
        blocked = [item for item in gone if _badness(item) >= _ALL_DEAD]
        return worst if not blocked or worst in blocked else blocked[0]
    if worst.title in _OF_UNITS:
        return worst
    before = [item for item in found[: found.index(worst)] if (item.step or 0) <= _LATEST * span]
    return next((item for item in before if item.title not in _OF_UNITS), worst)


def _badness(finding: Finding) -> float:
    """How far a layer is gone, 0 to 1: a share of units, or what a deviation has lost."""
    piece = finding.evidence[0]
    level = piece.observed_value or 0.0
    return 1.0 - level if (piece.threshold_value or 0.0) < _DEAD else level
