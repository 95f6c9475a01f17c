"""Third family, healthy: aims whose losses are negative, noisy, tiny, huge or never small."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, noise, supervise
from benchmarks.diagnosis.families.third_tasks import make_plain, scaled_friedman, split
from benchmarks.diagnosis.scenario import Draw


def _critic(draw: Draw) -> Course:
    """A Wasserstein game with a penalty on gradients; its losses wander below zero."""
    width = draw.integer(24, 48)
    generator = make_plain(4, width, width, 2)
    critic = make_plain(2, width, width, 1, act=nn.LeakyReLU)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizer = torch.optim.Adam(
        model.parameters(), lr=draw.log_uniform(0.002, 0.004), betas=(0.0, 0.9)
    )
    angles = torch.rand(800, 1) * math.tau
    real = torch.cat([angles.cos(), angles.sin()], 1) * draw.uniform(1.0, 1.5) + torch.tensor(
        [2.0, 1.0]
    )
    real = real + 0.1 * torch.randn_like(real)
    notes, held = Notes(), noise(3, 300, 4)

    def advance(_step: int) -> dict[str, float]:
        for _ in range(3):
            chosen = real[torch.randint(0, 800, (64,))]
            fake = generator(torch.randn(64, 4)).detach()
            mixed = (chosen + torch.rand(64, 1) * (fake - chosen)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = 5.0 * (slope.norm(dim=1) - 1.0).square().mean()
            judged = critic(fake).mean() - critic(chosen).mean() + penalty
            optimizer.zero_grad(set_to_none=True)
            judged.backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        made = -critic(generator(torch.randn(64, 4))).mean()
        made.backward()
        critic.zero_grad(set_to_none=True)
        optimizer.step()
        notes.losses.append(float(made.detach()))
        return {
            "train/critic_loss": float(judged.detach()),
            "train/generator_loss": notes.losses[-1],
        }

    def distance() -> Tensor:
        fake = generator(held)
        apart = torch.cdist(fake, real).mean() - 0.5 * torch.cdist(fake, fake).mean()
        return apart - 0.5 * torch.cdist(real, real).mean()

    return Course(
        model=model, optimizer=optimizer, steps=260, advance=advance, exam=distance, notes=notes
    )


def _noise_prediction(draw: Draw) -> Course:
    """The noise in a noisy point is predicted: most of the loss can never go."""
    points = datasets.load_spirals(draw.stream("data")).x
    points = points / points.std()
    width = draw.integer(48, 96)
    model = make_plain(4, width, width, 2, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.log_uniform(0.002, 0.004))
    notes = Notes()

    def value(x: Tensor, level: Tensor, added: Tensor) -> Tensor:
        angle = 0.5 * math.pi * level
        noisy = angle.cos() * x + angle.sin() * added
        said = model(torch.cat([noisy, level, angle.sin()], 1))
        return functional.mse_loss(said, added)

    def advance(_step: int) -> dict[str, float]:
        x = points[torch.randint(0, len(points), (128,))]
        loss = value(x, torch.rand(128, 1), torch.randn(128, 2))
        return {"train/loss": descend(notes, model, optimizer, loss)}

    levels = torch.linspace(0.02, 0.98, 500)[:, None]
    return Course(
        model=model,
        optimizer=optimizer,
        steps=300,
        advance=advance,
        exam=lambda: value(points[:500], levels, noise(5, 500, 2)),
        show=lambda: {"val/loss": float(value(points[:500], levels, noise(6, 500, 2)))},
        notes=notes,
    )


def _with_negatives(draw: Draw) -> Course:
    """Two views of each image are found among all others; the temperature is learned."""
    data = datasets.load_digits(draw.stream("data"))
    model = nn.ModuleDict({"tower": make_plain(64, draw.integer(48, 80), 16)})
    scale = nn.Parameter(torch.tensor(draw.uniform(1.5, 2.5)))
    model.register_parameter("scale", scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.005))
    notes, order = Notes(), draw.stream("order")
    level = draw.uniform(0.1, 0.2)

    def value(x: Tensor, shake: Tensor) -> Tensor:
        one = functional.normalize(model["tower"](x + level * shake[0]), dim=1)
        two = functional.normalize(model["tower"](x + level * shake[1]), dim=1)
        fits = scale.exp() * one @ two.T
        own = torch.arange(len(x))
        return 0.5 * (functional.cross_entropy(fits, own) + functional.cross_entropy(fits.T, own))

    def advance(_step: int) -> dict[str, float]:
        x = data.x[torch.from_numpy(order.integers(0, len(data.x), 64))]
        loss = value(x, torch.randn(2, *x.shape))
        return {"contrastive_loss": descend(notes, model, optimizer, loss)}

    proof, seen = data.proof_x[:128], data.val_x[:128]
    return Course(
        model=model,
        optimizer=optimizer,
        steps=220,
        advance=advance,
        exam=lambda: value(proof, noise(1, 2, *proof.shape)),
        show=lambda: {"val_contrastive_loss": float(value(seen, noise(2, 2, *seen.shape)))},
        notes=notes,
    )


def _triplets(draw: Draw) -> Course:
    """Triplets with a margin: in many batches soon hardly one still counts."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    model = make_plain(64, draw.integer(48, 80), 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.003))
    notes, order = Notes(), draw.stream("order")

    def value(x: Tensor, y: Tensor, margin: float = 0.4) -> Tensor:
        vectors = functional.normalize(model(x), dim=1)
        apart = 2.0 - 2.0 * vectors @ vectors.T
        same = y[:, None] == y
        over = apart[:, :, None] - apart[:, None, :] + margin
        counts = same[:, :, None] & ~same[:, None, :]
        return over.clamp_min(0.0)[counts].mean()

    def advance(_step: int) -> dict[str, float]:
        chosen = torch.from_numpy(order.integers(0, len(data.x), 48))
        return {"loss": descend(notes, model, optimizer, value(data.x[chosen], data.y[chosen]))}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=200,
        advance=advance,
        exam=lambda: value(data.proof_x[:150], data.proof_y[:150]),
        fit=lambda: value(data.x[:150], data.y[:150]),
        show=lambda: {"val_loss": float(value(data.val_x[:150], data.val_y[:150]))},
        notes=notes,
    )


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


def _ranking(draw: Draw) -> Course:
    """Documents of a query are put in order, by pairs."""
    rng = draw.stream("data")
    x = rng.normal(size=(900, 8, 6))
    worth = x[..., 0] + np.sin(2 * x[..., 1]) + 0.3 * rng.normal(size=(900, 8))
    model = nn.Sequential(
        nn.Linear(6, width := draw.integer(24, 48)), nn.ReLU(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=draw.log_uniform(0.03, 0.06))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        score = output[..., 0]
        better = y[:, :, None] > y[:, None, :]
        return functional.softplus(score[:, None, :] - score[:, :, None])[better].mean()

    return supervise(draw, model, split(x, worth), loss, optimizer, batch=16, steps=220)


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


def _actor(draw: Draw) -> Course:
    """Walks on a line, by an actor and a critic on returns: the loss says little."""
    size, width = 9, draw.integer(24, 40)
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Linear(size, width), nn.Tanh()),
            "actor": nn.Linear(width, 2),
            "critic": nn.Linear(width, 1),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.004, 0.01))
    places, notes = torch.eye(size), Notes()
    goal, length, walkers = size - 1, 14, 16
    entropy = draw.uniform(0.005, 0.02)

    def walk() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        at = torch.randint(0, size - 1, (walkers,))
        states, moves, rewards = [], [], []
        for _ in range(length):
            with torch.no_grad():
                odds = model["actor"](model["body"](places[at])).softmax(-1)
            move = torch.multinomial(odds, 1)[:, 0]
            states.append(at)
            moves.append(move)
            at = (at + 2 * move - 1).clamp(0, goal)
            rewards.append((at == goal).float() - 0.1)
        return states, moves, rewards

    def advance(_step: int) -> dict[str, float]:
        states, moves, rewards = walk()
        returns, total = [], torch.zeros(walkers)
        for reward in reversed(rewards):
            total = reward + 0.95 * total
            returns.insert(0, total)
        hidden = model["body"](places[torch.cat(states)])
        wanted = torch.cat(returns)
        off = wanted - model["critic"](hidden)[:, 0]
        log_odds = model["actor"](hidden).log_softmax(-1)
        taken = log_odds.gather(1, torch.cat(moves)[:, None])[:, 0]
        spread = -(log_odds.exp() * log_odds).sum(1).mean()
        policy = -(taken * off.detach()).mean()
        loss = policy + 0.5 * off.square().mean() - entropy * spread
        value = descend(notes, model, optimizer, loss, clip=0.5)
        reward = float(torch.stack(rewards).sum(0).mean())
        return {
            "train/loss": value,
            "train/policy_loss": float(policy.detach()),
            "train/reward": reward,
        }

    def miss() -> Tensor:
        return 1.0 - model["actor"](model["body"](places[:-1])).softmax(-1)[:, 1].mean()

    return Course(
        model=model, optimizer=optimizer, steps=220, advance=advance, exam=miss, notes=notes
    )


def _house_prices(draw: Draw) -> Course:
    """Prices in full, by a loss that is linear far out: hundreds of thousands, and falling."""
    data = scaled_friedman(draw, count=1200)
    unit, middle = draw.log_uniform(5e3, 5e4), draw.uniform(0.0, 2.0)
    for part in (data.y, data.val_y, data.proof_y):
        part.add_(middle).mul_(unit)
    plain = make_plain(10, draw.integer(32, 64), 32, 1)

    class Priced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain

        def forward(self, x: Tensor) -> Tensor:
            return unit * self.net(x)

    model = Priced()
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.003, 0.008))
    return supervise(draw, model, data, functional.l1_loss, optimizer, steps=240)


def _long_saddle(draw: Draw) -> Course:
    """A deep linear net from a small start: nothing happens for long, then it falls."""
    rng = draw.stream("data")
    x = rng.normal(size=(900, 8))
    y = x @ rng.normal(size=(8, 4)) / 2.8 * draw.uniform(1.0, 1.3)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(draw.uniform(0.25, 0.35) / parameter.std() / 4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.04, 0.06), momentum=0.9)
    return supervise(draw, model, split(x, y), functional.mse_loss, optimizer, steps=320)


SCENARIOS = (
    verdicts.healthy("critic", _critic),
    verdicts.healthy("noise_prediction", _noise_prediction, gain=0.25),
    verdicts.healthy("with_negatives", _with_negatives),
    verdicts.healthy("triplets", _triplets),
    verdicts.healthy("quantiles", _quantiles),
    verdicts.healthy("hazards", _hazards),
    verdicts.healthy("many_labels", _many_labels),
    verdicts.healthy("ranking", _ranking),
    verdicts.healthy("equation", _equation),
    verdicts.healthy("actor", _actor),
    verdicts.healthy("house_prices", _house_prices),
    verdicts.healthy("long_saddle", _long_saddle),
)
