"""Sound trainings of the sixth family that look odd: recipes, aims and machines."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import Batch, Plan, deal, sound
from benchmarks.diagnosis.families.seventh_tasks import classify, learn, regress
from benchmarks.diagnosis.families.sixth_faults_machines import train_with_memory
from benchmarks.diagnosis.families.sixth_ranks import train_ranks
from benchmarks.diagnosis.families.sixth_tasks import digits, images
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

_sound = partial(sound, mild=math.inf)


def _pick(data: Data, low: int, high: int) -> Data:
    """Rows of the classes from low to below high, whose labels begin at 0."""
    parts = {}
    for name in ("", "val_", "proof_"):
        y = getattr(data, f"{name}y")
        kept = (y >= low) & (y < high)
        parts[f"{name}x"], parts[f"{name}y"] = getattr(data, f"{name}x")[kept], y[kept] - low
    return Data(**parts, classes=high - low)


def _build_tuned(width: int, state: dict[str, Tensor] | None, *, low_rank: int = 0) -> nn.Module:
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
    if state is not None:
        body.load_state_dict(state)
    layers = OrderedDict(body=body, act=nn.ReLU(), head=nn.Linear(width, 5))
    if low_rank:
        body.requires_grad_(False)
        layers["adapter"] = nn.Sequential(
            nn.Linear(width, low_rank, bias=False), nn.Linear(low_rank, width, bias=False)
        )
        nn.init.zeros_(layers["adapter"][1].weight)
        return _Adapted(layers)
    return nn.Sequential(layers)


class _Adapted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return self.head(self.act(features + self.adapter(features)))


def _pretrain(data: Data, width: int, rng: np.random.Generator) -> dict[str, Tensor]:
    """The body's weights after it was trained on classes 0 to 4."""
    data = _pick(data, 0, 5)
    model = _build_tuned(width, None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        rows = torch.from_numpy(rng.integers(0, len(data.x), 32))
        optimizer.zero_grad()
        classify(model, data.x[rows], data.y[rows]).backward()
        optimizer.step()
    return model.get_submodule("body").state_dict()


def _gentle_tuning(draw: Draw) -> Plan:
    """The whole of a trained network goes on with new data at a small rate."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    state = _pretrain(data, 80, draw.stream("pretraining"))
    rate = draw.uniform(1.5e-4, 2.5e-4)
    return learn(
        draw,
        _pick(data, 5, 10),
        lambda: _build_tuned(80, state),
        lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
        steps=260,
    )


def _rate_to_zero(draw: Draw) -> Plan:
    """Linear to zero: the last updates are nearly none, as planned."""
    return digits(
        draw,
        steps=300,
        log_rate=True,
        rate=lambda step: min(1.0, (step + 1) / 20) * (1 - step / 300),
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=4e-3),
    )


def _always_clipped(draw: Draw) -> Plan:
    """A recurrent network whose gradients are clipped at almost every step, under Adam."""
    data = sequences.load_text(draw.stream("data"), count=3000, length=20)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(data.classes, 24)
            self.rnn = nn.LSTM(24, 40, batch_first=True)
            self.head = nn.Linear(40, data.classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(x))[0])

    return learn(
        draw,
        data,
        Reader,
        lambda model: torch.optim.Adam(model.parameters(), lr=6e-3),
        clip=0.1,
        steps=220,
    )


def _much_dropout(draw: Draw) -> Plan:
    """Half of everything is dropped: the training loss stays far above that of validations."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(),
                first=nn.Linear(64, 96),
                norm=nn.BatchNorm1d(96),
                act=nn.ReLU(),
                drop=nn.Dropout(0.6),
                head=nn.Linear(96, 10),
            )
        )

    return digits(draw, data=data, build=build, steps=280, val_every=10)


def _wide_gap(draw: Draw) -> Plan:
    """The training loss is soon a fraction of the other, which still falls."""
    data = datasets.load_digits(draw.stream("data"), noise=0.25).shrink(500)
    return digits(
        draw,
        data=data,
        steps=200,
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.1),
    )


def _strong_decay(draw: Draw) -> Plan:
    """AdamW with a decay of 0.3 at a small rate, as large networks have it."""
    return images(
        draw,
        steps=280,
        optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3),
    )


def _curriculum(draw: Draw) -> Plan:
    """Harder rows come in two stages: the training loss rises at each, and falls again."""
    data = datasets.load_digits(draw.stream("data"))
    noise, stage = draw.stream("noise"), draw.choice(90, 110)

    def disturb(x: Tensor, by: float) -> Tensor:
        return x + by * torch.from_numpy(noise.normal(size=x.shape)).float()

    data = replace(data, val_x=disturb(data.val_x, 0.4), proof_x=disturb(data.proof_x, 0.4))
    made = digits(draw, data=data, steps=3 * stage)
    plain = made.batch

    def batch(step: int) -> Batch:
        x, y, rows = plain(step)
        return disturb(x, 0.2 * (step // stage)), y, rows

    made.batch = batch
    return made


def _mostly_black(draw: Draw) -> Plan:
    """Digits in the middle of a black frame: three quarters of the inputs never change."""
    data = datasets.load_digits(draw.stream("data"))
    parts = {
        name: functional.pad(getattr(data, name), (4, 4, 4, 4))
        for name in ("x", "val_x", "proof_x")
    }

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(), first=nn.Linear(256, 64), act=nn.ReLU(), head=nn.Linear(64, 10)
            )
        )

    return digits(draw, data=replace(data, **parts), build=build, steps=220)


def _soon_done(draw: Draw) -> Plan:
    """An easy task with much noise in its targets: soon there is nothing left to learn."""
    rng = draw.stream("data")
    x = torch.from_numpy(rng.normal(size=(4000, 8))).float()
    way = torch.from_numpy(rng.normal(size=(8, 1))).float()
    y = x @ way + 1.2 * torch.from_numpy(rng.normal(size=(4000, 1))).float()
    data = Data(x[:3000], y[:3000], x[3000:3500], y[3000:3500], x[3500:], y[3500:], classes=0)
    return learn(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        lose=regress,
        size=64,
        steps=300,
    )


def _contrast(draw: Draw) -> Plan:
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

    return Plan(
        build=lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16)),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        batch=deal(data, 96, draw.stream("order")),
        loss=lambda model, batch, _step: (compare(model, batch[0]), {}),
        val=lambda model: {"val/loss": float(compare(model, data.val_x[:96]))},
        proof=proof,
        steps=280,
        epoch_steps=11,
    )


def _scaled_steps(draw: Draw) -> Plan:
    """A scaler begins too high: the first steps overflow and are skipped, as they should."""
    made = digits(draw, steps=260)
    scale = {"now": 2.0**16, "skipped": 0}

    def turn(optimizer: torch.optim.Optimizer, _step: int) -> None:
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


def _sent_now_and_then(recorder: Recorder, draw: Draw) -> Truth:
    """Local SGD: two ranks whose weights are averaged every tenth step, and differ between."""
    told = train_ranks(recorder, draw, "local")
    reason = f"proof {told['first']:.3g} -> {told['end']:.3g}, ranks {told['apart']:.3g} apart"
    if told["end"] > 0.5 * told["first"]:
        return doubt(f"{reason}: did not learn")
    return Truth(kind="healthy", phases_forbidden=("divergence",), reason=reason)


def _named(name: str, train: object) -> Scenario:
    return Scenario(name=f"sixth/healthy/{name}", kind="healthy", train=train)


SCENARIOS = (
    _sound("sixth/gentle_tuning", _gentle_tuning, gain=0.2),
    _sound("sixth/rate_to_zero", _rate_to_zero),
    _sound("sixth/always_clipped", _always_clipped),
    _sound("sixth/much_dropout", _much_dropout),
    _sound("sixth/wide_gap", _wide_gap),
    _sound("sixth/strong_decay", _strong_decay),
    _sound("sixth/curriculum", _curriculum),
    _sound("sixth/mostly_black", _mostly_black),
    _sound("sixth/soon_done", _soon_done),
    _sound("sixth/contrast", _contrast),
    _sound("sixth/scaled_steps", _scaled_steps),
    _named("cache_fills", _quiet_machine),
    _named("local_steps", _sent_now_and_then),
)
