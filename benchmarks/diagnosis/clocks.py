"""Times of steps as machines have them: a base, noise, slow first steps, evaluations, faults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class StepClock:
    """Draws the times of one step after the other.

    Attributes:
        rng: For the noise.
        compute_ms, data_ms: Medians of a step's parts.
        noise: Standard deviation of the logarithm of each part.
        tail: Share of steps that are slower by half to twice.
        first_ms: Added to the first step (compilation, allocation).
        period, period_ms: Every so many steps takes so much longer (evaluation, checkpoint).
        probe_ms: What a probed step takes longer.
    """

    rng: np.random.Generator
    compute_ms: float
    data_ms: float
    noise: float = 0.04
    tail: float = 0.01
    first_ms: float = 0.0
    period: int = 0
    period_ms: float = 0.0
    probe_ms: float = 0.0

    def take(self, step: int, *, probed: bool = False) -> tuple[float, float, float]:
        """Step, data and compute time of a step in milliseconds."""
        data = self.data_ms * float(np.exp(self.rng.normal(0.0, 2.0 * self.noise)))
        compute = self.compute_ms * float(np.exp(self.rng.normal(0.0, self.noise)))
        if self.rng.uniform() < self.tail:
            compute *= float(self.rng.uniform(1.5, 2.0))
        if step == 0:
            compute += self.first_ms
        if self.period and step and step % self.period == 0:
            compute += self.period_ms
        if probed:
            compute += self.probe_ms
        return data + compute + 0.01 * self.compute_ms, data, compute


def draw_clock(rng: np.random.Generator) -> StepClock:
    """The clock of a healthy machine."""
    compute = float(np.exp(rng.uniform(np.log(2.0), np.log(300.0))))
    return StepClock(
        rng,
        compute_ms=compute,
        data_ms=compute * float(rng.uniform(0.01, 0.15)),
        noise=float(rng.uniform(0.01, 0.08)),
        tail=float(rng.uniform(0.0, 0.02)),
        first_ms=compute * float(rng.choice([0.0, 3.0, 20.0])),
        probe_ms=compute * float(rng.uniform(0.0, 0.1)),
    )
