"""Third family: overfitting, values that are not finite, spikes, divergence and plateaus."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families import third_verdicts as verdicts
from benchmarks.diagnosis.families.third_course import Course, Notes, descend, supervise
from benchmarks.diagnosis.families.third_tasks import (
    cross_entropy,
    make_plain,
    scaled_friedman,
    split,
)
from benchmarks.diagnosis.networks import make_convolutional
from benchmarks.diagnosis.scenario import Draw


def _left_in_eval(draw: Draw, faulty: bool) -> Course:
    """After the first validations nobody calls train(): dropout is off for good."""
    rng = draw.stream("data")
    data = datasets.load_digits(rng, noise=0.35).shrink(draw.integer(90, 140)).mislabel(rng, 0.15)
    width = draw.integer(96, 160)
    model = make_plain(64, width, width, 10, drop=0.7)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.004))
    steps = 20 * draw.integer(18, 24)
    onset = draw.onset_step(steps, 0.2, 0.35)
    return supervise(
        draw,
        model,
        data,
        cross_entropy,
        optimizer,
        before=lambda step: model.train(not (faulty and step >= onset)) and None,
        keep_mode=True,
        accuracy=draw.choice(True, False),
        keys=("loss", "val_loss"),
        steps=steps,
        onset=onset,
    )


def _negative_variance(draw: Draw, faulty: bool) -> Course:
    """A variance is predicted without anything that keeps it above zero."""
    rng = draw.stream("data")
    x = rng.normal(size=(1500, 10))
    scatter = x[:, 1:2].clip(min=0.0) * rng.normal(size=(1500, 1))
    data = split(x, x @ rng.normal(size=(10, 1)) / 3.2 + scatter)
    width = draw.integer(24, 48)
    model = make_plain(10, width, width, 2, act=nn.SiLU)
    with torch.no_grad():
        model.head.bias[1] = draw.uniform(0.5, 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.006, 0.015))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        variance = output[:, 1] if faulty else functional.softplus(output[:, 1]) + 0.02
        return 0.5 * (variance.log() + (output[:, 0] - y[:, 0]).square() / variance).mean()

    return supervise(draw, model, data, loss, optimizer, steps=360)


def _arc_cosine(draw: Draw, faulty: bool) -> Course:
    """The angle to the true direction, by an arc cosine that meets its end."""
    rng = draw.stream("data")
    x = rng.normal(size=(1200, 6))
    y = functional.normalize(torch.tensor(x @ rng.normal(size=(6, 2))), dim=-1)
    model = make_plain(6, draw.integer(24, 48), 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.002, 0.006))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        cosine = (functional.normalize(output, dim=-1) * y).sum(-1)
        return (cosine if faulty else cosine.clamp(-0.9999, 0.9999)).acos().mean()

    return supervise(draw, model, split(x, y), loss, optimizer, batch=64, steps=280)


def _no_hard_examples(draw: Draw, faulty: bool) -> Course:
    """The mean over the hard examples of a batch, of which one day there are none."""
    data = datasets.load_blobs(draw.stream("data"), spread=0.8, classes=4)
    model = make_plain(20, draw.integer(24, 48), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.02, 0.06), momentum=0.9)
    level = 0.01 + 0.09 * draw.severity

    def loss(output: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(output, y, reduction="none")
        if not model.training:
            return each.mean()
        hard = each[each > level]
        return hard.mean() if faulty else hard.sum() / max(1, len(hard))

    return supervise(draw, model, data, loss, optimizer, steps=240)


def _one_sorted_epoch(draw: Draw, faulty: bool) -> Course:
    """After a resume one epoch comes in the order of its classes."""
    data = datasets.load_shapes(draw.stream("data"))
    model = make_convolutional([6, 12], 16, 4, hidden=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.0015, 0.003))
    steps = 10 * draw.integer(28, 34)
    onset = draw.onset_step(steps, 0.45, 0.6)
    rows = data.y.argsort(stable=True)
    rng = draw.stream("order")
    per_epoch = len(rows) // 32

    def take(step: int) -> Tensor:
        place = step - onset
        if faulty and 0 <= place < per_epoch:
            return rows[32 * place : 32 * place + 32]
        return torch.from_numpy(rng.integers(0, len(rows), 32))

    return supervise(
        draw, model, data, cross_entropy, optimizer, take=take, steps=steps, onset=onset
    )


def _stale_gradients(draw: Draw, faulty: bool) -> Course:
    """Workers send gradients of weights that are long gone, and more of them join."""
    data = scaled_friedman(draw)
    model = make_plain(10, draw.integer(16, 32), 1, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.02, 0.04), momentum=0.9)
    steps = 10 * draw.integer(24, 30)
    onset = draw.onset_step(steps, 0.15, 0.4)
    delay = 10 + round(20 * draw.severity)
    waiting: deque[list[Tensor]] = deque()

    def delay_gradients(_optimizer: object, _args: object, _kwargs: object) -> None:
        waiting.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        place = len(waiting) - 1 if len(waiting) <= onset else max(onset, len(waiting) - 1 - delay)
        for parameter, old in zip(model.parameters(), waiting[place], strict=True):
            parameter.grad = old.clone()

    if faulty:
        optimizer.register_step_pre_hook(delay_gradients)
    return supervise(draw, model, data, functional.mse_loss, optimizer, steps=steps, onset=onset)


def _adversary(draw: Draw, faulty: bool) -> Course:
    """A reversed gradient against a domain head, many times too strong."""
    data = datasets.load_blobs(draw.stream("data"), classes=4)
    domain = (data.x[:, 0] > data.x[:, 0].median()).long()
    proof_domain = (data.proof_x[:, 0] > data.x[:, 0].median()).long()
    width = draw.integer(16, 32)
    model = nn.ModuleDict(
        {
            "body": make_plain(20, width, width),
            "task": nn.Linear(width, 4),
            "domain": nn.Linear(width, 2),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.log_uniform(0.01, 0.03), momentum=0.9)
    steps = 10 * draw.integer(24, 30)
    onset = draw.onset_step(steps, 0.15, 0.35)
    notes = Notes()
    order = draw.stream("order")
    strong = 5.0 + 10.0 * draw.severity

    def value(x: Tensor, y: Tensor, side: Tensor, weight: float) -> Tensor:
        features = model["body"](x)
        turned = features.detach() * (1.0 + weight) - features * weight
        return cross_entropy(model["task"](features), y) + cross_entropy(
            model["domain"](turned), side
        )

    def advance(step: int) -> dict[str, float]:
        chosen = torch.from_numpy(order.integers(0, len(data.x), 32))
        weight = strong if faulty and step >= onset else 0.05
        loss = value(data.x[chosen], data.y[chosen], domain[chosen], weight)
        return {"train/loss": descend(notes, model, optimizer, loss)}

    return Course(
        model=model,
        optimizer=optimizer,
        steps=steps,
        advance=advance,
        exam=lambda: value(data.proof_x, data.proof_y, proof_domain, 0.0),
        fit=lambda: value(data.x, data.y, domain, 0.0),
        notes=notes,
        onset=onset,
    )


class _Shares(nn.Sequential):
    """A network whose one output goes through a softmax over that one output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).softmax(-1)


def _softmax_of_one(draw: Draw, faulty: bool) -> Course:
    data = datasets.load_table("breast_cancer", draw.stream("data"))
    width = draw.integer(16, 48)
    plain = make_plain(30, width, width, 1, act=draw.choice(nn.ReLU, nn.Tanh))
    model = _Shares(*plain) if faulty else nn.Sequential(*plain, nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.log_uniform(0.001, 0.005))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy(output[:, 0], y.float())

    return supervise(draw, model, data, loss, optimizer, steps=10 * draw.integer(18, 26))


SCENARIOS = (
    verdicts.fault("overfit/left_in_eval", _left_in_eval, verdicts.judge_overfitting),
    verdicts.fault("nonfinite/negative_variance", _negative_variance, verdicts.judge_non_finite),
    verdicts.fault("nonfinite/arc_cosine", _arc_cosine, verdicts.judge_non_finite),
    verdicts.fault("nonfinite/no_hard_examples", _no_hard_examples, verdicts.judge_non_finite),
    verdicts.fault("spike/one_sorted_epoch", _one_sorted_epoch, verdicts.judge_spike),
    verdicts.fault("diverge/stale_gradients", _stale_gradients, verdicts.judge_divergence),
    verdicts.fault("diverge/adversary", _adversary, verdicts.judge_divergence),
    verdicts.fault("plateau/softmax_of_one", _softmax_of_one, verdicts.judge_plateau),
)
