"""Faults of data that are too few, of machines, and of numbers, after published accounts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.eighth_course import Course, fit, judge_fault, pair
from benchmarks.diagnosis.families.eighth_tasks import (
    Reader,
    cut,
    make_images,
    make_prices,
    supervise,
)
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.networks import make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _memorised_reviews(recorder: Recorder, draw: Draw) -> Truth:
    """The forum's classic: fine-tuning too long on two hundred reviews."""

    def make(draw: Draw, faulty: bool) -> Course:
        rng = draw.stream("reviews")
        words = rng.integers(0, 60, (1500, 16))
        mood = (words < 12).sum(1) - ((words >= 12) & (words < 24)).sum(1)
        label = (mood + rng.normal(0, 1.2, 1500) > 0).astype(np.int64)
        data = cut(words, label, 2)
        data = data.shrink(draw.integer(160, 220)) if faulty else data
        model = Reader(60, 32, 2, 16, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
        return supervise(
            draw,
            model,
            optimizer,
            data,
            steps=360 if faulty else 120,
            check_every=15,
            size=16,
            train_accuracy="train/accuracy",
            start={"layers": False, "parameters": False},
        )

    _, notes, twin = pair(make, recorder, draw)
    rise = notes.end / notes.best
    borne = rise > 1.4 and float(np.mean(notes.losses[-30:])) < 0.3
    onset = notes.looks[int(np.argmin(notes.proof))]
    return judge_fault(
        borne,
        notes,
        twin,
        "overfitting_onset",
        reason=f"few texts learnt by heart: proof loss rose to {rise:.2f} times its best",
        onset=onset,
        tolerated=("divergence", "loss_spike"),
    )


def _waits(recorder: Recorder, course: Course, take: Any) -> None:
    def after(step: int) -> None:
        data_ms, compute_ms = take(step)
        recorder.time(
            step, step_ms=data_ms + compute_ms + 0.3, data_ms=data_ms, compute_ms=compute_ms
        )

    course.after = after
    course.start = {"timing": "manual"}


def _workers_born_each_epoch(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch issue 15849: workers are made anew at each epoch, which begins by waiting."""
    data = make_images(draw, classes=6)
    model = make_convolutional([8, 16], 12, 6)
    course = supervise(
        draw, model, torch.optim.Adam(model.parameters(), 2e-3), data, size=64, steps=280
    )
    compute, wait = draw.uniform(60, 120), draw.uniform(2500, 5000)
    rng, spent = draw.stream("clock"), [0.0, 0.0]

    def take(step: int) -> tuple[float, float]:
        begins = step % (course.per_epoch or 1) == 0
        data_ms = (wait if begins else 3.0) * float(np.exp(rng.normal(0, 0.15)))
        compute_ms = compute * float(np.exp(rng.normal(0, 0.04)))
        spent[0], spent[1] = spent[0] + data_ms, spent[1] + compute_ms
        return data_ms, compute_ms

    _waits(recorder, course, take)
    notes = fit(course, recorder)
    share = spent[0] / sum(spent)
    return judge_fault(
        share > 0.5,
        notes,
        None,
        "runtime_bottleneck_risk",
        reason=f"workers made anew at each of the epochs: {share:.0%} of the time is waiting",
        tolerated=("idle_device",),
    )


def _list_that_grows(recorder: Recorder, draw: Draw) -> Truth:
    """Many threads: statistics over a list of all steps so far, so that each step takes longer."""
    data = make_prices(draw)
    model = make_mlp([8, 48, 48, 1], activation="silu")
    course = supervise(
        draw, model, torch.optim.Adam(model.parameters(), 3e-3), data, steps=400, check_every=40
    )
    base, growth = draw.uniform(15, 40), draw.uniform(3.0, 6.0)
    rng, times = draw.stream("clock"), []

    def take(step: int) -> tuple[float, float]:
        compute_ms = base * (1 + growth * step / 400) * float(np.exp(rng.normal(0, 0.05)))
        times.append(compute_ms)
        return 0.05 * base * float(np.exp(rng.normal(0, 0.1))), compute_ms

    _waits(recorder, course, take)
    notes = fit(course, recorder)
    factor = float(np.median(times[-40:]) / np.median(times[:40]))
    return judge_fault(
        factor > 2.5,
        notes,
        None,
        "runtime_bottleneck_risk",
        reason=f"steps took {factor:.1f} times as long in the end as in the beginning",
    )


def _root_of_nothing(recorder: Recorder, draw: Draw) -> Truth:
    """Keras issue 9097: two equal inputs, a distance of 0, and the gradient of its root is NaN."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        rng, onset = draw.stream("pairs"), draw.onset_step(300, 0.2, 0.6)

        def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
            one = torch.from_numpy(rng.integers(0, len(data.x), 64))
            two = (one + torch.from_numpy(rng.integers(1, len(data.x), 64))) % len(data.x)
            if step == onset:
                two[0] = one[0]
            return data.x[one], data.x[two], (data.y[one] == data.y[two]).float()

        def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
            gap = (net(got[0]) - net(got[1])).square().sum(1)
            far = torch.sqrt(gap if faulty else gap + 1e-6)
            apart = (1 - got[2]) * functional.relu(1 - far).square()
            return (3.0 * got[2] * far.square() + apart).mean(), {}

        def proof(net: nn.Module) -> float:
            codes = net(data.proof_x)
            near = torch.cdist(codes, codes).fill_diagonal_(9e9).argmin(1)
            return float((data.proof_y[near] != data.proof_y).float().mean())

        return Course(model, optimizer, batch, lose, proof, key="train/contrastive_loss")

    course, notes, twin = pair(make, recorder, draw)
    bad = [step for step, loss in enumerate(notes.losses) if not math.isfinite(loss)]
    gone = any(not torch.isfinite(p).all() for p in course.model.parameters())
    return judge_fault(
        bool(bad) and gone and math.isfinite(twin.losses[-1]),
        notes,
        twin,
        "non_finite_values",
        reason=f"the root of a distance of 0: NaN from step {bad[0] if bad else None}",
        onset=bad[0] if bad else None,
        tolerated=WRECK,
    )


class _Attention(nn.Module):
    """Tokens, one head of attention, a residual perceptron, and a mean that is classified."""

    def __init__(self, letters: int, width: int, classes: int):
        super().__init__()
        self.token = nn.Embedding(letters, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; places of letter 0 are not read."""
        states = self.token(x)
        scores = self.query(states) @ self.key(states).transpose(1, 2) / states.shape[-1] ** 0.5
        scores = scores.masked_fill((x == 0)[:, None], float("-inf"))
        states = self.norm(states + scores.softmax(-1) @ self.value(states))
        return self.classifier((states + self.mlp(states)).mean(1))


def _all_padding(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch issue 41508: a text that is all padding, a softmax over nothing, NaN."""

    def make(draw: Draw, faulty: bool) -> Course:
        rng, onset = draw.stream("texts"), draw.onset_step(260, 0.25, 0.65)
        words = rng.integers(1, 20, (1200, 14))
        lengths = rng.integers(6, 15, 1200)
        words[np.arange(14) >= lengths[:, None]] = 0
        data = cut(words, ((words == 3).any(1) | (words == 7).any(1)).astype(np.int64), 2)
        model = _Attention(20, 24, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        course = supervise(draw, model, optimizer, data, steps=260)
        plain = course.batch

        def batch(step: int) -> Any:
            x, y, ids = plain(step)
            if faulty and step == onset:
                x = x.clone()
                x[3] = 0
            return x, y, ids

        course.batch = batch
        return course

    _, notes, twin = pair(make, recorder, draw)
    bad = [step for step, loss in enumerate(notes.losses) if not math.isfinite(loss)]
    return judge_fault(
        bool(bad) and math.isfinite(twin.losses[-1]),
        notes,
        twin,
        "non_finite_values",
        reason=f"a text of padding only: NaN from step {bad[0] if bad else None}",
        onset=bad[0] if bad else None,
        tolerated=WRECK,
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "overfitting_onset/memorised_reviews": _memorised_reviews,
        "runtime_bottleneck_risk/workers_born_each_epoch": _workers_born_each_epoch,
        "runtime_bottleneck_risk/list_that_grows": _list_that_grows,
        "non_finite_values/root_of_nothing": _root_of_nothing,
        "non_finite_values/all_padding": _all_padding,
    }.items()
)
