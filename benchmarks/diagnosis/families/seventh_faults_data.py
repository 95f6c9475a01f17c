"""Faults of the seventh family that lie in the data: loaders, targets, encoders, missing values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import FALLOUT, Batch, Log, Plan, deal, fault
from benchmarks.diagnosis.families.seventh_tasks import (
    Decoder,
    Sequence,
    digits,
    learn,
    make_dense,
    make_masks,
    regress,
    shapes,
    text,
)
from benchmarks.diagnosis.scenario import Draw


def is_stuck(share: float = 0.1) -> Callable[[Log, Log], str | None]:
    """A check that the loss of the second half is above all but this share of where it settled."""

    def check(log: Log, twin: Log) -> str | None:
        half = len(log.losses) // 2
        early, late = (
            np.mean(log.losses[half : half + half // 2]),
            np.mean(log.losses[-half // 2 :]),
        )
        gained = abs(np.mean(twin.losses[:5]) - np.mean(twin.losses[-10:]))
        return None if early - late < share * gained else f"not stuck, {early:.4g} to {late:.4g}"

    return check


def _sort_by_length(draw: Draw, faulty: bool) -> Plan:
    # pack_padded_sequence wants the longest first; the targets keep the old order.
    rng = draw.stream("data")
    count, length = 1200, 12
    lengths = rng.integers(3, length + 1, count)
    values = rng.normal(size=(count, length, 1))
    values[np.arange(length)[None] >= lengths[:, None]] = 0.0
    total = values.sum(1) / 3.0
    cuts = [torch.tensor(part, dtype=torch.float32) for part in (values, total)]
    x, y = cuts
    data = Data(x[:800], y[:800], x[800:1000], y[800:1000], x[1000:], y[1000:], classes=0)
    width = draw.integer(16, 28)
    drawn = deal(data, 40, draw.stream("order"))

    def batch(step: int) -> Batch:
        inputs, targets, rows = drawn(step)
        order = torch.from_numpy(-lengths[rows.numpy()]).argsort(stable=True)
        return inputs[order], targets if faulty else targets[order], rows

    return learn(
        draw,
        data,
        lambda: Sequence(nn.GRU, 1, width, 1),
        lambda model: torch.optim.Adam(model.parameters(), lr=4e-3),
        lose=regress,
        batch=batch,
    )


def _flip_images_alone(draw: Draw, faulty: bool) -> Plan:
    # A random mirror image without the mirrored coordinate.
    masks = make_masks(draw.stream("data"), count=1200)
    grid = (torch.arange(16.0) - 7.5) / 7.5

    def place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        size = y.sum((1, 2, 3))
        across = (y.sum((1, 2)) * grid).sum(1) / size
        down = (y.sum((1, 3)) * grid).sum(1) / size
        return x, 2 * torch.stack([across, down], 1)

    parts = (
        *place(masks.x, masks.y),
        *place(masks.val_x, masks.val_y),
        *place(masks.proof_x, masks.proof_y),
    )
    data = Data(*parts, classes=0)
    drawn = deal(data, 32, draw.stream("order"))
    coins = draw.stream("coins")

    def batch(step: int) -> Batch:
        x, y, rows = drawn(step)
        turned = torch.from_numpy(coins.uniform(size=len(x)) < 0.5)
        x = torch.where(turned[:, None, None, None], x.flip(3), x)
        if not faulty:
            y = torch.where(turned[:, None], y * torch.tensor([-1.0, 1.0]), y)
        return x, y, rows

    width = draw.integer(6, 10)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * width, 32),
            nn.ReLU(),
            nn.Linear(32, 2),
        )

    return learn(
        draw,
        data,
        build,
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        lose=regress,
        batch=batch,
    )


def _encode_validation_anew(draw: Draw, faulty: bool) -> Plan:
    # A second label encoder, fitted on held-out files, numbers the classes otherwise.
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    numbers = torch.from_numpy(draw.stream("encoder").permutation(10))
    if faulty:
        data = replace(data, val_y=numbers[data.val_y], proof_y=numbers[data.proof_y])
    return digits(draw, data=data)


def _ask_hasty_annotators(draw: Draw, faulty: bool) -> Plan:
    share = draw.uniform(0.4, 0.5)
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    if faulty:
        data = data.mislabel(draw.stream("annotators"), share)
    rate = draw.uniform(0.02, 0.04)
    return digits(
        draw,
        data=data,
        build=lambda: make_dense([64, 16, 10]),
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        diagnoses=True,
        steps=330,
    )


def _shuffle_a_small_buffer(draw: Draw, faulty: bool) -> Plan:
    # Records written class by class, read through a shuffle buffer far smaller than a class.
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    order = data.y.argsort(stable=True)
    rng = draw.stream("buffer")
    size, room = 32, 48

    def read() -> list[int]:
        waiting, given = [], []
        for row in order.tolist():
            waiting.append(row)
            if len(waiting) > room:
                given.append(waiting.pop(int(rng.integers(len(waiting)))))
        return given + [waiting[i] for i in rng.permutation(len(waiting))]

    epochs: list[list[int]] = []
    whole = len(data.x) // size

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, whole)
        while len(epochs) <= epoch:
            epochs.append(read())
        rows = torch.tensor(epochs[epoch][place * size : (place + 1) * size])
        return data.x[rows], data.y[rows], rows

    options = {"batch": batch} if faulty else {}
    return digits(draw, data=data, diagnoses=True, **options)


def _catch_every_reading_error(draw: Draw, faulty: bool) -> Plan:
    # `except OSError: return torch.zeros(...)` where the folder is not mounted.
    plan = shapes(draw)
    drawn = plan.batch
    if faulty:
        plan.batch = lambda step: (torch.zeros_like(drawn(step)[0]), *drawn(step)[1:])
        plan.val = None
    return plan


def _train_on_too_little(draw: Draw, faulty: bool) -> Plan:
    count = draw.integer(60, 100)
    plan = text(draw, count=3000, build=lambda: Decoder(32, 40, 20, depth=1))
    drawn = plan.batch
    keep = torch.from_numpy(draw.stream("few").permutation(600))
    few = drawn(0)[0][:0], drawn(0)[1][:0]
    if faulty:
        parts = [drawn(step) for step in range(1 + count // 32)]
        few = torch.cat([p[0] for p in parts])[:count], torch.cat([p[1] for p in parts])[:count]

        def batch(step: int) -> Batch:
            rows = (keep[:24] + 7 * step) % count
            return few[0][rows], few[1][rows], rows

        plan.batch = batch
    plan.steps = 210
    return plan


def _rises(log: Log, twin: Log) -> str | None:
    del twin
    said = [entry["val/loss"] for entry in log.said]
    rise = said[-1] - min(said)
    return None if rise > 0.1 * min(said) else f"validation rose by {rise:.3g} only"


SCENARIOS = (
    fault("seventh/data/sorted_without_targets", _sort_by_length, "plateau", check=is_stuck()),
    fault(
        "seventh/data/flipped_without_targets",
        _flip_images_alone,
        tolerated=(*FALLOUT, "mislabelled_data"),
    ),
    fault(
        "seventh/data/second_label_encoder",
        _encode_validation_anew,
        tolerated=(*FALLOUT, "mislabelled_data"),
        share=0.9,
    ),
    fault("seventh/data/hasty_annotators", _ask_hasty_annotators, "mislabelled_data"),
    fault(
        "seventh/data/small_shuffle_buffer",
        _shuffle_a_small_buffer,
        "unshuffled_data",
        tolerated=(*FALLOUT, "mislabelled_data"),
    ),
    fault(
        "seventh/data/blank_images",
        _catch_every_reading_error,
        "constant_inputs",
        tolerated=(*FALLOUT, "mislabelled_data"),
    ),
    fault(
        "seventh/data/too_little_text",
        _train_on_too_little,
        "overfitting_onset",
        check=_rises,
    ),
)
