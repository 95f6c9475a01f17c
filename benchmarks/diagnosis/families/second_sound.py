"""Healthy trainings of the second family: odd losses, odd habits, odd machines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    friedman,
    handwriting,
    shape_images,
    tabular,
)
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    log_uniform,
    supervise,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


def _inner_loops(draw: Draw) -> Lesson:
    """Meta-learning of sine waves: two inner steps of SGD inside each outer step."""
    rng = draw.stream("build")
    model = nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))

    def adapt(source: np.random.Generator) -> Tensor:
        size, phase = source.uniform(0.5, 2.0), source.uniform(0, np.pi)
        x = torch.as_tensor(source.uniform(-3, 3, (20, 1)), dtype=torch.float32)
        y = size * torch.sin(x + phase)
        weights = dict(model.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(model, weights, (x[:10],))
            loss = functional.mse_loss(out, y[:10])
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), grads, strict=True)
            weights = {name: entry - 0.05 * grad for (name, entry), grad in pairs}
        return functional.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), y[10:])

    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        loss = torch.stack([adapt(batches) for _ in range(4)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/meta_loss": loss.item()}

    def assess() -> float:
        source = np.random.default_rng(3)
        with torch.enable_grad():
            return float(np.mean([adapt(source).item() for _ in range(12)]))

    return Lesson(model=model, optimizer=optimizer, steps=240, advance=advance, assess=assess)


def _uncertain_tasks(draw: Draw) -> Lesson:
    """Two tasks weighed by learned variances: the loss goes through zero and below."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    mix = torch.as_tensor(rng.normal(size=(30, 2)) / 8, dtype=torch.float32)
    model = nn.Sequential()
    model.add_module("trunk", nn.Sequential(nn.Linear(30, 32), nn.SiLU()))
    model.add_module("heads", nn.Linear(32, 2))
    model.register_parameter("log_variance", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))
    batches = draw.stream("batches")

    def errors(x: Tensor) -> Tensor:
        return (model.heads(model.trunk(x)) - (x @ mix) * torch.tensor([1.0, 0.2])).pow(2).mean(0)

    def lose(x: Tensor) -> Tensor:
        return (errors(x) * (-model.log_variance).exp() + model.log_variance).sum()

    def advance(_step: int) -> dict[str, float]:
        loss = lose(data.draw(batches, 32)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=400,
        advance=advance,
        assess=lambda: float(errors(data.x_held).sum()),
        validate=lambda: {"val/loss": without_graph(lambda: float(lose(data.x_held)))},
    )


def _net(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers += [nn.Linear(widths[place], widths[place + 1]), act()]
    return nn.Sequential(*layers[:-1])


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


class SignUnits(nn.Module):
    """Units of minus or plus one, with a straight-through gradient inside the linear range."""

    def forward(self, x: Tensor) -> Tensor:
        soft = x.clamp(-1, 1)
        return soft + (torch.sign(x) - soft).detach()


def _binary_units(draw: Draw) -> Lesson:
    """Activations that are all at their bounds by design."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), SignUnits(), nn.Linear(64, 48), nn.BatchNorm1d(48),
        SignUnits(), nn.Linear(48, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=240, batch=48)


def _pruned(draw: Draw) -> Lesson:
    """Weights are pruned in rounds, up to four fifths of them, and stay zero."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    masks = {0: torch.ones(80, 64), 2: torch.ones(10, 80)}

    def finish(step: int) -> None:
        for place, mask in masks.items():
            weight = model[place].weight
            if step in {90, 130, 170, 210}:
                bound = torch.quantile(weight.detach().abs()[mask > 0], 0.3)
                mask.mul_((weight.detach().abs() > bound).float())
            with torch.no_grad():
                weight.mul_(mask)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=320, finish=finish)


def _accumulated(draw: Draw) -> Lesson:
    """Four small batches to a step, of very different sizes; brain floats in the forward pass."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(200, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.03, 0.08), momentum=0.9)
    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        optimizer.zero_grad()
        whole = 0.0
        for size in (4, 8, 8, 12):
            x, y = data.draw(batches, size)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = functional.cross_entropy(out.float(), y) * size / 32
            loss.backward()
            whole += loss.item()
        optimizer.step()
        return {"train/loss": whole}

    def assess() -> float:
        return float(functional.cross_entropy(model(data.x_held), data.y_held))

    return Lesson(model=model, optimizer=optimizer, steps=180, advance=advance, assess=assess)


def _counts(draw: Draw) -> Lesson:
    """Poisson regression of large counts: raw losses far below zero, with heavy tails."""
    rng = draw.stream("build")
    data = friedman(rng)
    data.y = torch.poisson(data.y.clamp(min=0) * 8)
    data.y_held = torch.poisson(data.y_held.clamp(min=0) * 8)
    model = nn.Sequential(nn.Linear(10, 32), nn.Softplus(), nn.Linear(32, 1))
    nn.init.constant_(model[-1].bias, 4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.poisson_nll_loss(out, y)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, loss=loss)


def _resilient(draw: Draw) -> Lesson:
    """Rprop on the whole data: step sizes of every weight's own, gradients that fall to nothing."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = nn.Sequential(nn.Linear(30, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.Rprop(model.parameters(), lr=log_uniform(rng, 5e-4, 2e-3))

    def advance(_step: int) -> dict[str, float]:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.x), data.y, label_smoothing=0.15)
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    def assess() -> float:
        return float(
            functional.cross_entropy(model(data.x_held), data.y_held, label_smoothing=0.15)
        )

    return Lesson(model=model, optimizer=optimizer, steps=120, advance=advance, assess=assess)


SCENARIOS = (
    sound("inner_loops", _inner_loops, share=0.7),
    sound("uncertain_tasks", _uncertain_tasks, share=0.3),
    sound("tied_autoencoder", _tied, share=0.5),
    sound("stochastic_depth", _stochastic_depth, share=0.5),
    sound("loss_weight_steps", _weights_change, share=0.5, rising=True),
    sound("binary_units", _binary_units, share=0.4),
    sound("pruned_in_rounds", _pruned, share=0.3),
    sound("accumulated_brain_floats", _accumulated, share=0.5),
    sound("poisson_counts", _counts, share=0.985),
    sound("rprop", _resilient, share=0.8),
)
