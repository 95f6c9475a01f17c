"""How a training went, by its losses, accuracies and rewards: what rules are gated by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quark_core.analysis.curves import Curve, estimate_noise, smooth, spread

__all__ = ["Outcome", "Progress", "judge_outcome", "measure_progress", "negate"]

_SIGNIFICANT = 4.0
_SMALL_FALL = 0.1
_NOTHING = 5e-3
_ACCURACY_STEP = 0.03
_GOOD_ACCURACY = 0.9
_MOST_POINTS = 4000
_REWARD = re.compile(r"(^|[/_.-])(reward|return|score|elbo|bleu|auc|map|iou|psnr)s?([/_.-]|$)")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A curve from its start to its end, in its own unit, and in its own noise.

    Attributes:
        key: The curve.
        points: Its finite points.
        first: Its first value.
        start: Median of its first points: the level before learning.
        best: Lowest level of the smoothed curve.
        best_step: Where that is.
        final: Median of its last points.
        noise: Deviation of one point from the trend.
        error: Standard error of the levels.
        drift: Median of the first third less that of the last.
        drift_error: Standard error of `drift`.
        smoothed: The smoothed curve.
    """

    key: str
    points: int
    first: float
    start: float
    best: float
    best_step: int
    final: float
    noise: float
    error: float
    drift: float
    drift_error: float
    smoothed: Curve

    @property
    def fall(self) -> float:
        """From the start to the best level."""
        return self.start - self.best

    @property
    def has_fallen(self) -> bool:
        """Whether it fell by more than chance: to its best level, or from third to third."""
        if self.fall > _SIGNIFICANT * self.error and self.fall > 1e-9 * abs(self.start):
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
        return lost / max(self.fall, _SIGNIFICANT * self.error, 1e-300)

    @property
    def is_worse_than_untrained(self) -> bool:
        """Whether a positive loss ends at twice its first value."""
        return self.first > 0 and self.best > 0 and self.final > 2.0 * self.first + 4.0 * self.error

    @property
    def relapse(self) -> float:
        """`regression` in logarithms, for losses that fall over orders of magnitude.

        0 unless the loss is positive and ends at three times its best level
        and a twentieth of its start, at least.
        """
        if not (self.best > 0 and self.start > self.best and self.regression > 0):
            return 0.0
        if self.final < 3.0 * self.best or self.final < 0.05 * self.start:
            return 0.0
        return float(np.log(self.final / self.best) / np.log(self.start / self.best))

    def level_before(self, step: int, points: int = 10) -> float:
        """Median of the last smoothed values before a step; the start where there is none."""
        values = self.smoothed.value[self.smoothed.step < step][-points:]
        return float(np.median(values)) if len(values) else self.start

    def highest_after(self, step: int) -> float:
        """Highest smoothed value from a step on; the final level where there is none."""
        values = self.smoothed.value[self.smoothed.step >= step]
        return float(values.max()) if len(values) else self.final


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
        if progress.regression >= 0.5 or progress.is_worse_than_untrained:
            return True
        if progress.has_fallen and progress.relative_fall >= _SMALL_FALL:
            return False
        return not (self.other_progress and progress.relative_fall >= 0.02)

    @property
    def stalls(self) -> bool:
        """Whether a positive loss falls by less than a twentieth after the run's first third."""
        progress = self.train or self.validation
        if progress is None or (self.accuracy or 0.0) >= _GOOD_ACCURACY:
            return False
        values = progress.smoothed.value[len(progress.smoothed) // 3 :]
        if len(values) < 6 or values[0] <= 0:
            return False
        few = max(1, len(values) // 5)
        return float(np.median(values[-few:])) > 0.95 * float(np.median(values[:few]))

    def worsens_after(self, step: int, share: float = 0.25) -> bool:
        """Whether the loss rises after a step by a share of what had been won until then."""
        if self.non_finite_step is not None and self.non_finite_step >= step:
            return True
        for item in (self.train, self.validation):
            if item is None:
                continue
            before = item.level_before(step)
            won = max(item.start - before, _SIGNIFICANT * item.error, 0.0)
            if item.highest_after(step) - before > max(
                share * won, _SIGNIFICANT * item.error, 0.02 * abs(before)
            ):
                return True
        return False


def judge_outcome(
    train: Curve | None,
    validation: Curve | None,
    accuracies: tuple[Curve | None, ...],
    metrics: Mapping[str, Curve],
) -> Outcome:
    """Judge a training by its curves."""
    known = [curve for curve in accuracies if curve is not None]
    rewards = [
        curve
        for key, curve in metrics.items()
        if _REWARD.search(key.lower()) and not key.startswith("system/")
    ]
    rising = known + rewards
    rewarded = any(_rises(curve) for curve in rewards)
    levels = [
        float(np.median(curve.merged.value[-5:]))
        for curve in accuracies
        if curve is not None and len(curve.merged)
    ]
    shares = [level / 100.0 if level > 1.5 else level for level in levels]
    losses = [curve for curve in (train, validation) if curve is not None]
    return Outcome(
        train=None if train is None else measure_progress(train),
        validation=None if validation is None else measure_progress(validation),
        non_finite_step=_find_end(train),
        other_progress=rewarded or any(_rises(curve, _ACCURACY_STEP) for curve in known),
        rewarded=rewarded,
        accuracy=min(shares, default=None),
        has_metrics=any(len(curve) >= 3 for curve in losses + rising),
    )


def measure_progress(curve: Curve) -> Progress | None:
    """Progress of a curve that should fall; None with fewer than three finite points."""
    merged = curve.merged
    if len(merged) < 3:
        return None
    whole = merged.thin(_MOST_POINTS)
    values = whole.value
    count = len(values)
    few = max(1, min(count // 10, 20))
    window = max(1, min(count // 8, 101) | 1)
    smoothed = Curve(whole.key, whole.step, smooth(values, window), whole.epoch, whole.unit)
    noise = max(estimate_noise(values), 0.0)
    if noise == 0.0 and count >= 8:
        noise = spread(np.diff(values)) / np.sqrt(2.0)
    width = max(1, min(few, window))
    best = int(np.argmin(smoothed.value))
    third = max(1, count // 3)
    return Progress(
        key=curve.key,
        points=len(merged),
        first=float(merged.value[0]),
        start=float(np.median(values[: max(1, few // 2)])),
        best=float(smoothed.value[best]),
        best_step=int(whole.step[best]),
        final=float(np.median(values[-few:])),
        noise=noise,
        error=float(noise * np.sqrt(2.0 / width)),
        drift=float(np.median(values[:third]) - np.median(values[-third:])),
        # A median's variance is pi/2 times the mean's.
        drift_error=float(noise * np.sqrt(np.pi / third)),
        smoothed=smoothed,
    )


def negate(curve: Curve) -> Curve:
    """A curve that should rise as one that should fall."""
    return Curve(curve.key, curve.step, -curve.value, curve.epoch, curve.unit)


def _rises(curve: Curve, least: float = 0.0) -> bool:
    progress = measure_progress(negate(curve))
    if progress is None or not progress.has_fallen:
        return False
    unit = 100.0 if float(curve.finite.value.max()) > 1.5 else 1.0
    return progress.fall > least * unit


def _find_end(loss: Curve | None) -> int | None:
    if loss is None or not len(loss):
        return None
    finite = np.isfinite(loss.value)
    if finite[-1]:
        return None
    last = np.flatnonzero(finite)
    return int(loss.step[last[-1] + 1 if len(last) else 0])
