"""Third family: gradients that explode, and gradients that vanish."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, note_gradients, supervise
from benchmarks.diagnosis.families.third_tasks import (
    Attention,
    cross_entropy,
    load_recall,
    make_plain,
    scaled_friedman,
)
from benchmarks.diagnosis.networks import Residual
from benchmarks.diagnosis.scenario import Draw


def _raw_unit(draw: Draw, faulty: bool) -> Course:
    """After a resume, targets come in grams in place of kilograms."""
    data = scaled_friedman(draw)
    model = Residual(10, draw.integer(16, 32), draw.integer(1, 3), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.005, 0.02), momentum=0.9)
    steps = 10 * draw.integer(22, 30)
    onset = draw.onset_step(steps)
    factor = 100.0 * 10.0**draw.severity

    def feed(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y * factor if faulty and step >= onset else y

    return supervise(
        draw, model, data, functional.mse_loss, optimizer, feed=feed, steps=steps, onset=onset
    )


def _growing_batch(draw: Draw, faulty: bool) -> Course:
    """The batch grows by plan, and the loss is a sum."""
    data = datasets.load_digits(draw.stream("data"), noise=0.2)
    width = draw.integer(32, 64)
    model = make_plain(64, width, width, 10, act=draw.choice(nn.ReLU, nn.SiLU))
    small = draw.choice(4, 8)
    large = int(small * (40 + 40 * draw.severity))
    rate = draw.log_uniform(0.06, 0.15) / small
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    steps = 10 * draw.integer(24, 32)
    onset = draw.onset_step(steps)
    rng = draw.stream("batches")

    def loss(output: Tensor, y: Tensor) -> Tensor:
        total = functional.cross_entropy(output, y, reduction="sum")
        return total if faulty else total * small / len(y)

    return supervise(
        draw,
        model,
        data,
        loss,
        optimizer,
        take=lambda step: rng.integers(0, len(data.x), large if step >= onset else small),
        exam=lambda: cross_entropy(model(data.proof_x), data.proof_y),
        fit=lambda: cross_entropy(model(data.x[:256]), data.y[:256]),
        show=lambda: {"val/loss": float(cross_entropy(model(data.val_x), data.val_y))},
        steps=steps,
        onset=onset,
    )


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


def _softmax_between(draw: Draw, faulty: bool) -> Course:
    """Softmax is taken for an activation of hidden layers."""

    class Shares(nn.Softmax):
        def __init__(self) -> None:
            super().__init__(dim=-1)

    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(48, 96)
    depth = 3 + round(2 * draw.severity)
    model = make_plain(64, *[width] * depth, 10, act=Shares if faulty else nn.ReLU)
    if draw.choice(True, False):
        rate = draw.log_uniform(0.03, 0.1)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=0.9
        )
    else:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=draw.log_uniform(3e-4, 1e-3))
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        steps=10 * draw.integer(20, 28),
        victims=("fc0.", "fc1."),
    )


def _saturated_game(draw: Draw, faulty: bool) -> Course:
    """The judge of a GAN is sure from the start, and log(1 - D) teaches nothing."""
    width = draw.integer(24, 48)
    generator = make_plain(4, width, width, 2, act=nn.Tanh)
    judge = make_plain(2, width, width, 1, act=nn.LeakyReLU)
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    rate = draw.log_uniform(0.003, 0.006)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.99))
    centre = torch.tensor([4.0, -3.0]) + 0.3 * torch.randn(2)
    real = centre + 0.5 * torch.randn(600, 2)
    trained = torch.optim.Adam(judge.parameters(), lr=0.01)
    for _ in range(200):
        fake = generator(torch.randn(64, 4)).detach()
        away = functional.softplus(-judge(real[:300])).mean()
        trained.zero_grad()
        (away + functional.softplus(judge(fake)).mean()).backward()
        trained.step()
    with torch.no_grad():
        # So sure as a judge gets that was trained for longer.
        judge.head.weight.mul_(2.0 + 2.0 * draw.severity)
        judge.head.bias.mul_(2.0 + 2.0 * draw.severity)
    notes = Notes()
    held = torch.randn(300, 4)

    def advance(_step: int) -> dict[str, float]:
        latent = torch.randn(64, 4)
        optimizer.zero_grad(set_to_none=True)
        chosen = real[torch.randint(0, 600, (64,))]
        sure = functional.softplus(-judge(chosen)).mean()
        judged = sure + functional.softplus(judge(generator(latent).detach())).mean()
        judged.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        said = judge(generator(latent))
        made = -functional.softplus(said).mean() if faulty else functional.softplus(-said).mean()
        made.backward()
        note_gradients(notes, generator)
        judge.zero_grad(set_to_none=True)
        optimizer.step()
        notes.losses.append(float(made.detach()))
        return {"loss/generator": notes.losses[-1], "loss/judge": float(judged.detach())}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=10 * draw.integer(34, 42),
        advance=advance,
        exam=lambda: (generator(held).mean(0) - centre).norm(),
        notes=notes,
        victims=("generator.",),
    )


SCENARIOS = (
    verdicts.fault("explode/raw_unit", _raw_unit, verdicts.judge_explosion),
    verdicts.fault("explode/growing_batch_sum", _growing_batch, verdicts.judge_explosion),
    verdicts.fault("explode/longer_sequences", _longer_sequences, verdicts.judge_explosion),
    verdicts.fault("vanish/hard_attention", _hard_attention, verdicts.judge_vanishing),
    verdicts.fault("vanish/softmax_between", _softmax_between, verdicts.judge_vanishing),
    verdicts.fault("vanish/saturated_game", _saturated_game, verdicts.judge_vanishing),
)
