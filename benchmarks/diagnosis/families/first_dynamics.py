"""Values that are not finite, spikes, divergence, no progress, steps of a wrong size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.diagnosis import zoo
from benchmarks.diagnosis.measuring import WRECK, doubt, smooth
from benchmarks.diagnosis.oracles import is_worse, soften
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, Trace, train_twice

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


def _overflow_softmax(draw: Draw, faulty: bool) -> Problem:
    """A softmax by hand at a falling temperature, whose exponentials overflow in the end."""
    made = draw.choice(zoo.make_digits_mlp, zoo.make_spirals, zoo.make_digits_cnn)(draw)
    last = 30.0 + 100.0 * draw.severity
    sharpness = [1.0]

    def by_hand(output: Tensor, target: Tensor) -> Tensor:
        powers = (sharpness[0] * output).exp()
        return -(powers.gather(1, target[:, None])[:, 0] / powers.sum(1)).log().mean()

    def stable(output: Tensor, target: Tensor) -> Tensor:
        return zoo.cross_entropy(sharpness[0] * output, target)

    def cool(step: int) -> None:
        sharpness[0] = last ** (step / made.steps)

    made.before = cool
    made.loss = by_hand if faulty else stable
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


def _glitch_rate(draw: Draw, faulty: bool) -> Problem:
    """A few steps at a rate far too high, then as before."""
    made = draw.choice(zoo.make_digits_cnn, zoo.make_residual, zoo.make_spirals)(draw)
    made.clip = 1.0
    onset, length = draw.onset_step(made.steps, 0.4, 0.6), draw.integer(2, 4)
    factor = 40.0 * 4.0**draw.severity
    if faulty:
        made.rate = lambda step: factor if onset <= step < onset + length else 1.0
    return made


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


def _grow_rate(draw: Draw, faulty: bool) -> Problem:
    """A schedule that multiplies the rate each epoch where it should divide it."""
    names = ("digits_mlp", "friedman", "residual", "spirals", "digits_cnn")
    made = zoo.ZOO[draw.choice(*names)](draw)
    onset = draw.onset_step(made.steps, 0.2, 0.4)
    whole = 400.0 * 10.0**draw.severity
    span = made.steps - onset
    if faulty:
        made.rate = lambda step: whole ** max(0.0, (step - onset) / span)
    return made


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


def _start_with_zeros(draw: Draw, faulty: bool) -> Problem:
    """All weights start at 0, so that no unit ever differs from another."""
    made = draw.choice(zoo.make_digits_mlp, zoo.make_digits_cnn, zoo.make_spirals)(draw)
    if faulty:
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.zero_()
    return made


def _judge_plateau(make: Make, recorder: Recorder, draw: Draw) -> Truth:
    _problem, trace, twin = train_twice(make, recorder, draw)
    proof, other = smooth(trace.proof), smooth(twin.proof)
    # After a tenth: the outputs' level is soon found, and is no learning.
    tenth = len(proof) // 10
    gained = float(proof[: tenth + 1].min() - proof[tenth:].min())
    possible = float(other[0] - other.min())
    told = f"proof loss {proof[0]:.3g} -> {proof[-1]:.3g}, twin -> {other[-1]:.3g}"
    if gained > 0.06 * possible or possible < 0.2 * other[0]:
        return doubt(f"{told}: no plateau")
    return Truth(
        kind="fault",
        expected=("plateau",),
        tolerated=(
            "vanishing_gradients",
            "stagnant_layers",
            "activation_collapse",
            "update_ratio",
        ),
        onset_step=0,
        phases_expected=("stagnation",),
        phases_forbidden=("overfitting_onset", "divergence"),
        reason=told,
    )


def _creep(draw: Draw, faulty: bool) -> Problem:
    """A rate thousands of times too low."""
    names = ("digits_mlp", "shapes_cnn", "residual", "waves", "autoencoder")
    made = zoo.ZOO[draw.choice(*names)](draw)
    factor = 10.0 ** (-3.5 - 1.5 * draw.severity)
    if faulty:
        for group in made.optimizer.param_groups:
            group["lr"] *= factor
    return made


def _leap_alone(draw: Draw, faulty: bool) -> Problem:
    """One layer's group has a rate a hundred times that of the others."""
    made = draw.choice(zoo.make_digits_mlp, zoo.make_residual, zoo.make_digits_cnn)(
        draw, optimizer="adam"
    )
    layer = draw.choice("first", "last")
    names = [name for name, _ in made.model.named_parameters() if name.endswith("weight")]
    name = names[0] if layer == "first" else names[-1]
    chosen = dict(made.model.named_parameters())[name]
    rest = [p for p in made.model.parameters() if p is not chosen]
    rate = made.optimizer.param_groups[0]["lr"]
    factor = 200.0 * 5.0**draw.severity if faulty else 1.0
    groups = [{"params": rest}, {"params": [chosen], "lr": rate * factor}]
    made.optimizer = torch.optim.Adam(groups, lr=rate)
    return made


def _judge_steps(make: Make, large: bool, recorder: Recorder, draw: Draw) -> Truth:
    _problem, trace, twin = train_twice(make, recorder, draw)
    weights = [name for name in trace.ratios if name.endswith("weight") or "weight_" in name]
    # Steps that are too large soon make weights that are: the first looks tell.
    early = slice(0, 5) if large else slice(len(trace.looks) // 8, None)
    usual, other = _list_ratios(trace, weights, early), _list_ratios(twin, weights, early)
    strange = {
        name: usual[name]
        for name in weights
        if (usual[name] > 5.0 * other[name] if large else usual[name] < 2e-3 * other[name])
    }
    told = (
        f"update over weight {max(usual.values()) if large else min(usual.values()):.2g}, "
        f"twin {np.median(list(other.values())):.2g}; proof loss {trace.proof[0]:.3g} -> "
        f"{trace.proof[-1]:.3g}, twin {twin.proof[-1]:.3g}"
    )
    if not strange or not is_worse(trace, twin, 0.1 if large else 0.5):
        return doubt(f"{told}: not wrong enough")
    tolerated = WRECK if large else ("plateau", "stagnant_layers")
    truth = Truth(
        kind="fault",
        expected=("update_ratio",),
        tolerated=tuple(rule for rule in tolerated if rule != "update_ratio"),
        culprits=() if len(strange) > len(weights) // 2 else _list_layers(strange),
        onset_step=0,
        phases_forbidden=("overfitting_onset",) if large else ("overfitting_onset", "divergence"),
        reason=told,
    )
    return soften(truth, trace)


def _list_layers(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[0] for name in names}))


def _list_ratios(trace: Trace, names: list[str], looks: slice) -> dict[str, float]:
    return {name: float(np.median(trace.ratios[name][looks])) for name in names}


def _scenario(name: str, judge: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/{name}", kind="fault", train=judge)


SCENARIOS = (
    _scenario("non_finite/sample", partial(_judge_non_finite, _spoil_sample)),
    _scenario("non_finite/softmax", partial(_judge_non_finite, _overflow_softmax)),
    _scenario("spike/rate_glitch", partial(_judge_spike, _glitch_rate)),
    _scenario("spike/lost_head", partial(_judge_spike, _lose_weights)),
    _scenario("diverge/growing_rate", partial(_judge_divergence, _grow_rate, 0.2, 0.4)),
    _scenario("diverge/fed_weights", partial(_judge_divergence, _feed_weights, 0.3, 0.5)),
    _scenario("plateau/zeros", partial(_judge_plateau, _start_with_zeros)),
    _scenario("update/creeping", partial(_judge_steps, _creep, False)),
    _scenario("update/leaping_layer", partial(_judge_steps, _leap_alone, True)),
)
