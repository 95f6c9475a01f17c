"""Healthy trainings of the fifth family: what looks like a fault, and faults that were mended."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import Plan, make_healthy
from benchmarks.diagnosis.families.fifth_faults import (
    make_bare_norms,
    make_broadcast,
    make_detached,
    make_lags,
    make_poles,
    make_spoken,
    make_unfrozen,
)
from benchmarks.diagnosis.families.fifth_recipes import (
    clicks,
    documents,
    reversals,
    series,
)
from benchmarks.diagnosis.families.fifth_tasks import (
    Documents,
    make_documents,
)
from benchmarks.diagnosis.scenario import Draw


# Power et al. 2022 in small, and seq2seq attention: nothing for long, then everything.
def make_late(draw: Draw, _broken: bool) -> Plan:
    """Rows backwards, which stay at chance until attention turns around."""
    return reversals(draw, length=6, steps=360)


# Szegedy et al. 2016: smoothed labels keep the loss up.
def make_smoothed(draw: Draw, _broken: bool) -> Plan:
    """The loss cannot fall below its floor, the errors do."""

    def smoothed(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, label_smoothing=0.25)

    def errors(output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(-1) != y).float().mean()

    return documents(
        draw, Documents(draw.integer(20, 28)), criterion=smoothed, honest=errors, rate=6e-3
    )


# Click prediction (DLRM, Naumov et al. 2019): few positives, a small loss from early on.
def make_rare(draw: Draw, _broken: bool) -> Plan:
    """Three of a hundred were clicked."""
    return clicks(draw, base=-4.5)


# Evaluation every few steps makes some steps longer; it is a small part of the time.
def make_evaluating(draw: Draw, _broken: bool) -> Plan:
    """Every 25th step takes three times as long."""
    plan = documents(draw, Documents(draw.integer(16, 24)))
    rng, compute = draw.stream("clock"), draw.log_uniform(40.0, 300.0)

    def times(step: int) -> tuple[float, float, float]:
        worked = compute * float(rng.lognormal(0.0, 0.04)) * (3.0 if step % 25 == 24 else 1.0)
        waited = 0.06 * compute * float(rng.lognormal(0.0, 0.2))
        return worked + waited, waited, worked

    plan.times = times
    return plan


# torch.compile and cuDNN's search: the first steps are slow, once.
def make_compiled(draw: Draw, _broken: bool) -> Plan:
    """The first step takes as long as forty."""
    plan = clicks(draw, steps=340)
    rng, compute = draw.stream("clock"), draw.log_uniform(10.0, 80.0)

    def times(step: int) -> tuple[float, float, float]:
        worked = compute * float(rng.lognormal(0.0, 0.06))
        worked *= {0: 40.0, 1: 8.0}.get(step, 1.0)
        waited = 0.1 * compute * float(rng.lognormal(0.0, 0.2))
        return worked + waited, waited, worked

    plan.times = times
    return plan


# Bengio et al. 2009: easy samples first; the loss rises where the hard ones come.
def make_graded(draw: Draw, _broken: bool) -> Plan:
    """Clear documents first, then those with many common words."""
    parts = make_documents(draw.stream("data"), blur=0.7, count=2400)
    # Documents with more words of their own are longer here, and so clearer.
    lengths = (parts.x > 0).sum(1)
    order = lengths.argsort(descending=True)
    easy, rng = order[: len(order) // 3], draw.stream("easy")

    def grade(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < 90:
            chosen = easy[torch.from_numpy(rng.integers(0, len(easy), len(x)))]
            return parts.x[chosen], parts.y[chosen]
        return x, y

    return documents(draw, Documents(draw.integer(20, 28)), parts=parts, change=grade)


class _Taught(nn.Module):
    def __init__(self, student: Documents):
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student)
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.student(words)
        return result


# Mean teacher (Tarvainen and Valpola 2017): half of the weights have no gradient.
def make_taught(draw: Draw, _broken: bool) -> Plan:
    """A teacher that is the average of its student, and in no optimizer."""
    model = _Taught(Documents(draw.integer(20, 28), dropout=0.1))
    parts = make_documents(draw.stream("data"))
    optimizer = torch.optim.Adam(model.student.parameters(), lr=6e-3)
    plan = documents(draw, Documents(4), parts=parts, optimizer=optimizer)
    rng = draw.stream("more")

    def loss(_model: nn.Module, step: int) -> Tensor:
        chosen = torch.from_numpy(rng.integers(0, len(parts.x), 32))
        output = model(parts.x[chosen])
        with torch.no_grad():
            wanted = model.teacher(parts.x[chosen]).softmax(-1)
        agreement = functional.mse_loss(output.softmax(-1), wanted)
        return functional.cross_entropy(output, parts.y[chosen]) + agreement * min(1, step / 50)

    def follow(_step: int) -> None:
        with torch.no_grad():
            pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, 0.05)

    plan.model, plan.loss, plan.after = model, loss, follow
    return plan


# Lightning's on_epoch logging: one number of training and one of validation per epoch.
def make_epochs(draw: Draw, _broken: bool) -> Plan:
    """A forecaster whose curves have a point for each epoch."""
    plan = series(draw, steps=312, keys=("train_loss_epoch", "val_mse"))
    plan.by_epoch = True
    return plan


SCENARIOS = (
    make_healthy("late_breakthrough", make_late, "at chance for long"),
    make_healthy("smoothed_labels", make_smoothed, "the loss has a high floor"),
    make_healthy("rare_clicks", make_rare, "a small loss from early on"),
    make_healthy("evaluates_often", make_evaluating, "every 25th step is slow"),
    make_healthy("compiled_first", make_compiled, "the first step is slow"),
    make_healthy("easy_first", make_graded, "harder data from step 90", tolerated=("loss_spike",)),
    make_healthy("mean_teacher", make_taught, "half of the weights are in no optimizer"),
    make_healthy("epochs_only", make_epochs, "a point for each epoch"),
    # TrainCheck's pytorch-forum-84911, fixed.
    make_healthy("all_trained", make_bare_norms, "batch normalisation, everything trained"),
    # fastai #2133, fixed: the unfrozen layers come into the optimizer later.
    make_healthy("unfrozen_with_their_group", make_unfrozen, "still at first, then trained"),
    # PyTorch forum's detached encoder, fixed.
    make_healthy("encoder_attached", make_detached, "long flat start of a sequence model"),
    # wenet #2299, fixed: what cannot be aligned counts 0.
    make_healthy("infinities_zeroed", make_spoken, "some utterances count nothing"),
    # RoboVerse #814, fixed: only a reward is logged, and it is noisy.
    make_healthy("falls_count", make_poles, "a noisy reward and no loss", phases=False),
    # PyTorch's warning of target sizes, heeded.
    make_healthy("sizes_agree", make_broadcast, "mean square error of noisy hours"),
    # Stack Overflow's unscaled features, scaled.
    make_healthy("scaled_lags", make_lags, "a linear model, soon at its floor"),
)
