"""Faults of signals, gradients, units and machines, each after an account that was published."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.eighth_course import (
    RUINS,
    Course,
    fit,
    judge_fault,
    lost,
    pair,
)
from benchmarks.diagnosis.families.eighth_tasks import (
    Reader,
    cut,
    make_images,
    make_prices,
    sample,
    supervise,
)
from benchmarks.diagnosis.networks import make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

__all__ = ["SCENARIOS"]


def _bootstrapped_beyond_data(recorder: Recorder, draw: Draw) -> Truth:
    """Tsitsiklis and Van Roy 1996: values bootstrapped off the data, without a target network."""

    def make(draw: Draw, faulty: bool) -> Course:
        model = make_mlp([4, 48, 48, 1], activation="relu")
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=draw.uniform(0.004, 0.007))
        rng, discount = draw.stream("states"), 0.99 if faulty else 0.3

        def batch(_step: int) -> Tensor:
            return torch.tensor(rng.uniform(-0.5, 0.5, (64, 4)), dtype=torch.float32)

        def lose(net: nn.Module, state: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            value, reward = net(state), 0.2 * state.abs().mean(1, keepdim=True)
            with torch.no_grad():
                # Nine episodes of ten go on, twice as far out as any state of the data.
                target = reward + 0.9 * discount * net(2.5 * state)
            return functional.mse_loss(value, target), {"train/mean_value": float(value.mean().item())}

        test = torch.tensor(draw.stream("test").uniform(-0.5, 0.5, (256, 4)), dtype=torch.float32)
        return Course(
            model,
            optimizer,
            batch,
            lose,
            lambda net: float(net(test).abs().mean()),
            steps=400,
            key="train/td_loss",
            log_norm=True,
        )

    _, notes, twin = pair(make, recorder, draw)
    growth = float(np.median(notes.norms[-40:]) / np.median(notes.norms[10:40]))
    return judge_fault(
        growth > 100 and notes.end > 20,
        notes,
        twin,
        "exploding_gradients",
        reason=f"values bootstrap on themselves: gradients grew to {growth:.3g} times",
        tolerated=RUINS,
    )


def _tiny_start(recorder: Recorder, draw: Draw) -> Truth:
    """Glorot and Bengio 2010: a deep tanh network whose weights start far too small."""

    def make(draw: Draw, faulty: bool) -> Course:
        depth, width = draw.integer(9, 11), draw.integer(40, 56)
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model = make_mlp([64, *[width] * depth, 10], activation="tanh")
        if faulty:
            gain = draw.uniform(0.15, 0.25)
            for name, weight in model.named_parameters():
                if name.endswith("weight") and not name.startswith("head"):
                    nn.init.normal_(weight, std=gain / math.sqrt(weight.shape[1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return supervise(draw, model, optimizer, data, steps=300, train_accuracy="train/acc")

    course, notes, twin = pair(make, recorder, draw)
    x, y, _ = course.batch(0)
    course.model.zero_grad()
    course.lose(course.model, (x, y), 0)[0].backward()
    sizes = {n: float(p.grad.norm()) for n, p in course.model.named_parameters() if p.grad is not None}
    share = sizes["fc0.weight"] / (sizes["head.bias"] + 1e-30)
    borne = share < 1e-3 and lost(notes, twin) > 0.5
    reason = f"weights started too small: fc0 gets {share:.2g} of the head's gradient"
    return judge_fault(
        borne,
        notes,
        twin,
        "vanishing_gradients",
        reason=reason,
        tolerated=("plateau", "stagnant_layers", "update_ratio", "activation_collapse", "mostly_frozen"),
    )


class _Quantizer(nn.Module):
    """Images to words of a book and back; `through` copies gradients past the words."""

    def __init__(self, through: bool):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 8))
        self.book = nn.Parameter(0.5 * torch.randn(48, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 64))
        self.through = through

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image again, and the loss of the book."""
        code = self.encoder(x)
        with torch.no_grad():
            word = torch.cdist(code, self.book).argmin(1)
        chosen = self.book[word]
        book_loss = functional.mse_loss(chosen, code.detach())
        if self.through:
            book_loss = book_loss + 0.25 * functional.mse_loss(code, chosen.detach())
            return self.decoder(code + (chosen - code).detach()), book_loss
        return self.decoder(chosen), book_loss


def _no_straight_through(recorder: Recorder, draw: Draw) -> Truth:
    """van den Oord et al. 2017: without the straight-through estimator no gradient passes argmin."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Quantizer(not faulty)
        with torch.no_grad():
            model.book.copy_(model.encoder(data.x[:48]))
        optimizer = torch.optim.Adam(model.parameters(), lr=draw.uniform(2e-3, 4e-3))
        take = sample(draw, len(data.x), 64)

        def lose(net: nn.Module, x: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            again, book_loss = net(x)
            error = functional.mse_loss(again, x)
            return error + book_loss, {"train/recon": error.item(), "train/vq": book_loss.item()}

        def proof(net: nn.Module) -> float:
            return float(functional.mse_loss(net(data.proof_x)[0], data.proof_x))

        def check(_step: int) -> dict[str, float]:
            with torch.no_grad():
                return {"val/recon": float(functional.mse_loss(model(data.val_x)[0], data.val_x))}

        return Course(
            model, optimizer, lambda step: data.x[take(step)], lose, proof, check, steps=400
        )

    _, notes, twin = pair(make, recorder, draw)
    still = notes.moved("encoder.0.weight")
    borne = still == 0.0 and notes.end > 1.1 * twin.end
    return judge_fault(
        borne,
        notes,
        twin,
        "stagnant_layers",
        reason=f"no gradient passes the quantizer: the encoder moved by {still:.2g}",
        tolerated=("vanishing_gradients", "mostly_frozen", "parameters_not_optimized", "plateau", "update_ratio"),
        culprits=("encoder", "encoder.0", "encoder.2"),
    )


def _prior_bias_everywhere(recorder: Recorder, draw: Draw) -> Truth:
    """RetinaNet's prior bias, -log((1-p)/p), meant for the last layer, given to every convolution."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=4)
        model = make_convolutional([8, 8, 16], 12, 4)
        if faulty:
            prior = draw.uniform(0.002, 0.01)
            for name, layer in model.named_modules():
                if isinstance(layer, nn.Conv2d) and name != "conv0":
                    nn.init.constant_(layer.bias, -math.log((1 - prior) / prior))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        return supervise(draw, model, optimizer, data, steps=220, names=("loss", "val_loss", "val_acc"))

    course, notes, twin = pair(make, recorder, draw)
    with torch.no_grad():
        out = course.model[:6](course.batch(0)[0])
    dead = float((out.amax((0, 2, 3)) <= 0).float().mean())
    borne = dead >= 0.7 and lost(notes, twin) > 0.5
    return judge_fault(
        borne,
        notes,
        twin,
        "activation_collapse",
        reason=f"a bias for rare classes in all layers: {dead:.0%} of the units are out",
        tolerated=("vanishing_gradients", "stagnant_layers", "plateau", "mostly_frozen", "update_ratio"),
        culprits=("act1", "act2", "conv1", "conv2"),
    )


class _Siamese(nn.Module):
    """Encoder, projector and predictor; `stop` is the stop-gradient."""

    def __init__(self, width: int, stop: bool):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.projector = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 16)
        )
        self.predictor = nn.Sequential(
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 16)
        )
        self.stop = stop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Projection and prediction."""
        z = self.projector(self.encoder(x))
        return (z.detach() if self.stop else z), self.predictor(z)


def _spread(z: Tensor) -> float:
    return float(functional.normalize(z, dim=1).std(0).mean() * math.sqrt(z.shape[1]))


def _no_stop_gradient(recorder: Recorder, draw: Draw) -> Truth:
    """Chen and He 2021: a siamese network without stop-gradient maps everything to one point."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Siamese(draw.integer(40, 64), not faulty)
        rate = draw.uniform(0.04, 0.08)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
        take, noise = sample(draw, len(data.x), 64), torch.Generator().manual_seed(draw.seed)

        def blur(x: Tensor) -> Tensor:
            return x + 0.25 * torch.randn(x.shape, generator=noise)

        def lose(net: nn.Module, x: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            (z1, p1), (z2, p2) = net(blur(x)), net(blur(x))
            likeness = functional.cosine_similarity(p1, z2) + functional.cosine_similarity(p2, z1)
            return -0.5 * likeness.mean(), {"train/feature_std": _spread(z1.detach())}

        return Course(
            model,
            optimizer,
            lambda step: data.x[take(step)],
            lose,
            lambda net: -_spread(net(data.proof_x)[0]),
            steps=360,
            key="train/similarity_loss",
        )

    _, notes, twin = pair(make, recorder, draw)
    borne = -notes.end < 0.25 * -twin.end and -notes.end < 0.1
    return judge_fault(
        borne,
        notes,
        twin,
        "activation_collapse",
        reason=f"no stop-gradient: spread {-notes.begin:.3f} -> {-notes.end:.4f}, twin {-twin.end:.3f}",
        tolerated=("vanishing_gradients", "plateau", "stagnant_layers", "update_ratio"),
    )


def _memorised_reviews(recorder: Recorder, draw: Draw) -> Truth:
    """The forum's classic: fine-tuning too long on two hundred reviews, some of them mislabelled."""

    def make(draw: Draw, faulty: bool) -> Course:
        rng = draw.stream("reviews")
        words = rng.integers(0, 60, (1500, 16))
        mood = (words < 12).sum(1) - ((words >= 12) & (words < 24)).sum(1)
        label = (mood + rng.normal(0, 1.2, 1500) > 0).astype(np.int64)
        data = cut(words, label, 2)
        data = data.shrink(draw.integer(160, 220)) if faulty else data
        model = Reader(60, 32, 2, 16, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
        return supervise(
            draw,
            model,
            optimizer,
            data,
            steps=360 if faulty else 120,
            check_every=15,
            size=16,
            train_accuracy="train/accuracy",
        )

    _, notes, twin = pair(make, recorder, draw)
    rise = notes.end / notes.best
    borne = rise > 1.4 and float(np.mean(notes.losses[-30:])) < 0.3
    onset = notes.looks[int(np.argmin(notes.proof))]
    return judge_fault(
        borne,
        notes,
        twin,
        "overfitting_onset",
        reason=f"few texts learnt by heart: proof loss rose to {rise:.2f} times its best",
        onset=onset,
        tolerated=("divergence", "loss_spike"),
    )


def _waits(recorder: Recorder, draw: Draw, course: Course, take: Any) -> None:
    def after(step: int) -> None:
        data_ms, compute_ms = take(step)
        recorder.time(
            step, step_ms=data_ms + compute_ms + 0.3, data_ms=data_ms, compute_ms=compute_ms
        )

    course.after = after
    course.start = {"timing": "manual"}


def _workers_born_each_epoch(recorder: Recorder, draw: Draw) -> Truth:
    """pytorch issue 15849: workers are made anew at each epoch, and every epoch begins by waiting."""
    data = make_images(draw, classes=6)
    model = make_convolutional([8, 16], 12, 6)
    course = supervise(draw, model, torch.optim.Adam(model.parameters(), 2e-3), data, size=64, steps=280)
    compute, wait = draw.uniform(60, 120), draw.uniform(2500, 5000)
    rng, spent = draw.stream("clock"), [0.0, 0.0]

    def take(step: int) -> tuple[float, float]:
        begins = step % (course.per_epoch or 1) == 0
        data_ms = (wait if begins else 3.0) * float(np.exp(rng.normal(0, 0.15)))
        compute_ms = compute * float(np.exp(rng.normal(0, 0.04)))
        spent[0], spent[1] = spent[0] + data_ms, spent[1] + compute_ms
        return data_ms, compute_ms

    _waits(recorder, draw, course, take)
    notes = fit(course, recorder)
    share = spent[0] / sum(spent)
    return judge_fault(
        share > 0.5,
        notes,
        None,
        "runtime_bottleneck_risk",
        reason=f"workers made anew at each of the epochs: {share:.0%} of the time is waiting",
        tolerated=("idle_device",),
    )


def _list_that_grows(recorder: Recorder, draw: Draw) -> Truth:
    """Many threads: statistics over a list of all steps so far, so that each step takes longer."""
    data = make_prices(draw)
    model = make_mlp([8, 48, 48, 1], activation="silu")
    course = supervise(
        draw, model, torch.optim.Adam(model.parameters(), 3e-3), data, steps=400, check_every=40
    )
    base, growth = draw.uniform(15, 40), draw.uniform(3.0, 6.0)
    rng, times = draw.stream("clock"), []

    def take(step: int) -> tuple[float, float]:
        compute_ms = base * (1 + growth * step / 400) * float(np.exp(rng.normal(0, 0.05)))
        times.append(compute_ms)
        return 0.05 * base * float(np.exp(rng.normal(0, 0.1))), compute_ms

    _waits(recorder, draw, course, take)
    notes = fit(course, recorder)
    factor = float(np.median(times[-40:]) / np.median(times[:40]))
    return judge_fault(
        factor > 2.5,
        notes,
        None,
        "runtime_bottleneck_risk",
        reason=f"steps took {factor:.1f} times as long in the end as in the beginning",
    )


def _root_of_nothing(recorder: Recorder, draw: Draw) -> Truth:
    """keras issue 9097: two equal inputs, a distance of 0, and the gradient of its root is NaN."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        rng, onset = draw.stream("pairs"), draw.onset_step(300, 0.2, 0.6)

        def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
            one = torch.from_numpy(rng.integers(0, len(data.x), 64))
            two = (one + torch.from_numpy(rng.integers(1, len(data.x), 64))) % len(data.x)
            if step == onset:
                two[0] = one[0]
            return data.x[one], data.x[two], (data.y[one] == data.y[two]).float()

        def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
            gap = (net(got[0]) - net(got[1])).square().sum(1)
            far = torch.sqrt(gap if faulty else gap + 1e-6)
            apart = (1 - got[2]) * functional.relu(1 - far).square()
            return (3.0 * got[2] * far.square() + apart).mean(), {}

        def proof(net: nn.Module) -> float:
            codes = net(data.proof_x)
            near = torch.cdist(codes, codes).fill_diagonal_(9e9).argmin(1)
            return float((data.proof_y[near] != data.proof_y).float().mean())

        return Course(model, optimizer, batch, lose, proof, key="train/contrastive_loss")

    course, notes, twin = pair(make, recorder, draw)
    bad = [step for step, loss in enumerate(notes.losses) if not math.isfinite(loss)]
    gone = any(not torch.isfinite(p).all() for p in course.model.parameters())
    return judge_fault(
        bool(bad) and gone and math.isfinite(twin.losses[-1]),
        notes,
        twin,
        "non_finite_values",
        reason=f"the root of a distance of 0: NaN from step {bad[0] if bad else None}",
        onset=bad[0] if bad else None,
        tolerated=RUINS,
    )


class _Attention(nn.Module):
    """Tokens, one head of attention, a residual perceptron, and a mean that is classified."""

    def __init__(self, letters: int, width: int, classes: int):
        super().__init__()
        self.token = nn.Embedding(letters, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; places of letter 0 are not read."""
        states = self.token(x)
        scores = self.query(states) @ self.key(states).transpose(1, 2) / states.shape[-1] ** 0.5
        scores = scores.masked_fill((x == 0)[:, None], float("-inf"))
        states = self.norm(states + scores.softmax(-1) @ self.value(states))
        return self.classifier((states + self.mlp(states)).mean(1))


def _all_padding(recorder: Recorder, draw: Draw) -> Truth:
    """pytorch issue 41508: a text that is all padding, a softmax over nothing, NaN."""

    def make(draw: Draw, faulty: bool) -> Course:
        rng, onset = draw.stream("texts"), draw.onset_step(260, 0.25, 0.65)
        words = rng.integers(1, 20, (1200, 14))
        lengths = rng.integers(6, 15, 1200)
        words[np.arange(14) >= lengths[:, None]] = 0
        data = cut(words, ((words == 3).any(1) | (words == 7).any(1)).astype(np.int64), 2)
        model = _Attention(20, 24, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        course = supervise(draw, model, optimizer, data, steps=260)
        plain = course.batch

        def batch(step: int) -> Any:
            x, y, ids = plain(step)
            if faulty and step == onset:
                x = x.clone()
                x[3] = 0
            return x, y, ids

        course.batch = batch
        return course

    course, notes, twin = pair(make, recorder, draw)
    bad = [step for step, loss in enumerate(notes.losses) if not math.isfinite(loss)]
    return judge_fault(
        bool(bad) and math.isfinite(twin.losses[-1]),
        notes,
        twin,
        "non_finite_values",
        reason=f"a text of padding only: NaN from step {bad[0] if bad else None}",
        onset=bad[0] if bad else None,
        tolerated=RUINS,
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "exploding_gradients/bootstrapped_beyond_data": _bootstrapped_beyond_data,
        "vanishing_gradients/tiny_start": _tiny_start,
        "stagnant_layers/no_straight_through": _no_straight_through,
        "activation_collapse/prior_bias_everywhere": _prior_bias_everywhere,
        "activation_collapse/no_stop_gradient": _no_stop_gradient,
        "overfitting_onset/memorised_reviews": _memorised_reviews,
        "runtime_bottleneck_risk/workers_born_each_epoch": _workers_born_each_epoch,
        "runtime_bottleneck_risk/list_that_grows": _list_that_grows,
        "non_finite_values/root_of_nothing": _root_of_nothing,
        "non_finite_values/all_padding": _all_padding,
    }.items()
)
