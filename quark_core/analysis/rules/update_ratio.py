"""Updates that are far too large or too small for the weights they change."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.learning_signs import improves_otherwise, knows_something
from quark_core.analysis.observations import format_number, observe, rank_by, say_steps
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis_records import AlertCategory

__all__ = ["UpdateRatio"]

_LEAST_PROBES = 3
_GOOD_ACCURACY = 0.9
_LARGE = 0.05
_LARGE_ALONE = 0.5
_LARGE_FIRST = 0.4
_LARGE_FIRST_ALONE = 1.0
_TINY_START = 0.1  # of the other weights' size: what starts near zero is overwritten on purpose
_SMALL_UNLEARNED = 1e-4
_USUAL = 1e-3
_LEARNED = 0.02
_SMALL = 1e-5
_MANY_STEPS = ("LBFGS",)  # one call of these makes many steps
_APART = 100.0  # times the other weights' median


class UpdateRatio:
    """Fires where weights change by more than a tenth in a step, or by a hundred-thousandth.

    The usual ratio of the norms of update and weight is about a thousandth. A
    first step of a third of weights that had a usual size has overwritten them.
    Large ratios count after the first probes and where the loss does not like
    them, or where one layer is a hundred times apart from the others; small
    ones only where nothing is learned.
    """

    rule_id = "update_ratio"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        levels: dict[str, float] = {}
        first_steps = _read_first_steps(case)
        spans: dict[str, tuple[int, int]] = {}
        for item in case.run.parameters.values():
            ratios = item["update_to_parameter_ratio"]
            known = np.isfinite(ratios) & (ratios > 0)
            count = float(np.nanmax(item["element_count"], initial=0.0))
            if item.role != "weight" or known.sum() < _LEAST_PROBES or count <= 16:
                continue
            levels[item.name], spans[item.name] = _read(item.step[known], ratios[known])
        if not levels:
            return Verdict(
                reason="it needs updates of parameters (ParameterDiagnostics with an optimizer)",
                missing=("parameter updates",),
            )
        ranked = rank_by(levels)
        highest = levels[ranked[0]]
        middle = float(np.median(list(levels.values())))
        suffers = case.outcome.is_poor
        apart = len(levels) >= 3 and highest > _APART * middle and highest > _LARGE
        if highest >= _LARGE_ALONE or (highest >= _LARGE and suffers) or apart:
            return Verdict(findings=(self._describe_large(ranked, levels, spans, middle),))
        if first_steps:
            return Verdict(findings=(_describe_first(first_steps),))
        lowest = levels[ranked[-1]]
        is_small = middle <= _SMALL_UNLEARNED or (lowest <= _SMALL_UNLEARNED and highest <= _USUAL)
        if suffers and is_small and not _learns(case):
            return Verdict(findings=(self._describe_small(ranked, levels, spans, middle),))
        slow = min(_SMALL, highest / (5.0 * _APART))
        crawling = [name for name in ranked if levels[name] <= slow]
        if crawling and not (case.outcome.accuracy or 0.0) >= _GOOD_ACCURACY:
            crawling.reverse()
            return Verdict(findings=(_describe_crawling(crawling, levels, spans, highest),))
        return Verdict(
            reason="no weight changes by too much or too little for the training to go on",
            observed=highest,
            threshold=_LARGE,
        )

    @staticmethod
    def _describe_large(
        ranked: list[str],
        levels: dict[str, float],
        spans: dict[str, tuple[int, int]],
        middle: float,
    ) -> Finding:
        name = ranked[0]
        first, last = spans[name]
        return Finding(
            culprit=name.removesuffix(".weight"),
            severity=grade(levels[name], 0.0, 0.3, 1.0),
            title="Updates are too large",
            fact=f"A step changes {name} by {format_number(levels[name])} of its norm "
            f"({say_steps(first, last)}); the median over all weights is {format_number(middle)}.",
            inference="The learning rate is too large for these weights: they are overwritten, "
            "not trained.",
            suggested_check="Lower the rate of their parameter group, warm up, clip.",
            evidence=tuple(
                observe("layer", other, "norm of an update over that of the weights",
                        levels[other], _LARGE, *spans[other])
                for other in ranked[:4]
            ),
            step=first,
            step_end=last,
            affected=tuple(other for other in ranked[1:] if levels[other] >= _LARGE),
        )  # fmt: skip

    @staticmethod
    def _describe_small(
        ranked: list[str],
        levels: dict[str, float],
        spans: dict[str, tuple[int, int]],
        middle: float,
    ) -> Finding:
        name = ranked[0]
        first, last = spans[name]
        return Finding(
            culprit=ranked[-1].removesuffix(".weight"),
            severity="error",
            title="Updates are too small",
            fact=f"Half of the weights change by less than {format_number(middle)} of their norm "
            f"in a step ({say_steps(first, last)}), and nothing is learned.",
            inference="The learning rate, or the loss's scale, is far too small.",
            suggested_check="Raise the rate; see whether the schedule or a scaler lowers it.",
            evidence=(
                observe("layer", name, "largest norm of an update over that of the weights",
                        levels[name], _SMALL, first, last),
            ),
            step=first,
            step_end=last,
        )  # fmt: skip


def _learns(case: Case) -> bool:
    """Whether the loss falls by a fiftieth, or anything else shows that something is known."""
    progress = case.outcome.train or case.outcome.validation
    if progress is None:
        return case.outcome.has_learned
    if progress.has_fallen and progress.relative_fall > _LEARNED:
        return True
    return improves_otherwise(case) or knows_something(case, progress.start)


def _read(steps: NDArray[np.int64], ratios: NDArray[np.float64]) -> tuple[float, tuple[int, int]]:
    """The level of a weight's updates, and from when to when it is there.

    It is the highest level that lasts for three probes and a tenth of them,
    without the first quarter where what starts near zero has large ratios; or
    the median, where that is about as high.
    """
    count = len(ratios)
    skipped = count // 4 if count >= 8 else 1
    later = ratios[skipped:]
    usual = float(np.median(later))
    width = max(_LEAST_PROBES, count // 10)
    if len(later) > width:
        windows = np.lib.stride_tricks.sliding_window_view(later, width)
        lowest = windows.min(axis=1)
        highest = float(lowest.max())
        if highest > 3.0 * usual:
            begin = skipped + int(np.argmax(lowest >= 0.5 * highest))
            return highest, (int(steps[begin]), int(steps[-1]))
    near = ratios >= 0.5 * usual
    return usual, (int(steps[int(np.argmax(near))]), int(steps[-1]))


def _read_first_steps(case: Case) -> dict[str, tuple[float, int]]:
    """Weights that their first seen update has overwritten: its ratio and its step."""
    ratios: dict[str, tuple[float, int]] = {}
    sizes: dict[str, float] = {}
    for item in case.run.parameters.values():
        known = np.flatnonzero(np.isfinite(item["update_to_parameter_ratio"]))
        count = float(np.nanmax(item["element_count"], initial=0.0))
        if item.role != "weight" or not len(known) or count <= 16 or known[0] > 1:
            continue
        if item.optimizer in _MANY_STEPS:
            continue
        row = int(known[0])
        ratio = float(item["update_to_parameter_ratio"][row])
        before = float(item["update_norm"][row]) / ratio if ratio > 0 else 0.0
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


def _describe_first(found: dict[str, tuple[float, int]]) -> Finding:
    name = max(found, key=lambda other: found[other][0])
    ratio, step = found[name]
    return Finding(
        culprit=name.removesuffix(".weight"),
        severity=grade(ratio, 0.0, 0.5, 2.0),
        title="The first updates overwrite the weights",
        fact=f"At step {step} a single update of {name} is {format_number(ratio)} of its norm.",
        inference="What the initialisation had set is gone; the training goes on from somewhere "
        "else, with weights that are too large.",
        suggested_check="Lower the rate of its parameter group, or warm up.",
        evidence=tuple(
            observe("layer", other, "norm of the first update over that of the weights",
                    found[other][0], _LARGE_FIRST, found[other][1])
            for other in list(found)[:4]
        ),
        step=step,
        affected=tuple(other for other in found if other != name),
    )  # fmt: skip


def _describe_crawling(
    names: list[str],
    levels: dict[str, float],
    spans: dict[str, tuple[int, int]],
    highest: float,
) -> Finding:
    name = names[0]
    first, last = spans[name]
    return Finding(
        culprit=name.removesuffix(".weight"),
        severity="warning",
        title="Some weights hardly change",
        fact=f"A step changes {name} by {format_number(levels[name])} of its norm "
        f"({say_steps(first, last)}); others change by up to {format_number(highest)}.",
        inference="The learning rate of their parameter group is far too small.",
        suggested_check="Look at the rates of the parameter groups and their units.",
        evidence=tuple(
            observe("layer", other, "norm of an update over that of the weights", levels[other],
                    _SMALL, *spans[other])
            for other in names[:4]
        ),
        step=first,
        step_end=last,
        affected=tuple(names[1:]),
    )  # fmt: skip
