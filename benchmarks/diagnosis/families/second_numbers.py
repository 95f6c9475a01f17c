"""Faults in the numbers: NaN and infinity, spikes, updates of the wrong size, nothing learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.second_data import (
    Material,
    characters,
    friedman,
    handwriting,
    shape_images,
    tabular,
    trigger_sequences,
)
from benchmarks.diagnosis.families.second_evidence import Lesson, log_uniform, supervise
from benchmarks.diagnosis.families.second_judges import (
    fault,
    judge_nonfinite,
    judge_plateau,
    judge_spike,
    judge_updates,
)
from benchmarks.diagnosis.scenario import Draw


def _perceptron(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(len(widths) - 1):
        layers.append(nn.Linear(widths[place], widths[place + 1]))
        if place < len(widths) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


def _log_of_zero(draw: Draw, faulty: bool) -> Lesson:
    """A hand-written binary cross entropy takes the logarithm of 1 - p where p rounds to one."""
    rng = draw.stream("build")
    data = tabular("breast_cancer", rng)
    model = _perceptron(30, 32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.05), momentum=0.9)
    sharp = 2 + 3 * draw.severity

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if not faulty:
            return functional.cross_entropy(out, y)
        share = torch.sigmoid(sharp * (out[:, 1] - out[:, 0]))
        return -(y * share.log() + (1 - y) * (1 - share).log()).mean()

    return supervise(model, optimizer, data, draw.stream("batches"), steps=160, loss=loss)


def _empty_mask(draw: Draw, faulty: bool) -> Lesson:
    """A masked mean over tokens divides by zero when a batch has no valid target."""
    rng = draw.stream("build")
    data = trigger_sequences(rng)
    model = nn.Sequential(
        nn.Embedding(8, 16), nn.Flatten(), nn.Linear(14 * 16, 48), nn.ReLU(), nn.Linear(48, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))
    steps = 200
    onset = draw.onset_step(steps)
    empty = False

    def loss(out: Tensor, y: Tensor) -> Tensor:
        mask = (torch.zeros if empty else torch.ones)(len(y))
        each = functional.cross_entropy(out, y, reduction="none") * mask
        return each.sum() / (mask.sum() if faulty else mask.sum().clamp(min=1))

    def shape(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal empty
        empty = step == onset
        return x, y

    def close(_step: int) -> None:
        # Validation has valid targets.
        nonlocal empty
        empty = False

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=loss,
        shape=shape,
        finish=close,
        onset=onset,
    )


def _half_overflow(draw: Draw, faulty: bool) -> Lesson:
    """A sum of squares is accumulated in half precision, and a fixed scale is never lowered."""
    rng = draw.stream("build")
    data = friedman(rng)
    model = _perceptron(10, 40, 40, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))
    steps = 180
    onset = draw.onset_step(steps)
    state = {"scale": 1.0}

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(out, y)

    def weigh(step: int, value: Tensor) -> Tensor:
        # The scale doubles now and then; the half-precision product overflows at 65504.
        state["scale"] = 2.0 ** int(16 * min(1.0, step / onset))
        return (value.half() * state["scale"]).float()

    def correct(_step: int) -> None:
        for entry in model.parameters():
            if entry.grad is not None:
                entry.grad.div_(state["scale"])

    lesson = supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=loss,
        weigh=weigh if faulty else None,
        correct=correct,
        onset=onset,
    )
    inner = lesson.advance
    lesson.advance = lambda step: {
        name: value / state["scale"] for name, value in inner(step).items()
    }
    return lesson


def _distance_of_equals(draw: Draw, faulty: bool) -> Lesson:
    """The square root of a zero distance: the loss is finite, its gradient is not."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _perceptron(64, 48, 12, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 3e-3))
    batches = draw.stream("batches")
    steps = 160
    onset = draw.onset_step(steps)
    anchors = torch.as_tensor(rng.normal(size=(10, 12)), dtype=torch.float32)

    def distance(one: Tensor, two: Tensor) -> Tensor:
        squares = (one - two).pow(2).sum(-1)
        return squares.sqrt() if faulty else (squares + 1e-8).sqrt()

    def lose(x: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
        codes = model(x)
        return distance(codes, anchors[y]).mean() + 0.05 * distance(codes, codes[pairs]).mean()

    def advance(step: int) -> dict[str, float]:
        x, y = data.draw(batches, 32)
        # Until the onset every example is paired with another one, then one with itself.
        pairs = (torch.arange(32) + 1) % 32
        if step >= onset and step % 3 == 0:
            pairs[5] = 5
        loss = lose(x, y, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"train/loss": loss.item()}

    def assess() -> float:
        return float((model(data.x_held) - anchors[data.y_held]).pow(2).sum(-1).mean())

    return Lesson(
        model=model, optimizer=optimizer, steps=steps, advance=advance, assess=assess, onset=onset
    )


def _corrupt_shards(draw: Draw, faulty: bool) -> Lesson:
    """Bursts of corrupt targets at the end of each shard, each of which costs dozens of steps."""
    rng = draw.stream("build")
    data = friedman(rng)
    model = _perceptron(10, 48, 48, 1, act=nn.GELU)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=log_uniform(rng, 4e-3, 1e-2), betas=(0.9, 0.95)
    )
    steps = 360
    onset = draw.onset_step(steps, 0.4, 0.5)
    period = int(rng.integers(60, 90))

    def shape(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if faulty and step >= onset and (step - onset) % period < 3:
            y = y * -(2 + 3 * draw.severity)
        return x, y

    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=steps,
        loss=functional.mse_loss,
        shape=shape,
        onset=onset,
    )


def _restart_too_high(draw: Draw, faulty: bool) -> Lesson:
    """Warm restarts with a peak that is a hundred times what the net bears."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential(
        nn.Conv2d(1, 10, 3), nn.BatchNorm2d(10), nn.LeakyReLU(0.1), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(250, 32), nn.LeakyReLU(0.1), nn.Linear(32, 4),
    )  # fmt: skip
    rate = log_uniform(rng, 1e-3, 3e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = 300
    onset = draw.onset_step(steps, 0.4, 0.6)

    def correct(step: int) -> None:
        # The peak decays over a few steps, as a restart with a short period does.
        high = rate * (120 + 200 * draw.severity) * 0.75 ** (step - onset)
        optimizer.param_groups[0]["lr"] = max(rate, high) if faulty and step >= onset else rate

    return supervise(
        model, optimizer, data, draw.stream("batches"), steps=steps, correct=correct, onset=onset
    )


def _permuted(draw: Draw, faulty: bool) -> Lesson:
    """Inputs are shuffled within the batch, the targets are not."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _perceptron(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=log_uniform(rng, 0.02, 0.08), momentum=0.9)
    shuffles = draw.stream("shuffles")

    def shape(_step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x[torch.from_numpy(shuffles.permutation(len(x)))] if faulty else x), y

    return supervise(model, optimizer, data, draw.stream("batches"), steps=240, shape=shape)


def _blank_images(draw: Draw, faulty: bool) -> Lesson:
    """The loader's cache hands out the same image for every row, in training and validation."""
    rng = draw.stream("build")
    data = shape_images(rng)
    if faulty:
        data = Material(
            data.x[:1].expand_as(data.x), data.y, data.x[:1].expand_as(data.x_held), data.y_held
        )
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(200, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))
    return supervise(
        model,
        optimizer,
        data,
        draw.stream("batches"),
        steps=240,
        names=("train_loss", "val_loss"),
        accuracy="val_acc",
    )


def _tiny_rate(draw: Draw, faulty: bool) -> Lesson:
    """A rate of 1e-8: a micro was read as a nano, and that of the schedule on top."""
    rng = draw.stream("build")
    data = characters(rng)
    symbols = int(data.x.max()) + 1
    model = nn.Sequential(
        nn.Embedding(symbols, 12), nn.Flatten(), nn.Linear(144, 64), nn.GELU(),
        nn.Linear(64, symbols),
    )  # fmt: skip
    rate = 10 ** -(7.5 + draw.severity) if faulty else log_uniform(rng, 2e-3, 6e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=240, batch=64)


def _gradient_wiped(draw: Draw, faulty: bool) -> Lesson:
    """`zero_grad(set_to_none=False)` moved between backward and the optimizer's step."""
    rng = draw.stream("build")
    data = tabular("wine", rng)
    model = _perceptron(13, 32, 32, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=log_uniform(rng, 1e-3, 4e-3))

    def correct(_step: int) -> None:
        if faulty:
            optimizer.zero_grad(set_to_none=False)

    return supervise(model, optimizer, data, draw.stream("batches"), steps=200, correct=correct)


def _group_rate(draw: Draw, faulty: bool) -> Lesson:
    """The rate of one group, meant as a factor, is far too large from the start."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(64, 48))
    model.add_module("act0", nn.Tanh())
    model.add_module("hidden", nn.Linear(48, 48))
    model.add_module("act", nn.SiLU())
    model.add_module("head", nn.Linear(48, 10))
    rate = log_uniform(rng, 4e-3, 8e-3)
    chosen = [*model.hidden.parameters()]
    rest = [entry for entry in model.parameters() if all(entry is not other for other in chosen)]
    high = rate * (400 + 600 * draw.severity) if faulty else rate
    optimizer = torch.optim.AdamW(
        [{"params": rest, "lr": rate}, {"params": chosen, "lr": high}], lr=rate, weight_decay=0.05
    )
    return supervise(model, optimizer, data, draw.stream("batches"), steps=200)


def _decay_as_percent(draw: Draw, faulty: bool) -> Lesson:
    """A weight decay of some dozens, decoupled: weights are eaten faster than they learn."""
    rng = draw.stream("build")
    data = handwriting(rng)
    model = _perceptron(64, 56, 56, 10, act=nn.GELU)
    rate = log_uniform(rng, 2e-3, 4e-3)
    decay = 40 + 60 * draw.severity if faulty else 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    return supervise(model, optimizer, data, draw.stream("batches"), steps=200)


def _crawling_body(draw: Draw, faulty: bool) -> Lesson:
    """The body's rate is a thousandth of a thousandth of what was meant; only the head learns."""
    rng = draw.stream("build")
    data = shape_images(rng)
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3)))
    model.add_module("pool", nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten()))
    model.add_module("head", nn.Linear(24, 4))
    rate = log_uniform(rng, 3e-3, 8e-3)
    slow = rate * 10 ** -(4.0 + draw.severity) if faulty else rate
    optimizer = torch.optim.Adam(
        [
            {"params": model.body.parameters(), "lr": slow},
            {"params": model.head.parameters(), "lr": rate},
        ]
    )
    return supervise(model, optimizer, data, draw.stream("batches"), steps=200)


SCENARIOS = (
    fault("nonfinite/log_of_zero", _log_of_zero, judge_nonfinite()),
    fault("nonfinite/empty_mask", _empty_mask, judge_nonfinite()),
    fault("nonfinite/half_overflow", _half_overflow, judge_nonfinite()),
    fault("nonfinite/distance_of_equals", _distance_of_equals, judge_nonfinite()),
    fault("spike/corrupt_shards", _corrupt_shards, judge_spike()),
    fault("spike/restart_too_high", _restart_too_high, judge_spike()),
    fault("plateau/shuffled_inputs", _permuted, judge_plateau()),
    fault("plateau/same_image", _blank_images, judge_plateau(also=("constant_inputs",))),
    fault("plateau/tiny_rate", _tiny_rate, judge_plateau()),
    fault("plateau/gradient_wiped", _gradient_wiped, judge_plateau()),
    fault("update/group_rate", _group_rate, judge_updates("hidden", "hidden")),
    fault("update/decay_as_percent", _decay_as_percent, judge_updates("")),
    fault("update/crawling_body", _crawling_body, judge_updates("body", "body.0", "body.2")),
)
