"""Memory of the process that grows with the run."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve, fit_slope
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["MemoryGrowth"]

_KEYS = ("system/process/rss_bytes", "system/gpu/memory_used_bytes")
_FIELDS = {"process_rss_bytes": _KEYS[0], "gpu_memory_used_bytes": _KEYS[1]}
_LEAST_POINTS = 20
_SHARE = 0.25
_LEAST_BYTES = 256 * 1024**2


class MemoryGrowth:
    """Fires where memory rises steadily over the last two thirds of the run, by a quarter.

    The first third is left out: caches and workers fill in it.
    """

    rule_id = "memory_growth"
    category: AlertCategory = "runtime"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        curves = [case.run.metrics[key] for key in _KEYS if key in case.run.metrics]
        if not curves and case.run.telemetry.count:
            curves = [_from_telemetry(case, field) for field in _FIELDS]
        curves = [curve.merged for curve in curves if len(curve.merged) >= _LEAST_POINTS]
        if not curves:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} readings of memory (SystemTelemetry)",
                missing=("memory telemetry",),
            )
        highest = 0.0
        for curve in curves:
            later = curve.take(slice(len(curve) // 3, None))
            base = float(np.median(later.value[: max(3, len(later) // 10)]))
            grown = fit_slope(later.step, later.value) * float(later.step[-1] - later.step[0])
            share = grown / max(base, 1.0)
            rises = np.diff([float(np.median(part)) for part in np.array_split(later.value, 5)])
            highest = max(highest, share)
            if share < _SHARE or grown < _LEAST_BYTES or not (rises > 0).all():
                continue
            first, last = int(later.step[0]), int(later.step[-1])
            finding = Finding(
                culprit=curve.key,
                severity="warning" if share < 1.0 else "error",
                title="Memory grows",
                fact=f"{curve.key} rose by {format_number(grown / 1024**2)} MiB from step {first} "
                f"to {last}, {share:.0%} of what it was.",
                inference="Something is kept from step to step: a run of this kind ends when the "
                "memory does.",
                suggested_check="Look for losses kept with their graph (use .item() or detach()), "
                "growing lists, caches without bound.",
                evidence=(
                    observe("metric", curve.key, "growth over what it was", share, _SHARE, first,
                            last),
                ),
                step=first,
                step_end=last,
            )  # fmt: skip
            return Verdict(findings=(finding,), observed=share, threshold=_SHARE)
        return Verdict(reason="memory does not rise steadily", observed=highest, threshold=_SHARE)


def _from_telemetry(case: Case, field: str) -> Curve:
    rows = case.run.telemetry
    steps, values = rows["step"], rows[field].astype(np.float64)
    kept = (steps >= 0) & (values > 0)
    order = np.argsort(steps[kept], kind="stable")
    empty = np.full(int(kept.sum()), -1)
    return Curve(_FIELDS[field], steps[kept][order], values[kept][order], empty)
