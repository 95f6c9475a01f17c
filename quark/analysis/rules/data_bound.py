"""Devices that wait for the processor: low use while the processor is busy."""

from __future__ import annotations

import numpy as np

from quark.analysis.analysis_context import Case
from quark.analysis.observations import observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_READINGS = 10
_IDLE_PERCENT = 40.0  # use of the GPU below which it mostly waits
_BUSY_PERCENT = 85.0  # use of all cores above which there is hardly any left


class DataBound(BaseRule):
    """Informs where a GPU is mostly idle while every core of the processor is busy.

    Step times alone do not show it: the waiting is inside of the step.
    """

    rule_id = "data_bound"
    category: AlertCategory = "runtime"
    needs = f"it needs {_LEAST_READINGS} readings of a GPU (SystemTelemetry)"
    data = ("GPU telemetry",)
    tables = ("telemetry",)
    threshold = 100.0 - _IDLE_PERCENT

    def judge(self, case: Case) -> Verdict | None:
        """Look for a GPU that is mostly idle (median) while the processor is nearly full.

        Silent where the processor has time left: then something else is waited
        for, and where the GPU is at work, however busy the processor is.
        """
        rows = case.run.telemetry
        if rows.count < _LEAST_READINGS:
            return None
        gpu, processor = rows["gpu_utilization_percent"], rows["cpu_usage_percent"]
        known = np.isfinite(gpu) & np.isfinite(processor)
        if known.sum() < _LEAST_READINGS:
            return Verdict(reason="no GPU was read", missing=self.data)
        idle = float(np.median(gpu[known]))
        busy = float(np.median(processor[known]))
        if idle > _IDLE_PERCENT or busy < _BUSY_PERCENT:
            return self.stay_quiet(
                "the GPU is at work, or the processor has time left", 100.0 - idle
            )
        steps = rows["step"][known]
        first = int(steps[steps >= 0].min()) if (steps >= 0).any() else None
        finding = Finding(
            culprit="system/gpu/utilization_percent",
            severity="info",
            title="The GPU waits for the processor",
            fact=say(
                "The GPU is in use {idle} % of the time (median) while the processor is at {busy} "
                "%.",
                idle=case.measure_curve("gpu_utilization_percent", "median").whole,
                busy=case.measure_curve("cpu_usage_percent", "median").whole,
            ),
            inference="Loading, augmenting or launching on the processor limits the training.",
            suggested_check="Fewer but larger operations, work on the device, a cheaper pipeline.",
            evidence=(
                observe("telemetry", "gpu_utilization_percent", "median use", idle, _IDLE_PERCENT),
                observe("telemetry", "cpu_usage_percent", "median use", busy, _BUSY_PERCENT),
            ),
            step=first,
        )
        return Verdict(findings=(finding,), observed=100.0 - idle, threshold=self.threshold)
