"""How the third family trains: a course, the notes taken of it, and its twin.

A `Course` is ready to go step by step; `attend` takes it to its end, recorded or
not. Notes hold what an oracle may use: float64 norms of gradients before any
clipping, true updates, weights before and after, losses without noise on data
that nothing was trained or validated on.
"""

from __future__ import annotations

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
    compare_weights,
    find_end,
    keep_weights,
    measure_gradient,
    note_updates,
    train_both,
)
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw

Clock = Callable[[int], tuple[float, float, float]]


@dataclass(slots=True)
class Notes:
    """What was true of one training.

    Attributes:
        losses, norms: Loss and float64 gradient norm of each step.
        looks: Steps after which the rest was noted.
        exam, fit: Loss without noise on the oracle's data, and on training data.
        rms, ratios: Of each parameter at each look, root mean square gradient
            and relative change in the step; None where there is no gradient.
        first, last: Parameters before and after.
        times: Milliseconds of each step.
        measured: What `Course.dissect` said at the end.
        broken_at: First step with a loss, gradient or weight that is not finite.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    exam: list[float] = field(default_factory=list)
    fit: list[float] = field(default_factory=list)
    rms: dict[str, list[float | None]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    measured: float = math.nan
    broken_at: int | None = None

    def moved(self, name: str) -> float:
        """How far a parameter came, relative to where it was."""
        return compare_weights(self.first, self.last, name)

    def end(self, values: list[float]) -> float:
        """Median of the last three looks; infinite where one is not finite."""
        return find_end(values)

    def typical(self, series: Mapping[str, list[Any]], part: str, since: int = 0) -> float:
        """Median over looks from a step on, of all parameters whose name contains the part."""
        begin = int(np.searchsorted(self.looks, since))
        found = [
            value
            for name, values in series.items()
            if part in name
            for value in values[begin:]
            if value is not None and math.isfinite(value)
        ]
        return float(np.median(found)) if found else math.nan


@dataclass(slots=True, kw_only=True)
class Course:
    """One training, ready to begin.

    Attributes:
        model, optimizer: What is recorded.
        steps: How many.
        advance: Does one step and returns the metrics that it shows.
        exam: Loss without noise on data for the oracle alone.
        fit: The same on training data; `exam` where it is None.
        show: Metrics of a validation; none is made where it is None.
        notes: That `advance` adds losses and norms to.
        val_every, log_every: In steps.
        epoch_steps: Metrics are of epochs of so many steps and carry no step.
        first_step: Number of the first step, of a run that was resumed.
        clock: Step, data and compute milliseconds of a step.
        timed: Times come from `notes.times`, which `advance` measures.
        onset: Where the fault begins.
        victims: Parts of names of parameters that the fault concerns.
        dissect: A measure of the trained model, for the oracle.
        options: For the recorder's `start`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    advance: Callable[[int], Mapping[str, float]]
    exam: Callable[[], Any]
    fit: Callable[[], Any] | None = None
    show: Callable[[], Mapping[str, float]] | None = None
    notes: Notes = field(default_factory=Notes)
    val_every: int = 20
    log_every: int = 1
    epoch_steps: int = 0
    first_step: int = 0
    clock: Clock | None = None
    timed: bool = False
    onset: int = 0
    victims: tuple[str, ...] = ()
    dissect: Callable[[], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)


Build = Callable[[Draw, bool], Course]


def descend(
    notes: Notes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    *,
    clip: float | None = None,
) -> float:
    """One whole step down the loss, noted."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    notes.norms.append(measure_gradient(model))
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    notes.losses.append(float(loss.detach()))
    return notes.losses[-1]


def attend_twice(build: Build, recorder: Recorder, draw: Draw) -> tuple[Course, Course]:
    """The course with the fault, recorded, and without it: same seed, data and order."""

    def train_one(faulty: bool, recorder: AnyRecorder) -> Course:
        course = build(draw.again(), faulty)
        attend(course, recorder)
        return course

    return train_both(train_one, recorder, draw)


def attend(course: Course, recorder: AnyRecorder) -> Notes:
    """Take a course to its end; returns its notes."""
    model, notes = course.model, course.notes
    manual = course.clock is not None or course.timed
    timing = {"timing": "manual"} if manual else {}
    config = {"model": type(model).__name__, "lr": course.optimizer.param_groups[0]["lr"]}
    recorder.start(model, course.optimizer, config=config, **{**timing, **course.options})
    notes.first = keep_weights(model)
    look_every = max(2, course.steps // 30)
    gathered: dict[str, list[float]] = {}
    for index in range(course.steps):
        step = course.first_step + index
        final = index == course.steps - 1
        looks = index % look_every == 0 or final
        earlier = keep_weights(model) if looks else {}
        with recorder.step(step, epoch=index // course.epoch_steps if course.epoch_steps else None):
            shown = course.advance(index)
            for key, value in shown.items():
                gathered.setdefault(key, []).append(value)
            if not course.epoch_steps and (index + 1) % course.log_every == 0:
                recorder.log(shown)
        if course.clock is not None:
            notes.times.append(course.clock(index))
        if manual:
            whole, data, compute = notes.times[-1]
            recorder.time(step, step_ms=whole, data_ms=data, compute_ms=compute)
        if looks:
            _look(course, index, earlier)
        if course.epoch_steps:
            if (index + 1) % course.epoch_steps == 0:
                means = {key: float(np.mean(values)) for key, values in gathered.items()}
                if course.show is not None:
                    means |= _show(course)
                recorder.log(means, epoch=index // course.epoch_steps)
                gathered.clear()
        elif course.show is not None and ((index + 1) % course.val_every == 0 or final):
            recorder.validate(step, _show(course))
    notes.last = keep_weights(model)
    if course.dissect is not None:
        model.eval()
        with torch.no_grad():
            notes.measured = float(course.dissect())
    return notes


def supervise(
    draw: Draw,
    model: nn.Module,
    data: Data,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    batch: int = 32,
    clip: float | None = None,
    rate: Callable[[int], float] | None = None,
    before: Callable[[int], None] | None = None,
    feed: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    weigh: Callable[[int, Tensor], Tensor] | None = None,
    take: Callable[[int], Any] | None = None,
    accumulate: int = 1,
    keys: tuple[str, str] = ("train/loss", "val/loss"),
    accuracy: bool = False,
    keep_mode: bool = False,
    **options: Any,
) -> Course:
    """A course of batches of a data set.

    Args:
        draw: Gives the order of batches.
        model, data, loss, optimizer: What learns what.
        batch: Examples of a step.
        clip: Norm that gradients are clipped to.
        rate: Factor of the learning rates at a step.
        before: Called with the step ahead of it.
        feed: Changes inputs and targets of a step.
        weigh: Changes the loss of a step.
        take: Chooses the examples of a step, in place of shuffled epochs.
        accumulate: Parts that a step's batch is computed in.
        keys: Of the losses.
        accuracy: Whether accuracies are shown too.
        keep_mode: Whether the model is not set to training at each step.
        options: More of the Course.
    """
    notes = Notes()
    order = draw.stream("order")
    bases = [group["lr"] for group in optimizer.param_groups]
    waiting: list[int] = []

    def choose(step: int) -> Tensor:
        if take is not None:
            return torch.as_tensor(take(step))
        if len(waiting) < batch:
            waiting.extend(order.permutation(len(data.x)).tolist())
        chosen = torch.tensor(waiting[:batch])
        del waiting[:batch]
        return chosen

    def advance(step: int) -> dict[str, float]:
        if not keep_mode:
            model.train()
        if rate is not None:
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * rate(step)
        if before is not None:
            before(step)
        chosen = choose(step)
        x, y = data.x[chosen], data.y[chosen]
        if feed is not None:
            x, y = feed(step, x, y)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part_x, part_y in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            value = loss(model(part_x), part_y)
            if weigh is not None:
                value = weigh(step, value)
            (value / accumulate).backward()
            total += float(value.detach()) / accumulate
        notes.norms.append(measure_gradient(model))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        notes.losses.append(total)
        return {keys[0]: total}

    def show() -> dict[str, float]:
        output = model(data.val_x)
        shown = {keys[1]: float(loss(output, data.val_y))}
        if accuracy:
            hits = (output.argmax(-1) == data.val_y).double().mean()
            shown[keys[1].replace("loss", "accuracy")] = float(hits)
        return shown

    made: dict[str, Any] = {
        "exam": lambda: loss(model(data.proof_x), data.proof_y),
        "fit": lambda: loss(model(data.x[:256]), data.y[:256]),
        "show": show,
        "steps": 240,
    }
    return Course(
        model=model, optimizer=optimizer, advance=advance, notes=notes, **{**made, **options}
    )


def _look(course: Course, index: int, earlier: dict[str, Tensor]) -> None:
    notes, model = course.notes, course.model
    note_updates(model, earlier, notes.ratios, notes.rms, none=None)
    mode = model.training
    model.eval()
    with torch.no_grad():
        notes.exam.append(float(course.exam()))
        notes.fit.append(notes.exam[-1] if course.fit is None else float(course.fit()))
    model.train(mode)
    notes.looks.append(index)
    whole = all(bool(p.isfinite().all()) for p in model.parameters())
    latest = (*notes.losses[-1:], *notes.norms[-1:])
    if notes.broken_at is None and not (whole and all(map(math.isfinite, latest))):
        found = (i for i, v in enumerate(notes.losses) if not math.isfinite(v))
        notes.broken_at = min(next(found, index), index)


def _show(course: Course) -> dict[str, float]:
    mode = course.model.training
    course.model.eval()
    assert course.show is not None
    with torch.no_grad():
        shown = dict(course.show())
    course.model.train(mode)
    return shown
