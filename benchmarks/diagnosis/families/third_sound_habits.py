"""Third family, healthy: optimizers, schedules, logging and machines of many kinds."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import (
    Course,
    Notes,
    note_gradients,
    supervise,
)
from benchmarks.diagnosis.families.third_tasks import (
    Speller,
    cross_entropy,
    load_chain,
    make_plain,
    scaled_friedman,
)
from benchmarks.diagnosis.networks import Residual, make_convolutional
from benchmarks.diagnosis.scenario import Draw


class _Layerwise(torch.optim.Optimizer):
    """Adam whose step of each tensor is as large as the rate times the tensor's norm."""

    def __init__(self, parameters: object, lr: float):
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p]
                if not kept:
                    kept.update(n=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                kept["n"] += 1
                kept["m"].lerp_(p.grad, 0.1)
                kept["v"].lerp_(p.grad.square(), 0.01)
                n = kept["n"]
                way = kept["m"] / (1 - 0.9**n) / ((kept["v"] / (1 - 0.99**n)).sqrt() + 1e-6)
                trust = p.norm().clamp(0.05, 10.0) / (way.norm() + 1e-9)
                p.sub_(group["lr"] * trust * way)


def _large_batches(draw: Draw) -> Course:
    """Half the data in a batch, with steps in proportion to each layer."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    model = make_plain(64, draw.integer(48, 80), 48, 10, act=nn.GELU)
    optimizer = _Layerwise(model.parameters(), lr=draw.log_uniform(0.01, 0.02))
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        batch=512,
        accumulate=draw.choice(1, 4),
        rate=lambda step: min(1.0, (step + 1) / 20) * (1 - step / 180),
        steps=180,
    )


def _factored(draw: Draw) -> Course:
    data = load_chain(draw)
    model = Speller(12, 2 * draw.integer(10, 16), 1, 16, before=True, causal=True)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=draw.log_uniform(0.02, 0.05))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=180)


def _heavy_ball(draw: Draw) -> Course:
    """Momentum 0.99: the loss swings before it settles."""
    data = scaled_friedman(draw)
    model = Residual(10, draw.integer(16, 28), 2, 1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=draw.log_uniform(0.0005, 0.0015), momentum=0.99, nesterov=True
    )
    return supervise(draw, model, data, functional.mse_loss, optimizer, steps=360)


def _root_mean_square(draw: Draw) -> Course:
    data = datasets.load_table("wine", draw.stream("data"))
    model = make_plain(13, draw.integer(12, 24), 3, act=nn.Sigmoid)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=draw.log_uniform(0.002, 0.005), centered=True
    )
    return supervise(draw, model, data, cross_entropy, optimizer, batch=8, steps=300)


def _half_precision(draw: Draw) -> Course:
    """Products in bfloat16, with a scaler whose scale is too high at first."""
    data = datasets.load_shapes(draw.stream("data"))
    model = make_convolutional([6, 12], 16, 4, hidden=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.001, 0.003))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=60)
    notes, order = Notes(), draw.stream("order")

    def advance(_step: int) -> dict[str, float]:
        chosen = torch.from_numpy(order.integers(0, len(data.x), 32))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(data.x[chosen]).float(), data.y[chosen])
        scaler.scale(8.0 * loss).backward()
        scaler.unscale_(optimizer)
        note_gradients(notes, model)
        notes.norms[-1] = notes.norms[-1] if math.isfinite(notes.norms[-1]) else 0.0
        scaler.step(optimizer)
        scaler.update()
        notes.losses.append(float(loss.detach()))
        return {"train/loss": notes.losses[-1], "train/scale": scaler.get_scale()}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=160,
        advance=advance,
        exam=lambda: cross_entropy(model(data.proof_x), data.proof_y),
        show=lambda: {"val/loss": float(cross_entropy(model(data.val_x), data.val_y))},
        notes=notes,
        options={"grad_scaler": scaler},
    )


def _every_tenth(draw: Draw) -> Course:
    """Metrics of every tenth step, of tiny batches."""
    data = datasets.load_digits(draw.stream("data"), noise=0.2)
    model = make_plain(64, draw.integer(32, 64), 10, act=nn.Mish)
    optimizer = torch.optim.NAdam(model.parameters(), lr=draw.log_uniform(0.001, 0.002))
    return supervise(
        draw, model, data, cross_entropy, optimizer, batch=3, log_every=10, val_every=50, steps=600
    )


class _Rounded(nn.Linear):
    """Weights on a coarse grid, with gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().max().detach() / 7.0
        coarse = (self.weight / step).round() * step
        return functional.linear(x, self.weight + (coarse - self.weight).detach(), self.bias)


def _four_bits(draw: Draw) -> Course:
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(32, 64)
    model = nn.Sequential(
        nn.Flatten(),
        _Rounded(64, width),
        nn.ReLU6(),
        _Rounded(width, width),
        nn.ReLU6(),
        _Rounded(width, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.004))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=220)


def _slow_every_other(draw: Draw) -> Course:
    """Two kinds of batches take turns: long ones compute longer, and nothing waits."""
    data = datasets.load_spirals(draw.stream("data"), arms=2)
    model = make_plain(2, draw.integer(32, 48), 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.005, 0.01))
    base, ratio = draw.log_uniform(10.0, 200.0), draw.uniform(1.1, 1.25)
    rng = draw.stream("clock")

    def clock(step: int) -> tuple[float, float, float]:
        compute = base * (ratio if step % 2 else 1.0) * float(np.exp(rng.normal(0.0, 0.02)))
        read = 0.03 * base * float(np.exp(rng.normal(0.0, 0.1)))
        return compute + read, read, compute

    return supervise(draw, model, data, cross_entropy, optimizer, clock=clock, steps=340)


SCENARIOS = (
    verdicts.healthy("large_batches", _large_batches),
    verdicts.healthy("factored", _factored),
    verdicts.healthy("heavy_ball", _heavy_ball),
    verdicts.healthy("root_mean_square", _root_mean_square),
    verdicts.healthy("half_precision", _half_precision),
    verdicts.healthy("every_tenth", _every_tenth),
    verdicts.healthy("four_bits", _four_bits),
    verdicts.healthy("slow_every_other", _slow_every_other),
)
