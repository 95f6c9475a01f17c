"""Healthy trainings whose recipes look odd: schedules, scales, pauses, machines, habits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.eighth_course import fit, judge_sound
from benchmarks.diagnosis.families.eighth_tasks import (
    SmallResNet,
    make_images,
    make_prices,
    sample,
    supervise,
)
from benchmarks.diagnosis.networks import Autoencoder, make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _warm_restarts(recorder: Recorder, draw: Draw) -> Truth:
    """Loshchilov and Hutter 2017: the rate jumps back up, and the loss with it, each time."""
    data = make_images(draw, classes=8, noise=0.8)
    model = SmallResNet(10, 1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60, T_mult=2)
    course = supervise(draw, model, optimizer, data, steps=420, check_every=15)
    course.after = lambda _step: schedule.step()
    return judge_sound(fit(course, recorder), 0.15, "the rate restarts after 60 and 180 steps")


def _batches_of_four(recorder: Recorder, draw: Draw) -> Truth:
    """A batch of four, by memory: the loss of a step says nearly nothing."""
    data = datasets.load_blobs(draw.stream("data"), count=1500, classes=6, features=12, spread=1.6)
    model = make_mlp([12, 48, 6], activation="tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    course = supervise(draw, model, optimizer, data, size=4, steps=600, check_every=50)
    course.before = lambda step: optimizer.param_groups[0].update(lr=0.03 * (1 - step / 620))
    notes = fit(course, recorder)
    return judge_sound(notes, 0.5 * notes.begin, "batches of four points", back=0.15)


def _accumulated(recorder: Recorder, draw: Draw) -> Truth:
    """Gradients of four batches are added up on purpose, and cleared after the step."""
    data = make_images(draw, classes=6)
    model = make_convolutional([8, 16], 12, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    course = supervise(draw, model, optimizer, data, size=16, steps=480, check_every=40)
    plain = course.lose

    def lose(net: nn.Module, got: Any, step: int) -> tuple[Tensor, dict[str, float]]:
        loss, logged = plain(net, got, step)
        return loss / 4, logged

    def update(step: int) -> None:
        if step % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    course.lose, course.update, course.zero = lose, update, lambda _step: None
    course.config["accumulate"] = 4
    return judge_sound(fit(course, recorder), 0.1, "gradients of four batches to a step")


def _loss_scale(recorder: Recorder, draw: Draw) -> Truth:
    """Micikevicius et al. 2018: a scale grows until it overflows, and a step is skipped."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    model = make_mlp([64, 48, 48, 10], activation="gelu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    course = supervise(draw, model, optimizer, data, steps=340, start={"timing": "none"})
    scale, calm, skipped = [2.0**18], [0], [0]
    plain = course.lose

    def lose(net: nn.Module, got: Any, step: int) -> tuple[Tensor, dict[str, float]]:
        loss, logged = plain(net, got, step)
        return loss, {**logged, "amp/loss_scale": scale[0], "amp/skipped": float(skipped[0])}

    def update(step: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        halves = [(scale[0] * gradient).half() for gradient in gradients]
        if not all(torch.isfinite(half).all() for half in halves):
            scale[0], calm[0], skipped[0] = scale[0] / 2, 0, skipped[0] + 1
            recorder.mark_skipped(step)
            return
        for gradient, half in zip(gradients, halves, strict=True):
            gradient.copy_(half.float() / scale[0])
        optimizer.step()
        calm[0] += 1
        if calm[0] == 60:
            scale[0], calm[0] = scale[0] * 2, 0

    course.lose, course.update = lose, update
    notes = fit(course, recorder)
    return judge_sound(notes, 0.35, f"{skipped[0]} steps were skipped for the scale")


def _raw_units(recorder: Recorder, draw: Draw) -> Truth:
    """Prices in thousands: the loss begins at some ten thousands and ends at a thousand."""
    data = make_prices(draw, count=4000)
    middle = draw.uniform(150, 250)
    for part in (data.y, data.val_y, data.proof_y):
        part.mul_(90.0).add_(middle)
    model = make_mlp([8, 64, 64, 1], activation="relu")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    course = supervise(
        draw,
        model,
        optimizer,
        data,
        steps=600,
        names=("train/mse", "val/mse", ""),
        check_every=20,
        start={"layers": False, "parameters": False},
    )
    course.before = lambda step: optimizer.param_groups[0].update(lr=3e-2 * (1 - step / 620))
    return judge_sound(fit(course, recorder), 1600.0, "targets in thousands, not standardised")


def _two_validations(recorder: Recorder, draw: Draw) -> Truth:
    """Validation is dear: it is run in the middle and at the end."""
    data = make_images(draw, classes=6)
    model = make_convolutional([6, 12], 12, 6, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    course = supervise(
        draw,
        model,
        optimizer,
        data,
        steps=240,
        check_every=120,
        names=("loss", "test_loss", "test_acc"),
        log_every=10,
        start={"parameters": False},
    )
    course.before = lambda step: optimizer.param_groups[0].update(lr=0.02 * (1 - step / 250))
    return judge_sound(fit(course, recorder), 0.12, "two validations")


def _mosaic_ends(recorder: Recorder, draw: Draw) -> Truth:
    """YOLOX ends its strong augmentation early: the training loss falls at once."""
    data = make_images(draw, classes=6)
    model = SmallResNet(10, 1, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    course = supervise(draw, model, optimizer, data, steps=360, check_every=20)
    plain, noise = course.batch, torch.Generator().manual_seed(draw.seed)

    def batch(step: int) -> Any:
        x, y, ids = plain(step)
        if step < 270:
            x = x.clone()
            other = torch.randperm(len(x), generator=noise)
            x[:, :, :6] = x[other][:, :, :6]
            x = x + 0.7 * torch.randn(x.shape, generator=noise)
        return x, y, ids

    course.batch, course.config["augment_until"] = batch, 270
    return judge_sound(fit(course, recorder), 0.12, "augmentation ends at step 270")


def _resumed(recorder: Recorder, draw: Draw) -> Truth:
    """A run that goes on at step 400 from a checkpoint, with its optimizer's state."""
    data = datasets.load_digits(draw.stream("data"), noise=0.25).flatten()
    x = (data.x, data.x, data.val_x, data.val_x, data.proof_x, data.proof_x)
    model = Autoencoder(64, 48, 12, activation="gelu")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    take = sample(draw, len(data.x), 48)
    for step in range(400):
        batch = data.x[take(step)]
        optimizer.zero_grad()
        functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    course = supervise(
        draw, model, optimizer, datasets.Data(*x, classes=0), size=48, steps=300, first_step=400
    )
    course.before = lambda step: optimizer.param_groups[0].update(
        lr=2e-3 * (1 - (step - 400) / 320)
    )
    course.config["resumed_from"] = 400
    notes = fit(course, recorder)
    return judge_sound(
        notes, 0.99 * notes.begin, "goes on at step 400, where little is left to win", back=0.4
    )


def _average_of_weights(recorder: Recorder, draw: Draw) -> Truth:
    """Polyak averages, as of Mean Teacher: the average is validated, and lags at first."""
    data = make_images(draw, classes=6)
    model = make_convolutional([8, 16], 12, 6, activation="silu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    course = supervise(draw, model, optimizer, data, steps=360, check_every=20)
    average = copy.deepcopy(model)

    def after(_step: int) -> None:
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.02)

    def check(_step: int) -> dict[str, float]:
        with torch.no_grad():
            output = average(data.val_x)
        return {
            "val/ema_loss": float(functional.cross_entropy(output, data.val_y)),
            "val/ema_accuracy": float((output.argmax(1) == data.val_y).float().mean()),
        }

    course.after, course.check = after, check
    return judge_sound(fit(course, recorder), 0.35, "the average of the weights is validated")


def _checkpoints(recorder: Recorder, draw: Draw) -> Truth:
    """Every hundredth step writes a checkpoint and takes five times as long."""
    data = make_prices(draw)
    model = make_mlp([8, 64, 64, 1], activation="gelu")
    course = supervise(
        draw,
        model,
        torch.optim.Adam(model.parameters(), 3e-3),
        data,
        steps=400,
        names=("mse", "val_mse", ""),
    )
    rng, usual = draw.stream("clock"), draw.uniform(80, 200)

    def after(step: int) -> None:
        took = usual * float(np.exp(rng.normal(0, 0.04)))
        wait = 0.04 * usual * float(np.exp(rng.normal(0, 0.15)))
        saving = 4 * usual if step % 100 == 99 else 0.0
        recorder.time(step, step_ms=took + wait + saving, data_ms=wait, compute_ms=took + saving)

    course.after, course.start = after, {"timing": "manual"}
    return judge_sound(fit(course, recorder), 0.2, "a checkpoint each hundred steps")


SCENARIOS = tuple(
    Scenario(name=f"eighth/healthy/{name}", kind="healthy", train=train)
    for name, train in {
        "warm_restarts": _warm_restarts,
        "batches_of_four": _batches_of_four,
        "accumulated": _accumulated,
        "loss_scale": _loss_scale,
        "raw_units": _raw_units,
        "two_validations": _two_validations,
        "mosaic_ends": _mosaic_ends,
        "resumed": _resumed,
        "average_of_weights": _average_of_weights,
        "checkpoints": _checkpoints,
    }.items()
)
