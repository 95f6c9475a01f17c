"""How the second family trains, and what it measures beside the recording.

A `Lesson` is a training that is ready to go step by step. `conduct` takes it to
its end, recorded or not, and keeps a `Trace`: noise-free losses, gradient norms
in float64, true updates of every parameter, the weights before and after.
A fault is judged from its own trace and from that of its twin, the same lesson
from the same draw without the fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import Material
from benchmarks.diagnosis.measuring import keep_weights

Clock = Callable[[int], tuple[float, float, float]]


def without_graph(assess: Callable[[], float]) -> float:
    """The assessment as a validation makes it: no graph is kept."""
    with torch.no_grad():
        return float(assess())


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Drawn evenly on a logarithmic scale."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


@dataclass(slots=True, kw_only=True)
class Lesson:
    """One training, ready to advance.

    Attributes:
        model, optimizer: What is recorded.
        steps: How many.
        advance: Does one step, and returns the metrics that it shows.
        assess: A loss without noise of training on held-out data; lower is better.
        assess_train: The same on training data.
        gauge: The loss of a (float64) copy of the model, for exact gradients.
        validate: The metrics that a validation shows.
        validate_every, log_every: In steps.
        by_epoch: Metrics carry an epoch, one for each `log_every` steps, and no step.
        clock: Step, data and compute time of a step in milliseconds.
        onset: Where the fault begins.
        dissect: Share of a layer's units that no longer say anything.
        watched: False where only metrics are recorded.
        options: More for the recorder's `start`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    advance: Callable[[int], Mapping[str, float]]
    assess: Callable[[], float]
    assess_train: Callable[[], float] | None = None
    gauge: Callable[[nn.Module], Tensor] | None = None
    validate: Callable[[], Mapping[str, float]] | None = None
    validate_every: int = 20
    log_every: int = 1
    by_epoch: bool = False
    clock: Clock | None = None
    onset: int = 0
    dissect: Callable[[], float] | None = None
    watched: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """What was measured of one training.

    Attributes:
        held, trained: Noise-free losses by step, on held-out and training data.
        gradients: Norm of each parameter's gradient by step; None without one.
        updates: Relative change of each parameter in one step, by step.
        start, middle, end: Weights at step 0, at the onset and after the last one.
        times: Step, data and compute milliseconds of each step.
        dead: What `dissect` said, by step.
    """

    lesson: Lesson
    held: dict[int, float] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, dict[str, float | None]] = field(default_factory=dict)
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    middle: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    dead: dict[int, float] = field(default_factory=dict)
    ladder: dict[str, float] = field(default_factory=dict)
    first_bad_step: int | None = None

    @property
    def last(self) -> float:
        """The held-out loss at the end: the median of the last three assessments."""
        return float(np.median([*self.held.values()][-3:]))

    @property
    def first(self) -> float:
        """The held-out loss before any step."""
        return next(iter(self.held.values()))

    @property
    def best(self) -> float:
        """The lowest held-out loss."""
        known = [loss for loss in self.held.values() if np.isfinite(loss)]
        return min(known, default=float("inf"))

    def total_gradients(self, low: int, high: int) -> list[float]:
        """Norms over all parameters of the steps in [low, high)."""
        return [
            float(np.sqrt(sum((norm or 0.0) ** 2 for norm in norms.values())))
            for step, norms in self.gradients.items()
            if low <= step < high
        ]

    def moved(self, prefix: str, since: str = "start") -> float:
        """Largest relative change of the weights of a module from then to the end."""
        before: dict[str, Tensor] = getattr(self, since)
        shares = [
            float((self.end[name] - old).norm() / (old.norm() + 1e-12))
            for name, old in before.items()
            if name.startswith(prefix) and name in self.end and old.shape == self.end[name].shape
        ]
        return max(shares, default=0.0)


def _norm(tensor: Tensor | None) -> float | None:
    if tensor is None:
        return None
    dense = tensor.detach()
    if dense.is_sparse:
        dense = dense.coalesce().values()
    return float(dense.double().norm())


def conduct(lesson: Lesson, recorder: Any = None) -> Trace:
    """Train to the end; with a recorder everything a user would record is recorded."""
    trace = Trace(lesson)
    model = lesson.model
    if recorder is not None:
        options = {"timing": "drawn" if lesson.clock is None else "manual", **lesson.options}
        if lesson.watched:
            recorder.start(model, lesson.optimizer, **options)
        else:
            recorder.start(**options)
    trace.start = trace.middle = keep_weights(model)
    look = max(5, lesson.steps // 40)
    for step in range(lesson.steps):
        if step % look == 0:
            _assess(trace, step)
        if step == lesson.onset:
            trace.middle = keep_weights(model)
        near = step % 5 == 0
        before = keep_weights(model) if near else {}
        if recorder is None:
            lesson.advance(step)
        else:
            with recorder.step(step):
                shown = lesson.advance(step)
                if step % lesson.log_every == 0:
                    recorder.log(dict(shown), **_place(lesson, step))
        if near:
            _measure(trace, step, before)
        if lesson.clock is not None:
            trace.times.append(times := lesson.clock(step))
            if recorder is not None:
                recorder.time(step, step_ms=times[0], data_ms=times[1], compute_ms=times[2])
        if recorder is not None and lesson.validate and (step + 1) % lesson.validate_every == 0:
            recorder.log(dict(lesson.validate()), **_place(lesson, step))
        if step == lesson.steps // 3 and lesson.gauge is not None:
            trace.ladder = gradient_ladder(model, lesson.gauge)
    _assess(trace, lesson.steps)
    trace.end = keep_weights(model)
    return trace


def _place(lesson: Lesson, step: int) -> dict[str, int]:
    return {"epoch": step // lesson.log_every} if lesson.by_epoch else {"step": step}


def _assess(trace: Trace, step: int) -> None:
    lesson = trace.lesson
    lesson.model.eval()
    with torch.no_grad():
        trace.held[step] = float(lesson.assess())
        if lesson.assess_train is not None:
            trace.trained[step] = float(lesson.assess_train())
        if lesson.dissect is not None:
            trace.dead[step] = float(lesson.dissect())
    lesson.model.train()


def _measure(trace: Trace, step: int, before: dict[str, Tensor]) -> None:
    norms: dict[str, float | None] = {}
    changes: dict[str, float] = {}
    for name, entry in trace.lesson.model.named_parameters():
        norms[name] = _norm(entry.grad)
        old = before.get(name)
        if old is not None and old.shape == entry.shape:
            change = entry.detach().double() - old
            changes[name] = float(change.norm() / (old.norm() + 1e-12))
    trace.gradients[step] = norms
    trace.updates[step] = changes
    values = [*changes.values(), *(norm for norm in norms.values() if norm is not None)]
    if trace.first_bad_step is None and not np.isfinite(values).all():
        trace.first_bad_step = step


def gradient_ladder(model: nn.Module, gauge: Callable[[nn.Module], Tensor]) -> dict[str, float]:
    """Root mean square of each weight's gradient, computed by a copy in float64."""
    double = copy.deepcopy(model).double()
    double.zero_grad(set_to_none=True)
    gauge(double).backward()
    return {
        name: 0.0 if entry.grad is None else float(entry.grad.pow(2).mean().sqrt())
        for name, entry in double.named_parameters()
        if entry.requires_grad and name.endswith("weight")
    }


def dead_share(model: nn.Module, layer: str, x: Tensor, *, bound: float = 0.0) -> float:
    """Share of a layer's units that are constant (or all beyond the bound) on all of x."""
    kept: list[Tensor] = []
    place = model.get_submodule(layer)
    handle = place.register_forward_hook(lambda _m, _i, out: kept.append(out.detach()))
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.remove()
    out = kept[-1]
    if out.dim() > 2:
        out = out.flatten(2).transpose(1, 2).flatten(0, 1)
    if bound:
        return float((out.abs() > bound).double().mean())
    return float(((out.max(0).values - out.min(0).values) < 1e-4).double().mean())


def supervise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    material: Material,
    rng: np.random.Generator,
    *,
    steps: int,
    batch: int = 32,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    shape: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    weigh: Callable[[int, Tensor], Tensor] | None = None,
    correct: Callable[[int], None] | None = None,
    finish: Callable[[int], None] | None = None,
    names: tuple[str, str] = ("train/loss", "val/loss"),
    accuracy: str | None = "val/accuracy",
    **more: Any,
) -> Lesson:
    """A supervised lesson; faults reach in by the four callables.

    `shape` changes a batch, `weigh` the loss, `correct` acts between backward and
    the optimizer's step, `finish` after it.
    """

    def advance(step: int) -> dict[str, float]:
        x, y = material.draw(rng, batch)
        if shape is not None:
            x, y = shape(step, x, y)
        value = loss(model(x), y)
        if weigh is not None:
            value = weigh(step, value)
        optimizer.zero_grad()
        if value.requires_grad:
            value.backward()
        if correct is not None:
            correct(step)
        optimizer.step()
        if finish is not None:
            finish(step)
        return {names[0]: float(value.detach())}

    def assess() -> float:
        return float(loss(model(material.x_held), material.y_held))

    def assess_train() -> float:
        return float(loss(model(material.x[:800]), material.y[:800]))

    def gauge(double: nn.Module) -> Tensor:
        x, y = material.x[:64], material.y[:64]
        cast = [part.double() if part.is_floating_point() else part for part in (x, y)]
        return loss(double(cast[0]), cast[1])

    def validate() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            out = model(material.x_held)
            shown = {names[1]: float(loss(out, material.y_held))}
            if accuracy is not None and not material.y_held.is_floating_point():
                shown[accuracy] = float((out.argmax(-1) == material.y_held).double().mean())
        model.train()
        return shown

    settings: dict[str, Any] = {
        "assess": assess,
        "assess_train": assess_train,
        "gauge": gauge,
        "validate": validate,
    }
    return Lesson(
        model=model, optimizer=optimizer, steps=steps, advance=advance, **{**settings, **more}
    )
