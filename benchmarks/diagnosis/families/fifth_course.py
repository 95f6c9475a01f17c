"""The loop of the fifth family; it leaves the recorded model alone when the oracle looks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.measuring import (
    WRECK,
    AnyRecorder,
    ask_shadow,
    compare_weights,
    doubt,
    keep_weights,
    measure_gradient,
    note_updates,
    smooth,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


@dataclass(slots=True)
class Trace:
    """What was true of a training, none of it through the SDK.

    Attributes:
        losses: Of each step's batch.
        gradients: Norm of all gradients of each step before clipping, in float64.
        looks: Steps after which the rest was noted.
        proof: Loss on the oracle's own data at each look.
        ratios: Of each parameter at each look, the norm of the step's update
            over the norm of the value before it, in float64.
        layer_gradients: Of each parameter at each look, the root mean square gradient.
        first, last: Parameters before and after the training.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    proof: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    layer_gradients: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    def moved(self, name: str) -> float:
        """How far a parameter came, relative to where it was."""
        return compare_weights(self.first, self.last, name)


def is_worse(trace: Trace, twin: Trace, share: float = 0.2) -> bool:
    """Whether the faulty training gave away this share of what its twin gained."""
    end, other = smooth(trace.proof)[-1], smooth(twin.proof)[-1]
    return not end < other + share * (twin.proof[0] - other)


def excess(trace: Trace) -> float:
    """By what share of its best the loss on new data ends above it; 0 for a trifle."""
    proof = smooth(trace.proof, 5)
    if not np.isfinite(proof).all():
        return math.inf
    best, end = float(proof.min()), float(proof[-1])
    gained = float(proof[0]) - best
    if end - best <= 0.01 * gained:
        return 0.0
    return (end - best) / max(abs(best), 0.01 * gained, 1e-12)


def soften(truth: Truth, trace: Trace) -> Truth:
    """Overfitting may be found where the oracle, too, sees some of it."""
    if not 0.08 < excess(trace) < math.inf or "overfitting_onset" in truth.expected:
        return truth
    return replace(
        truth,
        tolerated=(*truth.tolerated, "overfitting_onset"),
        phases_forbidden=tuple(p for p in truth.phases_forbidden if p != "overfitting_onset"),
    )


Make = Callable[[Draw, bool], "Plan"]
_SLACK = ("plateau", "overfitting_onset", "mislabelled_data", "loss_spike", "update_ratio")


class Batches:
    """Indexes of batches; every epoch in a new order, or never in one.

    Args:
        rng: Draws the orders.
        count: Of samples.
        size: Of a batch.
        shuffled: Whether there are orders.
    """

    def __init__(
        self, rng: np.random.Generator, count: int, size: int, *, shuffled: bool = True
    ) -> None:
        self._rng, self._count, self._size, self._shuffled = rng, count, size, shuffled
        self._order = np.arange(count)
        self.per_epoch = count // size

    def take(self, step: int) -> Tensor:
        """Of this step; steps are asked for in order."""
        place = step % self.per_epoch
        if place == 0 and self._shuffled:
            self._order = self._rng.permutation(self._count)
        return torch.from_numpy(self._order[place * self._size : (place + 1) * self._size])


@dataclass(slots=True)
class Plan:
    """A training as its user wrote it.

    Attributes:
        model, optimizer: What is trained with what.
        loss: Of the batch of a step.
        judge: The oracle's figure on data never trained on; lower is better.
        held_out: What the user logs of validation; empty for none.
        key: Of the training loss; None where it is not logged.
        per_epoch: Steps.
        by_epoch: Whether metrics are logged once an epoch, by their epoch alone.
        others: What else is logged with the loss.
        rate: Factor of the learning rate at a step.
        update: In place of zero_grad, backward, clipping and optimizer.step().
        before, after: Around a step, outside of what is recorded as one.
        evaluates: Whether model.eval() is called for validation.
        times: Step, data and compute time of a step in milliseconds.
        start: Options for `Recorder.start`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, int], Tensor]
    judge: Callable[[nn.Module], float]
    held_out: Callable[[nn.Module], dict[str, float]] | None = None
    steps: int = 240
    per_epoch: int = 24
    val_every: int = 20
    key: str | None = "train/loss"
    by_epoch: bool = False
    others: Callable[[], dict[str, float]] | None = None
    rate: Callable[[int], float] | None = None
    update: Callable[[int, Tensor], None] | None = None
    clip: float | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    evaluates: bool = True
    looks: int = 24
    times: Callable[[int], tuple[float, float, float]] | None = None
    start: dict[str, Any] = field(default_factory=dict)


def run_both(make: Make, recorder: Recorder, draw: Draw) -> tuple[Plan, Trace, Trace]:
    """Train with the fault, recorded, and a twin without it on the same draws."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> tuple[Plan, Trace]:
        plan = make(draw.again(), faulty)
        return plan, run(plan, recorder, draw)

    (plan, trace), (_, twin) = train_both(train_one, recorder, draw)
    return plan, trace, twin


def run(plan: Plan, recorder: AnyRecorder, draw: Draw) -> Trace:
    """The whole training; the oracle looks at a copy of the model, never at the model."""
    model, optimizer = plan.model, plan.optimizer
    shadow = copy.deepcopy(model)
    base = [group["lr"] for group in optimizer.param_groups]
    options = dict(plan.start)
    if plan.times is not None:
        options["timing"] = "manual"
    config = {"lr": base[0], "optimizer": type(optimizer).__name__, "torch_seed": draw.torch_seed}
    recorder.start(model, optimizer, config=config, **options)
    trace = Trace(first=keep_weights(model))
    look_every = max(1, plan.steps // plan.looks)
    gathered: list[float] = []
    model.train()
    for step in range(plan.steps):
        epoch = step // plan.per_epoch
        if plan.rate is not None:
            for group, rate in zip(optimizer.param_groups, base, strict=False):
                group["lr"] = rate * plan.rate(step)
        if plan.before is not None:
            plan.before(step)
        looks = step % look_every == 0 or step == plan.steps - 1
        if looks:
            _look(plan, shadow, trace, step)
        earlier = keep_weights(model) if looks else {}
        with recorder.step(step, epoch=epoch):
            value = _advance(plan, trace, step)
            gathered.append(value)
            others = plan.others() if plan.others is not None else {}
            if not plan.by_epoch:
                recorder.log({**({plan.key: value} if plan.key else {}), **others})
        if looks:
            note_updates(model, earlier, trace.ratios, trace.layer_gradients)
        if plan.times is not None:
            whole, data, compute = plan.times(step)
            recorder.time(step, step_ms=whole, data_ms=data, compute_ms=compute)
        if plan.after is not None:
            plan.after(step)
        ended = (step + 1) % plan.per_epoch == 0
        if plan.by_epoch and ended:
            mean = float(np.mean(gathered))
            recorder.log({**({plan.key: mean} if plan.key else {}), **others}, epoch=epoch)
            gathered.clear()
        if ended if plan.by_epoch else (step + 1) % plan.val_every == 0:
            _validate(plan, recorder, step, epoch)
    _look(plan, shadow, trace, plan.steps)
    trace.last = keep_weights(model)
    return trace


def _advance(plan: Plan, trace: Trace, step: int) -> float:
    if plan.update is None:
        plan.optimizer.zero_grad(set_to_none=True)
    loss = plan.loss(plan.model, step)
    if plan.update is not None:
        plan.update(step, loss)
    else:
        loss.backward()
        if plan.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(plan.model.parameters(), plan.clip))
            trace.gradients.append(norm)
        plan.optimizer.step()
    if plan.clip is None or plan.update is not None:
        trace.gradients.append(measure_gradient(plan.model))
    trace.losses.append(float(loss.detach()))
    return trace.losses[-1]


def _validate(plan: Plan, recorder: AnyRecorder, step: int, epoch: int) -> None:
    if plan.held_out is None:
        return
    if plan.evaluates:
        plan.model.eval()
    with torch.no_grad():
        values = plan.held_out(plan.model)
    plan.model.train()
    if plan.by_epoch:
        recorder.log(values, epoch=epoch)
    else:
        recorder.validate(step, values, epoch=epoch)


def _look(plan: Plan, shadow: nn.Module, trace: Trace, step: int) -> None:
    trace.proof.append(ask_shadow(shadow, plan.model, plan.judge, 0))
    trace.looks.append(step)


def tell(trace: Trace) -> str:
    """The oracle's figure at the start, at its best and in the end."""
    proof = smooth(trace.proof)
    return f"{proof[0]:.4g} -> best {proof.min():.4g} -> {proof[-1]:.4g}"


def find_healthy(
    trace: Trace,
    trap: str,
    *,
    gain: float = 0.3,
    tolerated: tuple[str, ...] = (),
    phases: bool = True,
) -> Truth:
    """Healthy where the oracle's figure fell by this share of its first and stayed down."""
    proof = smooth(trace.proof)
    told = f"{trap}; oracle {tell(trace)}"
    if not np.isfinite(proof).all():
        return doubt(f"{told}: not finite")
    if proof[0] - proof[-1] < gain * abs(proof[0]):
        return doubt(f"{told}: did not learn")
    if proof[-1] - proof.min() > 0.12 * (proof[0] - proof.min()):
        return doubt(f"{told}: got worse again")
    forbidden = ("divergence", "overfitting_onset") if phases else ()
    truth = Truth(kind="healthy", tolerated=tolerated, phases_forbidden=forbidden, reason=told)
    return soften(truth, trace)


def make_healthy(
    name: str,
    make: Make,
    trap: str,
    *,
    gain: float = 0.3,
    tolerated: tuple[str, ...] = (),
    phases: bool = True,
) -> Scenario:
    """A training as it should be, in which something looks like a fault."""

    def train(recorder: Recorder, draw: Draw) -> Truth:
        torch.manual_seed(draw.torch_seed)
        trace = run(make(draw.again(), False), recorder, draw)
        return find_healthy(trace, trap, gain=gain, tolerated=tolerated, phases=phases)

    return Scenario(name=f"fifth/healthy/{name}", kind="healthy", train=train)


def blame_nothing(trace: Trace, twin: Trace, fault: str, tolerated: tuple[str, ...] = ()) -> Truth:
    """A fault no rule is named for, where it cost a good part of what the twin gained."""
    told = f"{fault}; oracle {tell(trace)}, without the fault {tell(twin)}"
    end = smooth(twin.proof)
    if not end[-1] < end[0]:
        return doubt(f"{told}: the twin did not learn either")
    if not is_worse(trace, twin):
        return doubt(f"{told}: no harm done")
    allowed = tuple(dict.fromkeys((*_SLACK, *tolerated)))
    return Truth(kind="fault", tolerated=allowed, onset_step=0, reason=told)


def make_wrong(name: str, make: Make, fault: str, *, tolerated: tuple[str, ...] = ()) -> Scenario:
    """A training that runs, and learns what it should not, or less than it should."""

    def train(recorder: Recorder, draw: Draw) -> Truth:
        _, trace, twin = run_both(make, recorder, draw)
        return blame_nothing(trace, twin, fault, tolerated)

    return Scenario(name=f"fifth/wrong/{name}", kind="fault", train=train)


def expect(
    rule: str,
    told: str,
    *,
    culprits: tuple[str, ...] = (),
    onset: int | None = None,
    tolerated: tuple[str, ...] = WRECK,
) -> Truth:
    """The truth of a fault that one rule is named for."""
    kept = tuple(name for name in tolerated if name != rule)
    truth = Truth(kind="fault", expected=(rule,), culprits=culprits, onset_step=onset, reason=told)
    return replace(truth, tolerated=kept)
