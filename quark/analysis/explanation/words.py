"""An explanation told in rows of words, which a terminal, a page and a text lay out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quark.analysis.comparison.results import FigureDiff
from quark.analysis.comparison.unfinished import tell_ends as tell_ends_of
from quark.analysis.explanation.results import (
    ABSENT,
    Cause,
    ChangeExplanation,
    Remark,
)
from quark.analysis.observations import format_number
from quark_core.records.names import decode_name

_VALUE_CHARACTERS = 60
_LABELS = {"probable": "Probably", "possible": "Possibly", "unlikely": "Unlikely"}
_VERDICTS = {
    "better": "better",
    "worse": "worse",
    "changed": "changed",
    "no_difference": "no change beyond chance",
    "cannot_tell": "inconclusive",
}
_FOLDED = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        label: Probably, Possibly, Unlikely, Differs, Ruled out, Unknown or To be sure.
        kind: What it is about, or "".
        place: Which one, and what it was and is.
        words: What is said of it.
    """

    label: str
    kind: str
    place: str
    words: str


def describe_change(result: ChangeExplanation) -> str:
    """The metric on both sides and the verdict, in one line."""
    if result.metric is None or result.metric_key is None:
        return f"{_VERDICTS[result.verdict]}: {result.reason}"
    ends = result.metric.last
    digits = _count_digits(ends)
    figures = f"{_show_figure(ends.reference, digits)} -> {_show_figure(ends.primary, digits)}"
    several = max(result.metric.primary_run_count, result.metric.reference_run_count) > 1
    named = "means of last values" if several else "last values"
    line = f"{decode_name(result.metric_key)}  {figures}  {_VERDICTS[result.verdict]} ({named}"
    floor = result.noise_floor
    if floor is None:
        return f"{line})"
    told = f"± {format_number(float(f'{floor.deviation:.2g}'))}"
    if floor.source == "project":
        return f"{line}; seeds of other configurations lie {told} apart, {floor.run_count} runs)"
    mean = "" if floor.mean is None else f"{_show_figure(floor.mean, digits)} "
    return f"{line}; {floor.run_count} runs of these configurations: {mean}{told})"


def tell_ends(result: ChangeExplanation) -> tuple[str, ...]:
    """A sentence on each run that did not complete; whoever shows the rest shows these first."""
    return tell_ends_of(("The first", result.before), ("The second", result.after))


def list_rows(result: ChangeExplanation) -> Iterator[Row]:
    """Causes or differences, what is ruled out, what is unknown, what would settle it."""
    for cause in result.causes:
        yield _tell_cause(_LABELS[cause.standing], cause)
    for cause in result.differences[:_FOLDED]:
        yield Row("Differs", cause.kind, _tell_place(cause), "")
    if len(result.differences) > _FOLDED:
        yield Row("Differs", "", f"{len(result.differences) - _FOLDED} more; --json has all", "")
    if result.ruled_out:
        yield Row("Ruled out", "", _join(result.ruled_out), "")
    if result.unknown:
        yield Row("Unknown", "", _join(result.unknown), "")
    for check in result.checks[:1]:
        yield Row("To be sure", "", check.command, check.words)


def tell(result: ChangeExplanation) -> str:
    """The whole explanation as plain text."""
    lines = [
        *tell_ends(result),
        describe_change(result),
        f"{_capitalise(result.first_difference.summary)}.",
    ]
    for row in list_rows(result):
        parts = [
            f"{row.label:<11}",
            f"{row.kind:<9}" if row.kind else "",
            row.place,
            row.words and f" {row.words}",
        ]
        lines.append(" ".join(part for part in parts if part).rstrip())
    return "\n".join([*lines, *result.notes])


def show_value(value: Any) -> str:
    """A value in few characters."""
    text = value if value == ABSENT else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 3]}..."


def _tell_cause(label: str, cause: Cause) -> Row:
    words = cause.summary
    if cause.together:
        words += f"; always changed together with {', '.join(cause.together)}"
    return Row(label, cause.kind, _tell_place(cause), words)


def _tell_place(cause: Cause) -> str:
    if cause.kind == "code":
        return cause.place
    if cause.kind == "data" and cause.after == "another order":
        return f"{cause.place}  in {cause.after}"
    return f"{cause.place}  {show_value(cause.before)} -> {show_value(cause.after)}"


def _join(remarks: Sequence[Remark]) -> str:
    parts = []
    for remark in remarks:
        name = f"{remark.kind} {remark.place}" if remark.place else remark.kind
        parts.append(f"{name} ({remark.words})")
    return " · ".join(parts)


def _count_digits(ends: FigureDiff) -> int:
    """Three digits, or as many as show two digits of the difference."""
    difference, value = ends.difference, ends.primary
    if not difference or not value:
        return 3
    return min(12, max(3, math.floor(math.log10(abs(value) / abs(difference))) + 3))


def _show_figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
