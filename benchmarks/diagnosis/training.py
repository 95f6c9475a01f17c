"""One training loop for the first family, and what it notes for the oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.measuring import (
    AnyRecorder,
    compare_weights,
    keep_weights,
    measure_gradient,
    note_updates,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Problem:
    """A training that is set up and not begun; a scenario changes what it wants of it.

    Attributes:
        model, optimizer, data, loss: What is trained on what.
        order: Draws the batches.
        clip: Norm that gradients are clipped to, or None.
        rate: Factor of the learning rate at a step.
        change_batch: Given step, inputs and targets, returns others.
        change_loss: Given step and loss, returns what is minimised and logged.
        before, adapt, after: Called with the step: before it, between backward
            and the optimizer, after it.
        accuracy: Whether accuracies are logged.
        loss_key, val_key: Keys of metrics.
        start: Options for `Recorder.start`.
        accumulate: Batches whose gradients are added up for one step.
        scaler: A GradScaler, or None.
        zero_all: Whether the model's gradients are zeroed, not only the optimizer's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    loss: LossFunction
    order: np.random.Generator
    batch_size: int = 32
    steps: int = 240
    val_every: int = 20
    clip: float | None = None
    rate: Callable[[int], float] | None = None
    change_batch: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    change_loss: Callable[[int, Tensor], Tensor] | None = None
    before: Callable[[int], None] | None = None
    adapt: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    accumulate: int = 1
    scaler: torch.amp.GradScaler | None = None
    zero_all: bool = True
    accuracy: bool = False
    loss_key: str = "train/loss"
    val_key: str = "val"
    log_rate: bool = False
    start: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """What was true of a training, none of it through the SDK.

    Attributes:
        losses: Of each step's batch.
        gradients: Norm of all gradients of each step before clipping, in float64.
        looks: Steps after which the rest was noted.
        fixed: Loss on a fixed part of the training data at each look, in evaluation mode.
        proof, accuracy: Loss and accuracy on the oracle's own data at each look.
        ratios: Of each parameter at each look, the norm of the step's update
            over the norm of the value before it, in float64.
        layer_gradients: Of each parameter at each look, the root mean square gradient.
        first, last: Parameters before and after the training.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    fixed: list[float] = field(default_factory=list)
    proof: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    layer_gradients: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    def near(self, values: list[float], step: int) -> float:
        """The look of these values that was nearest before a step."""
        return values[max(0, int(np.searchsorted(self.looks, step, side="right")) - 1)]

    def after(self, values: list[float], step: int) -> list[float]:
        """The looks of these values from a step on."""
        return values[int(np.searchsorted(self.looks, step)) :]

    def moved(self, name: str) -> float:
        """How far a parameter came, relative to where it was."""
        return compare_weights(self.first, self.last, name)


def train_twice(
    make: Callable[[Draw, bool], Problem], recorder: Recorder, draw: Draw
) -> tuple[Problem, Trace, Trace]:
    """Train with the fault, recorded, and a twin without it: same seed, data and batches."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> tuple[Problem, Trace]:
        problem = make(draw.again(), faulty)
        return problem, train(problem, recorder, draw)

    (problem, trace), (_, twin) = train_both(train_one, recorder, draw)
    return problem, trace, twin


def train(problem: Problem, recorder: AnyRecorder, draw: Draw) -> Trace:
    """The whole training; leaves the model trained and returns what was noted."""
    model, optimizer, data = problem.model, problem.optimizer, problem.data
    config = {
        "model": type(model).__name__,
        "optimizer": type(optimizer).__name__,
        "batch_size": problem.batch_size,
        "lr": optimizer.param_groups[0]["lr"],
        "torch_seed": draw.torch_seed,
    }
    recorder.start(model, optimizer, config=config, **problem.start)
    trace = Trace(first=keep_weights(model))
    base_rates = [group["lr"] for group in optimizer.param_groups]
    look_every = max(2, problem.steps // 40)
    per_epoch = max(1, len(data.x) // problem.batch_size)
    shuffled = torch.empty(0, dtype=torch.long)
    for step in range(problem.steps):
        place = step % per_epoch
        if place == 0:
            shuffled = torch.from_numpy(problem.order.permutation(len(data.x)))
        chosen = shuffled[place * problem.batch_size : (place + 1) * problem.batch_size]
        if problem.rate is not None:
            for group, base in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = base * problem.rate(step)
        if problem.before is not None:
            problem.before(step)
        looks = step % look_every == 0 or step == problem.steps - 1
        earlier = keep_weights(model) if looks else {}
        with recorder.step(step, epoch=step // per_epoch):
            loss, hits = _take_step(problem, trace, step, data.x[chosen], data.y[chosen])
            logged = {problem.loss_key: loss}
            if problem.accuracy and hits is not None:
                logged["train/accuracy"] = hits
            if problem.log_rate:
                logged["optimizer/lr"] = optimizer.param_groups[0]["lr"]
            recorder.log(logged)
        if problem.after is not None:
            problem.after(step)
        if looks:
            _look(problem, trace, step, earlier)
        if (step + 1) % problem.val_every == 0 or step == problem.steps - 1:
            loss, hits = measure(problem, data.val_x, data.val_y, step)
            values = {f"{problem.val_key}/loss": loss}
            if problem.accuracy and hits is not None:
                values[f"{problem.val_key}/accuracy"] = hits
            recorder.validate(step, values)
    trace.last = keep_weights(model)
    return trace


def measure(
    problem: Problem, x: Tensor, y: Tensor, step: int | None = None
) -> tuple[float, float | None]:
    """Loss and, of classes, accuracy in evaluation mode; the model is left training.

    Args:
        problem: Whose model and loss.
        x, y: On what.
        step: The loss is changed as at this step; None for the plain loss.
    """
    problem.model.eval()
    with torch.no_grad():
        output = problem.model(x)
        loss = problem.loss(output, y)
        if step is not None and problem.change_loss is not None:
            loss = problem.change_loss(step, loss)
    problem.model.train()
    return float(loss), _count_hits(output, y)


def _take_step(
    problem: Problem, trace: Trace, step: int, x: Tensor, y: Tensor
) -> tuple[float, float | None]:
    if problem.change_batch is not None:
        x, y = problem.change_batch(step, x, y)
    if step % problem.accumulate == 0:
        (problem.model if problem.zero_all else problem.optimizer).zero_grad(set_to_none=True)
    output = problem.model(x)
    loss = problem.loss(output, y)
    if problem.change_loss is not None:
        loss = problem.change_loss(step, loss)
    scaler = problem.scaler
    (loss / problem.accumulate if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(problem.optimizer)
    trace.gradients.append(measure_gradient(problem.model))
    if problem.clip is not None:
        nn.utils.clip_grad_norm_(problem.model.parameters(), problem.clip)
    if problem.adapt is not None:
        problem.adapt(step)
    if scaler is not None:
        scaler.step(problem.optimizer)
        scaler.update()
    elif (step + 1) % problem.accumulate == 0:
        problem.optimizer.step()
    trace.losses.append(float(loss.detach()))
    return trace.losses[-1], _count_hits(output.detach(), y)


def _look(problem: Problem, trace: Trace, step: int, earlier: dict[str, Tensor]) -> None:
    data = problem.data
    trace.looks.append(step)
    trace.fixed.append(measure(problem, data.x[:256], data.y[:256])[0])
    loss, hits = measure(problem, data.proof_x, data.proof_y)
    trace.proof.append(loss)
    trace.accuracy.append(math.nan if hits is None else hits)
    note_updates(problem.model, earlier, trace.ratios, trace.layer_gradients)


def _count_hits(output: Tensor, y: Tensor) -> float | None:
    if y.dtype != torch.long or output.shape[:-1] != y.shape:
        return None
    return float((output.argmax(-1) == y).double().mean())
