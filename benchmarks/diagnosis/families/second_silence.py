"""Faults that starve layers of gradient, and faults that keep layers from being updated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    characters,
    handwriting,
    shape_images,
    tabular,
    trigger_sequences,
    zipf_documents,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import (
    fault,
    judge_stagnation,
    judge_vanishing,
)
from benchmarks.diagnosis.scenario import Draw


class HalfWire(torch.autograd.Function):
    """The identity, whose gradient passes through half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad.half().to(grad.dtype)


class HalfLinear(nn.Linear):
    """A linear layer, the gradient of whose input is kept in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(HalfWire.apply(x))


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


class Skip(nn.Module):
    """A tanh convolution, with or without a skip around it."""

    def __init__(self, channels: int, skip: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.conv(x))
        return x + out if self.skip else out


class Fusion(nn.Module):
    """Two branches over two halves of the input, joined before the head."""

    def __init__(self, width: int, onset: int, faulty: bool) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(2 * width, 10)
        self.onset, self.faulty, self.calls = onset, faulty, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        right = self.right(x[:, 32:])
        if self.faulty and self.calls > self.onset:
            # A cache of features for logging found its way into the graph.
            right = right.detach()
        return self.head(torch.cat([self.left(x[:, :32]), right], -1).relu())


class Rounded(nn.Module):
    """An encoder whose code is quantised, with or without a straight-through gradient."""

    def __init__(self, straight: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24))
        self.decoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 10))
        self.straight = straight

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        rounded = torch.round(code * 4) / 4
        if self.straight:
            rounded = code + (rounded - code).detach()
        return self.decoder(rounded)


class Reader(nn.Module):
    """Embedding, GRU and head over tokens."""

    def __init__(self, symbols: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0].mean(1))


class Bag(nn.Module):
    """Mean of word vectors, then two layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="sum")
        self.hidden = nn.Linear(width, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.words(x))))


def _deep_tanh_images(draw: Draw, faulty: bool) -> Lesson:
    """A deep tanh conv net from which the skips were refactored away, with a small init."""
    rng = draw.stream("build")
    data = shape_images(rng, side=8)
    depth = int(rng.integers(12, 17))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *(Skip(8, skip=not faulty) for _ in range(depth)),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )
    for module in model.modules():
        if isinstance(module, Skip):
            nn.init.normal_(module.conv.weight, std=(0.045 - 0.02 * draw.severity))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.005, 0.02), momentum=0.9)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=150, batch=24)


def _half_underflow(draw: Draw, faulty: bool) -> Lesson:
    """Half-precision gradients without loss scaling: those of the early layers are zero."""
    rng = draw.stream("build")
    data = handwriting(rng)
    kind = HalfLinear if faulty else nn.Linear
    widths = [64, 96, 96, 96, 96]
    layers: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        layers += [kind(wide, next_wide), nn.SiLU()]
    model = nn.Sequential(*layers, kind(96, 10))
    # The loss is spread over a long accumulation: its gradients are small by design.
    scale = 10 ** -(5.0 + 0.5 * draw.severity)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 5e-4, 2e-3), eps=1e-14)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y) * scale

    return supervise(model, optimizer, data, draw.stream("batches"), steps=200, batch=64, loss=loss)


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


def _sigmoid_autoencoder(draw: Draw, faulty: bool) -> Lesson:
    """An autoencoder of eight sigmoid layers gives back the mean image only."""
    rng = draw.stream("build")
    data = handwriting(rng)
    data.y, data.y_held = data.x, data.x_held
    layers: list[nn.Module] = []
    widths = [64, 48, 32, 24, 16, 24, 32, 48]
    for wide, next_wide in pairwise(widths):
        layers += [nn.Linear(wide, next_wide), nn.Sigmoid() if faulty else nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(48, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=240,
        loss=functional.mse_loss,
        names=("train/recon_loss", "val/recon_loss"),
    )


def _replaced_head(draw: Draw, faulty: bool) -> Lesson:
    """The head is replaced for the new classes after the optimizer was built."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.AvgPool2d(2)))
    model.add_module("neck", nn.Sequential(nn.Flatten(), nn.Linear(12 * 25, 32), nn.ReLU()))
    model.add_module("head", nn.Linear(32, 1000))
    kind = draw.stream("kind").integers(2)
    make = torch.optim.AdamW if kind else torch.optim.SGD
    rate = log_uniform(rng, 5e-4, 2e-3) * (1 if kind else 30)
    optimizer = make(model.parameters(), lr=rate)
    model.head = nn.Linear(32, 4)
    if not faulty:
        optimizer = make(model.parameters(), lr=rate)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=160)


def _zeroed_group(draw: Draw, faulty: bool) -> Lesson:
    """A scheduler of several lambdas takes one group to rate zero far too early."""
    rng = draw.stream("build")
    data = trigger_sequences(rng)
    model = Reader(8, 24, 8)
    rate = log_uniform(rng, 3e-3, 8e-3)
    optimizer = torch.optim.Adam(
        [
            {"params": model.embed.parameters(), "lr": rate},
            {"params": model.gru.parameters(), "lr": rate},
            {"params": model.head.parameters(), "lr": rate},
        ]
    )
    steps = 300
    onset = draw.onset_step(steps, 0.15, 0.35)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        [
            lambda _step: 1.0,
            lambda step: 0.0 if faulty and step >= onset else 1.0,
            lambda _step: 1.0,
        ],
    )
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        finish=lambda _step: schedule.step(),
        onset=onset,
    )


def _detached_branch(draw: Draw, faulty: bool) -> Lesson:
    """One of two branches is cut from the graph from some step on."""
    rng = draw.stream("build")
    data = handwriting(rng)
    steps = 220
    onset = draw.onset_step(steps, 0.1, 0.35)
    model = Fusion(int(rng.integers(24, 40)), onset, faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.05, 0.15))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=steps, onset=onset)


def _no_straight_through(draw: Draw, faulty: bool) -> Lesson:
    """A quantised code without a straight-through gradient: the encoder gets none."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Rounded(straight=not faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=180)


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


def _frozen_forgotten(draw: Draw, faulty: bool) -> Lesson:
    """A group for layers 'without decay' was given rate zero by a units slip in its schedule."""
    rng = draw.stream("build")
    data = characters(rng)
    symbols = int(data.x.max()) + 1
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(symbols, 12))
    model.add_module("join", nn.Flatten())
    model.add_module("hidden", nn.Linear(144, 64))
    model.add_module("act", nn.GELU())
    model.add_module("norm", nn.LayerNorm(64))
    model.add_module("mixer", nn.Linear(64, 64))
    model.add_module("act2", nn.GELU())
    model.add_module("out", nn.Linear(64, symbols))
    rate = log_uniform(rng, 1e-3, 4e-3)
    slow = [*model.mixer.parameters()]
    rest = [entry for entry in model.parameters() if all(entry is not other for other in slow)]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "lr": rate}, {"params": slow, "lr": 0.0 if faulty else rate}],
        weight_decay=0.01,
    )
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=200,
        batch=64,
        names=("training_loss", "validation_loss"),
    )


def _small_tabular(draw: Draw, faulty: bool) -> Lesson:
    """Weights initialised a thousand times too small in the middle of a deep SELU net."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = nn.Sequential(
        nn.Linear(30, 32), nn.SELU(), nn.Linear(32, 32), nn.SELU(), nn.Linear(32, 32), nn.SELU(),
        nn.Linear(32, 32), nn.SELU(), nn.Linear(32, 2),
    )  # fmt: skip
    if faulty:
        with torch.no_grad():
            for place in (2, 4, 6):
                model[place].weight.mul_(10 ** -(1.5 + draw.severity))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.8)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=200)


SCENARIOS = (
    fault(
        "vanish/skips_removed",
        _deep_tanh_images,
        judge_vanishing("", "0.weight"),
    ),
    fault(
        "vanish/half_underflow",
        _half_underflow,
        judge_vanishing("8.weight", "0.weight", "0", "2", "4"),
    ),
    fault("vanish/highway_gates", _highway_gates, judge_vanishing("", "0.weight")),
    fault("vanish/sigmoid_autoencoder", _sigmoid_autoencoder, judge_vanishing("", "0.weight")),
    fault("vanish/tiny_middle", _small_tabular, judge_vanishing("8.weight", "0.weight")),
    fault("stagnant/replaced_head", _replaced_head, judge_stagnation("head")),
    fault("stagnant/zeroed_group", _zeroed_group, judge_stagnation("gru")),
    fault(
        "stagnant/detached_branch",
        _detached_branch,
        judge_stagnation("right", "right.0", "right.2"),
    ),
    fault(
        "stagnant/no_straight_through",
        _no_straight_through,
        judge_stagnation("encoder", "encoder.0", "encoder.2", zero=True),
    ),
    fault("stagnant/resized_embedding", _resized_embedding, judge_stagnation("words")),
    fault("stagnant/zero_rate_group", _frozen_forgotten, judge_stagnation("mixer")),
)
