"""Faults that starve layers of gradient, and faults that keep layers from being updated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.families.second_data import (
    handwriting,
    zipf_documents,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import (
    fault,
    judge_stagnation,
    judge_vanishing,
)
from benchmarks.diagnosis.scenario import Draw


class Highway(nn.Module):
    """A highway layer: a gate mixes a transformed input and the input."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.change = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.gate(x))
        return share * torch.tanh(self.change(x)) + (1 - share) * x


class Bag(nn.Module):
    """Mean of word vectors, then two layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="sum")
        self.hidden = nn.Linear(width, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.words(x))))


def _highway_gates(draw: Draw, faulty: bool) -> Lesson:
    """A highway net whose gate bias has the wrong sign: nothing is carried."""
    rng = draw.stream("build")
    data = handwriting(rng)
    width = 40
    bias = 4.0 if faulty else -2.0
    model = nn.Sequential(
        nn.Linear(64, width),
        *(Highway(width, bias) for _ in range(int(rng.integers(12, 17)))),
        nn.Linear(width, 10),
    )
    for module in model.modules():
        if isinstance(module, Highway):
            nn.init.normal_(module.change.weight, std=(0.5 - 0.2 * draw.severity) / width**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.08, 0.2), momentum=0.9)
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=240, names=("loss", "val_loss")
    )


def _resized_embedding(draw: Draw, faulty: bool) -> Lesson:
    """The vocabulary grows: the new embedding table is not the one that the optimizer has."""
    rng = draw.stream("build")
    data = zipf_documents(rng, words=400)
    model = Bag(400, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    steps = 240
    onset = draw.onset_step(steps, 0.2, 0.5)

    def finish(step: int) -> None:
        if step != onset - 1:
            return
        old = model.words.weight
        model.words.weight = nn.Parameter(old.detach().clone())
        if not faulty:
            optimizer.param_groups[0]["params"][0] = model.words.weight

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        finish=finish,
        onset=onset,
    )


SCENARIOS = (
    fault("vanish/highway_gates", _highway_gates, judge_vanishing("", "0.weight")),
    fault("stagnant/resized_embedding", _resized_embedding, judge_stagnation("words")),
)
