"""Faults after which a layer says nothing: dead units, saturation, one code, one representation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import friedman, handwriting
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    dead_share,
    log_uniform,
    supervise,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import fault, judge_collapse
from benchmarks.diagnosis.scenario import Draw


class Codebook(nn.Module):
    """An autoencoder through the nearest of a few code vectors, with straight-through gradients."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, width))
        self.quantizer = Quantizer(codes, width)
        self.decoder = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.quantizer(self.encoder(x)))


class Quantizer(nn.Module):
    """The nearest code vector of each row."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, width) * 0.3)
        self.pull = torch.zeros(())
        self.chosen = torch.zeros(1, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        self.chosen = torch.cdist(x, self.codes).argmin(1)
        near = self.codes[self.chosen]
        self.pull = functional.mse_loss(near, x.detach()) + functional.mse_loss(x, near.detach())
        return x + (near - x).detach()


def _codebook_collapse(draw: Draw, faulty: bool) -> Lesson:
    """One code vector takes every example; the others are far from the data and stay unused."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Codebook(24, 8)
    with torch.no_grad():
        if faulty:
            model.quantizer.codes[1:] += 20.0 + 20 * draw.severity
        else:
            # The usual cure: start from outputs of the encoder.
            model.quantizer.codes.copy_(model.encoder(data.x[:24]))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        x, _ = data.draw(batches, 48)
        recon = functional.mse_loss(model(x), x)
        loss = recon + model.quantizer.pull
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item(), "train/recon": recon.item()}

    def assess() -> float:
        return float(functional.mse_loss(model(data.x_held), data.x_held))

    def dissect() -> float:
        model(data.x_held)
        counts = torch.bincount(model.quantizer.chosen, minlength=24).double()
        shares = counts / counts.sum()
        # Share of the codes that are not in use, by the perplexity of the choice.
        used = float(torch.exp(-(shares * torch.log(shares + 1e-12)).sum()))
        return 1.0 if used < 1.2 else min(1.0 - used / 24, 0.59)

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=200,
        advance=advance,
        assess=assess,
        validate=lambda: {"val/loss": without_graph(assess)},
        dissect=dissect,
    )


def _sentinel_targets(draw: Draw, faulty: bool) -> Lesson:
    """A shard whose missing targets are -999 kills the ReLU units: only the mean is left."""
    rng = draw.stream("build")
    data = friedman(rng)
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(10, 48))
    model.add_module("act0", nn.ReLU())
    model.add_module("mid", nn.Linear(48, 48))
    model.add_module("act1", nn.ReLU())
    model.add_module("head", nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3), momentum=0.9)
    steps = 260
    onset = draw.onset_step(steps)

    def shape(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if faulty and onset <= step < onset + 4:
            missing = torch.arange(len(y)) % 4 == 0
            y = torch.where(missing[:, None], torch.full_like(y, -999.0), y)
        return x, y

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=functional.mse_loss,
        shape=shape,
        onset=onset,
        dissect=lambda: dead_share(model, "act1", data.x_held),
    )


def _gain_runaway(draw: Draw, faulty: bool) -> Lesson:
    """A learned gain before a sigmoid grows by a wrong rule until the layer is a step function."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(64, 40))
    model.add_module("norm", nn.BatchNorm1d(40))
    model.add_module("squash", nn.Tanh())
    model.add_module("second", nn.Linear(40, 40))
    model.add_module("squash2", nn.Tanh())
    model.add_module("out", nn.Linear(40, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    steps = 240
    onset = draw.onset_step(steps, 0.15, 0.4)
    growth = 1.06 + 0.04 * draw.severity

    def finish(step: int) -> None:
        if faulty and step >= onset and float(model.second.weight.detach().abs().max()) < 1e3:
            with torch.no_grad():
                model.second.weight.mul_(growth)

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        finish=finish,
        onset=onset,
        dissect=lambda: dead_share(model, "squash2", data.x_held, bound=0.97),
    )


SCENARIOS = (
    fault("collapse/one_code", _codebook_collapse, judge_collapse("quantizer", "decoder")),
    fault(
        "collapse/sentinel_targets",
        _sentinel_targets,
        judge_collapse("stem", "act0", "mid", "act1"),
    ),
    fault("collapse/runaway_gain", _gain_runaway, judge_collapse("second", "squash2")),
)
