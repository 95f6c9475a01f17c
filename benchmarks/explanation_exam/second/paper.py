"""The second paper: a package that is set by a JSON file, by people who judge by r2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.explanation_exam.changes import Setup
from benchmarks.explanation_exam.paper import Paper, Task
from benchmarks.explanation_exam.second.changes import (
    CHANGES,
    NEUTRAL,
    make_project,
    take_project,
)

__all__ = ["SECOND"]

_SMALL = {"shape.width": 12, "shape.depth": 1}
_LARGE = {"shape.width": 48, "shape.depth": 3}
_TRIED: tuple[dict[str, Any], ...] = (
    {"optimizer.rate": 0.003},
    {"optimizer.rate": 0.03},
    {"optimizer.rate": 0.03, "tag": "storm"},
    {"optimizer.rate": 0.001, "report_every": 20},
    _SMALL,
    _LARGE,
    _LARGE | {"optimizer.rate": 0.003},
    _LARGE | {"shape.drop": 0.1},
    {"shape.drop": 0.1},
    {"shape.drop": 0.3, "tag": "storm"},
    {"delta": 0.5},
    {"delta": 3.0},
    {"delta": 3.0, "clean": False},
    {"clean": False},
    {"clean": False, "delta": 0.5, "report_every": 20},
    {"optimizer.decay": 0.1},
    {"optimizer.decay": 0.1, "optimizer.rate": 0.03},
    {"optimizer.epochs": 5},
    {"optimizer.epochs": 20},
    {"optimizer.epochs": 20, "optimizer.batch": 64},
    {"optimizer.batch": 64, "tag": "storm"},
    {"optimizer.batch": 16},
    _SMALL | {"optimizer.rate": 0.03, "tag": "calm"},
    _SMALL | {"optimizer.batch": 16},
)
"""What a person has tried, one thing after another; width and depth always together."""

_TRIED_IN_CODE = (8, 9, 10)
"""Runs of it with another strength of the layers in the code, which was taken back."""

_NEW_SEED = 70
_SEEDS = 6
_BY_NAME = {change.name: change for change in (*CHANGES, *NEUTRAL)}
_PAIRS = (
    ("rate", "statistics"),
    ("together", "column"),
    ("clean", "activation"),
    ("library", "truncated"),
    ("dropped", "comparison"),
    ("sorted", "swapped"),
    ("rate", "together"),
    # One of two is what matters.
    ("constant", "tag"),
    ("rate", "formatted"),
    ("together", "report"),
    ("truncated", "uncalled"),
    ("variable", "tag"),
)
_NOTHING = (
    *[((), seed, seed) for seed in (0, 3)],
    *[((), seed, _NEW_SEED + seed) for seed in range(4)],
    (("formatted",), 0, 0),
    (("formatted",), 1, _NEW_SEED + 1),
    (("documented",), 2, _NEW_SEED + 2),
    (("imports",), 3, _NEW_SEED + 3),
    (("renamed",), 4, _NEW_SEED + 4),
    (("annotated", "imports"), 5, 5),
    (("uncalled",), 0, _NEW_SEED + 5),
    (("module",), 1, 1),
    (("tag",), 2, 2),
    (("report", "tag"), 3, _NEW_SEED + 6),
    (("unused",), 4, _NEW_SEED + 7),
    (("shuffled",), 5, 5),
    (("threads",), 0, 0),
    (("threads", "documented"), 1, _NEW_SEED + 8),
)


def _list_singles() -> Iterator[Task]:
    """Each change that matters, with one seed and with two."""
    for number, change in enumerate(CHANGES):
        yield Task((change,), number % _SEEDS, number % _SEEDS)
        yield Task((change,), (number + 2) % _SEEDS, _NEW_SEED + number)


def _list_pairs() -> Iterator[Task]:
    """Half of them with two seeds."""
    for number, names in enumerate(_PAIRS):
        seed = (number + 1) % _SEEDS
        changes = tuple(_BY_NAME[name] for name in names)
        yield Task(changes, seed, seed if number % 2 else _NEW_SEED + number)


def _list_history(setup: Setup, short: bool) -> Iterator[tuple[Setup, int]]:
    for number, options in enumerate(_TRIED):
        if short and number % 2:
            continue
        tried = number in _TRIED_IN_CODE
        if tried:
            setup.edit("tides/model/blocks.py", "strength=0.7", "strength=1.1")
        # Who tries leaves the seed alone, most of the time.
        yield replace(setup, options=dict(options)), number % 2
        if tried:
            setup.edit("tides/model/blocks.py", "strength=1.1", "strength=0.7")


SECOND = Paper(
    metric="val/r2",
    worst=-1e9,
    scripts=("-m tides",),
    make_project=make_project,
    setup=take_project,
    list_history=_list_history,
    measure_effect=lambda before, after: abs(after - before),
    parts={
        "single": tuple(_list_singles()),
        "pairs": tuple(_list_pairs()),
        "nothing": tuple(
            Task(tuple(_BY_NAME[name] for name in names), seed, other)
            for names, seed, other in _NOTHING
        ),
    },
    neutral=NEUTRAL,
    short={
        "single": ("default-0-0", "column-5-79", "rate-4-84"),
        "pairs": ("together+report-4-4",),
        "nothing": ("nothing-0-0", "formatted-1-71"),
    },
)
