"""Codes that carry nothing, overfitting, slow steps, and losses that jump, rise or stand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.fourth_course import (
    AFTERMATH,
    Course,
    both,
    broken,
    calm,
    train,
)
from benchmarks.diagnosis.families.fourth_tasks import supervise
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _onset_of_rise(values: list[float], looks: list[int]) -> int:
    return looks[int(np.argmin(calm(values)))]


def a_hundred_rows(recorder: Recorder, draw: Draw) -> Truth:
    """StackOverflow: a hundred rows; "val_loss increases after some epochs"."""

    def make(made: Draw, _faulty: bool) -> Course:
        rng = made.stream("data")
        rows, columns = 720, made.integer(40, 60)
        x = rng.normal(size=(rows, columns))
        # Some of the outcomes go against what the columns say, as outcomes do.
        says = x[:, :4].sum(1) > 0
        label = np.where(rng.uniform(size=rows) < 0.05 + 0.1 * made.severity, ~says, says)
        ins, outs = torch.from_numpy(x).float(), torch.from_numpy(label.astype(np.int64))
        data = datasets.Data(
            ins[:140], outs[:140], ins[140:320], outs[140:320], ins[320:], outs[320:], classes=2
        )
        model = nn.Sequential(
            nn.Linear(columns, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 2)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        return supervise(
            made,
            model,
            data,
            optimizer,
            size=20,
            steps=240,
            val_every=6,
            keys=("loss", "eval_loss"),
        )

    torch.manual_seed(draw.torch_seed)
    notes = train(make(draw.again(), True), recorder, draw)
    proof = calm(notes.proof)
    return broken(
        proof[-1] > 1.2 * proof.min() and np.median(notes.losses[-10:]) < 0.2 * proof.min(),
        f"proof {proof[0]:.3g} -> best {proof.min():.3g} -> {proof[-1]:.3g}; training loss ends "
        f"at {np.median(notes.losses[-10:]):.3g}",
        expected=("overfitting_onset",),
        culprits=("eval_loss",),
        onset_step=_onset_of_rise(notes.proof, notes.looks),
        phases_expected=("overfitting_onset",),
    )


def _plain(made: Draw, **options: object) -> Course:
    data = datasets.load_blobs(made.stream("data"))
    width = made.integer(16, 40)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return supervise(made, model, data, optimizer, **options)


def checkpoints_cost_half(recorder: Recorder, draw: Draw) -> Truth:
    """DeepChem issue 458: "it spends more time saving checkpoints than it does computing"."""
    rng = draw.stream("times")
    every = draw.integer(8, 15)
    compute, share = draw.log_uniform(10, 80), 0.7 + 0.5 * draw.severity

    def times(step: int) -> dict[str, float]:
        busy = compute * float(np.exp(rng.normal(0, 0.04)))
        saving = share * every * compute if step % every == every - 1 else 0.0
        data = 0.04 * compute
        return {"step_ms": busy + data + saving, "data_ms": data, "compute_ms": busy}

    course = _plain(draw, times=times, start={"timing": "manual"})
    train(course, recorder, draw)
    return broken(
        True,
        f"every {every}th step saves for {share * every:.1f} steps' time: "
        f"{share / (1 + share):.0%} of the whole",
        expected=("runtime_bottleneck_risk",),
        onset_step=0,
    )


def adamw_at_a_tenth(recorder: Recorder, draw: Draw) -> Truth:
    """Karpathy: "3e-4 is the best learning rate for Adam"; threads have 0.1, and decay of 0.3."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.2).flatten()
        width = made.integer(48, 80)
        model = nn.Sequential()
        for place, inputs in enumerate((64, width)):
            model.add_module(f"fc{place}", nn.Linear(inputs, width))
            model.add_module(f"norm{place}", nn.LayerNorm(width))
            model.add_module(f"act{place}", nn.GELU())
        model.add_module("head", nn.Linear(width, 10))
        rate = 0.15 + 0.15 * made.severity if faulty else 0.002
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.3)
        return supervise(made, model, data, optimizer, steps=240)

    _, notes, twin = both(make, recorder, draw)
    names = ("fc0.weight", "fc1.weight", "head.weight")
    ratios = [float(np.median(notes.ratios[name])) for name in names]
    usual = [float(np.median(twin.ratios[name])) for name in names]
    return broken(
        min(ratios[:2]) > 0.04 and notes.end > 2 * twin.end,
        f"in the median step updates are {ratios[0]:.2g}, {ratios[1]:.2g}, {ratios[2]:.2g} of the "
        f"weights (twin {usual[0]:.2g}, {usual[1]:.2g}, {usual[2]:.2g}); proof {notes.end:.3g} "
        f"against {twin.end:.3g}",
        expected=("update_ratio",),
        tolerated=tuple(rule for rule in AFTERMATH if rule != "update_ratio"),
        onset_step=0,
    )


SCENARIOS = (
    Scenario(
        name="fourth/overfitting_onset/a_hundred_rows",
        kind="fault",
        train=a_hundred_rows,
    ),
    Scenario(
        name="fourth/runtime_bottleneck_risk/checkpoints_cost_half",
        kind="fault",
        train=checkpoints_cost_half,
    ),
    Scenario(name="fourth/update_ratio/adamw_at_a_tenth", kind="fault", train=adamw_at_a_tenth),
)
