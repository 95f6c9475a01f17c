"""A small real training: a network of one hidden layer that learns handwritten digits.

The same parameters give the same losses to the bit, in one go or continued from a
checkpoint, on one machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

EPOCHS = 6

_TRAINED = 1_400
_BATCH = 35
_MOMENTUM = 0.9


def save_digits(path: Path) -> None:
    """Write the data to a file, so that workers need not import what has them."""
    from sklearn.datasets import load_digits as load

    pixels, labels = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    np.savez(path, pixels=(pixels[order] / 16.0).astype(np.float64), labels=labels[order])


def load_digits(path: Path) -> tuple[Any, Any]:
    """Pixels and labels."""
    with np.load(path, allow_pickle=False) as found:
        return found["pixels"], found["labels"]


class DigitsTraining:
    """The training of one trial.

    Args:
        digits: Pixels and labels.
        parameters: lr, width, decay; seed, of weights and of the order of samples.
    """

    def __init__(self, digits: tuple[Any, Any], parameters: dict[str, Any]) -> None:
        self._pixels, labels = digits
        self._labels = labels
        self._seed = int(parameters["seed"])
        self._lr = float(parameters["lr"])
        self._decay = float(parameters["decay"])
        width = int(parameters["width"])
        rng = np.random.default_rng([self._seed, 0])
        self._weights = [
            rng.normal(0, 0.1, (64, width)),
            np.zeros(width),
            rng.normal(0, 0.1, (width, 10)),
            np.zeros(10),
        ]
        self._pushes = [np.zeros_like(each) for each in self._weights]
        self.epoch = 0

    def train_epoch(self) -> float:
        """One pass over the data; returns the loss on samples that are not trained on."""
        self.epoch += 1
        order = np.random.default_rng([self._seed, self.epoch]).permutation(_TRAINED)
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, _TRAINED, _BATCH):
                self._step(order[at : at + _BATCH])
            loss = self._find_loss(slice(_TRAINED, None))
        return loss if np.isfinite(loss) else 1e9

    def save(self, path: Path) -> None:
        """Keep a checkpoint, whole or not at all."""
        scratch = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(scratch, *self._weights, *self._pushes, epoch=self.epoch)
        scratch.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        with np.load(path, allow_pickle=False) as found:
            kept = [found[f"arr_{place}"] for place in range(8)]
            self.epoch = int(found["epoch"])
        self._weights, self._pushes = kept[:4], kept[4:]

    def _forward(self, rows: Any) -> tuple[Any, Any]:
        first, first_bias, second, second_bias = self._weights
        hidden = np.maximum(self._pixels[rows] @ first + first_bias, 0.0)
        scores = hidden @ second + second_bias
        scores = scores - scores.max(axis=1, keepdims=True)
        powers = np.exp(scores)
        return hidden, powers / powers.sum(axis=1, keepdims=True)

    def _step(self, rows: Any) -> None:
        hidden, shares = self._forward(rows)
        shares[np.arange(len(rows)), self._labels[rows]] -= 1.0
        shares /= len(rows)
        back = (shares @ self._weights[2].T) * (hidden > 0)
        gradients = [
            self._pixels[rows].T @ back,
            back.sum(axis=0),
            hidden.T @ shares,
            shares.sum(axis=0),
        ]
        for weight, push, gradient in zip(self._weights, self._pushes, gradients, strict=True):
            push *= _MOMENTUM
            push += gradient + self._decay * weight
            weight -= self._lr * push

    def _find_loss(self, rows: slice) -> float:
        _, shares = self._forward(rows)
        right = shares[np.arange(len(shares)), self._labels[rows]]
        return float(-np.log(np.maximum(right, 1e-12)).mean())
