"""Healthy trainings of other kinds: rewards, games, densities, rare words, whole-batch methods."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _take_whole_batch(recorder: Recorder, draw: Draw) -> Truth:
    """L-BFGS on all data: few steps, each of many forwards, steps far larger than Adam's."""
    rng = draw.stream("data")
    data = datasets.load_blobs(rng, count=600, spread=1.5)
    model = make_mlp([20, draw.integer(8, 16), data.classes], activation="tanh")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=draw.uniform(0.2, 0.5), max_iter=4)
    recorder.start(model, optimizer, config={"model": "whole batch"})
    steps, decay = 60, 3e-3
    proof: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.x), data.y)
        loss = loss + decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    for step in range(steps):
        with recorder.step(step):
            loss = float(optimizer.step(closure).detach())
            recorder.log({"train/loss": loss})
        with torch.no_grad():
            proof.append(float(functional.cross_entropy(model(data.proof_x), data.proof_y)))
            held_out = float(functional.cross_entropy(model(data.val_x), data.val_y))
        if step % 3 == 2:
            recorder.validate(step, {"val/loss": held_out})
    told = f"proof loss {proof[0]:.3g} -> best {min(proof):.3g} -> {proof[-1]:.3g}"
    if not proof[-1] < 0.6 * proof[0] or proof[-1] > 1.25 * min(proof):
        return doubt(told)
    tolerated = ("overfitting_onset",) if proof[-1] > 1.08 * min(proof) else ()
    return Truth(kind="healthy", tolerated=tolerated, phases_forbidden=("divergence",), reason=told)


def _healthy(name: str, train_one: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/healthy/{name}", kind="healthy", train=train_one)


SCENARIOS = (_healthy("whole_batch", _take_whole_batch),)
