"""Faults of signals, gradients and units, each after an account that was published."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.eighth_course import Course, judge_fault, lost, pair
from benchmarks.diagnosis.families.eighth_tasks import (
    make_images,
    sample,
    supervise,
)
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.networks import make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _bootstrapped_beyond_data(recorder: Recorder, draw: Draw) -> Truth:
    """Tsitsiklis and Van Roy 1996: values bootstrapped off the data, without a target network."""

    def make(draw: Draw, faulty: bool) -> Course:
        model = make_mlp([4, 48, 48, 1], activation="relu")
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=draw.uniform(0.004, 0.007))
        rng, discount = draw.stream("states"), 0.99 if faulty else 0.3

        def batch(_step: int) -> Tensor:
            return torch.tensor(rng.uniform(-0.5, 0.5, (64, 4)), dtype=torch.float32)

        def lose(net: nn.Module, state: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            value, reward = net(state), 0.2 * state.abs().mean(1, keepdim=True)
            with torch.no_grad():
                # Nine episodes of ten go on, twice as far out as any state of the data.
                target = reward + 0.9 * discount * net(2.5 * state)
            return functional.mse_loss(value, target), {"train/mean_value": value.mean().item()}

        test = torch.tensor(draw.stream("test").uniform(-0.5, 0.5, (256, 4)), dtype=torch.float32)
        return Course(
            model,
            optimizer,
            batch,
            lose,
            lambda net: float(net(test).abs().mean()),
            steps=400,
            key="train/td_loss",
            log_norm=True,
        )

    _, notes, twin = pair(make, recorder, draw)
    growth = float(np.median(notes.norms[-40:]) / np.median(notes.norms[10:40]))
    return judge_fault(
        growth > 100 and notes.end > 20,
        notes,
        twin,
        "exploding_gradients",
        reason=f"values bootstrap on themselves: gradients grew to {growth:.3g} times",
        tolerated=WRECK,
    )


def _tiny_start(recorder: Recorder, draw: Draw) -> Truth:
    """Glorot and Bengio 2010: a deep tanh network whose weights start far too small."""

    def make(draw: Draw, faulty: bool) -> Course:
        depth, width = draw.integer(9, 11), draw.integer(40, 56)
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model = make_mlp([64, *[width] * depth, 10], activation="tanh")
        if faulty:
            gain = draw.uniform(0.15, 0.25)
            for name, weight in model.named_parameters():
                if name.endswith("weight") and not name.startswith("head"):
                    nn.init.normal_(weight, std=gain / math.sqrt(weight.shape[1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return supervise(draw, model, optimizer, data, steps=300, train_accuracy="train/acc")

    course, notes, twin = pair(make, recorder, draw)
    x, y, _ = course.batch(0)
    course.model.zero_grad()
    course.lose(course.model, (x, y), 0)[0].backward()
    sizes = {
        n: float(p.grad.norm()) for n, p in course.model.named_parameters() if p.grad is not None
    }
    share = sizes["fc0.weight"] / (sizes["head.bias"] + 1e-30)
    borne = share < 1e-3 and lost(notes, twin) > 0.5
    reason = f"weights started too small: fc0 gets {share:.2g} of the head's gradient"
    return judge_fault(
        borne,
        notes,
        twin,
        "vanishing_gradients",
        reason=reason,
        tolerated=(
            "plateau",
            "stagnant_layers",
            "update_ratio",
            "activation_collapse",
            "mostly_frozen",
        ),
    )


class _Quantizer(nn.Module):
    """Images to words of a book and back; `through` copies gradients past the words."""

    def __init__(self, through: bool):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 8))
        self.book = nn.Parameter(0.5 * torch.randn(48, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 64))
        self.through = through

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image again, and the loss of the book."""
        code = self.encoder(x)
        with torch.no_grad():
            word = torch.cdist(code, self.book).argmin(1)
        chosen = self.book[word]
        book_loss = functional.mse_loss(chosen, code.detach())
        if self.through:
            book_loss = book_loss + 0.25 * functional.mse_loss(code, chosen.detach())
            return self.decoder(code + (chosen - code).detach()), book_loss
        return self.decoder(chosen), book_loss


def _no_straight_through(recorder: Recorder, draw: Draw) -> Truth:
    """Van den Oord et al. 2017: without the straight-through estimator argmin passes nothing."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Quantizer(not faulty)
        with torch.no_grad():
            model.book.copy_(model.encoder(data.x[:48]))
        optimizer = torch.optim.Adam(model.parameters(), lr=draw.uniform(2e-3, 4e-3))
        take = sample(draw, len(data.x), 64)

        def lose(net: nn.Module, x: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            again, book_loss = net(x)
            error = functional.mse_loss(again, x)
            return error + book_loss, {"train/recon": error.item(), "train/vq": book_loss.item()}

        def proof(net: nn.Module) -> float:
            return float(functional.mse_loss(net(data.proof_x)[0], data.proof_x))

        def check(_step: int) -> dict[str, float]:
            with torch.no_grad():
                return {"val/recon": float(functional.mse_loss(model(data.val_x)[0], data.val_x))}

        return Course(
            model, optimizer, lambda step: data.x[take(step)], lose, proof, check, steps=400
        )

    _, notes, twin = pair(make, recorder, draw)
    still = notes.moved("encoder.0.weight")
    borne = still == 0.0 and notes.end > 1.1 * twin.end
    return judge_fault(
        borne,
        notes,
        twin,
        "stagnant_layers",
        reason=f"no gradient passes the quantizer: the encoder moved by {still:.2g}",
        tolerated=(
            "vanishing_gradients",
            "mostly_frozen",
            "parameters_not_optimized",
            "plateau",
            "update_ratio",
        ),
        culprits=("encoder", "encoder.0", "encoder.2"),
    )


def _prior_bias_everywhere(recorder: Recorder, draw: Draw) -> Truth:
    """RetinaNet's prior bias, -log((1-p)/p), is for the last layer; here each has it."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=4)
        model = make_convolutional([8, 8, 16], 12, 4)
        if faulty:
            prior = draw.uniform(0.002, 0.01)
            for name, layer in model.named_modules():
                if isinstance(layer, nn.Conv2d) and name != "conv0":
                    nn.init.constant_(layer.bias, -math.log((1 - prior) / prior))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        return supervise(
            draw, model, optimizer, data, steps=220, names=("loss", "val_loss", "val_acc")
        )

    course, notes, twin = pair(make, recorder, draw)
    with torch.no_grad():
        out = course.model[:6](course.batch(0)[0])
    dead = float((out.amax((0, 2, 3)) <= 0).float().mean())
    borne = dead >= 0.7 and lost(notes, twin) > 0.5
    return judge_fault(
        borne,
        notes,
        twin,
        "activation_collapse",
        reason=f"a bias for rare classes in all layers: {dead:.0%} of the units are out",
        tolerated=(
            "vanishing_gradients",
            "stagnant_layers",
            "plateau",
            "mostly_frozen",
            "update_ratio",
        ),
        culprits=("act1", "act2", "conv1", "conv2"),
    )


class _Siamese(nn.Module):
    """Encoder, projector and predictor; `stop` is the stop-gradient."""

    def __init__(self, width: int, stop: bool):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.projector = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 16)
        )
        self.predictor = nn.Sequential(
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 16)
        )
        self.stop = stop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Projection and prediction."""
        z = self.projector(self.encoder(x))
        return (z.detach() if self.stop else z), self.predictor(z)


def _spread(z: Tensor) -> float:
    return float(functional.normalize(z, dim=1).std(0).mean() * math.sqrt(z.shape[1]))


def _no_stop_gradient(recorder: Recorder, draw: Draw) -> Truth:
    """Chen and He 2021: a siamese network without stop-gradient maps everything to one point."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Siamese(draw.integer(40, 64), not faulty)
        rate = draw.uniform(0.04, 0.08)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
        take, noise = sample(draw, len(data.x), 64), torch.Generator().manual_seed(draw.seed)

        def blur(x: Tensor) -> Tensor:
            return x + 0.25 * torch.randn(x.shape, generator=noise)

        def lose(net: nn.Module, x: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            (z1, p1), (z2, p2) = net(blur(x)), net(blur(x))
            likeness = functional.cosine_similarity(p1, z2) + functional.cosine_similarity(p2, z1)
            return -0.5 * likeness.mean(), {"train/feature_std": _spread(z1.detach())}

        return Course(
            model,
            optimizer,
            lambda step: data.x[take(step)],
            lose,
            lambda net: -_spread(net(data.proof_x)[0]),
            steps=360,
            key="train/similarity_loss",
        )

    _, notes, twin = pair(make, recorder, draw)
    borne = -notes.end < 0.25 * -twin.end and -notes.end < 0.1
    return judge_fault(
        borne,
        notes,
        twin,
        "activation_collapse",
        reason=f"no stop-gradient: spread {-notes.end:.4f}, of the twin {-twin.end:.3f}",
        tolerated=("vanishing_gradients", "plateau", "stagnant_layers", "update_ratio"),
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "exploding_gradients/bootstrapped_beyond_data": _bootstrapped_beyond_data,
        "vanishing_gradients/tiny_start": _tiny_start,
        "stagnant_layers/no_straight_through": _no_straight_through,
        "activation_collapse/prior_bias_everywhere": _prior_bias_everywhere,
        "activation_collapse/no_stop_gradient": _no_stop_gradient,
    }.items()
)
