"""Healthy trainings with habits that look like faults: schedules, freezing, clipping, few data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.clocks import StepClock
from benchmarks.diagnosis.families.fourth_course import Course, sound, train
from benchmarks.diagnosis.families.fourth_tasks import (
    Batches,
    load_zipf,
    supervise,
)
from benchmarks.diagnosis.networks import Recurrent, Transformer
from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _mlp(inputs: int, width: int, outputs: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), act(), nn.Linear(width, width), act(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def warm_restarts(recorder: Recorder, draw: Draw) -> Truth:
    """Loshchilov and Hutter 2017: at each restart of the rate the loss jumps, and comes back."""
    data = datasets.load_spirals(draw.stream("data"))
    model = _mlp(2, draw.integer(32, 64), 3, nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    cycle = draw.integer(60, 90)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=cycle)
    course = supervise(
        draw, model, data, optimizer, steps=4 * cycle, after=lambda _step: scheduler.step(),
        extra=lambda: {"lr": optimizer.param_groups[0]["lr"]},
    )  # fmt: skip
    return sound(train(course, recorder, draw), f"the rate restarts every {cycle} steps", gain=0.5)


def large_rate_with_norms(recorder: Recorder, draw: Draw) -> Truth:
    """Smith and Topin 2019, super-convergence: with batch norm a rate far above 0.1 works."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    channels = draw.integer(8, 12)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * channels, 10),
    )  # fmt: skip
    highest = draw.uniform(0.4, 0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 240
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=highest, total_steps=steps + 1
    )
    course = supervise(
        draw, model, data, optimizer, steps=steps, size=48, after=lambda _step: scheduler.step()
    )
    return sound(train(course, recorder, draw), f"one cycle up to {highest:.2f}", gain=0.7)


def backbone_kept_still(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch's transfer learning tutorial: a fixed feature extractor, only the head moves."""
    full = datasets.load_digits(draw.stream("data"), noise=0.1)
    few = full.y < 6
    width = draw.integer(64, 96)
    body = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 48), nn.ReLU()
    )

    class Net(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.backbone = body
            self.head = nn.Linear(48, outputs)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.backbone(x))

    known = Net(6)
    old = replace(full, x=full.x[few], y=full.y[few], proof_x=full.x[few], proof_y=full.y[few])
    taught = supervise(
        draw, known, replace(old, val_x=old.x, val_y=old.y, classes=6),
        torch.optim.Adam(known.parameters(), lr=0.003), steps=160,
    )  # fmt: skip
    train(taught, SilentRecorder(), draw)
    model = Net(10)
    for parameter in body.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.01)
    course = supervise(draw, model, full, optimizer, steps=260)
    return sound(train(course, recorder, draw), "a pretrained backbone is frozen", gain=0.6)


def micro_batches(recorder: Recorder, draw: Draw) -> Truth:
    """Hugging Face's guide: gradients of some micro-batches are added up before each step."""
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    model = _mlp(64, draw.integer(48, 80), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006)
    accumulate = draw.choice(4, 8)
    course = supervise(draw, model, data, optimizer, size=12, steps=400, accumulate=accumulate)
    return sound(train(course, recorder, draw), f"{accumulate} micro-batches a step", gain=0.6)


def a_dozen_to_validate(recorder: Recorder, draw: Draw) -> Truth:
    """Forum: "validation loss fluctuates": it is measured on a dozen samples."""
    data = datasets.load_blobs(draw.stream("data"), spread=1.6)
    count = draw.integer(10, 16)
    data = replace(data, val_x=data.val_x[:count], val_y=data.val_y[:count])
    model = nn.Sequential(nn.Linear(20, draw.integer(12, 20)), nn.ReLU())
    model.add_module("2", nn.Linear(model[0].out_features, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    course = supervise(draw, model, data, optimizer, steps=220, val_every=5)
    return sound(train(course, recorder, draw), f"{count} samples of validation", gain=0.5)


def _timed(draw: Draw, clock: StepClock) -> Course:
    data = datasets.load_friedman(draw.stream("data"))
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(14.4).div_(5.0)
    model = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.006)
    return supervise(
        draw, model, data, optimizer, measure=functional.mse_loss, steps=300,
        start={"timing": clock},
    )  # fmt: skip


def compiled_at_first(recorder: Recorder, draw: Draw) -> Truth:
    """torch.compile's documentation: the first step takes as long as many others."""
    compute = draw.log_uniform(5, 100)
    clock = StepClock(
        draw.stream("times"), compute_ms=compute, data_ms=0.06 * compute, noise=0.05, tail=0.01,
        first_ms=compute * draw.uniform(60, 200),
    )  # fmt: skip
    notes = train(_timed(draw, clock), recorder, draw)
    return sound(notes, f"first step takes {clock.first_ms / compute:.0f} more", gain=0.5)


def saved_now_and_then(recorder: Recorder, draw: Draw) -> Truth:
    """Checkpoints as trainers make them: a long step now and then, a few per cent of the time."""
    compute = draw.log_uniform(20, 200)
    period = draw.integer(60, 90)
    clock = StepClock(
        draw.stream("times"), compute_ms=compute, data_ms=0.05 * compute, noise=0.03, tail=0.0,
        period=period, period_ms=compute * 0.04 * period,
    )  # fmt: skip
    notes = train(_timed(draw, clock), recorder, draw)
    return sound(notes, f"every {period}th step takes longer, 4 % of the time in all", gain=0.5)


def lengths_in_stages(recorder: Recorder, draw: Draw) -> Truth:
    """Bengio et al. 2009: a curriculum; the loss jumps where harder samples begin."""
    rng = draw.stream("data")
    stages = (3, 8, 15)
    sets = [sequences.load_adding(rng, length=length, count=1500) for length in stages]
    model = Recurrent("gru", 2, draw.integer(24, 36), 1, letters=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.008)
    batches = [Batches(draw, data.x, data.y, 48) for data in sets]
    steps = 330

    def stage(step: int) -> int:
        return min(2, 3 * step // steps)

    def take(step: int) -> Tensor:
        x, y = batches[stage(step)].take()
        return functional.mse_loss(model(x), y)

    last = sets[-1]

    def validate() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            loss = float(functional.mse_loss(model(last.val_x), last.val_y))
        model.train()
        return {"val/loss": loss}

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=lambda seen: float(functional.mse_loss(seen(last.proof_x), last.proof_y)),
        held_out=validate,
        steps=steps,
        clip=1.0,
    )
    return sound(train(course, recorder, draw), "rows of 3, then 8, then 15 numbers", gain=0.6)


def rare_words(recorder: Recorder, draw: Draw) -> Truth:
    """Zipf's law: most rows of an embedding get no gradient in most steps."""
    data = load_zipf(draw.stream("data"))

    class Bag(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.words = nn.Embedding(2000, width)
            self.head = nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).sum(1))

    model = Bag(draw.integer(8, 16))
    with torch.no_grad():
        model.words.weight.mul_(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    course = supervise(draw, model, data, optimizer, size=48, steps=140)
    return sound(train(course, recorder, draw), "few rows of the embedding move", gain=0.2)


def always_clipped(recorder: Recorder, draw: Draw) -> Truth:
    """Merity et al. 2018 clip hard: nearly every step's gradient is above the norm."""
    data = sequences.load_text(draw.stream("data"), count=2400, length=16)
    model = Recurrent(
        "lstm", data.classes, draw.integer(28, 40), data.classes, letters=True, every_state=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=15.0)
    course = supervise(
        draw, model, data, optimizer, size=24, steps=250, clip=0.1, accuracy=False,
        keys=("train/loss", "valid/loss"),
    )  # fmt: skip
    notes = train(course, recorder, draw)
    above = float(np.mean(np.array(notes.gradients) > 0.1))
    return sound(notes, f"{above:.0%} of the steps are clipped", gain=0.2)


def rate_from_zero_to_zero(recorder: Recorder, draw: Draw) -> Truth:
    """Vaswani et al. 2017 and BERT: the rate rises from 0 and falls to 0; ends barely move."""
    data = sequences.load_text(draw.stream("data"), count=2000, length=16)
    model = Transformer(data.classes, 32, 1, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    steps, warm = 260, draw.integer(30, 60)

    def factor(step: int) -> float:
        return min((step + 0.01) / warm, (steps - step) / (steps - warm))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    course = supervise(
        draw, model, data, optimizer, size=24, steps=steps, clip=1.0, accuracy=False,
        after=lambda _step: scheduler.step(), keys=("loss", "eval_loss"),
    )  # fmt: skip
    return sound(train(course, recorder, draw), f"{warm} steps of warm-up, linear to 0", gain=0.2)


def learnt_early(recorder: Recorder, draw: Draw) -> Truth:
    """Karpathy: "leave it training": all is learnt in the first tenth, then nothing happens."""
    data = datasets.load_blobs(draw.stream("data"), spread=0.5, classes=4)
    model = nn.Sequential(nn.Linear(20, draw.integer(16, 32)), nn.ReLU())
    model.add_module("2", nn.Linear(model[0].out_features, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    course = supervise(draw, model, data, optimizer, steps=350)
    notes = train(course, recorder, draw)
    return sound(notes, f"loss at step 60 is {notes.losses[60]:.2g}", gain=0.9)


def much_dropout(recorder: Recorder, draw: Draw) -> Truth:
    """Keras FAQ: "why is my training loss much higher than my testing loss?": dropout."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(96, 160)
    share = draw.uniform(0.5, 0.65)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(share),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(share), nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    course = supervise(draw, model, data, optimizer, steps=260)
    notes = train(course, recorder, draw)
    end = float(np.median(notes.losses[-20:]))
    return sound(notes, f"dropout {share:.2f}; training loss ends at {end:.2g}", gain=0.7)


class _Lora(nn.Module):
    """A fixed linear layer and a low-rank change of it that begins at zero."""

    def __init__(self, fixed: nn.Linear, rank: int) -> None:
        super().__init__()
        self.fixed = fixed.requires_grad_(False)
        self.down = nn.Linear(fixed.in_features, rank, bias=False)
        self.up = nn.Linear(rank, fixed.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The fixed layer and its change."""
        return self.fixed(x) + self.up(self.down(x))


def adapters_from_zero(recorder: Recorder, draw: Draw) -> Truth:
    """Hu et al. 2021, LoRA: one factor starts at 0, the other's first gradient is exactly 0."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    base = _mlp(64, draw.integer(64, 96), 10)
    taught = supervise(draw, base, data, torch.optim.Adam(base.parameters(), lr=0.003), steps=160)
    train(taught, SilentRecorder(), draw)
    # The same digits, turned: the network has to be adapted.
    parts = {name: getattr(data, name).rot90(1, (2, 3)) for name in ("x", "val_x", "proof_x")}
    turned = replace(data, **parts)
    rank = draw.integer(4, 8)
    model = nn.Sequential(
        nn.Flatten(), _Lora(base[1], rank), nn.ReLU(), _Lora(base[3], rank), nn.ReLU(),
        _Lora(base[5], rank),
    )  # fmt: skip
    given = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(given, lr=0.006)
    course = supervise(draw, model, turned, optimizer, steps=280)
    return sound(train(course, recorder, draw), f"adapters of rank {rank}", gain=0.7)


def thawed_in_stages(recorder: Recorder, draw: Draw) -> Truth:
    """Howard and Ruder 2018: layers are unfrozen one after the other, from the head down."""
    data = datasets.load_digits(draw.stream("data"), noise=0.15)
    base = _mlp(64, draw.integer(64, 96), 10)
    odd = replace(data, y=data.y % 2, val_y=data.val_y % 2, proof_y=data.proof_y % 2)
    taught = supervise(draw, base, odd, torch.optim.Adam(base.parameters(), lr=0.002), steps=120)
    train(taught, SilentRecorder(), draw)
    base[5] = nn.Linear(base[5].in_features, 10)
    for place in (1, 3):
        base[place].requires_grad_(False)
    optimizer = torch.optim.Adam(base.parameters(), lr=0.002)
    first = draw.integer(50, 70)

    def thaw(step: int) -> None:
        for turn, place in enumerate((3, 1)):
            if step == first * (turn + 1):
                base[place].requires_grad_(True)

    course = supervise(draw, base, data, optimizer, steps=280, before=thaw)
    return sound(train(course, recorder, draw), f"a layer more every {first} steps", gain=0.7)


def _scenario(train_it: object) -> Scenario:
    name = train_it.__name__  # type: ignore[attr-defined]
    return Scenario(name=f"fourth/healthy/{name}", kind="healthy", train=train_it)  # type: ignore[arg-type]


SCENARIOS = tuple(
    _scenario(train_it)
    for train_it in (
        warm_restarts,
        large_rate_with_norms,
        backbone_kept_still,
        micro_batches,
        a_dozen_to_validate,
        compiled_at_first,
        saved_now_and_then,
        lengths_in_stages,
        rare_words,
        always_clipped,
        rate_from_zero_to_zero,
        learnt_early,
        much_dropout,
        adapters_from_zero,
        thawed_in_stages,
    )
)
