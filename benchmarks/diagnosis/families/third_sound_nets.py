"""Third family, healthy: architectures of many kinds that learn as they should."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, noise, supervise
from benchmarks.diagnosis.families.third_tasks import (
    Attention,
    Graph,
    Patches,
    Speller,
    cross_entropy,
    load_chain,
    load_graph,
    load_recall,
    load_reversal,
    split,
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


class _Funnel(nn.Module):
    """Down, across and up again, with what was seen on the way down."""

    def __init__(self, channels: int):
        super().__init__()
        self.down0 = nn.Conv2d(1, channels, 3, padding=1)
        self.norm0 = nn.GroupNorm(2, channels)
        self.down1 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.norm1 = nn.GroupNorm(2, 2 * channels)
        self.middle = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.out = nn.Conv2d(2 * channels, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = functional.silu(self.norm0(self.down0(x)))
        low = functional.silu(self.norm1(self.down1(high)))
        low = functional.silu(self.middle(low))
        return self.out(torch.cat([high, self.up(low)], 1))


def _masks(draw: Draw) -> Course:
    """Segmentation by cross-entropy and overlap, of images with few pixels that count."""
    clean = datasets.load_shapes(draw.stream("data"), noise=0.0, count=500)
    level = draw.uniform(0.3, 0.5)
    x = torch.cat([clean.x, clean.val_x, clean.proof_x])
    data = split(x + level * noise(draw.integer(0, 999), *x.shape), (x > 0.5).float())
    model = _Funnel(2 * draw.integer(2, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.005))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        shares = output.sigmoid()
        overlap = (2 * (shares * y).sum() + 1) / (shares.sum() + y.sum() + 1)
        return functional.binary_cross_entropy_with_logits(output, y) + 1.0 - overlap

    return supervise(draw, model, data, loss, optimizer, batch=16, steps=150, val_every=15)


def _nodes(draw: Draw) -> Course:
    """A graph net on its whole graph, with labels of a few nodes and a strong decay."""
    features, near, label, order = load_graph(draw)
    model = Graph(12, draw.integer(12, 24), 2, 4, skip=True)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=draw.log_uniform(0.003, 0.008), weight_decay=5e-3
    )
    learn, seen, held = order[:100], order[100:140], order[140:]
    notes = Notes()

    def value(chosen: Tensor) -> Tensor:
        return cross_entropy(model(features, near)[chosen], label[chosen])

    return Course(
        model=model,
        optimizer=optimizer,
        steps=160,
        advance=lambda _step: {"train/loss": descend(notes, model, optimizer, value(learn))},
        exam=lambda: value(held),
        fit=lambda: value(learn),
        show=lambda: {"val/loss": float(value(seen))},
        notes=notes,
    )


class _Skipping(nn.Module):
    """Convolutional residual blocks with batch normalisation; the last gain starts at 0."""

    def __init__(self, channels: int, depth: int, classes: int):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            last = nn.BatchNorm2d(channels)
            nn.init.zeros_(last.weight)
            self.blocks.append(
                nn.Sequential(
                    nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    nn.BatchNorm2d(channels),
                    nn.ReLU(),
                    nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    last,
                )
            )
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = functional.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def _mixed_images(draw: Draw) -> Course:
    """A residual net with mixup: its training loss never comes near zero."""
    data = datasets.load_digits(draw.stream("data"))
    model = _Skipping(draw.integer(12, 18), 2, 10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=draw.log_uniform(0.1, 0.2), momentum=0.9, nesterov=True
    )
    rng = draw.stream("mix")

    def feed(_step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share, other = float(rng.beta(0.4, 0.4)), torch.randperm(len(x))
        rows = functional.one_hot(y, 10).float()
        return share * x + (1 - share) * x[other], share * rows + (1 - share) * rows[other]

    return supervise(
        draw,
        model,
        data,
        functional.cross_entropy,
        optimizer,
        feed=feed,
        batch=64,
        steps=240,
        rate=lambda step: 0.5 * (1 + math.cos(math.pi * step / 240)),
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


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (12.0 * x).sin()


def _picture(draw: Draw) -> Course:
    """One picture as a function of its coordinates, by sines."""
    grid = torch.rand(1200, 2) * 2 - 1
    bumps = torch.rand(6, 2) * 2 - 1
    value = (-8.0 * (grid[:, None] - bumps).square().sum(-1)).exp().sum(1, keepdim=True)
    width = draw.integer(32, 56)
    model = nn.Sequential(
        nn.Linear(2, width), _Sine(), nn.Linear(width, width), _Sine(), nn.Linear(width, 1)
    )
    with torch.no_grad():
        model[0].weight.uniform_(-0.3, 0.3)
        model[2].weight.uniform_(-math.sqrt(6 / width) / 12, math.sqrt(6 / width) / 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.0005, 0.002))
    return supervise(
        draw, model, split(grid, value), functional.mse_loss, optimizer, batch=128, steps=260
    )


class _Adapter(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))


def _adapters(draw: Draw) -> Course:
    """Adapters on a frozen net, as they should be: started at zero, and trained."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(40, 80)
    layers = [nn.Linear(64, width), nn.Linear(width, width)]
    body = [m for layer in layers for m in (_Adapter(layer, draw.integer(3, 8)), nn.GELU())]
    model = nn.Sequential(nn.Flatten(), *body, nn.Linear(width, 10))
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=draw.log_uniform(0.002, 0.006))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=260)


SCENARIOS = (
    verdicts.healthy("norm_before", _norm_before),
    verdicts.healthy("norm_after", _norm_after),
    verdicts.healthy("patches", _patches),
    verdicts.healthy("masks", _masks),
    verdicts.healthy("nodes", _nodes),
    verdicts.healthy("mixed_images", _mixed_images),
    verdicts.healthy("translation", _translation),
    verdicts.healthy("recall", _recall),
    verdicts.healthy("carried_state", _carried_state),
    verdicts.healthy("picture", _picture),
    verdicts.healthy("adapters", _adapters),
)
