"""What the oracles of all families measure of a model, none of it through the SDK."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Truth

AnyRecorder = Recorder | SilentRecorder
Weights = dict[str, Tensor]
T = TypeVar("T")

# What a network that was blown up may show beside the explosion.
WRECK = (
    "exploding_gradients",
    "loss_spike",
    "divergence",
    "update_ratio",
    "non_finite_values",
    "activation_collapse",
    "vanishing_gradients",
    "stagnant_layers",
    "plateau",
)


def doubt(reason: str) -> Truth:
    """A truth that could not be confirmed."""
    return Truth(kind="unclear", reason=reason)


def smooth(values: Sequence[float], width: int = 3) -> np.ndarray:
    """Running medians; infinite where a value is not finite."""
    kept = np.array([value if math.isfinite(value) else math.inf for value in values])
    half = width // 2
    return np.array([np.median(kept[max(0, i - half) : i + half + 1]) for i in range(len(kept))])


def find_end(values: Sequence[float]) -> float:
    """The median of the last three; infinite where one is not finite."""
    return float(np.median([value if math.isfinite(value) else math.inf for value in values[-3:]]))


def keep_weights(model: nn.Module) -> Weights:
    """All parameters as they are now, in float64."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def compare_weights(first: Weights, last: Weights, name: str) -> float:
    """How far a parameter came, relative to where it was."""
    return float((last[name] - first[name]).norm() / (first[name].norm() + 1e-12))


def measure_gradient(model: nn.Module) -> float:
    """Norm of all gradients, in float64."""
    squares = 0.0
    for parameter in model.parameters():
        if (grad := parameter.grad) is not None:
            dense = grad.coalesce().values() if grad.is_sparse else grad
            squares += float(dense.double().square().sum())
    return math.sqrt(squares) if math.isfinite(squares) else squares


def note_updates(
    model: nn.Module,
    earlier: Weights,
    ratios: dict[str, list[float]],
    gradients: dict[str, list[Any]],
    *,
    none: float | None = math.nan,
) -> None:
    """Add each parameter's relative change and its root mean square gradient.

    Args:
        model: After a step.
        earlier: Its weights before the step.
        ratios, gradients: Where to add to, by the parameter's name.
        none: What stands for no gradient.
    """
    for name, parameter in model.named_parameters():
        before, grad = earlier[name], parameter.grad
        change = float((parameter.detach().double() - before).norm())
        ratios.setdefault(name, []).append(change / (float(before.norm()) + 1e-12))
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        rms = none if grad is None else float(grad.double().square().mean().sqrt())
        gradients.setdefault(name, []).append(rms)


def ask_shadow(
    shadow: nn.Module, model: nn.Module, judge: Callable[[nn.Module], float], seed: int | None
) -> float:
    """What the oracle finds of a model, by a copy of it that no recorder's hook sees.

    Its draws are its own (at every look the same ones where there is a seed), so that a look
    moves no random number of the training.
    """
    shadow.load_state_dict(model.state_dict())
    shadow.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return float(judge(shadow))


def train_both(
    train: Callable[[bool, AnyRecorder], T], recorder: Recorder, draw: Draw
) -> tuple[T, T]:
    """Train with the fault, recorded, and a twin without it: same seed, data and batches."""
    torch.manual_seed(draw.torch_seed)
    faulty = train(True, recorder)
    torch.manual_seed(draw.torch_seed)
    return faulty, train(False, SilentRecorder())
