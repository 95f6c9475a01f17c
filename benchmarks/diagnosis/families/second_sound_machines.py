"""Healthy trainings on machines and in stages: clocks with a reason, resumption, odd precision."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    characters,
    friedman,
    handwriting,
    shape_images,
    signal_windows,
    tabular,
    trigger_sequences,
)
from benchmarks.diagnosis.families.second_evidence import Clock, Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


def _distilled(draw: Draw) -> Lesson:
    """A student learns from soft targets of a wide random-feature teacher, at high temperature."""
    rng = draw.stream("build")
    data = handwriting(rng)
    teacher = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    tutor = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(80):
        tutor.zero_grad()
        functional.cross_entropy(teacher(data.x), data.y).backward()
        tutor.step()
    teacher.requires_grad_(False)
    student = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    optimizer = torch.optim.AdamW(student.parameters(), lr=log_uniform(rng, 3e-3, 8e-3))
    with torch.no_grad():
        data.y, data.y_held = (torch.softmax(teacher(x) / 4, -1) for x in (data.x, data.x_held))

    def loss(out: Tensor, soft: Tensor) -> Tensor:
        return functional.kl_div(torch.log_softmax(out / 4, -1), soft, reduction="batchmean") * 16

    return supervise(student, optimizer, data, draw.stream("batches"), steps=300, loss=loss)


def _timed(draw: Draw, clock: Clock) -> Lesson:
    """A forecaster under a clock of its own."""
    rng = draw.stream("build")
    data = signal_windows(rng)
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=300,
        loss=functional.mse_loss,
        clock=clock,
    )


def _bucketed_lengths(draw: Draw) -> Lesson:
    """Batches of long and short sequences: compute varies threefold from step to step."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    base = log_uniform(rng, 10, 150)

    def clock(_step: int) -> tuple[float, float, float]:
        compute = base * noise.choice([0.6, 0.8, 1.0, 1.3, 1.8]) * noise.lognormal(0, 0.03)
        data = base * 0.04 * noise.lognormal(0, 0.2)
        return data + compute, data, compute

    return _timed(draw, clock)


def _long_checkpoints(draw: Draw) -> Lesson:
    """A checkpoint of many steps' length every fifty steps, and a compilation at the start."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    base = log_uniform(rng, 30, 300)

    def clock(step: int) -> tuple[float, float, float]:
        compute = base * noise.lognormal(0, 0.02) + (40 * base if step < 2 else 0)
        data = base * 0.08 * noise.lognormal(0, 0.1)
        return data + compute + (6 * base if step % 50 == 49 else 0.0), data, compute

    return _timed(draw, clock)


def _large_and_slow(draw: Draw) -> Lesson:
    """Two seconds a step, from the first one to the last: a large model, not a bottleneck."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    base = log_uniform(rng, 900, 4000)

    def clock(_step: int) -> tuple[float, float, float]:
        compute, data = base * noise.lognormal(0, 0.03), base * 0.02 * noise.lognormal(0, 0.3)
        return data + compute, data, compute

    return _timed(draw, clock)


def _resumed(draw: Draw) -> Lesson:
    """A second attempt goes on from a checkpoint without the optimizer's moments."""
    rng = draw.stream("build")
    data = trigger_sequences(rng, train=4000, length=8)
    model = nn.Sequential(
        nn.Embedding(8, 12), nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 8)
    )
    rate = log_uniform(rng, 3e-3, 8e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = 360
    cut = draw.onset_step(steps, 0.4, 0.6)

    def finish(step: int) -> None:
        if step == cut:
            optimizer.state.clear()
        if step >= cut:
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step - cut + 1) / 20)

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=steps, batch=64, finish=finish
    )


def _unfrozen_in_stages(draw: Draw) -> Lesson:
    """Frozen layers join one after the other, with smaller rates."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential()
    model.add_module("low", nn.Sequential(nn.Linear(64, 48), nn.ReLU()))
    model.add_module("high", nn.Sequential(nn.Linear(48, 48), nn.ReLU()))
    model.add_module("head", nn.Linear(48, 10))
    rate = log_uniform(rng, 3e-3, 6e-3)
    model.low.requires_grad_(False)
    model.high.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=rate)

    def finish(step: int) -> None:
        for at, part, share in ((90, model.high, 0.5), (180, model.low, 0.25)):
            if step == at:
                part.requires_grad_(True)
                optimizer.add_param_group({"params": [*part.parameters()], "lr": rate * share})

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=300, finish=finish, gauge=None
    )


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


def _focal_long_tail(draw: Draw) -> Lesson:
    """A focal loss on a long-tailed task: losses of a few thousandths, mostly easy examples."""
    rng = draw.stream("build")
    data = handwriting(rng, train=1300)
    keep = torch.from_numpy(rng.random(len(data.y))) < 0.75 ** data.y.double()
    data.x, data.y = data.x[keep], data.y[keep]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(out, y, reduction="none")
        return (0.01 * (1 - torch.exp(-each)) ** 2 * each).mean()

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=260, loss=loss)


def _epochs_only(draw: Draw) -> Lesson:
    """One row of metrics for each of two dozen epochs; nothing else."""
    rng = draw.stream("build")
    data = tabular("wine", rng)
    model = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.05, 0.1))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=240,
        log_every=10,
        validate_every=10,
        by_epoch=True,
        names=("train_loss", "val_loss"),
        accuracy="val_accuracy",
        watched=False,
        options={"timing": "none"},
    )


def _fine_tuned(draw: Draw) -> Lesson:
    """Fine-tuning at a small rate, from weights that are nearly those wanted."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))
    tutor = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        tutor.zero_grad()
        functional.cross_entropy(model(data.x), data.y).backward()
        tutor.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=log_uniform(rng, 1e-4, 3e-4))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=240)


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


def _annealed_text(draw: Draw) -> Lesson:
    """A language model with tied embeddings, warm-up and a rate that ends at zero."""
    rng = draw.stream("build")
    data = characters(rng, context=10, train=12000)
    symbols = int(max(data.x.max(), data.x_held.max(), data.y.max(), data.y_held.max())) + 1

    class Tied(nn.Module):
        """Attention over a few characters; the output weights are the embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(symbols, 32)
            self.place = nn.Parameter(torch.zeros(10, 32))
            self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
            self.norm = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            out = self.block(self.embed(x) + self.place)[:, -1]
            return self.norm(out) @ self.embed.weight.T

    model = Tied()
    nn.init.normal_(model.embed.weight, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=log_uniform(rng, 3e-3, 6e-3))
    steps = 300
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 30, 0.5 + 0.5 * float(np.cos(np.pi * step / steps))),
    )

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, label_smoothing=0.05)

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        batch=48,
        loss=loss,
        finish=lambda _step: schedule.step(),
        gauge=None,
    )


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
    sound("distilled_student", _distilled, share=0.5, phases_expected=("rapid_learning",)),
    sound("bucketed_lengths", _bucketed_lengths, share=0.5),
    sound("long_checkpoints", _long_checkpoints, share=0.5),
    sound("large_and_slow", _large_and_slow, share=0.5),
    sound("resumed_without_moments", _resumed, share=0.7),
    sound("unfrozen_in_stages", _unfrozen_in_stages, share=0.3),
    sound("binary_units", _binary_units, share=0.4),
    sound("focal_long_tail", _focal_long_tail, share=0.4),
    sound("epochs_only", _epochs_only, share=0.4),
    sound("fine_tuned", _fine_tuned, share=0.9),
    sound("pruned_in_rounds", _pruned, share=0.3),
    sound("accumulated_brain_floats", _accumulated, share=0.5),
    sound("annealed_text", _annealed_text, share=0.8),
    sound("poisson_counts", _counts, share=0.985),
    sound("rprop", _resilient, share=0.8),
)
