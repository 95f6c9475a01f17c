"""The questions of the exam: single changes, pairs of them, and nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.explanation_exam.changes import CHANGES, NEUTRAL, Change

__all__ = ["Task", "list_nothing", "list_pairs", "list_singles"]

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


@dataclass(frozen=True)
class Task:
    """What is done between two runs.

    Attributes:
        changes: Everything that is done.
        seed, other: Seeds of the two runs.
    """

    changes: tuple[Change, ...]
    seed: int
    other: int

    @property
    def name(self) -> str:
        """It, for a folder."""
        return (
            f"{'+'.join(each.name for each in self.changes) or 'nothing'}-{self.seed}-{self.other}"
        )

    @property
    def script(self) -> str:
        """The script that trains."""
        return self.changes[0].script if self.changes else "train.py"


def list_singles() -> Iterator[Task]:
    """Each change that matters, with one seed and with two."""
    for number, change in enumerate(CHANGES):
        yield Task((change,), number % 6, number % 6)
        yield Task((change,), (number + 1) % 6, _NEW_SEED + number)


def list_pairs() -> Iterator[Task]:
    """Two changes that matter, and one of them beside one that does not."""
    for number, names in enumerate(itertools.chain(_TWO, _ONE_OF_TWO)):
        seed = number % 6
        yield Task(tuple(_BY_NAME[name] for name in names), seed, seed)


def list_nothing() -> Iterator[Task]:
    """Forty times nothing that matters."""
    for names, seed, other in _NOTHING:
        yield Task(tuple(_BY_NAME[name] for name in names), seed, other)
