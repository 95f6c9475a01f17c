"""Updates that are far too large or too small for the weights they change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, improves_otherwise, is_above_chance
from quark.analysis.curves import ParameterHistory
from quark.analysis.observations import Figure, Text, at_step, between_steps, observe, rank_by, say
from quark.analysis.rule import BaseRule, Finding, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory, EvidenceRecord

# Norms of an update over those of its weights; the usual one is about a thousandth.
_LARGE, _LARGE_ALONE = 0.05, 0.5  # in a training that suffers, and in any
_ERROR_LARGE, _CRITICAL_LARGE = 0.3, 1.0
_LARGE_FIRST, _LARGE_FIRST_ALONE = 0.4, 1.0  # of a first update: of most weights, and of one
_ERROR_FIRST, _CRITICAL_FIRST = 0.5, 2.0
_SMALL, _SMALL_UNLEARNED = 1e-5, 1e-4  # next to others that move, and where nothing is learned
_USUAL = 1e-3

_LEAST_PROBES = 3
_LEAST_ELEMENTS = 16  # a weight with fewer is a scale or a gate, which may move as it likes
_LEAST_WEIGHTS = 3  # that one can be apart from
_APART = 100.0  # times the other weights' median
_CRAWLING_APART = 5.0 * _APART  # times slower than the fastest
_TINY_START = 0.1  # of the other weights' size: what starts near zero is overwritten on purpose
_LATEST_FIRST = 1  # probe that shows the first update
_MANY_STEPS = ("LBFGS",)  # one call of these makes many steps
_LEARNED = 0.02  # share by which a loss that learns has fallen

_SKIPPED_PART, _SKIPPED_FROM = 4, 8  # the first quarter, of so many probes at least
_LASTING_PART = 10  # a tenth of the probes have to be that high
_CLEARLY = 3.0  # times the median, from which on a stretch is a level of its own
_NEAR = 0.5  # of a level: it is there
_MOST_EVIDENCE = 4
_FIELD = "update_to_parameter_ratio"


@dataclass(frozen=True)
class _Level:
    """How much a step changes a weight, and between which steps it does."""

    ratio: float
    first: int
    last: int


Levels = dict[str, _Level]
"""By weight, the highest ratio first."""


class UpdateRatio(BaseRule):
    """Fires where weights change by more than a tenth in a step, or by a hundred-thousandth.

    The usual ratio of the norms of update and weight is about a thousandth. A
    first step of a third of weights that had a usual size has overwritten them.
    Large ratios count after the first probes and where the loss does not like
    them, or where one layer is a hundred times apart from the others; small
    ones only where nothing is learned.
    """

    rule_id = "update_ratio"
    category: AlertCategory = "optimization"
    needs = "it needs updates of parameters (ParameterDiagnostics with an optimizer)"
    data = ("parameter updates",)
    tables = ("parameters",)
    threshold = _LARGE

    def judge(self, case: Case) -> Verdict | None:
        """Look for weights that a step overwrites, and for such that hardly change.

        Silent of large ratios at the first probes, and later in a training that
        goes well; of small ones while anything is learned, unless other weights
        move and the accuracy is not good.
        """
        levels = _read_levels(case)
        if not levels:
            return None
        finding = (
            _look_for_large(levels, case)
            or _look_at_first_steps(case)
            or _look_for_small(levels, case)
            or _look_for_crawling(levels, case)
        )
        if finding is not None:
            return Verdict(findings=(finding,))
        return self.stay_quiet(
            "no weight changes by too much or too little for the training to go on",
            next(iter(levels.values())).ratio,
        )


def _read_levels(case: Case) -> Levels:
    levels: Levels = {}
    for item in case.run.parameters.values():
        ratios = item["update_to_parameter_ratio"]
        known = np.isfinite(ratios) & (ratios > 0)
        if _is_matrix(item) and known.sum() >= _LEAST_PROBES:
            levels[item.name] = _read(item.step[known], ratios[known])
    ranked = rank_by({name: level.ratio for name, level in levels.items()})
    return {name: levels[name] for name in ranked}


def _is_matrix(item: ParameterHistory) -> bool:
    """Whether a parameter is a weight with so many elements that its norm says something."""
    count = item.size
    return item.role == "weight" and count > _LEAST_ELEMENTS


def _read(steps: NDArray[np.int64], ratios: NDArray[np.float64]) -> _Level:
    """The level of a weight's updates, and from when to when it is there.

    It is the highest level that lasts for three probes and a tenth of them,
    without the first quarter where what starts near zero has large ratios; or
    the median, where that is about as high.
    """
    count = len(ratios)
    skipped = count // _SKIPPED_PART if count >= _SKIPPED_FROM else 1
    later = ratios[skipped:]
    usual = float(np.median(later))
    width = max(_LEAST_PROBES, count // _LASTING_PART)
    if len(later) > width:
        windows = np.lib.stride_tricks.sliding_window_view(later, width)
        lowest = windows.min(axis=1)
        highest = float(lowest.max())
        if highest > _CLEARLY * usual:
            begin = skipped + int(np.argmax(lowest >= _NEAR * highest))
            return _Level(highest, int(steps[begin]), int(steps[-1]))
    near = ratios >= _NEAR * usual
    return _Level(usual, int(steps[int(np.argmax(near))]), int(steps[-1]))


def _take_middle(levels: Levels) -> float:
    return float(np.median([level.ratio for level in levels.values()]))


def _look_for_large(levels: Levels, case: Case) -> Finding | None:
    """Steps that overwrite weights: in a training that suffers, of half, or of one layer alone."""
    middle = _take_middle(levels)
    name, level = next(iter(levels.items()))
    is_apart = len(levels) >= _LEAST_WEIGHTS and level.ratio > max(_APART * middle, _LARGE)
    is_large = level.ratio >= _LARGE_ALONE or (level.ratio >= _LARGE and case.outcome.is_poor)
    if not is_large and not is_apart:
        return None
    return Finding(
        culprit=name.removesuffix(".weight"),
        severity=grade(level.ratio, 0.0, _ERROR_LARGE, _CRITICAL_LARGE),
        title="Updates are too large",
        fact=say(
            "A step changes {name} by {ratio} of its norm ({steps}){others}.",
            name=name,
            ratio=_measure(name, level, case),
            steps=between_steps(level.first, level.last),
            others=_tell_lowest(levels, name, case),
        ),
        inference="The learning rate is too large for these weights: they are overwritten, "
        "not trained.",
        suggested_check="Lower the rate of their parameter group, warm up, clip.",
        evidence=_observe_levels(list(levels.items()), _LARGE),
        step=level.first,
        step_end=level.last,
        affected=tuple(
            other for other in levels if other != name and levels[other].ratio >= _LARGE
        ),
    )


def _look_at_first_steps(case: Case) -> Finding | None:
    """Weights of a usual size that their first update has overwritten."""
    found = _read_first_steps(case)
    if not found:
        return None
    name = max(found, key=lambda other: found[other][0])
    ratio, step = found[name]
    return Finding(
        culprit=name.removesuffix(".weight"),
        severity=grade(ratio, 0.0, _ERROR_FIRST, _CRITICAL_FIRST),
        title="The first updates overwrite the weights",
        fact=say(
            "At step {step} a single update of {name} is {ratio} of its norm.",
            step=at_step(step), name=name,
            ratio=case.measure("parameter", name, "value", _FIELD, first=step, last=step),
        ),
        inference="What the initialisation had set is gone; the training goes on from somewhere "
        "else, with weights that are too large.",
        suggested_check="Lower the rate of its parameter group, or warm up.",
        evidence=tuple(
            observe("layer", other, "norm of the first update over that of the weights", large,
                    _LARGE_FIRST, at)
            for other, (large, at) in list(found.items())[:_MOST_EVIDENCE]
        ),
        step=step,
        affected=tuple(other for other in found if other != name),
    )  # fmt: skip


def _read_first_steps(case: Case) -> dict[str, tuple[float, int]]:
    """Weights that their first seen update has overwritten: its ratio and its step."""
    ratios: dict[str, tuple[float, int]] = {}
    sizes: dict[str, float] = {}
    for item in case.run.parameters.values():
        known = np.flatnonzero(np.isfinite(item["update_to_parameter_ratio"]))
        if not _is_matrix(item) or not len(known) or known[0] > _LATEST_FIRST:
            continue
        if item.optimizer in _MANY_STEPS:
            continue
        row = int(known[0])
        ratio = float(item["update_to_parameter_ratio"][row])
        before = float(item["update_norm"][row]) / ratio if ratio > 0 else 0.0
        count = item.size
        sizes[item.name] = before / np.sqrt(count)
        ratios[item.name] = (ratio, int(item.step[row]))
    if len(sizes) < 2:
        return {}
    usual = float(np.median([size for size in sizes.values() if size > 0] or [0.0]))
    large = {
        name: found
        for name, found in ratios.items()
        if found[0] >= _LARGE_FIRST and sizes[name] >= _TINY_START * usual
    }
    is_general = len(large) >= max(2, len(sizes) / 2)
    if is_general or any(found[0] >= _LARGE_FIRST_ALONE for found in large.values()):
        return large
    return {}


def _look_for_small(levels: Levels, case: Case) -> Finding | None:
    """Half of the weights hardly change, or none by much, and nothing is learned."""
    middle = _take_middle(levels)
    ranked = list(levels)
    name, slowest = ranked[0], ranked[-1]
    level = levels[name]
    is_small = middle <= _SMALL_UNLEARNED or (
        levels[slowest].ratio <= _SMALL_UNLEARNED and level.ratio <= _USUAL
    )
    if not (case.outcome.is_poor and is_small) or _learns(case):
        return None
    return Finding(
        culprit=slowest.removesuffix(".weight"),
        severity="error",
        title="Updates are too small",
        aspect="small",
        fact=say(
            "A step changes {slowest} by {low} of its norm, and {name}, which moves most, by "
            "{high} ({steps}), and nothing is learned.",
            slowest=slowest, low=_measure(slowest, levels[slowest], case), name=name,
            high=_measure(name, level, case), steps=between_steps(level.first, level.last),
        ),
        inference="The learning rate, or the loss's scale, is far too small.",
        suggested_check="Raise the rate; see whether the schedule or a scaler lowers it.",
        evidence=(
            observe("layer", name, "largest norm of an update over that of the weights",
                    level.ratio, _SMALL, level.first, level.last),
        ),
    )  # fmt: skip


def _learns(case: Case) -> bool:
    """Whether the loss falls by a fiftieth, or anything else shows that something is known."""
    progress = case.outcome.loss
    if progress is None:
        return case.outcome.has_learned
    if progress.has_fallen and progress.relative_fall > _LEARNED:
        return True
    return improves_otherwise(case) or is_above_chance(case, progress.start)


def _look_for_crawling(levels: Levels, case: Case) -> Finding | None:
    """Weights that hardly change while others do, in a training that is not good already."""
    fastest = next(iter(levels))
    highest = levels[fastest].ratio
    slow = min(_SMALL, highest / _CRAWLING_APART)
    crawling = [item for item in levels.items() if item[1].ratio <= slow]
    if not crawling or case.outcome.is_accurate:
        return None
    crawling.reverse()
    name, level = crawling[0]
    return Finding(
        culprit=name.removesuffix(".weight"),
        severity="warning",
        title="Some weights hardly change",
        aspect="small",
        fact=say(
            "A step changes {name} by {ratio} of its norm ({steps}); {other} changes by {most}.",
            name=name,
            ratio=_measure(name, level, case),
            other=fastest,
            steps=between_steps(level.first, level.last),
            most=_measure(fastest, levels[fastest], case),
        ),
        inference="The learning rate of their parameter group is far too small.",
        suggested_check="Look at the rates of the parameter groups and their units.",
        evidence=_observe_levels(crawling, _SMALL),
        step=level.first,
        step_end=level.last,
        affected=tuple(other for other, _ in crawling[1:]),
    )


def _measure(name: str, level: _Level, case: Case) -> Figure:
    """The median of how much a step changes a weight, where it is at its level."""
    return case.measure("parameter", name, "median", _FIELD, first=level.first, last=level.last)


def _tell_lowest(levels: Levels, name: str, case: Case) -> Text:
    """How much the weight that moves least is changed, where there are others."""
    other = list(levels)[-1]
    if other == name:
        return say("")
    return say("; {other}, which moves least, by {ratio}", other=other,
               ratio=_measure(other, levels[other], case))  # fmt: skip


def _observe_levels(
    levels: list[tuple[str, _Level]], threshold: float
) -> tuple[EvidenceRecord, ...]:
    return tuple(
        observe("layer", name, "norm of an update over that of the weights", level.ratio, threshold,
                level.first, level.last)
        for name, level in levels[:_MOST_EVIDENCE]
    )  # fmt: skip
