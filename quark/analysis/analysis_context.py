"""One run under analysis: its data, the configuration, and facts that several rules need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.config import AnalyzerEngineConfig, AnalyzerThresholds
from quark.analysis.curves import (
    SMALLEST,
    Curve,
    LayerHistory,
    estimate_noise,
    find_resolution,
    smooth,
    spread,
)
from quark.analysis.metric_roles import (
    CurvePart,
    find_named,
    find_part,
    is_held_out,
    is_loss,
    is_player_loss,
    is_reward,
    is_score,
)
from quark.analysis.observations import (
    BATCH_LOSS,
    Arithmetic,
    Figure,
    FigureKind,
    Floats,
    Integers,
    Source,
    at_step,
    measure,
    name_source,
    read_source,
)
from quark.analysis.run_data import RunData
from quark_core.config.objective import Objective, find_mode, infer_mode, read_objective

_PERCENT_FROM = 1.5  # an accuracy beyond it is in percent

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
    def loss(self) -> Progress | None:
        """Progress of the training loss, or else of the validation's."""
        return self.train or self.validation

    @property
    def is_accurate(self) -> bool:
        """Whether its accuracies are known to be so high that there is little left to learn."""
        return (self.accuracy or 0.0) >= _GOOD_ACCURACY

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
        if self.is_accurate:
            return False
        progress = self.loss
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
        progress = self.loss
        if progress is None or self.is_accurate:
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
    shares = [level / find_unit(level) for level in levels]
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


def find_unit(highest: float) -> float:
    """The value of a perfect accuracy on the scale of this value: 100 in percent, else 1."""
    return 100.0 if highest > _PERCENT_FROM else 1.0


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
    unit = find_unit(float(-values.min()))
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


_DEAD = 0.97  # share of a layer's units
_LAST_PROBES = 3
_LINEAR = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")

_FIRST_POINTS = 20  # of an accuracy: what is known before much is learned
_LEAST_KNOWN, _ABOVE_GUESSES = 0.2, 0.02  # a share of right answers, and how far beyond guesses
_MOST_LOSS = 50.0  # exp(-loss) is nothing beyond it
_ACCURACY_LEARNED = 0.2  # by which a validation accuracy has risen, with a loss that stands still
_LEARNED = 0.02  # share by which a validation loss has fallen
_TASK_LEARNED = 0.06  # share by which the loss of another task has
_CREEPS = 1e-2  # of a validation loss: a little is still a fall
_AT_GUESSES = 0.03  # share by which a loss may differ from that of guesses
_BEGINS = 1.5  # times the loss of guesses: with so much, at most, begins who knows nothing
_ABOVE_ALL = 0.15  # of the way from a guess's share of right answers to all: more is known
_CLASSES = ("num_classes", "n_classes", "classes", "num_labels", "n_labels", "vocab_size")
_CONSISTENT = 0.4  # times exp(-loss): guesses have an accuracy of its size
_SIZE = re.compile(r"(^|[/_.-])(reg|regulari[sz]ation|penalty|decay|l1|l2|weight|norm)([/_.-]|$)")


@dataclass(frozen=True)
class NamedMetric:
    """The metric that the user named to judge the run by.

    Attributes:
        metric: Its name, as the user wrote it.
        mode: Whether it is better when lower or higher.
        curve: Its points, or None where the run has none.
    """

    metric: str
    mode: Literal["min", "max"]
    curve: Curve | None

    @property
    def is_loss(self) -> bool:
        """Whether rules may look at it as at a loss."""
        return self.mode == "min" and self.curve is not None

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward, which may rise whatever the losses do; no accuracy is."""
        if self.mode != "max" or self.curve is None:
            return False
        return is_reward(self.metric) or infer_mode(self.metric) is None

    def replaces(self, loss: Curve | None, *, held_out: bool) -> bool:
        """Whether rules look at it in place of the loss that was found by its name, if any.

        What is no loss by its name, such as an error rate, only stands in where there is none:
        naming it takes nothing away of what the losses say.
        """
        is_meant = self.is_loss and is_held_out(self.metric) is held_out
        return is_meant and (loss is None or is_loss(self.metric))


class Case:
    """A run with everything that rules ask for.

    Attributes:
        run: Its data.
        config: Settings.
    """

    def __init__(self, run: RunData, config: AnalyzerEngineConfig) -> None:
        self.run = run
        self.config = config

    @property
    def thresholds(self) -> AnalyzerThresholds:
        """The thresholds."""
        return self.config.thresholds

    def read(self, source: Source) -> tuple[Integers, Floats]:
        """Steps and values of a source, ascending; empty where there is none."""
        return read_source(self.run, source)

    def find_source(self, key: str) -> Source:
        """Name the source of a curve of this key: a metric, the loss of batches, or telemetry."""
        return Source(*name_source(self.run, key))

    def measure(
        self,
        kind: FigureKind,
        name: str,
        how: str | Arithmetic,
        field: str = "value",
        **span: int | None,
    ) -> Figure:
        """A figure of what the run has recorded; see `quark.analysis.observations.measure`."""
        return measure(self.run, kind, name, how, field, **span)

    def measure_source(self, source: Source, how: str | Arithmetic, **span: int | None) -> Figure:
        """As `measure`, of a source."""
        return measure(
            self.run, source.kind, source.name, how, source.field, rank=source.rank, **span
        )

    def measure_curve(self, key: str, how: str | Arithmetic, **span: int | None) -> Figure:
        """As `measure`, of a curve by its key; see `find_source`."""
        return self.measure_source(self.find_source(key), how, **span)

    def measure_best(self, curve: Curve, *, rises: bool = False) -> tuple[Figure, Figure]:
        """The best value of a curve that was logged, and its step; see `Curve.find_best`."""
        best = self.measure_curve(curve.key, "highest" if rises else "lowest")
        return best, at_step(curve.find_best(rises=rises)[1])

    def measure_before(self, source: Source, step: int, points: int = _CALM_POINTS) -> Figure:
        """The median of the last finite values before a step; the first one where there is none."""
        steps, values = self.read(source)
        before = steps[np.isfinite(values) & (steps < step)][-points:]
        if not len(before):
            return self.measure_source(source, "first value")
        return self.measure_source(source, "median", first=int(before[0]), last=int(before[-1]))

    def count_class(self, label: str) -> Figure:
        """How many samples of a class all batches have together."""
        return self.measure("batch", label, "total", "class_counts").whole

    @cached_property
    def as_documented(self) -> Case:
        """The same run, with every documented threshold read literally."""
        return Case(self.run, replace(self.config, mode="absolute"))

    @cached_property
    def objective(self) -> NamedMetric | None:
        """What the settings name, else what the run was started with, or None."""
        named = read_objective(self.run.config)
        if self.config.objective is not None:
            named = Objective(self.config.objective, self.config.objective_mode)
        if named is None:
            return None
        found = find_named(self.run.metrics, named.metric)
        curve = None if found is None else self.run.place_on_steps(found[1])
        return NamedMetric(named.metric, find_mode(named.metric, named) or "min", curve)

    @cached_property
    def scores(self) -> tuple[Curve, ...]:
        """Rewards and the like, which are better when higher, but for accuracies."""
        known = (self.train_accuracy, self.validation_accuracy)
        accuracies = {curve.key for curve in known if curve is not None}
        named = self.objective
        meant = None if named is None or not named.is_reward or named.curve is None else named.curve
        return tuple(
            self.run.place_on_steps(curve)
            for key, curve in self.run.metrics.items()
            if len(curve)
            and key not in accuracies
            and (is_score(key) or (meant is not None and key == meant.key))
        )

    @cached_property
    def train_loss(self) -> Curve | None:
        """Training loss with all its points; of batch diagnostics where no metric has it."""
        found = find_part(self.run.metrics, "train loss", self.config.train_loss_metric_keys)
        named = self.objective
        if named is not None and named.replaces(found, held_out=False):
            found = named.curve
        if found is not None:
            return self.run.place_on_steps(found)
        batches = self.run.batches
        if batches.count == 0:
            return None
        step, loss = batches["step"], batches["loss"]
        kept = step >= 0
        order = np.argsort(step[kept], kind="stable")
        return Curve(
            BATCH_LOSS, step[kept][order], loss[kept][order], batches["epoch"][kept][order]
        )

    @cached_property
    def validation_loss(self) -> Curve | None:
        """Validation loss with all its points."""
        keys = self.config.val_loss_metric_keys
        found = find_part(self.run.metrics, "validation loss", keys)
        named = self.objective
        if named is not None and named.replaces(found, held_out=True):
            found = named.curve
        return None if found is None else self.run.place_on_steps(found)

    @cached_property
    def train_accuracy(self) -> Curve | None:
        """Training accuracy with all its points."""
        return self._find_part("train accuracy", self.config.train_accuracy_metric_keys)

    @cached_property
    def validation_accuracy(self) -> Curve | None:
        """Validation accuracy with all its points."""
        return self._find_part("validation accuracy", self.config.val_accuracy_metric_keys)

    def _find_part(self, part: CurvePart, keys: tuple[str, ...]) -> Curve | None:
        found = find_part(self.run.metrics, part, keys)
        return None if found is None else self.run.place_on_steps(found)

    @cached_property
    def ends_with_dead_layer(self) -> bool:
        """Whether (nearly) all units of a layer give nothing at its last three probes.

        A layer that was set to zero and has never left it is none: nothing of it has died.
        """
        return any(
            float(np.nan_to_num(item["dead_unit_ratio"][-_LAST_PROBES:]).mean()) >= _DEAD
            and not is_zero_throughout(item)
            for item in self.run.activations.values()
            if len(item)
        )

    @cached_property
    def chance_loss(self) -> float | None:
        """The cross-entropy of guesses, in nats; None where the run does not say its classes.

        The entropy of the labels in the batch diagnostics, or the logarithm of
        the number of classes in the configuration.
        """
        total: Counter[str] = Counter()
        batches = self.run.batches
        for counts in batches["class_counts"].tolist() if batches.count else ():
            for name, count in (counts or {}).items():
                if isinstance(count, (int, float)):
                    total[name] += int(count)
        seen = np.array([count for count in total.values() if count > 0], dtype=np.float64)
        if len(seen) > 1:
            shares = seen / seen.sum()
            return float(-(shares * np.log(shares)).sum())
        for key, value in self.run.config.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if key.lower() in _CLASSES and is_number and value > 1:
                return float(np.log(value))
        return None

    @cached_property
    def output_layer(self) -> tuple[LayerHistory, int] | None:
        """The last layer with a bias that is called, and how many outputs it has, or None.

        They are the elements of its bias: the classes, where it is a classifier's.
        """
        counts = {
            item.module_name: int(item.size)
            for item in self.run.parameters.values()
            if item.role == "bias"
        }
        called = [name for name in self.run.activations if counts.get(name)]
        return (self.run.activations[called[-1]], counts[called[-1]]) if called else None

    @cached_property
    def output_count(self) -> int | None:
        """How many outputs the last layer has; None of one, or where it is not known."""
        if self.output_layer is not None:
            return self.output_layer[1] if self.output_layer[1] > 1 else None
        biases = [item for item in self.run.parameters.values() if item.role == "bias"]
        if not biases or self.run.activations:
            return None
        count = int(biases[-1].size)
        return count if count > 1 else None

    @cached_property
    def guess_loss(self) -> float | None:
        """`chance_loss`, or that of guesses among as many classes as there are outputs."""
        if self.chance_loss is not None or self.output_count is None:
            return self.chance_loss
        return float(np.log(self.output_count))

    @cached_property
    def outcome(self) -> Outcome:
        """How the training went, by its losses and accuracies, and what else the user named."""
        outcome = judge_outcome(
            self.train_loss,
            self.validation_loss,
            (self.train_accuracy, self.validation_accuracy),
            self.run.metrics,
        )
        named = self.objective
        if named is None or named.curve is None or named.is_loss:
            return outcome
        progress = measure_progress(negate(named.curve))
        if progress is None or not progress.has_fallen:
            return outcome
        return replace(
            outcome,
            other_progress=True,
            rewarded=outcome.rewarded or named.is_reward,
            has_metrics=True,
        )


def is_zero_throughout(item: LayerHistory) -> bool:
    """Whether a layer of weights gives nothing from its first probe to its last one.

    It was set to zero on purpose; that it has not left it is the matter of its updates.
    """
    return item.kind in _LINEAR and bool((np.nan_to_num(item["dead_unit_ratio"]) >= _DEAD).all())


def is_above_chance(case: Case, start: float) -> bool:
    """Whether the accuracy is twice that of guesses with this cross-entropy, exp(-loss)."""
    curve = case.train_accuracy or case.validation_accuracy
    if curve is None or not len(curve.finite):
        return False
    level = float(np.median(curve.finite.value[:_FIRST_POINTS]))
    share = level / find_unit(level)
    guesses = float(np.exp(-min(start, _MOST_LOSS)))
    return share > 2.0 * guesses + _ABOVE_GUESSES and share > _LEAST_KNOWN


def is_at_chance(case: Case, final: float) -> bool:
    """Whether the accuracy at the end is that of guesses with this cross-entropy, exp(-loss)."""
    curve = case.validation_accuracy or case.train_accuracy
    if curve is None or not len(curve.finite) or final <= 0:
        return False
    level = float(np.median(curve.finite.value[-_FIRST_POINTS:]))
    share = level / find_unit(level)
    guesses = float(np.exp(-min(final, _MOST_LOSS)))
    return _CONSISTENT * guesses <= share <= 2.0 * guesses + _ABOVE_GUESSES


def find_guesses(case: Case) -> float | None:
    """The loss of guesses, where the losses end at it and nothing is known better; else None.

    It is that of the labels, or of as many classes as the last layer has outputs: a loss that
    happens to end within three hundredths of that is a rare one. The training's may lie a little
    below it, for what is learned by heart.
    """
    chance = case.guess_loss
    known = [item for item in (case.outcome.train, case.outcome.validation) if item is not None]
    if chance is None or chance <= 0 or not known or case.outcome.rewarded:
        return None
    if case.chance_loss is None and known[0].start > _BEGINS * chance:
        return None  # no classifier begins so far above: its loss is another one
    levels = [item.final for item in known]
    if min(levels) < (1.0 - _AT_GUESSES) * chance or min(levels) > (1.0 + _AT_GUESSES) * chance:
        return None
    share = case.outcome.accuracy
    guess = float(np.exp(-chance))
    if share is not None and share > guess + _ABOVE_ALL * (1.0 - guess):
        return None
    return chance


def improves_otherwise(case: Case) -> bool:
    """Whether something that is no loss gets better: the training accuracy, or a reward."""
    if case.train_accuracy is not None:
        return improves_clearly(case.train_accuracy)
    if case.outcome.rewarded or _has_other_loss_that_falls(case):
        return True
    accuracy = case.validation_accuracy
    if accuracy is None:
        # With little left to win the training's noise hides what the validation shows.
        validation = case.outcome.validation
        if validation is None:
            return False
        if validation.has_fallen and validation.relative_fall > _LEARNED:
            return True
        return validation.drift > max(2.0 * validation.drift_error, _CREEPS * validation.start)
    progress = measure_progress(negate(accuracy))
    return progress is not None and progress.has_fallen and progress.fall > _ACCURACY_LEARNED


def _has_other_loss_that_falls(case: Case) -> bool:
    """Whether one of several losses falls: of two players, or of several tasks."""
    known = [curve.key for curve in (case.train_loss, case.validation_loss) if curve is not None]
    for key, curve in case.run.metrics.items():
        if "loss" not in key.lower() or key in known or _SIZE.search(key.lower()):
            continue
        # Two players that are equally good have losses that stand still.
        if is_player_loss(key):
            return True
        progress = measure_progress(curve)
        if progress is not None and progress.has_fallen and progress.relative_fall > _TASK_LEARNED:
            return True
    return False
