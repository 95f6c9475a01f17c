"""Healthy trainings in which something looks like a fault; each names where it is usual."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import Batches, Plan, make_healthy, run
from benchmarks.diagnosis.families.fifth_faults_records import pretrain
from benchmarks.diagnosis.families.fifth_recipes import (
    clicks,
    documents,
    keywords,
    next_letter,
    ratings,
    reversals,
    series,
    text,
)
from benchmarks.diagnosis.families.fifth_tasks import (
    Documents,
    Forecaster,
    KeywordNet,
    Parts,
    make_documents,
    make_keywords,
)
from benchmarks.diagnosis.recorder import SilentRecorder
from benchmarks.diagnosis.scenario import Draw


# AWD-LSTM and fairseq recipes: the clipping norm is far below the usual one.
def make_clipped(draw: Draw, _broken: bool) -> Plan:
    """Every gradient is clipped, and Adam does not mind."""
    plan = text(draw, rate=8e-3)
    plan.clip = draw.uniform(0.05, 0.15)
    return plan


# HF course: feature extraction with a frozen encoder.
def make_frozen(draw: Draw, _broken: bool) -> Plan:
    """Only the head is trained, on features that suffice."""
    parts = make_documents(draw.stream("data"))
    model = Documents(draw.integer(24, 32))
    pretrain(model, draw, parts, 150, classes=4)
    for parameter in (*model.embed.parameters(), *model.body.parameters()):
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=draw.uniform(8e-3, 2e-2))
    return documents(draw, model, parts=parts, optimizer=optimizer, steps=200)


# fairseq's criterions: the loss is a sum over the tokens of the batch.
def make_summed(draw: Draw, _broken: bool) -> Plan:
    """Losses of hundreds and gradients of hundreds."""

    def summed(output: Tensor, y: Tensor) -> Tensor:
        return next_letter(output, y) * y.numel()

    return text(draw, criterion=summed, rate=8e-3)


# DeepAR (Salinas et al. 2017): the loss is a negative log density and goes below 0.
def make_density(draw: Draw, _broken: bool) -> Plan:
    """A forecast of mean and deviation."""

    def density(output: Tensor, y: Tensor) -> Tensor:
        scale = functional.softplus(output[:, 1]) + 1e-2
        return (scale.log() + 0.5 * ((y - output[:, 0]) / scale) ** 2).mean()

    model = Forecaster("gru", draw.integer(20, 28), outputs=2)
    return series(draw, model, criterion=density, honest=density, keys=("nll", "val_nll"))


# SGDR (Loshchilov and Hutter 2016): the rate jumps back to its top.
def make_restarted_rate(draw: Draw, _broken: bool) -> Plan:
    """Three cosines one after the other."""
    model = KeywordNet(draw.integer(16, 24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = keywords(draw, model, optimizer=optimizer, steps=240)
    plan.rate = lambda step: 0.02 + 0.49 * (1 + math.cos(math.pi * (step % 80) / 80))
    return plan


# HF's linear schedule: from 0 up, and down to 0.
def make_triangle(draw: Draw, _broken: bool) -> Plan:
    """The first updates and the last are as good as none."""
    plan = text(draw, rate=1.2e-2, steps=260)
    plan.rate = lambda step: min(step / 40, (260 - step) / 220)
    return plan


# MovieLens and any shop: a few items have most ratings, most have few.
def make_long_tail(draw: Draw, _broken: bool) -> Plan:
    """Most rows of the item table have no gradient in most steps."""
    return ratings(draw, count=5000, tail=1.1, rank=3)


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


# Srivastava et al. 2014: the training loss lies above that of validation.
def make_dropped(draw: Draw, _broken: bool) -> Plan:
    """Much dropout, and evaluation without it."""
    model = Documents(40, dropout=draw.uniform(0.5, 0.65))
    return documents(draw, model, rate=5e-3)


# Prechelt 1998: stopped at the best validation.
def make_stopped(draw: Draw, _broken: bool) -> Plan:
    """Few documents, and an end before they are known by heart."""

    def build() -> Plan:
        again = draw.again()
        torch.manual_seed(again.torch_seed)
        parts = make_documents(again.stream("data"), blur=0.6)
        few = Parts(
            parts.x[:160], parts.y[:160], parts.val_x, parts.val_y, parts.proof_x, parts.proof_y
        )
        return documents(again, Documents(24), parts=few, steps=200, size=16)

    trial = build()
    trial.looks = 100
    trace = run(trial, SilentRecorder(), draw)
    best = trace.looks[int(np.argmin(trace.proof))]
    plan = build()
    plan.steps = max(60, best)
    plan.val_every = 5
    return plan


class _Codes(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.encode = nn.Linear(12, width)
        self.act = nn.ReLU()
        self.decode = nn.Linear(width, 12)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.act(self.encode(frames))
        return self.decode(codes), codes


# Sparse autoencoders: most units are 0 for most inputs, as they should be.
def make_sparse(draw: Draw, _broken: bool) -> Plan:
    """Frames of spectrograms out of few of many codes."""
    parts = make_keywords(draw.stream("data"), noise=0.2)
    frames = parts.x.transpose(1, 2).reshape(-1, 12)[:6000]
    val = parts.val_x.transpose(1, 2).reshape(-1, 12)[:800]
    proof = parts.proof_x.transpose(1, 2).reshape(-1, 12)[:800]
    model = _Codes(draw.integer(40, 56))
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    batches = Batches(draw.stream("order"), len(frames), 64)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = frames[batches.take(step)]
        again, codes = model(x)
        return functional.mse_loss(again, x) + 0.01 * codes.mean()

    def judge(model: nn.Module) -> float:
        return float(functional.mse_loss(model(proof)[0], proof))

    def held_out(model: nn.Module) -> dict[str, float]:
        return {"val/reconstruction": float(functional.mse_loss(model(val)[0], val))}

    return Plan(model, optimizer, loss, judge, held_out, steps=300, per_epoch=batches.per_epoch)


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


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


# LoRA (Hu et al. 2021): nearly all is frozen, and `down` has no gradient at first.
def make_adapted(draw: Draw, _broken: bool) -> Plan:
    """Low-rank matrices beside the frozen layers, and a new head."""
    parts = make_documents(draw.stream("data"))
    model = Documents(draw.integer(24, 32))
    pretrain(model, draw, parts, 80)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, layer in list(model.body.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(model.body, name, _Adapted(layer, 4))
    model.head = nn.Linear(model.head.in_features, 4)
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(free, lr=draw.uniform(8e-3, 1.6e-2))
    return documents(draw, model, parts=parts, optimizer=optimizer)


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
    make_healthy("clipped_always", make_clipped, "every gradient is clipped", gain=0.25),
    make_healthy("frozen_encoder", make_frozen, "only the head is trained"),
    make_healthy("summed_loss", make_summed, "a loss of hundreds", gain=0.25),
    make_healthy("negative_density", make_density, "a loss below 0"),
    make_healthy("rate_restarted", make_restarted_rate, "the rate jumps up twice"),
    make_healthy("rate_from_0_to_0", make_triangle, "no updates at both ends", gain=0.25),
    make_healthy("long_tail", make_long_tail, "most rows have no gradient"),
    make_healthy("late_breakthrough", make_late, "at chance for long"),
    make_healthy("smoothed_labels", make_smoothed, "the loss has a high floor"),
    make_healthy("rare_clicks", make_rare, "a small loss from early on"),
    make_healthy("much_dropout", make_dropped, "training above validation"),
    make_healthy("stopped_in_time", make_stopped, "few data, stopped at the best"),
    make_healthy("sparse_codes", make_sparse, "most codes are 0"),
    make_healthy("evaluates_often", make_evaluating, "every 25th step is slow"),
    make_healthy("compiled_first", make_compiled, "the first step is slow"),
    make_healthy("adapters", make_adapted, "nearly all is frozen"),
    make_healthy("easy_first", make_graded, "harder data from step 90", tolerated=("loss_spike",)),
    make_healthy("mean_teacher", make_taught, "half of the weights are in no optimizer"),
    make_healthy("epochs_only", make_epochs, "a point for each epoch"),
)
