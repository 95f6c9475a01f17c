"""Faults of the third family: gradients, layers, losses, and time."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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
    cross_entropy,
    load_chain,
    load_recall,
    make_plain,
    scaled_friedman,
    split,
)
from benchmarks.diagnosis.measuring import measure_gradient
from benchmarks.diagnosis.networks import make_convolutional
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
        notes.norms.append(measure_gradient(model))
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


def _left_in_eval(draw: Draw, faulty: bool) -> Course:
    """After the first validations nobody calls train(): dropout is off for good."""
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.35).shrink(draw.integer(90, 140)).mislabel(rng, 0.15)
    width = draw.integer(96, 160)
    model = make_plain(64, width, width, 10, drop=0.7)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.004))
    steps = 20 * draw.integer(18, 24)
    onset = draw.onset_step(steps, 0.2, 0.35)
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        before=lambda step: model.train(not (faulty and step >= onset)) and None,
        keep_mode=True,
        accuracy=draw.choice(True, False),
        keys=("loss", "val_loss"),
        steps=steps,
        onset=onset,
    )


def _negative_variance(draw: Draw, faulty: bool) -> Course:
    """A variance is predicted without anything that keeps it above zero."""
    rng = draw.stream("data")
    x = rng.normal(size=(1500, 10))
    scatter = x[:, 1:2].clip(min=0.0) * rng.normal(size=(1500, 1))
    data = split(x, x @ rng.normal(size=(10, 1)) / 3.2 + scatter)
    width = draw.integer(24, 48)
    model = make_plain(10, width, width, 2, act=nn.SiLU)
    with torch.no_grad():
        model.head.bias[1] = draw.uniform(0.5, 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.006, 0.015))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        variance = output[:, 1] if faulty else functional.softplus(output[:, 1]) + 0.02
        return 0.5 * (variance.log() + (output[:, 0] - y[:, 0]).square() / variance).mean()

    return supervise(draw, model, data, loss, optimizer, steps=360)


def _arc_cosine(draw: Draw, faulty: bool) -> Course:
    """The angle to the true direction, by an arc cosine that meets its end."""
    rng = draw.stream("data")
    x = rng.normal(size=(1200, 6))
    y = functional.normalize(torch.tensor(x @ rng.normal(size=(6, 2))), dim=-1)
    model = make_plain(6, draw.integer(24, 48), 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.006))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        cosine = (functional.normalize(output, dim=-1) * y).sum(-1)
        return (cosine if faulty else cosine.clamp(-0.9999, 0.9999)).acos().mean()

    return supervise(draw, model, split(x, y), loss, optimizer, batch=64, steps=280)


def _no_hard_examples(draw: Draw, faulty: bool) -> Course:
    """The mean over the hard examples of a batch, of which one day there are none."""
    data = datasets.load_blobs(draw.stream("data"), spread=0.8, classes=4)
    model = make_plain(20, draw.integer(24, 48), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.02, 0.06), momentum=0.9)
    level = 0.01 + 0.09 * draw.severity

    def loss(output: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(output, y, reduction="none")
        if not model.training:
            return each.mean()
        hard = each[each > level]
        return hard.mean() if faulty else hard.sum() / max(1, len(hard))

    return supervise(draw, model, data, loss, optimizer, steps=240)


def _one_sorted_epoch(draw: Draw, faulty: bool) -> Course:
    """After a resume one epoch comes in the order of its classes."""
    data = datasets.load_shapes(draw.stream("data"))
    model = make_convolutional([6, 12], 16, 4, hidden=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.0015, 0.003))
    steps = 10 * draw.integer(28, 34)
    onset = draw.onset_step(steps, 0.45, 0.6)
    rows = data.y.argsort(stable=True)
    rng = draw.stream("order")
    per_epoch = len(rows) // 32

    def take(step: int) -> Tensor:
        place = step - onset
        if faulty and 0 <= place < per_epoch:
            return rows[32 * place : 32 * place + 32]
        return torch.from_numpy(rng.integers(0, len(rows), 32))

    return supervise(
        draw, model, data, cross_entropy, optimizer, take=take, steps=steps, onset=onset
    )


def _stale_gradients(draw: Draw, faulty: bool) -> Course:
    """Workers send gradients of weights that are long gone, and more of them join."""
    data = scaled_friedman(draw)
    model = make_plain(10, draw.integer(16, 32), 1, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.02, 0.04), momentum=0.9)
    steps = 10 * draw.integer(24, 30)
    onset = draw.onset_step(steps, 0.15, 0.4)
    delay = 10 + round(20 * draw.severity)
    waiting: deque[list[Tensor]] = deque()

    def delay_gradients(_optimizer: object, _args: object, _kwargs: object) -> None:
        waiting.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        place = len(waiting) - 1 if len(waiting) <= onset else max(onset, len(waiting) - 1 - delay)
        for parameter, old in zip(model.parameters(), waiting[place], strict=True):
            parameter.grad = old.clone()

    if faulty:
        optimizer.register_step_pre_hook(delay_gradients)
    return supervise(draw, model, data, functional.mse_loss, optimizer, steps=steps, onset=onset)


def _adversary(draw: Draw, faulty: bool) -> Course:
    """A reversed gradient against a domain head, many times too strong."""
    data = datasets.load_blobs(draw.stream("data"), classes=4)
    domain = (data.x[:, 0] > data.x[:, 0].median()).long()
    proof_domain = (data.proof_x[:, 0] > data.x[:, 0].median()).long()
    width = draw.integer(16, 32)
    model = nn.ModuleDict(
        {
            "body": make_plain(20, width, width),
            "task": nn.Linear(width, 4),
            "domain": nn.Linear(width, 2),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.01, 0.03), momentum=0.9)
    steps = 10 * draw.integer(24, 30)
    onset = draw.onset_step(steps, 0.15, 0.35)
    notes = Notes()
    order = draw.stream("order")
    strong = 5.0 + 10.0 * draw.severity

    def value(x: Tensor, y: Tensor, side: Tensor, weight: float) -> Tensor:
        features = model["body"](x)
        turned = features.detach() * (1.0 + weight) - features * weight
        return cross_entropy(model["task"](features), y) + cross_entropy(
            model["domain"](turned), side
        )

    def advance(step: int) -> dict[str, float]:
        chosen = torch.from_numpy(order.integers(0, len(data.x), 32))
        weight = strong if faulty and step >= onset else 0.05
        loss = value(data.x[chosen], data.y[chosen], domain[chosen], weight)
        return {"train/loss": descend(notes, model, optimizer, loss)}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=steps,
        advance=advance,
        exam=lambda: value(data.proof_x, data.proof_y, proof_domain, 0.0),
        fit=lambda: value(data.x, data.y, domain, 0.0),
        notes=notes,
        onset=onset,
    )


class _Shares(nn.Sequential):
    """A network whose one output goes through a softmax over that one output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).softmax(-1)


def _softmax_of_one(draw: Draw, faulty: bool) -> Course:
    data = datasets.load_table("breast_cancer", draw.stream("data"))
    width = draw.integer(16, 48)
    plain = make_plain(30, width, width, 1, act=draw.choice(nn.ReLU, nn.Tanh))
    model = _Shares(*plain) if faulty else nn.Sequential(*plain, nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.005))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy(output[:, 0], y.float())

    return supervise(draw, model, data, loss, optimizer, steps=10 * draw.integer(18, 26))


Delay = Callable[[int, float, np.random.Generator], tuple[float, float]]


def _learn(draw: Draw, late: float, delay: Delay, faulty: bool) -> Course:
    """A plain training whose steps get what `delay` adds to computing and to data."""
    base = draw.log_uniform(4.0, 200.0)
    noise = draw.uniform(0.01, 0.05)
    share = draw.uniform(0.01, 0.06)
    if draw.choice(True, False):
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model, loss = make_plain(64, 48, 10), cross_entropy
    else:
        data, loss = scaled_friedman(draw), nn.functional.mse_loss
        model = make_plain(10, 32, 32, 1, act=nn.GELU)
    steps = 10 * draw.integer(22, 32)
    onset = int(late * steps)
    rng = draw.stream("clock")

    def clock(step: int) -> tuple[float, float, float]:
        compute = base * float(np.exp(rng.normal(0.0, noise)))
        read = share * base * float(np.exp(rng.normal(0.0, 3 * noise)))
        more_compute, more_read = delay(step, base, rng)
        if faulty and step >= onset:
            compute, read = compute + more_compute, read + more_read
        return 1.01 * compute + read, read, compute

    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.003))
    return supervise(draw, model, data, loss, optimizer, steps=steps, onset=onset, clock=clock)


def _alternating_wait(draw: Draw, faulty: bool) -> Course:
    """So many workers, so many quick steps, and then a wait for all of them."""
    workers = draw.integer(2, 5)
    wait = (1.0 + 2.0 * draw.severity) * workers

    def delay(step: int, base: float, rng: np.random.Generator) -> tuple[float, float]:
        waits = step % workers == workers - 1
        return 0.0, base * wait * float(rng.uniform(0.8, 1.2)) if waits else 0.0

    return _learn(draw, 0.0, delay, faulty)


def _swapping_host(draw: Draw, faulty: bool) -> Course:
    """Memory is full, and now and then a step waits for a disk."""
    late = draw.uniform(0.25, 0.5)
    strength = 0.6 + 1.5 * draw.severity

    def delay(_step: int, base: float, rng: np.random.Generator) -> tuple[float, float]:
        return base * strength * float(np.exp(rng.normal(0.0, 0.9))), 0.0

    return _learn(draw, late, delay, faulty)


class _CodeBook(nn.Module):
    """An autoencoder through the nearest of a few code vectors, with straight-through gradients."""

    def __init__(self, codes: int, width: int):
        super().__init__()
        self.encoder = make_plain(64, 48, width)
        self.quantizer = nn.Embedding(codes, width)
        self.decoder = make_plain(width, 48, 64)
        self.pull = torch.zeros(())
        self.chosen = torch.zeros(1, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        self.chosen = torch.cdist(code, self.quantizer.weight).argmin(1)
        near = self.quantizer(self.chosen)
        self.pull = functional.mse_loss(near, code.detach())
        self.pull = self.pull + functional.mse_loss(code, near.detach())
        return self.decoder(code + (near - code).detach())


def _one_code(draw: Draw, faulty: bool) -> Course:
    """One code vector takes every example; the others are far from the data and stay unused."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    model = _CodeBook(24, 8)
    with torch.no_grad():
        if faulty:
            model.quantizer.weight[1:] += 20.0 + 20.0 * draw.severity
        else:
            # The usual cure: start from outputs of the encoder.
            model.quantizer.weight.copy_(model.encoder(data.x[:24]))

    def dissect() -> float:
        model(data.proof_x)
        shares = torch.bincount(model.chosen, minlength=24).double() / len(data.proof_x)
        # Share of the codes that are not in use, by the perplexity of the choice.
        used = float(torch.exp(-(shares * torch.log(shares + 1e-12)).sum()))
        return 1.0 if used < 1.2 else min(1.0 - used / 24, 0.54)

    return supervise(
        draw,
        model,
        replace(data, y=data.x, val_y=data.val_x, proof_y=data.proof_x),
        lambda output, y: functional.mse_loss(output, y) + model.pull,
        torch.optim.Adam(model.parameters(), lr=draw.log_uniform(1e-3, 3e-3)),
        victims=("quantizer", "decoder"),
        dissect=dissect,
        exam=lambda: functional.mse_loss(model(data.proof_x), data.proof_x),
        steps=600,
    )


def _accuracy_only(draw: Draw, faulty: bool) -> Course:
    """Wrong labels are learned by heart, and only accuracies are shown."""
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.3).shrink(200)
    if faulty:
        data = data.mislabel(rng, 0.3 + 0.2 * draw.severity)
    model = make_plain(64, 128, 128, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(5e-4, 1e-3))
    course = supervise(draw, model, data, cross_entropy, optimizer, accuracy=True, steps=420)
    step_on, show = course.advance, course.show
    assert show is not None

    def advance(step: int) -> dict[str, float]:
        step_on(step)
        with torch.no_grad():
            return {"train/accuracy": float((model(data.x).argmax(-1) == data.y).double().mean())}

    course.advance = advance
    course.show = lambda: {"val/accuracy": show()["val/accuracy"]}
    return course


SCENARIOS = (
    verdicts.fault("collapse/one_code", _one_code, verdicts.judge_collapse),
    verdicts.fault("overfit/accuracy_only", _accuracy_only, verdicts.judge_overfitting),
    verdicts.fault("explode/longer_sequences", _longer_sequences, verdicts.judge_explosion),
    verdicts.fault("vanish/hard_attention", _hard_attention, verdicts.judge_vanishing),
    verdicts.fault(
        "stagnant/reentrant_checkpoint", _reentrant_checkpoint, verdicts.judge_stagnation
    ),
    verdicts.fault("collapse/ceiling", _ceiling, verdicts.judge_collapse),
    verdicts.fault("collapse/inverted_warm_up", _inverted_warm_up, verdicts.judge_collapse),
    verdicts.fault("update/endless_warm_up", _endless_warm_up, verdicts.judge_update),
    verdicts.fault("update/leaping_words", _leaping_words, verdicts.judge_update),
    verdicts.fault("update/inverted_trust", _inverted_trust, verdicts.judge_update),
    verdicts.fault("overfit/left_in_eval", _left_in_eval, verdicts.judge_overfitting),
    verdicts.fault("nonfinite/negative_variance", _negative_variance, verdicts.judge_non_finite),
    verdicts.fault("nonfinite/arc_cosine", _arc_cosine, verdicts.judge_non_finite),
    verdicts.fault("nonfinite/no_hard_examples", _no_hard_examples, verdicts.judge_non_finite),
    verdicts.fault("spike/one_sorted_epoch", _one_sorted_epoch, verdicts.judge_spike),
    verdicts.fault("diverge/stale_gradients", _stale_gradients, verdicts.judge_divergence),
    verdicts.fault("diverge/adversary", _adversary, verdicts.judge_divergence),
    verdicts.fault("plateau/softmax_of_one", _softmax_of_one, verdicts.judge_plateau),
    verdicts.fault("runtime/alternating_wait", _alternating_wait, verdicts.judge_runtime),
    verdicts.fault("runtime/swapping_host", _swapping_host, verdicts.judge_runtime),
)
