"""Healthy trainings with losses that look ill: adversaries, rewards, bounds, inner loops."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import tabular
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    log_uniform,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


def _inner_loops(draw: Draw) -> Lesson:
    """Meta-learning of sine waves: two inner steps of SGD inside each outer step."""
    rng = draw.stream("build")
    model = nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))

    def adapt(source: np.random.Generator) -> Tensor:
        size, phase = source.uniform(0.5, 2.0), source.uniform(0, np.pi)
        x = torch.as_tensor(source.uniform(-3, 3, (20, 1)), dtype=torch.float32)
        y = size * torch.sin(x + phase)
        weights = dict(model.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(model, weights, (x[:10],))
            loss = functional.mse_loss(out, y[:10])
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), grads, strict=True)
            weights = {name: entry - 0.05 * grad for (name, entry), grad in pairs}
        return functional.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), y[10:])

    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        loss = torch.stack([adapt(batches) for _ in range(4)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/meta_loss": loss.item()}

    def assess() -> float:
        source = np.random.default_rng(3)
        with torch.enable_grad():
            return float(np.mean([adapt(source).item() for _ in range(12)]))

    return Lesson(model=model, optimizer=optimizer, steps=240, advance=advance, assess=assess)


def _uncertain_tasks(draw: Draw) -> Lesson:
    """Two tasks weighed by learned variances: the loss goes through zero and below."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    mix = torch.as_tensor(rng.normal(size=(30, 2)) / 8, dtype=torch.float32)
    model = nn.Sequential()
    model.add_module("trunk", nn.Sequential(nn.Linear(30, 32), nn.SiLU()))
    model.add_module("heads", nn.Linear(32, 2))
    model.register_parameter("log_variance", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))
    batches = draw.stream("batches")

    def errors(x: Tensor) -> Tensor:
        return (model.heads(model.trunk(x)) - (x @ mix) * torch.tensor([1.0, 0.2])).pow(2).mean(0)

    def lose(x: Tensor) -> Tensor:
        return (errors(x) * (-model.log_variance).exp() + model.log_variance).sum()

    def advance(_step: int) -> dict[str, float]:
        loss = lose(data.draw(batches, 32)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=400,
        advance=advance,
        assess=lambda: float(errors(data.x_held).sum()),
        validate=lambda: {"val/loss": without_graph(lambda: float(lose(data.x_held)))},
    )


SCENARIOS = (
    sound("inner_loops", _inner_loops, share=0.7),
    sound("uncertain_tasks", _uncertain_tasks, share=0.3),
)
