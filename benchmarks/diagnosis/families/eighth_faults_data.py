"""Faults of data, of judging and of aims; four of them are ones that no rule is named for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.eighth_course import Course, Notes, judge_fault, lost, pair
from benchmarks.diagnosis.families.eighth_tasks import (
    SmallResNet,
    cut,
    make_images,
    supervise,
)
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.networks import Recurrent, make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _tell(batch: Any) -> dict[str, Any]:
    return {"labels": batch[1].flatten(), "sample_ids": batch[2]}


def _spoil(data: Data, wrong: Tensor, shift: int) -> Data:
    y = data.y.clone()
    y[wrong] = (y[wrong] + shift) % data.classes
    return Data(data.x, y, data.val_x, data.val_y, data.proof_x, data.proof_y, data.classes)


def _judge_labels(course: Course, notes: Notes, twin: Notes, data: Data, wrong: Tensor) -> Truth:
    course.model.eval()
    with torch.no_grad():
        each = functional.cross_entropy(course.model(data.x), data.y, reduction="none")
    right = torch.ones(len(data.x), dtype=torch.bool)
    right[wrong] = False
    bad, good = float(each[wrong].mean()), float(each[right].mean())
    return judge_fault(
        bad > 5 * good and bad > 1.0 and notes.end > twin.end,
        notes,
        twin,
        "mislabelled_data",
        reason=f"{len(wrong)} of {len(data.x)} labels are wrong; their loss is {bad:.2f}, "
        f"of the others {good:.2f}",
        tolerated=("overfitting_onset", "plateau", "loss_spike"),
    )


def _annotator_off_by_one(recorder: Recorder, draw: Draw) -> Truth:
    """Northcutt et al. 2021 and many threads: one annotator's file counts its classes from one."""
    kept: list[Any] = []

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).shrink(800)
        first, many = draw.integer(0, 600), draw.integer(32, 56)
        wrong = torch.arange(first, first + many)
        data = _spoil(data, wrong, 1) if faulty else data
        model = make_convolutional([8, 12], 8, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=2e-3)
        kept.append((data, wrong))
        return supervise(
            draw, model, optimizer, data, size=16, steps=600, check_every=50, tell=_tell
        )

    course, notes, twin = pair(make, recorder, draw)
    return _judge_labels(course, notes, twin, *kept[0])


def _spammers(recorder: Recorder, draw: Draw) -> Truth:
    """Hovy et al. 2013: a few workers of a crowd answer without reading; their texts are wrong."""
    kept: list[Any] = []

    def make(draw: Draw, faulty: bool) -> Course:
        rng = draw.stream("texts")
        words = rng.integers(0, 40, (1200, 12))
        label = ((words < 8).sum(1) > (words >= 32).sum(1)).astype(np.int64)
        data = cut(words, label, 2)
        wrong = torch.from_numpy(rng.permutation(720)[: draw.integer(36, 56)])
        data = _spoil(data, wrong, 1) if faulty else data
        model = nn.Sequential(
            nn.EmbeddingBag(40, 24), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        kept.append((data, wrong))
        return supervise(
            draw, model, optimizer, data, size=12, steps=600, check_every=60, tell=_tell
        )

    course, notes, twin = pair(make, recorder, draw)
    return _judge_labels(course, notes, twin, *kept[0])


def _dropout_in_validation(recorder: Recorder, draw: Draw) -> Truth:
    """The forum's commonest answer: `model.eval()` was forgotten, dropout acts in validation."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data"), noise=0.2)
        model = make_mlp([64, 64, 64, 10], dropout=draw.uniform(0.45, 0.6))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        course = supervise(draw, model, optimizer, data, steps=300, check_every=15)

        def check(_step: int) -> dict[str, float]:
            if not faulty:
                model.eval()
            with torch.no_grad():
                output = model(data.val_x)
                values = {"val/loss": float(functional.cross_entropy(output, data.val_y))}
                values["val/accuracy"] = float((output.argmax(1) == data.val_y).float().mean())
            model.train()
            return values

        course.check = check
        return course

    course, notes, twin = pair(make, recorder, draw)
    assert course.check is not None
    told = course.check(0)["val/loss"]
    return judge_fault(
        told > 1.3 * notes.end,
        notes,
        twin,
        "training_mode_in_evaluation",
        reason=f"dropout acts in validation: {told:.3f} is told",
        tolerated=("plateau",),
    )


def _statistics_of_validation(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on batch norm: validated in training mode, class by class; statistics move."""
    kept: list[Data] = []

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=6)
        model = SmallResNet(10, 1, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        course = supervise(draw, model, optimizer, data, steps=260, check_every=20)
        order = data.val_y.argsort()
        kept.append(data)

        def check(_step: int) -> dict[str, float]:
            model.train(faulty)
            losses, hits = [], []
            with torch.no_grad():
                for ids in order.split(25):
                    output = model(data.val_x[ids])
                    losses.append(float(functional.cross_entropy(output, data.val_y[ids])))
                    hits.append(float((output.argmax(1) == data.val_y[ids]).float().mean()))
            model.train()
            return {"val_loss": float(np.mean(losses)), "val_acc": float(np.mean(hits))}

        course.check = check
        return course

    course, notes, twin = pair(make, recorder, draw)
    assert course.check is not None
    told = course.check(0)["val_loss"]
    return judge_fault(
        told > 1.3 * twin.end,
        notes,
        twin,
        "training_mode_in_evaluation",
        reason=f"validation by the statistics of its own batches: {told:.3f} is told",
        tolerated=("plateau", "overfitting_onset", "loss_spike", "divergence"),
    )


def _softmax_twice(recorder: Recorder, draw: Draw) -> Truth:
    """The forum: a softmax as the last layer before CrossEntropyLoss; the loss stops at 1.5."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data"), noise=0.3)
        model = make_convolutional([8, 16], 8, 10)
        if faulty:
            model.add_module("softmax", nn.Softmax(dim=-1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return supervise(draw, model, optimizer, data, steps=300, train_accuracy="train/accuracy")

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        notes.end > 1.3 and notes.end > twin.end + 0.8,
        notes,
        twin,
        "squashed_outputs",
        reason="softmax before a loss that has its own",
        tolerated=(
            "plateau",
            "vanishing_gradients",
            "activation_collapse",
            "update_ratio",
            "stagnant_layers",
        ),
        culprits=("softmax",),
    )


class _Tagger(nn.Module):
    """Tags of a row of numbers, with a sigmoid of its own or without."""

    def __init__(self, squashed: bool):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.tags = nn.Linear(48, 12)
        self.out = nn.Sigmoid() if squashed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """A number for each tag."""
        return self.out(self.tags(self.trunk(x)))


def _sigmoid_twice(recorder: Recorder, draw: Draw) -> Truth:
    """Threads: a sigmoid at the end, and BCEWithLogitsLoss; the loss stays near log 2."""

    def make(draw: Draw, faulty: bool) -> Course:
        rng = draw.stream("tags")
        x = rng.normal(size=(1500, 20))
        tags = (np.tanh(x @ rng.normal(size=(20, 16))) @ rng.normal(size=(16, 12)) > 2.5) * 1.0
        model = _Tagger(faulty)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return supervise(
            draw,
            model,
            optimizer,
            cut(x, tags, 0),
            loss=functional.binary_cross_entropy_with_logits,
            steps=300,
            names=("bce", "val_bce", ""),
        )

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        notes.end > 0.6 and twin.end < 0.5,
        notes,
        twin,
        "squashed_outputs",
        reason="sigmoid before a loss that has its own",
        tolerated=(
            "plateau",
            "vanishing_gradients",
            "activation_collapse",
            "update_ratio",
            "stagnant_layers",
        ),
        culprits=("out",),
    )


def _in_order(course: Course, data: Data, size: int) -> None:
    order = data.y.argsort(stable=True)
    count = len(order) // size

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = order[(step % count) * size : (step % count + 1) * size]
        return data.x[ids], data.y[ids], ids

    course.batch = batch


def _folders_in_order(recorder: Recorder, draw: Draw) -> Truth:
    """ImageFolder with shuffle=False: class after class, each forgotten for the next."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data"), noise=0.1)
        model = make_convolutional([8, 12], 8, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        course = supervise(
            draw, model, optimizer, data, size=24, steps=360, tell=_tell, check_every=20
        )
        if faulty:
            _in_order(course, data, 24)
        return course

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        lost(notes, twin) > 0.2,
        notes,
        twin,
        "unshuffled_data",
        reason="classes come one after the other",
        tolerated=(*WRECK, "overfitting_onset"),
    )


def _balanced_file_in_order(recorder: Recorder, draw: Draw) -> Truth:
    """Threads on text classifiers: first all negative texts of the file, then the others."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = sequences.load_brackets(draw.stream("data"), length=8, count=1600)
        model = Recurrent("gru", 4, 24, 2, letters=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        course = supervise(
            draw, model, optimizer, data, size=32, steps=360, tell=_tell, train_accuracy="train/acc"
        )
        if faulty:
            _in_order(course, data, 32)
        return course

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        lost(notes, twin) > 0.3,
        notes,
        twin,
        "unshuffled_data",
        reason="first one class, then the other",
        tolerated=(*WRECK, "overfitting_onset"),
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "mislabelled_data/annotator_off_by_one": _annotator_off_by_one,
        "mislabelled_data/spammers": _spammers,
        "training_mode_in_evaluation/dropout_in_validation": _dropout_in_validation,
        "training_mode_in_evaluation/statistics_of_validation": _statistics_of_validation,
        "squashed_outputs/softmax_twice": _softmax_twice,
        "squashed_outputs/sigmoid_twice": _sigmoid_twice,
        "unshuffled_data/folders_in_order": _folders_in_order,
        "unshuffled_data/balanced_file_in_order": _balanced_file_in_order,
    }.items()
)
