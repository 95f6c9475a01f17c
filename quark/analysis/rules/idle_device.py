"""A device that is held and does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.observations import Figure, Text, between_steps, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.columns import Columns
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LEAST_READINGS = 12
_LEFT_OUT_PART = 4  # the first quarter: loading and compiling
_IDLE_PERCENT = 10.0  # use of a device that does next to nothing
_FALLEN_PERCENT, _BUSY_PERCENT = 25.0, 60.0  # of one that was, or others are, at work
_HELD_PERCENT = 5.0  # of its memory: then the run has it
_LEAST_STEP_MS = 20.0  # a shorter step may leave the largest device idle
_SLOWER = 1.3  # times the step before: it did not merely get less to do
_LASTING = 0.3  # share of the readings, to the end
_MOSTLY = 0.9  # of these readings
_WAITS = 0.4  # share of the step that it waits for data

_USE, _MEMORY = "gpu_utilization_percent", "gpu_memory_usage_percent"


@dataclass(frozen=True)
class _Readings:
    """What a rank says of its device.

    Attributes:
        rank: The rank.
        step: Steps of the readings.
        use, memory: In percent.
        times: Milliseconds of the steps, NaN where not timed.
    """

    rank: int
    step: NDArray[np.int64]
    use: Floats
    memory: Floats
    times: Floats


class IdleDevice(BaseRule):
    """Fires where a GPU holds memory of the run and is idle while steps take their time.

    It is idle throughout, or from some step on while steps became slower, or
    it is the one of a rank whose other ranks keep theirs busy.
    """

    rule_id = "idle_device"
    category: AlertCategory = "runtime"
    needs = f"it needs {_LEAST_READINGS} readings of a GPU at steps (SystemTelemetry)"
    data = ("GPU telemetry",)
    tables = ("rank_telemetry",)
    threshold = 100.0 - _IDLE_PERCENT

    def judge(self, case: Case) -> Verdict | None:
        """Look for a device that is held and idle to the end of the run.

        Silent of a device whose memory is not used, as of a training on the
        processor, of steps too short to fill it, and of one that gets less to
        do while steps are as fast as before.
        """
        devices = [
            device
            for rank, rows in case.run.rank_telemetry.items()
            if (device := _read(rank, rows)) is not None
        ]
        if not devices:
            return None
        for device in devices:
            finding = (
                _compare_with_peers(device, devices, case)
                or _look_at_fall(device, case)
                or _look_throughout(device, case)
            )
            if finding is not None:
                return Verdict(findings=(finding,))
        lowest = min(float(np.median(device.use)) for device in devices)
        return self.stay_quiet("the device is at work, not held, or its steps are short",
                               100.0 - lowest)  # fmt: skip


def _read(rank: int, rows: Columns) -> _Readings | None:
    kept = np.isfinite(rows[_USE]) & (rows["step"] >= 0)
    if kept.sum() < _LEAST_READINGS:
        return None
    order = np.argsort(rows["step"][kept], kind="stable")
    columns = (rows[name][kept][order] for name in (_USE, _MEMORY, "step_time_ms"))
    return _Readings(rank, rows["step"][kept][order], *columns)


def _is_held(device: _Readings) -> bool:
    memory = device.memory[np.isfinite(device.memory)]
    return bool(len(memory)) and float(np.median(memory)) >= _HELD_PERCENT


def _take_step(times: Floats) -> float:
    known = times[np.isfinite(times)]
    return float(np.median(known)) if len(known) else 0.0


def _look_throughout(device: _Readings, case: Case) -> Finding | None:
    """Idle from after the start to the end, though it is held and steps are long."""
    later = slice(len(device.use) // _LEFT_OUT_PART, None)
    is_idle = device.use[later] <= _IDLE_PERCENT
    if is_idle.mean() < _MOSTLY or not _is_held(device):
        return None
    if _take_step(device.times[later]) < _LEAST_STEP_MS:
        return None
    first, last = int(device.step[later][0]), int(device.step[-1])
    return _describe(device, case, first, last, say(""))


def _look_at_fall(device: _Readings, case: Case) -> Finding | None:
    """At work at first, and idle from some reading to the end, in steps that became slower."""
    least = max(_LEAST_READINGS // 2, round(_LASTING * len(device.use)))
    is_idle = device.use <= _FALLEN_PERCENT
    if len(device.use) < 2 * least or is_idle[-least:].mean() < _MOSTLY:
        return None
    start = len(is_idle) - least
    while start > 0 and is_idle[start - 1]:
        start -= 1
    while not is_idle[start]:
        start += 1
    if start < _LEAST_READINGS // 2 or float(np.median(device.use[:start])) < _BUSY_PERCENT:
        return None
    before, after = _take_step(device.times[:start]), _take_step(device.times[start:])
    if not after >= _SLOWER * before > 0:
        return None
    first, last = int(device.step[start]), int(device.step[-1])
    end = int(device.step[start - 1])
    more = say(
        ", {use} % before; a step takes {after} ms, {before} ms before",
        use=_measure(device, case, _USE, None, end).whole,
        after=_measure(device, case, "step_time_ms", first, last),
        before=_measure(device, case, "step_time_ms", None, end),
    )
    return _describe(device, case, first, last, more)


def _compare_with_peers(device: _Readings, devices: list[_Readings], case: Case) -> Finding | None:
    """Idle while the devices of the other ranks are at work."""
    others = [float(np.median(other.use)) for other in devices if other is not device]
    later = slice(len(device.use) // _LEFT_OUT_PART, None)
    if not others or min(others) < _BUSY_PERCENT:
        return None
    if (device.use[later] <= _FALLEN_PERCENT).mean() < _MOSTLY:
        return None
    first, last = int(device.step[later][0]), int(device.step[-1])
    busy = min(
        (_measure(other, case, _USE, first, last) for other in devices if other is not device),
        key=lambda figure: figure.value,
    )
    more = say(", those of the other ranks {use} % and more", use=busy.whole)
    return _describe(device, case, first, last, more)


def _describe(device: _Readings, case: Case, first: int, last: int, more: Text) -> Finding:
    use = _measure(device, case, _USE, first, last)
    memory = _measure(device, case, _MEMORY, first, last)
    waits, check = _tell_wait(device, case, first, last)
    rank = f"rank {device.rank}"
    held = say("")
    if np.isfinite(memory.value):
        held = say(" and holds {memory} % of its memory", memory=memory.whole)
    return Finding(
        culprit="system/gpu/utilization_percent" if len(case.run.rank_telemetry) < 2 else rank,
        severity="warning",
        title="The device is idle",
        fact=say(
            "The GPU of {rank} is in use {use} % of the time (median){held}{more} "
            "({steps}).{waits}",
            rank=rank, use=use.whole, held=held, more=more, steps=between_steps(first, last),
            waits=waits,
        ),
        inference="The device is paid for and waits: what limits the training is elsewhere.",
        suggested_check=check,
        evidence=(
            observe("telemetry", _USE, "median use in percent", use.value, _IDLE_PERCENT, first,
                    last),
        ),
    )  # fmt: skip


def _tell_wait(device: _Readings, case: Case, first: int, last: int) -> tuple[Text, str]:
    """Whether it waits for data or the computation runs elsewhere, and what to look at."""
    waiting, whole = (
        _measure(device, case, field, first, last) for field in ("data_time_ms", "step_time_ms")
    )
    if not np.isfinite(waiting.value):
        return say(""), ("See whether model and batches are on the device, and profile a step: "
                         "loading, computing, synchronising.")  # fmt: skip
    if waiting.value >= _WAITS * whole.value:
        return (
            say(" A step waits {waiting} ms of {whole} ms for data.", waiting=waiting, whole=whole),
            "More loader workers, prefetching, pinned memory, less work per sample.",
        )
    return (
        say(" A step waits {waiting} ms of {whole} ms for data: the rest is computed, and not on "
            "this device.", waiting=waiting, whole=whole),
        "See whether the model and the batches are on the device (.to(device)), and what the "
        "processor does meanwhile.",
    )  # fmt: skip


def _measure(
    device: _Readings, case: Case, field: str, first: int | None, last: int | None
) -> Figure:
    return case.measure("telemetry", "", "median", field, first=first, last=last, rank=device.rank)
