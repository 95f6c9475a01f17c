"""Sound aims and machines that look odd: losses below zero, games, rewards, late drops, pauses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.sixth_course import Batch, Course, cycle, doubt, follow, sound
from benchmarks.diagnosis.families.sixth_faults_machines import play, train_with_memory
from benchmarks.diagnosis.families.sixth_ranks import train_ranks
from benchmarks.diagnosis.families.sixth_tasks import Variational, digits, teach
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _late_drop(draw: Draw) -> Course:
    """The parity of three of ten signs: nothing to see for long, then all at once."""
    rng = draw.stream("data")
    x = torch.from_numpy(rng.choice([-1.0, 1.0], (6000, 10))).float()
    y = (x[:, :3].prod(1) > 0).long()
    data = Data(x[:5000], y[:5000], x[5000:5500], y[5000:5500], x[5500:], y[5500:], classes=2)
    return teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        size=64,
        steps=500,
    )


def _density(draw: Draw) -> Course:
    """The likelihood of precise measurements: a loss that goes far below zero."""
    rng = draw.stream("data")
    x = torch.from_numpy(rng.uniform(-2, 2, (2400, 2))).float()
    y = (x[:, :1].sin() * x[:, 1:]) + 0.02 * torch.from_numpy(rng.normal(size=(2400, 1))).float()
    data = Data(x[:1600], y[:1600], x[1600:2000], y[1600:2000], x[2000:], y[2000:], classes=0)

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mean, scale = model(x).chunk(2, 1)
        return functional.gaussian_nll_loss(mean, y, functional.softplus(scale) + 1e-4)

    return teach(
        draw,
        data,
        lambda: nn.Sequential(
            nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)
        ),
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        lose=lose,
        size=64,
        steps=400,
        clip=5.0,
    )


def _warmed_divergence(draw: Draw) -> Course:
    """A variational autoencoder whose divergence is weighted in slowly: the loss rises with it."""
    data = datasets.load_digits(draw.stream("data")).flatten()

    def weigh(step: int) -> float:
        return min(1.0, step / 150) * 0.01

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Mapping[str, float]]:
        again, divergence = model(batch[0])
        error = functional.mse_loss(again, batch[0])
        more = {"train/error": error.item(), "train/kl": divergence.mean().item()}
        return error + weigh(step) * divergence.mean(), more

    return Course(
        build=lambda: Variational(64, 64, 8),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        batch=cycle(data, 48, draw.stream("order")),
        loss=loss,
        proof=lambda model: float(functional.mse_loss(model(data.proof_x)[0], data.proof_x)),
        val=lambda model: {
            "val/error": float(functional.mse_loss(model(data.val_x)[0], data.val_x))
        },
        steps=300,
    )


def _contrast(draw: Draw) -> Course:
    """InfoNCE between two views: a loss that stays high for as long as batches are large."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    noise = draw.stream("noise")

    def compare(model: nn.Module, x: Tensor) -> Tensor:
        views = [
            functional.normalize(
                model(x + 0.3 * torch.from_numpy(noise.normal(size=x.shape)).float()), dim=1
            )
            for _ in range(2)
        ]
        return functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(x)))

    def proof(model: nn.Module) -> float:
        x = data.proof_x[:128]
        fixed = torch.from_numpy(np.random.default_rng(0).normal(size=x.shape)).float()
        one, two = (functional.normalize(model(part), dim=1) for part in (x, x + 0.3 * fixed))
        return float(functional.cross_entropy(one @ two.T / 0.2, torch.arange(128)))

    return Course(
        build=lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16)),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        batch=cycle(data, 96, draw.stream("order")),
        loss=lambda model, batch, _step: (compare(model, batch[0]), {}),
        val=lambda model: {"val/loss": float(compare(model, data.val_x[:96]))},
        proof=proof,
        steps=280,
        epoch_steps=11,
    )


def _bandit(draw: Draw) -> Course:
    """Policy gradients with a baseline: the loss means nothing, the reward rises."""
    rng = draw.stream("data")
    way = torch.from_numpy(rng.normal(size=(6, 4))).float()

    def batch(step: int) -> Batch:  # noqa: ARG001
        return (torch.from_numpy(rng.normal(size=(48, 6))).float(),)

    asked = torch.from_numpy(draw.stream("proof").normal(size=(500, 6))).float()

    def reward(x: Tensor, action: Tensor) -> Tensor:
        return ((x @ way).argmax(1) == action).float()

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Mapping[str, float]]:  # noqa: ARG001
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        action = policy.sample()
        won = reward(batch[0], action) + 0.3 * torch.randn(len(action))
        made = -(policy.log_prob(action) * (won - won.mean())).mean()
        made = made - 0.005 * policy.entropy().mean()
        more = {"train/reward": float(won.mean()), "train/entropy": float(policy.entropy().mean())}
        return made, more

    return Course(
        build=lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        batch=batch,
        loss=loss,
        proof=lambda model: 1.0 - float(reward(asked, model(asked).argmax(1)).mean()),
        steps=350,
    )


def _bootstrapped(draw: Draw) -> Course:
    """Values of a walk by temporal differences: their errors grow as the values do."""
    rng = draw.stream("data")
    target: list[nn.Module] = []
    states, discount = 12, 0.9
    truth = discount ** np.arange(states)[::-1].astype(float)

    def encode(place: np.ndarray) -> Tensor:
        return functional.one_hot(torch.from_numpy(place), states).float()

    def batch(step: int) -> Batch:  # noqa: ARG001
        place = rng.integers(0, states, 48)
        return encode(place), torch.from_numpy(place)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(states, 32), nn.ReLU(), nn.Linear(32, 1))

    def before(model: nn.Module, step: int) -> None:
        if not target:
            target.append(build())
        if step % 25 == 0:
            target[0].load_state_dict(model.state_dict())

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Mapping[str, float]]:  # noqa: ARG001
        place = batch[1].numpy()
        ends = place == states - 1
        with torch.no_grad():
            later = target[0](encode(np.minimum(place + 1, states - 1)))[:, 0].numpy()
        wanted = np.where(ends, 10.0, discount * later)
        value = model(batch[0])[:, 0]
        return functional.mse_loss(value, torch.from_numpy(wanted).float()), {
            "train/value": float(value.mean())
        }

    everywhere = encode(np.arange(states))

    def proof(model: nn.Module) -> float:
        return float((model(everywhere)[:, 0] / 10 - torch.from_numpy(truth)).square().mean())

    return Course(
        build=build,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-2),
        batch=batch,
        loss=loss,
        proof=proof,
        before=before,
        steps=400,
    )


def _scaled_steps(draw: Draw) -> Course:
    """A scaler begins too high: the first steps overflow and are skipped, as they should."""
    made = digits(draw, steps=260)
    scale = {"now": 2.0**16, "skipped": 0}

    def turn(optimizer: torch.optim.Optimizer, step: int) -> None:  # noqa: ARG001
        if scale["now"] > 2.0**12:
            scale["now"] /= 2.0
            scale["skipped"] += 1
            optimizer.zero_grad()
            return
        optimizer.step()

    made.turn = turn
    return made


def _quiet_machine(recorder: Recorder, draw: Draw) -> Truth:
    """A cache fills in the first fifth of the steps, and then memory stays as it is."""
    sizes = train_with_memory(recorder, draw, until=60)
    later = sizes[-1] - sizes[75]
    reason = f"memory grows by {(sizes[60] - sizes[0]) / 1e6:.0f} MB, then by {later / 1e6:.1f} MB"
    if later > 0.05 * (sizes[60] - sizes[0]):
        return doubt(f"{reason}: goes on")
    return Truth(kind="healthy", phases_forbidden=("divergence",), reason=reason)


def _pauses(recorder: Recorder, draw: Draw) -> Truth:
    """Every fiftieth step a checkpoint is written; at each epoch the loader starts anew."""
    rng = draw.stream("clock")
    course = digits(draw, steps=260)
    course.start = {"timing": "manual"}
    base = draw.log_uniform(20.0, 120.0)

    def after(_model: nn.Module, step: int) -> None:
        compute = base * float(np.exp(rng.normal(0, 0.05)))
        data = 0.06 * base * float(np.exp(rng.normal(0, 0.2)))
        if step % course.epoch_steps == 0:
            data += 3.0 * base
        pause = 10.0 * base if step % 50 == 49 else 0.0
        recorder.time(
            step, step_ms=compute + data + pause, data_ms=data, compute_ms=compute + pause
        )

    course.after = after
    log = follow(course, recorder)
    if log.end > 0.5 * log.proofs[0]:
        return doubt(f"{log.tell()}: did not learn")
    return Truth(
        kind="healthy", phases_forbidden=("divergence", "overfitting_onset"), reason=log.tell()
    )


def _fair_game(recorder: Recorder, draw: Draw) -> Truth:
    """Two networks that keep each other at bay: neither loss falls, and all centres are found."""
    shares, _ = play(recorder, draw, centres=4, steps=800, rates=(4e-4, 1e-3), spread=0.4)
    reason = f"the centres have {', '.join(f'{share:.0%}' for share in shares)}"
    if (shares < 0.08).any():
        return doubt(f"{reason}: not all are found")
    return Truth(kind="healthy", reason=reason)


def _sent_now_and_then(recorder: Recorder, draw: Draw) -> Truth:
    """Local SGD: two ranks whose weights are averaged every tenth step, and differ between."""
    told = train_ranks(recorder, draw, "local")
    reason = f"proof {told['first']:.3g} -> {told['end']:.3g}, ranks {told['apart']:.3g} apart"
    if told["end"] > 0.5 * told["first"]:
        return doubt(f"{reason}: did not learn")
    return Truth(kind="healthy", phases_forbidden=("divergence",), reason=reason)


def _named(name: str, train: object) -> Scenario:
    return Scenario(name=f"sixth/healthy/{name}", kind="healthy", train=train)


SCENARIOS: tuple[Scenario, ...] = (
    sound("late_drop", _late_drop),
    sound("density", _density),
    sound("warmed_divergence", _warmed_divergence),
    sound("contrast", _contrast),
    sound("bandit", _bandit),
    sound("bootstrapped_values", _bootstrapped),
    sound("scaled_steps", _scaled_steps),
    _named("cache_fills", _quiet_machine),
    _named("pauses", _pauses),
    _named("fair_game", _fair_game),
    _named("local_steps", _sent_now_and_then),
)
