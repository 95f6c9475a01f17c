"""The results of an explanation as records, and as rows of text.

`before` is the first side that was asked about, `after` the second: a difference
is what the second has less what the first has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quark.analysis.comparison.results import FigureDiff, MetricDiff, RunReference
from quark.analysis.comparison.summary import tell_ends as tell_ends_of
from quark.analysis.observations import format_number
from quark_core.presentation import bundle, paint
from quark_core.records import EvidenceRecord
from quark_core.records.base import Record
from quark_core.records.names import decode_name

ChangeVerdict = Literal["better", "worse", "changed", "no_difference", "cannot_tell"]
CauseKind = Literal["seed", "data", "config", "code", "launch", "switch", "package", "hardware"]
Likelihood = Literal["probable", "possible", "unlikely"]
DivergenceManner = Literal["identical", "at_once", "later", "rounding", "unknown"]

_LEAST_DEGREES = 2

ABSENT = "(absent)"
"""Stands for the value of what a side is known not to have."""


class NoiseFloor(Record, frozen=True, gc=False):
    """How far runs of one configuration lie apart, which is what chance does.

    Attributes:
        deviation: Standard deviation of the metric's end between seeds.
        degrees: Degrees of freedom of it.
        run_count: Runs that it was taken from.
        mean: Mean of those of the first side's configuration, or None.
        source: `side` where they are runs of the configurations that are compared,
            `project` where they are of other configurations of the project.
    """

    deviation: float
    degrees: int
    run_count: int
    mean: float | None
    source: str

    @classmethod
    def pool(
        cls, groups: Iterable[Sequence[float]], source: str, mean: float | None = None
    ) -> NoiseFloor | None:
        """Pool the noise of groups of runs, each of one configuration; None if too few have one."""
        known = [np.array(values) for values in groups if len(values) > 1]
        degrees = sum(len(values) - 1 for values in known)
        if degrees < _LEAST_DEGREES:
            return None
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in known)
        return cls(math.sqrt(squares / degrees), degrees, sum(map(len, known)), mean, source)


class FirstDivergence(Record, frozen=True, gc=False):
    """Where the curves of the two sides part.

    Attributes:
        manner: identical; at_once, from the first point on; later, equal to the bit before;
            rounding, apart by rounding first; unknown where nothing can be compared.
        step: The first step at which they are not equal to the bit, or None.
        unit: step or epoch.
        metric_key: A metric that parts there, or None.
        equal_points: How many points were the same to the bit before that.
        relative_difference: The largest relative difference at that step, or None.
        settled_step: With `rounding`, where they are apart by more than rounding, or None.
        summary: One sentence.
    """

    manner: DivergenceManner
    step: int | None
    unit: str
    metric_key: str | None
    equal_points: int
    relative_difference: float | None
    settled_step: int | None
    summary: str


class Effect(Record, frozen=True, gc=False):
    """What a change does to the metric, by other runs.

    Attributes:
        source: `pairs`, runs that differ in this alone, or `history`, a regression on all runs.
        difference: Of the metric, from before to after.
        low, high: Interval of it, or None where there is none.
        level: Of the interval, such as 0.95.
        count: Pairs, or runs.
        agreement: Of a regression, the share of resamples that hold this for the largest one.
    """

    source: str
    difference: float
    low: float | None
    high: float | None
    level: float
    count: int
    agreement: float | None = None


class Cause(Record, frozen=True, gc=False):
    """Something that differs between the sides, and how much speaks for its being the cause.

    Attributes:
        kind: seed, data, config, code, launch, switch, package or hardware.
        place: Which one: a key, `optim.py: clip`, a fingerprint's key, a package.
        before, after: What it was on either side, as JSON-like values; `ABSENT` where a side
            is known not to have it, a list where the runs of a side differ.
        standing: probable, possible or unlikely.
        effect: What it does by other runs, or None where none tell.
        summary: What speaks for or against it, in a few words.
        evidence: The same piece by piece.
        together: Places of what always changed together with it in all runs: it cannot be told
            apart from them.
        repeats: What differs besides and only says the same again.
    """

    kind: CauseKind
    place: str
    before: Any
    after: Any
    standing: Likelihood
    effect: Effect | None
    summary: str
    evidence: tuple[EvidenceRecord, ...] = ()
    together: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()


class Note(Record, frozen=True, gc=False):
    """What is ruled out, or not known.

    Attributes:
        kind: As of a `Cause`.
        place: Which one; "" for the whole kind.
        words: Why.
    """

    kind: CauseKind
    place: str
    words: str


class Check(Record, frozen=True, gc=False):
    """Runs that would settle it: one side with one difference of the other.

    Attributes:
        kind, place: The difference.
        runs: How many runs.
        words: What they are.
        command: What makes them.
    """

    kind: CauseKind
    place: str
    runs: int
    words: str
    command: str


class ChangeExplanation(Record, frozen=True, gc=True, weakref=True):
    """Explanation of a changed result, returned by `explain_change`.

    Attributes:
        schema_version: Schema version of this result.
        generated_at: Time of the explanation.
        before, after: The two sides.
        metric_key: Explained metric, or None if the sides share no metric.
        metric: Comparison of that metric. Its primary side is `after`.
        verdict: `better` or `worse` (for `after`), `changed` if the direction is unknown,
            `no_difference` within seed noise, or `cannot_tell`.
        reason: Reason for the verdict, in one sentence.
        noise_floor: Seed noise, if known.
        first_difference: First step at which the runs diverge.
        causes: Possible causes, most likely first. Empty if the difference is within seed noise.
        differences: Differences between runs whose results agree. Each has the confidence
            `unlikely`.
        ruled_out: Differences that are not the cause.
        unknown: Data that was not recorded for one side.
        checks: Experiments that would settle the question.
        history_count: Number of runs of the project that were read.
        notes: Limits of this explanation.
    """

    schema_version: int
    generated_at: str
    before: RunReference
    after: RunReference
    metric_key: str | None
    metric: MetricDiff | None
    verdict: ChangeVerdict
    reason: str
    noise_floor: NoiseFloor | None
    first_difference: FirstDivergence
    causes: tuple[Cause, ...]
    differences: tuple[Cause, ...]
    ruled_out: tuple[Note, ...]
    unknown: tuple[Note, ...]
    checks: tuple[Check, ...]
    history_count: int
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        first = self.causes[0] if self.causes else None
        told = "" if first is None else f", {first.standing} {first.kind} {first.place}"
        return (
            f"ChangeExplanation({self.before.run_id} -> {self.after.run_id}: {self.verdict}{told})"
        )

    def __str__(self) -> str:
        # What it is told in is made of these records.

        return tell(self)

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)


_VALUE_CHARACTERS = 60
_LABELS = {"probable": "Probably", "possible": "Possibly", "unlikely": "Unlikely"}
_VERDICTS = {
    "better": "better",
    "worse": "worse",
    "changed": "changed",
    "no_difference": "no change beyond seed noise",
    "cannot_tell": "inconclusive",
}
_FOLDED = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        label: Probably, Possibly, Unlikely, Differs, Ruled out, Unknown or To confirm.
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
        return f"{line}; seeds of other configs are {told} apart, {floor.run_count} runs)"
    mean = "" if floor.mean is None else f"{_show_figure(floor.mean, digits)} "
    return f"{line}; {floor.run_count} runs of these configs: {mean}{told})"


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
        yield Row("Differs", "", f"{len(result.differences) - _FOLDED} more; --json shows all", "")
    if result.ruled_out:
        yield Row("Ruled out", "", _join(result.ruled_out), "")
    if result.unknown:
        yield Row("Unknown", "", _join(result.unknown), "")
    for check in result.checks[:1]:
        yield Row("To confirm", "", check.command, check.words)


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


def _join(remarks: Sequence[Note]) -> str:
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
