"""Layers that do not train though they should, and activations that collapse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import WRECK, doubt, find_dead, find_saturated, is_worse, soften
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train_twice


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


def _scenario(name: str, judge: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/{name}", kind="fault", train=judge)


SCENARIOS = (
    _scenario("stagnant/swapped", partial(_judge_stagnant, _swap_layer)),
    _scenario("collapse/sameness", _judge_sameness),
    _scenario("collapse/penalty", partial(_judge_collapse, _penalise, True)),
)
