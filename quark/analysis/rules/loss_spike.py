"""Losses that jump far above their neighbours and come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import SMALLEST, Curve, local_spread, spread, trailing_median
from quark.analysis.observations import between_steps, count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity

Floats = NDArray[np.float64]

_LEAST_POINTS = 20
_WINDOW = 30  # points before, whose median is the level and whose deviation is the noise
_DEVIATIONS = 10.0
_LEAST_NOISE = 0.25  # of the whole run's noise: a calm stretch is none to be measured by
_SHARE = 0.5  # of all that the run had won
_LEAST_JUMP = 0.05  # of the level
_FIRST_POINTS = 8  # before them a median of the points before is no level yet
_START_PART, _LEAST_START_POINTS = 10, 3  # where the loss began: its first tenth

_LASTING = 3  # high points in one spike: more than a bad batch
_PAIR, _CLEARLY = 2, 1.5  # high points side by side; times the limit, for a warning
_LEAST_SPIKES, _MANY_SPIKES = 2, 5
_GAP = 3  # points from a high one to the next of the same spike
_LONGEST_PART, _LONGEST_POINTS = 8, 5  # of the run: what is up for longer is a change of level
_AFTER_POINTS, _LEAST_AFTER = 8, 3  # that have to be down again
_LEFT = 0.35  # share of the jump that may be left after it
_MOST_EVIDENCE = 6


@dataclass(frozen=True)
class _Excess:
    """How far each point lies above those before it.

    Attributes:
        base: Median of the points before.
        limit: Distance from it beyond which a point is high.
        is_high: Which points are.
        ratio: The highest distance over its limit.
    """

    base: Floats
    limit: Floats
    is_high: NDArray[np.bool_]
    ratio: float


class LossSpike(BaseRule):
    """Fires for losses that stand far out of the noise before them and undo half of the progress.

    One point that comes back at once is told as info: a bad batch. Two or
    more spikes that are clearly beyond the limit, or one that lasts, are a warning.
    """

    rule_id = "loss_spike"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_POINTS} points of the training loss"
    data = ("train/loss",)
    threshold = 1.0

    def judge(self, case: Case) -> Verdict | None:
        """Look for points far above the median and the noise of those before, that come back.

        Silent of what stays up (another rule's) or is still up at the end, and
        of single points that are no higher than the loss was when it began:
        noise with heavy tails throws such.
        """
        loss = case.train_loss
        if loss is None or len(loss.finite) < _LEAST_POINTS:
            return None
        curve = loss.finite
        progress = case.outcome.train
        won = max(progress.fall, 0.0) if progress is not None else 0.0
        excess = _measure_excess(curve.value, won)
        spikes = _find_spikes(curve.value, excess)
        if not spikes:
            return self.stay_quiet("no loss stands out of the noise before it", excess.ratio)
        finding = _describe(case, curve, excess, spikes)
        return Verdict(findings=(finding,), observed=excess.ratio, threshold=self.threshold)


def _measure_excess(values: Floats, won: float) -> _Excess:
    base = trailing_median(values, _WINDOW)
    distance = values - base
    residual = np.nan_to_num(distance)
    noise = np.maximum(local_spread(residual, _WINDOW), _LEAST_NOISE * spread(residual))
    limit = np.maximum(_DEVIATIONS * noise, np.maximum(_SHARE * won, _LEAST_JUMP * np.abs(base)))
    with np.errstate(invalid="ignore"):
        is_high = distance > limit
    is_high[:_FIRST_POINTS] = False
    later = slice(_FIRST_POINTS, None)
    ratios = distance[later] / np.maximum(limit[later], SMALLEST)
    return _Excess(base, limit, is_high, float(np.nanmax(ratios, initial=0.0)))


def _find_spikes(values: Floats, excess: _Excess) -> list[tuple[int, int]]:
    """First and last index of each spike."""
    start = float(values[: max(_LEAST_START_POINTS, len(values) // _START_PART)].max())
    return [
        (low, up)
        for low, up in _group(excess.is_high)
        if _comes_back(values, excess.base, low, up)
        and (
            int(excess.is_high[low : up + 1].sum()) >= _LASTING
            or float(values[low : up + 1].max()) > start
        )
    ]


def _comes_back(values: Floats, base: Floats, low: int, up: int) -> bool:
    """Whether a rise is over soon: one that stays is a change, and one at the end is unknown."""
    length = up - low + 1
    after = values[up + 1 : up + 1 + max(_AFTER_POINTS, length)]
    if len(after) < _LEAST_AFTER or length > max(_LONGEST_POINTS, len(values) // _LONGEST_PART):
        return False
    peak, level = float(values[low : up + 1].max()), float(base[low])
    return float(np.median(after)) <= level + _LEFT * (peak - level)


def _group(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of true values, those with up to two others between as one."""
    out: list[tuple[int, int]] = []
    for index in np.flatnonzero(mask).tolist():
        if out and index - out[-1][1] <= _GAP:
            out[-1] = (out[-1][0], index)
        else:
            out.append((index, index))
    return out


def _is_lasting(values: Floats, excess: _Excess, low: int, up: int) -> bool:
    """Whether it is more than one bad batch: three points, or two that are both far out."""
    if up - low + 1 >= _LASTING:
        return True
    return up - low + 1 >= _PAIR and bool((_list_beyond(values, excess, low, up) >= _CLEARLY).all())


def _list_beyond(values: Floats, excess: _Excess, low: int, up: int) -> Floats:
    """How many times the limit each point of a spike lies above the level before."""
    return (values - excess.base)[low : up + 1] / excess.limit[low : up + 1]


def _describe(case: Case, curve: Curve, excess: _Excess, spikes: list[tuple[int, int]]) -> Finding:
    peaks = [float(curve.value[low : up + 1].max()) for low, up in spikes]
    peak = max(peaks)
    low, up = spikes[peaks.index(peak)]
    first, last = int(curve.step[low]), int(curve.step[up])
    source = case.find_source(curve.key)
    count = len(spikes)
    times = count_names(str(curve.step[begin]) for begin, _ in spikes)
    often = say("once,") if count == 1 else say("{count} times, at most", count=times)
    severity: AlertSeverity = "info"
    clear = [
        spike for spike in spikes if _list_beyond(curve.value, excess, *spike).max() >= _CLEARLY
    ]
    if len(clear) >= _LEAST_SPIKES or any(
        _is_lasting(curve.value, excess, *spike) for spike in clear
    ):
        severity = "error" if count >= _MANY_SPIKES else "warning"
    return Finding(
        culprit=curve.key,
        severity=severity,
        title="The loss spikes" if count == 1 else "The loss spikes repeatedly",
        fact=say(
            "{key} jumped {often} to {peak} from {before}, the level before, at {steps}.",
            key=curve.key,
            often=often,
            peak=case.measure_curve(curve.key, "highest", first=first, last=last),
            before=case.measure_before(source, first, _WINDOW),
            steps=between_steps(first, last),
        ),
        inference="Single batches undo what was learned.",
        suggested_check="Look at those batches; clip the norm of the step, lower the "
        "rate, look at the optimizer's epsilon and second moment.",
        evidence=tuple(
            observe("metric", curve.key, "far above the points before it", top,
                    float(excess.base[low] + excess.limit[low]),
                    int(curve.step[low]), int(curve.step[up]))
            for (low, up), top in list(zip(spikes, peaks, strict=True))[:_MOST_EVIDENCE]
        ),
        step=int(curve.step[spikes[0][0]]),
        step_end=int(curve.step[spikes[-1][1]]),
    )  # fmt: skip
