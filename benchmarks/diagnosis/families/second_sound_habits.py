"""Healthy trainings with unusual habits: schedules, rare layers, odd optimizers, sparse logs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    friedman,
    handwriting,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


def _net(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers += [nn.Linear(widths[place], widths[place + 1]), act()]
    return nn.Sequential(*layers[:-1])


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, width)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.encoder(x)) @ self.encoder.weight + self.shift


def _tied(draw: Draw) -> Lesson:
    """Tied weights, sum-reduced loss, many inactive units."""
    rng = draw.stream("build")
    data = handwriting(rng)
    data.y, data.y_held = data.x, data.x_held
    model = Tied(96)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 1e-4, 3e-4), momentum=0.9)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).pow(2).sum() * 32 / len(y)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, loss=loss)


class Dropped(nn.Module):
    """A residual net whose blocks are skipped at random in training."""

    def __init__(self, width: int, depth: int, source: np.random.Generator) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(_net(width, width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            share = 1 - 0.5 * (place + 1) / len(self.blocks)
            if not self.training:
                x = x + share * block(x)
            elif self.source.random() < share:
                x = x + block(x)
        return self.head(x)


def _stochastic_depth(draw: Draw) -> Lesson:
    """Blocks that take part in half of the steps, without gradient in the others."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Dropped(40, int(rng.integers(5, 9)), draw.stream("depth"))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.9)
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=300, gauge=None
    )  # fmt: skip


def _weights_change(draw: Draw) -> Lesson:
    """The weight of the loss is changed by a factor twice: the shown loss has two steps."""
    rng = draw.stream("build")
    data = friedman(rng)
    data = Material(data.x, (data.y - 14) / 5, data.x_held, (data.y_held - 14) / 5)
    model = _net(10, 40, 40, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))

    def weigh(step: int, loss: Tensor) -> Tensor:
        return loss * (1.0 if step < 120 else 3.0 if step < 220 else 0.5)

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=320, loss=functional.mse_loss,
        weigh=weigh,
    )  # fmt: skip


SCENARIOS = (
    sound("tied_autoencoder", _tied, share=0.5),
    sound("stochastic_depth", _stochastic_depth, share=0.5),
    sound("loss_weight_steps", _weights_change, share=0.5, rising=True),
)
