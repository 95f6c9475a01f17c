"""The sixth family's loop: a course as a user writes it, a shadow that is asked what is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from quark import DataDiagnostics

Batch = tuple[Tensor, ...]
# What a training that is broken through and through may show beside what is asked for.
ANYTHING = (
    "exploding_gradients",
    "vanishing_gradients",
    "stagnant_layers",
    "activation_collapse",
    "overfitting_onset",
    "loss_spike",
    "divergence",
    "plateau",
    "update_ratio",
    "squashed_outputs",
)


@dataclass(slots=True, kw_only=True)
class Course:
    """A training that is set up and not begun.

    Attributes:
        build: Makes the model; called twice, so that the shadow has its own hooks: none.
        optimize: Makes the optimizer of a model.
        batch: The batch of a step.
        loss: Of a model, a batch and a step: what is minimised and logged, and more to log.
        proof: Of a model in evaluation mode: how bad it is; never logged.
        val: Of a model: what a validation logs; None for none.
        arrange: Called once the optimizer is made.
        rate: Factor of the learning rate at a step.
        turn: In place of `optimizer.step()`, given optimizer and step.
        before, after: Called with model and step, before and after a step.
        evaluates: Whether a validation switches to evaluation mode.
        restores: Whether it switches back.
        clears: Whether gradients are zeroed.
        accumulate: Batches to a step; `divides`: whether their losses are divided by it.
        epoch_steps: Steps of an epoch.
        start: Options of `Recorder.start`.
        diagnoses: Whether each batch is told of to DataDiagnostics, with labels and ids.
    """

    build: Callable[[], nn.Module]
    optimize: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch, int], tuple[Tensor, Mapping[str, float]]]
    proof: Callable[[nn.Module], float]
    val: Callable[[nn.Module], Mapping[str, float]] | None = None
    steps: int = 240
    val_every: int = 20
    arrange: Callable[[nn.Module], None] | None = None
    rate: Callable[[int], float] | None = None
    turn: Callable[[torch.optim.Optimizer, int], None] | None = None
    before: Callable[[nn.Module, int], None] | None = None
    after: Callable[[nn.Module, int], None] | None = None
    clip: float | None = None
    evaluates: bool = True
    restores: bool = True
    clears: bool = True
    accumulate: int = 1
    log_rate: bool = False
    epoch_steps: int = 25
    config: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    diagnoses: bool = False


@dataclass(slots=True)
class Log:
    """What was true of a course.

    Attributes:
        model: Trained; the recorded one.
        looks, proofs: Steps, and how bad the shadow was after them (the first: before all).
        losses: As logged.
        said: What validations logged.
        begun: The parameters before the training.
    """

    model: nn.Module
    looks: list[int] = field(default_factory=list)
    proofs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    said: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    begun: dict[str, Tensor] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The median of the last three proofs; infinite where one is not finite."""
        last = [value if math.isfinite(value) else math.inf for value in self.proofs[-3:]]
        return float(np.median(last))

    @property
    def best(self) -> float:
        """The best proof."""
        return float(np.nanmin(self.proofs))

    def tell(self) -> str:
        """The proof's way, for a reason."""
        return f"proof {self.proofs[0]:.4g} -> best {self.best:.4g} -> {self.end:.4g}"


def cycle(data: Data, size: int, rng: np.random.Generator, *, shuffled: bool = True) -> Any:
    """Batches of the training data, epoch after epoch; rows come third in each batch."""
    whole = len(data.x) // size
    state: dict[str, Any] = {"epoch": -1, "order": np.arange(len(data.x))}

    def draw(step: int) -> Batch:
        epoch, place = divmod(step, whole)
        if shuffled and epoch != state["epoch"]:
            state["epoch"], state["order"] = epoch, rng.permutation(len(data.x))
        rows = torch.from_numpy(state["order"][place * size : (place + 1) * size].copy())
        return data.x[rows], data.y[rows], rows

    return draw


def follow(course: Course, recorder: Recorder | SilentRecorder) -> Log:
    """Train a whole course; what is true is asked of a shadow model without hooks."""
    model = course.build()
    with torch.random.fork_rng():
        shadow = course.build()
    optimizer = course.optimize(model)
    if course.arrange is not None:
        course.arrange(model)
        with torch.random.fork_rng():
            course.arrange(shadow)
    rates = [group["lr"] for group in optimizer.param_groups]
    recorder.start(model, optimizer, config={"lr": rates[0], **course.config}, **course.start)
    told = None
    if course.diagnoses and isinstance(recorder, Recorder):
        told = DataDiagnostics(recorder._session)
    log = Log(model)
    log.begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    _ask(course, model, shadow, log, -1)
    for step in range(course.steps):
        if course.rate is not None:
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * course.rate(step)
        if course.before is not None:
            course.before(model, step)
        with recorder.step(step, epoch=step // course.epoch_steps):
            batch = course.batch(step)
            logged = _step(course, model, optimizer, batch, log, step)
            if course.log_rate:
                logged["optimizer/lr"] = optimizer.param_groups[0]["lr"]
            recorder.log(logged)
        if told is not None:
            epoch = step // course.epoch_steps
            told.log_batch(
                log.losses[-1], step=step, epoch=epoch, labels=batch[1], sample_ids=batch[2]
            )
        if course.after is not None:
            course.after(model, step)
        if (step + 1) % max(1, course.steps // 25) == 0 or step == course.steps - 1:
            _ask(course, model, shadow, log, step)
        if course.val is not None and (step + 1) % course.val_every == 0:
            log.said.append((step, _validate(course, model)))
            recorder.validate(step, log.said[-1][1])
    if told is not None:
        told.close()
    return log


def watch(make: Callable[[Draw, bool], Course], recorder: Recorder, draw: Draw) -> tuple[Log, Log]:
    """The faulty course, recorded, and its twin without the fault: same seed, data, batches."""
    torch.manual_seed(draw.torch_seed)
    log = follow(make(draw.again(), True), recorder)
    torch.manual_seed(draw.torch_seed)
    return log, follow(make(draw.again(), False), SilentRecorder())


def doubt(reason: str) -> Truth:
    """A truth that could not be confirmed."""
    return Truth(kind="unclear", reason=reason)


def fault(
    name: str,
    make: Callable[[Draw, bool], Course],
    *expected: str,
    tolerated: tuple[str, ...] = ANYTHING,
    culprits: tuple[str, ...] = (),
    share: float = 0.25,
    check: Callable[[Log, Log], str | None] | None = None,
) -> Scenario:
    """A fault that is one where the twin without it ends better by `share` of what it gained.

    Args:
        name: After `sixth/fault/`.
        make: The course, with and without the fault.
        expected, tolerated, culprits: As in Truth.
        share: Of the twin's gain.
        check: Of both logs: why the mechanism did not act, or None.
    """

    def train(recorder: Recorder, draw: Draw) -> Truth:
        log, twin = watch(make, recorder, draw)
        told = f"{log.tell()}; without the fault {twin.tell()}"
        if log.end < twin.end + share * (twin.proofs[0] - twin.end):
            return doubt(f"{told}: not harmed")
        if check is not None and (reason := check(log, twin)) is not None:
            return doubt(f"{told}: {reason}")
        return Truth(
            kind="fault",
            expected=expected,
            tolerated=tuple(rule for rule in tolerated if rule not in expected),
            culprits=culprits,
            reason=told,
        )

    return Scenario(name=f"sixth/fault/{name}", kind="fault", train=train)


def sound(
    name: str,
    make: Callable[[Draw], Course],
    *,
    gain: float = 0.3,
    rise: float = 0.1,
    check: Callable[[Log], str | None] | None = None,
) -> Scenario:
    """A healthy course: it gained `gain` of the first proof, and kept it but for `rise`."""

    def train(recorder: Recorder, draw: Draw) -> Truth:
        torch.manual_seed(draw.torch_seed)
        log = follow(make(draw.again()), recorder)
        told = log.tell()
        if not log.proofs[0] - log.end >= gain * abs(log.proofs[0]):
            return doubt(f"{told}: did not learn")
        if log.end - log.best > rise * (log.proofs[0] - log.best):
            return doubt(f"{told}: got worse again")
        if check is not None and (reason := check(log)) is not None:
            return doubt(f"{told}: {reason}")
        return Truth(
            kind="healthy", phases_forbidden=("divergence", "overfitting_onset"), reason=told
        )

    return Scenario(name=f"sixth/healthy/{name}", kind="healthy", train=train)


def _step(
    course: Course,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    log: Log,
    step: int,
) -> dict[str, float]:
    last = (step + 1) % course.accumulate == 0
    if course.clears and step % course.accumulate == 0:
        optimizer.zero_grad()
    loss, more = course.loss(model, batch, step)
    (loss / course.accumulate).backward()
    if course.clip is not None and last:
        nn.utils.clip_grad_norm_(model.parameters(), course.clip)
    if course.turn is not None:
        course.turn(optimizer, step)
    elif last:
        optimizer.step()
    log.losses.append(float(loss.detach()))
    return {"train/loss": log.losses[-1], **more}


def _validate(course: Course, model: nn.Module) -> dict[str, float]:
    assert course.val is not None
    was = model.training
    if course.evaluates:
        model.eval()
    with torch.no_grad():
        said = dict(course.val(model))
    if course.restores:
        model.train(was)
    return said


def _ask(course: Course, model: nn.Module, shadow: nn.Module, log: Log, step: int) -> None:
    shadow.load_state_dict(model.state_dict())
    shadow.eval()
    # What is asked must not move the training's own random numbers.
    with torch.no_grad(), torch.random.fork_rng():
        log.proofs.append(float(course.proof(shadow)))
    log.looks.append(step)
