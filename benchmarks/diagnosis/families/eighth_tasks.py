"""Tasks and networks of the eighth family, and the supervised course of most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.eighth_course import Course
from benchmarks.diagnosis.scenario import Draw


def sample(draw: Draw, count: int, size: int) -> Callable[[int], Tensor]:
    """Indices of a step's batch, from epochs without replacement."""
    rng = draw.stream("order")
    queue: list[int] = []

    def take(_step: int) -> Tensor:
        if len(queue) < size:
            queue[:] = rng.permutation(count).tolist()
        taken, queue[:size] = queue[:size], []
        return torch.tensor(taken)

    return take


def cut(x: Any, y: Any, classes: int) -> Data:
    """Inputs and targets in three parts, 60, 20 and 20 %."""
    x = torch.as_tensor(np.asarray(x))
    y = torch.as_tensor(np.asarray(y))
    x = x.float() if x.is_floating_point() else x.long()
    y = y.float() if y.is_floating_point() else y.long()
    first, second = int(0.6 * len(x)), int(0.8 * len(x))
    return Data(
        x[:first], y[:first], x[first:second], y[first:second], x[second:], y[second:], classes
    )


def make_images(
    draw: Draw, *, count: int = 1500, classes: int = 8, side: int = 12, noise: float = 0.6
) -> Data:
    """Images of gratings: each class has an angle and a period; phases, contrast and noise vary."""
    rng = draw.stream("images")
    label = rng.integers(0, classes, count)
    angle = np.pi * label / classes
    rows, columns = np.mgrid[0:side, 0:side]
    along = (
        (np.cos(angle)[:, None, None] * columns + np.sin(angle)[:, None, None] * rows)
        * 2.0
        * np.pi
        / (4.0 + label % 2)[:, None, None]
    )
    waves = np.sin(along + rng.uniform(0, 2 * np.pi, (count, 1, 1)))
    images = rng.uniform(0.6, 1.4, (count, 1, 1)) * waves + noise * rng.normal(size=waves.shape)
    return cut(images[:, None], label, classes)


def make_prices(draw: Draw, *, count: int = 1500, noise: float = 0.15) -> Data:
    """Houses: eight features, a price of mean 0 and deviation 1 with an interaction and a bend."""
    rng = draw.stream("prices")
    x = rng.normal(size=(count, 8))
    price = x[:, 0] + 0.8 * x[:, 1] * x[:, 2] + np.abs(x[:, 3]) - 0.5 * np.cos(2 * x[:, 4])
    price = (price - price.mean()) / price.std() + noise * rng.normal(size=count)
    return cut(x, price[:, None], 0)


def make_chain(
    draw: Draw, *, letters: int = 12, count: int = 1200, length: int = 20, sharpness: float = 1.5
) -> tuple[Data, float]:
    """Texts of a Markov chain, and its entropy rate: the loss that nobody can go below."""
    rng = draw.stream("chain")
    table = np.exp(sharpness * rng.normal(size=(letters, letters)))
    table /= table.sum(1, keepdims=True)
    texts = np.zeros((count, length + 1), dtype=np.int64)
    texts[:, 0] = rng.integers(0, letters, count)
    for place in range(length):
        sums = table[texts[:, place]].cumsum(1)
        sums[:, -1] = 1.0
        texts[:, place + 1] = (rng.uniform(size=(count, 1)) > sums).sum(1)
    before = texts[:, :-1].ravel()
    entropy = -(table[before] * np.log(table[before])).sum(1).mean()
    return cut(texts[:, :-1], texts[:, 1:], letters), float(entropy)


class SmallResNet(nn.Module):
    """A stem, residual blocks of two convolutions with batch normalisation, a pooled head."""

    def __init__(self, width: int, blocks: int, classes: int, *, zero_last: bool = False):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(4 * width, classes)
        if zero_last:
            for block in self.blocks:
                nn.init.zeros_(block[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = functional.relu(self.stem(x))
        for block in self.blocks:
            x = functional.relu(x + block(x))
        return self.fc(self.pool(x).flatten(1))


class Reader(nn.Module):
    """A small transformer that reads a whole sequence of letters and classifies it."""

    def __init__(self, letters: int, width: int, depth: int, length: int, classes: int):
        super().__init__()
        self.token = nn.Embedding(letters, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        """Logits; `padded` marks places that are not read."""
        states = self.token(x) + self.position
        for layer in self.encoder:
            states = layer(states, src_key_padding_mask=padded)
        return self.classifier(states.mean(1))


def supervise(
    draw: Draw,
    model: nn.Module,
    optimizer: Any,
    data: Data,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    size: int = 32,
    names: tuple[str, str, str] = ("train/loss", "val/loss", "val/accuracy"),
    train_accuracy: str = "",
    **options: Any,
) -> Course:
    """Classification or regression as everyone writes it, with a correct validation.

    Args:
        draw: Of the run.
        model, optimizer, data, loss: What is trained; cross entropy or the mean
            squared error where no loss is given. Batches are tuples of inputs, targets, ids.
        size: Of a batch.
        names: Of the training loss, of the validation's loss and of its accuracy.
        train_accuracy: Its name, where it is logged.
        options: Of the Course.
    """
    plain = _cross_entropy if data.classes else functional.mse_loss
    chosen = loss or plain
    take = sample(draw, len(data.x), size)

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = take(step)
        return data.x[ids], data.y[ids], ids

    def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
        output = net(got[0])
        logged = {}
        if train_accuracy:
            logged[train_accuracy] = float((output.argmax(-1) == got[1]).float().mean())
        return chosen(output, got[1]), logged

    def proof(net: nn.Module) -> float:
        return float(chosen(net(data.proof_x), data.proof_y))

    def check(_step: int) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            output = model(data.val_x)
            values = {names[1]: float(chosen(output, data.val_y))}
            if data.classes and names[2]:
                hits = output.argmax(-1) == data.val_y
                values[names[2]] = float(hits.float().mean())
        model.train()
        return values

    settings: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "batch": batch,
        "lose": lose,
        "proof": proof,
        "check": check,
        "key": names[0],
        "per_epoch": max(1, len(data.x) // size),
        "config": {"batch_size": size, "model": type(model).__name__},
    }
    return Course(**{**settings, **options})


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())
