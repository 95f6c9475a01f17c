"""Sequences to learn: text that ships with Python, waves, brackets, sums, copies."""

from __future__ import annotations

import argparse
import json
import logging
import string
from functools import cache

import numpy as np
import torch

from benchmarks.diagnosis.datasets import Data

_MODULES = (argparse, json, logging, string)
_LETTERS = "abcdefghijklmnopqrstuvwxyz .,()\n"


@cache
def read_text() -> torch.Tensor:
    """Docstrings of the standard library as indexes of 32 letters."""
    texts = []
    for module in _MODULES:
        texts.append(module.__doc__ or "")
        members = vars(module)
        texts.extend(getattr(members[name], "__doc__", None) or "" for name in sorted(members))
    joined = "\n".join(texts).lower()
    index = {letter: place for place, letter in enumerate(_LETTERS)}
    return torch.tensor([index[letter] for letter in joined if letter in index])


def load_text(rng: np.random.Generator, *, count: int = 1500, length: int = 24) -> Data:
    """Windows of the text; the target of each letter is the next one.

    The three parts come from different thirds of the text, so that nothing is shared.
    """
    text = read_text()
    bounds = [0, int(0.6 * len(text)), int(0.8 * len(text)), len(text)]
    parts: list[torch.Tensor] = []
    for low, high, share in zip(bounds[:-1], bounds[1:], (0.6, 0.2, 0.2), strict=True):
        starts = rng.integers(low, high - length - 1, int(share * count))
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        parts += [windows[:, :-1], windows[:, 1:]]
    return Data(*parts, classes=len(_LETTERS))


def load_waves(rng: np.random.Generator, *, count: int = 900, length: int = 30) -> Data:
    """Sums of two sines with noise, count x length x 1; the target is the next value."""
    times = np.arange(length + 1)
    first = rng.uniform(0.1, 0.5, (count, 1))
    phases = rng.uniform(0, 2 * np.pi, (count, 2))
    waves = np.sin(first * times + phases[:, :1])
    waves += 0.5 * np.sin(2.7 * first * times + phases[:, 1:])
    waves += 0.05 * rng.normal(size=waves.shape)
    return _cut(waves[:, :-1, None], waves[:, -1:], 0)


def load_adding(rng: np.random.Generator, *, count: int = 1500, length: int = 30) -> Data:
    """The adding problem: numbers and two marks; the target is the sum of the marked ones."""
    numbers = rng.uniform(0, 1, (count, length))
    marks = np.zeros((count, length))
    half = length // 2
    first, second = rng.integers(0, half, count), rng.integers(half, length, count)
    rows = np.arange(count)
    marks[rows, first] = marks[rows, second] = 1.0
    total = numbers[rows, first] + numbers[rows, second]
    return _cut(np.stack([numbers, marks], 2), total[:, None], 0)


def load_brackets(rng: np.random.Generator, *, count: int = 1500, length: int = 24) -> Data:
    """Rows of brackets of two kinds as indexes; the target says whether they are balanced."""
    rows = np.zeros((count, length), dtype=np.int64)
    for row in rows:
        stack: list[int] = []
        for place in range(length):
            left = length - place
            if stack and (len(stack) >= left or rng.uniform() < 0.5):
                row[place] = 2 + stack.pop()
            else:
                stack.append(int(rng.integers(0, 2)))
                row[place] = stack[-1]
    label = rng.integers(0, 2, count)
    for index in np.flatnonzero(label == 0):
        place = int(rng.integers(0, length))
        rows[index, place] = (rows[index, place] + rng.integers(1, 4)) % 4
    return _cut(rows, label, 2)


def _cut(x: np.ndarray, y: np.ndarray, classes: int) -> Data:
    first, second = int(0.6 * len(x)), int(0.8 * len(x))
    kind = torch.float32 if x.dtype.kind == "f" else torch.long
    parts: list[torch.Tensor] = []
    for cut in (slice(0, first), slice(first, second), slice(second, None)):
        parts.append(torch.tensor(x[cut], dtype=kind))
        parts.append(torch.tensor(y[cut], dtype=torch.long if classes else torch.float32))
    return Data(*parts, classes=classes)
