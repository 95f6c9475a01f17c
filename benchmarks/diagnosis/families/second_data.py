"""Data for the second family: small tables, texts of python, generated tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Material:
    """Training and held-out examples of one task."""

    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
        """`count` training examples, drawn with replacement."""
        rows = torch.from_numpy(rng.integers(0, len(self.x), count))
        return self.x[rows], self.y[rows]


def _split(x: np.ndarray, y: np.ndarray, rng: np.random.Generator, train: int) -> Material:
    order = rng.permutation(len(x))
    chosen, held = order[:train], order[train:]
    kind = torch.long if np.issubdtype(y.dtype, np.integer) else torch.float32
    return Material(
        torch.as_tensor(x[chosen], dtype=torch.float32),
        torch.as_tensor(y[chosen], dtype=kind),
        torch.as_tensor(x[held], dtype=torch.float32),
        torch.as_tensor(y[held], dtype=kind),
    )


def handwriting(rng: np.random.Generator, train: int = 1200, image: bool = False) -> Material:
    """The 8x8 digits with pixels in -0.5 to 0.5, flat or as one-channel images."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = x / 16.0 - 0.5
    return _split(x.reshape(-1, 1, 8, 8) if image else x, y, rng, train)


def tabular(name: str, rng: np.random.Generator, share: float = 0.7, raw: bool = False) -> Material:
    """A small table: `wine`, `breast_cancer`, `diabetes`; standardised unless raw."""
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    if not raw:
        x = (x - x.mean(0)) / x.std(0)
    if y.dtype.kind == "f":
        y = y.reshape(-1, 1)
    return _split(x, y, rng, int(share * len(x)))


def friedman(rng: np.random.Generator, train: int = 800, noise: float = 0.5) -> Material:
    """The first function of Friedman: ten inputs, of which five matter, one target near 14."""
    x = rng.random((train + 400, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4] + noise * rng.normal(size=len(x))
    return _split((x - 0.5) * 3.4, y.reshape(-1, 1), rng, train)


def shape_images(rng: np.random.Generator, train: int = 900, side: int = 12) -> Material:
    """Noisy one-channel images of a disc, a square, a cross or a diagonal line."""
    count = train + 300
    y = rng.integers(0, 4, count)
    rows, columns = np.mgrid[0:side, 0:side]
    images = rng.normal(0, 0.25, (count, 1, side, side))
    for place in range(count):
        centre = rng.uniform(side * 0.35, side * 0.65, 2)
        size = rng.uniform(2.0, 3.6)
        dr, dc = rows - centre[0], columns - centre[1]
        kinds = (
            dr**2 + dc**2 <= size**2,
            np.maximum(abs(dr), abs(dc)) <= size,
            (np.minimum(abs(dr), abs(dc)) <= 0.8) & (np.maximum(abs(dr), abs(dc)) <= size + 1),
            abs(dr - dc) <= 1.0,
        )
        images[place, 0] += kinds[y[place]]
    return _split(images, y.astype(np.int64), rng, train)


def zipf_documents(
    rng: np.random.Generator, train: int = 1200, words: int = 2000, length: int = 20
) -> Material:
    """Bags of word ids of which most are rare; the class follows from hidden word scores."""
    shares = 1.0 / np.arange(1, words + 1)
    x = rng.choice(words, size=(train + 400, length), p=shares / shares.sum())
    scores = rng.normal(size=words)
    total = scores[x].sum(1)
    y = (total > np.median(total)).astype(np.int64)
    material = _split(x.astype(np.float64), y, rng, train)
    return Material(material.x.long(), material.y, material.x_held.long(), material.y_held)
