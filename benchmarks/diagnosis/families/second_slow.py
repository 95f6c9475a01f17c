"""Faults of time and of generalisation: slow steps, and nets that learn their data by heart."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis.families.second_data import (
    Material,
    handwriting,
    tabular,
)
from benchmarks.diagnosis.families.second_evidence import Clock, Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import fault, judge_overfitting, judge_runtime
from benchmarks.diagnosis.scenario import Draw


def _plain(draw: Draw, clock: Clock, steps: int, onset: int, watched: bool = True) -> Lesson:
    """A small training that goes well, under a clock of its own."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        clock=clock,
        onset=onset,
        watched=watched,
    )


def _straggler(draw: Draw, faulty: bool) -> Lesson:
    """All workers wait for one that throttles in bursts; only the whole step's time shows it."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    steps = 400
    base = log_uniform(rng, 20, 200)
    onset = draw.onset_step(steps, 0.25, 0.5)
    burst = False

    def clock(step: int) -> tuple[float, float, float]:
        nonlocal burst
        burst = noise.random() < (0.8 if burst else 0.25)
        data, compute = base * 0.05 * noise.lognormal(0, 0.1), base * noise.lognormal(0, 0.03)
        wait = base * (1.5 + 2.5 * draw.severity) if faulty and burst and step >= onset else 0.0
        return data + compute + wait + 0.05 * base, data, compute

    return _plain(draw, clock, steps, onset)


def _decay_switched_off(draw: Draw, faulty: bool) -> Lesson:
    """A second stage starts without decay and dropout: what held the net back is gone."""
    rng = draw.stream("build")
    data = handwriting(rng, train=160)
    data = _with_noise(data, rng, 0.15)
    drop = nn.Dropout(0.4)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), drop, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    rate = log_uniform(rng, 1e-3, 2e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=15.0)
    steps = 500
    onset = draw.onset_step(steps, 0.3, 0.4)

    def finish(step: int) -> None:
        if faulty and step == onset:
            drop.p = 0.0
            optimizer.param_groups[0]["weight_decay"] = 0.0
            optimizer.param_groups[0]["lr"] = 3 * rate

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        finish=finish,
        validate_every=10,
        onset=onset,
    )


def _with_noise(data: Material, rng: np.random.Generator, share: float) -> Material:
    """The same data with a share of the training labels drawn anew."""
    wrong = torch.from_numpy(rng.random(len(data.y)) < share)
    drawn = torch.from_numpy(rng.integers(0, int(data.y.max()) + 1, len(data.y)))
    return Material(data.x, torch.where(wrong, drawn, data.y), data.x_held, data.y_held)


def _accuracy_only(draw: Draw, faulty: bool) -> Lesson:
    """Noisy labels again, of sequences, and only accuracies are shown."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng, share=0.35)
    if faulty:
        data = _with_noise(data, rng, 0.55 + 0.15 * draw.severity)
    model = nn.Sequential(
        nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-4, 4e-4))
    lesson = supervise(model, optimizer, data, draw.stream("batches"), steps=420, validate_every=10)
    inner, shown = lesson.advance, lesson.validate
    assert shown is not None

    def advance(step: int) -> dict[str, float]:
        inner(step)
        with torch.no_grad():
            found = model(data.x).argmax(-1)
        return {"train/accuracy": float((found == data.y).double().mean())}

    lesson.advance = advance
    lesson.validate = lambda: {"val/accuracy": shown()["val/accuracy"]}
    # Judged by what is shown: the share of wrong answers.
    lesson.assess = lambda: float((model(data.x_held).argmax(-1) != data.y_held).double().mean())
    return lesson


SCENARIOS = (
    fault("runtime/straggler", _straggler, judge_runtime()),
    fault("overfit/decay_switched_off", _decay_switched_off, judge_overfitting()),
    fault("overfit/accuracy_only", _accuracy_only, judge_overfitting()),
)
