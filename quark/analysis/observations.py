"""Observations that rules share: values in texts with their records, and evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import History, as_floats, estimate_noise
from quark_core.records.kinds.findings import EvidenceRecord
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark.analysis.run_data import RunData
    from quark_core.records.columns import Columns


def observe(
    kind: str,
    source: str,
    summary: str,
    observed: float | None = None,
    threshold: float | None = None,
    start: int | None = None,
    end: int | None = None,
) -> EvidenceRecord:
    """One piece of evidence; a value that is not finite is left out, since the summary says it."""
    return EvidenceRecord(
        kind, source, summary, keep_finite(observed), keep_finite(threshold), start, end
    )


def list_stretches(mask: NDArray[np.bool_], least: int = 1) -> list[tuple[int, int]]:
    """Stretches of at least so many true values: the first index, and the one after the last."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(low, high) for low, high in pairs if high - low >= least]


def count_run(mask: NDArray[np.bool_]) -> int:
    """How many values at the end are true without a break."""
    if not len(mask):
        return 0
    false = np.flatnonzero(~mask)
    return int(len(mask) - 1 - false[-1]) if len(false) else len(mask)


def count_longest(mask: NDArray[np.bool_]) -> int:
    """How many values of the longest stretch of true ones there are."""
    return max((high - low for low, high in list_stretches(mask)), default=0)


def rank_by(scores: dict[str, float]) -> list[str]:
    """Names, the highest score first; of equals the one that was there first."""
    return sorted(scores, key=lambda name: -scores[name])


def format_number(value: float) -> str:
    """A number for people: three digits, an exponent where it is long."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    return f"{value + 0.0:.3g}"  # nothing is not told as minus nothing


def say_steps(first: int | None, last: int | None, unit: str = "step") -> str:
    """A stretch of steps in words."""
    if first is None:
        return "the whole run"
    if last is None or last == first:
        return f"{unit} {first}"
    return f"{unit}s {first} to {last}"


def keep_finite(value: float | None) -> float | None:
    """The value where it is finite, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


# Numbers in texts, each with the records that it is from.
#
# A text that is made by `say` keeps the figures that it shows. A figure is
# measured on a run's records by a named arithmetic, or made of other figures, so
# that whoever reads a text can do the sum again; a rule that prints another
# number is found out by the tests.

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Arithmetic = Callable[[Floats], float]
FigureKind = Literal["metric", "activation", "gradient", "parameter", "telemetry", "batch"]

BATCH_LOSS = "batch loss"
"""Key of the training loss where only batch diagnostics have it."""

_LISTED = ("sequence_lengths", "class_counts")
_FULL_FROM, _FULL_TO = 1e3, 1e6  # shown without an exponent
_END_PART, _MOST_END = 10, 20  # points of the start and of the end


def _count_ends(values: Floats) -> int:
    return max(1, min(len(values) // _END_PART, _MOST_END))


ARITHMETIC: Mapping[str, Arithmetic] = {
    "value": lambda values: float(values[-1]),
    "first value": lambda values: float(values[0]),
    "median": lambda values: float(np.median(values)),
    "mean": lambda values: float(np.mean(values)),
    "highest": lambda values: float(np.max(values)),
    "lowest": lambda values: float(np.min(values)),
    "total": lambda values: float(np.sum(values)),
    "count": lambda values: float(len(values)),
    "noise": estimate_noise,
    "level at the start": lambda values: float(
        np.median(values[: max(1, _count_ends(values) // 2)])
    ),
    "level at the end": lambda values: float(np.median(values[-_count_ends(values) :])),
}
"""Name -> what is done to the finite recorded values, in order of their steps."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where recorded values are.

    Attributes:
        kind: Of which records.
        name: Of the metric, the module or the parameter; empty for telemetry and batches.
        field: Of the record; `rms` of a layer is its norm over the root of its elements,
            `gradient_rms` of a parameter that of its gradient; of `sequence_lengths` the
            longest counts, and of `class_counts` the one of the class that `name` says.
        rank: Whose records; None for the rank that speaks for the run.
    """

    kind: FigureKind
    name: str
    field: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a text may show.

    Attributes:
        value: The number; NaN where nothing finite was recorded.
        arithmetic: What was done: a name of ARITHMETIC, that of a function, or
            `ratio`, `difference`, `sum`, `product` or `root of the sum of squares` of the
            operands; `step`, `count of names` or `limit`.
        function: How it is done again, of what was measured.
        source: Where the values are, of what was measured.
        first, last: Steps between which they are; None is no bound.
        operands: Figures that it is made of.
        names: What was counted.
        form: Whether it is shown as a number, in percent or as a whole number.
    """

    value: float
    arithmetic: str
    function: Arithmetic | None = None
    source: Source | None = None
    first: int | None = None
    last: int | None = None
    operands: tuple[Figure, ...] = ()
    names: tuple[str, ...] = ()
    form: Literal["number", "percent", "whole"] = "number"

    def __str__(self) -> str:
        if not np.isfinite(self.value):
            return "an unknown number"
        if self.form == "percent":
            # What is rounded to nothing, or to all, is told to where it is not.
            share = 100.0 * self.value
            return (
                f"{share:.0f} %"
                if 1.0 <= abs(share) <= 99.0 or share in {0.0, 100.0}
                else (f"{format_number(share)} %")
            )
        if self.form == "whole" or _FULL_FROM <= abs(self.value) < _FULL_TO:
            return f"{self.value:.0f}"
        return format_number(self.value)

    def __float__(self) -> float:
        return self.value

    def __truediv__(self, other: Figure) -> Figure:
        value = self.value / other.value if other.value != 0 else float("nan")
        return Figure(value, "ratio", operands=(self, other))

    def __sub__(self, other: Figure) -> Figure:
        return Figure(self.value - other.value, "difference", operands=(self, other))

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.value + other.value, "sum", operands=(self, other))

    def __mul__(self, other: Figure) -> Figure:
        return Figure(self.value * other.value, "product", operands=(self, other))

    @property
    def percent(self) -> Figure:
        """The same, shown in percent."""
        return replace(self, form="percent")

    @property
    def whole(self) -> Figure:
        """The same, shown as a whole number."""
        return replace(self, form="whole")


class Text(str):
    """A text with the figures and the names that it shows; equal to the plain text.

    A pickled one comes back as the plain text.

    Attributes:
        figures: In order.
        names: Of layers, metrics and the like, which may have digits of their own.
    """

    figures: tuple[Figure, ...]
    names: tuple[str, ...]

    def __new__(cls, text: str, figures: Iterable[Figure] = (), names: Iterable[str] = ()) -> Text:
        """A text that shows these."""
        made = super().__new__(cls, text)
        made.figures, made.names = tuple(figures), tuple(names)
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Other processes get the plain text: figures belong to the records they are of."""
        return str, (str(self),)


def say(template: str, **parts: Figure | Text | str) -> Text:
    """A text out of a template with named fields, as of `str.format`.

    Args:
        template: Its own words have no digits: whatever is a number is a figure.
        parts: Figures, names (plain texts), and other texts of `say`.
    """
    shown: list[str] = []
    figures: list[Figure] = []
    names: list[str] = []
    for words, field, _, _ in Formatter().parse(template):
        shown.append(words)
        if field is None:
            continue
        part = parts[field]
        if type(part) is str:
            # People know a metric by the name that they gave it.
            part = decode_name(part)
        shown.append(str(part))
        if isinstance(part, Figure):
            figures.append(part)
        elif isinstance(part, Text):
            figures += part.figures
            names += part.names
        else:
            names.append(part)
    return Text("".join(shown), figures, names)


def keep_figures(text: str) -> Text:
    """The text itself where it is one of `say`, else one without figures."""
    return text if isinstance(text, Text) else Text(text)


def measure(
    run: RunData,
    kind: FigureKind,
    name: str,
    how: str | Arithmetic,
    field: str = "value",
    *,
    first: int | None = None,
    last: int | None = None,
    rank: int | None = None,
) -> Figure:
    """A figure of what a run has recorded: it is computed here, of the records and nothing else.

    Args:
        run: The run.
        kind, name, field, rank: See Source.
        how: A name of ARITHMETIC, or a function of the values.
        first, last: Only values between these steps, both included.
    """
    source = Source(kind, name, field, rank)
    function = ARITHMETIC[how] if isinstance(how, str) else how
    arithmetic = how if isinstance(how, str) else getattr(how, "__name__", "function")
    step, values = read_source(run, source)
    kept = np.isfinite(values)
    if first is not None:
        kept &= step >= first
    if last is not None:
        kept &= step <= last
    value = float(function(values[kept])) if kept.any() else float("nan")
    form: Literal["number", "whole"] = "whole" if arithmetic == "count" else "number"
    return Figure(value, arithmetic, function, source, first, last, form=form)


def name_source(run: RunData, key: str) -> tuple[FigureKind, str, str]:
    """Kind, name and field of what a curve of a case has as its key."""
    if key in run.metrics:
        return "metric", key, "value"
    if key == BATCH_LOSS:
        return "batch", "", "loss"
    return "telemetry", "", key


def read_source(run: RunData, source: Source) -> tuple[Integers, Floats]:
    """Steps and values of a source, ascending; empty where there is none."""
    empty = np.empty(0, dtype=np.int64), np.empty(0)
    if source.kind == "metric":
        curve = run.metrics.get(source.name)
        if curve is None:
            return empty
        placed = run.place_on_steps(curve)
        return placed.step, placed.value
    if source.kind in ("telemetry", "batch"):
        rows = run.telemetry if source.kind == "telemetry" else run.batches
        if source.rank is not None:
            rows = run.rank_telemetry.get(source.rank, rows)
        step = rows["step"]
        order = np.argsort(step, kind="stable")
        return step[order], read_field(rows, source.field, source.name)[order]
    history: History | None
    if source.kind == "parameter":
        items = run.parameters if source.rank is None else run.replicas.get(source.rank, {})
        history = items.get(source.name)
    else:
        table = run.activations if source.kind == "activation" else run.gradients
        history = table.get(source.name)
    return empty if history is None else (history.step, history[source.field])


def read_field(rows: Columns, field: str, label: str | None) -> Floats:
    """A field of rows as numbers: of lengths the longest, of counts those of the class `label`."""
    items: list[Any] = rows[field].tolist() if field in _LISTED else []
    if field == "sequence_lengths":
        longest = [max(item, default=0) if item else np.nan for item in items]
        return np.array(longest, dtype=np.float64)
    if field == "class_counts":
        return np.array([(item or {}).get(label, 0) for item in items], dtype=np.float64)
    return as_floats(rows[field])


def at_step(step: int) -> Figure:
    """A step, or an epoch, as a figure."""
    return Figure(float(step), "step", form="whole")


def between_steps(first: int | None, last: int | None, unit: str = "step") -> Text:
    """A stretch of steps in words."""
    if first is None:
        return say("the whole run")
    if last is None or last == first:
        return say("{unit} {first}", unit=unit, first=at_step(first))
    return say("{unit}s {first} to {last}", unit=unit, first=at_step(first), last=at_step(last))


def count_names(names: Iterable[str]) -> Figure:
    """How many layers, parameters or metrics there are of a kind."""
    named = tuple(names)
    return Figure(float(len(named)), "count of names", names=named, form="whole")


def count_steps(steps: Iterable[int]) -> Figure:
    """How many probes, or points, there are at some steps."""
    return count_names(str(step) for step in steps)


def add(parts: Iterable[Figure]) -> Figure:
    """The sum of several figures, one at least."""
    operands = tuple(parts)
    return Figure(sum(part.value for part in operands), "sum", operands=operands)


def combine_norms(parts: Iterable[Figure]) -> Figure:
    """The norm of all together: the root of the sum of squares."""
    operands = tuple(parts)
    value = float(np.linalg.norm([part.value for part in operands]))
    return Figure(value, "root of the sum of squares", operands=operands)


def limit(value: float) -> Figure:
    """A named constant of a rule, or a threshold of the user's."""
    return Figure(float(value), "limit")
