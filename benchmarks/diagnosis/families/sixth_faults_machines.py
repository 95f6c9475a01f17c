"""Machines with a mistake: a loader that starves, memory that is kept; and a game that is lost."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis.families.seventh_course import pursue
from benchmarks.diagnosis.families.sixth_ranks import train_ranks
from benchmarks.diagnosis.families.sixth_tasks import digits
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from quark import SystemTelemetry, SystemTelemetryConfig

_BLOCK = 3_000_000


def train_with_memory(recorder: Recorder, draw: Draw, *, until: int, steps: int = 300) -> list[int]:
    """Train while blocks are kept, one a step, until a step; returns the memory after each step."""
    telemetry: list[SystemTelemetry] = []
    kept: list[np.ndarray] = []
    sizes: list[int] = []
    plan = digits(draw, steps=steps)
    plan.start = {"timing": "none"}
    page = os.sysconf("SC_PAGE_SIZE")

    def after(_model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
        if not telemetry:
            config = SystemTelemetryConfig(capture_gpu=False, sample_interval_s=0.05)
            telemetry.append(SystemTelemetry(recorder._session, config=config))
        if step < until:
            kept.append(np.ones(_BLOCK // 8))
        if step % 5 == 0:
            telemetry[0].sample(step=step)
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * page)

    plan.after = after
    try:
        pursue(plan, recorder)
    finally:
        for each in telemetry:
            each.close()
    return sizes


def _keep_graphs(recorder: Recorder, draw: Draw) -> Truth:
    """What each step made is appended to a list, "for the plot"."""
    sizes = train_with_memory(recorder, draw, until=300)
    grown = (sizes[-1] - sizes[20]) / (len(sizes) - 21)
    reason = f"memory grows by {grown / 1e6:.1f} MB a step, from {sizes[20] / 1e6:.0f} MB"
    if grown < 0.5 * _BLOCK:
        return doubt(f"{reason}: hardly")
    return Truth(kind="fault", expected=("memory_growth",), reason=reason)


def _part(recorder: Recorder, draw: Draw) -> Truth:
    """Two ranks that never average gradients: two trainings under one name."""
    told = train_ranks(recorder, draw, "apart")
    reason = f"rank 0 and 1 are {told['apart']:.3g} of their norm apart in the end"
    if told["apart"] < 0.05:
        return doubt(f"{reason}: the same")
    return Truth(
        kind="fault",
        expected=("replicas_differ",),
        tolerated=("overfitting_onset",),
        reason=reason,
    )


SCENARIOS = (
    Scenario(name="sixth/fault/kept_graphs", kind="fault", train=_keep_graphs),
    Scenario(name="sixth/fault/ranks_apart", kind="fault", train=_part),
)
