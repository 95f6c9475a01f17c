"""Healthy trainings of the seventh family with losses, layers and games that look like faults."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import Batch, Plan, sound
from benchmarks.diagnosis.families.seventh_games import (
    SimSiam,
    judge_centres,
    pair,
)
from benchmarks.diagnosis.families.seventh_tasks import (
    Graph,
    digits,
    draw_graph,
    learn,
    make_dense,
    segment,
    shapes,
)
from benchmarks.diagnosis.scenario import Draw


def _keep_twins_apart(draw: Draw) -> Plan:
    data = datasets.load_digits(draw.stream("data")).flatten()
    width = draw.integer(32, 48)
    return learn(
        draw,
        data,
        lambda: SimSiam(64, width, 16),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lose=pair,
        judge=lambda model, x, y: judge_centres(model, data.x, data.y, x, y),
        val=lambda model: {"val/loss": float(pair(model, data.val_x, data.val_y))},
        steps=260,
        size=64,
    )


def _anneal_the_prior(draw: Draw) -> Plan:
    # The whole loss rises as the divergence's weight does.
    data = datasets.load_digits(draw.stream("data")).flatten()
    width, steps = draw.integer(40, 64), 280

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = make_dense([64, width, 16])
            self.decoder = make_dense([8, width, 64])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_var = self.encoder(x).chunk(2, 1)
            code = mean + torch.randn_like(mean) * (0.5 * log_var).exp() * self.training
            prior = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
            return self.decoder(code), prior

    def make_again(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        made, prior = model(x)
        return (made - x).square().sum(1).mean(), prior

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        error, prior = make_again(model, batch[0])
        weight = 0.08 * min(1.0, step / (0.7 * steps))
        more = {"train/reconstruction": float(error.detach()), "train/kl": float(prior.detach())}
        return error + weight * prior, more

    return learn(
        draw,
        data,
        Coder,
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        judge=lambda model, x, y: make_again(model, x)[0],  # noqa: ARG005
        loss=loss,
        steps=steps,
    )


def _sample_the_doubt(draw: Draw) -> Plan:
    # Validation keeps dropout on, by intent, and averages ten passes.
    width = draw.integer(48, 72)
    data = datasets.load_digits(draw.stream("data"), noise=0.15)

    def switch(model: nn.Module) -> None:
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()

    def val(model: nn.Module) -> dict[str, float]:
        shares = torch.stack([model(data.val_x).softmax(1) for _ in range(10)]).mean(0)
        return {"val/loss": float(functional.nll_loss(shares.log(), data.val_y))}

    return digits(
        draw,
        data=data,
        build=lambda: make_dense([64, width, width, 10], drop=0.2),
        evaluates=switch,
        val=val,
    )


def _raise_the_bar(draw: Draw) -> Plan:
    # A curriculum: noise grows in stages, and the loss with it.
    plan = shapes(draw, data=datasets.load_shapes(draw.stream("data"), count=1200, noise=0.3))
    drawn = plan.batch
    clean = datasets.load_shapes(draw.stream("data"), count=1200, noise=0.0)
    stages = (0.0, 0.15, 0.3)
    plan.steps = 270

    def batch(step: int) -> Batch:
        x, y, rows = drawn(step)
        share = stages[min(2, 3 * step // plan.steps)] / 0.3
        return clean.x[rows] + share * (x - clean.x[rows]), y, rows

    # The two sets draw noise of different strength from the same numbers.
    plan.batch = batch
    return plan


def _paint_with_sigmoids(draw: Draw) -> Plan:
    # Outputs that are shares of white, and the cross-entropy that belongs to them.
    data = datasets.load_digits(draw.stream("data")).flatten()
    width = draw.integer(40, 64)

    def build() -> nn.Module:
        model = make_dense([64, width, 12, width, 64], nn.GELU)
        assert isinstance(model, nn.Sequential)
        model.add_module("paint", nn.Sigmoid())
        return model

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        del y
        return functional.binary_cross_entropy(model(x), x.clamp(0, 1))

    return learn(
        draw,
        data,
        build,
        lambda model: torch.optim.Adam(model.parameters(), lr=4e-3),
        lose=lose,
        judge=lambda model, x, y: (model(x) - x).square().sum(1).mean(),  # noqa: ARG005
        steps=300,
    )


def _find_parity(draw: Draw) -> Plan:
    # Nothing for a while, then all of it.
    rng = draw.stream("data")
    bits = rng.integers(0, 2, (4000, 8)) * 2.0 - 1
    label = (bits[:, :3].prod(1) > 0).astype(np.int64)
    x, y = torch.tensor(bits, dtype=torch.float32), torch.from_numpy(label)
    data = Data(x[:2400], y[:2400], x[2400:3200], y[2400:3200], x[3200:], y[3200:], classes=2)
    width = draw.integer(40, 64)
    return learn(
        draw,
        data,
        lambda: make_dense([8, width, width, 2]),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.85),
        steps=300,
    )


def _know_few_nodes(draw: Draw) -> Plan:
    # Forty labelled nodes of a graph: training is soon perfect, the rest follows.
    adjacency, x, y = draw_graph(draw.stream("graph"))
    parts = torch.from_numpy(draw.stream("parts").permutation(len(x))).split([60, 60, 120])
    width = draw.integer(14, 20)

    def lose(model: nn.Module, rows: Tensor) -> Tensor:
        return functional.cross_entropy(model(x)[rows], y[rows])

    return Plan(
        build=lambda: Graph(adjacency, [12, width, 4]),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2),
        batch=lambda step: (x, y, parts[0]),  # noqa: ARG005
        loss=lambda model, batch, step: (lose(model, batch[2]), {}),  # noqa: ARG005
        val=lambda model: {"val/loss": float(lose(model, parts[1]))},
        proof=lambda model: float(lose(model, parts[2])),
        steps=120,
        val_every=10,
        epoch_steps=1,
    )


def _rank_pairs(draw: Draw) -> Plan:
    # A hinge: ever more pairs cost nothing, and batches without any gradient come.
    data = datasets.load_friedman(draw.stream("data"), count=1500, noise=0.2)
    width = draw.integer(24, 40)

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        score = model(x)
        apart = y[:half] - y[half : 2 * half]
        kept = apart.abs() > 4
        cost = (1 - apart.sign() * (score[:half] - score[half : 2 * half])).relu()
        return (cost * kept).sum() / kept.sum().clamp(min=1)

    return learn(
        draw,
        data,
        lambda: make_dense([10, width, width, 1]),
        lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        lose=lose,
        size=24,
    )


def _weigh_the_hard(draw: Draw) -> Plan:
    # A focal loss on small objects: values of a few thousandths.
    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        cost = functional.binary_cross_entropy_with_logits(model(x), y, reduction="none")
        right = (-cost).exp()
        return ((0.25 * y + 0.75 * (1 - y)) * (1 - right).square() * cost).mean()

    return segment(draw, lose=lose, steps=200)


def _help_an_early_exit(draw: Draw) -> Plan:
    # A second head's weight goes to zero, and with it its gradient.
    width = draw.integer(36, 56)
    steps = 240

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
            self.high = nn.Sequential(nn.Linear(width, width), nn.ReLU())
            self.exit = nn.Linear(width, 10)
            self.head = nn.Linear(width, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.high(self.low(x)))

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        assert isinstance(model, Two)
        low = model.low(batch[0])
        main = functional.cross_entropy(model.head(model.high(low)), batch[1])
        early = functional.cross_entropy(model.exit(low), batch[1])
        weight = max(0.0, 0.5 * (1 - step / (0.6 * steps)))
        return main + weight * early, {"train/exit_loss": float(early.detach())}

    return digits(draw, build=Two, loss=loss, steps=steps)


SCENARIOS = (
    sound("seventh/twins_kept_apart", _keep_twins_apart, rise=0.2),
    sound("seventh/annealed_prior", _anneal_the_prior),
    sound("seventh/sampled_doubt", _sample_the_doubt),
    sound("seventh/raised_bar", _raise_the_bar),
    sound("seventh/painted_with_sigmoids", _paint_with_sigmoids),
    sound("seventh/late_parity", _find_parity),
    sound("seventh/few_known_nodes", _know_few_nodes),
    sound("seventh/ranked_pairs", _rank_pairs),
    sound("seventh/hard_pixels", _weigh_the_hard),
    sound("seventh/early_exit", _help_an_early_exit),
)
