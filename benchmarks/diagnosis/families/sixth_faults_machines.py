"""Machines with a mistake: a loader that starves, memory that is kept; and a game that is lost."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.clocks import draw_clock
from benchmarks.diagnosis.families.seventh_course import FALLOUT, pursue
from benchmarks.diagnosis.families.sixth_ranks import train_ranks
from benchmarks.diagnosis.families.sixth_tasks import digits
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from quark import SystemTelemetry, SystemTelemetryConfig

_BLOCK = 3_000_000


def _starve(recorder: Recorder, draw: Draw) -> Truth:
    """The cache of the loader is full, and from then on each batch comes over the network."""
    begin, factor = draw.onset_step(220, 0.3, 0.5), draw.uniform(2.0, 4.0)
    clock = draw_clock(draw.stream("clock"))
    plan = digits(draw, steps=220)
    plan.start = {"timing": "manual"}
    total = [0.0, 0.0]

    def after(_model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
        whole, data, compute = clock.take(step, probed=step % recorder.every == 0)
        if step >= begin:
            late = factor * clock.compute_ms * float(np.exp(clock.rng.normal(0.0, 0.3)))
            whole, data = whole + late, data + late
        total[step >= begin] += data / whole
        recorder.time(step, step_ms=whole, data_ms=data, compute_ms=compute)

    plan.after = after
    pursue(plan, recorder)
    before, later = total[0] / begin, total[1] / (220 - begin)
    reason = f"waiting for data took {before:.0%} of a step, and {later:.0%} from {begin} on"
    return Truth(
        kind="fault",
        expected=("runtime_bottleneck_risk",),
        onset_step=begin,
        reason=reason,
    )


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


@dataclass(slots=True)
class Ring:
    """Points around `count` centres on a circle."""

    count: int
    rng: np.random.Generator
    spread: float = 0.15
    centres: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        angles = 2 * np.pi * np.arange(self.count) / self.count
        self.centres = 2.0 * np.stack([np.cos(angles), np.sin(angles)], 1)

    def take(self, size: int) -> Tensor:
        """A batch of points."""
        chosen = self.centres[self.rng.integers(0, self.count, size)]
        return torch.from_numpy(chosen + self.spread * self.rng.normal(size=(size, 2))).float()

    def shares(self, points: Tensor) -> np.ndarray:
        """Of points that lie at a centre, the share at each; NaN where none does."""
        distances = np.linalg.norm(points.numpy()[:, None] - self.centres[None], axis=2)
        near = distances.argmin(1)[distances.min(1) < max(0.6, 2.5 * self.spread)]
        return np.bincount(near, minlength=self.count) / max(1, len(points))


def play(
    recorder: Recorder,
    draw: Draw,
    *,
    centres: int,
    steps: int,
    rates: tuple[float, float],
    spread: float = 0.15,
) -> tuple[np.ndarray, nn.Module]:
    """A game of two networks for a ring; returns the shares of the centres, and the model."""
    ring = Ring(centres, draw.stream("data"), spread)

    def stack(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, 64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, outputs),
        )

    model = nn.Sequential(OrderedDict(generator=stack(8, 2), critic=stack(2, 1)))
    made, judged = model.get_submodule("generator"), model.get_submodule("critic")
    turns = [
        torch.optim.Adam(part.parameters(), lr=rate, betas=(0.5, 0.9))
        for part, rate in zip((made, judged), rates, strict=True)
    ]
    recorder.start(model, turns, config={"lr": rates[0], "game": "gan"})
    for step in range(steps):
        real = ring.take(128)
        with recorder.step(step):
            false = made(torch.randn(128, 8))
            turns[1].zero_grad()
            right = functional.softplus(-judged(real)).mean()
            critic = right + functional.softplus(judged(false.detach())).mean()
            critic.backward()
            turns[1].step()
            turns[0].zero_grad()
            generator = functional.softplus(-judged(false)).mean()
            generator.backward()
            turns[0].step()
            recorder.log(
                {"train/generator_loss": generator.item(), "train/critic_loss": critic.item()}
            )
    with torch.no_grad():
        return ring.shares(made(torch.randn(2000, 8))), model


def _lose_modes(recorder: Recorder, draw: Draw) -> Truth:
    """The generator learns forty times as fast as the critic, and runs after one centre."""
    shares, _ = play(recorder, draw, centres=8, steps=700, rates=(8e-3, 2e-4))
    covered = int((shares > 0.03).sum())
    reason = f"{covered} of 8 centres are covered, {shares.sum():.0%} of the points lie at one"
    if covered > 3:
        return doubt(f"{reason}: most are")
    return Truth(kind="fault", tolerated=(*FALLOUT, "non_finite_values"), reason=reason)


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
    Scenario(name="sixth/fault/starved_loader", kind="fault", train=_starve),
    Scenario(name="sixth/fault/kept_graphs", kind="fault", train=_keep_graphs),
    Scenario(name="sixth/fault/lost_modes", kind="fault", train=_lose_modes),
    Scenario(name="sixth/fault/ranks_apart", kind="fault", train=_part),
)
