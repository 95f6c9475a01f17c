"""Text samples: what a model was asked, what it said, and what that was worth."""

from __future__ import annotations

from typing import ClassVar

from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject


class SampleRecord(StreamRecord, frozen=True, gc=False):
    """One row of text samples or rollouts.

    Attributes:
        set_name: The set that the row belongs to, such as `eval/generations`.
        prompt: What the model was given, or None.
        completion: What it made of it, or None.
        reward: What that was worth, NaN included, or None.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        columns: The row's other columns: texts, numbers, truth values, small JSON; or None.
        cut: Of texts that were longer than their bound: column -> how many characters it had.
    """

    set_name: str
    prompt: str | None = None
    completion: str | None = None
    reward: float | None = None
    step: int | None = None
    epoch: int | None = None
    columns: JsonObject | None = None
    cut: JsonObject | None = None

    KIND: ClassVar[str] = "sample"
    TABLE: ClassVar[str] = "samples"
    # Many rows have one step: as points of a curve they would say nothing.
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(names=("set_name",), labelled=("cut",))
