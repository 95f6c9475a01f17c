"""Sound aims and machines that look odd: losses below zero, games, rewards, late drops, pauses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.sixth_course import Course, cycle, doubt, follow, sound
from benchmarks.diagnosis.families.sixth_faults_machines import play, train_with_memory
from benchmarks.diagnosis.families.sixth_ranks import train_ranks
from benchmarks.diagnosis.families.sixth_tasks import digits, teach
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _late_drop(draw: Draw) -> Course:
    """The parity of three of ten signs: nothing to see for long, then all at once."""
    rng = draw.stream("data")
    x = torch.from_numpy(rng.choice([-1.0, 1.0], (6000, 10))).float()
    y = (x[:, :3].prod(1) > 0).long()
    data = Data(x[:5000], y[:5000], x[5000:5500], y[5000:5500], x[5500:], y[5500:], classes=2)
    return teach(
        draw,
        data,
        lambda: nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        size=64,
        steps=500,
    )


def _contrast(draw: Draw) -> Course:
    """InfoNCE between two views: a loss that stays high for as long as batches are large."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    noise = draw.stream("noise")

    def compare(model: nn.Module, x: Tensor) -> Tensor:
        views = [
            functional.normalize(
                model(x + 0.3 * torch.from_numpy(noise.normal(size=x.shape)).float()), dim=1
            )
            for _ in range(2)
        ]
        return functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(x)))

    def proof(model: nn.Module) -> float:
        x = data.proof_x[:128]
        fixed = torch.from_numpy(np.random.default_rng(0).normal(size=x.shape)).float()
        one, two = (functional.normalize(model(part), dim=1) for part in (x, x + 0.3 * fixed))
        return float(functional.cross_entropy(one @ two.T / 0.2, torch.arange(128)))

    return Course(
        build=lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16)),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        batch=cycle(data, 96, draw.stream("order")),
        loss=lambda model, batch, _step: (compare(model, batch[0]), {}),
        val=lambda model: {"val/loss": float(compare(model, data.val_x[:96]))},
        proof=proof,
        steps=280,
        epoch_steps=11,
    )


def _scaled_steps(draw: Draw) -> Course:
    """A scaler begins too high: the first steps overflow and are skipped, as they should."""
    made = digits(draw, steps=260)
    scale = {"now": 2.0**16, "skipped": 0}

    def turn(optimizer: torch.optim.Optimizer, step: int) -> None:  # noqa: ARG001
        if scale["now"] > 2.0**12:
            scale["now"] /= 2.0
            scale["skipped"] += 1
            optimizer.zero_grad()
            return
        optimizer.step()

    made.turn = turn
    return made


def _quiet_machine(recorder: Recorder, draw: Draw) -> Truth:
    """A cache fills in the first fifth of the steps, and then memory stays as it is."""
    sizes = train_with_memory(recorder, draw, until=60)
    later = sizes[-1] - sizes[75]
    reason = f"memory grows by {(sizes[60] - sizes[0]) / 1e6:.0f} MB, then by {later / 1e6:.1f} MB"
    if later > 0.05 * (sizes[60] - sizes[0]):
        return doubt(f"{reason}: goes on")
    return Truth(kind="healthy", phases_forbidden=("divergence",), reason=reason)


def _pauses(recorder: Recorder, draw: Draw) -> Truth:
    """Every fiftieth step a checkpoint is written; at each epoch the loader starts anew."""
    rng = draw.stream("clock")
    course = digits(draw, steps=260)
    course.start = {"timing": "manual"}
    base = draw.log_uniform(20.0, 120.0)

    def after(_model: nn.Module, step: int) -> None:
        compute = base * float(np.exp(rng.normal(0, 0.05)))
        data = 0.06 * base * float(np.exp(rng.normal(0, 0.2)))
        if step % course.epoch_steps == 0:
            data += 3.0 * base
        pause = 10.0 * base if step % 50 == 49 else 0.0
        recorder.time(
            step, step_ms=compute + data + pause, data_ms=data, compute_ms=compute + pause
        )

    course.after = after
    log = follow(course, recorder)
    if log.end > 0.5 * log.proofs[0]:
        return doubt(f"{log.tell()}: did not learn")
    return Truth(
        kind="healthy", phases_forbidden=("divergence", "overfitting_onset"), reason=log.tell()
    )


def _fair_game(recorder: Recorder, draw: Draw) -> Truth:
    """Two networks that keep each other at bay: neither loss falls, and all centres are found."""
    shares, _ = play(recorder, draw, centres=4, steps=800, rates=(4e-4, 1e-3), spread=0.4)
    reason = f"the centres have {', '.join(f'{share:.0%}' for share in shares)}"
    if (shares < 0.08).any():
        return doubt(f"{reason}: not all are found")
    return Truth(kind="healthy", reason=reason)


def _sent_now_and_then(recorder: Recorder, draw: Draw) -> Truth:
    """Local SGD: two ranks whose weights are averaged every tenth step, and differ between."""
    told = train_ranks(recorder, draw, "local")
    reason = f"proof {told['first']:.3g} -> {told['end']:.3g}, ranks {told['apart']:.3g} apart"
    if told["end"] > 0.5 * told["first"]:
        return doubt(f"{reason}: did not learn")
    return Truth(kind="healthy", phases_forbidden=("divergence",), reason=reason)


def _named(name: str, train: object) -> Scenario:
    return Scenario(name=f"sixth/healthy/{name}", kind="healthy", train=train)


SCENARIOS = (
    sound("late_drop", _late_drop),
    sound("contrast", _contrast),
    sound("scaled_steps", _scaled_steps),
    _named("cache_fills", _quiet_machine),
    _named("pauses", _pauses),
    _named("fair_game", _fair_game),
    _named("local_steps", _sent_now_and_then),
)
