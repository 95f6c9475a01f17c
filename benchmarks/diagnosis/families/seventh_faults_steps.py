"""Faults of the seventh family in how a training steps: optimizers, scalers, schedules, numbers."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.seventh_course import FALLOUT, Batch, Log, Plan, fault
from benchmarks.diagnosis.families.seventh_faults_data import is_stuck
from benchmarks.diagnosis.families.seventh_tasks import (
    Sequence,
    classify,
    digits,
    friedman,
    learn,
    make_dense,
    regress,
    shapes,
    text,
)
from benchmarks.diagnosis.scenario import Draw
from benchmarks.diagnosis.sequences import load_waves


def _keep_a_static_scale(draw: Draw, faulty: bool) -> Plan:
    scale = 2.0 ** draw.integer(24, 28)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plan = digits(draw, start={"grad_scaler": scaler})

    def take(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, step: int
    ) -> dict[str, float]:
        del step
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch[0])
        loss = functional.cross_entropy(output.float(), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        # A static scale is set anew each time; a dynamic one backs off.
        scaler.update(scale if faulty else None)
        return {"train/loss": float(loss.detach())}

    plan.take = take
    return plan


def _clip_before_unscaling(draw: Draw, faulty: bool) -> Plan:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    plan = shapes(
        draw,
        start={"grad_scaler": scaler},
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9),
    )

    def take(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, step: int
    ) -> dict[str, float]:
        del step
        optimizer.zero_grad()
        loss = classify(model, batch[0], batch[1])
        scaler.scale(loss).backward()
        if not faulty:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return {"train/loss": float(loss.detach())}

    plan.take = take
    return plan


def _step_an_earlier_copy(draw: Draw, faulty: bool) -> Plan:
    # The model is wrapped anew (as for another precision) after its optimizer was made.
    rate = draw.uniform(2e-3, 5e-3)

    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        kept = copy.deepcopy(model) if faulty else model
        return torch.optim.AdamW(kept.parameters(), lr=rate)

    return text(draw, optimize=optimize)


def _clear_the_head_alone(draw: Draw, faulty: bool) -> Plan:
    plan = shapes(
        draw, optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    )

    def take(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, step: int
    ) -> dict[str, float]:
        del step
        cleared = model.get_submodule("head") if faulty else model
        cleared.zero_grad()
        loss = classify(model, batch[0], batch[1])
        loss.backward()
        optimizer.step()
        return {"train/loss": float(loss.detach())}

    plan.take = take
    return plan


def _unroll_without_clipping(draw: Draw, faulty: bool) -> Plan:
    data = load_waves(draw.stream("data"), count=900, length=40)
    width, rate, gain = draw.integer(20, 32), draw.uniform(2e-3, 4e-3), draw.uniform(1.12, 1.2)

    def build() -> nn.Module:
        model = Sequence(nn.RNN, 1, width, 1, nonlinearity="relu")
        with torch.no_grad():
            model.rnn.weight_hh_l0.copy_((gain if faulty else 1.0) * torch.eye(width))
        return model

    return learn(
        draw,
        data,
        build,
        lambda model: torch.optim.Adam(model.parameters(), lr=rate),
        lose=regress,
        # Where it is thrown at first says nothing of either.
        judge=lambda model, x, y: regress(model, x, y).clamp(max=2.0),
        clip=None if faulty else 1.0,
        steps=160,
    )


def _explodes(log: Log, twin: Log) -> str | None:
    ratio = max(log.gradients[:20]) / (np.median(twin.gradients) + 1e-12)
    return None if ratio > 100 else f"gradients are only {ratio:.3g} times the twin's"


def _stack_sigmoids(draw: Draw, faulty: bool) -> Plan:
    depth, width = draw.integer(9, 12), draw.integer(32, 48)
    act = nn.Sigmoid if faulty else nn.SELU
    return digits(
        draw,
        build=lambda: make_dense([64, *[width] * depth, 10], act),
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9),
        steps=260,
    )


def _vanishes(log: Log, twin: Log) -> str | None:
    del twin

    def rms(module: str) -> float:
        grad = log.model.get_submodule(module).weight.grad
        return 0.0 if grad is None else float(grad.square().mean().sqrt())

    ratio = rms("fc0") / (rms("head") + 1e-30)
    return None if ratio < 1e-3 else f"the first layer's gradient is {ratio:.3g} of the head's"


def _keep_no_master_weights(draw: Draw, faulty: bool) -> Plan:
    rate = draw.uniform(1.6e-4, 2e-4)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_dense([64, 64, 64, 10])
            if faulty:
                self.net.bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.to(self.net.head.weight.dtype)).float()

    return digits(
        draw,
        build=Half,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=rate),
        steps=300,
    )


def _leave_the_rate_finder_on(draw: Draw, faulty: bool) -> Plan:
    rate, growth = draw.uniform(1e-3, 2e-3), draw.uniform(1.028, 1.036)
    plan = friedman(
        draw,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=rate * 10, momentum=0.9),
        log_rate=draw.choice(True, False),
        clip=5.0,
    )
    plan.rate = lambda step: growth**step if faulty else 1.0
    return plan


SCENARIOS = (
    fault(
        "seventh/steps/static_loss_scale",
        _keep_a_static_scale,
        "optimizer_not_stepping",
        tolerated=(*FALLOUT, "non_finite_values"),
    ),
    fault(
        "seventh/steps/clipped_before_unscaling",
        _clip_before_unscaling,
        "plateau",
        tolerated=(*FALLOUT, "optimizer_not_stepping"),
        check=is_stuck(),
    ),
    fault(
        "seventh/steps/earlier_copy_stepped",
        _step_an_earlier_copy,
        "parameters_not_optimized",
        tolerated=(*FALLOUT, "optimizer_not_stepping"),
    ),
    fault(
        "seventh/steps/head_alone_cleared",
        _clear_the_head_alone,
        "gradients_not_cleared",
    ),
    fault(
        "seventh/steps/unclipped_recurrence",
        _unroll_without_clipping,
        "exploding_gradients",
        tolerated=(*FALLOUT, "non_finite_values"),
        check=_explodes,
    ),
    fault(
        "seventh/steps/stacked_sigmoids",
        _stack_sigmoids,
        "vanishing_gradients",
        check=_vanishes,
    ),
    fault(
        "seventh/steps/no_master_weights",
        _keep_no_master_weights,
        tolerated=(*FALLOUT, "optimizer_not_stepping"),
    ),
    fault(
        "seventh/steps/rate_finder_left_on",
        _leave_the_rate_finder_on,
        "divergence",
        tolerated=(*FALLOUT, "non_finite_values"),
    ),
)
