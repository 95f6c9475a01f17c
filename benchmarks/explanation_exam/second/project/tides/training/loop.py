"""Trains."""

import os

import numpy as np
import torch

import quark

from ..data import Scaler, Table
from ..model import Network
from .averaging import Averaged
from .losses import Bent, explained

FOLDER = "tables"


class Trainer:
    def __init__(self, settings, columns, steps):
        self.network = Network(columns, settings.shape)
        self.averaged = Averaged(self.network)
        self.loss = Bent(settings.delta)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=settings.optimizer.rate,
            weight_decay=settings.optimizer.decay,
        )
        self.slower = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, steps)

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = self.loss(self.network(inputs), targets)
        loss.backward()
        self.limit()
        self.optimizer.step()
        self.slower.step()
        self.averaged.update(self.network)
        return float(loss)

    def limit(self, longest=4.0):
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), longest)

    @torch.no_grad()
    def evaluate(self, inputs, targets):
        self.averaged.network.eval()
        return explained(self.averaged.network(inputs), targets)


def prepare(settings):
    # Only here: it is slow to load.
    from seastate.filters import settle

    inputs, targets = Table(FOLDER, "journeys").read(settings.clean)
    held_inputs, held_targets = Table(FOLDER, "held").read(False)
    scaler, goal = Scaler().fit(inputs), Scaler().fit(targets)
    kind = torch.get_default_dtype()
    parts = (
        settle(scaler.apply(inputs)),
        goal.apply(targets),
        settle(scaler.apply(held_inputs)),
        goal.apply(held_targets),
    )
    return [torch.tensor(part, dtype=kind) for part in parts]


def iterate(inputs, targets, settings):
    rng = np.random.default_rng(settings.seed)
    batch = settings.optimizer.batch
    for _ in range(settings.optimizer.epochs):
        for start in range(0, len(targets) - batch + 1, batch):
            rows = slice(start, start + batch)
            noise = torch.tensor(0.1 * rng.normal(size=inputs[rows].shape), dtype=inputs.dtype)
            yield inputs[rows] + noise, targets[rows]


def run(settings):
    if os.environ.get("TIDES_COARSE"):
        torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(settings.seed)
    session = quark.start_run(project="tides", config=settings, objective="val/r2", mode="max")
    with session, quark.MetricsLogger(session) as metrics:
        session.fingerprint_data("tables", FOLDER)
        inputs, targets, held_inputs, held_targets = prepare(settings)
        batch, epochs = settings.optimizer.batch, settings.optimizer.epochs
        steps = epochs * (len(targets) // batch)
        trainer = Trainer(settings, inputs.shape[1], steps)
        step = 0
        for inputs_now, targets_now in iterate(inputs, targets, settings):
            loss = trainer.step(inputs_now, targets_now)
            if step % settings.report_every == 0:
                metrics.log("train/loss", loss, step=step)
                metrics.log("val/r2", trainer.evaluate(held_inputs, held_targets), step=step)
            step += 1
        metrics.log("val/r2", trainer.evaluate(held_inputs, held_targets), step=step)
