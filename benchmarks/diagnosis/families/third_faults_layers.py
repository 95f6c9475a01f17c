"""Third family: layers that stand still, say nothing, or take steps of the wrong size."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, noise, supervise
from benchmarks.diagnosis.families.third_tasks import (
    Graph,
    cross_entropy,
    load_chain,
    load_graph,
    make_plain,
    scaled_friedman,
)
from benchmarks.diagnosis.scenario import Draw


class _Adapted(nn.Module):
    """A frozen layer and a narrow correction of it."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 4.0 * self.up(self.down(x))


def _forgotten_adapters(draw: Draw, faulty: bool) -> Course:
    """Adapters are put in after the optimizer was made for what could be trained then."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(32, 64)
    model = make_plain(64, width, width, 10)
    for place in (0, 1):
        layer = model.get_submodule(f"fc{place}")
        assert isinstance(layer, nn.Linear)
        setattr(model, f"fc{place}", _Adapted(layer, draw.integer(4, 8)))
    wanted: Iterable[nn.Parameter] = model.head.parameters()
    if not faulty:
        wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=draw.log_uniform(0.002, 0.006))
    return supervise(
        draw, model, data, cross_entropy, optimizer, steps=240, victims=("down.", "up.")
    )


def _layerwise_decay(draw: Draw, faulty: bool) -> Course:
    """The rate falls from layer to layer, by a factor meant for a percentage."""
    data = datasets.load_shapes(draw.stream("data"))
    width = draw.integer(48, 80)
    model = make_plain(256, width, width, width, 4, act=nn.GELU)
    factor = 10.0 ** -(4.0 + draw.severity) if faulty else 0.75
    rate = draw.log_uniform(0.001, 0.003)
    names = ("head", "fc2", "fc1", "fc0")
    groups = [
        {"params": model.get_submodule(name).parameters(), "lr": rate * factor**place}
        for place, name in enumerate(names)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    return supervise(
        draw, model, data, cross_entropy, optimizer, steps=260, victims=("fc0.", "fc1.")
    )


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


class _Tied(nn.Module):
    """A recurrent speller whose output weights are its embedding's."""

    def __init__(self, letters: int, width: int, *, cut: bool):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.embed(x)
        words = self.embed.weight
        if self.cut:
            vectors, words = vectors.detach(), words.detach()
        return self.norm(self.rnn(vectors)[0]) @ words.T


def _tied_and_detached(draw: Draw, faulty: bool) -> Course:
    data = load_chain(draw, letters=draw.integer(10, 20))
    model = _Tied(data.classes, draw.integer(16, 32), cut=faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.003, 0.008))
    return supervise(draw, model, data, cross_entropy, optimizer, steps=200, victims=("embed.",))


class _Coder(nn.Module):
    """A variational autoencoder of digits."""

    def __init__(self, width: int, code: int):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.mean = nn.Linear(width, code)
        self.spread = nn.Linear(width, code)
        self.decode = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction error and divergence from the prior, of each example."""
        features = self.encode(x)
        mean, spread = self.mean(features), self.spread(features)
        again = self.decode(mean + drawn * (0.5 * spread).exp())
        apart = 0.5 * (mean.square() + spread.exp() - spread - 1.0).sum(1)
        return (again - x.flatten(1)).square().sum(1), apart


def _posterior(draw: Draw, faulty: bool) -> Course:
    """The divergence weighs so much that the code says nothing."""
    data = datasets.load_digits(draw.stream("data"))
    code = draw.integer(4, 8)
    model = _Coder(draw.integer(48, 96), code)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.005))
    weight = 30.0 * 10.0**draw.severity if faulty else 0.03
    notes = Notes()
    order = draw.stream("order")
    held = noise(7, len(data.proof_x), code)

    def value(x: Tensor, drawn: Tensor) -> Tensor:
        error, apart = model(x, drawn)
        return (error + weight * apart).mean()

    def advance(_step: int) -> dict[str, float]:
        x = data.x[torch.from_numpy(order.integers(0, len(data.x), 64))]
        loss = value(x, torch.randn(64, code))
        return {"train/elbo_loss": descend(notes, model, optimizer, loss)}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=10 * draw.integer(24, 32),
        advance=advance,
        exam=lambda: model(data.proof_x, held)[0].mean(),
        show=lambda: {"val/elbo_loss": float(value(data.val_x, noise(8, len(data.val_x), code)))},
        notes=notes,
        dissect=lambda: (
            (model.mean(model.encode(data.proof_x)).var(0) < 0.01).double().mean().item()
        ),
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


def _oversmoothed(draw: Draw, faulty: bool) -> Course:
    """So many graph convolutions that all nodes become the same."""
    features, near, label, order = load_graph(draw)
    depth = 24 + round(16 * draw.severity) if faulty else 2
    model = Graph(12, draw.integer(16, 32), depth, 4, skip=not faulty)
    with torch.no_grad():
        for layer in model.layers:
            nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.005))
    learn, seen, held = order[:100], order[100:140], order[140:]
    notes = Notes()

    def value(chosen: Tensor) -> Tensor:
        return cross_entropy(model(features, near)[chosen], label[chosen])

    def sameness() -> float:
        rows = model.embed(features, near).double()
        return float(1.0 - rows.var(0).sum() / (rows.square().mean(0).sum() + 1e-30))

    return Course(
        model=model,
        optimizer=optimizer,
        steps=10 * draw.integer(14, 20),
        advance=lambda _step: {"loss": descend(notes, model, optimizer, value(learn))},
        exam=lambda: value(held),
        fit=lambda: value(learn),
        show=lambda: {"val_loss": float(value(seen))},
        notes=notes,
        dissect=sameness,
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
    verdicts.fault("stagnant/forgotten_adapters", _forgotten_adapters, verdicts.judge_stagnation),
    verdicts.fault("stagnant/layerwise_decay", _layerwise_decay, verdicts.judge_stagnation),
    verdicts.fault(
        "stagnant/reentrant_checkpoint", _reentrant_checkpoint, verdicts.judge_stagnation
    ),
    verdicts.fault("stagnant/tied_and_detached", _tied_and_detached, verdicts.judge_stagnation),
    verdicts.fault("collapse/posterior", _posterior, verdicts.judge_collapse),
    verdicts.fault("collapse/ceiling", _ceiling, verdicts.judge_collapse),
    verdicts.fault("collapse/oversmoothed", _oversmoothed, verdicts.judge_collapse),
    verdicts.fault("collapse/inverted_warm_up", _inverted_warm_up, verdicts.judge_collapse),
    verdicts.fault("update/endless_warm_up", _endless_warm_up, verdicts.judge_update),
    verdicts.fault("update/leaping_words", _leaping_words, verdicts.judge_update),
    verdicts.fault("update/inverted_trust", _inverted_trust, verdicts.judge_update),
)
