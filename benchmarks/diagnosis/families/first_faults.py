"""Faults of the first family: gradients, layers that do not train or collapse, overfitting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.measuring import WRECK, doubt, smooth
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import find_dead, find_saturated, is_worse, soften
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, Trace, train, train_twice

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


def _choose_base(draw: Draw) -> Problem:
    make = draw.choice(
        zoo.make_digits_mlp,
        zoo.make_digits_cnn,
        zoo.make_shapes_cnn,
        zoo.make_residual,
        zoo.make_text_gru,
        zoo.make_spirals,
        zoo.make_friedman,
    )
    return make(draw)


def _remake(optimizer: torch.optim.Optimizer, groups: list[object]) -> torch.optim.Optimizer:
    options = {
        name: value
        for name, value in optimizer.param_groups[0].items()
        if name in {"lr", "momentum", "weight_decay"}
    }
    return type(optimizer)(groups, **options)


def _swap_layer(draw: Draw, faulty: bool) -> Problem:
    """A layer is replaced after the optimizer was made, which so holds the old one."""
    made = _choose_base(draw)
    chosen = draw.integer(0, 10)
    names = [n for n, m in made.model.named_modules() if isinstance(m, nn.Linear)]
    name = names[chosen % len(names)]
    old = made.model.get_submodule(name)
    torch.manual_seed(draw.torch_seed + 1)
    new = nn.Linear(old.in_features, old.out_features)
    parent = made.model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], new)
    if not faulty:
        made.optimizer = _remake(made.optimizer, [*made.model.parameters()])
    return made


def _judge_stagnant(make: Callable[[Draw, bool], Problem], recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, twin = train_twice(make, recorder, draw)
    # Exactly no update at any look of the last half: not small, none.
    half = len(trace.looks) // 2
    still = [name for name, ratios in trace.ratios.items() if not any(ratios[half:])]
    idle = [name for name in still if not any(twin.ratios[name][half:])]
    layers = sorted({name.rpartition(".")[0] for name in still if name not in idle})
    moving = [np.median(trace.ratios[name][half:]) for name in trace.ratios if name not in still]
    told = f"parameters of {layers} never change in the last half; in the twin they do"
    if not layers or not moving or max(moving) <= 0.0:
        return doubt(f"{told}: nothing stands still alone")
    onset = 0
    first = [trace.ratios[f"{layer}.{_first_name(problem, layer)}"] for layer in layers]
    changes = [index for ratios in first for index, ratio in enumerate(ratios) if ratio]
    if changes:
        onset = trace.looks[min(max(changes) + 1, len(trace.looks) - 1)]
    tolerated = ["update_ratio", "plateau", "vanishing_gradients"]
    if not problem.zero_all:
        # Nobody zeroes the gradient of what the optimizer does not hold: it grows.
        tolerated.append("exploding_gradients")
    truth = Truth(
        kind="fault",
        expected=("stagnant_layers",),
        tolerated=tuple(tolerated),
        culprits=tuple(layers),
        onset_step=onset,
        phases_forbidden=("divergence", "overfitting_onset"),
        reason=f"{told}; proof loss {trace.proof[-1]:.3g}, twin {twin.proof[-1]:.3g}",
    )
    return soften(truth, trace)


def _first_name(problem: Problem, layer: str) -> str:
    return next(iter(dict(problem.model.get_submodule(layer).named_parameters())))


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


class _Views(nn.Module):
    """Two noisy views of each input through one encoder."""

    def __init__(self, encoder: nn.Module, generator: torch.Generator):
        super().__init__()
        self.encoder = encoder
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn((2, *x.shape), generator=self.generator)
        return torch.stack([self.encoder(x + 0.3 * part) for part in noise], -1)


def _agree(draw: Draw, faulty: bool) -> Problem:
    """Two views are drawn together, and nothing keeps the representations apart."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    width = draw.integer(32, 64)
    encoder = make_mlp([64, width, width, 16], activation=draw.choice("relu", "tanh", "gelu"))
    generator = torch.Generator().manual_seed(draw.torch_seed)
    model = _Views(encoder, generator)

    def loss(output: Tensor, _target: Tensor) -> Tensor:
        first, second = output[..., 0], output[..., 1]
        apart = (first - second).square().mean()
        if faulty:
            return apart
        spread = first.std(0)
        centred = first - first.mean(0)
        cross = (centred.T @ centred / len(first)).fill_diagonal_(0.0)
        return apart + (1.0 - spread).relu().mean() + 0.1 * cross.square().sum() / 16

    optimizer = zoo.make_optimizer(draw, model.parameters(), "adam", factor=2.0 + draw.severity)
    return Problem(model, optimizer, data, loss, draw.stream("order"), steps=300, batch_size=48)


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


def _judge_sameness(recorder: Recorder, draw: Draw) -> Truth:
    problem, trace, twin = train_twice(_agree, recorder, draw)
    spread = _spread(problem)
    torch.manual_seed(draw.torch_seed)
    start = _spread(_agree(draw.again(), True))
    told = f"deviation of embeddings over inputs {start:.3g} -> {spread:.3g}"
    if spread > 0.05 * start or twin.proof[-1] > twin.proof[0]:
        return doubt(f"{told}: no collapse")
    return Truth(
        kind="fault",
        expected=("activation_collapse",),
        tolerated=("vanishing_gradients", "plateau", "update_ratio"),
        onset_step=0,
        phases_forbidden=("overfitting_onset", "divergence"),
        reason=f"{told}; loss {trace.fixed[0]:.3g} -> {trace.fixed[-1]:.3g}",
    )


def _spread(problem: Problem) -> float:
    with torch.no_grad():
        return float(problem.model.encoder(problem.data.proof_x).double().std(0).mean())


def _learn_wrong_labels(draw: Draw) -> Problem:
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.1)
    data = data.shrink(draw.integer(150, 400)).mislabel(rng, 0.15 + 0.25 * draw.severity)
    width = draw.integer(96, 160)
    model = make_mlp([64, width, width, 10], activation=draw.choice("relu", "tanh"))
    return _finish(draw, model, data, zoo.cross_entropy, 1.5)


def _learn_noise_columns(draw: Draw) -> Problem:
    """A table with few rows, and many columns that say nothing."""
    rng = draw.stream("data")
    name = draw.choice("breast_cancer", "wine")
    data = datasets.load_table(name, rng)
    data = data.shrink(draw.integer(40, 70))
    columns = 40 + int(120 * draw.severity)
    parts = {
        key: torch.cat([part, torch.tensor(rng.normal(size=(len(part), columns))).float()], 1)
        for key in ("x", "val_x", "proof_x")
        for part in (getattr(data, key),)
    }
    data = replace(data, **parts).mislabel(rng, 0.35)
    model = make_mlp([data.features, 96, 96, data.classes], activation="relu")
    return _finish(draw, model, data, zoo.cross_entropy, 0.4)


def _finish(draw: Draw, model: torch.nn.Module, data: Data, loss: object, factor: float) -> Problem:
    return Problem(
        model,
        zoo.make_optimizer(draw, model.parameters(), "adam", factor=factor),
        data,
        loss,
        draw.stream("order"),
        batch_size=draw.choice(16, 24, 32),
        steps=10 * draw.integer(36, 50),
        val_every=draw.choice(10, 12, 15),
        accuracy=data.classes > 0 and draw.choice(True, False),
    )


def _judge(make: Callable[[Draw], Problem], recorder: Recorder, draw: Draw) -> Truth:
    problem = make(draw.again())
    trace = train(problem, recorder, draw)
    proof, fixed = smooth(trace.proof, 5), smooth(trace.fixed, 5)
    best = int(proof.argmin())
    told = (
        f"proof loss {proof[0]:.4g} -> {proof[best]:.4g} at step {trace.looks[best]} "
        f"-> {proof[-1]:.4g}, training {fixed[best]:.4g} -> {fixed[-1]:.4g}"
    )
    lasted = len(proof) - best
    if proof[-1] < 1.2 * proof[best] or fixed[-1] > 0.8 * fixed[best] or lasted < 8 or best < 3:
        return doubt(f"{told}: not learned by heart")
    # Where the loss on new data is clearly past its best, and stays so.
    beyond = np.flatnonzero(proof[best:] > 1.02 * proof[best])
    return Truth(
        kind="fault",
        expected=("overfitting_onset",),
        culprits=("val/loss",),
        onset_step=trace.looks[best + int(beyond[0])],
        phases_expected=("overfitting_onset",) if lasted >= 14 else (),
        phases_forbidden=("divergence",),
        reason=told,
    )


def _scenario_generalization(name: str, make: Callable[[Draw], Problem]) -> Scenario:
    return Scenario(name=f"first/overfit/{name}", kind="fault", train=partial(_judge, make))


SCENARIOS = (
    _scenario("explode/large_start", partial(_judge_explosion, _start_large, True)),
    _scenario("explode/loss_weight", partial(_judge_explosion, _weigh_loss, False)),
    _scenario("vanish/half_underflow", partial(_judge_vanishing, _underflow)),
    _scenario("stagnant/swapped", partial(_judge_stagnant, _swap_layer)),
    _scenario("collapse/sameness", _judge_sameness),
    _scenario("collapse/penalty", partial(_judge_collapse, _penalise, True)),
    _scenario_generalization("wrong_labels", _learn_wrong_labels),
    _scenario_generalization("noise_columns", _learn_noise_columns),
)
