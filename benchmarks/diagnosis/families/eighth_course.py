"""The loop of the eighth family, what it notes beside the recorder, and how runs are judged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.diagnosis.measuring import (
    AnyRecorder,
    ask_shadow,
    compare_weights,
    find_end,
    keep_weights,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Truth
from quark import DataDiagnostics


@dataclass(slots=True)
class Course:
    """A training that is set up and not begun.

    Attributes:
        model: What is trained and looked at.
        optimizer: Its optimizer, or several.
        batch: The batch of a step.
        lose: Given model, batch and step, the loss and what is logged beside it.
        proof: Given a copy of the model in evaluation mode, a number without
            noise that is lower the better; for the oracle alone.
        check: Given the step, what a user's validation logs.
        zero, update: In place of the optimizer's `zero_grad` and `step`.
        before, after: Called with the step, around it.
        tell: Given a batch, what its batch diagnostics say.
        first_step: Where a resumed run begins to count.
        per_epoch: Steps of an epoch; without it no epoch is logged.
        key: Of the training loss; empty where the loss is not logged.
        log_norm: Whether the norm of the gradients is logged.
        looks: How often the oracle looks.
        log_every: Steps from one logged step to the next.
        start: Options for `Recorder.start`.
    """

    model: nn.Module
    optimizer: Any
    batch: Callable[[int], Any]
    lose: Callable[[nn.Module, Any, int], tuple[Tensor, dict[str, float]]]
    proof: Callable[[nn.Module], float]
    check: Callable[[int], dict[str, float]] | None = None
    steps: int = 300
    check_every: int = 25
    per_epoch: int | None = None
    clip: float | None = None
    zero: Callable[[int], None] | None = None
    update: Callable[[int], None] | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    tell: Callable[[Any], dict[str, Any]] | None = None
    first_step: int = 0
    key: str = "train/loss"
    log_norm: bool = False
    looks: int = 30
    log_every: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Notes:
    """What was true of a training, none of it through the SDK.

    Attributes:
        losses, norms: Of each step: its loss, and the norm of all gradients before clipping.
        looks, proof: Steps, and what the oracle found after each of them.
        first, last: Parameters before and after.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    proof: list[float] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        """What the oracle found before anything was learnt."""
        return self.proof[0]

    @property
    def end(self) -> float:
        """The median of the oracle's last three looks."""
        return find_end(self.proof)

    @property
    def best(self) -> float:
        """The best that the oracle found."""
        return float(np.nanmin(self.proof))

    def moved(self, name: str) -> float:
        """How far a parameter came, against its size before."""
        return compare_weights(self.first, self.last, name)


def fit(course: Course, recorder: AnyRecorder) -> Notes:
    """The whole training; the oracle looks at a copy, so that hooks see none of it."""
    ghost = copy.deepcopy(course.model)
    recorder.start(course.model, course.optimizer, config=course.config, **course.start)
    diagnostics = None
    if course.tell is not None and isinstance(recorder, Recorder):
        diagnostics = DataDiagnostics(recorder._session)
    notes = Notes(first=keep_weights(course.model))
    notes.looks.append(course.first_step)
    notes.proof.append(ask_shadow(ghost, course.model, course.proof, 7))
    every = max(1, course.steps // course.looks)
    try:
        for step in range(course.first_step, course.first_step + course.steps):
            epoch = None if course.per_epoch is None else step // course.per_epoch
            if course.before is not None:
                course.before(step)
            batch = course.batch(step)
            with recorder.step(step, epoch=epoch):
                logged = _take_step(course, notes, batch, step)
                if step % course.log_every == 0:
                    recorder.log(logged)
            if diagnostics is not None and course.tell is not None:
                diagnostics.log_batch(
                    notes.losses[-1], step=step, epoch=epoch, **course.tell(batch)
                )
            if course.after is not None:
                course.after(step)
            if (step + 1) % every == 0:
                notes.looks.append(step)
                notes.proof.append(ask_shadow(ghost, course.model, course.proof, 7))
            if course.check is not None and (step + 1) % course.check_every == 0:
                recorder.validate(step, course.check(step), epoch=epoch)
    finally:
        if diagnostics is not None:
            diagnostics.close()
    notes.last = keep_weights(course.model)
    return notes


def pair(
    make: Callable[[Draw, bool], Course], recorder: Recorder, draw: Draw
) -> tuple[Course, Notes, Notes]:
    """Train with the fault, recorded, and a twin without: same start, data and order."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> tuple[Course, Notes]:
        course = make(draw.again(), faulty)
        return course, fit(course, recorder)

    (course, notes), (_, twin) = train_both(train_one, recorder, draw)
    return course, notes, twin


def lost(notes: Notes, twin: Notes) -> float:
    """The share of what the twin gained that the faulty training has not in the end."""
    return (notes.end - twin.end) / (twin.begin - twin.end + 1e-12)


def judge_fault(
    borne_out: bool,
    notes: Notes,
    twin: Notes | None,
    *expected: str,
    reason: str,
    tolerated: Sequence[str] = (),
    culprits: Sequence[str] = (),
    onset: int | None = None,
) -> Truth:
    """A fault where the evidence bears it out, else unclear."""
    told = f"{reason}; proof {notes.begin:.4g} -> {notes.end:.4g}"
    if twin is not None:
        told += f", of its twin {twin.end:.4g}"
    if not borne_out:
        return Truth(kind="unclear", reason=f"no effect: {told}")
    return Truth(
        kind="fault",
        expected=expected,
        tolerated=tuple(rule for rule in dict.fromkeys(tolerated) if rule not in expected),
        culprits=tuple(culprits),
        onset_step=onset,
        reason=told,
    )


def judge_sound(
    notes: Notes,
    target: float,
    reason: str,
    *,
    back: float = 0.2,
    tolerated: Sequence[str] = (),
    calm: bool = True,
) -> Truth:
    """Healthy where the oracle's number reached the target and stayed near its best.

    Args:
        notes: Of the training.
        target: What the known recipe reaches, at the least.
        reason: What the trap is.
        back: The share of the gain that the end may lie above the best.
        tolerated: As in Truth.
        calm: Whether phases of divergence and overfitting are forbidden.
    """
    told = (
        f"{reason}; proof {notes.begin:.4g} -> best {notes.best:.4g} -> {notes.end:.4g}, "
        f"aim {target:.4g}"
    )
    if not math.isfinite(notes.end) or notes.end > target:
        return Truth(kind="unclear", reason=f"missed its aim: {told}")
    if notes.end - notes.best > back * (notes.begin - notes.best):
        return Truth(kind="unclear", reason=f"lost what it had: {told}")
    forbidden = ("divergence", "overfitting_onset") if calm else ()
    rise = (notes.end - notes.best) / max(abs(notes.best), 1e-9)
    if rise > 0.08 and notes.end - notes.best > 0.01 * (notes.begin - notes.best):
        # The oracle, too, sees some of it.
        tolerated = (*tolerated, "overfitting_onset")
        forbidden = ("divergence",) if calm else ()
        if rise > 0.5 and calm:
            return Truth(kind="unclear", reason=f"overfitted: {told}")
    return Truth(
        kind="healthy",
        tolerated=tuple(tolerated),
        phases_forbidden=forbidden,
        reason=told,
    )


def _take_step(course: Course, notes: Notes, batch: Any, step: int) -> dict[str, float]:
    optimizers = course.optimizer if isinstance(course.optimizer, list) else [course.optimizer]
    if course.zero is not None:
        course.zero(step)
    else:
        course.model.zero_grad(set_to_none=True)
    loss, logged = course.lose(course.model, batch, step)
    if loss.requires_grad:
        loss.backward()
    squares = [float(p.grad.norm()) for p in course.model.parameters() if p.grad is not None]
    notes.norms.append(float(np.linalg.norm(squares)) if squares else 0.0)
    notes.losses.append(float(loss.detach()))
    if course.clip is not None:
        nn.utils.clip_grad_norm_(course.model.parameters(), course.clip)
    if course.update is not None:
        course.update(step)
    else:
        for optimizer in optimizers:
            optimizer.step()
    if course.log_norm:
        logged["grad_norm"] = notes.norms[-1]
    return {course.key: notes.losses[-1], **logged} if course.key else logged
