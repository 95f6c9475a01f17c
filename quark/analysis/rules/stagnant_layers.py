"""Layers that should train and do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, is_zero_throughout
from quark.analysis.curves import ParameterHistory
from quark.analysis.observations import (
    Text,
    between_steps,
    count_names,
    count_run,
    count_steps,
    limit,
    list_stretches,
    observe,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Limit, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LEAST_PROBES = 3
_LEAST_OUTSIDE = 2  # probes outside of every optimizer; what was seen there is not in doubt
_RATIO = 1e-3  # of the other weights' median update ratio
_MOVED = 2e-3  # of a weight's size, in all: then it does move
_PULL = 0.02  # of their median gradient, relative to the weights
_LASTING = 0.2  # share of the probes at which it stands still
_TO_THE_END = 10  # by a tenth of its probes it may miss the end
_CUT_OFF_LASTING = 0.1  # share of the probes, to the end, without any gradient
_RESOLUTION = 1e-12  # in place of the scale of a parameter that is zero
_CALLED = 0.5  # share of the steps at which the module was called
_COMPARABLE = 1e-3  # of the largest median update: weights below it are no measure for the others
_MOSTLY = 0.5  # share of the probes
_SURE_PROBES = 5  # with an update of exactly nothing each, to the end
_FINGERPRINT = ("value_norm", "value_mean", "value_std", "value_min", "value_max")
_MOVING = 1e-6  # of its size, in all: another parameter that does move
_UNMOVED = 1e-9  # of a parameter's size: what its figures differ by where nothing has moved it
_ROUNDED = 6e-8  # of a parameter's size: a smaller update is lost in single precision
_NAMED, _EVIDENCE_NAMED = 5, 4

_Reason = Literal["outside", "no gradient", "undone", "rounded", "unmoved", "small updates"]
_REASONS: dict[_Reason, tuple[str, str, str]] = {
    "outside": (
        "is in no optimizer",
        "The optimizer was made without it, or before it was replaced.",
        "Make the optimizer after the model is complete and give it all of its parameters; freeze "
        "with requires_grad_(False) what shall not train.",
    ),
    "no gradient": (
        "gets no gradient",
        "Nothing leads from the loss to it: its output is detached, or it is not used.",
        "Look for detach(), no_grad(), .item() or an argmax between it and the loss.",
    ),
    "undone": (
        "is as it was at every probe, though the optimizer updates it",
        "Something puts its values back after each step.",
        "Look for what writes to it: a restored state, weights that are tied or copied, a clamp.",
    ),
    "rounded": (
        "is as it was at every probe, since its updates are lost in rounding",
        "Its gradient, or the learning rate of its parameter group, is next to nothing.",
        "Look at the gradients on their way back to it, and at its learning rate.",
    ),
    "unmoved": (
        "gets gradients and has not changed at all",
        "No optimizer that works has it, or its learning rate is zero.",
        "Look at the parameter groups of the optimizer and their learning rates.",
    ),
    "small updates": (
        "hardly moves while the other layers do",
        "Its parameter group has a learning rate of (nearly) zero, or something undoes its "
        "updates.",
        "Look at the learning rate of its parameter group and at what the scheduler does to it.",
    ),
}
"""Reason -> what a layer does, why, and what to look at."""


_LIMIT = Limit(
    "stagnant_layer",
    "probes",
    title="The layer's weights do not change",
    check="See whether the layer is meant to train.",
    scale="stagnant_layer_gradient_norm",
)


@dataclass(frozen=True)
class _Standstill:
    """That a parameter, or a layer, stands still: from when to when, at how many probes, and why.

    Attributes:
        ratio: Its updates over the others', relative to the weights.
    """

    first: int
    last: int
    probes: int
    reason: _Reason
    ratio: float = 0.0


@dataclass(frozen=True)
class _Others:
    """All parameters that should train, and how much they do.

    Attributes:
        trained: The parameters.
        update: Step -> median update ratio of the weights.
        pull: Step -> median gradient over the weights.
    """

    trained: list[ParameterHistory]
    update: dict[int, float]
    pull: dict[int, float]


class StagnantLayers(BaseRule):
    """Fires for a layer that gets gradients and stands still while others move.

    Either the optimizer does not have its parameters, or its updates are a
    thousandth of the other layers' in relation to its weights, or its values
    do not change at all, or nothing leads from the loss to it. Frozen
    parameters (`requires_grad=False`) are meant to stand still. A run that has
    converged slows all layers together.
    """

    rule_id = "stagnant_layers"
    category: AlertCategory = "optimization"
    needs = "it needs summaries of parameters (ParameterDiagnostics or quark.watch)"
    data = ("parameter summaries",)
    tables = ("activations", "gradients", "parameters")
    threshold = _RATIO

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """Limits on how long a layer's gradient is small: for how many probes in a row."""
        norm, found = case.thresholds.stagnant_layer_gradient_norm, []
        for name, layer in case.run.gradients.items():
            # Of stretches of equal length the first one counts.
            stretches = list_stretches(layer["norm"] < norm)
            low, high = max(stretches, key=lambda part: part[1] - part[0], default=(0, 0))
            if low == high or not _LIMIT.list_reached(case, high - low):
                continue
            first, last = int(layer.step[low]), int(layer.step[high - 1])
            fact = say(
                "The gradient's norm of {name} was below {limit} for {probes} probes in a row.",
                name=name, limit=limit(norm),
                probes=case.measure("gradient", name, "count", "norm", first=first, last=last),
            )  # fmt: skip
            found.append(_LIMIT.find(case, name, float(high - low), first, fact))
        return tuple(found)

    def judge(self, case: Case) -> Verdict | None:
        """Look for layers with a parameter that should train and does not, to the end of the run.

        Silent of frozen parameters, of one whose gradient has vanished or whose
        units are dead (those are other rules'), of a module that is not called,
        and of a weight that moves between the probes.
        """
        trained = [item for item in case.run.parameters.values() if item.requires_grad]
        outside = {
            name: history
            for name, history in case.run.activations.items()
            if history.outside_optimizer
        }
        if len(trained) < 2 and not outside:
            return None
        others = _Others(
            trained,
            _take_medians(trained, "update_to_parameter_ratio"),
            _take_medians(trained, "gradient_norm", over="value_norm"),
        )
        found: dict[str, tuple[_Standstill, list[str]]] = {}
        for item in trained:
            standstill = _judge(item, others, case)
            if standstill is not None:
                found.setdefault(item.module_name, (standstill, []))[1].append(item.name)
        for name, history in outside.items():
            if name not in found and len(history) >= _LEAST_PROBES:
                steps = history.step
                whole = _Standstill(int(steps[0]), int(steps[-1]), len(steps), "outside")
                found[name] = whole, [name]
        findings = [_describe(name, *entry, case) for name, entry in found.items()]
        if findings:
            return Verdict(findings=(_join(findings) if len(findings) > 1 else findings[0],))
        cut_off = _find_all_cut_off(trained, case)
        if cut_off is not None:
            return Verdict(findings=(cut_off,))
        left_out = [item.name for item in trained if _is_left_out(item)]
        if left_out:
            return self.stay_quiet(
                f"{', '.join(left_out[:_NAMED])} are in no optimizer and get no gradient, as what "
                "is left out on purpose"
            )
        return self.stay_quiet("every parameter that should train is in an optimizer and moves")


def _take_medians(
    trained: Iterable[ParameterHistory], column: str, *, over: str | None = None
) -> dict[int, float]:
    """Step -> median of a column over the weights that have more than nothing of it.

    Of updates only weights count that are not far below the largest one: where
    most stand still, those are no measure for each other.
    """
    values: dict[int, list[float]] = {}
    for item in trained:
        if item.role != "weight":
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = item[column] if over is None else item[column] / item[over]
        for step, ratio in zip(item.step.tolist(), ratios.tolist(), strict=True):
            if ratio > 0 and np.isfinite(ratio):
                values.setdefault(step, []).append(ratio)
    if over is None:
        return {step: _take_comparable(np.array(some)) for step, some in values.items()}
    return {step: float(np.median(some)) for step, some in values.items()}


def _take_comparable(values: Floats) -> float:
    return float(np.median(values[values >= _COMPARABLE * values.max()]))


def _judge(item: ParameterHistory, others: _Others, case: Case) -> _Standstill | None:
    """Where a parameter stands still, and why; None where it does not."""
    if len(item.step) < 2:
        return None
    outside = item["in_optimizer"] == 0.0
    if outside.any() and bool((np.nan_to_num(item["gradient_norm"][outside]) > 0).any()):
        return _find_outside(item, outside)
    if item.role == "bias":
        return None
    unmoved = _find_unmoved(item, others)
    if item.role != "weight":
        return unmoved
    return _find_cut_off(item, others.trained, case) or unmoved or _find_small_updates(item, others)


def _is_left_out(item: ParameterHistory) -> bool:
    """Whether no optimizer has a parameter at the end, and nothing leads to it from the loss."""
    outside = item["in_optimizer"] == 0.0
    return item.in_optimizer is False and not bool((item["gradient_norm"][outside] > 0).any())


def _find_outside(item: ParameterHistory, outside: NDArray[np.bool_]) -> _Standstill | None:
    """Where a parameter that gets gradients is in no optimizer, to the end."""
    steps = item.step
    probes = count_run(outside)
    if probes < _LEAST_OUTSIDE:
        return None
    return _Standstill(int(steps[-probes]), int(steps[-1]), probes, "outside")


def _find_cut_off(
    item: ParameterHistory, trained: list[ParameterHistory], case: Case
) -> _Standstill | None:
    """Where a parameter gets no gradient to the end, and stands still, while others get some."""
    steps, gradients = item.step, item["gradient_norm"]
    count = len(steps)
    if count < _LEAST_PROBES or item.in_optimizer is False:
        return None
    missing = np.isnan(gradients) & (np.nan_to_num(item["non_finite_gradient_count"]) == 0)
    nothing = missing | (gradients == 0)
    lasting = count_run(nothing)
    if lasting < max(_LEAST_PROBES, round(_CUT_OFF_LASTING * count)):
        return None
    chosen = np.arange(count - lasting, count)
    begin = int(steps[chosen[0]])
    if _drift(item, chosen) > 0.0 or not _others_get_gradients(item, trained, begin):
        return None
    if not missing[chosen].all() and case.ends_with_dead_layer and not _is_held_at_zero(case):
        return None  # dead units pass nothing on: that is another rule's
    if not _is_called(item, case, steps[chosen]):
        return None
    return _Standstill(begin, int(steps[-1]), lasting, "no gradient")


def _find_unmoved(item: ParameterHistory, others: _Others) -> _Standstill | None:
    """Where a parameter with gradients is the same at each probe to the end, while others move.

    By its recorded values, whatever its updates are said to be: they may not be
    recorded, or be undone.
    """
    steps = item.step
    same = np.ones(len(steps), dtype=np.bool_)
    for name in _FINGERPRINT:
        values = item[name]
        known = values[np.isfinite(values)]
        scale = max(float(np.abs(known).max(initial=0.0)), _RESOLUTION)
        same &= ~(np.abs(values - values[-1]) > _UNMOVED * scale)
    if not np.isfinite(item["value_norm"]).all():
        return None
    if not np.isfinite(item["value_min"]).any() and not np.isfinite(item["value_std"]).any():
        return None
    lasting = count_run(same)
    least = max(_LEAST_PROBES, min(_SURE_PROBES, round(_LASTING * len(steps))))
    # The first of the probes that are alike has seen the last change.
    if lasting - (lasting < len(steps)) < least:
        return None
    chosen = np.arange(len(steps) - lasting + (lasting < len(steps)), len(steps))
    gradients, updates = item["gradient_norm"][chosen], item["update_norm"][chosen]
    if np.median(np.nan_to_num(gradients)) <= 0 or not _others_move(item, others, chosen):
        return None
    pulls = np.array([others.pull.get(step, np.nan) for step in steps[chosen].tolist()])
    with np.errstate(invalid="ignore", divide="ignore"):
        has_vanished = gradients / item["value_norm"][chosen] <= _PULL * pulls
    if has_vanished.mean() > _MOSTLY:
        return None  # what gets next to nothing stands still: that is another rule's
    most = float(np.nanmax(np.nan_to_num(updates) / item["value_norm"][chosen], initial=0.0))
    reason: _Reason = "undone" if most > _UNMOVED else "unmoved"
    if reason == "undone" and most < _ROUNDED:
        reason = "rounded"
    return _Standstill(int(steps[chosen[0]]), int(steps[-1]), len(chosen), reason)


def _others_move(item: ParameterHistory, others: _Others, rows: NDArray[np.int64]) -> bool:
    """Whether the values of another parameter change where those of this one do not."""
    since = int(item.step[rows[0]])
    for other in others.trained:
        if other is item or other.role == "bias":
            continue
        values = other["value_norm"][other.step >= since]
        known = values[np.isfinite(values)]
        if len(known) > 1 and float(np.ptp(known)) > _MOVING * float(np.abs(known).max()):
            return True
    return False


def _find_all_cut_off(trained: list[ParameterHistory], case: Case) -> Finding | None:
    """That no parameter gets a gradient to the end, and none moves, though something is logged.

    Silent where the layers' outputs get none either, or units are dead, which
    other rules tell of, and of a model beside one that learns.
    """
    held = [item for item in trained if item.in_optimizer is not False]
    layers = [item for item in case.run.gradients.values() if len(item) >= _LEAST_PROBES]
    is_faded = bool(layers) and not any(
        (item["norm"][-_LEAST_PROBES:] > 0).any() for item in layers
    )
    if not held or is_faded or case.ends_with_dead_layer or not case.outcome.has_metrics:
        return None
    begins: list[int] = []
    probes: list[int] = []
    for item in held:
        gradients = item["gradient_norm"]
        is_finite = np.nan_to_num(item["non_finite_gradient_count"]) == 0
        is_finite &= np.nan_to_num(item["non_finite_value_count"]) == 0
        lasting = count_run((np.isnan(gradients) | (gradients == 0)) & is_finite)
        if lasting < max(_LEAST_PROBES, round(_CUT_OFF_LASTING * len(item))):
            return None
        if _drift(item, np.arange(len(item) - lasting, len(item))) > 0.0:
            return None
        begins.append(int(item.step[len(item) - lasting]))
        probes = item.step[-lasting:].tolist()
    begin, last = max(begins), int(held[0].step[-1])
    if begin <= int(held[0].step[0]) and case.outcome.has_learned:
        return None
    fact = say(
        "None of the {count} parameters that should train gets a gradient, and none changes "
        "({probes} probes, {steps}).",
        count=count_names(item.name for item in held),
        probes=count_steps(probes), steps=between_steps(begin, last),
    )  # fmt: skip
    return Finding(
        culprit=None,
        severity="critical",
        title="No parameter gets a gradient",
        fact=fact,
        inference="Nothing leads from the loss to the model, or gradients are cleared before the "
        "optimizer's step.",
        suggested_check="Look at where backward() and zero_grad() stand, for a loss that is "
        "detached, and for a model that was built anew after the optimizer was made.",
        evidence=(
            observe("parameter", held[0].name, "gets no gradient", float(len(probes)),
                    float(_LEAST_PROBES), begin, last),
        ),
    )  # fmt: skip


def _is_held_at_zero(case: Case) -> bool:
    """Whether the layers that give nothing do so from the start, which no other rule tells of."""
    return all(
        is_zero_throughout(item)
        for item in case.run.activations.values()
        if len(item) >= _LEAST_PROBES and bool(item["dead_unit_ratio"][-1] >= 1.0)
    )


def _find_small_updates(item: ParameterHistory, others: _Others) -> _Standstill | None:
    """Where a weight's updates, and not its gradient, are far below the others' to the end."""
    steps, gradients = item.step, item["gradient_norm"]
    median = np.array([others.update.get(step, np.nan) for step in steps.tolist()])
    pulls = np.array([others.pull.get(step, np.nan) for step in steps.tolist()])
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = item["update_to_parameter_ratio"] / median
        stands = (relative <= _RATIO) & (gradients > 0)
        # A gradient that is as small as the update has vanished: that is another rule's.
        stands &= gradients / item["value_norm"] > _PULL * pulls
    # A matrix that starts at zero has no ratio; its update says whether it moves.
    stands &= ~((item["value_norm"] == 0) & (item["update_norm"] > 0))
    rows = np.flatnonzero(np.isfinite(relative))
    if len(rows) < _LEAST_PROBES:
        return None
    stretch = next(reversed(list_stretches(stands[rows])), (0, 0))
    least = max(_LEAST_PROBES, round(_LASTING * len(rows)))
    if not np.nan_to_num(relative[rows[slice(*stretch)]]).any():
        least = min(least, _SURE_PROBES)
    if stretch[1] - stretch[0] < least:
        return None
    if stretch[1] < len(rows) - max(1, len(rows) // _TO_THE_END):
        return None
    chosen = rows[slice(*stretch)]
    if _drift(item, chosen) > _MOVED:
        return None  # it moves at other steps than those that were looked at
    return _Standstill(
        int(steps[chosen[0]]),
        int(steps[chosen[-1]]),
        len(chosen),
        "small updates",
        float(np.median(relative[chosen])),
    )


def _drift(item: ParameterHistory, rows: NDArray[np.int64]) -> float:
    """How far a parameter's norm, mean or deviation went in some probes, over its norm's scale."""
    drifts = []
    for name in ("value_norm", "value_mean", "value_std"):
        values = item[name][rows]
        known = values[np.isfinite(values)]
        if len(known) > 1:
            scale = max(float(np.abs(known).max()), _RESOLUTION)
            drifts.append(float(np.ptp(known)) / scale)
    return max(drifts, default=0.0)


def _is_called(item: ParameterHistory, case: Case, steps: NDArray[np.int64]) -> bool:
    """Whether the module of a parameter was called at half of the steps, or cannot be known."""
    activations = case.run.activations
    if not activations or not any(other in activations for other in _names(item.module_name)):
        return not activations or not item.module_name
    name = next(other for other in _names(item.module_name) if other in activations)
    return bool(np.isin(steps, activations[name].step).mean() >= _CALLED)


def _names(module: str) -> list[str]:
    """A module, and those that hold it, from the inside out."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _others_get_gradients(
    item: ParameterHistory, trained: list[ParameterHistory], since: int
) -> bool:
    return any(
        other is not item and bool((other["gradient_norm"][other.step >= since] > 0).any())
        for other in trained
    )


def _describe(module: str, found: _Standstill, names: list[str], case: Case) -> Finding:
    does, inference, check = _REASONS[found.reason]
    named = module or names[0]
    is_slow = found.reason == "small updates"
    detail = _tell_updates(names[0], found, case) if is_slow else say("")
    scale = case.thresholds
    return Finding(
        culprit=named,
        severity=grade(
            found.probes, 0.0, scale.stagnant_layer_error_probes,
            scale.stagnant_layer_critical_probes,
        ),
        title="Layer does not train",
        fact=say(
            "{named} {does}{detail} ({steps}).", named=named, does=does, detail=detail,
            steps=between_steps(found.first, found.last),
        ),
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("layer", named, say("{does}: {names}", does=does,
                                        names=", ".join(names[:_EVIDENCE_NAMED])),
                    found.ratio, _RATIO if is_slow else None, found.first, found.last),
        ),
    )  # fmt: skip


def _tell_updates(name: str, found: _Standstill, case: Case) -> Text:
    """How much a weight changes in a step, beside the one that changes most."""
    field = "update_to_parameter_ratio"
    span = {"first": found.first, "last": found.last}
    own = case.measure("parameter", name, "median", field, **span)
    others = {
        other: case.measure("parameter", other, "median", field, **span)
        for other, item in case.run.parameters.items()
        if item.role == "weight" and item.requires_grad and other != name
    }
    known = {other: figure for other, figure in others.items() if np.isfinite(figure.value)}
    if not known:
        return say(": a step changes it by {own} of its norm", own=own)
    most = max(known, key=lambda other: known[other].value)
    return say(
        ": a step changes {name} by {own} of its norm, and {other} by {most}",
        name=name, own=own, other=most, most=known[most],
    )  # fmt: skip


def _join(findings: list[Finding]) -> Finding:
    """Several layers that stand still for a reason are one alert, in the name of the first."""
    worst = max(findings, key=lambda item: (item.severity == "critical", item.severity == "error"))
    others = tuple(item.culprit for item in findings if item is not worst and item.culprit)
    return Finding(
        culprit=worst.culprit,
        severity=worst.severity,
        title="Layers do not train",
        fact=say(
            "{fact} The same holds for {count} more: {names}.",
            fact=worst.fact,
            count=count_names(others),
            names=", ".join(others[:_NAMED]),
        ),
        inference=worst.inference,
        suggested_check=worst.suggested_check,
        evidence=tuple(piece for item in findings[:_NAMED] for piece in item.evidence),
        step=min(item.step for item in findings if item.step is not None),
        step_end=worst.step_end,
        affected=others,
    )
