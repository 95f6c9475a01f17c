"""Tasks and networks of the fourth family that others of the exam do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.fourth_course import Course
from benchmarks.diagnosis.scenario import Draw

Measure = Callable[[Tensor, Tensor], Tensor]


class Batches:
    """Shuffled batches of a data set, drawn from the run's own stream."""

    def __init__(self, draw: Draw, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size
        self.rng = draw.stream("order")
        self.queue: list[Tensor] = []

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch; a new shuffle where the epoch is over."""
        if not self.queue:
            order = torch.from_numpy(self.rng.permutation(len(self.x)))
            self.queue = list(order.split(self.size))
            if len(self.queue) > 1 and len(self.queue[-1]) < self.size:
                self.queue.pop()
        chosen = self.queue.pop(0)
        return self.x[chosen], self.y[chosen]

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        return max(1, len(self.x) // self.size)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Over the last axis."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def hit_rate(output: Tensor, target: Tensor) -> float:
    """Share of right classes."""
    return float((output.argmax(-1) == target).double().mean())


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """As users validate: evaluation mode, no gradients, and back to training."""
    model.eval()
    with torch.no_grad():
        output: Tensor = model(x)
    model.train()
    return output


def supervise(
    draw: Draw,
    model: nn.Module,
    data: Data,
    optimizer: torch.optim.Optimizer,
    *,
    measure: Measure | None = None,
    proof: Measure | None = None,
    size: int = 32,
    keys: tuple[str, str] = ("train/loss", "val/loss"),
    accuracy: bool = True,
    **options: Any,
) -> Course:
    """The course of a model from inputs to targets.

    Args:
        draw: Of the run.
        model, data, optimizer: What is trained on what.
        measure: The loss; cross-entropy where not given.
        proof: The examiner's loss; as `measure` where not given.
        size: Of batches.
        keys: Of the two losses.
        accuracy: Whether accuracy is logged, of classes.
        **options: Of Course.
    """
    loss = measure or cross_entropy
    judge = proof or loss
    batches = Batches(draw, data.x, data.y, size)

    def take(_step: int) -> Tensor:
        x, y = batches.take()
        return loss(model(x), y)

    def validate() -> dict[str, float]:
        output = evaluate(model, data.val_x)
        values = {keys[1]: float(loss(output, data.val_y))}
        if accuracy and data.classes:
            values[keys[1].replace("loss", "accuracy")] = hit_rate(output, data.val_y)
        return values

    made: dict[str, Any] = {
        "loss": take,
        "proof": lambda seen: float(judge(seen(data.proof_x), data.proof_y)),
        "held_out": validate,
        "loss_key": keys[0],
        "per_epoch": batches.per_epoch,
        **options,
    }
    return Course(model=model, optimizer=optimizer, **made)


class Vae(nn.Module):
    """A variational autoencoder of vectors."""

    def __init__(self, inputs: int, width: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        self.mean = nn.Linear(width, code)
        self.spread = nn.Linear(width, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.ReLU(), nn.Linear(width, inputs), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input again, and mean and logarithm of the variance of the code."""
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (0.5 * spread).exp()), mean, spread


def draw_ring(rng: np.random.Generator, count: int, modes: int = 6) -> Tensor:
    """Points of as many clouds on a ring."""
    angle = 2 * np.pi * rng.integers(0, modes, count) / modes
    points = np.stack([np.cos(angle), np.sin(angle)], 1) + rng.normal(0.0, 0.12, (count, 2))
    return torch.from_numpy(points).float()
