"""Faults that blow training up: gradients, weights or losses that grow without bound."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    friedman,
    handwriting,
    shape_images,
    signal_windows,
    tabular,
)
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    log_uniform,
    supervise,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import fault, judge_divergence, judge_explosion
from benchmarks.diagnosis.scenario import Draw


class Recurrent(nn.Module):
    """A recurrent layer and a linear head on its last output."""

    def __init__(self, cell: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Block(nn.Module):
    """A residual block, with or without layer norm before it."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


class TwoTasks(nn.Module):
    """A shared trunk, a head for classes and one for a number."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.classes = nn.Linear(width, classes)
        self.number = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(x)
        return self.classes(shared), self.number(shared)


def _clip_removed(draw: Draw, faulty: bool) -> Lesson:
    """A tanh RNN under plain SGD lives on its clip; a refactoring takes the clip away."""
    rng = draw.stream("build")
    data = signal_windows(rng, length=40)
    width = int(rng.integers(32, 49))
    model = Recurrent(nn.RNN(1, width, batch_first=True), width, 1)
    nn.init.orthogonal_(model.cell.weight_hh_l0, gain=1.5)
    nn.init.normal_(model.head.weight, std=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.04, 0.1), momentum=0.9)
    steps = 240
    onset = draw.onset_step(steps, 0.35, 0.6)

    def correct(step: int) -> None:
        if not faulty or step < onset:
            nn.utils.clip_grad_norm_(model.parameters(), 0.15)

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=functional.mse_loss,
        correct=correct,
        onset=onset,
    )


def _task_weight(draw: Draw, faulty: bool) -> Lesson:
    """The weight of the second loss is raised by a factor every epoch and never bounded."""
    rng = draw.stream("build")
    data = tabular("wine", rng)
    scores = data.x @ torch.as_tensor(rng.normal(size=(13, 1)), dtype=torch.float32)
    held = data.x_held @ torch.as_tensor(rng.normal(size=(13, 1)), dtype=torch.float32)
    model = TwoTasks(13, 40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.9)
    batches = draw.stream("batches")
    steps = 260
    onset = draw.onset_step(steps)
    growth = 1.08 + 0.08 * draw.severity

    def lose(rows: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
        classes, number = model(data.x[rows])
        first = functional.cross_entropy(classes, data.y[rows])
        second = functional.mse_loss(number, scores[rows])
        return first + weight * second, first, second

    def advance(step: int) -> dict[str, float]:
        weight = 0.2
        if faulty and step >= onset:
            weight *= min(growth ** (step - onset), 1e5)
        whole, first, second = lose(torch.from_numpy(batches.integers(0, len(data.x), 24)), weight)
        optimizer.zero_grad()
        whole.backward()
        optimizer.step()
        return {
            "train/loss": whole.item(),
            "train/class_loss": first.item(),
            "train/number_loss": second.item(),
        }

    def assess() -> float:
        classes, _ = model(data.x_held)
        return float(functional.cross_entropy(classes, data.y_held)) + 0.0 * float(held.sum())

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=steps,
        advance=advance,
        assess=assess,
        validate=lambda: {"val/loss": without_graph(assess)},
        onset=onset,
    )


def _norms_removed(draw: Draw, faulty: bool) -> Lesson:
    """A deep residual net whose layer norms went missing, with the rate that needs them."""
    rng = draw.stream("build")
    data = handwriting(rng)
    width, depth = 48, int(rng.integers(14, 20))
    model = nn.Sequential(
        nn.Linear(64, width),
        *(Block(width, norm=not faulty) for _ in range(depth)),
        nn.LayerNorm(width) if not faulty else nn.Identity(),
        nn.Linear(width, 10),
    )
    for module in model.modules():
        if isinstance(module, Block):
            nn.init.kaiming_normal_(module.up.weight)
            nn.init.normal_(module.down.weight, std=(0.5 + 0.4 * draw.severity) / width**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.9)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=150, batch=24)


def _bytes_input(draw: Draw, faulty: bool) -> Lesson:
    """From some step on the loader hands out bytes, not fractions."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 16, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(16 * 36, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.004, 0.012), momentum=0.9)
    steps = 200
    onset = draw.onset_step(steps)
    scale = 20 + 40 * draw.severity

    def shape(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * scale if faulty and step >= onset else x), y

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=steps, shape=shape, onset=onset
    )


def _relu_recurrence(draw: Draw, faulty: bool) -> Lesson:
    """A ReLU RNN whose recurrent matrix is far above the identity from the start."""
    rng = draw.stream("build")
    data = signal_windows(rng, length=32)
    width = int(rng.integers(24, 41))
    cell = nn.RNN(1, width, nonlinearity="relu", batch_first=True)
    model = Recurrent(cell, width, 1)
    gain = 1.25 + 0.15 * draw.severity if faulty else 0.95
    with torch.no_grad():
        cell.weight_hh_l0.copy_(gain * torch.eye(width) + 0.01 * torch.randn(width, width))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=log_uniform(rng, 5e-4, 2e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=160,
        loss=functional.mse_loss,
        names=("loss", "val_loss"),
    )


def _rate_grows(draw: Draw, faulty: bool) -> Lesson:
    """The exponential schedule got a factor above one."""
    rng = draw.stream("build")
    data = friedman(rng)
    model = nn.Sequential(
        nn.Linear(10, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    steps = 320
    onset = draw.onset_step(steps, 0.2, 0.4)
    gamma = 1.03 + 0.02 * draw.severity if faulty else 0.99

    def finish(step: int) -> None:
        if step >= onset and optimizer.param_groups[0]["lr"] < 3:
            optimizer.param_groups[0]["lr"] *= gamma

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=functional.mse_loss,
        finish=finish,
        onset=onset,
    )


def _sign_error(draw: Draw, faulty: bool) -> Lesson:
    """A reward is turned into a loss twice: from some step on the loss is climbed slowly."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))
    steps = 260
    onset = draw.onset_step(steps)

    def weigh(step: int, loss: Tensor) -> Tensor:
        return -loss if faulty and step >= onset else loss

    lesson = supervise(
        model, optimizer, data, draw.stream("batches"), steps=steps, weigh=weigh, onset=onset
    )
    inner = lesson.advance
    # What is shown is the cross entropy: the sign is lost in what is optimised.
    lesson.advance = lambda step: {name: abs(value) for name, value in inner(step).items()}
    return lesson


def _no_target_net(draw: Draw, faulty: bool) -> Lesson:
    """Bootstrapped values without a target network, off-policy: the values chase themselves."""
    rng = draw.stream("build")
    states = rng.normal(size=(300, 6))
    following = np.roll(states, 1, axis=1) * 1.3 + 0.1 * rng.normal(size=states.shape)
    x = torch.as_tensor(states, dtype=torch.float32)
    after = torch.as_tensor(following, dtype=torch.float32)
    reward = x[:, :1].sin()
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.5)
    batches = draw.stream("batches")
    steps = 300
    onset = draw.onset_step(steps, 0.2, 0.4)
    discount = 0.98 + 0.1 * draw.severity

    def advance(step: int) -> dict[str, float]:
        rows = torch.from_numpy(batches.integers(0, len(x), 32))
        target = reward[rows]
        if faulty and step >= onset:
            target = target + discount * model(after[rows]).detach()
        loss = functional.mse_loss(model(x[rows]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/td_loss": loss.item(), "train/loss": loss.item()}

    def assess() -> float:
        return float(functional.mse_loss(model(x), reward))

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=steps,
        advance=advance,
        assess=assess,
        validate=lambda: {"val/loss": without_graph(assess)},
        onset=onset,
    )


SCENARIOS = (
    fault("explode/clip_removed_rnn", _clip_removed, judge_explosion("cell", "head")),
    fault("explode/unbounded_task_weight", _task_weight, judge_explosion()),
    fault("explode/layer_norms_removed", _norms_removed, judge_explosion(from_start=True)),
    fault("explode/bytes_for_fractions", _bytes_input, judge_explosion("0", "3", "6")),
    fault(
        "explode/relu_recurrence",
        _relu_recurrence,
        judge_explosion("cell", "head", from_start=True),
    ),
    fault("diverge/growing_rate", _rate_grows, judge_divergence()),
    fault("diverge/sign_error", _sign_error, judge_divergence()),
    fault("diverge/no_target_net", _no_target_net, judge_divergence()),
)
