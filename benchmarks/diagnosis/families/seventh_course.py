"""The loop of the sixth and the seventh family: a plan of a training, its log, their judging."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.measuring import (
    AnyRecorder,
    ask_shadow,
    doubt,
    find_end,
    measure_gradient,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from quark import DataDiagnostics

Batch = tuple[Tensor, ...]
Check = Callable[["Log", "Log"], str | None]
# What a broken training may show beside the alert that is asked for.
FALLOUT = (
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
_LOOKS = 24


@dataclass(slots=True, kw_only=True)
class Plan:
    """A training that is set up and not begun.

    Attributes:
        build: Makes the model.
        optimize: Makes the optimizer of a model.
        batch: The batch of a step.
        loss: Of a model, a batch and a step: what is minimised and logged, and more to log.
        proof: Of a model in evaluation mode: how bad it is; never logged.
        val: Of a model: what a validation logs; None for none.
        steps, val_every, epoch_steps: Lengths of the training, from one validation to
            the next, and of an epoch.
        arrange: Called with model and optimizer once both are made.
        rate: Factor of the learning rates at a step.
        before, after: Called with model, optimizer and step.
        take: In place of clearing, backward and the optimizer's step: given model,
            optimizer, batch and step, returns what is logged.
        turn: In place of the optimizer's step, given optimizer and step.
        clears: Whether gradients are zeroed.
        halts: Given the log, whether the training stops early.
        clip: Norm that gradients are clipped to.
        accumulate: Batches to a step.
        evaluates: Switches to the mode of a validation; None leaves the mode.
        resumes: Whether a validation switches back to training.
        log_rate: Whether the learning rate is logged.
        start: Options of `Recorder.start`.
        diagnoses: Whether batches are told of to DataDiagnostics, with labels and ids.
        first_step: Number of the first step, as in a resumed run.
        onset: The step from which a fault acts, where it is not the first.
        skips: Whether the last step was skipped for an overflow; None for no scaler.
    """

    build: Callable[[], nn.Module]
    optimize: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch, int], tuple[Tensor, Mapping[str, float]]]
    proof: Callable[[nn.Module], float]
    val: Callable[[nn.Module], Mapping[str, float]] | None = None
    steps: int = 220
    val_every: int = 20
    epoch_steps: int = 25
    arrange: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None
    rate: Callable[[int], float] | None = None
    before: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    after: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    take: Callable[[nn.Module, torch.optim.Optimizer, Batch, int], dict[str, float]] | None = None
    turn: Callable[[torch.optim.Optimizer, int], None] | None = None
    clears: bool = True
    halts: Callable[[Log], bool] | None = None
    clip: float | None = None
    accumulate: int = 1
    evaluates: Callable[[nn.Module], Any] | None = nn.Module.eval
    resumes: bool = True
    log_rate: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    diagnoses: bool = False
    first_step: int = 0
    onset: int | None = None
    skips: Callable[[], bool] | None = None


@dataclass(slots=True)
class Log:
    """What was true of a training.

    Attributes:
        model: Trained; the recorded one.
        proofs: How bad it was, from before the first step on.
        losses: As logged.
        said: What validations logged.
        begun: The parameters before the training.
        gradients: Norm of the whole gradient of each step, as it lay there after the step.
    """

    model: nn.Module
    proofs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    said: list[dict[str, float]] = field(default_factory=list)
    begun: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[float] = field(default_factory=list)

    @property
    def end(self) -> float:
        """The median of the last three proofs; infinite where one is not finite."""
        return find_end(self.proofs)

    @property
    def best(self) -> float:
        """The best proof."""
        return float(np.nanmin(self.proofs))

    def moved(self, prefix: str = "") -> float:
        """How far the parameters of this prefix came, relative to where they were."""
        now = dict(self.model.named_parameters())
        names = [name for name in self.begun if name.startswith(prefix)]
        far = sum(float((now[name].detach() - self.begun[name]).square().sum()) for name in names)
        size = sum(float(self.begun[name].square().sum()) for name in names)
        return math.sqrt(far / (size + 1e-12))

    def tell(self) -> str:
        """The proof's way, for a reason."""
        return f"proof {self.proofs[0]:.4g} -> best {self.best:.4g} -> {self.end:.4g}"


def deal(data: Data, size: int, rng: np.random.Generator) -> Callable[[int], Batch]:
    """Shuffled batches, epoch after epoch; the rows come third in each."""
    whole = max(1, len(data.x) // size)
    orders: dict[int, np.ndarray] = {}

    def draw(step: int) -> Batch:
        epoch, place = divmod(step, whole)
        while len(orders) <= epoch:
            orders[len(orders)] = rng.permutation(len(data.x))
        rows = torch.from_numpy(orders[epoch][place * size : (place + 1) * size])
        return data.x[rows], data.y[rows], rows

    return draw


def pursue(plan: Plan, recorder: AnyRecorder) -> Log:
    """Train a whole plan; what is true is asked of a copy without hooks."""
    model = plan.build()
    optimizer = plan.optimize(model)
    if plan.arrange is not None:
        plan.arrange(model, optimizer)
    shadow = copy.deepcopy(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    config = {"lr": rates[0], "optimizer": type(optimizer).__name__, **plan.config}
    recorder.start(model, optimizer, config=config, **plan.start)
    told = None
    if plan.diagnoses and isinstance(recorder, Recorder):
        told = DataDiagnostics(recorder._session)
    log = Log(model)
    log.begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    log.proofs.append(ask_shadow(shadow, model, plan.proof, None))
    for step in range(plan.steps):
        number = plan.first_step + step
        if plan.rate is not None:
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * plan.rate(step)
        if plan.before is not None:
            plan.before(model, optimizer, step)
        with recorder.step(number, epoch=number // plan.epoch_steps):
            batch = plan.batch(step)
            logged = (plan.take or _Taker(plan))(model, optimizer, batch, step)
            if plan.log_rate:
                logged["optimizer/lr"] = optimizer.param_groups[0]["lr"]
            recorder.log(logged)
        if plan.skips is not None and plan.skips() and isinstance(recorder, Recorder):
            recorder.mark_skipped(number)
        log.losses.append(logged["train/loss"])
        log.gradients.append(measure_gradient(model))
        if told is not None:
            told.log_batch(
                log.losses[-1],
                step=number,
                epoch=number // plan.epoch_steps,
                labels=batch[1],
                sample_ids=batch[2],
            )
        if plan.after is not None:
            plan.after(model, optimizer, step)
        if (step + 1) % max(1, plan.steps // _LOOKS) == 0 or step == plan.steps - 1:
            log.proofs.append(ask_shadow(shadow, model, plan.proof, None))
        if plan.val is not None and (step + 1) % plan.val_every == 0:
            log.said.append(_validate(plan, model))
            recorder.validate(number, log.said[-1])
            if plan.halts is not None and plan.halts(log):
                break
    if told is not None:
        told.close()
    return log


def compare(
    make: Callable[[Draw, bool], Plan], recorder: Recorder, draw: Draw
) -> tuple[Log, Log, int | None]:
    """The faulty training, recorded, its twin without the fault, and where the fault begins."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> tuple[Plan, Log]:
        plan = make(draw.again(), faulty)
        return plan, pursue(plan, recorder)

    (plan, log), (_, twin) = train_both(train_one, recorder, draw)
    return log, twin, plan.onset


def fault(
    name: str,
    make: Callable[[Draw, bool], Plan],
    *expected: str,
    tolerated: tuple[str, ...] = FALLOUT,
    culprits: tuple[str, ...] = (),
    share: float = 0.25,
    check: Check | None = None,
) -> Scenario:
    """A fault that is one where it cost `share` of what the twin without it gained.

    Args:
        name: Family and name, between which the kind is put.
        make: The plan, with and without the fault.
        expected, tolerated, culprits: As in Truth; a rule that is only tolerated here
            would be no surprise, one that is neither would be wrong.
        share: Of the twin's gain.
        check: Of both logs: why the mechanism did not act, or None.
    """

    def train(recorder: Recorder, draw: Draw) -> Truth:
        log, twin, onset = compare(make, recorder, draw)
        told = f"{log.tell()}; without the fault {twin.tell()}"
        if not twin.proofs[0] - twin.end > 0:
            return doubt(f"{told}: the twin did not learn either")
        if log.end < twin.end + share * (twin.proofs[0] - twin.end):
            return doubt(f"{told}: not harmed")
        if check is not None and (reason := check(log, twin)) is not None:
            return doubt(f"{told}: {reason}")
        return Truth(
            kind="fault",
            expected=expected,
            tolerated=tuple(rule for rule in tolerated if rule not in expected),
            culprits=culprits,
            onset_step=onset,
            reason=told,
        )

    return Scenario(name=_join(name, "fault"), kind="fault", train=train)


def sound(
    name: str,
    make: Callable[[Draw], Plan],
    *,
    gain: float = 0.3,
    rise: float = 0.1,
    mild: float = 0.08,
    check: Callable[[Log], str | None] | None = None,
    tolerated: tuple[str, ...] = (),
) -> Scenario:
    """A healthy training: it gained `gain` of the first proof, and kept it but for `rise`.

    A rise of more than `mild` of the best proof may be called overfitting.
    """

    def train(recorder: Recorder, draw: Draw) -> Truth:
        torch.manual_seed(draw.torch_seed)
        log = pursue(make(draw.again()), recorder)
        told = log.tell()
        if not log.proofs[0] - log.end >= gain * abs(log.proofs[0]):
            return doubt(f"{told}: did not learn")
        if log.end - log.best > rise * (log.proofs[0] - log.best):
            return doubt(f"{told}: got worse again")
        if check is not None and (reason := check(log)) is not None:
            return doubt(f"{told}: {reason}")
        best = max(abs(log.best), 0.01 * (log.proofs[0] - log.best))
        # As the first families have it: a rise that this oracle sees, too, may be told of.
        rose = ("overfitting_onset",) if log.end - log.best > mild * best else ()
        return Truth(
            kind="healthy",
            tolerated=(*tolerated, *rose),
            phases_forbidden=("divergence",) if rose else ("divergence", "overfitting_onset"),
            reason=told,
        )

    return Scenario(name=_join(name, "healthy"), kind="healthy", train=train)


def _join(name: str, kind: str) -> str:
    family, rest = name.split("/", 1)
    return f"{family}/{kind}/{rest}"


class _Taker:
    """The plain step of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, step: int
    ) -> dict[str, float]:
        plan = self.plan
        if plan.clears and step % plan.accumulate == 0:
            optimizer.zero_grad()
        loss, more = plan.loss(model, batch, step)
        (loss / plan.accumulate).backward()
        if (step + 1) % plan.accumulate == 0:
            if plan.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            if plan.turn is None:
                optimizer.step()
            else:
                plan.turn(optimizer, step)
        return {"train/loss": float(loss.detach()), **more}


def _validate(plan: Plan, model: nn.Module) -> dict[str, float]:
    assert plan.val is not None
    if plan.evaluates is not None:
        plan.evaluates(model)
    with torch.no_grad():
        said = dict(plan.val(model))
    if plan.resumes:
        model.train()
    return said
