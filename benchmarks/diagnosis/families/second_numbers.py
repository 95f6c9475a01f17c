"""Faults in the numbers: NaN and infinity, spikes, updates of the wrong size, nothing learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    tabular,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import (
    fault,
    judge_nonfinite,
    judge_plateau,
)
from benchmarks.diagnosis.scenario import Draw


def _perceptron(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers.append(nn.Linear(widths[place], widths[place + 1]))
        if place < len(widths) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


def _log_of_zero(draw: Draw, faulty: bool) -> Lesson:
    """A hand-written binary cross entropy takes the logarithm of 1 - p where p rounds to one."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = _perceptron(30, 32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.9)
    sharp = 2 + 3 * draw.severity

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if not faulty:
            return functional.cross_entropy(out, y)
        share = torch.sigmoid(sharp * (out[:, 1] - out[:, 0]))
        return -(y * share.log() + (1 - y) * (1 - share).log()).mean()

    return supervise(model, optimizer, data, draw.stream("batches"), steps=160, loss=loss)


def _gradient_wiped(draw: Draw, faulty: bool) -> Lesson:
    """`zero_grad(set_to_none=False)` moved between backward and the optimizer's step."""
    rng = draw.stream("build")
    data = tabular("wine", rng)
    model = _perceptron(13, 32, 32, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))

    def correct(_step: int) -> None:
        if faulty:
            optimizer.zero_grad(set_to_none=False)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=200, correct=correct)


SCENARIOS = (
    fault("nonfinite/log_of_zero", _log_of_zero, judge_nonfinite()),
    fault("plateau/gradient_wiped", _gradient_wiped, judge_plateau()),
)
