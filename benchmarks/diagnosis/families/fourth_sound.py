"""Healthy trainings of the fourth family whose habits or losses look like faults."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.fourth_course import Course, Notes, sound, train
from benchmarks.diagnosis.families.fourth_tasks import (
    Batches,
    Vae,
    draw_ring,
    supervise,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def large_rate_with_norms(recorder: Recorder, draw: Draw) -> Truth:
    """Smith and Topin 2019, super-convergence: with batch norm a rate far above 0.1 works."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    channels = draw.integer(8, 12)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * channels, 10),
    )  # fmt: skip
    highest = draw.uniform(0.4, 0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 240
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=highest, total_steps=steps + 1
    )
    course = supervise(
        draw, model, data, optimizer, steps=steps, size=48, after=lambda _step: scheduler.step()
    )
    return sound(train(course, recorder, draw), f"one cycle up to {highest:.2f}", gain=0.7)


def a_dozen_to_validate(recorder: Recorder, draw: Draw) -> Truth:
    """Forum: "validation loss fluctuates": it is measured on a dozen samples."""
    data = datasets.load_blobs(draw.stream("data"), spread=1.6)
    count = draw.integer(10, 16)
    data = replace(data, val_x=data.val_x[:count], val_y=data.val_y[:count])
    model = nn.Sequential(nn.Linear(20, draw.integer(12, 20)), nn.ReLU())
    model.add_module("2", nn.Linear(model[0].out_features, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    course = supervise(draw, model, data, optimizer, steps=220, val_every=5)
    return sound(train(course, recorder, draw), f"{count} samples of validation", gain=0.5)


def _scenario(train_it: object) -> Scenario:
    name = train_it.__name__  # type: ignore[attr-defined]
    return Scenario(name=f"fourth/healthy/{name}", kind="healthy", train=train_it)  # type: ignore[arg-type]


def _run(course: Course, recorder: Recorder, draw: Draw) -> Notes:
    return train(course, recorder, draw)


def summed_over_pixels(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch examples, VAE: binary cross-entropy with reduction="sum"; losses of thousands."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    model = Vae(64, draw.integer(64, 96), draw.integer(6, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = Batches(draw, data.x, data.x, 64)

    def measure(x: Tensor) -> Tensor:
        made, mean, spread = model(x)
        errors = functional.binary_cross_entropy(made, x, reduction="sum")
        return errors - 0.5 * torch.sum(1 + spread - mean.square() - spread.exp())

    def validate() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            loss = float(measure(data.val_x))
        model.train()
        return {"val/loss": loss / len(data.val_x)}

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(batches.take()[0]),
        proof=lambda seen: float(functional.mse_loss(seen(data.proof_x)[0], data.proof_x)),
        held_out=validate,
        steps=280,
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "losses are sums over batch and pixels", gain=0.4)


def noise_predicted(recorder: Recorder, draw: Draw) -> Truth:
    """Ho et al. 2020: a denoiser's loss falls soon, then stands and is noisy."""
    rng = draw.stream("data")
    points, kept = draw_ring(rng, 2000, modes=4), draw_ring(rng, 500, modes=4)
    width = draw.integer(64, 96)
    model = nn.Sequential(
        nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    batches = Batches(draw, points, points, 64)

    def measure(network: nn.Module, x: Tensor) -> Tensor:
        time = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        angle = 0.5 * torch.pi * time
        mixed = angle.cos() * x + angle.sin() * noise
        guess = network(torch.cat([mixed, time, (4 * angle).sin()], 1))
        return functional.mse_loss(guess, noise)

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(model, batches.take()[0]),
        proof=lambda seen: float(measure(seen, kept)),
        steps=350,
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "noise is predicted at random times", gain=0.4)


def outliers_in_targets(recorder: Recorder, draw: Draw) -> Truth:
    """Huber 1964: heavy tails in the targets make single losses huge; his loss stands it."""
    data = datasets.load_friedman(draw.stream("data"), noise=0.3)
    rng = draw.stream("outliers")
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(14.4).div_(5.0)
    y = data.y.clone()
    chosen = torch.from_numpy(rng.permutation(len(y))[: int(0.02 * len(y))])
    y[chosen] += torch.from_numpy(rng.choice([-1, 1], (len(chosen), 1)) * 40.0).float()
    data = replace(data, y=y)
    width = draw.integer(32, 64)
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    course = supervise(
        draw, model, data, optimizer, measure=functional.huber_loss, proof=functional.mse_loss,
        size=48, steps=300, keys=("train/huber", "val/huber"),
    )  # fmt: skip
    return sound(_run(course, recorder, draw), "2 % of the targets are 40 off", gain=0.5)


SCENARIOS = tuple(
    _scenario(train_it)
    for train_it in (
        large_rate_with_norms,
        a_dozen_to_validate,
        summed_over_pixels,
        noise_predicted,
        outliers_in_targets,
    )
)
