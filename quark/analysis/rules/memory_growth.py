"""Memory of the process that grows with the run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import Curve, fit_slope
from quark.analysis.observations import Figure, between_steps, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_KEYS = ("system/process/rss_bytes", "system/gpu/memory_used_bytes")
_FIELDS = {"process_rss_bytes": _KEYS[0], "gpu_memory_used_bytes": _KEYS[1]}
_LEAST_POINTS = 20
_LEFT_OUT_PART = 3  # the first third: caches and workers fill in it
_SHARE = 0.25  # of what it was after that
_LEAST_BYTES = 256 * 1024**2  # less is no danger to any machine
_MIB_BYTES = 1024**2
_BASE_PART, _LEAST_BASE_POINTS = 10, 3  # what it was: the first tenth of the rest
_PARTS = 5  # of the rest, each of which has to be above the one before


class MemoryGrowth(BaseRule):
    """Fires where memory rises steadily over the last two thirds of the run, by a quarter.

    The first third is left out: caches and workers fill in it.
    """

    rule_id = "memory_growth"
    category: AlertCategory = "runtime"
    needs = f"it needs {_LEAST_POINTS} readings of memory (SystemTelemetry)"
    data = ("memory telemetry",)
    threshold = _SHARE

    def judge(self, case: Case) -> Verdict | None:
        """Look for memory that rises in every fifth of the last two thirds, by a quarter in all.

        Silent where it levels off or falls in between, as a cache does that is
        full, and where it is a matter of less than 256 MiB.
        """
        curves = [case.run.metrics[key] for key in _KEYS if key in case.run.metrics]
        if not curves and case.run.telemetry.count:
            rows = case.run.telemetry
            curves = [Curve.of_rows(key, rows, field) for field, key in _FIELDS.items()]
            curves = [curve.take(curve.value > 0) for curve in curves]
        curves = [curve.merged for curve in curves if len(curve.merged) >= _LEAST_POINTS]
        if not curves:
            return None
        highest = 0.0
        for curve in curves:
            later = curve.take(slice(len(curve) // _LEFT_OUT_PART, None))
            few = max(_LEAST_BASE_POINTS, len(later) // _BASE_PART)
            base = float(np.median(later.value[:few]))
            grown = fit_slope(later.step, later.value) * float(later.step[-1] - later.step[0])
            share = grown / max(base, 1.0)
            parts = np.array_split(later.value, _PARTS)
            rises = np.diff([float(np.median(part)) for part in parts])
            highest = max(highest, share)
            if share < _SHARE or grown < _LEAST_BYTES or not (rises > 0).all():
                continue
            first, last = int(later.step[0]), int(later.step[-1])
            finding = Finding(
                culprit=curve.key,
                severity="warning" if share < 1.0 else "error",
                title="Memory grows",
                fact=say(
                    "{key} rose from {before} to {after} MiB ({steps}).",
                    key=curve.key, steps=between_steps(first, last),
                    before=_measure_mib(case, curve, int(later.step[0]), int(later.step[few - 1])),
                    after=_measure_mib(case, curve, int(later.step[-few]), last),
                ),
                inference="Something is kept from step to step: a run of this kind ends when the "
                "memory does.",
                suggested_check="Look for losses kept with their graph (use .item() or detach()), "
                "growing lists, caches without bound.",
                evidence=(
                    observe("metric", curve.key, "growth over what it was", share, _SHARE, first,
                            last),
                ),
            )  # fmt: skip
            return Verdict(findings=(finding,), observed=share, threshold=_SHARE)
        return self.stay_quiet("memory does not rise steadily", highest)


def _measure_mib(case: Case, curve: Curve, first: int, last: int) -> Figure:
    """The median of memory between two steps, in MiB."""
    key = curve.key
    if key not in case.run.metrics:
        key = next(field for field, named in _FIELDS.items() if named == key)
    return case.measure_curve(key, _take_median_mib, first=first, last=last).whole


def _take_median_mib(values: NDArray[np.float64]) -> float:
    return float(np.median(values)) / _MIB_BYTES
