"""Third family: trainings that learn well and wait for something."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, supervise
from benchmarks.diagnosis.families.third_tasks import cross_entropy, make_plain, scaled_friedman
from benchmarks.diagnosis.scenario import Draw

Delay = Callable[[int, float, np.random.Generator], tuple[float, float]]


def _learn(draw: Draw, late: float, delay: Delay, faulty: bool) -> Course:
    """A plain training whose steps get what `delay` adds to computing and to data."""
    base = draw.log_uniform(4.0, 200.0)
    noise = draw.uniform(0.01, 0.05)
    share = draw.uniform(0.01, 0.06)
    if draw.choice(True, False):
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model, loss = make_plain(64, 48, 10), cross_entropy
    else:
        data, loss = scaled_friedman(draw), nn.functional.mse_loss
        model = make_plain(10, 32, 32, 1, act=nn.GELU)
    steps = 10 * draw.integer(22, 32)
    onset = int(late * steps)
    rng = draw.stream("clock")

    def clock(step: int) -> tuple[float, float, float]:
        compute = base * float(np.exp(rng.normal(0.0, noise)))
        read = share * base * float(np.exp(rng.normal(0.0, 3 * noise)))
        more_compute, more_read = delay(step, base, rng)
        if faulty and step >= onset:
            compute, read = compute + more_compute, read + more_read
        return 1.01 * compute + read, read, compute

    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.003))
    return supervise(draw, model, data, loss, optimizer, steps=steps, onset=onset, clock=clock)


def _alternating_wait(draw: Draw, faulty: bool) -> Course:
    """So many workers, so many quick steps, and then a wait for all of them."""
    workers = draw.integer(2, 5)
    wait = (1.0 + 2.0 * draw.severity) * workers

    def delay(step: int, base: float, rng: np.random.Generator) -> tuple[float, float]:
        waits = step % workers == workers - 1
        return 0.0, base * wait * float(rng.uniform(0.8, 1.2)) if waits else 0.0

    return _learn(draw, 0.0, delay, faulty)


def _swapping_host(draw: Draw, faulty: bool) -> Course:
    """Memory is full, and now and then a step waits for a disk."""
    late = draw.uniform(0.25, 0.5)
    strength = 0.6 + 1.5 * draw.severity

    def delay(_step: int, base: float, rng: np.random.Generator) -> tuple[float, float]:
        return base * strength * float(np.exp(rng.normal(0.0, 0.9))), 0.0

    return _learn(draw, late, delay, faulty)


SCENARIOS = (
    verdicts.fault("runtime/alternating_wait", _alternating_wait, verdicts.judge_runtime),
    verdicts.fault("runtime/swapping_host", _swapping_host, verdicts.judge_runtime),
)
