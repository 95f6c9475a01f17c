"""The seventh family's tasks: plans that go well, for faults and traps to be put into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import Batch, Plan, deal
from benchmarks.diagnosis.scenario import Draw

Lose = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """The head's outputs."""
        return self.head(self.backbone(x))


class Sequence(nn.Module):
    """An embedding or a projection, a recurrent network, a head on the last state."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, outputs: int, **more: Any):
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.rnn = kind(width, width, batch_first=True, **more)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Of the last state."""
        return self.head(self.rnn(self.enter(x))[0][:, -1])


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a bypass."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """States of the same shape; `seen` is added to the scores."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5 + seen
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
        x = x + self.project(mixed)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A transformer over letters; `causal` may be switched off, as in a bug."""

    def __init__(self, letters: int, width: int, length: int, depth: int = 1, heads: int = 2):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)
        future = torch.triu(torch.full((length, length), -1e9), 1)
        self.register_buffer("future", future)
        self.causal = True

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits of the next letter at each place."""
        if seen is None:
            seen = self.future if self.causal else torch.zeros_like(self.future)
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


class Graph(nn.Module):
    """Graph convolutions with a normalised adjacency matrix that the model keeps."""

    def __init__(self, adjacency: Tensor, sizes: list[int], *, bypass: bool = False):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.bypass = bypass

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every node."""
        for place, layer in enumerate(self.layers):
            made = layer(self.adjacency @ x)
            if place < len(self.layers) - 1:
                made = made.relu()
                x = x + made if self.bypass and made.shape == x.shape else made
            else:
                x = made
        return x


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of a model's logits."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of a model's outputs."""
    return functional.mse_loss(model(x), y)


def make_dense(sizes: list[int], act: type[nn.Module] = nn.ReLU, drop: float = 0.0) -> nn.Module:
    """A perceptron: flat, fc0, act0, ..., head."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    for place, (a, b) in enumerate(pairwise(sizes[:-1])):
        layers[f"fc{place}"] = nn.Linear(a, b)
        layers[f"act{place}"] = act()
        if drop:
            layers[f"drop{place}"] = nn.Dropout(drop)
    layers["head"] = nn.Linear(sizes[-2], sizes[-1])
    return nn.Sequential(layers)


def learn(
    draw: Draw,
    data: Data,
    build: Callable[[], nn.Module],
    optimize: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    lose: Lose = classify,
    judge: Lose | None = None,
    size: int = 32,
    **options: Any,
) -> Plan:
    """A supervised plan; `judge` is the proof and the validation, as the loss where None."""
    judge = judge or lose

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Mapping[str, float]]:  # noqa: ARG001
        return lose(model, batch[0], batch[1]), {}

    made: dict[str, Any] = {
        "build": build,
        "optimize": optimize,
        "batch": deal(data, size, draw.stream("order")),
        "loss": loss,
        "val": lambda model: {"val/loss": float(judge(model, data.val_x, data.val_y))},
        "proof": lambda model: float(judge(model, data.proof_x, data.proof_y)),
        "epoch_steps": max(1, len(data.x) // size),
        "val_every": draw.choice(10, 15, 20),
        "config": {"batch_size": size},
    }
    return Plan(**{**made, **options})


def digits(draw: Draw, **options: Any) -> Plan:
    """Digits by a perceptron of two hidden layers."""
    data = options.pop("data", None) or datasets.load_digits(draw.stream("data"), noise=0.15)
    width, act = draw.integer(36, 64), draw.choice(nn.ReLU, nn.GELU, nn.SiLU)
    rate = draw.uniform(0.025, 0.05)
    options.setdefault("build", lambda: make_dense([64, width, width, 10], act))
    options.setdefault(
        "optimize", lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def shapes(draw: Draw, *, norm: bool = False, **options: Any) -> Plan:
    """Shapes by a small convolutional network."""
    data = options.pop("data", None) or datasets.load_shapes(draw.stream("data"), count=1200)
    width = draw.integer(6, 10)

    def build() -> nn.Module:
        def bn(count: int) -> nn.Module:
            return nn.BatchNorm2d(count) if norm else nn.Identity()

        body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            bn(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            bn(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * width, 24),
            nn.ReLU(),
        )
        return Net(body, nn.Linear(24, 4))

    options.setdefault("build", build)
    options.setdefault("optimize", lambda model: torch.optim.Adam(model.parameters(), lr=2e-3))
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def friedman(draw: Draw, **options: Any) -> Plan:
    """Friedman's regression with targets of mean 0 and deviation 1."""
    data = options.pop("data", None) or datasets.load_friedman(draw.stream("data"), count=1500)
    mean, deviation = data.y.mean(), data.y.std()
    scaled = {part: (getattr(data, part) - mean) / deviation for part in ("y", "val_y", "proof_y")}
    data = replace(data, **scaled)
    width = draw.integer(24, 48)
    options.setdefault("build", lambda: make_dense([10, width, width, 1]))
    options.setdefault("optimize", lambda model: torch.optim.Adam(model.parameters(), lr=4e-3))
    options.setdefault("lose", regress)
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def text(draw: Draw, *, count: int = 3000, **options: Any) -> Plan:
    """Next letters of text by a decoder."""
    data = sequences.load_text(draw.stream("data"), count=count, length=20)
    width = 2 * draw.integer(12, 18)
    rate = draw.uniform(3e-3, 6e-3)
    options.setdefault("build", lambda: Decoder(data.classes, width, 20))
    options.setdefault("optimize", lambda model: torch.optim.AdamW(model.parameters(), lr=rate))
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def make_masks(
    rng: np.random.Generator, *, count: int = 900, low: float = 2, high: float = 4
) -> Data:
    """Images 1 x 16 x 16 of a disc in noise, and where the disc is; y is 0 or 1 in float."""
    grid_y, grid_x = np.mgrid[0:16, 0:16]
    centre = rng.uniform(4, 12, (count, 2, 1, 1))
    radius = rng.uniform(low, high, (count, 1, 1))
    masks = np.hypot(grid_y - centre[:, 0], grid_x - centre[:, 1]) < radius
    images = masks + 0.5 * rng.normal(size=masks.shape)
    x = torch.tensor(images[:, None], dtype=torch.float32)
    y = torch.tensor(masks[:, None], dtype=torch.float32)
    a, b = int(0.6 * count), int(0.8 * count)
    return Data(x[:a], y[:a], x[a:b], y[a:b], x[b:], y[b:], classes=0)


def segment(draw: Draw, **options: Any) -> Plan:
    """Masks of discs by a fully convolutional network; judged by one minus the overlap."""
    data = options.pop("data", None) or make_masks(draw.stream("data"))
    width = draw.integer(6, 10)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(1, width, 3, padding=1),
                act0=nn.ReLU(),
                conv1=nn.Conv2d(width, width, 3, padding=1),
                act1=nn.ReLU(),
                head=nn.Conv2d(width, 1, 1),
            )
        )

    options.setdefault("build", build)
    options.setdefault("optimize", lambda model: torch.optim.Adam(model.parameters(), lr=4e-3))
    options.setdefault(
        "lose", lambda model, x, y: functional.binary_cross_entropy_with_logits(model(x), y)
    )
    return learn(draw, data, options.pop("build"), options.pop("optimize"), **options)


def draw_graph(
    rng: np.random.Generator, *, nodes: int = 240, classes: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of communities: normalised adjacency, features of the nodes, their classes."""
    label = rng.integers(0, classes, nodes)
    same = label[:, None] == label[None]
    edges = rng.uniform(size=(nodes, nodes)) < np.where(same, 0.06, 0.01)
    joined = np.triu(edges, 1)
    joined = joined | joined.T | np.eye(nodes, dtype=bool)
    degree = joined.sum(1) ** -0.5
    features = rng.normal(size=(classes, 12))[label] + 1.5 * rng.normal(size=(nodes, 12))
    adjacency = torch.tensor(joined * degree[:, None] * degree[None], dtype=torch.float32)
    return adjacency, torch.tensor(features, dtype=torch.float32), torch.from_numpy(label)
