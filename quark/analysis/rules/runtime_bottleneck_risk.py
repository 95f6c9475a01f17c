"""Time that steps lose: waiting for data, stalls, jitter, and slowing down."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import Curve, spread
from quark.analysis.metric_roles import find_curve, is_reward
from quark.analysis.observations import (
    Figure,
    Text,
    between_steps,
    count_names,
    list_stretches,
    observe,
    say,
)
from quark.analysis.observations import limit as constant
from quark.analysis.rule import SEVERITIES, BaseRule, Finding, Limit, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity

Floats = NDArray[np.float64]

_WARM_UP_STEPS = 3  # whose time says nothing: they compile, and fill caches
_LIMITS = tuple(
    Limit(
        "runtime",
        suffix,
        title="Steps beyond a time limit",
        check="Profile a step: loading, computing, synchronising.",
        words=words,
    )
    for suffix, words in (
        ("step_time_ms", "mean step time in ms"),
        ("jitter_ratio", "deviation of step times over their mean"),
        ("data_fraction", "share of a step that waits for data"),
    )
)
_FIELDS = ("step_time_ms", "data_time_ms", "compute_time_ms")  # of telemetry
_SUMMED = "step time"  # key of step times that only their two parts tell
_LEAST_STEPS = 12
_SMALLEST_MS = 8.0  # below it the clock and the machine speak, not the training
_LEAST_MS = 1e-6  # what is left of a step at least when a probe's usual time is taken off
_RESOLUTION_MS = 1e-9  # in place of 0 under a fraction

_WINDOWS, _LEAST_WINDOW = 10, 5  # stretches of the run, and the steps of the shortest
_LEAST_WINDOWED_STEPS = 30  # so that there are some windows
_EARLY_PART, _LEAST_EARLY = 5, 2  # the first fifth of the windows

_SMALLEST_WAIT_MS = 1.0
_WAITS_MOSTLY = 0.5  # share of a slow step that it waits for data: then it is no evaluation
_LEAST_WAITS = 2  # long waits in a window: they have to come back to be a habit
_LEAST_WAIT_MS = 1e-3  # in place of a usual wait of nothing
_LASTING_WINDOWS = 2

_DRIFT = 1.5  # times the time of the first windows
_ABOVE_EARLY = 1.2  # times the slowest of the first windows
_END_PART, _LEAST_END = 3, 2  # it has to be slow in the last third of the windows
_END_SHARE = 0.75  # in so many of them
_GAP_WINDOWS = 2  # that the slow stretch may have been interrupted for
_ERROR_DRIFT, _CRITICAL_DRIFT = 2.0, 4.0
_TRIMMED_PART = 20  # the slowest twentieth is left out of a mean

_STALL = 3.0  # times the usual step
_SMALLEST_STALL_MS = 100.0  # what steps too short for the clock stall for is no matter of the clock
_COSTLY = 0.4  # share of the time that may be lost at a regular distance, with a reason
_LATE_WINDOWS, _LATE_DRIFT = 2, 2.0  # the last windows, where all are so much slower
_LOST = 0.2  # share of the time
_ERROR_LOST, _CRITICAL_LOST = 0.4, 0.6
_LEAST_STALLS = 3
_LEAST_REST = 0.2  # share of the run that what begins late has to last
_OFF_BEAT = 0.1  # of a period: what deviates by less is at a regular distance
_REGULAR = 0.8  # share of the distances
_LEAST_PERIOD = 3  # steps: what comes at every other one is the training itself

_JITTER = 0.35  # deviation of step times over their median
_JITTER_PART, _LEAST_JITTER_WINDOWS = 3, 2  # a third of the windows in a row
_MORE_JITTER = 3.0  # times that of the first windows: it was not so from the start
# How much a step has to do, such as the length of an episode or of a sequence.
_WORK = re.compile(
    r"(^|[/_. -])(len|lengths?|sizes?|tokens|steps|frames|nodes|edges|atoms|samples|transitions)"
    r"([/_. -](mean|avg|median|max|sum|per_\w+|step))*$"
)
_FIT_QUANTILE = 0.95  # of the step times: what stalls says nothing of the work
_COUNTS_ON = 0.02  # share of falls below which a curve of ever other values is a counter


class RuntimeBottleneckRisk(BaseRule):
    """Fires where a large share of the time is lost; a step that is slow throughout is only slow.

    The first steps, which compile and warm up, do not count, nor does what
    the probes of layers usually add, nor slow steps at a regular distance that are no
    waiting for data: evaluations and checkpoints, as long as they take less than
    two fifths of the time. Medians over windows find what begins late.
    """

    rule_id = "runtime_bottleneck_risk"
    category: AlertCategory = "runtime"
    needs = f"it needs step times of {_LEAST_STEPS} steps (SystemTelemetry)"
    data = ("step times",)
    threshold = _LOST

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """Limits on mean step time, on its share that waits for data, and on jitter."""
        metrics, config = case.run.metrics, case.config
        step_time = find_curve(metrics, config.step_time_metric_keys)
        if step_time is None or not len(step_time.finite):
            return ()
        key, known = step_time.key, step_time.finite
        # One slow first step would be most of the mean.
        first = int(known.step[min(_WARM_UP_STEPS, len(known) // 2)])
        usual = case.measure_curve(key, "mean", first=first)
        figures = {"step_time_ms": usual}
        if len(known.between(first, None)) > 1 and usual.value > 0:
            deviation = case.measure_curve(key, _take_deviation, first=first)
            figures["jitter_ratio"] = deviation / usual
        data_time = find_curve(metrics, config.data_time_metric_keys)
        if data_time is not None and usual.value > 0 and len(data_time.finite):
            waiting = case.measure_curve(data_time.key, "mean", first=first)
            figures["data_fraction"] = waiting / usual
        return tuple(
            limit.find(
                case, key, figure.value, first,
                say("The {words} is {value}.", words=limit.words, value=figure),
                kind="metric", unit=step_time.unit,
            )
            for limit in _LIMITS
            if (figure := figures.get(limit.suffix)) is not None
            and limit.list_reached(case, figure.value)
        )  # fmt: skip

    def judge(self, case: Case) -> Verdict | None:
        """Look for steps that wait for data, slow down, stall or jitter; tell the worst of these.

        Silent of a step time that is long but constant, of steps too short for
        the clock, of slowness that is over before the end, and of slow steps at
        a regular distance or where something is evaluated, and of what is made
        up for by the work of a step, where that is recorded.
        """
        times = _Times.find(case)
        if times is None:
            return None
        found = [] if (waits := _look_at_data(times, case)) is None else [waits]
        eased = list(_ease(times, case))
        for look in (_look_at_drift, _look_at_stalls, _look_at_jitter):
            finding = look(times, case)
            if finding is None or not all(look(less, case) for less in eased):
                continue
            if case.outcome.rewarded and not eased:
                # Episodes grow as an agent learns, and nothing says how long they are.
                finding = replace(finding, severity="info")
            found.append(finding)
        if found:
            worst = max(found, key=lambda item: SEVERITIES.index(item.severity))
            return Verdict(findings=(worst,))
        return self.stay_quiet(
            "steps take about the same time and hardly wait"
            if times.lost_share <= _LOST
            else "some steps take longer, but at a regular distance and for less than two fifths "
            "of the time, as from the start, or too short for the clock",
            times.lost_share,
        )


class _Times:
    """Step times in milliseconds, without those that say nothing."""

    def __init__(
        self,
        key: str,
        step: NDArray[np.int64],
        total: Floats,
        data: Floats | None,
        case: Case,
    ) -> None:
        self.key, self.step, self.total, self.data = key, step, total, data
        self.data_key, self.compute_key = "data_time_ms", "compute_time_ms"
        self.usual = float(np.median(total))
        rows = np.flatnonzero(total > _STALL * self.usual)
        waits = np.zeros(len(rows), dtype=np.bool_)
        if data is not None:
            waits = np.nan_to_num(data[rows]) > _WAITS_MOSTLY * total[rows]
        self.explained = np.zeros(len(total), dtype=np.bool_)
        if len(rows):
            self.explained[rows[_is_periodic(step[rows], case) & ~waits]] = True

    @classmethod
    def find(cls, case: Case) -> _Times | None:
        """Of the metrics, or else of telemetry; None where there is too little."""
        metrics, config = case.run.metrics, case.config
        curves = [
            find_curve(metrics, getattr(config, f"{part}_time_metric_keys"))
            for part in ("step", "data", "compute")
        ]
        if _positive(curves[0]) is None and case.run.telemetry.count:
            curves = [Curve.of_rows(name, case.run.telemetry, name) for name in _FIELDS]
        step_time = _positive(curves[0])
        data_time, compute = (_positive(curve, zero=True) for curve in curves[1:])
        if step_time is None and data_time is not None and compute is not None:
            steps, ours, theirs = np.intersect1d(data_time.step, compute.step, return_indices=True)
            total = data_time.value[ours] + compute.value[theirs]
            step_time = Curve.over_steps(_SUMMED, steps, total)
        if step_time is None or len(step_time) < _LEAST_STEPS + _WARM_UP_STEPS:
            return None
        step, total = step_time.step[_WARM_UP_STEPS:], step_time.value[_WARM_UP_STEPS:]
        probed = np.isin(step, case.run.probe_steps)
        if probed.any() and (~probed).sum() >= _LEAST_STEPS:
            # What a probe usually adds is ours; what is beyond it is the run's.
            added = float(np.median(total[probed]) - np.median(total[~probed]))
            total = np.where(probed, np.maximum(total - max(added, 0.0), _LEAST_MS), total)
        data = None
        if data_time is not None and len(data_time):
            place = np.searchsorted(data_time.step, step).clip(0, len(data_time) - 1)
            data = np.where(data_time.step[place] == step, data_time.value[place], np.nan)
        found = cls(step_time.key, step, total, data, case)
        found.data_key = "data_time_ms" if data_time is None else data_time.key
        found.compute_key = "compute_time_ms" if compute is None else compute.key
        return found

    def measure(
        self,
        case: Case,
        how: str | Callable[[Floats], float],
        first: int | None = None,
        last: int | None = None,
    ) -> Figure:
        """A figure of the recorded step times; of a step's two parts where only these are."""
        keys = (self.data_key, self.compute_key) if self.key == _SUMMED else (self.key,)
        found = [case.measure_curve(key, how, first=first, last=last) for key in keys]
        return found[0] if len(found) == 1 else found[0] + found[1]

    def measure_waiting(self, case: Case, first: int, last: int) -> Figure:
        """Share of the recorded step times that is spent waiting for data."""
        waiting = case.measure_curve(self.data_key, "total", first=first, last=last)
        return waiting / self.measure(case, "total", first, last)

    @property
    def is_tiny(self) -> bool:
        """Whether the steps are too short for their times to mean anything."""
        return self.usual < _SMALLEST_MS

    @property
    def lost_share(self) -> float:
        """Share of the time beyond the usual step."""
        return float(np.maximum(self.total - self.usual, 0.0).sum() / self.total.sum())


def _ease(times: _Times, case: Case) -> Iterator[_Times]:
    """The step times without what each curve of the work of a step explains of them.

    A step takes a fixed time and one for each unit of work. Rewards are such work too: who stays
    up longer gets more.
    """
    limit = float(np.quantile(times.total, _FIT_QUANTILE))
    for key, curve in case.run.metrics.items():
        known = curve.merged
        if not (_WORK.search(key.lower()) or is_reward(key)) or len(known) < _LEAST_STEPS:
            continue
        falls = np.diff(known.value) < 0
        if falls.mean() < _COUNTS_ON and len(np.unique(known.value)) > len(known) // 2:
            continue
        work = np.interp(times.step, known.step, known.value)
        fit = np.minimum(times.total, limit)
        if not work.min() > 0 or not work.std() > 0:
            continue
        slope = float(np.cov(work, fit, bias=True)[0, 1] / work.var())
        fixed = float(fit.mean() - slope * work.mean())
        if slope <= 0:
            continue
        expected = fixed + slope * work if fixed > 0 else work * fit.mean() / work.mean()
        eased = copy.copy(times)
        eased.total = times.total / expected * float(np.median(expected))
        eased.usual = float(np.median(eased.total))
        yield eased


def _positive(curve: Curve | None, *, zero: bool = False) -> Curve | None:
    if curve is None:
        return None
    kept = curve.merged
    kept = kept.take(kept.value >= 0 if zero else kept.value > 0)
    return kept if len(kept) else None


def _windows(count: int) -> list[slice]:
    """About ten stretches of the run, of five steps at least."""
    size = max(_LEAST_WINDOW, count // _WINDOWS)
    return [slice(low, min(low + size, count)) for low in range(0, count - size // 2, size)]


def _look_at_data(times: _Times, case: Case) -> Finding | None:
    if times.data is None:
        return None
    known = np.isfinite(times.data)
    if known.sum() < _LEAST_STEPS:
        return None
    step, total, data = times.step[known], times.total[known], times.data[known]
    windows = _windows(len(step))
    shares = np.array(
        [data[part].sum() / max(total[part].sum(), _RESOLUTION_MS) for part in windows]
    )
    waits = np.array([data[part].mean() >= _SMALLEST_WAIT_MS for part in windows])
    middles = np.array(
        [np.median(data[part] / np.maximum(total[part], _RESOLUTION_MS)) for part in windows]
    )
    scale = case.thresholds
    limit = scale.runtime_warning_data_fraction
    # By the sum, single long waits count, where they come back.
    busy = np.where(middles >= limit, True, (shares >= limit) & (_repeats(data, windows)))
    stretch = _find_worst(busy & waits, shares, min(_LASTING_WINDOWS, len(busy)))
    if stretch is None:
        return None
    first = int(step[windows[stretch[0]].start])
    last = int(step[windows[stretch[1]].stop - 1])
    share = float(np.median(shares[stretch[0] : stretch[1] + 1]))
    return _make(
        times, "Steps wait for data",
        say("{share} of the step time is spent waiting for data ({steps}).",
            share=times.measure_waiting(case, first, last).percent,
            steps=between_steps(first, last)),
        "The device is idle while the next batch is made.",
        "More loader workers, prefetching, a faster format or storage, less work per sample.",
        share, limit, first, last,
        grade(share, 0.0, scale.runtime_error_data_fraction,
              scale.runtime_critical_data_fraction),
    )  # fmt: skip


def _find_worst(mask: NDArray[np.bool_], sizes: Floats, least: int) -> tuple[int, int] | None:
    """First and last index of the stretch of at least so many whose sizes add up to the most."""
    stretches = list_stretches(mask, least)
    if not stretches:
        return None
    low, high = max(stretches, key=lambda part: float(sizes[slice(*part)].sum()))
    return low, high - 1


def _repeats(data: Floats, windows: list[slice]) -> NDArray[np.bool_]:
    usual = float(np.median(data))
    long = _STALL * max(usual, _LEAST_WAIT_MS)
    return np.array([(data[part] > long).sum() >= _LEAST_WAITS for part in windows])


def _look_at_drift(times: _Times, case: Case) -> Finding | None:
    if len(times.total) < _LEAST_WINDOWED_STEPS:
        return None
    windows = _windows(len(times.total))
    calm = np.where(times.explained, times.usual, times.total)
    # Means see steps that are slow now and then, medians those that are slow throughout.
    levels = np.array([max(np.median(calm[part]), _trimmed_mean(calm[part])) for part in windows])
    early = levels[: max(_LEAST_EARLY, len(levels) // _EARLY_PART)]
    base = float(np.median(early))
    high = levels > max(_DRIFT * base, _ABOVE_EARLY * float(early.max()))
    # It has to last to the end: a slow stretch that is over is a visitor on the machine.
    tail = max(_LEAST_END, len(levels) // _END_PART)
    if high[-tail:].mean() < _END_SHARE:
        # What begins late has less of an end to last for, and has to be the more.
        tail = _LATE_WINDOWS
        high = levels > max(_LATE_DRIFT * base, _LATE_DRIFT * float(np.median(levels)))
        if not high[-tail:].all():
            return None
    if float(np.median(levels[-tail:])) < _SMALLEST_MS:
        return None
    start = len(high) - 1
    while start > 0 and not high[start]:
        start -= 1
    while start > 0 and high[max(0, start - _GAP_WINDOWS) : start].any():
        start -= 1
    ratio = float(np.median(levels[-tail:])) / base
    first, last = int(times.step[windows[start].start]), int(times.step[-1])
    end = windows[-tail].start
    begun = times.measure(case, "median", int(times.step[0]), int(times.step[windows[0].stop - 1]))
    late = times.measure(case, "median", int(times.step[end]), last)
    where, cause = _tell_part(
        times, case, np.arange(end, len(times.step)), np.arange(windows[0].stop)
    )
    return _make(
        times, say("Steps get slower{where}", where=where),
        say("A step takes {late} ms at the end, {early} ms at the beginning: {ratio} times as "
            "long{cause}.", late=late, early=begun, ratio=late / begun, cause=cause),
        "Something grows with the run, or the machine became slower.",
        "Look for lists that grow, a graph that is kept (loss without .item() or detach()), "
        "storage, heat and neighbours.",
        ratio, _DRIFT, first, last, grade(ratio, 0.0, _ERROR_DRIFT, _CRITICAL_DRIFT),
    )  # fmt: skip


def _tell_part(
    times: _Times, case: Case, slow: NDArray[np.int64], usual: NDArray[np.int64]
) -> tuple[Text, Text]:
    """For a title and a fact: whether slow steps wait for data or compute; empty if not known.

    Args:
        times: Of the run.
        case: The run.
        slow: Rows that are slow.
        usual: Rows that they are held against.
    """
    data = times.data
    if data is None or not all(np.isfinite(data[rows]).any() for rows in (slow, usual)):
        return say(""), say("")
    waited = float(np.nanmean(data[slow])) - float(np.nanmedian(data[usual]))
    longer = float(times.total[slow].mean()) - float(np.median(times.total[usual]))
    first, last = int(times.step[slow[0]]), int(times.step[slow[-1]])
    highest = case.measure_curve(times.data_key, "highest", first=first, last=last)
    if waited > _WAITS_MOSTLY * longer:
        return say(": waiting for data"), say("; a step waits up to {ms} ms for data", ms=highest)
    return say(": in the computation"), say(
        "; the longest wait for data there is {ms} ms, the rest is computation", ms=highest
    )


def _trimmed_mean(values: Floats) -> float:
    """Mean without the highest twentieth, one value at least."""
    left_out = max(1, len(values) // _TRIMMED_PART)
    kept = np.sort(values)[: max(1, len(values) - left_out)]
    return float(kept.mean())


def _look_at_stalls(times: _Times, case: Case) -> Finding | None:
    slow = times.total > _STALL * times.usual
    if times.is_tiny:
        slow &= times.total >= _SMALLEST_STALL_MS
    rows = np.flatnonzero(slow)
    if len(rows) < _LEAST_STALLS:
        return None
    finding = _describe_stalls(times, case, rows[~times.explained[rows]], _LOST)
    if finding is not None:
        return finding
    # At a regular distance they have a reason, and cost what they cost.
    return _describe_stalls(times, case, rows, _COSTLY)


def _describe_stalls(
    times: _Times, case: Case, rows: NDArray[np.int64], limit: float
) -> Finding | None:
    if len(rows) < _LEAST_STALLS:
        return None
    lost = float((times.total[rows] - times.usual).sum() / times.total.sum())
    if lost < limit:
        # What begins late is thin in the whole: look at where it is.
        part = slice(int(rows[0]), len(times.total))
        lost = float((times.total[rows] - times.usual).sum() / times.total[part].sum())
        if lost < limit or len(times.total) - rows[0] < _LEAST_REST * len(times.total):
            return None
    first, last = int(times.step[rows[0]]), int(times.step[rows[-1]])
    where, cause = _tell_part(
        times, case, rows, np.flatnonzero(times.total <= _STALL * times.usual)
    )
    is_regular = bool(times.explained[rows].mean() >= _REGULAR)
    return _make(
        times,
        say("Regular stalls cost much of the time") if is_regular
        else say("Steps stall{where}", where=where),
        say("{count} steps took more than {factor} times the usual {usual} ms, up to {longest} "
            "ms{cause}.", count=count_names(str(step) for step in times.step[rows].tolist()),
            factor=constant(_STALL), usual=times.measure(case, "median"),
            longest=times.measure(case, "highest", first, last), cause=cause),
        "What is done there, an evaluation or a checkpoint, is too slow or comes too often."
        if is_regular
        else "Something blocks the loop now and then.",
        "Do it less often, on less data, or in the background (asynchronous checkpoints)."
        if is_regular
        else "Look at the loader's workers, storage, garbage collection, other users of the "
        "machine.",
        lost, limit, first, last, grade(lost, 0.0, _ERROR_LOST, _CRITICAL_LOST)
        if not is_regular
        else "warning",
    )  # fmt: skip


def _is_periodic(steps: NDArray[np.int64], case: Case) -> NDArray[np.bool_]:
    """Which steps are at a regular distance, or where something is evaluated."""
    evaluations = [
        curve.step
        for curve in (case.validation_loss, case.validation_accuracy)
        if curve is not None and curve.unit == "step"
    ]
    near = np.zeros(len(steps), dtype=np.bool_)
    for some in evaluations:
        near |= np.isin(steps, some) | np.isin(steps, some + 1) | np.isin(steps, some - 1)
    distances = np.diff(steps)
    if len(distances) >= 2:
        usual = float(np.median(distances))
        regular = np.abs(distances / usual - np.round(distances / usual)) < _OFF_BEAT
        if usual >= _LEAST_PERIOD and regular.mean() >= _REGULAR:
            near |= True
    return near


def _look_at_jitter(times: _Times, case: Case) -> Finding | None:
    if times.is_tiny or len(times.total) < _LEAST_WINDOWED_STEPS:
        return None
    windows = _windows(len(times.total))
    scale = case.thresholds
    values = np.array([_measure_jitter(times.total[part]) for part in windows])
    early = float(np.median(values[: max(_LEAST_EARLY, len(values) // _EARLY_PART)]))
    least = max(_LEAST_JITTER_WINDOWS, len(values) // _JITTER_PART)
    stretch = _find_worst(values >= _JITTER, values, least)
    if stretch is None:
        return None
    first = int(times.step[windows[stretch[0]].start])
    last = int(times.step[windows[stretch[1]].stop - 1])
    jitter = float(np.median(values[stretch[0] : stretch[1] + 1]))
    return _make(
        times, "Step times jitter",
        say("Step times deviate by {jitter} of their median ({steps}).",
            jitter=times.measure(case, _measure_jitter, first, last).percent,
            steps=between_steps(first, last)),
        "The work of a step depends on its batch, or something else takes the machine's time.",
        "Look at batches of very different sizes, at other processes, at the loader's workers.",
        jitter, _JITTER, first, last,
        # Batches of different sizes jitter from the start: that is how such a training is.
        grade(jitter, 0.0, scale.runtime_error_jitter_ratio, scale.runtime_critical_jitter_ratio)
        if jitter >= _MORE_JITTER * early
        else "info",
    )  # fmt: skip


def _take_deviation(values: Floats) -> float:
    return float(values.std())


def _measure_jitter(times: Floats) -> float:
    return spread(times) / max(float(np.median(times)), _RESOLUTION_MS)


def _make(
    times: _Times,
    title: str,
    fact: Text,
    inference: str,
    check: str,
    observed: float,
    threshold: float,
    first: int,
    last: int,
    severity: AlertSeverity,
) -> Finding:
    return Finding(
        culprit=times.key,
        severity=severity,
        title=title,
        fact=fact,
        inference=inference,
        suggested_check=check,
        evidence=(observe("metric", times.key, fact, observed, threshold, first, last),),
    )
