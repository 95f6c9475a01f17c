"""Training data learned by heart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import doubt, smooth
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train


def _learn_wrong_labels(draw: Draw) -> Problem:
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.1)
    data = data.shrink(draw.integer(150, 400)).mislabel(rng, 0.15 + 0.25 * draw.severity)
    width = draw.integer(96, 160)
    model = make_mlp([64, width, width, 10], activation=draw.choice("relu", "tanh"))
    return _finish(draw, model, data, zoo.cross_entropy, 1.5)


def _learn_noise_columns(draw: Draw) -> Problem:
    """A table with few rows, and many columns that say nothing."""
    rng = draw.stream("data")
    name = draw.choice("breast_cancer", "wine")
    data = datasets.load_table(name, rng)
    data = data.shrink(draw.integer(40, 70))
    columns = 40 + int(120 * draw.severity)
    parts = {
        key: torch.cat([part, torch.tensor(rng.normal(size=(len(part), columns))).float()], 1)
        for key in ("x", "val_x", "proof_x")
        for part in (getattr(data, key),)
    }
    data = replace(data, **parts).mislabel(rng, 0.35)
    model = make_mlp([data.features, 96, 96, data.classes], activation="relu")
    return _finish(draw, model, data, zoo.cross_entropy, 0.4)


def _finish(draw: Draw, model: torch.nn.Module, data: Data, loss: object, factor: float) -> Problem:
    return Problem(
        model,
        zoo.make_optimizer(draw, model.parameters(), "adam", factor=factor),
        data,
        loss,
        draw.stream("order"),
        batch_size=draw.choice(16, 24, 32),
        steps=10 * draw.integer(36, 50),
        val_every=draw.choice(10, 12, 15),
        accuracy=data.classes > 0 and draw.choice(True, False),
    )


def _judge(make: Callable[[Draw], Problem], recorder: Recorder, draw: Draw) -> Truth:
    problem = make(draw.again())
    trace = train(problem, recorder, draw)
    proof, fixed = smooth(trace.proof, 5), smooth(trace.fixed, 5)
    best = int(proof.argmin())
    told = (
        f"proof loss {proof[0]:.4g} -> {proof[best]:.4g} at step {trace.looks[best]} "
        f"-> {proof[-1]:.4g}, training {fixed[best]:.4g} -> {fixed[-1]:.4g}"
    )
    lasted = len(proof) - best
    if proof[-1] < 1.2 * proof[best] or fixed[-1] > 0.8 * fixed[best] or lasted < 8 or best < 3:
        return doubt(f"{told}: not learned by heart")
    # Where the loss on new data is clearly past its best, and stays so.
    beyond = np.flatnonzero(proof[best:] > 1.02 * proof[best])
    return Truth(
        kind="fault",
        expected=("overfitting_onset",),
        culprits=("val/loss",),
        onset_step=trace.looks[best + int(beyond[0])],
        phases_expected=("overfitting_onset",) if lasted >= 14 else (),
        phases_forbidden=("divergence",),
        reason=told,
    )


def _scenario(name: str, make: Callable[[Draw], Problem]) -> Scenario:
    return Scenario(name=f"first/overfit/{name}", kind="fault", train=partial(_judge, make))


SCENARIOS = (
    _scenario("wrong_labels", _learn_wrong_labels),
    _scenario("noise_columns", _learn_noise_columns),
)
