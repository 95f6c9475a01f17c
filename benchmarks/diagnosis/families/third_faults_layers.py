"""Third family: layers that stand still, say nothing, or take steps of the wrong size."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, supervise
from benchmarks.diagnosis.families.third_tasks import (
    cross_entropy,
    load_chain,
    make_plain,
    scaled_friedman,
)
from benchmarks.diagnosis.scenario import Draw


class _Checkpointed(nn.Module):
    """A convolutional net whose stem is computed again in the backward pass."""

    def __init__(self, channels: int, *, reentrant: bool):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(32 * channels, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = checkpoint(self.stem, x, use_reentrant=self.reentrant)
        return self.head(self.body(x).flatten(1))


def _reentrant_checkpoint(draw: Draw, faulty: bool) -> Course:
    """A checkpointed stem whose input needs no gradient: its weights get none either."""
    data = datasets.load_shapes(draw.stream("data"))
    model = _Checkpointed(draw.integer(4, 8), reentrant=faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.004))
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        accuracy=True,
        steps=10 * draw.integer(16, 22),
        victims=("stem.",),
    )


def _ceiling(draw: Draw, faulty: bool) -> Course:
    """Millimetres in place of metres, and every ReLU6 is at its ceiling or at zero."""
    data = datasets.load_spirals(draw.stream("data"), arms=draw.integer(2, 3))
    width = draw.integer(32, 64)
    model = make_plain(2, width, width, data.classes, act=nn.ReLU6)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    factor = 250.0 * 4.0**draw.severity if faulty else 1.0
    for part in (data.x, data.val_x, data.proof_x):
        part.mul_(factor)

    def count() -> float:
        reached = model.act0(model.fc0(model.flat(data.proof_x)))
        return float((reached[reached > 0] >= 6.0).double().mean())

    return supervise(
        draw, model, data, cross_entropy, optimizer, steps=10 * draw.integer(26, 36), dissect=count
    )


def _inverted_warm_up(draw: Draw, faulty: bool) -> Course:
    """The warm-up divides where it should multiply: the first steps kill the units."""
    data = datasets.load_digits(draw.stream("data"), noise=0.05)
    width = draw.integer(32, 64)
    model = make_plain(64, width, width, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.002))
    ramp = draw.integer(15, 25)
    strength = 1500.0 * 3.0**draw.severity

    def rate(step: int) -> float:
        if step >= ramp:
            return 1.0
        return strength / (step + 1) if faulty else (step + 1) / ramp

    def count() -> float:
        first = model.act0(model.fc0(model.flat(data.x)))
        second = model.act1(model.fc1(first))
        return max(float(acts.amax(0).le(0.0).double().mean()) for acts in (first, second))

    return supervise(
        draw, model, data, cross_entropy, optimizer, rate=rate, steps=220, dissect=count
    )


def _endless_warm_up(draw: Draw, faulty: bool) -> Course:
    """The warm-up was set in steps of a training a million times as long."""
    data = scaled_friedman(draw)
    width = draw.integer(24, 48)
    model = make_plain(10, width, width, 1, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.003, 0.01))
    length = 1e8 * 10.0**draw.severity if faulty else 30.0
    return supervise(
        draw,
        model,
        data,
        functional.mse_loss,
        optimizer,
        rate=lambda step: min(1.0, (step + 1) / length),
        steps=240,
        victims=("fc0.", "fc1.", "head."),
    )


class _Bag(nn.Module):
    """Words, their mean, a small network."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.embed = nn.Embedding(words, width, max_norm=2.0)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(self.fc(self.embed(x).mean(1))))


def _leaping_words(draw: Draw, faulty: bool) -> Course:
    """The rate of the embedding is that of a sparse sum; vectors of bounded norm leap about."""
    chain = load_chain(draw, letters=24, length=12, count=1000)
    halves = {p: (getattr(chain, p) % 6).mode(1).values for p in ("y", "val_y", "proof_y")}
    data = datasets.Data(
        chain.x,
        halves["y"],
        chain.val_x,
        halves["val_y"],
        chain.proof_x,
        halves["proof_y"],
        6,
    )
    model = _Bag(24, draw.integer(16, 32), 6)
    rate = draw.log_uniform(0.003, 0.006)
    body = [*model.fc.parameters(), *model.head.parameters()]
    words = {"params": model.embed.parameters(), "lr": rate}
    if faulty:
        words["lr"] = rate * 500.0 * 4.0**draw.severity
    optimizer = torch.optim.Adam([words, {"params": body, "lr": rate}])
    return supervise(draw, model, data, cross_entropy, optimizer, steps=260, victims=("embed.",))


class _Trust(torch.optim.SGD):
    """Steps in proportion to each tensor's norm; `inverted` divides the wrong way round."""

    inverted = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size, slope = p.norm().clamp_min(0.05), p.grad.norm() + 1e-9
                    trust = slope / size if self.inverted else size / slope
                    p.sub_(group["lr"] * trust * p.grad)


def _inverted_trust(draw: Draw, faulty: bool) -> Course:
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(48, 96)
    model = make_plain(64, width, width, 10, act=nn.Tanh)
    optimizer = _Trust(model.parameters(), lr=draw.log_uniform(0.01, 0.02))
    optimizer.inverted = faulty
    return supervise(
        draw, model, data, cross_entropy, optimizer, steps=260, victims=("fc0.weight", "fc1.")
    )


SCENARIOS = (
    verdicts.fault(
        "stagnant/reentrant_checkpoint", _reentrant_checkpoint, verdicts.judge_stagnation
    ),
    verdicts.fault("collapse/ceiling", _ceiling, verdicts.judge_collapse),
    verdicts.fault("collapse/inverted_warm_up", _inverted_warm_up, verdicts.judge_collapse),
    verdicts.fault("update/endless_warm_up", _endless_warm_up, verdicts.judge_update),
    verdicts.fault("update/leaping_words", _leaping_words, verdicts.judge_update),
    verdicts.fault("update/inverted_trust", _inverted_trust, verdicts.judge_update),
)
