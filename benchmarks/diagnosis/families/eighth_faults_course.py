"""Faults of the course: schedules, precision, optimizers gradients that are not meant so."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.eighth_course import Course, judge_fault, lost, pair
from benchmarks.diagnosis.families.eighth_tasks import (
    SmallResNet,
    make_chain,
    make_images,
    make_prices,
    sample,
    supervise,
)
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.networks import Classifier, Transformer, make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _schedule_not_restored(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on resuming: the checkpoint lacks the scheduler, the rate comes back far too high."""

    def make(draw: Draw, faulty: bool) -> Course:
        data, _ = make_chain(draw, sharpness=2.0)
        model = Transformer(12, 32, 2, 20)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        again, high = draw.onset_step(360, 0.35, 0.55), draw.uniform(0.25, 0.5)

        def before(step: int) -> None:
            rate = 2e-3 * max(0.1, 1 - step / 360)
            if faulty and step >= again:
                rate = high
            optimizer.param_groups[0]["lr"] = rate

        course = supervise(
            draw, model, optimizer, data, steps=360, names=("train/loss", "eval/loss", "")
        )
        plain = course.lose

        def lose(net: nn.Module, got: Any, step: int) -> tuple[Tensor, dict[str, float]]:
            loss, logged = plain(net, got, step)
            return loss, {**logged, "train/lr": optimizer.param_groups[0]["lr"]}

        course.before, course.lose, course.config["resumed_at"] = before, lose, again
        return course

    course, notes, twin = pair(make, recorder, draw)
    gained = notes.begin - notes.best
    borne = notes.end - notes.best > 0.3 * gained
    return judge_fault(
        borne,
        notes,
        twin,
        "divergence",
        reason=f"a schedule begun anew: {(notes.end - notes.best) / gained:.0%} is lost",
        onset=course.config["resumed_at"],
        tolerated=WRECK,
    )


class _Reverse(torch.autograd.Function):
    """The identity whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """The input."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient, turned and weighted."""
        return -ctx.weight * grads[0], None


class _Domains(nn.Module):
    """Features, a classifier of labels and one of domains."""

    def __init__(self, width: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.labels = nn.Linear(width, 10)
        self.domains = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor, weight: float = 0.0) -> tuple[Tensor, Tensor]:
        """Logits of labels and of domains."""
        found = self.features(x)
        return self.labels(found), self.domains(_Reverse.apply(found, weight))


def _reversal_without_end(recorder: Recorder, draw: Draw) -> Truth:
    """Ganin and Lempitsky 2015: the weight of the reversal is ramped to 1; here it goes on."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Domains(draw.integer(48, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        take, top = sample(draw, len(data.x), 32), draw.uniform(60, 120)

        def weight(step: int) -> float:
            ramp = 2 / (1 + np.exp(-10 * step / 400)) - 1
            return float(top * max(0.0, step / 400 - 0.3) + ramp) if faulty else float(0.1 * ramp)

        def lose(net: nn.Module, ids: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
            x, y = data.x[ids], data.y[ids]
            other = 0.8 * x.flip(1) + 0.2
            labels, here = net(x, weight(step))
            there = net(other, weight(step))[1]
            names = torch.tensor([0] * len(x) + [1] * len(x))
            domain = functional.cross_entropy(torch.cat([here, there]), names)
            label = functional.cross_entropy(labels, y)
            return label + domain, {
                "train/label_loss": label.item(),
                "train/domain_loss": domain.item(),
                "train/lambda": weight(step),
            }

        def proof(net: nn.Module) -> float:
            return min(20.0, float(functional.cross_entropy(net(data.proof_x)[0], data.proof_y)))

        def check(_step: int) -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                output = model(data.val_x)[0]
            model.train()
            return {
                "val/loss": float(functional.cross_entropy(output, data.val_y)),
                "val/accuracy": float((output.argmax(1) == data.val_y).float().mean()),
            }

        return Course(model, optimizer, take, lose, proof, check, steps=400)

    _, notes, twin = pair(make, recorder, draw)
    gained = notes.begin - notes.best
    return judge_fault(
        notes.end - notes.best > 0.4 * gained and lost(notes, twin) > 0.4,
        notes,
        twin,
        "divergence",
        reason=f"the reversal outgrew the task: {(notes.end - notes.best) / gained:.0%} is lost",
        tolerated=WRECK,
    )


def _scheduler_per_batch(recorder: Recorder, draw: Draw) -> Truth:
    """Many threads: StepLR meant for epochs is stepped at every batch, and the rate is gone."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=8, count=1800)
        model = make_convolutional([8, 16], 12, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        size = draw.integer(9, 14)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=size, gamma=0.3)
        course = supervise(
            draw, model, optimizer, data, steps=400, names=("train_loss", "valid_loss", "valid_acc")
        )
        plain = course.lose

        def lose(net: nn.Module, got: Any, step: int) -> tuple[Tensor, dict[str, float]]:
            loss, logged = plain(net, got, step)
            return loss, {**logged, "lr": optimizer.param_groups[0]["lr"]}

        def after(step: int) -> None:
            if faulty or (step + 1) % (course.per_epoch or 1) == 0:
                schedule.step()

        course.after, course.lose = after, lose
        return course

    _, notes, twin = pair(make, recorder, draw)
    late = np.ptp(notes.proof[15:]) / notes.begin
    return judge_fault(
        lost(notes, twin) > 0.25 and late < 0.02,
        notes,
        twin,
        "plateau",
        reason="a schedule of epochs stepped at every batch: soon there is no rate",
        tolerated=("update_ratio", "stagnant_layers", "optimizer_not_stepping", "mostly_frozen"),
    )


def _symmetric_units(recorder: Recorder, draw: Draw) -> Truth:
    """Goodfellow et al. 2016, 8.4: all weights start at one value, and all units stay the same."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model = make_mlp([64, 48, 48, 10], activation="tanh")
        if faulty:
            value = draw.uniform(0.02, 0.05)
            for weight in model.parameters():
                nn.init.constant_(weight, value)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        return supervise(draw, model, optimizer, data, steps=500, train_accuracy="train/accuracy")

    course, notes, twin = pair(make, recorder, draw)
    unequal = float(course.model.get_submodule("fc0").weight.detach().std(0).max())
    late = (notes.proof[18] - notes.end) / notes.begin
    return judge_fault(
        unequal < 1e-3 and lost(notes, twin) > 0.4 and late < 0.06,
        notes,
        twin,
        "plateau",
        reason=f"all units of a layer are one unit (deviation {unequal:.1g}): it cannot learn more",
        tolerated=("update_ratio", "stagnant_layers", "activation_collapse", "vanishing_gradients"),
    )


def _no_zero_grad(recorder: Recorder, draw: Draw) -> Truth:
    """The recipe's second line forgotten: gradients of all steps so far are added up."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=6)
        model = SmallResNet(10, 1, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=draw.uniform(2e-3, 4e-3))
        course = supervise(
            draw, model, optimizer, data, steps=260, train_accuracy="train/accuracy", log_norm=True
        )
        if faulty:
            course.zero = lambda _step: None
        return course

    _, notes, twin = pair(make, recorder, draw)
    growth = float(np.median(notes.norms[-30:]) / np.median(notes.norms[:10]))
    return judge_fault(
        notes.end > 1.3 * twin.end,
        notes,
        twin,
        "gradients_not_cleared",
        reason=f"gradients never cleared: their norm grew to {growth:.1f} times",
        tolerated=(*WRECK, "overfitting_onset"),
    )


def _head_never_cleared(recorder: Recorder, draw: Draw) -> Truth:
    """Two optimizers, one `zero_grad`: threads on models with an optimizer for each part."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data"), noise=0.2).flatten()
        body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        model = Classifier(body, 32, 10)
        first = torch.optim.SGD(body.parameters(), lr=0.03, momentum=0.9)
        rest = [*model.neck.parameters(), *model.head.parameters()]
        second = torch.optim.SGD(rest, lr=draw.uniform(0.01, 0.02), momentum=0.9)
        course = supervise(draw, model, [first, second], data, steps=300)

        def zero(_step: int) -> None:
            first.zero_grad()
            if not faulty:
                second.zero_grad()

        course.zero = zero
        return course

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        notes.end > 1.3 * twin.end,
        notes,
        twin,
        "gradients_not_cleared",
        reason="only the body's optimizer clears its gradients",
        tolerated=(*WRECK, "overfitting_onset"),
    )


def _head_replaced_afterwards(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on fine-tuning: the optimizer was made before the model got its new last layers."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=8, noise=0.8)
        model = make_convolutional([8, 12], 12, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        model.fc = nn.Linear(12 * 36, 24)
        model.head = nn.Linear(24, 8)
        if not faulty:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return supervise(draw, model, optimizer, data, steps=240)

    _, notes, twin = pair(make, recorder, draw)
    still = max(notes.moved("head.weight"), notes.moved("fc.weight"))
    return judge_fault(
        still == 0.0 and lost(notes, twin) > 0.02,
        notes,
        twin,
        "parameters_not_optimized",
        reason="the optimizer has the layers that were replaced",
        tolerated=("stagnant_layers", "mostly_frozen", "plateau", "optimizer_not_stepping"),
        culprits=("head", "fc", "head.weight", "fc.weight", "head.bias", "fc.bias"),
    )


def _model_of_the_last_fold(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on cross-validation: a new model for each fold, the optimizer of the last one."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_prices(draw)
        model = make_mlp([8, 40, 40, 1], activation="relu")
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        if faulty:
            model = make_mlp([8, 40, 40, 1], activation="relu")
        return supervise(draw, model, optimizer, data, steps=300, names=("mse", "val_mse", ""))

    _, notes, twin = pair(make, recorder, draw)
    still = all(notes.moved(name) == 0.0 for name in notes.first)
    return judge_fault(
        still and lost(notes, twin) > 0.5,
        notes,
        twin,
        "parameters_not_optimized",
        reason="the optimizer steps the model of another fold",
        tolerated=(
            "stagnant_layers",
            "mostly_frozen",
            "plateau",
            "optimizer_not_stepping",
            "update_ratio",
        ),
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "divergence/schedule_not_restored": _schedule_not_restored,
        "divergence/reversal_without_end": _reversal_without_end,
        "plateau/scheduler_per_batch": _scheduler_per_batch,
        "plateau/symmetric_units": _symmetric_units,
        "gradients_not_cleared/no_zero_grad": _no_zero_grad,
        "gradients_not_cleared/head_never_cleared": _head_never_cleared,
        "parameters_not_optimized/head_replaced_afterwards": _head_replaced_afterwards,
        "parameters_not_optimized/model_of_the_last_fold": _model_of_the_last_fold,
    }.items()
)
