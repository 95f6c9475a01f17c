"""Healthy trainings with losses that look ill: adversaries, rewards, bounds, inner loops."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import handwriting, ring_points, tabular
from benchmarks.diagnosis.families.second_evidence import (
    Lesson,
    log_uniform,
    without_graph,
)
from benchmarks.diagnosis.families.second_judges import sound
from benchmarks.diagnosis.scenario import Draw


class Gan(nn.Module):
    """Generator and critic, trained in turns by one optimizer of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2),
            nn.Linear(48, 1),
        )  # fmt: skip


def _gan(draw: Draw) -> Lesson:
    """Two nets against each other on a ring of points: neither loss ever settles."""
    rng = draw.stream("build")
    model = Gan()
    rate = log_uniform(rng, 5e-4, 1.5e-3)
    optimizer = torch.optim.Adam(
        [
            {"params": model.generator.parameters(), "lr": rate},
            {"params": model.critic.parameters(), "lr": 2 * rate},
        ],
        betas=(0.5, 0.95),
    )
    batches = draw.stream("batches")
    held = ring_points(draw.stream("held"), 400)
    noise = torch.as_tensor(draw.stream("noise").normal(size=(400, 4)), dtype=torch.float32)

    def advance(_step: int) -> dict[str, float]:
        real = ring_points(batches, 64)
        made = model.generator(torch.as_tensor(batches.normal(size=(64, 4)), dtype=torch.float32))
        critic_loss = (
            functional.softplus(-model.critic(real)).mean()
            + functional.softplus(model.critic(made.detach())).mean()
        )
        optimizer.zero_grad()
        critic_loss.backward()
        optimizer.step()
        generator_loss = functional.softplus(-model.critic(made)).mean()
        optimizer.zero_grad()
        generator_loss.backward()
        # As with an optimizer for each: the critic has gradients now, and takes no step.
        kept = [(entry, entry.grad) for entry in model.critic.parameters()]
        model.critic.zero_grad()
        optimizer.step()
        for entry, grad in kept:
            entry.grad = grad
        return {"train/d_loss": critic_loss.item(), "train/g_loss": generator_loss.item()}

    def assess() -> float:
        # Energy distance of generated and held-out points.
        made = model.generator(noise)
        across = torch.cdist(made, held).mean()
        return float(2 * across - torch.cdist(made, made).mean() - torch.cdist(held, held).mean())

    return Lesson(model=model, optimizer=optimizer, steps=600, advance=advance, assess=assess)


def _bandit(draw: Draw) -> Lesson:
    """REINFORCE on a contextual bandit: a noisy surrogate loss around zero, of either sign."""
    rng = draw.stream("build")
    contexts = torch.as_tensor(rng.normal(size=(500, 8)), dtype=torch.float32)
    worth = torch.tanh(contexts @ torch.as_tensor(rng.normal(size=(8, 4)), dtype=torch.float32))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 3e-3, 1e-2))
    batches = draw.stream("batches")
    state = {"baseline": 0.0}

    def advance(_step: int) -> dict[str, float]:
        rows = torch.from_numpy(batches.integers(0, 500, 32))
        policy = torch.distributions.Categorical(logits=model(contexts[rows]))
        action = policy.sample()
        noise = torch.as_tensor(batches.normal(0, 0.5, 32), dtype=torch.float32)
        reward = worth[rows, action] + noise
        loss = -(policy.log_prob(action) * (reward - state["baseline"])).mean()
        loss = loss - 0.01 * policy.entropy().mean()
        state["baseline"] += 0.05 * (float(reward.mean()) - state["baseline"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item(), "train/reward": float(reward.mean())}

    def assess() -> float:
        shares = torch.softmax(model(contexts), -1)
        return float((worth.max(-1).values - (shares * worth).sum(-1)).mean())

    return Lesson(model=model, optimizer=optimizer, steps=400, advance=advance, assess=assess)


class Vae(nn.Module):
    """A variational autoencoder of digits."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.centre = nn.Linear(64, latent)
        self.spread = nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def bound(self, x: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Reconstruction error and divergence from the prior, per example."""
        code = self.encoder(x)
        centre, spread = self.centre(code), self.spread(code).clamp(-6, 3)
        noise = torch.randn(centre.shape, generator=source)
        made = self.decoder(centre + noise * (spread / 2).exp())
        divergence = 0.5 * (centre.pow(2) + spread.exp() - spread - 1).sum(-1).mean()
        return 10 * (made - x).pow(2).sum(-1).mean(), divergence


def _vae(draw: Draw) -> Lesson:
    """The weight of the divergence is warmed up: the loss rises while all is well."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = Vae(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    batches = draw.stream("batches")
    source = torch.Generator().manual_seed(draw.torch_seed)
    steps = 400

    def advance(step: int) -> dict[str, float]:
        x, _ = data.draw(batches, 48)
        error, divergence = model.bound(x, source)
        loss = error + min(1.0, step / (0.6 * steps)) * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item(), "train/kl": divergence.item()}

    def assess() -> float:
        error, divergence = model.bound(data.x_held, torch.Generator().manual_seed(1))
        return float(error + divergence)

    return Lesson(model=model, optimizer=optimizer, steps=steps, advance=advance, assess=assess)


def _inner_loops(draw: Draw) -> Lesson:
    """Meta-learning of sine waves: two inner steps of SGD inside each outer step."""
    rng = draw.stream("build")
    model = nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))

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

    batches = draw.stream("batches")

    def advance(_step: int) -> dict[str, float]:
        loss = torch.stack([adapt(batches) for _ in range(4)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/meta_loss": loss.item()}

    def assess() -> float:
        source = np.random.default_rng(3)
        with torch.enable_grad():
            return float(np.mean([adapt(source).item() for _ in range(12)]))

    return Lesson(model=model, optimizer=optimizer, steps=240, advance=advance, assess=assess)


def _q_learning(draw: Draw) -> Lesson:
    """Values on a chain with a target network: the shown loss rises as values are discovered."""
    rng = draw.stream("build")
    length = int(rng.integers(6, 9))
    eye = torch.eye(length)
    model = nn.Sequential(nn.Linear(length, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 4e-3))
    target = copy.deepcopy(model)
    batches = draw.stream("batches")
    exact = torch.tensor([10 * 0.8 ** (length - 1 - place) for place in range(length)])

    def advance(step: int) -> dict[str, float]:
        if step % 20 == 0:
            target.load_state_dict(model.state_dict())
        place = torch.from_numpy(batches.integers(0, length, 48))
        action = torch.from_numpy(batches.integers(0, 2, 48))
        after = (place + 2 * action - 1).clamp(0, length - 1)
        won = (place == length - 1) & (action == 1)
        with torch.no_grad():
            hoped = torch.where(won, 10.0, 0.8 * target(eye[after]).max(-1).values)
        found = model(eye[place]).gather(1, action[:, None])[:, 0]
        loss = functional.smooth_l1_loss(found, hoped)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item(), "train/mean_q": float(found.detach().mean())}

    def assess() -> float:
        return float((model(eye).max(-1).values - exact).abs().mean())

    return Lesson(model=model, optimizer=optimizer, steps=420, advance=advance, assess=assess)


class MovingTwin(nn.Module):
    """An encoder with a predictor, and a slowly following copy that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 24)
        )
        self.predictor = nn.Sequential(
            nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24)
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def _bootstrap(draw: Draw) -> Lesson:
    """Self-supervision without negatives that does not collapse: predictor and moving average."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = MovingTwin()
    trained = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.Adam(trained, lr=log_uniform(rng, 1e-3, 3e-3))
    batches = draw.stream("batches")

    def view(x: Tensor) -> Tensor:
        mask = torch.as_tensor(batches.random(x.shape) > 0.25, dtype=torch.float32)
        return x * mask + torch.as_tensor(batches.normal(0, 0.1, x.shape), dtype=torch.float32)

    def advance(_step: int) -> dict[str, float]:
        x, _ = data.draw(batches, 64)
        with torch.no_grad():
            goal = model.target(view(x))
        loss = 1 - functional.cosine_similarity(model.predictor(model.online(view(x))), goal).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(
                model.target.parameters(), model.online.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.03)
        return {"train/loss": loss.item()}

    def gap(encode: nn.Module) -> float:
        x = data.x_held[:200]
        noise = torch.as_tensor(np.random.default_rng(2).normal(0, 0.35, x.shape)).float()
        codes = functional.normalize(encode(x)), functional.normalize(encode(x + noise))
        codes = tuple(functional.normalize(code - code.mean(0)) for code in codes)
        return float(functional.cross_entropy(codes[0] @ codes[1].T / 0.1, torch.arange(200)))

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=300,
        advance=advance,
        assess=lambda: gap(model.online),
    )


def _uncertain_tasks(draw: Draw) -> Lesson:
    """Two tasks weighed by learned variances: the loss goes through zero and below."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    mix = torch.as_tensor(rng.normal(size=(30, 2)) / 8, dtype=torch.float32)
    model = nn.Sequential()
    model.add_module("trunk", nn.Sequential(nn.Linear(30, 32), nn.SiLU()))
    model.add_module("heads", nn.Linear(32, 2))
    model.register_parameter("log_variance", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 5e-3))
    batches = draw.stream("batches")

    def errors(x: Tensor) -> Tensor:
        return (model.heads(model.trunk(x)) - (x @ mix) * torch.tensor([1.0, 0.2])).pow(2).mean(0)

    def lose(x: Tensor) -> Tensor:
        return (errors(x) * (-model.log_variance).exp() + model.log_variance).sum()

    def advance(_step: int) -> dict[str, float]:
        loss = lose(data.draw(batches, 32)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=400,
        advance=advance,
        assess=lambda: float(errors(data.x_held).sum()),
        validate=lambda: {"val/loss": without_graph(lambda: float(lose(data.x_held)))},
    )


class Coupling(nn.Module):
    """One affine coupling of two coordinates."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = (x[:, 1:], x[:, :1]) if self.flip else (x[:, :1], x[:, 1:])
        scale, shift = self.net(kept).chunk(2, -1)
        scale = torch.tanh(scale) * 2
        moved = moved * scale.exp() + shift
        parts = (moved, kept) if self.flip else (kept, moved)
        return torch.cat(parts, -1), scale[:, 0]


def _flow(draw: Draw) -> Lesson:
    """A normalising flow on a ring scaled far down: likelihoods above one, negative losses."""
    rng = draw.stream("build")
    model = nn.Sequential(*(Coupling(flip=bool(place % 2)) for place in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 2e-3, 6e-3))
    batches = draw.stream("batches")
    held = ring_points(draw.stream("held"), 500) * 0.05

    def lose(x: Tensor) -> Tensor:
        whole = torch.zeros(len(x))
        for layer in model:
            x, scale = layer(x)
            whole = whole + scale
        return (0.5 * x.pow(2).sum(-1) + np.log(2 * np.pi) - whole).mean()

    def advance(_step: int) -> dict[str, float]:
        loss = lose(ring_points(batches, 128) * 0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return {"train/nll": loss.item()}

    return Lesson(
        model=model,
        optimizer=optimizer,
        steps=320,
        advance=advance,
        assess=lambda: float(lose(held)),
        validate=lambda: {"val/nll": without_graph(lambda: float(lose(held)))},
    )


SCENARIOS = (
    sound("gan_on_a_ring", _gan, share=0.5, rising=True),
    sound("reinforce_bandit", _bandit, share=0.6, rising=True),
    sound("vae_with_annealing", _vae, share=0.7, rising=True),
    sound("inner_loops", _inner_loops, share=0.7),
    sound("q_learning", _q_learning, share=0.5, rising=True),
    sound("bootstrap_without_negatives", _bootstrap, share=0.9, rising=True),
    sound("uncertain_tasks", _uncertain_tasks, share=0.3),
    sound("negative_flow", _flow, share=0.2),
)
