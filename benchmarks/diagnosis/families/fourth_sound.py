"""Healthy trainings of the fourth family whose habits or losses look like faults."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.fourth_course import Course, Notes, sound, train
from benchmarks.diagnosis.families.fourth_tasks import (
    Batches,
    Vae,
    draw_ring,
    load_masks,
    supervise,
)
from benchmarks.diagnosis.networks import Transformer
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


def rate_from_zero_to_zero(recorder: Recorder, draw: Draw) -> Truth:
    """Vaswani et al. 2017 and BERT: the rate rises from 0 and falls to 0; ends barely move."""
    data = sequences.load_text(draw.stream("data"), count=2000, length=16)
    model = Transformer(data.classes, 32, 1, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    steps, warm = 260, draw.integer(30, 60)

    def factor(step: int) -> float:
        return min((step + 0.01) / warm, (steps - step) / (steps - warm))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    course = supervise(
        draw, model, data, optimizer, size=24, steps=steps, clip=1.0, accuracy=False,
        after=lambda _step: scheduler.step(), keys=("loss", "eval_loss"),
    )  # fmt: skip
    return sound(train(course, recorder, draw), f"{warm} steps of warm-up, linear to 0", gain=0.2)


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


def masks_by_dice(recorder: Recorder, draw: Draw) -> Truth:
    """Milletari et al. 2016: one minus the Dice coefficient, between 0 and 1, of small masks."""
    data = load_masks(draw.stream("data"))
    channels = draw.integer(6, 10)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 1, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def measure(output: Tensor, target: Tensor) -> Tensor:
        given = torch.sigmoid(output)
        both = 2 * (given * target).sum((1, 2, 3)) + 1
        return (1 - both / (given.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

    course = supervise(
        draw, model, data, optimizer, measure=measure, steps=220, size=16,
        keys=("train/dice_loss", "val/dice_loss"),
    )  # fmt: skip
    return sound(_run(course, recorder, draw), "Dice loss of masks", gain=0.3)


def pairs_with_margin(recorder: Recorder, draw: Draw) -> Truth:
    """FaceNet 2015 on easy pairs: more and more losses, and so gradients, are exactly 0."""
    rng = draw.stream("data")
    items = torch.from_numpy(rng.normal(size=(1200, 12))).float()
    taste = torch.from_numpy(rng.normal(size=12)).float()
    worth = items @ taste + 0.5 * (items[:, 0] * items[:, 1])
    width = draw.integer(32, 64)
    model = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)

    def pair(low: int, high: int, count: int) -> tuple[Tensor, Tensor]:
        one = torch.randint(low, high, (count,))
        two = torch.randint(low, high, (count,))
        better = worth[one] > worth[two]
        # Only pairs that are clearly apart are asked for.
        clear = (worth[one] - worth[two]).abs() > 2
        one, two, better = one[clear], two[clear], better[clear]
        return items[torch.where(better, one, two)], items[torch.where(better, two, one)]

    def measure(network: nn.Module, low: int, high: int, count: int) -> Tensor:
        good, bad = pair(low, high, count)
        return (1.0 - network(good) + network(bad)).relu().mean()

    def validate() -> dict[str, float]:
        with torch.no_grad():
            good, bad = pair(800, 1000, 400)
            ahead = model(good) - model(bad)
        return {
            "val/hinge": float((1 - ahead).relu().mean()),
            "val/pair_accuracy": float((ahead > 0).double().mean()),
        }

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(model, 0, 800, 24),
        proof=lambda seen: float(measure(seen, 1000, 1200, 1000)),
        held_out=validate,
        steps=300,
        loss_key="train/hinge",
    )
    notes = _run(course, recorder, draw)
    none = sum(loss == 0.0 for loss in notes.losses)
    return sound(notes, f"{none} of 300 losses are exactly 0", gain=0.7)


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


SCENARIOS = (
    *tuple(
        _scenario(train_it)
        for train_it in (
            large_rate_with_norms,
            a_dozen_to_validate,
            rate_from_zero_to_zero,
        )
    ),
    *tuple(
        _scenario(train_it)
        for train_it in (
            summed_over_pixels,
            noise_predicted,
            masks_by_dice,
            pairs_with_margin,
            outliers_in_targets,
        )
    ),
)
