"""Healthy trainings of the third family: aims, habits and architectures of many kinds."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import (
    Course,
    Notes,
    descend,
    supervise,
)
from benchmarks.diagnosis.families.third_tasks import (
    Attention,
    Patches,
    Speller,
    cross_entropy,
    load_chain,
    load_recall,
    load_reversal,
    make_plain,
    split,
)
from benchmarks.diagnosis.measuring import measure_gradient
from benchmarks.diagnosis.networks import make_convolutional
from benchmarks.diagnosis.scenario import Draw


def _quantiles(draw: Draw) -> Course:
    data = datasets.load_friedman(draw.stream("data"), noise=draw.uniform(1.0, 2.5))
    model = make_plain(10, draw.integer(32, 64), 32, 3, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(output: Tensor, y: Tensor) -> Tensor:
        off = y - output
        return torch.maximum(levels * off, (levels - 1.0) * off).mean()

    return supervise(draw, model, data, loss, optimizer, steps=260)


def _hazards(draw: Draw) -> Course:
    """Survival times in a small unit: the likelihood goes from above zero to far below."""
    rng = draw.stream("data")
    x = rng.normal(size=(1600, 8))
    speed = np.exp(draw.uniform(1.5, 2.5) + 0.8 * x[:, 0] - 0.6 * np.tanh(x[:, 1] * 2))
    times = rng.exponential(size=1600) / speed
    limit = float(np.quantile(times, 0.8))
    y = np.stack([times.clip(max=limit), (times < limit).astype(float)], 1)
    model = make_plain(8, draw.integer(16, 32), 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=draw.log_uniform(0.004, 0.01), weight_decay=1e-3
    )

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0].exp() * y[:, 0] - y[:, 1] * output[:, 0]).mean()

    return supervise(draw, model, split(x, y), loss, optimizer, steps=240, keys=("nll", "val_nll"))


def _many_labels(draw: Draw) -> Course:
    """Twenty rare labels, each by a cross-entropy of its own."""
    rng = draw.stream("data")
    x = rng.normal(size=(1500, 24))
    y = (x @ rng.normal(size=(24, 20)) / 4.9 > draw.uniform(1.2, 1.6)).astype(np.float32)
    model = make_plain(24, draw.integer(40, 80), 20, drop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    loss = functional.binary_cross_entropy_with_logits
    return supervise(draw, model, split(x, y), loss, optimizer, steps=260)


def _equation(draw: Draw) -> Course:
    """A differential equation and its start, by a net of tanh; full batch, from 1 to 1e-5."""
    width, pull = draw.integer(16, 28), draw.uniform(2.0, 5.0)
    model = nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.003, 0.01))
    notes = Notes()
    x = torch.linspace(0, 1.5, 64)[:, None]
    truth = (-pull * x).exp()

    def value() -> Tensor:
        at = x.clone().requires_grad_()
        y = model(at)
        (slope,) = torch.autograd.grad(y.sum(), at, create_graph=True)
        start = (model(torch.zeros(1, 1)) - 1.0).square().mean()
        return 0.1 * (slope + pull * y).square().mean() + start

    return Course(
        model=model,
        optimizer=optimizer,
        steps=320,
        advance=lambda _step: {"loss/physics": descend(notes, model, optimizer, value())},
        exam=lambda: functional.mse_loss(model(x), truth),
        notes=notes,
        log_every=2,
    )


def _factored(draw: Draw) -> Course:
    data = load_chain(draw)
    model = Speller(12, 2 * draw.integer(10, 16), 1, 16, before=True, causal=True)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=draw.log_uniform(0.02, 0.05))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=180)


def _root_mean_square(draw: Draw) -> Course:
    data = datasets.load_table("wine", draw.stream("data"))
    model = make_plain(13, draw.integer(12, 24), 3, act=nn.Sigmoid)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=draw.log_uniform(0.002, 0.005), centered=True
    )
    return supervise(draw, model, data, cross_entropy, optimizer, batch=8, steps=300)


def _half_precision(draw: Draw) -> Course:
    """Products in bfloat16, with a scaler whose scale is too high at first."""
    data = datasets.load_shapes(draw.stream("data"))
    model = make_convolutional([6, 12], 16, 4, hidden=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.001, 0.003))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=60)
    notes, order = Notes(), draw.stream("order")

    def advance(_step: int) -> dict[str, float]:
        chosen = torch.from_numpy(order.integers(0, len(data.x), 32))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(data.x[chosen]).float(), data.y[chosen])
        scaler.scale(8.0 * loss).backward()
        scaler.unscale_(optimizer)
        notes.norms.append(measure_gradient(model))
        notes.norms[-1] = notes.norms[-1] if math.isfinite(notes.norms[-1]) else 0.0
        scaler.step(optimizer)
        scaler.update()
        notes.losses.append(float(loss.detach()))
        return {"train/loss": notes.losses[-1], "train/scale": scaler.get_scale()}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=160,
        advance=advance,
        exam=lambda: cross_entropy(model(data.proof_x), data.proof_y),
        show=lambda: {"val/loss": float(cross_entropy(model(data.val_x), data.val_y))},
        notes=notes,
        options={"grad_scaler": scaler},
    )


def _every_tenth(draw: Draw) -> Course:
    """Metrics of every tenth step, of tiny batches."""
    data = datasets.load_digits(draw.stream("data"), noise=0.2)
    model = make_plain(64, draw.integer(32, 64), 10, act=nn.Mish)
    optimizer = torch.optim.NAdam(model.parameters(), lr=draw.log_uniform(0.001, 0.002))
    return supervise(
        draw, model, data, cross_entropy, optimizer, batch=3, log_every=10, val_every=50, steps=600
    )


class _Rounded(nn.Linear):
    """Weights on a coarse grid, with gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().max().detach() / 7.0
        coarse = (self.weight / step).round() * step
        return functional.linear(x, self.weight + (coarse - self.weight).detach(), self.bias)


def _four_bits(draw: Draw) -> Course:
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(32, 64)
    model = nn.Sequential(
        nn.Flatten(),
        _Rounded(64, width),
        nn.ReLU6(),
        _Rounded(width, width),
        nn.ReLU6(),
        _Rounded(width, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.004))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=220)


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


def _inner_loops(draw: Draw) -> Course:
    """Meta-learning of sine waves: two inner steps of SGD inside each outer step."""
    model = make_plain(1, 40, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(1e-3, 3e-3))
    notes, batches = Notes(), draw.stream("order")

    def adapt(source: np.random.Generator) -> Tensor:
        size, phase = source.uniform(0.5, 2.0), source.uniform(0, np.pi)
        x = torch.as_tensor(source.uniform(-3, 3, (20, 1)), dtype=torch.float32)
        y = size * torch.sin(x + phase)
        weights = dict(model.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(model, weights, (x[:10],))
            loss = functional.mse_loss(out, y[:10])
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), grads, strict=True)
            weights = {name: entry - 0.05 * grad for (name, entry), grad in pairs}
        return functional.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), y[10:])

    def advance(_step: int) -> dict[str, float]:
        loss = torch.stack([adapt(batches) for _ in range(4)]).mean()
        return {"train/meta_loss": descend(notes, model, optimizer, loss)}

    def exam() -> float:
        source = np.random.default_rng(3)
        with torch.enable_grad():
            return float(np.mean([adapt(source).item() for _ in range(12)]))

    return Course(
        model=model, optimizer=optimizer, steps=240, advance=advance, exam=exam, notes=notes
    )


def _pruned_in_rounds(draw: Draw) -> Course:
    """Weights are pruned in rounds, up to four fifths of them, and stay zero."""
    data = datasets.load_digits(draw.stream("data"))
    model = make_plain(64, 80, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(1e-3, 3e-3))
    weights = [entry for entry in model.parameters() if entry.dim() > 1]
    masks = [torch.ones_like(weight) for weight in weights]

    def prune(step: int) -> None:
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                if step in {90, 130, 170, 210}:
                    bound = torch.quantile(weight.abs()[mask > 0], 0.3)
                    mask.mul_((weight.abs() > bound).float())
                weight.mul_(mask)

    return supervise(draw, model, data, cross_entropy, optimizer, before=prune, steps=320)


class _Dropped(nn.Module):
    """A residual network whose blocks are skipped at random in training."""

    def __init__(self, width: int, depth: int, source: np.random.Generator):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        self.blocks = nn.ModuleList(make_plain(width, width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            share = 1 - 0.5 * (place + 1) / len(self.blocks)
            if not self.training:
                x = x + share * block(x)
            elif self.source.random() < share:
                x = x + block(x)
        return self.head(x)


def _stochastic_depth(draw: Draw) -> Course:
    """Blocks that take part in half of the steps, without gradient in the others."""
    data = datasets.load_digits(draw.stream("data"))
    model = _Dropped(40, draw.integer(5, 8), draw.stream("depth"))
    rate = draw.log_uniform(0.01, 0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return supervise(draw, model, data, cross_entropy, optimizer, steps=300)


SCENARIOS = (
    verdicts.healthy("inner_loops", _inner_loops),
    verdicts.healthy("pruned_in_rounds", _pruned_in_rounds),
    verdicts.healthy("stochastic_depth", _stochastic_depth),
    verdicts.healthy("quantiles", _quantiles),
    verdicts.healthy("hazards", _hazards),
    verdicts.healthy("many_labels", _many_labels),
    verdicts.healthy("equation", _equation),
    verdicts.healthy("factored", _factored),
    verdicts.healthy("root_mean_square", _root_mean_square),
    verdicts.healthy("half_precision", _half_precision),
    verdicts.healthy("every_tenth", _every_tenth),
    verdicts.healthy("four_bits", _four_bits),
    verdicts.healthy("norm_before", _norm_before),
    verdicts.healthy("norm_after", _norm_after),
    verdicts.healthy("patches", _patches),
    verdicts.healthy("translation", _translation),
    verdicts.healthy("recall", _recall),
    verdicts.healthy("carried_state", _carried_state),
)
