"""Faults that blow training up: gradients, weights or losses that grow without bound."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    handwriting,
)
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    log_uniform,
    supervise,
)
from benchmarks.diagnosis.families.second_judges import fault, judge_explosion
from benchmarks.diagnosis.scenario import Draw


class Block(nn.Module):
    """A residual block, with or without layer norm before it."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


def _norms_removed(draw: Draw, faulty: bool) -> Lesson:
    """A deep residual net whose layer norms went missing, with the rate that needs them."""
    rng = draw.stream("build")
    data = handwriting(rng)
    width, depth = 48, int(rng.integers(14, 20))
    model = nn.Sequential(
        nn.Linear(64, width),
        *(Block(width, norm=not faulty) for _ in range(depth)),
        nn.LayerNorm(width) if not faulty else nn.Identity(),
        nn.Linear(width, 10),
    )
    for module in model.modules():
        if isinstance(module, Block):
            nn.init.kaiming_normal_(module.up.weight)
            nn.init.normal_(module.down.weight, std=(0.5 + 0.4 * draw.severity) / width**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.9)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=150, batch=24)


SCENARIOS = (
    fault("explode/layer_norms_removed", _norms_removed, judge_explosion(from_start=True)),
)
