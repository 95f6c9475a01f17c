"""Time that steps lose: waiting for data, stalls, jitter, and slowing down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve, spread
from quark_core.analysis.limits import limit_runtime
from quark_core.analysis.metric_roles import find_curve
from quark_core.analysis.observations import find_sustained, format_number, observe, say_steps
from quark_core.analysis.rule import Finding, Verdict, grade
from quark_core.analysis_records import AlertCategory

if TYPE_CHECKING:
    from quark_core.columns import Columns

__all__ = ["RuntimeBottleneckRisk"]

_LEAST_STEPS = 12
_WARM_UP = 3
_STALL = 3.0  # times the usual step
_LOST = 0.2  # share of the time
_DRIFT = 1.5
_JITTER = 0.35
_SMALLEST_MS = 8.0  # below it the clock and the machine speak, not the training
_SMALLEST_WAIT_MS = 1.0


class RuntimeBottleneckRisk:
    """Fires where a large share of the time is lost; a step that is slow throughout is only slow.

    The first steps, which compile and warm up, do not count, nor does what
    the probes of layers usually add, nor slow steps at a regular distance that are no
    waiting for data: evaluations and checkpoints. Medians over windows find
    what begins late.
    """

    rule_id = "runtime_bottleneck_risk"
    category: AlertCategory = "runtime"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        limited = limit_runtime(case)
        times = _Times.find(case)
        if times is None:
            return Verdict(
                findings=limited,
                reason=f"it needs step times of {_LEAST_STEPS} steps (SystemTelemetry)",
                missing=() if limited else ("step times",),
            )
        found = [
            finding
            for look in (_look_at_data, _look_at_drift, _look_at_stalls, _look_at_jitter)
            if (finding := look(times, case)) is not None
        ]
        if found:
            worst = max(found, key=lambda item: ("info", "warning", "error", "critical").index(
                item.severity))  # fmt: skip
            return Verdict(findings=(worst, *limited))
        if limited:
            return Verdict(findings=limited)
        return Verdict(
            reason="steps take about the same time and hardly wait"
            if times.lost_share <= _LOST
            else "some steps take longer, but at a regular distance, as from the start, or "
            "too short for the clock",
            observed=times.lost_share,
            threshold=_LOST,
        )


class _Times:
    """Step times in milliseconds, without those that say nothing."""

    def __init__(
        self,
        key: str,
        step: NDArray[np.int64],
        total: NDArray[np.float64],
        data: NDArray[np.float64] | None,
        case: Case,
    ) -> None:
        self.key, self.step, self.total, self.data = key, step, total, data
        self.usual = float(np.median(total))
        rows = np.flatnonzero(total > _STALL * self.usual)
        waits = np.zeros(len(rows), dtype=np.bool_)
        if data is not None:
            waits = np.nan_to_num(data[rows]) > 0.5 * total[rows]
        self.explained = np.zeros(len(total), dtype=np.bool_)
        if len(rows):
            self.explained[rows[_is_periodic(step[rows], case) & ~waits]] = True

    @classmethod
    def find(cls, case: Case) -> _Times | None:
        """Of the metrics, or else of telemetry; None where there is too little."""
        metrics, config = case.run.metrics, case.config
        step_time = _positive(find_curve(metrics, config.step_time_metric_keys))
        data_time = _positive(find_curve(metrics, config.data_time_metric_keys), zero=True)
        compute = _positive(find_curve(metrics, config.compute_time_metric_keys), zero=True)
        if step_time is None and case.run.telemetry.count:
            rows = case.run.telemetry
            step_time = _positive(_from_telemetry(rows, "step_time_ms"))
            data_time = _positive(_from_telemetry(rows, "data_time_ms"), zero=True)
            compute = _positive(_from_telemetry(rows, "compute_time_ms"), zero=True)
        if step_time is None and data_time is not None and compute is not None:
            steps, ours, theirs = np.intersect1d(data_time.step, compute.step, return_indices=True)
            step_time = Curve("step time", steps, data_time.value[ours] + compute.value[theirs],
                              np.full(len(steps), -1))  # fmt: skip
        if step_time is None or len(step_time) < _LEAST_STEPS + _WARM_UP:
            return None
        step, total = step_time.step[_WARM_UP:], step_time.value[_WARM_UP:]
        probed = np.isin(step, case.run.probe_steps)
        if probed.any() and (~probed).sum() >= _LEAST_STEPS:
            # What a probe usually adds is ours; what is beyond it is the run's.
            added = float(np.median(total[probed]) - np.median(total[~probed]))
            total = np.where(probed, np.maximum(total - max(added, 0.0), 1e-6), total)
        data = None
        if data_time is not None and len(data_time):
            place = np.searchsorted(data_time.step, step).clip(0, len(data_time) - 1)
            data = np.where(data_time.step[place] == step, data_time.value[place], np.nan)
        return cls(step_time.key, step, total, data, case)

    @property
    def is_tiny(self) -> bool:
        """Whether the steps are too short for their times to mean anything."""
        return self.usual < _SMALLEST_MS

    @property
    def lost_share(self) -> float:
        """Share of the time beyond the usual step."""
        return float(np.maximum(self.total - self.usual, 0.0).sum() / self.total.sum())


def _positive(curve: Curve | None, *, zero: bool = False) -> Curve | None:
    if curve is None:
        return None
    kept = curve.merged
    kept = kept.take(kept.value >= 0 if zero else kept.value > 0)
    return kept if len(kept) else None


def _from_telemetry(rows: Columns, name: str) -> Curve | None:
    steps, values = rows["step"], rows[name]
    kept = (steps >= 0) & np.isfinite(values)
    order = np.argsort(steps[kept], kind="stable")
    curve = Curve(name, steps[kept][order], values[kept][order], np.full(int(kept.sum()), -1))
    return curve if len(curve) else None


def _windows(count: int) -> list[slice]:
    """About ten stretches of the run, of five steps at least."""
    size = max(5, count // 10)
    return [slice(low, min(low + size, count)) for low in range(0, count - size // 2, size)]


def _look_at_data(times: _Times, case: Case) -> Finding | None:
    if times.data is None:
        return None
    known = np.isfinite(times.data)
    if known.sum() < _LEAST_STEPS:
        return None
    step, total, data = times.step[known], times.total[known], times.data[known]
    windows = _windows(len(step))
    shares = np.array([data[part].sum() / max(total[part].sum(), 1e-9) for part in windows])
    waits = np.array([data[part].mean() >= _SMALLEST_WAIT_MS for part in windows])
    middles = np.array([np.median(data[part] / np.maximum(total[part], 1e-9)) for part in windows])
    scale = case.thresholds
    limit = scale.runtime_warning_data_fraction
    # By the sum, single long waits count; they have to come back to be a habit.
    busy = np.where(middles >= limit, True, (shares >= limit) & (_repeats(data, windows)))
    stretch = find_sustained(busy & waits, min(2, len(busy)))
    if stretch is None:
        return None
    first = int(step[windows[stretch[0]].start])
    last = int(step[windows[stretch[1]].stop - 1])
    share = float(np.median(shares[stretch[0] : stretch[1] + 1]))
    return _make(
        times, "Steps wait for data",
        f"{share:.0%} of the step time is spent waiting for data ({say_steps(first, last)}).",
        "The device is idle while the next batch is made.",
        "More loader workers, prefetching, a faster format or storage, less work per sample.",
        share, limit, first, last,
        grade(share, 0.0, scale.runtime_error_data_fraction,
              scale.runtime_critical_data_fraction),
    )  # fmt: skip


def _repeats(data: NDArray[np.float64], windows: list[slice]) -> NDArray[np.bool_]:
    usual = float(np.median(data))
    return np.array([(data[part] > _STALL * max(usual, 1e-3)).sum() >= 2 for part in windows])


def _look_at_drift(times: _Times, _case: Case) -> Finding | None:
    if times.is_tiny or len(times.total) < 30:
        return None
    windows = _windows(len(times.total))
    calm = np.where(times.explained, times.usual, times.total)
    # Means see steps that are slow now and then, medians those that are slow throughout.
    levels = np.array([max(np.median(calm[part]), _trimmed_mean(calm[part])) for part in windows])
    early = levels[: max(2, len(levels) // 5)]
    base = float(np.median(early))
    high = levels > max(_DRIFT * base, 1.2 * float(early.max()))
    # It has to last to the end: a slow stretch that is over is a visitor on the machine.
    tail = max(2, len(levels) // 3)
    if high[-tail:].mean() < 0.75:
        return None
    start = len(high) - 1
    while start > 0 and not high[start]:
        start -= 1
    while start > 0 and high[max(0, start - 2) : start].any():
        start -= 1
    ratio = float(np.median(levels[-tail:])) / base
    first, last = int(times.step[windows[start].start]), int(times.step[-1])
    return _make(
        times, "Steps get slower",
        f"A step takes {format_number(ratio)} times as long at the end as at the beginning "
        f"({format_number(base)} ms then).",
        "Something grows with the run, or the machine became slower.",
        "Look for lists that grow, a graph that is kept (loss without .item() or detach()), "
        "storage, heat and neighbours.",
        ratio, _DRIFT, first, last, grade(ratio, 0.0, 2.0, 4.0),
    )  # fmt: skip


def _trimmed_mean(values: NDArray[np.float64]) -> float:
    """Mean without the highest twentieth, one value at least."""
    kept = np.sort(values)[: max(1, len(values) - max(1, len(values) // 20))]
    return float(kept.mean())


def _look_at_stalls(times: _Times, _case: Case) -> Finding | None:
    if times.is_tiny:
        return None
    slow = times.total > _STALL * times.usual
    rows = np.flatnonzero(slow)
    if len(rows) < 3:
        return None
    rows = rows[~times.explained[rows]]
    if len(rows) < 3:
        return None
    lost = float((times.total[rows] - times.usual).sum() / times.total.sum())
    if lost < _LOST:
        # What begins late is thin in the whole: look at where it is.
        part = slice(int(rows[0]), len(times.total))
        lost = float((times.total[rows] - times.usual).sum() / times.total[part].sum())
        if lost < _LOST or len(times.total) - rows[0] < 0.2 * len(times.total):
            return None
    first, last = int(times.step[rows[0]]), int(times.step[rows[-1]])
    longest = float(times.total[rows].max() / times.usual)
    return _make(
        times, "Steps stall",
        f"{len(rows)} steps took more than {_STALL:g} times the usual "
        f"{format_number(times.usual)} ms, up to {format_number(longest)} times; {lost:.0%} of "
        "the time is lost to them.",
        "Something blocks the loop now and then.",
        "Look at the loader's workers, storage, garbage collection, other users of the machine.",
        lost, _LOST, first, last, grade(lost, 0.0, 0.4, 0.6),
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
        regular = np.abs(distances / usual - np.round(distances / usual)) < 0.1
        if usual >= 3 and regular.mean() >= 0.8:
            near |= True
    return near


def _look_at_jitter(times: _Times, case: Case) -> Finding | None:
    if times.is_tiny or len(times.total) < 30:
        return None
    windows = _windows(len(times.total))
    scale = case.thresholds
    values = np.array(
        [spread(times.total[part]) / max(float(np.median(times.total[part])), 1e-9)
         for part in windows]
    )  # fmt: skip
    early = float(np.median(values[: max(2, len(values) // 5)]))
    high = values >= _JITTER
    stretch = find_sustained(high, max(2, len(high) // 3))
    if stretch is None:
        return None
    first = int(times.step[windows[stretch[0]].start])
    last = int(times.step[windows[stretch[1]].stop - 1])
    jitter = float(np.median(values[stretch[0] : stretch[1] + 1]))
    return _make(
        times, "Step times jitter",
        f"Step times deviate by {jitter:.0%} of their median ({say_steps(first, last)}).",
        "The work of a step depends on its batch, or something else takes the machine's time.",
        "Look at batches of very different sizes, at other processes, at the loader's workers.",
        jitter, _JITTER, first, last,
        # Batches of different sizes jitter from the start: that is how such a training is.
        grade(jitter, 0.0, scale.runtime_error_jitter_ratio, scale.runtime_critical_jitter_ratio)
        if jitter >= 3.0 * early
        else "info",
    )  # fmt: skip


def _make(
    times: _Times,
    title: str,
    fact: str,
    inference: str,
    check: str,
    observed: float,
    threshold: float,
    first: int,
    last: int,
    severity: str,
) -> Finding:
    return Finding(
        culprit=times.key,
        severity=severity,  # type: ignore[arg-type]
        title=title,
        fact=fact,
        inference=inference,
        suggested_check=check,
        evidence=(observe("metric", times.key, fact, observed, threshold, first, last),),
        step=first,
        step_end=last,
    )
