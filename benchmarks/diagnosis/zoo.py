"""Problems that a healthy training solves; sizes, rates and batches are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.networks import (
    Autoencoder,
    Recurrent,
    Residual,
    Transformer,
    make_convolutional,
    make_mlp,
)
from benchmarks.diagnosis.scenario import Draw
from benchmarks.diagnosis.training import Problem


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Over the last axis, whatever the others are."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def make_optimizer(
    draw: Draw, parameters: Iterable[object], kind: str = "drawn", *, factor: float = 1.0
) -> torch.optim.Optimizer:
    """SGD with momentum, Adam or AdamW at a rate that suits small networks, times `factor`."""
    drawn = draw.choice("sgd", "adam", "adamw")
    position = draw.log_uniform(0.6, 1.7) * factor
    kind = drawn if kind == "drawn" else kind
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.03 * position, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.002 * position)
    return torch.optim.AdamW(parameters, lr=0.002 * position, weight_decay=0.01)


def make_digits_mlp(
    draw: Draw,
    *,
    activation: str = "drawn",
    depth: int = 0,
    optimizer: str = "drawn",
    norm: bool = False,
    dropout: float = 0.0,
) -> Problem:
    """Digits by a perceptron of two to four hidden layers."""
    drawn = draw.choice("relu", "tanh", "gelu")
    depth = depth or draw.integer(2, 4)
    width = draw.integer(32, 96)
    model = make_mlp(
        [64, *[width] * depth, 10],
        activation=drawn if activation == "drawn" else activation,
        norm=norm,
        dropout=dropout,
    )
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    return _finish(draw, model, data, cross_entropy, optimizer)


def make_digits_cnn(draw: Draw, *, optimizer: str = "drawn", norm: bool = False) -> Problem:
    """Digits by two convolutions."""
    first = draw.integer(6, 12)
    model = make_convolutional([first, 2 * first], 8, 10, norm=norm)
    data = datasets.load_digits(draw.stream("data"), noise=0.2)
    return _finish(draw, model, data, cross_entropy, optimizer)


def make_shapes_cnn(
    draw: Draw, *, optimizer: str = "drawn", norm: bool = False, activation: str = "relu"
) -> Problem:
    """Shapes by four convolutions."""
    first = draw.integer(4, 8)
    model = make_convolutional(
        [first, first, 2 * first, 2 * first], 16, 4, norm=norm, activation=activation
    )
    data = datasets.load_shapes(draw.stream("data"))
    return _finish(draw, model, data, cross_entropy, optimizer, factor=0.7)


def make_table(draw: Draw, *, optimizer: str = "drawn") -> Problem:
    """Wine, breast cancer or clouds by a small perceptron."""
    name = draw.choice("wine", "breast_cancer", "blobs")
    rng = draw.stream("data")
    data = datasets.load_blobs(rng) if name == "blobs" else datasets.load_table(name, rng)
    width = draw.integer(8, 24)
    model = make_mlp([data.features, width, width, data.classes], activation="relu")
    # Short of the point where so few data begin to be learnt by heart.
    made = _finish(draw, model, data, cross_entropy, optimizer, factor=0.5)
    made.steps = 160 if name == "blobs" else 120
    made.batch_size = min(made.batch_size, 24)
    return made


def make_friedman(draw: Draw, *, optimizer: str = "adam", scale: float = 1.0) -> Problem:
    """Friedman's regression; targets are about `scale` times 5 around 0."""
    data = datasets.load_friedman(draw.stream("data"))
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(14.4).mul_(scale)
    width = draw.integer(24, 64)
    model = make_mlp([10, width, width, 1], activation=draw.choice("relu", "tanh", "silu"))
    return _finish(draw, model, data, functional.mse_loss, optimizer, factor=2.0)


def make_spirals(draw: Draw, *, activation: str = "drawn", optimizer: str = "adam") -> Problem:
    """Interlocked spirals by a perceptron."""
    drawn = draw.choice("relu", "tanh", "gelu", "elu")
    width = draw.integer(32, 64)
    chosen = drawn if activation == "drawn" else activation
    model = make_mlp([2, width, width, width, 3], activation=chosen)
    data = datasets.load_spirals(draw.stream("data"))
    return _finish(draw, model, data, cross_entropy, optimizer, factor=2.0)


def make_residual(draw: Draw, *, optimizer: str = "adamw") -> Problem:
    """Digits by a residual perceptron with layer norms."""
    model = Residual(64, draw.integer(24, 40), draw.integer(2, 4), 10)
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    return _finish(draw, model, data, cross_entropy, optimizer, factor=0.45)


def make_text_gru(draw: Draw, *, kind: str = "gru", optimizer: str = "adam") -> Problem:
    """Next letters by a recurrent network."""
    data = sequences.load_text(draw.stream("data"), count=3000)
    model = Recurrent(
        kind, data.classes, draw.integer(24, 40), data.classes, letters=True, every_state=True
    )
    made = _finish(draw, model, data, cross_entropy, optimizer, factor=2.0)
    made.steps, made.clip = 200, 1.0
    return made


def make_text_transformer(draw: Draw) -> Problem:
    """Next letters by a transformer."""
    data = sequences.load_text(draw.stream("data"), count=3000)
    model = Transformer(data.classes, 2 * draw.integer(12, 20), draw.integer(1, 2), 24)
    made = _finish(draw, model, data, cross_entropy, "adamw", factor=1.5)
    made.steps = 200
    return made


def make_waves(draw: Draw, *, kind: str = "lstm") -> Problem:
    """The next value of a wave by a recurrent network."""
    data = sequences.load_waves(draw.stream("data"))
    model = Recurrent(kind, 1, draw.integer(16, 28), 1, letters=False)
    made = _finish(draw, model, data, functional.mse_loss, "adam", factor=2.0)
    made.steps = 200
    return made


def make_adding(draw: Draw, *, kind: str = "gru", length: int = 12) -> Problem:
    """The adding problem by a recurrent network, clipped."""
    data = sequences.load_adding(draw.stream("data"), length=length)
    model = Recurrent(kind, 2, draw.integer(24, 40), 1, letters=False)
    made = _finish(draw, model, data, functional.mse_loss, "adam", factor=3.0)
    made.steps, made.clip = 300, 1.0
    return made


def make_brackets(draw: Draw, *, kind: str = "gru") -> Problem:
    """Balanced or not, by a recurrent network."""
    data = sequences.load_brackets(draw.stream("data"), length=10, count=2500)
    model = Recurrent(kind, 4, draw.integer(24, 32), 2, letters=True)
    made = _finish(draw, model, data, cross_entropy, "adam", factor=3.0)
    made.steps = 300
    return made


def make_autoencoder(draw: Draw) -> Problem:
    """Digits through a code of a few numbers."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    parts = (data.x, data.x, data.val_x, data.val_x, data.proof_x, data.proof_x)
    model = Autoencoder(64, draw.integer(32, 64), draw.integer(6, 16))
    return _finish(draw, model, Data(*parts, classes=0), functional.mse_loss, "adam")


ZOO: dict[str, Callable[[Draw], Problem]] = {
    "digits_mlp": make_digits_mlp,
    "digits_cnn": make_digits_cnn,
    "shapes_cnn": make_shapes_cnn,
    "table": make_table,
    "friedman": make_friedman,
    "spirals": make_spirals,
    "residual": make_residual,
    "text_gru": make_text_gru,
    "text_transformer": make_text_transformer,
    "waves": make_waves,
    "adding": make_adding,
    "brackets": make_brackets,
    "autoencoder": make_autoencoder,
}


def _finish(
    draw: Draw,
    model: nn.Module,
    data: Data,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: str,
    *,
    factor: float = 1.0,
) -> Problem:
    return Problem(
        model=model,
        optimizer=make_optimizer(draw, model.parameters(), optimizer, factor=factor),
        data=data,
        loss=loss,
        order=draw.stream("order"),
        batch_size=draw.choice(16, 24, 32, 48, 64),
        steps=10 * draw.integer(22, 32),
        val_every=draw.choice(10, 12, 15, 20),
        accuracy=data.classes > 0 and draw.uniform(0, 1) < 0.6,
        log_rate=draw.uniform(0, 1) < 0.4,
        clip=None,
    )
