"""The sixth family's tasks: courses that go well, for faults to be put into."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.seventh_course import Plan
from benchmarks.diagnosis.families.seventh_tasks import learn, regress
from benchmarks.diagnosis.scenario import Draw


class Letters(nn.Module):
    """A causal transformer over letters; `tied`: the head has the embedding's weight."""

    def __init__(self, count: int, width: int, length: int, *, depth: int = 1, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(count, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, count, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05 if tied else 1.0)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.full((length, length), -torch.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next letter at each place."""
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(self.norm(x))


class Variational(nn.Module):
    """An encoder to means and log-variances, a sample, a decoder."""

    def __init__(self, inputs: int, width: int, code: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, inputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input again, and the divergence of the code from its prior for each row."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return self.decoder(code), divergence


def digits(draw: Draw, **options: Any) -> Plan:
    """Digits by a perceptron of two hidden layers."""
    data = options.pop("data", None) or datasets.load_digits(draw.stream("data"), noise=0.1)
    width, act = draw.integer(40, 72), draw.choice(nn.ReLU, nn.GELU, nn.Tanh)
    rate = draw.uniform(0.03, 0.06)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(),
                first=nn.Linear(64, width),
                act1=act(),
                second=nn.Linear(width, width),
                act2=act(),
                head=nn.Linear(width, 10),
            )
        )

    options.setdefault(
        "optimize", lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    return learn(draw, data, options.pop("build", build), options.pop("optimize"), **options)


def images(draw: Draw, **options: Any) -> Plan:
    """Shapes by a small convolutional network: body, neck and head."""
    data = datasets.load_shapes(draw.stream("data"), count=1200)
    width = draw.integer(6, 10)

    def build() -> nn.Module:
        body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        neck = nn.Sequential(nn.Linear(32 * width, 24), nn.ReLU())
        return nn.Sequential(OrderedDict(body=body, neck=neck, head=nn.Linear(24, 4)))

    options.setdefault("optimize", lambda model: torch.optim.Adam(model.parameters(), lr=2e-3))
    return learn(draw, data, options.pop("build", build), options.pop("optimize"), **options)


def letters(draw: Draw, *, tied: bool = False, **options: Any) -> Plan:
    """Next letters of text by a causal transformer."""
    data = sequences.load_text(draw.stream("data"), count=3000, length=20)
    width = 2 * draw.integer(12, 18)
    rate = draw.uniform(3e-3, 5e-3)
    options.setdefault("optimize", lambda model: torch.optim.AdamW(model.parameters(), lr=rate))
    options.setdefault("build", lambda: Letters(data.classes, width, 20, tied=tied))
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def friedman(draw: Draw, *, scale: float = 1.0, **options: Any) -> Plan:
    """Friedman's regression by a perceptron; targets about `scale` around 0."""
    data = datasets.load_friedman(draw.stream("data"))
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(14.4).mul_(scale / 5.0)
    width = draw.integer(24, 48)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                first=nn.Linear(10, width),
                act1=nn.ReLU(),
                second=nn.Linear(width, width),
                act2=nn.ReLU(),
                head=nn.Linear(width, 1),
            )
        )

    options.setdefault("optimize", lambda model: torch.optim.Adam(model.parameters(), lr=4e-3))
    options.setdefault("lose", regress)
    return learn(draw, data, options.pop("build", build), options.pop("optimize"), **options)
