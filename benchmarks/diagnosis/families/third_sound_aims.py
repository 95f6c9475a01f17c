"""Third family, healthy: aims whose losses are negative, noisy, tiny, huge or never small."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, supervise
from benchmarks.diagnosis.families.third_tasks import make_plain, split
from benchmarks.diagnosis.scenario import Draw


def _quantiles(draw: Draw) -> Course:
    data = datasets.load_friedman(draw.stream("data"), noise=draw.uniform(1.0, 2.5))
    model = make_plain(10, draw.integer(32, 64), 32, 3, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(output: Tensor, y: Tensor) -> Tensor:
        off = y - output
        return torch.maximum(levels * off, (levels - 1.0) * off).mean()

    return supervise(draw, model, data, loss, optimizer, steps=260)


def _hazards(draw: Draw) -> Course:
    """Survival times in a small unit: the likelihood goes from above zero to far below."""
    rng = draw.stream("data")
    x = rng.normal(size=(1600, 8))
    speed = np.exp(draw.uniform(1.5, 2.5) + 0.8 * x[:, 0] - 0.6 * np.tanh(x[:, 1] * 2))
    times = rng.exponential(size=1600) / speed
    limit = float(np.quantile(times, 0.8))
    y = np.stack([times.clip(max=limit), (times < limit).astype(float)], 1)
    model = make_plain(8, draw.integer(16, 32), 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=draw.log_uniform(0.004, 0.01), weight_decay=1e-3
    )

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0].exp() * y[:, 0] - y[:, 1] * output[:, 0]).mean()

    return supervise(draw, model, split(x, y), loss, optimizer, steps=240, keys=("nll", "val_nll"))


def _many_labels(draw: Draw) -> Course:
    """Twenty rare labels, each by a cross-entropy of its own."""
    rng = draw.stream("data")
    x = rng.normal(size=(1500, 24))
    y = (x @ rng.normal(size=(24, 20)) / 4.9 > draw.uniform(1.2, 1.6)).astype(np.float32)
    model = make_plain(24, draw.integer(40, 80), 20, drop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    loss = functional.binary_cross_entropy_with_logits
    return supervise(draw, model, split(x, y), loss, optimizer, steps=260)


def _equation(draw: Draw) -> Course:
    """A differential equation and its start, by a net of tanh; full batch, from 1 to 1e-5."""
    width, pull = draw.integer(16, 28), draw.uniform(2.0, 5.0)
    model = nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.003, 0.01))
    notes = Notes()
    x = torch.linspace(0, 1.5, 64)[:, None]
    truth = (-pull * x).exp()

    def value() -> Tensor:
        at = x.clone().requires_grad_()
        y = model(at)
        (slope,) = torch.autograd.grad(y.sum(), at, create_graph=True)
        start = (model(torch.zeros(1, 1)) - 1.0).square().mean()
        return 0.1 * (slope + pull * y).square().mean() + start

    return Course(
        model=model,
        optimizer=optimizer,
        steps=320,
        advance=lambda _step: {"loss/physics": descend(notes, model, optimizer, value())},
        exam=lambda: functional.mse_loss(model(x), truth),
        notes=notes,
        log_every=2,
    )


SCENARIOS = (
    verdicts.healthy("quantiles", _quantiles),
    verdicts.healthy("hazards", _hazards),
    verdicts.healthy("many_labels", _many_labels),
    verdicts.healthy("equation", _equation),
)
