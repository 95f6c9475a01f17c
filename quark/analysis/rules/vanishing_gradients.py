"""Gradients that do not reach the first layers, in a training that hardly learns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import Curve, History, LayerHistory
from quark.analysis.metric_roles import is_loss, is_player_loss
from quark.analysis.observations import (
    Figure,
    Text,
    add,
    at_step,
    between_steps,
    count_names,
    count_run,
    limit,
    list_stretches,
    observe,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Limit, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory, EvidenceRecord

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_RATIO = 1e-3  # of the layer with the largest gradient
_NOTHING = 1e-4  # of it: with so little even a loss that only stalls has its reason
_UNDERFLOW = 1e-13  # of an element: below the resolution of any weight
_LEAST_PROBES = 3
_LASTING = 0.2  # share of the probes that it lasts
_LEAST_LAYERS = 3
_LEAST_ELEMENTS = 16  # a weight with fewer is a scale or a gate, with no depth
_NO_DEPTH = ("Embedding", "EmbeddingBag", "LayerNorm", "BatchNorm1d", "BatchNorm2d", "RMSNorm")
_LARGE_PARTS = 2  # of a model, from which on each is a chain of its own, as of two players
_HALF = 0.5  # of the layers without any gradient, and of the probes at which that is so
_STANDS_STILL = 0.01  # of the largest updates, relative to the weights
_NOTHING_LEFT = 1e-6  # of its start: a loss that is zero
_SMALL_FALL = 0.1  # of the loss, which the evidence holds it against
_OF_FIRST, _WON = 0.01, 0.02  # of the first gradient, and of the first loss of a player that won
_LEAST_POINTS = 10  # of that loss
_CONFIDENCE = 0.9  # an optimizer may train on the smallest gradients

_LIMIT = Limit(
    "vanishing_gradient",
    "ratio",
    title="Gradients below their limit",
    check="Look at the depth, the initialisation and the loss's scale.",
    scale="vanishing_gradient_norm",
)


@dataclass(frozen=True)
class _Depth:
    """Size of the gradient of an element, layers by probes, the first layer first."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]
    sizes: Floats

    @property
    def first_half(self) -> int:
        """How many layers count as the first ones."""
        return max(1, len(self.names) // 2)

    @cached_property
    def largest(self) -> Floats:
        """The largest layer's size by probe, NaN where none is finite."""
        largest = np.max(np.where(np.isfinite(self.sizes), self.sizes, -np.inf), axis=0)
        largest[largest < 0] = np.nan
        return np.asarray(largest)

    @cached_property
    def ratios(self) -> Floats:
        """Each size over the largest at its probe."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.sizes / self.largest)

    @cached_property
    def lowest(self) -> Floats:
        """The lowest ratio of the first layers by probe, infinite where none is known."""
        known = np.where(np.isnan(self.ratios), np.inf, self.ratios)
        return np.asarray(np.nanmin(known[: self.first_half], axis=0))

    @cached_property
    def usual(self) -> float | None:
        """The median of `lowest`, or None."""
        known = self.lowest[np.isfinite(self.lowest)]
        return float(np.median(known)) if len(known) else None

    @cached_property
    def gets_nothing(self) -> Mask:
        """Probes at which no layer gets any: an underflow, or a flat loss."""
        return np.asarray(self.largest <= _UNDERFLOW)

    @cached_property
    def underflows(self) -> Mask | None:
        """Probes at which half of the layers get nothing and others do; None where few do."""
        zero = self.sizes == 0
        share = zero.sum(axis=0) / len(self.names)
        found = (share >= _HALF) & (self.sizes > 0).any(axis=0)
        return None if found.mean() < _HALF else np.asarray(found)


class VanishingGradients(BaseRule):
    """Fires where early layers get a thousandth of the largest gradient, and little is learned.

    Sizes are root mean squares of an element's gradient: of weight matrices
    where parameters were watched, else of the layers' outputs. An optimizer
    that scales each parameter by itself learns all the same; therefore the
    outcome decides. Of two players one gets no gradient any more where the
    other is never wrong.
    """

    rule_id = "vanishing_gradients"
    category: AlertCategory = "optimization"
    needs = f"it needs gradients of {_LEAST_LAYERS} layers in {_LEAST_PROBES} probes"
    data = ("layer gradients", "parameter gradients")
    tables = ("gradients", "parameters")
    threshold = _RATIO

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """A limit on the share of gradient samples whose norm is below another one."""
        norm, layers = case.thresholds.vanishing_gradient_norm, case.run.gradients
        below = {name: _count(layer["norm"] < norm) for name, layer in layers.items()}
        known = sum(_count(np.isfinite(layer["norm"])) for layer in layers.values())
        if not known or known < case.thresholds.vanishing_gradient_min_samples:
            return ()
        share = sum(below.values()) / known
        if not _LIMIT.list_reached(case, share):
            return ()
        culprit = max(layers, key=lambda name: below[name] / len(layers[name]))
        fact = say(
            "At {count} layers together {share} of the gradient's norms are below {limit}; at "
            "{culprit} its median is {norm}.",
            count=count_names(layers), limit=limit(norm), culprit=culprit,
            share=_measure_share(case, norm).percent,
            norm=case.measure("gradient", culprit, "median", "norm"),
        )  # fmt: skip
        first = int(min(layer.step[0] for layer in layers.values()))
        return (_LIMIT.find(case, culprit, share, first, fact),)

    def judge(self, case: Case) -> Verdict | None:
        """Look for first layers with a thousandth of the largest gradient for a fifth of the run.

        Silent where the training learns, unless the gradients underflow, the
        first layers stand still, or there is no metric to judge it by; of
        layers behind dead units; and after the loss has ceased to be finite.
        """
        depths = [
            depth
            for depth in (_of_parameters(case), *_of_layers(case))
            if len(depth.names) >= _LEAST_LAYERS and len(depth.steps) >= _LEAST_PROBES
        ]
        if not depths:
            return None
        for depth in depths:
            rows = _find_stretch(depth, case)
            if rows is not None:
                return Verdict(findings=(_describe(depth, rows, case),))
        lost = next((found for item in depths if (found := _find_lost_game(item, case))), None)
        if lost is not None:
            return Verdict(findings=(lost,))
        known = [depth.usual for depth in depths if depth.usual is not None]
        return self.stay_quiet(
            "the first layers get gradients of a size with the others, or the training "
            "learns all the same",
            min(known, default=None),
        )


def _of_parameters(case: Case) -> _Depth:
    chosen = [
        parameter
        for parameter in case.run.parameters.values()
        if parameter.role == "weight"
        and parameter.requires_grad
        and parameter.kind not in _NO_DEPTH
        and parameter.size > _LEAST_ELEMENTS
        and bool(np.isfinite(parameter["gradient_norm"]).any())
    ]
    return _align(
        [(item.name, item, item["gradient_norm"], item["element_count"]) for item in chosen]
    )


def _of_layers(case: Case) -> list[_Depth]:
    """Chains of layers: each part of the model that has several by itself, as of two players."""
    parts: dict[str, list[LayerHistory]] = {}
    for item in case.run.gradients.values():
        if item.name in case.run.activations:
            parts.setdefault(item.name.partition(".")[0], []).append(item)
    large = [part for part in parts.values() if len(part) >= _LEAST_LAYERS]
    if len(large) < _LARGE_PARTS:
        large = [[item for part in parts.values() for item in part]]
    return [
        _align([(item.name, item, item["norm"], item["element_count"]) for item in part])
        for part in large
    ]


def _align(parts: list[tuple[str, History, Floats, Floats]]) -> _Depth:
    if not parts:
        return _Depth((), np.empty(0, np.int64), np.empty((0, 0)))
    steps = np.unique(np.concatenate([item.step for _, item, _, _ in parts]))
    sizes = np.full((len(parts), len(steps)), np.nan)
    for row, (_, item, norms, counts) in enumerate(parts):
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes[row, np.searchsorted(steps, item.step)] = norms / np.sqrt(counts)
    return _Depth(tuple(name for name, _, _, _ in parts), steps, sizes)


def _find_stretch(depth: _Depth, case: Case) -> slice | None:
    """The probes at which gradients vanish, where that does harm; None where it does not."""
    underflows = None
    # A gradient of exactly nothing is an underflow, or the doing of dead units.
    vanished = (depth.lowest <= _RATIO) & (depth.lowest > 0)
    if not case.ends_with_dead_layer:
        vanished |= depth.gets_nothing
        underflows = depth.underflows
        if underflows is not None:
            vanished = underflows.copy()
    broken = case.outcome.non_finite_step
    if broken is not None:
        vanished &= depth.steps < broken
    stretches = list_stretches(vanished, max(_LEAST_PROBES, round(_LASTING * len(vanished))))
    if not stretches:
        return None
    rows = slice(*max(stretches, key=lambda part: part[1] - part[0]))
    is_unknown = not case.outcome.has_metrics and bool(depth.gets_nothing[rows].all())
    does_harm = (
        case.outcome.is_poor
        or underflows is not None
        or is_unknown
        or _stands_still(depth, case)
        or _gets_exactly_nothing(depth, rows, case)
    )
    return rows if does_harm else None


def _find_lost_game(depth: _Depth, case: Case) -> Finding | None:
    """Whether all gradients are gone since one of two players is never wrong any more.

    Both have to show: in a game that is in balance gradients get small as well, and a loss of
    nothing is what any other training wants.
    """
    won = next((curve for key in case.run.metrics if (curve := _select_improved(key, case))), None)
    known = np.flatnonzero(depth.largest > 0)
    if won is None or not len(known):
        return None
    begin = float(depth.largest[known[0]])
    lasting = count_run(np.nan_to_num(depth.largest, nan=np.inf) <= _OF_FIRST * begin)
    if lasting < max(_LEAST_PROBES, round(_LASTING * len(depth.steps))):
        return None
    culprit = depth.names[int(np.nanargmax(depth.sizes[:, known[0]]))]
    first, last = int(depth.steps[-lasting]), int(depth.steps[-1])
    start = int(depth.steps[known[0]])
    late, early = (_measure_size(culprit, case, *part) for part in ((first, last), (start, start)))
    return Finding(
        culprit=culprit.removesuffix(".weight"),
        severity="error",
        title="Gradients vanish",
        fact=say(
            "An element of {culprit}, which had the largest gradient at first, gets {late} "
            "({steps}), and got {early} at step {start}; {key} fell from {high} to {low}.",
            culprit=culprit, late=late, steps=between_steps(first, last), early=early,
            start=at_step(start), key=won.key,
            high=case.measure_curve(won.key, "first value"),
            low=case.measure_curve(won.key, "level at the end"),
        ),
        inference="One of two players is never wrong any more, and the other one gets no gradient "
        "from it.",
        suggested_check="A loss that does not saturate, fewer steps or a lower rate of the player "
        "that wins, a penalty on its gradient, noise on its inputs.",
        evidence=(
            observe("layer", culprit, "largest gradient against that of the first probe",
                    float(np.nanmedian(depth.largest[-lasting:])) / begin, _OF_FIRST, first, last),
            observe("metric", won.key, "loss at the end", float(won.value[-1]),
                    _WON * float(won.value[0])),
        ),
        confidence=_CONFIDENCE,
        affected=tuple(name for name in depth.names if name != culprit),
    )  # fmt: skip


def _select_improved(key: str, case: Case) -> Curve | None:
    """The curve of a player's loss that has come to nothing; None where it has not."""
    if not is_loss(key) or not is_player_loss(key):
        return None
    curve = case.run.place_on_steps(case.run.metrics[key]).merged
    if len(curve) < _LEAST_POINTS or not float(curve.value.min()) >= 0:
        return None
    end = float(np.median(curve.value[-_LEAST_POINTS:]))
    return curve if end <= _WON * float(curve.value[0]) else None


def _gets_exactly_nothing(depth: _Depth, rows: slice, case: Case) -> bool:
    """Whether every gradient is zero to the end, with a loss that has something left to fall.

    No outcome acquits that: whatever fell did so by something else than these
    gradients. A loss of zero, as a hinge has, is nothing to fall from.
    """
    if rows.stop < len(depth.steps) or bool((depth.largest[rows] != 0).any()):
        return False
    loss = case.outcome.loss
    if loss is None or case.outcome.is_accurate:
        return False
    return abs(loss.final) > _NOTHING_LEFT * abs(loss.start)


def _stands_still(depth: _Depth, case: Case) -> bool:
    """Whether the first layers hardly change, or get next to nothing in a loss that stalls.

    They hardly change where one's updates are a hundredth of the others',
    relative to the weights: optimizers that scale each parameter train on the
    smallest gradients.
    """
    if depth.usual is not None and depth.usual <= _NOTHING and case.outcome.stalls:
        return True
    levels = {
        item.name: float(np.nanmedian(np.append(item["update_to_parameter_ratio"], np.nan)))
        for item in case.run.parameters.values()
        if item.role == "weight" and bool((item["update_to_parameter_ratio"] > 0).any())
    }
    if len(levels) < _LEAST_LAYERS:
        return False
    names = depth.names[: depth.first_half]
    first = [levels[name] for name in names if name in levels]
    first += [levels[f"{name}.weight"] for name in names if f"{name}.weight" in levels]
    return bool(first) and min(first) < _STANDS_STILL * max(levels.values())


def _describe(depth: _Depth, rows: slice, case: Case) -> Finding:
    begin, end = int(depth.steps[rows.start]), int(depth.steps[rows.stop - 1])
    window = depth.ratios[: depth.first_half, rows]
    levels = np.median(np.where(np.isfinite(window), window, 1.0), axis=1)
    culprit = depth.names[int(np.argmin(levels))]
    ratio = float(levels.min())
    if bool(depth.gets_nothing[rows].all()):
        fact = say("No layer gets any gradient ({steps}).", steps=between_steps(begin, end))
        inference = "The gradient underflows, or the loss does not depend on the parameters."
    else:
        top = depth.names[int(np.nanargmax(np.nanmedian(depth.sizes[:, rows], axis=1)))]
        ours, theirs = (_measure_size(name, case, begin, end) for name in (culprit, top))
        fact = say(
            "An element of {culprit} gets a gradient of {ours}, one of {top} of {theirs}: {ratio} "
            "of it ({steps}); {loss}.",
            culprit=culprit, ours=ours, top=top, theirs=theirs, ratio=ours / theirs,
            steps=between_steps(begin, end), loss=_tell_loss(case),
        )  # fmt: skip
        inference = "The gradient fades on its way back; the first layers do not train."
    share = (rows.stop - rows.start) / len(depth.steps)
    scale = case.thresholds
    return Finding(
        culprit=culprit.removesuffix(".weight"),
        severity=grade(
            share, 0.0, scale.vanishing_gradient_error_ratio,
            scale.vanishing_gradient_critical_ratio,
        ),
        title="Gradients vanish",
        fact=fact,
        inference=inference,
        suggested_check="Other activations (ReLU, GELU), residual connections, "
        "normalisation, another initialisation; with half precision a larger loss scale.",
        evidence=(
            observe("layer", culprit, "gradient against that of the layer with the largest",
                    ratio, _RATIO, begin, end),
            *_observe_loss(case),
        ),
        confidence=_CONFIDENCE,
        affected=tuple(
            name
            for name, level in zip(depth.names, levels, strict=False)
            if level <= _RATIO and name != culprit
        ),
    )  # fmt: skip


def _measure_size(name: str, case: Case, first: int, last: int) -> Figure:
    """Root mean square of an element's gradient, of a weight or of a layer's output."""
    if name in case.run.parameters:
        return case.measure("parameter", name, "median", "gradient_rms", first=first, last=last)
    return case.measure("gradient", name, "median", "rms", first=first, last=last)


def _tell_loss(case: Case) -> Text:
    loss = case.outcome.loss
    if loss is None:
        return say("no loss tells what comes of it")
    return say(
        "the loss went from {start} to {end}",
        start=case.measure_curve(loss.key, "level at the start"),
        end=case.measure_curve(loss.key, "level at the end"),
    )  # fmt: skip


def _observe_loss(case: Case) -> tuple[EvidenceRecord, ...]:
    loss = case.outcome.loss
    if loss is None:
        return ()
    return (observe("metric", loss.key, _tell_loss(case), loss.relative_fall, _SMALL_FALL),)


def _count(mask: Mask) -> int:
    return int(mask.sum())


def _measure_share(case: Case, norm: float) -> Figure:
    """Share of all recorded norms of gradients that are below one."""

    def count_below(values: Floats) -> float:
        return float((values < norm).sum())

    names = list(case.run.gradients)
    below = [case.measure("gradient", name, count_below, "norm") for name in names]
    every = [case.measure("gradient", name, "count", "norm") for name in names]
    known = [pair for pair in zip(below, every, strict=True) if np.isfinite(pair[1].value)]
    return add(pair[0] for pair in known) / add(pair[1] for pair in known)
