"""Faults of time and of generalisation: slow steps, and nets that learn their data by heart."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    characters,
    handwriting,
    signal_windows,
    tabular,
    trigger_sequences,
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


def _growing_list(draw: Draw, faulty: bool) -> Lesson:
    """Losses are kept with their graphs in a list that is walked each step: compute drifts."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    steps = 400
    base = log_uniform(rng, 5, 120)
    onset = draw.onset_step(steps, 0.05, 0.3)
    slope = (0.008 + 0.02 * draw.severity) * base

    def clock(step: int) -> tuple[float, float, float]:
        data = base * 0.05 * noise.lognormal(0, 0.15)
        compute = base * noise.lognormal(0, 0.04) + faulty * slope * max(0, step - onset)
        return data + compute, data, compute

    return _plain(draw, clock, steps, onset)


def _starved_loader(draw: Draw, faulty: bool) -> Lesson:
    """Every k-th step waits for the workers: the prefetch queue is as deep as they are few."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    steps = 320
    base = log_uniform(rng, 8, 90)
    period = int(rng.integers(4, 13))
    wait = base * period * (0.9 + 1.6 * draw.severity)

    def clock(step: int) -> tuple[float, float, float]:
        data = base * 0.04 * noise.lognormal(0, 0.2)
        if faulty and step % period == period - 1:
            data += wait * noise.lognormal(0, 0.15)
        compute = base * noise.lognormal(0, 0.03)
        return data + compute + 0.02 * base, data, compute

    return _plain(draw, clock, steps, 0, watched=draw.seed % 2 == 0)


def _cold_storage(draw: Draw, faulty: bool) -> Lesson:
    """The cached shards are used up: from some step on every batch comes over the network."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    steps = 360
    base = log_uniform(rng, 3, 200)
    onset = draw.onset_step(steps, 0.5, 0.75)

    def clock(step: int) -> tuple[float, float, float]:
        far = faulty and step >= onset
        data = base * (1.2 + 2.5 * draw.severity if far else 0.05) * noise.lognormal(0, 0.3)
        compute = base * noise.lognormal(0, 0.05)
        return data + compute, data, compute

    return _plain(draw, clock, steps, onset)


def _noisy_neighbour(draw: Draw, faulty: bool) -> Lesson:
    """Another job comes to the machine: compute times are heavy-tailed from some step on."""
    rng, noise = draw.stream("clock"), draw.stream("noise")
    steps = 360
    base = log_uniform(rng, 10, 150)
    onset = draw.onset_step(steps, 0.3, 0.55)

    def clock(step: int) -> tuple[float, float, float]:
        data = base * 0.06 * noise.lognormal(0, 0.2)
        compute = base * noise.lognormal(0, 0.04)
        if faulty and step >= onset:
            compute *= 1 + (0.8 + draw.severity) * noise.lognormal(0, 0.9)
        return data + compute, data, compute

    return _plain(draw, clock, steps, onset)


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


def _memorised_regression(draw: Draw, faulty: bool) -> Lesson:
    """A wide net on two hundred patients; the twin is small and decayed. Raw targets."""
    rng = draw.stream("build")
    data = tabular("diabetes", rng, share=0.45)
    width = 160 if faulty else 4
    model = nn.Sequential(
        nn.Linear(10, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )
    nn.init.constant_(model[-1].bias, 150.0)
    rate = log_uniform(rng, 3e-3, 6e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=500,
        loss=functional.mse_loss,
        validate_every=10,
    )


class CharRecurrent(nn.Module):
    """Embedding, GRU, head of the next character."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 16)
        self.gru = nn.GRU(16, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0][:, -1])


def _memorised_text(draw: Draw, faulty: bool) -> Lesson:
    """A language model sees the same few hundred windows again and again."""
    rng = draw.stream("build")
    data = characters(rng, context=8, train=300 if faulty else 8000, held=500)
    symbols = int(max(data.x.max(), data.x_held.max(), data.y.max(), data.y_held.max())) + 1
    model = CharRecurrent(symbols, int(rng.integers(48, 65)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=log_uniform(rng, 4e-3, 8e-3))
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=320, batch=48, validate_every=10
    )


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


def _label_noise(draw: Draw, faulty: bool) -> Lesson:
    """Wrong labels are learned by heart late, after the right ones have been understood."""
    rng = draw.stream("build")
    data = handwriting(rng, train=600, image=True)
    if faulty:
        data = _with_noise(data, rng, 0.3 + 0.15 * draw.severity)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 2e-3))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=420, validate_every=15)


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


def _forecast(draw: Draw, faulty: bool) -> Lesson:
    """A forecaster of forty noisy windows, metrics only, logged by an older convention."""
    rng = draw.stream("build")
    data = signal_windows(rng, train=40 if faulty else 600)
    data.y = data.y + 0.35 * torch.as_tensor(rng.normal(size=data.y.shape), dtype=torch.float32)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=360,
        batch=16,
        loss=functional.mse_loss,
        names=("training/loss", "validation/loss"),
        validate_every=10,
        watched=False,
    )


def _order_by_heart(draw: Draw, faulty: bool) -> Lesson:
    """A token model with as many parameters as there are examples of the rule."""
    rng = draw.stream("build")
    data = trigger_sequences(rng, train=300 if faulty else 6000)
    model = nn.Sequential(
        nn.Embedding(8, 24), nn.Flatten(), nn.Linear(14 * 24, 128), nn.ReLU(), nn.Linear(128, 8)
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=log_uniform(rng, 3e-4, 6e-4))
    return supervise(model, optimizer, data, draw.stream("batches"), steps=300, validate_every=5)


SCENARIOS = (
    fault("runtime/growing_list", _growing_list, judge_runtime()),
    fault("runtime/starved_loader", _starved_loader, judge_runtime()),
    fault("runtime/cold_storage", _cold_storage, judge_runtime()),
    fault("runtime/noisy_neighbour", _noisy_neighbour, judge_runtime()),
    fault("runtime/straggler", _straggler, judge_runtime()),
    fault("overfit/memorised_regression", _memorised_regression, judge_overfitting()),
    fault("overfit/memorised_text", _memorised_text, judge_overfitting()),
    fault("overfit/decay_switched_off", _decay_switched_off, judge_overfitting()),
    fault("overfit/label_noise", _label_noise, judge_overfitting()),
    fault("overfit/accuracy_only", _accuracy_only, judge_overfitting()),
    fault("overfit/few_windows", _forecast, judge_overfitting()),
    fault("overfit/tokens_by_heart", _order_by_heart, judge_overfitting()),
)
