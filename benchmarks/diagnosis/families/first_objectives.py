"""Healthy trainings of other kinds: rewards, games, densities, rare words, whole-batch methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import doubt, judge_healthy, list_phases
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train


class _Variational(nn.Module):
    """A variational autoencoder; returns input, mean and logarithm of the variance side by side."""

    def __init__(self, inputs: int, width: int, code: int, generator: torch.Generator):
        super().__init__()
        self.encoder = make_mlp([inputs, width, 2 * code], activation="relu")
        self.decoder = make_mlp([code, width, inputs], activation="relu")
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=self.generator)
        code = mean + noise * (0.5 * log_variance).exp()
        return torch.cat([self.decoder(code), mean, log_variance], 1)


def _bound_evidence(draw: Draw) -> Problem:
    """A variational autoencoder whose loss goes below 0."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    parts = (data.x, data.x, data.val_x, data.val_x, data.proof_x, data.proof_x)
    code, deviation = draw.integer(4, 10), draw.uniform(0.12, 0.2)
    generator = torch.Generator().manual_seed(draw.torch_seed)
    model = _Variational(64, draw.integer(48, 96), code, generator)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        made, mean, log_variance = output.split([64, code, code], 1)
        fit = 0.5 * ((made - target) / deviation).square() + math.log(deviation)
        spread = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1.0)
        return fit.sum(1).mean() + spread.sum(1).mean()

    optimizer = zoo.make_optimizer(draw, model.parameters(), "adam")
    return Problem(model, optimizer, Data(*parts, classes=0), loss, draw.stream("order"), steps=300)


class _Mixture(nn.Module):
    """A mixture of Gaussians for the target, given the input."""

    def __init__(self, inputs: int, width: int, parts: int):
        super().__init__()
        self.body = make_mlp([inputs, width, width], activation="tanh")
        self.act = nn.Tanh()
        self.head = nn.Linear(width, 3 * parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.body(x)))


def _fit_density(draw: Draw) -> Problem:
    """A mixture density of targets with little noise: the loss ends well below 0."""
    rng = draw.stream("data")
    inputs = rng.uniform(-1, 1, (1500, 2))
    targets = np.sin(3 * inputs[:, :1]) * inputs[:, 1:] + 0.05 * rng.normal(size=(1500, 1))
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (inputs, targets))
    data = Data(x[:900], y[:900], x[900:1200], y[900:1200], x[1200:], y[1200:], classes=0)
    model = _Mixture(2, draw.integer(24, 48), draw.integer(2, 4))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight, mean, log_deviation = output.chunk(3, 1)
        deviation = log_deviation.clamp(-5.0, 3.0)
        each = -0.5 * ((target - mean) / deviation.exp()).square() - deviation
        return -torch.logsumexp(weight.log_softmax(1) + each, 1).mean()

    optimizer = zoo.make_optimizer(draw, model.parameters(), "adam", factor=2.0)
    return Problem(model, optimizer, data, loss, draw.stream("order"), steps=320)


class _Bag(nn.Module):
    """The mean of embeddings of many words, most of which are rare."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.hidden = nn.Linear(width, width)
        self.act = nn.ReLU()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.hidden(self.embed(x).mean(1))))


def _count_words(draw: Draw) -> Problem:
    """Bags of words with Zipf's frequencies: most rows of the embedding are hardly used."""
    rng = draw.stream("data")
    words, classes, count = draw.integer(800, 2500), 4, 2000
    frequency = 1.0 / np.arange(1, words + 1) ** 1.1
    topics = np.stack([frequency * rng.gamma(0.6, 1.0, words) for _ in range(classes)])
    topics /= topics.sum(1, keepdims=True)
    label = rng.integers(0, classes, count)
    rows = np.stack([rng.choice(words, 20, p=topics[each]) for each in label])
    x, y = torch.tensor(rows), torch.tensor(label)
    data = Data(x[:1200], y[:1200], x[1200:1600], y[1200:1600], x[1600:], y[1600:], classes)
    model = _Bag(words, draw.integer(16, 32), classes)
    optimizer = zoo.make_optimizer(draw, model.parameters(), "adam", factor=1.0)
    return Problem(
        model,
        optimizer,
        data,
        zoo.cross_entropy,
        draw.stream("order"),
        steps=120,
        val_every=10,
        accuracy=True,
    )


def _train(make: Callable[[Draw], Problem], gain: float, recorder: Recorder, draw: Draw) -> Truth:
    trace = train(make(draw), recorder, draw)
    phases = list_phases(trace) if trace.fixed[-1] > 0 else ()
    truth = judge_healthy(trace, gain=gain, reason=draw.name.rpartition("/")[2])
    return truth if phases or truth.kind != "healthy" else _without_expected(truth)


def _without_expected(truth: Truth) -> Truth:
    return Truth.from_dict({**truth.to_dict(), "phases_expected": ()})


def _search_rewards(recorder: Recorder, draw: Draw) -> Truth:
    """A policy gradient on a contextual bandit: the logged loss is noise around 0."""
    arms, features = draw.integer(3, 6), 6
    rng = draw.stream("data")
    truth = torch.tensor(rng.normal(0, 1, (features, arms)), dtype=torch.float32)
    model = make_mlp([features, 32, arms], activation=draw.choice("relu", "tanh"))
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.003, 0.01))
    recorder.start(model, optimizer, config={"model": "policy"})
    generator = torch.Generator().manual_seed(draw.torch_seed)
    baseline, steps = 0.0, 10 * draw.integer(30, 45)
    proof = torch.randn((512, features), generator=generator)
    best = (proof @ truth).amax(1).mean()

    def value() -> float:
        with torch.no_grad():
            chances = model(proof).softmax(1)
            return float((chances * (proof @ truth)).sum(1).mean() / best)

    start = value()
    for step in range(steps):
        x = torch.randn((16, features), generator=generator)
        with recorder.step(step):
            logits = model(x).log_softmax(1)
            action = torch.multinomial(logits.detach().exp(), 1, generator=generator)
            noise = 0.5 * torch.randn((16, 1), generator=generator)
            reward = (x @ truth).gather(1, action) + noise
            loss = -((reward - baseline) * logits.gather(1, action)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            baseline = 0.95 * baseline + 0.05 * float(reward.mean())
            recorder.log({"train/loss": float(loss.detach()), "train/reward": float(reward.mean())})
        if (step + 1) % 20 == 0:
            recorder.validate(step, {"val/reward": value()})
    end = value()
    told = f"share of the best reward {start:.2f} -> {end:.2f}"
    if end < 0.7:
        return doubt(told)
    return Truth(
        kind="healthy",
        phases_forbidden=("divergence", "overfitting_onset"),
        reason=told,
    )


def _play_game(recorder: Recorder, draw: Draw) -> Truth:
    """Generator and discriminator of points on a ring: both losses wander."""
    generator = torch.Generator().manual_seed(draw.torch_seed)
    width = draw.integer(32, 64)
    model = nn.ModuleDict(
        {
            "maker": make_mlp([4, width, width, 2], activation="leaky"),
            "judge": make_mlp([2, width, width, 1], activation="leaky"),
        }
    )
    rate = draw.log_uniform(0.001, 0.002)
    makers, judges = (
        torch.optim.Adam(model[name].parameters(), lr=rate, betas=(0.5, 0.9))
        for name in ("maker", "judge")
    )
    # One optimizer is told of, as it must be: the groups of both.
    recorder.start(model, None, config={"model": "game"})
    steps = 10 * draw.integer(40, 55)

    def take_real(count: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        ring = torch.stack([angle.cos(), angle.sin()], 1) * 1.5
        return ring + 0.1 * torch.randn((count, 2), generator=generator)

    def take_made(count: int) -> Tensor:
        return model["maker"](torch.randn((count, 4), generator=generator))

    start = _distance(take_made(400).detach(), take_real(400))
    for step in range(steps):
        with recorder.step(step):
            real, made = take_real(48).requires_grad_(), take_made(48)
            judges.zero_grad()
            said_real, said_made = model["judge"](real), model["judge"](made.detach())
            judged = functional.softplus(-said_real).mean() + functional.softplus(said_made).mean()
            # A penalty on the slope at real points, without which the game may not settle.
            slope = torch.autograd.grad(said_real.sum(), real, create_graph=True)[0]
            (judged + 0.2 * slope.square().sum(1).mean()).backward()
            judges.step()
            makers.zero_grad()
            fooled = functional.softplus(-model["judge"](made)).mean()
            fooled.backward()
            makers.step()
            losses = {"train/loss": fooled, "train/judge_loss": judged}
            recorder.log({key: float(loss.detach()) for key, loss in losses.items()})
    end = _distance(take_made(400).detach(), take_real(400))
    told = f"energy distance to the ring {start:.3f} -> {end:.3f}"
    if end > 0.4 * start:
        return doubt(told)
    return Truth(kind="healthy", phases_forbidden=("overfitting_onset",), reason=told)


def _distance(first: Tensor, second: Tensor) -> float:
    def mean(a: Tensor, b: Tensor) -> float:
        return float(torch.cdist(a, b).mean())

    return 2.0 * mean(first, second) - mean(first, first) - mean(second, second)


def _take_whole_batch(recorder: Recorder, draw: Draw) -> Truth:
    """L-BFGS on all data: few steps, each of many forwards, steps far larger than Adam's."""
    rng = draw.stream("data")
    data = datasets.load_blobs(rng, count=600, spread=1.5)
    model = make_mlp([20, draw.integer(8, 16), data.classes], activation="tanh")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=draw.uniform(0.2, 0.5), max_iter=4)
    recorder.start(model, optimizer, config={"model": "whole batch"})
    steps, decay = 60, 3e-3
    proof: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.x), data.y)
        loss = loss + decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    for step in range(steps):
        with recorder.step(step):
            loss = float(optimizer.step(closure).detach())
            recorder.log({"train/loss": loss})
        with torch.no_grad():
            proof.append(float(functional.cross_entropy(model(data.proof_x), data.proof_y)))
            held_out = float(functional.cross_entropy(model(data.val_x), data.val_y))
        if step % 3 == 2:
            recorder.validate(step, {"val/loss": held_out})
    told = f"proof loss {proof[0]:.3g} -> best {min(proof):.3g} -> {proof[-1]:.3g}"
    if not proof[-1] < 0.6 * proof[0] or proof[-1] > 1.25 * min(proof):
        return doubt(told)
    tolerated = ("overfitting_onset",) if proof[-1] > 1.08 * min(proof) else ()
    return Truth(kind="healthy", tolerated=tolerated, phases_forbidden=("divergence",), reason=told)


def _log_epochs(recorder: Recorder, draw: Draw) -> Truth:
    """Metrics by epoch alone, no steps: nothing else is written."""
    made = draw.choice(zoo.make_digits_mlp, zoo.make_spirals, zoo.make_friedman)(draw)
    recorder.start(config={"model": "epochs"}, timing="none")
    quiet = _EpochRecorder(recorder, max(1, len(made.data.x) // made.batch_size))
    made.steps = 16 * quiet.per_epoch
    made.val_every = quiet.per_epoch
    return judge_healthy(train(made, quiet, draw), reason="epochs", phases=False)


class _EpochRecorder:
    """Sums up what is logged of steps, and logs it once an epoch."""

    every = 5

    def __init__(self, recorder: Recorder, per_epoch: int):
        self.recorder = recorder
        self.per_epoch = per_epoch
        self.seen: list[float] = []

    def start(self, *_arguments: object, **_options: object) -> None:
        """The run is open already."""

    def step(self, step: int, *, epoch: int | None = None) -> object:  # noqa: ARG002
        """Nothing is probed."""
        return torch.autograd.profiler.record_function("step")

    def log(self, values: dict[str, float]) -> None:
        """Keep the loss."""
        self.seen.append(values["train/loss"])

    def validate(self, step: int, values: dict[str, float]) -> None:
        """Log the epoch that ends with this step."""
        if not self.seen:
            return
        epoch = step // self.per_epoch
        self.recorder.log({"train/loss": float(np.mean(self.seen)), **values}, epoch=epoch)
        self.seen.clear()


def _healthy(name: str, train_one: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/healthy/{name}", kind="healthy", train=train_one)


SCENARIOS = (
    _healthy("evidence_bound", partial(_train, _bound_evidence, 0.3)),
    _healthy("density", partial(_train, _fit_density, 0.3)),
    _healthy("rare_words", partial(_train, _count_words, 0.2)),
    _healthy("rewards", _search_rewards),
    _healthy("game", _play_game),
    _healthy("whole_batch", _take_whole_batch),
    _healthy("epochs_only", _log_epochs),
)
