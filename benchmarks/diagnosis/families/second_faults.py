"""Faults of the second family: collapse, explosion, numbers, silent layers, time, data by heart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    friedman,
    handwriting,
    tabular,
    zipf_documents,
)
from benchmarks.diagnosis.families.second_evidence import (
    Clock,
    Lesson,
    dead_share,
    log_uniform,
    supervise,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import (
    fault,
    judge_collapse,
    judge_explosion,
    judge_nonfinite,
    judge_overfitting,
    judge_plateau,
    judge_runtime,
    judge_stagnation,
    judge_vanishing,
)
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


class Block(nn.Module):
    """A residual block, with or without layer norm before it."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


def _norms_removed(draw: Draw, faulty: bool) -> Lesson:
    """A deep residual net whose layer norms went missing, with the rate that needs them."""
    rng = draw.stream("build")
    data = handwriting(rng)
    width, depth = 48, int(rng.integers(14, 20))
    model = nn.Sequential(
        nn.Linear(64, width),
        *(Block(width, norm=not faulty) for _ in range(depth)),
        nn.LayerNorm(width) if not faulty else nn.Identity(),
        nn.Linear(width, 10),
    )
    for module in model.modules():
        if isinstance(module, Block):
            nn.init.kaiming_normal_(module.up.weight)
            nn.init.normal_(module.down.weight, std=(0.5 + 0.4 * draw.severity) / width**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.01, 0.03), momentum=0.9)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=150, batch=24)


def _perceptron(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers.append(nn.Linear(widths[place], widths[place + 1]))
        if place < len(widths) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


def _log_of_zero(draw: Draw, faulty: bool) -> Lesson:
    """A hand-written binary cross entropy takes the logarithm of 1 - p where p rounds to one."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = _perceptron(30, 32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.9)
    sharp = 2 + 3 * draw.severity

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if not faulty:
            return functional.cross_entropy(out, y)
        share = torch.sigmoid(sharp * (out[:, 1] - out[:, 0]))
        return -(y * share.log() + (1 - y) * (1 - share).log()).mean()

    return supervise(model, optimizer, data, draw.stream("batches"), steps=160, loss=loss)


def _gradient_wiped(draw: Draw, faulty: bool) -> Lesson:
    """`zero_grad(set_to_none=False)` moved between backward and the optimizer's step."""
    rng = draw.stream("build")
    data = tabular("wine", rng)
    model = _perceptron(13, 32, 32, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))

    def correct(_step: int) -> None:
        if faulty:
            optimizer.zero_grad(set_to_none=False)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=200, correct=correct)


class Highway(nn.Module):
    """A highway layer: a gate mixes a transformed input and the input."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.change = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.gate(x))
        return share * torch.tanh(self.change(x)) + (1 - share) * x


class Bag(nn.Module):
    """Mean of word vectors, then two layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="sum")
        self.hidden = nn.Linear(width, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.words(x))))


def _highway_gates(draw: Draw, faulty: bool) -> Lesson:
    """A highway net whose gate bias has the wrong sign: nothing is carried."""
    rng = draw.stream("build")
    data = handwriting(rng)
    width = 40
    bias = 4.0 if faulty else -2.0
    model = nn.Sequential(
        nn.Linear(64, width),
        *(Highway(width, bias) for _ in range(int(rng.integers(12, 17)))),
        nn.Linear(width, 10),
    )
    for module in model.modules():
        if isinstance(module, Highway):
            nn.init.normal_(module.change.weight, std=(0.5 - 0.2 * draw.severity) / width**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.08, 0.2), momentum=0.9)
    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=240, names=("loss", "val_loss")
    )


def _resized_embedding(draw: Draw, faulty: bool) -> Lesson:
    """The vocabulary grows: the new embedding table is not the one that the optimizer has."""
    rng = draw.stream("build")
    data = zipf_documents(rng, words=400)
    model = Bag(400, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    steps = 240
    onset = draw.onset_step(steps, 0.2, 0.5)

    def finish(step: int) -> None:
        if step != onset - 1:
            return
        old = model.words.weight
        model.words.weight = nn.Parameter(old.detach().clone())
        if not faulty:
            optimizer.param_groups[0]["params"][0] = model.words.weight

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        finish=finish,
        onset=onset,
    )


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
    fault("collapse/one_code", _codebook_collapse, judge_collapse("quantizer", "decoder")),
    fault(
        "collapse/sentinel_targets",
        _sentinel_targets,
        judge_collapse("stem", "act0", "mid", "act1"),
    ),
    fault("collapse/runaway_gain", _gain_runaway, judge_collapse("second", "squash2")),
    fault("explode/layer_norms_removed", _norms_removed, judge_explosion(from_start=True)),
    fault("nonfinite/log_of_zero", _log_of_zero, judge_nonfinite()),
    fault("plateau/gradient_wiped", _gradient_wiped, judge_plateau()),
    fault("vanish/highway_gates", _highway_gates, judge_vanishing("", "0.weight")),
    fault("stagnant/resized_embedding", _resized_embedding, judge_stagnation("words")),
    fault("runtime/straggler", _straggler, judge_runtime()),
    fault("overfit/decay_switched_off", _decay_switched_off, judge_overfitting()),
    fault("overfit/accuracy_only", _accuracy_only, judge_overfitting()),
)
