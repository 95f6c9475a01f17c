"""Faults of the first family: gradients, layers that do not train or collapse, overfitting."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.measuring import WRECK, doubt, smooth
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import find_dead, find_saturated, is_worse
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, Trace, train_twice

Make = Callable[[Draw, bool], Problem]
_MUTED = ("plateau", "stagnant_layers", "activation_collapse", "update_ratio")


def _start_large(draw: Draw, faulty: bool) -> Problem:
    """A deep network whose weights start too large."""
    depth, width = draw.integer(6, 10), draw.integer(32, 64)
    regression = draw.choice(True, False)
    rng = draw.stream("data")
    data = datasets.load_friedman(rng) if regression else datasets.load_digits(rng, noise=0.15)
    if regression:
        for part in (data.y, data.val_y, data.proof_y):
            part.sub_(14.4).div_(5.0)
    model = make_mlp([data.features, *[width] * depth, data.classes or 1], activation="relu")
    gain = 1.7 + 0.8 * draw.severity
    if faulty:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weight"):
                    parameter.mul_(gain)
    loss = nn.functional.mse_loss if regression else zoo.cross_entropy
    optimizer = zoo.make_optimizer(draw, model.parameters(), "adam", factor=0.5)
    return Problem(
        model, optimizer, data, loss, draw.stream("order"), steps=10 * draw.integer(20, 28)
    )


def _weigh_loss(draw: Draw, faulty: bool) -> Problem:
    """A regulariser on the outputs comes in with a weight in the wrong unit."""
    made = draw.choice(zoo.make_digits_cnn, zoo.make_autoencoder, zoo.make_waves)(draw)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.03, momentum=0.9)
    weight = 6.0 * 15.0**draw.severity
    onset = draw.onset_step(made.steps)
    outputs: list[Tensor] = []
    made.model.register_forward_hook(lambda _m, _i, out: outputs.__setitem__(slice(None), [out]))
    if faulty:
        made.change_loss = lambda step, loss: (
            loss + weight * outputs[0].pow(4).mean() if step >= onset else loss
        )
    return made


def _judge_explosion(make: Make, from_start: bool, recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, twin = train_twice(make, recorder, draw)
    onset = 0 if from_start else draw.onset_step(problem.steps)
    usual = float(np.median(twin.gradients if from_start else trace.gradients[:onset]))
    after = np.array(trace.gradients[onset:])
    huge = ~(after <= 10.0 * usual)
    peak = np.inf if not np.isfinite(after).all() else after.max()
    told = f"gradient norm {usual:.3g} -> {peak:.3g}, above ten times in {int(huge.sum())} steps"
    if huge.sum() < 5:
        return doubt(f"{told}: no explosion")
    # Where it was over at once, what there is to see are values that are not finite.
    lasted = int((huge & np.isfinite(after)).sum()) >= 2 * recorder.every
    if not lasted and np.isfinite(after).all():
        return doubt(f"{told}: over at once")
    if not is_worse(trace, twin):
        return doubt(f"{told}: without effect, {trace.proof[-1]:.3g}, twin {twin.proof[-1]:.3g}")
    fixed = smooth(trace.fixed)
    settled = np.median(fixed[-len(fixed) // 5 :])
    diverged = not from_start and not settled < 2.0 * trace.near(trace.fixed, onset - 1)
    return Truth(
        kind="fault",
        expected=("exploding_gradients" if lasted else "non_finite_values",),
        tolerated=WRECK,
        onset_step=onset + int(np.argmax(huge)),
        phases_expected=("divergence",) if diverged and math.isfinite(settled) else (),
        phases_forbidden=("overfitting_onset",),
        reason=f"{told}; proof loss {trace.proof[-1]:.3g}, twin {twin.proof[-1]:.3g}",
    )


class _HalfGradient(torch.autograd.Function):
    """The backward of an operation in half precision: what is too small becomes 0."""

    @staticmethod
    def forward(_context: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        return gradient.half().float()


class _Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _HalfGradient.apply(x)


def _underflow(draw: Draw, faulty: bool) -> Problem:
    depth, width = draw.integer(3, 5), draw.integer(32, 64)
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    model = make_mlp([64, *[width] * depth, 10], activation="relu")
    for place in range(depth):
        setattr(model, f"act{place}", nn.Sequential(model.get_submodule(f"act{place}"), _Half()))
    made = _deep(draw, model, zoo.make_optimizer(draw, model.parameters(), "adam"), data)
    scale = 10.0 ** (-5.5 - 1.5 * draw.severity)
    if faulty:
        made.change_loss = lambda _step, loss: loss * scale
    return made


def _deep(
    draw: Draw, model: nn.Module, optimizer: torch.optim.Optimizer, data: datasets.Data
) -> Problem:
    return Problem(
        model,
        optimizer,
        data,
        zoo.cross_entropy,
        draw.stream("order"),
        batch_size=draw.choice(24, 32, 48),
        steps=10 * draw.integer(22, 30),
        val_every=draw.choice(10, 15, 20),
        accuracy=draw.choice(True, False),
    )


def _judge_vanishing(make: Make, recorder: Recorder, draw: Draw) -> Truth:
    _problem, trace, twin = train_twice(make, recorder, draw)
    weights = [name for name in trace.ratios if name.endswith("weight")]
    weak, healthy = _compare_layers(trace, weights), _compare_layers(twin, weights)
    lowest = weak[weights[0]]
    gain, other = max(trace.accuracy) - trace.accuracy[0], max(twin.accuracy) - twin.accuracy[0]
    told = (
        f"gradient of {weights[0]} over that of the head {lowest:.2g} "
        f"(twin {healthy[weights[0]]:.2g}); accuracy gained {gain:.2f}, twin {other:.2f}"
    )
    below = np.median(trace.layer_gradients[weights[0]]) / twin.layer_gradients[weights[0]][0]
    told += f", {below:.2g} of the twin's first"
    if (lowest > 1e-2 * healthy[weights[0]] or lowest > 1e-2) and below > 1e-3:
        return doubt(f"{told}: does not vanish")
    if gain > 0.5 * other:
        return doubt(f"{told}: learns all the same")
    layers = {name.rpartition(".")[0] for name in weights if weak[name] < 0.1}
    layers |= {name.replace("fc", "act").replace("conv", "act") for name in layers}
    return Truth(
        kind="fault",
        expected=("vanishing_gradients",),
        tolerated=_MUTED,
        culprits=tuple(sorted(layers | {f"{name}.0" for name in layers})),
        onset_step=0,
        phases_forbidden=("divergence", "overfitting_onset"),
        reason=told,
    )


def _compare_layers(trace: Trace, weights: list[str]) -> dict[str, float]:
    """Root mean square gradient of each layer over that of the last, in the middle of its looks."""
    last = float(np.median(trace.layer_gradients[weights[-1]])) + 1e-300
    return {name: float(np.median(trace.layer_gradients[name])) / last for name in weights}


def _scenario(name: str, judge: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/{name}", kind="fault", train=judge)


def _kill_units(draw: Draw, faulty: bool) -> Problem:
    """A few steps at a far too large rate, after which the units are dead."""
    make = draw.choice(zoo.make_digits_mlp, zoo.make_table, zoo.make_shapes_cnn)
    if make is zoo.make_digits_mlp:
        made = make(draw, activation="relu", optimizer="sgd")
    else:
        made = make(draw, optimizer="sgd")
    made.clip = 5.0
    onset, factor = draw.onset_step(made.steps, 0.2, 0.5), 150.0 * 6.0**draw.severity
    if faulty:
        made.rate = lambda step: factor if onset <= step < onset + 3 else 1.0
    return made


def _penalise(draw: Draw, faulty: bool) -> Problem:
    """A penalty on activations that comes in too strong, and puts the units out."""
    made = zoo.make_digits_mlp(draw, activation="relu", depth=draw.integer(2, 3))
    onset = draw.onset_step(made.steps, 0.2, 0.4)
    weight = 15.0 * 4.0**draw.severity
    kept: list[Tensor] = []
    for module in made.model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda _m, _i, output: kept.append(output))

    def add(step: int, loss: Tensor) -> Tensor:
        total = loss + (weight * sum(a.mean() for a in kept) if step >= onset else 0.0)
        kept.clear()
        return total

    def clear(_step: int) -> None:
        kept.clear()

    made.before = clear
    if faulty:
        made.change_loss = add
    return made


def _judge_collapse(
    make: Callable[[Draw, bool], Problem], late: bool, recorder: Recorder, draw: Draw
) -> Truth:
    problem, trace, twin = train_twice(make, recorder, draw)
    torch.manual_seed(draw.torch_seed)
    # A layer that lost many of its units is no wrong answer where another lost nearly all.
    fresh = make(draw.again(), False)
    found = find_dead(problem, fresh, 0.4) | find_saturated(problem, 0.4)
    told = (
        ", ".join(f"{name} {share:.0%} dead or saturated" for name, share in found.items())
        + f"; proof loss {trace.proof[-1]:.3g}, twin {twin.proof[-1]:.3g}"
    )
    if max(found.values(), default=0.0) < 0.75:
        return doubt(f"no layer collapsed: {told}")
    if not is_worse(trace, twin):
        return doubt(f"{told}: without effect")
    near = {name.replace("act", "fc") for name in found}
    near |= {name.replace("act", "conv") for name in found} | {"fc"} & {*found, *near}
    onset = draw.onset_step(problem.steps, 0.2, 0.5 if make is _kill_units else 0.4)
    return Truth(
        kind="fault",
        expected=("activation_collapse",),
        tolerated=tuple(rule for rule in WRECK if rule != "activation_collapse"),
        culprits=tuple(sorted({*found, *near})),
        onset_step=onset if late else 0,
        phases_forbidden=("overfitting_onset",),
        reason=told,
    )


SCENARIOS = (
    _scenario("explode/large_start", partial(_judge_explosion, _start_large, True)),
    _scenario("explode/loss_weight", partial(_judge_explosion, _weigh_loss, False)),
    _scenario("vanish/half_underflow", partial(_judge_vanishing, _underflow)),
    _scenario("collapse/penalty", partial(_judge_collapse, _penalise, True)),
)
