"""The fourth family's own training loop, what it keeps for the judges, and the judges."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.measuring import (
    AnyRecorder,
    ask_shadow,
    compare_weights,
    keep_weights,
    measure_gradient,
    note_updates,
    smooth,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Truth


@dataclass(slots=True)
class Course:
    """One training that is ready to begin.

    Attributes:
        model, optimizer: What is recorded and trained.
        loss: Forward of a step: what is minimised.
        proof: The examiner's figure of a model in evaluation mode, lower is
            better; on data that is used for nothing else, and never logged. It
            gets a copy of the model that no recorder sees.
        held_out: What the user logs at a validation.
        steps, val_every, per_epoch: Lengths.
        loss_key: Under which the loss is logged.
        extra: Further metrics of a step.
        before, after: Called with the step, outside of the recorded part.
        update: In place of zeroing, backward, clipping and the optimizer's step.
        clip: Norm of gradients, or None.
        accumulate: Micro-batches of one optimizer step; each is a recorded step.
        times: Times of a step for `Recorder.time`.
        start: Options for `Recorder.start`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    proof: Callable[[nn.Module], float]
    held_out: Callable[[], dict[str, float]] | None = None
    steps: int = 240
    val_every: int = 20
    per_epoch: int = 30
    loss_key: str = "train/loss"
    extra: Callable[[], dict[str, float]] | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    update: Callable[[int, Tensor], None] | None = None
    clip: float | None = None
    accumulate: int = 1
    times: Callable[[int], dict[str, float]] | None = None
    start: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Notes:
    """What happened, noted without the SDK.

    Attributes:
        losses: Of each step.
        gradients: Norm over all parameters at each step in float64, before clipping.
        times_s: Of each step on the wall clock.
        looks: Steps at which the rest was noted.
        proof: The examiner's figure at each look.
        rms: Root mean square gradient of each parameter at each look; 0 without one.
        ratios: Norm of the step's update over the norm of the value, likewise.
        first, last: Parameters before and after, in float64.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    proof: list[float] = field(default_factory=list)
    rms: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The figure of the end, over the last looks."""
        return float(smooth(self.proof, 5)[-1])

    def loss_near(self, step: int, width: int = 10) -> float:
        """Median loss of the steps before one."""
        return float(np.median(self.losses[max(0, step - width) : max(1, step)]))

    def moved(self, name: str) -> float:
        """How far a parameter came, relative to its first norm."""
        return compare_weights(self.first, self.last, name)


def train(course: Course, recorder: AnyRecorder, draw: Draw) -> Notes:
    """The whole training, recorded; the model is left trained."""
    model = course.model
    # Made before the recorder's hooks, so that the examiner's looks are not recorded.
    shadow = copy.deepcopy(model).eval()
    config = {
        "model": type(model).__name__,
        "optimizer": type(course.optimizer).__name__,
        "lr": course.optimizer.param_groups[0]["lr"],
        "torch_seed": draw.torch_seed,
    }
    recorder.start(model, course.optimizer, config=config, **course.start)
    notes = Notes(first=keep_weights(model))
    look_every = max(2, course.steps // 40)
    for step in range(course.steps):
        if course.before is not None:
            course.before(step)
        looks = step % look_every == 0 or step == course.steps - 1
        earlier = keep_weights(model) if looks else {}
        begun = time.perf_counter()
        with recorder.step(step, epoch=step // course.per_epoch):
            loss = course.loss(step)
            if course.update is None:
                _descend(course, notes, step, loss)
            else:
                course.update(step, loss)
                notes.gradients.append(measure_gradient(model))
            notes.losses.append(float(loss.detach()))
            extra = {} if course.extra is None else course.extra()
            recorder.log({course.loss_key: notes.losses[-1], **extra})
        notes.times_s.append(time.perf_counter() - begun)
        if course.times is not None:
            recorder.time(step, **course.times(step))
        if course.after is not None:
            course.after(step)
        if looks:
            _look(course, notes, step, earlier, shadow)
        last = step == course.steps - 1
        if course.held_out is not None and (last or (step + 1) % course.val_every == 0):
            recorder.validate(step, course.held_out())
    notes.last = keep_weights(model)
    return notes


def both(
    make: Callable[[Draw, bool], Course], recorder: Recorder, draw: Draw
) -> tuple[Course, Notes, Notes]:
    """Train with the fault, recorded, and a twin without it: same seed, data and batches."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> tuple[Course, Notes]:
        course = make(draw.again(), faulty)
        return course, train(course, recorder, draw)

    (course, notes), (_, twin) = train_both(train_one, recorder, draw)
    return course, notes, twin


def given_away(notes: Notes, twin: Notes) -> float:
    """The share of what the twin gained that the faulty training did not."""
    gained = twin.proof[0] - twin.end
    if not math.isfinite(notes.end):
        return math.inf
    return (notes.end - twin.end) / max(gained, 1e-9)


def broken(holds: bool, reason: str, **truth: Any) -> Truth:
    """A fault where the evidence holds, else unclear."""
    if not holds:
        return Truth(kind="unclear", reason=f"not borne out: {reason}")
    return Truth(kind="fault", reason=reason, **truth)


def sound(
    notes: Notes,
    reason: str,
    *,
    gain: float = 0.3,
    keep: float = 0.15,
    tolerated: tuple[str, ...] = (),
) -> Truth:
    """Healthy where the examiner's figure fell by `gain` of its first and stayed down.

    Args:
        notes: Of the training.
        reason: What the trap was.
        gain: Share of the first figure that must be gone in the end.
        keep: Share of what was gained at best that may be lost again.
        tolerated: As in Truth.
    """
    proof = smooth(notes.proof, 5)
    best = float(proof.min())
    told = f"{reason}; proof {proof[0]:.4g} -> best {best:.4g} -> {proof[-1]:.4g}"
    if not np.isfinite(proof).all() or not np.isfinite(notes.losses).all():
        return Truth(kind="unclear", reason=f"{told}: not finite")
    if notes.proof[0] - proof[-1] < gain * abs(notes.proof[0]):
        return Truth(kind="unclear", reason=f"{told}: did not learn")
    lost = (float(proof[-1]) - best) / (float(notes.proof[0]) - best)
    if lost > keep:
        return Truth(kind="unclear", reason=f"{told}: lost {lost:.0%} of it again")
    above = (float(proof[-1]) - best) / max(abs(best), 0.01 * abs(float(proof[0])))
    if lost > 0.01 and above > 0.08:
        tolerated = (*tolerated, "overfitting_onset")
    forbidden = ("divergence",) if "overfitting_onset" in tolerated else _CALM
    return Truth(kind="healthy", reason=told, tolerated=tolerated, phases_forbidden=forbidden)


_CALM = ("divergence", "overfitting_onset")


def _descend(course: Course, notes: Notes, step: int, loss: Tensor) -> None:
    if step % course.accumulate == 0:
        course.optimizer.zero_grad()
    (loss / course.accumulate).backward()
    notes.gradients.append(measure_gradient(course.model))
    if course.clip is not None:
        nn.utils.clip_grad_norm_(course.model.parameters(), course.clip)
    if (step + 1) % course.accumulate == 0:
        course.optimizer.step()


def _look(
    course: Course, notes: Notes, step: int, earlier: dict[str, Tensor], shadow: nn.Module
) -> None:
    notes.looks.append(step)
    notes.proof.append(ask_shadow(shadow, course.model, course.proof, 7))
    note_updates(course.model, earlier, notes.ratios, notes.rms, none=0.0)
