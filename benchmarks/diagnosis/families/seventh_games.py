"""The seventh family's games and pairs: a duel of two networks, a bandit, twin embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.seventh_course import Batch, Plan
from benchmarks.diagnosis.families.seventh_tasks import make_dense
from benchmarks.diagnosis.scenario import Draw


class SimSiam(nn.Module):
    """An encoder and a predictor."""

    def __init__(self, inputs: int, width: int, code: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, code)
        )
        self.predictor = nn.Sequential(nn.Linear(code, code), nn.ReLU(), nn.Linear(code, code))
        self.encoder.append(nn.BatchNorm1d(code, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings."""
        return self.encoder(x)


def pair(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Minus the similarity of two noisy views, as SimSiam has it."""
    del y
    assert isinstance(model, SimSiam)
    one, two = (model.encoder(x + 0.2 * torch.randn_like(x)) for _ in range(2))
    parts = []
    for from_, to in ((one, two), (two, one)):
        said = model.predictor(from_)
        parts.append(functional.cosine_similarity(said, to.detach()).mean())
    return -0.5 * (parts[0] + parts[1])


def judge_centres(model: nn.Module, x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> Tensor:
    """The share of new inputs whose embedding is nearest to another class's mean."""
    code, new = model(x), model(new_x)
    centres = torch.stack([code[y == label].mean(0) for label in range(int(y.max()) + 1)])
    # Digits of a float that are noise of the sums must not tell classes apart.
    spread = (new - new.mean(0)).norm(dim=1).mean() / (new.norm(dim=1).mean() + 1e-12)
    if not float(spread) > 1e-3:
        return torch.tensor(0.9)
    return (torch.cdist(new, centres).argmin(1) != new_y).double().mean()


def bandit(draw: Draw, *, sign: float = 1.0, **options: Any) -> Plan:
    """Rewards for the right one of four actions in a context, by policy gradients."""
    rng = draw.stream("world")
    right = torch.tensor(rng.normal(size=(8, 4)), dtype=torch.float32)
    contexts = torch.tensor(rng.normal(size=(4000, 8)), dtype=torch.float32)
    width = draw.integer(24, 40)
    past = [0.25]

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        del step
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        action = policy.sample()
        reward = (action == (batch[0] @ right).argmax(1)).float()
        gain = reward - past[0]
        past[0] += 0.1 * float(reward.mean() - past[0])
        cost = -sign * (policy.log_prob(action) * gain).mean()
        return cost - 0.005 * policy.entropy().mean(), {"train/reward": float(reward.mean())}

    def proof(model: nn.Module) -> float:
        x = contexts[3000:]
        return float((model(x).argmax(1) != (x @ right).argmax(1)).double().mean())

    def val(model: nn.Module) -> dict[str, float]:
        x = contexts[2500:3000]
        return {"val/reward": float((model(x).argmax(1) == (x @ right).argmax(1)).double().mean())}

    drawn = draw.stream("order")
    return Plan(
        build=lambda: make_dense([8, width, 4], nn.Tanh),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        batch=lambda step: (contexts[torch.from_numpy(drawn.integers(0, 2500, 48))],),  # noqa: ARG005
        loss=loss,
        val=val,
        proof=proof,
        **{"steps": 300, "val_every": 20, **options},
    )
