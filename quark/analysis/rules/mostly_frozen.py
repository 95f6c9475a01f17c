"""Models of which nearly nothing may train."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, find_guesses, is_above_chance
from quark.analysis.curves import ParameterHistory, list_owners
from quark.analysis.observations import add, between_steps, count_run, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark.analysis.rules.poor_initialisation import is_as_drawn
from quark_core.records.kinds.findings import AlertCategory

_FROZEN = 0.9  # share of the elements
_DRAWN = 0.5  # share of the elements, where they are frozen as they were drawn
_LEAST_PROBES = 3
_SMALL_FALL = 0.05  # of the loss, with which nothing to speak of is learned
_PARTS = 4  # of what comes after the freeze: the first is held against the last
_SIGNIFICANT = 4.0  # standard errors
_MOST_LEFT = 0.5  # share of the loss, where only normalisations train
_NORM = re.compile(r"(Batch|Layer|Group|Instance|RMS)Norm")
_NAMED = 5

Floats = NDArray[np.float64]


class MostlyFrozen(BaseRule):
    """Fires where nearly all of a model is frozen and nothing is learned.

    Also where everything is frozen from some probe on, and the loss does not
    go on falling, and where normalisations alone are left to train and most of
    the loss is left too. A loss that comes down to that of guesses has not
    learned. A head on a frozen body that learns is healthy, and so is an
    input that is trained through a frozen model. A body that is frozen as it was
    drawn has learned nothing that a head could use: from half of the elements on
    that is told, where most of the loss is left.
    """

    rule_id = "mostly_frozen"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_PROBES} summaries of parameters, and a loss"
    data = ("parameter summaries", "a loss")
    tables = ("parameters",)
    threshold = _FROZEN

    def judge(self, case: Case) -> Verdict | None:
        """Hold the share of frozen parameters against what is learned."""
        items = list(case.run.parameters.values())
        if not items or not case.outcome.has_metrics:
            return None
        steps, shares = _measure(items)
        if len(steps) < _LEAST_PROBES:
            return None
        drawn = _find_drawn(items)
        if drawn and _keeps_most(case):
            return Verdict(findings=(_describe_drawn(items, drawn, case),))
        lasting = count_run(shares >= _FROZEN)
        level = float(shares[-1])
        if lasting < _LEAST_PROBES:
            return self.stay_quiet("most of the model may train", level)
        first = int(steps[len(steps) - lasting])
        if lasting < len(steps) and level >= 1.0:
            whole = int(steps[len(steps) - count_run(shares >= 1.0)])
            if not _falls_after(case, whole):
                return Verdict(findings=(_describe(items, level, whole, int(steps[-1]), case),))
        if _learns(case) and not (_trains_norms_only(items) and _keeps_most(case)):
            return self.stay_quiet("nearly everything is frozen, and the rest learns", level)
        return Verdict(findings=(_describe(items, level, first, int(steps[-1]), case),))


def _measure(items: Sequence[ParameterHistory]) -> tuple[NDArray[np.int64], Floats]:
    """Steps, and the share of the elements that are frozen there."""
    steps = np.unique(np.concatenate([item.step for item in items]))
    frozen, whole = np.zeros(len(steps)), np.zeros(len(steps))
    for item in items:
        rows = np.searchsorted(steps, item.step)
        counts = np.nan_to_num(item["element_count"])
        whole[rows] += counts
        frozen[rows] += counts * (item["requires_grad"] == 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return steps, np.nan_to_num(frozen / whole)


def _find_drawn(items: Sequence[ParameterHistory]) -> list[ParameterHistory]:
    """Weights that are frozen as they were drawn, where they are most of the model, else none.

    Only where a part of the model trains, so that a training is meant.
    """
    outputs = {item.module_name: item.size for item in items if item.role == "bias"}
    drawn = [
        item
        for item in items
        if bool((item["requires_grad"] == 0.0).all()) and len(item) >= _LEAST_PROBES
        if is_as_drawn(item, outputs.get(item.module_name))
    ]
    share = sum(item.size for item in drawn) / max(sum(item.size for item in items), 1.0)
    is_any_trained = any(item.requires_grad for item in items)
    return drawn if share >= _DRAWN and is_any_trained else []


def _learns(case: Case) -> bool:
    """Whether a loss falls by more than a little, or goes on falling, or anything is known."""
    outcome = case.outcome
    progress = outcome.loss
    if find_guesses(case) is not None:
        return False
    if progress is None or outcome.other_progress:
        return outcome.has_learned
    if not outcome.has_learned:
        return is_above_chance(case, progress.start)
    return progress.relative_fall >= _SMALL_FALL or not outcome.stalls


def _trains_norms_only(items: Sequence[ParameterHistory]) -> bool:
    """Whether all that may train belongs to normalisations: every weight matrix is as it began."""
    trained = [item for item in items if item.requires_grad]
    return bool(trained) and all(_NORM.search(item.kind) for item in trained)


def _keeps_most(case: Case) -> bool:
    """Whether most of the loss is left, and no score is good."""
    progress = case.outcome.loss
    if progress is None or case.outcome.is_accurate:
        return False
    return not case.outcome.rewarded and progress.final > _MOST_LEFT * progress.start > 0


def _falls_after(case: Case, step: int) -> bool:
    """Whether the loss falls after a step, beyond its noise."""
    progress = case.outcome.loss
    if progress is None:
        return case.outcome.has_learned
    values = progress.smoothed.value[progress.smoothed.step >= step]
    part = max(1, len(values) // _PARTS)
    if not len(values):
        return False
    fall = float(np.median(values[:part]) - np.median(values[-part:]))
    return fall > _SIGNIFICANT * progress.error


def _describe(
    items: Sequence[ParameterHistory], share: float, first: int, last: int, case: Case
) -> Finding:
    frozen = sorted(
        (item for item in items if not item.requires_grad),
        key=lambda item: -item.size,
    )
    names = list_owners(frozen)
    is_all = share >= 1.0
    loss = case.outcome.loss
    course = say("")
    if loss is not None:
        course = say(
            " {key} goes from {start} to {end}.", key=loss.key,
            start=case.measure_curve(loss.key, "level at the start"),
            end=case.measure_curve(loss.key, "level at the end"),
        )  # fmt: skip
    every, held = (
        add(case.measure("parameter", item.name, "value", "element_count") for item in some)
        for some in (items, frozen)
    )
    said = say("All parameters") if is_all else say(
        "{share} of the elements", share=(held / every).percent
    )  # fmt: skip
    return Finding(
        culprit=names[0] if names else None,
        severity="error" if is_all else "warning",
        title="Everything is frozen" if is_all else "Nearly everything is frozen",
        fact=say(
            "{said} of the model are frozen ({steps}): {names}.{course}", said=said,
            steps=between_steps(first, last), names=", ".join(names[:_NAMED]), course=course,
        ),
        inference="What is left to train does not suffice to learn anything."
        if not is_all
        else "Nothing of the model can learn.",
        suggested_check="Look for requires_grad_(False), a no_grad() around the model, or an "
        "evaluation that freezes and does not undo it; unfreeze more, or give the head a larger "
        "learning rate.",
        evidence=(
            observe("parameters", "requires_grad", "share of elements that are frozen", share,
                    _FROZEN, first, last),
        ),
        affected=tuple(names[1:_NAMED]),
    )  # fmt: skip


def _describe_drawn(
    items: Sequence[ParameterHistory], drawn: Sequence[ParameterHistory], case: Case
) -> Finding:
    ordered = sorted(drawn, key=lambda item: -item.size)
    names = list_owners(ordered)
    steps, _ = _measure(drawn)
    first, last = int(steps[0]), int(steps[-1])
    every, held = (
        add(case.measure("parameter", item.name, "value", "element_count") for item in some)
        for some in (items, ordered)
    )
    largest = ordered[0]
    mean, deviation, lowest, highest = (
        case.measure("parameter", largest.name, "median", f"value_{name}")
        for name in ("mean", "std", "min", "max")
    )
    share = sum(item.size for item in drawn) / sum(item.size for item in items)
    return Finding(
        culprit=names[0],
        severity="warning",
        title="Frozen layers were never trained",
        fact=say(
            "{share} of the model's elements are frozen ({steps}) as they were drawn: {names}. "
            "{largest} has a mean of {mean}, a deviation of {deviation}, and goes from {lowest} to "
            "{highest}.",
            share=(held / every).percent, steps=between_steps(first, last),
            names=", ".join(names[:_NAMED]), largest=largest.name, mean=mean, deviation=deviation,
            lowest=lowest, highest=highest,
        ),
        inference="Weights as a framework draws them hold nothing that was learned elsewhere, and "
        "what trains on top of them can use only chance features.",
        suggested_check="See that the pretrained weights are loaded before the model is frozen "
        "(load_state_dict with strict=True, and the names that it misses), or train all of it. "
        "Random features are meant to be so.",
        evidence=(
            observe("parameters", "requires_grad", "share of elements frozen as drawn", share,
                    _DRAWN, first, last),
        ),
        aspect="drawn",
        affected=tuple(names[1:_NAMED]),
    )  # fmt: skip
