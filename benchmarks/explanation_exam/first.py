"""The first paper: single changes, pairs of them, and nothing, in a folder of scripts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.explanation_exam.changes import CHANGES, NEUTRAL, Setup, make_project
from benchmarks.explanation_exam.paper import Paper, Task

__all__ = ["FIRST"]

_SPREAD = {
    "--lr": ("0.003", "0.05", "0.1", "0.2"),
    "--hidden": ("1", "12", "24", "48"),
    "--noise": ("0.2", "0.5", "6.0"),
    "--weight-decay": ("0.0", "0.01", "2.0"),
    "--batch-size": ("32", "64", "400"),
    "--log-every": ("5", "7"),
    "--title": ("plain", "fancy"),
}
"""What a person has tried before, one or two at a time."""

_TRIED = {"train.py": 34, "train_torch.py": 4}
_TRIED_SHORT = 20
_NEW_SEED = 50
_BY_NAME = {change.name: change for change in (*CHANGES, *NEUTRAL)}
_TWO = (
    ("lr", "clip"),
    ("hidden", "labels"),
    ("noise", "momentum"),
    ("weight_decay", "library"),
    ("batch_size", "scale"),
    ("normalise", "inputs"),
    ("warm_up", "sorted"),
    ("lr", "noise"),
    ("hidden", "weight_decay"),
    ("clip", "library"),
    ("sorted", "library"),
    ("momentum", "scale"),
)
_ONE_OF_TWO = (
    ("lr", "comment"),
    ("lr", "log_every"),
    ("noise", "title"),
    ("hidden", "log_every"),
    ("batch_size", "renamed_local"),
    ("clip", "log_every"),
    ("scale", "title"),
    ("momentum", "comment"),
    ("labels", "log_every"),
    ("sorted", "title"),
    ("library", "renamed_local"),
    ("library", "log_every"),
)
_NOTHING = (
    *[((), seed, seed) for seed in range(6)],
    *[((), seed % 6, _NEW_SEED + seed) for seed in range(8)],
    *[(("comment",), seed, seed) for seed in range(3)],
    *[(("comment",), seed, _NEW_SEED + seed) for seed in range(2)],
    *[(("renamed_local",), seed, seed) for seed in range(3)],
    *[(("renamed_local",), seed, _NEW_SEED + seed) for seed in range(2)],
    *[(("log_every",), seed, seed) for seed in range(3)],
    *[(("log_every",), seed, _NEW_SEED + seed) for seed in range(2)],
    *[(("title",), seed, seed) for seed in range(2)],
    *[(("title",), seed, _NEW_SEED + seed) for seed in range(2)],
    *[(("unused_library",), seed, seed) for seed in range(2)],
    *[(("comment", "title"), seed, _NEW_SEED + seed) for seed in range(2)],
    *[(("renamed_local", "log_every"), seed, _NEW_SEED + seed) for seed in range(2)],
    (("unused_library", "title"), 0, _NEW_SEED),
)


def _list_singles() -> Iterator[Task]:
    """Each change that matters, with one seed and with two."""
    for number, change in enumerate(CHANGES):
        yield Task((change,), number % 6, number % 6)
        yield Task((change,), (number + 1) % 6, _NEW_SEED + number)


def _list_pairs() -> Iterator[Task]:
    """Two changes that matter, and one of them beside one that does not."""
    for number, names in enumerate(itertools.chain(_TWO, _ONE_OF_TWO)):
        seed = number % 6
        yield Task(tuple(_BY_NAME[name] for name in names), seed, seed)


def _list_nothing() -> Iterator[Task]:
    """Forty times nothing that matters."""
    for names, seed, other in _NOTHING:
        yield Task(tuple(_BY_NAME[name] for name in names), seed, other)


def _list_history(setup: Setup, short: bool) -> Iterator[tuple[Setup, int]]:
    rng = np.random.default_rng(7)
    whole = setup.script == "train.py"
    options = [name for name in _SPREAD if whole or name in ("--lr", "--hidden")]
    for number in range(_TRIED_SHORT if short else _TRIED[setup.script]):
        chosen = rng.choice(options, size=int(rng.integers(1, 3)), replace=False)
        given = {str(name): str(rng.choice(_SPREAD[name])) for name in chosen}
        yield replace(setup, options=given), 100 + number


FIRST = Paper(
    metric="val/loss",
    # What is no number any more is worse than all that is one.
    worst=1e9,
    scripts=("train.py", "train_torch.py"),
    make_project=make_project,
    setup=lambda folder: Setup(folder / "work"),
    list_history=_list_history,
    measure_effect=lambda before, after: abs(math.log(after / before)),
    parts={
        "single": tuple(_list_singles()),
        "pairs": tuple(_list_pairs()),
        "nothing": tuple(_list_nothing()),
    },
    neutral=NEUTRAL,
    short={
        "single": ("lr-0-0", "clip-3-58", "labels-5-5", "library-1-1"),
        "pairs": ("lr+comment-0-0", "labels+log_every-2-2"),
        "nothing": ("nothing-0-0", "nothing-1-51", "comment-0-0", "log_every-0-50"),
    },
)
