"""How a training went, by its losses, accuracies and rewards: what rules are gated by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import (
    SMALLEST,
    Curve,
    estimate_noise,
    find_resolution,
    smooth,
    spread,
)
from quark.analysis.metric_roles import is_reward, is_score

PERCENT_FROM = 1.5
"""An accuracy beyond it is in percent."""

_SIGNIFICANT = 4.0  # standard errors beyond which a level is another one
_RESOLUTION = 1e-9  # of the start: a fall by less is one of rounding
_SMALL_FALL, _TINY_FALL = 0.1, 0.02  # share of the start: alone, and where an accuracy improves
_NOTHING = 5e-3
_LOST = 0.5  # share of what was won, lost again: a training that went wrong
_RELAPSE_FACTOR, _RELAPSE_SHARE = 3.0, 0.05  # of the best level, of the start
_ACCURACY_STEP = 0.03
_GOOD_ACCURACY = 0.9
_LAST_ACCURACIES = 5
_STALL_PART, _STALL_END_PART, _LEAST_STALL = 3, 5, 6  # after the first third; a fifth of that
_STALL_LEFT = 0.95  # share of the level that is left where a loss stalls
_WORSE = 0.02  # of the level: less is no rise
_LEAST_POINTS = 3
_MOST_POINTS = 4000
_END_PART, _MOST_END = 10, 20  # points of the start and of the end: a tenth of all
_WINDOW_PART, _MOST_WINDOW = 8, 101  # of the smoothing
_LEAST_DIFFERENCES = 8  # points from which on first differences say what second ones do not
_DRIFT_PART = 3  # thirds are compared
_LEFT_AT_ONCE = 2.0  # times the first value: the next ones are no level before learning
_LEFT_BY = 10.0  # of a loss that may be negative: times its size
_FAR = 1e3  # times the first value: no noise throws a loss there
_BLOWN = 3.0  # times the first value: a loss that ends there has undone more than was ever won
_CLEAR_DEVIATIONS = 3.0  # of an accuracy's own resolution
_LEAST_DOUBLED = 5e-3  # accuracy beyond twice that of the start
_CALM_POINTS = 10  # before a step, whose median is the level there
_BURST_POINTS = 3  # as many high points in a row are no accident


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A curve from its start to its end, in its own unit, and in its own noise.

    Attributes:
        key: The curve.
        points: Its finite points.
        first: Its first value.
        start: The level before learning: the median of its first points, or the
            first value alone where the next ones have left it for far above.
        best: Lowest level of the smoothed curve.
        best_step: Where that is.
        lowest: The lowest value that was logged, which texts call the best.
        final: Median of its last points.
        noise: Deviation of one point from the trend.
        error: Standard error of the levels.
        drift: Median of the first third less that of the last.
        drift_error: Standard error of `drift`.
        log_noise: Deviation of one point from the trend of the logarithms; None
            where not all values are positive.
        blows_up: Whether the points after the first one leave it for far above,
            so that the first value alone says where it began.
        values: The points that were judged.
        smoothed: The smoothed curve.
    """

    key: str
    points: int
    first: float
    start: float
    best: float
    best_step: int
    lowest: float
    final: float
    noise: float
    error: float
    drift: float
    drift_error: float
    log_noise: float | None
    blows_up: bool
    values: Curve
    smoothed: Curve

    @property
    def fall(self) -> float:
        """From the start to the best level."""
        return self.start - self.best

    @property
    def has_fallen(self) -> bool:
        """Whether it fell by more than chance: to its best level, or from third to third."""
        if self.fall > _SIGNIFICANT * self.error and self.fall > _RESOLUTION * abs(self.start):
            return True
        return self.drift > _SIGNIFICANT * self.drift_error > 0.0

    @property
    def relative_fall(self) -> float:
        """Fall as a share of the start, where all of it is positive; else of its whole span."""
        lowest = min(self.best, self.final)
        if lowest > 0 and self.start > 0:
            return self.fall / self.start
        span = float(np.ptp(self.smoothed.value))
        return self.fall / span if span > 0 else 0.0

    @property
    def regression(self) -> float:
        """How far it is above its best at the end, in falls; 1 is all that was won."""
        lost = self.final - self.best
        if lost <= _SIGNIFICANT * self.error:
            return 0.0
        return lost / max(self.fall, _SIGNIFICANT * self.error, SMALLEST)

    @property
    def gain(self) -> float:
        """From the start to the end: what is left of the fall."""
        return self.start - self.final

    @property
    def is_worse_than_untrained(self) -> bool:
        """Whether a positive loss ends at twice its first value."""
        if self.has_blown_up:
            return True
        limit = 2.0 * self.first + _SIGNIFICANT * self.error
        return self.first > 0 and self.best > 0 and self.final > limit

    @property
    def has_blown_up(self) -> bool:
        """Whether a positive loss ends at three times its first value, beyond its noise.

        In logarithms, so that a noise as large as the explosion does not hide it.
        """
        if self.log_noise is None or self.first <= 0 or self.final < _BLOWN * self.first:
            return False
        return float(np.log(self.final / self.first)) > _SIGNIFICANT * self.log_noise

    @property
    def relapse(self) -> float:
        """`regression` in logarithms, for losses that fall over orders of magnitude.

        0 unless the loss is positive and ends at three times its best level
        and a twentieth of its start, at least.
        """
        if not (self.best > 0 and self.start > self.best and self.regression > 0):
            return 0.0
        if self.final < max(_RELAPSE_FACTOR * self.best, _RELAPSE_SHARE * self.start):
            return 0.0
        return float(np.log(self.final / self.best) / np.log(self.start / self.best))

    def level_before(self, step: int) -> float:
        """Median of the last ten values before a step; where there is none, where it began."""
        values = self.values.value[self.values.step < step][-_CALM_POINTS:]
        return float(np.median(values)) if len(values) else max(self.first, self.start)

    def highest_after(self, step: int, end: int | None = None) -> float:
        """The highest level from a step on, or until another; the final one where there is none.

        The highest of the smoothed values, or what three points in a row have
        where that is beyond the noise: smoothing hides no burst.
        """
        smoothed = self.smoothed.between(step, end).value
        if not len(smoothed):
            return self.final
        highest = float(smoothed.max())
        values = self.values.between(step, end).value
        if len(values) >= _BURST_POINTS:
            rows = np.lib.stride_tricks.sliding_window_view(values, _BURST_POINTS)
            burst = float(rows.min(axis=1).max())
            if burst > highest + _SIGNIFICANT * self.noise:
                return burst
        return highest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training went.

    Attributes:
        train, validation: Progress of the losses, or None where there is none.
        non_finite_step: First step whose loss is NaN or infinite and after
            which no finite value comes any more, or None.
        other_progress: Whether an accuracy, a reward or the like has improved.
        rewarded: Whether a reward, a score or the like has.
        accuracy: The lowest of the accuracies at the end, 0 to 1, or None.
        has_metrics: Whether there is anything to judge by.
    """

    train: Progress | None
    validation: Progress | None
    non_finite_step: int | None
    other_progress: bool
    rewarded: bool
    accuracy: float | None
    has_metrics: bool

    @property
    def has_learned(self) -> bool:
        """Whether any loss fell, or any accuracy or reward rose, by more than chance."""
        return self.other_progress or any(
            item is not None and item.has_fallen and item.relative_fall > _NOTHING
            for item in (self.train, self.validation)
        )

    @property
    def is_poor(self) -> bool:
        """Whether it went wrong or hardly learned, so that a weak layer can be why."""
        if self.non_finite_step is not None:
            return True
        if not self.has_metrics:
            return False
        if self.accuracy is not None and self.accuracy >= _GOOD_ACCURACY:
            return False
        progress = self.train or self.validation
        if progress is None:
            return not self.other_progress
        if progress.regression >= _LOST or progress.is_worse_than_untrained:
            return True
        if progress.has_fallen and progress.relative_fall >= _SMALL_FALL:
            return False
        return not (self.other_progress and progress.relative_fall >= _TINY_FALL)

    @property
    def stalls(self) -> bool:
        """Whether the loss falls by less than a twentieth after the run's first third.

        Of its level there, or, where it may be negative, of all that it spans.
        """
        progress = self.train or self.validation
        if progress is None or (self.accuracy or 0.0) >= _GOOD_ACCURACY:
            return False
        values = progress.smoothed.value[len(progress.smoothed) // _STALL_PART :]
        if len(values) < _LEAST_STALL:
            return False
        few = max(1, len(values) // _STALL_END_PART)
        begin, end = float(np.median(values[:few])), float(np.median(values[-few:]))
        unit = begin if values.min() > 0 else max(abs(begin), progress.fall)
        return begin - end < (1.0 - _STALL_LEFT) * unit

    def worsens_after(self, step: int, share: float = 0.25) -> bool:
        """Whether the loss rises after a step by a share of what had been won until then."""
        if self.non_finite_step is not None and self.non_finite_step >= step:
            return True
        return any(
            item is not None and _worsens(item, step, share)
            for item in (self.train, self.validation)
        )


def _worsens(item: Progress, step: int, share: float) -> bool:
    before, after = item.level_before(step), item.highest_after(step)
    known = int(np.clip(np.searchsorted(item.values.step, step), 1, _CALM_POINTS))
    error = max(item.error, item.noise / np.sqrt(known))
    # By factors: the noise of what is blown up is as large as that.
    if (
        item.log_noise is not None
        and after > _BLOWN * before > 0
        and float(np.log(after / before)) > _SIGNIFICANT * item.log_noise
    ):
        return True
    won = max(item.start - before, _SIGNIFICANT * item.error, 0.0)
    least = max(share * won, _SIGNIFICANT * error, _WORSE * abs(before))
    return bool(after - before > least)


def judge_outcome(
    train: Curve | None,
    validation: Curve | None,
    accuracies: tuple[Curve | None, ...],
    metrics: Mapping[str, Curve],
) -> Outcome:
    """Judge a training by its curves."""
    known = [curve for curve in accuracies if curve is not None]
    accuracy_keys = {curve.key for curve in known}
    scores = [curve for key, curve in metrics.items() if is_score(key) and key not in accuracy_keys]
    rising = known + scores
    rewarded = any(_rises(curve) for curve in scores if is_reward(curve.key))
    levels = [
        float(np.median(curve.merged.value[-_LAST_ACCURACIES:]))
        for curve in accuracies
        if curve is not None and len(curve.merged)
    ]
    shares = [level / 100.0 if level > PERCENT_FROM else level for level in levels]
    losses = [curve for curve in (train, validation) if curve is not None]
    return Outcome(
        train=None if train is None else measure_progress(train),
        validation=None if validation is None else measure_progress(validation),
        non_finite_step=_find_end(train),
        other_progress=any(map(_rises, scores)) or any(map(improves_clearly, known)),
        rewarded=rewarded,
        accuracy=min(shares, default=None),
        has_metrics=any(len(curve) >= _LEAST_POINTS for curve in losses + rising),
    )


def measure_progress(curve: Curve) -> Progress | None:
    """Progress of a curve that should fall; None with fewer than three finite points."""
    merged = curve.merged
    if len(merged) < _LEAST_POINTS:
        return None
    whole = merged.thin(_MOST_POINTS)
    values = whole.value
    count = len(values)
    few = max(1, min(count // _END_PART, _MOST_END))
    window = max(1, min(count // _WINDOW_PART, _MOST_WINDOW) | 1)
    noise = max(estimate_noise(values), 0.0)
    if noise == 0.0 and count >= _LEAST_DIFFERENCES:
        noise = spread(np.diff(values)) / np.sqrt(2.0)
    log_noise = estimate_noise(np.log(values)) if float(values.min()) > 0 else None
    first, start = float(merged.value[0]), float(np.median(values[: max(1, few // 2)]))
    level = smooth(values, window)
    blows_up = _leaves_at_once(values, few, first, noise, log_noise)
    if blows_up:
        # What comes after the first value is the explosion, not what it began from.
        start = min(first, start)
        level[0] = first
    smoothed = Curve(whole.key, whole.step, level, whole.epoch, whole.unit)
    width = max(1, min(few, window))
    best = int(np.argmin(smoothed.value))
    third = max(1, count // _DRIFT_PART)
    return Progress(
        key=curve.key,
        points=len(merged),
        first=first,
        start=start,
        best=float(smoothed.value[best]),
        best_step=int(whole.step[best]),
        lowest=curve.find_best()[0],
        final=float(np.median(values[-few:])),
        noise=noise,
        error=float(noise * np.sqrt(2.0 / width)),
        drift=float(np.median(values[:third]) - np.median(values[-third:])),
        # A median's variance is pi/2 times the mean's.
        drift_error=float(noise * np.sqrt(np.pi / third)),
        log_noise=log_noise,
        blows_up=blows_up,
        values=whole,
        smoothed=smoothed,
    )


def _leaves_at_once(
    values: NDArray[np.float64], few: int, first: float, noise: float, log_noise: float | None
) -> bool:
    """Whether the first points of a curve leave the first one for far above."""
    head = values[:few]
    if len(head) < 2:
        return False
    level = float(np.max(smooth(head, _BURST_POINTS)[1:]))
    if first > 0 and log_noise is not None:
        if float(np.max(head)) > _FAR * first:
            return True
        if level < _LEFT_AT_ONCE * first:
            return False
        return float(np.log(level / first)) > _SIGNIFICANT * log_noise
    # A first value about zero is no measure: beside it counts what the loss is later.
    unit = max(abs(first), float(np.median(np.abs(values))))
    far = min(_LEFT_BY * unit, _FAR * abs(first)) if first else _LEFT_BY * unit
    return level - first > max(_SIGNIFICANT * noise, far)


def negate(curve: Curve) -> Curve:
    """A curve that should rise as one that should fall."""
    return Curve(curve.key, curve.step, -curve.value, curve.epoch, curve.unit)


def improves_clearly(accuracy: Curve) -> bool:
    """Whether an accuracy ends higher than it began, by more than it can resolve.

    Of n samples it is known to a deviation of sqrt(p (1 - p) / n); n follows from
    the smallest step that it makes. A rise by less is one of chance, and so is one
    by less than three hundredths, unless it has doubled.
    """
    progress = measure_progress(negate(accuracy))
    if progress is None or not progress.has_fallen:
        return False
    values = progress.values.value
    unit = 100.0 if float(-values.min()) > PERCENT_FROM else 1.0
    begin, end, gain = -progress.start / unit, -progress.final / unit, progress.gain / unit
    third = max(1, len(values) // _DRIFT_PART)
    step = min(find_resolution(values) / unit, 1.0)
    share = min(max(end, step), 1.0 - step)
    deviation = np.sqrt(max(share * (1.0 - share), 0.0) * step / third)
    if gain <= max(step, _CLEAR_DEVIATIONS * float(deviation)):
        return False
    return gain > _ACCURACY_STEP or end > 2.0 * begin + _LEAST_DOUBLED


def _rises(curve: Curve) -> bool:
    progress = measure_progress(negate(curve))
    return progress is not None and progress.has_fallen


def _find_end(loss: Curve | None) -> int | None:
    if loss is None or not len(loss):
        return None
    finite = np.isfinite(loss.value)
    if finite[-1]:
        return None
    last = np.flatnonzero(finite)
    return int(loss.step[last[-1] + 1 if len(last) else 0])
