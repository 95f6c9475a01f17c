"""Codes that carry nothing, overfitting, slow steps, and losses that jump, rise or stand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.fourth_course import (
    AFTERMATH,
    Course,
    both,
    broken,
    calm,
    given_away,
    train,
)
from benchmarks.diagnosis.families.fourth_tasks import Batches, Vae, supervise
from benchmarks.diagnosis.networks import Recurrent, Transformer
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def code_under_summed_divergence(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch forum, VAE: the divergence is summed, the error averaged; Bowman et al. 2016."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data")).flatten()
        model = Vae(64, made.integer(48, 80), made.integer(6, 12))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        batches = Batches(made, data.x, data.x, 64)

        def divergence(mean: Tensor, spread: Tensor) -> Tensor:
            return -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)

        def take(_step: int) -> Tensor:
            x, _ = batches.take()
            made_x, mean, spread = model(x)
            if faulty:
                return functional.mse_loss(made_x, x) + divergence(mean, spread).mean()
            errors = (made_x - x).square().sum(1)
            return (errors + 0.1 * divergence(mean, spread)).mean()

        def error(seen: nn.Module) -> float:
            return float(functional.mse_loss(seen(data.proof_x)[0], data.proof_x))

        def validate() -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                made_x, mean, spread = model(data.val_x)
            model.train()
            return {
                "val/reconstruction": float(functional.mse_loss(made_x, data.val_x)),
                "val/kl": float(divergence(mean, spread).mean()),
            }

        return Course(
            model=model,
            optimizer=optimizer,
            loss=take,
            proof=error,
            held_out=validate,
            steps=300,
            per_epoch=batches.per_epoch,
        )

    course, notes, twin = both(make, recorder, draw)
    data = datasets.load_digits(draw.again().stream("data")).flatten()
    course.model.eval()
    with torch.no_grad():
        output, mean, _ = course.model(data.x)
    course.model.train()
    codes, images = float(mean.std(0).mean()), float(output.std(0).mean())
    return broken(
        codes < 0.05 and images < 0.02 and notes.end > 2 * twin.end,
        f"means of the code differ by {codes:.2g} over samples, images by {images:.2g}; error "
        f"{notes.end:.4g} against {twin.end:.4g}",
        expected=("activation_collapse",),
        tolerated=("vanishing_gradients", "plateau", "stagnant_layers", "update_ratio"),
        culprits=("mean", "spread", "encoder.0", "encoder.1", "decoder.0", "decoder.1"),
    )


def _onset_of_rise(values: list[float], looks: list[int]) -> int:
    return looks[int(np.argmin(calm(values)))]


def letters_by_heart(recorder: Recorder, draw: Draw) -> Truth:
    """Forum threads on character models: a few pages of text, many epochs, validation turns up."""

    def make(made: Draw, faulty: bool) -> Course:
        full = sequences.load_text(made.stream("data"), count=1500, length=16)
        data = full.shrink(made.integer(40, 70)) if faulty else full
        model = Recurrent(
            "lstm", full.classes, made.integer(64, 80), full.classes, letters=True, every_state=True
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.008)
        return supervise(
            made, model, data, optimizer, size=20, steps=240, val_every=12, accuracy=False
        )

    _, notes, twin = both(make, recorder, draw)
    proof = calm(notes.proof)
    return broken(
        proof[-1] > 1.25 * proof.min() and calm(twin.proof)[-1] < 1.05 * calm(twin.proof).min(),
        f"proof {proof[0]:.3g} -> best {proof.min():.3g} -> {proof[-1]:.3g}; loss "
        f"{notes.losses[-1]:.3g}; twin with more text ends at {twin.end:.3g}",
        expected=("overfitting_onset",),
        culprits=("val/loss",),
        onset_step=_onset_of_rise(notes.proof, notes.looks),
        phases_expected=("overfitting_onset",),
    )


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


def loader_falls_behind(recorder: Recorder, draw: Draw) -> Truth:
    """Forum: once the page cache is full, workers read from the disk and the device waits."""
    onset = draw.onset_step(240)
    rng = draw.stream("times")
    compute, wait = draw.log_uniform(20, 200), 2.5 + 4 * draw.severity

    def times(step: int) -> dict[str, float]:
        busy = compute * float(np.exp(rng.normal(0, 0.04)))
        share = 0.05 if step < onset else wait
        data = share * compute * float(np.exp(rng.normal(0, 0.2)))
        return {"step_ms": busy + data, "data_ms": data, "compute_ms": busy}

    course = _plain(draw, times=times, start={"timing": "manual"})
    train(course, recorder, draw)
    return broken(
        True,
        f"from step {onset} a step waits {wait:.1f} times its {compute:.0f} ms of computing",
        expected=("runtime_bottleneck_risk",),
        tolerated=("idle_device",),
        onset_step=onset,
    )


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


def bank_never_cut(recorder: Recorder, draw: Draw) -> Truth:
    """Forum, "each iteration gets slower": what is kept of all former steps is read in each."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48))

        def forward(self, x: Tensor) -> Tensor:
            return functional.normalize(self.net(x), dim=-1)

    data = datasets.load_digits(draw.stream("data")).flatten()
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = Batches(draw, data.x, data.y, 128)
    bank: list[Tensor] = []

    def take(_step: int) -> Tensor:
        x, _ = batches.take()
        one, two = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        keys = torch.cat([two.detach(), *bank])
        loss = functional.cross_entropy(one @ keys.T / 0.2, torch.arange(len(x)))
        bank.append(two.detach())
        return loss

    def separate(seen: nn.Module) -> float:
        code, label = seen(data.proof_x), data.proof_y
        nearest = (code @ code.T - 2 * torch.eye(len(code))).argmax(1)
        return 1.0 - float((label[nearest] == label).double().mean())

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=separate,
        steps=draw.integer(150, 190),
        start={"timing": "real"},
    )
    notes = train(course, recorder, draw)
    first = float(np.median(notes.times_s[3:18]))
    end = float(np.median(notes.times_s[-15:]))
    return broken(
        end > 3 * first,
        f"a step takes {1e3 * first:.1f} ms at first and {1e3 * end:.1f} ms in the end",
        expected=("runtime_bottleneck_risk",),
        tolerated=("memory_growth", "plateau", "divergence"),
    )


def root_of_nothing(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch forum: the gradient of sqrt at 0 is not a number; two equal points are enough."""
    onset = draw.onset_step(200, 0.2, 0.7)
    data = datasets.load_blobs(draw.stream("data"), features=12)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = Batches(draw, data.x, data.y, 32)

    def apart(code: Tensor, label: Tensor) -> Tensor:
        half = len(code) // 2
        distance = (code[:half] - code[half:]).square().sum(1).sqrt()
        same = (label[:half] == label[half:]).float()
        return (same * distance.square() + (1 - same) * (2 - distance).relu().square()).mean()

    def take(step: int) -> Tensor:
        x, y = batches.take()
        if step == onset:
            x, y = x.clone(), y.clone()
            x[16], y[16] = x[0], y[0]
        return apart(model(x), y)

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=lambda seen: float(apart(seen(data.proof_x[:200]), data.proof_y[:200])),
        steps=200,
        per_epoch=batches.per_epoch,
    )
    notes = train(course, recorder, draw)
    lost = sum(not math.isfinite(loss) for loss in notes.losses)
    return broken(
        lost == 200 - onset - 1 and not bool(torch.isfinite(model[0].weight).all()),
        f"equal points at step {onset}; {lost} losses after it are not numbers",
        expected=("non_finite_values",),
        tolerated=AFTERMATH,
        onset_step=onset,
    )


def raw_batch(recorder: Recorder, draw: Draw) -> Truth:
    """PaLM section 5.1: spikes at certain batches, from which the training comes back."""
    onset = draw.onset_step(280, 0.35, 0.6)
    scale = draw.log_uniform(25, 60)

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_friedman(made.stream("data"), noise=0.5)
        for part in (data.y, data.val_y, data.proof_y):
            part.sub_(14.4).div_(5.0)
        model = nn.Sequential(
            nn.Linear(10, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
        course = supervise(
            made, model, data, optimizer, measure=functional.mse_loss, steps=280, clip=1.0
        )
        batches = Batches(made, data.x, data.y, 32)

        def take(step: int) -> Tensor:
            x, y = batches.take()
            if faulty and onset <= step < onset + 3:
                x = x * scale
            return functional.mse_loss(model(x), y)

        return replace(course, loss=take)

    _, notes, twin = both(make, recorder, draw)
    before, worst = notes.loss_near(onset, 30), max(notes.losses[onset : onset + 4])
    return broken(
        worst > 20 * before and given_away(notes, twin) < 0.5,
        f"loss {before:.3g} -> {worst:.3g} at step {onset} by inputs {scale:.0f} times too large, "
        f"back at {notes.losses[-1]:.3g}",
        expected=("loss_spike",),
        tolerated=("exploding_gradients", "update_ratio", "activation_collapse"),
        culprits=("train/loss",),
        onset_step=onset,
    )


def resumed_with_peak_rate(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on resuming: the scheduler was not restored, and the rate is what it never was."""
    onset = draw.onset_step(260, 0.4, 0.6)

    def make(made: Draw, faulty: bool) -> Course:
        data = sequences.load_text(made.stream("data"), count=2000, length=16)
        model = Transformer(data.classes, 32, 1, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        high = 0.25 + 0.35 * made.severity

        def resume(step: int) -> None:
            if faulty and step == onset:
                optimizer.param_groups[0]["lr"] = high

        return supervise(
            made, model, data, optimizer, steps=260, before=resume, accuracy=False, size=16
        )

    _, notes, twin = both(make, recorder, draw)
    before, end = notes.loss_near(onset, 20), float(np.median(notes.losses[-30:]))
    return broken(
        end > 1.2 * before and given_away(notes, twin) > 0.3,
        f"loss {before:.3g} before the resumption at step {onset}, {end:.3g} in the end; proof "
        f"{notes.end:.3g} against {twin.end:.3g}",
        expected=("divergence",),
        tolerated=AFTERMATH,
        onset_step=onset,
        phases_expected=("divergence",),
    )


def scheduler_in_the_inner_loop(recorder: Recorder, draw: Draw) -> Truth:
    """leftthomas/SRGAN issue 94: scheduler.step() at every batch, the rate is zero very soon."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.1)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        every = made.integer(10, 14)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=every, gamma=0.1)
        course = supervise(made, model, data, optimizer, steps=300)

        def schedule(step: int) -> None:
            if faulty or (step + 1) % (course.per_epoch * 2) == 0:
                scheduler.step()

        return replace(course, after=schedule)

    _, notes, twin = both(make, recorder, draw)
    ends = float(np.median(notes.losses[45:95])), float(np.median(notes.losses[-50:]))
    return broken(
        abs(ends[0] - ends[1]) < 0.06 * ends[0] and given_away(notes, twin) > 0.5,
        f"loss stands from {ends[0]:.3g} to {ends[1]:.3g}; proof {notes.end:.3g} against "
        f"{twin.end:.3g}",
        expected=("plateau",),
        tolerated=("stagnant_layers", "update_ratio", "optimizer_not_stepping", "mislabelled_data"),
        onset_step=40,
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
        name="fourth/activation_collapse/code_under_summed_divergence",
        kind="fault",
        train=code_under_summed_divergence,
    ),
    Scenario(
        name="fourth/overfitting_onset/letters_by_heart", kind="fault", train=letters_by_heart
    ),
    Scenario(
        name="fourth/overfitting_onset/a_hundred_rows",
        kind="fault",
        train=a_hundred_rows,
    ),
    Scenario(
        name="fourth/runtime_bottleneck_risk/loader_falls_behind",
        kind="fault",
        train=loader_falls_behind,
    ),
    Scenario(
        name="fourth/runtime_bottleneck_risk/checkpoints_cost_half",
        kind="fault",
        train=checkpoints_cost_half,
    ),
    Scenario(
        name="fourth/runtime_bottleneck_risk/bank_never_cut", kind="fault", train=bank_never_cut
    ),
    Scenario(name="fourth/non_finite_values/root_of_nothing", kind="fault", train=root_of_nothing),
    Scenario(name="fourth/loss_spike/raw_batch", kind="fault", train=raw_batch),
    Scenario(
        name="fourth/divergence/resumed_with_peak_rate", kind="fault", train=resumed_with_peak_rate
    ),
    Scenario(
        name="fourth/plateau/scheduler_in_the_inner_loop",
        kind="fault",
        train=scheduler_in_the_inner_loop,
    ),
    Scenario(name="fourth/update_ratio/adamw_at_a_tenth", kind="fault", train=adamw_at_a_tenth),
)
