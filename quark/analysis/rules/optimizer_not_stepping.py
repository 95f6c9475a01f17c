"""Optimizers that make no step, or whose steps change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import ParameterHistory, list_owners
from quark.analysis.observations import (
    between_steps,
    count_longest,
    count_names,
    count_run,
    count_steps,
    observe,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_VALUES = ("value_norm", "value_mean", "value_std", "value_min", "value_max")
_NON_FINITE = ("non_finite_value_count", "non_finite_gradient_count")
_LEAST_PROBES, _LASTING = 3, 0.1  # without any change, and their share of all
_LEAST_APART, _LASTING_APART = 5, 0.3  # the same of one optimizer while others step
_LONGER, _LONGER_APART = 2, 3  # times the longest rest that ended
_MOSTLY = 0.9
_ABRUPT, _WASTED = 0.3, 1 / 3  # of the highest rate, just before it is 0; of the run, at rate 0
_STILL_PULLED = 0.5  # of its median gradient before, where a weight rests that has learned
_LEAST_AT_ZERO = 5  # probes, where the rate is 0 from the first one on: it may be warming up
_MOST_MICRO_BATCHES = 64  # probes of a run that goes on, in a row
_NAMED = 5

_Reason = Literal["no step", "rate", "no change", "skipped"]


@dataclass(frozen=True)
class _Rest:
    """That a parameter stands still to the end: at which of its rows, and why.

    Attributes:
        first: Row of the first probe that shows it.
        probes: How many do.
        before: The longest such stretch that ended.
    """

    item: ParameterHistory
    first: int
    probes: int
    before: int
    reason: _Reason

    @property
    def step(self) -> int:
        return int(self.item.step[self.first])

    def lasts(self, least: int, share: float, longer: int) -> bool:
        """Whether it is longer than those that ended, and long enough."""
        count = len(self.item)
        return self.probes >= max(least, share * count, longer * self.before)


class OptimizerNotStepping(BaseRule):
    """Fires where weights that get gradients are exactly the same from some probe to the end.

    Either no step of their optimizer was seen, or its steps change nothing,
    because the learning rate is 0 or the updates are lost in rounding. Of all
    weights together, or of those of one optimizer while others step. Between
    the micro-batches of a step, in a warm-up and at the end of a schedule
    weights may rest; what is frozen, in no optimizer or without a gradient is
    other rules', and so is a step that a GradScaler leaves out.
    """

    rule_id = "optimizer_not_stepping"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_PROBES} summaries of parameters that should train"
    data = ("parameter summaries",)
    tables = ("parameters",)

    def judge(self, case: Case) -> Verdict | None:
        """Look for weights that rest to the end, all of them or those of one optimizer."""
        trained = [
            item
            for item in case.run.parameters.values()
            if item.requires_grad and item.in_optimizer is not False and len(item) >= _LEAST_PROBES
        ]
        if not trained:
            return None
        breaks = case.outcome.non_finite_step
        if breaks is not None:
            # What is NaN gets no gradient and changes no more: that is another rule's.
            trained = [item.take(item.step < breaks) for item in trained]
            if any(len(item) < _LEAST_PROBES for item in trained):
                return self.stay_quiet("the training broke down by itself")
        pulled = [item for item in trained if bool((item["gradient_norm"] > 0).any())]
        if not any(_is_pulled(item) for item in trained):
            return self.stay_quiet("no parameter gets a gradient, which stagnant_layers tells of")
        rests = [rest for item in pulled if (rest := _find_rest(item)) is not None]
        if not rests:
            return self.stay_quiet("the weights that get gradients change between the probes")
        if len(rests) < len(pulled):
            return self._judge_some(rests)
        latest = max(rests, key=lambda rest: rest.step)
        if not latest.lasts(_LEAST_PROBES, _LASTING, _LONGER):
            return self.stay_quiet("the weights rest no longer than they did before")
        excuse = _find_excuse(latest, case)
        if excuse is not None:
            return self.stay_quiet(excuse)
        return Verdict(findings=(_describe_all(latest),))

    def _judge_some(self, rests: Sequence[_Rest]) -> Verdict:
        apart = [
            rest
            for rest in rests
            if rest.reason == "no step" and rest.lasts(_LEAST_APART, _LASTING_APART, _LONGER_APART)
        ]
        if not apart:
            return self.stay_quiet("some weights that get gradients change between the probes")
        return Verdict(findings=(_describe_some(apart),))


def _is_pulled(item: ParameterHistory) -> bool:
    """Whether a parameter gets any gradient at its last probes."""
    return bool((item["gradient_norm"][-_LEAST_PROBES:] > 0).any())


def _find_rest(item: ParameterHistory) -> _Rest | None:
    """Where a parameter stands still to its last probe, though it gets gradients; or None."""
    same = np.ones(len(item), dtype=np.bool_)
    for name in _VALUES:
        values = item[name]
        equal = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
        same[1:] &= equal
    for name in _NON_FINITE:
        same &= ~(item[name] > 0)  # what is lost already is another rule's
    update = item["update_norm"]
    still = same & ~(update > 0)
    # What came before the first probe only the optimizer tells.
    still[0] = bool(item["no_optimizer_step"][0] or update[0] == 0 or _has_no_rate(item)[0])
    lasting = count_run(still)
    if lasting < _LEAST_PROBES - 1:
        return None
    first = len(item) - lasting
    if first and item["no_optimizer_step"][first - 1]:
        first, lasting = first - 1, lasting + 1
    if not bool((item["gradient_norm"][first:] > 0).any()):
        return None
    return _Rest(item, first, lasting, count_longest(still[:first]), _find_reason(item, first))


def _has_no_rate(item: ParameterHistory) -> NDArray[np.bool_]:
    return np.asarray(item["learning_rate"] == 0)


def _find_reason(item: ParameterHistory, first: int) -> _Reason:
    if item["skipped"][first:].mean() >= _MOSTLY:
        return "skipped"
    if item["no_optimizer_step"][first:].mean() >= _MOSTLY:
        return "no step"
    return "rate" if _has_no_rate(item)[first:].mean() >= _MOSTLY else "no change"


def _find_excuse(rest: _Rest, case: Case) -> str | None:
    """Why all weights may rest so; None where there is no good reason."""
    item, first = rest.item, rest.first
    if rest.reason == "skipped":
        return "a GradScaler leaves out every step, which non_finite_values tells of"
    is_summing = bool(item["accumulated"][-1] > 1) and rest.probes < _MOST_MICRO_BATCHES
    if rest.reason == "no step" and is_summing and not case.run.ended:
        return "micro-batches are summed up, and the step may be to come"
    if rest.reason == "no change" and item.in_optimizer is None and case.outcome.has_learned:
        return "the weights rest and the loss falls: something else is trained"
    if rest.reason == "no change" and first > 1 and case.outcome.has_learned:
        norms = item["gradient_norm"]
        if not np.nanmedian(norms[first:]) >= _STILL_PULLED * np.nanmedian(norms[:first]):
            return "the gradients have come down, and with them the updates"
    if rest.reason != "rate":
        return None
    if first <= 1:
        return "the rate is 0 so far" if len(item) < _LEAST_AT_ZERO else None
    rates = item["learning_rate"][:first]
    is_abrupt = rates[-1] > _ABRUPT * np.nanmax(rates)
    if is_abrupt or rest.probes > _WASTED * len(item):
        return None
    return "the schedule of the learning rate has come to its end"


_SAID: dict[_Reason, tuple[str, str, str, str]] = {
    "no step": (
        "The optimizer makes no step",
        "no step of the optimizer was seen",
        "Gradients are worked out and nobody uses them.",
        "See whether optimizer.step() is reached: a condition around it, a GradScaler without "
        "update(), an accumulation counter that never comes round.",
    ),
    "rate": (
        "The learning rate is zero",
        "the optimizer steps with a learning rate of zero",
        "Its steps change nothing.",
        "Look at the schedule: its number of steps, how often it is called, its last epoch.",
    ),
    "no change": (
        "Steps change nothing",
        "no weight changes",
        "The updates are lost in rounding, or what steps holds other weights.",
        "Compare the size of an update with that of a weight in its number format; see that the "
        "optimizer holds the parameters of this model.",
    ),
}
"""Reason -> title, what is seen, what follows, and what to look at."""


def _describe_all(rest: _Rest) -> Finding:
    title, seen, inference, check = _SAID[rest.reason]
    item = rest.item
    first, last = rest.step, int(item.step[-1])
    probes = item.step[item.step >= first][-rest.probes :]
    fact = say(
        "At {some} of {all} probes ({steps}) {seen}, and every parameter that should train is "
        "exactly what it was.",
        some=count_steps(probes.tolist()), all=count_steps(item.step.tolist()),
        steps=between_steps(first, last), seen=seen,
    )  # fmt: skip
    return Finding(
        culprit=None,
        severity="critical" if rest.first <= 1 else "error",
        title=title,
        fact=fact,
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("parameter", item.name, "probes in a row without any change",
                    float(rest.probes), float(_LEAST_PROBES), first, last),
        ),
    )  # fmt: skip


def _describe_some(rests: Sequence[_Rest]) -> Finding:
    title, seen, inference, check = _SAID["no step"]
    first = min(rests, key=lambda rest: (rest.step, rest.item.order))
    names = list_owners(rest.item for rest in rests)
    culprit = first.item.owner
    last = int(first.item.step[-1])
    return Finding(
        culprit=culprit,
        severity="error",
        title="One optimizer does not step",
        fact=say(
            "{title} for {some} of the parameters that get gradients: at {probes} of {all} probes "
            "({steps}) {seen}.",
            title=title, some=count_names(rest.item.name for rest in rests),
            probes=count_steps(
                first.item.step[first.item.step >= first.step][-first.probes :].tolist()
            ),
            all=count_steps(first.item.step.tolist()), steps=between_steps(first.step, last),
            seen=seen,
        ),
        inference=f"{inference} The other optimizers go on.",
        suggested_check=check,
        evidence=tuple(
            observe("parameter", rest.item.name, "probes in a row without any step",
                    float(rest.probes), float(_LEAST_APART), rest.step, last)
            for rest in rests[:_NAMED]
        ),
        step=first.step,
        step_end=last,
        affected=tuple(name for name in names if name != culprit),
    )  # fmt: skip
