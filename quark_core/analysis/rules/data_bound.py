"""Devices that wait for the processor: low use while the processor is busy."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.observations import observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["DataBound"]

_LEAST_READINGS = 10
_IDLE_PERCENT = 40.0
_BUSY_PERCENT = 85.0


class DataBound:
    """Informs where a GPU is mostly idle while every core of the processor is busy.

    Step times alone do not show it: the waiting is inside of the step.
    """

    rule_id = "data_bound"
    category: AlertCategory = "runtime"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        rows = case.run.telemetry
        if rows.count < _LEAST_READINGS:
            return Verdict(
                reason=f"it needs {_LEAST_READINGS} readings of a GPU (SystemTelemetry)",
                missing=("GPU telemetry",),
            )
        gpu, processor = rows["gpu_utilization_percent"], rows["cpu_usage_percent"]
        known = np.isfinite(gpu) & np.isfinite(processor)
        if known.sum() < _LEAST_READINGS:
            return Verdict(reason="no GPU was read", missing=("GPU telemetry",))
        idle = float(np.median(gpu[known]))
        busy = float(np.median(processor[known]))
        if idle > _IDLE_PERCENT or busy < _BUSY_PERCENT:
            return Verdict(
                reason="the GPU is at work, or the processor has time left",
                observed=100.0 - idle,
                threshold=100.0 - _IDLE_PERCENT,
            )
        steps = rows["step"][known]
        first = int(steps[steps >= 0].min()) if (steps >= 0).any() else None
        finding = Finding(
            culprit="system/gpu/utilization_percent",
            severity="info",
            title="The GPU waits for the processor",
            fact=f"The GPU is in use {idle:.0f} % of the time (median) while the processor is at "
            f"{busy:.0f} %.",
            inference="Loading, augmenting or launching on the processor limits the training.",
            suggested_check="Fewer but larger operations, work on the device, a cheaper pipeline.",
            evidence=(
                observe("telemetry", "gpu_utilization_percent", "median use", idle, _IDLE_PERCENT),
                observe("telemetry", "cpu_usage_percent", "median use", busy, _BUSY_PERCENT),
            ),
            step=first,
        )
        return Verdict(findings=(finding,), observed=100.0 - idle, threshold=100.0 - _IDLE_PERCENT)
