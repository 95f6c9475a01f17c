"""Third family: gradients that explode, and gradients that vanish."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, note_gradients, supervise
from benchmarks.diagnosis.families.third_tasks import (
    Attention,
    cross_entropy,
    load_recall,
)
from benchmarks.diagnosis.scenario import Draw


class _StateSpace(nn.Module):
    """A diagonal linear recurrence that is slightly unstable, as what it has to copy."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.decay = nn.Parameter(torch.empty(width).uniform_(0.95, 1.12))
        self.entry = nn.Linear(inputs, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        driven = self.entry(x)
        state = torch.zeros_like(driven[:, 0])
        for place in range(x.shape[1]):
            state = self.decay * state + driven[:, place]
        return self.head(state)


def _longer_sequences(draw: Draw, faulty: bool) -> Course:
    """A curriculum of lengths goes on to where the recurrence blows up."""
    teacher = _StateSpace(4, 3)
    with torch.no_grad():
        teacher.decay.copy_(torch.tensor([0.5, 0.9, draw.uniform(1.06, 1.12)]))
    model = _StateSpace(4, draw.integer(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.003, 0.01), momentum=0.9)
    steps = 10 * draw.integer(22, 30)
    onset = draw.onset_step(steps)
    length = int(50 + 40 * draw.severity)
    generator = torch.Generator().manual_seed(draw.integer(0, 10**6))
    notes = Notes()

    def batch(count: int, places: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, places, 4, generator=generator)
        with torch.no_grad():
            return x, teacher(x)

    held, kept = batch(200, 6), batch(200, 6)

    def advance(step: int) -> dict[str, float]:
        x, y = batch(32, length if faulty and step >= onset else 6)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        note_gradients(notes, model)
        optimizer.step()
        notes.losses.append(float(loss.detach()))
        return {"loss": notes.losses[-1]}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=steps,
        advance=advance,
        exam=lambda: functional.mse_loss(model(held[0]), held[1]),
        show=lambda: {"val_loss": float(functional.mse_loss(model(kept[0]), kept[1]))},
        notes=notes,
        onset=onset,
    )


def _hard_attention(draw: Draw, faulty: bool) -> Course:
    """Keys and queries in a raw unit: the softmax is a switch, and teaches neither."""
    data = load_recall(draw)
    sharpness = 1e6 * 10.0**draw.severity if faulty else 0.5
    model = Attention(draw.integer(12, 24), sharpness)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        accuracy=draw.choice(True, False),
        steps=10 * draw.integer(30, 40),
        victims=("query.", "key."),
    )


SCENARIOS = (
    verdicts.fault("explode/longer_sequences", _longer_sequences, verdicts.judge_explosion),
    verdicts.fault("vanish/hard_attention", _hard_attention, verdicts.judge_vanishing),
)
