"""Healthy trainings of the seventh family: recipes whose records look like those of faults."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import Batch, Log, Plan, deal, sound
from benchmarks.diagnosis.families.seventh_ranks import train_ranks
from benchmarks.diagnosis.families.seventh_tasks import (
    classify,
    digits,
    make_dense,
)
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _accept_few_wrong_labels(draw: Draw) -> Plan:
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    data = data.mislabel(draw.stream("labels"), draw.uniform(0.03, 0.05))
    return digits(draw, data=data, diagnoses=True, build=lambda: make_dense([64, 24, 10]))


def _train_before(model: nn.Module, data: Data, rng: np.random.Generator, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    drawn = deal(data, 64, rng)
    for step in range(steps):
        optimizer.zero_grad()
        classify(model, *drawn(step)[:2]).backward()
        optimizer.step()
    optimizer.zero_grad()


class _LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices beside it."""

    def __init__(self, inner: nn.Linear, rank: int):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


def _adapt_at_low_rank(draw: Draw) -> Plan:
    before = datasets.load_digits(draw.stream("before"))
    rank = draw.integer(3, 5)

    def build() -> nn.Module:
        model = make_dense([64, 96, 96, 10])
        _train_before(model, before, draw.stream("order before"), 150)
        model.requires_grad_(False)
        for name in ("fc0", "fc1", "head"):
            setattr(model, name, _LowRank(model.get_submodule(name), rank))
        return model

    # The new task: the same digits from a camera that hangs a pixel to the side.
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    moved = {part: getattr(data, part).roll(1, 3) for part in ("x", "val_x", "proof_x")}
    return digits(
        draw,
        data=replace(data, **moved),
        build=build,
        optimize=lambda model: torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=4e-3
        ),
    )


def _stop_in_time(draw: Draw) -> Plan:
    data = datasets.load_digits(draw.stream("data"), noise=0.2).shrink(300)
    kept: dict[str, Any] = {"best": math.inf}

    def halts(log: Log) -> bool:
        loss = log.said[-1]["val/loss"]
        if loss < kept["best"] - 1e-3:
            kept.update(best=loss, state=copy.deepcopy(log.model.state_dict()), since=0)
        else:
            kept["since"] += 1
        return bool(kept["since"] >= 2)

    return digits(draw, data=data, halts=halts, val_every=9, steps=300)


def _reach_its_limit(draw: Draw) -> Plan:
    # Four hidden units for ten classes: it ends far from zero, and cannot do better.
    steps = 300
    return digits(
        draw,
        build=lambda: make_dense([64, 4, 10], nn.Tanh),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-2),
        rate=lambda step: 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)),
        steps=steps,
    )


def _overflow_at_first(draw: Draw) -> Plan:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** draw.integer(20, 23))
    state = {"skipped": False}

    def take(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, step: int
    ) -> dict[str, float]:
        del step
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch[0])
        loss = functional.cross_entropy(output.float(), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        state["skipped"] = scaler.get_scale() < before
        return {"train/loss": float(loss.detach())}

    return digits(draw, take=take, skips=lambda: state["skipped"], start={"grad_scaler": scaler})


def _train_on_two_ranks(recorder: Recorder, draw: Draw) -> Truth:
    made = train_ranks(recorder, draw, "sound")
    told = f"ranks apart by {made['apart']:.3g}, loss {made['first']:.3g} -> {made['end']:.3g}"
    if made["apart"] > 1e-6 or made["end"] > 0.5 * made["first"]:
        return doubt(told)
    forbidden = ("divergence", "overfitting_onset")
    return Truth(kind="healthy", phases_forbidden=forbidden, reason=told)


def _stopped(log: Log) -> str | None:
    return None if len(log.losses) < 300 else "it was not stopped"


def _skipped(log: Log) -> str | None:
    return None if np.isfinite(log.losses).all() else "losses are not finite"


SCENARIOS = (
    sound("seventh/few_wrong_labels", _accept_few_wrong_labels),
    sound("seventh/low_rank", _adapt_at_low_rank),
    sound("seventh/stopped_in_time", _stop_in_time, check=_stopped),
    sound("seventh/at_its_limit", _reach_its_limit),
    sound("seventh/overflows_at_first", _overflow_at_first, check=_skipped),
    Scenario(name="seventh/healthy/two_ranks", kind="healthy", train=_train_on_two_ranks),
)
