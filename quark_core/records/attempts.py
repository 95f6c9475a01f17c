"""What a resumed run hides of its earlier attempts.

`resume_run(from_step=N)` does again what came from step N on, so readers leave
out by default what earlier attempts have there: points at step N or beyond,
and points without a step that the same writer logged after the first of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark_core.records import ANALYSIS_TYPES, RECORD_TYPES, EventRecord, LifecycleRecord
from quark_core.records.fields import column_types

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

__all__ = ["HiddenRows", "can_be_hidden", "find_hiding_step", "hide_superseded"]


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Which rows of one writer and kind a later attempt has hidden.

    Attributes:
        step: Rows at this step or beyond.
        sequence: Rows without a step, from this sequence on; None where no
            row at `step` or beyond is known.
    """

    step: int
    sequence: int | None

    def is_hidden(self, step: int | None, sequence: int) -> bool:
        """Whether one row is hidden."""
        if step is not None and step >= 0:
            return step >= self.step
        return self.sequence is not None and sequence > self.sequence

    def find_hidden(self, steps: Any, sequences: Any) -> Any:
        """Which rows are hidden, of arrays."""
        hidden = steps >= self.step
        if self.sequence is not None:
            hidden = hidden | ((steps < 0) & (sequences > self.sequence))
        return hidden


def can_be_hidden(kind: str) -> bool:
    """Whether records of a kind are points, which a later attempt may hide.

    What events say of a run stays true, whatever a later attempt does again.
    """
    record_type = RECORD_TYPES.get(kind)
    if record_type in (None, EventRecord, LifecycleRecord, *ANALYSIS_TYPES):
        return False
    return "step" in column_types(kind)


def find_hiding_step(attempt: int, from_steps: Mapping[int, int]) -> int | None:
    """From which step on the points of an attempt are hidden; None where they are not.

    Args:
        attempt: The attempt.
        from_steps: Attempt -> the step that it was resumed from.
    """
    return min((step for later, step in from_steps.items() if later > attempt), default=None)


def hide_superseded(columns: Columns, from_steps: Mapping[int, int]) -> Columns:
    """All rows of a run's kind without those that later attempts have hidden.

    For backends that keep what they are given and do not hide by themselves.

    Args:
        columns: Every row of one kind; a filter must come after this.
        from_steps: Attempt -> the step that it was resumed from.
    """
    import numpy as np

    if not from_steps or not columns.count or not can_be_hidden(columns.kind):
        return columns
    steps, sequences = columns["step"], columns["sequence"]
    hidden = np.zeros(columns.count, dtype=np.bool_)
    writers = columns["writer_id"].astype(str)
    for writer in np.unique(writers):
        rows = np.flatnonzero(writers == writer)
        step = find_hiding_step(int(columns["attempt"][rows[0]]), from_steps)
        if step is None:
            continue
        beyond = sequences[rows][steps[rows] >= step]
        first = int(beyond.min()) if len(beyond) else None
        hidden[rows] = HiddenRows(step, first).find_hidden(steps[rows], sequences[rows])
    return columns.take(~hidden) if hidden.any() else columns
