"""An explosion that the loss itself shows: huge values, or growth that ends as NaN."""

from __future__ import annotations

import numpy as np

from quark.analysis.case import Case
from quark.analysis.curves import SMALLEST, Curve
from quark.analysis.figures import (
    Source,
    between_steps,
    measure_before,
    measure_curve,
    name_source,
    say,
)
from quark.analysis.observations import list_stretches, observe
from quark.analysis.outcome import Progress
from quark.analysis.rule import Finding

RECOVERED = 0.5
"""Of the rise of the loss is left at most before another one counts by itself."""

LOSS_FACTOR = 5.0
"""Times the start, or what was won, above the highest of the first losses."""

_LEAST_LOSSES = 3
_TOP_PART, _MOST_TOP_POINTS = 5, 10  # the first losses: a fifth of them
_LASTING_PART, _LEAST_LASTING = 100, 3  # a hundredth of the losses has to be so high
_MOST_LASTING = 30  # of a long run: so many in a row are no accident
_HEAD_PART = 10  # a tenth of the run: what is over by then may have been how it found its way
_HUGE = 100.0  # times the start, or what was won: beyond any such way
_LAST_POINTS = 5  # before the loss ceases to be finite
_LEAST_BEFORE = 8  # losses from which on those before the last ones have a level of their own
_GROWN_NOISE = 6.0  # deviations above that level: the end was growth
_GROWN_SHARE = 0.5  # of the start, or of what was won: there the growth began
_CALM = 3.0  # times their median: gradients below it did not explode
_LOSS_CONFIDENCE = 0.7  # the loss alone does not show gradients
# Title, inference and check, where nothing of gradients was recorded.
_LOSS_ALONE = (
    "The loss explodes",
    "Steps this far uphill are too large for what the loss looks like there.",
    "Lower the learning rate or lengthen the warm-up; look at the data of these steps; "
    "quark.watch(session, model, optimizer) shows which layers it comes from.",
)


def read_loss(case: Case, series: list[Curve]) -> Finding | None:
    """An explosion that only the loss shows: huge values, or growth that ends as NaN."""
    loss, progress = case.train_loss, case.outcome.train
    if loss is None or progress is None or len(loss.finite) < _LEAST_LOSSES:
        return None
    values = loss.finite.value
    few = max(1, min(_MOST_TOP_POINTS, len(values) // _TOP_PART))
    unit = max(abs(progress.start), progress.fall, SMALLEST)
    # Where the first losses are the explosion, only the very first says what is high.
    top = progress.first if progress.blows_up else float(np.max(values[:few]))
    limit = max(top, progress.start) + LOSS_FACTOR * unit
    breaks = case.outcome.non_finite_step
    if breaks is not None:
        span = _find_growth(loss.finite, progress, unit, limit, breaks)
    else:
        span = _find_high_losses(loss.finite, limit)
        # Where gradients were watched and stayed calm, the loss alone says divergence.
        if span is not None and series and _highest_seen(series, span[0]) < _CALM:
            return None
        # What a policy loses follows the rewards that it gets.
        if case.outcome.rewarded:
            return None
        if span is not None and _finds_its_way(loss.finite, progress, span, unit):
            return None
    if span is None:
        return None
    first, end = span
    highest = measure_curve(case.run, loss.key, "highest")
    said = "and came down after it"
    if breaks is not None:
        said = "and then ceased to be finite"
    elif progress.final > limit:
        said = "and stayed there"
    title, inference, check = (
        _LOSS_ALONE
        if not series
        else (
            "Gradients explode",
            "Steps this far uphill come from exploding gradients; no probe of the gradients "
            "themselves shows it.",
            "Watch the gradients more often (quark.watch), clip their norm, lower the rate.",
        )
    )
    return Finding(
        culprit=loss.key,
        severity="critical" if breaks is not None else "error",
        title=title,
        fact=say(
            "The loss rose from {before} to {peak} {said} ({steps}).",
            before=measure_before(case.run, Source(*name_source(case.run, loss.key)), first),
            peak=highest, said=said, steps=between_steps(first, end),
        ),
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("metric", loss.key, say("highest finite loss {peak}", peak=highest),
                    highest.value, limit, first, end),
        ),
        step=first,
        step_end=end,
        confidence=_LOSS_CONFIDENCE,
    )  # fmt: skip


def _finds_its_way(loss: Curve, progress: Progress, span: tuple[int, int], unit: float) -> bool:
    """Whether an early burst is over in time and the training is good after it.

    Large first steps may throw a training off before it settles in a wider valley.
    """
    values = loss.value
    head = loss.step[: max(1, len(values) // _HEAD_PART)]
    if span[0] > int(head[-1]) or float(values.max()) > progress.first + _HUGE * unit:
        return False
    return progress.final < RECOVERED * progress.first and progress.first > 0


def _find_growth(
    loss: Curve, progress: Progress, unit: float, limit: float, breaks: int
) -> tuple[int, int] | None:
    """From where to where a loss grew before it ceased to be finite; None where it did not."""
    tail = loss.value[-_LAST_POINTS:]
    before = progress.start
    if len(loss) > _LEAST_BEFORE:
        before = float(np.median(loss.value[:-_LAST_POINTS]))
    has_grown = float(tail.max()) > before + max(unit, _GROWN_NOISE * progress.noise)
    if not has_grown and not (tail > limit).any():
        return None
    rows = np.flatnonzero(tail > before + _GROWN_SHARE * unit)
    return (int(loss.step[-len(tail) :][rows[0]]) if len(rows) else breaks), breaks


def _find_high_losses(loss: Curve, limit: float) -> tuple[int, int] | None:
    """From where to where a loss is beyond a limit, for long enough: the highest such stretch."""
    least = max(_LEAST_LASTING, min(_MOST_LASTING, len(loss) // _LASTING_PART))
    stretches = list_stretches(loss.value > limit, least)
    if not stretches:
        return None
    low, high = max(stretches, key=lambda part: float(loss.value[part[0] : part[1]].max()))
    return int(loss.step[low]), int(loss.step[high - 1])


def _highest_seen(series: list[Curve], step: int) -> float:
    """Highest ratio of any gradient to its median before a step, from then on."""
    best = 0.0
    for curve in series:
        before = curve.value[(curve.step < step) & np.isfinite(curve.value)]
        after = curve.value[curve.step >= step]
        if len(before) and len(after):
            after = np.where(np.isfinite(after), after, np.inf)
            best = max(best, float(after.max() / max(float(np.median(before)), SMALLEST)))
        elif not len(before):
            return np.inf
    return best
