"""Data and networks of the third family."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.datasets import Data, load_friedman
from benchmarks.diagnosis.scenario import Draw


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Over the last axis of any number of them."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def split(x: Any, y: Any, classes: int = 0) -> Data:
    """60 % for training and 20 % for each of the others, in order."""
    a, b = int(0.6 * len(x)), int(0.8 * len(x))
    x = torch.as_tensor(x)
    y = torch.as_tensor(y)
    x = x if x.dtype == torch.long else x.float()
    y = y if y.dtype == torch.long else y.float()
    return Data(x[:a], y[:a], x[a:b], y[a:b], x[b:], y[b:], classes)


def scaled_friedman(draw: Draw, count: int = 1000, level: float = 0.5) -> Data:
    """Friedman's problem with targets of mean 0 and deviation 1."""
    data = load_friedman(draw.stream("data"), count=count, noise=level)
    mean, deviation = data.y.mean(), data.y.std()
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(mean).div_(deviation)
    return data


def load_chain(draw: Draw, *, letters: int = 12, length: int = 16, count: int = 600) -> Data:
    """Sentences of a random Markov chain; the target of a letter is the next one."""
    rng = draw.stream("data")
    odds = rng.dirichlet(np.full(letters, 0.12), letters).cumsum(1)
    text = np.zeros((count, length + 1), dtype=np.int64)
    text[:, 0] = rng.integers(0, letters, count)
    for place in range(length):
        drawn = rng.uniform(size=(count, 1))
        text[:, place + 1] = (odds[text[:, place]] < drawn).sum(1).clip(0, letters - 1)
    return split(text[:, :-1], text[:, 1:], letters)


def load_reversal(draw: Draw, *, letters: int = 6, length: int = 6, count: int = 1500) -> Data:
    """Words, and the same words backwards."""
    words = draw.stream("data").integers(0, letters, (count, length))
    return split(words, words[:, ::-1].copy(), letters)


def load_recall(draw: Draw, *, items: int = 6, width: int = 8, count: int = 1200) -> Data:
    """Items of a key and one of four values; the last row is a key, whose value is asked for."""
    rng = draw.stream("data")
    keys = rng.normal(size=(count, items, width))
    values = rng.integers(0, 4, (count, items))
    asked = rng.integers(0, items, count)
    rows = np.zeros((count, items + 1, width + 4))
    rows[:, :items, :width] = keys
    rows[:, :items, width:] = np.eye(4)[values]
    rows[:, items, :width] = keys[np.arange(count), asked] + 0.05 * rng.normal(size=(count, width))
    return split(rows, values[np.arange(count), asked], 4)


def make_plain(*sizes: int, act: type[nn.Module] = nn.ReLU, drop: float = 0.0) -> nn.Sequential:
    """fc0, act0, fc1, ..., head."""
    made = nn.Sequential()
    made.add_module("flat", nn.Flatten())
    for place in range(len(sizes) - 2):
        made.add_module(f"fc{place}", nn.Linear(sizes[place], sizes[place + 1]))
        made.add_module(f"act{place}", act())
        if drop:
            made.add_module(f"drop{place}", nn.Dropout(drop))
    made.add_module("head", nn.Linear(sizes[-2], sizes[-1]))
    return made


class Attention(nn.Module):
    """The last row asks the others; `sharpness` multiplies the logits."""

    def __init__(self, width: int, sharpness: float = 1.0):
        super().__init__()
        self.query = nn.Linear(8, width, bias=False)
        self.key = nn.Linear(8, width, bias=False)
        self.value = nn.Linear(4, width)
        self.head = nn.Linear(width, 4)
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the value."""
        asked, items = self.query(x[:, -1, :8]), x[:, :-1]
        fits = torch.einsum("bw,biw->bi", asked, self.key(items[..., :8]))
        shares = (self.sharpness * fits).softmax(-1)
        return self.head(torch.einsum("bi,biw->bw", shares, self.value(items[..., 8:])))


class Block(nn.Module):
    """A transformer block, normalised before or after each part."""

    def __init__(self, width: int, *, before: bool, drop: float = 0.0, heads: int = 2):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.reduce = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)
        self.before = before

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The rows again."""
        if self.before:
            y = self.norm1(x)
            x = x + self.drop(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])
            return x + self.drop(self.reduce(functional.gelu(self.expand(self.norm2(x)))))
        y = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = self.norm1(x + self.drop(y))
        return self.norm2(x + self.drop(self.reduce(functional.relu(self.expand(x)))))


class Speller(nn.Module):
    """Letters in, letters out, by blocks; causal or not."""

    def __init__(
        self, letters: int, width: int, depth: int, length: int, *, before: bool, causal: bool
    ):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, before=before) for _ in range(depth))
        self.head = nn.Linear(width, letters)
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        self.register_buffer("mask", mask if causal else torch.zeros(length, length))

    def forward(self, x: Tensor) -> Tensor:
        """Logits at every place."""
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


class Patches(nn.Module):
    """Images 16 x 16 as sixteen patches and a class token, through blocks."""

    def __init__(self, width: int, depth: int, classes: int, *, drop: float = 0.0):
        super().__init__()
        self.cut = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(17, width))
        self.blocks = nn.ModuleList(Block(width, before=True, drop=drop) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        rows = self.cut(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.places
        for block in self.blocks:
            rows = block(rows)
        return self.head(self.norm(rows[:, 0]))
