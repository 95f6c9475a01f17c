"""Healthy trainings of models that look broken from outside: frozen, sparse, silent parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.eighth_course import Course, fit, judge_sound
from benchmarks.diagnosis.families.eighth_tasks import (
    SmallResNet,
    cut,
    make_images,
    make_prices,
    sample,
    supervise,
)
from benchmarks.diagnosis.networks import Classifier
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _pretrain(draw: Draw, body: nn.Module, width: int, classes: int) -> None:
    data = make_images(Draw(draw.name, draw.seed + 100), classes=classes)
    model = Classifier(body, width, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    course = supervise(draw, model, optimizer, data)
    for step in range(150):
        optimizer.zero_grad()
        course.lose(model, course.batch(step), step)[0].backward()
        optimizer.step()


def _make_body() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.ReLU(),
    )


def _frozen_body(recorder: Recorder, draw: Draw) -> Truth:
    """Fine-tuning of a head: the body has no gradients on purpose, and the optimizer lacks it."""
    body = _make_body()
    _pretrain(draw, body, 32, 8)
    body.requires_grad_(False)
    model = Classifier(body, 32, 4)
    data = make_images(draw, classes=4, count=800)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    course = supervise(draw, model, optimizer, data, steps=240, train_accuracy="train/accuracy")
    course.config["frozen"] = "backbone"
    return judge_sound(fit(course, recorder), 0.3, "only neck and head are trained")


def _thawed_by_turns(recorder: Recorder, draw: Draw) -> Truth:
    """Howard and Ruder 2018: layers are unfrozen from the head down, each at a smaller rate."""
    body = _make_body()
    _pretrain(draw, body, 32, 8)
    model = Classifier(body, 32, 6)
    data = make_images(draw, classes=6, count=1000, noise=0.8)
    body.requires_grad_(False)
    optimizer = torch.optim.Adam(
        [
            {"params": [*model.neck.parameters(), *model.head.parameters()], "lr": 2e-3},
            {"params": list(body[7].parameters()), "lr": 1e-3},
            {"params": [*body[0].parameters(), *body[3].parameters()], "lr": 3e-4},
        ]
    )
    course = supervise(draw, model, optimizer, data, steps=360, log_every=5)

    def before(step: int) -> None:
        if step == 100:
            body[7].requires_grad_(True)
        if step == 200:
            body.requires_grad_(True)

    course.before, course.config["unfreeze_at"] = before, [100, 200]
    return judge_sound(fit(course, recorder), 0.35, "layers thawed at steps 100 and 200")


def _zero_branches(recorder: Recorder, draw: Draw) -> Truth:
    """Goyal et al. 2017: the last scale of each branch starts at 0."""
    data = make_images(draw, classes=8)
    model = SmallResNet(10, 2, 8, zero_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    course = supervise(draw, model, optimizer, data, steps=240, size=48)
    course.before = lambda step: optimizer.param_groups[0].update(
        lr=0.05 * min(1.0, step / 40 + 0.05)
    )
    return judge_sound(fit(course, recorder), 0.15, "residual branches begin as nothing")


class _TopK(nn.Module):
    """An autoencoder of which a tenth of the units speak at once."""

    def __init__(self, units: int, spoken: int):
        super().__init__()
        self.encoder = nn.Linear(64, units)
        self.act = nn.ReLU()
        self.decoder = nn.Linear(units, 64)
        self.spoken = spoken

    def forward(self, x: Tensor) -> Tensor:
        """The input again."""
        code = self.act(self.encoder(x))
        least = code.topk(self.spoken, dim=1).values[:, -1:]
        return self.decoder(code * (code >= least))


def _few_units_speak(recorder: Recorder, draw: Draw) -> Truth:
    """Makhzani and Frey 2014: k-sparse codes, 12 of 160 units for an image."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    pixels = (data.x, data.x, data.val_x, data.val_x, data.proof_x, data.proof_x)
    model = _TopK(160, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    course = supervise(
        draw,
        model,
        optimizer,
        datasets.Data(*pixels, classes=0),
        size=64,
        steps=450,
        names=("train/recon_loss", "val/recon_loss", ""),
    )
    return judge_sound(fit(course, recorder), 0.03, "twelve of 160 units are on")


class _Tastes(nn.Module):
    """Tables of users and of things; the score is a product."""

    def __init__(self, users: int, things: int):
        super().__init__()
        self.users = nn.Embedding(users, 8, sparse=True)
        self.things = nn.Embedding(things, 8, sparse=True)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.things.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of pairs."""
        return (self.users(x[:, 0]) * self.things(x[:, 1])).sum(1, keepdim=True)


def _tables_mostly_still(recorder: Recorder, draw: Draw) -> Truth:
    """A recommender by SparseAdam: a step touches a few rows, some are never seen."""
    rng = draw.stream("tastes")
    one, two = rng.normal(size=(400, 3)), rng.normal(size=(900, 3))
    popular = rng.zipf(1.3, 60_000) % 900
    pairs = np.stack([rng.integers(0, 300, 60_000), popular], 1)
    score = (one[pairs[:, 0]] * two[pairs[:, 1]]).sum(1) + 0.2 * rng.normal(size=60_000)
    data = cut(pairs, score[:, None].astype(np.float32), 0)
    model = _Tastes(400, 900)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    course = supervise(
        draw, model, optimizer, data, size=512, steps=400, names=("train/mse", "val/mse", "")
    )
    notes = fit(course, recorder)
    return judge_sound(notes, 0.45 * notes.begin, "rows of the tables that nobody asks for")


class _Experts(nn.Module):
    """Four experts, of which a gate takes one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        shares = self.gate(x).softmax(1)
        chosen = shares.argmax(1)
        made = torch.zeros(len(x), 1)
        for place, expert in enumerate(self.experts):
            mine = chosen == place
            if mine.any():
                made[mine] = expert(x[mine]) * (0.5 + shares[mine, place : place + 1])
        return made


def _one_expert_each(recorder: Recorder, draw: Draw) -> Truth:
    """Fedus et al. 2022: a switch layer; an expert that was not asked has no gradient in a step."""
    data = make_prices(draw)
    model = _Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    course = supervise(
        draw, model, optimizer, data, size=24, steps=500, names=("loss", "val_loss", "")
    )
    notes = fit(course, recorder)
    return judge_sound(notes, 0.4 * notes.begin, "each sample goes to one of four experts")


class _Tasks(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.digit = nn.Linear(32, 10)
        self.ink = nn.Linear(32, 1)


def _rare_task(recorder: Recorder, draw: Draw) -> Truth:
    """Two tasks by turns, one of which comes at every fifth step: its head rests between."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1).flatten()
    model = _Tasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    take = sample(draw, len(data.x), 32)

    def parts(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = net.trunk(x)
        ink = functional.mse_loss(net.ink(found)[:, 0], x.mean(1) * 4)
        return functional.cross_entropy(net.digit(found), y), ink

    def lose(net: nn.Module, ids: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
        digit, ink = parts(net, data.x[ids], data.y[ids])
        loss = ink if step % 5 == 4 else digit
        return loss, {"train/ink_loss" if step % 5 == 4 else "train/digit_loss": loss.item()}

    def check(_step: int) -> dict[str, float]:
        with torch.no_grad():
            digit, ink = parts(model, data.val_x, data.val_y)
        return {"val/digit_loss": float(digit), "val/ink_loss": float(ink)}

    course = Course(
        model,
        optimizer,
        take,
        lose,
        lambda net: float(sum(parts(net, data.proof_x, data.proof_y))),
        check,
        steps=600,
        key="",
    )
    notes = fit(course, recorder)
    return judge_sound(notes, 0.4 * notes.begin, "one head learns at every fifth step only")


def _long_wait(recorder: Recorder, draw: Draw) -> Truth:
    """The adding problem: a recurrent network says the mean for long, and then understands."""
    data = sequences.load_adding(draw.stream("data"), length=16, count=3000)

    class Adder(nn.Module):
        """A gated network and a readout."""

        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 32, batch_first=True)
            self.out = nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            """The sum."""
            return self.out(self.gru(x)[0][:, -1])

    model = Adder()
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-3)
    course = supervise(
        draw,
        model,
        optimizer,
        data,
        steps=600,
        size=48,
        clip=1.0,
        names=("train/mse", "val/mse", ""),
    )
    return judge_sound(
        fit(course, recorder), 0.03, "long at the variance of the target, then solved"
    )


def _own_sigmoid(recorder: Recorder, draw: Draw) -> Truth:
    """A sigmoid as the last layer, with the loss that wants probabilities, as of old."""
    rng = draw.stream("defects")
    x = rng.normal(size=(1600, 12))
    bad = (np.abs(x[:, 0]) + x[:, 1] * x[:, 2] > 1.0) * 1.0
    model = nn.Sequential(
        nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1), nn.Sigmoid()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    course = supervise(
        draw,
        model,
        optimizer,
        cut(x, bad[:, None], 0),
        loss=functional.binary_cross_entropy,
        steps=320,
        names=("train/bce", "val/bce", ""),
    )
    return judge_sound(fit(course, recorder), 0.35, "one sigmoid, and a loss of probabilities")


SCENARIOS = tuple(
    Scenario(name=f"eighth/healthy/{name}", kind="healthy", train=train)
    for name, train in {
        "frozen_body": _frozen_body,
        "thawed_by_turns": _thawed_by_turns,
        "zero_branches": _zero_branches,
        "few_units_speak": _few_units_speak,
        "tables_mostly_still": _tables_mostly_still,
        "one_expert_each": _one_expert_each,
        "rare_task": _rare_task,
        "long_wait": _long_wait,
        "own_sigmoid": _own_sigmoid,
    }.items()
)
