"""Values that are not finite, spikes, divergence, no progress, steps of a wrong size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.diagnosis import zoo
from benchmarks.diagnosis.measuring import WRECK, doubt, smooth
from benchmarks.diagnosis.oracles import soften
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train_twice

Make = Callable[[Draw, bool], Problem]


def _choose_base(draw: Draw) -> Problem:
    names = ("digits_mlp", "digits_cnn", "friedman", "spirals", "residual", "waves", "autoencoder")
    return zoo.ZOO[draw.choice(*names)](draw)


def _spoil_sample(draw: Draw, faulty: bool) -> Problem:
    """One sample that comes in late holds a NaN."""
    made = _choose_base(draw)
    onset = draw.onset_step(made.steps, 0.2, 0.7)

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == onset:
            x = x.clone()
            x.view(-1)[0] = math.nan
        return x, y

    if faulty:
        made.change_batch = spoil
    return made


def _judge_non_finite(make: Make, recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, twin = train_twice(make, recorder, draw)
    values = np.isfinite(trace.losses) & np.isfinite(trace.gradients)
    ruined = not all(torch.isfinite(p).all() for p in problem.model.parameters())
    if values.all() or not np.isfinite(twin.losses).all():
        return doubt("all values stay finite")
    first = int(np.argmin(values))
    return Truth(
        kind="fault",
        expected=("non_finite_values",),
        tolerated=WRECK,
        onset_step=first,
        phases_forbidden=("overfitting_onset",),
        reason=f"first not finite at step {first}; weights lost: {ruined}",
    )


def _lose_weights(draw: Draw, faulty: bool) -> Problem:
    """A checkpoint is restored in part: one layer starts anew in the middle of the run."""
    made = draw.choice(zoo.make_digits_mlp, zoo.make_digits_cnn, zoo.make_residual)(draw)
    made.steps += 80
    onset = draw.onset_step(made.steps, 0.4, 0.6)
    fresh = torch.Generator().manual_seed(draw.torch_seed)

    def lose(step: int) -> None:
        if step == onset:
            with torch.no_grad():
                head = made.model.get_submodule("head").weight
                scale = (2.0 + 2.0 * draw.severity) * float(head.std())
                head.copy_(scale * torch.randn(head.shape, generator=fresh))

    if faulty:
        made.before = lose
    return made


def _judge_spike(make: Make, recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, _twin = train_twice(make, recorder, draw)
    onset = draw.onset_step(problem.steps, 0.4, 0.6)
    before = trace.near(trace.proof, onset - 1)
    after = np.array(trace.after(trace.proof, onset))
    batches = np.array(trace.losses)
    usual = float(np.median(batches[onset - 20 : onset]))
    high = int((~(batches[onset:] < 2.0 * usual)).sum())
    told = (
        f"proof loss {before:.3g} -> {after.max():.3g} -> {after[-1]:.3g}; "
        f"batch loss above twice {usual:.3g} in {high} steps"
    )
    harmed = int((after > 1.5 * before).sum())
    if not np.isfinite(after).all() or harmed < 2 or high < 3:
        return doubt(f"{told}: no spike that harmed")
    if after[-1] > 1.3 * before:
        return doubt(f"{told}: never came back")
    truth = Truth(
        kind="fault",
        expected=("loss_spike",),
        tolerated=tuple(rule for rule in WRECK if rule != "loss_spike"),
        onset_step=onset,
        phases_forbidden=("overfitting_onset",),
        reason=told,
    )
    return soften(truth, trace)


def _feed_weights(draw: Draw, faulty: bool) -> Problem:
    """Decay with the wrong sign: weights grow and the loss with them."""
    made = draw.choice(zoo.make_friedman, zoo.make_digits_mlp, zoo.make_shapes_cnn)(draw)
    onset = draw.onset_step(made.steps, 0.3, 0.5)
    growth = 1.0 + 0.02 * 2.5**draw.severity

    def feed(step: int) -> None:
        if step >= onset:
            with torch.no_grad():
                for parameter in made.model.parameters():
                    parameter.mul_(growth)

    if faulty:
        made.before = feed
    return made


def _judge_divergence(make: Make, low: float, high: float, recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, twin = train_twice(make, recorder, draw)
    onset = draw.onset_step(problem.steps, low, high)
    fixed = smooth(trace.fixed, 5)
    best = int(fixed.argmin())
    tail = fixed[-max(3, len(fixed) // 10) :]
    lowest = f"{fixed[best]:.3g} at step {trace.looks[best]}"
    told = f"training loss {fixed[0]:.3g} -> {lowest} -> {tail[-1]:.3g}"
    scale = fixed[0] - fixed[best]
    if not tail.min() > fixed[best] + 0.3 * scale or scale <= 0 or best > len(fixed) - 5:
        return doubt(f"{told}: does not diverge")
    rising = np.flatnonzero(fixed[best:] > fixed[best] + 0.1 * scale)
    lasts = len(fixed) - best - int(rising[0]) >= 6
    return Truth(
        kind="fault",
        expected=("divergence",),
        tolerated=tuple(rule for rule in WRECK if rule != "divergence"),
        onset_step=max(onset, trace.looks[min(best + int(rising[0]), len(fixed) - 1)]),
        phases_expected=("divergence",) if lasts and np.isfinite(tail).all() else (),
        phases_forbidden=("overfitting_onset",),
        reason=f"{told}; twin {twin.fixed[-1]:.3g}",
    )


def _scenario(name: str, judge: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/{name}", kind="fault", train=judge)


SCENARIOS = (
    _scenario("non_finite/sample", partial(_judge_non_finite, _spoil_sample)),
    _scenario("spike/lost_head", partial(_judge_spike, _lose_weights)),
    _scenario("diverge/fed_weights", partial(_judge_divergence, _feed_weights, 0.3, 0.5)),
)
