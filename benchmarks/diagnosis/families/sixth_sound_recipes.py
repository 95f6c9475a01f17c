"""Sound recipes that look odd: beside each mistake of the family, what only resembles it."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.sixth_course import Batch, Course, cycle, sound
from benchmarks.diagnosis.families.sixth_tasks import (
    classify,
    digits,
    images,
    regress,
    teach,
)
from benchmarks.diagnosis.scenario import Draw, Scenario


def _pick(data: Data, low: int, high: int) -> Data:
    """Rows of the classes from low to below high, whose labels begin at 0."""
    parts = {}
    for name in ("", "val_", "proof_"):
        y = getattr(data, f"{name}y")
        kept = (y >= low) & (y < high)
        parts[f"{name}x"], parts[f"{name}y"] = getattr(data, f"{name}x")[kept], y[kept] - low
    return Data(**parts, classes=high - low)


def _build_tuned(width: int, state: dict[str, Tensor] | None, *, low_rank: int = 0) -> nn.Module:
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
    if state is not None:
        body.load_state_dict(state)
    layers = OrderedDict(body=body, act=nn.ReLU(), head=nn.Linear(width, 5))
    if low_rank:
        body.requires_grad_(False)
        layers["adapter"] = nn.Sequential(
            nn.Linear(width, low_rank, bias=False), nn.Linear(low_rank, width, bias=False)
        )
        nn.init.zeros_(layers["adapter"][1].weight)
        return _Adapted(layers)
    return nn.Sequential(layers)


class _Adapted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return self.head(self.act(features + self.adapter(features)))


def _pretrain(data: Data, width: int, rng: np.random.Generator) -> dict[str, Tensor]:
    """The body's weights after it was trained on classes 0 to 4."""
    data = _pick(data, 0, 5)
    model = _build_tuned(width, None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        rows = torch.from_numpy(rng.integers(0, len(data.x), 32))
        optimizer.zero_grad()
        classify(model, data.x[rows], data.y[rows]).backward()
        optimizer.step()
    return model.get_submodule("body").state_dict()


def _frozen_body(draw: Draw) -> Course:
    """Linear probing: the body was trained before and is frozen; the head learns other classes."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(64, 96)
    state = _pretrain(data, width, draw.stream("pretraining"))

    def build() -> nn.Module:
        model = _build_tuned(width, state)
        model.get_submodule("body").requires_grad_(False)
        return model

    return teach(
        draw,
        _pick(data, 5, 10),
        build,
        lambda model: torch.optim.Adam(model.get_submodule("head").parameters(), lr=4e-3),
        steps=240,
    )


def _adapter(draw: Draw) -> Course:
    """A low-rank adapter, its second factor zero at first, and a head beside a frozen body."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    state = _pretrain(data, 96, draw.stream("pretraining"))
    return teach(
        draw,
        _pick(data, 5, 10),
        lambda: _build_tuned(96, state, low_rank=4),
        lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 4e-3),
        steps=240,
    )


def _gentle_tuning(draw: Draw) -> Course:
    """The whole of a trained network goes on with new data at a small rate."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    state = _pretrain(data, 80, draw.stream("pretraining"))
    rate = draw.uniform(1.5e-4, 2.5e-4)
    return teach(
        draw,
        _pick(data, 5, 10),
        lambda: _build_tuned(80, state),
        lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
        steps=260,
    )


def _warm_restarts(draw: Draw) -> Course:
    """Cosine with restarts from a high rate: the loss jumps a little at each."""
    period = draw.choice(60, 75)
    return images(
        draw,
        steps=300,
        log_rate=True,
        rate=lambda step: 0.5 * (1 + math.cos(math.pi * (step % period) / period)),
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9),
    )


def _rate_to_zero(draw: Draw) -> Course:
    """Linear to zero: the last updates are nearly none, as planned."""
    return digits(
        draw,
        steps=300,
        log_rate=True,
        rate=lambda step: min(1.0, (step + 1) / 20) * (1 - step / 300),
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=4e-3),
    )


def _rare_rows(draw: Draw) -> Course:
    """An embedding of 400 words of which most are seen seldom: their gradient is zero."""
    rng = draw.stream("data")
    chances = 1.0 / np.arange(1, 401) ** 1.1
    words = rng.choice(400, (2400, 12), p=chances / chances.sum())
    tone = rng.normal(size=400)
    y = (tone[words].sum(1) + 0.5 * rng.normal(size=2400) > 0).astype(np.int64)
    x, y = torch.from_numpy(words), torch.from_numpy(y)
    data = Data(x[:1600], y[:1600], x[1600:2000], y[1600:2000], x[2000:], y[2000:], classes=2)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(400, 12)
            self.head = nn.Linear(12, 2)
            nn.init.normal_(self.embed.weight, std=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1))

    return teach(
        draw, data, Bag, lambda model: torch.optim.Adam(model.parameters(), lr=6e-3), steps=300
    )


def _batches_of_two(draw: Draw) -> Course:
    """Two rows a batch: each loss says little, and all of them together learn."""
    return digits(
        draw,
        size=2,
        steps=600,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    )


def _rare_class(draw: Draw) -> Course:
    """One row of thirty is of the class that matters, and weighs as much as the others."""
    shares = (0.97, 0.03)
    data = datasets.load_blobs(
        draw.stream("data"), count=4000, features=12, classes=2, spread=2.2, shares=shares
    )
    weight = torch.tensor([0.5 / 0.97, 0.5 / 0.03])

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        # Divided by the size, not by the weights in the batch: the usual choice of old code.
        losses = functional.cross_entropy(model(x), y, reduction="none") * weight[y]
        return losses.mean()

    return teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)),
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        lose=lose,
        size=64,
        steps=260,
    )


def _accumulated(draw: Draw) -> Course:
    """Eight small batches to one step, divided by eight."""
    return digits(
        draw,
        size=8,
        steps=480,
        accumulate=8,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.9),
    )


def _always_clipped(draw: Draw) -> Course:
    """A recurrent network whose gradients are clipped at almost every step, under Adam."""
    data = sequences.load_text(draw.stream("data"), count=3000, length=20)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(data.classes, 24)
            self.rnn = nn.LSTM(24, 40, batch_first=True)
            self.head = nn.Linear(40, data.classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(x))[0])

    return teach(
        draw,
        data,
        Reader,
        lambda model: torch.optim.Adam(model.parameters(), lr=6e-3),
        clip=0.1,
        steps=220,
    )


def _much_dropout(draw: Draw) -> Course:
    """Half of everything is dropped: the training loss stays far above that of validations."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(),
                first=nn.Linear(64, 96),
                norm=nn.BatchNorm1d(96),
                act=nn.ReLU(),
                drop=nn.Dropout(0.6),
                head=nn.Linear(96, 10),
            )
        )

    return digits(draw, data=data, build=build, steps=280, val_every=10)


def _wide_gap(draw: Draw) -> Course:
    """The training loss is soon a fraction of the other, which still falls."""
    data = datasets.load_digits(draw.stream("data"), noise=0.25).shrink(500)
    return digits(
        draw,
        data=data,
        steps=200,
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.1),
    )


def _strong_decay(draw: Draw) -> Course:
    """AdamW with a decay of 0.3 at a small rate, as large networks have it."""
    return images(
        draw,
        steps=280,
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3),
    )


def _curriculum(draw: Draw) -> Course:
    """Harder rows come in two stages: the training loss rises at each, and falls again."""
    data = datasets.load_digits(draw.stream("data"))
    noise, stage = draw.stream("noise"), draw.choice(90, 110)

    def disturb(x: Tensor, by: float) -> Tensor:
        return x + by * torch.from_numpy(noise.normal(size=x.shape)).float()

    data = replace(data, val_x=disturb(data.val_x, 0.4), proof_x=disturb(data.proof_x, 0.4))
    made = digits(draw, data=data, steps=3 * stage)
    plain = made.batch

    def batch(step: int) -> Batch:
        x, y, rows = plain(step)
        return disturb(x, 0.2 * (step // stage)), y, rows

    made.batch = batch
    return made


def _by_length(draw: Draw) -> Course:
    """Batches of rows of like length: the loss goes up and down with the length."""
    rng = draw.stream("data")
    count = 2000
    lengths = rng.integers(3, 24, count)
    x = np.zeros((count, 24), dtype=np.float32)
    for row, length in enumerate(lengths):
        x[row, :length] = rng.normal(size=length)
    y = (x.sum(1, keepdims=True) * 0.6 + np.abs(x).sum(1, keepdims=True) * 0.1).astype(np.float32)
    x_, y_ = torch.from_numpy(x), torch.from_numpy(y)
    data = Data(x_[:1200], y_[:1200], x_[1200:1600], y_[1200:1600], x_[1600:], y_[1600:], 0)
    ranked = np.argsort(lengths[:1200], kind="stable").reshape(-1, 40)
    made = teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 1)),
        lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        lose=regress,
        size=40,
        steps=300,
    )
    order = draw.stream("buckets")
    state = {"order": np.arange(len(ranked))}

    def batch(step: int) -> Batch:
        if step % len(ranked) == 0:
            state["order"] = order.permutation(len(ranked))
        rows = torch.from_numpy(ranked[state["order"][step % len(ranked)]].copy())
        return data.x[rows], data.y[rows], rows

    made.batch = batch
    return made


def _zero_branches(draw: Draw) -> Course:
    """Residual branches end in zero weights: all before them gets no gradient in the first step."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry = nn.Linear(64, 48)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)) for _ in range(6)
            )
            self.head = nn.Linear(48, 10)
            for block in self.blocks:
                nn.init.zeros_(block[2].weight)
                nn.init.zeros_(block[2].bias)

        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x.flatten(1))
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return digits(
        draw,
        data=data,
        build=Deep,
        steps=240,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    )


def _mostly_black(draw: Draw) -> Course:
    """Digits in the middle of a black frame: three quarters of the inputs never change."""
    data = datasets.load_digits(draw.stream("data"))
    parts = {
        name: functional.pad(getattr(data, name), (4, 4, 4, 4))
        for name in ("x", "val_x", "proof_x")
    }

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(), first=nn.Linear(256, 64), act=nn.ReLU(), head=nn.Linear(64, 10)
            )
        )

    return digits(draw, data=replace(data, **parts), build=build, steps=220)


def _in_time_order(draw: Draw) -> Course:
    """A forecast learned as the days come, never shuffled; it is asked of later days."""
    rng = draw.stream("data")
    days = np.arange(3300)
    series = np.sin(2 * np.pi * days / 7) + 0.5 * np.sin(2 * np.pi * days / 30.5 + 1)
    series = (series + 0.1 * rng.normal(size=len(days))).astype(np.float32)
    x = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(series, 20)[:-1].copy())
    y = torch.from_numpy(series[20:, None].copy())
    data = Data(x[:2600], y[:2600], x[2600:2900], y[2600:2900], x[2900:], y[2900:], classes=0)
    return teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)),
        lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        lose=regress,
        size=10,
        steps=260,
        batch=cycle(data, 10, draw.stream("order"), shuffled=False),
    )


def _soon_done(draw: Draw) -> Course:
    """An easy task with much noise in its targets: soon there is nothing left to learn."""
    rng = draw.stream("data")
    x = torch.from_numpy(rng.normal(size=(4000, 8))).float()
    way = torch.from_numpy(rng.normal(size=(8, 1))).float()
    y = x @ way + 1.2 * torch.from_numpy(rng.normal(size=(4000, 1))).float()
    data = Data(x[:3000], y[:3000], x[3000:3500], y[3000:3500], x[3500:], y[3500:], classes=0)
    return teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        lose=regress,
        size=64,
        steps=300,
    )


SCENARIOS: tuple[Scenario, ...] = (
    sound("frozen_body", _frozen_body),
    sound("adapter", _adapter),
    sound("gentle_tuning", _gentle_tuning, gain=0.2),
    sound("warm_restarts", _warm_restarts),
    sound("rate_to_zero", _rate_to_zero),
    sound("rare_rows", _rare_rows, gain=0.15),
    sound("batches_of_two", _batches_of_two),
    sound("rare_class", _rare_class),
    sound("accumulated", _accumulated),
    sound("always_clipped", _always_clipped),
    sound("much_dropout", _much_dropout),
    sound("wide_gap", _wide_gap),
    sound("strong_decay", _strong_decay),
    sound("curriculum", _curriculum),
    sound("by_length", _by_length),
    sound("zero_branches", _zero_branches),
    sound("mostly_black", _mostly_black),
    sound("in_time_order", _in_time_order),
    sound("soon_done", _soon_done),
)
