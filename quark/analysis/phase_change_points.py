"""Change points where a run goes wrong: divergence, and the onset of overfitting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.config import PhaseAnalyzerThresholds
from quark.analysis.curves import Curve, fit_slope, median_filter, smooth
from quark.analysis.phase_segmentation import Track, trim_outliers

# Finds where a run goes wrong for good: divergence, and the onset of overfitting.
#
# Both are rises above a curve's own best level that last until the end. They
# differ by the training loss: a run diverges where it rises itself, and
# overfits where only the validation loss does.

Floats = NDArray[np.float64]

_SIGNIFICANT = 5.0
_NON_FINITE_POINTS = 3
_HIGH_WINDOW = 15
_HIGH_PERCENT = 75


@dataclass(frozen=True)
class Rise:
    """A lasting rise of a curve above its best level.

    Attributes:
        key: The curve.
        step: Where it begins; the best level lies before.
        best: The best value that was logged.
        final: Level at the end, in the curve's own unit.
        best_step: Where the best value is.
        size: The rise as a share of the fall before it, on the track's scale.
        strength: The rise over the noise of the levels.
        threshold: What `size` is held against.
        train_change: Change of the training loss since the best level, as a
            share of it; None where there is none.
    """

    key: str
    step: int
    best: float
    final: float
    best_step: int
    size: float
    strength: float
    threshold: float
    train_change: float | None = None


def find_non_finite(curve: Curve) -> int | None:
    """First step of the NaN and infinite values that a curve ends with, or None.

    One or two of them say nothing, unless there is hardly anything before them.
    """
    bad = ~np.isfinite(curve.value)
    if not bad.any() or not bad[-1]:
        return None
    good = np.flatnonzero(~bad)
    first = int(good[-1]) + 1 if len(good) else 0
    count = len(curve) - first
    if count < _NON_FINITE_POINTS and not 0 < len(good) <= 2 * count:
        return None
    return int(curve.step[first])


def find_divergence(
    track: Track, outcome: Track | None, thresholds: PhaseAnalyzerThresholds
) -> Rise | None:
    """A large rise of the training loss that does not recover.

    Args:
        track: The training loss.
        outcome: A validation curve; while that is at its best, a training loss
            that rises has become a harder one.
        thresholds: See PhaseAnalyzerThresholds.
    """
    count = len(track)
    if count < 4:
        return None
    calm = median_filter(trim_outliers(track), 5 if count >= 15 else 3)
    found = _find_rise(track, calm, outcome, thresholds)
    if found is None and count > _HIGH_WINDOW:
        # Batches of few examples, some of which are learned, hide the rise of all others.
        windows = np.lib.stride_tricks.sliding_window_view(calm, _HIGH_WINDOW)
        high = np.percentile(windows, _HIGH_PERCENT, axis=1)
        half = _HIGH_WINDOW // 2
        found = _find_rise(track, np.pad(high, half, mode="edge"), outcome, thresholds)
    return found


def _find_rise(
    track: Track, calm: Floats, outcome: Track | None, thresholds: PhaseAnalyzerThresholds
) -> Rise | None:
    """The lasting rise at the end of a curve that was smoothed, or None."""
    count = len(track)
    lowest = np.minimum.accumulate(calm)
    above = calm - lowest
    noise = track.noise
    fall = float(calm[0] - lowest[-1])
    # Where a curve breaks down, the noise about is no measure of what is near.
    near = np.maximum(3.0 * np.minimum(noise, 3.0 * float(np.median(noise))), 0.05 * fall)
    last = int(np.flatnonzero(above <= near)[-1])
    begin, length = last + 1, count - last - 1
    if length < max(3, 0.04 * count) or int(track.points[begin:].sum()) < 4:
        return None
    third = max(2, length // 3)
    tail = float(np.median(calm[-third:]))
    best_at = int(np.argmin(calm[: begin + 1]))
    best = float(calm[best_at])
    rise = tail - best
    error = float(np.median(noise[begin:])) * np.sqrt(1.0 / third + 1.0 / 3.0)
    strength = float(rise / error)
    level = float(np.median(track.level[max(0, best_at - 1) : best_at + 2]))
    final = float(np.median(track.level[-third:]))
    start = float(np.median(track.level[: max(1, min(5, best_at + 1))]))
    size = _share_of_fall(rise, float(calm[0]) - best, error)
    ratio = thresholds.divergence_from_best_ratio
    limit = thresholds.limit("divergence_min_relative_regression")
    relative = (final - level) / abs(level) if level else np.inf
    if limit is not None and relative < limit:
        return None
    if strength < _SIGNIFICANT or size < ratio:
        return None
    if not track.is_signed and rise < 0.7 * thresholds.divergence_min_relative_regression:
        return None
    # On a loss that had fallen far a ratio is quickly large though hardly anything was lost.
    if start > level and final - level < 0.1 * (start - level) and size < 0.4:
        return None
    wander = float(above[: last + 1].max(initial=0.0))
    if rise < (2.0 if track.is_signed else 1.2) * wander:
        return None
    if _is_recovering(track, calm, begin, tail - best) or _is_served(outcome, track, begin):
        return None
    logged, logged_step = track.find_best()
    return Rise(
        track.key, int(track.step[begin]), logged, _show(track, final), logged_step, size,
        strength, ratio,
    )  # fmt: skip


def find_overfitting(
    validation: Track, train: Track | None, thresholds: PhaseAnalyzerThresholds
) -> Rise | None:
    """A lasting rise of the validation loss above its minimum while the training loss is low.

    Args:
        validation: The validation loss, or 1 less the accuracy.
        train: The training loss likewise; without it a rise counts by itself.
        thresholds: See PhaseAnalyzerThresholds.
    """
    count = len(validation)
    if count < 5:
        return None
    y = validation.height
    calm = median_filter(y, 3)
    best_at = int(np.argmin(calm))
    best = float(calm[best_at])
    noise = float(np.median(validation.noise))
    above = calm - best
    last = best_at + int(np.flatnonzero(above[best_at:] <= 2.0 * noise)[-1])
    valley = max(0, best_at - 2)
    turn = valley + int(np.argmin(smooth(y, 5)[valley : last + 1]))
    after = count - last - 1
    if after < (3 if count < 12 else 4):
        return None
    third = max(2, after // 3)
    tail = float(np.median(calm[-third:]))
    rise = tail - best
    strength = rise / float(noise * np.sqrt(1.0 / third + 1.0 / 3.0))
    around = slice(max(0, best_at - 1), best_at + 2)
    level = float(np.median(validation.level[around]))
    final = float(np.median(validation.level[-third:]))
    start = _first_level(validation, train, best_at)
    regression = (final - level) / max(abs(level), 1e-300)
    won = (final - level) / max(start - level, 1e-300)
    if validation.is_accuracy:
        regression = max(won, 0.0)
    scale = thresholds.overfitting_min_validation_regression
    limit = thresholds.limit("overfitting_min_validation_regression")
    if limit is not None and regression < limit:
        return None
    if strength < _SIGNIFICANT or regression < 6.0 * scale or won < 4.0 * scale:
        return None
    if after < 8 and strength < 2.0 * _SIGNIFICANT and regression < 10.0 * scale:
        return None
    change = None
    if train is not None:
        change = _train_change(train, validation, best_at, won, thresholds)
        if change is None:
            return None
    if not _fits_gap(validation, train, final, thresholds):
        return None
    lowest, lowest_step = validation.find_best()
    return Rise(
        validation.key, int(validation.step[turn]), lowest, _show(validation, final),
        lowest_step, regression, strength, scale, change,
    )  # fmt: skip


def _first_level(validation: Track, train: Track | None, best_at: int) -> float:
    """The validation curve before learning, which the training curve may show better."""
    start = float(np.median(validation.level[: min(3, best_at + 1)]))
    if train is None or train.is_accuracy != validation.is_accuracy:
        return start
    return max(start, float(np.median(train.level[:3])))


def _share_of_fall(rise: float, fall: float, error: float) -> float:
    """The rise over the fall before it; where hardly anything had fallen, in multiples of e.

    A loss that never learned wanders about, so that it must rise to twice its level.
    """
    has_learned = fall > max(_SIGNIFICANT * error, 0.2)
    return rise / (max(fall, 1.0) if has_learned else 2.8)


def _is_recovering(track: Track, calm: Floats, begin: int, rise: float) -> bool:
    """Whether the curve is on its way back to the best level."""
    peak = begin + int(np.argmax(calm[begin:]))
    count = len(calm)
    back = count - peak - 1
    if back < 4:
        return False
    half = slice(max(peak + 1, count - max(4, back // 2)), count)
    slope = fit_slope(track.middle[half], calm[half])
    lost = float(np.median(track.noise[half]))
    span = float(track.middle[-1] - track.middle[half][0])
    if -slope * span < 2.0 * lost:
        return False
    ahead = float(track.middle[-1] - track.middle[begin])
    return rise + slope * ahead <= 0.3 * rise


def _is_served(outcome: Track | None, track: Track, begin: int) -> bool:
    """Whether a validation curve is as good as ever since then."""
    if outcome is None:
        return False
    later = outcome.middle >= track.step[begin]
    if later.sum() < 2 or (~later).sum() < 2:
        return False
    calm = median_filter(outcome.height, 3)
    before = calm[~later]
    fall = max(float(before[0] - before.min()), 0.0)
    error = 2.0 * float(np.median(outcome.noise))
    last = float(np.median(calm[later][-max(2, int(later.sum()) // 3) :]))
    return last <= float(before.min()) + max(error, 0.05 * fall)


def _train_change(
    train: Track,
    validation: Track,
    best_at: int,
    won: float,
    thresholds: PhaseAnalyzerThresholds,
) -> float | None:
    """Change of the training loss since the best validation; None where that is no overfitting."""
    step = float(validation.middle[best_at])
    at = int(np.searchsorted(train.middle, step, side="right"))
    width = max(1, len(train) // 20)
    around = train.level[max(0, at - width) : max(at + width, 1)]
    tail = train.level[-2 * width :]
    if train.middle[-1] <= step or not len(around):
        return None
    level, final = float(np.median(around)), float(np.median(tail))
    change = (final - level) / max(abs(level), 1e-300)
    limit = thresholds.limit("overfitting_min_train_relative_change")
    if limit is not None and -change < limit:
        return None
    start = float(np.median(train.level[: max(1, min(5, at))]))
    lost = (final - level) / max(start - level, 1e-300)
    # A training loss that gives back as much as the validation loss does is no memory.
    if change > 0 and lost > 0.3 * won:
        return None
    return change


def _fits_gap(
    validation: Track, train: Track | None, final: float, thresholds: PhaseAnalyzerThresholds
) -> bool:
    limit = thresholds.limit("overfitting_min_gap")
    if limit is None:
        return True
    if train is None or train.is_accuracy != validation.is_accuracy:
        return False
    return final - float(np.median(train.level[-max(2, len(train) // 20) :])) >= limit


def _show(track: Track, level: float) -> float:
    return 1.0 - level if track.is_accuracy else level
