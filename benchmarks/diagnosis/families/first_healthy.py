"""Healthy trainings of the first family: the usual kind, and habits that look like faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import judge_healthy
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train

Make = Callable[[Draw], Problem]


def _any(draw: Draw, *names: str) -> Problem:
    return zoo.ZOO[draw.choice(*names)](draw)


def _scale_loss_down(draw: Draw) -> Problem:
    made = _any(draw, "waves", "friedman", "autoencoder", "brackets")
    made.change_loss = lambda _step, loss: loss * 1e-5
    made.optimizer = torch.optim.Adam(
        made.model.parameters(), lr=made.optimizer.param_groups[0]["lr"], eps=1e-14
    )
    return made


def _meet_bad_batch(draw: Draw) -> Problem:
    """One batch with wrong labels; the training is over it in a few steps."""
    made = _any(draw, "digits_mlp", "digits_cnn", "shapes_cnn", "brackets")
    made.clip = 1.0
    bad, shift = draw.onset_step(made.steps), 1

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, (y + shift) % made.data.classes if step == bad else y

    made.change_batch = spoil
    return made


class _Quiet(nn.Module):
    """A layer whose outputs are tiny by design, beside a path of the usual size."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


def _whisper(draw: Draw) -> Problem:
    made = zoo.make_digits_mlp(draw, activation="gelu", depth=2)
    width = made.model.get_submodule("fc0").out_features
    made.model.get_submodule("fc0").weight.data.mul_(0.1)
    quiet = _Quiet(width, 10.0 ** draw.uniform(-3.0, -1.5))
    made.model.act1 = nn.Sequential(nn.GELU(), quiet)
    made.optimizer = zoo.make_optimizer(draw, made.model.parameters(), "adam")
    return made


def _log_little(draw: Draw) -> Problem:
    """Metrics only, under the other conventional keys."""
    made = _any(draw, "digits_mlp", "table", "friedman", "text_gru", "brackets", "spirals")
    made.loss_key, made.val_key = "training/loss", "validation"
    made.start = {"layers": False, "parameters": False, "timing": "none"}
    return made


def _log_no_parameters(draw: Draw) -> Problem:
    made = _any(draw, "digits_cnn", "shapes_cnn", "text_transformer", "adding")
    made.start = {"parameters": False}
    return made


def _train(make: Make, gain: float, recorder: Recorder, draw: Draw) -> Truth:
    trace = train(make(draw), recorder, draw)
    return judge_healthy(trace, gain=gain, reason=draw.name.rpartition("/")[2])


def _healthy(name: str, make: Make, gain: float = 0.3) -> Scenario:
    return Scenario(name=f"first/healthy/{name}", kind="healthy", train=partial(_train, make, gain))


def _take_whole_batch(recorder: Recorder, draw: Draw) -> Truth:
    """L-BFGS on all data: few steps, each of many forwards, steps far larger than Adam's."""
    rng = draw.stream("data")
    data = datasets.load_blobs(rng, count=600, spread=1.5)
    model = make_mlp([20, draw.integer(8, 16), data.classes], activation="tanh")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=draw.uniform(0.2, 0.5), max_iter=4)
    recorder.start(model, optimizer, config={"model": "whole batch"})
    steps, decay = 60, 3e-3
    proof: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.x), data.y)
        loss = loss + decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    for step in range(steps):
        with recorder.step(step):
            loss = float(optimizer.step(closure).detach())
            recorder.log({"train/loss": loss})
        with torch.no_grad():
            proof.append(float(functional.cross_entropy(model(data.proof_x), data.proof_y)))
            held_out = float(functional.cross_entropy(model(data.val_x), data.val_y))
        if step % 3 == 2:
            recorder.validate(step, {"val/loss": held_out})
    told = f"proof loss {proof[0]:.3g} -> best {min(proof):.3g} -> {proof[-1]:.3g}"
    if not proof[-1] < 0.6 * proof[0] or proof[-1] > 1.25 * min(proof):
        return doubt(told)
    tolerated = ("overfitting_onset",) if proof[-1] > 1.08 * min(proof) else ()
    return Truth(kind="healthy", tolerated=tolerated, phases_forbidden=("divergence",), reason=told)


def _healthy_objectives(name: str, train_one: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/healthy/{name}", kind="healthy", train=train_one)


SCENARIOS = (
    *(_healthy(f"plain_{name}", make) for name, make in zoo.ZOO.items()),
    _healthy("small_loss", _scale_loss_down),
    _healthy("bad_batch", _meet_bad_batch),
    _healthy("tiny_outputs", _whisper),
    _healthy("metrics_only", _log_little),
    _healthy("no_parameters", _log_no_parameters),
    _healthy_objectives("whole_batch", _take_whole_batch),
)
