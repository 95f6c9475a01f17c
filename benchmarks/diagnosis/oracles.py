"""What the oracles of the first family measure: losses without noise, twins, trained weights."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis.measuring import doubt, smooth
from benchmarks.diagnosis.scenario import Truth
from benchmarks.diagnosis.training import Problem, Trace

_CALM = ("divergence", "overfitting_onset")


def is_worse(trace: Trace, twin: Trace, share: float = 0.2) -> bool:
    """Whether the faulty training gave away this share of what its twin gained."""
    end, other = smooth(trace.proof)[-1], smooth(twin.proof)[-1]
    return not end < other + share * (twin.proof[0] - other)


def excess(trace: Trace) -> float:
    """By what share of its best the loss on new data ends above it; 0 for a trifle."""
    proof = smooth(trace.proof, 5)
    if not np.isfinite(proof).all():
        return math.inf
    best, end = float(proof.min()), float(proof[-1])
    gained = float(proof[0]) - best
    if end - best <= 0.01 * gained:
        return 0.0
    return (end - best) / max(abs(best), 0.01 * gained, 1e-12)


def soften(truth: Truth, trace: Trace) -> Truth:
    """Overfitting may be found where the oracle, too, sees some of it."""
    if not 0.08 < excess(trace) < math.inf or "overfitting_onset" in truth.expected:
        return truth
    return replace(
        truth,
        tolerated=(*truth.tolerated, "overfitting_onset"),
        phases_forbidden=tuple(p for p in truth.phases_forbidden if p != "overfitting_onset"),
    )


def list_phases(trace: Trace) -> tuple[str, ...]:
    """Phases that the noise-free training loss shows beyond doubt."""
    fixed = smooth(trace.fixed)
    if not np.isfinite(fixed).all():
        return ()
    fall = fixed[0] - fixed.min()
    quick = fixed[0] > 0 and fall > 0.5 * fixed[0]
    return ("rapid_learning",) if quick else ()


def judge_healthy(
    trace: Trace,
    *,
    gain: float = 0.3,
    rise: float = 0.3,
    tolerated: tuple[str, ...] = (),
    phases: bool = True,
    reason: str = "",
) -> Truth:
    """Healthy where the oracle's own data say that the training learned and kept it.

    Args:
        trace: Of the training.
        gain: Share of the first loss that must be gone in the end, on data
            never trained on; 0 for one that starts nearly converged.
        rise: By what share of its best the loss may end above it; from 8 % on
            overfitting may be found.
        tolerated: As in Truth.
        phases: Whether phases are judged.
        reason: What the trap was.
    """
    proof, fixed = smooth(trace.proof), smooth(trace.fixed)
    told = f"{reason}; proof loss {proof[0]:.4g} -> best {proof.min():.4g} -> {proof[-1]:.4g}"
    if not (np.isfinite(proof).all() and np.isfinite(fixed).all()):
        return doubt(f"{told}: not finite")
    scale = abs(proof[0]) + 1e-12
    if proof[0] - proof[-1] < gain * scale:
        return doubt(f"{told}: did not learn")
    if excess(trace) > rise:
        return doubt(f"{told}: got worse again")
    if fixed[-1] - fixed.min() > max(0.1 * (fixed[0] - fixed.min()), 0.01 * abs(fixed[0])):
        return doubt(f"{told}: training loss rose again")
    truth = Truth(
        kind="healthy",
        tolerated=tolerated,
        phases_expected=list_phases(trace) if phases else (),
        phases_forbidden=_CALM if phases else (),
        reason=told,
    )
    return soften(truth, trace)


def find_dead(problem: Problem, fresh: Problem, share: float = 0.8) -> dict[str, float]:
    """ReLU modules of which this share of units is out on all training data, and the share.

    Out is a unit that nowhere comes above 1 % of what such a unit reaches in
    the same network before the training (`fresh`).
    """
    before = {name: _list_peaks(output) for name, output in _watch(fresh, (nn.ReLU,)).items()}
    dead: dict[str, float] = {}
    for name, output in _watch(problem, (nn.ReLU,)).items():
        gone = float((_list_peaks(output) <= 0.01 * before[name].median()).double().mean())
        if gone >= share:
            dead[name] = gone
    return dead


def _list_peaks(output: torch.Tensor) -> torch.Tensor:
    units = output.transpose(0, 1) if output.dim() == 4 else output.flatten(0, -2).T
    return units.flatten(1).amax(1)


def find_saturated(problem: Problem, share: float = 0.7) -> dict[str, float]:
    """Tanh and sigmoid modules with this share of outputs at an end on all training data."""
    saturated: dict[str, float] = {}
    for name, output in _watch(problem, (nn.Tanh, nn.Sigmoid)).items():
        centred = output if name_type(problem, name) is nn.Tanh else 2.0 * output - 1.0
        ends = float((centred.abs() > 0.99).double().mean())
        if ends >= share:
            saturated[name] = ends
    return saturated


def name_type(problem: Problem, name: str) -> type[nn.Module]:
    """The class of a module."""
    return type(problem.model.get_submodule(name))


def _watch(problem: Problem, kinds: tuple[type[nn.Module], ...]) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in problem.model.named_modules():
        if isinstance(module, kinds):

            def keep(_m: nn.Module, _i: object, output: torch.Tensor, name: str = name) -> None:
                outputs[name] = output.detach()

            handles.append(module.register_forward_hook(keep))
    problem.model.eval()
    with torch.no_grad():
        problem.model(problem.data.x)
    problem.model.train()
    for handle in handles:
        handle.remove()
    return outputs
