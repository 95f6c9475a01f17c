"""What an explanation is worth: the right cause first, nobody accused in vain, nothing excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.explanation_exam.campaign import Question
from benchmarks.explanation_exam.changes import Change

__all__ = ["Mark", "mark_change", "mark_nothing", "mark_unrecorded"]


@dataclass(frozen=True)
class Mark:
    """One question, marked.

    Attributes:
        name: The question.
        right: Whether the answer was right.
        wrongly_excluded: What was ruled out, although it was the cause.
        said: The answer in short.
    """

    name: str
    right: bool
    wrongly_excluded: tuple[str, ...]
    said: str


def mark_change(question: Question, explanation: Any, guilty: Sequence[Change]) -> Mark:
    """A question with a change that matters.

    Args:
        question: It.
        explanation: What was said.
        guilty: The changes of which one must be named first; all of them have an effect.
    """
    first = explanation.causes[0] if explanation.causes else None
    right = first is not None and first.standing in ("probable", "possible")
    right = right and any(_names(first, change) for change in guilty)
    excluded = tuple(
        change.name
        for change in guilty
        if any(_excludes(each, change) for each in explanation.ruled_out)
    )
    return Mark(question.name, right, excluded, _say(explanation))


def mark_nothing(question: Question, explanation: Any) -> Mark:
    """A question where nothing was changed that matters: nobody may be accused."""
    accused = [each for each in explanation.causes if each.standing in ("probable", "possible")]
    return Mark(question.name, not accused, (), _say(explanation))


def mark_unrecorded(question: Question, explanation: Any) -> Mark:
    """A question whose cause no run records: nobody is probable, and something is unknown."""
    accused = any(each.standing == "probable" for each in explanation.causes)
    seen = explanation.verdict not in ("no_difference", "cannot_tell")
    right = seen and not accused and bool(explanation.unknown)
    return Mark(question.name, right, (), _say(explanation))


def _names(cause: Any, change: Change) -> bool:
    """Whether a cause is a change. Two that always went together are named together."""
    place = str(cause.place)
    return cause.kind == change.kind and any(word in place for word in change.places)


def _excludes(item: Any, change: Change) -> bool:
    place = str(item.place)
    return item.kind == change.kind and (not place or any(word in place for word in change.places))


def _say(explanation: Any) -> str:
    causes = [f"{each.standing} {each.kind} {each.place}" for each in explanation.causes[:3]]
    return f"{explanation.verdict}: {'; '.join(causes) or 'nobody'}"
