"""Small data sets: those that ship in packages, and images, points and tables that are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Data:
    """Inputs and targets in three parts; `proof` is for the oracle alone, never logged.

    Attributes:
        x, y: For training.
        val_x, val_y: For validation.
        proof_x, proof_y: For the oracle.
        classes: How many there are; 0 where targets are numbers.
    """

    x: torch.Tensor
    y: torch.Tensor
    val_x: torch.Tensor
    val_y: torch.Tensor
    proof_x: torch.Tensor
    proof_y: torch.Tensor
    classes: int

    @property
    def features(self) -> int:
        """Numbers of one input."""
        return int(self.x[0].numel())

    def shrink(self, count: int) -> Data:
        """With only the first `count` of the training data."""
        return replace(self, x=self.x[:count], y=self.y[:count])

    def mislabel(self, rng: np.random.Generator, share: float) -> Data:
        """With this share of the training labels drawn anew."""
        y = self.y.clone()
        chosen = torch.from_numpy(rng.permutation(len(y))[: int(share * len(y))])
        y[chosen] = torch.from_numpy(rng.integers(0, self.classes, len(chosen)))
        return replace(self, y=y)

    def flatten(self) -> Data:
        """With inputs as vectors."""
        parts = {name: getattr(self, name).flatten(1) for name in ("x", "val_x", "proof_x")}
        return replace(self, **parts)


def load_digits(rng: np.random.Generator, *, noise: float = 0.0) -> Data:
    """1797 images of digits, 1 x 8 x 8, values 0 to 1, shuffled by `rng`."""
    images, labels = _read("digits")
    images = images.reshape(-1, 1, 8, 8) / 16.0
    if noise:
        images = images + rng.normal(0.0, noise, images.shape)
    return _split(images, labels, rng, classes=10)


def load_table(name: str, rng: np.random.Generator, *, scale: bool = True) -> Data:
    """A table of scikit-learn: breast_cancer, wine, iris, diabetes or linnerud.

    Args:
        name: Which one.
        rng: Shuffles.
        scale: Whether inputs get mean 0 and deviation 1; targets stay as they are.
    """
    x, y = _read(name)
    if scale:
        x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    regression = name in {"diabetes", "linnerud"}
    return _split(x, y, rng, classes=0 if regression else int(y.max()) + 1)


def load_friedman(rng: np.random.Generator, *, count: int = 1200, noise: float = 1.0) -> Data:
    """Friedman's first regression problem, ten inputs of which five count."""
    x = rng.uniform(0.0, 1.0, (count, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4] + noise * rng.normal(size=count)
    return _split(x, y[:, None], rng, classes=0)


def load_spirals(
    rng: np.random.Generator, *, count: int = 1200, arms: int = 3, noise: float = 0.1
) -> Data:
    """Points on interlocked spirals."""
    label = rng.integers(0, arms, count)
    radius = np.sqrt(rng.uniform(0.02, 1.0, count))
    angle = 2.2 * np.pi * radius + 2 * np.pi * label / arms + noise * rng.normal(size=count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) * 2.0
    return _split(points, label, rng, classes=arms)


def load_blobs(
    rng: np.random.Generator,
    *,
    count: int = 1200,
    features: int = 20,
    classes: int = 6,
    spread: float = 1.0,
    shares: tuple[float, ...] | None = None,
) -> Data:
    """Gaussian clouds; `shares` are those of the classes."""
    centres = rng.normal(0.0, 1.5, (classes, features))
    label = rng.choice(classes, count, p=shares)
    return _split(centres[label] + spread * rng.normal(size=(count, features)), label, rng, classes)


def load_shapes(rng: np.random.Generator, *, count: int = 1000, noise: float = 0.2) -> Data:
    """Images 1 x 16 x 16 of a square, a disc, a cross or a ring, anywhere, of any size."""
    grid_y, grid_x = np.mgrid[0:16, 0:16]
    label = rng.integers(0, 4, count)
    images = np.empty((count, 1, 16, 16))
    for index, kind in enumerate(label):
        centre_y, centre_x = rng.uniform(5, 11, 2)
        radius = rng.uniform(3, 5)
        dy, dx = np.abs(grid_y - centre_y), np.abs(grid_x - centre_x)
        distance = np.hypot(dy, dx)
        images[index, 0] = (
            np.maximum(dy, dx) < 0.85 * radius,
            distance < radius,
            np.minimum(dy, dx) < 0.9,
            np.abs(distance - radius) < 0.9,
        )[kind]
    return _split(images + noise * rng.normal(size=images.shape), label, rng, classes=4)


@cache
def _read(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    y = bunch.target
    if name == "linnerud":
        y = y[:, :1]
    elif name == "diabetes":
        y = y[:, None]
    return bunch.data.astype(np.float64), y


def _split(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], rng: np.random.Generator, classes: int
) -> Data:
    order = rng.permutation(len(x))
    inputs = torch.tensor(x[order], dtype=torch.float32)
    targets = torch.tensor(y[order], dtype=torch.long if classes else torch.float32)
    # 60 % for training, 20 % for each of the others.
    first, second = int(0.6 * len(x)), int(0.8 * len(x))
    cuts = (slice(0, first), slice(first, second), slice(second, None))
    parts = [part for cut in cuts for part in (inputs[cut], targets[cut])]
    return Data(*parts, classes=classes)
