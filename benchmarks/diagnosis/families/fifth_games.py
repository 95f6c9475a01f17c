"""Poles to balance, many at once, and an actor and critic that learn to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import Plan
from benchmarks.diagnosis.scenario import Draw

_LIMIT = 200


class Poles:
    """Poles on carts as in Barto, Sutton and Anderson (1983); every step is paid the same."""

    def __init__(self, rng: np.random.Generator, count: int) -> None:
        self.rng = rng
        self.states = rng.uniform(-0.05, 0.05, (count, 4))
        self.ages = np.zeros(count, dtype=np.int64)

    def push(self, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """States before restarts, which fell, which ran out of time, ages of those ended."""
        place, speed, angle, turn = self.states.T
        force = np.where(right, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        drive = (force + 0.05 * turn**2 * sin) / 1.1
        bend = (9.8 * sin - cos * drive) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = drive - 0.05 * bend * cos / 1.1
        moved = np.stack(
            [place + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend], 1
        )
        self.ages += 1
        fell = (np.abs(moved[:, 0]) > 2.4) | (np.abs(moved[:, 2]) > 0.2095)
        late = ~fell & (self.ages >= _LIMIT)
        over = fell | late
        ages = self.ages[over].copy()
        self.states = moved.copy()
        self.states[over] = self.rng.uniform(-0.05, 0.05, (int(over.sum()), 4))
        self.ages[over] = 0
        return moved, fell, late, ages


class ActorCritic(nn.Module):
    """Two perceptrons: logits of the two pushes, and the value of a state."""

    def __init__(self, width: int):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values."""
        return self.actor(states), self.critic(states)[..., 0]


def _see(states: np.ndarray) -> Tensor:
    return torch.tensor(states * np.array([0.4, 0.5, 4.0, 0.5]), dtype=torch.float32)


def play_poles(
    draw: Draw, *, masked: bool = True, steps: int = 240, log_loss: bool = False
) -> Plan:
    """Advantage actor-critic.

    Args:
        draw: Of the run.
        masked: Whether nothing is expected after a fall; without it, falls cost nothing.
        steps: Updates, each of 16 pushes of 16 poles.
        log_loss: Whether the loss is logged beside the reward.
    """
    model = ActorCritic(draw.integer(32, 48))
    poles = Poles(draw.stream("poles"), 16)
    chance = draw.stream("pushes")
    gamma, pay = 0.99, 0.03
    lengths: list[float] = [20.0]
    kept: dict[str, Tensor] = {}

    def collect(_step: int) -> None:
        seen, pushed, after, fallen = [], [], [], []
        with torch.no_grad():
            for _ in range(16):
                states = _see(poles.states)
                chances = model.actor(states).softmax(1)[:, 1].numpy()
                right = chance.uniform(size=16) < chances
                # Without the mask what follows a fall is the state after the restart.
                moved, fell, _, ages = poles.push(right)
                seen.append(states)
                pushed.append(torch.from_numpy(right.astype(np.int64)))
                after.append(_see(np.where(fell[:, None], poles.states, moved)))
                fallen.append(torch.from_numpy(fell))
                lengths.extend(ages.tolist())
            kept["states"], kept["pushes"] = torch.stack(seen), torch.stack(pushed)
            following = model.critic(torch.stack(after))[..., 0]
            alive = 1.0 - torch.stack(fallen).float() if masked else torch.ones(16, 16)
            values = model.critic(kept["states"])[..., 0]
            deltas = pay + gamma * alive * following - values
            gains = torch.zeros(16, 16)
            carry = torch.zeros(16)
            for place in range(15, -1, -1):
                carry = deltas[place] + gamma * 0.95 * alive[place] * carry
                gains[place] = carry
            kept["gains"], kept["returns"] = gains, gains + values

    def loss(model: nn.Module, _step: int) -> Tensor:
        logits, values = model(kept["states"])
        chosen = -functional.cross_entropy(
            logits.flatten(0, 1), kept["pushes"].flatten(), reduction="none"
        )
        gains = kept["gains"].flatten()
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        logs = logits.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1).mean()
        value_loss = functional.mse_loss(values, kept["returns"])
        return 0.5 * value_loss - (chosen * gains).mean() - 0.01 * entropy

    return Plan(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        loss=loss,
        judge=_make_judge(draw),
        steps=steps,
        per_epoch=steps,
        key="policy_loss" if log_loss else None,
        others=lambda: {"episode_reward": float(np.mean(lengths[-30:]))},
        before=collect,
        rate=lambda step: max(0.02, 1.0 - step / steps),
        clip=1.0,
        looks=6,
    )


def _make_judge(draw: Draw) -> Callable[[nn.Module], float]:
    def judge(model: nn.Module) -> float:
        assert isinstance(model, ActorCritic)
        rng = draw.stream("judge")
        poles, chance = Poles(rng, 40), draw.stream("judge pushes")
        ended = np.full(40, float(_LIMIT))
        open_ = np.ones(40, dtype=bool)
        for age in range(1, _LIMIT):
            chances = model.actor(_see(poles.states)).softmax(1)[:, 1].numpy()
            _, fell, _, _ = poles.push(chance.uniform(size=40) < chances)
            ended[open_ & fell] = age
            open_ &= ~fell
            if not open_.any():
                break
        return -float(ended.mean())

    return judge
