"""Third family, healthy: architectures of many kinds that learn as they should."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, supervise
from benchmarks.diagnosis.families.third_tasks import (
    Attention,
    Patches,
    Speller,
    cross_entropy,
    load_chain,
    load_recall,
    load_reversal,
)
from benchmarks.diagnosis.scenario import Draw


def _norm_before(draw: Draw) -> Course:
    data = load_chain(draw, letters=draw.integer(10, 16))
    model = Speller(data.classes, 2 * draw.integer(10, 16), 2, 16, before=True, causal=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.001, 0.004))
    return supervise(draw, model, data, cross_entropy, optimizer, clip=1.0, steps=180)


def _norm_after(draw: Draw) -> Course:
    """Normalised after each part, with warm-up and the decay of the inverse root."""
    data = load_reversal(draw)
    model = Speller(6, 2 * draw.integer(12, 18), 2, 6, before=False, causal=False)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=draw.log_uniform(0.003, 0.005), betas=(0.9, 0.98)
    )
    ramp = draw.integer(25, 50)
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        rate=lambda step: min((step + 1) / ramp, math.sqrt(ramp / (step + 1))),
        steps=280,
        keys=("train_loss", "eval_loss"),
    )


def _patches(draw: Draw) -> Course:
    data = datasets.load_shapes(draw.stream("data"), noise=0.1, count=2000)
    model = Patches(2 * draw.integer(12, 18), 2, 4, drop=0.1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=draw.log_uniform(0.002, 0.004), weight_decay=0.05
    )
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        accuracy=True,
        rate=lambda step: 0.5 * (1 + math.cos(math.pi * step / 240)),
        steps=240,
    )


class _Translator(nn.Module):
    """Reads a word, writes another, and is told the right letters while it learns."""

    def __init__(self, letters: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(letters + 1, width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)
        self.letters = letters

    def forward(self, pair: Tensor) -> Tensor:
        read, written = pair.chunk(2, 1)
        start = torch.full_like(written[:, :1], self.letters)
        _, state = self.reader(self.embed(read))
        states, _ = self.writer(self.embed(torch.cat([start, written[:, :-1]], 1)), state)
        return self.head(states)


def _translation(draw: Draw) -> Course:
    plain = load_reversal(draw, letters=5, length=draw.integer(4, 5))
    pairs = {p: torch.cat([getattr(plain, p), getattr(plain, p).flip(1)], 1) for p in _INPUTS}
    data = datasets.Data(
        pairs["x"],
        plain.y,
        pairs["val_x"],
        plain.val_y,
        pairs["proof_x"],
        plain.proof_y,
        5,
    )
    model = _Translator(5, draw.integer(24, 40))
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.006, 0.012))
    return supervise(
        draw, model, data, cross_entropy, optimizer, clip=1.0, steps=260, keys=("loss", "val_loss")
    )


_INPUTS = ("x", "val_x", "proof_x")


def _recall(draw: Draw) -> Course:
    """One head of attention, on which the loss first stays and then falls."""
    data = load_recall(draw, items=4, count=1600)
    model = Attention(draw.integer(12, 24), 0.35)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.008))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=340)


def _carried_state(draw: Draw) -> Course:
    """An LSTM that goes along one long series, and is cut off from its past at each step."""
    rng = draw.stream("data")
    length, streams, window = 4000, 16, 12
    phases = rng.uniform(0, 6.28, (streams, 1))
    place = torch.arange(length)[None] * draw.uniform(0.15, 0.3) + torch.tensor(phases)
    series = (place.sin() + 0.5 * (2.7 * place).sin()).float()
    series = series + 0.05 * torch.tensor(rng.normal(size=series.shape)).float()
    width = draw.integer(16, 28)
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(1, width, batch_first=True), "head": nn.Linear(width, 1)}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    notes = Notes()
    kept: list[tuple[Tensor, Tensor] | None] = [None]

    def value(begin: int, size: int, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, object]:
        x = series[:, begin : begin + size, None]
        states, after = model["lstm"](x, state)
        wanted = series[:, begin + 1 : begin + size + 1, None]
        return functional.mse_loss(model["head"](states), wanted), after

    def advance(step: int) -> dict[str, float]:
        loss, after = value(step * window, window, kept[0])
        kept[0] = (after[0].detach(), after[1].detach())  # type: ignore[index]
        return {"loss": descend(notes, model, optimizer, loss, clip=0.5)}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=240,
        advance=advance,
        exam=lambda: value(3500, 400, None)[0],
        show=lambda: {"val_loss": float(value(3000, 300, None)[0])},
        notes=notes,
    )


SCENARIOS = (
    verdicts.healthy("norm_before", _norm_before),
    verdicts.healthy("norm_after", _norm_after),
    verdicts.healthy("patches", _patches),
    verdicts.healthy("translation", _translation),
    verdicts.healthy("recall", _recall),
    verdicts.healthy("carried_state", _carried_state),
)
