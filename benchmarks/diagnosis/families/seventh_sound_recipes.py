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
    Net,
    classify,
    digits,
    learn,
    make_dense,
    regress,
    shapes,
    text,
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


def _pretrain_shapes(draw: Draw) -> nn.Module:
    """A network that knows clean shapes, with a new head."""
    data = datasets.load_shapes(draw.stream("before"), count=1500, noise=0.1)
    body = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 24),
        nn.ReLU(),
    )
    model = Net(body, nn.Linear(24, 4))
    _train_before(model, data, draw.stream("order before"), 110)
    model.head = nn.Linear(24, 4)
    return model


def _train_a_new_head(draw: Draw) -> Plan:
    def build() -> nn.Module:
        model = _pretrain_shapes(draw)
        model.get_submodule("backbone").requires_grad_(False)
        return model

    rate = draw.uniform(0.01, 0.02)
    return shapes(
        draw,
        build=build,
        optimize=lambda model: torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], lr=rate
        ),
    )


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


class _Bag(nn.Module):
    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.embed = nn.EmbeddingBag(words, width, sparse=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def _learn_rare_words(draw: Draw) -> Plan:
    rng = draw.stream("data")
    words, count = 800, 1500
    share = 1 / np.arange(1, words + 1)
    tilt = np.exp(rng.normal(size=(5, words)))
    label = rng.integers(0, 5, count)
    rows = np.stack([rng.choice(words, 14, p=(p := share * tilt[k]) / p.sum()) for k in label])
    x, y = torch.from_numpy(rows), torch.from_numpy(label)
    data = Data(x[:900], y[:900], x[900:1200], y[900:1200], x[1200:], y[1200:], classes=5)
    return learn(
        draw,
        data,
        lambda: _Bag(words, 16, 5),
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        steps=260,
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


def _resume_as_it_was(draw: Draw) -> Plan:
    # A run that is taken up at step 1000, moments and schedule and all.
    plan = text(draw, first_step=1000)
    rate, former, moments = plan.optimize, plan.build, {}
    drawn = plan.batch

    def build() -> nn.Module:
        model = former()
        optimizer = rate(model)
        for step in range(60):
            optimizer.zero_grad()
            classify(model, *drawn(step)[:2]).backward()
            optimizer.step()
        optimizer.zero_grad()
        moments.update(optimizer.state_dict())
        return model

    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = rate(model)
        optimizer.load_state_dict(moments)
        return optimizer

    plan.build, plan.optimize = build, optimize
    plan.batch = lambda step: drawn(60 + step)
    plan.rate = lambda step: 1 - 0.8 * step / plan.steps
    return plan


def _regress_in_dollars(draw: Draw) -> Plan:
    # Prices as they are: losses of 10^9, gradients to match.
    data = datasets.load_friedman(draw.stream("data"), count=1500)
    scaled = {
        part: 2e5 + 5e4 * (getattr(data, part) - 14.4) / 5 for part in ("y", "val_y", "proof_y")
    }
    data = replace(data, **scaled)
    width = draw.integer(32, 48)

    class Priced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_dense([10, width, width, 1])

        def forward(self, x: Tensor) -> Tensor:
            return 2e5 + 5e4 * self.net(x)

    return learn(
        draw,
        data,
        Priced,
        lambda model: torch.optim.Adam(model.parameters(), lr=4e-3),
        lose=regress,
    )


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
    sound("seventh/new_head", _train_a_new_head),
    sound("seventh/low_rank", _adapt_at_low_rank),
    sound("seventh/rare_words", _learn_rare_words),
    sound("seventh/stopped_in_time", _stop_in_time, check=_stopped),
    sound("seventh/at_its_limit", _reach_its_limit),
    sound("seventh/overflows_at_first", _overflow_at_first, check=_skipped),
    sound("seventh/resumed_as_it_was", _resume_as_it_was, gain=0.05),
    sound("seventh/prices", _regress_in_dollars),
    Scenario(name="seventh/healthy/two_ranks", kind="healthy", train=_train_on_two_ranks),
)
