"""Rows of earlier attempts that a resumed run hides.

A run that says from which step it goes on, `resume_run(from_step=N)`, does again what came from
step N on. Readers leave out by default what earlier attempts have there: points at step N or
beyond, and points without a step that the same writer logged after the first of those.

A run that does not say it replaces what it repeats: of each series, the points of earlier
attempts between the first step that the later attempt logged and the last one that it has
reached. A series that has no steps is held against its epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from quark_core.records import RECORD_TYPES, EventRecord, LifecycleRecord
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

REPLACED_KINDS = frozenset(
    {"metric", "telemetry", "layer", "parameter", "parameter_distribution", "batch", "aggregate"}
)
"""What a loop measures again when it repeats a step, so that a later attempt replaces it.

What is kept one by one, such as artifacts and samples, is no curve: an earlier attempt's stay
beside those of a later one.
"""


class Reach(NamedTuple):
    """How far an attempt has come with one series.

    Attributes:
        first: The step of the point that it logged first.
        last: The highest step that it has logged since.
        on_epochs: Whether these are epochs, since none of its points has a step.
    """

    first: int
    last: int
    on_epochs: bool = False


ReachesByAttempt = Mapping[int, Mapping[str, Reach]]
"""Attempt -> series -> how far it has come."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Which rows of one writer and kind later attempts have hidden.

    Attributes:
        step: Rows at this step or beyond; None where no later attempt was resumed from a step.
        sequence: Rows without a step, from this sequence on; None where no
            row at `step` or beyond is known.
        reaches: Series -> the stretches that later attempts have replaced.
    """

    step: int | None = None
    sequence: int | None = None
    reaches: Mapping[str, tuple[Reach, ...]] = field(default_factory=dict)

    def is_hidden(
        self, step: int | None, sequence: int, epoch: int | None = None, series: str = ""
    ) -> bool:
        """Whether one row is hidden."""
        has_step = step is not None and step >= 0
        for reach in self.reaches.get(series, ()):
            place = (None if has_step else epoch) if reach.on_epochs else step
            if place is not None and reach.first <= place <= reach.last:
                return True
        if self.step is None:
            return False
        if step is not None and step >= 0:
            return step >= self.step
        return self.sequence is not None and sequence > self.sequence

    def find_hidden(self, steps: Any, sequences: Any, epochs: Any = None, series: Any = "") -> Any:
        """Which rows are hidden, of arrays.

        Args:
            steps, sequences: Of the rows.
            epochs: Of the rows; of kinds without epochs, None.
            series: The series of all rows, or an array with that of each row.
        """
        import numpy as np

        hidden = np.zeros(len(steps), dtype=np.bool_)
        if self.step is not None:
            hidden = steps >= self.step
            if self.sequence is not None:
                hidden = hidden | ((steps < 0) & (sequences > self.sequence))
        if not self.reaches or not len(steps):
            return hidden
        if isinstance(series, str):
            for reach in self.reaches.get(series, ()):
                places = steps
                if reach.on_epochs:
                    places = -1 if epochs is None else np.where(steps < 0, epochs, -1)
                hidden = hidden | ((places >= reach.first) & (places <= reach.last))
            return hidden
        return hidden | self._find_replaced(steps, epochs, series)

    def is_whole(self, step_low: int, step_high: int, last_sequence: int, series: str = "") -> bool:
        """Whether none of some rows of a series is hidden.

        Args:
            step_low, step_high: Their lowest and highest step; -1 where none has one.
            last_sequence: The last of their sequences.
            series: Their series.
        """
        for reach in self.reaches.get(series, ()):
            if reach.on_epochs or (step_low <= reach.last and step_high >= reach.first):
                return False
        return self.step is None or (
            step_high < self.step and (self.sequence is None or last_sequence <= self.sequence)
        )

    def _find_replaced(self, steps: Any, epochs: Any, series: Any) -> Any:
        import numpy as np

        numbers = {name: number for number, name in enumerate(self.reaches)}
        rows = np.fromiter((numbers.get(s, -1) for s in series.tolist()), np.int64, len(steps))
        of_epochs = np.full(len(steps), -1) if epochs is None else np.where(steps < 0, epochs, -1)
        replaced = np.zeros(len(steps), dtype=np.bool_)
        for depth in range(max(map(len, self.reaches.values()))):
            # A stretch that ends before it begins holds nothing.
            bounds = np.array(
                [
                    reaches[depth] if depth < len(reaches) else Reach(0, -1)
                    for reaches in (*self.reaches.values(), ())
                ]
            )[rows]
            places = np.where(bounds[:, 2] == 1, of_epochs, steps)
            replaced |= (places >= bounds[:, 0]) & (places <= bounds[:, 1])
        return replaced


def can_be_hidden(kind: str) -> bool:
    """Whether records of a kind are points, which a later attempt may hide.

    What events say of a run stays true, whatever a later attempt does again.
    """
    record_type = RECORD_TYPES.get(kind)
    if record_type is None or record_type in (EventRecord, LifecycleRecord):
        return False
    if record_type.IS_ANALYSIS:
        return False
    return "step" in column_types(kind)


def find_series(columns: Columns) -> Any:
    """The series of rows: the key of each metric, or "" for all rows of another kind."""
    if columns.kind != "metric":
        return ""
    constant = columns.find_constant("metric_key")
    return constant[0] if constant else columns["metric_key"]


def find_hiding_step(attempt: int, from_steps: Mapping[int, int]) -> int | None:
    """From which step on the points of an attempt are hidden; None where they are not.

    Args:
        attempt: The attempt.
        from_steps: Attempt -> the step that it was resumed from.
    """
    return min((step for later, step in from_steps.items() if later > attempt), default=None)


def join_ranks(reaches: Iterable[Reach]) -> Reach:
    """How far an attempt has come, of how far each of its ranks has.

    Where some ranks have steps and others have epochs, the steps count.
    """
    found = list(reaches)
    found = [reach for reach in found if not reach.on_epochs] or found
    return Reach(
        min(reach.first for reach in found),
        max(reach.last for reach in found),
        found[0].on_epochs,
    )


def list_later_reaches(attempt: int, reaches: ReachesByAttempt) -> dict[str, tuple[Reach, ...]]:
    """Series -> the stretches that attempts after one have replaced."""
    found: dict[str, tuple[Reach, ...]] = {}
    for later in sorted(reaches):
        if later > attempt:
            for series, reach in reaches[later].items():
                found[series] = (*found.get(series, ()), reach)
    return found


def hide_superseded(columns: Columns, from_steps: Mapping[int, int]) -> Columns:
    """Leave out the rows of steps that a later attempt of the run has repeated.

    For backends that keep what they are given and do not hide by themselves.

    Args:
        columns: Every row of one kind in persistence order; a filter must come after this.
        from_steps: Attempt -> the step that it was resumed from.
    """
    import numpy as np

    if not columns.count or not can_be_hidden(columns.kind):
        return columns
    attempts = columns["attempt"]
    replacing: ReachesByAttempt = {}
    if columns.kind in REPLACED_KINDS and (attempts != attempts[0]).any():
        replacing = _find_reaches(columns, from_steps)
    if not from_steps and not replacing:
        return columns
    steps, sequences, series = columns["step"], columns["sequence"], find_series(columns)
    epochs = columns["epoch"] if "epoch" in column_types(columns.kind) else None
    hidden = np.zeros(columns.count, dtype=np.bool_)
    writers = columns["writer_id"].astype(str)
    for writer in np.unique(writers):
        rows = np.flatnonzero(writers == writer)
        attempt = int(attempts[rows[0]])
        step = find_hiding_step(attempt, from_steps)
        reaches = list_later_reaches(attempt, replacing)
        if step is None and not reaches:
            continue
        beyond: Any = sequences[rows][steps[rows] >= step] if step is not None else ()
        first = int(beyond.min()) if len(beyond) else None
        hidden[rows] = HiddenRows(step, first, reaches).find_hidden(
            steps[rows],
            sequences[rows],
            None if epochs is None else epochs[rows],
            series if isinstance(series, str) else series[rows],
        )
    return columns.take(~hidden) if hidden.any() else columns


def _find_reaches(columns: Columns, from_steps: Mapping[int, int]) -> ReachesByAttempt:
    """How far each attempt after the first has come that does not say from where it goes on."""
    import numpy as np

    attempts, ranks, steps = columns["attempt"], columns["rank"], columns["step"]
    epochs = columns["epoch"] if "epoch" in column_types(columns.kind) else np.full_like(steps, -1)
    series = find_series(columns)
    names: dict[str, int] = {}
    if isinstance(series, str):
        names[series] = 0
        codes = np.zeros(columns.count, dtype=np.int64)
    else:
        codes = np.fromiter(
            (names.setdefault(name, len(names)) for name in series.tolist()),
            np.int64,
            columns.count,
        )
    texts = list(names)
    # A number for each series of each rank.
    codes = np.unique(ranks, return_inverse=True)[1].reshape(-1) * len(texts) + codes
    found: dict[int, dict[str, list[Reach]]] = {}
    for attempt in np.unique(attempts)[1:].tolist():
        if attempt in from_steps:
            continue
        own = attempts == attempt
        for places, counts, on_epochs in (
            (steps, steps >= 0, False),
            (epochs, (steps < 0) & (epochs >= 0), True),
        ):
            rows = np.flatnonzero(own & counts)
            if not len(rows):
                continue
            which, firsts, groups = np.unique(codes[rows], return_index=True, return_inverse=True)
            lasts = np.full(len(which), -1)
            np.maximum.at(lasts, groups.reshape(-1), places[rows])
            begun = places[rows[firsts]]
            for code, first, last in zip(
                which.tolist(), begun.tolist(), lasts.tolist(), strict=True
            ):
                reach = Reach(first, last, on_epochs)
                name = texts[code % len(texts)]
                found.setdefault(attempt, {}).setdefault(name, []).append(reach)
    return {
        attempt: {name: join_ranks(reaches) for name, reaches in its.items()}
        for attempt, its in found.items()
    }
