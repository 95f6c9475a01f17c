"""Healthy trainings on machines and in stages: clocks with a reason, resumption, odd precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    friedman,
    handwriting,
    shape_images,
    tabular,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


class SignUnits(nn.Module):
    """Units of minus or plus one, with a straight-through gradient inside the linear range."""

    def forward(self, x: Tensor) -> Tensor:
        soft = x.clamp(-1, 1)
        return soft + (torch.sign(x) - soft).detach()


def _binary_units(draw: Draw) -> Lesson:
    """Activations that are all at their bounds by design."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), SignUnits(), nn.Linear(64, 48), nn.BatchNorm1d(48),
        SignUnits(), nn.Linear(48, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=240, batch=48)


def _pruned(draw: Draw) -> Lesson:
    """Weights are pruned in rounds, up to four fifths of them, and stay zero."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    masks = {0: torch.ones(80, 64), 2: torch.ones(10, 80)}

    def finish(step: int) -> None:
        for place, mask in masks.items():
            weight = model[place].weight
            if step in {90, 130, 170, 210}:
                bound = torch.quantile(weight.detach().abs()[mask > 0], 0.3)
                mask.mul_((weight.detach().abs() > bound).float())
            with torch.no_grad():
                weight.mul_(mask)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=320, finish=finish)


def _accumulated(draw: Draw) -> Lesson:
    """Four small batches to a step, of very different sizes; brain floats in the forward pass."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(200, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.03, 0.08), momentum=0.9)
    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        optimizer.zero_grad()
        whole = 0.0
        for size in (4, 8, 8, 12):
            x, y = data.draw(batches, size)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = functional.cross_entropy(out.float(), y) * size / 32
            loss.backward()
            whole += loss.item()
        optimizer.step()
        return {"train/loss": whole}

    def assess() -> float:
        return float(functional.cross_entropy(model(data.x_held), data.y_held))

    return Lesson(model=model, optimizer=optimizer, steps=180, advance=advance, assess=assess)


def _counts(draw: Draw) -> Lesson:
    """Poisson regression of large counts: raw losses far below zero, with heavy tails."""
    rng = draw.stream("build")
    data = friedman(rng)
    data.y = torch.poisson(data.y.clamp(min=0) * 8)
    data.y_held = torch.poisson(data.y_held.clamp(min=0) * 8)
    model = nn.Sequential(nn.Linear(10, 32), nn.Softplus(), nn.Linear(32, 1))
    nn.init.constant_(model[-1].bias, 4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.poisson_nll_loss(out, y)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, loss=loss)


def _resilient(draw: Draw) -> Lesson:
    """Rprop on the whole data: step sizes of every weight's own, gradients that fall to nothing."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = nn.Sequential(nn.Linear(30, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.Rprop(model.parameters(), lr=log_uniform(rng, 5e-4, 2e-3))

    def advance(_step: int) -> dict[str, float]:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.x), data.y, label_smoothing=0.15)
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    def assess() -> float:
        return float(
            functional.cross_entropy(model(data.x_held), data.y_held, label_smoothing=0.15)
        )

    return Lesson(model=model, optimizer=optimizer, steps=120, advance=advance, assess=assess)


SCENARIOS = (
    sound("binary_units", _binary_units, share=0.4),
    sound("pruned_in_rounds", _pruned, share=0.3),
    sound("accumulated_brain_floats", _accumulated, share=0.5),
    sound("poisson_counts", _counts, share=0.985),
    sound("rprop", _resilient, share=0.8),
)
