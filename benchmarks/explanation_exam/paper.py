"""What a paper of the exam is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.explanation_exam.changes import Change, Setup

__all__ = ["Paper", "Task"]


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
        return self.changes[0].script if self.changes else ""


@dataclass(frozen=True)
class Paper:
    """Questions about one project.

    Attributes:
        metric: What a run is judged by.
        worst: What counts where a run ended with no number.
        scripts: What trains; the first one where a question names none.
        make_project: Makes it, with data and libraries, in a new folder.
        setup: A project that has been made, as its folder holds it.
        list_history: Runs that somebody has made of it, with their seeds; of a script, and whether
            few are enough. A setup may have edited the project before it is yielded.
        measure_effect: How far a result has moved, whatever its size is.
        parts: Part of the paper -> its questions.
        neutral: Changes that change nothing that comes out.
        short: Part of the paper -> names of a few questions.
    """

    metric: str
    worst: float
    scripts: tuple[str, ...]
    make_project: Callable[[Path], Setup]
    setup: Callable[[Path], Setup]
    list_history: Callable[[Setup, bool], Iterable[tuple[Setup, int]]]
    measure_effect: Callable[[float, float], float]
    parts: dict[str, tuple[Task, ...]]
    neutral: tuple[Change, ...]
    short: dict[str, tuple[str, ...]]

    def find_script(self, task: Task) -> str:
        """What trains in a question."""
        return task.script or self.scripts[0]
