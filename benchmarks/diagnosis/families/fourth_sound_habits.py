"""Healthy trainings with habits that look like faults: schedules, freezing, clipping, few data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.fourth_course import sound, train
from benchmarks.diagnosis.families.fourth_tasks import (
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


SCENARIOS = tuple(
    _scenario(train_it)
    for train_it in (
        large_rate_with_norms,
        a_dozen_to_validate,
        rate_from_zero_to_zero,
    )
)
