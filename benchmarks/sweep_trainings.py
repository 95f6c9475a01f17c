"""Real small trainings for sweeps: networks on handwritten digits, in numpy, with bad corners.

The space has corners in which nothing can be learned: a learning rate of 0, far too high or far
too low, weights that are all zero or far too large, and deep sigmoid networks; and good trials
that look bad for long: warm-ups and plateaus before a layer wakes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CHANCE = 0.1
STEPS = 600
_BATCH = 64
_EVERY = 20  # steps from one validation to the next


@dataclass
class Course:
    """How one training went.

    Attributes:
        parameters: What was tried.
        loss: (step, value) of the training loss, each step.
        accuracy: (step, value) of the validation's.
        seconds: How long it took.
    """

    parameters: dict[str, Any]
    loss: list[tuple[int, float]] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> float:
        """The best accuracy, as it would have been without a stop."""
        return max((value for _, value in self.accuracy), default=0.0)

    @property
    def last(self) -> float:
        """The last accuracy."""
        return self.accuracy[-1][1] if self.accuracy else 0.0


def draw_parameters(seed: int, number: int) -> dict[str, Any]:
    """What one trial tries; about half of all is good."""
    chance = random.Random(seed * 100_003 + number)
    return {
        "lr": 0.0 if chance.random() < 0.04 else 10 ** chance.uniform(-4.5, 1.5),
        "optimizer": chance.choice(["sgd", "momentum", "adam"]),
        "layers": chance.choice([1, 1, 2, 3, 5, 8]),
        "width": chance.choice([16, 32, 64]),
        "activation": chance.choice(["relu", "tanh", "sigmoid"]),
        "init": chance.choice(["good", "good", "good", "zero", "small", "huge"]),
        "warmup": chance.choice([0, 0, 0, 100, 300]),
        "seed": number,
    }


def train(
    parameters: dict[str, Any],
    log: Callable[[str, float, int], None],
    steps: int = STEPS,
) -> None:
    """Train once; `log` takes a metric, its value and its step, and may raise to end it."""
    data = _load_digits()
    generator = np.random.default_rng(parameters["seed"])
    weights = _make_weights(parameters, data[0].shape[1], generator)
    moments = [[np.zeros_like(each) for each in weights] for _ in range(2)]
    with np.errstate(all="ignore"):
        for step, rows in enumerate(_draw_batches(len(data[0]), steps, generator)):
            loss, gradients = _differentiate(weights, data[0][rows], data[1][rows], parameters)
            warmup = parameters["warmup"]
            rate = parameters["lr"] * min(1.0, (step + 1) / warmup if warmup else 1.0)
            _update(weights, gradients, moments, rate, parameters["optimizer"], step)
            log("train/loss", loss, step)
            if step % _EVERY == _EVERY - 1:
                scores = _run(weights, data[2], parameters)[-1]
                log("val/acc", float((scores.argmax(1) == data[3]).mean()), step)


def record(parameters: dict[str, Any]) -> Course:
    """Train once to the end, and keep how it went."""
    course = Course(parameters)

    def log(metric: str, value: float, step: int) -> None:
        (course.loss if metric == "train/loss" else course.accuracy).append((step, value))

    begun = time.perf_counter()
    train(parameters, log)
    course.seconds = time.perf_counter() - begun
    return course


@lru_cache(maxsize=1)
def _load_digits() -> tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    inputs, labels = digits.data[order] / 16.0 - 0.3, digits.target[order].astype(np.int64)
    return inputs[:1300], labels[:1300], inputs[1300:], labels[1300:]


def _draw_batches(
    count: int, steps: int, generator: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    for _ in range(steps):
        yield generator.integers(0, count, _BATCH)


def _make_weights(
    parameters: dict[str, Any], inputs: int, generator: np.random.Generator
) -> list[Floats]:
    """Matrices, each with its bias as a last row."""
    sizes = [inputs, *[parameters["width"]] * parameters["layers"], 10]
    scale = {"good": 1.0, "zero": 0.0, "small": 0.1, "huge": 8.0}[parameters["init"]]
    gain = math.sqrt(2.0 if parameters["activation"] == "relu" else 1.0)
    made = []
    for before, after in pairwise(sizes):
        matrix = generator.normal(size=(before + 1, after)) * scale * gain / math.sqrt(before)
        matrix[-1] = 0.0
        made.append(matrix)
    return made


def _run(weights: list[Floats], inputs: Floats, parameters: dict[str, Any]) -> list[Floats]:
    """What each layer gives, the inputs first and the scores last."""
    given = [inputs]
    for place, matrix in enumerate(weights):
        value = given[-1] @ matrix[:-1] + matrix[-1]
        is_last = place == len(weights) - 1
        given.append(value if is_last else _ACTIVATIONS[parameters["activation"]][0](value))
    return given


def _differentiate(
    weights: list[Floats],
    inputs: Floats,
    labels: NDArray[np.int64],
    parameters: dict[str, Any],
) -> tuple[float, list[Floats]]:
    given = _run(weights, inputs, parameters)
    scores = given[-1] - given[-1].max(1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    rows = np.arange(len(labels))
    flow = np.exp(logs)
    flow[rows, labels] -= 1.0
    flow /= len(labels)
    gradients: list[Floats] = []
    for place in range(len(weights) - 1, -1, -1):
        before = given[place]
        gradients.insert(0, np.vstack([before.T @ flow, flow.sum(0)]))
        if place:
            slope = _ACTIVATIONS[parameters["activation"]][1](before)
            flow = (flow @ weights[place][:-1].T) * slope
    return float(-logs[rows, labels].mean()), gradients


def _update(
    weights: list[Floats],
    gradients: list[Floats],
    moments: list[list[Floats]],
    rate: float,
    optimizer: str,
    step: int,
) -> None:
    first, second = moments
    for place, gradient in enumerate(gradients):
        if optimizer == "sgd":
            change = gradient
        elif optimizer == "momentum":
            first[place] = change = 0.9 * first[place] + gradient
        else:
            first[place] = 0.9 * first[place] + 0.1 * gradient
            second[place] = 0.999 * second[place] + 0.001 * gradient**2
            fixed = second[place] / (1 - 0.999 ** (step + 1))
            change = first[place] / (1 - 0.9 ** (step + 1)) / (np.sqrt(fixed) + 1e-8) * 0.1
        weights[place] = weights[place] - rate * change


_ACTIVATIONS: dict[str, tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]] = {
    "relu": (lambda x: np.maximum(x, 0.0), lambda y: (y > 0).astype(float)),
    "tanh": (np.tanh, lambda y: 1.0 - y * y),
    "sigmoid": (lambda x: 1.0 / (1.0 + np.exp(-x)), lambda y: y * (1.0 - y)),
}
