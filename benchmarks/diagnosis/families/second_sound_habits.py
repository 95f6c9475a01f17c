"""Healthy trainings with unusual habits: schedules, rare layers, odd optimizers, sparse logs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    addition_problem,
    friedman,
    handwriting,
    shape_images,
    tabular,
    zipf_documents,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


def _net(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers += [nn.Linear(widths[place], widths[place + 1]), act()]
    return nn.Sequential(*layers[:-1])


class Experts(nn.Module):
    """One of several experts for each example; some are idle in many batches."""

    def __init__(self, inputs: int, classes: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, count)
        self.experts = nn.ModuleList(_net(inputs, 24, classes) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), -1)
        best = shares.argmax(-1)
        out = x.new_zeros(len(x), 10)
        for place, expert in enumerate(self.experts):
            rows = best == place
            if rows.any():
                out = out.index_add(
                    0, rows.nonzero()[:, 0], expert(x[rows]) * shares[rows, place, None]
                )
        return out


def _experts(draw: Draw) -> Lesson:
    """Layers that are used in some steps only, and by a part of the batch."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Experts(64, 10, int(rng.integers(4, 7)))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, batch=24)


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, width)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.encoder(x)) @ self.encoder.weight + self.shift


def _tied(draw: Draw) -> Lesson:
    """Tied weights, sum-reduced loss, many inactive units."""
    rng = draw.stream("build")
    data = handwriting(rng)
    data.y, data.y_held = data.x, data.x_held
    model = Tied(96)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 1e-4, 3e-4), momentum=0.9)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).pow(2).sum() * 32 / len(y)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, loss=loss)


class Adder(nn.Module):
    """An LSTM over marked numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _adding(draw: Draw) -> Lesson:
    """The adding problem: a long early plateau at the variance, clipped all the while."""
    rng = draw.stream("build")
    data = addition_problem(rng, length=8)
    model = Adder(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 8e-3, 1.2e-2))

    def correct(_step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=420, batch=48,
        loss=functional.mse_loss, correct=correct,
    )  # fmt: skip


def _siamese(draw: Draw) -> Lesson:
    """A margin loss that is exactly zero for more and more pairs."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _net(64, 48, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    batches = draw.stream("batches")

    def margin(x: Tensor, y: Tensor) -> Tensor:
        codes = model(x)
        half = len(x) // 2
        far = (codes[:half] - codes[half : 2 * half]).pow(2).sum(-1)
        same = (y[:half] == y[half : 2 * half]).float()
        return (same * far + (1 - same) * functional.relu(2 - (far + 1e-8).sqrt()).pow(2)).mean()

    def advance(_step: int) -> dict[str, float]:
        x, y = data.draw(batches, 64)
        order = torch.argsort(y, stable=True)
        # Half of the pairs are of one class, the others as they come.
        x, y = (
            torch.cat([x[order][::2], x[order][1::2]]),
            torch.cat([y[order][::2], y[order][1::2]]),
        )
        loss = margin(x, y) + margin(*data.draw(batches, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    def assess() -> float:
        order = torch.argsort(data.y_held, stable=True)
        x, y = data.x_held[order], data.y_held[order]
        near = torch.cat([x[::2][:250], x[1::2][:250]]), torch.cat([y[::2][:250], y[1::2][:250]])
        return float(margin(*near) + margin(data.x_held, data.y_held))

    return Lesson(model=model, optimizer=optimizer, steps=300, advance=advance, assess=assess)


def _cosine_restarts(draw: Draw) -> Lesson:
    """Warm restarts: the loss jumps a little at each, and falls again."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(200, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.9)
    steps = 300
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2)
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=steps,
        finish=lambda _step: schedule.step(),
    )  # fmt: skip


def _averaged(draw: Draw) -> Lesson:
    """Weight averaging late in the run: the average is written back at the end of each epoch."""
    rng = draw.stream("build")
    data = friedman(rng)
    model = _net(10, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3), momentum=0.8)
    mean = copy.deepcopy(model)
    state = {"count": 0}

    def finish(step: int) -> None:
        if step < 200 or step % 10:
            return
        state["count"] += 1
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 / state["count"])
        if step % 50 == 0:
            model.load_state_dict(mean.state_dict())

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=320, loss=functional.mse_loss,
        finish=finish,
    )  # fmt: skip


def _curriculum(draw: Draw) -> Lesson:
    """Inputs get noisier as training goes on: the training loss rises, the held-out one falls."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _net(64, 64, 10, act=nn.GELU)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    noise = draw.stream("noise")
    steps = 400

    def shape(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        level = 0.7 * max(0.0, step / steps - 0.2)
        return x + torch.as_tensor(noise.normal(0, level, x.shape), dtype=torch.float32), y

    return supervise(model, optimizer, data, draw.stream("batches"), steps=steps, shape=shape)


def _tolerated_noise(draw: Draw) -> Lesson:
    """A fifth of the labels is wrong, and a small decayed net does not learn them by heart."""
    rng = draw.stream("build")
    data = handwriting(rng)
    wrong = torch.from_numpy(rng.random(len(data.y)) < 0.2)
    drawn = torch.from_numpy(rng.integers(0, 10, len(data.y)))
    data.y = torch.where(wrong, drawn, data.y)
    model = _net(64, 12, 10)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=log_uniform(rng, 2e-3, 4e-3), weight_decay=0.1
    )
    return supervise(model, optimizer, data, draw.stream("batches"), steps=300)


class Bag(nn.Module):
    """Mean of word vectors and a head."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, 12, mode="mean", sparse=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def _sparse_words(draw: Draw) -> Lesson:
    """Sparse gradients: most rows of the table are never touched."""
    rng = draw.stream("build")
    data = zipf_documents(rng)
    model = Bag(2000)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=log_uniform(rng, 0.05, 0.1))
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=240, gauge=None,
        names=("train/loss", "val/loss"),
    )  # fmt: skip


def _pairs(draw: Draw) -> Lesson:
    """SGD without momentum, two examples a step: the loss is almost all noise."""
    rng = draw.stream("build")
    data = tabular(("wine", "breast_cancer")[int(rng.integers(2))], rng)
    model = _net(data.x.shape[1], 16, int(data.y.max()) + 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.005, 0.015))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=500, batch=2)


class Dropped(nn.Module):
    """A residual net whose blocks are skipped at random in training."""

    def __init__(self, width: int, depth: int, source: np.random.Generator) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(_net(width, width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            share = 1 - 0.5 * (place + 1) / len(self.blocks)
            if not self.training:
                x = x + share * block(x)
            elif self.source.random() < share:
                x = x + block(x)
        return self.head(x)


def _stochastic_depth(draw: Draw) -> Lesson:
    """Blocks that take part in half of the steps, without gradient in the others."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Dropped(40, int(rng.integers(5, 9)), draw.stream("depth"))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.9)
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=300, gauge=None
    )  # fmt: skip


def _second_order(draw: Draw) -> Lesson:
    """LBFGS: several evaluations a step, large first steps, then none to speak of."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = nn.Linear(30, 2)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=log_uniform(rng, 0.05, 0.1), max_iter=4, history_size=6
    )

    def lose() -> Tensor:
        penalty = 0.02 * sum(entry.pow(2).sum() for entry in model.parameters())
        return functional.cross_entropy(model(data.x), data.y) + penalty

    def advance(_step: int) -> dict[str, float]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = lose()
            loss.backward()
            return loss

        return {"train/loss": float(optimizer.step(closure).detach())}

    def assess() -> float:
        return float(functional.cross_entropy(model(data.x_held), data.y_held))

    return Lesson(model=model, optimizer=optimizer, steps=120, advance=advance, assess=assess)


def _frozen_body(draw: Draw) -> Lesson:
    """A frozen body of random convolutions, in evaluation mode, and a small head."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.AvgPool2d(4)))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", _net(64, 32, 4))
    model.body.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=log_uniform(rng, 3e-3, 8e-3))
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=240, gauge=None,
    )  # fmt: skip


def _weights_change(draw: Draw) -> Lesson:
    """The weight of the loss is changed by a factor twice: the shown loss has two steps."""
    rng = draw.stream("build")
    data = friedman(rng)
    data = Material(data.x, (data.y - 14) / 5, data.x_held, (data.y_held - 14) / 5)
    model = _net(10, 40, 40, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))

    def weigh(step: int, loss: Tensor) -> Tensor:
        return loss * (1.0 if step < 120 else 3.0 if step < 220 else 0.5)

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=320, loss=functional.mse_loss,
        weigh=weigh,
    )  # fmt: skip


def _every_tenth(draw: Draw) -> Lesson:
    """Metrics every ten steps; no layers, no parameters."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _net(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=400, log_every=10, watched=False,
        names=("loss", "val_loss"), accuracy="val_acc",
    )  # fmt: skip


SCENARIOS = (
    sound("mixture_of_experts", _experts, share=0.5),
    sound("tied_autoencoder", _tied, share=0.5),
    sound("adding_with_clip", _adding, share=0.5),
    sound("siamese_margin", _siamese, share=0.6),
    sound("cosine_restarts", _cosine_restarts, share=0.5),
    sound("weight_average", _averaged, share=0.3),
    sound("noise_curriculum", _curriculum, share=0.4, rising=True),
    sound("tolerated_label_noise", _tolerated_noise, share=0.5),
    sound("sparse_words", _sparse_words, share=0.95),
    sound("two_examples_a_step", _pairs, share=0.6),
    sound("stochastic_depth", _stochastic_depth, share=0.5),
    sound("lbfgs", _second_order, share=0.5),
    sound("frozen_body", _frozen_body, share=0.6),
    sound("loss_weight_steps", _weights_change, share=0.5, rising=True),
    sound("every_tenth_step", _every_tenth, share=0.3),
)
