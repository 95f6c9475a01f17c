"""Recipes with a mistake in them, as post-mortems and issue threads tell of: rates, sums, modes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.seventh_course import FALLOUT, Batch, Log, Plan, fault
from benchmarks.diagnosis.families.seventh_tasks import classify, learn
from benchmarks.diagnosis.families.sixth_tasks import digits, friedman, letters
from benchmarks.diagnosis.scenario import Draw


def _clip_to_nothing(draw: Draw, broken: bool) -> Plan:
    """The threshold of clipping was meant as a tolerance: 1e-4."""
    return digits(draw, clip=1e-4 if broken else 1.0, steps=250)


def _rate_never_capped(draw: Draw, broken: bool) -> Plan:
    """A warm-up in the wrong unit: it never ends, and the rate grows on and on."""

    def rate(step: int) -> float:
        warmed = (step + 1) / 20
        return warmed**2.2 if broken else min(1.0, warmed)

    return letters(draw, rate=rate, steps=240, log_rate=draw.choice(True, False))


def _decay_eats_weights(draw: Draw, broken: bool) -> Plan:
    """A weight decay of 5e-4 lost its exponent."""
    decay = draw.uniform(0.4, 0.6) if broken else 5e-4
    return digits(
        draw,
        steps=240,
        optimize=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay
        ),
    )


def _never_enough_batches(draw: Draw, broken: bool) -> Plan:
    """The optimizer steps after every 64th batch of an epoch, and an epoch has 33."""

    def turn(optimizer: torch.optim.Optimizer, step: int) -> None:
        if (step % 33 + 1) % (64 if broken else 1) == 0:
            optimizer.step()
            optimizer.zero_grad()

    return digits(draw, turn=turn, clears=False, steps=200)


def _labels_out_of_step(draw: Draw, broken: bool) -> Plan:
    """An off-by-one in the loader: each row has the label of the row before it."""
    data = datasets.load_blobs(draw.stream("data"), count=3000, classes=6, spread=2.0)
    if broken:
        data = replace(data, y=data.y.roll(1), val_y=data.val_y.roll(1))
    return learn(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 6)),
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        steps=240,
        size=48,
    )


def _stale_statistics(draw: Draw, broken: bool) -> Plan:
    """Batch normalisation with the other framework's momentum: 0.001 is nearly none here."""
    data = datasets.load_shapes(draw.stream("data"), count=1200)
    # Brightness as a camera gives it: the statistics are far from 0 and 1.
    for part in (data.x, data.val_x, data.proof_x):
        part.mul_(6.0).add_(10.0)
    momentum = 0.0005 if broken else 0.1

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 8, 3, padding=1),
                norm1=nn.BatchNorm2d(8, momentum=momentum),
                act1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(8, 16, 3, padding=1),
                norm2=nn.BatchNorm2d(16, momentum=momentum),
                act2=nn.ReLU(),
                pool2=nn.AdaptiveMaxPool2d(2),
                flat=nn.Flatten(),
                head=nn.Linear(64, 4),
            )
        )

    return learn(
        draw, data, build, lambda model: torch.optim.Adam(model.parameters(), lr=3e-3), steps=220
    )


def _tuned_too_long(draw: Draw, broken: bool) -> Plan:
    """Fifty labelled rows, some labelled wrongly, and as many epochs as for the whole set."""
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.25)
    data = data.shrink(60).mislabel(rng, 0.25) if broken else data
    return digits(
        draw,
        data=data,
        steps=400,
        size=20,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
    )


def _has_overfitted(log: Log, _twin: Log) -> str | None:
    return None if log.end > 1.25 * log.best else "new data were not predicted worse again"


def _corrupt_shard(draw: Draw, broken: bool) -> Plan:
    """Some batches of one shard are in another unit: a thousand times as large."""
    begin = draw.onset_step(240, 0.4, 0.6)
    made = friedman(
        draw,
        steps=240,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        clip=5.0,
    )
    plain = made.batch

    def batch(step: int) -> Batch:
        x, y, rows = plain(step)
        return (x, y * 300.0, rows) if broken and begin <= step < begin + 3 else (x, y, rows)

    made.batch = batch
    return made


def _was_thrown_back(log: Log, twin: Log) -> str | None:
    worst = max(mine - other for mine, other in zip(log.proofs, twin.proofs, strict=True))
    return None if worst > 0.25 * twin.proofs[0] else "the model was not thrown back"


def _wrong_shard(draw: Draw, broken: bool) -> Plan:
    """One annotator's rows, an eighth of all, bear labels that mean something else."""
    rng = draw.stream("data")
    data = datasets.load_blobs(rng, count=2000, classes=5, spread=1.2)
    if broken:
        wrong = torch.from_numpy(rng.permutation(len(data.y))[: len(data.y) // 6])
        y = data.y.clone()
        y[wrong] = (y[wrong] + 1) % 5
        data = replace(data, y=y)
    return learn(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)),
        lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        steps=260,
        diagnoses=True,
    )


def _summed(draw: Draw, broken: bool) -> Plan:
    """The loss is summed over the vocabulary's places where a mean was meant, at the old rate."""
    made = digits(
        draw,
        steps=220,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9),
    )
    if not broken:
        return made

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Mapping[str, float]]:  # noqa: ARG001
        return 32 * classify(model, batch[0], batch[1]), {}

    made.loss = loss
    return made


_WRECK = (*FALLOUT, "non_finite_values")

SCENARIOS = (
    fault("sixth/clip_to_nothing", _clip_to_nothing, "update_ratio"),
    fault("sixth/rate_never_capped", _rate_never_capped, "divergence", tolerated=_WRECK),
    fault("sixth/decay_eats_weights", _decay_eats_weights, "plateau"),
    fault(
        "sixth/never_enough_batches",
        _never_enough_batches,
        "optimizer_not_stepping",
        tolerated=(*FALLOUT, "gradients_not_cleared"),
    ),
    # Relabelled after the first sight, from `plateau`: the training loss does get below that of
    # guesses, by heart, and the validation stays above it.
    fault(
        "sixth/labels_out_of_step",
        _labels_out_of_step,
        "mislabelled_data",
    ),
    fault("sixth/stale_statistics", _stale_statistics, share=0.15),
    fault("sixth/tuned_too_long", _tuned_too_long, "overfitting_onset", check=_has_overfitted),
    fault(
        "sixth/corrupt_shard",
        _corrupt_shard,
        "loss_spike",
        share=-1.0,
        check=_was_thrown_back,
    ),
    fault("sixth/wrong_shard", _wrong_shard, "mislabelled_data", share=0.03),
    fault("sixth/summed_loss", _summed, tolerated=_WRECK, share=0.1),
)
